"""`sokoban`: a planner sees a room with a box and says the moves; a mover, who sees no room, makes them.

A room is generated backwards: the box starts on its target and is pulled away by random moves, so that pushing it back
is always possible. The solver is a breadth-first search over places of walker and box. Held-out instances are other
rooms.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from itertools import permutations, product

from mafrt.core.errors import ConfigError
from mafrt.core.types import Observation, Scored, StepResult
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

MOST_PULLS = 12
"""random moves away from the solved room"""
SLACK = 4
"""moves that may be made beyond the shortest solution"""


class Sokoban(Game):
    """Planner and mover; the outcome is 1 with the box on its target, else half of the share of the way it came nearer.

    Args:
        size: rows and columns of the room, 3 to 7; its border is a wall.
        walls: cells inside that block.
        pulls: pushes that the box is away from its target in generation, 1 to 6; the shortest solution may have fewer.
        split: `train`, `validation` or `test`.
        brief: observations without instructions and spaces, and moves as letters: u, d, l, r.
    """

    agents = ("planner", "mover")
    max_steps = 2
    bounded = True

    def __init__(
        self, size: int = 4, walls: int = 1, pulls: int = 1, split: str = "train", brief: bool = False
    ) -> None:
        super().__init__(split, brief)
        if not 3 <= size <= 7 or not 0 <= walls <= size or not 1 <= pulls <= 6:
            raise ConfigError(
                f"size is {size}, walls is {walls} and pulls is {pulls}; choose a size of 3 to 7, at most that many "
                "walls, and 1 to 6 pulls."
            )
        self.size, self.walls, self.pulls = size, walls, pulls
        self._searched: tuple[frozenset[Place], Place] | None = None
        self._moves_left: dict[tuple[Place, Place], int] = {}

    # --------------------------------------------------------------------------------------------------- the room

    def open(self, place: Place) -> bool:
        """Whether a cell is inside and no wall."""
        return 0 <= place[0] < self.size and 0 <= place[1] < self.size and place not in self.blocked

    def after(self, walker: Place, box: Place, step: str) -> tuple[Place, Place]:
        """Places of walker and box after a step; one that is blocked changes nothing."""
        there = moved(walker, step)
        if there == box:
            behind = moved(box, step)
            return (there, behind) if self.open(behind) else (walker, box)
        return (there, box) if self.open(there) else (walker, box)

    def left(self, walker: Place, box: Place) -> int | None:
        """Moves of the shortest solution; None if there is none."""
        room = self.blocked, self.target
        if self._searched != room:
            self._searched, self._moves_left = room, self._search()
        return self._moves_left.get((walker, box))

    def _search(self) -> dict[tuple[Place, Place], int]:
        """Moves of the shortest solution from each state (walker, box) that has one, searched from the room's end."""
        cells = [place for place in product(range(self.size), range(self.size)) if self.open(place)]
        before: dict[tuple[Place, Place], list[tuple[Place, Place]]] = {}
        for walker, box in permutations(cells, 2):
            for step in STEPS:
                before.setdefault(self.after(walker, box, step), []).append((walker, box))
        left = {(walker, self.target): 0 for walker in cells if walker != self.target}
        queue = deque(left)
        while queue:
            state = queue.popleft()
            for earlier in before.get(state, ()):
                if earlier not in left:
                    left[earlier] = left[state] + 1
                    queue.append(earlier)
        return left

    def solution(self, walker: Place, box: Place) -> list[str] | None:
        """The shortest moves that bring the box to its target; None if there are none."""
        left, moves = self.left(walker, box), list[str]()
        if left is None:
            return None
        while left:
            left -= 1
            step = next(step for step in STEPS if self.left(*self.after(walker, box, step)) == left)
            walker, box = self.after(walker, box, step)
            moves.append(step)
        return moves

    # --------------------------------------------------------------------------------------------------- the game

    def draw(self, rng: random.Random) -> str:
        cells = [(row, column) for row in range(self.size) for column in range(self.size)]
        while True:
            self.target, walker, *walls = rng.sample(cells, self.walls + 2)
            self.blocked, self.plan = frozenset(walls), ""
            self.walker, self.box = self._pulled(rng, walker)
            away = self.target not in (self.box, self.walker)
            way = self.left(self.walker, self.box) if away else None
            if way:
                self.way = way
                return f"{self.size} {self.walker} {self.box} {self.target} {sorted(self.blocked)}"

    def _pulled(self, rng: random.Random, walker: Place) -> tuple[Place, Place]:
        """Walker and box after random moves from the solved room; beside the box, the walker may pull it along."""
        box, pulled = self.target, 0
        for _ in range(MOST_PULLS):
            step = rng.choice(list(STEPS))
            there = moved(walker, step)
            if not self.open(there) or there == box:
                continue
            if pulled < self.pulls and moved(box, step) == walker:
                box, pulled = walker, pulled + 1
            walker = there
        return walker, box

    def drawing(self) -> str:
        """The room, a line per row: S walker, B box, G target, # wall, . free."""

        def sign(cell: Place) -> str:
            signs = {self.walker: "S", self.box: "B", self.target: "G"} | dict.fromkeys(self.blocked, "#")
            return signs.get(cell, ".")

        return drawn(self.size, sign, self.brief)

    def start(self) -> dict[str, Observation]:
        if self.brief:
            return {"planner": self.drawing()}
        return {"planner": f"{self.drawing()}\nSay the moves of S that push B to G: up, down, left, right."}

    def step(self, actions: dict[str, str]) -> StepResult:
        if "planner" in actions:
            self.plan = actions["planner"]
            info = scored("planner", self._progress())
            return StepResult({"mover": to_mover(self.plan, self.brief)}, {}, False, False, info)
        route = steps_in(actions["mover"], self.brief)
        states = self._states(route)
        far, nearest = _distance(self.box, self.target), min(_distance(box, self.target) for _, box in states)
        solved = not nearest
        outcome = 1.0 if solved else 0.5 * (1 - nearest / far)
        info = {
            "outcome": outcome,
            "measures": {"solved": float(solved)},
            "answers": walked(route, outcome),
            **scored("mover", obeyed(self.plan, actions["mover"], self.brief)),
        }
        return StepResult({}, {}, True, False, info)

    def _progress(self) -> Scored:
        """Score of the plan by the moves that are left after each of its moves."""
        states = self._states(steps_in(self.plan, self.brief))
        return progress(self.plan, [self.left(*state) for state in states], self.brief)

    def _states(self, route: Sequence[str]) -> list[tuple[Place, Place]]:
        """Places of walker and box, before the first move and after each that is made; the target ends them."""
        states = [(self.walker, self.box)]
        for step in route[: self.way + SLACK]:
            states.append(self.after(*states[-1], step))
            if states[-1][1] == self.target:
                break
        return states

    def move(self, player: Player, agent: str, rng: random.Random) -> str:
        if player == "optimal":
            return self.plan if agent == "mover" else said(self.solution(self.walker, self.box) or (), self.brief)
        if player == "constant":
            return said(("right", "down", "right", "down"), self.brief)
        if agent == "mover":
            return random_steps(rng, 2 * self.size, self.brief)
        return self._walk(rng)

    def _walk(self, rng: random.Random) -> str:
        """Random moves that no wall stops: legal, and blind to the target."""
        walker, box, steps = self.walker, self.box, list[str]()
        for _ in range(2 * self.size):
            free = [name for name in STEPS if self.after(walker, box, name)[0] != walker]
            step = rng.choice(free or list(STEPS))
            walker, box = self.after(walker, box, step)
            steps.append(step)
        return said(steps, self.brief)


def _distance(one: Place, other: Place) -> int:
    return abs(one[0] - other[0]) + abs(one[1] - other[1])
