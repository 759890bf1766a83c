"""Decoding for Llama-like models (`lean_model.py`), one batch at a time.

A decode step has dozens of small operations per layer, and on a small model or batch the overhead around them
dominates. Here query, key and value are one product, as are gate and up; masks are not rebuilt; shared prompts are
read once (`shared_prefix_attention.py`); adapters act on runs of rows. On a CPU with a C compiler all but the products
are a few kernels (`block_steps.py`). `agrees` compares the results with
`SharedBase.forward` when an engine starts; on a mismatch, or for any other model, the engine decodes with Hugging
Face's forward.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from mafrt.engines.local.block_steps import KernelSteps, TorchSteps
from mafrt.engines.local.decode_lora import FusedLora, RowAdapters
from mafrt.engines.local.decoder_block import Linear
from mafrt.engines.local.kernel_rows import KernelRows
from mafrt.engines.local.kv_cache import KVCache, PromptKV, prefill
from mafrt.engines.local.lean_model import LeanModel
from mafrt.engines.local.shared_prefix_attention import SharedPrompts
from mafrt.engines.local.widened_linear import ColumnMasks, WidenedLinear
from mafrt.kernels.decode import decode_kernels

if TYPE_CHECKING:
    from mafrt.models.shared_base import SharedBase

log = logging.getLogger(__name__)


class LeanDecoder:
    """One batch in the middle of its generation.

    Args:
        model: the weights.
        prompts: keys and values of the prompts.
        owner: `[rows]`, on the host: which prompt each row goes on from; rows of one prompt lie side by side.
        adapters: adapter name of each row; rows of one adapter lie side by side, those of None last.
        steps: most tokens that will be fed to a row.
        form: of the adapters: "widened" (`widened_linear.py`), "narrow" or "wide" (`decode_lora.py`); "auto" is the one
            for the device and the batch, and takes the kernels in C where there are any.
    """

    def __init__(
        self,
        model: LeanModel,
        prompts: PromptKV,
        owner: Tensor,
        adapters: Sequence[str | None],
        steps: int,
        form: Literal["auto", "widened", "narrow", "wide"] = "auto",
    ) -> None:
        self.model = model
        device = model.base.device
        kernels = decode_kernels(model.dtype, device.type) if form == "auto" else None
        self._prompts = SharedPrompts(prompts, owner, model.shape.cap, for_kernels=kernels is not None)
        names = [name for name in dict.fromkeys(adapters) if name is not None]
        wide = form == "wide" or (form == "auto" and device.type != "cpu")
        self._lora: Sequence[Sequence[FusedLora | WidenedLinear | None]] | None = None
        self._columns: ColumnMasks | None = None
        self._rows: RowAdapters | KernelRows | None = None
        widened = None
        if names and kernels is None and not wide and form != "narrow":
            widened = model.widened(len(adapters), steps)
        if widened is not None:
            self._lora, names = widened
        elif names and kernels is None:
            self._lora = model.lora(names, wide)
        number = {name: k for k, name in enumerate(names)}
        index = torch.tensor([-1 if name is None else number[name] for name in adapters])
        if widened is not None:
            self._columns = ColumnMasks(index)
        elif names and kernels is not None:
            self._rows = KernelRows(model, names, index)
        elif names:
            self._rows = RowAdapters(index, len(names), wide, device, model.dtype)
        self._steps = (
            TorchSteps(model, self._prompts) if kernels is None else KernelSteps(model, self._prompts, kernels)
        )
        self._position = prompts.lengths[owner].to(device)
        self._rotary = model.rotary(int(prompts.lengths.max()) + steps)
        self._turn()

    def step(self, tokens: Tensor) -> Tensor:
        """Feed one token per row `[rows]`; returns the hidden states `[rows, d]` after it, after the final norm."""
        x = self.model.base.inner.embed_tokens(tokens)
        for number in range(len(self.model.blocks)):
            x = self.block(number, x)
        self.advance()
        return self._steps.final_norm(x)

    def block(self, number: int, x: Tensor) -> Tensor:
        """One decoder layer for the present position: `[rows, d]` -> `[rows, d]`."""
        block, steps = self.model.blocks[number], self._steps
        qkv = self._product(number, 0, block.qkv, steps.norm(x, block.norm_in))
        h = steps.attend(number, qkv, self._rotary_now)
        x = self._added(number, 1, block.out, h, x, block.norm_out)
        h = steps.norm(x, block.norm_mlp)
        if block.feed is None:  # of the families with experts, none norms their output
            mixed = block.mlp(h.unsqueeze(0))
            return x + (mixed[0] if isinstance(mixed, tuple) else mixed)[0]
        gate_up, down = block.feed
        h = steps.activated(block, self._product(number, 2, gate_up, h))
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
        return self._prompts.extended(self._steps.own)

    def _added(self, block: int, linear: int, layer: Linear, h: Tensor, x: Tensor, norm: Tensor | None) -> Tensor:
        """`x` plus a linear layer's output for `h`, which is normed first if there is a norm."""
        if norm is None:
            return self._product(block, linear, layer, h, x)
        return x + self._steps.norm(self._product(block, linear, layer, h), norm)

    def _product(self, block: int, linear: int, layer: Linear, h: Tensor, residual: Tensor | None = None) -> Tensor:
        """A linear layer with its adapters, plus `residual`."""
        if isinstance(self._rows, KernelRows):
            return self._rows.product(block, linear, layer, h, residual)
        lora = None if self._lora is None else self._lora[block][linear]
        if self._columns is not None and isinstance(lora, WidenedLinear):
            return self._columns.apply(lora, h, residual)
        out = layer(h, residual)
        if self._rows is not None and isinstance(lora, FusedLora):
            self._rows.add(out, h, lora)
        return out

    def keep(self, rows: Tensor) -> None:
        """Leave only the given rows `[kept]`, in order, in the batch."""
        self._steps.keep(rows)
        self._position = self._position[rows]
        self._turn()
        self._prompts.keep(rows.cpu())
        for each in (self._rows, self._columns):
            if each is not None:
                each.keep(rows)


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
