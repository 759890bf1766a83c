"""What a failing test has started does not outlive it; what its file shares does."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from helpers_warm import run_python

FILE = """
import os, subprocess, sys, time

import pytest
from helpers_warm import start_python

TREE = "import subprocess, time; print(subprocess.Popen(['sleep', '600']).pid, flush=True); time.sleep(600)"


def started():
    process = subprocess.Popen([sys.executable, "-c", TREE], stdout=subprocess.PIPE, text=True)
    return process, int(process.stdout.readline())


def gone(pid):
    while os.path.exists(f"/proc/{pid}/stat") and open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[0] != "Z":
        time.sleep(0.01)
    return True


@pytest.fixture(scope="module")
def shared():
    process, child = started()
    yield process
    process.kill()
    os.kill(child, 9)


pids = []


def test_fails(shared):
    process, child = started()
    pids[:] = process.pid, child, start_python("-c", "import time; time.sleep(600)").pid
    assert False


def test_afterwards(shared):
    assert len(pids) == 3 and all(gone(pid) for pid in pids)
    assert shared.poll() is None
"""


@pytest.mark.slow
@pytest.mark.ci
def test_processes_of_a_failed_test_are_ended(tmp_path):
    (tmp_path / "test_it.py").write_text(FILE)
    words = ["-q", "-p", "conftest", "-p", "no:cacheprovider", "-c", os.devnull, "--rootdir", ".", "test_it.py"]
    paths = [str(folder) for folder in Path(__file__).parents[1:3]]
    code = f"import sys; sys.path[:0] = {paths}; import pytest; pytest.main({words})"
    done = run_python("-c", code, cwd=tmp_path)
    assert "1 failed, 1 passed" in done.stdout, done.stdout + done.stderr
