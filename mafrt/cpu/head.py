"""The output layer by the kernels in C: packed weights, and the softmax over the vocabulary in one pass."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mafrt.cpu import learn_rows
from mafrt.cpu.onednn import product
from mafrt.cpu.packed_weights import PackedWeights
from mafrt.models.logprobs import FrozenHead, Scores


@dataclass(frozen=True)
class CpuHead(FrozenHead):
    """`FrozenHead` with copies of the weight, if there are any."""

    packed: PackedWeights | None = None

    def products(self, hidden: Tensor) -> Tensor:
        weight = None if self.packed is None else self.packed.of(self.weight)
        return product(hidden, self.weight if weight is None else weight, self.bias)

    def back(self, onto: Tensor) -> Tensor:
        weight = None if self.packed is None else self.packed.of(self.weight, transposed=True)
        return product(onto.to(self.weight.dtype), self.weight.t() if weight is None else weight)

    def score(self, hidden: Tensor, targets: Tensor, scale: Tensor, want: bool, want_entropy: bool) -> Scores:
        if self.form.cap is not None or not learn_rows.serves(hidden):
            return super().score(hidden, targets, scale, want, want_entropy)
        products = self.products(hidden)
        scale = scale * self.form.factor
        surprises = torch.empty_like(products) if want and want_entropy else None
        logprobs, entropies, rest = learn_rows.word_softmax(products, targets, scale.squeeze(1), want, surprises)
        if not want:
            return Scores(logprobs, entropies, None, None)
        mean = self.back(products)  # they hold the probabilities by now
        d_entropies = None
        if surprises is not None:
            d_entropies = self.back(surprises).add_(mean * rest.unsqueeze(1)) * -scale
        return Scores(logprobs, entropies, (self.weight[targets] - mean) * scale, d_entropies)
