"""The body of a script as a process: errors as one sentence, exit codes, the log on stderr."""

from __future__ import annotations

import atexit
import errno
import io
import logging
import os
import re
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import NoReturn, TextIO

from mafrt.config import permission
from mafrt.core.atomic_files import remedy
from mafrt.core.distributed import joined, started
from mafrt.core.errors import MafrtError, ProcessLostError, is_panic
from mafrt.core.signals import StopRequest, ending, source_of
from mafrt.core.text import one_line
from mafrt.core.threads import wait_passively


def run_main(main: Callable[[Sequence[str]], int], argv: Sequence[str] | None = None) -> int:
    """Run a script's body; an error of ours becomes one sentence on stderr and exit code 2.

    `python scripts/x.py` puts the scripts folder first on `sys.path`, where `evaluate.py` would shadow the package of
    that name; it is taken off again.

    One of several processes ends here and does not return: see `_leave`.
    """
    StopRequest.ends = StopRequest.ends or argv is None  # else a program has called it, and goes on
    with ending() if argv is None else nullcontext():
        code = _run(main, argv)
    if joined():
        _leave(code)
    return code


def _run(main: Callable[[Sequence[str]], int], argv: Sequence[str] | None) -> int:
    # A stream that was closed is None: `input` and `write` fail, and the next file that is opened takes its number.
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115 - for as long as the process lives
    for stream in (sys.stdout, sys.stderr) if argv is None else ():
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # what its encoding lacks, such as … in ASCII
    argv = sys.argv[1:] if argv is None else list(argv)
    try:
        os.getcwd()
    except OSError:
        print("error: the current folder is not there any more; change into one that is.", file=sys.stderr)
        return 2
    here = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    sys.path[:] = [entry for entry in sys.path if not entry or os.path.abspath(entry) != here]
    # Show the library's warnings; other packages' loggers are their own business.
    logger = logging.getLogger("mafrt")
    if not logger.handlers:
        logger.addHandler(_ToStderr())
        logger.propagate = False
    threading.excepthook = _of_thread
    wait_passively()
    try:
        with permission.of_command():
            return main(argv)
    except MafrtError as error:
        if "--debug" in argv:
            raise
        print(f"error{_which()}: " + one_line(str(error)), file=sys.stderr, flush=True)
        if isinstance(error, ProcessLostError):
            os._exit(2)  # a regular exit would wait for processes that are gone
        return 2
    except BrokenPipeError:  # `... | head` has seen enough; keep the interpreter from complaining when it flushes
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:  # a folder that may not be written to, a full disk
        if "--debug" in argv or (refusal := _of_disk(error)) is None:
            raise
        print(f"error: {one_line(refusal)}", file=sys.stderr)
        return 2
    except KeyboardInterrupt as error:
        by, code = source_of(error)
        print(f"Stopped by {by} before anything was saved.", file=sys.stderr)
        return code
    except BaseException as error:  # a panic of Rust's, as of a tokenizer over a text, is no Exception
        if "--debug" in argv or not is_panic(error):
            raise
        why = one_line(str(error))
        print(f"error: a library of the base (its tokenizer) failed: {why}; take another base.", file=sys.stderr)
        return 2


def _of_disk(error: Exception) -> str | None:
    """What a disk refused, as a sentence; None for any other error.

    A full disk names no file where an open one is written to; `shutil`, safetensors and NumPy tell of it in their text.
    """
    advice = f"; {lifted}" if (lifted := remedy(error, "")) else ""
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename} cannot be read or written: {error.strerror}{advice}."
    if isinstance(error, OSError) and error.errno in (errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EMFILE, errno.EROFS):
        return f"a file cannot be written: {error.strerror}{advice}."
    if isinstance(error, OSError) and "No usable temporary directory" in str(error):  # in the words of `tempfile`
        return f"{error.strerror}: make room in one of them, or name another folder in TMPDIR."
    if isinstance(error, RuntimeError) and str(error).startswith("Symlink loop from"):  # of `Path.resolve`
        return f"{str(error)[18:]} is a link that leads to itself; give another path."
    full = any(words in str(error) for words in ("No space left", "os error 28"))
    full |= isinstance(error, OSError) and re.fullmatch(r"\d+ requested and \d+ written", str(error)) is not None
    return "a file cannot be written: no space is left on the device." if full else None


def _of_thread(args: threading.ExceptHookArgs) -> None:
    """What a disk refused to a thread, such as TensorBoard's, as one line; its owner says what is lost."""
    error = args.exc_value
    if isinstance(error, Exception) and "--debug" not in sys.argv and (refusal := _of_disk(error)) is not None:
        logging.getLogger("mafrt").error("%s", one_line(refusal))
    else:
        threading.__excepthook__(args)


def _leave(code: int) -> NoReturn:
    """Exit after running the atexit handlers, but skip the interpreter's teardown.

    Libraries keep process groups beyond `destroy_process_group`, and with them gloo's threads; one of these that lets
    go of a tensor while the interpreter is being taken apart aborts the process (SIGABRT), after all its work was done
    (https://github.com/pytorch/pytorch/issues/190489).
    """
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _which() -> str:
    """Which process this is, where there are several."""
    rank, size = started()
    return f" (process {rank} of {size})" if size > 1 else ""


class _ToStderr(logging.StreamHandler[TextIO]):
    """Writes to the standard error of the moment: programs that call `main` may replace it between two calls."""

    def format(self, record: logging.LogRecord) -> str:
        return f"{record.levelname}{_which()}: {super().format(record)}"

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)
