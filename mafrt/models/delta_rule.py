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
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

STEP, CHUNKS = "torch_recurrent_gated_delta_rule", "torch_chunk_gated_delta_rule"
"""names of transformers' two forms in the modules of its families"""
CHUNK = 64
"""tokens of the longest chunk: products within one grow with its square"""

Form = Callable[..., tuple[Tensor, Tensor | None]]


def quicken(model: nn.Module) -> None:
    """Let `model`'s family take the forms of this file; other families, and those with kernels, stay as they are."""
    if importlib.util.find_spec("fla") is not None:
        return
    for name in {type(layer).__module__ for layer in model.modules()}:
        family = sys.modules[name]
        for form, ours in ((STEP, one_step), (CHUNKS, even_chunks)):
            theirs = getattr(family, form, None)
            if theirs is not None and not hasattr(theirs, "_theirs"):
                setattr(family, form, ours(theirs))


def one_step(theirs: Form) -> Form:
    """transformers' recurrent form, by two products where there is one token and no gradient."""

    def step(
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
            return theirs(
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
        rows, _, heads, width = value.shape
        v = value.float().reshape(rows * heads, 1, width)
        both = torch.stack((key, query), 3).float().reshape(rows * heads, 2, -1)
        size = both.shape[2]
        key_scale, query_scale = 1.0, size**-0.5
        if use_qk_l2norm_in_kernel:
            # A norm by the mean of the squares, one operation on a GPU; what is missing is multiplied in below.
            both = functional.rms_norm(both, (size,), None, 1e-6 / size)
            key_scale, query_scale = size**-0.5, size**-1.0
        k, q = both.split(1, 1)
        decay, weight = g.float().exp().reshape(-1, 1, 1), beta.float().reshape(-1, 1, 1)
        # Never written to in place: several rows may go on from one state.
        state = initial_state.float().reshape(rows * heads, size, width) * decay
        remembered, read = torch.bmm(both, state).split(1, 1)
        change = torch.sub(v, remembered, alpha=key_scale).mul_(weight)
        out = torch.addcmul(read, torch.bmm(k, q.transpose(1, 2)), change, value=key_scale).mul_(query_scale)
        state.baddbmm_(k.transpose(1, 2), change, alpha=key_scale)
        kept = state.view(rows, heads, -1, width) if output_final_state else None
        return out.reshape(rows, 1, heads, width).to(query.dtype), kept

    return _marked(step, theirs)


def even_chunks(theirs: Form) -> Form:
    """transformers' form in chunks, of equal length; in the loop over them is only what needs the state before."""

    def chunks(
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
        (rows, tokens, heads, width), size = value.shape, key.shape[3]
        count = -(-tokens // min(chunk_size, CHUNK))
        length = -(-tokens // count)

        def laid(x: Tensor) -> Tensor:
            x = functional.pad(x.transpose(1, 2).float(), (0, 0, 0, count * length - tokens))
            return x.reshape(rows * heads, count, length, -1)

        q, k, v = laid(query), laid(key), laid(value)
        weight, total = laid(beta.unsqueeze(3)), laid(g.unsqueeze(3)).squeeze(3).cumsum(2)
        if use_qk_l2norm_in_kernel:
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
        kept = state.view(rows, heads, size, width) if output_final_state else None
        return out.to(query.dtype, memory_format=torch.contiguous_format), kept

    return _marked(chunks, theirs)


def _marked(ours: Any, theirs: Form) -> Form:
    ours._theirs = theirs
    return ours  # type: ignore[no-any-return]
