"""The warm interpreter: everything a snippet may want is imported once, and every snippet is a fork of it.

Started as `python -c "...; main()"` with a socket as the only open file; see `mafrt.sandbox.zygote_process`. It never
runs a snippet, reads nothing that a snippet wrote, and ends when the trainer's end of the socket closes, however that
happens.
"""

from __future__ import annotations

import contextlib
import gc
import json
import math
import os
import select
import signal
import socket
import time
from collections import deque
from dataclasses import dataclass

from . import frames, libc, pages, supervise, warm
from .confine import UNPRIVILEGED_ID, Confinement, Landlocked, Namespaces
from .group import ControlGroup
from .limits import SPARE


@dataclass
class Child:
    """A supervisor."""

    pid: int
    handle: int
    line: socket.socket | None
    """Over which it gets its connection; None once it has."""
    until: float = math.inf
    """When it is ended by force: long after it should have ended its snippet itself."""


GROUP_FILES = 4
"""Most descriptors of a control group that come with a message."""


def main(tier: str, control_fd: int, libraries: bool, grouped: bool) -> None:
    """Warm up, say so, then fork a supervisor for every connection that arrives on the control socket.

    `grouped`: every message also brings a control group, which the next supervisor takes for its snippet; the first
    `SPARE` messages bring nothing else.
    """
    # Python's own handler would let a snippet's signal through to its supervisor, which inherits it.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.closerange(3, control_fd)
    os.closerange(control_fd + 1, 65536)
    control = socket.socket(fileno=control_fd)
    try:
        confinement: Confinement = Landlocked() if tier == "degraded" else _enter_room()
        versions = warm.up() if libraries else {}
    except Exception as error:
        control.send(json.dumps({"error": f"{type(error).__name__}: {error}"}).encode()[:60000])
        return
    gc.collect()
    gc.freeze()  # a collection in a fork then leaves these pages shared
    pages.collapse()
    threads = len(os.listdir("/proc/self/task"))
    control.send(json.dumps({"ready": versions, "threads": threads}).encode())
    with contextlib.suppress(ConnectionError):
        _serve(control, confinement, grouped)
    confinement.leave()
    os._exit(0)


def _enter_room() -> Confinement:
    """In bubblewrap: as root, become another user, with a /proc that has nothing mounted over it."""
    if os.getuid() == 0:
        # The kernel lets a new user namespace have a /proc of its own only where all of this one is visible.
        for covered in _mounts_below("/proc/"):
            libc.unmount(covered)
        os.setgroups([])
        os.setresgid(UNPRIVILEGED_ID, UNPRIVILEGED_ID, UNPRIVILEGED_ID)
        os.setresuid(UNPRIVILEGED_ID, UNPRIVILEGED_ID, UNPRIVILEGED_ID)
        libc.prctl(libc.PR_SET_DUMPABLE, 1)  # its own /proc/self/uid_map must be its own to write
    return Namespaces()


def _mounts_below(prefix: str) -> list[str]:
    with open("/proc/self/mounts", encoding="utf-8") as file:
        return [place for line in file if (place := line.split()[1]).startswith(prefix)]


def _serve(control: socket.socket, confinement: Confinement, grouped: bool) -> None:
    children: dict[int, Child] = {}
    spare: list[Child] = []
    groups: deque[ControlGroup] = deque()
    poll = select.poll()
    poll.register(control, select.POLLIN)
    while True:
        first = min((child.until for child in children.values()), default=math.inf)
        more = len(spare) < SPARE and (bool(groups) or not grouped)
        wait = 0.0 if more else max(0.0, first - time.monotonic())
        events = poll.poll(None if wait == math.inf else 1000 * wait)
        for source, _ in events:
            if source != control.fileno():
                child = children.pop(source)
                poll.unregister(source)
                os.close(source)
                os.waitpid(child.pid, 0)
                if child in spare:
                    spare.remove(child)
                    time.sleep(0.1)  # it should not have ended; not so fast, if they all do
                continue
            data, descriptors, _, _ = socket.recv_fds(control, 4096, 1 + GROUP_FILES)
            if not data:
                return
            message = json.loads(data)
            if grouped:
                fresh = descriptors if message["end_after_s"] is None else descriptors[1:]
                groups.append(ControlGroup(message["group"], fresh))
            if message["end_after_s"] is None:
                continue
            try:
                child = spare.pop(0) if spare else _fork(confinement, groups)
                _assign(child, descriptors[0], float(message["end_after_s"]))
                if child.handle not in children:
                    children[child.handle] = child
                    poll.register(child.handle, select.POLLIN)
            except OSError as error:
                with socket.socket(fileno=descriptors[0]) as connection, contextlib.suppress(OSError):
                    frames.send(connection, {"failed": f"the sandbox could not fork: {error}"})
        if not events and more:
            try:
                child = _fork(confinement, groups)
            except OSError:
                time.sleep(0.1)  # the next request receives the error
                continue
            spare.append(child)
            children[child.handle] = child
            poll.register(child.handle, select.POLLIN)
        _reap_strangers({child.pid for child in children.values()})
        for child in children.values():
            if child.until < time.monotonic():
                signal.pidfd_send_signal(child.handle, signal.SIGKILL)
                child.until += 10.0


def _assign(child: Child, descriptor: int, end_after_s: float) -> None:
    """Give it the trainer's connection."""
    assert child.line is not None
    with child.line:
        socket.send_fds(child.line, [b"serve"], [descriptor])
    os.close(descriptor)
    child.line, child.until = None, time.monotonic() + end_after_s


def _fork(confinement: Confinement, groups: deque[ControlGroup]) -> Child:
    """A supervisor, getting ready; it takes the first of the control groups along."""
    ours, child_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    group = groups.popleft() if groups else None
    try:
        pid = confinement.fork()
    except OSError:
        ours.close()
        child_end.close()
        if group is not None:
            groups.appendleft(group)
        raise
    if pid == 0:
        status = 1
        try:
            # Neither the control socket nor the lines of others: a closed line must be seen to be closed.
            close_others({child_end.fileno(), *(group.descriptors if group is not None else ())})
            with contextlib.suppress(ConnectionError):
                supervise.supervise(child_end, confinement, group)
            status = 0
        except BaseException as error:
            os.write(2, f"supervisor: {type(error).__name__}: {error}\n".encode("utf-8", "replace"))
        finally:
            os._exit(status)
    child_end.close()
    if group is not None:
        group.close()
    return Child(pid, os.pidfd_open(pid), ours)


def close_others(needed: set[int]) -> None:
    """Close every descriptor but the three streams and these."""
    first = 3
    for descriptor in sorted(needed):
        os.closerange(first, descriptor)
        first = descriptor + 1
    os.closerange(first, 65536)


def _reap_strangers(known: set[int]) -> None:
    """Reap orphans: the first process of bubblewrap's pid namespace inherits them."""
    while True:
        try:
            child = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return
        if child is None or child.si_pid in known:
            return
        os.waitpid(child.si_pid, 0)
