"""scripts/install.sh on a machine with a GPU and on one without, with stand-ins for nvidia-smi, python and pip."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
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


def install(folder: Path, *, gpu: bool, there: str | None, offered: str) -> tuple[int, str, str | None, str]:
    """(exit status, what was printed, the torch that is there now, pip's calls) of an installation in `folder`."""
    binaries = folder / "machine"
    for path in (folder / "scripts", folder / ".venv/bin", binaries):
        path.mkdir(parents=True, exist_ok=True)
    for name in ("scripts/install.sh", "requirements.txt", "constraints.txt", "setup.cfg", "pyproject.toml"):
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
    done = subprocess.run(
        ["bash", "scripts/install.sh"], cwd=folder, env=env, capture_output=True, text=True, timeout=60
    )
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
