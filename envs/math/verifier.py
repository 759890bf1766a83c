"""Is the answer right? Plain numbers are compared here; everything else by math-verify in a process of its own.

Model-written text is never parsed by sympy in the trainer's process (see `_worker.py`). One worker serves all threads.
It is started when the first answer needs it, restarted when it dies or stops replying, and ended with the program. An
answer that uses up its processor time, or that kills the worker twice, is counted and is not right; a worker that
cannot be started at all is an error, never a verdict.
"""

from __future__ import annotations

import atexit
import signal
import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass

from mafrt.core.asked_process import AskedProcess, EndedError
from mafrt.envs.math.answers import (
    MAX_ANSWER_CHARS,
    as_mixed_number,
    asks_for_percent,
    boxed,
    comparable,
    counted,
    extract_answer,
    in_english,
    plain_number,
    quick_verdict,
    same_bases,
    tidy,
    without_labels,
)
from mafrt.envs.math.notation import latex, same_units
from mafrt.envs.math.number_words import in_digits

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
    of a pair, and a busy machine must make no right answer wrong.
    """

    def __init__(self, *, deadline_s: float = 60.0, cache_size: int = 20_000) -> None:
        self.deadline_s, self.cache_size = deadline_s, cache_size
        self.stats = VerifyStats()
        self._lock = threading.RLock()
        self._cache: OrderedDict[tuple[str, str], bool] = OrderedDict()
        self.worker = AskedProcess("mafrt.envs.math._worker", "the answer verifier")

    def verify_many(self, pairs: Iterable[tuple[str, str]], *, last_number: bool = False) -> list[bool]:
        """Whether each text gives its reference answer, in the order of the pairs."""
        return [self.verify(text, reference, last_number=last_number) for text, reference in pairs]

    def close(self) -> None:
        """End the worker; the next answer that needs it starts another."""
        self.worker.close()

    def verify(self, text: str, reference: str, *, last_number: bool = False, problem: str = "") -> bool:
        """As the function `verify`."""
        given = extract_answer(text, last_number=last_number)
        with self._lock:
            self.stats.asked += 1
            if given is None or not tidy(given):
                self.stats.no_answer += 1
                return False
            if len(given) > MAX_ANSWER_CHARS:
                self.stats.too_long += 1
                return False
            reference = boxed(reference) or reference
            if len(reference) > MAX_ANSWER_CHARS:  # which no shorter answer meets
                self.stats.too_long += 1
                return False
            given, reference = tidy(given), tidy(reference)
            if plain_number(given) is None or plain_number(reference) is None:
                given, reference = without_labels(given, reference)
                given, reference = in_digits(given), in_digits(reference)
                given, reference = counted(given, reference), counted(reference, given)
                given = as_mixed_number(in_english(given, reference), reference)
            if "%" in given and plain_number(reference) is not None and asks_for_percent(problem):
                given = given.removesuffix("%").removesuffix("\\")
            plain = (given, reference) if given == reference else same_bases(given, reference)
            verdict = False if plain is None else quick_verdict(*plain)
            if plain is not None and verdict is None and (plain := same_units(*plain)) is not None:
                plain = latex(plain[0]), latex(plain[1])
                verdict = quick_verdict(*plain)
            # None: not to be compared by string work, nor by math-verify.
            parts = None if plain is None or verdict is not None else comparable(*plain)
            if parts is None:
                self.stats.quick += 1
                return bool(verdict)
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
            try:
                reply = self.worker.ask({"given": given, "reference": reference}, self.deadline_s)
                self.stats.timeouts += bool(reply["timeout"])
                return bool(reply["equal"])
            except TimeoutError:
                self.stats.timeouts += 1
                return None
            except EndedError as error:
                if error.returncode == -signal.SIGXCPU:  # out of processor time
                    self.stats.timeouts += 1
                    return None
                # It may have been killed from outside, so the answer gets a second worker before it is blamed.
                self.stats.crashes += last_try
            finally:
                self.stats.restarts = self.worker.restarts
        return None


_SHARED = Verifier()
atexit.register(_SHARED.close)


def verify(text: str, answer: str, *, last_number: bool = False, problem: str = "") -> bool:
    """Whether the answer that `text` gives equals the reference `answer`.

    It is the last \\boxed{...} or \\fbox{...}, else what follows the last `####`, else (`last_number`) the last number.
    Where `problem` asks for a percentage, 25% meets a plain 25.
    """
    return _SHARED.verify(text, answer, last_number=last_number, problem=problem)


def verify_many(pairs: Sequence[tuple[str, str]], *, last_number: bool = False) -> list[bool]:
    """`verify` for many (text, answer) pairs."""
    return _SHARED.verify_many(pairs, last_number=last_number)


def verify_stats() -> dict[str, int]:
    """Counts of the shared verifier since the program began."""
    return asdict(_SHARED.stats)
