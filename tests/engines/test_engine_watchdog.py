"""Processes of an engine do not outlive their trainer."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mafrt.engines.vllm.watchdog import alive, birth, children, descendants, watch

TRAINER = """
import subprocess, sys, time
from pathlib import Path
from mafrt.engines.vllm.watchdog import watch
sleeper = "import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']); "
child = subprocess.Popen([sys.executable, "-c", sleeper + "time.sleep(60)"])
time.sleep(1)
from mafrt.engines.vllm.watchdog import descendants
import os
pids = sorted(descendants(os.getpid()))
watch(pids, Path(sys.argv[1]))
print(*pids, flush=True)
time.sleep(60)
"""


SHARING = """
import os, subprocess, sys, time
from pathlib import Path
from mafrt.engines.vllm.watchdog import descendants, watch
sharer = "import time; from multiprocessing.shared_memory import SharedMemory; "
sharer += "found = SharedMemory(create=True, size=8); print(found.name, flush=True); time.sleep(60)"
child = subprocess.Popen([sys.executable, "-c", sharer], stdout=subprocess.PIPE, text=True)
name = child.stdout.readline().strip()
pids = sorted(descendants(os.getpid()))
watch(pids, Path(sys.argv[1]))
print(name, *pids, flush=True)
time.sleep(60)
"""


STARTING = """
import subprocess, sys, time
from pathlib import Path
from mafrt.engines.vllm.watchdog import watch_what_starts
sleeper = [sys.executable, "-c", "import time; time.sleep(60)"]
before = subprocess.Popen(sleeper)
watch_what_starts(Path(sys.argv[1]))
starter = f"import subprocess, time; subprocess.Popen({sleeper}); time.sleep(60)"
child = subprocess.Popen([sys.executable, "-c", starter])
time.sleep(2)
print(before.pid, child.pid, flush=True)
time.sleep(60)
"""


def gone(pids: list[int], born: dict[int, str | None], seconds: float = 20.0) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if not any(alive(pid, born[pid]) for pid in pids):
            return True
        time.sleep(0.1)
    return False


def test_kill_9_of_the_trainer_ends_them_and_takes_their_folder_along(tmp_path):
    folder = tmp_path / "adapters"
    folder.mkdir()
    trainer = subprocess.Popen([sys.executable, "-c", TRAINER, str(folder)], stdout=subprocess.PIPE, text=True)
    assert trainer.stdout is not None
    pids = [int(word) for word in trainer.stdout.readline().split()]
    born = {pid: birth(pid) for pid in pids}
    assert len(pids) == 2 and all(alive(pid, born[pid]) for pid in pids)
    trainer.send_signal(signal.SIGKILL)
    trainer.wait()
    assert gone(pids, born)
    deadline = time.monotonic() + 90
    while folder.exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not folder.exists()


@pytest.mark.slow
def test_what_is_starting_while_the_trainer_is_killed_ends_too_and_nothing_else(tmp_path):
    words = [sys.executable, "-c", STARTING, str(tmp_path / "folder")]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as trainer:
        assert trainer.stdout is not None
        other, child = (int(word) for word in trainer.stdout.readline().split())
        pids = sorted({child, *descendants(child)})
        born = {pid: birth(pid) for pid in [*pids, other]}
        assert len(pids) == 2
        trainer.kill()
    try:
        assert gone(pids, born) and alive(other, born[other])
    finally:
        os.kill(other, signal.SIGKILL)


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="shared memory has no folder here")
def test_shared_memory_of_those_it_ends_is_given_back(tmp_path):
    words = [sys.executable, "-c", SHARING, str(tmp_path / "folder")]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as trainer:
        assert trainer.stdout is not None
        name, *found = trainer.stdout.readline().split()
        pids = [int(word) for word in found]
        born = {pid: birth(pid) for pid in pids}
        assert len(pids) == 2 and Path("/dev/shm", name).exists()  # the child, and its resource tracker
        trainer.kill()
    assert gone(pids, born)
    assert not Path("/dev/shm", name).exists()


def test_it_watches_as_long_as_the_trainer_lives_and_ends_when_told(tmp_path):
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    guardian = watch([child.pid], tmp_path / "folder")
    try:
        assert {child.pid, guardian.pid} <= children(os.getpid()) <= descendants(os.getpid())
        time.sleep(1.5)
        assert child.poll() is None and guardian.poll() is None
    finally:
        guardian.kill()
        guardian.wait()
        born = birth(child.pid)
        child.kill()
        child.wait()
    assert not alive(child.pid, born) and not alive(child.pid, None)
