"""Play and learning of real dimensions on the pretended GPU: launches, waits and bytes, and the speed that they allow.

Two models of a few layers are measured, and the difference is what a layer costs: all of it grows with the layers, and
nothing else does.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from bench._gpu.models import NAMES, of_periods, period, random_base
from bench._gpu.pretend_cuda import PretendCuda
from bench._gpu.speed import step_bytes
from mafrt.config.agent import AgentSpec
from mafrt.config.team import Team
from mafrt.config.train_config import LearnConfig
from mafrt.core.types import Request, SamplingParams, Turn
from mafrt.engines.local.engine import LocalEngine
from mafrt.models.logprobs import FrozenHead, token_logprobs
from mafrt.models.memory_estimate import MemoryInputs, ModelShape, activations, adapter_weights
from mafrt.models.shared_base import SharedBase
from mafrt.training.learner import Learner
from mafrt.training.policy_objective import Objective

NUMBERS = 2**17
"""elements of the largest tensor whose numbers are computed"""
PERIODS = (1, 2)
"""of the two models that are measured: a block, or the blocks between two with attention"""


@dataclass(frozen=True)
class Cost:
    """Of one piece of work on the device."""

    launches: float
    """by the host"""
    kernels: float
    """on the device; those of recorded work are one launch"""
    waits: float
    live: float
    """bytes after it, beside what was there before"""
    peak: float
    """bytes at its peak, beside what was there before"""

    def at(self, other: Cost, periods: tuple[int, int], asked: int) -> Cost:
        """Of `asked` periods, from this cost and another with these numbers of periods."""
        share = (asked - periods[0]) / (periods[1] - periods[0])
        pairs = zip(vars(self).values(), vars(other).values(), strict=True)
        return Cost(*(few + share * (many - few) for few, many in pairs))


def of_layers(shape: ModelShape, measure: Callable[[ModelShape], dict[str, Cost]]) -> dict[str, Cost]:
    """The costs of all layers of a shape."""
    few, many = (measure(of_periods(shape, periods)) for periods in PERIODS)
    return {name: few[name].at(many[name], PERIODS, shape.layers // period(shape)) for name in few}


class Meter(Protocol):
    """What a piece of work costs, under a name."""

    costs: dict[str, Cost]

    def __call__(self, name: str, work: Callable[[], Any]) -> Any: ...


class _PretendedMeter:
    def __init__(self, gpu: PretendCuda) -> None:
        self.gpu, self.before, self.costs = gpu, gpu.live, dict[str, Cost]()

    def __call__(self, name: str, work: Callable[[], Any]) -> Any:
        self.gpu.clear()
        done = work()
        gpu = self.gpu
        kernels = gpu.launched + gpu.recorded.total()
        self.costs[name] = Cost(gpu.launched, kernels, gpu.waited, gpu.live - self.before, gpu.peak - self.before)
        return done


def play(shape: ModelShape, adapters: int, rows: int, context: int, **sampling: Any) -> dict[str, Cost]:
    """`played` on the pretended GPU."""
    with PretendCuda(NUMBERS) as gpu, torch.no_grad():
        base = random_base(shape, adapters, device="cuda", dtype=torch.bfloat16)
        return played(base, _PretendedMeter(gpu), adapters, rows, context, **sampling)


def played(base: SharedBase, meter: Meter, adapters: int, rows: int, context: int, **sampling: Any) -> dict[str, Cost]:
    """A prefill of `rows` prompts of `context` tokens, the first step, others, a request that joins, its step."""
    rng, vocabulary = random.Random(0), base.config.vocab_size

    def requests(first: int, count: int, length: int) -> dict[int, Request]:
        made = {}
        for row in range(first, first + count):
            how = SamplingParams(max_new_tokens=64, **sampling)
            prompt = [rng.randrange(1, vocabulary) for _ in range(length)]
            made[row] = Request(prompt, f"agent{row % adapters}" if adapters else None, how, seed=row)
        return made

    engine = LocalEngine(base, eos_ids=())
    batch = meter("prefill", lambda: engine.begin(requests(0, rows, context)))
    for number in range(7):  # the later ones are recorded
        meter("step" if number else "first step", batch.step)
    meter("join", lambda: engine.join(batch, requests(rows, 1, context)))
    meter("step after it", batch.step)
    return meter.costs


def learn(shape: ModelShape, adapters: int, *, checkpointing: bool, **size: int) -> dict[str, Cost]:
    """`learnt` on the pretended GPU."""
    with PretendCuda(NUMBERS) as gpu:
        base = random_base(shape, adapters, device="cuda", dtype=torch.bfloat16, window=2**15)
        return learnt(base, _PretendedMeter(gpu), adapters, checkpointing=checkpointing, **size)


def learnt(
    base: SharedBase,
    meter: Meter,
    adapters: int,
    *,
    prompts: int,
    prompt: int,
    answers: int,
    answer: int,
    checkpointing: bool,
) -> dict[str, Cost]:
    """Two updates of all adapters from `prompts` x `answers` turns, in one micro-batch."""
    tokens = prompts * (prompt + answers * answer)
    base.gradient_checkpointing(checkpointing)
    names = [f"agent{number}" for number in range(adapters)]
    settings = LearnConfig(ppo_epoch=1, micro_batch_tokens=tokens, gradient_checkpointing=checkpointing)
    team = Team(tuple(AgentSpec(name=name, adapter=name) for name in names))
    learner = Learner(base, team, settings, Objective(), seed=0)
    turns = turns_of(base.config.vocab_size, adapters, prompts, prompt, answers, answer)
    for name in ("first update", "update"):
        meter(name, lambda: learner.update(turns, names, 0))
    base.gradient_checkpointing(False)
    return meter.costs


def turns_of(vocabulary: int, adapters: int, prompts: int, prompt: int, answers: int, answer: int) -> list[Turn]:
    """Turns with advantages, `answers` to each prompt, adapters in turn."""
    rng, made = random.Random(0), []
    for number in range(prompts):
        ids = [rng.randrange(1, vocabulary) for _ in range(prompt)]
        for _ in range(answers):
            out = [rng.randrange(1, vocabulary) for _ in range(answer)]
            told: dict[str, Any] = {"text": "x", "stop": "eos", "turn": 0, "env_step": 0, "adapter_version": 0}
            turn = Turn(
                agent=f"agent{number % adapters}", prompt_ids=ids, action_ids=out, logprobs=[-1.0] * answer, **told
            )
            turn.advantages = [rng.gauss(0, 1)] * answer
            made.append(turn)
    return made


LAUNCH_S, KERNEL_S, BYTES_S = 10e-6, 2.5e-6, 2.9e12
"""seconds that the host needs for a launch, and a kernel on the device however small it is; bytes that the device reads
in a second: of an H100"""


def decode_row(name: str, adapters: int, rows: int = 16, context: int = 1024) -> dict[str, Any]:
    """A line of the table: a decode step, its modelled speed, and that of a step that only reads its bytes."""
    shape = NAMES[name]
    costs = of_layers(shape, lambda few: play(few, adapters, rows, context))
    step, first = costs["step"], costs["first step"]
    least = step_bytes(shape, rows, context, 2) / BYTES_S
    seconds = max(LAUNCH_S * step.launches, KERNEL_S * step.kernels, least)
    return {
        "model": name,
        "K": adapters,
        "launches": round(step.launches),
        "kernels": round(step.kernels),
        "waits": round(step.waits),
        "more in the first step": round(first.kernels - step.kernels),
        "GB beside the base": round(step.live / 1e9, 2),
        "tokens/s": round(rows / seconds),
        "roofline": round(rows / least),
    }


def update_size(adapters: int) -> dict[str, int]:
    """Of the update in the table: 256 tokens a prompt, with 4 answers of 256."""
    return {"prompts": max(4, adapters), "prompt": 256, "answers": 4, "answer": 256}


def update_row(name: str, adapters: int) -> dict[str, Any]:
    """A line of the table: an update from 4 prompts of 256 tokens with 4 answers of 256 each, checkpointed."""
    shape = NAMES[name]
    size = update_size(adapters)
    cost = of_layers(shape, lambda few: learn(few, adapters, checkpointing=True, **size))["update"]
    tokens, formula = update_bytes(shape, adapters)
    return {
        "model": name,
        "K": adapters,
        "tokens": tokens,
        "launches": round(cost.launches),
        "waits": round(cost.waits),
        "peak, GB": round(cost.peak / 1e9, 2),
        "formula, GB": round(formula / 1e9, 2),
    }


def update_bytes(shape: ModelShape, adapters: int) -> tuple[int, float]:
    """Tokens of the update in the table, and what `mafrt info --memory` counts for it beside what was there."""
    tokens = update_size(adapters)["prompts"] * (256 + 4 * 256)
    use = MemoryInputs(agents=adapters, micro_batch_tokens=tokens, rows=0)
    # The weights, float32, were there before.
    return tokens, activations(shape, use, 2) + 16 * adapters * adapter_weights(shape, use)


def head(tokens: int = 6144, vocabulary: int = 151936, hidden: int = 2560, *, entropy: bool = False) -> Cost:
    """Log-probabilities of tokens, with their gradients."""
    with PretendCuda(NUMBERS) as gpu:
        weight = torch.empty(vocabulary, hidden, dtype=torch.bfloat16, device="cuda")
        states = torch.empty(tokens, hidden, dtype=torch.bfloat16, device="cuda", requires_grad=True)
        targets = torch.zeros(tokens, dtype=torch.long, device="cuda")
        meter = _PretendedMeter(gpu)
        kept = meter("head", lambda: token_logprobs(states, targets, FrozenHead(weight), entropy_grad=entropy))
        del kept
    return meter.costs["head"]
