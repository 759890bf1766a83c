"""Sampling: logits in; one token a row and its log-probability under the distribution really sampled from out.

Order of the filters as in Hugging Face `generate` and vLLM: temperature, then top-k, then top-p on the remaining tokens
(nucleus sampling, Holtzman et al. 2020, arXiv:1904.09751), then renormalisation. A token is drawn by inverting the
cumulative distribution at one uniform number, derived from the request's own seed: a sample does not depend on
the rest of the batch.

Deviation from `generate`: among equal logits at the edge of top-k exactly k are kept, where `generate` keeps all.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from mafrt.core.errors import ConfigError, MafrtError
from mafrt.core.types import SamplingParams
from mafrt.models.compute import compute_for


class NonFiniteLogitsError(MafrtError, ArithmeticError):
    """The model returned NaN or infinity where the logits of the next token should be.

    `adapters` names whose rows they were (None: the bare base), so that only those need to be rolled back; nothing
    was sampled. The other rows of the call are lost too, and equal requests give equal tokens when asked again.
    """

    def __init__(self, adapters: Sequence[str | None]) -> None:
        self.adapters = tuple(dict.fromkeys(adapters))
        whose = ", ".join("the bare base" if name is None else f"adapter {name!r}" for name in self.adapters)
        super().__init__(
            f"found NaN or infinite logits while sampling from {whose}, expected finite numbers; "
            "go back to the last good weights, and lower the learning rate or the gradient clip"
        )


def check_sampling(params: SamplingParams) -> None:
    """Raise ConfigError for sampling parameters that cannot be meant."""
    for name, ok, expected in (
        ("max_new_tokens", params.max_new_tokens >= 1, "1 or more"),
        ("temperature", 0.0 <= params.temperature < float("inf"), "0 (greedy) or a positive number"),
        ("top_p", 0.0 < params.top_p <= 1.0, "a number above 0 and at most 1 (off)"),
        ("top_k", params.top_k >= 0, "0 (off) or a positive number of tokens"),
        ("thinking_budget", params.thinking_budget >= 0, "0 (no limit) or a positive number of tokens"),
        ("stop", not isinstance(params.stop, str) and all(params.stop), "a tuple of non-empty texts"),
    ):
        if not ok:
            raise ConfigError(f"sampling: found {name}={getattr(params, name)!r}, expected {expected}")


def draw_uniforms(seed: int, count: int) -> Tensor:
    """`[count]` float32 in [0, 1), a function of `seed` alone; a longer draw begins with the shorter one."""
    # On the CPU, since other devices draw other numbers from the same seed.
    generator = torch.Generator().manual_seed(seed % 2**63)
    return torch.rand(count, generator=generator)


class Sampler:
    """The sampling parameters of a batch as tensors, a row each, and the uniforms that its tokens will use.

    Args:
        params: one per row.
        seeds: one per row.
        adapters: whose row it is; only for the message of an error.
        steps: most tokens that any row will sample.
        device: where the logits are.
        begun: tokens that each row has already sampled; none by default.
    """

    def __init__(
        self,
        params: Sequence[SamplingParams],
        seeds: Sequence[int],
        adapters: Sequence[str | None],
        steps: int,
        device: torch.device | str = "cpu",
        begun: Sequence[int] | None = None,
    ) -> None:
        self.params, self.adapters = list(params), list(adapters)
        draws = torch.zeros(steps, len(params))
        for row, (p, seed) in enumerate(zip(params, seeds, strict=True)):
            done = 0 if begun is None else begun[row]
            count = min(p.max_new_tokens - done, steps)
            # A greedy row never looks at its draws.
            if p.temperature > 0:
                draws[:count, row] = draw_uniforms(seed, done + count)[done:]
        self.uniforms = draws.to(device)
        """`[steps, rows]`"""
        self.temperature = torch.tensor([p.temperature for p in params], dtype=torch.float32, device=device)
        self.top_p = torch.tensor([p.top_p for p in params], dtype=torch.float32, device=device)
        self.top_k = torch.tensor([p.top_k for p in params], dtype=torch.long, device=device)
        self._look()

    def _look(self) -> None:
        """Find out once per composition of the batch which rows top-k or top-p cut."""
        cut = [row for row, p in enumerate(self.params) if (p.top_p < 1 or p.top_k > 0) and p.temperature > 0]
        self._cut = torch.tensor(cut, device=self.uniforms.device) if cut else None
        if self._cut is not None:
            self._limits = self.temperature[self._cut], self.top_k[self._cut], self.top_p[self._cut]
            self._widest = max(ks) if all(ks := [self.params[row].top_k for row in cut]) else 0

    def keep(self, rows: Tensor) -> None:
        """Leave only the given rows `[kept]` in the batch."""
        indices = rows.tolist()
        self.params, self.adapters = [self.params[i] for i in indices], [self.adapters[i] for i in indices]
        self.uniforms = self.uniforms.index_select(1, rows)
        self.temperature, self.top_p, self.top_k = (t[rows] for t in (self.temperature, self.top_p, self.top_k))
        self._look()

    def __call__(self, logits: Tensor, step: int) -> tuple[Tensor, Tensor]:
        """Sample token number `step` of every row.

        Args:
            logits: `[rows, V]`, any floating type; -inf bars a token.
            step: which of the row's uniforms to use.

        Returns:
            Token ids `[rows]` and their log-probabilities `[rows]` float32 (0.0 in greedy rows).

        Raises:
            NonFiniteLogitsError: a row holds NaN or +inf, or nothing but -inf.
        """
        ids, logprobs, totals = self.drawn(logits, step)
        self.check(totals.tolist())
        return ids, logprobs

    def drawn(self, logits: Tensor, step: int) -> tuple[Tensor, Tensor, Tensor]:
        """The same without waiting for the device, and `[rows]` float32 numbers for `check`."""
        compute = compute_for(logits.device.type)
        if (cut := self._cut) is not None:
            of_cut = logits if len(cut) == len(logits) else logits[cut]
            truncated = compute.truncate(of_cut, *self._limits, self._widest)
            # The other rows stay as they are: a row's rounding must not depend on its neighbours' settings.
            logits = truncated if of_cut is logits else logits.index_copy(0, cut, truncated)
        return compute.sample(logits, self.temperature, self.uniforms[step])

    def check(self, totals: Sequence[float]) -> None:
        """Raise NonFiniteLogitsError for rows that `drawn` could not sample from."""
        # One NaN or +inf among the logits makes the whole row NaN, so the sum is all that needs a look.
        if bad := [row for row, total in enumerate(totals) if not math.isfinite(total)]:
            raise NonFiniteLogitsError([self.adapters[row] for row in bad])
