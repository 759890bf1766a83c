"""Other ways to decode the requests of `bench rollout`: PEFT's, `generate`'s, and a bare loop around PEFT's forward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor

from bench import _measure
from bench._models import Rivals
from mafrt.core.types import Request, SamplingParams
from mafrt.engines.local.engine import LocalEngine
from mafrt.models.shared_base import SharedBase

Tokens = list[list[int]]
Rival = Callable[[], Tokens]
PEFT_WAYS = ("switching", "names", "names_loop")


def team_rivals(models: Rivals, requests: Sequence[Request], device: str) -> dict[str, Rival]:
    """All ways to decode requests with their adapters, greedily, and the bare base on the same prompts."""
    engine, peft = LocalEngine(models.base, eos_ids=()), models.peft
    bare = [replace(request, adapter=None) for request in requests]
    names = [str(r.adapter) for r in requests]
    groups = {name: [i for i, owner in enumerate(names) if owner == name] for name in sorted(set(names))}
    steps = requests[0].sampling.max_new_tokens
    everything = _left_padded([r.prompt_ids for r in requests], device)
    padded = {name: _left_padded([requests[i].prompt_ids for i in rows], device) for name, rows in groups.items()}

    def switching() -> Tokens:
        sampled: Tokens = [[] for _ in requests]
        for name, rows in groups.items():
            peft.set_adapter(name)
            for row, tokens in zip(rows, _generated(peft, padded[name], steps), strict=True):
                sampled[row] = tokens
        return sampled

    def by_names_loop() -> Tokens:
        with torch.no_grad(), peft._enable_peft_forward_hooks(adapter_names=names):
            return _greedy_loop(peft.get_base_model(), *everything, steps).tolist()

    return {
        "ours": lambda: said(engine, requests),
        "bare": lambda: said(engine, bare),
        "switching": switching,
        "names": lambda: _generated(peft, everything, steps, adapter_names=names),
        "names_loop": by_names_loop,
    }


def generate_rivals(models: Rivals, requests: Sequence[Request], device: str) -> dict[str, Rival]:
    """The bare base and transformers' `generate` on the same prompts, greedy and sampled."""
    engine, steps = LocalEngine(models.base, eos_ids=()), requests[0].sampling.max_new_tokens
    padded = _left_padded([request.prompt_ids for request in requests], device)
    sampled = at_temperature_1(requests)
    drawn: dict[str, Any] = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
    return {
        "greedy": lambda: said(engine, requests),
        "generate greedy": lambda: _generated(models.plain, padded, steps),
        "sampled": lambda: said(engine, sampled),
        "generate sampled": lambda: _generated(models.plain, padded, steps, **drawn),
    }


def at_temperature_1(requests: Sequence[Request]) -> list[Request]:
    """The same requests, sampled from the model's whole distribution."""
    return [
        replace(r, sampling=SamplingParams(max_new_tokens=r.sampling.max_new_tokens, temperature=1.0)) for r in requests
    ]


def said(engine: LocalEngine, requests: Sequence[Request]) -> Tokens:
    return [completion.ids for completion in engine.generate(requests)]


def logits_after(model: Any, request: Request, ids: list[int], device: str) -> Tensor:
    """transformers' logits `[tokens, V]` where the answer's tokens were sampled."""
    whole = torch.tensor([[*request.prompt_ids, *ids[:-1]]], device=device)
    with torch.no_grad():
        hidden = model.model(input_ids=whole, use_cache=False).last_hidden_state
        return cast(torch.Tensor, model.lm_head(hidden[0, len(request.prompt_ids) - 1 :]))


def check_greedy(base: SharedBase, requests: Sequence[Request], ours: Tokens, rivals: dict[str, Tokens]) -> int:
    """Raise Disagreement unless all rivals give our tokens.

    Rows may part where two logits are equal to within rounding; returns how often they did.
    """
    ties = 0
    for name, answers in rivals.items():
        for request, mine, theirs in zip(requests, ours, answers, strict=True):
            if mine == theirs:
                continue
            place = next((i for i, (a, b) in enumerate(zip(mine, theirs, strict=False)) if a != b), None)
            if place is None:
                raise _measure.Disagreement(f"{name}: found {len(theirs)} tokens, expected {len(mine)}; not timed")
            ids = torch.tensor([[*request.prompt_ids, *mine[:place]]], device=base.device)
            with torch.no_grad():
                hidden = base.forward(ids, None, torch.tensor([base.adapter_index(request.adapter)]))
                logits = base.logits(hidden[0, -1])
            two = logits[[mine[place], theirs[place]]]
            _measure.agree(f"{name} token {place}", two[0], two[1], tolerance=1e-4 * float(logits.abs().max()))
            ties += 1
    return ties


def forget_end_tokens(models: Rivals) -> None:
    """Give `generate` no end token and no cut of unlikely tokens, which a model's own settings may have."""
    from transformers import GenerationConfig

    for model in (models.plain, models.peft, models.peft.get_base_model()):
        model.generation_config = GenerationConfig(pad_token_id=0)


def _generated(model: Any, padded: tuple[Tensor, Tensor], steps: int, **more: Any) -> Tokens:
    ids, mask = padded
    settings: dict[str, Any] = {"do_sample": False, "max_new_tokens": steps, **more}
    out = model.generate(input_ids=ids, attention_mask=mask, **settings)
    return list(out[:, ids.shape[1] :].tolist())


def _left_padded(prompts: Sequence[Sequence[int]], device: str) -> tuple[Tensor, Tensor]:
    width = max(len(p) for p in prompts)
    ids = torch.tensor([[0] * (width - len(p)) + list(p) for p in prompts])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
    return ids.to(device), mask.to(device)


def _greedy_loop(model: Any, ids: Tensor, mask: Tensor, steps: int) -> Tensor:
    """Greedy decoding with nothing around the model's forward; `[rows, steps]`."""
    from transformers.cache_utils import DynamicCache

    cache, tokens = DynamicCache(), []
    position = (mask.cumsum(1) - 1).clamp(min=0)
    for _ in range(steps):
        hidden = model.model(
            input_ids=ids, attention_mask=mask, position_ids=position, past_key_values=cache, use_cache=True
        ).last_hidden_state
        ids = model.lm_head(hidden[:, -1]).argmax(1, keepdim=True)
        tokens.append(ids)
        mask = torch.cat((mask, mask.new_ones(len(mask), 1)), 1)
        position = position[:, -1:] + 1
    return torch.cat(tokens, 1)
