"""Attention made for GPUs equals the reference, forward and backward; its kernel is written out for the CPU here."""

from __future__ import annotations

import pytest
import torch
from helpers_models import add_random_adapter, random_ids, tiny_base
from test_packed_rows import HEADS, KV_HEADS, attend, result_and_grads

from bench._gpu import fused_kernels
from bench._gpu.pretend_cuda import PretendCuda
from mafrt.models.compute import reference
from mafrt.models.gpu import packed_attention
from mafrt.models.packed_attention import PackedRows
from mafrt.models.packing import Family, Packing, SharedPrefixes, TokenBlock, pack
from mafrt.models.shared_base import SharedBase

DIM = 16


@pytest.fixture
def kernel(monkeypatch):
    """The flash kernel, in the precision of its inputs."""

    def constants(segments, scale, window):
        return segments.queries, segments.keys, segments.causal, scale, window if segments.causal else -1

    def forward(q, k, v, segments, scale, window):
        return fused_kernels.segments_attention(q, k, v, *constants(segments, scale, window))

    def backward(grad, q, k, v, out, lse, segments, scale, window):
        return fused_kernels.segments_attention_backward(grad, q, k, v, out, lse, *constants(segments, scale, window))

    monkeypatch.setattr(packed_attention, "flash", forward)
    monkeypatch.setattr(packed_attention, "flash_backward", backward)


def batch(*blocks: TokenBlock) -> Packing:
    tokens = torch.arange(sum(block.rows * block.length for block in blocks))
    return Packing(tokens, tokens, blocks, tokens, tokens)


def family(shared: int, *sizes: int, past: tuple[int, ...] | None = None) -> TokenBlock:
    places = None if past is None else torch.tensor(past)
    own = Family.of(shared, sizes, torch.device("cpu"), places)
    return TokenBlock(1, sum(sizes) + (shared if past is None else 0), own)


PACKINGS = {
    "rows alone": [TokenBlock(3, 5), TokenBlock(1, 9)],
    "one family": [family(17, 4, 1, 6)],
    "a family of even rests": [family(8, 5, 5)],
    "families side by side": [family(6, 2, 3), family(11, 1, 1)],
    "rows between families": [family(6, 2, 3), TokenBlock(2, 7), family(5, 4), TokenBlock(1, 1)],
    "rows before a family": [TokenBlock(1, 12), family(9, 2, 8, 3)],
    "a longest run that reads nothing": [TokenBlock(1, 40), family(3, 1, 2), TokenBlock(1, 50)],
    "beginnings of another pass": [family(4, 3, 2, past=(0, 1, 2, 9)), family(2, 6, past=(5, 6))],
    "both kinds of beginnings": [family(4, 3, 2, past=(0, 1, 2, 9)), TokenBlock(2, 3), family(7, 2, 2)],
    "one beginning for two families": [family(3, 2, 2, past=(4, 5, 6)), family(3, 1, 5, past=(4, 5, 6))],
}


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("name", PACKINGS)
def test_equal_to_the_reference(kernel, name, window):
    packing = batch(*PACKINGS[name])
    torch.manual_seed(0)
    tokens = len(packing.take)
    parts = [torch.randn(heads, tokens, DIM, requires_grad=True) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    past = tuple(torch.randn(KV_HEADS, 12, DIM) for _ in range(2))
    rows = PackedRows(packing, attend, 0.3, window, past, True)
    if window is not None and any(block.family is not None for block in packing.blocks):
        half = torch.zeros(HEADS, tokens, DIM, dtype=torch.bfloat16)
        assert not packed_attention.serves(half, rows), "a window would begin at another place in every rest"
        return
    weight = torch.randn(tokens, HEADS, DIM)
    expected = result_and_grads(lambda *p: rows.attend(*p), parts, weight)
    found = result_and_grads(lambda *p: packed_attention.attend(*p, rows), parts, weight)
    for part, own, theirs in zip(("out", "q", "k", "v"), found, expected, strict=True):
        torch.testing.assert_close(own, theirs, atol=1e-5, rtol=1e-5, msg=lambda m, n=part: f"{n}: {m}")


@pytest.mark.parametrize("seed", range(6))
def test_any_batch_is_cut_into_the_runs_of_the_reference(kernel, seed):
    draw = torch.Generator().manual_seed(seed)
    rows, width = 9, 60
    ids = torch.randint(3, 9, (3, width), generator=draw)[torch.randint(0, 3, (rows,), generator=draw)]
    lengths = torch.randint(20, width + 1, (rows,), generator=draw)
    for row in range(rows):
        ids[row, int(lengths[row]) // 2 :] = torch.randint(3, 9, (width - int(lengths[row]) // 2,), generator=draw)
    real = torch.arange(width) < lengths[:, None]
    index = torch.randint(0, 2, (rows,), generator=draw)
    cpu, past = torch.device("cpu"), None
    beginnings = None
    if seed % 2:
        index = torch.where(torch.arange(width) < 18, -1, index[:, None])
        beginnings = SharedPrefixes.of(real, index, ids, cpu)
        past = tuple(torch.randn(KV_HEADS, len(beginnings.packing.take), DIM, generator=draw) for _ in range(2))
    packing = pack(real, index, cpu, ids, beginnings=beginnings)
    sizes = (HEADS, KV_HEADS, KV_HEADS)
    parts = [torch.randn(n, len(packing.take), DIM, generator=draw).requires_grad_() for n in sizes]
    weight = torch.randn(len(packing.take), HEADS, DIM, generator=draw)
    how = PackedRows(packing, attend, 0.3, None, past, True)
    expected = result_and_grads(lambda *p: how.attend(*p), parts, weight)
    found = result_and_grads(lambda *p: packed_attention.attend(*p, how), parts, weight)
    for own, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(own, theirs, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("change", "served"),
    [
        ({}, True),
        ({"dtype": torch.float16}, True),
        ({"dtype": torch.float32}, False),
        ({"dim": 12}, False),
        ({"dim": 320}, False),
        ({"plain": False}, False),
        ({"capability": (7, 5)}, False),
        ({"dim": 256, "capability": (8, 6)}, False),
        ({"dim": 256}, True),
    ],
)
def test_what_the_kernel_refuses_is_the_references(monkeypatch, change, served):
    packed_attention._largest_head.cache_clear()
    rows = PackedRows(batch(family(4, 1, 2)), attend, 0.3, None, None, change.get("plain", True))
    with PretendCuda():
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: change.get("capability", (9, 0)))
        query = torch.zeros(6, 7, change.get("dim", 16), dtype=change.get("dtype", torch.bfloat16), device="cuda")
        assert packed_attention.serves(query, rows) == served
    packed_attention._largest_head.cache_clear()


@pytest.mark.slow
@pytest.mark.parametrize("scope", ["all", "action"])
@pytest.mark.parametrize("kind", ["qwen3", "qwen2", "mistral", "gemma3", "gemma2"])
def test_a_base_on_a_gpu_learns_as_the_reference(kind, scope):
    """With the model's own layers around it, in bfloat16, in which the kernel computes."""

    def gradients(gpu: PretendCuda) -> torch.Tensor:
        base = tiny_base(kind, width=64)
        base = SharedBase(base.model.to("cuda", torch.bfloat16), base.tokenizer, base.name)
        for number in range(2):
            add_random_adapter(base, f"agent{number}", seed=number, scope=scope)
        ids = random_ids(6, 40, seed=1)
        ids[1:3, :30], ids[4, :25] = ids[0, :30], ids[3, :25]
        index = torch.tensor([0, 0, 0, 1, 1, 1])
        if scope == "action":
            index = torch.where(torch.arange(40) < 20, -1, index[:, None])
        states = base.forward(ids.to("cuda"), None, index)
        logprobs, _ = base.token_logprobs(states[:, :-1].flatten(0, 1), ids[:, 1:].flatten().to("cuda"))
        logprobs.sum().backward()
        return torch.cat([p.grad.cpu().flatten() for name in base.adapters for p in base.adapter_parameters(name)])

    with PretendCuda() as gpu:
        found = gradients(gpu)
        fused = gpu.launches["_flash_attention_backward"]
    with PretendCuda() as gpu, reference():
        expected = gradients(gpu)
        assert not gpu.launches["_flash_attention_backward"]
    assert (fused > 0) == (kind not in ("gemma2", "mistral")), "neither capped scores nor windows over beginnings"
    assert torch.nn.functional.cosine_similarity(found, expected, dim=0) > 0.995


def test_a_prompt_of_24576_tokens_is_neither_copied_nor_masked():
    """Bytes of one layer's attention over 8 answers of 60 tokens, forward and backward, on the device's shapes."""
    heads, kv_heads, dim, prompt, answers = 32, 8, 128, 24576, 8
    with PretendCuda(numbers=2**14) as gpu:
        block = TokenBlock(1, prompt + 60 * answers, Family.of(prompt, [60] * answers, torch.device("cpu")))
        packing = batch(block).to(torch.device("cuda"))
        assert not any(t.numel() > 2**21 for t in block.family.places())
        tokens = block.length
        query, key, value = (
            torch.empty(n, tokens, dim, dtype=torch.bfloat16, device="cuda", requires_grad=True)
            for n in (heads, kv_heads, kv_heads)
        )
        rows = PackedRows(packing, attend, 0.1, None, None, True)
        packing.once(packed_attention.segments_of)
        before = gpu.live
        gpu.clear()
        out = packed_attention.attend(query, key, value, rows)
        size = 2 * tokens * heads * dim
        assert gpu.live - before < 1.05 * size, "the output, and one number a query and head"
        assert gpu.peak - before < 2.2 * size and gpu.launched <= 12
        gpu.clear()
        out.backward(torch.empty_like(out))
        assert gpu.peak - before < 7 * size and gpu.launched <= 14
        assert not gpu.waited
