"""Does the device compute the same? Every fast path against its plain form, and the device against float32 on a CPU."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from bench._gpu.models import SMALL, add_adapter, random_base
from bench._measure import Disagreement, agree
from mafrt.core.types import Request, SamplingParams
from mafrt.engines.local.engine import LocalEngine
from mafrt.models.compute import reference
from mafrt.models.gpu import packed_attention
from mafrt.models.logprobs import FrozenHead, token_logprobs
from mafrt.models.packed_attention import PackedRows
from mafrt.models.packing import Packing, SharedPrefixes, pack
from mafrt.models.shared_base import SharedBase

TOLERANCE = {torch.float32: 2e-4, torch.bfloat16: 6e-2}
"""Largest difference, relative to the largest number compared. TF32 is off."""
LENGTHS = (48, 20, 33, 7, 41, 12)


def check(device: str, dtypes: tuple[torch.dtype, ...]) -> dict[str, float]:
    """Largest relative difference of each comparison; raises Disagreement where one is too large."""
    torch.backends.cuda.matmul.allow_tf32 = False
    differences: dict[str, float] = {}
    for dtype in dtypes:
        name, limit = str(dtype).removeprefix("torch."), TOLERANCE[dtype]
        base, other = _base(device, dtype), _base("cpu", torch.float32)
        _copy(other, base)
        for what, (ours, theirs) in {
            "update: device's own form and reference": (_update(base), _by_reference(base)),
            "update: device and CPU float32": (_update(base), _update(other)),
            "update: packed and row by row": (_update(base), _rows(base)),
        }.items():
            differences[f"{name} {what}"] = _close(f"{name} {what}", ours, theirs, limit)
        differences |= {f"{name} {what}": gap for what, gap in _heads(device, dtype, limit).items()}
        differences[f"{name} greedy tokens that differ, lean and model's decoder"] = _decoders(base, exact=limit < 1e-3)
    return differences


def attention(device: str, batches: int = 12) -> dict[str, float]:
    """Attention of packed rows in bfloat16 against the reference in float32, on batches of all kinds, gradients too.

    Returns the largest difference of outputs and gradients relative to their largest number; bfloat16 has 8 bits.
    """
    worst = {"forward": 0.0, "gradients": 0.0}
    if torch.device(device).type != "cuda":
        return worst
    for seed in range(batches):
        draw = torch.Generator().manual_seed(seed)
        heads, kv_heads, dim = ((16, 8, 128), (6, 2, 64), (4, 4, 96), (8, 1, 256))[seed % 4]
        packing, past = _packed(draw, seed, (kv_heads, dim), device)
        parts = [torch.randn(n, len(packing.take), dim, generator=draw) for n in (heads, kv_heads, kv_heads)]
        weight = torch.randn(len(packing.take), heads, dim, generator=draw).to(device)
        window = 24 if seed % 5 == 4 else None
        results = []
        for dtype, compute in ((torch.bfloat16, packed_attention.attend), (torch.float32, _reference_attention)):
            # The reference begins from the rounded numbers too.
            own = [t.to(device, torch.bfloat16).to(dtype).requires_grad_() for t in parts]
            kept = None if past is None else (past[0].bfloat16().to(dtype), past[1].bfloat16().to(dtype))
            rows = PackedRows(packing, _rectangle, dim**-0.5, window, kept, True)
            if not packed_attention.serves(own[0].bfloat16(), rows):
                break  # a window that cuts a beginning
            out = compute(own[0], own[1], own[2], rows)
            results.append([out, *torch.autograd.grad((out * weight.to(dtype)).sum(), own)])
        for number, (ours, theirs) in enumerate(zip(*results, strict=True) if len(results) == 2 else ()):
            kind = "gradients" if number else "forward"
            gap = float((ours.float() - theirs).abs().max() / theirs.abs().max())
            if not gap < 2e-2:
                what = f"attention of packed rows, batch {seed}, {kind} of {('output', 'q', 'k', 'v')[number]}"
                raise Disagreement(f"{what}: found {gap:.1%} of the largest number as difference, expected rounding")
            worst[kind] = max(worst[kind], gap)
    return {name: round(gap, 5) for name, gap in worst.items()}


def _packed(
    draw: torch.Generator, seed: int, shape: tuple[int, int], device: str
) -> tuple[Packing, tuple[Tensor, Tensor] | None]:
    """Rows that partly begin alike; every other batch begins in a pass before."""
    rows, width, there, past = 9, 300, torch.device(device), None
    ids = torch.randint(3, 9, (3, width), generator=draw)[torch.randint(0, 3, (rows,), generator=draw)]
    lengths = torch.randint(width // 3, width + 1, (rows,), generator=draw)
    for row in range(rows):
        cut = int(lengths[row]) // 2
        ids[row, cut:] = torch.randint(3, 9, (width - cut,), generator=draw)
    real = torch.arange(width) < lengths[:, None]
    index = torch.randint(0, 2, (rows,), generator=draw)
    beginnings = None
    if seed % 2:
        index = torch.where(torch.arange(width) < width // 4, -1, index[:, None])
        beginnings = SharedPrefixes.of(real, index, ids, there)
        assert beginnings is not None
        tokens = len(beginnings.packing.take)
        keys, values = (torch.randn(shape[0], tokens, shape[1], generator=draw).to(device) for _ in range(2))
        past = keys, values
    return pack(real, index, there, ids, beginnings=beginnings), past


def _reference_attention(query: Tensor, key: Tensor, value: Tensor, rows: PackedRows) -> Tensor:
    return rows.attend(query, key, value)


def _rectangle(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
    key, value = (t.repeat_interleave(query.shape[1] // t.shape[1], 1) for t in (key, value))
    out = functional.scaled_dot_product_attention(query, key, value, mask, is_causal=mask is None)
    return out.transpose(1, 2)


def _base(device: str, dtype: torch.dtype) -> SharedBase:
    return random_base(SMALL, 3, device=device, dtype=dtype)


def _copy(target: SharedBase, source: SharedBase) -> None:
    """The weights of `source`, adapters included, in the number format of `target`."""
    with torch.no_grad():
        for mine, theirs in zip(target.model.parameters(), source.model.parameters(), strict=True):
            mine.copy_(theirs)
    for name in target.adapters:
        target.bump(name)


def _by_reference(base: SharedBase) -> list[Tensor]:
    with reference():
        return _update(base)


def _update(base: SharedBase, rows: Sequence[int] = range(len(LENGTHS))) -> list[Tensor]:
    """Log-probabilities of the chosen rows, then the gradient of every adapter parameter, on the CPU in float32."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(1, SMALL.vocabulary, (len(LENGTHS), max(LENGTHS)), generator=generator)
    ids[3, :5] = ids[0, :5]  # two rows of one adapter that begin alike
    mask = (torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS)[:, None]).long()
    chosen = torch.tensor(list(rows))
    ids, mask, index = ids[chosen].to(base.device), mask[chosen].to(base.device), chosen % 3
    for name in base.adapters:
        for parameter in base.adapter_parameters(name):
            parameter.grad = None
    hidden = base.forward(ids, mask, index)
    real = mask[:, 1:].bool()
    logprobs, _ = base.token_logprobs(hidden[:, :-1][real], ids[:, 1:][real])
    logprobs.sum().backward()
    parameters = [p for name in base.adapters for p in base.adapter_parameters(name)]
    grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
    return [tensor.detach().float().cpu() for tensor in (logprobs, *grads)]


def _rows(base: SharedBase) -> list[Tensor]:
    """`_update`, a forward and backward pass for each row."""
    each = [_update(base, (row,)) for row in range(len(LENGTHS))]
    grads = [torch.stack(parts).sum(0) for parts in zip(*(one[1:] for one in each), strict=True)]
    return [torch.cat([one[0] for one in each]), *grads]


def _close(name: str, ours: list[Tensor], theirs: list[Tensor], limit: float) -> float:
    """Log-probabilities and gradients, each relative to the largest number of its kind."""
    worst = 0.0
    for kind, part in (("log-probs", slice(0, 1)), ("gradients", slice(1, None))):
        mine, other = (torch.cat([t.flatten() for t in ts[part]]) for ts in (ours, theirs))
        scale = float(other.abs().max())
        worst = max(worst, agree(f"{name}, {kind}", mine / scale, other / scale, tolerance=limit))
    return worst


def _heads(device: str, dtype: torch.dtype, limit: float) -> dict[str, float]:
    """Chunked log-probabilities, entropies and their gradients against the whole matrix of logits."""
    generator = torch.Generator().manual_seed(2)
    hidden = torch.randn(40, 64, generator=generator).to(device, dtype)
    weight = torch.randn(3000, 64, generator=generator).to(device, dtype)
    targets = torch.randint(0, 3000, (40,), generator=generator).to(device)
    mine, other = (hidden.clone().requires_grad_() for _ in range(2))
    logprobs, entropy = token_logprobs(mine, targets, FrozenHead(weight), temperature=0.8, chunk=16)
    (logprobs.sum() + entropy.sum()).backward()
    table = ((other @ weight.t()).float() / 0.8).log_softmax(1)
    plain = table.gather(1, targets[:, None])[:, 0]
    (plain.sum() - (table.exp() * table).sum()).backward()
    assert mine.grad is not None and other.grad is not None
    scale = float(other.grad.abs().max())
    return {
        "chunked log-probs": agree("chunked log-probs", logprobs / 10, plain / 10, tolerance=limit),
        "their gradients": agree("their gradients", mine.grad / scale, other.grad / scale, tolerance=limit),
    }


def _decoders(base: SharedBase, *, exact: bool) -> float:
    """Share of greedy tokens in which the lean decoder and the model's own forward differ; 0 is asked of float32."""
    sampling = SamplingParams(max_new_tokens=12, temperature=0.0)
    names: list[str | None] = [*base.adapters, None]
    requests = [Request([3 + n, 5, 7, 11, *range(20, 20 + n)], names[n % 4], sampling, seed=n) for n in range(12)]
    # A processor without a lean form decodes by the model's own.
    lean = LocalEngine(base, eos_ids=()).generate(requests)
    plain = LocalEngine(base, eos_ids=(), decoding="expanded").generate(requests)
    pairs = [(a, b) for x, y in zip(lean, plain, strict=True) for a, b in zip(x.ids, y.ids, strict=True)]
    share = sum(a != b for a, b in pairs) / len(pairs)
    if exact and share:
        raise Disagreement(f"greedy decoding: {share:.1%} of the tokens differ, expected none in float32")
    return round(share, 4)


def quantised(device: str) -> dict[str, Any]:
    """Cosine of the adapter gradients on a base in 8 and 4 bits with those on the whole one; at least .9 is asked."""
    if importlib.util.find_spec("bitsandbytes") is None:
        return {"left out": "bitsandbytes is not installed"}
    cosines: dict[str, Any] = {}
    whole = _teaching(device, None)
    for bits in (8, 4):
        cosines[f"{bits} bits"] = cosine = float(torch.cosine_similarity(_teaching(device, bits), whole, dim=0))
        if not cosine >= 0.9:
            raise Disagreement(f"{bits} bits: the gradients' cosine is {cosine:.3f}, expected at least .9")
    return cosines


def _teaching(device: str, bits: Any) -> Tensor:
    """Gradient of an adapter on the teaching base, as one vector on the CPU."""
    base = SharedBase.load("teaching-base", device=device, bits=bits)
    add_adapter(base, 0)
    ids = torch.randint(5, 300, (3, 24), generator=torch.Generator().manual_seed(1)).to(base.device)
    hidden = base.forward(ids, None, torch.zeros(3, dtype=torch.long))
    base.token_logprobs(hidden[:, :-1].flatten(0, 1), ids[:, 1:].flatten())[0].sum().backward()
    parts = [p.grad for p in base.adapter_parameters("agent0") if p.grad is not None]
    return torch.cat([part.flatten().float().cpu() for part in parts])
