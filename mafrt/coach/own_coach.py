"""A coach of one's own: what it must have, and calls with a deadline, where an error on one case loses that alone."""

from __future__ import annotations

import asyncio
import copy
import inspect
import logging
import threading
from collections.abc import Awaitable, Sequence
from typing import Any

from mafrt.coach.base import Case, Coach
from mafrt.config.resolve import place_of, user_line
from mafrt.core.errors import CoachError, CoachInterruptedError, ConfigError, MafrtError
from mafrt.core.text import error_line
from mafrt.core.types import Unscored

log = logging.getLogger(__name__)
_LOOK_S = 0.2
"""Seconds between two looks at a request to stop."""


def check_coach(coach: object, name: str = "") -> Coach:
    """`coach`; raises ConfigError unless it is a Coach with a `judge` of its own. `name`: how it was asked for."""
    title = f"coach {name}" if name else "the coach"
    if not isinstance(coach, Coach):
        raise ConfigError(f"{title} is a {type(coach).__name__}, which is not a mafrt.Coach; derive it from that.")
    if type(coach).judge is Coach.judge:
        raise ConfigError(f"{title}{place_of(type(coach))} lacks judge(self, cases); define it.")
    return coach


def verdicts_of(coach: Coach, cases: Sequence[Case], deadline_s: float) -> list[Any]:
    """What `coach.judge` gives on `cases`: a list, also of an async function or a generator.

    Where it raises, the cases are judged one by one, and those on which it raises again are Unscored.

    Raises:
        CoachError: it raises on every case, does not come back within `deadline_s`, or gives no list.
        CoachInterruptedError: the run was asked to stop meanwhile.
    """
    try:
        return _call(coach, cases, deadline_s)
    except MafrtError:
        raise
    # It is the user's code, so any error is possible.
    except Exception as error:
        first = _told(coach, error)
    log.warning("%s; its cases are judged one by one", first)
    verdicts: list[Any] = []
    failed = 0
    for case in cases:
        try:
            verdicts += _call(coach, [case], deadline_s)
        except MafrtError:
            raise
        except Exception as error:
            failed += 1
            verdicts.append(Unscored(_told(coach, error)))
    if failed == len(cases):
        raise CoachError(f"{first}; it does so on every case")
    return verdicts


def _call(coach: Coach, cases: Sequence[Case], deadline_s: float) -> list[Any]:
    """`coach.judge` on copies of the cases, in a thread that is left behind at the deadline."""
    answer: list[Any] = []
    raised: list[Exception] = []

    def work() -> None:
        try:
            result: Any = coach.judge(copy.deepcopy(list(cases)))
            if inspect.isawaitable(result):
                result = asyncio.run(_awaited(result))
            elif inspect.isasyncgen(result):
                result = asyncio.run(_collected(result))
            answer.append(list(result))
        except Exception as error:  # raised again in the thread that waits
            raised.append(error)

    thread = threading.Thread(target=work, name="coach", daemon=True)
    thread.start()
    for _ in range(max(1, round(deadline_s / _LOOK_S))):
        thread.join(_LOOK_S)
        if not thread.is_alive():
            break
        if coach.interrupted():
            raise CoachInterruptedError("the run was asked to stop")
    else:
        raise CoachError(f"{type(coach).__name__}.judge() took longer than coach_deadline ({deadline_s:g} s)")
    if raised:
        raise raised[0]
    return list(answer[0])


async def _awaited(result: Awaitable[Any]) -> Any:
    return await result


async def _collected(results: Any) -> list[Any]:
    return [result async for result in results]


def _told(coach: Coach, error: Exception) -> str:
    return f"{type(coach).__name__}.judge() raised {type(error).__name__}: {error_line(error)}{user_line(error)}"
