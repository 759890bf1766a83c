"""Stand-alone program for a SandboxFusion server: runs the snippet and writes its result to one file.

It imports nothing of mafrt, since the server has only the standard library. It exists because such a server reports
150 kB of output as a time-out, cannot list files, follows links, and hides the signal that ended a program.
"""

from __future__ import annotations

import base64
import contextlib
import ctypes
import hashlib
import hmac
import json
import os
import resource
import signal
import stat
import subprocess
import sys
import threading
import time

TYPE_CHECKING = False
"""Type checkers take it for true; here nothing of typing is imported."""
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import IO, Any

ORDER, SNIPPET, RESULT = ".mafrt_order.json", "snippet.py", ".mafrt_result.json"


class Tail:
    """Beginning and end of a stream, read by a thread of its own, which calls `stop` when there are `most` bytes."""

    def __init__(self, stream: IO[bytes], half: int, most: int, stop: Callable[[], None]) -> None:
        self.stream, self.half, self.most, self.stop = stream, half, most, stop
        self.head, self.end, self.total = bytearray(), bytearray(), 0
        self.thread = threading.Thread(target=self.pump, daemon=True)
        self.thread.start()

    def pump(self) -> None:
        while True:
            data = os.read(self.stream.fileno(), 65536)
            if not data:
                return
            if self.total <= self.most < self.total + len(data):
                self.stop()
            self.total += len(data)
            room = max(0, self.half - len(self.head))
            self.head += data[:room]
            self.end = (self.end + data[room:])[-self.half :]

    def add(self, line: bytes) -> None:
        self.end += line
        self.total += len(line)

    def text(self) -> str:
        left = self.total - len(self.head) - len(self.end)
        line = b"\n[... %d bytes left out ...]\n" % left if left else b""
        return base64.b64encode(bytes(self.head) + line + bytes(self.end)).decode()


DEEPEST = 16
"""Levels of folders that are looked into."""
WARM_MIB = 256
"""Memory already written by an interpreter with pandas and scikit-learn before the snippet's first line."""


def limit_memory(mib: int) -> None:
    """Data, not address space: libraries map much that they never touch."""
    resource.setrlimit(resource.RLIMIT_DATA, ((mib + WARM_MIB) * 2**20,) * 2)


def candidates(order: dict[str, Any]) -> Iterator[str]:
    """Names to look at: those that were asked for, or all there are."""
    if order["fetch"] != ["*"]:
        yield from order["fetch"]
        return
    waiting = [""]
    while waiting:
        folder = waiting.pop()
        try:
            entries = sorted(os.listdir(folder or "."))
        except OSError:
            continue
        for name in entries:
            path = os.path.join(folder, name)
            if os.path.isdir(path) and not os.path.islink(path):
                if name != "__pycache__" and path.count("/") + 1 < DEEPEST:
                    waiting.append(path)
            elif path not in (ORDER, SNIPPET, RESULT, os.path.basename(sys.argv[0])):
                yield path


def gather(order: dict[str, Any]) -> tuple[dict[str, str], dict[str, str]]:
    """File contents, and reasons for refused files; unchanged files are omitted."""
    files: dict[str, str] = {}
    refused: dict[str, str] = {}
    room, count = order["fetch_bytes"], 0
    for name in candidates(order):
        count += 1
        if count > order["fetch_files"]:
            refused["*"] = f"more than {order['fetch_files']} files; the rest was left"
            break
        shown = name.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
        if not shown.isprintable() or shown != name:
            refused[shown] = "a name with control characters"
            continue
        try:
            # Resolved and compared, since a folder on the way may be a link that leads out.
            folder = os.path.dirname(name)
            if os.path.realpath(folder or ".") != os.path.normpath(os.path.join(os.path.realpath("."), folder)):
                refused[name] = "its folder is a link"  # whether there is anything behind it or not
                continue
            kind = os.lstat(name)
            if stat.S_ISLNK(kind.st_mode):
                refused[name] = "a symbolic link"
            elif not stat.S_ISREG(kind.st_mode):
                refused[name] = "not a regular file"
            elif kind.st_size > order["fetch_file_bytes"]:
                refused[name] = f"{kind.st_size} bytes; at most {order['fetch_file_bytes']} are taken"
            elif kind.st_size > room:
                refused[name] = "all files together are too large"
            else:
                with open(name, "rb") as file:
                    content = file.read(room)
                if order["fetch"] == ["*"] and content == order["handed"].get(name):
                    continue
                room -= len(content)
                files[name] = base64.b64encode(content).decode()
        except FileNotFoundError:
            pass
        except OSError as error:
            refused[name] = f"cannot be read: {error.strerror}"
    return files, refused


def main() -> None:
    order = read_order()
    began = time.monotonic()
    process = start(order)
    most = order["most_output"]
    assert process.stdout is not None and process.stderr is not None  # both are pipes
    streams = [Tail(each, order["half"], most, lambda: end(process)) for each in (process.stdout, process.stderr)]
    late = False
    try:
        code = process.wait(order["timeout_s"])
    except subprocess.TimeoutExpired:
        late = True
    seconds = time.monotonic() - began
    end(process)
    process.wait()
    for stream in streams:
        # Not for ever, since a daemon of the snippet may hold the pipe open.
        stream.thread.join(1.0)
    if os.path.exists(SNIPPET):
        os.remove(SNIPPET)
    files, refused = gather(order)
    last = bytes(streams[1].end or streams[1].head).strip().split(b"\n")[-1]
    # Only the error's own name counts; a message that mentions it is the program's text.
    lacking = b"MemoryError" in last.split(b":")[0]
    if any(stream.total > most for stream in streams):
        streams[1].add(b"\n[sandbox] ended: it wrote more than %d MiB\n" % (most // 2**20))
    result = {
        "exit_code": None if late else code,
        "late": late,
        "memory": lacking,
        "seconds": seconds,
        "streams": [stream.text() for stream in streams],
        "files": files,
        "refused": refused,
        "gone": [name for name in order["names"] if not os.path.lexists(name)],
    }
    write_result(result, order["key"])


def end(process: subprocess.Popen[bytes]) -> None:
    """End the whole group: what the snippet started must neither outlive it nor hold its streams open."""
    with contextlib.suppress(OSError):
        # Killed and not asked to end: a handler of the snippet could otherwise go on writing.
        os.killpg(process.pid, signal.SIGKILL)


def read_order() -> dict[str, Any]:
    """The order, with the content of the files that were handed over; a snippet with null bytes is replaced."""
    with open(ORDER, encoding="utf-8") as file:
        order: dict[str, Any] = json.load(file)
    # Removed before the snippet runs, since it holds the key.
    os.remove(ORDER)
    # Other processes of this user may not look into this one, which alone knows the key.
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(4, 0, 0, 0, 0)
    order["handed"] = {}
    for name in order["names"]:
        with open(name, "rb") as file:
            order["handed"][name] = file.read()
    with open(SNIPPET, "rb") as file:
        cut = b"\0" in file.read()
    if cut:  # before 3.11.4 an interpreter reads a file as far as that, and says nothing
        with open(SNIPPET, "w", encoding="utf-8") as file:
            file.write("raise SyntaxError('source code cannot contain null bytes')\n")
    return order


def start(order: dict[str, Any]) -> subprocess.Popen[bytes]:
    """The process of the snippet, in a session of its own."""
    environment = {**os.environ, **{name + "_NUM_THREADS": "1" for name in ("OMP", "OPENBLAS", "MKL")}}
    # Output written before a kill is then not lost in a buffer.
    environment["PYTHONUNBUFFERED"] = "1"
    return subprocess.Popen(
        [sys.executable, SNIPPET],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
        preexec_fn=lambda: limit_memory(order["memory_mib"]),
    )


def write_result(result: dict[str, Any], key: str) -> None:
    """Write the result with its seal, which the snippet cannot make."""
    text = json.dumps(result).encode()
    seal = hmac.new(bytes.fromhex(key), text, hashlib.sha256).hexdigest()
    # Created anew and exclusively: the snippet may have left a file or a link of this name.
    with contextlib.suppress(OSError):
        os.remove(RESULT)
    with open(RESULT, "xb") as file:
        file.write(seal.encode() + b"\n" + text)


if __name__ == "__main__":
    main()
