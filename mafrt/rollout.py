"""Play: environments and an engine in, episodes out.

All live environments advance together: whoever has to speak in any of them goes into one mixed-adapter batch.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from mafrt.engine import Engine
from mafrt.env import Env
from mafrt.errors import EnvError
from mafrt.prompts import encode_prompt
from mafrt.seeding import seed_of
from mafrt.team import Team
from mafrt.types import Completion, Episode, Observation, Request, SamplingParams, Turn

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Start:
    """How one episode begins. Equal `group` means the same task; `seed` makes its samples differ."""

    id: str
    group: str
    reset_seed: int
    seed: int
    task: int | None = None


@dataclass
class PlayStats:
    """What happened besides the episodes themselves."""

    tokens: int = 0
    """tokens sampled"""
    prompt_tokens: int = 0
    env_errors: int = 0
    """episodes lost because their environment raised"""
    prompt_too_long: int = 0
    """episodes cut because a prompt left no room in the context window"""
    last_error: EnvError | None = None
    sampling_rounds: int = 0
    """rounds of dynamic sampling"""
    groups_replaced: int = 0
    """groups that dynamic sampling has replaced"""

    def add(self, other: PlayStats) -> None:
        """Take in what happened in another stretch of play."""
        self.tokens += other.tokens
        self.prompt_tokens += other.prompt_tokens
        self.env_errors += other.env_errors
        self.prompt_too_long += other.prompt_too_long
        self.last_error = other.last_error or self.last_error


@dataclass
class _Live:
    """One environment in the middle of an episode."""

    slot: int
    env: Env
    start: Start
    episode: Episode
    observations: dict[str, Observation]
    env_step: int = 0
    last_turn: dict[str, Turn] = field(default_factory=dict)


class Player:
    """Plays episodes of one team on one engine.

    Args:
        engine: samples the turns.
        tokenizer: encodes what agents see.
        team: who plays; an agent's `prompt` becomes the system message.
        sampling: how each agent samples, by agent name.
        context_window: tokens of prompt and answer together.
    """

    def __init__(
        self,
        engine: Engine,
        tokenizer: Any,
        team: Team,
        sampling: Mapping[str, SamplingParams],
        context_window: int,
    ) -> None:
        self.engine = engine
        self.tokenizer = tokenizer
        self.team = team
        self.sampling = sampling
        self.context_window = context_window
        self.adapters: Mapping[str, str] = {agent.name: agent.adapter for agent in team.agents}
        """Adapter that each agent speaks with; a schedule may cast them anew (CORY)."""

    def sampling_as(self, sampling: Mapping[str, SamplingParams]) -> Player:
        """A player that differs from this one only in how agents sample."""
        twin = Player(self.engine, self.tokenizer, self.team, sampling, self.context_window)
        twin.adapters = self.adapters
        return twin

    def play(
        self,
        envs: Sequence[Env],
        next_start: Callable[[int, Episode | None], Start | None],
        interrupted: Callable[[], bool] = lambda: False,
    ) -> tuple[list[Episode], PlayStats]:
        """Play until `next_start(slot, finished episode or None)` returns None for every slot.

        An environment that raises loses its episode, which is counted; the slot goes on with the next start. A
        true `interrupted()` abandons everything between two generations and returns what was finished.

        Returns:
            The episodes sorted by id, and what else happened.

        Raises:
            EnvError: more episodes are lost than twice the environments and the finished episodes together.
        """
        stats = PlayStats()
        done: list[Episode] = []
        live: list[_Live] = []
        for slot, env in enumerate(envs):
            self._begin(live, slot, env, next_start, None, stats)
        while live and not interrupted():
            live = self._advance(live, done, next_start, stats)
            _give_up(stats, len(envs), len(done))
        return sorted(done, key=lambda episode: episode.id), stats

    def _begin(
        self,
        live: list[_Live],
        slot: int,
        env: Env,
        next_start: Callable[[int, Episode | None], Start | None],
        finished: Episode | None,
        stats: PlayStats,
    ) -> None:
        while (start := next_start(slot, finished)) is not None:
            finished = None
            try:
                options = None if start.task is None else {"task": start.task}
                observations, info = env.reset(seed=start.reset_seed, options=options)
                self._known(observations, env)
            except EnvError as error:
                _lost(error, stats)
                _give_up(stats, slot + 1, 0)
                continue
            episode = Episode(id=start.id, group=start.group, info=dict(info))
            live.append(_Live(slot, env, start, episode, dict(observations)))
            return

    def _advance(
        self,
        live: list[_Live],
        done: list[Episode],
        next_start: Callable[[int, Episode | None], Start | None],
        stats: PlayStats,
    ) -> list[_Live]:
        """One generation for everybody who has to speak, one step of every environment."""
        asked: list[tuple[_Live, str, Request]] = []
        still: list[_Live] = []
        for item in live:
            requests = {agent: self._request(item, agent) for agent in item.observations}
            room = min(self.context_window - len(request.prompt_ids) for request in requests.values())
            if room < 1:
                stats.prompt_too_long += 1
                item.episode.info["ended"] = "prompt_too_long"
                self._finish(item, done, still, next_start, stats)
                continue
            still.append(item)
            asked += [(item, agent, request) for agent, request in requests.items()]
        answers = self.engine.generate([request for _, _, request in asked])
        said: dict[int, dict[str, tuple[Request, Completion]]] = {}
        for (item, agent, request), answer in zip(asked, answers, strict=True):
            said.setdefault(id(item), {})[agent] = (request, answer)
            stats.tokens += len(answer.ids)
            stats.prompt_tokens += len(request.prompt_ids)
        going: list[_Live] = []
        for item in still:
            if id(item) not in said:  # begun in this very call, in the place of a cut episode
                going.append(item)
                continue
            self._step(item, said[id(item)], done, going, next_start, stats)
        return going

    def _step(
        self,
        item: _Live,
        said: dict[str, tuple[Request, Completion]],
        done: list[Episode],
        going: list[_Live],
        next_start: Callable[[int, Episode | None], Start | None],
        stats: PlayStats,
    ) -> None:
        for agent, (request, answer) in said.items():
            turn = Turn(
                agent=agent,
                prompt_ids=list(request.prompt_ids),
                action_ids=answer.ids,
                logprobs=answer.logprobs,
                stop=answer.stop,
                text=answer.text,
                turn=len(item.episode.turns),
                env_step=item.env_step,
                adapter_version=answer.adapter_version,
            )
            item.episode.turns.append(turn)
            item.last_turn[agent] = turn
        try:
            result = item.env.step({agent: answer.text for agent, (_, answer) in said.items()})
            over = result.terminated or result.truncated
            if not over:
                self._known(result.observations, item.env)
            self._pay(item, result.rewards)
        except EnvError as error:
            _lost(error, stats)
            self._begin(going, item.slot, item.env, next_start, None, stats)
            return
        item.env_step += 1
        if "outcome" in result.info:
            item.episode.outcome = float(result.info["outcome"])
        if over:
            item.episode.info["ended"] = "terminated" if result.terminated else "truncated"
            self._finish(item, done, going, next_start, stats)
        else:
            item.observations = dict(result.observations)
            going.append(item)

    def _finish(
        self,
        item: _Live,
        done: list[Episode],
        going: list[_Live],
        next_start: Callable[[int, Episode | None], Start | None],
        stats: PlayStats,
    ) -> None:
        done.append(item.episode)
        self._begin(going, item.slot, item.env, next_start, item.episode, stats)

    def _request(self, item: _Live, agent: str) -> Request:
        ids = encode_prompt(self.tokenizer, self.team.agent(agent).prompt, item.observations[agent])
        sampling, room = self.sampling[agent], self.context_window - len(ids)
        if 0 < room < sampling.max_new_tokens:
            sampling = replace(sampling, max_new_tokens=room)
        return Request(
            prompt_ids=ids,
            adapter=self.adapters[agent],
            sampling=sampling,
            seed=seed_of(item.start.seed, agent, len(item.episode.turns)),
        )

    def _known(self, observations: Mapping[str, Observation], env: Env) -> None:
        name = type(env).__name__
        if not observations:
            raise EnvError(f"{name} goes on but shows nobody an observation; return one for whoever acts next.")
        for agent in observations:
            if agent not in self.team.names:
                raise EnvError(f"{name} asks agent {agent!r} to act, but the team has {', '.join(self.team.names)}.")

    @staticmethod
    def _pay(item: _Live, rewards: Mapping[str, float]) -> None:
        """A reward goes to its agent's latest turn, also when others spoke since."""
        for agent, reward in rewards.items():
            turn = item.last_turn.get(agent)
            if turn is None:
                if reward:
                    name = type(item.env).__name__
                    raise EnvError(f"{name} rewards {agent!r} with {reward} before it has acted; reward it later.")
                continue
            turn.reward = float(reward) if turn.reward is None else turn.reward + float(reward)


def _lost(error: EnvError, stats: PlayStats) -> None:
    stats.env_errors += 1
    stats.last_error = error
    log.warning("An episode is lost: %s", error)


def _give_up(stats: PlayStats, slots: int, done: int) -> None:
    """An environment that mostly raises will not get better by being asked again."""
    if stats.last_error is not None and stats.env_errors > 2 * slots + done:
        raise EnvError(f"{stats.env_errors} episodes were lost, {done} finished; the last because: {stats.last_error}")
