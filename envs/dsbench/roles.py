"""The three agents, and the files that each makes for the next one."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from mafrt.core.errors import ConfigError

ENGINEER, MODELER, ANALYST = ROLES = ("data_engineer", "modeler", "analyst")
REQUIRED: dict[str, tuple[str, ...]] = {
    ENGINEER: ("X_train.pkl", "y_train.pkl", "X_test.pkl"),
    MODELER: ("model.pkl",),
    ANALYST: ("submission.csv",),
}
"""Files each role hands over; its stage ends when they exist and it reports that it is done."""

DONE = "DONE"
"""An agent says so on a line of its own."""
APPROVE = "Verdict: approve"
"""Its report in the brief style, in words known to the teaching base."""


def turns_of(turns: int | Sequence[int]) -> dict[str, int]:
    """Turns of each role, from one number for all or one for each. Raises ConfigError."""
    each: list[Any] = list(turns) if isinstance(turns, (list, tuple)) else [turns]
    each = each * len(ROLES) if len(each) == 1 else each
    if len(each) != len(ROLES) or any(isinstance(n, bool) or not isinstance(n, int) or n < 1 for n in each):
        raise ConfigError(
            f"turns must be a whole number of at least 1, or one for each of {', '.join(ROLES)}; found {turns!r}"
        )
    return dict(zip(ROLES, each, strict=True))


_FENCE = re.compile(r"```.*?(?:```|\Z)", re.DOTALL)
# Within a line and possessive: many empty lines would cost time that grows with the square of their number.
_DONE = {
    word: re.compile(rf"^(?:[^\S\n]|[*_#>])*+{word}(?:[^\S\n]|[*_.!])*+$", re.MULTILINE) for word in (DONE, APPROVE)
}


def says_done(text: str, word: str = DONE) -> bool:
    """Whether a text says, outside its programs, that the stage is done."""
    return bool(_DONE[word].search(_FENCE.sub("\n", text)))
