"""Decoding for Llama-like models (`lean_model.py`) by the kernels in C, one batch at a time.

A decode step has dozens of small operations per layer, and on a small model or batch the overhead around them
dominates. Here query, key and value are one product, as are gate and up; masks are not rebuilt; shared prompts are
stored once (`shared_prompts.py`); adapters act on runs of rows, as a part of the frozen product where that is in
panels; all but the products are a few kernels. `agrees` compares the results with `SharedBase.forward` when an engine
starts.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from mafrt.cpu.decode import NearKeys, decode_kernels
from mafrt.cpu.decoder_block import Linear
from mafrt.cpu.lean_model import LeanModel
from mafrt.cpu.low_rank import Joined, LowRank, Segments, columns_for
from mafrt.cpu.panels import Panels
from mafrt.cpu.shared_prompts import SharedPrompts
from mafrt.models.adapter_routing import AdapterRouting
from mafrt.models.decoder import DecodeModel, FoldingDecoder, where_it_agrees
from mafrt.models.kv_cache import KVCache, PromptKV, prefill

if TYPE_CHECKING:
    from mafrt.models.shared_base import SharedBase

log = logging.getLogger(__name__)


class LeanDecoder:
    """One batch in the middle of its generation.

    Args:
        model: the weights.
        prompts: keys and values of the prompts.
        owner: `[rows]`, which prompt each row goes on from.
        adapters: adapter name of each row; rows of one adapter lie side by side, those of None last.
        steps: most tokens that will be fed to a row.
    """

    def __init__(
        self, model: LeanModel, prompts: PromptKV, owner: Tensor, adapters: Sequence[str | None], steps: int
    ) -> None:
        self.model = model
        kernels = decode_kernels(model.dtype, "cpu")
        assert kernels is not None, "a LeanModel is made where there are kernels for its number format"
        self._kernels = kernels
        self._prompts = SharedPrompts(prompts, owner)
        self._near = [NearKeys(len(owner), model.shape, model.dtype) for _ in model.blocks]
        """of the rows' own tokens, layer by layer"""
        names = [name for name in dict.fromkeys(adapters) if name is not None]
        number = {name: k for k, name in enumerate(names)}
        index = torch.tensor([-1 if name is None else number[name] for name in adapters])
        self._rows = AdapterRows(model, names, index) if names else None
        self._experts: AdapterRouting | None = None
        """the adapters of the rows where experts are called that have some"""
        if names and model.base.adapted_experts:
            of_base = torch.tensor([model.base.adapter_index(name) for name in adapters])
            self._experts = AdapterRouting(len(of_base), 1, of_base)
        self._position = prompts.lengths[owner]
        self._rotary = model.rotary(int(prompts.lengths.max()) + steps)
        self._turn()

    def step(self, tokens: Tensor) -> Tensor:
        """Feed one token per row `[rows]`; returns the hidden states `[rows, d]` after it, after the final norm."""
        x = self.model.base.inner.embed_tokens(tokens)
        for number in range(len(self.model.blocks)):
            x = self.block(number, x)
        self.advance()
        return self._norm(x, self.model.norm_final)

    def block(self, number: int, x: Tensor) -> Tensor:
        """One decoder layer for the present position: `[rows, d]` -> `[rows, d]`."""
        block = self.model.blocks[number]
        qkv = self._product(number, 0, block.qkv, self._norm(x, block.norm_in))
        norms = None if block.head_norm is None else self.model.exact(block.head_norm)
        rotation, far, near = self._rotary_now[block.rotary], self._prompts.far(number), self._near[number]
        h = self._kernels.attend(qkv, rotation, norms, self.model.shape, far, near, block.window)
        x = self._added(number, 1, block.out, h, x, block.norm_out)
        h = self._norm(x, block.norm_mlp)
        if block.feed is None:  # of the families with experts, none norms their output
            with self.model.base.context.use(self._experts):
                mixed = block.mlp(h.unsqueeze(0))
            return cast(Tensor, x + (mixed[0] if isinstance(mixed, tuple) else mixed)[0])
        gate_up, down = block.feed
        h = self._product(number, 2, gate_up, h)
        if block.silu:
            h = self._kernels.silu_product(h)
        else:
            gate, up = h.chunk(2, 1)
            h = block.act(gate).mul_(up)
        return self._added(number, 3, down, h, x, block.norm_mlp_out)

    def advance(self, positions: int = 1) -> None:
        """Go on to the next position of every row."""
        self._position += positions
        self._turn()

    def _turn(self) -> None:
        """Look up the rotation of the present positions."""
        last = min(len(cos) for cos, _ in self._rotary.values()) - 1
        place = self._position.clamp(max=last)  # after the last step there is no next position
        self._rotary_now = {kind: (cos[place], sin[place]) for kind, (cos, sin) in self._rotary.items()}

    def folded(self) -> PromptKV:
        """Keys and values of every row, own tokens included, as prompts of their own: one for each row."""
        return self._prompts.extended(self._near)

    def keep(self, rows: Tensor) -> None:
        """Leave only the given rows `[kept]`, in order, in the batch."""
        for layer in self._near:
            layer.keep(rows)
        self._position = self._position[rows]
        self._turn()
        self._prompts.keep(rows)
        if self._rows is not None:
            self._rows.keep(rows)
        if self._experts is not None:
            left = self._experts.index[rows]
            self._experts = AdapterRouting(len(left), 1, left)

    def _norm(self, x: Tensor, factors: Tensor) -> Tensor:
        return self._kernels.rms_norm(x, self.model.exact(factors), self.model.shape.eps)

    def _added(self, block: int, linear: int, layer: Linear, h: Tensor, x: Tensor, norm: Tensor | None) -> Tensor:
        """`x` plus a linear layer's output for `h`, which is normed first if there is a norm."""
        if norm is None:
            return self._product(block, linear, layer, h, x)
        return x + self._norm(self._product(block, linear, layer, h), norm)

    def _product(self, block: int, linear: int, layer: Linear, h: Tensor, residual: Tensor | None = None) -> Tensor:
        """A linear layer with its adapters, plus `residual`."""
        return layer(h, residual, None if self._rows is None else self._rows.tables[block][linear])


class AdapterRows:
    """Which rows of a batch use which adapters, and the tables of all layers that say so to the kernels.

    Args:
        model: the weights.
        names: of the adapters.
        index: `[rows]`, position among the names, -1 for none; rows of one adapter lie side by side.
    """

    def __init__(self, model: LeanModel, names: Sequence[str], index: Tensor) -> None:
        owners, runs = torch.unique_consecutive(index, return_inverse=True)
        self._runs, layers = runs, model.joined(names)
        self._segments = Segments(self._stops(len(owners)), owners.tolist())
        most = max((columns_for(each) for block in layers for each in block), default=0)
        # One place for all layers, of which each is done with it before the next begins.
        self._numbers = torch.empty(len(index), most, dtype=model.dtype)
        self.tables = [
            [self._table(linear, each) for linear, each in zip(block.linears, adapters, strict=True)]
            for block, adapters in zip(model.blocks, layers, strict=True)
        ]
        """by block and linear; None: no row has an adapter there"""

    def _table(self, linear: Linear, adapters: Sequence[Joined | None]) -> LowRank | None:
        each = [None if k < 0 else adapters[k] for k in self._segments.owners]
        if not any(each):
            return None
        return LowRank(self._segments, each, linear.widths, self._numbers, panels=isinstance(linear.packed, Panels))

    def _stops(self, count: int) -> list[int]:
        """The row behind each run; runs may have lost all of their rows."""
        return torch.bincount(self._runs, minlength=count).cumsum(0).tolist()

    def keep(self, rows: Tensor) -> None:
        """Leave only the given rows `[kept]`, in order."""
        self._runs = self._runs[rows]
        self._segments.move(self._stops(len(self._segments.owners)))


class LeanDecoding(LeanModel):
    """A `LeanModel` and its decoders."""

    def decoder(
        self, prompts: PromptKV, owner: Sequence[int], adapters: Sequence[str | None], steps: int
    ) -> FoldingDecoder:
        return LeanDecoder(self, prompts, torch.tensor(owner), adapters, steps)


def decode_model(base: SharedBase) -> DecodeModel:
    """The lean form where it covers a model and agrees with it, else the reference."""
    return where_it_agrees(base, LeanDecoding, agrees)


def agrees(model: LeanModel, steps: int = 3) -> bool:
    """Whether the lean decoder computes what the model computes, for the bare base and each adapter.

    Two prompts of unequal length, several rows each, against Hugging Face's forward over the whole sequences. In
    float32 the hidden states have to be equal but for rounding. In lower precisions rounding alone reaches several
    percent after tens of layers, so every layer is compared by itself, from the input that the model gave it. A wrong
    rotation or mask shows as tens of percent.
    """
    base = model.base
    names: list[str | None] = [*base.adapters, None]
    # A few adapters and the bare base are enough: every adapter takes the same path.
    names = names[:3] + names[-1:] if len(names) > 4 else names
    tokens = torch.arange(7, 7 + 6 + steps) % base.config.vocab_size
    prompts: list[list[int]] = []
    owner: list[int] = []
    rows: list[str | None] = []
    for name in names:
        for length, samples in ((6, 2), (3, 1)):
            owner += [len(prompts)] * samples
            rows += [name] * samples
            prompts.append(tokens[:length].tolist())
    adapters = [base.adapter_index(name) for name in rows]
    _, kv = prefill(base, prompts, [adapters[owner.index(place)] for place in range(len(prompts))])
    decoder = LeanDecoder(model, kv, torch.tensor(owner), rows, steps)
    lengths = torch.tensor([len(prompts[place]) for place in owner])
    states = _layer_states(base, tokens.expand(len(owner), -1), torch.tensor(adapters))
    by_layer = states[0].dtype != torch.float32
    worst, limit = 0.0, 1.0 if by_layer else 1e-3
    for step in range(steps):
        expected = [state[torch.arange(len(owner)), lengths + step] for state in states]
        if by_layer:
            for number, (before, after) in enumerate(pairwise(expected)):
                computed = decoder.block(number, before.clone())
                worst = max(worst, _share_of_allowed(computed.float(), before.float(), after.float()))
            decoder.advance()
        else:
            computed = decoder.step(tokens[lengths + step].to(base.device))
            last = base.inner.norm(expected[-1])
            worst = max(worst, float((computed - last).abs().max() / last.abs().max()))
    log.debug("lean decoding differs by %.1e, limit %.1e", worst, limit)
    return worst <= limit


def _share_of_allowed(computed: Tensor, before: Tensor, after: Tensor) -> float:
    """Largest difference of a row over all that rounding may cause: a share of the update and of the sum."""
    allowed = 0.06 * (after - before).norm(dim=1) + 2**-7 * after.norm(dim=1)
    return float(((computed - after).norm(dim=1) / allowed).max())


def _layer_states(base: SharedBase, tokens: Tensor, adapters: Tensor) -> list[Tensor]:
    """The embeddings and the output of every decoder layer `[rows, T, d]`, by Hugging Face's forward."""
    states: list[Tensor] = []

    def keep(module: Any, given: Any, output: Any) -> None:
        states.append(output[0] if isinstance(output, tuple) else output)

    hooks = [layer.register_forward_hook(keep) for layer in base.inner.layers]
    ids = tokens.to(base.device)
    try:
        base.forward(ids, None, adapters, past_key_values=KVCache())  # with a cache rows are not packed
    finally:
        for hook in hooks:
            hook.remove()
    return [base.inner.embed_tokens(ids), *states]
