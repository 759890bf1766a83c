"""Steps on a grid, as an agent says them: words, or in brief games the letters u, d, l and r."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterable, Sequence

from mafrt.core.types import Scored

Place = tuple[int, int]
"""row and column"""
STEPS: dict[str, Place] = {"up": (-1, 0), "down": (1, 0), "left": (0, -1), "right": (0, 1)}
_WORD = re.compile(r"\b(?:up|down|left|right)\b", re.ASCII | re.IGNORECASE)
_LETTER = re.compile("[udlr]", re.ASCII | re.IGNORECASE)
_NAMES = {name[0]: name for name in STEPS}


def moved(place: Place, step: str) -> Place:
    """The cell that a step leads to, whatever lies there."""
    return place[0] + STEPS[step][0], place[1] + STEPS[step][1]


def steps_in(text: str, brief: bool) -> list[str]:
    """Names of the steps that a text says, in their order."""
    found = (_LETTER if brief else _WORD).findall(text)
    return [_NAMES[word.lower()] if brief else word.lower() for word in found]


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


def progress(plan: str, left: Sequence[int | None], brief: bool) -> Scored:
    """Score of a plan: the largest share of the shortest way that it leaves behind.

    Each step that comes nearer than all before it is a span of its own, so that a rule that sees tokens pays every step
    for itself. Steps beyond those that are made, as after the goal, earn nothing.

    Args:
        left: steps of the shortest way at first and after each step that is made; None: the goal cannot be reached.
    """
    way = nearest = left[0] or 0
    earned = list[float]()
    for steps in left[1:]:
        now = nearest if steps is None else min(nearest, steps)
        earned.append(10.0 * (nearest - now) / way)
        nearest = now
    stuck = " After them there is no way any more." if left[-1] is None else ""
    return Scored(
        10.0 * (way - nearest) / way,
        f"Of {way} steps on the shortest way these leave {nearest} at their nearest.{stuck}",
        _by_step(plan, earned, brief),
    )


def obeyed(plan: str, route: str, brief: bool) -> Scored:
    """Score of the mover by its own part: the share of the plan that it carried out, and no step beyond it.

    Each step that is the plan's is a span of its own, and so is the end where the whole plan was carried out.
    """
    planned, made = steps_in(plan, brief), steps_in(route, brief)
    pairs = zip(planned, made, strict=False)
    same = next((n for n, (one, other) in enumerate(pairs) if one != other), min(len(planned), len(made)))
    longer = max(len(planned), len(made))
    return Scored(
        10.0 * same / longer if longer else 10.0,
        f"Of {len(planned)} planned steps the first {same} were made, and {len(made) - same} others.",
        _by_step(route, [1.0] * same, brief) + ((("", 1.0),) if planned == made else ()),
    )


def _by_step(text: str, earned: Sequence[float], brief: bool) -> tuple[tuple[str, float], ...]:
    """The spans of the steps that earn something: each quotes the text up to its end, which stands in it once."""
    steps = (_LETTER if brief else _WORD).finditer(text)
    return tuple((text[: step.end()], score) for step, score in zip(steps, earned, strict=False) if score)
