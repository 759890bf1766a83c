"""Finds the answer in a text, and compares plain numbers: string work only, in microseconds, safe on any text.

The rule: the content of the last \\boxed, \\fbox or \\framebox, with braces (`\\boxed{2}`) or without (`\\boxed 2`, as
in some solutions of MATH); else the text after the last `####` on its line; else, only where asked for, the last
number. The last one counts whatever is in it: a box that is cut off or empty gives no answer, and not the one before.
"""

from __future__ import annotations

import math
import re
from fractions import Fraction

from mafrt.envs.math.notation import interval, same_time

# A box and its brace, a box without braces, an escaped character (\\{ is no brace), or a brace.
_BOX = r"\\(?:(?:[AB]?boxed|fbox|ovalbox)(?![A-Za-z])"
_BOX += r"|fcolorbox(?:\s{0,9}\{[^{}]{0,40}\}){2}(?=\s*\{)|framebox(?![A-Za-z])(?:\s{0,9}\[[^][{}]{0,99}\]){0,2})"
_BRACE = re.compile(rf"(?P<box>{_BOX}(?P<brace>\s*\{{)?)|\\.|[{{}}]", re.DOTALL)
_DOLLARS = re.compile(r"(?<!\\)\$\$?")
_FORMULA_END = re.compile(r"\n|(?<!\\)\$|\\[)\]]|\\\\|\\end(?![A-Za-z])|$")
_SENTENCE_END = re.compile(rf"{_FORMULA_END.pattern}|[.,;:!?](?=\s|$)|\s+(?=[A-Za-z]{{2}})")
_PLAIN_SIGNS: dict[int, str] = {
    **dict.fromkeys(map(ord, "\u2010\u2011\u2012\u2013\u2212\ufe63\uff0d"), "-"),
    # Digits of other scripts (full width, Arabic, Persian, Devanagari), and full-width letters and signs.
    **{zero + digit: str(digit) for zero in (0xFF10, 0x660, 0x6F0, 0x966) for digit in range(10)},
    **{0xFEE0 + ord(sign): sign for sign in "+=<>()[],.:;/%ABCDEFGHIJabcdefghijxyzn"},
    ord("\u2044"): "/", ord("\u2019"): "'", ord("\u00a2"): " cents",
}  # fmt: skip
_LOWERED_SIGNS = str.maketrans("\u2080\u2081\u2082\u2083\u2084\u2085\u2086\u2087\u2088\u2089", "0123456789")
_LOWERED = re.compile("[\u2080-\u2089]+")
_THIN_SPACE = re.compile(r"(?<!\\)\\[,!;:]")
_SPACE = re.compile(r"(?<!\\)\\(?: |q?quad(?![A-Za-z]))")
_STYLE = re.compile(r"\\(?:display|text|script|scriptscript)style(?![A-Za-z])\s*")
_SIZE = re.compile(r"\\(?:left|right|[bB]igg?[lrm]?)(?![A-Za-z])")
_HASHES = re.compile(r"####[ \t]*([^\n]*)")
_LAST_NUMBER = re.compile(r"-?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?:/\d+)?")
_PLAIN = re.compile(r"([+-]?)([1-9][0-9]{0,2}(?:,[0-9]{3})+|[0-9]{1,40})?(\.[0-9]{0,40})?")
_WORDS = re.compile(r"\\(?:text|textbf|textit|mathrm|mathbf|mbox|textrm)\s*\{\s*\(?([A-Za-z][A-Za-z \-']*)\)?\s*\}")
_OPTION = re.compile(r"\(?([A-J])[).]?")
_CHOSEN = re.compile(r"\(?([A-J])[).:]\s*((?:(?<![A-Za-z])[A-Za-z]?[a-z]+|[^A-Za-z]|(?<=[A-Za-z])[A-Z])+)")
_ANNOUNCED = re.compile(r"(?:the )?(?:correct )?(?:option|choice|answer)(?: is)?\s*:?\s*(?=\(?[A-J]\b)", re.IGNORECASE)
# (B) 12, B. 12, \text{(B)} 12; not the product (B)x, the sum (B) + 3, or one of several.
_LABELLED = re.compile(
    r"(?:\(([A-J])\)|([A-J])[).:])(?:\s+|\\[ ,;]|~)+(?![-+*/^=<>]\s|[+*/^=<>]|\\(?:cdot|times|div|pm|le|ge)\b)(.+)"
)
_ANOTHER = re.compile(r"\(?(?<![A-Za-z])[A-J][).:](?=\s)|\([A-J]\)")
_ASKS_PERCENT = re.compile(
    r"\b(?:what|which|how many) (?:is the |was the )?(?:[a-z]+ ){0,3}?percent(?:age)?s?\b"
    r"|\bas an? (?:[a-z]+ )?percent(?:age)?\b|\bfind the (?:[a-z]+ ){0,3}?percent(?:age)?\b"
    r"|\b(?:nearest|closest) (?:[a-z]+ ){0,4}?percent\b|\bin percent\b",
    re.IGNORECASE,
)
_OPTIONS = re.compile(r"\(?[A-J]\)?(?:(?:[\s,;/&]|\band\b)*\(?[A-J]\)?){0,9}")
_BARE_WORDS = re.compile(r"\(?([A-Za-z][A-Za-z \-']*)\)?")

_NO_ANSWERS = re.compile(
    r"None|(?i:n/?a|null|nan|nil|unknown|not? ?(?:found|given|available)|missing|tbd|todo|proof|see (?:the )?solution)"
)
"""What stands in data where an answer is missing."""
_PUNCTUATION = " \t\n$.,;:!?'\"`-_*#/|\\~()[]{}\u2013\u2014\u2026"
_SENTENCE_WORDS = re.compile(r"\b(?:since|thus|hence|therefore|because|so|we|let|answer|equals)\b", re.IGNORECASE)
_VERBS = re.compile(r"\b(?:is|are|was|were|has|have|there)\b", re.IGNORECASE)
_TEXT = re.compile(r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mbox)\s*\{([^{}]*)\}")
_COMMANDS = re.compile(r"\\(?:text|mathrm|mbox)\s*\{[^{}]*\}|\\[A-Za-z]+")

MAX_ANSWER_CHARS = 600
"""A longer answer is not parsed and not right; the longest of MATH's 12,500 has under 200 characters."""
MOST_WORDS = 12
"""A reference of more words that nothing marks as the answer is a text about the answer."""
LONGEST_NUMBER = 120
"""Characters; Python refuses to read numbers of more than 4,300 digits, and no answer has them."""
TOLERANCE = Fraction(1, 10**6)
"""Decimals closer than this may round to the same number; such pairs are left to math-verify."""


def boxed(text: str) -> str | None:
    """The content of the last box; "" if it is cut off or empty, None if there is none. One pass, whatever the text."""
    if "box" not in text:
        return None  # a megabyte of braces would take half a second
    opened: list[int | None] = []  # where the content of each open brace starts, if it is a box's
    # The last box that is opened counts, so that an outer one, which closes later, does not replace it.
    start, end, has_braces = -1, -1, False
    for match in _BRACE.finditer(text):
        if match[0] == "}":
            begun = opened.pop() if opened else None
            if begun == start:
                end = match.start()
        elif match[0] == "{":
            opened.append(None)
        elif match["box"]:
            start, end, has_braces = match.end(), -1, bool(match["brace"])
            if has_braces:
                opened.append(start)
    if start < 0:
        return None
    if not has_braces:
        return _without_braces(text, start)
    return text[start:end].strip() if end >= 0 else ""


def _without_braces(text: str, start: int) -> str:
    """The content of a box without braces: to the end of its formula, or of what stands there in a sentence.

    TeX itself would box the first digit or letter only; solutions mean what stands there, as in `$\\boxed 12$`.
    """
    in_formula = len(_DOLLARS.findall(text, 0, start)) % 2 == 1
    while text[start : start + 1] in (" ", "\t"):
        start += 1
    end = (_FORMULA_END if in_formula else _SENTENCE_END).search(text, start)
    content = text[start : end.start() if end else len(text)]
    depth = 0
    for place, character in enumerate(content):
        depth += (character in _OPENING) - (character in _CLOSING)
        if depth < 0:  # a bracket that was opened before the box
            return content[:place].strip()
    return content.strip()


def hash_answer(text: str) -> str | None:
    """Text after the last `####` on its line (GSM8K), "" if nothing follows, None if there is none."""
    matches = _HASHES.findall(text)
    return matches[-1].strip() if matches else None


def extract_answer(text: str, *, last_number: bool = False) -> str | None:
    """The answer that `text` gives, or None if it gives none (a last box that is empty or cut off gives none)."""
    answer = boxed(text)
    if answer is None:
        answer = hash_answer(text)
    if answer is None and last_number:
        numbers = _LAST_NUMBER.findall(text)
        answer = numbers[-1] if numbers else None
    return answer or None


def tidy(answer: str) -> str:
    """Strip notation that never changes an answer: dollars, thin spaces, `\\displaystyle`, a full stop, emphasis."""
    answer = answer.strip().translate(_PLAIN_SIGNS).strip('*`"\u201c\u201d ')
    if answer.startswith("$") and not answer.endswith("\\$") and "$" not in answer.strip("$"):
        answer = answer.strip("$").strip()
    answer = _SPACE.sub(" ", _THIN_SPACE.sub("", _STYLE.sub("", answer))).replace("{,}", ",").strip()
    answer = _LOWERED.sub(lambda match: f"_{{{match[0].translate(_LOWERED_SIGNS)}}}", answer)
    return re.sub(r"(?<!\\)[.,;:]$|\\\\$", "", answer).rstrip()


def reference_fault(reference: str, *, marked: bool) -> str | None:
    """Why no answer can meet a reference, or None if one can.

    `marked`: it stood in a box or after `####`; a text that did not may be prose about the answer, which only the same
    prose would meet.
    """
    answer = _SIZE.sub("", _TEXT.sub(r"\1", tidy(reference))).strip()
    if _NO_ANSWERS.fullmatch(answer.strip("*_ ")):
        return f"it says {answer!r}, which stands for a missing answer"
    # Beside letters and digits: comparisons, infinity, the empty set, emoji of puzzles.
    if answer != "\\{\\}" and all(
        character.isspace() or character in "$.,;:!?'\"`-_*#/|\\~()[]{}\u2013\u2014\u2026" for character in answer
    ):
        return "it is empty"
    if len(answer) > MAX_ANSWER_CHARS:
        return f"it has {len(answer)} characters, and an answer at most {MAX_ANSWER_CHARS}"
    if marked:
        return None
    prose = _COMMANDS.sub(" ", tidy(reference))
    about_a_number = re.search(r"\d", prose) and (
        _SENTENCE_WORDS.search(prose) or (reference.rstrip().endswith(".") and _VERBS.search(prose))
    )
    if about_a_number or len(re.findall(r"[^\W\d_]{2,}", prose)) > MOST_WORDS:
        return "it is prose without a marked answer"
    return None


def plain_number(answer: str) -> Fraction | None:
    """The value of a plain integer or decimal such as `-3`, `1,234.50` or `.5`; None for anything else."""
    # A number of thousands of digits takes Python quadratic time, and is no answer to anything here.
    match = _PLAIN.fullmatch(answer) if len(answer) <= LONGEST_NUMBER else None
    if match is None or not answer.strip("+-."):
        return None
    whole = (match[2] or "0").replace(",", "")
    return Fraction(f"{match[1]}{whole}{match[3] or ''}" + ("0" if match[3] == "." else ""))


def words(answer: str) -> str | None:
    """The letters of an answer in words, such as `\\text{(B)}`, in lower case; None for anything else."""
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
    left, right = plain_number(given), plain_number(reference)
    if left is None or right is None:
        return _verdict_on_words(given, reference)
    if left == right:
        return True
    return None if abs(left - right) <= TOLERANCE else False


_ABSENT = re.compile(r"^(?:\\(?:text|mathrm)\s*\{\s*)?(?:DNE|D\.N\.E\.?)\s*\}?$")


def _verdict_on_words(given: str, reference: str) -> bool | None:
    """`quick_verdict` of answers that are no plain numbers: options, words, and times of day."""
    plain, wanted = _TEXT.sub(r"\1", given), _TEXT.sub(r"\1", reference)
    if (option := _OPTION.fullmatch(wanted)) is not None:
        # The letter with the text of its option, and no other letter.
        plain = _ANNOUNCED.sub("", plain)
        chosen = _CHOSEN.fullmatch(plain) or (_OPTION.fullmatch(plain) if plain != given else None)
        if chosen is not None:
            return chosen[1] == option[1]
    if _OPTIONS.fullmatch(plain) and _OPTIONS.fullmatch(wanted) and (len(wanted) == 1) == (len(plain) == 1):
        letters = [re.findall("[A-J]", text.replace("and", "")) for text in (plain, wanted)]
        if "".join(letters[0]) != plain or "".join(letters[1]) != wanted:  # AB alone is a segment as well
            return sorted(letters[0]) == sorted(letters[1])
    given, reference = (_ABSENT.sub("does not exist", text) for text in (given, reference))
    if (word := words(reference)) is not None:
        # math-verify reads words as products of letters, so that anagrams agree; here only equal words do.
        bare = _BARE_WORDS.fullmatch(given)
        word_given = words(given) or (bare[1].lower() if bare else None)
        if word_given is not None:
            words_given, others = (
                sorted(re.split(r"\s+and\s+", text.removesuffix("s") if text.startswith("no ") else text))
                for text in (word_given, word)
            )
            return words_given == others
    return same_time(given, reference)


_APPROXIMATELY = re.compile(
    r"^(?:\\?[A-Za-z]+(?:_\{?\w+\}?)?\s*)?(?:\\approx(?![A-Za-z])|\\simeq(?![A-Za-z])|\u2248)\s*"
)


def asks_for_percent(problem: str) -> bool:
    """Whether a problem asks for a number of percent."""
    return bool(_ASKS_PERCENT.search(problem))


def without_labels(given: str, reference: str) -> tuple[str, str]:
    """Both without the letter of an option that stands before a value, as in `(B) 12`, where the other gives none."""
    labelled, wanted = _label(given), _label(reference)
    if labelled and wanted:
        return (labelled[1], wanted[1]) if labelled[0] == wanted[0] else (labelled[0], wanted[0])
    if wanted:
        option = _OPTION.fullmatch(_TEXT.sub(r"\1", given))
        return (option[1], wanted[0]) if option else (given, wanted[1])
    if labelled and not _OPTION.fullmatch(_TEXT.sub(r"\1", reference)):
        return labelled[1], reference
    return given, reference


def _label(answer: str) -> tuple[str, str] | None:
    match = _LABELLED.fullmatch(_ANNOUNCED.sub("", _TEXT.sub(r"\1 ", answer).strip()))
    if match is None or _ANOTHER.search(match[3]):
        return None
    return match[1] or match[2], match[3].strip()


_RELATIONS = re.compile(
    r"\\(?:equiv|approx|sim|simeq|cong|neq?|to|rightarrow|Rightarrow|implies|iff)(?![A-Za-z])|[≡≈≠→⇒]|:="
)
_EQUALS = re.compile(r"(?<![<>!:])=+(?![<>])")
_NAME = re.compile(
    r"(?:\\(?:angle|triangle) ?)?\\?[A-Za-z]+(?:_\{?\w+\}?)?(?:\([A-Za-z0-9, ]*\))?"
    r"|\([A-Za-z](?:, *[A-Za-z])+\)|\\(?:text|mathrm)\s*\{[A-Za-z ]+\}"
)
_CONGRUENT = re.compile(r"^[A-Za-z]\s*(?:\\equiv(?![A-Za-z])|\u2261)\s*")
_CHAIN = re.compile(r"(<|>|\\[lg](?:eq?(?:slant)?|t)(?![A-Za-z]))")
_TURNED = {">": "<", "\\gt": "<", "\\ge": "\\le", "\\geq": "\\le", "\\geqslant": "\\le"}
_TURNED_BRACKETS = re.compile(r"([\[\]])([^\[\]();]+[,;][^\[\]();]+)([\[\]])")
_IN = re.compile(r"^[A-Za-z] *\\in(?![a-z])\s*")
_PERCENT = re.compile(r"\s*(?:\\?%|\\text\s*\{\s*(?:percent|%)\s*\}|(?<![A-Za-z])percent)\s*")
_SIGNS = ("\\pm", "\\mp", "±")
"""Stand for two answers in one."""
_OPENING, _CLOSING = "([{", ")]}"


_HEXADECIMAL = re.compile(r"(?<![A-Za-z0-9_\\^.])[0-9a-f]+(?=\)?_\{?\(?1[1-6])")
_PREFIXED = re.compile(r"0(?P<prefix>[bBoOxX])(?P<digits>[0-9A-Fa-f]+)")
_PREFIXES = {"b": 2, "o": 8, "x": 16}
_BASE_NAMES = ("two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve")
_BASE_WORDS = f"{'|'.join(_BASE_NAMES)}|sixteen"
_BASE = rf"1[0-6]|[2-9]|{_BASE_WORDS}"
# 1011_2, (1011)_2, 1A_{16}, 1011_{two}, 1011_{(2)}, 1011_two, 1011 (base 2), 1011 in base 2, without any \text{}.
_BASED = re.compile(
    r"(?<![A-Za-z0-9_\\^.])(?P<number>(?P<open>[({])?(?P<digits>[0-9A-F][0-9A-F,]*(?:\.[0-9A-F]+)?)(?(open)[)}]))\s*"
    rf"(?:_\s*(?:(?:1[0-6]|[2-9])(?![0-9])|\{{[\s(]*(?:base[ ~-]*)?(?:{_BASE})[\s)]*\}}|(?:{_BASE_WORDS}))"
    rf"|\(?(?:in )?base[ ~-]*(?:{_BASE})\b\)?)"
)


def same_bases(given: str, reference: str) -> tuple[str, str] | None:
    """Both answers with numbers such as `1011_2` as plain ones; None if they are in different bases.

    math-verify drops the bases. A number without one is of the reference's base, and a reference without is decimal.
    """
    if not any(mark in text for mark in ("_", "base") for text in (given, reference)):
        return given, reference
    reference = _HEXADECIMAL.sub(lambda digits: digits[0].upper(), reference)
    plain_reference, wanted = _without_bases(reference)
    if wanted and (prefixed := _PREFIXED.fullmatch(given)):
        given = f"{prefixed['digits'].upper()}_{{{_PREFIXES[prefixed['prefix'].lower()]}}}"
    if any(base > 10 for base in wanted):
        given = re.sub(r"\b[0-9a-f]+(?=\)?_)", lambda digits: digits[0].upper(), given)
    plain_given, bases = _without_bases(given)
    if bases and bases != (wanted or [10] * len(bases)):
        return None
    return plain_given, plain_reference


def _without_bases(answer: str) -> tuple[str, list[int]]:
    bases = []

    def plain(match: re.Match[str]) -> str:
        name = re.search(rf"({_BASE})[\s)}}]*$", match[0])[1]  # type: ignore[index]  # the pattern ends with one
        base = _BASE_NAMES.index(name) + 2 if name in _BASE_NAMES else 16 if name == "sixteen" else int(name)
        # C_5 is a name, and 5C_2 are combinations.
        if any(int(letter, 16) >= base for letter in match["digits"] if letter.isalpha()):
            return match[0]
        bases.append(base)
        return match["number"]

    text = _BASED.sub(plain, _TEXT.sub(r"\1", answer))
    return (text, sorted(bases)) if bases else (answer, [])


_REMAINDER = re.compile(r"([0-9]{1,20})(?:\\?b?mod|%)([0-9]{1,20})")
# C(5, 2), nCr(5, 2), _5C_2, 5C2, 5 choose 2, C_5^2; without braces and blanks.
_WAYS = tuple(
    re.compile(pattern)
    for pattern in (
        r"n?(?P<of>[CP])r?\((?P<n>[0-9]{1,3}),(?P<k>[0-9]{1,3})\)",
        r"(?:[_^]?(?P<n>[0-9]{1,3}))(?P<of>[CP])_?(?P<k>[0-9]{1,3})",
        r"(?P<n>[0-9]{1,3})(?P<of>c)hoose(?P<k>[0-9]{1,3})",
        r"(?P<of>[CP])_(?P<n>[0-9]{1,3})\^(?P<k>[0-9]{1,3})",
        r"(?P<of>[CP])\^(?P<k>[0-9]{1,3})_(?P<n>[0-9]{1,3})",
    )
)
_OF_Y = re.compile(r"y\s*=")
_DASHED = re.compile(r"([0-9]{1,9})-([0-9]{1,9})/([0-9]{1,9})")
_MIXED = re.compile(
    r"(-?[0-9]{1,9})(?:\s|\\[ ,;]|~)*(?:\\text\s*\{\s*and\s*\}|and)\s*"
    r"(?:([0-9]{1,9})/([0-9]{1,9})|\\[dt]?frac\s*\{?([0-9]{1,9}?)\}?\s*\{?([0-9]{1,9})\}?)(?![0-9/.])"
)
_MANY = re.compile(r"^[(\[].*[)\]]$|matrix|\\pm|±|:")
_SEVERAL = re.compile(r",|;|\\\{|\\ne|<|>|(?<![A-Za-z])(?:and|or)(?![A-Za-z])")


def comparable(given: str, reference: str) -> list[tuple[str, str]] | None:
    """Pairs of an answer and a reference that must all be equal; None if it cannot be the same answer.

    math-verify takes the last side of `3=4`, drops the sign of `3\\%`, and compares sets, tuples and lists by
    their items. Here every side of an equation must be right but for a name (`x = 4`), a percentage is a hundredth
    unless the reference is one, and sets, tuples and lists must be of one kind and size.
    """
    if "mod" in given and "mod" in reference:
        given, reference = _CONGRUENT.sub("", given), _CONGRUENT.sub("", reference)
    if not _RELATIONS.search(reference):
        given = _APPROXIMATELY.sub("", given)  # x is about 7: the value that is given
        if _RELATIONS.search(given):
            return None
    elif (excluded := _excluded(given)) is not None and (others := _excluded(reference)) is not None:
        if excluded[0] != others[0]:
            return None
        given, reference = excluded[1], others[1]
    given, reference = _as_matrix(given, reference), _as_matrix(reference, given)
    if _OF_Y.match(given) or _OF_Y.match(reference):  # y = 2x for f(x) = 2x
        given, reference = (re.sub(r"^f\(x\)(?=\s*=)", "y", text) for text in (given, reference))
    given, reference = _ascending(given), _ascending(reference)
    if given.replace(" ", "") == reference.replace(" ", ""):
        return []
    if (pairs := _same_ratio(given, reference)) is not None:
        return pairs or None
    if "\\langle" in given + reference:
        given, reference = (
            re.sub(r"\\langle(?![a-z])", "(", re.sub(r"\\rangle(?![a-z])", ")", text)) for text in (given, reference)
        )
    given, reference = _usual_brackets(given), _usual_brackets(reference)
    # An interval and the inequality that says the same.
    if _is_interval(reference):
        given = interval(given) or given
    elif _is_interval(given):
        reference = interval(reference) or reference
    given, reference = _as_set(given, reference), _as_set(reference, given)
    if len(_sides(reference)) == 1:
        given = _values(given, _collection(reference)[0] == "tuple")
    parts = [given]
    sides = _sides(given)
    if len(sides) > 1 and len(_sides(reference)) == 1:
        parts = sides
        if _NAME.fullmatch(parts[0]):
            parts = parts[1:]
        elif len(parts) == 2 and _NAME.fullmatch(parts[1]):
            parts = parts[:1]
        if not parts or not all(parts):
            return None
    # math-verify drops the sign, and 3% would pass for 3.
    if _PERCENT.search(given) and not _PERCENT.search(reference):
        parts = [f"\\frac{{{_PERCENT.sub('', part)}}}{{100}}" if _PERCENT.search(part) else part for part in parts]
    kind, size = _collection(reference)
    for part in parts:
        its_kind, count = _collection(part)
        signs = any(sign in text for sign in _SIGNS for text in (part, reference))
        # math-verify takes a set for a tuple and ignores missing elements, so both are told apart here.
        if {its_kind, kind} == {"set", "tuple"} or (count != size and not signs):
            return None
    return [(part, reference) for part in parts]


def counted(answer: str, other: str) -> str:
    """C(5, 2), 5P2, 7 mod 3 and their like as numbers beside a number; else they may be points or names."""
    if plain_number(other) is None or len(answer) > 40:
        return answer
    plain = re.sub(r"[{}\s]", "", _TEXT.sub(r"\1", answer))
    if (rest := _REMAINDER.fullmatch(plain)) is not None and int(rest[2]):
        return str(int(rest[1]) % int(rest[2]))
    match = next(filter(None, (ways.fullmatch(plain) for ways in _WAYS)), None)
    return str((math.perm if match["of"] == "P" else math.comb)(int(match["n"]), int(match["k"]))) if match else answer


_EUROPEAN = re.compile(
    r"(\\?\$|€|£)?([+-]?)([0-9]{1,3}(?:[. ][0-9]{3})+|[0-9]{1,20})(?:,([0-9]{1,20}))?([^0-9,;]{0,40})"
)
_GROUPS = re.compile(r"[1-9][0-9]{0,2}(?:\.[0-9]{3}){2,9}")
_INDIAN = re.compile(r"[1-9][0-9]?(?:,[0-9]{2}){1,9},[0-9]{3}")
_SHORT = re.compile(r"(\\?\$)?([0-9]{1,9}(?:\.[0-9]{1,9})?) ?(k|K|M|bn|B)")
_SHORT_OF = {"k": 10**3, "K": 10**3, "M": 10**6, "bn": 10**9, "B": 10**9}


def in_english(given: str, reference: str) -> str:
    """`3,14`, `1.234,56`, `12,34,567` and `5k` as English writes them, where the reference is one value.

    `1,234` stays what English reads, and 5k is five thousand beside a number of thousands only: 300K may be kelvins.
    """
    if _SEVERAL.search(re.sub(r"(?<=[0-9]),(?=[0-9]{3})", "", reference)) or _MANY.search(reference):
        return given
    if _INDIAN.fullmatch(given) or _GROUPS.fullmatch(given):
        return re.sub("[,.]", "", given)
    if (short := _SHORT.fullmatch(given)) is not None:
        value, size = plain_number(reference.removeprefix("\\").removeprefix("$")), _SHORT_OF[short[3]]
        return given if value is None or value < size else str(Fraction(short[2]) * size)
    match = _EUROPEAN.fullmatch(given)
    if match is None or not match[4] or (len(match[4]) == 3 and len(match[3]) < 4 and match[3][0] != "0"):
        return given
    return f"{match[1] or ''}{match[2]}{re.sub('[. ]', '', match[3])}.{match[4]}{match[5]}"


def as_mixed_number(given: str, reference: str) -> str:
    """`2 and 1/2` as a mixed number where the reference is one value: else they may be two answers."""
    dashed = _DASHED.fullmatch(given)
    # 2-1/2 is a mixed number beside 2 1/2, which it writes with a dash, and a difference beside all others.
    if dashed and "-" not in reference and re.findall("[0-9]+", reference) == [*dashed.groups()]:
        return f"{dashed[1]}\\frac{{{dashed[2]}}}{{{dashed[3]}}}"
    match = _MIXED.match(given)
    if match is None or _SEVERAL.search(reference) or _SEVERAL.search(given[match.end() :]):
        return given
    whole, part, of = match[1], match[2] or match[4], match[3] or match[5]
    return f"{whole}\\frac{{{part}}}{{{of}}}{given[match.end() :]}" if 0 < int(part) < int(of) else given


def _excluded(answer: str) -> tuple[str, str] | None:
    """The name and the values of `x \\ne 2, 3`, `2 \\ne x`, or `x \\ne 2, x \\ne 3`; None for anything else."""
    names: set[str] = set()
    values: list[str] = []
    for part in _split(re.sub(r"\\ne(?![A-Za-z])", "\u2260", answer)):
        left, *right = part.split("\u2260")
        if len(right) > 1 or not (right or values):
            return None
        if right and not _NAME.fullmatch(left):
            left, right = right[0], [left]
        if right and not _NAME.fullmatch(left):
            return None
        names.update([left] if right else [])
        values.append(right[0] if right else left)
    return (names.pop(), ", ".join(values)) if len(names) == 1 else None


def _ascending(answer: str) -> str:
    """A chain such as `a > b \\ge c` the other way round."""
    terms = _CHAIN.split(answer)
    if len(terms) < 5 or any("<" in sign or "\\l" in sign for sign in terms[1::2]):
        return answer
    return " ".join(_TURNED.get(term, term.strip()) for term in reversed(terms))


def _same_ratio(given: str, reference: str) -> list[tuple[str, str]] | None:
    """Pairs that are equal if two ratios of three or more are; none if these differ in number; None for others."""
    parts, wanted = given.split(":"), reference.split(":")
    if max(len(parts), len(wanted)) < 3 or not all(re.search(r"\w", part) for part in (*parts, *wanted)):
        return None
    if len(parts) != len(wanted):
        return []
    places = [(i, j) for i in range(len(parts)) for j in range(i)]
    return [(f"({parts[i]}) \\cdot ({wanted[j]})", f"({parts[j]}) \\cdot ({wanted[i]})") for i, j in places]


_COLUMN = re.compile(r"\\begin\{([pb]matrix)\}([^&]*)\\end\{\1\}")
_ROWS = re.compile(r"\[\s*(\[[^][]*\](?:\s*,\s*\[[^][]*\])*)\s*\]")


def _as_matrix(answer: str, other: str) -> str:
    """`[[1, 2], [3, 4]]` as a matrix beside one, and a column as `(1, 2)` beside a tuple."""
    if (rows := _ROWS.fullmatch(answer)) and "matrix}" in other:
        lines = r" \\ ".join(row.replace(",", " & ") for row in re.findall(r"\[([^][]*)\]", rows[1]))
        return rf"\begin{{pmatrix}} {lines} \end{{pmatrix}}"
    if (column := _COLUMN.fullmatch(answer)) and "\\\\" in answer and _collection(other)[0] == "tuple":
        return f"({', '.join(part.strip() for part in column[2].split(chr(92) * 2))})"
    return answer


def _usual_brackets(answer: str) -> str:
    """`]a, b]` as `(a, b]`."""
    match = _TURNED_BRACKETS.fullmatch(answer)
    if match is None:
        return answer
    return f"{'(' if match[1] == ']' else '['}{match[2]}{')' if match[3] == '[' else ']'}"


def _sides(answer: str) -> list[str]:
    """What stands between the equality signs, without those in braces, as in `\\sum_{k=1}^4 k`."""
    sides, depth, start = [], 0, 0
    for match in re.finditer(rf"\\.|[{{}}]|{_EQUALS.pattern}", answer):
        depth += (match[0] == "{") - (match[0] == "}")
        if depth <= 0 and match[0][0] == "=":
            sides.append(answer[start : match.start()].strip())
            start = match.end()
    return [*sides, answer[start:].strip()]


def _is_interval(answer: str) -> bool:
    """Whether an answer is in brackets, or is a union of such."""
    text = _IN.sub("", _SIZE.sub("", answer)).strip()
    return text[:1] in ("(", "[") and text[-1:] in (")", "]")


def _as_set(answer: str, other: str) -> str:
    """`{1, 2}` as `\\{1, 2\\}` where the other answer is a set: a backslash was forgotten."""
    return f"\\{answer[:-1]}\\}}" if _collection(other)[0] == "set" and re.fullmatch(r"\{[^{}]*\}", answer) else answer


def _values(answer: str, as_tuple: bool) -> str:
    """The values of named ones: of `x=1, x=2` the list, of `x=1, y=2` the tuple if one is asked for."""
    parts = [_sides(part) for part in _split(answer)]
    if len(parts) < 2 or any(len(part) != 2 or not _NAME.fullmatch(part[0]) for part in parts):
        return answer
    names = {name for name, _ in parts}
    if not as_tuple and len({name.partition("_")[0] for name in names}) == 1:  # x_1 = 1, x_2 = 2
        names = {""}
    if len(names) == 1 and not as_tuple:
        return ", ".join(value for _, value in parts)
    if len(names) == len(parts) and as_tuple:
        return (
            "(" + ", ".join(value for _, value in sorted(parts)) + ")"
        )  # (x, y), (m, n): in the order of the alphabet
    return answer


def _collection(answer: str) -> tuple[str, int]:
    """`set`, `tuple`, `list` or `one`, and how many things it holds; those of a set that are equal count once."""
    text = _SIZE.sub("", answer).strip()
    # A name in front, as in x = 1, 2, is no element.
    if "=" in text and _NAME.match(text):
        text = text[text.rindex("=") + 1 :].strip()
    text = _IN.sub("", text)
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
