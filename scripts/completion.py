"""Print the completion script of a shell: commands and flags, from the same settings as `--help`."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from functools import partial

from mafrt.core.errors import ConfigError
from mafrt.core.extras import package
from mafrt.scripts.cli.command_names import COMMANDS
from mafrt.scripts.cli.run_main import run_main

SHELLS = ("bash", "zsh", "fish")
USAGE = """usage: mafrt completion bash|zsh|fish

Print the completion script of a shell. To switch it on:
  bash  mafrt completion bash > ~/.local/share/bash-completion/completions/mafrt
  zsh   mafrt completion zsh > ~/.zfunc/_mafrt        (a folder of $fpath, before compinit)
  fish  mafrt completion fish > ~/.config/fish/completions/mafrt.fish"""


def parser() -> argparse.ArgumentParser:
    """All commands as subcommands of one parser."""
    whole = argparse.ArgumentParser(prog="mafrt")
    commands = whole.add_subparsers()
    for name, told in COMMANDS.items():
        settings = getattr(importlib.import_module(f"mafrt.scripts.{name}"), "COMMAND", None)
        parents = [] if settings is None else [settings.parser()]
        command = commands.add_parser(name, help=told, description=told, parents=parents, add_help=not parents)
        if name == "completion":
            command.add_argument("shell", choices=SHELLS)
    return whole


def complete(argv: Sequence[str]) -> int:
    if list(argv) in ([], ["-h"], ["--help"]):
        print(USAGE)
        return 0 if argv else 2
    if len(argv) != 1 or argv[0] not in SHELLS:
        raise ConfigError(f"found {' '.join(argv)!r}, expected one shell: {', '.join(SHELLS)}.")
    print(package("a completion script", "completion", "shtab").complete(parser(), argv[0]))
    return 0


main = partial(run_main, complete)

if __name__ == "__main__":
    sys.exit(main())
