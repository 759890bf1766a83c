"""What a snippet can take from the machine: with control groups, and in the weaker tiers without them."""

from __future__ import annotations

import logging
import os
import subprocess
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers_sandbox import ensure_bubblewrap, why_not

from mafrt.sandbox import cgroup, open_sandbox
from mafrt.sandbox.inside import limits, supervise, watch, workdir
from mafrt.sandbox.inside.output import Kept
from mafrt.sandbox.zygote_sandbox import WarmSandbox

pytestmark = pytest.mark.takes(slow=8)

TIERS = ("bwrap", "bwrap-nocgroup", "degraded", "degraded-nocgroup")


@pytest.fixture(scope="module", params=TIERS)
def sandbox(request: pytest.FixtureRequest) -> Iterator[WarmSandbox]:
    name = request.param
    if name.startswith("degraded") and (why := why_not("degraded")):
        pytest.skip(why)
    if not name.endswith("-nocgroup") and cgroup.find() is None:
        pytest.skip("this process can make no control groups")
    ensure_bubblewrap()
    with WarmSandbox(name, 2, libraries=False) as warm:
        assert warm.tier == name
        yield warm


class Available:
    """The least memory that the machine had while this was open, below what it had at first, in MiB."""

    def __enter__(self) -> Available:
        self.first = self.least = watch.available_bytes()
        self.over = threading.Event()
        self.thread = threading.Thread(target=self.look)
        self.thread.start()
        return self

    def look(self) -> None:
        while not self.over.wait(0.01):
            self.least = min(self.least, watch.available_bytes())

    def __exit__(self, *error: object) -> None:
        self.over.set()
        self.thread.join()

    @property
    def taken_mib(self) -> float:
        return (self.first - self.least) / limits.MIB


SOCKETS = """
import os, socket, time
def fill():
    held = []
    try:
        while True:
            pair = socket.socketpair(getattr(socket, "AF_UNIX"), KIND)
            held += pair
            for end in pair:
                for option in (socket.SO_SNDBUF, socket.SO_RCVBUF, 32, 33):
                    try:
                        end.setsockopt(socket.SOL_SOCKET, option, 2**28)
                        print("ENLARGED", flush=True)
                    except OSError:
                        pass
                end.setblocking(False)
                try:
                    while True:
                        end.send(bytes(SIZE))
                except OSError:
                    pass
    except OSError:
        pass
    time.sleep(2)
for _ in range(8):
    try:
        if os.fork() == 0:
            fill()
            os._exit(0)
    except OSError:
        pass
fill()
"""
PIPES = """
import fcntl, os, time
def fill():
    held = []
    try:
        while True:
            ends = os.pipe()
            held.append(ends)
            try:
                fcntl.fcntl(ends[1], 1031, 2**20)
                print("ENLARGED", flush=True)
            except OSError:
                pass
            os.set_blocking(ends[1], False)
            try:
                while True:
                    os.write(ends[1], bytes(65536))
            except BlockingIOError:
                pass
    except OSError:
        pass
    time.sleep(2)
for _ in range(8):
    try:
        if os.fork() == 0:
            fill()
            os._exit(0)
    except OSError:
        pass
fill()
"""
IN_FLIGHT = """
import array, os, socket, time
held = []
def send(pair, descriptor):
    pair[0].sendmsg([b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [descriptor]))])
outer = socket.socketpair()
outer[0].setblocking(False)
try:
    for _ in range(100000):
        pair = socket.socketpair()
        for end in pair:
            end.setblocking(False)
            try:
                while True:
                    end.send(bytes(65536))
            except OSError:
                pass
        send(outer, pair[0].fileno())
        pair[0].close(); pair[1].close()
except OSError as error:
    print(error)
time.sleep(1)
"""
TABLES = """
import mmap, time
held = []
try:
    for _ in range(100000):
        part = mmap.mmap(-1, 2**21 * 64, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        held.append(part)
        for place in range(0, len(part), 2**21):
            part[place]
except (OSError, MemoryError) as error:
    print(error)
time.sleep(1)
"""
TAKERS = {
    "socket buffers": SOCKETS.replace("KIND", "socket.SOCK_STREAM").replace("SIZE", "65536"),
    "many small datagrams": SOCKETS.replace("KIND", "socket.SOCK_DGRAM").replace("SIZE", "1"),
    "pipes": PIPES,
    "sockets in flight": IN_FLIGHT,
    "page tables": TABLES,
}


@pytest.mark.slow
@pytest.mark.cases(6)
@pytest.mark.parametrize("name", TAKERS)
def test_kernel_memory_is_bounded(sandbox: WarmSandbox, name: str) -> None:
    """256 MiB are allowed. What the machine loses meanwhile is other processes' too, so the bound is generous, and a
    program that seems to have taken more is run again."""
    taken, bound = [], 900 if sandbox.tier in ("bwrap", "degraded") else 1400
    for _ in range(3):
        with Available() as available:
            done = sandbox.execute(TAKERS[name], timeout_s=6.0, memory_mib=256)
        assert done.status in ("ok", "error", "memory", "killed", "timeout") and "ENLARGED" not in done.stdout
        taken.append(available.taken_mib)
        if taken[-1] < bound:
            return
    raise AssertionError(f"took {taken} MiB: {done}")
    assert sandbox.execute("print('next')").stdout == "next\n"


@pytest.mark.slow
def test_forty_processes_share_the_memory_of_one(sandbox: WarmSandbox) -> None:
    """40 of them, each allowed 1024 MiB by its own limit, took 20 GiB."""
    code = """
    import os, time
    for _ in range(40):
        try:
            if os.fork() == 0:
                held = []
                while True:
                    held.append(bytearray(b"x") * 2**24)
        except OSError:
            break
    time.sleep(20)
    """
    with Available() as available:
        done = sandbox.execute(textwrap.dedent(code), timeout_s=20.0, memory_mib=1024)
    assert done.status == "memory", done
    assert available.taken_mib < 2600, available.taken_mib


def test_fewer_processes_and_files_without_groups(sandbox: WarmSandbox) -> None:
    code = """
    import os, socket, time
    count = 0
    try:
        while True:
            if os.fork() == 0:
                time.sleep(5)
                os._exit(0)
            count += 1
    except OSError:
        pass
    files = []
    try:
        while True:
            files.append(os.open("/dev/null", os.O_RDONLY))
    except OSError:
        pass
    print(count, len(files))
    """
    count, files = map(int, sandbox.execute(textwrap.dedent(code), timeout_s=20).stdout.split())
    grouped = not sandbox.tier.endswith("-nocgroup")
    # Without a pid namespace the limit is about all processes of the user: those of other tests may end meanwhile.
    others = 8 if sandbox.tier.startswith("degraded") else 0
    assert 10 <= count < (limits.PROCESSES if grouped else limits.FEWER_PROCESSES) + others
    assert files < (limits.OPEN_FILES if grouped else limits.FEWER_OPEN_FILES) and files >= 40


def test_the_tier_is_named(sandbox: WarmSandbox) -> None:
    assert sandbox.execute("pass").tier == sandbox.tier
    assert sandbox.description.startswith(f"{sandbox.tier}: ")
    assert ("control groups, version" in sandbox.description) == (not sandbox.tier.endswith("-nocgroup"))


def _groups() -> list[str]:
    found = cgroup.find()
    return (
        []
        if found is None
        else [p.name for parent in found.parents for p in parent.glob(f"{cgroup.PREFIX}{os.getpid()}-*")]
    )


@pytest.mark.skipif(cgroup.find() is None, reason="this process can make no control groups")
def test_groups_go_with_their_snippets() -> None:
    ensure_bubblewrap()
    before = set(_groups())
    with WarmSandbox("bwrap", 2, libraries=False) as warm:
        for _ in range(30):
            warm.execute("import os\nos.fork()")
        warm.execute("print(1)")
        assert len(set(_groups()) - before) <= 2 * (limits.SPARE + 6)
    assert not set(_groups()) - before


@pytest.mark.skipif(cgroup.find() is None, reason="this process can make no control groups")
def test_groups_of_a_killed_trainer_are_swept() -> None:
    groups = cgroup.find()
    assert groups is not None
    left = [parent / f"{cgroup.PREFIX}999999999-abc" for parent in groups.parents]
    for folder in left:
        folder.mkdir()
    assert cgroup.find() is not None
    assert not any(folder.exists() for folder in left)


@pytest.mark.slow
def test_without_control_groups_the_weaker_tier_is_named(monkeypatch, caplog) -> None:
    ensure_bubblewrap()
    monkeypatch.setattr(cgroup, "find", lambda: None)
    with caplog.at_level(logging.WARNING), open_sandbox("bwrap") as weak:
        assert weak.tier == weak.execute("pass").tier == "bwrap-nocgroup"
    assert any("'bwrap-nocgroup' instead of 'bwrap'" in record.getMessage() for record in caplog.records)


@pytest.mark.parametrize("available_mib", [100, 100_000])
def test_a_machine_without_memory_ends_snippets(monkeypatch, available_mib) -> None:
    class Alone:
        alone = True

    monkeypatch.setattr(watch, "available_bytes", lambda: available_mib * limits.MIB)
    monkeypatch.setattr(watch, "processes", lambda alone: [])
    run = supervise.RunningSnippet(0, 0, {}, 0, "/")
    supervise._look(run, Alone(), 2**40)
    assert run.verdict == ("memory" if available_mib == 100 else None)


# --- how a snippet ended, whatever it leaves ------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [1500, 15])
def test_nested_folders_end_no_supervisor(sandbox: WarmSandbox, depth: int) -> None:
    code = f"""
    import os
    open("kept.txt", "w").write("kept")
    for i in range({depth}):
        os.mkdir("d" * 200)
        os.chdir("d" * 200)
    open("deep.txt", "w").write("deep")
    print("ended well")
    """
    done = sandbox.execute(textwrap.dedent(code), fetch=["*"], timeout_s=30)
    if sandbox.tier.startswith("degraded") and depth > watch.DEEPEST and done.status == "killed":
        assert "nested more than" in done.stderr  # a real disk: the folder has no quota of its own
        return
    assert (done.status, done.stdout) == ("ok", "ended well\n"), done
    assert done.files["kept.txt"] == b"kept"
    assert (depth < 16) == any(name.endswith("deep.txt") for name in done.files)
    assert sandbox.counts.restarts == 0


def test_a_note_is_no_evidence(sandbox: WarmSandbox) -> None:
    """The pipe on which a snippet's process says that it is ready is closed before its code runs."""
    code = """
    import os
    for descriptor in range(3, 256):
        for text in (b"m", b"mm", b"!"):
            try:
                os.write(descriptor, text)
            except OSError:
                pass
    raise ValueError("m")
    """
    done = sandbox.execute(textwrap.dedent(code))
    assert (done.status, done.exit_code) == ("error", 1) and done.stderr.endswith("ValueError: m\n")
    assert sandbox.execute("raise MemoryError").status == "memory"
    assert sandbox.execute("x = bytearray(2**40)").status == "memory"


def test_control_characters_in_names_are_cleaned(sandbox: WarmSandbox) -> None:
    code = r"""
for name in ("a\x1b[2Jb", "c\nd", "e\x9bf", "fine"):
    open(name, "w").write("x")
import os
open(b"\xff\xfe", "w").write("x")
"""
    done = sandbox.execute(code, fetch=["*"])
    assert done.files == {"fine": b"x"}
    shown = [*done.refused, *done.refused.values(), *done.missing]
    assert {"a\ufffd[2Jb", "c\ufffdd", "e\ufffdf"} <= set(shown)
    assert all(text.isprintable() or text == "" for text in (name.replace("\ufffd", "") for name in shown))


@pytest.mark.slow
def test_walking_is_bounded_by_nothing_of_the_interpreter(tmp_path: Path) -> None:
    here = os.getcwd()
    try:
        os.chdir(tmp_path)
        for _ in range(1200):
            os.mkdir("x" * 100)
            os.chdir("x" * 100)
    finally:
        os.chdir(here)
    try:
        assert len(list(workdir.entries(str(tmp_path)))) == 16
        assert len(list(workdir.entries(str(tmp_path), 300))) == 300
    finally:
        subprocess.run(["rm", "-rf", str(tmp_path / ("x" * 100))], check=True)  # pytest's own removal is recursive


def test_a_report_survives_a_workdir_that_cannot_be_read(monkeypatch) -> None:
    def broken(*_: object) -> None:
        raise RecursionError

    monkeypatch.setattr(workdir, "fetch_changes", broken)
    found = supervise._gather("/", ["*"], {})
    assert found.files == {} and "cannot be read" in found.refused["*"]


def test_memory_is_what_stderr_says_last() -> None:
    def outcome(stderr: bytes, code: int) -> str:
        out, err = Kept(), Kept()
        err.add(stderr)
        run = supervise.RunningSnippet(0, 0, {0: out, 1: err}, 0, "/")
        run.wait_status = code << 8
        return supervise._outcome(run)[0]

    assert outcome(b"Traceback ...\nMemoryError\n", 1) == "memory"
    assert outcome(b"Traceback ...\nnumpy.exceptions._ArrayMemoryError: no\nValueError: m\n", 1) == "error"
    assert outcome(b"numpy._core._exceptions._ArrayMemoryError: Unable to allocate\n", 1) == "memory"
    assert outcome(b"MemoryError\n", 0) == "ok"
