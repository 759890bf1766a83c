"""The process in which math-verify parses what models wrote: JSON lines in, JSON lines out.

Started by `mafrt.envs.math.verify` as `python -m mafrt.envs.math._worker`. Parsing happens on the main thread, where
math-verify's signal time-outs work. Only its LaTeX reader is used: its reader of plain expressions calls
`sympy.parse_expr`, which runs what it reads. Behind that stand an audit hook that refuses to start programs, open
sockets or write files, and limits on memory, processor time and file size.

    -> {"given": "\\\\frac12", "reference": "0.5"}
    <- {"equal": true, "timeout": false}
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import resource
import sys
from typing import Any

MEMORY_MIB = 2048
CPU_S = 30
"""Processor seconds for one pair; the parent's deadline comes first unless the parent is gone."""
PARSE_S, COMPARE_S = 1, 2

_REFUSED = ("os.system", "os.exec", "os.fork", "os.forkpty", "os.posix_spawn", "os.spawn", "os.kill", "os.remove",
            "os.rename", "os.rmdir", "os.mkdir", "os.link", "os.symlink", "os.truncate", "os.chmod", "os.chown",
            "pty.spawn", "subprocess.Popen", "shutil.rmtree", "ctypes.dlopen")  # fmt: skip


def refuse(event: str, args: tuple[Any, ...]) -> None:
    """Audit hook: nothing that math needs starts a program, opens a socket or writes a file."""
    if event in _REFUSED or event.startswith("socket."):
        raise PermissionError(f"{event} is refused in the verifier's process")
    if event == "open":
        mode, flags = args[1], args[2]
        writes = any(c in mode for c in "wax+") if isinstance(mode, str) else False
        if writes or (isinstance(flags, int) and flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC)):
            raise PermissionError("writing a file is refused in the verifier's process")


class TimeoutWatch(logging.Handler):
    """math-verify reports its own time-outs only in its log."""

    seen = False

    def emit(self, record: logging.LogRecord) -> None:
        self.seen = self.seen or str(record.msg).startswith("Timeout during")


def limit(kind: int, value: int) -> None:
    """Lower a limit as far as the system lets us; a platform without that limit keeps its own."""
    with contextlib.suppress(ValueError, OSError):
        hard = resource.getrlimit(kind)[1]
        resource.setrlimit(kind, (value if hard == resource.RLIM_INFINITY else min(value, hard), hard))


def main() -> None:
    # What a library prints must not end up among the replies.
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)

    def reply(message: dict[str, Any]) -> None:
        replies.write(json.dumps(message) + "\n")
        replies.flush()

    try:
        from math_verify import LatexExtractionConfig, parse, verify
    except ImportError as error:
        reply({"error": str(error)})
        return
    watch = TimeoutWatch()
    logging.getLogger("math_verify").addHandler(watch)
    config = [LatexExtractionConfig(boxed_match_priority=0)]

    def read(answer: str) -> list[Any]:
        return parse(f"\\boxed{{{answer}}}", extraction_config=config, parsing_timeout=PARSE_S)

    # The first call imports and compiles the grammar; it must not count against an answer's deadline.
    verify(read("\\frac{1}{2}"), read("0.5"), timeout_seconds=COMPARE_S)
    limit(resource.RLIMIT_AS, MEMORY_MIB * 2**20)
    limit(resource.RLIMIT_FSIZE, 0)
    limit(resource.RLIMIT_CORE, 0)
    sys.addaudithook(refuse)
    reply({"ready": True})
    for line in sys.stdin:
        used = resource.getrusage(resource.RUSAGE_SELF)
        limit(resource.RLIMIT_CPU, int(used.ru_utime + used.ru_stime) + CPU_S)
        request = json.loads(line)
        watch.seen, equal = False, False
        # Whatever goes wrong while reading an answer, the answer is not right.
        with contextlib.suppress(Exception):
            equal = bool(verify(read(request["reference"]), read(request["given"]), timeout_seconds=COMPARE_S))
        reply({"equal": equal, "timeout": watch.seen})


if __name__ == "__main__":
    main()
