"""What a user of the sandbox relies on, on every tier; and what happens when the sandbox itself fails."""

from __future__ import annotations

import dataclasses
import logging
import os
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from fusion_server import StandIn
from helpers_sandbox import SECRET, descendants, ensure_bubblewrap, settled, why_not

import mafrt
from mafrt.core.errors import ConfigError, DataError, MafrtError
from mafrt.sandbox import Execution, Sandbox, SandboxError, factory, open_sandbox, shared_sandbox
from mafrt.sandbox.inside import confine, limits
from mafrt.sandbox.inside.zygote import SPARE
from mafrt.sandbox.zygote_sandbox import WarmSandbox

pytestmark = pytest.mark.takes(fast=9, slow=8)


@pytest.fixture(scope="module", params=["bwrap", "degraded", "fusion"])
def sandbox(request: pytest.FixtureRequest) -> Iterator[Sandbox]:
    if why := why_not(request.param):
        pytest.skip(why)
    ensure_bubblewrap()
    with WarmSandbox("degraded" if request.param == "degraded" else "bwrap", 4, libraries=False) as warm:
        if request.param != "fusion":
            yield warm
            return
        with StandIn(warm) as server, open_sandbox(f"fusion:{server.url}", workers=4) as fusion:
            yield fusion


@pytest.fixture(scope="module")
def bwrap() -> Iterator[WarmSandbox]:
    ensure_bubblewrap()
    with WarmSandbox("bwrap") as warm:
        yield warm


def test_output_and_exit(sandbox):
    done = sandbox.execute("import sys\nprint('to out')\nprint('to err', file=sys.stderr)\nsys.exit(7)")
    assert (done.status, done.stdout, done.stderr, done.exit_code) == ("error", "to out\n", "to err\n", 7)
    assert done.tier == sandbox.tier and 0 <= done.seconds < 60
    assert (done.files, done.missing, done.refused) == ({}, (), {})


@pytest.mark.parametrize(
    ("code", "status", "exit_code"),
    [
        ("", "ok", 0),
        ("# nothing", "ok", 0),
        ("raise SystemExit", "ok", 0),
        ("raise SystemExit('why')", "error", 1),
        ("if __name__ == '__main__':\n    raise SystemExit(4)", "error", 4),
        ("import threading\nthreading.Thread(target=print, args=('late',)).start()", "ok", 0),
        ("import os\nos._exit(5)", "error", 5),
        ("import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)", "killed", -11),
        ("raise MemoryError", "memory", 1),
        ("input()", "error", 1),
    ],
)
def test_how_it_ended(sandbox, code, status, exit_code):
    done = sandbox.execute(code)
    assert done.status == status, done
    if exit_code is not None:
        assert done.exit_code == exit_code


def test_a_traceback_is_what_an_interpreter_prints(sandbox):
    done = sandbox.execute("def half(x):\n    return 1 / x\n\nhalf(0)")
    assert done.stderr.startswith("Traceback (most recent call last):\n")
    assert 'snippet.py", line 4, in <module>\n    half(0)\n' in done.stderr
    assert 'snippet.py", line 2, in half\n    return 1 / x\n' in done.stderr
    assert done.stderr.rstrip().endswith("ZeroDivisionError: division by zero")
    assert done.stderr.count("File") == 2  # none of ours


@pytest.mark.parametrize("code", ["Let me think about it.", "print('a", "x = = 1", "\x00", "\ud800", "é" * 3 + " = ="])
def test_what_is_not_python_is_an_error_of_the_snippet(sandbox, code):
    done = sandbox.execute(code)
    assert (done.status, done.exit_code, done.stdout) == ("error", 1, "")
    assert "Error" in done.stderr and done.stderr.count('File "') <= 1


def test_nothing_is_lost_without_a_flush(sandbox):
    code = "import os, sys\nprint('a' * 100000, end='')\nsys.stderr.write('b')\nos._exit(0)"
    done = sandbox.execute(code)
    assert done.stdout.endswith("a" * 1000) and done.stderr == "b"


def test_long_output_keeps_its_end(sandbox):
    code = "print('first')\nfor i in range(40000):\n    print('line', i)\nprint('last')\n1 / 0"
    done = sandbox.execute(code, timeout_s=30)
    assert done.status == "error", done.status  # a server alone would have called it a time-out
    assert done.stdout.startswith("first\nline 0\n") and done.stdout.endswith("line 39999\nlast\n")
    written = len("first\nlast\n") + sum(len(f"line {i}\n") for i in range(40000))
    left_out = written - limits.OUTPUT_HEAD_BYTES - limits.OUTPUT_TAIL_BYTES
    assert done.stdout.count(f"\n[... {left_out} bytes left out ...]\n") == 1
    assert "ZeroDivisionError" in done.stderr


def test_files_in_and_out(sandbox):
    code = """
import os
print(open('in/deep.txt').read(), sorted(os.listdir('.')))
open('out.bin', 'wb').write(bytes(range(256)))
"""
    done = sandbox.execute(code, {"in/deep.txt": b"hello", "empty": b""}, ["out.bin", "empty", "absent"])
    assert done.stdout.startswith("hello ['empty', 'in'")
    assert done.files == {"out.bin": bytes(range(256)), "empty": b""}
    assert done.missing == ("absent",) and done.refused == {}


def test_helper_modules_can_be_imported(sandbox):
    done = sandbox.execute("import solution\nprint(solution.f(20))", {"solution.py": b"def f(x):\n    return x + 1\n"})
    assert done.stdout == "21\n", done


def test_changes_only(sandbox):
    code = """
import os
open('new', 'w').write('1')
open('changed', 'w').write('2')
os.remove('gone')
os.mkdir('d')
open('d/e', 'w')
"""
    done = sandbox.execute(code, {"same": b"0", "changed": b"0", "gone": b"0"}, ["*"])
    assert done.files == {"new": b"1", "changed": b"2", "d/e": b""}
    assert done.missing == ("gone",)


def test_a_fetch_outside_the_workspace_is_refused(sandbox):
    outside = ["/etc/hostname", "../x", "a/../../x", "", "a\0b", "x" * 300]
    done = sandbox.execute("print('ran')", fetch=["ok", *outside])
    assert done.status == "ok" and done.stdout == "ran\n"
    assert set(done.refused) == set(outside) and set(done.missing) == {"ok", *outside}
    assert "leads out" in done.refused["../x"]


@pytest.mark.parametrize("name", ["/etc/x", "../x", "a//b", "", "a/./b", "\ud800"])
def test_a_file_outside_the_workspace_is_the_callers_mistake(sandbox, name):
    with pytest.raises(DataError, match="plain relative path"):
        sandbox.execute("pass", {name: b""})


@pytest.mark.parametrize(
    "wrong",
    [{"timeout_s": 0}, {"timeout_s": float("nan")}, {"timeout_s": float("inf")}, {"memory_mib": 0}, {"fetch": "a"}],
)
def test_settings_that_cannot_be(sandbox, wrong):
    with pytest.raises(DataError, match="expected"):
        sandbox.execute("pass", **wrong)


def test_the_deadline_keeps_what_was_said_and_made(sandbox):
    code = "import time\nprint('begun')\nopen('half', 'w').write('half')\ntime.sleep(600)"
    start = time.monotonic()
    done = sandbox.execute(code, fetch=["half"], timeout_s=1.0)
    assert time.monotonic() - start < 300
    assert (done.status, done.exit_code, done.stdout) == ("timeout", None, "begun\n")
    assert done.files == {"half": b"half"} and done.seconds >= 1.0


def test_many_at_once_do_not_mix(sandbox):
    results: dict[int, Execution] = {}

    def ask(i: int) -> None:
        code = f"import os\nprint({i}, sorted(os.listdir('.')))\nopen('{i}', 'w').write('{i}' * 1000)"
        results[i] = sandbox.execute(code, {f"in{i}": b""}, [str(i)], timeout_s=60)

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i in range(16):
        assert results[i].stdout.startswith(f"{i} ['in{i}'"), results[i]
        assert results[i].files == {str(i): str(i).encode() * 1000}


def test_an_execution_leaves_nothing_to_the_next(sandbox):
    sandbox.execute(
        "import builtins, tempfile\nbuiltins.left = 1\nopen('x', 'w')\nopen(tempfile.gettempdir() + '/y', 'w')"
    )
    code = """
import os, tempfile
print(hasattr(__builtins__, 'left'), os.path.exists('x'), os.listdir(tempfile.gettempdir()))
"""
    done = sandbox.execute(code)
    assert done.stdout.startswith("False False"), done
    assert "y" not in done.stdout.split("[")[1].replace("snippet.py", "")


def test_waiting_for_a_slot_costs_no_time():
    """Four snippets of .6 s with 1 s each, two at a time: all are in time."""
    with WarmSandbox("bwrap", 2, libraries=False) as two:
        results: list[Execution] = []
        code = "import time\ntime.sleep(.6)"
        threads = [threading.Thread(target=lambda: results.append(two.execute(code, timeout_s=1.5))) for _ in range(4)]
        start = time.monotonic()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert [done.status for done in results] == ["ok"] * 4
    assert time.monotonic() - start >= 1.2


def test_libraries_are_warm(bwrap):
    pytest.importorskip("pandas")
    pytest.importorskip("sklearn")
    assert set(bwrap.versions) == {"numpy", "pandas", "sklearn"}
    done = bwrap.execute("import sys\nprint(all(name in sys.modules for name in ('numpy', 'pandas', 'sklearn')))")
    assert done.stdout == "True\n"
    code = """
import numpy, pandas, threading
from sklearn.ensemble import RandomForestClassifier
frame = pandas.DataFrame({"x": range(50), "y": [i % 2 for i in range(50)]})
model = RandomForestClassifier(5, n_jobs=2).fit(frame[["x"]], frame["y"])
print(model.score(frame[["x"]], frame["y"]) > .5, numpy.linalg.inv(numpy.eye(3)).sum())
"""
    assert bwrap.execute(code, timeout_s=60).stdout == "True 3.0\n"


def test_chance_is_the_same_in_every_execution(bwrap):
    """What is drawn without a seed would make a resumed run differ from one that was not interrupted."""
    code = """
import random
print(random.random(), hash('a'))
if 'numpy' in __import__('sys').modules:
    print(__import__('numpy').random.rand())
"""
    first = bwrap.execute(code)
    assert first.status == "ok" and first.stdout == bwrap.execute(code).stdout


def test_the_environment_of_the_walls_is_clean(monkeypatch):
    """Also bubblewrap's own, and the warm interpreter's: what they were started with can be read on this machine."""
    monkeypatch.setenv("ANTHROPIC_API_KEY", SECRET)
    with WarmSandbox("bwrap", libraries=False) as warm:
        processes = [warm.zygote_pid, warm._zygote._process.pid, *descendants(warm.zygote_pid)]
        read = []
        for pid in processes:
            try:
                read.append(Path(f"/proc/{pid}/environ").read_bytes() + Path(f"/proc/{pid}/cmdline").read_bytes())
            except OSError:  # gone, or not ours to read
                continue
        assert len(read) >= 2 and b"bwrap" in b"".join(read)
        assert SECRET.encode() not in b"".join(read)
        assert SECRET in os.environ["ANTHROPIC_API_KEY"]


# --- when the sandbox itself fails ---------------------------------------------------------------------------------


def test_a_dead_zygote_is_started_again_and_counted():
    with WarmSandbox("bwrap", libraries=False) as warm:
        first = warm.zygote_pid
        warm._zygote.kill()
        assert warm.execute("print(1)").stdout == "1\n"
        assert warm.zygote_pid != first
        assert (warm.counts.restarts, warm.counts.repeated) == (1, 1)


@pytest.mark.slow
def test_a_zygote_that_dies_under_a_snippet():
    with WarmSandbox("bwrap", libraries=False) as warm:
        threading.Timer(0.5, warm._zygote.kill).start()
        done = warm.execute("import time\ntime.sleep(1.5)\nprint('done')", timeout_s=30)
        assert (done.status, done.stdout) == ("ok", "done\n")
        assert warm.counts.restarts == 1


def test_a_zygote_that_dies_twice_in_a_row_is_an_error():
    with WarmSandbox("bwrap", libraries=False) as warm:
        stop = threading.Event()

        def murder() -> None:
            while not stop.wait(0.05):
                warm._zygote.kill()

        thread = threading.Thread(target=murder)
        thread.start()
        try:
            with pytest.raises(SandboxError):
                warm.execute("import time\ntime.sleep(20)", timeout_s=30)
        finally:
            stop.set()
            thread.join()
        assert warm.counts.restarts >= 1
        assert warm.execute("print(1)").stdout == "1\n"  # and it works again when it may


def test_closing_ends_what_runs():
    warm = WarmSandbox("bwrap", libraries=False)
    failed: list[BaseException] = []

    def ask() -> None:
        try:
            warm.execute("import time\ntime.sleep(60)", timeout_s=60)
        except SandboxError as error:
            failed.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    time.sleep(0.5)
    pid = warm.zygote_pid
    warm.close()
    thread.join(20)
    assert not thread.is_alive() and len(failed) == 1
    assert not Path(f"/proc/{pid}").exists()
    with pytest.raises(SandboxError, match="closed"):
        warm.execute("pass")


@pytest.mark.slow
@pytest.mark.parametrize("tier", ["bwrap", "degraded"])
def test_killing_the_trainer_ends_everything(tier):
    if why := why_not(tier):
        pytest.skip(why)
    code = f"""
import sys
from mafrt.sandbox.zygote_sandbox import WarmSandbox
sandbox = WarmSandbox({tier!r}, libraries=False)
print(sandbox.zygote_pid, flush=True)
sandbox.execute("import os\\nos.execv('/usr/bin/sleep', ['sleep', '7654322'])", timeout_s=600)
"""
    trainer = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert trainer.stdout is not None
    zygote = int(trainer.stdout.readline())
    deadline = time.monotonic() + 90
    while not _sleepers(zygote) and time.monotonic() < deadline:
        time.sleep(0.05)
    victims = [zygote, *descendants(zygote)]
    assert _sleepers(zygote)
    trainer.kill()
    trainer.wait()
    trainer.stdout.close()
    while any(_alive(pid) for pid in victims) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert [pid for pid in victims if _alive(pid)] == []


def _sleepers(zygote: int) -> list[int]:
    return [pid for pid in descendants(zygote) if b"7654322" in _read(f"/proc/{pid}/cmdline")]


def _alive(pid: int) -> bool:
    state = _read(f"/proc/{pid}/stat").rpartition(b")")[2].split()
    return bool(state) and state[0] != b"Z"


def _read(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError:
        return b""


def test_without_bubblewrap_one_sentence_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SandboxError) as caught:
        open_sandbox("bwrap")
    assert str(caught.value).endswith("install it with: apt-get install -y bubblewrap")
    assert str(caught.value).count("\n") == 0


def test_a_bubblewrap_that_may_not_is_quoted(monkeypatch, tmp_path):
    """No tier takes the place of another: a sandbox that cannot be had is an error."""
    fake = tmp_path / "bwrap"
    fake.write_text("#!/bin/sh\necho 'bwrap: No permissions to create a new namespace' >&2\nexit 1\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(SandboxError, match="It said: bwrap: No permissions to create a new namespace"):
        open_sandbox("bwrap")


@pytest.mark.slow
@pytest.mark.ci
@pytest.mark.cases(1)
@pytest.mark.parametrize("end", ["warm.close()", "os._exit(1)", "os.kill(os.getpid(), signal.SIGKILL)"])
def test_degraded_leaves_no_folder_however_its_process_ends(tmp_path, end):
    if why := why_not("degraded"):
        pytest.skip(why)
    code = f"""
        import os, signal
        from mafrt.sandbox.zygote_sandbox import WarmSandbox
        warm, other = (WarmSandbox("degraded", libraries=False) for _ in range(2))
        print(len([name for name in os.listdir({str(tmp_path)!r}) if name.startswith("mafrt-packages-")]))
        print(warm.execute("import os; print(os.getcwd())").stdout, flush=True)
        other.close()
        print(warm.execute("import numpy; print('still there')").stdout, flush=True)
        {end}
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env={**os.environ, "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    count, place, still = done.stdout.split(maxsplit=2)
    assert count == "2" and still.strip() == "still there", done.stderr
    deadline = time.monotonic() + 60  # the warm process sees a little later that its trainer is gone
    while (left := [*tmp_path.glob("mafrt-*"), *Path(place).glob("..")]) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not left


def test_degraded_is_said_aloud(caplog):
    if why := why_not("degraded"):
        pytest.skip(why)
    with caplog.at_level(logging.ERROR), WarmSandbox("degraded", libraries=False) as warm:
        assert warm.execute("print(1)").tier == "degraded"
    assert [record.levelname for record in caplog.records if "degraded" in record.message] == ["ERROR"]


@pytest.mark.parametrize("name", ["", "docker", "fusion", "fusion:", "fusion:ftp://x", "fusion:http://u:p@x", "BWRAP"])
def test_an_unknown_tier(name):
    with pytest.raises(ConfigError, match="expected"):
        open_sandbox(name)
    with pytest.raises(ConfigError):
        open_sandbox("bwrap", workers=0)


@pytest.mark.slow
def test_one_sandbox_is_shared(monkeypatch):
    monkeypatch.setattr(factory, "_shared", {})
    first = shared_sandbox("bwrap")
    try:
        assert shared_sandbox("bwrap") is first
        assert first.execute("print(1)").stdout == "1\n"
    finally:
        factory._close_shared()
    with pytest.raises(SandboxError):
        first.execute("pass")


def test_a_fork_of_the_trainer_gets_its_own(bwrap):
    child = os.fork()
    if child == 0:
        status = 1
        try:
            bwrap.execute("pass")
        except SandboxError:
            bwrap.close()
            status = 0
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
    assert bwrap.execute("print(1)").stdout == "1\n"


def test_errors_are_of_the_one_tree():
    assert issubclass(SandboxError, MafrtError)
    assert {f.name for f in dataclasses.fields(Execution)} == {
        *("status", "stdout", "stderr", "exit_code", "files", "missing", "refused", "seconds", "tier")
    }


# --- as an ordinary user -------------------------------------------------------------------------------------------

AS_USER = """
import os, sys
sys.path.insert(0, sys.argv[1])
from mafrt.sandbox import open_sandbox
for tier in sys.argv[2:]:
    with open_sandbox(tier) as sandbox:
        done = sandbox.execute("import os\\nprint(os.getuid() != 0)\\nopen('a', 'w').write('x')", fetch=["a"])
        assert (done.stdout, done.files) == ("True\\n", {"a": b"x"}), done
        bomb = "import os\\nwhile True:\\n    try:\\n        os.fork()\\n    except OSError:\\n        pass"
        assert sandbox.execute(bomb, timeout_s=1.0).status == "timeout"
        hog = "held = []\\nwhile True:\\n    held.append(bytearray(2**24))"
        assert sandbox.execute(hog, memory_mib=128).status == "memory"
        kill = "import os\\ntry:\\n    os.kill(-1, 9)\\nexcept OSError:\\n    pass\\nprint('alive')"
        assert sandbox.execute(kill).stdout == "alive\\n"
        assert sandbox.counts.restarts == 0
        print(tier, "fine", os.getuid())
"""


@pytest.mark.slow
@pytest.mark.skipif(os.getuid() != 0, reason="this is an ordinary user; every other test shows it")
def test_as_an_ordinary_user(tmp_path):
    """With a copy of the package and an interpreter that the user can read; root's own home is closed to it."""
    public = [
        python
        for python in (sys.executable, "/usr/bin/python3")
        if confine.open_to_others(Path(python).resolve().parent)
    ]
    if not public or subprocess.run([public[0], "-c", "import sys; sys.exit(sys.version_info < (3, 11))"]).returncode:
        pytest.skip("no interpreter of Python 3.11 or later that an ordinary user can run")
    place = Path("/tmp") / f"mafrt-user-{os.getpid()}"
    source = Path(mafrt.__file__).parent
    try:
        for file in [*source.glob("*.py"), *source.glob("core/*.py"), *source.glob("sandbox/**/*.py")]:
            target = place / "mafrt" / file.relative_to(source)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(file.read_bytes())
        tiers = ["bwrap"] + (["degraded"] if why_not("degraded") is None else [])
        command = [public[0], "-c", AS_USER, str(place), *tiers]
        done = subprocess.run(
            command, user=65534, group=65534, extra_groups=[], cwd="/", env={"PATH": os.environ["PATH"]},
            capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert done.stdout.split("\n")[:-1] == [f"{tier} fine 65534" for tier in tiers]
    finally:
        subprocess.run(["rm", "-rf", str(place)], check=True)


@pytest.mark.slow
@pytest.mark.ci
def test_hundreds_of_executions_leave_nothing():
    """The benchmark's `--soak 10000` is the long version."""
    from bench import sandbox as bench

    with WarmSandbox("bwrap", 4, libraries=False) as warm:
        found = bench._soak(warm, 200, 4)
        assert found["executions"] == 200 and found["restarts"] == 0
        assert not any(found["left"].values()), found
        assert found["statuses"] == {"ok": 120, "error": 40, "killed": 40}
        assert settled(warm.zygote_pid, 2 * SPARE) <= 2 * SPARE


def test_importing_it_is_light():
    code = "import sys, mafrt.sandbox\nprint(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {"numpy", "pandas", "sklearn", "torch"} & set(loaded)


def test_the_launcher_needs_nothing_of_ours():
    from mafrt.sandbox.inside import launcher

    text = Path(launcher.__file__).read_text()
    assert "from ." not in text and "mafrt." not in text.replace(".mafrt_", "")
    assert textwrap.dedent(text) == text
