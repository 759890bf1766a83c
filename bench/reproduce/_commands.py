"""mafrt commands as stages of an experiment."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from mafrt.core.errors import ConfigError


def run(main: Callable[[list[str]], int], *words: object, makes: Path | None = None) -> None:
    """Run one mafrt command in this process. Raises SystemExit if it fails, or ends before it has made a file.

    A training that a signal stops saves everything and has not failed; the next stage must not begin all the same.
    """
    if main([str(word) for word in words]):
        raise SystemExit(2)
    if makes is not None and not makes.exists():
        raise SystemExit(f"stopped before {makes} was made; move that folder away and give the same command again.")


def tabled(
    argv: Sequence[str] | None,
    parse: Callable[[Sequence[str] | None], argparse.Namespace],
    make: Callable[[argparse.Namespace], str],
) -> int:
    """Read the arguments, make a table, print it and write it into their `output`; the exit code."""
    try:
        args = parse(argv)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    text = make(args)
    (args.output / "table.md").write_text(text + "\n", encoding="utf-8")
    print(f"{text}\n\nThe table is in {args.output}/table.md, the runs beside it.")
    return 0
