"""Play and learning of real dimensions on the pretended GPU: launches, waits and bytes, and the speed that they allow.

Two models of a few layers are measured, and the difference is what a layer costs: all of it grows with the layers, and
nothing else does.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from bench._gpu.models import random_base
from bench._gpu.pretend_cuda import PretendCuda
from mafrt.config.agent import AgentSpec
from mafrt.config.team import Team
from mafrt.config.train_config import LearnConfig
from mafrt.core.types import Request, SamplingParams, Turn
from mafrt.engines.local.engine import LocalEngine
from mafrt.models.memory_estimate import ModelShape
from mafrt.training.learner import Learner
from mafrt.training.policy_objective import Objective

NUMBERS = 2**17
"""elements of the largest tensor whose numbers are computed"""
LAYERS = (2, 4)
"""of the two models that are measured"""


@dataclass(frozen=True)
class Cost:
    """Of one piece of work on the device."""

    launches: float
    waits: float
    live: float
    """bytes after it, beside what was there before"""
    peak: float
    """bytes at its peak, beside what was there before"""

    def at(self, other: Cost, layers: tuple[int, int], asked: int) -> Cost:
        """Of `asked` layers, from this cost and another with these numbers of layers."""
        share = (asked - layers[0]) / (layers[1] - layers[0])
        pairs = zip(vars(self).values(), vars(other).values(), strict=True)
        return Cost(*(few + share * (many - few) for few, many in pairs))


def of_layers(shape: ModelShape, measure: Callable[[ModelShape], dict[str, Cost]]) -> dict[str, Cost]:
    """The costs of all layers of a shape."""
    few, many = (measure(replace(shape, layers=layers)) for layers in LAYERS)
    return {name: few[name].at(many[name], LAYERS, shape.layers) for name in few}


class _Meter:
    def __init__(self, gpu: PretendCuda) -> None:
        self.gpu, self.before, self.costs = gpu, gpu.live, dict[str, Cost]()

    def __call__(self, name: str, work: Callable[[], Any]) -> Any:
        self.gpu.clear()
        done = work()
        gpu = self.gpu
        self.costs[name] = Cost(gpu.launched, gpu.waited, gpu.live - self.before, gpu.peak - self.before)
        return done


def play(shape: ModelShape, adapters: int, rows: int, context: int, **sampling: Any) -> dict[str, Cost]:
    """A prefill of `rows` prompts of `context` tokens, the first step, one more, a request that joins, and its step."""
    rng = random.Random(0)

    def requests(first: int, count: int, length: int) -> dict[int, Request]:
        made = {}
        for row in range(first, first + count):
            how = SamplingParams(max_new_tokens=64, **sampling)
            prompt = [rng.randrange(1, shape.vocabulary) for _ in range(length)]
            made[row] = Request(prompt, f"agent{row % adapters}" if adapters else None, how, seed=row)
        return made

    with PretendCuda(NUMBERS) as gpu, torch.no_grad():
        base = random_base(shape, adapters, device="cuda", dtype=torch.bfloat16)
        engine = LocalEngine(base, eos_ids=())
        meter = _Meter(gpu)
        batch = meter("prefill", lambda: engine.begin(requests(0, rows, context)))
        meter("first step", batch.step)
        meter("step", batch.step)
        meter("join", lambda: engine.join(batch, requests(rows, 1, context)))
        meter("step after it", batch.step)
    return meter.costs


def learn(
    shape: ModelShape, adapters: int, *, prompts: int, prompt: int, answers: int, answer: int, checkpointing: bool
) -> dict[str, Cost]:
    """One update of all adapters from `prompts` x `answers` turns, in one micro-batch."""
    tokens = prompts * (prompt + answers * answer)
    with PretendCuda(NUMBERS) as gpu:
        base = random_base(shape, adapters, device="cuda", dtype=torch.bfloat16, window=2**15)
        base.gradient_checkpointing(checkpointing)
        names = [f"agent{number}" for number in range(adapters)]
        meter = _Meter(gpu)
        settings = LearnConfig(ppo_epoch=1, micro_batch_tokens=tokens, gradient_checkpointing=checkpointing)
        team = Team(tuple(AgentSpec(name=name, adapter=name) for name in names))
        learner = Learner(base, team, settings, Objective(), seed=0)
        turns = turns_of(shape, adapters, prompts, prompt, answers, answer)
        for name in ("first update", "update"):
            meter(name, lambda: learner.update(turns, names, 0))
    return meter.costs


def turns_of(shape: ModelShape, adapters: int, prompts: int, prompt: int, answers: int, answer: int) -> list[Turn]:
    """Turns with advantages, `answers` to each prompt, adapters in turn."""
    rng, made = random.Random(0), []
    for number in range(prompts):
        ids = [rng.randrange(1, shape.vocabulary) for _ in range(prompt)]
        for _ in range(answers):
            out = [rng.randrange(1, shape.vocabulary) for _ in range(answer)]
            told: dict[str, Any] = {"text": "x", "stop": "eos", "turn": 0, "env_step": 0, "adapter_version": 0}
            turn = Turn(
                agent=f"agent{number % adapters}", prompt_ids=ids, action_ids=out, logprobs=[-1.0] * answer, **told
            )
            turn.advantages = [rng.gauss(0, 1)] * answer
            made.append(turn)
    return made
