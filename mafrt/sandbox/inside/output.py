"""Captured output of a snippet: beginning and end are kept, the bytes between are only counted."""

from __future__ import annotations

from . import limits


class Kept:
    """Takes any number of bytes, holds at most `head + tail` and a little."""

    def __init__(self, head: int = limits.OUTPUT_HEAD_BYTES, tail: int = limits.OUTPUT_TAIL_BYTES) -> None:
        self.head_size, self.tail_size = head, tail
        self.head, self.tail = bytearray(), bytearray()
        self.total = 0

    def add(self, data: bytes) -> None:
        self.total += len(data)
        room = self.head_size - len(self.head)
        self.head += data[:room]
        self.tail += data[max(room, 0) :]
        # Cut now and then only: cutting at every piece would move the whole tail every time.
        if len(self.tail) > 2 * self.tail_size + 65536:
            del self.tail[: -self.tail_size]

    def bytes(self) -> bytes:
        """With a line between beginning and end that says how much is not there."""
        left_out = self.total - self.head_size - self.tail_size
        if left_out <= 0:
            return bytes(self.head + self.tail)
        line = f"\n[... {left_out} bytes left out ...]\n".encode()
        return bytes(self.head) + line + bytes(self.tail[-self.tail_size :])
