"""`plan_path`: a planner sees a grid with walls and says a route; a mover, who sees no walls, walks it.

An instance is the grid with start and goal; the solver is a breadth-first search. Held-out instances are other grids.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence

from mafrt.core.errors import ConfigError
from mafrt.core.types import Observation, StepResult
from mafrt.envs.games.base import Game, Player, scored
from mafrt.envs.games.routes import (
    STEPS,
    Place,
    drawn,
    moved,
    obeyed,
    progress,
    random_steps,
    said,
    steps_in,
    to_mover,
    walked,
)

SLACK = 2
"""steps that may be taken beyond the shortest route"""


class PlanPath(Game):
    """Planner and mover; the outcome is 1 at the goal, else half of the share of the way that was covered.

    Steps beyond the length of the shortest route and two more are not taken, so that no one route finds most goals.

    Args:
        size: rows and columns of the grid, 2 to 8.
        walls: cells that block; a route around them always exists.
        split: `train`, `validation` or `test`.
        brief: observations without instructions and spaces, and steps as letters: u, d, l, r.
    """

    agents = ("planner", "mover")
    max_steps = 2
    bounded = True

    def __init__(self, size: int = 3, walls: int = 2, split: str = "train", brief: bool = False) -> None:
        super().__init__(split, brief)
        if not 2 <= size <= 8 or not 0 <= walls <= size * size // 2:
            raise ConfigError(f"size is {size} and walls is {walls}; choose a size of 2 to 8 and at most half of it.")
        self.size, self.walls = size, walls

    def draw(self, rng: random.Random) -> str:
        cells = [(row, column) for row in range(self.size) for column in range(self.size)]
        while True:
            chosen = rng.sample(cells, self.walls + 2)
            self.here, self.goal, self.blocked = chosen[0], chosen[1], frozenset(chosen[2:])
            route = self.route(self.here)
            if route is not None:
                self.way = len(route)
                self.plan = ""
                return f"{self.size} {self.here} {self.goal} {sorted(self.blocked)}"

    def route(self, start: Place) -> list[str] | None:
        """The shortest route from `start` to the goal, by name of the steps; None if there is none."""
        paths: dict[Place, list[str]] = {start: []}
        queue = deque([start])
        while queue:
            place = queue.popleft()
            if place == self.goal:
                return paths[place]
            for name in STEPS:
                there = self._after(place, name)
                if there not in paths:
                    paths[there] = [*paths[place], name]
                    queue.append(there)
        return None

    def _after(self, place: Place, step: str) -> Place:
        """Where a step leads: a wall or the border leaves the walker where it is."""
        there = moved(place, step)
        inside = 0 <= there[0] < self.size and 0 <= there[1] < self.size
        return there if inside and there not in self.blocked else place

    def drawing(self) -> str:
        """The grid, a line per row: S start, G goal, # wall, . free."""

        def sign(cell: Place) -> str:
            return "S" if cell == self.here else "G" if cell == self.goal else "#" if cell in self.blocked else "."

        return drawn(self.size, sign, self.brief)

    def start(self) -> dict[str, Observation]:
        if self.brief:
            return {"planner": self.drawing()}
        return {"planner": f"{self.drawing()}\nSay the way from S to G: up, down, left, right."}

    def step(self, actions: dict[str, str]) -> StepResult:
        if "planner" in actions:
            self.plan = actions["planner"]
            info = scored("planner", progress(self.plan, self._left(steps_in(self.plan, self.brief)), self.brief))
            return StepResult({"mover": to_mover(self.plan, self.brief)}, {}, False, False, info)
        route = steps_in(actions["mover"], self.brief)
        nearest = min(self._left(route))
        outcome = 1.0 if not nearest else 0.5 * (1 - nearest / self.way)
        info = {
            "outcome": outcome,
            "measures": {"reached": float(not nearest)},
            "answers": walked(route, outcome),
            **scored("mover", obeyed(self.plan, actions["mover"], self.brief)),
        }
        return StepResult({}, {}, True, False, info)

    def _left(self, route: Sequence[str]) -> list[int]:
        """Steps to the goal by the shortest way, at first and after each step of a route, up to the goal."""
        place, left = self.here, [self.way]
        for name in route[: self.way + SLACK]:
            place = self._after(place, name)
            left.append(len(self.route(place) or ()))
            if not left[-1]:
                break
        return left

    def move(self, player: Player, agent: str, rng: random.Random) -> str:
        if agent == "planner" and player == "optimal":
            return said(self.route(self.here) or (), self.brief)
        if agent == "mover" and player == "optimal":
            return self.plan
        if player == "constant":
            return said(("right", "down", "right", "down"), self.brief)
        return self._walk(rng) if agent == "planner" else random_steps(rng, 2 * self.size, self.brief)

    def _walk(self, rng: random.Random) -> str:
        """A random route that no wall stops: legal, and blind to the goal."""
        place, steps = self.here, list[str]()
        for _ in range(2 * self.size):
            step = rng.choice([name for name in STEPS if self._after(place, name) != place])
            place = self._after(place, step)
            steps.append(step)
        return said(steps, self.brief)
