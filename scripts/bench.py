"""`mafrt bench NAME [arguments]`: run one benchmark.

The last line printed is its result as JSON.
"""

from __future__ import annotations

import difflib
import importlib
import json
import pkgutil
import sys
from collections.abc import Sequence

from mafrt.scripts import benchmarks
from mafrt.scripts.benchmarks._measure import Disagreement
from mafrt.scripts.cli.run_main import run_main


def names() -> list[str]:
    """The benchmarks there are: the public modules of this package."""
    modules = (module.name for module in pkgutil.iter_modules(benchmarks.__path__))
    return sorted(name for name in modules if not name.startswith("_"))


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
        print(f"found no benchmark {name!r}; {hint}", file=sys.stderr)
        return 2
    try:
        result = importlib.import_module(f"mafrt.scripts.benchmarks.{name}").run(arguments[1:])
    except Disagreement as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 1
    print(json.dumps(result))
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    return run_main(bench, argv)


if __name__ == "__main__":
    sys.exit(main())
