"""Streams of the pretended GPU: what one has written another may read, and what one uses another may write or take into
use again, only behind a wait.

Launches of a stream are numbered. A stream is behind another up to a number (`wait_stream`), and the host knows that
one has come to a number (`synchronize`, or anything that brings numbers to the host). Whatever is launched from then
on, by any thread, comes later.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


class Stream:
    """As `torch.cuda.Stream`, as far as it is used."""

    def __init__(self, device: object = None, priority: int = 0) -> None:
        self.device = device
        self.launched = 0
        self.done = 0
        """the launches of which the host knows that they have ended"""
        self.behind: dict[Stream, int] = {}

    def wait_stream(self, other: Stream) -> None:
        for stream, number in [(other, other.launched), *other.behind.items()]:
            self.behind[stream] = max(number, self.behind.get(stream, 0))

    def synchronize(self) -> None:
        self.done = self.launched
        for stream, number in self.behind.items():
            stream.done = max(stream.done, number)

    def comes_after(self, other: Stream, number: int) -> bool:
        return other is self or number <= max(other.done, self.behind.get(other, 0))


@dataclass(slots=True)
class Uses:
    """Of a block of memory: the stream that took it, and of each stream its last launch that wrote or read it."""

    taken: Stream
    written: dict[Stream, int] = field(default_factory=dict)
    read: dict[Stream, int] = field(default_factory=dict)


class Streams:
    """The streams of one device. Each thread has a current one; `default` until it chooses another."""

    def __init__(self) -> None:
        self.default = Stream()
        self.races: list[str] = []
        """what was used by two streams without a wait in between"""
        self._own = threading.local()
        self._uses: dict[int, Uses] = {}

    def current(self, device: object = None) -> Stream:
        return getattr(self._own, "stream", self.default)

    @contextmanager
    def chosen(self, stream: Stream) -> Iterator[None]:
        before = self.current()
        self._own.stream = stream
        try:
            yield
        finally:
            self._own.stream = before

    def took(self, block: int) -> None:
        self._uses[block] = Uses(self.current())

    def gave_back(self, block: int) -> None:
        """Its next user is of the stream that took it, which must be behind all others by then."""
        uses = self._uses.pop(block)
        for stream, number in (*uses.written.items(), *uses.read.items()):
            if not uses.taken.comes_after(stream, number):
                self.races.append("given back while another stream may still use it")

    def launch(self, read: set[int], written: set[int], line: Callable[[], str]) -> None:
        """One launch on the current stream."""
        stream = self.current()
        stream.launched += 1
        for block in read | written:
            uses = self._uses.get(block)
            if uses is None:  # of a tensor whose numbers were forgotten
                continue
            others = (*uses.written.items(), *(uses.read.items() if block in written else ()))
            if not all(stream.comes_after(other, number) for other, number in others):
                self.races.append(f"{'written' if block in written else 'read'} at {line()}, without a wait")
            (uses.written if block in written else uses.read)[stream] = stream.launched
