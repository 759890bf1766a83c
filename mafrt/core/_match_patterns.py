"""Process that matches regular expressions: `{"patterns", "texts", "cpu_s"}` in, a row of truths for each out.

It imports the standard library only. `patterns.py` is the side that asks.
"""

from __future__ import annotations

import contextlib
import json
import re
import resource
import signal
import sys

MEMORY_MIB = 512


def main() -> None:
    asked = json.load(sys.stdin)
    signal.setitimer(signal.ITIMER_PROF, asked["cpu_s"])  # its signal ends the process, also in the midst of a match
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(ValueError):  # a Mac takes no such limit
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_MIB * 2**20, MEMORY_MIB * 2**20))
    expressions = map(re.compile, asked["patterns"])
    json.dump([[each.fullmatch(text) is not None for text in asked["texts"]] for each in expressions], sys.stdout)


if __name__ == "__main__":
    main()
