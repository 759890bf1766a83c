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

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mafrt.kernels import learn_rows
from mafrt.models.exact_dtype import exact_dtype
from mafrt.models.onednn import product
from mafrt.models.packed_weights import PackedWeights

CHUNK_ELEMENTS = {"cpu": 2**19, "cuda": 2**26}
"""Logits held at a time, by device type, in the model's precision; on a GPU also in float32, twice."""
BLOCK_ELEMENTS = 2**19
"""Logits of a chunk whose softmax is computed at a time on a CPU: 2 MiB in float32. With all of a chunk at once 512
tokens took 190 and not 168 ms in bfloat16 (V=49,152, d=576), and twice the memory."""
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


def token_logprobs(
    hidden: Tensor,
    targets: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    temperature: float | Tensor = 1.0,
    chunk: int | None = None,
    entropy_grad: bool = True,
    form: LogitForm = PLAIN,
    packed: PackedWeights | None = None,
) -> tuple[Tensor, Tensor]:
    """Log-probability of each target and entropy of each distribution, both `[N]` float32 (in nats).

    `hidden` `[N, d]` after the final norm, `targets` `[N]`, `weight` `[V, d]` and `bias` `[V]` of the frozen head.
    The distribution is softmax(logits / temperature); `temperature` is a number or `[N]`, all above 0.
    `chunk` is the number of tokens whose logits exist at a time (default: `chunk_tokens`).
    Differentiable with respect to `hidden` only; `entropy_grad=False` saves a third of the time if the entropy is
    only logged. `form`: from the head's products to logits. `packed`: holds packed copies of the weight.
    """
    if not isinstance(temperature, Tensor):
        if not temperature > 0:
            raise ValueError(f"found temperature {temperature}, expected a number above 0")
        temperature = torch.tensor(float(temperature), device=hidden.device)
    temperature = temperature.to(hidden.device).expand(hidden.shape[0])
    if chunk is None:
        chunk = chunk_tokens(weight.shape[0], hidden.device.type)
    want = torch.is_grad_enabled() and hidden.requires_grad
    return _TokenLogprobs.apply(hidden, targets, weight, bias, temperature, chunk, want, entropy_grad, form, packed)


def chunk_tokens(vocabulary: int, device: str) -> int:
    """Number of tokens whose logits exist at a time: `LEAST_TOKENS`, or more if that stays small.

    Args:
        vocabulary: number of tokens that the head knows.
        device: device type, such as `cpu`.
    """
    usual = CHUNK_ELEMENTS.get(device, 2**26) // vocabulary
    return max(usual, min(LEAST_TOKENS, MOST_ELEMENTS // vocabulary), 16)


def _products(
    weight: Tensor, bias: Tensor | None, packed: PackedWeights | None, want: bool
) -> tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]:
    """`x W^T + b` and `y W`, by packed copies of the weight if there are any; the second only where `want`."""
    ahead = None if packed is None else packed.of(weight)
    back = None if packed is None or not want else packed.of(weight, transposed=True)
    return (
        partial(product, weight=weight if ahead is None else ahead, bias=bias),
        partial(product, weight=weight.t() if back is None else back),
    )


def _divide(values: Tensor, total: Tensor, out: Tensor) -> None:
    """Fill `out` with `values / total`."""
    if out.dtype == values.dtype:
        torch.div(values, total, out=out)
    else:  # a division that rounds on the way is slower than two passes
        out.copy_(values.div_(total))


def _blocks(products: Tensor) -> Iterator[slice]:
    """Rows whose softmax is computed at a time: all on a GPU; on a CPU so few that it stays in the cache."""
    size = max(1, BLOCK_ELEMENTS // products.shape[1]) if products.device.type == "cpu" else max(1, len(products))
    return (slice(start, min(start + size, len(products))) for start in range(0, len(products), size))


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, targets, weight, bias, temperature, chunk, want, entropy_grad, form, packed):
        # Half-precision log-sum-exp over 150,000 words would be off by more than a clipped ratio may move, so float32
        # at least.
        exact = exact_dtype(hidden)
        n = hidden.shape[0]
        logprobs = torch.empty(n, dtype=exact, device=hidden.device)
        entropy = torch.empty_like(logprobs)
        d_logprob = torch.empty_like(hidden) if want else None
        d_entropy = torch.empty_like(hidden) if want and entropy_grad else None
        ahead, back = _products(weight, bias, packed, want)
        # On a GPU the look would wait for it.
        unscaled = temperature.device.type == "cpu" and bool((temperature == 1.0).all())
        for start in range(0, n, chunk):
            part = slice(start, min(start + chunk, n))
            products = ahead(hidden[part])
            scale = temperature[part].to(exact).reciprocal().unsqueeze(1)
            target = targets[part].unsqueeze(1)
            own = weight[targets[part]] if want else None
            surprises = torch.empty_like(products) if d_entropy is not None else None
            h = torch.empty_like(scale)
            in_one_pass = form.cap is None and learn_rows.serves(products)
            if in_one_pass:
                factors = (scale * form.factor).squeeze(1)
                found = learn_rows.word_softmax(products, targets[part], factors, want, surprises)
                logprobs[part], entropy[part], h = found[0], found[1], found[2].unsqueeze(1)
            for rows in () if in_one_pass else _blocks(products):
                logits = form(products[rows].to(exact))
                slope = form.slope(logits) if want else None
                # Two buffers and one exponential, since each pass over them costs. After the shift the largest is 0, so
                # that nothing overflows.
                shifted = logits if unscaled else logits.mul_(scale[rows])
                shifted.sub_(shifted.amax(1, keepdim=True))
                p = shifted.exp()
                total = p.sum(1, keepdim=True)
                log_total = total.log()
                place = slice(start + rows.start, start + rows.stop)
                logprobs[place] = (shifted.gather(1, target[rows]) - log_total).squeeze(1)
                # A token of probability 0 has a log-probability of -inf at worst; p log p is then 0, not NaN.
                surprise = shifted.clamp_(min=torch.finfo(exact).min).mul_(p)
                # Of the shifted logits: with p log p = p (shifted - log_total), the entropy is log_total + this.
                h[rows] = -surprise.sum(1, keepdim=True) / total
                entropy[place] = (h[rows] + log_total).squeeze(1)
                if own is None:
                    continue
                if slope is not None:
                    p.mul_(slope)
                    surprise.mul_(slope)
                    own[rows] *= slope.gather(1, target[rows]).to(own.dtype)
                if surprises is not None:
                    _divide(surprise, total, surprises[rows])
                _divide(p, total, products[rows])  # which are not needed any more
            if d_logprob is not None and own is not None:
                scale = scale * form.factor
                mean = back(products)
                # The gradient is formed now, while the logits of this chunk exist; otherwise all logits must be kept or
                # computed again.
                d_logprob[part] = (own - mean) * scale
                if d_entropy is not None and surprises is not None:
                    d_entropy[part] = back(surprises).add_(mean * h) * -scale
            # Freed before the next chunk's logits exist beside them.
            del products, surprises
        ctx.save_for_backward(d_logprob, d_entropy)
        # Without an entropy bonus its gradient is None and not a tensor of zeros, so no product is computed for it.
        ctx.set_materialize_grads(False)
        if not entropy_grad:
            ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    def backward(ctx, grad_logprob, grad_entropy):
        d_logprob, d_entropy = ctx.saved_tensors
        grad = None
        if grad_logprob is not None:
            grad = grad_logprob.unsqueeze(1).to(d_logprob.dtype) * d_logprob
        if grad_entropy is not None and d_entropy is not None:
            extra = grad_entropy.unsqueeze(1).to(d_entropy.dtype) * d_entropy
            grad = extra if grad is None else grad.add_(extra)
        return grad, None, None, None, None, None, None, None, None, None
