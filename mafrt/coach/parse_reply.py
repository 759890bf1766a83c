"""Reading a judge's reply. Only an unmistakable verdict is one: there is no guessing and no default number.

A reply is JSON with exactly the keys of `judge_prompt.schema`; prose or a fence may stand around that one object, such
as an analysis before it. Otherwise it is the text form: the first line is `PROCESS_SCORE: X`, the only one in the
reply, and `REASONING:` follows. Where the rubric asks for an analysis, that line may be the last one.

Text that an agent or a tool wrote can reach a reply when a judge or an error page
echoes its prompt, so a verdict that stands in the quoted texts is not read. Neither is a reply that was cut short or
holds only thoughts.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from mafrt.coach.judge_prompt import MOST_SPANS
from mafrt.core.text import clean_text
from mafrt.core.types import Scored
from mafrt.environment.tool_calls import visible

LONGEST_REASON = 2000
"""Characters of a reason that are kept."""

LONGEST_OBJECT = 16_384
"""Characters of a quoted text that are read for a verdict in JSON."""
MOST_OBJECTS = 1000
"""Beginnings of objects in a quoted text that are looked at."""

_OBJECT = re.compile(r'\{\s*"')
_OWN_LINE = re.compile(r"^[ \t]*\{", re.MULTILINE)
_FENCED = re.compile(r"```(?:json)?[^\S\n]*\n(.*)\n[ \t]*```", re.DOTALL)
_SCORE_LINE = re.compile(r"PROCESS_SCORE:[ \t]*([0-9]{1,2}(?:\.[0-9]{1,6})?)[ \t]*\r?")
_SCORED_LAST = re.compile(
    r"(?P<analysis>.*?)^[ \t*]*PROCESS_SCORE:[ \t*]*(?P<score>[0-9]{1,2}(?:\.[0-9]{1,6})?)(?:[ \t]*/[ \t]*10)?"
    r"[ \t*]*(?:\s+ANSWER_CORRECT:[ \t]*(?:[01]|N/?A))?\s*",
    re.DOTALL | re.MULTILINE,
)
"""An analysis with the score at its end; MARTI's judges add whether the answer is right, which a verifier knows."""
_ANY_SCORE = re.compile(r"process[\s_-]*score[\s:=*\"'`]*([0-9]{1,2}(?:\.[0-9]{1,6})?)", re.IGNORECASE)
_REASONING = re.compile(r"\s*REASONING:[ \t]*(?=\S)")
_WORD = re.compile(r"process[\s_-]*score", re.IGNORECASE)
_SCORE_NAMED = re.compile(r"score[\"'*` ]*[:=]", re.IGNORECASE)
_KEYS, _SPAN_KEYS = {"reason", "score", "spans"}, {"quote", "score"}


class UnreadableError(ValueError):
    """A reply that is no verdict; the message says why, in words that may follow "because"."""


def read_reply(text: Any, *, cut: bool = False, quoted: Sequence[str] = (), analysis: bool = False) -> Scored:
    """The verdict in a reply.

    Args:
        text: the reply; anything but a text is no verdict.
        cut: whether it ended at the token limit.
        quoted: texts of agents and tools that the prompt quoted, as they were.
        analysis: whether it may be an analysis with the score at its end.

    Raises:
        UnreadableError: it is no verdict.
    """
    if cut:
        raise UnreadableError("the reply was cut off at its token limit")
    if not isinstance(text, str):
        raise UnreadableError(f"the reply is a {type(text).__name__} and not a text")
    text = clean_text(text).strip()
    if not text.startswith("{"):  # a reason may speak of thoughts; a model's own come before its reply
        text = visible(text).strip()
    if not text:
        raise UnreadableError("the reply is empty")
    fenced = _FENCED.fullmatch(text)
    body = fenced[1].strip() if fenced else text
    in_prose = None if body.startswith("{") else _object_in_prose(body)
    if not body.startswith("{") and in_prose is None:
        return read_text(body, quoted, analysis)
    body = in_prose or body
    verdict = read_json(body)
    scored = verdict.score, _joined(verdict.reason)
    # By what they say, too: an echo may have other blanks, escapes or order. In prose it may be cited in other words.
    if any(
        body in other or any(one == scored or (in_prose and one[0] == scored[0]) for one in _verdicts(other))
        for other in quoted
    ):
        raise UnreadableError("the reply repeats a text that was quoted to the judge")
    return verdict


def _object_in_prose(text: str) -> str | None:
    """The one JSON object that stands on lines of its own in a reply, and is all that speaks of a score; else None.

    A page of a server is no reply, whatever stands in it.
    """
    if text.startswith(("<", "[")):
        return None
    found: list[tuple[int, int]] = []
    for match in islice(_OWN_LINE.finditer(text), MOST_OBJECTS):
        start = match.end() - 1
        if found and start < found[-1][1]:
            continue  # within the object before
        try:
            _, length = json.JSONDecoder().raw_decode(text[start : start + LONGEST_OBJECT])
        except (ValueError, RecursionError):
            continue
        if not text[start + length :].partition("\n")[0].strip():
            found.append((start, start + length))
    if len(found) != 1:
        return None
    start, end = found[0]
    return None if _SCORE_NAMED.search(text[:start] + text[end:]) else text[start:end]


def _verdicts(text: str) -> Iterator[tuple[float, str]]:
    """Score and reason of the verdicts in JSON that stand in a text, also within a JSON string."""
    for version in (text, text.replace('\\"', '"')) if '\\"' in text else (text,):
        for start in islice(_OBJECT.finditer(version), MOST_OBJECTS):
            try:
                record, _ = json.JSONDecoder().raw_decode(version[start.start() : start.start() + LONGEST_OBJECT])
            except (ValueError, RecursionError):
                continue
            score, reason = record.get("score"), record.get("reason")
            if isinstance(score, (int, float)) and isinstance(reason, str):
                yield score, _joined(clean_text(reason)[:LONGEST_REASON])


def read_json(text: str) -> Scored:
    """A verdict as a JSON object."""
    try:
        record = json.loads(text, object_pairs_hook=_unique, parse_constant=_no_constant)
    except UnreadableError:
        raise
    except (ValueError, RecursionError) as error:
        raise UnreadableError(f"the reply is not JSON ({error})") from error
    return check_verdict(record)


def check_verdict(record: Any) -> Scored:
    """A verdict out of parsed JSON; from a judge or from the cache."""
    if not isinstance(record, dict):
        raise UnreadableError("the reply is not a JSON object")
    if strange := sorted(record.keys() - _KEYS):
        # {"error": "overloaded", "score": 0} is a judgement that failed, and so may be any other addition.
        raise UnreadableError(f"the JSON object has the key {strange[0][:40]!r}, which no verdict has")
    if not isinstance(record.get("reason"), str):
        raise UnreadableError('"reason" is not a text')
    spans = record.get("spans") or []
    if not isinstance(spans, list) or not all(isinstance(span, dict) for span in spans):
        raise UnreadableError('"spans" is not a list of objects')
    scores: dict[str, float] = {}
    for span in spans[:MOST_SPANS]:
        quote = span.get("quote")
        if not isinstance(quote, str):
            raise UnreadableError('a span has no "quote"')
        if span.keys() - _SPAN_KEYS:
            raise UnreadableError("a span has a key that no span has")
        if quote.strip():  # the first score of a quotation stays: the same words twice are not worth twice as much
            scores.setdefault(clean_text(quote), _score(span, "a span's score"))
    reason = clean_text(record["reason"]).strip()[:LONGEST_REASON]
    return Scored(_score(record, '"score"'), reason, tuple(scores.items()))


def read_text(text: str, quoted: Sequence[str] = (), analysis: bool = False) -> Scored:
    """A verdict in the text form; see `read_reply`."""
    first, _, rest = text.partition("\n")
    score = _SCORE_LINE.fullmatch(first)
    if analysis and (last := _SCORED_LAST.fullmatch(text)) is not None:
        # An echo at the end of prose may be set in other ways than the line was.
        if any(float(score) == float(last["score"]) for other in quoted for score in _ANY_SCORE.findall(other)):
            raise UnreadableError("its score stands in a text that was quoted to the judge")
        return _read_score(text, last["score"], last["analysis"])
    if score is None and analysis:
        raise UnreadableError("it does not end with a line PROCESS_SCORE: <number from 0 to 10>")
    if score is None:
        raise UnreadableError(
            "it is neither the JSON object asked for nor is its first line PROCESS_SCORE: <number from 0 to 10>"
        )
    reasoning = _REASONING.match(rest)
    if reasoning is None and len(_WORD.findall(text)) == 1:
        raise UnreadableError("its score is not followed by REASONING: <text>")
    verdict = _read_score(text, score[1], rest[reasoning.end() :] if reasoning else "")
    line = _joined(first)
    if any(line in map(_joined, other.splitlines()) for other in quoted if "PROCESS_SCORE" in other):
        raise UnreadableError("its score line stands in a text that was quoted to the judge")
    return verdict


def _read_score(text: str, score: str, reason: str) -> Scored:
    """The verdict of a score line, which must be the only one in the reply."""
    if len(_WORD.findall(text)) != 1:
        raise UnreadableError("it has a second PROCESS_SCORE")
    return Scored(_score({"score": float(score)}, "PROCESS_SCORE"), reason.strip()[:LONGEST_REASON])


def verdict_json(verdict: Scored) -> str:
    """A verdict as `read_json` reads it back."""
    spans = [{"quote": quote, "score": score} for quote, score in verdict.spans]
    return json.dumps({"score": verdict.score, "reason": verdict.reason, "spans": spans}, ensure_ascii=False)


def _joined(line: str) -> str:
    return " ".join(line.split())


def _score(record: Mapping[str, Any], name: str) -> float:
    score = record.get("score")
    if isinstance(score, bool) or not isinstance(score, (int, float)):
        raise UnreadableError(f"{name} is not a number")
    if not 0 <= score <= 10:  # nor is NaN or infinity
        raise UnreadableError(f"{name} is {str(score)[:20]}, which is not in 0..10")
    return float(score)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Two scores in one object are none."""
    record = dict(pairs)
    if len(record) < len(pairs):
        raise UnreadableError("a name stands twice in the JSON object")
    return record


def _no_constant(name: str) -> float:
    raise UnreadableError(f"{name} is not a number")
