"""The Triton kernels of a decode step: what they compute, by Triton's interpreter, and that they compile for GPUs.

Triton decides at its import whether it interprets, so both run in processes of their own.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.ci, pytest.mark.takes(slow=20)]

INTERPRETED = """
import torch
from mafrt.models.gpu import decode_kernels as kernels, decode_ops as ops

# Two layers of 4B's width side by side are wider than a row that a norm takes.
assert kernels.serves("gated", torch.empty(1, 2 * 9728)) and not kernels.serves("normed", torch.empty(1, 2 * 9728))
torch.manual_seed(0)
index = torch.tensor([0, 2, -1, 1])
rows, adapters = len(index), 3


def low(layers, rank):
    made = torch.randn(rows, layers, rank)
    made[index < 0] = 0
    return made


def same(found, wanted):
    for ours, theirs in zip(found, wanted, strict=True):
        if ours.dim() == 3 and ours.shape != theirs.shape:  # sums of parts
            ours, theirs = ours.sum(1), theirs.sum(1)
        assert ours.dtype == theirs.dtype
        torch.testing.assert_close(ours.float(), theirs.float(), atol=limit, rtol=limit)


for dtype, limit, rank, d, inner, heads, kv, dim in (
    (torch.float32, 1e-4, 8, 72, 600, 4, 2, 16),
    (torch.bfloat16, 0.05, 16, 64, 96, 3, 1, 24),
):
    def randn(*shape):
        return (torch.randn(shape) / shape[-1] ** 0.5).to(dtype)

    scale = torch.rand(adapters, 2)
    for parts in (1, 3):
        given = (randn(rows, d), low(parts, rank), randn(adapters, d, rank), index, randn(d), 1e-6)
        given += (randn(adapters, 2, 8, d), scale)
        same(kernels.normed(*given), ops._normed(*given))
    bare = (given[0], None, None, index, given[4], 1e-6, None, None)
    same(kernels.normed(*bare)[:2], ops._normed(*bare)[:2])
    given = (randn(rows, inner), index, randn(adapters, 1, rank, inner), scale[:, :1].contiguous())
    same([kernels.lowered(*given)], [ops._lowered(*given)])
    width = (heads + 2 * kv) * dim
    for inside, norm in ((low(3, rank), randn(heads + kv, dim)), (None, None)):
        caches = [torch.zeros(rows, kv, 9, dim, dtype=dtype) for _ in range(4)]
        up = None if inside is None else randn(adapters, width, rank)
        given = (randn(rows, width), inside, up, index, norm, 1e-6, randn(rows, dim), randn(rows, dim))
        given += (torch.tensor([0, 8, 3, 4]),)
        same([kernels.heads(*caches[:2], *given)], [ops._heads(*caches[2:], *given)])
        same(caches[:2], caches[2:])
        assert caches[0][1, :, 8].any() and not caches[0][1, :, 7].any()
    for inside, down in ((low(2, rank), randn(adapters, 1, 8, inner)), (None, None)):
        up = None if inside is None else randn(adapters, 2 * inner, rank)
        given = (randn(rows, 2 * inner), inside, up, index, down, None if down is None else scale[:, :1].contiguous())
        found, wanted = kernels.gated(*given), ops._gated(*given)
        same(found if down is not None else found[:1], wanted if down is not None else wanted[:1])
    for widths in ([24, 8, 4, 4], [600, 2]):
        given = (randn(rows, sum(widths)), low(len(widths), rank), randn(adapters, sum(widths), rank), index, widths)
        same([kernels.added(*given)], [ops._added(*given)])
    heads, keys, size, dim = 4, 2, 12, 6
    channels = 2 * keys * size + heads * dim
    taps, wide = randn(channels, 4), randn(rows, channels + heads * (dim + 2))
    before = randn(rows, channels, 4)
    states = [before.clone(), before.clone()]
    qkv = kernels.convolved(states[0], wide, taps)
    same([qkv], [ops._convolved(states[1], wide, taps)])
    assert torch.equal(*states) and not torch.equal(states[0], before)
    start = torch.randn(rows, heads, size, dim)
    states = [start.clone(), start.clone()]
    given = (qkv, wide, -torch.rand(heads), torch.randn(heads), randn(dim), 1e-6)
    same([kernels.delta(states[0], *given), states[0]], [ops._delta(states[1], *given), states[1]])
    assert not torch.equal(states[0], start)
"""

# Top-k and top-p without a sort keep what sorting keeps.
CUT = """
from mafrt.models.compute import truncate
from mafrt.models.gpu import decode_kernels as kernels

kernels.VOCABULARY = 64
torch.manual_seed(0)
top_k, top_p = torch.tensor([0, 1, 3, 200, 2, 0, 7]), torch.tensor([0.5, 0.9, 0.3, 1.0, 0.5, 1.0, 0.999])
for size, dtype in ((1, torch.float32), (64, torch.bfloat16), (200, torch.float32)):
    logits, heat = (3 * torch.randn(7, size)).to(dtype), torch.rand(7) + 0.2
    logits[2] = 0
    logits[3], logits[4, : size // 2] = logits[3].round(), -torch.inf
    logits[5, 0] = torch.nan
    found, wanted = kernels.truncated(logits, heat, top_k, top_p, 0), truncate(logits, heat, top_k, top_p)
    assert torch.equal(found.nan_to_num(nan=9e4), wanted.nan_to_num(nan=9e4))
"""

COMPILED = """
import inspect
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from mafrt.models.gpu import decode_kernels as kernels

FLAGS = {"ADDS": True, "LOWERS": True, "NORMS": True, "P": 8, "P_OUT": 8, "N": 512, "PARTS": 4, "R": 4}
FLAGS |= {"W": 4, "ND": 128, "NV": 128}
KINDS = {"low": "*fp32", "low_out": "*fp32", "scale": "*fp32", "index": "*i64", "position": "*i64", "eps": "fp32"}
KINDS |= {"decay": "*fp32", "bias": "*fp32", "temperatures": "*fp32", "top_k": "*i64", "top_p": "*fp32"}
NUMBERS = {"width", "parts", "dim", "count", "kv", "row_stride", "head_stride", "token_stride", "first", "second"}
NUMBERS |= {"third", "channels", "heads", "key_width", "group", "size"}
NAMES = "_normed _lowered _heads _gated _adds _convolved _delta _truncated"
for kernel in (getattr(kernels, name) for name in NAMES.split()):
    KINDS["state"] = "*fp32" if kernel is kernels._delta else "*bf16"
    names = kernel.arg_names
    consts = {name: FLAGS[name] for name in names if name in FLAGS}
    kinds = {
        name: "constexpr" if name in FLAGS else KINDS.get(name, "i32" if name in NUMBERS else "*bf16") for name in names
    }
    made = triton.compile(ASTSource(kernel, kinds, consts), target=GPUTarget("cuda", 80, 32), options={"num_warps": 8})
    assert made.asm["ptx"]
"""


def python(code: str, **more: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **more}, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-2000:]


def test_kernels_compute_what_the_plain_forms_compute():
    pytest.importorskip("triton")
    python(INTERPRETED + CUT, TRITON_INTERPRET="1")  # one interpreter imports torch and Triton


def test_kernels_compile_for_a_gpu(tmp_path):
    pytest.importorskip("triton")
    python(COMPILED, TRITON_CACHE_DIR=str(tmp_path))
