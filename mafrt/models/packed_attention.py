"""Attention of packed batches (`mafrt.models.packing`), as an attention implementation of transformers."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from mafrt.models.logprobs import exact_dtype
from mafrt.models.packing import Family, Packing

PACKED = "mafrt_packed"
"""Name of `packed_attention` among transformers' attention implementations."""
WINDOWED = ("gemma2", "gemma3_text", "mistral", "phi3", "qwen2", "qwen3")
"""Families whose layers tell the attention implementation their window; windows of others are not packed."""


def use_packed_attention(model: Any) -> bool:
    """Enable packed batches if the model supports them (`sdpa` attention, in a sliding window or without one)."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
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
    ALL_MASK_ATTENTION_FUNCTIONS.register(PACKED, _mask_without_waiting)
    model.config._attn_implementation = PACKED
    return True


def _mask_without_waiting(*args: Any, **kwargs: Any) -> Tensor | None:
    """transformers' mask for `sdpa`, which leaves a mask out if it hides nothing, and waits for a GPU to know that."""
    from transformers.masking_utils import sdpa_mask

    padding = kwargs.get("attention_mask")
    if padding is not None and padding.device.type != "cpu":
        kwargs["allow_is_causal_skip"] = False
    mask: Tensor | None = sdpa_mask(*args, **kwargs)
    return mask


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    packing: Packing | None = None,
    compute: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Hugging Face's `sdpa` attention, row by row where the batch is packed: `[1, N, heads, head_dim]`.

    `query` `[1, heads, N, head_dim]`, `key` and `value` with their own heads. `compute` is a `Compute`.
    """
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    scale = kwargs.get("scaling") or query.shape[-1] ** -0.5
    # transformers' `sdpa` takes a cap and ignores it; its own warning says to use the slow `eager` form.
    cap = kwargs.get("softcap")

    def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        if cap is not None:
            return capped_attention(q, k, v, mask, scale, cap)
        return sdpa_attention_forward(module, q, k, v, mask, **kwargs)[0]

    if packing is None:
        return attend(query, key, value, attention_mask), None
    layer = int(getattr(module, "layer_idx", 0))
    if packing.kept is not None:
        packing.kept[layer] = (key[0], value[0])
    past = None if packing.past is None else packing.past.get(layer)
    asks_more = kwargs.get("dropout") or kwargs.get("position_bias") is not None or value.shape[-1] != key.shape[-1]
    plain = not asks_more and cap is None
    rows = PackedRows(packing, attend, scale, kwargs.get("sliding_window"), past, plain)
    # Not `[0]`, whose way back fills a tensor of zeros and copies the gradient into it.
    by_head = query.squeeze(0), key.squeeze(0), value.squeeze(0)
    return compute.packed_attention(*by_head, rows).unsqueeze(0), None


@dataclass(frozen=True)
class PackedRows:
    """Which tokens of a packed batch are rows, and the constants of one layer's attention."""

    packing: Packing
    attend_rectangle: Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]
    """attention of `[rows, heads, T, D]`, with a mask `[1, 1, T, S]` (True: visible) or None for a causal one; returns
    `[rows, T, heads, D]`"""
    scale: float
    """factor on the scores"""
    window: int | None
    """tokens that a query may attend to, itself included; None: all before it"""
    past: tuple[Tensor, Tensor] | None
    """keys and values `[kv heads, P, D]` of the pass before this one, in which families begin"""
    plain: bool
    """whether it is softmax(scale q k^T) v and nothing else"""

    def hides(self, length: int) -> bool:
        """Whether the window hides anything in a row of this length."""
        return self.window is not None and length > self.window

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Block by block: `[heads, N, D]`, keys and values with heads of their own, -> `[N, heads, D]`."""
        done = []
        sizes = [block.rows * block.length for block in self.packing.blocks]
        for block, *parts in zip(self.packing.blocks, *(t.split(sizes, 1) for t in (query, key, value)), strict=True):
            if block.family is not None:
                done.append(self._family(block.family, parts))
                continue
            q, k, v = (part.unflatten(1, (block.rows, block.length)).transpose(0, 1) for part in parts)
            done.append(self._rectangle(q, k, v, self._mask(block.length, 0, q.device)).flatten(0, 1))
        return torch.cat(done)

    def _family(self, family: Family, parts: Sequence[Tensor]) -> Tensor:
        """The beginning attends to itself; each rest attends to the beginning and to itself, all rests at once."""
        done: list[Tensor] = []
        if family.past is None:
            beginning, parts = [p[:, : family.shared] for p in parts], [p[:, family.shared :] for p in parts]
            mask = self._mask(family.shared, 0, parts[0].device)
            q, k, v = (part.unsqueeze(0) for part in beginning)
            done.append(self._rectangle(q, k, v, mask)[0])
            common = beginning[1:]
        else:
            assert self.past is not None
            common = [part[:, family.past] for part in self.past]
        # [heads, rows, longest, head_dim] -> [rows, heads, ...]
        queries, *others = (part[:, family.rests].transpose(0, 1) for part in parts)
        keys, values = (
            torch.cat((part.unsqueeze(0).expand(len(answers), -1, -1, -1), answers), 2)
            for part, answers in zip(common, others, strict=True)
        )
        seen = self._mask(family.rests.shape[1], family.shared, queries.device)
        seen = family.mask if seen is None else seen
        rests = self._rectangle(queries, keys, values, seen).flatten(0, 1)
        # By places and not by booleans, whose number a GPU would be asked for in every layer.
        return torch.cat((*done, rests if family.even else rests.index_select(0, family.order)))

    def _rectangle(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        return self.attend_rectangle(q, k, v, None if mask is None else mask[None, None])

    def _mask(self, length: int, first: int, device: torch.device) -> Tensor | None:
        """`[length, first + length]`: the tokens that those from `first` on see; None where no window hides any."""
        if self.window is None or not self.hides(first + length):
            return None
        ones = torch.ones(length, first + length, dtype=torch.bool, device=device)
        return ones.tril(first).triu(first - self.window + 1)


MOST_SCORES = 2**24
"""Scores held at a time: 64 MiB of float32."""


def capped_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float, cap: float
) -> Tensor:
    """softmax(cap tanh(scale q k^T / cap)) v (Gemma 2, arXiv:2408.00118, section 2), in float32 (float64 for float64).

    No fused kernel of torch caps scores, and transformers' `sdpa` attention leaves the cap out. So the scores are
    written out, for a few rows at a time, and computed again in the backward pass.

    Args:
        query: `[rows, heads, T, D]`.
        key: `[rows, kv heads, S, D]`, and `value` alike.
        mask: broadcastable to `[rows, heads, T, S]`: booleans (True: visible), or numbers that are added to the
            scores. None: causal, or all of S for a single query.
        scale: factor on the scores.
        cap: bound of the scores.

    Returns:
        `[rows, T, heads, D]`, as transformers' attention functions do.
    """
    if mask is None and query.shape[2] > 1:
        mask = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=query.device).tril()[None, None]
    each = max(1, MOST_SCORES // (query.shape[1] * query.shape[2] * key.shape[2]))
    parts = []
    for start in range(0, len(query), each):
        some = slice(start, start + each)
        part_mask = mask[some] if mask is not None and len(mask) == len(query) else mask
        given = (query[some], key[some], value[some], part_mask, scale, cap)
        # Without gradients there is nothing to compute again.
        needs = torch.is_grad_enabled() and any(t.requires_grad for t in (query, key, value))
        parts.append(checkpoint(_attend, *given, use_reentrant=False) if needs else _attend(*given))
    return torch.cat(parts)


def _attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float, cap: float) -> Tensor:
    exact = exact_dtype(query)
    group = query.shape[1] // key.shape[1]
    q, k, v = (t.to(exact) for t in (query, key, value))
    if group > 1:
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = torch.matmul(q, k.transpose(2, 3)).mul(scale / cap).tanh().mul(cap)
    if mask is not None and mask.dtype == torch.bool:
        # The least number instead of minus infinity: a padded query that sees nothing gets a mean, not NaN.
        scores = scores.masked_fill(~mask, torch.finfo(exact).min)
    elif mask is not None:
        scores = scores + mask
    return torch.matmul(scores.softmax(3), v).transpose(1, 2).to(query.dtype)
