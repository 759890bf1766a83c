"""Linear layers that hold every agent's LoRA pair.

One batch may mix rows of different agents, of the reference policy and of the critic (both: no adapter). One
`AdapterRouting` per forward pass says which adapter acts on which token.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from mafrt.models.adapter_routing import AdapterRouting, LoraContext
from mafrt.models.compute import compute_for


class StackedLoRALinear(nn.Module):
    """A frozen linear layer and the LoRA pairs of all adapters that target it.

    `base_layer` is any module that maps `[..., in]` to `[..., out]`, perhaps quantised. Adapter parameters are float32
    whatever the base is; they are used in the input's dtype.
    """

    def __init__(self, base_layer: nn.Module, in_features: int, out_features: int, context: LoraContext) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.in_features, self.out_features = in_features, out_features
        self.context = context
        self.lora_A, self.lora_B = nn.ParameterDict(), nn.ParameterDict()
        self.pairs: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}
        self.ranks: dict[int, int] = {}
        self.scalings: dict[int, float] = {}
        self._stacked: tuple[object, Tensor, Tensor] | None = None
        self.faster: Any = None
        """what a faster form keeps of this layer"""

    @property
    def weight(self) -> Any:
        """The frozen layer's weight, possibly quantised; some models read its dtype or device."""
        return self.base_layer.weight

    @property
    def bias(self) -> Any:
        return self.base_layer.bias

    def add(self, adapter: int, rank: int, scaling: float, seed: str) -> None:
        """Give adapter number `adapter` a pair here: A uniform as PEFT draws it (seeded by `seed`), B zero."""
        pair = new_pair(rank, self.in_features, self.out_features, self.context.device or self.weight.device, seed)
        if not self.context.sharded:  # a registered parameter would be sharded along with the module
            self.lora_A[str(adapter)], self.lora_B[str(adapter)] = pair
        self.pairs[adapter], self.ranks[adapter], self.scalings[adapter] = pair, rank, scaling

    def drop_cache(self) -> None:
        self._stacked = None
        if self.faster is not None:
            self.faster.forget()

    def forward(self, x: Tensor) -> Tensor:
        routing = self.context.routing
        if routing is None:
            return cast(Tensor, self.base_layer(x))
        if (tokens := x.shape[:-1].numel()) != routing.rows * routing.steps:
            routing = routing.over(tokens)
        return compute_for(x.device.type).adapted_linear(self, x, routing)

    def adapted(self, x: Tensor, routing: AdapterRouting) -> Tensor:
        """`y = W x + b + sum_k [the token is adapter k's] scaling_k B_k A_k x`: `[..., in]` -> `[..., out]`.

        LoRA as of Hu et al. 2021 (arXiv:2106.09685), equation 3. The A of all adapters are one matrix `[R, in]` and
        the B one `[out, R]`; between the two products a mask keeps the ranks of each token's own adapter.
        """
        out: Tensor = self.base_layer(x)
        layout = tuple((k, self.ranks[k], self.scalings[k]) for k in routing.present if k in self.pairs)
        if not layout:
            return out
        down, up = self.stacked(routing, [k for k, _, _ in layout], x.dtype)
        tokens = x.reshape(routing.rows, routing.steps, self.in_features)
        low = F.linear(tokens, down) * routing.mask(layout, x)
        return out + F.linear(low, up).view(out.shape)

    def stacked(self, routing: AdapterRouting, adapters: list[int], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """A `[R, in]` and B `[out, R]` of some adapters; kept for the pass, and between passes that record nothing."""
        # Detached and not skipped: an adapter that does not learn acts all the same, and passes gradients on.
        pairs = [self.pairs[k] if routing.learns(k) else tuple(p.detach() for p in self.pairs[k]) for k in adapters]
        if torch.is_grad_enabled():
            # The recomputation of a checkpointed block has the routing of the pass, and takes what that has made.
            key = (self, dtype)
            if key not in routing.derived:
                joined = torch.cat([a for a, _ in pairs]), torch.cat([b for _, b in pairs], 1)
                routing.derived[key] = tuple(t.to(dtype) for t in joined)
            pair: tuple[Tensor, Tensor] = routing.derived[key]
            return pair
        # Torch counts the writes to a tensor, so that a change shows that was not announced.
        state = (tuple(adapters), dtype, sum(a._version + b._version for a, b in pairs))
        last = self._stacked  # a local reference: another thread may replace it at any moment
        if last is None or last[0] != state:
            down, up = torch.cat([a for a, _ in pairs]).to(dtype), torch.cat([b for _, b in pairs], 1).to(dtype)
            self._stacked = last = (state, down, up)
        return last[1], last[2]


def initial_a(rank: int, in_features: int, seed: str) -> Tensor:
    """A new adapter's A `[rank, in]`, on the CPU, as PEFT draws it; a function of the seed alone."""
    bits = hashlib.sha256(seed.encode()).digest()[:8]
    # A generator of its own, seeded by name and layer: an adapter begins the same whatever others were added before it.
    generator = torch.Generator().manual_seed(int.from_bytes(bits, "little") >> 1)
    # Drawn on the CPU, so that a GPU begins with the same weights.
    a = torch.empty(rank, in_features)
    nn.init.kaiming_uniform_(a, a=math.sqrt(5), generator=generator)
    return a


def new_pair(
    rank: int, in_features: int, out_features: int, device: torch.device, seed: str
) -> tuple[nn.Parameter, nn.Parameter]:
    """A `[rank, in]`, as `initial_a` draws it, and B `[out, rank]`, zero."""
    a = initial_a(rank, in_features, seed)
    return nn.Parameter(a.to(device)), nn.Parameter(torch.zeros(out_features, rank, device=device))


def set_checkpointing(inner: nn.Module, context: LoraContext, enabled: bool) -> None:
    """Wrap the `forward` of each decoder block so that its activations are recomputed in the backward pass.

    Hugging Face's own switch works in training mode only, and its recomputation would run after the forward has
    removed its routing; here each block keeps the routing for its recomputation.
    """
    for block in decoder_blocks(inner):
        # The wrapper is an attribute of the instance; without it the class's own forward is back.
        block.__dict__.pop("forward", None)
        if enabled:
            block.forward = _checkpointed(block.forward, context)


def decoder_blocks(inner: nn.Module) -> list[nn.Module]:
    """The decoder layers of a Hugging Face model; of one that reads images too, those that read text."""
    part = getattr(inner, "get_decoder", lambda: inner)()
    lists = [module for module in (part or inner).children() if isinstance(module, nn.ModuleList)]
    # The longest list holds them; a model may have other lists, such as those of experts.
    return [*max(lists, key=len, default=nn.ModuleList())]


def _checkpointed(forward: Callable[..., Any], context: LoraContext) -> Callable[..., Any]:
    def run(routing: AdapterRouting | None, *args: Any, **kwargs: Any) -> Any:
        with context.use(routing):
            return forward(*args, **kwargs)

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        # A block that appends to a cache must not run a second time.
        if not torch.is_grad_enabled() or kwargs.get("past_key_values") is not None:
            return forward(*args, **kwargs)
        # The base is in eval mode, without dropout, so no random state has to be restored.
        return checkpoint(run, context.routing, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)

    return wrapper
