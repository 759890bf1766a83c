"""Tasks on which one part of a learning rule decides: every turn is one word, and the right word depends on the box.

The shipped base says each of the words now and then (about 1 turn in 15), so that all of it has to be learnt, and an
episode of one-token turns takes milliseconds.
"""

from __future__ import annotations

from typing import Any

from mafrt.config.agent import AgentSpec
from mafrt.config.team import Team
from mafrt.core.types import StepResult
from mafrt.environment.base import Env

WORDS = ("Add", "Divide", "Subtract", "Multiply")
BOXES = 8


def team(size: int) -> Team:
    return Team(tuple(AgentSpec(name=f"agent{k}", prompt="Say a word.") for k in range(size)))


class Words(Env):
    """Agents speak in turn, or all at once. Each turn has a reward, and the outcome is the share of right words.

    Args:
        size: agents.
        rounds: turns of each agent.
        together: whether all speak at once.
        offset: added to the outcome in every other box, whatever is said.
        fixed: boxes in which every word is right, so that nothing can be learnt there.
        relay: the words of the last agent count nothing, and it is paid for the word before its own.
        scale: factor of the last agent's rewards.
    """

    bounded = True

    def __init__(
        self,
        size: int = 2,
        rounds: int = 2,
        *,
        together: bool = False,
        offset: float = 0.0,
        fixed: int = 0,
        relay: bool = False,
        scale: float = 1.0,
    ) -> None:
        self.agents, self.relay, self.scale = team(size).names, relay, scale
        self.rounds, self.together, self.offset, self.fixed = rounds, together, offset, fixed
        self.num_tasks = BOXES

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        self.box = options["task"] if options else self.rng.randrange(BOXES)
        self.right, self.done, self.said = 0.0, 0, ""
        return self._ask(0), {"task": str(self.box)}

    def step(self, actions: dict[str, str]) -> StepResult:
        rewards = {name: float(self._is_right(text)) for name, text in actions.items()}
        if self.relay:
            rewards = {name: float(self._is_right(self.said)) for name in actions if name == self.agents[-1]}
        self.said = "".join(actions.values())
        self.right += sum(rewards.values())
        rewards = {name: reward * (self.scale if name == self.agents[-1] else 1.0) for name, reward in rewards.items()}
        self.done += 1
        turns = self.rounds if self.together else self.rounds * len(self.agents)
        if self.done < turns:
            return StepResult(self._ask(self.done), rewards, False, False, {})
        share = self.right / (self.rounds * (1 if self.relay else len(self.agents)))
        outcome = share + self.offset * (self.box % 2)
        return StepResult({}, rewards, True, False, {"outcome": outcome, "measures": {"right": share}})

    def _ask(self, step: int) -> dict[str, str]:
        speaking = self.agents if self.together else (self.agents[step % len(self.agents)],)
        return dict.fromkeys(speaking, f"Box {self.box}.")

    def _is_right(self, text: str) -> bool:
        return self.box < self.fixed or text.strip() == WORDS[self.box % len(WORDS)]


class Helpers(Env):
    """Two agents speak at once, twice. The second is right in the second round if the first one's first word was.

    Nothing else depends on a word: the first agent's own reward is always `own`, the second's first one 0. So only a
    rule that pays for the change of another agent's reward can teach the first word, which is the outcome.
    """

    bounded = True

    def __init__(self, own: float = 0.0) -> None:
        self.agents, self.own = team(2).names, own
        self.num_tasks = BOXES

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        self.box = options["task"] if options else self.rng.randrange(BOXES)
        self.helped: float | None = None
        return self._ask(), {"task": str(self.box)}

    def step(self, actions: dict[str, str]) -> StepResult:
        first, second = self.agents
        if self.helped is None:
            self.helped = float(actions[first].strip() == WORDS[self.box % len(WORDS)])
            return StepResult(self._ask(), {first: self.own, second: 0.0}, False, False, {})
        info = {"outcome": self.helped, "measures": {"right": self.helped}}
        return StepResult({}, {first: self.own, second: self.helped}, True, False, info)

    def _ask(self) -> dict[str, str]:
        return dict.fromkeys(self.agents, f"Box {self.box}.")
