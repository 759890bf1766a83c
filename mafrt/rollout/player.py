"""Play: environments and an engine in, episodes out.

All live environments advance together: whoever has to speak in any of them goes into one mixed-adapter batch.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

from mafrt.config.team import Team
from mafrt.core.errors import EnvError
from mafrt.core.seeding import seed_of
from mafrt.core.text import clean_text
from mafrt.core.types import Completion, Episode, Evidence, Observation, Request, SamplingParams, StepResult, Turn
from mafrt.engines import Engine
from mafrt.environment.base import Env
from mafrt.environment.session import Session, session_of
from mafrt.environment.tool_calls import visible
from mafrt.rollout.prompts import encode_prompt, opens_thought

log = logging.getLogger(__name__)

Feedback = Callable[[Sequence[tuple[Episode, Turn]]], Sequence[str]]
"""Turns just spoken -> a note on each; an empty one is not shown."""

WAITING = 32
"""environments that wait for something outside at the same time (`Env.blocking`)"""


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
    tree_turns: int = 0
    """turns whose alternatives were tried (`mafrt.rollout.tree_player`)"""
    tree_unscored: int = 0
    """of these, turns of whose alternatives nothing was found out"""
    tree_errors: int = 0
    """alternatives lost because the environment raised"""

    def add(self, other: PlayStats) -> None:
        """Take in what happened in another stretch of play."""
        self.tokens += other.tokens
        self.prompt_tokens += other.prompt_tokens
        self.env_errors += other.env_errors
        self.prompt_too_long += other.prompt_too_long
        self.tree_turns += other.tree_turns
        self.tree_unscored += other.tree_unscored
        self.tree_errors += other.tree_errors
        self.last_error = other.last_error or self.last_error


@dataclass
class Live:
    """One environment in the middle of an episode."""

    slot: int
    env: Session
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
        reasoning: what becomes of thoughts in `<think>`: "auto" takes them off what environments hear, also where the
            chat template opened them; "on" says that every answer begins inside one; "off" leaves them.
    """

    def __init__(
        self,
        engine: Engine,
        tokenizer: Any,
        team: Team,
        sampling: Mapping[str, SamplingParams],
        context_window: int,
        reasoning: str = "auto",
    ) -> None:
        self.engine = engine
        self.tokenizer = tokenizer
        self.team = team
        self.sampling = sampling
        self.context_window = context_window
        self.reasoning = reasoning
        self._opened = reasoning == "on" or (reasoning == "auto" and opens_thought(tokenizer))
        self.adapters: Mapping[str, str] = {agent.name: agent.adapter for agent in team.agents}
        """Adapter that each agent speaks with; a schedule may cast them anew (CORY)."""
        self.feedback: Feedback | None = None
        """Says, of turns just spoken, what those who act next are to be told (`--coach_feedback`)."""

    def sampling_as(self, sampling: Mapping[str, SamplingParams]) -> Player:
        """A player that differs from this one only in how agents sample."""
        twin = Player(self.engine, self.tokenizer, self.team, sampling, self.context_window, self.reasoning)
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
        live: list[Live] = []
        for slot, env in enumerate(envs):
            self._begin(live, slot, session_of(env), next_start, None, stats)
        while live and not interrupted():
            live = self._advance(live, done, next_start, stats)
            _give_up(stats, len(envs), len(done))
        return sorted(done, key=lambda episode: episode.id), stats

    def _begin(
        self,
        live: list[Live],
        slot: int,
        env: Session,
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
            live.append(Live(slot, env, start, episode, dict(observations)))
            return

    def _advance(
        self,
        live: list[Live],
        done: list[Episode],
        next_start: Callable[[int, Episode | None], Start | None],
        stats: PlayStats,
    ) -> list[Live]:
        """One generation for everybody who has to speak, one step of every environment."""
        asked: list[tuple[Live, str, Request]] = []
        still: list[Live] = []
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
        said = self._answers(asked, stats)
        results = self._step_envs([item for item in still if id(item) in said], said)
        going: list[Live] = []
        for item in still:
            if id(item) not in said:  # begun in this very call, in the place of a cut episode
                going.append(item)
                continue
            self._step(item, said[id(item)], results[id(item)], done, going, next_start, stats)
        if self.feedback is not None:
            self._tell([item for item in going if id(item) in said], self.feedback)
        return going

    def _answers(
        self, asked: Sequence[tuple[Live, str, Request]], stats: PlayStats
    ) -> dict[int, dict[str, tuple[Request, Completion]]]:
        """What everybody says, by `id` of the item and agent."""
        said: dict[int, dict[str, tuple[Request, Completion]]] = {}
        answers = self._generate([request for _, _, request in asked], stats)
        for (item, agent, request), answer in zip(asked, answers, strict=True):
            said.setdefault(id(item), {})[agent] = (request, answer)
        return said

    def _generate(self, requests: Sequence[Request], stats: PlayStats) -> list[Completion]:
        answers = self.engine.generate(requests)
        stats.tokens += sum(len(answer.ids) for answer in answers)
        stats.prompt_tokens += sum(len(request.prompt_ids) for request in requests)
        return answers

    @staticmethod
    def _tell(going: list[Live], feedback: Feedback) -> None:
        """Add what is said of the turns just spoken, in all episodes that go on, to what is seen next."""
        fresh = [(item, turn) for item in going for turn in item.episode.turns if turn.env_step == item.env_step - 1]
        notes = feedback([(item.episode, turn) for item, turn in fresh])
        for (item, _), note in zip(fresh, notes, strict=True):
            if note:
                item.observations = {agent: _noted(seen, note) for agent, seen in item.observations.items()}

    def _step_envs(
        self, live: list[Live], said: Mapping[int, Mapping[str, tuple[Request, Completion]]]
    ) -> dict[int, StepResult | EnvError]:
        """One step of every environment, by `id` of the item; those that wait for something outside wait together."""

        def step(item: Live) -> StepResult | EnvError:
            heard = {agent: self._heard(answer.text) for agent, (_, answer) in said[id(item)].items()}
            try:
                return item.env.step(heard)
            except EnvError as error:
                return error

        waiting = [item for item in live if item.env.blocking]
        if len(waiting) < 2:
            return {id(item): step(item) for item in live}
        with ThreadPoolExecutor(min(len(waiting), WAITING)) as pool:
            begun = {id(item): pool.submit(step, item) for item in waiting}
            found = {id(item): step(item) for item in live if not item.env.blocking}
            return found | {key: future.result() for key, future in begun.items()}

    def _heard(self, text: str) -> str:
        """What others get of an answer: thoughts stay with whoever had them."""
        text = clean_text(text)
        return text if self.reasoning == "off" else visible(text, opened=self._opened)

    def _step(
        self,
        item: Live,
        said: dict[str, tuple[Request, Completion]],
        result: StepResult | EnvError,
        done: list[Episode],
        going: list[Live],
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
                text=clean_text(answer.text),
                turn=len(item.episode.turns),
                env_step=item.env_step,
                adapter_version=answer.adapter_version,
            )
            item.episode.turns.append(turn)
            item.last_turn[agent] = turn
        try:
            if isinstance(result, EnvError):
                raise result
            over = result.terminated or result.truncated
            if not over:
                self._known(result.observations, item.env)
            self._pay(item, result.rewards)
            self._inform(item, result.info.get("evidence", {}))
        except EnvError as error:
            _lost(error, stats)
            self._begin(going, item.slot, item.env, next_start, None, stats)
            return
        item.env_step += 1
        if "outcome" in result.info:
            item.episode.outcome = float(result.info["outcome"])
        if "measures" in result.info:
            item.episode.info["measures"] = dict(result.info["measures"])
        if over:
            item.episode.info["ended"] = "terminated" if result.terminated else "truncated"
            self._finish(item, done, going, next_start, stats)
        else:
            item.observations = dict(result.observations)
            going.append(item)

    def _finish(
        self,
        item: Live,
        done: list[Episode],
        going: list[Live],
        next_start: Callable[[int, Episode | None], Start | None],
        stats: PlayStats,
    ) -> None:
        done.append(item.episode)
        self._begin(going, item.slot, item.env, next_start, item.episode, stats)

    def _request(self, item: Live, agent: str) -> Request:
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
        name = env.class_name
        if not observations:
            raise EnvError(f"{name} goes on but shows nobody an observation; return one for whoever acts next.")
        for agent in observations:
            if agent not in self.team.names:
                raise EnvError(f"{name} asks agent {agent!r} to act, but the team has {', '.join(self.team.names)}.")

    @staticmethod
    def _pay(item: Live, rewards: Mapping[str, float]) -> None:
        """A reward goes to its agent's latest turn, also when others spoke since."""
        for agent, reward in rewards.items():
            turn = item.last_turn.get(agent)
            if turn is None:
                if reward:
                    name = item.env.class_name
                    raise EnvError(f"{name} rewards {agent!r} with {reward} before it has acted; reward it later.")
                continue
            turn.reward = float(reward) if turn.reward is None else turn.reward + float(reward)

    @staticmethod
    def _inform(item: Live, found: Mapping[str, Evidence]) -> None:
        """Evidence, too, is about its agent's latest turn."""
        for agent, evidence in found.items():
            turn = item.last_turn.get(agent)
            if turn is None:
                name = item.env.class_name
                raise EnvError(f"{name} gives evidence about {agent!r} before it has acted; give it later.")
            turn.evidence = evidence if turn.evidence is None else turn.evidence.updated(evidence)


def _noted(seen: Observation, note: str) -> Observation:
    """An observation with a note at its end; two messages of the user in a row would confuse chat templates."""
    if isinstance(seen, str):
        return f"{seen}\n\n{note}"
    *before, last = seen
    if last["role"] == "user":
        return [*before, {"role": "user", "content": f"{last['content']}\n\n{note}"}]
    return [*seen, {"role": "user", "content": note}]


def _lost(error: EnvError, stats: PlayStats) -> None:
    stats.env_errors += 1
    stats.last_error = error
    log.warning("An episode is lost: %s", error)


def _give_up(stats: PlayStats, slots: int, done: int) -> None:
    """An environment that mostly raises will not get better by being asked again."""
    if stats.last_error is not None and stats.env_errors > 2 * slots + done:
        raise EnvError(f"{stats.env_errors} episodes were lost, {done} finished; the last because: {stats.last_error}")
