"""The console command: `mafrt train_math ...` is `python scripts/train_math.py ...`."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

from mafrt import __version__
from mafrt.config.schema import unknown
from mafrt.core.errors import ConfigError
from mafrt.scripts.cli.run_main import run_main

COMMANDS = {
    "train": "train a team on any environment",
    "train_math": "train a team to solve math problems",
    "train_tasks": "train a team on tasks of your own, graded by a function of your own",
    "train_code": "train a team to write programs that pass tests",
    "train_dsbench": "train a team to solve tabular modelling tasks with code",
    "train_search": "train a team to answer questions by search",
    "train_sft": "fine-tune a team on answers to imitate, from files or recorded episodes",
    "train_dpo": "tune a team to preferences, from files or recorded episodes",
    "evaluate": "evaluate a trained team, or the untrained base",
    "report": "make a report of runs: one HTML file with curves and conversations",
    "show": "print a recorded episode in the terminal",
    "chat": "talk to a trained team in the terminal",
    "serve": "serve an environment to trainers elsewhere",
    "serve_team": "serve a trained team behind an OpenAI-compatible address",
    "serve_retriever": "serve a corpus for search",
    "export": "export a trained team: PEFT folders, role prompts, model cards",
    "collect": "collect good recorded episodes as chat JSONL for fine-tuning",
    "bench": "run a benchmark",
    "check_env": "check that an environment keeps its contract",
    "prepare_data": "prepare DAPO-Math, NQ or HotpotQA from local files",
    "get_base": "fetch a base model that has a name, such as smollm2",
    "make_base": "make the teaching base again, from its own corpus",
    "make_games_base": "make the games base again, from legal random play",
    "completion": "print the completion script of bash, zsh or fish",
    "info": "print versions and installed extras",
}
"""Each is the module of that name in this package, with a `main(argv) -> exit code`."""


def usage() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name.ljust(width)}  {what}" for name, what in COMMANDS.items()]
    return "\n".join(
        ["usage: mafrt COMMAND [--flag value ...]", "", *lines, "", "mafrt COMMAND --help lists its flags."]
    )


def dispatch(argv: Sequence[str]) -> int:
    # It may stand before the command as well as after it.
    words = [word for word in argv if word != "--debug"]
    if not words or words[0] in ("-h", "--help", "help"):
        print(usage())
        return 0
    if words[0] == "--version":
        print(__version__)
        return 0
    if words[0] not in COMMANDS:
        raise ConfigError(unknown("command", words[0], COMMANDS))
    if "_".join(words[:2]) in COMMANDS and len(words) > 1:
        raise ConfigError(f"There is no command '{words[0]} {words[1]}'; did you mean '{words[0]}_{words[1]}'?")
    rest = list(argv)
    rest.remove(words[0])
    return int(importlib.import_module(f"mafrt.scripts.{words[0]}").main(rest) or 0)


def main(argv: Sequence[str] | None = None) -> int:
    return run_main(dispatch, argv)


if __name__ == "__main__":
    sys.exit(main())
