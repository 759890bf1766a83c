"""Tasks on which one part of a learning rule decides: every turn is one word, and the right word depends on the box.

The shipped base says each of the words now and then (about 1 turn in 15), so that all of it has to be learnt, and an
episode of one-token turns takes milliseconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mafrt.config.agent import AgentSpec
from mafrt.config.team import Team
from mafrt.core.types import StepResult
from mafrt.environment.base import Env

WORDS = ("Add", "Divide", "Subtract", "Multiply")
RARE = ("You",)
"""that the base says in about one turn of a thousand"""
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
        boxes: kinds of tasks.
        fixed: boxes in which every word is right, so that nothing can be learnt there.
        first: number of the first box.
        numbered: whether agents see which turn it is; the right word then depends on it too.
        relay: the words of the last agent count nothing, and it is paid for the word before its own.
        scale: factor of the last agent's rewards.
        words: the right ones.
        echo: added to a turn's reward, and not to the outcome, if the word before it has an even number of letters.
        even: added to the outcome if all words together have an even number of letters.
    """

    bounded = True

    def __init__(
        self,
        size: int = 2,
        rounds: int = 2,
        *,
        together: bool = False,
        offset: float = 0.0,
        boxes: int = BOXES,
        fixed: int = 0,
        first: int = 0,
        numbered: bool = False,
        relay: bool = False,
        scale: float = 1.0,
        words: Sequence[str] = WORDS,
        echo: float = 0.0,
        even: float = 0.0,
    ) -> None:
        self.agents, self.relay, self.scale = team(size).names, relay, scale
        self.words, self.echo, self.even = words, echo, even
        self.rounds, self.together, self.offset, self.fixed = rounds, together, offset, fixed
        self.num_tasks = self.boxes = boxes
        self.numbered, self.first = numbered, first

    def evaluated(self) -> Words:
        """The boxes where words differ, with nothing added: only words that are right by themselves count."""
        return Words(
            len(self.agents), self.rounds, together=self.together, boxes=self.boxes - self.fixed, first=self.fixed,
            numbered=self.numbered, relay=self.relay, words=self.words,
        )  # fmt: skip

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        self.box = self.first + (options["task"] if options else self.rng.randrange(self.boxes))
        self.right, self.done, self.said, self.letters = 0.0, 0, "", 0
        return self._ask(0), {"task": str(self.box)}

    def step(self, actions: dict[str, str]) -> StepResult:
        rewards = {name: float(self._is_right(text)) for name, text in actions.items()}
        if self.relay:
            rewards = {name: float(self._is_right(self.said)) for name in actions if name == self.agents[-1]}
        self.right += sum(rewards.values())
        echo = self.echo * (len(self.said) % 2 == 0)
        rewards = {
            name: reward * (self.scale if name == self.agents[-1] else 1.0) + echo for name, reward in rewards.items()
        }
        self.said = "".join(text.strip() for text in actions.values())
        self.letters += len(self.said)
        self.done += 1
        turns = self.rounds if self.together else self.rounds * len(self.agents)
        if self.done < turns:
            return StepResult(self._ask(self.done), rewards, False, False, {})
        share = self.right / (self.rounds * (1 if self.relay else len(self.agents)))
        outcome = share + self.offset * (self.box % 2) + self.even * (self.letters % 2 == 0)
        return StepResult({}, rewards, True, False, {"outcome": outcome, "measures": {"right": share}})

    def _ask(self, step: int) -> dict[str, str]:
        speaking = self.agents if self.together else (self.agents[step % len(self.agents)],)
        return dict.fromkeys(speaking, f"Box {self.box}, word {step + 1}." if self.numbered else f"Box {self.box}.")

    def _is_right(self, text: str) -> bool:
        place = self.box + (self.done if self.numbered else 0)
        return self.box < self.fixed or text.strip() == self.words[place % len(self.words)]


class Helpers(Env):
    """Two agents speak at once, twice. The second is right in the second round if the first one's first word was.

    Nothing else depends on a word: the first agent's own reward is always `own`, the second's first one 0. So only a
    rule that pays for the change of another agent's reward can teach the first word, which is the outcome.
    """

    bounded = True

    def __init__(self, own: float = 0.0) -> None:
        self.agents, self.own = team(2).names, own
        self.num_tasks = BOXES

    def evaluated(self) -> Helpers:
        return self

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


class Unpaid(Env):
    """One agent. Of 16 tasks 8 are boxes, paid for the word of the box, and 8 are calculations, paid nothing.

    The shipped base names the operation of `Compute 3 + 4.` mostly rightly, so that there is a skill to be forgotten.
    The score is the share of right words on boxes and on calculations with other numbers.
    """

    bounded = True

    def __init__(self, fresh: bool = False) -> None:
        self.agents, self.fresh = team(1).names, fresh
        self.num_tasks = 2 * BOXES

    def evaluated(self) -> Unpaid:
        return Unpaid(fresh=True)

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        self.task = options["task"] if options else self.rng.randrange(2 * BOXES)
        number = self.task % BOXES
        asked = f"Box {number}." if self.task < BOXES else self._calculation(number)
        return {self.agents[0]: asked}, {"task": str(self.task)}

    def _calculation(self, number: int) -> str:
        """Of the numbers 5 to 9 in training, of 2 to 4 where fresh."""
        first, second = (2 + number % 3, 2 + number % 2) if self.fresh else (5 + number % 5, 5 + number % 3)
        return f"Compute {first} {'+-*/'[number % 4]} {second}."

    def step(self, actions: dict[str, str]) -> StepResult:
        word = actions[self.agents[0]].strip()
        if self.task < BOXES:
            right = float(word == WORDS[self.task % len(WORDS)])
            return StepResult({}, {}, True, False, {"outcome": right, "measures": {"box": right}})
        right = float(word == ("Add", "Subtract", "Multiply", "Divide")[self.task % 4])
        return StepResult({}, {}, True, False, {"outcome": right * self.fresh, "measures": {"skill": right}})


class Lazy(Env):
    """Two agents in turn. The second may end the work with its first word, `stop`, which pays it a tenth.

    Of six turns each right one pays a sixth: more in all than stopping, also before any word is known, and less divided
    by the turns of the episode.

    Args:
        by_turn: whether turns are paid as they come, or all at the end, by the outcome.
    """

    bounded = True
    stop = "Divide"
    words = ("Add", "Subtract", "Multiply")
    turns = 6

    def __init__(self, by_turn: bool = False) -> None:
        self.agents, self.by_turn = team(2).names, by_turn
        self.num_tasks = BOXES

    def evaluated(self) -> Lazy:
        return Lazy()

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        self.box = options["task"] if options else self.rng.randrange(BOXES)
        self.right, self.done = 0, 0
        return {self.agents[0]: f"Box {self.box}."}, {"task": str(self.box)}

    def step(self, actions: dict[str, str]) -> StepResult:
        [(name, said)] = actions.items()
        self.done += 1
        lazy = self.done == 2 and said.strip() == self.stop
        right = said.strip() == self.words[self.box % len(self.words)]
        pay = 0.1 if lazy else right / self.turns
        rewards = {name: pay} if self.by_turn else {}
        outcome = self.right / self.turns + pay
        self.right += right
        if lazy or self.done == self.turns:
            return StepResult({}, rewards, True, False, {"outcome": outcome, "measures": {"lazy": float(lazy)}})
        # The word before is shown, so that its influence on the next one can be measured.
        asked = f"{said.strip()}. Box {self.box}."
        return StepResult({self.agents[self.done % 2]: asked}, rewards, False, False, {})


class Both(Env):
    """Two agents at once: the outcome is 1 if both words are right, .2 if neither is, and 0 if one alone is.

    One that is right alone is worse off, so both have to move together (a climbing game, Claus and Boutilier 1998).
    """

    bounded = True

    def __init__(self) -> None:
        self.agents = team(2).names
        self.num_tasks = BOXES

    def evaluated(self) -> Both:
        return self

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        self.box = options["task"] if options else self.rng.randrange(BOXES)
        return dict.fromkeys(self.agents, f"Box {self.box}."), {"task": str(self.box)}

    def step(self, actions: dict[str, str]) -> StepResult:
        right = sum(text.strip() == WORDS[self.box % len(WORDS)] for text in actions.values())
        return StepResult({}, {}, True, False, {"outcome": (0.2, 0.0, 1.0)[right]})


class Peers(Env):
    """Two agents are asked at once, two times; the second one's answers are right by chance, whatever it says.

    A right answer is paid 1. The outcome is whether the first agent's second word is right.

    Args:
        right: chance that the second agent's answers of an episode are right.
        offset: added to the outcome in every other box, whatever is said.
    """

    bounded = True

    def __init__(self, right: float = 0.9, offset: float = 8.0) -> None:
        self.agents, self.chance, self.offset = team(2).names, right, offset
        self.num_tasks = BOXES

    def evaluated(self) -> Peers:
        return Peers(self.chance, 0.0)

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        self.box = options["task"] if options else self.rng.randrange(BOXES)
        self.peer, self.done = float(self.rng.random() < self.chance), 0
        return self._ask(), {"task": str(self.box)}

    def step(self, actions: dict[str, str]) -> StepResult:
        first, peer = self.agents
        right = float(actions[first].strip() == WORDS[self.box % len(WORDS)])
        self.done += 1
        rewards = {first: right, peer: self.peer}
        if self.done < 2:
            return StepResult(self._ask(), rewards, False, False, {})
        return StepResult(
            {}, rewards, True, False, {"outcome": right + self.offset * (self.box % 2), "measures": {"right": right}}
        )

    def _ask(self) -> dict[str, str]:
        return dict.fromkeys(self.agents, f"Box {self.box}, try {self.done + 1}.")


class Search(Env):
    """A search with a budget: two agents in turn take the best find so far, or pay for another one.

    Finds are drawn evenly from 0 to 7. `Add` takes the best one: the outcome is a seventh of it. Any other word costs
    its speaker `cost` and draws the next find, until the budget is used up. So every turn is paid as it comes, stopping
    is free, and the best policy, which goes on below some find, is known (`best`).

    Args:
        cost: of another find, in units of the outcome.
        budget: most further finds.
        in_all: whether the outcome holds the costs, and turns are paid nothing.
    """

    bounded = True
    num_tasks = 256 * BOXES
    """first finds, each with other finds after it"""

    def __init__(self, cost: float = 0.08, budget: int = 5, *, in_all: bool = False) -> None:
        self.agents, self.cost, self.budget, self.in_all = team(2).names, cost, budget, in_all

    def evaluated(self) -> Search:
        return Search(self.cost, self.budget, in_all=True)

    def best(self) -> float:
        """What the best policy gets, the mean over first finds: by going back from the last turn."""
        worth = [find / 7 for find in range(BOXES)]
        for _ in range(self.budget):
            on = [sum(worth[max(find, other)] for other in range(BOXES)) / BOXES - self.cost for find in range(BOXES)]
            worth = [max(find / 7, on[find]) for find in range(BOXES)]
        return sum(worth) / BOXES

    def always(self, *, stop: bool) -> float:
        """What two players get who always take the first find, or never take one."""
        if stop:
            return sum(range(BOXES)) / BOXES / 7
        below = [(find / BOXES) ** (self.budget + 1) for find in range(1, BOXES)]
        return sum(1 - share for share in below) / 7 - self.cost * self.budget

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        self.find = (options["task"] if options else self.rng.randrange(BOXES)) % BOXES
        self.turn = 0
        return self._ask(), {"task": str(self.find)}

    def step(self, actions: dict[str, str]) -> StepResult:
        [(name, text)] = actions.items()
        goes_on = text.strip() != WORDS[0]
        rewards = {name: -self.cost * goes_on}
        if goes_on:
            self.turn += 1
            self.find = max(self.find, self.rng.randrange(BOXES))
        if goes_on and self.turn < self.budget:
            return StepResult(self._ask(), {} if self.in_all else rewards, False, False, {})
        if self.in_all:
            return StepResult({}, {}, True, False, {"outcome": self.find / 7 - self.cost * self.turn})
        return StepResult({}, rewards, True, False, {"outcome": self.find / 7})

    def _ask(self) -> dict[str, str]:
        return {self.agents[self.turn % 2]: f"Box {self.find}, {self.budget - self.turn} left."}
