"""Supervisor of one snippet: starts it, reads its output, enforces the deadline, collects its files.

In the tier `bwrap` it is the first process of the snippet's pid namespace: no signal from inside reaches it, it cannot
be inspected, and when it exits the kernel ends the whole namespace. It alone holds the socket to the trainer, so the
snippet cannot forge its report.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import time
from dataclasses import dataclass

from . import frames, limits, snippet, watch, workdir
from .confine import UNPRIVILEGED_ID, Confinement
from .group import ControlGroup
from .output import Kept

SETTLE_S = 30.0
"""How long the walls may take, on a machine that is very busy."""


@dataclass(frozen=True)
class Lane:
    """Channels to and from the snippet's process."""

    orders: socket.socket
    out: int
    err: int
    note: int
    shared: int
    """Bytes of memory that it was born with."""


@dataclass
class RunningSnippet:
    """State of a running snippet."""

    pid: int
    note: int
    streams: dict[int, Kept]
    """Read end of a pipe -> its captured output: stdout first, then stderr."""
    shared: int
    """Bytes of memory that it was born with."""
    workdir: str
    group: ControlGroup | None = None
    """None where there are no control groups."""
    notes: bytes = b""
    started: float | None = None
    stopped: float | None = None
    verdict: str | None = None
    """The status, where the supervisor decided it."""
    why: str = ""
    wait_status: int | None = None

    @property
    def kept(self) -> list[Kept]:
        return list(self.streams.values())


def supervise(line: socket.socket, confinement: Confinement, group: ControlGroup | None = None) -> None:
    """Get everything ready, wait on `line` for the trainer's connection, serve one request, end.

    The snippet's process is forked before there is a request, which takes that time out of every request.
    """
    broken, place, lane, pid = "", "", None, 0
    try:
        # Prepared before there is a request, which then waits for none of it.
        place = confinement.prepare()
        lane, pid = _fork(confinement, place)
        if group is not None:
            group.enter(pid)  # before there is a request, since it may take the kernel milliseconds
    except OSError as error:
        broken = f"no room could be made for a snippet: {error}"
    try:
        message, descriptors, _, _ = socket.recv_fds(line, 16, 1)
        # The zygote has closed the line, so the trainer is gone.
        if not message:
            return
        with socket.socket(fileno=descriptors[0]) as connection:
            if broken or lane is None:
                frames.send(connection, {"failed": broken})
            else:
                _serve(
                    connection,
                    confinement,
                    place,
                    lane,
                    RunningSnippet(pid, lane.note, {lane.out: Kept(), lane.err: Kept()}, lane.shared, place, group),
                )
    finally:
        if place:
            _end_all(confinement)
            confinement.clean(place)


def _fork(confinement: Confinement, place: str) -> tuple[Lane, int]:
    """The snippet's process, still waiting for its code."""
    out, err, note = os.pipe(), os.pipe(), os.pipe()
    ours, child_end = socket.socketpair()
    shared = watch.own_bytes("self")
    pid = os.fork()
    if pid == 0:
        snippet.run(child_end, place, confinement, (out[1], err[1]), note[1])
    child_end.close()
    for pipe in (out, err, note):
        os.close(pipe[1])
        # One loop reads all of them, and must not wait on one.
        os.set_blocking(pipe[0], False)
    return Lane(ours, out[0], err[0], note[0], shared), pid


def _serve(connection: socket.socket, confinement: Confinement, place: str, lane: Lane, run: RunningSnippet) -> None:
    request = frames.receive(connection)
    handed = {name: frames.receive_bytes(connection, size) for name, size in request["files"]}
    owner = None if confinement.alone or os.getuid() else UNPRIVILEGED_ID
    try:
        workdir.write(place, handed, owner)
    except OSError as error:
        frames.send(connection, {"failed": f"the files could not be put into the workdir: {error}"})
        return
    timeout_s, memory_mib = float(request["timeout_s"]), int(request["memory_mib"])
    # A pid namespace counts its own; elsewhere the limit is about all processes of that user.
    others = 0 if confinement.alone else watch.tasks_of(UNPRIVILEGED_ID if os.getuid() == 0 else os.getuid())
    processes, open_files = limits.FEWER_PROCESSES, limits.FEWER_OPEN_FILES
    if run.group is not None:
        processes, open_files = limits.PROCESSES, limits.OPEN_FILES
        run.group.limit(memory_mib)
    order = {"code": request["code"], "budget": [memory_mib, timeout_s, others + processes, open_files]}
    with lane.orders, contextlib.suppress(BrokenPipeError):
        frames.send(lane.orders, order)
    _follow(run, connection, confinement, timeout_s, memory_mib * limits.MIB)
    if run.verdict == "gone":
        return
    _end_all(confinement, run)
    _drain(run)
    if run.started is None:
        text = run.notes.removeprefix(snippet.BROKEN).decode("utf-8", "replace") or "it ended early"
        frames.send(connection, {"failed": f"the snippet's process could not be confined: {text}"})
        return
    _reply(connection, run, request["fetch"], handed)


def _follow(
    run: RunningSnippet, connection: socket.socket, confinement: Confinement, timeout_s: float, memory: int
) -> None:
    """Until the snippet's main process has ended, or must be."""
    every = limits.WATCH_EVERY_S if run.group is not None else limits.WATCH_MORE_OFTEN_S
    # A descriptor that becomes ready at its end, since a SIGCHLD handler could be lost in a fork.
    ended = os.pidfd_open(run.pid)
    poll = select.poll()
    for source in (run.note, *run.streams, ended, connection.fileno()):
        poll.register(source, select.POLLIN)
    deadline, look = time.monotonic() + SETTLE_S, 0.0
    while run.verdict is None:
        now = time.monotonic()
        if now >= deadline:
            run.verdict, run.why = "timeout", f"ended after {timeout_s:g} s, which is all the time it had"
            break
        for source, _ in poll.poll(1000 * max(0.001, min(deadline - now, every))):
            if source == connection.fileno():
                # Nothing is ever sent to us at this point but the end of the connection.
                run.verdict = "gone"  # the caller no longer waits for the result
            elif source == ended:
                _read_note(run)
                _notice_start(run, connection)
                # The first process is the program; what it has left behind is ended below.
                run.wait_status = os.waitpid(run.pid, 0)[1]
                run.stopped = time.monotonic()
                os.close(ended)
                return
            elif source == run.note:
                if not _read_note(run):
                    poll.unregister(source)
            elif not _read(run, source):
                poll.unregister(source)
        # The clock begins with the code, so that a busy machine's slow fork costs the program nothing.
        if run.started is None and _notice_start(run, connection):
            deadline = time.monotonic() + timeout_s
        # Counted although only the ends are kept: an endless writer would occupy the machine until its deadline.
        if sum(stream.total for stream in run.kept) > limits.OUTPUT_BYTES:
            run.verdict, run.why = "killed", f"ended: it wrote more than {limits.OUTPUT_BYTES // limits.MIB} MiB"
        if time.monotonic() >= look:
            look = time.monotonic() + every
            _look(run, confinement, memory)
    run.stopped = time.monotonic()
    os.close(ended)


def _notice_start(run: RunningSnippet, connection: socket.socket) -> bool:
    """Whether the walls are up and the code runs; the trainer is told."""
    if run.started is None and len(run.notes) >= snippet.READY.size:
        ready, moment = snippet.READY.unpack_from(run.notes)
        if ready == snippet.YES:
            run.started = moment
            frames.send(connection, {"started": True, "group": run.group.name if run.group is not None else None})
    return run.started is not None


def _look(run: RunningSnippet, confinement: Confinement, memory: int) -> None:
    """Is all of it together within its bounds?"""
    pids = watch.processes(confinement.alone)
    together = f"ended: its processes together had more than {memory // limits.MIB} MiB"
    if (run.group is not None and run.group.kills()) or watch.memory_bytes(pids, run.shared) > memory:
        run.verdict, run.why = "memory", together
    elif run.group is None and watch.available_bytes() < limits.LEAST_AVAILABLE_MIB * limits.MIB:
        run.verdict = "memory"
        run.why = f"ended: this machine had less than {limits.LEAST_AVAILABLE_MIB} MiB of memory left"
    elif not confinement.alone and (fault := watch.folder_fault(os.path.dirname(run.workdir))):
        run.verdict, run.why = "killed", f"ended: {fault}"


def _read(run: RunningSnippet, source: int) -> bool:
    """Read the available bytes of a pipe; False at its end."""
    try:
        data = os.read(source, 65536)
    except BlockingIOError:
        return True
    run.streams[source].add(data)
    return bool(data)


def _read_note(run: RunningSnippet) -> bool:
    try:
        data = os.read(run.note, 1024)
    except BlockingIOError:
        return True
    run.notes = (run.notes + data)[:4096]
    return bool(data)


def _end_all(confinement: Confinement, run: RunningSnippet | None = None) -> None:
    """End whatever is left of the snippet, and wait until it is gone."""
    while True:
        pids = [] if confinement.alone else watch.processes(alone=False)
        with contextlib.suppress(ProcessLookupError):
            if confinement.alone:
                # In a pid namespace that is everything but the supervisor.
                os.kill(-1, signal.SIGKILL)
        # First none may go on forking, then all end.
        for kind in (signal.SIGSTOP, signal.SIGKILL):
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, kind)
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                time.sleep(0.001)  # and look again: one may have been born since
            elif run is not None and pid == run.pid:
                run.wait_status = status
        except ChildProcessError:
            return


def _drain(run: RunningSnippet) -> None:
    """The rest of the output; the pipes hold little, and their writers have ended."""
    for source in run.streams:
        while True:
            before = run.streams[source].total
            if not _read(run, source) or run.streams[source].total == before:
                break
    _read_note(run)


def _reply(connection: socket.socket, run: RunningSnippet, wanted: list[str], handed: dict[str, bytes]) -> None:
    fetched = _gather(run.workdir, wanted, handed)
    status, code = _outcome(run)
    # Read before the reason is added, so that the reason stands last.
    out, err = (stream.bytes() for stream in run.kept)
    if run.why:
        err += (b"\n" if err and not err.endswith(b"\n") else b"") + f"[sandbox] {run.why}\n".encode()
    header = {
        "status": status,
        "exit_code": code,
        "seconds": (run.stopped or 0.0) - (run.started or 0.0),
        "streams": [len(out), len(err)],
        "files": [[name, len(content)] for name, content in fetched.files.items()],
        "missing": fetched.missing,
        "refused": fetched.refused,
    }
    frames.send(connection, header, out, err, *fetched.files.values())


def _gather(place: str, wanted: list[str], handed: dict[str, bytes]) -> workdir.CollectedFiles:
    """The files of the workdir. Whatever a snippet has made of it, the report of how it ended is not lost."""
    try:
        return workdir.fetch_changes(place, handed) if wanted == ["*"] else workdir.fetch(place, list(wanted))
    # The files are the program's work; none of them may end the supervisor.
    except (OSError, RecursionError, MemoryError, ValueError) as error:
        none = workdir.CollectedFiles()
        none.refuse("*", f"the workdir cannot be read ({type(error).__name__})")
        none.missing = [name for name in wanted if name != "*"]
        return none


def _outcome(run: RunningSnippet) -> tuple[str, int | None]:
    """Status and exit code, from how the kernel says it ended."""
    if run.verdict is not None:
        return run.verdict, None
    code = os.waitstatus_to_exitcode(run.wait_status or 0)
    if code == 0:
        return "ok", 0
    if code < 0 and run.group is not None and run.group.kills():
        run.why = "ended: all its processes, files and buffers together had more memory than it may take"
        return "memory", code
    if code < 0:
        run.why = f"ended by signal {-code} ({_signal_name(-code)})"
        return "killed", code
    last = run.kept[1].bytes().rstrip().rpartition(b"\n")[2]
    # numpy has a subclass of its own: `numpy._core._exceptions._ArrayMemoryError: Unable to allocate ...`
    return ("memory" if last.partition(b":")[0].endswith(b"MemoryError") else "error"), code


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return "a real-time signal"
