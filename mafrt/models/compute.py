"""The seam for speed: the formulas that a processor may compute in a form of its own.

`Compute` is the reference, in plain torch on any device: what it returns is what every other form is tested against.
`mafrt/cpu` and `mafrt/models/gpu` hold everything made for one kind of processor. Each registers a subclass when it is
imported, and without it the reference computes, with equal results up to rounding.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor

from mafrt.models import delta_rule
from mafrt.models.adapter_routing import AdapterRouting
from mafrt.models.logprobs import FrozenHead, LogitForm
from mafrt.models.packed_attention import PackedRows
from mafrt.models.packing import MOST_TOKENS


class Compute:
    """Each formula in plain torch, on any device.

    A `base` is a `SharedBase`, a `layer` a `StackedLoRALinear`; their modules import this one.
    """

    own_adapter_only = False
    """whether a token of a mixed pass costs the products of its own adapter alone, and not those of all adapters"""

    def kernels(self, dtype: torch.dtype) -> str:
        """Whose kernels compute for a base in this number format, for the record of a run: c, c in decoding, torch."""
        return "torch"

    def adopt(self, base: Any) -> None:
        """Prepare a base that was just made."""

    def share_machine(self, base: Any) -> None:
        """Further bases or processes take their parts of the machine's memory."""

    def link(self, layers: Mapping[str, Any]) -> None:
        """Adapters were added; `layers` has all adapted layers by path."""

    def routes_bare(self, base: Any) -> bool:
        """Whether `adapted_linear` is to be called for passes without any adapter and gradient, too."""
        return False

    def adapted_linear(self, layer: Any, x: Tensor, routing: AdapterRouting) -> Tensor:
        """A frozen linear layer plus the adapter of each token: `[..., in]` -> `[..., out]`."""
        out: Tensor = layer.adapted(x, routing)
        return out

    def packed_attention(self, query: Tensor, key: Tensor, value: Tensor, rows: PackedRows) -> Tensor:
        """Causal attention of packed rows, each to its beginning and itself: `[heads, N, D]` -> `[N, heads, D]`.

        `key` and `value` `[kv heads, N, D]`; `rows` knows which tokens are rows, and the layer's constants.
        """
        return rows.attend(query, key, value)

    def family_tokens(self, base: Any) -> int:
        """Tokens of the largest family of rows that `packed_attention` is given (`mafrt.models.packing`)."""
        return MOST_TOKENS

    def frozen_head(self, weight: Tensor, bias: Tensor | None, form: LogitForm, packed: Any) -> FrozenHead:
        """The output layer, for logits and for log-probabilities of tokens; `packed` as of `LoraContext`."""
        return FrozenHead(weight, bias, form)

    def decode_model(self, base: Any) -> Any:
        """The weights laid out for decoding, a `mafrt.models.decoder.DecodeModel`; None: read them as they are."""
        return None

    def sample(self, logits: Tensor, temperatures: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Draw one token a row from softmax(logits / temperature).

        `logits` `[rows, V]`, where -inf bars a token; `temperatures` `[rows]` float32, where 0 takes the first of the
        most likely tokens; `uniforms` `[rows]` float32 in [0, 1). Returns token ids, none of probability 0, their
        log-probabilities (0.0 in greedy rows), and numbers not finite where a row has NaN, +inf or nothing but -inf.
        """
        # Half precision is too coarse for a cumulative sum over a vocabulary.
        logits = logits.float()
        greedy = temperatures == 0
        # Subtracting the maximum first keeps tiny temperatures from overflowing.
        shifted = logits - logits.amax(1, keepdim=True)
        probs = (shifted / torch.where(greedy, 1.0, temperatures).unsqueeze(1)).softmax(1)
        ids, drawn = draw(probs, uniforms)
        return torch.where(greedy, logits.argmax(1), ids), drawn.masked_fill(greedy, 0.0), probs.sum(1)

    def delta_step(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        g: Tensor,
        beta: Tensor,
        state: Tensor,
        normed: bool,
        in_place: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """`delta_rule.step`; `in_place`: the state may be written to, and be the one that is returned."""
        return delta_rule.step(query, key, value, g, beta, state, normed)

    def delta_chunks(
        self, query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, state: Tensor | None, normed: bool
    ) -> tuple[Tensor, Tensor]:
        """`delta_rule.chunks`."""
        return delta_rule.chunks(query, key, value, g, beta, state, normed)

    def short_conv(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None, state: Tensor | None
    ) -> Tensor | None:
        """A causal convolution `[rows, channels, T]` by `weight` `[channels, taps]`, and its activation.

        `state` `[rows, channels, taps]`: the tokens before the only one, which it takes up in place; None: zeros are
        before the first. Returns None for transformers' own.
        """
        return None

    def truncate(self, logits: Tensor, temperatures: Tensor, top_k: Tensor, top_p: Tensor, widest: int = 0) -> Tensor:
        """`truncate`, below."""
        return truncate(logits, temperatures, top_k, top_p, widest)


def truncate(logits: Tensor, temperatures: Tensor, top_k: Tensor, top_p: Tensor, widest: int = 0) -> Tensor:
    """Bar the tokens that top-k and top-p cut off.

    Args:
        logits: `[rows, V]`.
        temperatures: `[rows]` float32 above 0.
        top_k: `[rows]`, 0 for off.
        top_p: `[rows]`, 1 for off. Kept are the most likely tokens up to and including the one whose cumulative
            probability (among those that top-k left) reaches `top_p`; at least one. Equal ones are taken in order.
        widest: the largest of `top_k` if none of them is off, else 0; saves sorting the whole vocabulary.

    Returns:
        `[rows, V]` with -inf in place of what is cut off. A row that is not finite stays so.
    """
    size = logits.shape[1]
    if 0 < widest < size:
        ranked, order = logits.topk(widest, dim=1)
    else:
        ranked, order = logits.sort(dim=1, descending=True, stable=True)
    weights = ((ranked.float() - ranked[:, :1].float()) / temperatures.unsqueeze(1)).exp_()
    k = torch.where(top_k > 0, top_k, size).unsqueeze(1)
    outside = torch.arange(ranked.shape[1], device=logits.device) >= k
    upto = weights.masked_fill_(outside, 0.0).cumsum(1)
    # top_p = 1 keeps all tokens, also where the sum is rounded.
    beyond = (upto - weights >= top_p.unsqueeze(1) * upto[:, -1:]) & (top_p < 1).unsqueeze(1)
    beyond[:, 0] = False
    return torch.full_like(logits, -torch.inf).scatter_(1, order, ranked.masked_fill(outside | beyond, -torch.inf))


def draw(probs: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """Ids and log-probabilities `[rows]` of the first tokens at which the running sum exceeds the uniform number.

    `probs` `[rows, V]` need not be normalised, but one of each row is above 0; `uniforms` `[rows]` in [0, 1).
    """
    running = probs.cumsum(1)
    total = running[:, -1:]
    # Rounding may lift u * total to the total, beyond the last token that has a probability.
    target = torch.minimum(uniforms.unsqueeze(1) * total, torch.nextafter(total, total.new_zeros(())))
    # From the right: a target on an edge takes the next token, so none without probability is drawn.
    ids = torch.searchsorted(running, target, right=True).clamp_(max=probs.shape[1] - 1)
    return ids.squeeze(1), (probs.gather(1, ids) / total).log_().squeeze(1)


FOLDERS = {"cpu": "mafrt.cpu", "cuda": "mafrt.models.gpu"}
"""type of device -> the folder of what is made for it, which may be deleted"""
_registered: dict[str, Compute] = {}
_reference = Compute()


def register(device: str, compute: Compute) -> None:
    """Have a type of device compute in a form of its own."""
    _registered[device] = compute


def compute_for(device: str) -> Compute:
    """How a type of device (`cpu`, `cuda`) computes."""
    _form(device)
    return _registered.get(device, _reference)


@contextmanager
def reference() -> Iterator[None]:
    """Within it, all devices compute by the reference: for tests of the other forms."""
    for device in FOLDERS:
        _form(device)
    before = dict(_registered)
    _registered.clear()
    try:
        yield
    finally:
        _registered.update(before)


def cpu_part(name: str) -> Any:
    """A module of `mafrt/cpu`; None without that folder. `compute` registers itself if this processor has its forms."""
    return _part(FOLDERS["cpu"], name)


@cache
def _form(device: str) -> None:
    """Let the folder of a device register its form, once."""
    if device in FOLDERS:
        _part(FOLDERS[device], "compute")


@cache
def _part(folder: str, name: str) -> Any:
    try:
        return importlib.import_module(f"{folder}.{name}")
    except ModuleNotFoundError as error:
        if error.name != folder:
            raise
        return None
