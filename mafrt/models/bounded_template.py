"""A chat template is a program of the base's: it is tried within bounds before anything waits for it."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import time
import warnings
from itertools import product
from pathlib import Path
from typing import Any, NoReturn

from mafrt.core.errors import ModelError

TEMPLATE_S, TEMPLATE_CPU_S, TEMPLATE_MIB = 120.0, 5, 1024
"""bounds of filling a chat template in, by the clock, of a processor, and of memory"""


def check_template_ends(name: str, tokenizer: Any) -> None:
    """Raise ModelError for a chat template that does not end, or fills the memory: it is a program of the base's.

    It is tried in a fork, which alone can be ended.
    """
    if not getattr(tokenizer, "chat_template", None):
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # the child computes with texts alone
        pid = os.fork()
    if pid == 0:
        _try_template(tokenizer)
    deadline = time.monotonic() + TEMPLATE_S
    while not (ended := os.waitpid(pid, os.WNOHANG))[0]:
        if time.monotonic() > deadline:
            os.kill(pid, signal.SIGKILL)
            ended = os.waitpid(pid, 0)
            break
        time.sleep(0.002)
    if ended[1]:
        raise ModelError(
            f"the chat template of the model {name!r} does not end within {TEMPLATE_CPU_S} s, or needs more than "
            f"{TEMPLATE_MIB} MiB of memory, for a chat of four words; take another copy"
        )


def _try_template(tokenizer: Any) -> NoReturn:
    """Fill the template in, within bounds, and end this process."""
    code, full = 1, False
    try:
        signal.signal(signal.SIGXCPU, signal.SIG_DFL)
        with contextlib.suppress(OSError, ValueError):  # a Mac has other files, and takes no such limit
            mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (mapped + TEMPLATE_MIB * 2**20,) * 2)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_CPU, (TEMPLATE_CPU_S, TEMPLATE_CPU_S))
        words = [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": "b"},
            {"role": "user", "content": "c"},
        ]
        tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
        chats = (words, [{"role": "system", "content": "d"}, *words], [*words, {"role": "tool", "content": "e"}])
        for chat in chats:
            for tools, asked in product((None, [tool]), (True, False)):
                try:
                    tokenizer.apply_chat_template(chat, tools=tools, add_generation_prompt=asked, tokenize=False)
                except Exception as error:  # one that refuses a chat says so when it gets one
                    full |= isinstance(error, MemoryError)
        code = int(full)
    finally:
        os._exit(code)
