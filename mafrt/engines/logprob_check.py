"""Does an engine sample from the trainer's own model? Asked before the first turn of a run.

Three things would otherwise go unnoticed for a whole run: another base, log-probabilities of another distribution than
the one sampled from, and adapters that are accepted and then not applied, or not replaced. So the team's adapters get
known weights with a visible effect, the engine samples a few tokens with each, and the log-probabilities that it
reports are compared with those the trainer computes for the same tokens; twice, so that the second weights have to
replace the first under the same prompt. The adapters are then as they were.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mafrt.core.errors import ModelError
from mafrt.core.seeding import seed_of
from mafrt.core.types import Completion, Request, SamplingParams
from mafrt.engines import Engine
from mafrt.models.compute import truncate

if TYPE_CHECKING:
    from mafrt.models.shared_base import SharedBase

PROMPT_TOKENS = 24
ANSWER_TOKENS = 8
EXACT_NATS = 1e-3
"""Mean difference of log-probabilities that two float32 implementations of one model may have."""
HALF_NATS = 0.15
"""The same in bfloat16 or float16, where some tokens differ by more, and most by a tenth of this."""
EDGE = 4.0
"""A single token may be this many times the mean difference less likely than the last one that top-k and top-p keep."""
EFFECT_NATS = 0.5
"""Mean change of log-probabilities that the known weights make; far above both bounds."""
LEAST_EFFECT = 5
"""The same in those bounds, where no weights change more: some heads make all logits small (Cohere's `logit_scale`)."""

PLAIN = SamplingParams(max_new_tokens=ANSWER_TOKENS)
CUT = SamplingParams(max_new_tokens=ANSWER_TOKENS, temperature=0.7, top_k=8, top_p=0.8)


@dataclass(frozen=True)
class SelfCheck:
    """Measurements of a check."""

    base_nats: float
    """mean difference between engine and trainer without an adapter"""
    adapter_nats: float
    """the largest over adapters of the mean difference with it"""
    effect_nats: float
    """the smallest over adapters of the change by its known weights"""


_VERSIONS_APART = 10**6
"""Added to the adapters' versions during a check: an engine that keeps weights by version must not take those of the
check for weights of the run."""


def self_check(engine: Engine, base: SharedBase, where: str = "vLLM", *, own: bool = False) -> SelfCheck:
    """Compare `engine` with `base`, adapter by adapter; `where` names the engine in an error.

    `own`: the engine is the user's, whatever it says of itself: one that does not take updates would otherwise train to
    the end and teach nothing.

    Raises:
        ModelError: they differ; the message names the difference.
    """
    bound = nats_apart(base)
    prompt = probe_prompt(base)
    before = {name: base.adapter_state(name) for name in base.adapters}
    versions = dict(base.versions)
    if own:
        base.versions.update({name: version + _VERSIONS_APART for name, version in versions.items()})
    try:
        base_nats = _check_base(engine, base, prompt, bound, where, own=own)
        gaps = [_check_adapters(engine, base, prompt, bound, where, number, users=own) for number in range(2)]
    finally:
        for name, state in before.items():
            base.load_adapter_state(name, state)
        base.versions.update(versions)
    return SelfCheck(base_nats, max((gap for gap, _ in gaps)), min((effect for _, effect in gaps)))


def nats_apart(base: SharedBase) -> float:
    """The mean difference per token that another implementation of the base may have."""
    return EXACT_NATS if base.model.dtype == torch.float32 else HALF_NATS


def probe_prompt(base: SharedBase) -> list[int]:
    """Ordinary tokens, the same for the same tokenizer; they mean nothing, so that no answer is near certain."""
    special = set(base.tokenizer.all_special_ids) | set(base.eos_ids)
    ordinary = [token for token in range(len(base.tokenizer)) if token not in special]
    generator = torch.Generator().manual_seed(seed_of("probe", len(ordinary)))
    picks = torch.randint(len(ordinary), (min(PROMPT_TOKENS, base.context_window // 2),), generator=generator)
    return [ordinary[place] for place in picks.tolist()]


def _check_base(engine: Engine, base: SharedBase, prompt: list[int], bound: float, where: str, *, own: bool) -> float:
    # An adapter beside it, so that a mixed batch is checked.
    others = [Request(prompt, name, PLAIN, seed=0) for name in list(base.adapters)[:1]]
    plain, cut, *_ = engine.generate([Request(prompt, None, PLAIN, 1), Request(prompt, None, CUT, 2), *others])
    gap = mean_gap(plain, trainer_logprobs(base, prompt, plain, None, PLAIN))
    if not gap <= bound:
        raise ModelError(
            f"{where} does not hold the base {base.name}: the log-probabilities of a probe prompt differ by {gap:.3g} "
            f"nats a token on average, expected at most {bound}; serve the same weights in {_dtype(base)}."
        )
    remedy = "start it with --logprobs-mode processed_logprobs."
    if own:
        remedy = "return log-probabilities after temperature, top-k and top-p."
    raw = mean_gap(cut, trainer_logprobs(base, prompt, cut, None, CUT))
    if not raw <= bound:
        raise ModelError(
            f"{where} gives log-probabilities of another distribution than it samples from (with temperature and top-p "
            f"they are off by {raw:.3g} nats); {remedy}"
        )
    return gap


def _check_adapters(
    engine: Engine, base: SharedBase, prompt: list[int], bound: float, where: str, number: int, *, users: bool
) -> tuple[float, float]:
    """The largest difference and the smallest effect over the adapters with their known weights `number`."""
    names = list(base.adapters)
    replaced = {name: base.adapter_state(name) for name in names}
    for name in names:
        put_known_weights(base, name, prompt, seed_of("known", name, number))
    answers = engine.generate([Request(prompt, name, PLAIN, seed=10 + place) for place, name in enumerate(names)])
    gaps, effects = [0.0], [math.inf]
    for name, answer in zip(names, answers, strict=True):
        expected = trainer_logprobs(base, prompt, answer, name, PLAIN)
        bare = trainer_logprobs(base, prompt, answer, None, PLAIN)
        gap, effect = mean_gap(answer, expected), float((expected - bare).abs().mean())
        if not gap <= bound:
            base.load_adapter_state(name, replaced[name])
            if mean_gap(answer, bare) <= bound:
                fault = f"adapter {name!r} changes nothing"
            elif mean_gap(answer, trainer_logprobs(base, prompt, answer, name, PLAIN)) <= bound:
                fault = f"an update of adapter {name!r} does not arrive"
            else:
                fault = f"adapter {name!r} is not applied as it was trained"
            remedy = "use another version of vLLM" if not users else "sample with the weights that the base holds now"
            raise ModelError(
                f"In {where}, {fault}: with known weights, log-probabilities differ from the trainer's by {gap:.3g} "
                f"nats a token on average, expected at most {bound}; {remedy}, or --engine local."
            )
        gaps.append(gap)
        effects.append(effect)
    return max(gaps), min(effects)


def put_known_weights(base: SharedBase, name: str, prompt: list[int], seed: int) -> None:
    """Random weights, as strong as it takes to move the log-probabilities of the prompt by `EFFECT_NATS` on average.

    The strongest where none move them so far, but well beyond what engines may differ by.
    """
    generator = torch.Generator().manual_seed(seed)
    state: dict[str, Tensor] = {}
    for key, tensor in base.adapter_state(name).items():
        # PEFT's A is [r, in], B is [out, r]: the product's entries are about 1 / sqrt(in) for inputs of size 1.
        state[key] = torch.randn(tensor.shape, generator=generator) / math.sqrt(tensor.shape[1])
    bare = _of_prompt(base, prompt, None)
    for doubling in range(24):
        scale = 2.0 ** (doubling - 8)
        weights = {key: (t * scale if ".lora_B." in key else t).to(torch.float32) for key, t in state.items()}
        base.load_adapter_state(name, weights)
        effect = float((_of_prompt(base, prompt, name) - bare).abs().mean())
        if effect >= EFFECT_NATS:
            return
    if effect < LEAST_EFFECT * nats_apart(base):
        raise ModelError(f"Adapter {name!r} has no effect on {base.name} with any weights; check its targets.")


@torch.no_grad()
def trainer_logprobs(
    base: SharedBase, prompt: list[int], answer: Completion, adapter: str | None, how: SamplingParams
) -> Tensor:
    """`[tokens]`: the trainer's log-probabilities of the answer, under the distribution that `how` samples from.

    Where rounding decides which token is the last one kept, the engine's choice stands for the trainer's.
    """
    logits = _logits(base, [*prompt, *answer.ids], adapter)[len(prompt) - 1 : -1] / how.temperature
    probs = logits.softmax(1)
    chosen = probs.gather(1, torch.tensor(answer.ids, device=probs.device).unsqueeze(1)).squeeze(1)
    if how.truncated:
        rows = len(probs)
        one, k, p = (torch.full((rows,), value, device=probs.device) for value in (1.0, how.top_k, how.top_p))
        truncated = probs.masked_fill(truncate(logits, one, k, p) == -math.inf, 0.0)
        last = truncated.where(truncated > 0, 1.0).amin(1)
        tied = (chosen < last) & (chosen >= last * math.exp(-EDGE * nats_apart(base)))
        chosen = chosen.where((chosen >= last) | tied, 0.0) / (truncated.sum(1) + (chosen - last).where(tied, 0.0))
    return chosen.log().cpu()


@torch.no_grad()
def _of_prompt(base: SharedBase, prompt: list[int], adapter: str | None) -> Tensor:
    logprobs = _logits(base, prompt, adapter)[:-1].log_softmax(1)
    return logprobs.gather(1, torch.tensor(prompt[1:], device=logprobs.device).unsqueeze(1)).squeeze(1).cpu()


def _logits(base: SharedBase, ids: list[int], adapter: str | None) -> Tensor:
    """`[tokens, V]`; a probe is short."""
    rows = torch.tensor([ids], device=base.device)
    return base.logits(base.forward(rows, None, torch.tensor([base.adapter_index(adapter)])))[0].float()


def mean_gap(answer: Completion, trainer: Tensor) -> float:
    """Mean absolute difference; infinity where the trainer would never have said it."""
    gap = (torch.tensor(answer.logprobs) - trainer).abs().mean()
    return float(gap) if math.isfinite(gap) else math.inf


def _dtype(base: SharedBase) -> str:
    return str(base.model.dtype).removeprefix("torch.")


def summary(checks: Mapping[str, SelfCheck]) -> str:
    """One line for the log, by engine."""
    return "; ".join(
        f"{where}: base within {check.base_nats:.1e} nats of the trainer, adapters within {check.adapter_nats:.1e} "
        f"(their known weights change {check.effect_nats:.2f})"
        for where, check in checks.items()
    )
