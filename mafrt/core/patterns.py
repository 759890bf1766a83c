"""Regular expressions of a user or of a file, on short texts: one that takes for ever is an error."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

LONGEST = 1000
"""Characters of an expression."""
TIMEOUT_S = 60.0
"""By the clock."""
CPU_S = 2.0
"""Of a processor, after which the process that matches ends."""
_MATCHER = Path(__file__).with_name("_match_patterns.py")
_REPEATS = re.compile(r"[*+?{(|]")
"""what an expression needs to take more than one way through a text"""


class PatternError(ValueError):
    """An expression that cannot be used; the text is a clause that says why."""


def full_matches(patterns: Sequence[str], texts: Sequence[str]) -> list[list[bool]]:
    """For each expression, which of the texts it matches as a whole.

    An expression that could take more than one way is matched in a process that ends after `CPU_S`.

    Raises:
        PatternError: an expression that is none, is too long, or takes too long.
    """
    for pattern in patterns:
        if len(pattern) > LONGEST:
            raise PatternError(f"it has {len(pattern)} characters, of which at most {LONGEST} are taken")
        try:
            re.compile(pattern)
        except (re.error, RecursionError, OverflowError) as error:
            raise PatternError(f"it is no regular expression ({error})") from error
    if not any(map(_REPEATS.search, patterns)):
        return [[re.fullmatch(pattern, text) is not None for text in texts] for pattern in patterns]
    try:
        done = subprocess.run(
            [sys.executable, "-I", "-S", str(_MATCHER)],
            input=json.dumps({"patterns": patterns, "texts": texts, "cpu_s": CPU_S}),
            capture_output=True,
            encoding="utf-8",
            env={},
            timeout=TIMEOUT_S,
        )
    except subprocess.TimeoutExpired:
        raise PatternError("it takes too long to match") from None
    if done.returncode:
        raise PatternError("it takes too long to match")
    rows: list[list[bool]] = json.loads(done.stdout)
    return rows
