"""Process that matches regular expressions: `{"patterns": [...], "texts": [...]}` in, a row of truths for each out.

It imports the standard library only. `patterns.py` is the side that asks.
"""

from __future__ import annotations

import contextlib
import json
import re
import resource
import sys

CPU_S = 2
MEMORY_MIB = 512


def main() -> None:
    asked = json.load(sys.stdin)
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_S, CPU_S))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(ValueError):  # a Mac takes no such limit
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_MIB * 2**20, MEMORY_MIB * 2**20))
    expressions = map(re.compile, asked["patterns"])
    json.dump([[each.fullmatch(text) is not None for text in asked["texts"]] for each in expressions], sys.stdout)


if __name__ == "__main__":
    main()
