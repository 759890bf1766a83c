"""The allocator's options are taken, and torch works with them. In a process of its own, which they stay with."""

from __future__ import annotations

import platform

import pytest
from helpers_warm import run_python

CODE = """
import resource, torch
from mafrt.cpu.malloc import keep_freed_memory
assert keep_freed_memory()
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(4):
        torch.ones(8_000_000)
        # More than a GiB at once, in blocks, which a heap that shrinks would give back.
        [torch.ones(20_000_000) for _ in range(16)]
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
faults()
print(faults())
"""


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the allocator is not glibc's")
def test_freed_blocks_stay_with_the_process(tmp_path):
    script = tmp_path / "faults.py"
    script.write_text(CODE)
    done = run_python(script)
    assert done.returncode == 0, done.stderr
    # The tensors of one round are 300,000 pages, touched again where they are mapped afresh.
    assert int(done.stdout) < 8000
