"""From an observation to the token ids of a prompt."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, cast

from mafrt.core.errors import EnvError
from mafrt.core.text import clean_deep, error_line
from mafrt.core.transcript import quoted
from mafrt.core.types import Message, Observation
from mafrt.environment.contract import ROLES, tools_problem
from mafrt.environment.tool_calls import OWN_MARKUP, THINK
from mafrt.models.invocation import PLAIN
from mafrt.models.outside_text import Placeholders, encode_outside


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


def encode_prompt(tokenizer: Any, system: str, observation: Observation, at: str = "start") -> list[int]:
    """Token ids of the chat up to where the assistant speaks, by the tokenizer's own chat template.

    The only way of a text into a prompt: control tokens come of the template alone (`mafrt.models.outside_text`), but
    for the markup of an agent's own thoughts and calls. Without a template there are plain `role: content` lines.
    Raises EnvError where the schemas of tools are none, or the chat template refuses the messages.
    """
    seen: list[Message] = (
        [{"role": "user", "content": observation}] if isinstance(observation, str) else list(observation)
    )
    template = bool(getattr(tokenizer, "chat_template", None))
    if not isinstance(observation, str) and (problem := tools_problem(seen)):
        raise EnvError(f"{problem[:1].upper()}{problem[1:]}")
    stand_ins = Placeholders(tokenizer, [system, *(message["content"] for message in seen)])
    if not template:
        lines = [{**message, "content": quoted(message["content"], ROLES)} for message in seen]
        seen, system = lines, quoted(system, ROLES)
    hidden = [_hidden(message, stand_ins, template) for message in seen]
    messages = messages_of(stand_ins.hide(system), hidden, at)
    if not template:
        # The schemas of tools stand in the lines like any other message.
        text = "".join(f"{message['role']}: {message['content']}\n" for message in messages) + PLAIN
        return stand_ins.encode(text, add_special_tokens=True)
    from jinja2 import TemplateError

    try:
        tools = any(message["role"] in (TOOLS, "tool") for message in messages)
        filled = _with_tool_messages(tokenizer, messages) if tools else _template(tokenizer, messages)
    except (TemplateError, KeyError, TypeError, AttributeError, ValueError) as error:
        roles = ", ".join(message["role"] for message in messages)
        raise EnvError(f"The chat template refuses the messages {roles}: {error_line(error)}") from error
    # The template has already written the special tokens.
    return stand_ins.encode(filled)


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


def opens_thought(tokenizer: Any) -> bool:
    """Whether the chat template ends the prompt with `<think>`, so that every answer begins inside a thought."""
    if not getattr(tokenizer, "chat_template", None):
        return False
    return _template(tokenizer, [{"role": "user", "content": "?"}]).rstrip().endswith(THINK)


def _with_tool_messages(tokenizer: Any, messages: list[Message]) -> str:
    """The chat as text. A template that refuses or drops tool messages gets them as the user's, marked as such.

    Schemas of tools go to the template, and into the first message if it has no place for them.
    """
    if messages and messages[0]["role"] == TOOLS:
        schemas, messages = json.loads(messages[0]["content"]), messages[1:]
        if TOOLS in str(getattr(tokenizer, "chat_template", "")):
            tokenizer = _WithTools(tokenizer, schemas)
        else:
            lines = "\n".join(json.dumps(schema, ensure_ascii=False) for schema in schemas)
            first = {**messages[0], "content": f"{messages[0]['content']}\n\n{TOOLS_HEAD}\n{lines}\n{TOOLS_TAIL}"}
            messages = [first, *messages[1:]]
    outputs = [message["content"].strip() for message in messages if message["role"] == "tool"]
    if not outputs:
        return _template(tokenizer, messages)
    from jinja2 import TemplateError

    try:
        text = _template(tokenizer, messages)
        # Some templates write tool messages as JSON, with its escapes.
        if all(output in text or json.dumps(output)[1:-1] in text for output in outputs):
            return text
    # Templates refuse a role that they do not know by raising.
    except (TemplateError, KeyError, TypeError):
        pass
    plain: list[Message] = []
    for message in messages:
        if message["role"] == "tool":
            message = {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}
        # Many templates demand that user and assistant alternate.
        if plain and plain[-1]["role"] == message["role"] == "user":
            message = {"role": "user", "content": f"{plain.pop()['content']}\n{message['content']}"}
        plain.append(message)
    return _template(tokenizer, plain)


@dataclass(frozen=True)
class _WithTools:
    """A tokenizer whose template is filled in with tools."""

    tokenizer: Any
    schemas: list[Any]

    def apply_chat_template(self, messages: list[Message], **options: Any) -> Any:
        return self.tokenizer.apply_chat_template(messages, tools=self.schemas, **options)


def _template(tokenizer: Any, messages: list[Message]) -> str:
    return str(tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False))
