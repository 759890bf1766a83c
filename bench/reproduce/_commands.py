"""mafrt commands as stages of an experiment."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path


def run(main: Callable[[list[str]], int], *words: object, makes: Path | None = None) -> None:
    """Run one mafrt command in this process. Raises SystemExit if it fails, or ends before it has made a file.

    A training that a signal stops saves everything and has not failed; the next stage must not begin all the same.
    """
    if main([str(word) for word in words]):
        raise SystemExit(2)
    if makes is not None and not makes.exists():
        raise SystemExit(f"stopped before {makes} was made; move that folder away and give the same command again.")
