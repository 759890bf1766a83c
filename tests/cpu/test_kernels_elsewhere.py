"""The kernels compiled for processors that are not here: ARM under QEMU, and x86-64 without any AVX.

`every_kernel.c` calls each on the same numbers. This machine's own build is tested against float64 in the other files,
so equality with it is equality with the plain form.
"""

from __future__ import annotations

import os
import shutil
import subprocess

import pytest
import torch

from mafrt.cpu.library import FLAGS, SOURCE, find_compiler, library

pytestmark = [
    pytest.mark.takes(slow=11),
    pytest.mark.slow,
    pytest.mark.ci,
    pytest.mark.skipif(find_compiler() is None, reason="no C compiler"),
]
DRIVER = os.path.join(os.path.dirname(__file__), "every_kernel.c")
ARM = ("aarch64-linux-gnu-gcc", "qemu-aarch64")


def results(compiler, *words, folder, run=()):
    """(name, numbers) of every kernel, in the order of the driver's calls."""
    program = folder / "program"
    # -O1: optimising takes most of the time. -w: without AVX-512 vectors are passed otherwise, but none between files.
    flags = [flag for flag in FLAGS if not flag.startswith(("-march", "-O")) and flag not in ("-fPIC", "-shared")]
    command = [compiler, "-O1", "-w", *flags, f"-I{SOURCE}", DRIVER, *words, "-lm", "-o", str(program)]
    subprocess.run(command, check=True, capture_output=True)
    data = subprocess.run([*run, str(program)], check=True, capture_output=True, env={**os.environ}).stdout
    found = []
    while data:
        head, _, data = data.partition(b"\n")
        name, count = head.split()
        size = 4 * int(count)
        found.append((name.decode(), torch.frombuffer(bytearray(data[:size]), dtype=torch.float32)))
        data = data[size + 1 :]
    return found


@pytest.fixture(scope="module")
def ours(tmp_path_factory):
    """Of the library that this machine computes with."""
    kernels = library()
    assert kernels is not None
    found = results("cc", kernels._name, folder=tmp_path_factory.mktemp("ours"))
    assert len(found) > 50 and all(numbers.isfinite().all() and numbers.abs().max() > 0 for _, numbers in found)
    return found


@pytest.mark.cases(1)  # each compiles all; without AVX-512 they run in the other files
@pytest.mark.parametrize("kind", ["aarch64", "aarch64 with bfloat16", "x86-64"])
def test_every_kernel_computes_the_same_on_another_processor(kind, ours, tmp_path):
    sources = [str(path) for path in sorted(SOURCE.glob("*.c"))]
    if kind.startswith("aarch64"):
        if any(shutil.which(program) is None for program in ARM):
            pytest.skip(f"needs {' and '.join(ARM)}: apt-get install gcc-aarch64-linux-gnu qemu-user")
        march = "armv8.6-a" if "bfloat16" in kind else "armv8-a"
        found = results(ARM[0], f"-march={march}", "-static", *sources, folder=tmp_path, run=(ARM[1], "-cpu", "max"))
    else:
        found = results("cc", f"-march={kind}", *sources, folder=tmp_path)
    for (name, own), (same, numbers) in zip(ours, found, strict=True):
        assert name == same
        # A product that is rounded on its way to a sum, or is not, may round a bfloat16 number the other way.
        half = bool((own == own.bfloat16().float()).all()) and name != "ids"
        torch.testing.assert_close(numbers, own, rtol=2**-7 if half else 1e-4, atol=2**-9 if half else 1e-5, msg=name)
