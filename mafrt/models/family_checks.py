"""What a model of any family can do, found out by short passes when it is loaded.

The fast paths of this library are written for families that are known. A new one is tried: each question is put to the
model with a few tokens, and an answer that differs from its own plain forward means "not this way", never an error.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from mafrt.core.errors import ModelError
from mafrt.core.text import error_line
from mafrt.models import delta_rule, logprobs
from mafrt.models.adapter_routing import AdapterRouting
from mafrt.models.checkpoint_class import has_towers
from mafrt.models.compute import compute_for

log = logging.getLogger(__name__)

KNOWN = ("gemma2", "gemma3_text", "llama", "mistral", "phi3", "qwen2", "qwen3")
"""families whose every path has tests of its own"""
TOLERANCE = 1e-3
"""largest difference of two hidden states, relative to the largest number in them; a wrong way is off by much more"""

BOTH_WAYS = {"is_causal": (False,), "use_bidirectional_attention": (True, "all")}
"""settings of transformers, and the values by which a decoder reads both ways"""


class StatesBeforeHead(Exception):
    """Carries hidden states out of a forward pass."""

    def __init__(self, states: Tensor) -> None:
        self.states = states


@contextmanager
def stopped_before(head: nn.Module) -> Iterator[None]:
    """Within it, a pass that reaches `head` raises StatesBeforeHead with the head's input."""

    def stop(module: nn.Module, given: tuple[Any, ...]) -> None:
        raise StatesBeforeHead(given[0])

    handle = head.register_forward_pre_hook(stop)
    try:
        yield
    finally:
        handle.remove()


def arguments(forward: Callable[..., Any]) -> frozenset[str] | None:
    """Names of the arguments that a forward takes; None: any."""
    parameters = inspect.signature(forward).parameters.values()
    if any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters):
        return None
    return frozenset(each.name for each in parameters)


def cache_name(forward: Callable[..., Any]) -> str:
    """Name of the argument, and of the output, that holds the cache."""
    names = inspect.signature(forward).parameters
    return next((name for name in ("past_key_values", "cache_params", "state") if name in names), "past_key_values")


def steady_window(config: Any) -> int | None:
    """Tokens up to which a row computes the same whatever its neighbours, where that is not the whole window.

    With LongRoPE (Phi-3 and 4) transformers chooses one of two sets of angles by the longest row of a batch.
    """
    rope = getattr(config, "rope_parameters", None) or {}
    return int(rope["original_max_position_embeddings"]) if rope.get("rope_type") == "longrope" else None


def _head_size(base: Any) -> int:
    if base.head is None:
        raise ValueError("no output layer")
    return int(base.head_size)


@torch.no_grad()
def settle(base: Any) -> None:
    """Choose the paths of a family that is not known.

    Args:
        base: a SharedBase, whose module imports this one.

    Raises:
        ModelError: the model is no causal language model that adapters can be trained on; the reason is named.
    """
    if not (known := base.config.model_type in KNOWN):
        delta_rule.quicken(base.model, compute_for)
    try:
        ids = torch.randint(min(_head_size(base), 1000), (2, 9), generator=torch.Generator().manual_seed(0)).to(
            base.device
        )
        logits = _of_model(base, ids)
    except Exception as error:  # whatever its forward raises
        raise ModelError(
            f"{base.name} ({base.config.model_type}) cannot read text alone: found {error_line(error)}; expected a "
            "causal language model"
        ) from error
    if getattr(base.model, "is_quantized", False):
        # LLM.int8 takes whole columns apart for one large number at any token: only the configuration can be asked.
        causal = not any(getattr(base.config, name, None) in values for name, values in BOTH_WAYS.items())
    else:
        causal = close(_tried(lambda: _of_model(base, ids[:, :6])), logits[:, :6])
    if not causal and bool(logits.isnan().any()):  # which is unequal to itself
        raise ModelError(
            f"{base.name} ({base.config.model_type}) computes what is no number (NaN); expected weights and a "
            "config.json that belong together, and are whole; take another copy, or another --dtype"
        )
    if not causal:
        raise ModelError(
            f"{base.name} ({base.config.model_type}) is no causal language model: what it computes at a token depends "
            "on the tokens behind it; expected one that reads from left to right"
        )
    if known:  # its own settings may have it read both ways; all else is tested
        if has_towers(base.model.config):
            base.unrouted = _unrouted(base, ids)
        return
    named = base.logit_form

    def right(through_head: bool, *, search: bool) -> bool:
        base.through_head, base.logit_form = through_head, logprobs.PLAIN if search else named
        products = _tried(lambda: base.logits(_states(base, ids)))
        if search and products is not None:
            base.logit_form = logprobs.LogitForm.found(base.config, products, logits)
            products = base.logit_form(products)
        return close(products, logits)

    if base.packs and not (right(False, search=False) or right(False, search=True)):
        base.unpack()
    if not any(right(through_head, search=search) for search in (False, True) for through_head in (False, True)):
        raise ModelError(
            f"{base.name} ({base.config.model_type}): its logits are not its output layer applied to hidden states, "
            "perhaps scaled or capped; such models cannot be trained here"
        )
    base.unrouted = _unrouted(base, ids)
    if not _learns(base, ids):
        raise ModelError(
            f"{base.name} ({base.config.model_type}): no gradient reaches its linear layers, since its backward pass "
            "is one of its own; such models cannot be trained here"
        )
    base.fused = _of_interface(base, ids)
    if base.packs:
        expected = _states(base, ids)
        real = (torch.arange(9) < torch.tensor([[6], [9]])).to(ids)
        found = _tried(lambda: base.forward(ids, real, torch.tensor([-1, -1])))
        if found is None or not (close(found[0, :6], expected[0, :6]) and close(found[1], expected[1])):
            log.info("%s: rows are padded and not packed, since its layers see neighbours otherwise", base.name)
            base.unpack()
    base.continues = not base.packs and not base.through_head and _continues(base, ids)


@contextmanager
def tokens_seen(base: Any) -> Iterator[dict[str, list[int]]]:
    """Within it, the numbers of tokens that each linear layer is called with are noted by its path."""
    linears, seen = base.linear_paths(), dict[str, list[int]]()

    def hook(path: str) -> Callable[..., None]:
        def note(module: nn.Module, given: tuple[Any, ...]) -> None:
            seen.setdefault(path, []).append(given[0].numel() // linears[path][0] if given else 0)

        return note

    handles = [base.model.get_submodule(path).register_forward_pre_hook(hook(path)) for path in linears]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def _unrouted(base: Any, ids: Tensor) -> frozenset[str]:
    """Linear layers that are not called with every token, so that no adapter can act on them by token: experts of
    which each sees a few, weights that a kernel reads past their module, groups of channels."""
    with tokens_seen(base) as seen:
        # Rows of their own, which a batch that is not packed lays out as it is.
        base.forward(ids, None, torch.full((len(ids),), -1))
    return frozenset(path for path in base.linear_paths() if min(seen.get(path, [0])) != ids.numel())


def _learns(base: Any, ids: Tensor) -> bool:
    """Whether a gradient reaches the linear layers on which adapters may act."""
    added: list[Tensor] = []

    def add(module: nn.Module, given: tuple[Any, ...], out: Any) -> Any:
        if not isinstance(out, Tensor):  # of a router
            return out
        added.append(torch.zeros((), dtype=out.dtype, device=out.device, requires_grad=True))
        return out + added[-1]

    handles = [base.model.get_submodule(path).register_forward_hook(add) for path in base.linear_paths()]
    try:
        with torch.enable_grad():
            states = base.forward(ids[:1], None, torch.tensor([-1]))
    finally:
        for handle in handles:
            handle.remove()
    # Whether it is recorded tells enough: a backward pass of a recurrence in plain torch takes many seconds.
    return bool(states.requires_grad) or not added


def _of_interface(base: Any, ids: Tensor) -> dict[str, tuple[int, int, int]]:
    """The parameters of experts that see every token and compute what `expert_lora` computes."""
    if not base.fused:
        return {}
    from mafrt.models.expert_lora import mixed

    routing, fine = AdapterRouting(ids.shape[0], ids.shape[1], torch.full((len(ids),), -1)), set[str]()

    def hook(path: str) -> Callable[..., None]:
        def compare(module: nn.Module, given: tuple[Any, ...], out: Any) -> None:
            every = len(given) == 3 and len(given[0]) == ids.numel()
            if every and close(_tried(lambda: mixed(module, {}, routing, (), *given)), out):
                fine.add(path)

        return compare

    holders = dict.fromkeys(path.rpartition(".")[0] for path in base.fused)
    handles = [base.model.get_submodule(path).register_forward_hook(hook(path)) for path in holders]
    try:
        base.forward(ids, None, torch.full((len(ids),), -1))
    finally:
        for handle in handles:
            handle.remove()
    return {path: sizes for path, sizes in base.fused.items() if path.rpartition(".")[0] in fine}


def _of_model(base: Any, ids: Tensor) -> Tensor:
    """The model's own logits of each row alone."""
    takes = arguments(base.model.forward)
    # Some that can read text cannot fill the cache that they make for themselves.
    bare = {"use_cache": False} if takes is None or "use_cache" in takes else {}
    return torch.cat([base.model(input_ids=row.unsqueeze(0), **bare).logits for row in ids])


def _continues(base: Any, ids: Tensor) -> bool:
    """Whether rows may go on from a beginning that they share."""
    from mafrt.models import shared_beginnings

    rows = torch.stack((ids[0], torch.cat((ids[0, :6], ids[1, 6:])), ids[1]))
    real, index = torch.ones(rows.shape, dtype=torch.bool), torch.full((len(rows),), -1)
    found = _tried(lambda: shared_beginnings.forward(base, rows, real, index, None, least=3))
    return close(found, _states(base, rows))


def _states(base: Any, ids: Tensor) -> Tensor:
    """Hidden states of each row alone."""
    return torch.cat([base.forward(row.unsqueeze(0), None, torch.tensor([-1])) for row in ids])


def _tried(compute: Callable[[], Tensor | None]) -> Tensor | None:
    try:
        return compute()
    except Exception as error:  # whatever a new family raises means that it does not work this way
        log.debug("tried in vain: %s: %s", type(error).__name__, error)
        return None


def close(found: Tensor | None, expected: Tensor) -> bool:
    """Whether two ways compute the same, up to rounding; None is a way that failed."""
    if found is None or found.shape != expected.shape:
        return False
    tolerance = TOLERANCE if expected.dtype == torch.float32 else 0.05
    return bool((found.float() - expected.float()).abs().max() <= tolerance * expected.float().abs().max())
