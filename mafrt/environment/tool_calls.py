"""Reading an agent's answer: thoughts removed, tool calls found, and a tool's output shortened.

Model families write calls in their own ways; `mafrt.environment.call_forms` has them all. Beside those, a fenced block
of Python is a call, and so is JSON with a name and arguments that stands in a fence or in the text:

    ```python                     <tool_call>
    print(3 + 4)                  {"name": "python", "arguments": {"code": "print(3 + 4)"}}
    ```                           </tool_call>

A text is read once, from left to right: the content of a call or a block of code belongs to it, so that a thought or a
tag in a program's text is neither. String work only: nothing that is read here is run. Text that looks like a call and
cannot be read is a `BadCall`, whose sentence goes back to the agent in place of the tool's answer.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from mafrt.core.types import Message
from mafrt.environment.bare_calls import (
    BAD,
    BadCall,
    Call,
    Schemas,
    ToolCall,
    bare_json,
    bare_list,
    is_program,
    with_types,
    without_id,
    without_marks,
)
from mafrt.environment.call_forms import OPENING, read_form
from mafrt.environment.thought_forms import APRIEL, BY_OPENING, FORMS, HARMONY, MESSAGES, TAGS, THINK, THOUGHT

__all__ = ["OWN_MARKUP", "PYTHON", "THINK", "THOUGHT", "BadCall", "ToolCall", "code_of", "find_call", "find_calls",
           "find_code", "leading_thought", "shorten", "split_calls", "tool_message", "visible",
           "with_types"]  # fmt: skip

OWN_MARKUP = frozenset(("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>",
                        "<tool_calls>", "</tool_calls>")).union(*(form.tokens for form in TAGS))  # fmt: skip
"""Markup that an agent's own earlier turns keep when a chat template shows them again."""
PYTHON = "python"
"""The tool that fenced blocks call."""

_LANGUAGES = ("python", "python3", "py", "")
_CALL_LANGUAGES = ("json", "json5", "jsonc", "tool_call", "tool_calls", "tool_code", "xml", "text", "plaintext", "")
"""Languages of blocks that may hold a call."""
_CODE_TOOLS = ("python", "python3", "code", "code_interpreter", "execute_python", "run_python", "ipython")
_CODE_ARGUMENTS = ("code", "source", "program", "input")
# Possessive: nothing is tried twice, so that a long line cannot take time that grows with its square.
_OPENS = "|".join(re.escape(form.opening) for form in FORMS if form not in (APRIEL, HARMONY))
_CLOSES = "|".join(re.escape(form.closing) for form in FORMS if not form.message)
_ANY_CLOSING = re.compile("|".join((_CLOSES, *(re.escape(form.closing) for form in MESSAGES))))
_MAY_THINK = re.compile(rf"{_OPENS}|{_CLOSES}|<\||>>>")
_THOUGHT_ENDS = re.compile(rf"\A(?:{_OPENS})|(?:{_CLOSES})\Z")
_FENCE = r"^[ \t]*+(?P<fence>```++|~~~++)[ \t]*+(?P<language>[\w+-]*+)[^\n`]*+$"
_SPANS = {
    r"<!--": "-->",
    r"<!\[CDATA\[": "]]>",
    r"<(code|pre|samp|kbd|tt|xmp|q|blockquote|cite|example|td|th|del|s)(?:\s[^<>\n]*)?>": "</{}>",
    r"\\begin\{((?:V|v)erbatim\*?|lstlisting|minted|alltt|quote|quotation|displayquote)\}": r"\end{{{}}}",
    r"\[(code|quote)(?:=[^\[\]\n]*)?\]": "[/{}]",
    r"^[ \t]*#\+begin_(example|quote|src|verse)\b": "#+end_{}",
}
"""what begins and ends a quotation, in HTML, LaTeX, forums and Org"""
_SPAN_ENDS = tuple((re.compile(opening, re.IGNORECASE | re.MULTILINE), closing) for opening, closing in _SPANS.items())
_SPAN = "(?i:" + "|".join(re.sub(r"\((?!\?)", "(?:", opening) for opening in _SPANS) + ")"
_QUOTE_LINE = re.compile(r"[ \t]*(?:(?:[-*+]|\d{1,9}[.)])[ \t]+)?>(?!>>)")
_BARE_TABLE = re.compile(r"^[ \t]*:?-+:?(?:[ \t]*\|[ \t]*:?-+:?)+[ \t]*\n(?:[^\n]*\|[^\n]*\n)*\Z", re.MULTILINE)
"""the head of a table without bars at the ends of its lines, and lines of it"""
_INLINE = (
    r"(?<!`)(?P<ticks>``?)(?!`)[^`\n]+(?P=ticks)(?!`)|(?<!~)~~(?!~)[^~\n]+~~(?!~)"
    r"|\\verb\*?(?P<verb>[^\w\s*])[^\n]{1,500}?(?P=verb)"
)
# Each where it may stand; the first alternative that fits wins.
_MARK = re.compile(
    rf"{_FENCE}|(?P<inline>{_INLINE})|(?P<span>{_SPAN})|(?P<think>{_OPENS})|(?P<thought>{_CLOSES})|(?P<form>{OPENING})"
    r"|(?P<json>\{\s*['\"]|\[\s*\{\s*['\"])",
    re.MULTILINE,
)
_CLOSING_FENCE = re.compile(rf"^[ \t]*(```+|~~~+)[ \t]*(?:$|(?={_CLOSES}))", re.MULTILINE)
_NO_WORD = re.compile(r"[\s,;]*")
_QUOTES = "'\"\u201c\u201d\u2018\u2019`"
_PAIRS = ('""', "''", "\u201c\u201d", "\u2018\u2019", "\u201e\u201c", "\u201e\u201d", "\u201a\u2018", "\u00ab\u00bb",
          "\u00bb\u00ab", "\u2039\u203a", "\u203a\u2039", "\u300c\u300d", "\u300e\u300f", "`'")  # fmt: skip
_MARKS_BEFORE = re.compile(r"(?:</?[\w:.|-]{1,40}>\w{0,20})*\Z")
_MARKS_AFTER = re.compile(r"(?:</?[\w:.|-]{1,40}>(?:\w{1,20}(?=<))?)*")
"""marks of a call that are no part of what was read"""
_AFTER_WORD = (" ", "\t", "\n", ".", ",", ";", ":", "!", "?", ")", *_QUOTES)
_HARMONY = re.compile(
    r"(?:<\|start\|>assistant)?<\|channel\|>\s*(?P<channel>analysis|commentary|final)\s*<\|message\|>"
    r"|<\|(?:end|return)\|>|<\|start\|>assistant"
)
_HEADER = re.compile(
    r"<\|(?:open|close)\|>(?:response|message)\b[^<\n]*<\|sep\|>|<\|(?:START|END)_(?:RESPONSE|TEXT)\|>"
    r"|\[END FINAL RESPONSE\]|<\|begin\|>assistant|<\|(?:content|end|calls|eom|eot)\|>|>>>all\n"
    r"|(?:<\|start\|>assistant\s?)?(?<!\w)to=[\w.\-]+<\|message\|>"
)
"""Marks of the parts of a message, of Kimi K3, Cohere, Apriel, Solar Open, Muse Glimmer and functionary."""
_BARE_ANALYSIS = re.compile(
    r"(?:assistant)?analysis(?!\s?to=).*?assistant(?:final|(?=commentary|analysis|\s?to=))"
    r"|think(?=\S).*?think(?:response(?=\S)|(?=(?:tools)?call\s+tool=))"
    r"|all\n(?=.*?>>>[\w.\-/]+\n)",
    re.DOTALL,
)
"""Thoughts of gpt-oss and Kimi K3 at the beginning of a text whose special tokens were dropped, and the word behind
which functionary's words stand, where its prompt has the mark before it."""
_MOST_CROSSED = 9
"""Marks within a quotation that are looked at, lest one of them goes on behind it."""
_LINE = 500
"""Characters of a line before a mark that are looked at."""
_MOST_TRIES, _BAD_TRIES = 1000, 10
"""Marks of a text behind which a call is looked for in vain; more are no accident. One that is begun counts as many."""


@dataclass(frozen=True)
class _Part:
    """A piece of a text: words, a thought, or a block with the calls that it makes."""

    start: int
    end: int
    thought: bool = False
    calls: tuple[Call, ...] = ()
    open: str = ""
    """why a block does not end, if it does not"""
    quoted: bool = False
    """whether it is spoken of, so that nothing in it is a call"""


def visible(text: str, *, opened: bool = False) -> str:
    """`text` without its thoughts; `opened`: the prompt ended inside one, where the text goes on.

    A thought that does not end takes everything after it along: half a thought is no answer. Tags in calls, in code
    and in quotes are words, and so is an opening mark amid a line that nothing ends.
    """
    if not opened and not _MAY_THINK.search(text) and not _BARE_ANALYSIS.match(text):
        return text
    parts = list(_parts(text, opened))
    if not opened and not any(part.thought for part in parts):
        return text
    return "".join(text[part.start : part.end] for part in parts if not part.thought).strip()


def leading_thought(text: str) -> tuple[str, str]:
    """The thought with which a text begins, without its tags, and the rest; the thought is empty if there is none."""
    text = text.lstrip()
    first = next(_parts(text, False), None)
    if first is None or not first.thought:
        return "", text
    return _THOUGHT_ENDS.sub("", text[: first.end]).strip(), text[first.end :].lstrip()


def find_call(text: str, tools: Schemas = {}) -> Call | None:  # noqa: B006 (read only)
    """The last tool call of `text`, None if it makes none."""
    calls = find_calls(text, tools=tools)
    return calls[-1] if calls else None


def find_calls(text: str, fences: bool = True, tools: Schemas = {}) -> list[Call]:  # noqa: B006 (read only)
    """All tool calls of a text, in order; those in its thoughts are none.

    `fences`: whether blocks of Python are calls. `tools`: the schemas of those that there are; a call whose marks
    an engine dropped in decoding is read by them, or reported. A call that is not closed replaces all of them:
    nothing is run.
    """
    return split_calls(text, fences, tools)[1]


def split_calls(text: str, fences: bool = True, tools: Schemas = {}) -> tuple[str, list[Call]]:  # noqa: B006 (read only)
    """The words of a text before its first call, without thoughts, and its calls."""
    if tools and _lacks_mark(text, tools):
        text = f">>>{text}"
    parts = [part for part in _parts(text, False, fences) if not part.thought]
    calls = [call for part in parts for call in part.calls]
    first = next((place for place, part in enumerate(parts) if part.calls or part.open), len(parts))
    pieces = [(text[part.start : part.end], part.quoted) for part in parts[:first]]
    words = "".join(piece for piece, _ in pieces).strip()
    # In what is quoted no call is looked for; places stay as they are.
    spoken = "".join(re.sub(r"\S", "\u00b7", piece) if quoted else piece for piece, quoted in pieces).strip()
    if problem := next((part.open for part in parts if part.open), ""):
        return words, [BadCall(f"{BAD}{problem}.")]
    if not calls and (listed := bare_list(words)):
        return "", listed
    if not calls and tools and (lost := without_marks(spoken, tools)):
        return words[: lost[0]].strip(), lost[1]
    return words, [without_id(call, tools) for call in calls]


def _lacks_mark(text: str, tools: Schemas) -> bool:
    """Whether a text begins with a call whose mark `>>>` stands in the prompt, as in functionary's."""
    name, _, rest = text.partition("\n")
    if name not in tools:
        return False
    return rest.lstrip().startswith("{") or (name == PYTHON and is_program(re.split(r">>>[\w.\-/]+\n", rest)[0]))


def _parts(text: str, opened: bool, fences: bool = True) -> Iterator[_Part]:
    """The pieces of a text, from left to right."""
    parts: list[_Part] = []
    place = 0
    if opened:
        place = _end_of_thought(text, 0)
        parts.append(_Part(0, place, thought=True))
    while not opened and (bare := _BARE_ANALYSIS.match(text, place)):
        place = bare.end()
        parts.append(_Part(bare.start(), place, thought=True))
    thoughts, tries = opened, 0
    done = place
    while mark := _MARK.search(text, place):
        start, place = mark.start(), mark.end()
        part: _Part | None = None
        if mark["fence"]:
            part = _block(text, mark, fences)
        elif mark["inline"]:
            # A text that is one piece of code and nothing else is meant as what it is.
            if not text[:start].strip() and not text[place:].strip():
                place = start + len(mark["ticks"] or "~")
                continue
            part = _Part(start, place, quoted=True)
        elif mark["span"]:
            end = _end_of_span(text, start, place)
            # A thought may end in it, or its end may stand within a call or a program.
            if end < 0 or _ANY_CLOSING.search(text, place, end) or _crosses(text, place, end):
                continue
            part = _Part(start, end, quoted=True)
        elif mark["think"] or mark["thought"]:
            if _is_quoted(text, start, place) or (mark["think"] and _is_mentioned(text, done, start, place)):
                continue
            if mark["think"]:
                part = _Part(start, _end_of_thought(text, place, mark["think"]), thought=True)
            elif not thoughts:
                # It was opened before the text: all that is before it belongs to it.
                parts, part, done = [], _Part(0, place, thought=True), 0
            thoughts = True
        elif tries < _MOST_TRIES:
            if _is_quoted_line(text, start):
                end = text.find("\n", start)
                part = _Part(start, end if end >= 0 else len(text), quoted=True)
            elif mark["form"]:
                part = _form(text, start, place)
            elif found := bare_json(text, start):
                part = _Part(start, found[1], calls=found[0])
            if part is not None and part.calls and _is_cited(text, part.start, part.end):
                part = _Part(part.start, part.end, quoted=True)
            tries += 1 if part is None else _BAD_TRIES * any(isinstance(call, BadCall) for call in part.calls)
        if part is None:
            continue
        if part.start > done:
            parts.append(_Part(done, part.start))
        parts.append(part)
        place = done = part.end
    if done < len(text):
        parts.append(_Part(done, len(text)))
    return iter(parts)


def _end_of_thought(text: str, place: int, opening: str = "") -> int:
    """Behind the mark that closes a thought; without an opening one, which the prompt had, of any form."""
    closing = re.compile(BY_OPENING[opening].end) if opening else _ANY_CLOSING
    end = closing.search(text, place)
    return end.end() if end else len(text)


def _is_quoted(text: str, start: int, end: int) -> bool:
    """Whether a tag stands in quotes by itself: it is spoken of, and not used."""
    return start > 0 and end < len(text) and text[start - 1] in _QUOTES and text[end] in _QUOTES


def _is_quoted_line(text: str, start: int) -> bool:
    """Whether the line of a place is one of a quotation, or of a table."""
    line = text.rfind("\n", 0, start) + 1
    before, end = text[max(line, start - _LINE) : start], text.find("\n", start)
    if _QUOTE_LINE.match(before):
        return True
    if "|" not in before:
        return False
    whole = before.lstrip().startswith("|") and text[start : end if end >= 0 else None].rstrip().endswith("|")
    return whole or bool(_BARE_TABLE.search(text[max(line - _LINE, 0) : line]))


def _end_of_span(text: str, start: int, place: int) -> int:
    """The end of the quotation whose opening mark is at `start`; -1 if it has none."""
    for opening, closing in _SPAN_ENDS:
        if mark := opening.match(text, start):
            ends = closing.format(*mark.groups())
            found = re.compile(re.escape(ends), re.IGNORECASE).search(text, place)
            return found.end() if found else -1
    return -1


def _crosses(text: str, place: int, end: int) -> bool:
    """Whether a call or a block that begins before `end` goes on behind it."""
    for _ in range(_MOST_CROSSED):
        mark = _MARK.search(text, place, end)
        if mark is None:
            return False
        place, last = mark.end(), mark.end()
        if mark["fence"]:
            last = _block(text, mark, True).end
        elif mark["form"] and (part := _form(text, mark.start(), mark.end())) and _are_whole(part.calls):
            last = part.end
        elif mark["json"] and (found := bare_json(text, mark.start())) and _are_whole(found[0]):
            last = found[1]
        if last > end:
            return True
        place = max(place, last)
    return False


def _are_whole(calls: tuple[Call, ...]) -> bool:
    return bool(calls) and not any(isinstance(call, BadCall) for call in calls)


def _is_cited(text: str, start: int, end: int) -> bool:
    """Whether a call stands in quotes amid other words."""
    start = _MARKS_BEFORE.search(text, max(start - _LINE, 0), start).start()  # type: ignore[union-attr]
    end = _MARKS_AFTER.match(text, end).end()  # type: ignore[union-attr]
    before, after = text[max(start - _LINE, 0) : start], text[end : end + _LINE]
    spaced = before.rstrip(" \u00a0\u202f")
    if spaced != before and spaced[-1:] == '"' and spaced.rpartition("\n")[2].count('"') % 2 == 0:
        return False  # it closes a quotation
    around = spaced[-1:] + after.lstrip(" \u00a0\u202f.,;:!?")[:1]
    if spaced != before and around in ("''", "\u00bb\u00ab", "\u203a\u2039"):
        return False  # an apostrophe, or the end of a quotation before and the beginning of one behind
    if around == "{}" and re.search(r"\\(?:text|math)?tt\*?\{\Z|\\(?:code|text|mbox|url)\{\Z", spaced):
        return True
    return around in _PAIRS and bool(text[: start - 1].strip() or text[end + 1 :].strip())


def _is_mentioned(text: str, done: int, start: int, end: int) -> bool:
    """Whether the opening mark of a thought amid a line is only a word: nothing ends it, or the end is of the next."""
    earliest = max(done, start - _LINE)
    before = text[max(earliest, text.rfind("\n", earliest, start) + 1) : start]
    if not re.search(r"\w", before) or before[-1:].isalnum() or text[end : end + 1] not in _AFTER_WORD:
        return False
    again = text.find(opening := text[start:end], end)
    return text.find(BY_OPENING[opening].closing, end, again if again >= 0 else len(text)) < 0


def _block(text: str, mark: re.Match[str], fences: bool) -> _Part:
    """A fenced block: a program, a call, or something else."""
    language, size = mark["language"].lower(), len(mark["fence"])
    if language in _CALL_LANGUAGES:
        # The JSON itself tells where it ends, whatever its strings hold.
        listed, after = _json_calls(text, mark.end())
        if listed and text.startswith(mark["fence"], after):
            return _Part(mark.start(), after + size, calls=tuple(listed))
    ends = (m for m in _CLOSING_FENCE.finditer(text, mark.end()) if m[1].startswith(mark["fence"]))
    closing = next(ends, None)
    end = len(text) if closing is None else closing.end()
    content = text[mark.end() + 1 : len(text) if closing is None else closing.start()]
    calls = _calls_of_block(content.strip(), language) if language in _CALL_LANGUAGES else ()
    program = fences and language in _LANGUAGES and not calls
    if closing is None and (calls or program):
        return _Part(mark.start(), end, open="a code block is not closed with ```")
    quoted = not calls and not program and language not in _CALL_LANGUAGES
    return _Part(mark.start(), end, calls=(ToolCall(PYTHON, {"code": content}),) if program else calls, quoted=quoted)


def _json_calls(text: str, place: int) -> tuple[list[Call], int]:
    """The calls of JSON values one after the other, and where the next words are."""
    calls: list[Call] = []
    while True:
        place = _NO_WORD.match(text, place).end()  # type: ignore[union-attr]
        found = bare_json(text, place) if text.startswith(("{", "["), place) else None
        if found is None or not found[0]:
            return calls, place
        calls += found[0]
        place = found[1]


def _calls_of_block(content: str, language: str) -> tuple[Call, ...]:
    """The calls of a block that holds nothing else."""
    if language == "tool_code":
        return tuple(bare_list(content, code=True) or ())
    if content.startswith(("{", "[")):
        listed, end = _json_calls(content, 0)
        return tuple(listed) if end == len(content) else tuple(bare_list(content) or ())
    mark = _MARK.match(content)
    return tuple(find_calls(content, False)) if mark is not None and mark["form"] else ()


def _form(text: str, start: int, end: int) -> _Part | None:
    """The part that a family's opening mark begins; None if the mark is only mentioned."""
    if header := _HARMONY.match(text, start):
        thought_end = header.end()
        if header["channel"] == "analysis":
            following = re.compile(r"<\|(?:end|return|start|channel|call)\|>").search(text, header.end())
            thought_end = following.start() if following else len(text)
        # The headers of messages are no words either.
        return None if header["channel"] == "commentary" else _Part(start, thought_end, thought=True)
    if part := _HEADER.match(text, start):
        return _Part(start, part.end(), thought=True)
    if _is_quoted(text, start, end):
        return None
    found = read_form(text, start)
    if found is None:
        return None
    return _Part(start, found.end, calls=found.calls, open=found.open)


def code_of(call: ToolCall) -> str | BadCall:
    """The program that a call of the Python tool carries."""
    if call.name.lower() not in _CODE_TOOLS:
        return BadCall(f"{BAD}there is no tool {call.name!r}; there is {PYTHON!r}.")
    code = next((call.arguments[name] for name in _CODE_ARGUMENTS if name in call.arguments), None)
    if not isinstance(code, str) or not code.strip():
        has = ", ".join(map(repr, call.arguments)) or "none"
        return BadCall(f"{BAD}the tool {PYTHON!r} needs a program as its argument 'code', found {has}.")
    return code


def find_code(text: str) -> str | BadCall | None:
    """The program that `text` wants to be run: `find_call` and `code_of` in one."""
    call = find_call(text, {PYTHON: {"properties": {"code": {"type": "string"}}}})
    return code_of(call) if isinstance(call, ToolCall) else call


def shorten(text: str, limit: int = 2000) -> str:
    """At most about `limit` characters of `text`, from both ends: a traceback ends with its cause."""
    if len(text) <= limit:
        return text
    head, tail = limit // 2, limit - limit // 2
    return f"{text[:head]}\n[... {len(text) - limit} characters left out ...]\n{text[-tail:]}"


def tool_message(output: str) -> Message:
    """The tool's answer as the chat template's tool message."""
    return {"role": "tool", "content": output}
