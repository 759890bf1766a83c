"""Seeds as pure functions of their purpose.

Every random choice of a run is seeded by a hash of the run's seed and of the place where it is made, so a resumed
run repeats an uninterrupted one without any generator state, and neither batch size nor the order of work changes a
sample.
"""

from __future__ import annotations

import hashlib
import random


def seed_of(*parts: int | str) -> int:
    """A seed in [0, 2^63) that depends on every part and on their order (BLAKE2b of their text)."""
    text = "\x1f".join(f"{type(part).__name__}:{part}" for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def permutation(count: int, *parts: int | str) -> list[int]:
    """A permutation of `range(count)` that depends on `parts` alone."""
    order = list(range(count))
    random.Random(seed_of("permutation", *parts)).shuffle(order)
    return order
