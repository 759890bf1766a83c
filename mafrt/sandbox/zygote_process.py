"""The trainer's end of a zygote: start it, hand it connections, notice its death."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import IO, Any

from mafrt.core.errors import SandboxError
from mafrt.sandbox import cgroup
from mafrt.sandbox.inside.limits import SPARE

log = logging.getLogger(__name__)

START_S = 120.0
"""How long imports may take, on a machine that is very busy."""

Command = Callable[[int, int, "Options"], tuple[list[str], dict[str, str]]]
"""(control socket, descriptor of bubblewrap's status output, options) -> (arguments, environment)."""


@dataclass(frozen=True)
class Options:
    """How a zygote is started."""

    libraries: bool = True
    """whether numpy, pandas and scikit-learn are imported beforehand"""
    grouped: bool = False
    """whether each snippet gets a control group"""


class Zygote:
    """One warm interpreter. It lives until `end`, or until this process is gone."""

    def __init__(self, command: Command, options: Options, groups: cgroup.Groups | None = None) -> None:
        self._groups = groups
        self._messages: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115
        # Packets keep messages apart, so descriptors stay with the message they were sent with.
        ours, child_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        told, tell = os.pipe()
        try:
            arguments, environment = command(child_end.fileno(), tell, options)
            self._process = subprocess.Popen(
                arguments,
                env=environment,
                # The trainer's folder must not be held, and may be unreadable for the sandbox's user.
                cwd="/",
                stdin=subprocess.DEVNULL,
                stdout=self._messages,
                stderr=self._messages,
                pass_fds=(child_end.fileno(), tell),
                # Ctrl-C in the trainer's terminal must not end the sandbox before the trainer has stopped in order.
                start_new_session=True,
            )
        except OSError as error:
            ours.close()
            os.close(told)
            self._messages.close()
            raise SandboxError(f"the sandbox could not be started: {error}") from error
        finally:
            child_end.close()
            os.close(tell)
        self._control = ours
        self.pid = self._process.pid
        """Of the interpreter itself, as this machine counts."""
        try:
            self.versions = self._wait_until_ready()
            with open(told, "rb") as file:
                told = -1
                about = file.read()
            if about:
                self.pid = int(json.loads(about)["child-pid"])
            for _ in range(SPARE if groups is not None else 0):
                self._send(None)
        except BaseException:
            if told >= 0:
                os.close(told)
            self.end()
            raise

    def hand_over(self, connection: socket.socket, end_after_s: float) -> None:
        """Have a supervisor forked for the other end of this connection. Raises ConnectionError if it is dead."""
        self._send(end_after_s, connection.fileno())

    def _send(self, end_after_s: float | None, *descriptors: int) -> None:
        """A message to the zygote, with a fresh control group if there are any."""
        message: dict[str, Any] = {"end_after_s": end_after_s}
        opened: list[int] = []
        try:
            if self._groups is not None:
                group = self._groups.make()
                message["group"], opened = group.name, group.open()
            socket.send_fds(self._control, [json.dumps(message).encode()], [*descriptors, *opened])
        finally:
            cgroup.close(opened)

    def is_dead(self, within_s: float = 1.0) -> bool:
        """Whether it has ended; a connection breaks a little before that can be seen."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(within_s)
            return True
        return False

    def kill(self) -> None:
        """End it at once, with everything in it."""
        if self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)

    def end(self) -> None:
        """Close the control socket, upon which it ends, and see that it does."""
        self._control.close()
        try:
            self._process.wait(5.0)
        except subprocess.TimeoutExpired:
            self.kill()
            self._process.kill()
            self._process.wait()
        self._messages.close()

    def forget(self) -> None:
        """In a fork of the process that started it: let go, and leave it alone."""
        self._control.close()
        self._messages.close()

    def _wait_until_ready(self) -> dict[str, str]:
        deadline = time.monotonic() + START_S
        self._control.settimeout(START_S)
        try:
            data = self._control.recv(65536)
        except TimeoutError:
            raise SandboxError(f"the sandbox did not start within {START_S:g} s.{self._last_words()}") from None
        except OSError as error:
            raise SandboxError(f"the sandbox did not start: {error}.{self._last_words()}") from error
        if not data:
            self.is_dead(max(0.0, min(5.0, deadline - time.monotonic())))
            raise SandboxError(f"the sandbox ended while it was starting.{self._last_words()}")
        message = json.loads(data)
        if "error" in message:
            raise SandboxError(f"the sandbox could not be set up: {message['error']}")
        # Shorter from now on: a warm interpreter answers in milliseconds, and a dead one must not hold a thread.
        self._control.settimeout(10.0)
        if message["threads"] != 1:
            log.warning("the sandbox's warm interpreter has %d threads; forks of it have one", message["threads"])
        return {str(name): str(version) for name, version in message["ready"].items()}

    def _last_words(self) -> str:
        self._messages.seek(0)
        lines = self._messages.read(65536).decode("utf-8", "replace").strip().splitlines()
        return f" It said: {lines[-1][:300]}" if lines else ""


def interpreter(tier: str, control: int, inside: str, options: Options) -> Sequence[str]:
    """Arguments after the interpreter's name: start the zygote from the folder `inside`, wherever that is there."""
    words = ["warm" if options.libraries else "bare", "grouped" if options.grouped else "ungrouped"]
    return ["-s", "-B", "-c", _BOOT, inside, tier, str(control), *words]


# By its path, so that nothing beside it is importable, now or for a snippet.
_BOOT = """
import importlib.util, sys
place, tier, control, libraries, grouped = sys.argv[1:]
spec = importlib.util.spec_from_file_location("inside", place + "/__init__.py", submodule_search_locations=[place])
sys.modules["inside"] = package = importlib.util.module_from_spec(spec)
spec.loader.exec_module(package)
del sys.path[0], sys.argv[1:]
sys.path[:] = [path for path in sys.path if not path.endswith(("site-packages", "dist-packages"))]
from inside.zygote import main
main(tier, int(control), libraries == "warm", grouped == "grouped")
"""

ENVIRONMENT = {
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "LANG": "C.UTF-8",
    "USER": "sandbox",
    "LOGNAME": "sandbox",
    "TZ": "UTC",
    "PYTHONHASHSEED": "0",
    "MPLBACKEND": "agg",
    # A pool of threads does not survive a fork, and the cores are shared by many snippets.
    **{f"{name}_NUM_THREADS": "1" for name in ("OMP", "OPENBLAS", "MKL", "NUMEXPR", "VECLIB_MAXIMUM", "BLIS")},
    # pandas imports pyarrow, whose allocator would start a thread.
    "ARROW_DEFAULT_MEMORY_POOL": "system",
    "JE_ARROW_MALLOC_CONF": "background_thread:false",
    "LOKY_MAX_CPU_COUNT": "1",
}
"""Environment of a snippet, besides HOME and TMPDIR. The trainer's own variables are not passed on, since a snippet can
read the environment that bubblewrap was started with."""
