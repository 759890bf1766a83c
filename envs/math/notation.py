"""Rewrites the notations in which people and models write answers as the LaTeX that math-verify reads.

Signs (`√5`, `60°`, `½`), calculators (`1.6e-19`, `2*pi`, `3 1/2`), Markdown (`**5**`), repeating decimals, lists with
"and" or "or", units and multipliers in words. String work only, and every rule keeps the value.
"""

from __future__ import annotations

import re
import unicodedata
from fractions import Fraction

from mafrt.envs.math.number_words import MULTIPLIERS, SMALL

_SIGNS = str.maketrans({
    "π": r"\pi ", "∞": r"\infty ", "·": r"\cdot ", "⋅": r"\cdot ", "×": r"\times ", "÷": r"\div ", "°": r"^\circ ",
    "±": r"\pm ", "≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ", "∪": r"\cup ", "∩": r"\cap ", "∅": r"\emptyset ",
    "∈": r"\in ", "ℝ": r"\mathbb{R}", "θ": r"\theta ", "α": r"\alpha ", "β": r"\beta ", "λ": r"\lambda ",
    **{sign: "\\frac{" + unicodedata.normalize("NFKC", sign).replace("⁄", "}{") + "}" for sign in "½⅓⅔¼¾⅕⅖⅗⅘⅙⅚⅛⅜⅝⅞⅐⅑⅒"},
    "²": "^2", "³": "^3", "∶": ":", "⟨": r"\langle ", "⟩": r"\rangle ",
    "~": " ", "\u00a0": " ", "\u202f": " ", "\u2009": " ",
})  # fmt: skip
_RAISED = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿ", "0123456789+-n")
_RAISED_RUN = re.compile("[⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿ]+")
# Words after a number that are part of its value, and so no unit.
_NO_UNITS = r"hal(?:f|ves)|thirds?|quarters?|fourths?|fifths?|sixths?|percent|dozen|squared|cubed|plus|minus|times|over"
_NUMBER = r"-?[0-9][0-9,]*(?:\.[0-9]+)?"
_REWRITES: list[tuple[re.Pattern[str], str]] = [
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        # The condition of a set.
        (
            r"^\\?\{\s*([A-Za-z])(?:\s*\\in\s*\\mathbb\s*\{?R\}?)?\s*(?:\||:|\\mid(?![a-z]))"
            r"((?=[^|:{}]*(?:[<>]|\\[lg]eq?(?![a-z])))[^|:{}]*?)\\?\}$",
            r"\2",
        ),
        # Looks: colours, bold, underlines, spaces, ticks.
        (r"\\[hv]?phantom\s*\{[^{}]*\}", ""),
        (r"\\textcolor\s*\{[^{}]*\}|\\color\s*\{[^{}]*\}|\\[hv]space\*?\s*\{[^{}]*\}|\\checkmark|✓|✔", ""),
        (r"\\(?:underline|mathbf|boldsymbol|bm|mathit)\s*\{([^{}]*)\}", r"\1"),
        (r"\\(?:mathrm|text|operatorname)\s*\{\s*([ei])\s*\}", r"{\1}"),
        (r"(?<![\\A-Za-z])(?:\\(?:mathrm|text|operatorname)\s*\{\s*)?(gcd|lcm|max|min)\s*\}?(?=\s*\()", r"\\\1 "),
        (r"^\{([^{}]*)\}$", r"\1"),
        # The answer after words that announce it.
        (r"^\\text\s*\{[A-Za-z ,]*(?:is|are|:)\s*:?\s*\}(?=[^A-Za-z]*[0-9])", ""),
        (r"^(?:\\text\s*\{\s*)?(?:about|approximately|approx\.?|roughly|exactly)(?:\s*\}\s*|\s+)(?=[-\\0-9.])", ""),
        (r"^(?i:(?:the )?(?:final |correct )?answer(?: is)?)\s*:?\s*(?=[-\\$0-9.(])|^=\s*", ""),
        (r"\\not\s*=|!=|\\neq(?![A-Za-z])", r"\\ne "),
        # Signs that take what follows, and names of functions and constants without a backslash.
        (
            r"(?<![\\A-Za-z])(?:\\(?:text|mathrm|operatorname)\s*\{)?(floor|ceil)(?:ing)?\s*\}?\s*\(([^()]*)\)",
            r"\\l\1 \2 \\r\1 ",
        ),
        (r"(?<![\\A-Za-z])abs\s*\(([^()]*)\)", r"|\1|"),
        (r"(?:∛|(?<![\\A-Za-z])cbrt)\s*(?:\(([^()]*)\)|([0-9]+))", r"\\sqrt[3]{\1\2}"),
        (r"^(?:the )?(?:square )?root (?:of )?([0-9]+)$", r"\\sqrt{\1}"),
        (r"^(?:the )?cube root of ([0-9]+)$", r"\\sqrt[3]{\1}"),
        (r"(?<![\\A-Za-z])log(2|10)\s*(?=\()", r"\\log_{\1}"),
        (r"\*\*\s*(?:\((-?[0-9]+)\)|(-?[0-9]+|[A-Za-z]))", r"^{\1\2}"),
        (r"\\(?:nicefrac|sfrac)(?![A-Za-z])", r"\\frac"),
        (r"\\binom\s*([0-9])\s*([0-9])", r"\\binom{\1}{\2}"),
        (r"^(-?[0-9]+) over ([0-9]+)$", r"\\frac{\1}{\2}"),
        (r"\+\s*/\s*-|^\+\s*-|\bplus or minus\b", r"\\pm "),
        (r"(?<=[0-9})i])\s*(?:\\(?:text|mathrm)\s*\{\s*)?rad(?:ians?)?\s*\}?$", ""),
        (r"√\s*\(([^()]*)\)", r"\\sqrt{\1}"),
        (r"√\s*([0-9]+|[A-Za-z])", r"\\sqrt{\1}"),
        (r"(?<![\\A-Za-z])(pi|sqrt|sin|cos|tan|log|ln|exp|infty)(?![A-Za-z])", r"\\\1 "),
        (r"\\sqrt\s*\(([^()]*)\)", r"\\sqrt{\1}"),
        (r"\\varnothing(?![A-Za-z])|\\\{\s*\\\}", r"\\emptyset "),
        (r"^(?:\\(?:text|mathrm)\s*\{\s*)?no (?:real )?solutions?\s*\}?$", r"\\emptyset "),
        (
            r"^(?:\\(?:mathbb\s*\{?\s*R\s*\}?|R|Reals)|(?:\\text\s*\{\s*)?all real(?:s| numbers)\s*\}?)$",
            r"(-\\infty, \\infty)",
        ),
        (r"\+\s*-", "-"),
        # Numbers: 1.6e-19, 3 1/2; money.
        (rf"^({_NUMBER})[eE]\+?(-?[0-9]{{1,4}})$", r"\1 \\times 10^{\2}"),
        (r"(?<![0-9/])(-?[0-9]+) ([0-9]+)/([0-9]+)(?![0-9/])", r"\1\\frac{\2}{\3}"),
        (r"^(-?)\s*(?:\\?\$|€|£|¥|₹|USD|EUR|Rs\.?)\s*(?=[0-9.-])", r"\1"),
        (rf"^({_NUMBER})\s*[元円€£¥₹]$", r"\1"),
        (r"(?<=[0-9]) ?x ?(?=10 ?\^)", r"\\times "),
        (rf"^({_NUMBER})\s*(?:\\(?:text|mathrm)\s*\{{\s*)?dozen(?![a-z])[A-Za-z ]*\}}?$", r"\1 \\cdot 12"),
        (rf"^({_NUMBER}) to ({_NUMBER})$", r"\1:\2"),
        (r"\{?\s*\b([0-9]+|[nm])\s*\\choose\s*([0-9]+|[kmr])\b\s*\}?", r"\\binom{\1}{\2}"),
        (r"(?<![A-Za-z0-9}])(?:\{\})?\^\s*\{?([0-9]+|n)\}?\s*C_\s*\{?([0-9]+|[kr])\}?", r"\\binom{\1}{\2}"),
        # Units in words, and lengths with a power: the number is the answer.
        (rf"^({_NUMBER})\s*\^?\\circ\s*$", r"\1"),
        (rf"^({_NUMBER})\s+in\.?$", r"\1"),
        (rf"^({_NUMBER})\s+(?:mm|cm|dm|km|in|ft|yd|mi)\s*\^\s*\{{?[23]\}}?$", r"\1"),
        (
            rf"^({_NUMBER})((?:\s+(?!(?:{_NO_UNITS}|and|or|not|but)\b)(?:[A-Za-z]{{3,}}|in(?= total| all))){{1,5}})$",
            r"\1",
        ),
    )
]
_DEGREES = re.compile(r"([0-9.]+)\s*\^\s*(?:\\circ(?![A-Za-z])|\{\s*\\circ\s*\})")
_OF_ANGLES = re.compile(r"\\(?:sin|cos|tan|cot|sec|csc)(?![A-Za-z])")
_THOUSANDS = re.compile(r"(?<![0-9.])[0-9]{1,3}(?:(?: [0-9]{3})+|(?:_[0-9]{3})+)(?![0-9 _])")
# 0.1(6), 0.3 with a stroke above, and dots on the first and last repeated digit.
_IN_BRACKETS = re.compile(r"(?<![0-9])([0-9]*\.[0-9]*)\(([0-9]{1,20})\)(?![0-9.^!])")
_STRUCK = re.compile("(?:[0-9]\u0305){1,20}")
_DOTTED = re.compile(r"\\dot\s*\{?([0-9])\}?([0-9]{0,18})\\dot\s*\{?([0-9])\}?")
_REPEATING = re.compile(r"(?<![0-9])([0-9]*)\.([0-9]*)\\(?:overline|bar|dot)\s*\{?\s*([0-9]{1,20})\s*\}?")
# 0.1666..., 0.1212...
_GOES_ON = re.compile(
    r"(?<![0-9])([0-9]*)\.([0-9]{0,40}?)(?:([0-9])\3{2,}|([0-9]{2,9}?)\4+)(?:\.{2,3}|\\[lc]?dots(?![A-Za-z])|…)"
)
_TIMES = re.compile(
    rf"({_NUMBER})\s*(?:\\(?:text|mathrm)\s*\{{\s*)?\s*({'|'.join(MULTIPLIERS)})s?(?![A-Za-z])((?:[A-Za-z ]*\}})?)"
)
_CHOICE_TEXT = re.compile(r"\\(?:text|mathrm|textbf|mbox)\s*\{([^{}]*(?:[0-9]|\b(?:or|and|not|to)\b)[^{}]*)\}")
_CONJUNCTION = re.compile(r"\s*,?\s*(?<![A-Za-z\\])(?:and|or)(?![A-Za-z])\s*")
_INEQUALITY = re.compile(r"[<>]|\\(?:le|ge|lt|gt|leq|geq|leqslant|geqslant)(?![A-Za-z])")

_LESS = r"<|\\le(?:q|qslant)?(?![A-Za-z])|\\lt(?![A-Za-z])"
_MORE = r">|\\ge(?:q|qslant)?(?![A-Za-z])|\\gt(?![A-Za-z])"
_VARIABLE = r"\\?[A-Za-z]+(?:_\{?\w+\}?)?"
_ONE_SIDED = re.compile(rf"\s*({_VARIABLE})\s*({_LESS}|{_MORE})\s*([^<>=]+?)\s*")
_TURNED = re.compile(rf"\s*([^<>=]+?)\s*({_LESS}|{_MORE})\s*({_VARIABLE})\s*")
_TWO_SIDED = re.compile(rf"\s*([^<>=]+?)\s*({_LESS})\s*({_VARIABLE})\s*({_LESS})\s*([^<>=]+?)\s*")


def latex(answer: str) -> str:
    """An answer in the notation that math-verify reads."""
    # Text that holds an answer is an answer: `5\\text{ or }6`, `5\\text{ (or 6)}`.
    answer = _RAISED_RUN.sub(lambda match: f"^{{{match[0].translate(_RAISED)}}}", _CHOICE_TEXT.sub(r" \1 ", answer))
    answer = _ORDINAL.sub(_cardinal, answer)
    answer = answer.translate(_SIGNS)
    answer = " ".join(answer.split())  # long runs of blanks would cost the patterns below seconds
    answer = _STRUCK.sub(lambda match: f"\\overline{{{match[0].replace(chr(0x305), '')}}}", answer)
    answer = _DOTTED.sub(r"\\overline{\1\2\3}", _IN_BRACKETS.sub(r"\1\\overline{\2}", answer))
    answer = _ARC.sub(_degrees, answer)
    answer = _GOES_ON.sub(r"\1.\2\\overline{\3\4}", answer)
    answer = _REPEATING.sub(_fraction, answer)
    answer = _THOUSANDS.sub(lambda match: re.sub("[ _]", "", match[0]), answer)
    answer = _TIMES.sub(lambda match: f"{match[1].replace(',', '')} \\cdot 10^{{{MULTIPLIERS[match[2]]}}}", answer)
    if _OF_ANGLES.search(answer):  # math-verify drops the sign, and takes radians
        answer = _DEGREES.sub(r"{\\frac{\1\\pi}{180}}", answer)
    for pattern, replacement in _REWRITES:
        answer = pattern.sub(replacement, answer)
    if not _INEQUALITY.search(answer):
        answer = _CONJUNCTION.sub(", ", answer)
    return " ".join(answer.split())


_ARC = re.compile(r"([0-9]{1,3})\s*\^\s*\{?\s*\\circ\s*\}?\s*([0-5]?[0-9])\s*['′](?:\s*([0-5]?[0-9])\s*(?:''|″))?")


def _degrees(match: re.Match[str]) -> str:
    """45 degrees and 30 minutes as 45.5 degrees."""
    size = int(match[1]) + Fraction(int(match[2]), 60) + Fraction(int(match[3] or 0), 3600)
    return f"\\frac{{{size.numerator}}}{{{size.denominator}}}^\\circ"


_ORDINAL = re.compile(
    r"^([0-9]{1,20})[\s^{]*(?:\\(?:text|mathrm|textrm|mbox|textsuperscript)\s*\{\s*)?(st|nd|rd|th)[\s}]*$"
)


def _cardinal(match: re.Match[str]) -> str:
    """2^{nd} as 2; 2^{th} is a power."""
    tens, ones = match[1][-2:-1], match[1][-1]
    suffix = "th" if tens == "1" else {"1": "st", "2": "nd", "3": "rd"}.get(ones, "th")
    return match[1] if match[2] == suffix else match[0]


_SIZES = {
    "length": ("mm .001 millimeter .001 cm .01 centimeter .01 dm .1 m 1 meter 1 metre 1 km 1000 kilometer 1000 "
               "in .0254 inch .0254 inche .0254 ft .3048 foot .3048 feet .3048 yd .9144 yard .9144 "
               "mi 1609.344 mile 1609.344"),
    "mass": "mg .001 g 1 gram 1 kg 1000 kilogram 1000 lb 453.59237 pound 453.59237 oz 28.349523125 ounce 28.349523125",
    "time": "s 1 sec 1 second 1 min 60 minute 60 h 3600 hr 3600 hour 3600 day 86400 week 604800",
    "volume": "ml .001 milliliter .001 l 1 liter 1 litre 1",
    "money": "cent 1 dollar 100",
    "force": "N 1 newton 1 kN 1000",
    "energy": "J 1 joule 1 kJ 1000",
    "power": "W 1 watt 1 kW 1000",
    "speed": "m/s 1 mph .44704 ft/s .3048",
}  # fmt: skip
_UNITS = {
    name: (kind, Fraction(size))
    for kind, listed in _SIZES.items()
    for name, size in zip(listed.split()[::2], listed.split()[1::2], strict=True)
} | {name: ("speed", Fraction(5, 18)) for name in ("km/h", "kmh", "kph")}
_SPEEDS = tuple(
    (re.compile(rf"(?i:\b{pattern}\b)"), name)
    for pattern, name in (
        ("miles? per hour", "mph"),
        ("sq(?= )", "square"),
        ("degrees? celsius", r"^\\circ C"),
        ("degrees? fahrenheit", r"^\\circ F"),
        ("kilomet(?:er|re)s? per hour", "km/h"),
        ("met(?:er|re)s? per second", "m/s"),
        ("(?:feet|foot) per second", "ft/s"),
    )
)
_PLAIN = re.compile(_NUMBER)
_MONEY = re.compile(r"\\?\$\s*(?P<number>[0-9][0-9,]*(?:\.[0-9]+)?)")
_AMOUNT = re.compile(
    rf"(?P<number>{_NUMBER})(?:[\s~]|\\[ ,;])*(?:\\(?:text|mathrm|mbox|textrm)\s*\{{[\s~]*)?(?P<name>[A-Za-z]{{1,12}})"
    r"\.?[\s~]*(?:and[\s~]*)?\}?(?:[\s~,]|\\[ ,;]|and)*"
)
_OPPOSITES = tuple(map(frozenset, map(str.split, (
    "north south east west northeast northwest southeast southwest", "left right", "up down upward downward",
    "above below", "gain loss profit", "increase decrease", "clockwise counterclockwise anticlockwise", "bc ad bce ce",
    "more less fewer", "inside outside", "before after", "ahead behind", "ago later", "faster slower", "taller shorter",
))))  # fmt: skip
"""words behind a number of which one is not another"""
_ALTERING = frozenset(re.findall(
    "[a-z]+",
    "factorial lakh lakhs crore crores myriad tenths hundredths thousandths millionths billionths permille basis",
))  # fmt: skip
_ALTERING_AT_THE_END = (SMALL.keys() - {"one"}) | frozenset(re.findall(
    "[a-z]+",
    "below doubled tripled quadrupled halved inverse reciprocal root squared cubed negative repeating recurring wrong "
    "incorrect least most",
))  # fmt: skip
"""words behind a number that make it another, or none"""
_WORDS = re.compile(r"(?<!\\)\b[a-z]+")
_COUNTED = re.compile(
    rf"{_NUMBER}(?:[\s~]|\\[ ,;])*(?:\\(?:text|mathrm|mbox|textrm)\s*\{{)?"
    r"\s*([A-Za-z]+(?:[\s-]+[A-Za-z]+){0,5})\.?\s*\}?"
)
# What may be called otherwise, what is no thing, and parts of units.
_ANY_THING = frozenset(re.findall(
    "[a-z]+",
    "way arrangement possibility choice option outcome combination permutation method case number integer digit value "
    "solution root answer pair set thing item object piece unit person people total time point place year month per "
    "each more less fewer left remaining altogether about degree radian percent square cubic squared cubed cents "
    "half third quarter fourth dozen hundred thousand million billion trillion plus minus times over and not but mod "
    "base function element term factor divisor multiple subset triple sequence different distinct possible real "
    "positive new whole full line region side shape figure polygon path route step move round group team",
))  # fmt: skip
_SINGULAR = {"men": "man", "geese": "goose", "mice": "mouse", "teeth": "tooth"}
"""other plurals begin as their words do"""
_IN_TEXT = re.compile(r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mbox|operatorname)\s*\{([^{}]*)\}")
_SYMBOL = re.compile(rf"{_IN_TEXT.pattern.replace('([', '(?:[')}|\\([A-Za-z]+)|([A-Za-z]+)")
_GREEK = ("gamma", "delta", "theta", "lambda", "xi", "pi", "sigma", "upsilon", "phi", "psi", "omega")
_POINTS = re.compile(r"\$?(?:(\\[a-z]+)\s*)?\{?([A-Z]{2,8})\}?\$?")
_DEGREE_SIGN = re.compile(
    r"([0-9]+(?:\.[0-9]+)?)\s*(?:°|\^\s*\{?\s*\\circ(?![A-Za-z])\s*\}?|(?:\\(?:text|mathrm)\s*\{)?\s*degrees?(?![a-z])\s*\}?)"
)
_SCALE = re.compile(r"(?:°|\\circ)[\s}~]*(?:\\(?:text|mathrm)\s*\{\s*)?([CFK])(?![A-Za-z])")
_CURRENCY = re.compile(r"\\\$|(?<![\w$])\$(?=\s*[0-9])|[€£¥₹]")
_CLOCK = re.compile(
    r"(?P<hour>[0-9]{1,2})(?:[:.](?P<minute>[0-5][0-9]))?(?:[\s~]|\\[ ,;])*(?:\\(?:text|mathrm)\s*\{\s*)?"
    r"(?:(?P<half>[apAP])\.?\s*[mM]\.?)?\s*\}?"
)
_HOURS = {"noon": "12:00 pm", "12 noon": "12:00 pm", "midnight": "12:00 am", "12 midnight": "12:00 am"}
_HOURS |= {f"{hour} o'clock": f"{hour}:00" for hour in range(1, 13)}
_WITH_UNIT = re.compile(
    r"(?P<number>.+?)(?:[\s~]|\\[ ,;])*(?P<text>\\(?:text|mathrm|mbox|textrm)\s*\{[\s~]*|(?<=[0-9}\s]))"
    r"(?P<name>(?:square |cubic )?[A-Za-z]{1,12}(?:/[a-z]{1,2})?)\.?\s*(?(text)\}?)(?:\s*\^\s*\{?(?P<power>[23])\}?)?"
)


def same_units(given: str, reference: str) -> tuple[str, str] | None:
    """Both answers in one unit, if both have one that is known; None if these measure different things.

    math-verify drops units, so that 5 kg would pass for 5 g.
    """
    given, reference = (re.sub(r"(?i)\bsq\. ", "square ", text) for text in (given, reference))
    for words, short in _SPEEDS:
        given, reference = words.sub(short, given), words.sub(short, reference)
    if _contradict(given, reference):
        return None
    given, reference = _in_radians(given, reference), _in_radians(reference, given)
    measured, wanted = _measure(given), _measure(reference)
    if (measured is None) != (wanted is None):  # beside 90 min, 1.5 h is no product
        measured, wanted = measured or _measure(given, letters=True), wanted or _measure(reference, letters=True)
    if wanted is None and measured and measured[1] == ("money", 1) and _amounts(given) and _PLAIN.fullmatch(reference):
        reference, wanted = f"\\${reference}", _measure(f"\\${reference}")  # 5 dollars and 25 cents for 5.25
    if measured is None or wanted is None:
        return given, reference
    (number, kind, size), (plain, other, unit) = measured, wanted
    if kind != other:
        return None
    ratio = size / unit
    return (number if ratio == 1 else rf"\frac{{{ratio.numerator}}}{{{ratio.denominator}}} \cdot ({number})"), plain


def _measure(answer: str, letters: bool = False) -> tuple[str, tuple[str, int], Fraction] | None:
    """The number of an answer, what its unit measures with the power, and the unit's size; None without a known one.

    letters: whether a letter alone is a unit, as in 5 m, which may be a product.
    """
    if money := _MONEY.fullmatch(answer):
        return money["number"].replace(",", ""), ("money", 1), Fraction(100)
    if amounts := _amounts(answer):
        return amounts
    match = _WITH_UNIT.fullmatch(answer)
    if match is None or (len(match["name"]) == 1 and not match["text"] and not letters):
        return None
    *before, name = match["name"].split()
    unit = _UNITS.get(name) or _UNITS.get(name.lower().removesuffix("s"))
    if unit is None:
        return None
    power = int(match["power"] or {"square": 2, "cubic": 3}.get(before[0] if before else "", 1))
    return match["number"], (unit[0], power), unit[1] ** power


def _amounts(answer: str) -> tuple[str, tuple[str, int], Fraction] | None:
    """The sum of `3 hours 30 minutes` as a number of the smallest; None for anything else."""
    total, place, kinds = Fraction(0), 0, set[str]()
    parts = list(_AMOUNT.finditer(answer))
    for part in parts:
        name = "min" if part["name"] == "m" and kinds == {"time"} else part["name"]  # 1h 30m
        unit = _UNITS.get(name) or _UNITS.get(name.lower().removesuffix("s"))
        if unit is None or part.start() != place:
            return None
        total += Fraction(part["number"].replace(",", "")) * unit[1]
        kinds.add(unit[0])
        place = part.end()
    if len(parts) < 2 or len(kinds) != 1 or place != len(answer):
        return None
    return f"\\frac{{{total.numerator}}}{{{total.denominator}}}", (kinds.pop(), 1), Fraction(1)


def _in_radians(answer: str, other: str) -> str:
    """Degrees in radians where the other answer has pi or their name, and no degrees."""
    if (
        not re.search(r"\\pi(?![A-Za-z])|π|\brad(?:ians?)?\b", other)
        or _DEGREE_SIGN.search(other)
        or _OF_ANGLES.search(answer)
    ):
        return answer
    return _DEGREE_SIGN.sub(r"\\frac{\1\\pi}{180}", answer)


def _contradict(given: str, reference: str) -> bool:
    """Whether two answers name different directions, scales, currencies, things, or letters.

    math-verify drops words, and reads capitals as small letters, whose order does not matter in a product.
    """
    if _other_things(given, reference) or _other_case(given, reference) or _other_points(given, reference):
        return True
    for marks in (_SCALE, _CURRENCY):
        marked, wanted = ({mark.lstrip("\\") for mark in marks.findall(text)} for text in (given, reference))
        if marked and wanted and marked != wanted:
            return True
    marked, wanted = (set(_WORDS.findall(text.lower())) for text in (given, reference))
    if _altering(given) - wanted or _altering(reference) - marked:
        return True
    return any(marked & group and wanted & group and marked & group != wanted & group for group in _OPPOSITES)


def _altering(answer: str) -> set[str]:
    """Those words behind a number that make it another: math-verify drops them all, as it does units."""
    words = _WORDS.findall(answer.lower()) if re.search("[0-9]", answer) else []
    at_the_end = words[-1:] if re.search(r"[A-Za-z][\s.}]*$", answer) else []
    squares = {"squared", "cubed"} if len(words) > 1 else set()  # of units
    return {*words} & _ALTERING | {*at_the_end} & (_ALTERING_AT_THE_END - squares)


def _other_things(given: str, reference: str) -> bool:
    """Whether both are a number of things, of which each has a word that the other lacks: apples and oranges.

    Units are compared elsewhere, and `ways` may be `arrangements`.
    """
    names = []
    for text in (given, reference):
        match = _COUNTED.fullmatch(text)
        if match is None:
            return False
        words = [_SINGULAR.get(word, word) for word in re.findall("[a-z]+", match[1].lower())]
        if any(_forms(word) & _ANY_THING or len(word) < 3 or _forms(word) & _UNITS.keys() for word in words):
            return False
        names.append({word[:3] for word in words})
    return bool(names[0] - names[1] and names[1] - names[0])


def _forms(word: str) -> set[str]:
    return {word, word.removesuffix("s"), word.removesuffix("es"), word.removesuffix("ies") + "y"}


def _other_case(given: str, reference: str) -> bool:
    """Whether a letter is a capital in one answer only: E is not e. An option may be small: b for B."""
    if re.fullmatch(r"\(?[A-J]\)?\.?", _IN_TEXT.sub(r"\1", reference)):
        return False
    letters, wanted = _letters(given), _letters(reference)
    return any(sign not in wanted and sign[0].swapcase() + sign[1:] in wanted - letters for sign in letters)


def _letters(answer: str) -> set[str]:
    """Variables and Greek letters, without words, units, constants of integration, and the imaginary unit."""
    found: set[str] = set()
    for command, run in _SYMBOL.findall(answer):
        if command.lower() in _GREEK:
            found.add(command)
        elif run.isupper() or (run.islower() and len(run) < 3 and run not in _UNITS):
            found.update(run if run.lower() not in ("no", *_UNITS) else "")
    return found - set("cCiIkKlL")


def _other_points(given: str, reference: str) -> bool:
    """Whether both name points in another order where that matters: angles ABC and ACB, but not segments AB and BA."""
    points, wanted = _POINTS.fullmatch(given), _POINTS.fullmatch(reference)
    if points is None or wanted is None or len(wanted[2]) < 3 or wanted[1] == "\\triangle" or points[2] == wanted[2]:
        return False
    return not (wanted[1] and points[2] == wanted[2][::-1])


def same_time(given: str, reference: str) -> bool | None:
    """Whether two times of day of which one says am or pm are the same; None if they are no such."""
    clocks = [
        _CLOCK.fullmatch(_HOURS.get(text.lower().strip(" }").removeprefix("\\text{").strip(), text))
        for text in (given, reference)
    ]
    if None in clocks or not any(clock and clock["half"] for clock in clocks):
        return None
    minutes, sure = [], True
    for clock in clocks:
        assert clock is not None  # as was asked for
        if not clock["half"] and not clock["minute"]:
            return None  # a number, or one of hours
        hour = int(clock["hour"])
        sure = sure and bool(clock["half"] or hour > 12)
        after = 12 if clock["half"] in ("p", "P") else 0
        minutes.append((hour % 12 + after if clock["half"] else hour) * 60 + int(clock["minute"] or 0))
    return (minutes[0] - minutes[1]) % (1440 if sure else 720) == 0


def _fraction(match: re.Match[str]) -> str:
    """A repeating decimal as a fraction: 0.1666... = (16 - 1) / 90."""
    whole, fixed, repeated = match[1] or "0", match[2], match[3]
    if len(whole) + len(fixed) > 40:
        return match[0]
    over = (10 ** len(repeated) - 1) * 10 ** len(fixed)
    return f"\\frac{{{int(whole + fixed + repeated) - int(whole + fixed)}}}{{{over}}}"


def interval(answer: str) -> str | None:
    """A solved inequality as an interval, such as `x < 3` as `(-\\infty, 3)`; None for anything else.

    Only where a variable stands alone: an inequality that has still to be solved is no answer.
    """
    parts = re.split(r"(?<![A-Za-z\\])or(?![A-Za-z])|\\lor(?![A-Za-z])|\\vee(?![A-Za-z])", answer)
    intervals = [_interval(part) for part in parts]
    return None if None in intervals else " \\cup ".join(filter(None, intervals))


def _interval(part: str) -> str | None:
    if match := _TWO_SIDED.fullmatch(part):
        low, left, name, right, high = match.groups()
        bounds, ends = (low, high), ("(" if _strict(left) else "[", ")" if _strict(right) else "]")
    elif match := _ONE_SIDED.fullmatch(part) or _TURNED.fullmatch(part):
        name, relation, bound = match.groups()
        less = bool(re.fullmatch(_LESS, relation))
        if match.re is _TURNED:
            name, bound, less = bound, name, not less
        close = not _strict(relation)
        bounds = ("-\\infty", bound) if less else (bound, "\\infty")
        ends = ("(", "]" if close else ")") if less else ("[" if close else "(", ")")
    else:
        return None
    # `x < 2x + 1` is not solved.
    if any(re.search(rf"(?<![A-Za-z\\]){re.escape(name)}(?![A-Za-z])", bound) for bound in bounds):
        return None
    return f"{ends[0]}{bounds[0]}, {bounds[1]}{ends[1]}"


def _strict(relation: str) -> bool:
    return relation in ("<", ">", "\\lt", "\\gt")
