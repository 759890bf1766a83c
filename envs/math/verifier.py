"""Is the answer right? Plain numbers are compared here; everything else by math-verify in a process of its own.

Model-written text is never parsed by sympy in the trainer's process (see `_worker.py`). One worker serves all threads.
It is started when the first answer needs it, restarted when it dies or stops replying, and ended with the program. An
answer that uses up its processor time, or that kills the worker twice, is counted and is not right; a worker that
cannot be started at all is an error, never a verdict.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from mafrt.core.errors import EnvError, MissingExtraError
from mafrt.envs.math.answers import MAX_ANSWER_CHARS, boxed, comparable, extract_answer, quick_verdict, same_bases, tidy
from mafrt.envs.math.notation import latex

__all__ = ["Verifier", "VerifyStats", "extract_answer", "verify", "verify_many", "verify_stats"]


@dataclass
class VerifyStats:
    """Counters of compared pairs by result."""

    asked: int = 0
    no_answer: int = 0
    """Texts without \\boxed{} or `####`, or with nothing in it."""
    too_long: int = 0
    quick: int = 0
    """Decided by string work."""
    cached: int = 0
    parsed: int = 0
    """Decided by math-verify."""
    timeouts: int = 0
    """Pairs that used up their processor time, or got no reply within the deadline."""
    crashes: int = 0
    """Answers that killed the worker twice."""
    restarts: int = 0


class Verifier:
    """Checks answers with one worker process; safe to share among threads.

    `deadline_s` is how long a reply may take by the clock. It is generous: the worker itself bounds the processor time
    of a pair, and a busy machine must make no right answer wrong. `start_s` is the time for starting the worker.
    """

    def __init__(self, *, deadline_s: float = 60.0, start_s: float = 120.0, cache_size: int = 20_000) -> None:
        self.deadline_s, self.start_s, self.cache_size = deadline_s, start_s, cache_size
        self.stats = VerifyStats()
        self._lock = threading.RLock()
        self._cache: OrderedDict[tuple[str, str], bool] = OrderedDict()
        self._process: subprocess.Popen[bytes] | None = None
        self._owner, self._sent = 0, 0
        self._unread = b""

    def verify_many(self, pairs: Iterable[tuple[str, str]], *, last_number: bool = False) -> list[bool]:
        """Whether each text gives its reference answer, in the order of the pairs."""
        return [self._one(text, reference, last_number) for text, reference in pairs]

    def close(self) -> None:
        """End the worker; the next answer that needs it starts another."""
        with self._lock:
            process, self._process, self._unread = self._process, None, b""
            if process is None or self._owner != os.getpid():
                return
            with contextlib.suppress(OSError):
                process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    with contextlib.suppress(OSError):
                        pipe.close()

    def _one(self, text: str, reference: str, last_number: bool) -> bool:
        given = extract_answer(text, last_number=last_number)
        with self._lock:
            self.stats.asked += 1
            if given is None or not tidy(given):
                self.stats.no_answer += 1
                return False
            if len(given) > MAX_ANSWER_CHARS:
                self.stats.too_long += 1
                return False
            given, reference = tidy(given), tidy(boxed(reference) or reference)
            if given != reference:
                plain = same_bases(given, reference)
                if plain is None:
                    self.stats.quick += 1
                    return False
                given, reference = plain
            verdict = quick_verdict(given, reference)
            if verdict is not None:
                self.stats.quick += 1
                return verdict
            given, reference = latex(given), latex(reference)
            verdict = quick_verdict(given, reference)
            if verdict is not None:
                self.stats.quick += 1
                return verdict
            parts = comparable(given, reference)
            if parts is None:
                self.stats.quick += 1
                return False
            return all(self._equal(part, wanted) for part, wanted in parts)

    def _equal(self, given: str, reference: str) -> bool:
        """math-verify's verdict on one pair, remembered; a pair that it cannot decide is not right."""
        key = (given, reference)
        if key in self._cache:
            self.stats.cached += 1
            self._cache.move_to_end(key)
            return self._cache[key]
        verdict = self._ask(given, reference)
        if verdict is None:
            return False
        self.stats.parsed += 1
        self._cache[key] = verdict
        if len(self._cache) > self.cache_size:
            self._cache.popitem(last=False)
        return verdict

    def _ask(self, given: str, reference: str) -> bool | None:
        """math-verify's verdict, or None if it could not be had (which is counted)."""
        for last_try in (False, True):
            self._ensure_worker()
            assert self._process is not None and self._process.stdin is not None
            try:
                self._sent += 1
                request = {"id": self._sent, "given": given, "reference": reference}
                self._process.stdin.write(json.dumps(request).encode() + b"\n")
                self._process.stdin.flush()
                said = self._read(self.deadline_s)
                while said["id"] != self._sent:  # the reply to a question that Ctrl-C broke off
                    said = self._read(self.deadline_s)
                self.stats.timeouts += bool(said["timeout"])
                return bool(said["equal"])
            except TimeoutError:
                self.stats.timeouts += 1
                self._restart()
                return None
            except OSError:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(timeout=1)
                out_of_time = self._process.returncode == -signal.SIGXCPU
                self._restart()
                if out_of_time:
                    self.stats.timeouts += 1
                    return None
                # It may have been killed from outside, so the answer gets a second worker before it is blamed.
                if last_try:
                    self.stats.crashes += 1
        return None

    def _restart(self) -> None:
        self.stats.restarts += 1
        self.close()

    def _ensure_worker(self) -> None:
        if self._process is not None and self._owner != os.getpid():
            self._process, self._unread = None, b""  # a fork: the worker belongs to the parent
        if self._process is not None and self._process.poll() is None:
            return
        if self._process is not None:
            self._restart()
        # A clean environment: no keys for the worker to read, and the very packages that this process has.
        paths = [os.path.abspath(p) for p in sys.path]
        environment = {"PYTHONPATH": os.pathsep.join(paths), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "mafrt.envs.math._worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                cwd="/",
                env=environment,
                start_new_session=True,  # Ctrl-C is for the trainer
            )
        except OSError as error:
            raise EnvError(f"the answer verifier's process cannot be started: {error}") from error
        self._owner, self._unread = os.getpid(), b""
        try:
            hello = self._read(self.start_s)
        except OSError as error:
            self.close()
            raise EnvError(
                f"the answer verifier's process did not come up ({error or 'it ended'}); try: "
                f"{sys.executable} -c 'import math_verify'"
            ) from error
        if "ready" not in hello:
            self.close()
            raise MissingExtraError(
                f"checking answers needs math-verify ({hello.get('error')}): pip install math-verify"
            )

    def _read(self, deadline_s: float) -> dict[str, Any]:
        """One reply; TimeoutError past the deadline, OSError if the worker is gone or talks nonsense."""
        assert self._process is not None and self._process.stdout is not None
        pipe, until = self._process.stdout.fileno(), time.monotonic() + deadline_s
        while b"\n" not in self._unread:
            left = until - time.monotonic()
            if left <= 0 or not select.select([pipe], [], [], left)[0]:
                raise TimeoutError(f"no reply within {deadline_s:g} s")
            chunk = os.read(pipe, 65536)
            if not chunk:
                raise OSError("the process ended")
            self._unread += chunk
        line, _, self._unread = self._unread.partition(b"\n")
        try:
            return json.loads(line)
        except json.JSONDecodeError as error:
            raise OSError(f"the process sent {line[:80]!r}") from error


_SHARED = Verifier()
atexit.register(_SHARED.close)


def verify(text: str, answer: str, *, last_number: bool = False) -> bool:
    """Whether the answer that `text` gives equals the reference `answer`.

    The answer of a text is its last \\boxed{...} or \\fbox{...}, else the text after its last `####`, else (only with
    `last_number`) its last number; a text that gives none is not right, nor is one whose last box is cut off.
    """
    return _SHARED.verify_many([(text, answer)], last_number=last_number)[0]


def verify_many(pairs: Sequence[tuple[str, str]], *, last_number: bool = False) -> list[bool]:
    """`verify` for many (text, answer) pairs."""
    return _SHARED.verify_many(pairs, last_number=last_number)


def verify_stats() -> dict[str, int]:
    """Counts of the shared verifier since the program began."""
    return asdict(_SHARED.stats)
