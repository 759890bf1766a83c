"""`propose_solve`: a proposer makes an arithmetic task, a solver tries it several times; middling difficulty pays.

    proposer: 4 p (1 - p), p the share of right attempts; 0 for a task that breaks the rules
    solver:   1 for each right attempt

4 p (1 - p) is the learnability of a task: 0 where the solver always or never succeeds, 1 at p = 1/2. As the solver
learns, tasks that paid stop paying, so the proposer has to move on. With k attempts the expected reward of a task is
(k - 1) / k of that of its true p.

The grammar of a task, and nothing else is read (no `eval`):

    task   := number (op number){1,3}        op := + | - | *        number := 0 .. 999, one of them the given one

Products bind first. An instance is the number that the task must use; held-out instances are other numbers.
"""

from __future__ import annotations

import random
import re

from mafrt.core.errors import ConfigError
from mafrt.core.types import Observation, StepResult
from mafrt.envs.games.base import Game, Player

MOST_OPERATIONS = 3
LARGEST = 999
_TASK = re.compile(rf"\d{{1,3}}(?:\s*[-+*]\s*\d{{1,3}}){{1,{MOST_OPERATIONS}}}")
_PART = re.compile(r"\d+|[-+*]")
_ANSWER = re.compile(r"-?\d+")


def read_task(text: str, given: int) -> list[str] | None:
    """Numbers and operators of the task in a proposer's text, in turn; None if it breaks the rules.

    The text is the task and nothing else, but for blanks and a full stop at its end.
    """
    stripped = text.strip().removesuffix(".").strip()
    if not stripped.isascii() or _TASK.fullmatch(stripped) is None:
        return None
    parts = _PART.findall(stripped)
    return parts if str(given) in parts[::2] else None


def value(parts: list[str]) -> int:
    """Value of a task: products first, then sums from left to right."""
    sums, sign, product = 0, 1, int(parts[0])
    for op, number in zip(parts[1::2], parts[2::2], strict=True):
        if op == "*":
            product *= int(number)
        else:
            sums, sign, product = sums + sign * product, 1 if op == "+" else -1, int(number)
    return sums + sign * product


def learnability(right: int, attempts: int) -> float:
    """4 p (1 - p), in [0, 1]."""
    share = right / attempts
    return 4.0 * share * (1.0 - share)


class ProposeSolve(Game):
    """Proposer and solver, both to be trained.

    Args:
        attempts: of the solver at each task: 2 or more.
        largest: of the numbers that a task must use: 9 to 999.
        split: `train`, `validation` or `test`.
    """

    agents = ("proposer", "solver")
    bounded = True

    def __init__(self, attempts: int = 4, largest: int = 20, split: str = "train") -> None:
        super().__init__(split)
        if not 2 <= attempts <= 64 or not 9 <= largest <= LARGEST:
            raise ConfigError(
                f"attempts is {attempts} and largest is {largest}; choose 2 to 64 attempts and a largest number from "
                f"9 to {LARGEST}."
            )
        self.attempts, self.largest = attempts, largest
        self.max_steps = 1 + attempts

    def draw(self, rng: random.Random) -> str:
        self.given = rng.randint(1, self.largest)
        self.parts: list[str] = []
        self.tried = self.right = 0
        return f"use {self.given}"

    def start(self) -> dict[str, Observation]:
        return {"proposer": f"Write a task with + - * that uses the number {self.given}, such as {self.given} + 1."}

    def step(self, actions: dict[str, str]) -> StepResult:
        if "proposer" in actions:
            proposed = read_task(actions["proposer"], self.given)
            if proposed is None:
                measures = {"valid": 0.0, "solved": 0.0}
                return StepResult({}, {"proposer": 0.0}, True, False, {"measures": measures})
            self.parts = proposed
            return StepResult(self._asked(), {}, False, False, {})
        numbers = _ANSWER.findall(actions["solver"])
        right = bool(numbers) and len(numbers[-1]) < 20 and int(numbers[-1]) == value(self.parts)
        self.tried, self.right = self.tried + 1, self.right + right
        if self.tried < self.attempts:
            return StepResult(self._asked(), {"solver": float(right)}, False, False, {})
        paid = {"solver": float(right), "proposer": learnability(self.right, self.attempts)}
        measures = {"valid": 1.0, "solved": self.right / self.attempts, "operations": len(self.parts) // 2}
        return StepResult({}, paid, True, False, {"measures": measures})

    def _asked(self) -> dict[str, Observation]:
        return {"solver": f"Compute {' '.join(self.parts)}."}

    def move(self, player: Player, agent: str, rng: random.Random) -> str:
        if agent == "solver":
            exact = value(self.parts)
            return str(exact if player == "optimal" else rng.randint(0, 99) if player == "random" else 0)
        if player == "random":
            return f"{self.given} {rng.choice('+-*')} {rng.randint(0, 20)}"
        return f"{self.given} + 1"
