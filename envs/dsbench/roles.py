"""The three agents: who makes which files for whom."""

from __future__ import annotations

import re

ENGINEER, MODELER, ANALYST = ROLES = ("data_engineer", "modeler", "analyst")
REQUIRED: dict[str, tuple[str, ...]] = {
    ENGINEER: ("X_train.pkl", "y_train.pkl", "X_test.pkl"),
    MODELER: ("model.pkl",),
    ANALYST: ("submission.csv",),
}
"""What each hands on; its stage ends when these files are there and it says that it is done."""

DONE = "DONE"
"""An agent says so on a line of its own."""
APPROVE = "Verdict: approve"
"""What it says instead in the brief style: words that the teaching base knows."""

_FENCE = re.compile(r"```.*?(?:```|\Z)", re.DOTALL)
_DONE = {word: re.compile(rf"^[\s*_#>]*{word}[\s*_.!]*$", re.MULTILINE) for word in (DONE, APPROVE)}


def says_done(text: str, word: str = DONE) -> bool:
    """Whether a text says, outside its programs, that the stage is done."""
    return bool(_DONE[word].search(_FENCE.sub("\n", text)))
