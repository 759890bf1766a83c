"""From an observation to the token ids of a prompt."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

from mafrt.core.errors import EnvError
from mafrt.core.lookalikes import looks
from mafrt.core.text import clean_deep, fill_template, filled
from mafrt.core.transcript import quoted
from mafrt.core.types import Message, Observation, OwnTurns
from mafrt.environment.contract import ROLES, tools_problem
from mafrt.environment.tool_calls import OWN_MARKUP
from mafrt.models.invocation import PLAIN
from mafrt.models.outside_text import ANCHORS, Placeholders, controls_of, encode_outside
from mafrt.rollout.other_chats import otherwise


@dataclass(frozen=True)
class AgentTokenizer:
    """The tokens of one agent: they follow from the base that it sits on."""

    tokenizer: Any
    context_window: int
    """max tokens of prompt and answer together"""


TOOLS = "tools"
"""Role of an observation's first message if it holds the schemas of the agent's tools, as JSON."""
TOOLS_HEAD = "You may call these tools, each given by its JSON schema:"
TOOLS_TAIL = 'A call is <tool_call>\n{"name": ..., "arguments": {...}}\n</tool_call>'


def messages_of(system: str, observation: Observation, at: str = "start") -> list[Message]:
    """The agent's role prompt, which an own system message replaces, `at` the start or end of its observation."""
    seen = [{"role": "user", "content": observation}] if isinstance(observation, str) else list(observation)
    if seen and seen[0]["role"] == TOOLS:
        return [seen[0], *messages_of(system, seen[1:], at)]
    if system and not (seen and seen[0]["role"] == "system"):
        if at == "end" and seen:
            return cast("list[Message]", with_note(seen, system))
        return [{"role": "system", "content": system}, *seen]
    return seen


def with_note(seen: Observation, note: str) -> Observation:
    """An observation with a note at its end; two messages of the user in a row would confuse chat templates."""
    if isinstance(seen, str):
        return f"{seen}\n\n{note}"
    *before, last = seen
    if last["role"] == "user":
        return [*before, {"role": "user", "content": f"{last['content']}\n\n{note}"}]
    return [*seen, {"role": "user", "content": note}]


def encode_prompt(tokenizer: Any, system: str, seen: Observation, at: str = "start", past: OwnTurns = ()) -> list[int]:
    """Token ids of the chat up to where the assistant speaks, the only way of a text into a prompt.

    Control tokens come of the template and of an agent's `past` turns, which are the sampled ids. Raises EnvError.
    """
    if past:
        return encode_kept(tokenizer, system, seen, at, past)
    stand_ins, filled = fill_prompt(tokenizer, system, seen, at)
    return stand_ins.encode(filled, add_special_tokens=not getattr(tokenizer, "chat_template", None))


def fill_prompt(tokenizer: Any, system: str, observation: Observation, at: str) -> tuple[Placeholders, str]:
    """The prompt as text, with stand-ins: special tokens too, or plain `role: content` lines without a template."""
    seen = [{"role": "user", "content": observation}] if isinstance(observation, str) else list(observation)
    template = bool(getattr(tokenizer, "chat_template", None))
    if not isinstance(observation, str) and (problem := tools_problem(seen)):
        raise EnvError(f"{problem[:1].upper()}{problem[1:]}")
    stand_ins = Placeholders(tokenizer, [system, *(line["content"] for line in seen)], turns=True)
    if not template:
        seen, system = [{**line, "content": quoted(line["content"], ROLES)} for line in seen], quoted(system, ROLES)
    messages = messages_of(stand_ins.hide(system), [_hidden(line, stand_ins, template) for line in seen], at)
    if not template:  # the schemas of tools stand in the lines like any other message
        return stand_ins, "".join(f"{message['role']}: {message['content']}\n" for message in messages) + PLAIN
    write = _with_tool_messages if any(line["role"] in (TOOLS, "tool") for line in messages) else _template
    with contextlib.suppress(EnvError):
        text = write(tokenizer, messages)
        if all(line["content"].strip() in text for line in messages if line["role"] != TOOLS):
            return stand_ins, text
    return stand_ins, otherwise(write, tokenizer, messages)


def encode_answer(tokenizer: Any, text: str) -> list[int]:
    """Token ids of an agent's own words: only the markup of thoughts and calls becomes a control token."""
    return encode_outside(tokenizer, text, OWN_MARKUP)


def _hidden(message: Message, stand_ins: Placeholders, template: bool) -> Message:
    """A message with stand-ins for what would become a control token."""
    role, content = message["role"], message["content"]
    if role == TOOLS and template:
        schemas = _hidden_deep(clean_deep(json.loads(content)), stand_ins)
        return {"role": role, "content": json.dumps(schemas, ensure_ascii=False)}
    return {"role": role, "content": stand_ins.hide(content, OWN_MARKUP if role == "assistant" else ())}


def _hidden_deep(value: Any, stand_ins: Placeholders) -> Any:
    if isinstance(value, str):
        return stand_ins.hide(value)
    if isinstance(value, list):
        return [_hidden_deep(entry, stand_ins) for entry in value]
    if isinstance(value, dict):
        return {stand_ins.hide(key): _hidden_deep(entry, stand_ins) for key, entry in value.items()}
    return value


def _with_tool_messages(tokenizer: Any, messages: list[Message]) -> str:
    """The chat as text. A template that refuses or drops tool messages gets them as the user's, marked as such.

    Schemas of tools go to the template, and into the first message if it has no place for them, or for these.
    """
    if messages and messages[0]["role"] == TOOLS:
        schemas, messages = json.loads(messages[0]["content"]), messages[1:]
        if not schemas:
            return _with_outputs(tokenizer, messages)
        if TOOLS in str(getattr(tokenizer, "chat_template", "")):
            text, bare = (_or_nothing(tokenizer, messages, tools) for tools in (schemas, None))
            if text not in ("", bare):
                return text
        lines = "\n".join(json.dumps(schema, ensure_ascii=False) for schema in schemas)
        first = {**messages[0], "content": f"{messages[0]['content']}\n\n{TOOLS_HEAD}\n{lines}\n{TOOLS_TAIL}"}
        messages = [first, *messages[1:]]
    return _with_outputs(tokenizer, messages)


def _or_nothing(tokenizer: Any, messages: list[Message], tools: list[Any] | None) -> str:
    try:
        return _with_outputs(tokenizer, messages, tools)
    except EnvError:  # of schemas that are not as the template expects them, among others
        return ""


def _with_outputs(tokenizer: Any, messages: list[Message], tools: list[Any] | None = None) -> str:
    outputs = [message["content"].strip() for message in messages if message["role"] == "tool"]
    if not outputs:
        return _template(tokenizer, messages, tools)
    try:
        text = _template(tokenizer, messages, tools)
        # Some templates write tool messages as JSON, with its escapes.
        if all(output in text or json.dumps(output)[1:-1] in text for output in outputs):
            return text
    # Templates refuse a role that they do not know by raising.
    except EnvError:
        pass
    plain: list[Message] = []
    for message in messages:
        if message["role"] == "tool":
            message = {"role": "user", "content": _framed(message["content"])}
        # Many templates demand that user and assistant alternate.
        if plain and plain[-1]["role"] == message["role"] == "user":
            message = {"role": "user", "content": f"{plain.pop()['content']}\n{message['content']}"}
        plain.append(message)
    return _template(tokenizer, plain, tools)


def _framed(output: str) -> str:
    """A tool's output in tags of which it holds none, so that it cannot end before its end."""
    seen, tag, number = looks(output), "tool_response", 1
    while looks(tag) in seen:
        number += 1
        tag = f"tool_response_{number}"
    return f"<{tag}>\n{output}\n</{tag}>"


def _template(tokenizer: Any, messages: list[Message], tools: list[Any] | None = None) -> str:
    return fill_template(tokenizer, messages, add_generation_prompt=True, **({"tools": tools} if tools else {}))


def encode_kept(tokenizer: Any, system: str, seen: Observation, at: str, past: OwnTurns) -> list[int]:
    """`encode_prompt` of an observation with the sampled ids of `past`. Raises EnvError as it does.

    A turn before which the template writes no prompt, or which it leaves out, is left to the template.
    """
    assert not isinstance(seen, str)
    name = f"Q{hashlib.sha256(repr((system, seen)).encode('utf-8', 'replace')).hexdigest()[:16]}Q"
    marked = [dict(message) for message in seen]
    for place, _ in past:
        marked[place]["content"] = f"{name}{place}Z"
    ids: list[int] = []
    turns_kept: list[tuple[int, Sequence[int]]] = []
    for place, sampled_ids in (*past, (len(seen), ())):
        try:
            # The prompt as it was when the agent spoke there: its end opens the answer as the template does.
            stand_ins, filled = fill_prompt(tokenizer, system, marked[:place], at)
        except EnvError:
            if place == len(seen):
                raise
            filled = ""
        _, found, rest = filled.rpartition(f"{name}{turns_kept[-1][0]}Z") if turns_kept else ("", filled, filled)
        if not found:
            wrong = turns_kept[-1][0] if filled else place
            return encode_prompt(tokenizer, system, seen, at, [turn for turn in past if turn[0] != wrong])
        if not turns_kept:
            ids = stand_ins.encode(rest, add_special_tokens=not getattr(tokenizer, "chat_template", None))
        else:
            ids += _without_end(tokenizer, ids[-1], _after(stand_ins, rest))
        ids += sampled_ids
        turns_kept.append((place, sampled_ids))
    return ids


def _after(stand_ins: Placeholders, text: str) -> list[int]:
    """Token ids of a text that other text stands before."""
    for anchor in ANCHORS:
        before, both = stand_ins.encode(anchor), stand_ins.encode(anchor + text)
        if both[: len(before)] == before:
            return both[len(before) :]
    return stand_ins.encode(text)


def _without_end(tokenizer: Any, last: int, following: list[int]) -> list[int]:
    """What the template writes behind an answer, less the end of the answer if that was sampled with it.

    The sampled end may be another one: gpt-oss's answers end with `<|return|>` or `<|call|>`, which the template
    writes as `<|end|>` once another message follows, and some end with the token that ends any text.

    Args:
        last: the last token of the answer.
    """
    controls = controls_of(tokenizer)
    if not controls.of([last]) or tokenizer.convert_ids_to_tokens(last) in OWN_MARKUP:
        return following
    closing, most = _ends(tokenizer)
    ends = (*closing, last)
    places = [place for place, token in enumerate(following) if controls.of([token])][:most]
    many = next((n for n, place in enumerate(places) if following[place] not in ends), len(places))
    closing = [following[place] for place in places[:many]]
    if last in closing:
        many = len(closing) - closing[::-1].index(last)
    # Earlier answers may end by another token than the last one; then it is the one that other messages end with too.
    elif not many and len(ends) > 1 and places and following[places[0]] in following[places[0] + 1 :]:
        many = 1
    return following[places[many - 1] + 1 :] if many else following


def _ends(tokenizer: Any) -> tuple[list[int], int]:
    """The control tokens with which the template ends an answer that nothing follows, and how many can end any.

    Those of later messages are none of these, also where nothing but plain text opens a message.
    """
    word, more = "QANSWERQ", "QMOREQ"
    chat = [{"role": "user", "content": "?"}, {"role": "assistant", "content": word}]
    alone = filled(tokenizer, chat).rpartition(word)[2]
    between = filled(tokenizer, [*chat, {"role": "user", "content": more}]).rpartition(word)[2]
    tails = [alone, *([between.partition(more)[0]] if more in between else [])]
    found = [controls_of(tokenizer).of(tokenizer.encode(text, add_special_tokens=False)) for text in tails]
    return found[0], max(map(len, found))
