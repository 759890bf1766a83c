"""Attention of one decode step to prompts that several rows share.

The n samples of a prompt differ in their own few tokens only. So the prompt's keys and values are stored once, and
one step reads them once: the n rows' queries are stacked as queries against the one prompt (Juravsky et al. 2024,
"Hydragen", arXiv:2402.05099). Their scores and those of each row's own tokens stand side by side, and one softmax
normalises both.

On a CPU keys, scores and sums are float32 whatever the model is. A step has a handful of queries for each key head, and
the fused kernel spends more time on its thin blocks than on arithmetic, most of all in bfloat16. One layer, one thread,
microseconds with that kernel (for prompts and own tokens apart, merged by their log-sum-exps) and so: 32 prompts of 47
tokens by 8 rows (4 heads of 32 over 2 key heads, 24 own tokens) 560 and 340 in float32, 1,050 and 350 in bfloat16; 4
prompts of 48 by 8 rows (9 heads of 64 over 3) 158 and 137, 259 and 140. From some 1,000 tokens on both take the same
time, so that long prompts in bfloat16, of which a copy would cost memory, go by the kernel.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from mafrt.engines.local.kv_cache import OwnKeys, PromptKV
from mafrt.kernels.decode import LANES
from mafrt.models.exact_dtype import exact_dtype

_QUERY_COST = 1 / 16
"""Cost of one more query against a prompt, where reading the prompt costs 1. Steers the layout only."""
_LONGEST_COPY = 512
"""Longest prompts, in tokens, that are copied into float32."""


def rows_per_prompt(counts: list[int]) -> int:
    """How many rows at most should share one stored prompt, for prompts with these numbers of rows.

    Prompts with more rows are stored several times. Sharing among all is best when the numbers are alike; when one
    prompt has ten rows and a hundred have one, stacking ten queries everywhere would mostly compute nothing.
    """

    def cost(share: int) -> float:
        return sum(-(-count // share) for count in counts) * (1 + share * _QUERY_COST)

    return min(sorted(set(counts)), key=cost)


class SharedPrompts:
    """The prompts of a batch and which rows read them.

    Args:
        prompts: keys and values, on the device.
        owner: `[rows]`, the prompt of each row; rows of one prompt lie side by side.
        cap: bound of the scores, which are cap tanh(scale q k^T / cap) then (Gemma 2).
        for_kernels: lay them out for the kernels in C, which read them in the model's number format and compute in
            float32; `attend` is theirs then.
    """

    def __init__(
        self, prompts: PromptKV, owner: Tensor, cap: float | None = None, *, for_kernels: bool = False
    ) -> None:
        self._cap = cap
        names = owner.tolist()
        counts: dict[int, int] = {}
        for prompt in names:
            counts[prompt] = counts.get(prompt, 0) + 1
        share = rows_per_prompt(list(counts.values()))
        stored: list[int] = []
        self._owner: list[int] = []
        self.owner: Tensor
        """`[rows]`, on the host: the stored prompt of each row"""
        for prompt, count in counts.items():
            for seat in range(count):
                if seat % share == 0:
                    stored.append(prompt)
                self._owner.append(len(stored) - 1)
        like = prompts.keys[0]
        self._device, self._dtype = like.device, like.dtype
        on_cpu = self._device.type == "cpu"
        self.dtype = exact_dtype(like) if on_cpu and not for_kernels else like.dtype
        """of the keys and values of the rows' own tokens"""
        self._by_kernel = on_cpu and cap is None and self.dtype != self._dtype and prompts.longest > _LONGEST_COPY
        if stored != list(range(len(prompts.lengths))):
            prompts = prompts.select(torch.tensor(stored, device=self._device))
        self._set(prompts if self._by_kernel else _laid_out(prompts, self.dtype))

    def columns(self, layer: int) -> Tensor:
        """Keys `[prompts, kv heads, D, room]`, a column each, for the kernels in C; zeros beyond the longest prompt."""
        kept = self._columns.get(layer)
        if kept is None:
            keys = self.prompts.keys[layer].transpose(2, 3)
            kept = self._columns[layer] = functional.pad(keys, (0, -keys.shape[3] % LANES)).contiguous()
        return kept

    @property
    def values(self) -> list[Tensor]:
        """Per layer `[prompts, kv heads, longest, D]`."""
        return self.prompts.values

    @property
    def lengths(self) -> Tensor:
        """`[prompts]`, on the host."""
        return self.prompts.lengths

    def _set(self, prompts: PromptKV) -> None:
        self.prompts = prompts
        self._columns: dict[int, Tensor] = {}
        self._mask: Tensor | None = None
        self._windows: dict[int, tuple[int, Tensor | None]] = {}
        """window -> own tokens, and the mask of the prompts with as many of them"""
        if int(prompts.lengths.min()) < prompts.longest:
            self._mask = self._hiding(torch.arange(prompts.longest) >= prompts.lengths.unsqueeze(1))
        self._lay_out()

    def _hiding(self, hidden: Tensor) -> Tensor:
        """`[prompts, 1, 1, longest]`, to be added to scores: minus infinity where `hidden` `[prompts, longest]`."""
        mask = torch.zeros(hidden.shape).masked_fill_(hidden, -torch.inf)
        return mask[:, None, None].to(self._device, self.prompts.keys[0].dtype)

    def _mask_within(self, window: int | None, own: int) -> Tensor | None:
        """The prompts' mask for the last of `own` tokens, if it attends to `window` tokens, itself included."""
        if window is None or self.prompts.longest + own <= window:
            return self._mask
        if self._windows.get(window, (0, None))[0] != own:
            places, lengths = torch.arange(self.prompts.longest), self.prompts.lengths.unsqueeze(1)
            outside = (places >= lengths) | (places < lengths + own - window)
            self._windows[window] = (own, self._hiding(outside))
        return self._windows[window][1]

    def _lay_out(self) -> None:
        """Give every row a slot in a `[prompts, share]` rectangle; the slots of a ragged one are partly idle."""
        self.owner = torch.tensor(self._owner)
        counts = [0] * len(self.prompts.lengths)
        slots = []
        for prompt in self._owner:
            slots.append((prompt, counts[prompt]))
            counts[prompt] += 1
        self._share = max(counts)
        self._row_of: Tensor | None = None
        if min(counts) < self._share:
            row_of = [0] * (len(counts) * self._share)
            for row, (prompt, seat) in enumerate(slots):
                row_of[prompt * self._share + seat] = row
            slot_of = [prompt * self._share + seat for prompt, seat in slots]
            self._row_of = torch.tensor(row_of, device=self._device)
            self._slot_of = torch.tensor(slot_of, device=self._device)

    def keep(self, rows: Tensor) -> None:
        """Leave only the given rows `[kept]`, in order; unused prompts are dropped now and then."""
        self._owner = [self._owner[row] for row in rows.tolist()]
        read = sorted(set(self._owner))
        if len(read) <= 0.75 * len(self.prompts.lengths):
            place = {prompt: i for i, prompt in enumerate(read)}
            self._owner = [place[prompt] for prompt in self._owner]
            self._set(self.prompts.select(torch.tensor(read, device=self._device)))
        else:
            self._lay_out()

    def extended(self, own: Sequence[OwnKeys]) -> PromptKV:
        """The prompt of each row followed by the row's own tokens: one prompt for each row."""
        owner = torch.tensor(self._owner)
        lengths, used = self.prompts.lengths[owner], own[0].used
        rows = torch.arange(len(owner), device=self._device).unsqueeze(1)
        places = (lengths.unsqueeze(1) + torch.arange(used)).to(self._device)
        span, owner = int(lengths.max()) + used, owner.to(self._device)

        def row_wise(prompts: Tensor, tokens: Tensor | None) -> Tensor:
            near = prompts[:, :, :span].index_select(0, owner).to(self._dtype)
            whole = functional.pad(near, (0, 0, 0, span - near.shape[2]))
            if tokens is not None:
                whole[rows, :, places] = tokens[:, :, :used].transpose(1, 2).to(self._dtype)
            return whole

        keys = [row_wise(t, layer.keys) for t, layer in zip(self.prompts.keys, own, strict=True)]
        values = [row_wise(t, layer.values) for t, layer in zip(self.prompts.values, own, strict=True)]
        return PromptKV(keys, values, lengths + used)

    def attend(
        self, layer: int, q: Tensor, own_k: Tensor, own_v: Tensor, scale: float, window: int | None = None
    ) -> Tensor:
        """Attention of one query per row to its prompt and its own tokens.

        `q` `[rows, heads, D]`; `own_k`, `own_v` `[rows, kv heads, own tokens, D]`, in `dtype`; `window`: tokens that a
        query may attend to, itself included. Returns `[rows, heads * D]`.
        """
        kv_heads, used = own_k.shape[1:3]
        grouped = q.unflatten(1, (kv_heads, -1))
        if window is not None and used >= window:  # a prompt's last token is too far away already
            own_k, own_v = own_k[:, :, used - window :], own_v[:, :, used - window :]
            scores = _products(grouped.to(own_k.dtype), own_k.transpose(2, 3))
            out = _products(self._scaled(scores, scale).softmax(3).to(own_v.dtype), own_v)
        elif self._by_kernel:
            out = self._merged(layer, grouped, own_k, own_v, scale, self._mask_within(window, used))
        else:
            out = self._jointly(layer, grouped, own_k, own_v, scale, self._mask_within(window, used))
        return out.to(q.dtype).reshape(len(q), -1)

    def _jointly(
        self, layer: int, q: Tensor, own_k: Tensor, own_v: Tensor, scale: float, mask: Tensor | None
    ) -> Tensor:
        """By one softmax over the scores of both. `q` and the result: `[rows, kv heads, group, D]`."""
        keys, values, span = self.prompts.keys[layer], self.prompts.values[layer], self.prompts.longest
        q = q.to(keys.dtype)
        far = _products(self._stacked(q), keys.transpose(2, 3))
        near = self._stacked(_products(q, own_k.transpose(2, 3)))
        scores = self._scaled(torch.cat((far, near), 3), scale)
        if mask is not None:
            scores[..., :span] += mask
        p = scores.softmax(3).to(values.dtype)
        # Contiguous, so that the second product is added to the result itself and not to a copy.
        out = self._by_row(_products(p[..., :span], values)).contiguous()
        out.flatten(0, 1).baddbmm_(self._by_row(p[..., span:]).flatten(0, 1), own_v.flatten(0, 1))
        return out

    def _scaled(self, products: Tensor, scale: float) -> Tensor:
        scores = products.to(exact_dtype(products)).mul_(scale)
        return scores if self._cap is None else scores.div_(self._cap).tanh_().mul_(self._cap)

    def _merged(self, layer: int, q: Tensor, own_k: Tensor, own_v: Tensor, scale: float, mask: Tensor | None) -> Tensor:
        """By the kernel behind `scaled_dot_product_attention`, for each part; arguments and result as of `_jointly`."""
        keys, values = self.prompts.keys[layer], self.prompts.values[layer]
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        far, far_lse = kernel(self._stacked(q), keys, values, 0.0, False, attn_mask=mask, scale=scale)
        near, near_lse = kernel(q.to(own_k.dtype), own_k, own_v, 0.0, False, scale=scale)
        # e^a / (e^a + e^b) = sigmoid(a - b): the share of the probability that lies on the row's own tokens.
        share = near_lse.unsqueeze(3).sub(self._by_row(far_lse.unsqueeze(3))).sigmoid_()
        return torch.lerp(self._by_row(far).to(near.dtype), near, share)

    def _stacked(self, t: Tensor) -> Tensor:
        """`[rows, kv heads, group, X]` -> `[prompts, kv heads, share * group, X]`: what reads a prompt, together."""
        if self._row_of is not None:
            t = t.index_select(0, self._row_of)
        return t if self._share == 1 else t.unflatten(0, (-1, self._share)).transpose(1, 2).flatten(2, 3)

    def _by_row(self, t: Tensor) -> Tensor:
        """The way back."""
        if self._share > 1:
            t = t.unflatten(2, (self._share, -1)).transpose(1, 2).flatten(0, 1)
        return t if self._row_of is None else t.index_select(0, self._slot_of)


def _laid_out(prompts: PromptKV, dtype: torch.dtype) -> PromptKV:
    """With keys and values of a prompt's head side by side, since they are read in every step."""
    keys, values = ([t.to(dtype).contiguous() for t in ts] for ts in (prompts.keys, prompts.values))
    return PromptKV(keys, values, prompts.lengths)


def _products(left: Tensor, right: Tensor) -> Tensor:
    """`[B, H, n, D]` times `[B, H, D, m]`."""
    return torch.bmm(left.flatten(0, 1), right.flatten(0, 1)).unflatten(0, left.shape[:2])
