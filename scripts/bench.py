"""`mafrt bench NAME [arguments]`: run one benchmark. They lie in `bench/` of a checkout, and are not installed.

The last line printed is its result as JSON.
"""

from __future__ import annotations

import contextlib
import difflib
import importlib
import importlib.util
import json
import os
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import mafrt
from mafrt.core.errors import ConfigError
from mafrt.scripts.cli.run_main import run_main

CHECKOUT = Path(mafrt.__file__).resolve().parents[1]


def names() -> list[str]:
    """The benchmarks there are: the files of `bench/` that define `run(argv)`.

    Raises:
        ConfigError: this installation has none.
    """
    folder = CHECKOUT / "bench"
    if not (folder / "_measure.py").is_file():  # site-packages may hold somebody else's `bench`
        raise ConfigError(
            "benchmarks are not installed; run `mafrt bench` in a checkout of mafrt that `bash scripts/install.sh` or "
            "`pip install --editable .` has installed."
        )
    return sorted(path.stem for path in folder.glob("[a-z]*.py") if "\ndef run(" in path.read_text(encoding="utf-8"))


def bench(argv: Sequence[str]) -> int:
    """Run the benchmark that `argv` names; returns the exit status.

    1: the rivals disagree, so nothing was timed. 2: there is no such benchmark, or it cannot run.
    """
    arguments = [word for word in argv if word != "--debug"]
    known = names()
    if not arguments or arguments[0] in ("-h", "--help"):
        print("usage: mafrt bench NAME [arguments]   (NAME --help for its arguments)")
        print("benchmarks: " + ", ".join(known))
        return 0 if arguments else 2
    name = arguments[0]
    if name not in known:
        near = difflib.get_close_matches(name, known, 1)
        hint = f"did you mean {near[0]!r}?" if near else "expected one of: " + ", ".join(known)
        raise ConfigError(f"found no benchmark {name!r}; {hint}")
    with _found():
        disagreement = importlib.import_module("bench._measure").Disagreement
        try:
            result = importlib.import_module(f"bench.{name}").run(arguments[1:])
        except disagreement as error:
            print(f"{name}: {error}", file=sys.stderr)
            return 1
    print(json.dumps(result))
    return 0


@contextlib.contextmanager
def _found() -> Iterator[None]:
    """The package `bench` is found, here and in processes that a benchmark starts; afterwards all is as it was."""
    before, paths = os.environ.get("PYTHONPATH"), list(sys.path)
    found = importlib.util.find_spec("bench")
    if found is None or found.origin is None or Path(found.origin).resolve().parents[1] != CHECKOUT:
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(CHECKOUT), before]))
        sys.path.insert(0, str(CHECKOUT))
    try:
        yield
    finally:
        sys.path[:] = paths
        if before is None:
            os.environ.pop("PYTHONPATH", None)
        else:
            os.environ["PYTHONPATH"] = before


main = partial(run_main, bench)

if __name__ == "__main__":
    sys.exit(main())
