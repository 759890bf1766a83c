"""Compares a program's results with the expected ones. Runs in the judging room, where the program is not.

`results.jsonl` is the program's word and may be anything; `expected.json` is ours.
"""

from __future__ import annotations

import json
import math

from moving import CannotMove, decode

TYPE_CHECKING = False
"""As in `moving.py`."""
if TYPE_CHECKING:
    from typing import Any

SYNTAX = ("SyntaxError", "IndentationError", "TabError")
MOST_RESULT = 16 * 2**20


def read(data: bytes, asked: int, ended: str, stderr: str) -> tuple[list[dict[str, Any]], str, str]:
    """Results as far as they came, at most `asked`; how the program went; the first failure as an agent may see it."""
    records = []
    for line in data.split(b"\n", asked + 2)[: asked + 1]:
        record = parsed(line)
        if isinstance(record, dict):
            records.append(record)
    first = records[0] if records else {}
    if "failed" in first:
        kind = str(first["failed"])
        status = "timeout" if kind == "OutOfTime" else "syntax" if kind in SYNTAX else "error"
        return [], status, str(first.get("trace", ""))[-2000:]
    results = records[1 : 1 + asked] if first.get("ready") is True else []
    failed = next((r for r in results if "error" in r), None)
    if len(results) < asked:
        status = ended if ended != "ok" else "timeout" if _late(results) else "error"
        why = "." if status in ("ok", "error") else f" ({status})."
        note = f"The program ended before all its tests were through{why}"
        return results, status, "\n".join(part for part in (stderr.strip()[-1000:], note) if part)
    if failed is None:
        return results, "ok", ""
    return results, "timeout" if failed["error"] == "OutOfTime" else "error", str(failed.get("trace", ""))[-2000:]


def _late(results: list[dict[str, Any]]) -> bool:
    return bool(results) and results[-1].get("error") == "OutOfTime"


def parsed(data: bytes) -> Any:
    try:
        return json.loads(data) if len(data) <= MOST_RESULT else None
    except (ValueError, RecursionError):
        return None


def judge() -> dict[str, Any]:
    """Which tests a program passes: `{"good": [bool], "status": text, "trace": text}`."""
    with open("expected.json", encoding="utf-8") as file:
        expected = json.load(file)
    with open("results.jsonl", "rb") as file:
        data = file.read()
    tests = expected["tests"]
    results, status, trace = read(data, len(tests), expected["status"], expected["stderr"])
    right = printed_right if expected["kind"] == "stdin" else returned_right
    good = [right(result, test) for result, test in zip(results, tests, strict=False)]
    return {"good": good, "status": status, "trace": trace}


def returned_right(result: dict[str, Any], test: dict[str, Any]) -> bool:
    """Whether a call returned the value that it must."""
    if "value" not in result:
        return False
    try:
        value, wanted = decode(result["value"]), decode(test["expected"])
        if not test["loose"]:
            return bool(value == wanted)
        return _alike(value, wanted) or (isinstance(wanted, list) and len(wanted) == 1 and _alike(value, wanted[0]))
    except (CannotMove, RecursionError):
        return False


def _alike(value: Any, expected: Any) -> bool:
    if isinstance(value, (list, tuple)) and isinstance(expected, (list, tuple)):
        return len(value) == len(expected) and all(map(_alike, value, expected))
    if isinstance(value, float) or isinstance(expected, float):
        numbers = (int, float)
        if not isinstance(value, numbers) or not isinstance(expected, numbers):
            return False
        try:
            return math.isclose(value, expected, rel_tol=1e-6, abs_tol=1e-6)
        except OverflowError:  # a whole number that is no float
            return False
    return bool(value == expected)


def printed_right(result: dict[str, Any], test: str) -> bool:
    """Lines are compared without the spaces at their ends, numbers with a point in them to six digits."""
    if not isinstance(result.get("printed"), str):
        return False
    printed, wanted = ([line.strip() for line in text.strip().split("\n")] for text in (result["printed"], test))
    if printed == wanted:
        return True
    pairs = zip(printed, wanted, strict=False)
    return len(printed) == len(wanted) and all(_same_line(a.split(), b.split()) for a, b in pairs)


def _same_line(printed: list[str], wanted: list[str]) -> bool:
    return len(printed) == len(wanted) and all(
        a == b or ("." in b and _near(_decimal(a), _decimal(b))) for a, b in zip(printed, wanted, strict=True)
    )


def _decimal(word: str) -> float | None:
    try:
        return float(word) if len(word) < 40 else None
    except ValueError:
        return None


def _near(left: float | None, right: float | None) -> bool:
    return left is not None and right is not None and math.isclose(left, right, rel_tol=1e-6, abs_tol=1e-6)
