"""Play: environments and an engine in, episodes out.

All live environments advance together: the agents that act next in any of them form one mixed-adapter batch.
"""

from __future__ import annotations

import copy
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any, TypeAlias, TypeVar

from mafrt import engines
from mafrt.config.team import Team
from mafrt.core.errors import EnvError
from mafrt.core.seeding import seed_of
from mafrt.core.text import clean_text, counted
from mafrt.core.types import (
    Completion,
    Episode,
    Observation,
    Request,
    Sampled,
    SamplingParams,
    Start,
    StepResult,
    Stop,
    Turn,
)
from mafrt.engines import Engine
from mafrt.environment.base import Env
from mafrt.environment.session import Session, session_of
from mafrt.environment.thought_forms import template_thoughts
from mafrt.environment.tool_calls import visible
from mafrt.rollout.kept_thoughts import own_turns
from mafrt.rollout.prompts import AgentTokenizer, encode_prompt, with_note
from mafrt.rollout.thought_notes import check_thoughts

__all__ = ["Answers", "PlayStats", "Player", "Rollout", "RunningEpisode", "Start", "measures_of"]

log = logging.getLogger(__name__)

T = TypeVar("T")
R = TypeVar("R")
Answers: TypeAlias = dict[str, tuple[Request, Completion]]
"""Agent -> its request and the completion, of one step."""
Feedback = Callable[[Sequence[tuple[Episode, Turn]]], Sequence[str]]
"""Turns just spoken -> a note on each; an empty one is not shown."""
NextStart = Callable[[int, Episode | None], Start | None]
"""Slot, and the episode that it has just finished (or None) -> its next start, or None if it is to stop."""

WAITING = 128
"""Environments that wait for something outside at the same time (`Env.blocking`)."""
MAX_LOST = 0.25
"""Default of `env_max_lost`."""
_ALWAYS = 2
"""Lost episodes that end no play, however few were finished."""
_SHOWN = 3
"""Different reasons for lost episodes that are logged as soon as they come; the rest is logged with its counts."""


@dataclass
class PlayStats:
    """Counts of a stretch of play."""

    tokens: int = 0
    """tokens sampled"""
    prompt_tokens: int = 0
    env_errors: int = 0
    """episodes lost because their environment raised, hung or crashed"""
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
    replayed: dict[str, float] = field(default_factory=dict)
    """metrics of episodes that were played again (`mafrt.rollout.replay`)"""
    reasons: Counter[str] = field(default_factory=Counter)
    """error sentence -> episodes that it cost"""

    def add(self, other: PlayStats) -> None:
        """Add the counts of another stretch of play."""
        self.tokens += other.tokens
        self.prompt_tokens += other.prompt_tokens
        self.env_errors += other.env_errors
        self.prompt_too_long += other.prompt_too_long
        self.tree_turns += other.tree_turns
        self.tree_unscored += other.tree_unscored
        self.tree_errors += other.tree_errors
        self.last_error = other.last_error or self.last_error
        self.reasons += other.reasons

    def lost(self, error: EnvError) -> None:
        """Count an episode that its environment lost. An equal reason is logged once; `report` tells how often."""
        self.env_errors += 1
        self.last_error = error
        self.reasons[str(error)] += 1
        if self.reasons[str(error)] == 1 and len(self.reasons) <= _SHOWN:
            log.warning("An episode is lost: %s", error)

    def lost_share(self, finished: int) -> float:
        """Share of the episodes that were lost, where `finished` were not."""
        return self.env_errors / max(self.env_errors + finished, 1)

    def give_up(self, slots: int, finished: int, max_lost: float) -> None:
        """End play in which too many episodes are lost: an environment that mostly raises will not get better.

        The share is taken of the episodes so far, and of one per slot at least; two lost episodes are always allowed.

        Raises:
            EnvError: the share of lost episodes is above `max_lost`.
        """
        if self.env_errors > max(_ALWAYS, max_lost * max(slots, self.env_errors + finished)):
            raise EnvError(
                f"{self.env_errors} episodes were lost, {finished} finished, which is more than env_max_lost "
                f"({max_lost:g}) allows; the last because: {self.last_error}"
            )

    def report(self) -> None:
        """Log how many episodes were lost, by reason, if any reason came more than once or was not logged yet."""
        if self.env_errors > min(len(self.reasons), _SHOWN):
            told = "; ".join(
                f"{counted(count, 'times')} because {reason}" for reason, count in self.reasons.most_common(_SHOWN)
            )
            others = len(self.reasons) - _SHOWN
            rest = f"; and for {counted(others, 'other reasons')}" if others > 0 else ""
            log.warning("%d episodes were lost: %s%s", self.env_errors, told, rest)


@dataclass
class RunningEpisode:
    """One environment in the middle of an episode. The episode's id is its key: no two live ones share it."""

    slot: int
    env: Session
    start: Start
    episode: Episode
    observations: dict[str, Observation]
    env_step: int = 0
    last_turn: dict[str, Turn] = field(default_factory=dict)

    @property
    def key(self) -> str:
        return self.episode.id

    def advance(self, answers: Answers, result: StepResult | EnvError, team: Sequence[str]) -> bool:
        """Record a step; whether the episode is over. EnvError if its result is one, or fits no team or turn."""
        for agent, (request, answer) in answers.items():
            turn = Turn(
                agent=agent,
                prompt_ids=list(request.prompt_ids),
                action_ids=answer.ids,
                logprobs=answer.logprobs,
                stop=answer.stop,
                text=clean_text(answer.text),
                turn=len(self.episode.turns),
                env_step=self.env_step,
                adapter_version=answer.adapter_version,
                forced=answer.forced,
                observation=self.observations.get(agent),
                own_turns=request.own_turns,
            )
            self.episode.turns.append(turn)
            self.last_turn[agent] = turn
        if isinstance(result, EnvError):
            raise result
        over = result.terminated or result.truncated
        if not over:
            check_agents(result.observations, self.env, team)
        self.take(result)
        if over:
            self.episode.info["ended"] = "terminated" if result.terminated else "truncated"
        else:
            self.observations = dict(result.observations)
        return over

    def take(self, result: StepResult) -> None:
        """Fill turns and episode from a step's result; what is about an agent goes to its latest turn, or raises."""
        for agent, reward in result.rewards.items():
            if (turn := self.last_turn.get(agent)) is not None:
                # None means that nothing was paid, which is not the same as a reward of 0.
                turn.reward = (turn.reward or 0.0) + reward
                if reward and turn.env_step != self.env_step:
                    turn.late = [*turn.late, (self.env_step, reward)]  # forks share the list of the turn
            # A reward of 0 loses nothing, so environments may name all agents in every step.
            elif reward:
                raise EnvError(f"{self.env.class_name} rewards {agent!r} with {reward} before it has acted.")
        for agent, step, reward in result.info.get("earlier", ()):
            paid = next((t for t in self.episode.turns if t.agent == agent and t.env_step == step), None)
            if paid is None:
                raise EnvError(f"{self.env.class_name} pays {agent!r} for step {step}, in which it did not act.")
            paid.reward = (paid.reward or 0.0) + reward
        for agent, new in result.info.get("evidence", {}).items():
            if (turn := self.last_turn.get(agent)) is None:
                raise EnvError(f"{self.env.class_name} gives evidence about {agent!r} before it has acted.")
            turn.evidence = new if turn.evidence is None else turn.evidence.updated(new)
        self.env_step += 1
        if "outcome" in result.info:
            self.episode.outcome = float(result.info["outcome"])
        self.episode.info |= {k: dict(v) for k in ("measures", "answers") if isinstance(v := result.info.get(k), dict)}


@dataclass(frozen=True)
class FreeSlot:
    """A slot whose environment waits for its next start."""

    number: int
    env: Session
    finished: Episode | None = None
    """its last episode; None at first, and after one that was lost"""


@dataclass
class Rollout:
    """One call of `play`: where starts come from, and where finished episodes and counts go."""

    next_start: NextStart
    slots: int
    idle: list[FreeSlot]
    stats: PlayStats = field(default_factory=PlayStats)
    done: list[Episode] = field(default_factory=list)


@dataclass(eq=False, repr=False)
class Player:
    """Plays episodes of one team on one engine.

    >>> env, base = mafrt.make_env("tic_tac_toe"), mafrt.SharedBase.load("teaching-base")
    >>> team, sampling = mafrt.Team.of(env.agents), dict.fromkeys(env.agents, mafrt.SamplingParams(max_new_tokens=4))
    >>> engine = mafrt.ScriptedEngine({"x": ["a1"], "o": ["b2"]}, base.tokenizer)
    >>> player = mafrt.Player(engine, base.tokenizer, team, sampling, base.context_window)
    >>> starts = iter([mafrt.Start("e", "a task", reset_seed=0, seed=0)])
    >>> episodes, stats = player.play([env], lambda slot, finished: next(starts, None))
    >>> len(episodes), player
    (1, <Player of x, o on <ScriptedEngine: x, o>>)
    """

    engine: Engine
    """samples the turns"""
    tokenizer: Any
    """encodes the observations"""
    team: Team
    """an agent's `prompt` becomes the system message"""
    sampling: Mapping[str, SamplingParams]
    """by agent"""
    context_window: int
    """max tokens of prompt and answer together"""
    reasoning: str = "auto"
    """treatment of thoughts: "auto" hides them from environments, also if the chat template opened them;
    "on" means that every answer begins inside one; "off" leaves them"""
    _: KW_ONLY
    adapters: Mapping[str, str] = field(default_factory=dict)
    """agent -> adapter; default: the team's own"""
    feedback: Feedback | None = None
    """notes on turns just spoken, for the agents that act next (`--coach_feedback`)"""
    max_lost: float = MAX_LOST
    """max share of the episodes, in [0, 1], lost to errors of the environment"""
    keep_thoughts: bool = False
    """whether an agent sees its own earlier turns as it has sampled them, with their thoughts"""
    voices: Mapping[str, AgentTokenizer] = field(default_factory=dict)
    """agent -> its tokenizer and window, of agents on another base than that of `tokenizer` and `context_window`"""

    def __post_init__(self) -> None:
        self.adapters = self.adapters or {agent.name: agent.adapter for agent in self.team.agents}
        default = AgentTokenizer(self.tokenizer, self.context_window)
        self.voices = {name: self.voices.get(name, default) for name in self.team.names}
        self._opened = {
            name: self.reasoning == "on" or (self.reasoning == "auto" and template_thoughts(voice.tokenizer).opened)
            for name, voice in self.voices.items()
        }
        if self.keep_thoughts:
            check_thoughts([voice.tokenizer for voice in self.voices.values()], self.reasoning)

    def __repr__(self) -> str:
        return f"<Player of {', '.join(self.team.names)} on {self.engine!r}>"

    def with_adapters(self, adapters: Mapping[str, str]) -> Player:
        """A player that differs from this one only in the adapters of the agents; a schedule casts them (CORY)."""
        # A shallow copy: engine, tokenizers and their caches stay shared.
        twin = copy.copy(self)
        twin.adapters = adapters
        return twin

    def sampling_as(self, sampling: Mapping[str, SamplingParams]) -> Player:
        """A player of single turns, without feedback, with other sampling parameters: for evaluations."""
        return Player(
            self.engine,
            self.tokenizer,
            self.team,
            sampling,
            self.context_window,
            self.reasoning,
            adapters=self.adapters,
            keep_thoughts=self.keep_thoughts,
            max_lost=self.max_lost,
            voices=self.voices,
        )

    def play(
        self, envs: Sequence[Env], next_start: NextStart, interrupted: Callable[[], bool] = lambda: False
    ) -> tuple[list[Episode], PlayStats]:
        """Play until `next_start(slot, finished episode or None)` returns None for every slot.

        An environment that raises loses its episode; EnvError where more than two and a share of `max_lost` are lost. A
        true `interrupted()` abandons all running ones between two generations. Returns the others by id, and counts.
        """
        # A resumed run has no transcripts of earlier calls, so none may carry over into this one.
        engines.forget(self.engine)
        # All slots start before the first generation, so the first batch is as wide as the following ones.
        rollout = Rollout(next_start, len(envs), [FreeSlot(slot, session_of(env)) for slot, env in enumerate(envs)])
        try:
            live = self._start(rollout)
            while live and not interrupted():
                live = self._advance(live, rollout)
                if rollout.stats.env_errors:
                    rollout.stats.give_up(rollout.slots, len(rollout.done), self.max_lost)
        finally:
            if rollout.stats.env_errors:
                rollout.stats.report()
        return sorted(rollout.done, key=lambda episode: episode.id), rollout.stats

    def _start(self, rollout: Rollout) -> list[RunningEpisode]:
        """Reset the idle slots to their next starts, and to the ones after them where an episode is lost."""
        begun: list[RunningEpisode] = []
        # Repeats, since a reset that fails makes its slot idle again.
        while rollout.idle:
            idle, rollout.idle = rollout.idle, []
            nexts = [(slot, rollout.next_start(slot.number, slot.finished)) for slot in idle]
            asked = [(slot, start) for slot, start in nexts if start is not None]
            results = side_by_side(self._reset, asked, [slot.env.blocking for slot, _ in asked])
            for (slot, _), result in zip(asked, results, strict=True):
                if isinstance(result, RunningEpisode):
                    begun.append(result)
                    continue
                rollout.stats.lost(result)
                rollout.stats.give_up(rollout.slots, len(rollout.done), self.max_lost)
                rollout.idle.append(FreeSlot(slot.number, slot.env))
        return begun

    def _reset(self, asked: tuple[FreeSlot, Start]) -> RunningEpisode | EnvError:
        """Begin an episode; the error that loses it."""
        slot, start = asked
        try:
            options = None if start.task is None else {"task": start.task}
            observations, info = slot.env.reset(seed=start.reset_seed, options=options)
            check_agents(observations, slot.env, self.team.names)
        except EnvError as error:
            return error
        episode = Episode(id=start.id, group=start.group, info=dict(info), start=start)
        return RunningEpisode(slot.number, slot.env, start, episode, dict(observations))

    def _advance(self, live: list[RunningEpisode], rollout: Rollout) -> list[RunningEpisode]:
        """One generation for every agent that acts, one step of every environment."""
        asked: list[tuple[RunningEpisode, str, Request]] = []
        fitting: list[RunningEpisode] = []
        going: list[RunningEpisode] = []
        encoded: dict[tuple[str, str], list[int]] = {}
        for item in live:
            requests = {agent: self._request(item, agent, encoded) for agent in item.observations}
            # One agent without room ends the episode for all: the environment waits for every answer.
            if any(len(asks.prompt_ids) >= self.voices[name].context_window for name, asks in requests.items()):
                rollout.stats.prompt_too_long += 1
                item.episode.info["ended"] = "prompt_too_long"
                rollout.done.append(item.episode)
                rollout.idle.append(FreeSlot(item.slot, item.env, item.episode))
                continue
            fitting.append(item)
            asked += [(item, agent, request) for agent, request in requests.items()]
        answers = self._answers(asked, rollout.stats)
        results = self._step_envs(fitting, answers)
        for item in fitting:
            self._step(item, answers[item.key], results[item.key], going, rollout)
        if self.feedback is not None:
            self._tell([item for item in going if item.key in answers], self.feedback)
        going += self._start(rollout)
        # Sorted by slot: batches, and with them float rounding, must not depend on which episode ended first.
        return sorted(going, key=lambda item: item.slot)

    def _request(self, item: RunningEpisode, agent: str, encoded: dict[tuple[str, str], list[int]]) -> Request:
        """The request for an agent's next turn; `encoded`: (agent, observation) -> token ids, shared by a group."""
        voice, spec, seen = self.voices[agent], self.team.agent(agent), item.observations[agent]
        ids = encoded.get((agent, seen)) if isinstance(seen, str) else None
        past = own_turns(seen, agent, item.episode.turns, self.visible_text) if self.keep_thoughts else ()
        if ids is None:
            ids = encode_prompt(voice.tokenizer, spec.prompt, seen, spec.prompt_at, past)
            if isinstance(seen, str):
                encoded[agent, seen] = ids
        sampling, room = self.sampling[agent], voice.context_window - len(ids)
        # Prompt and answer must fit into the context window together.
        if 0 < room < sampling.max_new_tokens:
            sampling = replace(sampling, max_new_tokens=room)
        # Seeded by the place in the episode, not by a generator: batches of any width sample the same tokens.
        seed = seed_of(item.start.seed, agent, len(item.episode.turns))
        return Request(list(ids), self.adapters[agent], sampling, seed, past)

    def _answers(self, asked: Sequence[tuple[RunningEpisode, str, Request]], stats: PlayStats) -> dict[str, Answers]:
        """The answers of all agents, by key of the live item."""
        answers: dict[str, Answers] = {}
        completions = self._generate([request for _, _, request in asked], stats)
        for (item, agent, request), completion in zip(asked, completions, strict=True):
            answers.setdefault(item.key, {})[agent] = (request, completion)
        return answers

    def _generate(self, requests: Sequence[Request], stats: PlayStats) -> list[Completion]:
        completions = self.engine.generate(requests)
        stats.tokens += sum(len(completion.ids) for completion in completions)
        stats.prompt_tokens += sum(len(request.prompt_ids) for request in requests)
        return completions

    @staticmethod
    def _tell(going: list[RunningEpisode], feedback: Feedback) -> None:
        """Add the notes on turns just spoken to the next observations, in all episodes that go on."""
        fresh = [(item, turn) for item in going for turn in item.episode.turns if turn.env_step == item.env_step - 1]
        notes = feedback([(item.episode, turn) for item, turn in fresh])
        for (item, _), note in zip(fresh, notes, strict=True):
            if note:
                item.observations = {agent: with_note(seen, note) for agent, seen in item.observations.items()}

    def _step_envs(
        self, live: Sequence[RunningEpisode], answers: Mapping[str, Answers]
    ) -> dict[str, StepResult | EnvError]:
        """One step of every environment, by key."""
        asked = [(item, answers[item.key]) for item in live]
        results = side_by_side(self._step_env, asked, [item.env.blocking for item in live])
        return {item.key: result for item, result in zip(live, results, strict=True)}

    def _step_env(self, asked: tuple[RunningEpisode, Answers]) -> StepResult | EnvError:
        """One step of an environment; the error that loses its episode."""
        item, answers = asked
        if item.env.asks_how_sampled:
            item.env.sampled(
                {
                    agent: self.sampled(agent, request.prompt_ids, got.ids, got.logprobs, got.stop)
                    for agent, (request, got) in answers.items()
                }
            )
        try:
            return item.env.step({agent: self.visible_text(agent, got.text) for agent, (_, got) in answers.items()})
        except EnvError as error:
            return error

    def visible_text(self, agent: str, text: str) -> str:
        """An answer as the environment gets it: valid text, without the agent's thoughts."""
        text = clean_text(text)
        return text if self.reasoning == "off" else visible(text, opened=self._opened[agent])

    def sampled(
        self, agent: str, prompt_ids: Sequence[int], ids: Sequence[int], logprobs: Sequence[float], stop: Stop
    ) -> Sampled:
        """How an answer was sampled, as the environment may ask for it."""

        def said() -> list[tuple[str, float]]:
            decode = self.voices[agent].tokenizer.decode
            texts = [
                (decode([token], skip_special_tokens=True), logprob)
                for token, logprob in zip(ids, logprobs, strict=True)
            ]
            return [(text, logprob) for text, logprob in texts if text]

        return Sampled(len(prompt_ids), len(ids), stop, said)

    def _step(
        self,
        item: RunningEpisode,
        answers: Answers,
        result: StepResult | EnvError,
        going: list[RunningEpisode],
        rollout: Rollout,
    ) -> None:
        """Record a step. The item joins `going`, or its slot is idle."""
        try:
            over = item.advance(answers, result, self.team.names)
        except EnvError as error:
            rollout.stats.lost(error)
            # The lost episode is discarded whole: a part of it would have no outcome to learn from.
            rollout.idle.append(FreeSlot(item.slot, item.env))
            return
        if not over:
            going.append(item)
            return
        rollout.done.append(item.episode)
        rollout.idle.append(FreeSlot(item.slot, item.env, item.episode))


def check_agents(observations: Mapping[str, Observation], env: Session, team: Sequence[str]) -> None:
    """Raise EnvError unless all agents that act next are in the team."""
    for agent in observations:
        if agent not in team:
            raise EnvError(f"{env.class_name} asks agent {agent!r} to act, but the team has {', '.join(team)}.")


def side_by_side(call: Callable[[T], R], items: Sequence[T], blocking: Sequence[bool]) -> list[R]:
    """`call(item)` of every item; the blocking ones wait together in threads, which pay off outside of Python only."""
    waiting = [item for item, waits in zip(items, blocking, strict=True) if waits]
    if len(waiting) < 2:
        return [call(item) for item in items]
    with ThreadPoolExecutor(min(len(waiting), WAITING)) as pool:
        begun = iter([pool.submit(call, item) for item in waiting])
        done = iter([call(item) for item, waits in zip(items, blocking, strict=True) if not waits])
        return [next(begun).result() if waits else next(done) for waits in blocking]


def measures_of(measures: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The mean of each measure over the episodes that have it."""
    names = sorted({name for episode in measures for name in episode})
    values = {name: [episode[name] for episode in measures if name in episode] for name in names}
    return {name: sum(values[name]) / len(values[name]) for name in names}
