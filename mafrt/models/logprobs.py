"""Log-probabilities and entropies of tokens without ever holding `[tokens, vocabulary]`.

The head is frozen, so the gradient of a token's log-probability with respect to its hidden state is one vector:

    d logp / d h = (W[target] - p W) / temperature
    d H / d h    = -sum_v p_v (log p_v + H) W[v] / temperature

(where a model caps or scales its logits, each W[v] times the slope of that form at v.)

Both are computed chunk by chunk while the chunk's logits exist, and the backward pass only scales them: the logits
are not recomputed, and only `[tokens, d]` is stored. (Liger kernels do the same for the cross-entropy,
arXiv:2410.10989; here the two derivatives stay per token, since PPO's ratio weights each token differently.)
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.nn import functional as F


def exact_dtype(tensor: Tensor) -> torch.dtype:
    """The number format of sums and exponentials that half precision would spoil."""
    return torch.float32 if tensor.dtype in (torch.bfloat16, torch.float16) else tensor.dtype


CHUNK_ELEMENTS = {"cpu": 2**19, "cuda": 2**26}
"""Logits held at a time, by device type, in the model's precision; also in float32, twice."""
LEAST_TOKENS = 128
"""Tokens in a chunk for which the products with the head run near full speed. With 16 tokens at V=262,144 they took
1.9 times as long (d=640, one thread), with 64 1.2 times, with 256 as long."""
MOST_ELEMENTS = 2**25
"""Logits up to which a chunk of `LEAST_TOKENS` may exceed `CHUNK_ELEMENTS`: 128 MiB a float32 buffer."""


@dataclass(frozen=True)
class LogitForm:
    """What a model does to the head's products x: `factor x`, or `cap tanh(factor x / cap)`."""

    factor: float = 1.0
    cap: float | None = None

    @staticmethod
    def of(config: Any) -> LogitForm:
        """The form of a transformers model: Cohere multiplies, Granite divides, Gemma 2 caps."""
        factor = float(getattr(config, "logit_scale", None) or 1.0)
        factor /= float(getattr(config, "logits_scaling", None) or 1.0)
        cap = getattr(config, "final_logit_softcapping", None)
        return LogitForm(factor, None if cap is None else float(cap))

    @staticmethod
    def found(config: Any, products: Tensor, logits: Tensor) -> LogitForm:
        """The form by which a model comes from `products` to `logits`, both `[..., V]`: of the numbers in its
        configuration, whatever they are called there, those that come nearest."""
        numbers = {
            name: float(value)
            for name, value in config.to_dict().items()
            if isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < math.inf
        }
        factors = dict.fromkeys((1.0, *numbers.values(), *(1 / value for value in numbers.values())))
        caps = (None, *(value for name, value in numbers.items() if "cap" in name))
        forms = [LogitForm(factor, cap) for cap in caps for factor in factors]
        return min(forms, key=lambda form: float((form(products) - logits).abs().max()))

    @property
    def plain(self) -> bool:
        """Whether the products are the logits."""
        return self.factor == 1.0 and self.cap is None

    def __call__(self, products: Tensor) -> Tensor:
        """Logits; half precision becomes float32 unless the form is plain."""
        if self.plain:
            return products
        exact = products.to(exact_dtype(products)) * self.factor
        return exact if self.cap is None else (exact / self.cap).tanh() * self.cap

    def slope(self, logits: Tensor) -> Tensor | None:
        """d logits / d (factor x); None: 1 everywhere."""
        return None if self.cap is None else 1 - (logits / self.cap).square()


PLAIN = LogitForm()


class Scores(NamedTuple):
    """Of a chunk of tokens."""

    logprobs: Tensor
    entropies: Tensor
    d_logprobs: Tensor | None
    """`[tokens, d]`, the gradients with respect to the hidden states; None: not asked for"""
    d_entropies: Tensor | None


@dataclass(frozen=True)
class FrozenHead:
    """The output layer and what the model does to its products. Nothing here is recorded for a backward pass."""

    weight: Tensor
    """`[V, d]`"""
    bias: Tensor | None = None
    form: LogitForm = PLAIN

    def products(self, hidden: Tensor) -> Tensor:
        """`[tokens, d]` -> `[tokens, V]`."""
        return F.linear(hidden, self.weight, self.bias)

    def back(self, onto: Tensor) -> Tensor:
        """From a gradient `[tokens, V]` of the products to one of the hidden states."""
        return onto.to(self.weight.dtype) @ self.weight

    def score(self, hidden: Tensor, targets: Tensor, scale: Tensor, want: bool, want_entropy: bool) -> Scores:
        """Log-probabilities and entropies of `targets` `[tokens]`, with the gradients that are wanted.

        `hidden` `[tokens, d]`; `scale` `[tokens, 1]` is 1 / temperature; `want_entropy` asks for the entropies'
        gradient, beside that of the log-probabilities.
        """
        # Half-precision log-sum-exp over 150,000 words would be off by more than a clipped ratio may move.
        logits = self.form(self.products(hidden).to(scale.dtype))
        slope = self.form.slope(logits) if want else None
        # In place, and each buffer let go where it ends: they are the most of what learning holds beside the base.
        logp = logits.mul_(scale).log_softmax(1)
        del logits
        chosen, p = logp.gather(1, targets.unsqueeze(1)), logp.exp()
        # A token of probability 0 has a log-probability of -inf at worst; p log p is then 0, not NaN.
        surprise = logp.clamp_(min=torch.finfo(logp.dtype).min).mul_(p)
        del logp
        entropies = -surprise.sum(1, keepdim=True)
        if not want_entropy:
            del surprise
        d_logprobs = d_entropies = None
        if want:
            target = self.weight[targets]
            if slope is not None:
                p.mul_(slope)
                if want_entropy:
                    surprise.mul_(slope)
                target = target * slope.gather(1, targets.unsqueeze(1)).to(target.dtype)
            scale, mean = scale * self.form.factor, self.back(p)
            d_logprobs = (target - mean) * scale
            if want_entropy:
                d_entropies = self.back(surprise).add_(mean * entropies) * -scale
        return Scores(chosen.squeeze(1), entropies.squeeze(1), d_logprobs, d_entropies)


def token_logprobs(
    hidden: Tensor,
    targets: Tensor,
    head: FrozenHead,
    *,
    temperature: float | Tensor = 1.0,
    chunk: int | None = None,
    entropy_grad: bool = True,
) -> tuple[Tensor, Tensor]:
    """Log-probability of each target and entropy of each distribution, both `[N]` float32 (in nats).

    `hidden` `[N, d]` after the final norm, `targets` `[N]`; the distribution is softmax(logits / temperature), with a
    number or `[N]`, all above 0. `chunk` tokens' logits exist at a time (default: `chunk_tokens`). Differentiable with
    respect to `hidden` only; `entropy_grad=False` saves a third of the time if the entropy is only logged.
    """
    if not isinstance(temperature, Tensor):
        if not temperature > 0:
            raise ValueError(f"found temperature {temperature}, expected a number above 0")
        temperature = torch.tensor(float(temperature), device=hidden.device)
    scale = temperature.to(hidden.device, exact_dtype(hidden)).reciprocal().expand(len(hidden)).unsqueeze(1)
    want = torch.is_grad_enabled() and hidden.requires_grad
    if chunk is None:
        chunk = chunk_tokens(len(head.weight), hidden.device.type)
        if want and entropy_grad and hidden.device.type != "cpu":
            chunk = -(-3 * chunk // 4)  # it holds a third buffer, in the head's precision
    return cast(tuple[Tensor, Tensor], _TokenLogprobs.apply(hidden, targets, scale, head, chunk, want, entropy_grad))


def chunk_tokens(vocabulary: int, device: str) -> int:
    """Number of tokens whose logits exist at a time on a type of device: `LEAST_TOKENS`, or more if that is little."""
    usual = CHUNK_ELEMENTS.get(device, 2**26) // vocabulary
    return max(usual, min(LEAST_TOKENS, MOST_ELEMENTS // vocabulary), 16)


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, targets: Tensor, scale: Tensor, head: Any, chunk: int, want: bool, entropy_grad: bool
    ) -> tuple[Tensor, Tensor]:
        n, exact = len(hidden), exact_dtype(hidden)
        logprobs = torch.empty(n, dtype=exact, device=hidden.device)
        entropy = torch.empty_like(logprobs)
        d_logprob = torch.empty_like(hidden) if want else None
        d_entropy = torch.empty_like(hidden) if want and entropy_grad else None
        for part in (slice(start, start + chunk) for start in range(0, n, chunk)):
            # The gradients are formed now: otherwise the logits of this chunk must be kept, or computed again.
            scores = head.score(hidden[part], targets[part], scale[part], want, entropy_grad)
            logprobs[part], entropy[part] = scores.logprobs, scores.entropies
            if d_logprob is not None:
                d_logprob[part] = scores.d_logprobs
            if d_entropy is not None:
                d_entropy[part] = scores.d_entropies
        ctx.save_for_backward(d_logprob, d_entropy)
        # Without an entropy bonus its gradient is None and not a tensor of zeros, so no product is computed for it.
        ctx.set_materialize_grads(False)
        if not entropy_grad:
            ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, grad_logprob: Tensor | None, grad_entropy: Tensor | None) -> tuple[Tensor | None, ...]:
        d_logprob, d_entropy = ctx.saved_tensors
        grad = None
        if grad_logprob is not None:
            grad = grad_logprob.unsqueeze(1).to(d_logprob.dtype) * d_logprob
        if grad_entropy is not None and d_entropy is not None:
            extra = grad_entropy.unsqueeze(1).to(d_entropy.dtype) * d_entropy
            grad = extra if grad is None else grad.add_(extra)
        return grad, None, None, None, None, None, None
