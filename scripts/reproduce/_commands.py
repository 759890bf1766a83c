"""mafrt commands as stages of an experiment."""

from __future__ import annotations

from collections.abc import Callable


def run(main: Callable[[list[str]], int], *words: object) -> None:
    """Run one mafrt command in this process. Raises SystemExit if it fails."""
    if main([str(word) for word in words]):
        raise SystemExit(2)
