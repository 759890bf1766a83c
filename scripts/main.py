"""The console command: `mafrt train_math ...` is `python scripts/train_math.py ...`."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

from mafrt import __version__
from mafrt.config.schema import unknown
from mafrt.core.errors import ConfigError
from mafrt.scripts.cli.command_names import COMMANDS, GROUPS
from mafrt.scripts.cli.run_main import run_main

ELSEWHERE = {
    "eval": "here it is mafrt evaluate",
    "mrlm": "write mafrt in its place: mafrt train, serve, evaluate, collect, info",
    "run_train_mathchat.sh": "here it is mafrt train_math --config configs/recipes/mathchat.yaml",
    "run_train_dsbench.sh": "here it is mafrt train_dsbench --config configs/recipes/dsbench.yaml",
    "run_math.sh": "here it is mafrt train_math --config configs/recipes/dr_mas_math.yaml, and mafrt evaluate after it",
    "run_search.sh": "here it is mafrt train_search --config configs/recipes/dr_mas_search.yaml, and mafrt evaluate "
    "after it",
    "run_spin.sh": "here it is mafrt train --env math --algorithm spin --n_samples 8",
}
"""Commands and scripts of other libraries, and ours."""


def usage() -> str:
    width = max(map(len, COMMANDS))
    lines = ["usage: mafrt COMMAND [--flag value ...]", ""]
    for title, commands in GROUPS.items():
        lines += [f"{title}:", *(f"  {name.ljust(width)}  {what}" for name, what in commands.items()), ""]
    return "\n".join([*lines, "mafrt COMMAND --help explains the flags that matter, --help all lists every one."])


def dispatch(argv: Sequence[str]) -> int:
    # It may stand before the command as well as after it.
    words = [word for word in argv if word != "--debug"]
    if not words or words[0] in ("-h", "--help", "help"):
        print(usage())
        return 0
    if words[0] == "--version":
        if len(words) > 1:
            raise ConfigError(f"--version stands alone, found {words[1]!r} behind it.")
        print(__version__)
        return 0
    if (advice := ELSEWHERE.get(words[0])) is not None:
        raise ConfigError(f"There is no command {words[0]!r}; {advice} (docs/coming_from.md).")
    if words[0] not in COMMANDS:
        raise ConfigError(unknown("command", words[0], COMMANDS))
    rest = list(argv)
    rest.remove(words[0])
    name = words[0]
    if "_".join(words[:2]) in COMMANDS and len(words) > 1:  # `train math` is `train_math`
        rest.remove(words[1])
        name = "_".join(words[:2])
    return int(importlib.import_module(f"mafrt.scripts.{name}").main(rest) or 0)


def main(argv: Sequence[str] | None = None) -> int:
    return run_main(dispatch, argv)


if __name__ == "__main__":
    sys.exit(main())
