"""A sandbox whose snippets are forks of a zygote: the tiers `bwrap` and `degraded`."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mafrt.core.errors import DataError, SandboxError
from mafrt.core.text import readable, readable_name
from mafrt.sandbox import bwrap, cgroup, degraded
from mafrt.sandbox.fair_semaphore import Slots
from mafrt.sandbox.inside import frames, limits, names
from mafrt.sandbox.types import Execution
from mafrt.sandbox.zygote_process import Options, Zygote

log = logging.getLogger(__name__)

START_S = 120.0
"""For a supervisor to be forked and to put the walls up."""
GRACE_S = 15.0
"""After the deadline, for the supervisor to end the snippet and to answer. Then it is ended itself."""
DAY_S = 86400.0
UNGROUPED = "-nocgroup"
"""Suffix of the tier's name where snippets run without control groups."""
STATUSES = ("ok", "error", "timeout", "memory", "killed")


@dataclass
class SandboxCounts:
    """Counters of executions by result."""

    executions: int = 0
    restarts: int = 0
    """Times the zygote had died and was started again."""
    repeated: int = 0
    """Executions begun again, because their zygote died or no room could be made."""


class ZygoteDied(Exception):
    """It may be started again once."""


class NotStarted(Exception):
    """The snippet was not run, and the zygote is well."""


class WarmSandbox:
    """See `mafrt.sandbox.types.Sandbox`. At most `workers` snippets run at a time; the others wait, which costs them
    nothing of their time. `libraries`: whether numpy, pandas and scikit-learn are imported beforehand, which takes
    seconds once and saves one in every snippet that imports them."""

    def __init__(self, tier: str, workers: int = 2, *, libraries: bool = True) -> None:
        kind, _, weaker = tier.partition("-")
        if kind == "degraded":
            degraded.announce()
        # The weaker tier can be asked for by name, so that it can be tested where groups can be made.
        self._groups = None if weaker else cgroup.find()
        self.tier = kind if self._groups is not None else f"{kind}{UNGROUPED}"
        self.counts = SandboxCounts()
        self._command = degraded.command if kind == "degraded" else bwrap.command
        self._slots = Slots(workers)
        self._lock = threading.Lock()
        self._owner = os.getpid()
        self._closed = False
        self._options = Options(libraries, self._groups is not None)
        self._zygote = Zygote(self._command, self._options, self._groups)
        try:
            # Tried once, since a kernel may refuse namespaces only when a snippet asks for them.
            self.execute("pass", timeout_s=60.0)
        except BaseException:
            self.close()
            raise
        if not weaker and self._groups is None:
            log.warning(
                "sandbox tier %r instead of %r: this process can make no control groups, so the kernel's memory of a "
                "snippet is only bounded by fewer processes and open files (docs/sandbox.md)", self.tier, kind,
            )  # fmt: skip
        self.counts = SandboxCounts()

    @property
    def description(self) -> str:
        """The tier and its means, in one line."""
        walls = "Landlock and seccomp" if self.tier.startswith("degraded") else "namespaces and seccomp (bubblewrap)"
        bounds = self._groups.description if self._groups is not None else "resource limits"
        return f"{self.tier}: {walls}; memory and processes bounded by {bounds}"

    @property
    def zygote_pid(self) -> int:
        """Its process on this machine."""
        return self._zygote.pid

    @property
    def versions(self) -> dict[str, str]:
        """Packages imported before a snippet starts, with versions."""
        return dict(self._zygote.versions)

    def execute(
        self,
        code: str,
        files: Mapping[str, bytes] = {},
        fetch: Sequence[str] = (),
        timeout_s: float = 10.0,
        memory_mib: int = 1024,
    ) -> Execution:
        """Run `code` in a fresh folder with `files`; return the files named in `fetch` (`"*"`: all changed ones).

        Raises SandboxError when it could not be run, DataError for names of `files` that are none.
        """
        request = checked_request(code, files, fetch, timeout_s, memory_mib)
        if (fault := unfit(code, files)) is not None:
            return not_run(fault, fetch, self.tier)
        why = ""
        with self._slots:
            self.counts.executions += 1
            for attempt in range(2):
                zygote = self._living()
                try:
                    return self._once(zygote, request, list(files.values()), timeout_s)
                # Begun again once: a snippet cannot reach the zygote, so the machine ended it, perhaps for lack of
                # memory.
                except ZygoteDied as error:
                    why = str(error)
                    self._restart(zygote)
                except NotStarted as error:
                    why = str(error)
                    time.sleep(0.2)
                if attempt == 0:
                    with self._lock:
                        self.counts.repeated += 1
        raise SandboxError(f"the sandbox failed twice in a row: {why}")

    def close(self) -> None:
        """End the zygote and its running snippets."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        # A forked copy of this object must not end a zygote that its parent goes on using.
        if self._owner == os.getpid():
            self._zygote.end()
            if self._groups is not None:
                self._groups.close()
        else:
            self._zygote.forget()

    def __enter__(self) -> WarmSandbox:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _living(self) -> Zygote:
        if self._owner != os.getpid():
            raise SandboxError("this sandbox was opened before the process forked; open one in the one that uses it")
        if self._closed:
            raise SandboxError("this sandbox is closed")
        return self._zygote

    def _restart(self, dead: Zygote) -> None:
        """Unless another thread has done so already."""
        with self._lock:
            if self._closed:
                raise SandboxError("the sandbox was closed while a snippet ran")
            # Several threads notice the same death; only the first one starts another zygote.
            if self._zygote is dead:
                self.counts.restarts += 1
                dead.kill()
                dead.end()
                self._zygote = Zygote(self._command, self._options, self._groups)

    def _once(self, zygote: Zygote, request: dict[str, Any], contents: list[bytes], timeout_s: float) -> Execution:
        ours, child_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        started = False
        group = ""
        with ours:
            try:
                try:
                    with child_end:
                        zygote.hand_over(child_end, START_S + timeout_s + GRACE_S)
                    ours.settimeout(START_S)
                    # A supervisor that failed to start reads no further, but its error message can still be read.
                    with contextlib.suppress(BrokenPipeError):
                        frames.send(ours, request, *contents)
                    message = frames.receive(ours, time.monotonic() + START_S)
                    if "failed" in message:
                        raise NotStarted(str(message["failed"])[:500])
                    started, group = True, str(message.get("group"))
                    message = frames.receive(ours, time.monotonic() + timeout_s + GRACE_S)
                    if "failed" in message:
                        raise NotStarted(str(message["failed"])[:500])
                    return read_reply(ours, message, self.tier, request["fetch"])
                except TimeoutError as error:
                    if started:
                        # After its start a snippet may be the reason of anything, so it is not run again.
                        return _lost(self.tier, "timeout", timeout_s, "its supervisor did not answer in time either")
                    raise ZygoteDied(f"no snippet was started within {START_S:g} s") from error
            except OSError as error:
                if zygote.is_dead():
                    raise ZygoteDied("its warm interpreter died") from error
                if started:
                    return _lost(
                        self.tier, "killed", 0.0, "its supervisor died; the machine may have run out of memory"
                    )
                raise NotStarted(f"the supervisor died before the snippet began: {error}") from error
            finally:
                if self._groups is not None:
                    self._groups.ended(group)


def checked_request(
    code: str, files: Mapping[str, bytes], fetch: Sequence[str], timeout_s: float, memory_mib: int
) -> dict[str, Any]:
    """The message that asks for an execution."""
    for name in files:
        if why := names.fault(name):
            raise DataError(f"found {name!r} as the name of a file for the sandbox: {why}; use a plain relative path")
    if isinstance(fetch, str):
        raise DataError(f"found the text {fetch!r} for fetch, expected a list of names")
    if not 0 < timeout_s <= DAY_S or memory_mib < 1:
        raise DataError(
            f"found timeout_s={timeout_s} and memory_mib={memory_mib}, expected more than zero, and at most a day"
        )
    return {
        # Lone surrogates cannot be encoded in JSON, nor are they valid Python source.
        # A question mark in a surrogate's place: the program may still run.
        "code": code.encode("utf-8", "replace").decode(),
        "files": [[name, len(content)] for name, content in files.items()],
        "fetch": list(fetch),
        "timeout_s": timeout_s,
        "memory_mib": memory_mib,
    }


def unfit(code: str, files: Mapping[str, bytes]) -> str | None:
    """Why a program or its files can be run nowhere, None if they can: a fault of their own and not a sandbox's.

    A workspace's files are those that an agent's programs have left behind.
    """
    if len(code) > limits.CODE_BYTES or len(code.encode("utf-8", "replace")) > limits.CODE_BYTES:
        return f"the program has {len(code)} characters, and at most {limits.CODE_BYTES // limits.MIB} MiB are run"
    folders = {
        "/".join(parts[:depth]) for name in files for parts in [name.split("/")] for depth in range(1, len(parts))
    }
    if both := sorted(folders & files.keys()):
        return f"{readable_name(both[0])!r} is both a file and a folder"
    if len(files) + len(folders) >= limits.WORKDIR_INODES or sum(map(len, files)) > limits.NAMES_BYTES:
        return f"there are {len(files)} files in {len(folders)} folders, more than a workdir holds"
    pages = sum(-(-len(content) // 4096) + 1 for content in files.values()) + len(folders)
    if 4096 * pages > limits.WORKDIR_MIB * limits.MIB:
        return f"all files together have more than the {limits.WORKDIR_MIB} MiB of a workdir"
    return None


def not_run(why: str, fetch: Sequence[str], tier: str) -> Execution:
    """The result of a program that can be run nowhere."""
    missing = () if list(fetch) == ["*"] else tuple(fetch)
    return Execution("error", "", f"[sandbox] not run: {why}\n", 1, {}, missing, {}, 0.0, tier)


def read_reply(connection: socket.socket, message: dict[str, Any], tier: str, asked: Sequence[str] = ()) -> Execution:
    """An Execution from the supervisor's message. Sizes and types are checked as if the snippet had written them, and
    names of files that were not `asked` for are made readable."""
    shown = {name: name for name in asked}

    deadline = time.monotonic() + GRACE_S
    try:
        out_size, err_size = message["streams"]
        sizes = {str(name): int(size) for name, size in message["files"]}
        # Wider than the supervisor keeps, since the line between beginning and end comes on top.
        bound = 4 * (limits.OUTPUT_HEAD_BYTES + limits.OUTPUT_TAIL_BYTES)
        total = sum(sizes.values())
        if not (0 <= out_size <= bound and 0 <= err_size <= bound and min(sizes.values(), default=0) >= 0):
            raise ValueError("sizes out of bounds")
        if total > limits.FETCH_TOTAL_MIB * limits.MIB or message["status"] not in STATUSES:
            raise ValueError("files too large, or an unknown status")
        code = message["exit_code"]
        stdout = frames.receive_bytes(connection, out_size, deadline)
        stderr = frames.receive_bytes(connection, err_size, deadline)
        return Execution(
            status=message["status"],
            stdout=readable(stdout),
            stderr=readable(stderr),
            exit_code=None if code is None else int(code),
            files={name: frames.receive_bytes(connection, size, deadline) for name, size in sizes.items()},
            missing=tuple(shown.get(name, readable_name(str(name))) for name in message["missing"]),
            refused={
                shown.get(name, readable_name(name)): readable_name(str(why))
                for name, why in message["refused"].items()
            },
            seconds=float(message["seconds"]),
            tier=tier,
        )
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise frames.BrokenFrame(f"found a reply that is not as agreed: {error}") from error


def _lost(tier: str, status: Any, seconds: float, why: str) -> Execution:
    return Execution(status, "", f"[sandbox] ended: {why}\n", None, {}, (), {}, seconds, tier)
