"""What a base brings along and is computed with, tried within bounds before anything waits for it.

A chat template is a program, a tokenizer's expressions may take for ever over a text, and a config.json may describe a
model that is never laid out. The process that computes with one cannot end it, so each is tried in a fork.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import resource
import signal
import string
import time
import warnings
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from typing import Any, NoReturn

from mafrt.core.errors import ModelError
from mafrt.core.text import shortened
from mafrt.models.outside_text import controls_of

TRIAL_S, TRIAL_CPU_S, TRIAL_MIB = 300.0, 20, 1024
"""bounds of a trial, by the clock, of a processor, and of memory"""
SAID = 65536
"""most bytes that a trial says, as many as a pipe holds"""

TRIED_TEXTS = (
    # Expressions that take for ever do so over a run of what they repeat, and not without the character behind it.
    *(char * 40 + string.printable for char in f"{string.printable}\u00e9\u0301\u4e00\u200b\U0001f600"),
    "a" * 10_000 + string.printable,
    " " * 10_000 + string.printable,
    "aA1." * 2500,
)


def check_tokenizer_ends(name: str, tokenizer: Any) -> None:
    """Raise ModelError for a chat template or tokenizer that does not end, dies, or fills the memory."""
    said = in_fork(lambda: _fill_in(tokenizer), lambda: _encode(tokenizer))
    if len(said) < 2:
        raise ModelError(
            f"the {('chat template', 'tokenizer')[len(said)]} of the model {name!r} does not end within {TRIAL_CPU_S} "
            f"s, or needs more than {TRIAL_MIB} MiB of memory, for "
            f"{('a chat of four words', 'runs of one character')[len(said)]}; take another copy"
        )


def in_fork(*steps: Callable[[], str]) -> list[str]:
    """What the steps return in a fork, one line each; fewer where one raises, dies, or needs more than a trial may."""
    heard, told = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # the child uses no thread but its own
        pid = os.fork()
    if pid == 0:
        _work(steps, told)
    os.close(told)
    deadline = time.monotonic() + TRIAL_S
    while not os.waitpid(pid, os.WNOHANG)[0]:
        if time.monotonic() > deadline:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            break
        time.sleep(0.002)
    os.set_blocking(heard, False)  # another fork may hold the other end
    with open(heard, "rb") as file:
        return (file.read(SAID) or b"").decode("utf-8", "replace").split("\n")[:-1]


def _work(steps: Sequence[Callable[[], str]], told: int) -> NoReturn:
    """Take the steps within bounds, and end this process."""
    try:
        faulthandler.disable()
        os.environ["RUST_BACKTRACE"] = "0"  # a backtrace takes memory: where there is none, it waits for itself
        signal.signal(signal.SIGXCPU, signal.SIG_DFL)
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1)
        os.dup2(null, 2)
        with contextlib.suppress(OSError, ValueError):  # a Mac has other files, and takes no such limit
            mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (mapped + TRIAL_MIB * 2**20,) * 2)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_CPU, (TRIAL_CPU_S, TRIAL_CPU_S))
        for step in steps:
            os.write(told, f"{shortened(step(), 400)}\n".encode("utf-8", "replace"))
    finally:
        os._exit(0)


def _fill_in(tokenizer: Any) -> str:
    if not getattr(tokenizer, "chat_template", None):
        return ""
    words = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    chats = (words, [{"role": "system", "content": "d"}, *words], [*words, {"role": "tool", "content": "e"}])
    refused = 0
    for chat in chats:
        for tools, asked in product((None, [], [tool]), (True, False)):
            try:
                tokenizer.apply_chat_template(chat, tools=tools, add_generation_prompt=asked, tokenize=False)
            except MemoryError:
                raise SystemExit from None
            except Exception:  # it says so when it gets such a chat
                refused += 1
    return f"refuses {refused} chats"


def _encode(tokenizer: Any) -> str:
    if (backend := getattr(tokenizer, "backend_tokenizer", None)) is None:
        return ""
    controls_of(tokenizer).pieces(TRIED_TEXTS[-1])
    unread = 0
    for text in TRIED_TEXTS:
        try:
            backend.decode(backend.encode(text, add_special_tokens=False).ids, skip_special_tokens=False)
        except Exception:  # told when such a text is read; a panic of its library is no Exception
            unread += 1
    return f"cannot read {unread} texts"
