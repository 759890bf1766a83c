"""The gated delta rule of Qwen3-Next, Qwen3.5 and OLMo's hybrids, where `flash-linear-attention` is not installed.

transformers' own torch forms are written to be read: a step of decoding passes over the state of every head nine times,
and chunks are padded to 64 tokens, so that an answer of 33 costs as much as one of 64. Here a step reads the state in
two batched products and writes it twice, and the chunks of a row are equally long, with three operations for each:

    S' = exp(g) S;  S = S' + k (beta (v - S'^T k))^T;  o = S^T q = S'^T q + (k.q) beta (v - S'^T k)

Source: Yang, Kautz, Hatamizadeh 2024, "Gated Delta Networks" (arXiv:2412.06464), equation 10.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

STEP, CHUNKS = "torch_recurrent_gated_delta_rule", "torch_chunk_gated_delta_rule"
"""names of transformers' two forms in the modules of its families"""
CONV_STEP, CONV = "causal_conv1d_update", "causal_conv1d_fn"
"""and of the convolution before them"""
CHUNK = 64
"""tokens of the longest chunk: products within one grow with its square"""

Form = Callable[..., Any]
_OVERWRITES = ContextVar("overwrites", default=False)


@contextmanager
def overwritten() -> Iterator[None]:
    """Within it, a step may write its state over the one before, since the cache would copy it there."""
    token = _OVERWRITES.set(True)
    try:
        yield
    finally:
        _OVERWRITES.reset(token)


def quicken(model: nn.Module, compute_for: Callable[[str], Any]) -> None:
    """Let `model`'s family take the forms of this file, and those that a device has in their place.

    Other families, and those with kernels of a package, stay as they are. `compute_for`: as of `mafrt.models.compute`,
    which imports this module.
    """
    if importlib.util.find_spec("fla") is not None:
        return
    forms = {STEP: one_step, CHUNKS: even_chunks, CONV_STEP: conv_step, CONV: conv}
    for name in {type(layer).__module__ for layer in model.modules()}:
        family = sys.modules[name]
        if not hasattr(family, STEP):
            continue
        for form, ours in forms.items():
            theirs = getattr(family, form, None)
            if theirs is not None and not hasattr(theirs, "_theirs"):
                setattr(family, form, ours(theirs, compute_for))


def one_step(theirs: Form, compute_for: Callable[[str], Any]) -> Form:
    """transformers' recurrent form, by ours where there is one token and no gradient."""

    def taken(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        g: Tensor,
        beta: Tensor,
        initial_state: Tensor | None = None,
        output_final_state: bool = False,
        use_qk_l2norm_in_kernel: bool = False,
        **more: Any,
    ) -> tuple[Tensor, Tensor | None]:
        if query.shape[1] != 1 or initial_state is None or torch.is_grad_enabled():
            return theirs(  # type: ignore[no-any-return]
                query,
                key,
                value,
                g=g,
                beta=beta,
                initial_state=initial_state,
                output_final_state=output_final_state,
                use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
                **more,
            )
        given = query, key, value, g, beta, initial_state, use_qk_l2norm_in_kernel
        out, state_after = compute_for(value.device.type).delta_step(*given, in_place=_OVERWRITES.get())
        return out, state_after if output_final_state else None

    return _marked(taken, theirs)


def step(
    query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, initial_state: Tensor, normed: bool
) -> tuple[Tensor, Tensor]:
    """One token of the delta rule, by two products.

    Args:
        query, key: `[rows, 1, heads, size]`; `normed`: they are first divided by their lengths.
        value: `[rows, 1, heads, width]`.
        g: `[rows, 1, heads]`, logarithm of the decay.
        beta: `[rows, 1, heads]`.
        initial_state: `[rows, heads, size, width]`, which is not written to: several rows may go on from one.

    Returns:
        As `value`, and the state afterwards in float32.
    """
    rows, _, heads, width = value.shape
    v = value.float().reshape(rows * heads, 1, width)
    both = torch.stack((key, query), 3).float().reshape(rows * heads, 2, -1)
    size = both.shape[2]
    key_scale, query_scale = 1.0, size**-0.5
    if normed:
        # A norm by the mean of the squares, one operation on a GPU; what is missing is multiplied in below.
        both = functional.rms_norm(both, (size,), None, 1e-6 / size)
        key_scale, query_scale = size**-0.5, size**-1.0
    k, q = both.split(1, 1)
    decay, weight = g.float().exp().reshape(-1, 1, 1), beta.float().reshape(-1, 1, 1)
    state = initial_state.float().reshape(rows * heads, size, width) * decay
    remembered, read = torch.bmm(both, state).split(1, 1)
    change = torch.sub(v, remembered, alpha=key_scale).mul_(weight)
    out = torch.addcmul(read, torch.bmm(k, q.transpose(1, 2)), change, value=key_scale).mul_(query_scale)
    state.baddbmm_(k.transpose(1, 2), change, alpha=key_scale)
    return out.reshape(rows, 1, heads, width).to(query.dtype), state.view(rows, heads, -1, width)


def even_chunks(theirs: Form, compute_for: Callable[[str], Any]) -> Form:
    """transformers' form in chunks, by ours."""

    def taken(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        g: Tensor,
        beta: Tensor,
        chunk_size: int = CHUNK,
        initial_state: Tensor | None = None,
        output_final_state: bool = False,
        use_qk_l2norm_in_kernel: bool = False,
        **more: Any,
    ) -> tuple[Tensor, Tensor | None]:
        given = query, key, value, g, beta, initial_state, use_qk_l2norm_in_kernel
        out, state_after = compute_for(value.device.type).delta_chunks(*given)
        return out, state_after if output_final_state else None

    return _marked(taken, theirs)


def chunks(
    query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, initial_state: Tensor | None, normed: bool
) -> tuple[Tensor, Tensor]:
    """As `step`, of any number of tokens, in chunks of equal length; without a state it is zero.

    In the loop over the chunks is only what needs the state before.
    """
    (rows, tokens, heads, width), size = value.shape, key.shape[3]
    count = -(-tokens // CHUNK)
    length = -(-tokens // count)

    def laid(x: Tensor) -> Tensor:
        x = functional.pad(x.transpose(1, 2).float(), (0, 0, 0, count * length - tokens))
        return x.reshape(rows * heads, count, length, -1)

    q, k, v = laid(query), laid(key), laid(value)
    weight, total = laid(beta.unsqueeze(3)), laid(g.unsqueeze(3)).squeeze(3).cumsum(2)
    if normed:
        q, k = (x * torch.rsqrt(x.square().sum(3, keepdim=True) + 1e-6) for x in (q, k))
    # Decay from token to token of a chunk, from its beginning, to its end, and over all of it.
    later = torch.ones(length, length, dtype=torch.bool, device=q.device).triu(1)
    pairs = (total.unsqueeze(3) - total.unsqueeze(2)).masked_fill(later, -torch.inf).exp()
    begun, left = total.exp().unsqueeze(3), (total[:, :, -1:] - total).exp().unsqueeze(3)
    over = begun[:, :, -1:]
    q, weighted = q * size**-0.5, k * weight
    both = torch.cat((weighted, q), 2) @ k.transpose(2, 3)
    system, read = (both.view(*both.shape[:2], 2, length, length) * pairs.unsqueeze(2)).unbind(2)
    known = torch.cat((v * weight, weighted * begun), 3)
    solved = torch.linalg.solve_triangular(system, known, upper=False, unitriangular=True)
    values, remembered = (part.unbind(1) for part in solved.split([width, size], 3))
    written = (k * left).transpose(2, 3)
    state = q.new_zeros(rows * heads, size, width) if initial_state is None else initial_state.float().flatten(0, 1)
    states, changes = list[Tensor](), list[Tensor]()
    for number in range(count):
        states.append(state)
        changes.append(torch.baddbmm(values[number], remembered[number], state, alpha=-1))
        # Nothing may read the last of these, which an unbound part would have to know.
        state = torch.baddbmm(state * over[:, number], written[:, number], changes[number])
    out = (q * begun) @ torch.stack(states, 1) + read @ torch.stack(changes, 1)
    out = out.view(rows, heads, count * length, width)[:, :, :tokens].transpose(1, 2)
    return out.to(query.dtype, memory_format=torch.contiguous_format), state.view(rows, heads, size, width)


def conv_step(theirs: Form, compute_for: Callable[[str], Any]) -> Form:
    """transformers' convolution of one token, by that of the device where it has one."""

    def taken(
        hidden_states: Tensor, conv_state: Tensor, weight: Any, bias: Any = None, activation: Any = None, **more: Any
    ) -> Tensor:
        found = None
        if hidden_states.shape[2] == 1 and not more and not torch.is_grad_enabled():
            form = compute_for(hidden_states.device.type)
            found = form.short_conv(hidden_states, weight, bias, activation, conv_state)
        if found is None:
            found = theirs(hidden_states, conv_state, weight, bias, activation, **more)
        return cast(Tensor, found)

    return _marked(taken, theirs)


def conv(theirs: Form, compute_for: Callable[[str], Any]) -> Form:
    """transformers' convolution of whole rows, by that of the device where it has one."""

    def taken(hidden_states: Tensor, weight: Any, bias: Any = None, activation: Any = None, **more: Any) -> Tensor:
        found = None
        if more.get("seq_idx") is None:  # of rows that are packed
            found = compute_for(hidden_states.device.type).short_conv(hidden_states, weight, bias, activation, None)
        if found is None:  # by name: a package's own function has others between
            found = theirs(hidden_states, weight, bias, activation=activation, **more)
        return cast(Tensor, found)

    return _marked(taken, theirs)


def _marked(ours: Any, theirs: Form) -> Form:
    ours._theirs = theirs
    return ours  # type: ignore[no-any-return]
