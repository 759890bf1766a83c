"""What a decode step computes between its large products, as operations that are one kernel each on a GPU.

Products with the base's weights are left to torch; all else of a layer is so little work that a GPU spends its time on
starting kernels. Here a norm takes in what the adapters add to its input and what they take from its output; so do the
heads' norm and rotation, and the activation. A row reads its own adapter only, so their number costs nothing. One more
cuts off what top-k and top-p bar, without sorting the vocabulary.

`low` is the adapters' inner product, scaled, float32 `[rows, M, P]`: of M layers that share their input, or M parts of
a sum. P is the rank, rounded up. `index` `[rows]` is the row's adapter, -1 without one. Adapters lie as `down`
`[K, M, P, in]` and `up` `[K, out, P]`, zeros where a rank is smaller, and their scalings as `[K, M]` float32.

The forms in plain torch below say what each computes, and run where there is no Triton. They are operations of torch's
own registry, so that whatever counts or records launches sees one.
"""

from __future__ import annotations

import functools
import importlib
import logging
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from mafrt.models.compute import truncate

log = logging.getLogger(__name__)

STEP = 8
"""P is a multiple of it"""


def _normed(
    x: Tensor,
    low: Tensor | None,
    up: Tensor | None,
    index: Tensor,
    weight: Tensor,
    eps: float,
    down: Tensor | None,
    scale: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The residual `[rows, d]` with what the adapters of the layer before add, its norm, the norm's inner product."""
    x = _plus(x, None if low is None else low.sum(1, keepdim=True), up, index, (x.shape[1],))
    h = F.rms_norm(x.to(weight.dtype), x.shape[-1:], weight, eps).to(x.dtype)
    return x, h, _low(h, down, scale, index)


def _lowered(h: Tensor, index: Tensor, down: Tensor, scale: Tensor) -> Tensor:
    """The inner product alone."""
    return _low(h, down, scale, index)


def _heads(
    keys: Tensor,
    values: Tensor,
    qkv: Tensor,
    low: Tensor | None,
    up: Tensor | None,
    index: Tensor,
    norm: Tensor | None,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    position: Tensor,
) -> Tensor:
    """Queries `[rows, heads, D]`, normed and rotated; the keys and values are written to `[rows, kv heads, :, D]`.

    `norm` `[heads + kv heads, D]`; `cos` and `sin` `[rows, D]`, for `x cos + roll(x) sin`; `position` `[rows]`.
    """
    rows, kv, _, dim = keys.shape
    count = qkv.shape[1] // dim - 2 * kv
    whole = _plus(qkv, low, up, index, (count * dim, kv * dim, kv * dim))
    both, v = whole.view(rows, -1, dim).split([count + kv, kv], 1)
    if norm is not None:
        both = F.rms_norm(both, both.shape[-1:], None, eps) * norm
    both = both * cos.unsqueeze(1) + both.roll(dim // 2, -1) * sin.unsqueeze(1)
    q, k = both.split([count, kv], 1)
    every = torch.arange(rows, device=keys.device)
    for buffer, new in ((keys, k), (values, v)):
        buffer[every, :, position] = new.to(buffer.dtype)
    queries: Tensor = q.contiguous()
    return queries


def _gated(
    gate_up: Tensor, low: Tensor | None, up: Tensor | None, index: Tensor, down: Tensor | None, scale: Tensor | None
) -> tuple[Tensor, Tensor]:
    """`silu(gate) * up` `[rows, inner]` of both, side by side, and its inner product."""
    inner = gate_up.shape[1] // 2
    gate, other = _plus(gate_up, low, up, index, (inner, inner)).chunk(2, 1)
    h = F.silu(gate) * other
    return h, _low(h, down, scale, index)


def _added(x: Tensor, low: Tensor, up: Tensor, index: Tensor, widths: list[int]) -> Tensor:
    """`x` `[rows, out]`, the outputs of layers of these widths, with what the adapters add."""
    return _plus(x, low, up, index, tuple(widths))


def _convolved(state: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """SiLU of the causal convolution `[rows, C]` of each channel; the newest inputs are the first C columns of `x`.

    `state` `[rows, C, W]` holds the last W inputs, and moves on by one; `weight` `[C, W]`.
    """
    window = torch.cat((state[:, :, 1:], x[:, : state.shape[1], None]), 2)
    state.copy_(window)
    exact = torch.promote_types(x.dtype, torch.float32)
    return F.silu((window.to(exact) * weight.to(exact)).sum(2).to(x.dtype))


def _delta(state: Tensor, qkv: Tensor, whole: Tensor, decay: Tensor, bias: Tensor, norm: Tensor, eps: float) -> Tensor:
    """A step of the gated delta rule (`mafrt.models.delta_rule`), its norm and its gate: `[rows, H * V]`.

    `state` `[rows, H, D, V]` float32, moved on; `qkv` `[rows, 2 * G * D + H * V]`, G key heads, of which each serves
    H / G heads; the last columns of `whole` are the gate, H * V, the strength of writing and the decay, H each;
    `decay` and `bias` `[H]` float32; `norm` `[V]`.
    """
    rows, heads, size, width = state.shape
    exact, dtype = state.dtype, qkv.dtype
    keys = (qkv.shape[1] - heads * width) // 2
    q, k, v = qkv.split([keys, keys, heads * width], 1)
    gate, strength, a = whole[:, -heads * (width + 2) :].split([heads * width, heads, heads], 1)
    # A norm by the mean of the squares; what is missing of it is multiplied in below.
    both = torch.stack((k, q), 1).view(rows, 2, -1, size).to(exact)
    both = F.rms_norm(both, (size,), None, 1e-6 / size)
    if keys < heads * size:
        both = both.repeat_interleave(heads * size // keys, 2)
    both = both.transpose(1, 2).reshape(rows * heads, 2, size)
    k, q = both.split(1, 1)
    v = v.reshape(rows * heads, 1, width).to(exact)
    forget = (decay * F.softplus(a.to(exact) + bias)).exp()
    S = state.mul_(forget[:, :, None, None]).view(rows * heads, size, width)
    remembered, read = torch.bmm(both, S).split(1, 1)
    change = (v - remembered * size**-0.5) * strength.sigmoid().reshape(-1, 1, 1)
    S.baddbmm_(k.transpose(1, 2), change, alpha=size**-0.5)
    out = (read + torch.bmm(k, q.transpose(1, 2)) * size**-0.5 * change) / size
    out = norm * F.rms_norm(out.to(dtype).view(rows, heads, width).to(exact), (width,), None, eps).to(dtype)
    gated: Tensor = (out * F.silu(gate.reshape(rows, heads, width).to(exact))).to(dtype)
    return gated.view(rows, -1)


def _plus(x: Tensor, low: Tensor | None, up: Tensor | None, index: Tensor, widths: tuple[int, ...]) -> Tensor:
    """`x` `[rows, out]` and what the adapters add: `low[:, m]` to the m-th of the layers of these widths."""
    if low is None or up is None:
        return x.clone()
    up_parts = up[index.clamp(min=0)].to(low.dtype).split(list(widths), 1)
    added = [(part @ low[:, m].unsqueeze(2)).squeeze(2) for m, part in enumerate(up_parts)]
    return (x + torch.cat(added, 1)).to(x.dtype)


def _low(h: Tensor, down: Tensor | None, scale: Tensor | None, index: Tensor) -> Tensor:
    exact = torch.promote_types(h.dtype, torch.float32)
    if down is None or scale is None:
        return h.new_empty(0, dtype=exact)
    at = index.clamp(min=0)
    made = (down[at].to(exact) @ h.to(exact)[:, None, :, None]).squeeze(3)
    return made * (scale[at] * (index >= 0).unsqueeze(1)).unsqueeze(2).to(exact)


_adapted = "Tensor? low, Tensor? up, Tensor index"
_SCHEMAS: dict[str, tuple[str, Any]] = {
    "normed": (
        f"(Tensor x, {_adapted}, Tensor weight, float eps, Tensor? down, Tensor? scale) -> (Tensor, Tensor, Tensor)",
        _normed,
    ),
    "lowered": ("(Tensor h, Tensor index, Tensor down, Tensor scale) -> Tensor", _lowered),
    "heads": (
        f"(Tensor(a!) keys, Tensor(b!) values, Tensor qkv, {_adapted}, Tensor? norm, float eps, Tensor cos, "
        "Tensor sin, Tensor position) -> Tensor",
        _heads,
    ),
    "truncated": (
        "(Tensor logits, Tensor temperatures, Tensor top_k, Tensor top_p, int widest) -> Tensor",
        truncate,
    ),
    "added": ("(Tensor x, Tensor low, Tensor up, Tensor index, int[] widths) -> Tensor", _added),
    "convolved": ("(Tensor(a!) state, Tensor x, Tensor weight) -> Tensor", _convolved),
    "delta": (
        "(Tensor(a!) state, Tensor qkv, Tensor whole, Tensor decay, Tensor bias, Tensor norm, float eps) -> Tensor",
        _delta,
    ),
    "gated": (f"(Tensor gate_up, {_adapted}, Tensor? down, Tensor? scale) -> (Tensor, Tensor)", _gated),
}


@functools.cache
def _kernels(device: torch.device) -> Any:
    """The module with the kernels, or None where they cannot be had: Triton builds them with a C compiler."""
    try:
        kernels = importlib.import_module("mafrt.models.gpu.decode_kernels")
        one = torch.ones(1, 16, device=device)
        index, down = torch.zeros(1, dtype=torch.long, device=device), torch.ones(1, 1, STEP, 16, device=device)
        kernels.lowered(one, index, down, one)
    except Exception as error:
        log.warning("decoding launches more kernels than it has to: Triton cannot be used (%s)", str(error)[:200])
        return None
    return kernels


def _on_gpu(name: str, plain: Any) -> Any:
    def run(*args: Any) -> Any:
        # Triton launches on the current device, wherever the tensors are.
        with torch.cuda.device(args[0].device):
            kernels = _kernels(args[0].device)
            served = kernels is not None and kernels.serves(name, args[0])
            return getattr(kernels, name)(*args) if served else plain(*args)

    return run


library = torch.library.Library("mafrt", "DEF")
for _name, (_schema, _plain) in _SCHEMAS.items():
    library.define(_name + _schema)
    library.impl(_name, _plain, "CompositeExplicitAutograd")
    library.impl(_name, _on_gpu(_name, _plain), "CUDA")

ops = torch.ops.mafrt
normed, lowered, heads, gated = ops.normed, ops.lowered, ops.heads, ops.gated
added, convolved, delta, truncated = ops.added, ops.convolved, ops.delta, ops.truncated
