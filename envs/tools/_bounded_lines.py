"""Runs a program and passes its output on, line by line, until a line is too long: `_bounded_lines.py BYTES COMMAND...`

The client of an MCP server keeps a line in memory until it ends, however long it is. This process stands
between them. It imports the standard library only, and hands its own standard input on to the program.
"""

from __future__ import annotations

import subprocess
import sys

CHUNK = 65536


def main(most: int, command: list[str]) -> int:
    """The exit code of the program; 1 if it was ended for a line of more than `most` bytes."""
    program = subprocess.Popen(command, stdout=subprocess.PIPE)
    assert program.stdout is not None
    length = 0
    while chunk := program.stdout.read1(CHUNK):  # type: ignore[attr-defined]
        first, *others = chunk.split(b"\n")
        length += len(first)
        if length > most:
            program.kill()
            program.wait()
            return 1
        length = len(others[-1]) if others else length
        sys.stdout.buffer.write(chunk)
        sys.stdout.buffer.flush()
    return program.wait()


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
