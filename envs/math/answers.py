"""Finds the answer in a text, and compares plain numbers: string work only, in microseconds, safe on any text.

The rule: the content of the last \\boxed{...} whose braces balance; else the text after the last `####` on its line;
else, only where asked for, the last number.
"""

from __future__ import annotations

import re
from fractions import Fraction

# A box, an escaped character (\\{ is no brace), or a brace.
_BRACE = re.compile(r"\\boxed\s*\{|\\.|[{}]", re.DOTALL)
_THIN_SPACE = re.compile(r"(?<!\\)\\[,!;:]")
_SPACE = re.compile(r"(?<!\\)\\(?: |q?quad(?![A-Za-z]))")
_STYLE = re.compile(r"\\(?:display|text|script|scriptscript)style(?![A-Za-z])\s*")
_SIZE = re.compile(r"\\(?:left|right|[bB]igg?[lrm]?)(?![A-Za-z])")
_HASHES = re.compile(r"####[ \t]*([^\n]+)")
_LAST_NUMBER = re.compile(r"-?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?:/\d+)?")
_PLAIN = re.compile(r"([+-]?)([0-9]{1,3}(?:,[0-9]{3})+|[0-9]{1,40})?(\.[0-9]{0,40})?")
_WORDS = re.compile(r"\\(?:text|textbf|textit|mathrm|mathbf|mbox|textrm)\s*\{\s*\(?([A-Za-z][A-Za-z \-']*)\)?\s*\}")
_BARE_WORDS = re.compile(r"\(?([A-Za-z][A-Za-z \-']*)\)?")

LONGEST_NUMBER = 120
"""Characters; Python refuses to read numbers of more than 4,300 digits, and no answer has them."""
TOLERANCE = Fraction(1, 10**6)
"""Decimals closer than this may round to the same number; such pairs are left to math-verify."""


def boxed(text: str) -> str | None:
    """The content of the last \\boxed{...} with balanced braces, or None. One pass, whatever the text."""
    if "\\boxed" not in text:
        return None  # a megabyte of braces would take half a second
    opened: list[int | None] = []  # where the content of each open brace starts, if it is a box's
    start, end = -1, -1
    for match in _BRACE.finditer(text):
        if match[0] == "}":
            begun = opened.pop() if opened else None
            # The last box that is opened counts, so that an outer one, which closes later, does not replace it.
            if begun is not None and begun > start:
                start, end = begun, match.start()
        elif match[0].endswith("{") and match[0][1:2] != "{":
            opened.append(match.end() if len(match[0]) > 1 else None)
    return text[start:end].strip() if start >= 0 else None


def hash_answer(text: str) -> str | None:
    """Text after the last `####` on its line (GSM8K), or None."""
    matches = _HASHES.findall(text)
    return matches[-1].strip() if matches else None


def extract_answer(text: str, *, last_number: bool = False) -> str | None:
    """The answer that `text` gives, or None if it gives none (an empty box gives none)."""
    answer = boxed(text)
    if answer is None:
        answer = hash_answer(text)
    if answer is None and last_number:
        numbers = _LAST_NUMBER.findall(text)
        answer = numbers[-1] if numbers else None
    return answer or None


def tidy(answer: str) -> str:
    """Strip notation that never changes an answer: outer dollars, `\\,`-like spaces, `\\displaystyle`, a full stop."""
    answer = answer.strip().replace("\u2212", "-")
    if answer.startswith("$") and not answer.endswith("\\$") and "$" not in answer.strip("$"):
        answer = answer.strip("$").strip()
    answer = _SPACE.sub(" ", _THIN_SPACE.sub("", _STYLE.sub("", answer))).replace("{,}", ",").strip()
    return answer[:-1].rstrip() if answer.endswith(".") else answer


def plain_number(answer: str) -> Fraction | None:
    """The value of a plain integer or decimal such as `-3`, `1,234.50` or `.5`; None for anything else."""
    # A number of thousands of digits takes Python quadratic time, and is no answer to anything here.
    match = _PLAIN.fullmatch(answer) if len(answer) <= LONGEST_NUMBER else None
    if match is None or not answer.strip("+-."):
        return None
    whole = (match[2] or "0").replace(",", "")
    return Fraction(f"{match[1]}{whole}{match[3] or ''}" + ("0" if match[3] == "." else ""))


def words(answer: str) -> str | None:
    """The letters of an answer in words, such as `\\text{(B)}`, in lower case; None for anything else.

    Without \\text only four letters in a row count as a word: `abc` may be a product.
    """
    match = _WORDS.fullmatch(answer)
    if match is None:
        match = _BARE_WORDS.fullmatch(answer)
        # Short bare letters are variables or units, which math-verify compares better.
        if match is None or not re.search("[A-Za-z]{4}", match[1]):
            return None
    return re.sub("[^a-z]+", " ", match[1].lower()).strip()


def quick_verdict(given: str, reference: str) -> bool | None:
    """Whether two tidied answers agree, or None where string work cannot tell."""
    if given == reference:
        return True
    if (word := words(reference)) is not None:
        # math-verify reads words as products of letters, so that anagrams agree; here only equal words do.
        bare = _BARE_WORDS.fullmatch(given)
        said = words(given) or (bare[1].lower() if bare else None)
        if said is not None:
            return said == word
    left, right = plain_number(given), plain_number(reference)
    if left is None or right is None:
        return None
    if left == right:
        return True
    return None if abs(left - right) <= TOLERANCE else False


_RELATIONS = re.compile(
    r"\\(?:equiv|approx|sim|simeq|cong|neq?|to|rightarrow|Rightarrow|implies|iff)(?![A-Za-z])|[≡≈≠→⇒]|:="
)
_EQUALS = re.compile(r"(?<![<>!:])=+(?![<>])")
_NAME = re.compile(r"\\?[A-Za-z]+(?:_\{?\w+\}?)?(?:\([A-Za-z0-9, ]*\))?")
_PERCENT = re.compile(r"\s*(?:\\?%|\\text\s*\{\s*(?:percent|%)\s*\}|(?<![A-Za-z])percent)\s*")
_SIGNS = ("\\pm", "\\mp", "±")
"""Stand for two answers in one."""
_OPENING, _CLOSING = "([{", ")]}"


def comparable(given: str, reference: str) -> list[str] | None:
    """Parts of `given` that must all equal `reference`; None if it cannot be the same answer.

    math-verify takes the last side of `3=4`, drops the sign of `3\\%`, and compares sets, tuples and lists by
    their items. Here every side of an equation must be right but for a name (`x = 4`), a percentage is a hundredth
    unless the reference is one, and sets, tuples and lists must be of one kind and size.
    """
    if _RELATIONS.search(given) and not _RELATIONS.search(reference):
        return None
    parts = [given]
    if _EQUALS.search(given) and not _EQUALS.search(reference):
        parts = [part.strip() for part in _EQUALS.split(given)]
        if _NAME.fullmatch(parts[0]):
            parts = parts[1:]
        if not parts or not all(parts):
            return None
    # math-verify drops the sign, and 3% would pass for 3.
    if _PERCENT.search(given) and not _PERCENT.search(reference):
        parts = [f"\\frac{{{_PERCENT.sub('', part)}}}{{100}}" if _PERCENT.search(part) else part for part in parts]
    kind, size = _collection(reference)
    for part in parts:
        own, count = _collection(part)
        signs = any(sign in text for sign in _SIGNS for text in (part, reference))
        # math-verify takes a set for a tuple and ignores missing elements, so both are told apart here.
        if {own, kind} == {"set", "tuple"} or (count != size and not signs):
            return None
    return parts


def _collection(answer: str) -> tuple[str, int]:
    """`set`, `tuple`, `list` or `one`, and how many things it holds; those of a set that are equal count once."""
    text = _SIZE.sub("", answer).strip()
    # A name in front, as in x = 1, 2, is no element.
    if "=" in text and _NAME.match(text):
        text = text[text.rindex("=") + 1 :].strip()
    if re.match(r"[A-Za-z] *\\in(?![a-z])", text):
        text = re.sub(r"^[A-Za-z] *\\in\s*", "", text)
    kind = "list"
    if text.startswith("\\{") and text.endswith("\\}"):
        kind, text = "set", text[2:-2]
    elif text[:1] in ("(", "[") and text[-1:] in (")", "]") and _whole(text):
        kind, text = "tuple", text[1:-1]
    if kind == "list" and plain_number(text) is not None:
        return "one", 1
    parts = _split(text)
    if len(parts) == 1 and kind != "set":
        return "one", 1
    return kind, len(set(parts)) if kind == "set" else len(parts)


def _whole(text: str) -> bool:
    """Whether the bracket that opens a text is closed by its last character only."""
    depth = 0
    for place, character in enumerate(text):
        depth += (character in _OPENING) - (character in _CLOSING)
        if depth == 0:
            return place == len(text) - 1
    return False


def _split(text: str) -> list[str]:
    """The parts between commas that stand in no bracket."""
    parts, depth, start = [], 0, 0
    for place, character in enumerate(text):
        depth += (character in _OPENING) - (character in _CLOSING)
        if character in ",;" and depth <= 0:
            parts.append(text[start:place])
            start = place + 1
    return ["".join(part.split()) for part in (*parts, text[start:])]
