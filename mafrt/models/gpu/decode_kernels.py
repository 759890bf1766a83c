"""The operations of `decode_ops` as Triton kernels; arguments and results are described there.

One program computes a row, or a head or a part of it. Numbers are float32 within a kernel, and rounded where the plain
forms round. Adapters are read four or eight ranks (R) at a time, so that
registers suffice at any rank.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

PART = 512
"""columns of a program that computes a part of a row"""
VOCABULARY = 8192
"""tokens that a program looks at at once"""
WIDEST = 16384
"""columns of a row that one program can hold, as only a norm must"""


def serves(name: str, first: Tensor) -> bool:
    """Whether the kernel of this operation computes with numbers like its first argument."""
    fits = name != "normed" or first.shape[-1] <= WIDEST
    if name == "delta":  # a program holds a head's state
        fits = first.dtype == torch.float32 and triton.next_power_of_2(first[0, 0].numel()) <= WIDEST
    return fits and first.dtype in (torch.float32, torch.float16, torch.bfloat16)


@triton.jit
def _adapter(index):
    """A row's adapter, the first for a row without one, whose inner products are then taken times 0."""
    k = tl.load(index)
    return tl.maximum(k, 0), (k >= 0).to(tl.float32)


@triton.jit
def _added(low, parts, up, at, ok, P: tl.constexpr, N: tl.constexpr, PARTS: tl.constexpr, R: tl.constexpr):
    """What an adapter adds at the outputs `at` `[N]`: rows of `up` times the sum of the `parts` `[P]` at `low`."""
    part = tl.arange(0, PARTS)[:, None]
    total = tl.zeros([N], tl.float32)
    for first in tl.static_range(0, P, R):
        p = first + tl.arange(0, R)[None, :]
        inner = tl.sum(tl.load(low + part * P + p, mask=part + 0 * p < parts, other=0.0), 0)
        b = tl.load(up + at[:, None] * P + p, mask=ok[:, None], other=0.0)
        total += tl.sum(b.to(tl.float32) * inner[None, :], 1)
    return total


@triton.jit
def _inner(h, down, into, scale, at, ok, width, P: tl.constexpr, R: tl.constexpr):
    """Write the scaled products `[P]` of `h` `[N]`, the inputs `at`, with the rows of `down` `[P, width]`."""
    for first in tl.static_range(0, P, R):
        p = first + tl.arange(0, R)
        a = tl.load(down + p[:, None] * width + at[None, :], mask=ok[None, :], other=0.0)
        tl.store(into + p, tl.sum(a.to(tl.float32) * h[None, :], 1) * scale)


@triton.jit
def _normed(
    x_in, low, up, index, weight, down, scale, x_out, h_out, low_out,
    eps, width, parts,
    ADDS: tl.constexpr, LOWERS: tl.constexpr, P: tl.constexpr, P_OUT: tl.constexpr, N: tl.constexpr,
    PARTS: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    # Each layer that takes the norm has a program of its own, which computes the norm anew; the first writes it.
    row, layer, layers = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    k, acts = _adapter(index + row)
    at = tl.arange(0, N)
    ok = at < width
    x = tl.load(x_in + row * width + at, mask=ok, other=0.0).to(tl.float32)
    if ADDS:
        x += _added(low + row * parts * P, parts, up + k * width * P, at, ok, P, N, PARTS, R)
    rounded = x.to(x_out.dtype.element_ty)
    x = rounded.to(tl.float32)
    norm = tl.rsqrt(tl.sum(x * x, 0) / width + eps)
    h = (x * norm * tl.load(weight + at, mask=ok, other=0.0).to(tl.float32)).to(h_out.dtype.element_ty)
    if layer == 0:
        tl.store(x_out + row * width + at, rounded, mask=ok)
        tl.store(h_out + row * width + at, h, mask=ok)
    if LOWERS:
        factor = tl.load(scale + k * layers + layer) * acts
        mine = down + (k * layers + layer) * P_OUT * width
        _inner(h.to(tl.float32), mine, low_out + (row * layers + layer) * P_OUT, factor, at, ok, width, P_OUT, R)


@triton.jit
def _lowered(h_in, index, down, scale, low_out, width, P: tl.constexpr, N: tl.constexpr):
    row, part, parts = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    k, acts = _adapter(index + row)
    at = part * N + tl.arange(0, N)
    ok = at < width
    h = tl.load(h_in + row * width + at, mask=ok, other=0.0).to(tl.float32)
    factor = tl.load(scale + k) * acts
    _inner(h, down + k * P * width, low_out + (row * parts + part) * P, factor, at, ok, width, P, 8)


@triton.jit
def _heads(
    keys, values, qkv, low, up, index, norm, cos, sin, position, q_out,
    eps, width, dim, count, kv, row_stride, head_stride, token_stride,
    ADDS: tl.constexpr, NORMS: tl.constexpr, P: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    row, head = tl.program_id(0), tl.program_id(1)
    half = dim // 2
    c = tl.arange(0, N)
    ok = c < half
    at = head * dim + c
    a = tl.load(qkv + row * width + at, mask=ok, other=0.0).to(tl.float32)
    b = tl.load(qkv + row * width + at + half, mask=ok, other=0.0).to(tl.float32)
    if ADDS:
        k, _ = _adapter(index + row)
        layer = (head >= count).to(tl.int32) + (head >= count + kv).to(tl.int32)
        mine = low + (row * 3 + layer) * P
        a += _added(mine, 1, up + k * width * P, at, ok, P, N, 1, 8)
        b += _added(mine, 1, up + k * width * P, at + half, ok, P, N, 1, 8)
    a = a.to(q_out.dtype.element_ty).to(tl.float32)
    b = b.to(q_out.dtype.element_ty).to(tl.float32)
    if head < count + kv:
        if NORMS:
            inverse = tl.rsqrt((tl.sum(a * a, 0) + tl.sum(b * b, 0)) / dim + eps)
            a = a * inverse * tl.load(norm + at, mask=ok, other=0.0).to(tl.float32)
            b = b * inverse * tl.load(norm + at + half, mask=ok, other=0.0).to(tl.float32)
        here = row * dim + c
        first = a * tl.load(cos + here, mask=ok, other=0.0).to(tl.float32)
        first += b * tl.load(sin + here, mask=ok, other=0.0).to(tl.float32)
        second = b * tl.load(cos + here + half, mask=ok, other=0.0).to(tl.float32)
        second += a * tl.load(sin + here + half, mask=ok, other=0.0).to(tl.float32)
        a, b = first, second
    offset = row.to(tl.int64) * row_stride + tl.load(position + row) * token_stride
    if head < count:
        into = q_out + (row * count + head) * dim + c
    elif head < count + kv:
        into = keys + offset + (head - count) * head_stride + c
    else:
        into = values + offset + (head - count - kv) * head_stride + c
    tl.store(into, a.to(q_out.dtype.element_ty), mask=ok)
    tl.store(into + half, b.to(q_out.dtype.element_ty), mask=ok)


@triton.jit
def _gated(
    gate_up, low, up, index, down, scale, h_out, low_out, width,
    ADDS: tl.constexpr, LOWERS: tl.constexpr, P: tl.constexpr, P_OUT: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    row, part, parts = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    k, acts = _adapter(index + row)
    at = part * N + tl.arange(0, N)
    ok = at < width
    gate = tl.load(gate_up + row * 2 * width + at, mask=ok, other=0.0).to(tl.float32)
    other = tl.load(gate_up + row * 2 * width + width + at, mask=ok, other=0.0).to(tl.float32)
    if ADDS:
        mine = up + k * 2 * width * P
        gate += _added(low + row * 2 * P, 1, mine, at, ok, P, N, 1, 8)
        other += _added(low + (row * 2 + 1) * P, 1, mine, at + width, ok, P, N, 1, 8)
    gate = gate.to(h_out.dtype.element_ty).to(tl.float32)
    other = other.to(h_out.dtype.element_ty).to(tl.float32)
    acted = (gate / (1 + tl.exp(-gate))).to(h_out.dtype.element_ty).to(tl.float32)
    h = (acted * other).to(h_out.dtype.element_ty)
    tl.store(h_out + row * width + at, h, mask=ok)
    if LOWERS:
        factor = tl.load(scale + k) * acts
        into = low_out + (row * parts + part) * P_OUT
        _inner(h.to(tl.float32), down + k * P_OUT * width, into, factor, at, ok, width, P_OUT, 8)


@triton.jit
def _order(x):
    """Integers in the order of the numbers."""
    bits = x.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _number(order):
    """The number that `_order` gives this integer."""
    bits = order.to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _from(logits, width, top, heat, bound, N: tl.constexpr):
    """How many tokens come at `bound` or after it in the order of their logits, and their weight together."""
    count, weight = tl.zeros([N], tl.int32), tl.zeros([N], tl.float32)
    for first in range(0, width, N):
        at = first + tl.arange(0, N)
        x = tl.load(logits + at, mask=at < width, other=float("-inf")).to(tl.float32)
        inside = (at < width) & (_order(x) >= bound)
        count += inside.to(tl.int32)
        weight += tl.where(inside, tl.exp((x - top) / heat), 0.0)
    return tl.sum(count, 0), tl.sum(weight, 0)


@triton.jit
def _truncated(logits, temperatures, top_k, top_p, out, width, N: tl.constexpr):
    # One program a row. The last token that is kept is found by halving the range of logits, not by sorting them.
    row = tl.program_id(0)
    logits += row.to(tl.int64) * width
    out += row.to(tl.int64) * width
    heat, p = tl.load(temperatures + row), tl.load(top_p + row)
    k = tl.load(top_k + row).to(tl.int32)
    highest = tl.full([N], float("-inf"), tl.float32)
    for first in range(0, width, N):
        at = first + tl.arange(0, N)
        highest = tl.maximum(highest, tl.load(logits + at, mask=at < width, other=float("-inf")).to(tl.float32))
    top = tl.max(highest, 0)
    beyond = _order(top).to(tl.int64) + 1
    last = tl.full([], -(2**31), tl.int64)
    ties = width
    count, total = _from(logits, width, top, heat, last, N)
    finite = (total == total) & (total < float("inf"))
    if finite & (k > 0) & (k < width):
        high = beyond
        while high - last > 1:
            middle = (last + high) >> 1
            count, weight = _from(logits, width, top, heat, middle, N)
            if count >= k:
                last = middle
            else:
                high = middle
        count, total = _from(logits, width, top, heat, last + 1, N)
        ties = k - count
        total += ties * tl.exp((_number(last) - top) / heat)
    if finite & (p < 1):
        low, high = last, beyond
        while high - low > 1:
            middle = (low + high) >> 1
            count, weight = _from(logits, width, top, heat, middle, N)
            if weight >= p * total:
                low = middle
            else:
                high = middle
        count, weight = _from(logits, width, top, heat, low + 1, N)
        needed = tl.ceil((p * total - weight) / tl.exp((_number(low) - top) / heat))
        most = tl.where(low == last, ties, width)
        ties = tl.maximum(tl.minimum(needed, most.to(tl.float32)), 1).to(tl.int32)
        last = low
    before = 0
    for first in range(0, width, N):
        at = first + tl.arange(0, N)
        x = tl.load(logits + at, mask=at < width, other=float("-inf"))
        order = _order(x.to(tl.float32))
        tied = (at < width) & (order == last)
        rank = before + tl.cumsum(tied.to(tl.int32), 0)
        before += tl.sum(tied.to(tl.int32), 0)
        stays = (order > last) | (tied & (rank <= ties)) | (finite == 0)
        tl.store(out + at, tl.where(stays, x, float("-inf")), mask=at < width)


@triton.jit
def _adds(
    x_in, low, up, index, out, width, parts, first, second, third, P: tl.constexpr, N: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0)
    k, _ = _adapter(index + row)
    at = tl.program_id(1) * N + tl.arange(0, N)
    ok = at < width
    layer = (at >= first).to(tl.int32) + (at >= second).to(tl.int32) + (at >= third).to(tl.int32)
    total = tl.load(x_in + row * width + at, mask=ok, other=0.0).to(tl.float32)
    for begin in tl.static_range(0, P, 8):
        p = begin + tl.arange(0, 8)[None, :]
        inner = tl.load(low + (row * parts + layer)[:, None] * P + p, mask=ok[:, None], other=0.0)
        b = tl.load(up + (k * width + at)[:, None] * P + p, mask=ok[:, None], other=0.0)
        total += tl.sum(b.to(tl.float32) * inner, 1)
    tl.store(out + row * width + at, total.to(out.dtype.element_ty), mask=ok)


@triton.jit
def _convolved(state, x_in, weight, out, width, channels, W: tl.constexpr, N: tl.constexpr):
    row = tl.program_id(0)
    at = tl.program_id(1) * N + tl.arange(0, N)
    ok = at < channels
    base = state + (row.to(tl.int64) * channels + at) * W
    total = tl.zeros([N], tl.float32)
    for place in tl.static_range(0, W):
        if place < W - 1:
            x = tl.load(base + place + 1, mask=ok, other=0.0)
        else:
            x = tl.load(x_in + row * width + at, mask=ok, other=0.0)
        total += x.to(tl.float32) * tl.load(weight + at * W + place, mask=ok, other=0.0).to(tl.float32)
        tl.store(base + place, x, mask=ok)
    total = total.to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + row * channels + at, (total / (1 + tl.exp(-total))).to(out.dtype.element_ty), mask=ok)


@triton.jit
def _delta(
    state, qkv, whole, decay, bias, norm, out,
    eps, channels, width, heads, key_width, group, size, dim, ND: tl.constexpr, NV: tl.constexpr,
):  # fmt: skip
    row, head = tl.program_id(0), tl.program_id(1)
    kind = out.dtype.element_ty
    d, v = tl.arange(0, ND), tl.arange(0, NV)
    of_d, of_v = d < size, v < dim
    given = qkv + row * channels
    q = tl.load(given + head // group * size + d, mask=of_d, other=0.0).to(tl.float32)
    k = tl.load(given + key_width + head // group * size + d, mask=of_d, other=0.0).to(tl.float32)
    value = tl.load(given + 2 * key_width + head * dim + v, mask=of_v, other=0.0).to(tl.float32)
    q *= tl.rsqrt(tl.sum(q * q, 0) + 1e-6) * tl.rsqrt(size.to(tl.float32))
    k *= tl.rsqrt(tl.sum(k * k, 0) + 1e-6)
    rest = whole + row * width + width - heads * (dim + 2)
    gate = tl.load(rest + head * dim + v, mask=of_v, other=0.0).to(tl.float32)
    strength = 1 / (1 + tl.exp(-tl.load(rest + heads * dim + head).to(tl.float32)))
    strength = strength.to(kind).to(tl.float32)
    a = tl.load(rest + heads * (dim + 1) + head).to(tl.float32) + tl.load(bias + head)
    forget = tl.exp(tl.load(decay + head) * tl.where(a > 20, a, tl.log(1 + tl.exp(a))))
    there = state + (row.to(tl.int64) * heads + head) * size * dim + d[:, None] * dim + v[None, :]
    ok = of_d[:, None] & of_v[None, :]
    s = tl.load(there, mask=ok, other=0.0) * forget
    change = (value - tl.sum(s * k[:, None], 0)) * strength
    s += k[:, None] * change[None, :]
    tl.store(there, s, mask=ok)
    o = tl.sum(s * q[:, None], 0).to(kind).to(tl.float32)
    o = (o * tl.rsqrt(tl.sum(o * o, 0) / dim + eps)).to(kind).to(tl.float32)
    o = (o * tl.load(norm + v, mask=of_v, other=0.0).to(tl.float32)).to(kind).to(tl.float32)
    o *= gate / (1 + tl.exp(-gate))
    tl.store(out + (row * heads + head) * dim + v, o.to(kind), mask=of_v)


def normed(
    x: Tensor,
    low: Tensor | None,
    up: Tensor | None,
    index: Tensor,
    weight: Tensor,
    eps: float,
    down: Tensor | None,
    scale: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """`decode_ops.normed`."""
    rows, width = x.shape
    layers, block = 1 if down is None else down.shape[1], triton.next_power_of_2(width)
    parts = 1 if low is None else low.shape[1]
    x_out, h = torch.empty_like(x), torch.empty_like(x)
    inner = _space(x, (rows, layers, _rank(down, 2)))
    _normed[rows, layers](
        x, low, up, index, weight, down, scale, x_out, h, inner, eps, width, parts,
        ADDS=low is not None, LOWERS=down is not None, P=_rank(up, 2), P_OUT=_rank(down, 2), N=block,
        PARTS=triton.next_power_of_2(parts), R=8 if block <= 2048 else 4, num_warps=_warps(block),
    )  # fmt: skip
    return x_out, h, inner


def lowered(h: Tensor, index: Tensor, down: Tensor, scale: Tensor) -> Tensor:
    """`decode_ops.lowered`."""
    rows, width = h.shape
    parts, rank = triton.cdiv(width, PART), _rank(down, 2)
    inner = _space(h, (rows, parts, rank))
    _lowered[rows, parts](h, index, down, scale, inner, width, P=rank, N=PART, num_warps=_warps(PART))
    return inner


def heads(
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
    """`decode_ops.heads`."""
    rows, kv, _, dim = keys.shape
    width = qkv.shape[1]
    count, block = width // dim - 2 * kv, triton.next_power_of_2(dim // 2)
    q = qkv.new_empty(rows, count, dim)
    _heads[rows, count + 2 * kv](
        keys, values, qkv, low, up, index, norm, cos, sin, position, q, eps, width, dim, count, kv, *keys.stride()[:3],
        ADDS=low is not None, NORMS=norm is not None, P=_rank(up, 2), N=block, num_warps=1,
    )  # fmt: skip
    return q


def gated(
    gate_up: Tensor, low: Tensor | None, up: Tensor | None, index: Tensor, down: Tensor | None, scale: Tensor | None
) -> tuple[Tensor, Tensor]:
    """`decode_ops.gated`."""
    rows, width = len(gate_up), gate_up.shape[1] // 2
    parts = triton.cdiv(width, PART)
    h = gate_up.new_empty(rows, width)
    inner = _space(h, (rows, parts, _rank(down, 2)))
    _gated[rows, parts](
        gate_up, low, up, index, down, scale, h, inner, width,
        ADDS=low is not None, LOWERS=down is not None, P=_rank(up, 2), P_OUT=_rank(down, 2), N=PART,
        num_warps=_warps(PART),
    )  # fmt: skip
    return h, inner


def added(x: Tensor, low: Tensor, up: Tensor, index: Tensor, widths: list[int]) -> Tensor:
    """`decode_ops.added`, of four layers at most."""
    rows, width = x.shape
    ends = [sum(widths[: n + 1]) if n + 1 < len(widths) else width for n in range(3)]
    out = torch.empty_like(x)
    _adds[rows, triton.cdiv(width, PART)](
        x, low, up, index, out, width, low.shape[1], *ends, P=_rank(up, 2), N=PART, num_warps=_warps(PART)
    )
    return out


def convolved(state: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """`decode_ops.convolved`."""
    rows, channels, taps = state.shape
    out = x.new_empty(rows, channels)
    _convolved[rows, triton.cdiv(channels, PART)](state, x, weight, out, x.shape[1], channels, W=taps, N=PART)
    return out


def delta(state: Tensor, qkv: Tensor, whole: Tensor, decay: Tensor, bias: Tensor, norm: Tensor, eps: float) -> Tensor:
    """`decode_ops.delta`."""
    rows, heads, size, dim = state.shape
    keys = (qkv.shape[1] - heads * dim) // 2
    out = qkv.new_empty(rows, heads * dim)
    _delta[rows, heads](
        state, qkv, whole, decay, bias, norm, out, eps, qkv.shape[1], whole.shape[1], heads, keys,
        heads * size // keys, size, dim,
        ND=triton.next_power_of_2(size), NV=triton.next_power_of_2(dim), num_warps=8,
    )  # fmt: skip
    return out


def truncated(logits: Tensor, temperatures: Tensor, top_k: Tensor, top_p: Tensor, widest: int) -> Tensor:
    """`decode_ops.truncated`."""
    logits = logits.contiguous()
    out = torch.empty_like(logits)
    _truncated[len(logits),](logits, temperatures, top_k, top_p, out, logits.shape[1], N=VOCABULARY, num_warps=16)
    return out


def _space(like: Tensor, shape: tuple[int, ...]) -> Tensor:
    return torch.empty(shape, dtype=torch.float32, device=like.device)


def _rank(adapters: Tensor | None, axis: int) -> int:
    return 0 if adapters is None else adapters.shape[axis]


def _warps(block: int) -> int:
    """Such that a thread holds some 16 numbers of eight ranks of a part, and 32 of those of a whole row."""
    return max(4, min(16, block // 64))
