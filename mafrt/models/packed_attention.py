"""Attention of packed batches (`mafrt.models.packing`), as an attention implementation of transformers."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from mafrt.models.capped_attention import capped_attention
from mafrt.models.exact_dtype import exact_dtype
from mafrt.models.family_attention import family_attention
from mafrt.models.packing import Family, Packing, TokenBlock
from mafrt.models.row_attention import packed_rows, rows_attention, serves

PACKED = "mafrt_packed"
"""Name of `packed_attention` among transformers' attention implementations."""
WINDOWED = ("gemma2", "gemma3_text", "mistral", "phi3", "qwen2", "qwen3")
"""Families whose layers tell the attention implementation their window; windows of others are not packed."""


def use_packed_attention(model: Any) -> bool:
    """Enable packed batches if the model supports them (`sdpa` attention, in a sliding window or without one)."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    config = model.config.get_text_config()
    kinds = getattr(config, "layer_types", None)
    windowed = set(kinds) != {"full_attention"} if kinds else getattr(config, "sliding_window", None) is not None
    if config.model_type in WINDOWED and set(kinds or ()) <= {"full_attention", "sliding_attention"}:
        windowed = bool(getattr(config, "use_bidirectional_attention", False))
    # Models without the dispatch table call their attention directly and would ignore `packing`.
    dispatches = hasattr(sys.modules[type(model).__module__], "ALL_ATTENTION_FUNCTIONS")
    if windowed or not dispatches or config._attn_implementation not in ("sdpa", PACKED):
        if getattr(config, "attn_logit_softcapping", None) is not None and config._attn_implementation == "sdpa":
            model.config._attn_implementation = "eager"  # slow, and the only one left that caps the scores
        return False
    ALL_ATTENTION_FUNCTIONS.register(PACKED, packed_attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register(PACKED, sdpa_mask)
    model.config._attn_implementation = PACKED
    return True


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    packing: Packing | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Hugging Face's `sdpa` attention, block by block where the batch is packed.

    `query` `[1, heads, N, head_dim]`, `key` and `value` with their own heads; returns `[1, N, heads, head_dim]`. The
    layer's `sliding_window` (tokens that a query may attend to, itself included) and `softcap` (Gemma 2's bound of the
    scores) are arguments as for all implementations.
    """
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    scale = kwargs.get("scaling") or query.shape[-1] ** -0.5
    # transformers' `sdpa` takes a cap and ignores it; its own warning says to use the slow `eager` form.
    cap = kwargs.get("softcap")
    if packing is None:
        if cap is not None:
            return capped_attention(query, key, value, attention_mask, scale, cap), None
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    layer = int(getattr(module, "layer_idx", 0))
    if packing.kept is not None:
        packing.kept[layer] = (key[0], value[0])
    sizes = [block.rows * block.length for block in packing.blocks]

    # The kernels of a CPU are called directly; attention with anything else to it goes the general way.
    plain = not kwargs.get("dropout") and kwargs.get("position_bias") is None and value.shape[-1] == key.shape[-1]
    direct = query.device.type == "cpu" and plain and cap is None
    window = kwargs.get("sliding_window")
    if direct and serves(query) and not any(_hides(window, _longest(block)) for block in packing.blocks):
        rows, tokens = packing.once(packed_rows)
        earlier = None
        if packing.past is not None and tokens is not None:
            earlier = (packing.past[layer][0][:, tokens], packing.past[layer][1][:, tokens])
        # Not `[0]`, whose way back fills a tensor of zeros and copies the gradient into it.
        out = rows_attention(query.squeeze(0), key.squeeze(0), value.squeeze(0), rows, scale, earlier)
        return out.unsqueeze(0), None

    def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        mask = None if mask is None else mask[None, None]
        if cap is not None:
            return capped_attention(q, k, v, mask, scale, cap)
        if not direct:
            return sdpa_attention_forward(module, q, k, v, mask, **kwargs)[0]
        exact = exact_dtype(q)
        return sdpa_attention_forward(module, q.to(exact), k.to(exact), v.to(exact), mask, **kwargs)[0].to(q.dtype)

    done = []
    for block, *parts in zip(packing.blocks, *(t.squeeze(0).split(sizes, 1) for t in (query, key, value)), strict=True):
        if block.family is not None:
            kept = packing.past[layer] if packing.past is not None and block.family.past is not None else None
            if direct and not _hides(window, _longest(block)):
                past = None if kept is None else (kept[0][:, block.family.past], kept[1][:, block.family.past])
                done.append(family_attention(parts[0], parts[1], parts[2], block.family, scale, past))
            else:
                done.append(_within_family(block.family, parts, attend, kept, window))
            continue
        q, k, v = (part.unflatten(1, (block.rows, block.length)).transpose(0, 1) for part in parts)
        done.append(attend(q, k, v, _within_window(window, block.length, 0, q.device)).flatten(0, 1))
    return torch.cat(done).unsqueeze(0), None


def _hides(window: int | None, length: int) -> bool:
    """Whether a window hides anything in sequences of this length."""
    return window is not None and length > window


def _longest(block: TokenBlock) -> int:
    """Tokens of a block's longest row, with its beginning."""
    return block.length if block.family is None else block.family.shared + block.family.rests.shape[1]


def _within_window(window: int | None, length: int, first: int, device: torch.device) -> Tensor | None:
    """`[length, first + length]`: the tokens that those from `first` on may attend to; None where no window hides any.

    True: visible.
    """
    if window is None or not _hides(window, first + length):
        return None
    ones = torch.ones(length, first + length, dtype=torch.bool, device=device)
    return ones.tril(first).triu(first - window + 1)


def _within_family(
    family: Family,
    parts: Sequence[Tensor],
    attend: Callable[..., Tensor],
    kept: tuple[Tensor, Tensor] | None,
    window: int | None = None,
) -> Tensor:
    """Attention of a family's queries, keys and values, `[heads, N, head_dim]` each: `[N, heads, head_dim]`.

    The beginning attends to itself. Each rest attends to the beginning and to itself, all rests at once. `kept` are
    the keys and values of the pass in which the beginning was computed; None: it is part of this one.
    """
    done: list[Tensor] = []
    if kept is None:
        beginning, parts = [p[:, : family.shared] for p in parts], [p[:, family.shared :] for p in parts]
        mask = _within_window(window, family.shared, 0, parts[0].device)
        done.append(attend(*(part.unsqueeze(0) for part in beginning), mask)[0])
        common = beginning[1:]
    else:
        common = [part[:, family.past] for part in kept]
    # [heads, rows, longest, head_dim] -> [rows, heads, ...]
    queries, *others = (part[:, family.rests].transpose(0, 1) for part in parts)
    keys, values = (
        torch.cat((part.unsqueeze(0).expand(len(own), -1, -1, -1), own), 2)
        for part, own in zip(common, others, strict=True)
    )
    seen = _within_window(window, family.rests.shape[1], family.shared, queries.device)
    seen = family.mask if seen is None else seen
    return torch.cat((*done, attend(queries, keys, values, seen)[family.real]))
