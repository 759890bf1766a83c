"""Run a benchmark: `bench rollout`; the last line printed is one JSON object. `python -m mafrt.bench` is the same."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from mafrt.scripts._cli import run_main


def bench(argv: Sequence[str]) -> int:
    from mafrt.bench.__main__ import main as run

    return run([word for word in argv if word != "--debug"])


def main(argv: Sequence[str] | None = None) -> int:
    return run_main(bench, argv)


if __name__ == "__main__":
    sys.exit(main())
