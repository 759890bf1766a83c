"""Steps on a grid, as an agent says them: words, or in brief games the letters u, d, l and r."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterable, Sequence

from mafrt.core.types import Scored

Place = tuple[int, int]
"""row and column"""
STEPS: dict[str, Place] = {"up": (-1, 0), "down": (1, 0), "left": (0, -1), "right": (0, 1)}
_WORD = re.compile(r"\b(?:up|down|left|right)\b")
_NAMES = {name[0]: name for name in STEPS}


def moved(place: Place, step: str) -> Place:
    """The cell that a step leads to, whatever lies there."""
    return place[0] + STEPS[step][0], place[1] + STEPS[step][1]


def steps_in(text: str, brief: bool) -> list[str]:
    """Names of the steps that a text says, in their order."""
    return [_NAMES[sign] for sign in text.lower() if sign in _NAMES] if brief else _WORD.findall(text.lower())


def said(steps: Iterable[str], brief: bool) -> str:
    """Steps as a scripted player says them."""
    return "".join(step[0] for step in steps) if brief else " ".join(steps)


def random_steps(rng: random.Random, count: int, brief: bool) -> str:
    """A random route of so many steps, as a scripted player says it."""
    return said((rng.choice(list(STEPS)) for _ in range(count)), brief)


def drawn(size: int, sign: Callable[[Place], str], brief: bool) -> str:
    """A square grid, a line per row, with the sign of every cell."""
    between = "" if brief else " "
    return "\n".join(between.join(sign((row, column)) for column in range(size)) for row in range(size))


def to_mover(plan: str, brief: bool) -> str:
    """What the mover, who sees no grid, sees of a plan."""
    return plan if brief else f"The plan: {plan}\nSay your steps."


def walked(steps: Iterable[str], outcome: float) -> dict[str, dict[str, object]]:
    """The mover's answer, for a vote over episodes of one instance: its route as it was said, and the outcome.

    Not the route up to the goal: a voter does not know where that is.
    """
    return {"mover": {"key": " ".join(steps) or None, "score": outcome}}


def progress(way: int, left: int) -> Scored:
    """Score of a plan: the share of the shortest way, in steps, that it leaves behind."""
    return Scored(10.0 * max(0, way - left) / way, f"Of {way} steps on the shortest way {left} are left after these.")


def obeyed(plan: Sequence[str], route: Sequence[str]) -> Scored:
    """Score of the mover by its own part: the share of the plan that it carried out, and no step beyond it."""
    pairs = zip(plan, route, strict=False)
    same = next((n for n, (one, other) in enumerate(pairs) if one != other), min(len(plan), len(route)))
    score = 10.0 * same / max(len(plan), len(route)) if plan or route else 10.0
    return Scored(score, f"Of {len(plan)} planned steps the first {same} were made, and {len(route) - same} others.")
