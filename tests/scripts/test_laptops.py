"""Laptops without Linux: on a pretended Mac (`tests/mac`) all works, or says in a sentence what does not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from mafrt.core.errors import ConfigError

pytestmark = pytest.mark.takes(slow=21)

TESTS = Path(__file__).parents[1]
TOY = [
    "--iterations",
    "2",
    "--n_rollout_threads",
    "4",
    "--max_new_tokens",
    "8",
    "--eval_episodes",
    "2",
    "--threads",
    "1",
]
PROGRAM = "import os\ndef run(task):\n    return 1.0\n"
ANSWER = "def run(task, base_url):\n    return 1.0\n"
ENV = """
import mafrt
class Count(mafrt.Env):
    agents = ("solver",)
    def reset(self, *, seed, options=None):
        return {"solver": [{"role": "user", "content": "1 + 1"}]}, {}
    def step(self, actions):
        return mafrt.StepResult({}, {"solver": 1.0}, True, False, {})
"""
PARTS = r"""
import io, json, os, sys, tempfile
from mafrt.core import bounded_worker, gpus, threads
from mafrt.core.errors import ConfigError, SandboxError
from mafrt.config.team import Team

assert sys.platform == "darwin" and not os.path.exists("/proc/self") and not hasattr(os, "sched_getaffinity")
assert threads.cores() >= 1 and gpus.gpu_there() is None

from mafrt.core import _match_patterns, patterns
sys.stdin = io.StringIO(json.dumps({"patterns": ["(a|b)+"], "texts": ["abba", "abc"], "cpu_s": 2.0}))
sys.stdout, way = io.StringIO(), sys.stdout
_match_patterns.main()
matched, sys.stdout = sys.stdout.getvalue(), way
assert json.loads(matched) == [[True, False]]

from mafrt.envs.tools.checker import CHECKER
asked = {"do": "check", "schema": {"type": "object"}, "arguments": {}}
assert CHECKER.worker.ask(asked, 60) == {"fault": None, "id": 1, "timeout": False}

from mafrt.cpu import choice, library, malloc
assert library.library() is None and not library.expected() and not malloc.keep_freed_memory()
print(choice.choose_kernels())

def said(call):
    try:
        call()
    except (ConfigError, SandboxError) as error:
        print(type(error).__name__, error)

from mafrt.sandbox import open_sandbox
from mafrt.envs.program.runner import command_runner, function_runner
for tier in ("bwrap", "degraded", "bwrap-nocgroup"):
    said(lambda: open_sandbox(tier))
said(lambda: command_runner("python x.py", 1.0))
said(lambda: function_runner("reads_environment.py:run"))
function_runner("takes_address.py:run")
said(lambda: Team.of(["Solver", "solver"]))
from mafrt.config.train_config import EngineConfig
from mafrt.engines.checks import check_engine
from mafrt.scripts import serve_vllm
said(lambda: check_engine(EngineConfig(engine="vllm"), {}, {}))
said(lambda: serve_vllm.serve(["--servers", "1"]))
check_engine(EngineConfig(engine="vllm", vllm_servers=("http://127.0.0.1:8001",)), {}, {})
assert Team.of(["solver", "checker"]).adapters == ("solver", "checker")

from mafrt.environment.workers import guarded
from own import Count
session = guarded(Count(), 5.0)
assert session.reset(seed=0)[0] and type(session).__name__ == "Session"
"""


COMMANDS = """
import json, sys
from mafrt.scripts.main import main
for words in json.loads(sys.argv[1]):
    assert (main(words) or 0) == int(sys.argv[2]), words
    for stream in (sys.stdout, sys.stderr):
        print("\\f", end="", file=stream, flush=True)
"""


def on(system: str, folder: Path, *words: str, code: int | None = 0) -> subprocess.CompletedProcess[str]:
    """Run Python on a machine of that kind, in `folder`, where temporary files lie behind a link as on a Mac."""
    (folder / "private").mkdir(exist_ok=True)
    if not (folder / "var").exists():
        (folder / "var").symlink_to("private")
    env = {name: value for name, value in os.environ.items() if name != "MAFRT_KERNELS"}
    env |= {"TMPDIR": str(folder / "var"), "OMP_NUM_THREADS": "1"}
    if system == "linux":
        env["MAFRT_KERNELS"] = "torch"
    else:
        env |= {"PYTHONPATH": str(TESTS / "mac"), "MAFRT_SYSTEM": system}
    done = subprocess.run([sys.executable, *words], cwd=folder, env=env, capture_output=True, text=True, timeout=400)
    assert code is None or done.returncode == code, done.stdout[-2000:] + done.stderr[-3000:]
    return done


def mafrt(system: str, folder: Path, *commands: list[str], code: int = 0) -> list[str]:
    """What each command says; one process runs them all, since most of the time of one is its imports."""
    done = on(system, folder, "-c", COMMANDS, json.dumps(commands), str(code))
    said = [out + err for out, err in zip(done.stdout.split("\f"), done.stderr.split("\f"), strict=True)]
    assert len(said) == len(commands) + 1
    return said[:-1]


@pytest.mark.slow
def test_what_linux_alone_has_is_said_or_not_needed(tmp_path):
    for name, text in (("reads_environment", PROGRAM), ("takes_address", ANSWER), ("own", ENV), ("parts", PARTS)):
        (tmp_path / f"{name}.py").write_text(text)
    done = on("darwin", tmp_path, "parts.py")
    kernels, *lines = done.stdout.splitlines()
    assert kernels == "Kernels of the CPU: torch (those in C are for Linux)."
    kinds = [line.split()[0] for line in lines]
    assert kinds == ["SandboxError"] * 3 + ["ConfigError"] * 5
    assert all(
        "SandboxFusion" in line and "--sandbox fusion:http" in line and "container" in line for line in lines[:3]
    )
    assert all("needs Linux" in line and "container" in line for line in lines[3:5]) and "reads_environment" in lines[4]
    assert "'Solver' and 'solver'" in lines[5] and "Mac" in lines[5]
    assert all("vLLM runs on Linux" in line and "on a machine that has it" in line for line in lines[6:])
    assert "env_timeout_s needs Linux" in done.stderr


def test_names_that_differ_in_capitals_are_two_on_linux():
    from mafrt.config.team import Team

    assert len(Team.of(["Solver", "solver"]).adapters) == 2


def test_windows_is_told_of_wsl(tmp_path):
    done = on("win32", tmp_path, "-m", "mafrt.scripts.main", "info", code=1)
    assert "WSL" in done.stderr.splitlines()[-1] and "wsl --install" in done.stderr.splitlines()[-1]


@pytest.mark.parametrize("device", ["mps", "mps:0", "xpu", "hpu:1"])
def test_devices_on_which_nothing_was_run_are_refused(device):
    from mafrt.models.pretrained import check_device
    from mafrt.models.shared_base import SharedBase

    for call in (lambda: check_device(device), lambda: SharedBase.load("teaching-base", device=device)):
        with pytest.raises(ConfigError, match=rf"{device}.*never run on {device.split(':')[0]}.*give cpu"):
            call()


def test_the_installer_knows_the_system(tmp_path):
    (tmp_path / "uname").write_text('#!/bin/sh\necho "$SYSTEM"\n')
    (tmp_path / "uname").chmod(0o755)
    script = TESTS.parent / "scripts" / "install.sh"
    for system, words in {
        "MINGW64_NT-10.0 x86_64": ("WSL",),
        "MSYS_NT-10.0 x86_64": ("WSL",),
        "CYGWIN_NT-10.0 x86_64": ("WSL",),
        "Darwin x86_64": ("Intel", "container"),
    }.items():
        env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SYSTEM": system}
        done = subprocess.run(["bash", str(script)], env=env, capture_output=True, text=True)
        assert done.returncode == 2 and all(word in done.stderr for word in words), done


@pytest.mark.nightly
@pytest.mark.slow
def test_a_mac_trains_evaluates_exports_and_shows_what_linux_does(tmp_path):
    training = ["train_math", "--run_dir", "linux", *TOY]
    mafrt("linux", tmp_path, training)
    trained, info, memory, _, _, _, shown = mafrt(
        "darwin",
        tmp_path,
        ["train_math", "--run_dir", "darwin", *TOY],
        ["info"],
        ["info", "--memory", "Qwen/Qwen3-0.6B"],
        ["evaluate", "--load_path", "darwin", "--tasks", "2", "--output", "scores.json"],
        ["export", "darwin", "--output", "exported"],
        ["report", "darwin"],
        ["show", "darwin"],
    )
    assert "Kernels of the CPU: torch (those in C are for Linux)." in trained
    for name in ("metrics.jsonl", "episodes.jsonl", "evaluations.jsonl"):
        text = (tmp_path / "darwin" / name).read_text()
        assert text and text == (tmp_path / "linux" / name).read_text()
    assert len((tmp_path / "darwin/metrics.jsonl").read_text().splitlines()) == 2
    assert "accelerator" in info and "peak" in memory and "episodes" in shown
    assert json.loads((tmp_path / "scores.json").read_text())
    assert list((tmp_path / "exported").rglob("adapter_model.safetensors"))
    assert (tmp_path / "darwin/report.html").stat().st_size > 10_000
    # In its own folder, whose files were compared above.
    [longer] = mafrt("darwin", tmp_path, ["train_math", "--load_path", "darwin", "--iterations", "3"])
    assert "iteration 3/3" in longer


@pytest.mark.slow
def test_programs_of_agents_end_a_run_on_a_mac_before_it_begins(tmp_path):
    [said] = mafrt("darwin", tmp_path, ["train_code", "--run_dir", "run", *TOY], code=2)
    assert said.count("error: ") == 1 and "SandboxFusion" in said and not (tmp_path / "run").exists()
