"""The sandbox's parts: the filter's verdicts on both architectures, frames, names, output, slots, workspaces."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import socket
import struct
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mafrt.core.errors import ConfigError
from mafrt.core.text import readable
from mafrt.sandbox import Execution, Workspace
from mafrt.sandbox.fair_semaphore import Slots
from mafrt.sandbox.inside import frames, limits, names, seccomp, workdir
from mafrt.sandbox.inside.output import Kept
from mafrt.sandbox.zygote_sandbox import read_reply

# --- the filter ----------------------------------------------------------------------------------------------------

ALLOW, KILL = 0x7FFF0000, 0x80000000
EPERM, ENOSYS = 0x50000 | errno.EPERM, 0x50000 | errno.ENOSYS
NUMBERS = {"x86_64": {"read": 0, "fork": 57, "clone": 56}, "aarch64": {"read": 63, "clone": 220}}


def verdict(lines, number, arguments=(), architecture=None, machine="x86_64"):
    """What the kernel would say: a classic BPF machine with the few instructions a filter has."""
    data = struct.pack(
        "=iIQ6Q", number, architecture or seccomp.ARCHITECTURE[machine], 0, *(*arguments, *[0] * (6 - len(arguments)))
    )
    accumulator, at = 0, 0
    while True:
        code, yes, no, constant = lines[at]
        at += 1
        if code == 0x20:
            (accumulator,) = struct.unpack_from("=I", data, constant)
        elif code == 0x06:
            return constant
        else:
            holds = {
                0x15: accumulator == constant,
                0x25: accumulator > constant,
                0x45: bool(accumulator & constant),
            }[code]
            at += yes if holds else no


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_the_filter(machine):
    column = {"x86_64": 0, "aarch64": 1}[machine]
    lines = seccomp.program(machine)
    assert len(lines) < 4096

    def says(number, *arguments, program=lines, architecture=None):
        return verdict(program, number, arguments, architecture, machine)

    for name, pair in seccomp.REFUSED.items():
        if pair[column] is not None:
            assert says(pair[column]) == EPERM, name
    assert says(NUMBERS[machine]["read"]) == ALLOW
    assert says(435) == ENOSYS and says(451) == ENOSYS and says(0x40000000) == ENOSYS
    other = seccomp.ARCHITECTURE["aarch64" if machine == "x86_64" else "x86_64"]
    assert says(NUMBERS[machine]["read"], architecture=other) == KILL
    assert says(NUMBERS[machine]["read"], architecture=0x40000003) == KILL  # 32-bit calls have other numbers

    clone = NUMBERS[machine]["clone"]
    threads = 0x3D0F00  # what pthread_create asks for
    assert says(clone, 17) == says(clone, threads) == ALLOW
    for flag in (0x20000, 0x02000000, 0x04000000, 0x08000000, 0x10000000, 0x20000000, 0x40000000):
        assert says(clone, flag | 17) == EPERM
    for name, (pair, values) in seccomp.ONLY_SELF.items():
        oneself = [values.get(place, 0) for place in range(6)]
        assert says(pair[column], *oneself) == ALLOW, name
        for argument in values:  # another process, or a group or all processes of the user
            other_process = list(oneself)
            other_process[argument] = 2
            assert says(pair[column], *other_process) == EPERM, name
    for name, (pair, argument, options) in seccomp.OPTIONS.items():
        assert says(pair[column], *[1] * 6) == ALLOW, name
        for option in options:
            asked = [1] * 6
            asked[argument] = option
            assert says(pair[column], *asked) == EPERM, (name, option)
            asked[argument] |= 1 << 32  # the kernel looks at 32 bits
            assert says(pair[column], *asked) == EPERM, (name, option)

    kill, tgkill = seccomp.SIGNALS["kill"][0][column], seccomp.SIGNALS["tgkill"][0][column]
    assert says(kill, 1, 9) == ALLOW  # a pid namespace or Landlock sees to that
    strict = seccomp.program(machine, attributes=False, own_pid=77)
    assert says(kill, 77, 9, program=strict) == says(tgkill, 77, 78, 6, program=strict) == ALLOW
    for target in (1, 0, 78, 2**32 - 1, 2**64 - 1):
        assert says(kill, target, 9, program=strict) == EPERM
    for name, pair in seccomp.ATTRIBUTES.items():
        if pair[column] is not None:
            assert says(pair[column], program=strict) == EPERM and says(pair[column]) == ALLOW, name


HEADERS = {
    0: Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h"),
    1: Path("/usr/include/asm-generic/unistd.h"),
}


@pytest.mark.parametrize("column", [0, 1], ids=["x86_64", "aarch64"])
def test_numbers_are_those_of_the_kernels_headers(column):
    if not HEADERS[column].exists():
        pytest.skip("no kernel headers here")
    found = dict(re.findall(r"#define __NR(?:3264)?_(\w+)\s+(\d+)", HEADERS[column].read_text()))
    tables = {**seccomp.REFUSED, **seccomp.SIGNALS_REFUSED, **seccomp.ATTRIBUTES}
    tables |= {name: pair for name, (pair, _) in {**seccomp.ONLY_SELF, **seccomp.SIGNALS}.items()}
    tables |= {"clone": seccomp.CLONE, "clone3": seccomp.CLONE3}
    tables |= {name: pair for name, (pair, _, _) in seccomp.OPTIONS.items()}
    checked = 0
    for name, pair in tables.items():
        if name in found:
            assert pair[column] == int(found[name]), name
            checked += 1
        else:
            assert pair[column] is None or pair[column] > 430, name  # headers may be older than the call
    assert checked > 70


# --- frames --------------------------------------------------------------------------------------------------------


def pair():
    return socket.socketpair()


@pytest.mark.slow
@given(st.dictionaries(st.text(), st.integers() | st.text() | st.none()), st.binary(max_size=2000))
def test_frames_come_back(message, blob):
    ours, theirs = pair()
    with ours, theirs:
        frames.send(ours, message, blob)
        assert frames.receive(theirs) == message
        assert frames.receive_bytes(theirs, len(blob)) == blob


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b"\0\0",
        struct.pack("!Q", 10) + b"{}",
        struct.pack("!Q", 2**63) + b"{}",
        struct.pack("!Q", frames.HEADER_BYTES + 1),
        struct.pack("!Q", 2) + b"[]",
        struct.pack("!Q", 3) + b"{x}",
        struct.pack("!Q", 2) + b"\xff\xfe",
        struct.pack("!Q", 200000) + b"[" * 200000,
    ],
)
def test_broken_frames(sent):
    ours, theirs = pair()
    with ours, theirs:
        ours.setblocking(True)

        def send():
            with contextlib.suppress(OSError):  # whoever has seen that it is broken does not read to the end
                ours.sendall(sent)
                ours.shutdown(socket.SHUT_WR)

        threading.Thread(target=send).start()
        with pytest.raises(frames.BrokenFrame):
            frames.receive(theirs, time.monotonic() + 10)


def test_a_frame_that_does_not_come():
    ours, theirs = pair()
    with ours, theirs, pytest.raises(TimeoutError):
        frames.receive(theirs, time.monotonic() + 0.05)
    ours, theirs = pair()
    with ours, theirs, pytest.raises(frames.BrokenFrame, match="at most"):
        frames.send(ours, {"code": "x" * frames.HEADER_BYTES})


GOOD = {
    "status": "ok", "exit_code": 0, "seconds": 0.1, "streams": [2, 1], "files": [["a", 3]], "missing": [], "refused": {}
}  # fmt: skip


def reply(**changes):
    ours, theirs = pair()
    with ours, theirs:
        ours.sendall(b"hie123")
        ours.shutdown(socket.SHUT_WR)
        return read_reply(theirs, {**GOOD, **changes}, "bwrap")


def test_a_reply_is_read():
    assert reply() == Execution("ok", "hi", "e", 0, {"a": b"123"}, (), {}, 0.1, "bwrap")


@pytest.mark.parametrize(
    "changes",
    [
        {"status": "perfect"},
        {"status": None},
        {"streams": [2]},
        {"streams": [-1, 3]},
        {"streams": [2**40, 0]},
        {"streams": "ab"},
        {"files": [["a", 2**40]]},
        {"files": [["a", -3]]},
        {"files": {"a": 3}},
        {"files": None},
        {"exit_code": "x"},
        {"seconds": None},
        {"missing": None},
        {"refused": ["a"]},
        {"files": [["a", 30]]},
    ],
)
def test_a_reply_is_not_believed(changes):
    with pytest.raises(frames.BrokenFrame):
        reply(**changes)


# --- names, files, output, text ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["a", "a.b", "a/b/c", "é", "...", " ", "a b", "-rf", "~", "=cmd"])
def test_names_that_are_fine(name):
    assert names.fault(name) is None


@pytest.mark.parametrize(
    "name", ["", "/", "/a", "..", "../a", "a/..", "a//b", "a/", "./a", "a\0", "x" * 256, "a/" * 20 + "a", "\udcff"]
)
def test_names_that_are_not(name):
    assert names.fault(name)


def test_fetching_follows_nothing(tmp_path):
    work, outside = tmp_path / "work", tmp_path / "outside"
    work.mkdir()
    outside.mkdir()
    (outside / "secret").write_text("secret")
    (work / "plain").write_bytes(b"plain")
    (work / "link").symlink_to(outside / "secret")
    (work / "folder").symlink_to(outside)
    (work / "loop").symlink_to("loop")
    os.mkfifo(work / "pipe")
    (work / "sub").mkdir()
    with open(work / "huge", "wb") as file:
        file.truncate((limits.FETCH_FILE_MIB + 1) * limits.MIB)
    wanted = [
        "plain",
        "link",
        "folder/secret",
        "loop",
        "pipe",
        "sub",
        "huge",
        "plain/x",
        "sub/none",
        "../outside/secret",
    ]
    found = workdir.fetch(str(work), wanted)
    assert found.files == {"plain": b"plain"}
    assert found.missing == wanted[1:]
    assert set(found.refused) == {*wanted[1:]} - {"sub/none"}
    assert "symbolic link" in found.refused["link"] and "at most" in found.refused["huge"]
    changed = workdir.fetch_changes(str(work), {"plain": b"plain", "gone": b""})
    assert changed.files == {} and "gone" in changed.missing
    assert set(changed.refused) == {"link", "folder", "loop", "pipe", "huge"}


def test_fetching_has_bounds(tmp_path, monkeypatch):
    monkeypatch.setattr(limits, "FETCH_TOTAL_MIB", 1)
    monkeypatch.setattr(limits, "FETCH_FILES", 3)
    for i in range(5):
        (tmp_path / f"f{i}").write_bytes(bytes(400_000))
    found = workdir.fetch(str(tmp_path), [f"f{i}" for i in range(5)])
    assert list(found.files) == ["f0", "f1"] and found.missing == ["f2", "f3", "f4"]
    assert "all files together" in found.refused["f2"] and "were asked for" in found.refused["f3"]
    assert workdir.fetch_changes(str(tmp_path), {f"f{i}": bytes(400_000) for i in range(3)}).files.keys() == {
        "f3",
        "f4",
    }


def test_output_keeps_both_ends():
    kept = Kept(head=4, tail=3)
    for piece in (b"ab", b"cdef", b"", b"ghij"):
        kept.add(piece)
    assert kept.bytes() == b"abcd\n[... 3 bytes left out ...]\nhij"  # 10 bytes, 4 + 3 kept
    kept = Kept(head=4, tail=3)
    kept.add(b"abcdefg")
    assert kept.bytes() == b"abcdefg"


@given(st.lists(st.binary(max_size=40), max_size=40), st.integers(0, 50), st.integers(1, 50))
def test_output_whatever_the_pieces(pieces, head, tail):
    kept, whole = Kept(head, tail), b"".join(pieces)
    for piece in pieces:
        kept.add(piece)
    if len(whole) <= head + tail:
        assert kept.bytes() == whole
    else:
        line = f"\n[... {len(whole) - head - tail} bytes left out ...]\n".encode()
        assert kept.bytes() == whole[:head] + line + whole[-tail:]


def test_output_holds_little():
    kept = Kept()
    for _ in range(3000):
        kept.add(bytes(65536))
    assert len(kept.head) + len(kept.tail) < 300_000 and kept.total == 3000 * 65536


def test_text_that_a_terminal_does_not_obey():
    assert readable(b"a\tb\r\nc\x1b[2J\x00\xff\xc2\x9b\x7f\xe2\x82\xac") == "a\tb\nc\ufffd[2J\ufffd\ufffd\ufffd\ufffd€"


def test_slots_are_fair():
    slots, order, running, most = Slots(1), [], 0, 0
    threads = []

    def work(i: int) -> None:
        nonlocal running, most
        with slots:
            running += 1
            most = max(most, running)
            order.append(i)
            time.sleep(0.01)
            running -= 1

    with slots:
        for i in range(8):
            threads.append(threading.Thread(target=work, args=(i,)))
            threads[-1].start()
            while len(slots._waiting) <= i:
                time.sleep(0.001)
    for thread in threads:
        thread.join()
    assert order == list(range(8)) and most == 1
    with Slots(2), Slots(1):
        assert True
    assert slots._free == 1 and not slots._waiting


# --- workspaces ----------------------------------------------------------------------------------------------------


class Scripted:
    """A sandbox that gives what it is told to, and notes what it was asked."""

    tier = "scripted"

    def __init__(self, *files: dict[str, bytes]) -> None:
        self.files, self.seen = list(files), []

    def execute(self, code, files=None, fetch=(), timeout_s=10.0, memory_mib=1024):
        self.seen.append((dict(files), list(fetch)))
        return Execution("ok", "out", "err", 0, self.files.pop(0), tier=self.tier)


MIB = 2**20


def test_a_workspace_hands_files_on():
    sandbox = Scripted({"a": b"1", "b": b"2"}, {"a": b"3"}, {})
    workspace = Workspace(sandbox)
    for _ in range(3):
        workspace.run("pass")
    assert sandbox.seen == [({}, ["*"]), ({"a": b"1", "b": b"2"}, ["*"]), ({"a": b"3", "b": b"2"}, ["*"])]
    sandbox.files = [{"c": b""}]
    workspace.run("pass", fetch=["c"])
    assert sandbox.seen[-1][1] == ["c"]


def test_a_workspace_in_which_a_folder_takes_the_place_of_a_file_and_back():
    sandbox = Scripted({"a": b"1", "b": b"2"}, {"a/x/y": b"3"}, {"a/x": b"4"}, {"a": b"5"}, {})
    workspace = Workspace(sandbox)
    for _ in range(5):
        workspace.run("pass")
    kept = [sorted(files) for files, _ in sandbox.seen]
    assert kept == [[], ["a", "b"], ["a/x/y", "b"], ["a/x", "b"], ["a", "b"]]


def test_a_workspace_over_its_size():
    sandbox = Scripted({"a": bytes(MIB // 2), "b": bytes(MIB)}, {"a": bytes(2 * MIB), "c": bytes(MIB // 2)})
    workspace = Workspace(sandbox, quota_mib=1)
    done = workspace.run("pass")
    assert done.files.keys() == workspace.files.keys() == {"a"}
    assert done.refused == {"b": "over the workspace's quota of 1 MiB"} and done.missing == ("b",)
    assert done.stderr == "err\n[workspace] not kept, over the workspace's quota of 1 MiB: 'b'\n"
    assert done.status == "ok" and workspace.over_quota == 1
    workspace.run("pass")
    assert {name: len(content) for name, content in workspace.files.items()} == {"a": MIB // 2, "c": MIB // 2}
    assert workspace.over_quota == 2


def test_a_workspace_with_too_many_files():
    workspace = Workspace(Scripted({f"f{i}": b"" for i in range(9)}, {"f0": b"new", "z": b""}), max_files=3)
    done = workspace.run("pass")
    assert set(workspace.files) == {"f0", "f1", "f2"} and workspace.over_quota == 6
    assert "'f3', 'f4', 'f5', 'f6', 'f7' and others" in done.stderr
    workspace.run("pass")
    assert workspace.files["f0"] == b"new" and "z" not in workspace.files and workspace.over_quota == 7


@pytest.mark.parametrize("wrong", [{"quota_mib": 0}, {"max_files": 0}])
def test_a_workspace_that_holds_nothing(wrong):
    with pytest.raises(ConfigError, match="at least one"):
        Workspace(Scripted(), **wrong)
    with pytest.raises(ConfigError, match="a list of names"):
        Workspace(Scripted({})).run("pass", fetch="data.csv")


def test_json_is_all_that_a_header_is():
    """Bytes of a reply are never given to anything but `json` and `bytes`."""
    for name in ("frames.py", "launcher.py", "supervise.py"):
        text = (Path(frames.__file__).parent / name).read_text()
        assert "pickle" not in text and "marshal" not in text
