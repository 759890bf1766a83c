"""From what an agent sees to the token ids it is fed."""

from __future__ import annotations

from typing import Any

from mafrt.types import Message, Observation


def messages_of(system: str, observation: Observation) -> list[Message]:
    """The chat: the agent's role prompt, then what it sees. An observation's own system message wins."""
    seen = [{"role": "user", "content": observation}] if isinstance(observation, str) else list(observation)
    if system and not (seen and seen[0]["role"] == "system"):
        return [{"role": "system", "content": system}, *seen]
    return seen


def encode_prompt(tokenizer: Any, system: str, observation: Observation) -> list[int]:
    """Token ids of the chat up to where the assistant speaks, by the tokenizer's own chat template.

    A tokenizer without a template gets plain `role: content` lines; base models are commonly used that way.
    """
    messages = messages_of(system, observation)
    if getattr(tokenizer, "chat_template", None):
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        return list(tokenizer.encode(text, add_special_tokens=False))
    text = "".join(f"{message['role']}: {message['content']}\n" for message in messages) + "assistant:"
    return list(tokenizer.encode(text))
