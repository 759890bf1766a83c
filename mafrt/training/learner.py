"""Policy updates: turns with advantages in, new adapter weights out.

One backward pass serves all learning adapters. Each adapter has its own optimizer, gradient norm and denominator
(the number of its own action tokens, or turns, in the whole mini-batch), so its gradient depends neither on the
micro-batch size nor on the other agents' turns.

With several processes (`base.processes`) every process receives the same turns, runs forward and backward on its share
of each mini-batch, sums the gradients with the others, and makes the same step.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional

from mafrt.config.team import Team
from mafrt.config.train_config import LearnConfig
from mafrt.core.errors import ConfigError
from mafrt.core.flat_tensors import on_cpu
from mafrt.core.progress import stage
from mafrt.core.seeding import permutation
from mafrt.core.types import Turn
from mafrt.models.out_of_memory import let_go, out_of_memory
from mafrt.models.precision import NO_FLOAT16
from mafrt.models.tensors import copies, largest
from mafrt.training.batch import Batch, MicroBatch, collate, micro_batches
from mafrt.training.lr_schedule import LrSchedule, signal_scale
from mafrt.training.optimizer_steps import make_optimizer_steps
from mafrt.training.optimizers import learn_settings
from mafrt.training.policy_objective import (
    Loss,
    LossBatch,
    LossDenominators,
    Objective,
    PolicyLoss,
    UpdateMetrics,
    zero_means_no_gradient,
)
from mafrt.training.step_control import probe, shrink, step_kl
from mafrt.training.token_scores import token_scores

if TYPE_CHECKING:
    from mafrt.models.shared_base import SharedBase

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class UpdateContext:
    """Arguments of one update, which may change from update to update."""

    adapter_of: Mapping[str, str]
    """agent -> its adapter"""
    kl_coef: float
    """weight of the KL to the reference in the loss"""
    weights: Sequence[float] | None = None
    """per turn of the batch: factor on its policy terms (HAPPO's compound ratio)"""
    entropy_share: float = 1.0
    """factor on the weight of the entropy bonus"""


class Learner:
    """Clipped policy-gradient updates of stacked adapters (PPO; Schulman 2017).

    Args:
        base: holds the adapters.
        team: its agents' adapters, which are the default for calls without their own mapping, and the adapters' own
            optimizer settings.
        learn: passes, mini-batches, micro-batches, and the optimizer settings of adapters without their own.
        objective: settings of the policy loss.
        seed: for the mini-batches.
        temperatures: sampling temperature of each agent; log-probabilities are computed at the same temperature.
            Default: 1.
        loss: loss of a micro-batch; default: the clipped policy loss of `objective`.
        lr_schedule: factor on the learning rates in an iteration.
        entropy_schedule: factor on the weight of the entropy bonus in an iteration.

    >>> base, team = mafrt.SharedBase.load("teaching-base"), mafrt.Team.of(["solver"])
    >>> base.add_adapter("solver", mafrt.LoraSpec(), seed=0)
    >>> objective = mafrt.Objective(mafrt.make_algorithm("grpo"))
    >>> learner = mafrt.Learner(base, team, mafrt.LearnConfig(lr=1e-3, ppo_epoch=1), objective, seed=0)
    >>> turn = mafrt.Turn("solver", [1], [2, 3], [-0.1, -0.1], "eos", "7", turn=0, env_step=0, adapter_version=0)
    >>> turn.advantages = [1.0, 1.0]  # `assign` does that
    >>> metrics = learner.update([turn], ["solver"], iteration=0)
    >>> learner, base.versions
    (<Learner of solver: learning rate 0.001>, {'solver': 1})
    """

    def __init__(
        self,
        base: SharedBase,
        team: Team,
        learn: LearnConfig,
        objective: Objective,
        seed: int,
        *,
        temperatures: Mapping[str, float] | None = None,
        loss: Loss | None = None,
        lr_schedule: LrSchedule = lambda _: 1.0,
        entropy_schedule: LrSchedule = lambda _: 1.0,
    ) -> None:
        if base.model.dtype == torch.float16:
            raise ConfigError(f"The base {base.name} is in float16, but {NO_FLOAT16}")
        self.base = base
        self.adapter_of = {agent.name: agent.adapter for agent in team.agents}
        self.temperatures = dict.fromkeys(team.names, 1.0) if temperatures is None else temperatures
        adapter_learn = learn_settings(team, learn)
        self.rates, self.lr_schedule = {name: settings.lr for name, settings in adapter_learn.items()}, lr_schedule
        self.entropy_schedule = entropy_schedule
        self.learn = learn
        self.objective = objective
        self.seed = seed
        self.steps = make_optimizer_steps(base, adapter_learn)
        self.optimizers = self.steps.optimizers
        self.loss = loss or PolicyLoss(objective)
        self.micro_batch_tokens = learn.micro_batch_tokens
        self.slowdown = 1.0
        """factor on all learning rates, lowered after a collapse of the held-out score"""

    def __repr__(self) -> str:
        rates = ", ".join(dict.fromkeys(str(rate) for rate in self.rates.values()))
        return f"<Learner of {', '.join(self.rates)}: learning rate {rates}>"

    @torch.no_grad()
    def logprobs(self, turns: Sequence[Turn], adapter_of: Mapping[str, str] | None = None) -> list[list[float]]:
        """Log-probabilities of the action tokens under the current adapters, one list per turn.

        Args:
            turns: any turns; one without action tokens gets an empty list.
            adapter_of: agent -> adapter; None: the constructor's.
        """
        adapter_of = self.adapter_of if adapter_of is None else adapter_of
        spoken = [turn for turn in turns if turn.action_ids]
        computed: dict[int, list[float]] = {}  # by position in `spoken`
        for part in micro_batches(spoken, self.micro_batch_tokens, self.base):
            batch = self._collate([spoken[row] for row in part.rows], adapter_of)
            logprobs, _ = self._logprobs(batch, ())
            if not part.dummy:
                computed |= dict(zip(part.rows, batch.scatter(logprobs), strict=True))
        if self.base.processes.size > 1:
            parts = self.base.processes.gather([[row, values] for row, values in computed.items()])
            computed = {row: values for part in parts for row, values in part}
        values_of = iter([computed[row] for row in range(len(spoken))])
        return [next(values_of) if turn.action_ids else [] for turn in turns]

    def recompute_logprobs(self, turns: Sequence[Turn], adapter_of: Mapping[str, str] | None = None) -> None:
        """Fill `old_logprobs` under the current adapters.

        Needed where the sampler's log-probabilities differ from the trainer's: truncated support (top-p, top-k), or
        another engine. Arguments as of `logprobs`.
        """
        for turn, values in zip(turns, self.logprobs(turns, adapter_of), strict=True):
            turn.old_logprobs = values

    def update(
        self,
        turns: Sequence[Turn],
        agents: Sequence[str],
        iteration: int,
        weights: Sequence[float] | None = None,
        *,
        adapter_of: Mapping[str, str] | None = None,
        kl_coef: float | None = None,
    ) -> dict[str, float]:
        """Update the adapters of `agents` with the advantages of their turns; all others stay bit-identical.

        Args:
            turns: the batch; those without advantages are ignored.
            agents: agents whose adapters learn.
            iteration: iterations completed before this one.
            weights: factor on the policy terms of each of `turns` (HAPPO's compound ratio).
            adapter_of: agent -> adapter; None: the constructor's.
            kl_coef: weight of the KL to the reference, if it is in the loss; None: the setting's.

        A mini-batch whose gradient for an adapter is not finite is skipped for it; an adapter that is not finite after
        the update is rolled back. Returns metrics by name (docs/runs.md), means over the turns that need a pass.
        """
        settings = self.objective.settings
        context = UpdateContext(
            self.adapter_of if adapter_of is None else adapter_of,
            0.0 if settings.kl_in != "loss" else settings.kl_coef if kl_coef is None else kl_coef,
            weights,
            self.entropy_schedule(iteration),
        )
        adapters = tuple(dict.fromkeys(context.adapter_of[agent] for agent in agents))
        learning = [
            row
            for row, turn in enumerate(turns)
            if turn.advantages is not None and turn.action_ids and turn.agent in agents
        ]
        metrics = UpdateMetrics(adapters)
        if not learning:
            return metrics.by_name() | {"epochs": 0.0}
        # For the rollback; adapters are small, so a copy is cheap.
        before = {name: copies(self.base.adapter_parameters(name)) for name in adapters}
        rates = {name: self.rate(name, iteration) for name in adapters}
        epochs = 0
        for epoch in range(self.learn.ppo_epoch):
            # From the iteration and epoch, not from a generator: a resumed run makes the same mini-batches.
            order = permutation(len(learning), self.seed, iteration, epoch)
            size = math.ceil(len(order) / self.learn.num_mini_batch)
            this_pass = UpdateMetrics(adapters)
            for at in range(0, len(order), size):
                rows = [learning[i] for i in sorted(order[at : at + size])]
                this_pass.merge(self._step(turns, rows, adapters, context, rates))
            if self.base.processes.size > 1:
                this_pass.gather(self.base.processes)
            metrics.merge(this_pass)
            epochs += 1
            # Compared after the merge over the processes, so that all of them end at the same epoch. Fewer passes then.
            if settings.target_kl is not None and this_pass.mean_kl() > settings.target_kl:
                break
        metrics.rollbacks += self._roll_back_nonfinite(before)
        by_name = metrics.by_name() | {"epochs": float(epochs)}
        if self.learn.step_kl is not None:
            by_name |= self._limit_step(turns, before, context, iteration)
        return by_name

    def _roll_back_nonfinite(self, before: Mapping[str, list[Tensor]]) -> int:
        """Restore the weights `before` of every adapter that is not finite any more; the number of them."""
        rollbacks = 0
        # Read together: a GPU would be waited for at every adapter, and at each of its hundreds of tensors.
        sizes = on_cpu([largest(self.base.adapter_parameters(name)) for name in before])
        for (name, weights), size in zip(before.items(), sizes, strict=True):
            if not torch.isfinite(size) and torch.isfinite(largest(weights)):
                self._roll_back(name, weights)
                rollbacks += 1
            elif not torch.isfinite(size):
                log.error("Adapter %s is not finite, and was not before the update; nothing is restored.", name)
        return rollbacks

    def rate(self, adapter: str, iteration: int) -> float:
        """Learning rate of an adapter in an iteration."""
        return self.rates[adapter] * self.lr_schedule(iteration) * self.slowdown

    def _limit_step(
        self, turns: Sequence[Turn], before: Mapping[str, list[Tensor]], context: UpdateContext, iteration: int
    ) -> dict[str, float]:
        """Scale back the update of every adapter that moved its policy by more than `step_kl`; metrics per adapter."""
        metrics: dict[str, float] = {}
        assert self.learn.step_kl is not None
        for name, weights in before.items():
            of_adapter = [turn for turn in turns if turn.action_ids and context.adapter_of.get(turn.agent) == name]
            chosen = probe(of_adapter, self.seed, iteration)
            old = [turn.logprobs if turn.old_logprobs is None else turn.old_logprobs for turn in chosen]

            def measure(chosen: list[Turn] = chosen, old: list[list[float]] = old, name: str = name) -> float:
                self.base.bump(name)
                return step_kl(old, self.logprobs(chosen, context.adapter_of))

            kl, share = shrink(self.base.adapter_parameters(name), weights, measure, self.learn.step_kl)
            metrics |= {f"step_kl/{name}": kl, f"step_kept/{name}": share}
        return metrics

    def _step(
        self,
        turns: Sequence[Turn],
        rows: list[int],
        adapters: Sequence[str],
        context: UpdateContext,
        rates: Mapping[str, float],
    ) -> UpdateMetrics:
        """One optimizer step per adapter from the mini-batch `rows` of `turns`, with these learning rates."""
        mini_batch = [turns[row] for row in rows]
        follows = self.learn.lr_follows_signal
        scales = signal_scale(mini_batch, lambda turn: context.adapter_of[turn.agent]) if follows else {}
        for name, rate in rates.items():
            # Set for every step, since schedule, slowdown and share of turns with a signal all change it.
            for group in self.optimizers[name].param_groups:
                group["lr"] = rate * scales.get(name, 1.0)
        kl_coefs = [self.objective.kl_coef(name, context.kl_coef) for name in adapters]
        silent = zero_means_no_gradient(self.loss, self.objective, kl_coefs) and not self.base.sharded
        passing = [row for row in rows if turns[row].has_signal] if silent else rows
        denominators = {name: LossDenominators() for name in adapters}
        # Over the whole mini-batch: turns without a signal need no pass, and are part of the mean all the same.
        for turn in mini_batch:
            denominators[context.adapter_of[turn.agent]].add(turn, self.objective)
        while True:
            self._clear(adapters)
            metrics = UpdateMetrics(adapters)
            parts = micro_batches([turns[row] for row in passing], self.micro_batch_tokens, self.base)
            try:
                with stage("learning", len(parts)) as advance:
                    for part in parts:
                        in_batch = MicroBatch([passing[row] for row in part.rows], part.dummy)
                        self._backward(turns, in_batch, denominators, metrics, context)
                        advance(1)
                break
            except RuntimeError as error:
                if not out_of_memory(error) or self.micro_batch_tokens < 64 or self.base.sharded:
                    raise  # a sharded pass is collective: the other processes are inside it and cannot restart
                let_go(error)
            self._use_less_memory()
        metrics.steps = 1
        # An adapter without turns in the mini-batch must not step: its momentum alone would move it.
        spoke = [name for name in adapters if denominators[name].turns]
        for name, norm in self.steps.step(spoke).items():
            if torch.isfinite(norm):
                # With a gradient of exactly 0 no step was made, so the weights and what is cached of them still hold.
                if norm > 0.0:
                    self.base.bump(name)
                metrics.add(name, "step", {"norm": norm, "count": torch.ones(())})
            else:
                metrics.skipped += 1
                log.warning("The gradient of adapter %s is not finite; this step is skipped for it.", name)
        self._clear(adapters)
        return metrics

    def _use_less_memory(self) -> None:
        """Halve the micro-batches: a gradient is a sum over turns, so theirs is the same."""
        self.micro_batch_tokens //= 2
        log.warning("Out of memory in the backward pass; micro_batch_tokens is now %d.", self.micro_batch_tokens)

    def _backward(
        self,
        turns: Sequence[Turn],
        micro_batch: MicroBatch,
        denominators: Mapping[str, LossDenominators],
        metrics: UpdateMetrics,
        context: UpdateContext,
    ) -> None:
        """Accumulate the gradient of one micro-batch of `turns`; `denominators` cover the whole mini-batch."""
        rows = micro_batch.rows
        batch_turns = [turns[row] for row in rows]
        batch = self._collate(self.loss.forward_turns(batch_turns, rows), context.adapter_of)
        logprobs, entropy = self._logprobs(batch, [name for name, count in denominators.items() if count.turns])
        if micro_batch.dummy:  # a sharded backward is collective too
            (0.0 * logprobs.sum()).backward()
            return
        owners = [context.adapter_of[turn.agent] for turn in batch.turns]
        weights = None if context.weights is None else [context.weights[row] for row in rows]
        computed = (batch_turns, rows, batch, owners, logprobs, entropy, denominators, metrics, weights)
        self.loss.of(LossBatch(*computed, context.kl_coef, context.entropy_share)).backward()

    def _logprobs(self, batch: Batch, train: Sequence[str]) -> tuple[Tensor, Tensor]:
        """Log-probability and entropy of every action token, [N] each."""
        # Padding on the right changes nothing before it; a mask lets a base that packs leave it out, along with each
        # row's last token, after which nothing is predicted.
        mask = functional.pad(batch.attention_mask[:, 1:], (0, 1)) if self.base.shares else None
        states = self.base.forward(batch.input_ids, mask, batch.adapter_index, train=train)
        states = states.reshape(-1, states.shape[-1])
        return token_scores(self.base, batch, states, self.temperatures, entropy_grad=self.objective.uses_entropy)

    def _collate(self, turns: Sequence[Turn], adapter_of: Mapping[str, str]) -> Batch:
        return collate(
            turns,
            lambda turn: self.base.adapter_index(adapter_of[turn.agent]),
            self.base.pad_id,
            self.base.device,
            lambda turn: self.base.active_from(adapter_of[turn.agent], turn.prompt_ids),
        )

    def _clear(self, adapters: Sequence[str]) -> None:
        for name in adapters:
            for parameter in self.base.adapter_parameters(name):
                parameter.grad = None

    @torch.no_grad()
    def _roll_back(self, name: str, weights: list[Tensor]) -> None:
        for parameter, value in zip(self.base.adapter_parameters(name), weights, strict=True):
            parameter.copy_(value)
        # Its moments were computed from the values that are not finite.
        self.steps.forget(name)
        self.base.bump(name)
        log.error("Adapter %s had weights that are not finite; it was rolled back to its last finite weights.", name)

    def forget(self, adapter: str) -> None:
        """Reset the moments of an adapter's optimizer."""
        self.steps.forget(adapter)

    def state(self) -> dict[str, Any]:
        """Optimizer state of every adapter, in one format for all implementations of the steps. Collective."""
        return self.steps.state()

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.steps.load_state(state)
