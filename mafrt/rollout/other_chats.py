"""A chat in forms that its template takes whole, where it refuses the chat as it is or leaves messages out.

Gemma 2's template refuses a system message; gpt-oss's, MiniMax's and Bielik's leave out all but the first; Mistral's
refuse two messages of one side in a row; those of Idefics and SmolVLM write nothing of a content that is no list.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from mafrt.core.errors import EnvError
from mafrt.core.text import shortened
from mafrt.core.types import Message

log = logging.getLogger(__name__)

_told: set[str] = set()
"""templates of which it was said what they leave out"""


def left_out(messages: Sequence[Message], text: str) -> list[Message]:
    """The messages of which a template has written neither the first line nor the last, be it as JSON."""
    found = []
    for message in messages:
        bare = message["content"].strip()
        lines = {bare.partition("\n")[0].strip(), bare.rpartition("\n")[2].strip()}
        written = (json.dumps(line, ensure_ascii=ascii_)[1:-1] for line in lines for ascii_ in (True, False))
        if not any(line in text for line in (*lines, *written)):
            found.append(message)
    return found


class _InParts:
    """A tokenizer whose template gets contents as lists of parts."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.chat_template = getattr(tokenizer, "chat_template", None)

    def apply_chat_template(self, chat: Sequence[Message], **options: Any) -> Any:
        parts = [{**message, "content": [{"type": "text", "text": message["content"]}]} for message in chat]
        return self._tokenizer.apply_chat_template(parts, **options)


def otherwise(write: Callable[[Any, list[Message]], str], tokenizer: Any, messages: list[Message]) -> str:
    """The chat as text in the first form that the template takes whole.

    Args:
        write: from a tokenizer and a chat to text. Raises EnvError.
        tokenizer: whose template refuses the chat as it is, or leaves messages out.
        messages: the chat; the schemas of tools may be its first message.

    Raises:
        EnvError: no form is taken. Of one that leaves out the least it is said, once, what is missing.
    """
    schemas, chat = messages[: messages[0]["role"] == "tools"], messages[messages[0]["role"] == "tools" :]
    best, missing, refused = "", list[Message](), None
    for speaker in (tokenizer, _InParts(tokenizer)):
        for form in _forms(chat):
            try:
                text = write(speaker, [*schemas, *form])
            except EnvError as error:
                refused = refused or error
                continue
            lost = left_out(form, text)
            if not lost:
                return text
            if not best or len(lost) < len(missing):
                best, missing = text, lost
    if not best:
        raise refused or EnvError("The chat template writes nothing of the chat")
    template = str(getattr(tokenizer, "chat_template", ""))
    if template not in _told:
        _told.add(template)
        log.warning(
            "the base's chat template leaves out what the %s says: %r; change the template, or send it otherwise",
            *(missing[0]["role"], shortened(missing[0]["content"])),
        )
    return best


def _forms(chat: list[Message]) -> Iterator[list[Message]]:
    """The chat in forms of which each has the same beginning whatever follows it, so that kept turns find theirs."""
    yield chat
    joined = _joined(chat)
    for form in (chat, joined):
        if [message["role"] for message in form[:2]] == ["system", "user"]:
            system, first, *others = form
            yield [{**first, "content": f"{system['content']}\n\n{first['content']}"}, *others]
        if form is chat and joined != chat:
            yield joined


def _joined(chat: Sequence[Message]) -> list[Message]:
    """One system message, at the head, later ones as the user's, and one message where a side speaks twice in a row."""
    found: list[Message] = []
    for message in chat:
        system = message["role"] == "system"
        late = system and any(other["role"] != "system" for other in found)
        one = {**message, "role": "user"} if late else message
        if found and found[-1]["role"] == one["role"] and one["role"] != "tool":
            one = {**one, "content": f"{found.pop()['content']}\n\n{one['content']}"}
        found.append(one)
    return found
