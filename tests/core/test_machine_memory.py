"""The memory of a container or batch job is what its control group allows, not what the machine has."""

import os

import pytest

from mafrt.core import machine_memory
from mafrt.core.machine_memory import free_memory, memory_bytes

GIB = 2**30
WHOLE = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
V2 = ("memory.max", "memory.current", "inactive_file")


@pytest.fixture
def group(tmp_path, monkeypatch):
    """Writes the files of a machine with 12 GiB free, and of control groups."""
    proc, groups = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text(f"MemTotal: 1 kB\nMemAvailable:   {12 * GIB // 1024} kB\n")
    monkeypatch.setattr(machine_memory, "PROC", proc)
    monkeypatch.setattr(machine_memory, "GROUPS", groups)

    def write(own, folders, names=V2, under=""):
        (proc / "self/cgroup").write_text(own)
        for path, (limit, used, cached) in folders.items():
            folder = groups / under / path
            folder.mkdir(parents=True, exist_ok=True)
            (folder / names[0]).write_text(f"{limit}\n")
            (folder / names[1]).write_text(f"{used}\n")
            (folder / "memory.stat").write_text(f"anon 7\n{names[2]} {cached}\nslab 1\n")

    return write


CASES = {
    "a container of version 2": ("0::/\n", {"": (4 * GIB, 3 * GIB, GIB)}, V2, "", 4, 2),
    "a batch job below a slice": (
        "0::/slurm/job_7/step\n",
        {"slurm/job_7": (3 * GIB, 2 * GIB, 0), "slurm/job_7/step": ("max", GIB, 0)},
        V2, "", 3, 1,
    ),
    "a container of version 1, which its own path does not reach": (
        "5:cpu:/docker/a\n4:memory:/docker/a\n0::/\n", {"": (2 * GIB, GIB // 2, 0)}, V1, "memory", 2, 1.5,
    ),
    "version 1 without a limit": ("4:memory:/\n", {"": (9223372036854771712, GIB, 0)}, V1, "memory", None, 12),
    "version 2 without a limit": ("0::/\n", {"": ("max", GIB, 0)}, V2, "", None, 12),
    "more in use than is allowed": ("0::/\n", {"": (GIB, 2 * GIB, 0)}, V2, "", 1, 0),
    "nothing of the kind": ("", {}, V2, "", None, 12),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_the_smallest_limit_counts(group, case):
    own, folders, names, under, limit, free = CASES[case]
    group(own, folders, names, under)
    assert memory_bytes() == (WHOLE if limit is None else limit * GIB)
    assert free_memory() == free * GIB


def test_free_memory_that_cannot_be_known_is_none(group, tmp_path):
    group("0::/\n", {"": (GIB, 0, 0)})
    (tmp_path / "proc/meminfo").unlink()  # as on a Mac
    assert free_memory() is None
    assert memory_bytes() == GIB
