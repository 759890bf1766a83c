"""Finds the answer in a text, and compares plain numbers: string work only, in microseconds, safe on any text.

The rule: the content of the last \\boxed{...} whose braces balance; else what follows the last `####` on its line;
else, only where asked for, the last number.
"""

from __future__ import annotations

import re
from fractions import Fraction

_BOX = re.compile(r"\\f?boxed\s*\{")
_HASHES = re.compile(r"####[ \t]*([^\n]+)")
_LAST_NUMBER = re.compile(r"-?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?:/\d+)?")
_PLAIN = re.compile(r"([+-]?)(\d{1,3}(?:,\d{3})+|\d{1,40})?(\.\d{0,40})?")

TOLERANCE = Fraction(1, 10**6)
"""Decimals closer than this may round to the same number; such pairs are left to math-verify."""


def boxed(text: str) -> str | None:
    """The content of the last \\boxed{...} (or \\fbox-like \\fboxed) with balanced braces, or None."""
    for match in reversed(list(_BOX.finditer(text))):
        depth = 1
        for index in range(match.end(), len(text)):
            if text[index] in "{}" and text[index - 1] != "\\":
                depth += 1 if text[index] == "{" else -1
                if depth == 0:
                    return text[match.end() : index].strip()
    return None


def hash_answer(text: str) -> str | None:
    """What follows the last `####` on its line (GSM8K), or None."""
    found = _HASHES.findall(text)
    return found[-1].strip() if found else None


def extract_answer(text: str, *, last_number: bool = False) -> str | None:
    """The answer that `text` gives, or None if it gives none (an empty box gives none)."""
    answer = boxed(text)
    if answer is None:
        answer = hash_answer(text)
    if answer is None and last_number:
        found = _LAST_NUMBER.findall(text)
        answer = found[-1] if found else None
    return answer or None


def tidy(answer: str) -> str:
    """Strip what never changes an answer: outer dollars, `\\,`-like spaces, a final full stop."""
    answer = answer.strip()
    while len(answer) > 1 and answer[0] == "$" == answer[-1] and not answer.endswith("\\$"):
        answer = answer[1:-1].strip()
    for space in ("\\,", "\\!", "\\;", "\\:", "\\ "):
        answer = answer.replace(space, " " if space == "\\ " else "")
    answer = answer.replace("{,}", ",")
    return answer[:-1].rstrip() if answer.endswith(".") else answer


def plain_number(answer: str) -> Fraction | None:
    """The value of a plain integer or decimal such as `-3`, `1,234.50` or `.5`; None for anything else."""
    match = _PLAIN.fullmatch(answer)
    if match is None or not answer.strip("+-."):
        return None
    whole = (match[2] or "0").replace(",", "")
    return Fraction(f"{match[1]}{whole}{match[3] or ''}" + ("0" if match[3] == "." else ""))


def quick_verdict(given: str, reference: str) -> bool | None:
    """Whether two tidied answers agree, or None where string work cannot tell."""
    if given == reference:
        return True
    left, right = plain_number(given), plain_number(reference)
    if left is None or right is None:
        return None
    if left == right:
        return True
    return None if abs(left - right) <= TOLERANCE else False
