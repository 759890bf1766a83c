"""Play: environments and an engine in, episodes out.

All live environments advance together: the agents that act next in any of them form one mixed-adapter batch.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any

from mafrt import engines
from mafrt.config.team import Team
from mafrt.core.errors import EnvError
from mafrt.core.seeding import seed_of
from mafrt.core.text import clean_text
from mafrt.core.types import Completion, Episode, Observation, Request, Sampled, SamplingParams, StepResult, Stop, Turn
from mafrt.engines import Engine
from mafrt.environment.base import Env
from mafrt.environment.session import Session, session_of
from mafrt.environment.tool_calls import visible
from mafrt.rollout.live import Answers, Live, Start, with_note
from mafrt.rollout.play_stats import MAX_LOST, PlayStats
from mafrt.rollout.prompts import Voice, encode_prompt, opens_thought

Feedback = Callable[[Sequence[tuple[Episode, Turn]]], Sequence[str]]
"""Turns just spoken -> a note on each; an empty one is not shown."""
NextStart = Callable[[int, Episode | None], Start | None]
"""Slot, and the episode that it has just finished (or None) -> its next start, or None if it is to stop."""

WAITING = 128
"""Environments that wait for something outside at the same time (`Env.blocking`)."""


@dataclass(frozen=True)
class Idle:
    """A slot whose environment waits for its next start."""

    number: int
    env: Session
    finished: Episode | None = None
    """its last episode; None at first, and after one that was lost"""


@dataclass
class Stretch:
    """One call of `play`: where starts come from, and where finished episodes and counts go."""

    next_start: NextStart
    slots: int
    idle: list[Idle]
    stats: PlayStats = field(default_factory=PlayStats)
    done: list[Episode] = field(default_factory=list)


@dataclass(eq=False, repr=False)
class Player:
    """Plays episodes of one team on one engine."""

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
    """treatment of thoughts in `<think>`: "auto" hides them from environments, also if the chat template opened them;
    "on" means that every answer begins inside one; "off" leaves them"""
    _: KW_ONLY
    adapters: Mapping[str, str] = field(default_factory=dict)
    """agent -> adapter; default: the team's own"""
    feedback: Feedback | None = None
    """notes on turns just spoken, for the agents that act next (`--coach_feedback`)"""
    max_lost: float = MAX_LOST
    """max share of the episodes, in [0, 1], lost to errors of the environment"""
    voices: Mapping[str, Voice] = field(default_factory=dict)
    """agent -> its tokenizer and window, of agents on another base than that of `tokenizer` and `context_window`"""

    def __post_init__(self) -> None:
        self.adapters = self.adapters or {agent.name: agent.adapter for agent in self.team.agents}
        self._default = Voice(self.tokenizer, self.context_window)
        self._opened = {name: self._opens(name) for name in self.team.names}

    def voice(self, agent: str) -> Voice:
        """Tokenizer and window of an agent."""
        return self.voices.get(agent, self._default)

    def _opens(self, agent: str) -> bool:
        """Whether an agent's answers begin inside a thought."""
        return self.reasoning == "on" or (self.reasoning == "auto" and opens_thought(self.voice(agent).tokenizer))

    def cast(self, adapters: Mapping[str, str]) -> Player:
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
            max_lost=self.max_lost,
            voices=self.voices,
        )

    def play(
        self, envs: Sequence[Env], next_start: NextStart, interrupted: Callable[[], bool] = lambda: False
    ) -> tuple[list[Episode], PlayStats]:
        """Play until `next_start(slot, finished episode or None)` returns None for every slot.

        An environment that raises loses its episode, which is counted; the slot goes on with the next start. A
        true `interrupted()` abandons all running episodes between two generations and returns the finished ones.

        Returns:
            The episodes sorted by id, and the other counts.

        Raises:
            EnvError: more than two episodes, and more than the share `max_lost`, were lost (`PlayStats.give_up`).
        """
        # A resumed run has no transcripts of earlier calls, so none may carry over into this one.
        engines.forget(self.engine)
        # All slots start before the first generation, so the first batch is as wide as the following ones.
        stretch = Stretch(next_start, len(envs), [Idle(slot, session_of(env)) for slot, env in enumerate(envs)])
        try:
            live = self._start(stretch)
            while live and not interrupted():
                live = self._advance(live, stretch)
                stretch.stats.give_up(stretch.slots, len(stretch.done), self.max_lost)
        finally:
            stretch.stats.report()
        return sorted(stretch.done, key=lambda episode: episode.id), stretch.stats

    def _start(self, stretch: Stretch) -> list[Live]:
        """Reset the idle slots to their next starts, and to the ones after them where an episode is lost."""
        begun: list[Live] = []
        # Repeats, since a reset that fails makes its slot idle again.
        while stretch.idle:
            idle, stretch.idle = stretch.idle, []
            nexts = [(slot, stretch.next_start(slot.number, slot.finished)) for slot in idle]
            asked = [(slot, start) for slot, start in nexts if start is not None]
            for (slot, start), result in zip(asked, self._resets(asked), strict=True):
                if isinstance(result, EnvError):
                    stretch.stats.lost(result)
                    stretch.stats.give_up(stretch.slots, len(stretch.done), self.max_lost)
                    stretch.idle.append(Idle(slot.number, slot.env))
                    continue
                observations, info = result
                episode = Episode(id=start.id, group=start.group, info=dict(info), start=start)
                begun.append(Live(slot.number, slot.env, start, episode, dict(observations)))
        return begun

    def _resets(self, asked: Sequence[tuple[Idle, Start]]) -> list[tuple[Mapping[str, Observation], Any] | EnvError]:
        """The results of the resets; environments that wait for something outside are reset together."""

        def reset(slot: Idle, start: Start) -> tuple[Mapping[str, Observation], Any] | EnvError:
            options = None if start.task is None else {"task": start.task}
            try:
                observations, info = slot.env.reset(seed=start.reset_seed, options=options)
                self._check_agents(observations, slot.env)
            except EnvError as error:
                return error
            return observations, info

        if len(asked) < 2 or not asked[0][0].env.blocking:
            return [reset(*pair) for pair in asked]
        with ThreadPoolExecutor(min(len(asked), WAITING)) as pool:
            return list(pool.map(reset, *zip(*asked, strict=True)))

    def _advance(self, live: list[Live], stretch: Stretch) -> list[Live]:
        """One generation for every agent that acts, one step of every environment."""
        asked: list[tuple[Live, str, Request]] = []
        fitting: list[Live] = []
        going: list[Live] = []
        encoded: dict[tuple[str, str], list[int]] = {}
        for item in live:
            requests = {agent: self._request(item, agent, encoded) for agent in item.observations}
            # One agent without room ends the episode for all: the environment waits for every answer.
            room = min(self.voice(name).context_window - len(asks.prompt_ids) for name, asks in requests.items())
            if room < 1:
                stretch.stats.prompt_too_long += 1
                item.episode.info["ended"] = "prompt_too_long"
                self._finish(item, stretch)
                continue
            fitting.append(item)
            asked += [(item, agent, request) for agent, request in requests.items()]
        answers = self._answers(asked, stretch.stats)
        results = self._step_envs(fitting, answers)
        for item in fitting:
            self._step(item, answers[item.key], results[item.key], going, stretch)
        if self.feedback is not None:
            self._tell([item for item in going if item.key in answers], self.feedback)
        going += self._start(stretch)
        # Sorted by slot: batches, and with them float rounding, must not depend on which episode ended first.
        return sorted(going, key=lambda item: item.slot)

    def _answers(self, asked: Sequence[tuple[Live, str, Request]], stats: PlayStats) -> dict[str, Answers]:
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
    def _tell(going: list[Live], feedback: Feedback) -> None:
        """Add the notes on turns just spoken to the next observations, in all episodes that go on."""
        fresh = [(item, turn) for item in going for turn in item.episode.turns if turn.env_step == item.env_step - 1]
        notes = feedback([(item.episode, turn) for item, turn in fresh])
        for (item, _), note in zip(fresh, notes, strict=True):
            if note:
                item.observations = {agent: with_note(seen, note) for agent, seen in item.observations.items()}

    def _step_envs(self, live: Sequence[Live], answers: Mapping[str, Answers]) -> dict[str, StepResult | EnvError]:
        """One step of every environment, by key; those that wait for something outside wait together."""

        def step(item: Live) -> StepResult | EnvError:
            spoken = answers[item.key].items()
            heard = {agent: self.heard(agent, completion.text) for agent, (_, completion) in spoken}
            item.env.sampled(
                {
                    agent: self.sampled(agent, asked.prompt_ids, got.ids, got.logprobs, got.stop)
                    for agent, (asked, got) in spoken
                }
            )
            try:
                return item.env.step(heard)
            except EnvError as error:
                return error

        # Threads pay off only for environments that block outside of Python, such as sandboxes.
        waiting = [item for item in live if item.env.blocking]
        if len(waiting) < 2:
            return {item.key: step(item) for item in live}
        with ThreadPoolExecutor(min(len(waiting), WAITING)) as pool:
            begun = {item.key: pool.submit(step, item) for item in waiting}
            results = {item.key: step(item) for item in live if not item.env.blocking}
            return results | {key: future.result() for key, future in begun.items()}

    def heard(self, agent: str, text: str) -> str:
        """An answer as the environment gets it: valid text, without the agent's thoughts."""
        text = clean_text(text)
        return text if self.reasoning == "off" else visible(text, opened=self._opened[agent])

    def sampled(
        self, agent: str, prompt_ids: Sequence[int], ids: Sequence[int], logprobs: Sequence[float], stop: Stop
    ) -> Sampled:
        """How an answer was sampled, as the environment may ask for it."""

        def said() -> list[tuple[str, float]]:
            decode = self.voice(agent).tokenizer.decode
            texts = [
                (decode([token], skip_special_tokens=True), logprob)
                for token, logprob in zip(ids, logprobs, strict=True)
            ]
            return [(text, logprob) for text, logprob in texts if text]

        return Sampled(len(prompt_ids), len(ids), stop, said)

    def _step(
        self, item: Live, answers: Answers, result: StepResult | EnvError, going: list[Live], stretch: Stretch
    ) -> None:
        """Record a step. The item joins `going`, or its slot is idle."""
        item.record(answers)
        try:
            if isinstance(result, EnvError):
                # Raised here, so that one place discards a lost episode, whatever lost it.
                raise result
            over = result.terminated or result.truncated
            if not over:
                self._check_agents(result.observations, item.env)
            item.take(result)
        except EnvError as error:
            stretch.stats.lost(error)
            # The lost episode is discarded whole: a part of it would have no outcome to learn from.
            stretch.idle.append(Idle(item.slot, item.env))
            return
        if over:
            item.episode.info["ended"] = "terminated" if result.terminated else "truncated"
            self._finish(item, stretch)
        else:
            item.observations = dict(result.observations)
            going.append(item)

    @staticmethod
    def _finish(item: Live, stretch: Stretch) -> None:
        stretch.done.append(item.episode)
        stretch.idle.append(Idle(item.slot, item.env, item.episode))

    def _request(self, item: Live, agent: str, encoded: dict[tuple[str, str], list[int]]) -> Request:
        """The request for an agent's next turn; `encoded`: (agent, observation) -> token ids, filled as needed."""
        voice = self.voice(agent)
        ids = self._prompt(voice, agent, item.observations[agent], encoded)
        sampling, room = self.sampling[agent], voice.context_window - len(ids)
        # Prompt and answer must fit into the context window together.
        if 0 < room < sampling.max_new_tokens:
            sampling = replace(sampling, max_new_tokens=room)
        return Request(
            prompt_ids=ids,
            adapter=self.adapters[agent],
            sampling=sampling,
            # From the place in the episode, not from a generator: batches of any width sample the same tokens.
            seed=seed_of(item.start.seed, agent, len(item.episode.turns)),
        )

    def _prompt(
        self, voice: Voice, agent: str, observation: Observation, encoded: dict[tuple[str, str], list[int]]
    ) -> list[int]:
        spec = self.team.agent(agent)
        if not isinstance(observation, str):
            return encode_prompt(voice.tokenizer, spec.prompt, observation, spec.prompt_at)
        # The samples of a group begin with the same observation.
        ids = encoded.get((agent, observation))
        if ids is None:
            ids = encoded[agent, observation] = encode_prompt(voice.tokenizer, spec.prompt, observation, spec.prompt_at)
        return list(ids)

    def _check_agents(self, observations: Mapping[str, Observation], env: Session) -> None:
        name = env.class_name
        if not observations:
            raise EnvError(f"{name} goes on but returns no observation; return one for each agent that acts next.")
        for agent in observations:
            if agent not in self.team.names:
                raise EnvError(f"{name} asks agent {agent!r} to act, but the team has {', '.join(self.team.names)}.")
