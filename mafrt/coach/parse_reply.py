"""Reading a judge's reply. What is not a verdict beyond doubt is none: there is no guessing and no default number.

A reply is JSON as `asking.schema` says; else the text form, with `PROCESS_SCORE: X` on one whole line, exactly once. A
reply that was cut short, or that has thoughts only, is not read at all.
"""

from __future__ import annotations

import json
import re
from typing import Any

from mafrt.coach.judge_prompt import MOST_SPANS
from mafrt.core.types import Scored
from mafrt.environment.tool_calls import visible

LONGEST_REASON = 2000
"""Characters of a reason that are kept."""

_FENCED = re.compile(r"```(?:json)?\s*\n(.*)\n\s*```", re.DOTALL)
_SCORE_LINE = re.compile(r"^[ \t]*PROCESS_SCORE:[ \t]*([0-9]{1,2}(?:\.[0-9]{1,6})?)[ \t]*\r?$", re.MULTILINE)
_REASONING = re.compile(r"^[ \t]*REASONING:[ \t]*", re.MULTILINE)


class UnreadableError(ValueError):
    """A reply that is no verdict; the message says why, in words that may follow "because"."""


def read_reply(text: str, *, cut: bool = False) -> Scored:
    """The verdict in a reply. Raises UnreadableError."""
    if cut:
        raise UnreadableError("the reply was cut off at its token limit")
    text = text.strip()
    if not text.startswith("{"):  # a reason may speak of thoughts; a model's own come before its reply
        text = visible(text).strip()
    if not text:
        raise UnreadableError("the reply is empty")
    fenced = _FENCED.fullmatch(text)
    body = fenced[1].strip() if fenced else text
    return read_json(body) if body.startswith("{") else read_text(text)


def read_json(text: str) -> Scored:
    """A verdict as a JSON object."""
    try:
        found = json.loads(text, object_pairs_hook=_unique, parse_constant=_no_constant)
    except UnreadableError:
        raise
    except (ValueError, RecursionError) as error:
        raise UnreadableError(f"the reply is not JSON ({error})") from error
    return check_verdict(found)


def check_verdict(found: Any) -> Scored:
    """A verdict out of parsed JSON; from a judge or from the cache."""
    if not isinstance(found, dict):
        raise UnreadableError("the reply is not a JSON object")
    reason, spans = found.get("reason", ""), found.get("spans") or []
    if not isinstance(reason, str):
        raise UnreadableError('"reason" is not a text')
    if not isinstance(spans, list) or not all(isinstance(span, dict) for span in spans):
        raise UnreadableError('"spans" is not a list of objects')
    quoted: dict[str, float] = {}
    for span in spans[:MOST_SPANS]:
        quote = span.get("quote")
        if not isinstance(quote, str):
            raise UnreadableError('a span has no "quote"')
        if quote.strip():  # the first score of a quotation stays: the same words twice are not worth twice as much
            quoted.setdefault(quote, _score(span, "a span's score"))
    return Scored(_score(found, '"score"'), reason.strip()[:LONGEST_REASON], tuple(quoted.items()))


def read_text(text: str) -> Scored:
    """A verdict in the text form."""
    found = _SCORE_LINE.findall(text)
    if text.count("PROCESS_SCORE") != 1 or len(found) != 1:
        raise UnreadableError("it is neither the JSON object asked for nor has it one line PROCESS_SCORE: <number>")
    before, _, after = text.partition("PROCESS_SCORE")
    reason = after.partition("\n")[2].strip() or before.strip()
    return Scored(_score({"score": float(found[0])}, "PROCESS_SCORE"), _REASONING.sub("", reason, 1)[:LONGEST_REASON])


def verdict_json(verdict: Scored) -> str:
    """A verdict as `read_json` reads it back."""
    spans = [{"quote": quote, "score": score} for quote, score in verdict.spans]
    return json.dumps({"score": verdict.score, "reason": verdict.reason, "spans": spans}, ensure_ascii=False)


def _score(found: dict[str, Any], what: str) -> float:
    score = found.get("score")
    if isinstance(score, bool) or not isinstance(score, (int, float)):
        raise UnreadableError(f"{what} is not a number")
    if not 0 <= score <= 10:  # nor is what is not finite
        raise UnreadableError(f"{what} is {str(score)[:20]}, which is not in 0..10")
    return float(score)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Two scores in one object are none."""
    found = dict(pairs)
    if len(found) < len(pairs):
        raise UnreadableError("a name stands twice in the JSON object")
    return found


def _no_constant(name: str) -> float:
    raise UnreadableError(f"{name} is not a number")
