"""`--keep_thoughts`: an agent's own earlier turns stand in its prompt as it has sampled them, thoughts included.

Many chat templates strip the thoughts of earlier turns, and environments do not hear them. A kept turn is put between
two texts of the template: the prompt up to where the agent spoke, and what follows its words. So a chat that grows has
prompts of which each begins with the one before and its answer, and its turns are learnt from in one row.
"""

from __future__ import annotations

import hashlib
import json
import threading
from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

from mafrt.core.text import clean_text
from mafrt.core.types import Observation, Turn
from mafrt.environment.tool_calls import ToolCall, split_calls

MOST_TOKENS = 1 << 22
"""of the answers that a server keeps; the oldest go first"""


def own_turns(
    seen: Observation, agent: str, turns: Sequence[Turn], visible: Callable[[str, str], str]
) -> list[tuple[int, Sequence[int]]]:
    """Which messages of an observation are turns of its agent, with the ids that were sampled.

    A message is a turn if it says what the environment heard of it; calls may be written in another form, and turns may
    be left out, but none changes its place.
    """
    if isinstance(seen, str):
        return []
    places = [place for place, message in enumerate(seen) if message["role"] == "assistant" and place]
    in_history = [_meaning(seen[place]["content"]) for place in places]
    of_agent = [turn for turn in turns if turn.agent == agent and turn.action_ids]
    by_turns = [_meaning(visible(agent, turn.text)) for turn in of_agent]
    pairs = _aligned(in_history, by_turns)
    if len(pairs) < len(by_turns):  # histories are cut at their beginning
        last = _aligned(in_history[::-1], by_turns[::-1])
        if len(last) >= len(pairs):
            pairs = [(len(in_history) - 1 - a, len(by_turns) - 1 - b) for a, b in reversed(last)]
    return [(places[a], of_agent[b].action_ids) for a, b in pairs]


def _aligned(in_history: Sequence[Any], by_turns: Sequence[Any]) -> list[tuple[int, int]]:
    pairs, begin = [], 0
    for number, text in enumerate(by_turns):
        place = next((place for place in range(begin, len(in_history)) if in_history[place] == text), None)
        if place is not None:
            pairs.append((place, number))
            begin = place + 1
    return pairs


@lru_cache(4096)
def _meaning(text: str) -> tuple[str, str]:
    """Words and calls of a text, equal however a client writes a call."""
    words, calls = split_calls(clean_text(text), False)
    shown = [
        [
            call.name,
            {name: value if isinstance(value, str) else json.dumps(value) for name, value in call.arguments.items()},
        ]
        if isinstance(call, ToolCall)
        else str(call)
        for call in calls
    ]
    return words.strip(), json.dumps(shown, sort_keys=True)


class KeptAnswers:
    """Answers of a server as they were sampled, by the chats in which they were given."""

    def __init__(self, most_tokens: int = MOST_TOKENS) -> None:
        self._answers: OrderedDict[bytes, array[int]] = OrderedDict()
        self._most, self._tokens = most_tokens, 0
        self._lock = threading.Lock()

    def find(self, agent: str, seen: Observation) -> list[tuple[int, Sequence[int]]]:
        """Which messages of a chat are answers that were given in this very chat, with their ids."""
        if isinstance(seen, str):
            return []
        found: list[tuple[int, Sequence[int]]] = []
        with self._lock:
            for place, key in enumerate(_keys(agent, seen)):
                if place and seen[place]["role"] == "assistant" and key in self._answers:
                    self._answers.move_to_end(key)
                    found.append((place, self._answers[key].tolist()))
        return found

    def keep(self, agent: str, seen: Observation, text: str, ids: Sequence[int]) -> None:
        """Keep an answer; `text` is what was shown of it."""
        if isinstance(seen, str) or not ids:
            return
        key = _keys(agent, [*seen, {"role": "assistant", "content": text}])[-1]
        with self._lock:
            self._tokens += len(ids) - len(self._answers.pop(key, ()))
            self._answers[key] = array("q", ids)
            while self._tokens > self._most and len(self._answers) > 1:
                self._tokens -= len(self._answers.popitem(last=False)[1])


def _keys(agent: str, seen: Sequence[dict[str, str]]) -> list[bytes]:
    """A key of each beginning of a chat."""
    state, keys = hashlib.sha256(agent.encode()), []
    for message in seen:
        content = _meaning(message["content"]) if message["role"] == "assistant" else message["content"]
        state.update(json.dumps([message["role"], content]).encode())
        keys.append(state.digest())
    return keys
