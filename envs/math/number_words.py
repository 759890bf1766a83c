"""Numbers in words as digits: `seven`, `two hundred and five`, `two and a half`, `half a dozen`, `twice 5`, `a pair`.

String work only. A number may be followed by what is counted (`five apples`) or by `percent`. What can be read in two
ways is left as it stands, such as `two hundred and five thousandths`.
"""

from __future__ import annotations

import re
from fractions import Fraction

MULTIPLIERS = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}
_ONES = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
    "eighteen nineteen"
)
_TENS = {
    w: 10 * n for n, w in enumerate(re.findall("[a-z]+", "twenty thirty forty fifty sixty seventy eighty ninety"), 2)
}
SMALL = {word: number for number, word in enumerate(re.findall("[a-z]+", _ONES))} | _TENS
_ORDINALS = (
    "half third quarter fifth sixth seventh eighth ninth tenth eleventh twelfth thirteenth fourteenth fifteenth "
    "sixteenth seventeenth eighteenth nineteenth twentieth"
)
_PARTS = {word: number for number, word in enumerate(re.findall("[a-z]+", _ORDINALS), 2)}
_PARTS |= {"fourth": 4, "hundredth": 100, "thousandth": 1000, "millionth": 10**6}
_PLURALS = {f"{word}s": number for word, number in _PARTS.items() if word != "half"} | {"halves": 2}
_OF_NUMBERS = {*SMALL, *MULTIPLIERS, *_PARTS, *_PLURALS, "dozen", "minus", "negative", "point", "a", "and"}
_IN_WORDS = re.compile(r"(?:\\(?:text|mathrm|textbf|mbox)\s*\{)?\s*([A-Za-z]+(?:(?:\s+|-)[A-Za-z]+){0,11})[\s.]*\}?")
_TEXT = r"(?:\\(?:text|mathrm|mbox)\s*\{)?\s*"
_WITH_DIGITS = tuple(
    (re.compile(pattern), digits)
    for pattern, digits in (
        (r"(?<=[0-9])\s+p(?:er ?cent|ct)\.?$", r"\\%"),
        (rf"^{_TEXT}(?:a|one) (?:pair|couple)\s*\}}?$", "2"),
        (rf"^{_TEXT}(?:twice|double)\s*\}}?\s*([0-9.]{{1,20}})$", r"2 \\cdot \1"),
        (rf"^{_TEXT}(?:thrice|triple)\s*\}}?\s*([0-9.]{{1,20}})$", r"3 \\cdot \1"),
        (rf"^{_TEXT}(?:a |one )?half of\s*\}}?\s*([0-9]{{1,20}})$", r"\\frac{\1}{2}"),
        (rf"^([0-9]{{1,20}})\s*{_TEXT}squared\s*\}}?$", r"\1^2"),
        (rf"^([0-9]{{1,20}})\s*{_TEXT}cubed\s*\}}?$", r"\1^3"),
        (rf"^([0-9]{{1,9}})\s*{_TEXT}factorial\s*\}}?$", r"\1!"),
        (rf"^([0-9]{{1,9}})\s*{_TEXT}tenths?\s*\}}?$", r"\\frac{\1}{10}"),
        (rf"^([0-9]{{1,9}})\s*{_TEXT}hundredths?\s*\}}?$", r"\\frac{\1}{100}"),
        (rf"^([0-9]{{1,9}})\s*{_TEXT}thousandths?\s*\}}?$", r"\\frac{\1}{1000}"),
        (rf"^(-?[0-9]{{0,9}}\.)([0-9])\s*{_TEXT}(?:repeating|recurring)\s*\}}?$", r"\1\\overline{\2}"),
    )
)
_IN_BOTH = re.compile(r"([0-9]{1,9}) \(([A-Za-z][A-Za-z -]{0,60})\)|([A-Za-z][A-Za-z -]{0,60}) \(([0-9]{1,9})\)")
_NO_NAMES = frozenset(
    re.findall("[a-z]+", "an at by for from in into is no not of on one or out over per plus than times to")
)
"""words of no name of what is counted"""


def in_digits(answer: str) -> str:
    """An answer that is a number in words, or begins with one, with that number in digits; another as it stands."""
    for pattern, digits in _WITH_DIGITS:
        answer = pattern.sub(digits, answer)
    if both := _IN_BOTH.fullmatch(answer):  # 5 (five)
        number, text = both[1] or both[4], both[2] or both[3]
        return number if in_digits(text) == number else answer
    match = _IN_WORDS.fullmatch(answer)
    if match is None:
        return answer
    places = [word.span() for word in re.finditer("[A-Za-z]+", match[1])]
    names = [match[1][slice(*place)].lower() for place in places]
    length = next((place for place, name in enumerate(names) if name not in _OF_NUMBERS), len(names))
    value = _value(names[:length])
    if value is None:
        return answer
    number = str(value) if value.denominator == 1 else rf"\frac{{{value.numerator}}}{{{value.denominator}}}"
    if " ".join(names[length:]) in ("percent", "per cent"):
        return rf"{number}\%"
    rest = match[1][places[length - 1][1] :]  # half-life is a word
    return answer if rest[:1] == "-" or (_NO_NAMES | _OF_NUMBERS).intersection(names[length:]) else number + rest


def _value(names: list[str]) -> Fraction | None:
    """The number that these words are; None for none, or one of two."""
    if names[:1] in (["minus"], ["negative"]):
        value = _value(names[1:])
        return None if value is None else -value
    if not names:
        return None
    if names == ["half"]:
        return Fraction(1, 2)
    names = [
        "one" if name == "a" and follower in {*MULTIPLIERS, *_PARTS, "dozen"} else name
        for name, follower in zip(names, [*names[1:], ""], strict=True)
    ]
    if names[:2] == ["half", "one"] and names[2:]:  # half a million
        value = _value(names[1:])
        return value and value / 2
    *before, last = names
    if last == "dozen" or (last in MULTIPLIERS and before and before[-1] in {*_PARTS, *_PLURALS}):
        value = _value(before)
        return value and value * (12 if last == "dozen" else 10 ** MULTIPLIERS[last])
    if "point" in before:
        place = names.index("point")
        whole, digits = _whole(names[:place]), [SMALL.get(name, 10) for name in names[place + 1 :]]
        return Fraction(f"{whole}.{''.join(map(str, digits))}") if whole is not None and max(digits) < 10 else None
    if last not in _PARTS and last not in _PLURALS:
        whole = _whole(names)
        return None if whole is None else Fraction(whole)
    denominator, whole = _PARTS.get(last) or _PLURALS[last], 0
    if "and" in before:
        place = len(before) - 1 - before[::-1].index("and")
        # Two hundred and five thousandths: 200.005, or .205.
        whole = None if before[place - 1] in MULTIPLIERS and last != "half" else _whole(before[:place])
        before = before[place + 1 :]
    numerator = _whole(before)
    if whole is None or not numerator or numerator > 99 or (numerator != 1) != (last in _PLURALS):
        return None
    return None if whole and numerator >= denominator else whole + Fraction(numerator, denominator)


def _whole(names: list[str]) -> int | None:
    """Two hundred and five as 205."""
    total, current, room = 0, 0, 0  # room: below what the next word of the part must be
    for place, name in enumerate(names):
        previous = names[place - 1] if place else ""
        if name in SMALL and (
            not place or previous in ("and", *MULTIPLIERS) or (previous in _TENS and 0 < SMALL[name] < 10)
        ):
            current += SMALL[name]
        elif name == "hundred" and 0 < SMALL.get(previous, 0) < 20:
            current *= 100
        elif name in MULTIPLIERS and name != "hundred" and current and (room == 0 or MULTIPLIERS[name] < room):
            room = MULTIPLIERS[name]
            total, current = total + current * 10**room, 0
        elif not (name == "and" and previous in MULTIPLIERS and place + 1 < len(names)):
            return None
    return total + current if names else None
