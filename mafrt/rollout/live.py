"""One environment in the middle of an episode: how its turns are recorded, paid, and informed of evidence."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from mafrt.core.errors import EnvError
from mafrt.core.text import clean_text
from mafrt.core.types import Completion, Episode, Evidence, Observation, Request, Start, StepResult, Turn
from mafrt.environment.session import Session

__all__ = ["Answers", "Live", "Start", "with_note"]

Answers: TypeAlias = dict[str, tuple[Request, Completion]]
"""Agent -> its request and the completion, of one step."""


@dataclass
class Live:
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

    def record(self, answers: Answers) -> None:
        """Add a turn for each answer of this step."""
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
                observation=self.observations.get(agent),
            )
            self.episode.turns.append(turn)
            self.last_turn[agent] = turn

    def take(self, result: StepResult) -> None:
        """Fill turns and episode from a step's result.

        Raises:
            EnvError: a reward or evidence for an agent that has not acted yet.
        """
        self._pay(result.rewards)
        self._inform(result.info.get("evidence", {}))
        self.env_step += 1
        if "outcome" in result.info:
            self.episode.outcome = float(result.info["outcome"])
        if "measures" in result.info:
            self.episode.info["measures"] = dict(result.info["measures"])
        if "answers" in result.info:
            self.episode.info["answers"] = dict(result.info["answers"])

    def _pay(self, rewards: Mapping[str, float]) -> None:
        """A reward goes to its agent's latest turn, also if others spoke since."""
        for agent, reward in rewards.items():
            turn = self.last_turn.get(agent)
            if turn is not None:
                # None means that nothing was paid, which is not the same as a reward of 0.
                turn.reward = float(reward) if turn.reward is None else turn.reward + float(reward)
                if reward and turn.env_step != self.env_step:
                    turn.late = [*turn.late, (self.env_step, float(reward))]  # forks share the list of the turn
            # A reward of 0 loses nothing, so environments may name all agents in every step.
            elif reward:
                name = self.env.class_name
                raise EnvError(f"{name} rewards {agent!r} with {reward} before it has acted; reward it later.")

    def _inform(self, evidence: Mapping[str, Evidence]) -> None:
        """Evidence, too, is about its agent's latest turn."""
        for agent, new in evidence.items():
            turn = self.last_turn.get(agent)
            if turn is None:
                name = self.env.class_name
                raise EnvError(f"{name} gives evidence about {agent!r} before it has acted; give it later.")
            turn.evidence = new if turn.evidence is None else turn.evidence.updated(new)


def with_note(seen: Observation, note: str) -> Observation:
    """An observation with a note at its end; two messages of the user in a row would confuse chat templates."""
    if isinstance(seen, str):
        return f"{seen}\n\n{note}"
    *before, last = seen
    if last["role"] == "user":
        return [*before, {"role": "user", "content": f"{last['content']}\n\n{note}"}]
    return [*seen, {"role": "user", "content": note}]
