"""`sudoku`: 4x4 puzzles; one agent names an empty cell that is easy, the other fills it, until all are full.

Puzzles are made from a full grid by emptying cells while the solution stays unique. Held-out ones have other solutions.
"""

from __future__ import annotations

import random
import re

from mafrt.config.schema import check_number
from mafrt.core.types import Observation, Scored, StepResult
from mafrt.envs.games.base import Game, Player, scored

Grid = tuple[int, ...]
"""16 cells, row by row; 0 is empty"""
_DIGIT = re.compile(r"[1-4]")


def _seen_from(cell: int) -> tuple[int, ...]:
    """The cells in the row, the column and the box of a cell, itself among them."""
    row, column = divmod(cell, 4)
    box = (row // 2, column // 2)
    return tuple(
        other for other in range(16) if other // 4 == row or other % 4 == column or (other // 8, other % 4 // 2) == box
    )


_SEEN = tuple(map(_seen_from, range(16)))


def free(grid: Grid, cell: int) -> list[int]:
    """Digits that neither row, column nor box of the cell holds."""
    taken = {grid[other] for other in _SEEN[cell]}
    return [digit for digit in (1, 2, 3, 4) if digit not in taken]


def solutions(grid: Grid, most: int = 2) -> list[Grid]:
    """Up to `most` full grids that fit."""
    empty = [cell for cell in range(16) if not grid[cell]]
    if not empty:
        return [grid]
    cell = min(empty, key=lambda place: len(free(grid, place)))
    solved: list[Grid] = []
    for digit in free(grid, cell):
        solved += solutions((*grid[:cell], digit, *grid[cell + 1 :]), most - len(solved))
        if len(solved) >= most:
            break
    return solved


class Sudoku(Game):
    """Chooser and filler; the outcome is 1 for a full grid, else the share of the empty cells that were filled rightly.

    The first wrong digit ends the episode.

    Args:
        empty: cells to fill, 1 to 10.
        split: `train`, `validation` or `test`.
        brief: observations without instructions and spaces, and answers of the digits alone: else an entropy bonus
            would be earned by words behind them, which change nothing.
    """

    agents = ("chooser", "filler")
    max_steps = 20
    bounded = True

    def __init__(self, empty: int = 2, split: str = "train", brief: bool = False) -> None:
        super().__init__(split, brief)
        check_number("empty", empty, least=1, most=10, whole=True)
        self.empty = empty
        self.filled: list[str] = []

    def draw(self, rng: random.Random) -> str:
        while True:
            self.solution = self._full(rng)
            grid = list(self.solution)
            for cell in rng.sample(range(16), 16):
                if grid.count(0) == self.empty:
                    break
                digit, grid[cell] = grid[cell], 0
                if len(solutions(tuple(grid))) > 1:
                    grid[cell] = digit
            if grid.count(0) == self.empty:
                self.grid: Grid = tuple(grid)
                self.cell, self.right, self.filled = -1, 0, []
                return "".join(map(str, self.solution))

    @staticmethod
    def _full(rng: random.Random) -> Grid:
        grid: Grid = (0,) * 16
        for cell in rng.sample(range(16), 16):
            options = [d for d in free(grid, cell) if solutions((*grid[:cell], d, *grid[cell + 1 :]), 1)]
            grid = (*grid[:cell], rng.choice(options), *grid[cell + 1 :])
        return grid

    def drawing(self, marked: int = -1) -> str:
        """The grid, a line per row; `_` is empty and `?` the marked cell."""
        signs = ["?" if cell == marked else str(digit or "_") for cell, digit in enumerate(self.grid)]
        return "\n".join(("" if self.brief else " ").join(signs[row : row + 4]) for row in range(0, 16, 4))

    def start(self) -> dict[str, Observation]:
        if self.brief:
            return {"chooser": self.drawing()}
        return {"chooser": f"{self.drawing()}\nName the row and the column of an empty cell, each from 1 to 4."}

    def step(self, actions: dict[str, str]) -> StepResult:
        if "chooser" in actions:
            numbers = self._digits(actions["chooser"], 2)
            self.cell = 4 * (numbers[0] - 1) + numbers[1] - 1 if len(numbers) == 2 else -1
            if self.cell < 0 or self.grid[self.cell]:
                return self._end("chooser", Scored(0.0, "No empty cell is named."))
            left = len(free(self.grid, self.cell))
            info = scored("chooser", Scored(10.0 / left, f"In this cell {left} digits are possible."))
            asked = "" if self.brief else "\nWhich digit from 1 to 4 stands at the question mark?"
            return StepResult({"filler": self.drawing(self.cell) + asked}, {}, False, False, info)
        digit = next(iter(self._digits(actions["filler"], 1)), None)
        if digit is not None:
            self.filled.append(f"{self.cell}={digit}")
        if digit != self.solution[self.cell]:
            possible = digit in free(self.grid, self.cell)
            why = (
                "The digit is possible here, and not the solution's." if possible else "The digit is not possible here."
            )
            return self._end("filler", Scored(4.0 if possible else 0.0, why))
        self.grid = (*self.grid[: self.cell], digit, *self.grid[self.cell + 1 :])
        self.right += 1
        rules = Scored(10.0, "The digit is right.")
        if 0 in self.grid:
            return StepResult(self.start(), {}, False, False, scored("filler", rules))
        return self._end("filler", rules)

    def _digits(self, answer: str, count: int) -> list[int]:
        """The first digits of an answer; in brief form there must be so many and nothing else."""
        if self.brief and not re.fullmatch(rf"\s*[1-4]{{{count}}}\s*", answer):
            return []
        return [int(digit) for digit in _DIGIT.findall(answer)[:count]]

    def _end(self, speaker: str, rules: Scored) -> StepResult:
        solved, outcome = float(self.right == self.empty), self.right / self.empty
        # The digits are the answer in a vote over episodes of one puzzle. A game that a wrong one has ended shows its
        # players that it is lost, so it does not vote.
        answers = {"filler": {"key": " ".join(sorted(self.filled)) if solved else None, "score": outcome}}
        info = {"outcome": outcome, "measures": {"solved": solved}, "answers": answers, **scored(speaker, rules)}
        return StepResult({}, {}, True, False, info)

    def move(self, player: Player, agent: str, rng: random.Random) -> str:
        if agent == "chooser":
            if player == "constant":
                return self._name(0)
            cells = [cell for cell in range(16) if not self.grid[cell]]
            if player == "optimal":
                least = min(len(free(self.grid, cell)) for cell in cells)
                cells = [cell for cell in cells if len(free(self.grid, cell)) == least]
            return self._name(rng.choice(cells))
        if player == "optimal":
            return str(self.solution[self.cell])
        return "1" if player == "constant" else str(rng.randint(1, 4))

    def _name(self, cell: int) -> str:
        """Row and column, as a scripted chooser says them."""
        return f"{cell // 4 + 1}{'' if self.brief else ' '}{cell % 4 + 1}"
