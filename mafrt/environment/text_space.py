"""The Gymnasium space of all texts: actions and observations of the adapters in this folder."""

from __future__ import annotations

from typing import Any

from gymnasium.spaces import Text

from mafrt.core.types import Observation

LONGEST = 10_000_000
"""Characters of the longest text in the space."""
LONGEST_SAMPLE = 64
"""Characters of the longest text that `sample` draws."""


class AnyText(Text):
    """Every text, the empty one included; Gymnasium's `Text` knows finite alphabets only."""

    def __init__(self, seed: int | None = None) -> None:
        super().__init__(LONGEST, min_length=0, seed=seed)

    def contains(self, x: Any) -> bool:
        """Whether `x` is a text of at most `LONGEST` characters."""
        return isinstance(x, str) and len(x) <= LONGEST

    def sample(self, mask: Any = None, probability: Any = None) -> str:
        """A text of up to `LONGEST_SAMPLE` letters and digits, for tests."""
        if mask is None and probability is None:
            mask = (int(self.np_random.integers(0, LONGEST_SAMPLE + 1)), None)
        return super().sample(mask, probability)


class TypedText(str):
    """A text with the dtype of its space, which PettingZoo's `api_test` asks every observation for."""

    dtype = AnyText().dtype


def as_text(observation: Observation) -> str:
    """An observation as one text; of messages, a line `role: content` each."""
    if isinstance(observation, str):
        return observation
    return "\n".join(f"{message['role']}: {message['content']}" for message in observation)
