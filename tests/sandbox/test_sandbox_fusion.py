"""The tier `fusion` against a server on loopback that speaks its protocol, and that fails in every way it can."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
from collections.abc import Iterator

import pytest
from fusion_server import StandIn
from helpers_sandbox import ensure_bubblewrap

from mafrt.sandbox import Execution, SandboxError, Workspace, fusion, open_sandbox
from mafrt.sandbox.inside import launcher
from mafrt.sandbox.zygote_sandbox import WarmSandbox


@pytest.fixture(scope="module")
def server() -> Iterator[StandIn]:
    ensure_bubblewrap()
    with WarmSandbox("bwrap", 4, libraries=False) as inner, StandIn(inner) as standin:
        yield standin


@pytest.fixture()
def client(server: StandIn, monkeypatch: pytest.MonkeyPatch) -> fusion.FusionSandbox:
    monkeypatch.setattr(fusion, "PAUSE_S", 0.01)
    server.failures.clear()
    opened = open_sandbox(f"fusion:{server.url}")
    assert isinstance(opened, fusion.FusionSandbox)
    server.requests.clear()
    return opened


def test_the_request_is_that_of_the_protocol(server, client):
    client.execute("print(1)", {"in.csv": b"a\n"}, ["out.csv"], timeout_s=7, memory_mib=300)
    (request,) = server.requests
    assert request.keys() == {
        *("language", "code", "stdin", "compile_timeout", "run_timeout", "memory_limit_MB", "files", "fetch_files")
    }
    assert request["language"] == "python" and request["run_timeout"] == 12
    assert request["memory_limit_MB"] == 300 + fusion.LAUNCHER_MIB
    assert base64.b64decode(request["files"]["in.csv"]) == b"a\n"
    assert request["fetch_files"] == [launcher.RESULT]  # plain names only: no globs, no folders


def test_the_stand_in_runs_plain_code_too(server, client):
    """Without our launcher, as any client of such a server would ask: with its faults."""
    plain = {"language": "python", "run_timeout": 5, "memory_limit_MB": 256, "files": {}, "fetch_files": ["a", "*"]}
    answer = server.answer({**plain, "code": "open('a', 'w').write('x'); print(2)"})
    assert (answer["status"], answer["run_result"]["status"]) == ("Success", "Finished")
    assert answer["run_result"]["stdout"] == "2\n" and answer["run_result"]["return_code"] == 0
    assert answer["files"] == {"a": base64.b64encode(b"x").decode()}
    answer = server.answer({**plain, "code": "print('x' * 150_000)"})
    assert (answer["status"], answer["run_result"]["status"]) == ("Failed", "TimeLimitExceeded")
    assert server.answer({**plain, "code": "1 / 0"})["status"] == "Failed"
    assert server.answer({**plain, "language": "cobol", "code": ""})["status"] == "SandboxError"


@pytest.mark.slow
@pytest.mark.ci
def test_the_official_client_understands_the_stand_in_and_accepts_our_requests(server, client):
    """The protocol is that of `sandbox-fusion` on PyPI, the server's own client, and not what we take it for."""
    official = pytest.importorskip("sandbox_fusion")

    def run(code: str, **more: object) -> object:
        asked = official.RunCodeRequest(code=code, language="python", run_timeout=5, **more)
        return official.run_code(asked, endpoint=server.url, max_attempts=1, client_timeout=30)

    found = run("open('a', 'w').write(open('b').read() * 2); print(3)", files={"b": "eHk="}, fetch_files=["a"])
    assert found.status == official.RunStatus.Success and found.run_result.stdout == "3\n"
    assert base64.b64decode(found.files["a"]) == b"xyxy"
    failed = run("import sys; sys.exit(3)")
    assert failed.status == official.RunStatus.Failed and failed.run_result.return_code == 3
    late = run("while True: pass")
    assert late.run_result.status == official.models.CommandRunStatus.TimeLimitExceeded
    server.failures.append("SandboxError")
    with pytest.raises(Exception, match="no room"):
        run("print(1)")
    server.requests.clear()
    client.execute("print(1)", {"in.csv": b"a\n"}, ["out.csv"])
    (request,) = server.requests
    beyond = request.keys() - official.RunCodeRequest(**request).dict().keys()
    assert beyond == {"memory_limit_MB"}  # the server knows it, its client does not


def test_long_output_is_no_time_out(client):
    done = client.execute("print('x' * 150_000)\nprint('end')")
    assert done.status == "ok" and done.stdout.endswith("end\n") and "bytes left out" in done.stdout


KEY = b"0123456789abcdef"
FAILURES = [500, 502, 429, 404, "SandboxError", "garbage", "half", "hang"]


@pytest.mark.parametrize("failure", FAILURES)
def test_one_failure_is_survived_and_counted(server, client, failure):
    server.failures[:] = [failure]
    server.hang_s = 0.1
    done = client.execute("print(6 * 7)")
    assert (done.status, done.stdout) == ("ok", "42\n")
    assert (client.counts.executions, client.counts.repeated) == (1, 1)


@pytest.mark.cases(8)
@pytest.mark.parametrize("failure", FAILURES)
@pytest.mark.parametrize("code", ["print(6 * 7)", "1 / 0"])
def test_two_failures_are_no_wrong_answer(server, client, failure, code):
    server.failures[:] = [failure, failure]
    server.hang_s = 0.1
    with pytest.raises(SandboxError) as caught:
        client.execute(code)
    assert server.url in str(caught.value) and "\n" not in str(caught.value)


def test_no_server():
    with pytest.raises(SandboxError, match="cannot be reached"):
        open_sandbox("fusion:http://127.0.0.1:9")


@pytest.mark.parametrize(
    "change",
    [
        {"exit_code": "zero"},
        {"streams": []},
        {"streams": ["a", "!"]},
        {"files": {"not/asked/for": ""}},
        {"files": {"../x": ""}},
        {"files": []},
        {"files": {"out": "not base 64"}},
        {"refused": None},
        {"seconds": "long"},
        {"seconds": float("nan")},
        {"seconds": float("inf")},
        {"seconds": -1.0},
        {"seconds": 10**400},
        {"seconds": 1e9},
        {"exit_code": 10**400},
        {"exit_code": True},
    ],
)
def test_a_result_is_not_believed(client, monkeypatch, change):
    good = {
        "exit_code": 0, "late": False, "memory": False, "seconds": 0.1, "streams": ["", ""], "files": {}, "refused": {},
        "gone": [],
    }  # fmt: skip

    def answer(result: dict, key: bytes = KEY) -> dict:
        text = json.dumps(result).encode()
        packed = base64.b64encode(hmac.new(key, text, hashlib.sha256).hexdigest().encode() + b"\n" + text).decode()
        seen = {"status": "Finished", "return_code": 0, "stdout": "", "stderr": ""}
        return {"status": "Success", "run_result": seen, "files": {launcher.RESULT: packed}}

    assert client._read(answer(good, b"another"), ["out"], {}, KEY, 10.0).status == "killed"
    assert client._read(answer(good), ["out"], {}, KEY, 10.0) == Execution(
        "ok", "", "", 0, {}, ("out",), {}, 0.1, "fusion"
    )
    with pytest.raises(SandboxError, match="not as agreed"):
        client._read(answer({**good, **change}), ["out"], {}, KEY, 10.0)


@pytest.mark.parametrize(
    ("seen", "status"),
    [
        ({"status": "TimeLimitExceeded", "return_code": None, "stdout": "x", "stderr": ""}, "timeout"),
        ({"status": "Finished", "return_code": 137, "stdout": "", "stderr": "Killed"}, "killed"),
        ({"status": "Error", "return_code": None, "stdout": None, "stderr": None}, "killed"),
    ],
)
def test_a_launcher_that_was_ended_too(client, seen, status):
    done = client._read({"status": "Failed", "run_result": seen, "files": {}}, ["out"], {}, KEY, 10.0)
    assert done.status == status and done.missing == ("out",) and "ended by the server" in done.stderr
    assert done.exit_code == (137 if seen["return_code"] else None)


def test_the_environments_proxy_is_not_asked(server, monkeypatch):
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    with open_sandbox(f"fusion:{server.url}") as opened:
        assert opened.execute("print(1)").stdout == "1\n"


def test_a_workspace_on_a_server(client):
    workspace = Workspace(client)
    workspace.run("import os\nopen('a', 'w').write('1')\nos.mkdir('d')\nopen('d/b', 'w').write('2')")
    assert workspace.files == {"a": b"1", "d/b": b"2"}
    done = workspace.run("import os\nprint(open('d/b').read())\nos.remove('a')\nos.symlink('/etc/passwd', 'd/c')")
    assert done.stdout == "2\n" and workspace.files == {"d/b": b"2"}
    assert done.refused == {"d/c": "a symbolic link"}


def test_a_server_that_is_no_sandbox_server():
    with StandIn(_Mute()) as mute, pytest.raises(SandboxError, match="does not run Python"):
        open_sandbox(f"fusion:{mute.url}")


class _Mute:
    tier = "mute"

    def execute(self, code, files, fetch, timeout_s, memory_mib):
        return Execution("error", "", "python3: not found", 127)


FORGED = """
import base64, hashlib, hmac, json, os, signal, time
result = {"exit_code": 0, "late": False, "memory": False, "seconds": SECONDS,
          "streams": [base64.b64encode(b"all tests passed").decode(), ""], "files": {}, "refused": {}, "gone": []}
text = json.dumps(result).encode()
for seal in (b"", hmac.new(b"", text, hashlib.sha256).hexdigest().encode() + b"\\n"):
    open(".mafrt_result.json", "wb").write(seal + text)
LAST
"""
LAST_WORDS = {
    "kills the launcher": "os.kill(os.getppid(), signal.SIGKILL)\ntime.sleep(30)",
    "stops the launcher": "os.kill(os.getppid(), signal.SIGSTOP)\ntime.sleep(30)",
    "leaves a daemon that writes it again": (
        "if os.fork() == 0:\n    os.setsid()\n    for _ in range(200):\n"
        "        open('.mafrt_result.json', 'wb').write(text)\n        time.sleep(.01)\nraise SystemExit(3)"
    ),
    "looks for the key": (
        "for name in ('environ', 'cmdline', 'mem', 'fd/0', 'fd/1', 'fd/3'):\n    try:\n"
        "        data = open(f'/proc/{os.getppid()}/{name}', 'rb').read(10**6)\n"
        "        print('READ', name, b'key' in data)\n    except OSError:\n        pass\nraise SystemExit(3)"
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("seconds", ["0.1", "float('nan')"])
@pytest.mark.parametrize("last", LAST_WORDS)
def test_a_result_that_the_snippet_wrote_is_not_believed(client, last, seconds):
    code = FORGED.replace("SECONDS", seconds).replace("LAST", LAST_WORDS[last])
    done = client.execute(code, timeout_s=3.0)
    assert done.status != "ok" and "all tests passed" not in done.stdout
    assert "READ mem" not in done.stdout and 0 <= done.seconds < 60


def test_an_endless_writer_is_ended_long_before_its_deadline(client):
    done = client.execute("while True:\n    print('x' * 100000)", timeout_s=120.0)
    assert done.status == "killed" and done.seconds < 100 and len(done.stdout) < 10**6
    assert done.stderr.endswith("[sandbox] ended: it wrote more than 64 MiB\n")


@pytest.mark.parametrize("took", [None, float("nan"), float("inf"), -5, 10**400, "soon", True, [1]])
def test_a_servers_numbers_are_checked(client, took):
    seen = {"status": "Finished", "return_code": took, "execution_time": took, "stdout": "\ud800", "stderr": None}
    done = client._read({"status": "Failed", "run_result": seen, "files": {}}, [], {}, KEY, 10.0)
    assert (done.status, done.seconds) == ("killed", 0.0) and done.exit_code in (None, -5, True)
