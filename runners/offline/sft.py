"""Supervised fine-tuning (SFT), and the learner that takes its gradients from records instead of episodes.

SFT of an adapter: L = - mean over the action tokens of its agents' answers of log pi(token | tokens before it)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor

from mafrt.algorithms.losses import Stats, mean_stats
from mafrt.algorithms.preference_losses import sft_loss
from mafrt.config.team import Team
from mafrt.config.train_config import LearnConfig
from mafrt.core.types import Turn
from mafrt.models.shared_base import SharedBase
from mafrt.runners.offline.dataset import Record
from mafrt.runners.offline.replay import RecordedTurn
from mafrt.training.learner import Learner
from mafrt.training.lr_schedule import LrSchedule
from mafrt.training.policy_objective import LossBatch, Objective


class RecordRule(Protocol):
    """Loss of a record."""

    name: str
    turns: int
    """answers in a record"""

    def settings(self) -> dict[str, Any]:
        """Settings that a resumed run must share with its checkpoint."""
        ...

    def refer(self, records: Sequence[Record], learner: Learner) -> None:
        """Fill `reference` of every record, with the adapters as they are before the first step."""
        ...

    def size(self, records: Sequence[Record]) -> int:
        """The denominator of a mini-batch's loss: the number of averaged terms."""
        ...

    def loss(self, records: Sequence[Record], logprobs: Sequence[Tensor], denominator: int) -> tuple[Tensor, Stats]:
        """The loss from the log-probabilities of each answer's tokens, `[n]` each, record after record."""
        ...


class Sft:
    """Mean negative log-likelihood of the action tokens; see `mafrt.algorithms.preference_losses.sft_loss`."""

    name, turns = "sft", 1

    def settings(self) -> dict[str, Any]:
        return {}

    def refer(self, records: Sequence[Record], learner: Learner) -> None:
        """Nothing to refer to."""

    def size(self, records: Sequence[Record]) -> int:
        return sum(len(record.turns[0].action_ids) for record in records)

    def loss(self, records: Sequence[Record], logprobs: Sequence[Tensor], denominator: int) -> tuple[Tensor, Stats]:
        return sft_loss(torch.cat(list(logprobs)), denominator=denominator)


def examples_of(turns: Sequence[RecordedTurn], min_return: float) -> list[Record]:
    """Recorded turns with a return of at least `min_return`, equal ones (agent, prompt, answer) once.

    (As in rejection-sampling fine-tuning, Yuan 2023, 2308.01825.)
    """
    records: dict[tuple[Any, ...], Record] = {}
    for recorded in turns:
        if recorded.worth >= min_return:
            key = (recorded.turn.agent, tuple(recorded.turn.prompt_ids), tuple(recorded.turn.action_ids))
            records.setdefault(key, Record((recorded.turn,), recorded.where))
    return list(records.values())


class RecordLoss:
    """A rule on records as the learner's loss.

    The learner receives one turn per record, its longest, for its token limits; both answers of a pair then fall into
    the same micro-batch.
    """

    def __init__(self, rule: RecordRule) -> None:
        self.rule = rule
        self.records: Sequence[Record] = ()
        """of the mini-batch, in the order of the turns given to the learner"""
        self.sizes: dict[str, int] = {}
        """adapter -> denominator of the mini-batch"""

    def forward_turns(self, turns: list[Turn], index: list[int]) -> list[Turn]:
        return [turn for row in index for turn in self.records[row].turns]

    def of(self, part: LossBatch) -> Tensor:
        """Also stores the log-probabilities before the step in `old_logprobs`, for the metrics."""
        rows = part.batch.turns
        for turn, values in zip(rows, part.batch.scatter(part.logprobs), strict=True):
            turn.old_logprobs = values
        answers = iter(zip(part.owners, part.logprobs.split([len(turn.action_ids) for turn in rows]), strict=True))
        by_adapter: dict[str, tuple[list[Record], list[Tensor]]] = {}
        for record in (self.records[row] for row in part.index):
            for number in range(len(record.turns)):
                owner, logprobs = next(answers)
                records, record_logprobs = by_adapter.setdefault(owner, ([], []))
                records += [record] if number == 0 else []
                record_logprobs.append(logprobs)
        total = part.logprobs.new_zeros(())
        for name, (records, record_logprobs) in by_adapter.items():
            loss, _ = self.rule.loss(records, record_logprobs, self.sizes[name])
            part.metrics.add(name, "loss", {"loss": loss.detach()})
            total = total + loss
        return total


class RecordLearner:
    """Steps and measurements on records, by a learner whose loss is the rule's."""

    def __init__(
        self,
        base: SharedBase,
        team: Team,
        learn: LearnConfig,
        rule: RecordRule,
        seed: int,
        lr_schedule: LrSchedule = lambda _: 1.0,
    ) -> None:
        tokens = max(1, learn.micro_batch_tokens // rule.turns)
        one_step = replace(learn, ppo_epoch=1, num_mini_batch=1, micro_batch_tokens=tokens)
        self.rule, self.loss = rule, RecordLoss(rule)
        self.learner = Learner(
            base,
            team,
            one_step,
            Objective(),
            seed,
            loss=self.loss,
            lr_schedule=lr_schedule,
        )

    def step(self, records: Sequence[Record], iteration: int) -> dict[str, float]:
        """One optimizer step of every adapter that has a record among `records`; all others stay bit-identical.

        Returns the metrics of `measure` as they were before the step, and `grad_norm/ADAPTER`, `skipped_updates`,
        `rollbacks`, `nonfinite_terms`.
        """
        by_adapter = self._by_adapter(records)
        longest = [max(record.turns, key=lambda turn: len(turn.action_ids)) for record in records]
        for turn in longest:
            turn.advantages = [1.0] * len(turn.action_ids)  # in the loss, and every token as much as any other
        self.loss.records = records
        self.loss.sizes = {name: self.rule.size(part) for name, part in by_adapter.items()}
        metrics = self.learner.update(longest, list(dict.fromkeys(record.agent for record in records)), iteration)
        of_loss = {name: value for name, value in metrics.items() if not name.startswith(("policy_loss/", "epochs"))}
        return of_loss | self._metrics(by_adapter)

    @torch.no_grad()
    def measure(self, records: Sequence[Record]) -> dict[str, float]:
        """`loss/ADAPTER` and the other statistics of the rule on `records`, with the adapters as they are."""
        self.learner.recompute_logprobs([turn for record in records for turn in record.turns])
        return self._metrics(self._by_adapter(records))

    def refer(self, records: Sequence[Record]) -> None:
        """Fill `reference` of every record."""
        self.rule.refer(records, self.learner)

    def state(self) -> dict[str, Any]:
        """Optimizer state of every adapter."""
        return self.learner.state()

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.learner.load_state(state)

    def _metrics(self, by_adapter: Mapping[str, Sequence[Record]]) -> dict[str, float]:
        """The rule's numbers from `old_logprobs`, which are dropped."""
        metrics: dict[str, float] = {}
        bad = 0.0
        for name, records in by_adapter.items():
            turns = [turn for record in records for turn in record.turns]
            logprobs = [torch.tensor(turn.old_logprobs) for turn in turns]
            loss, stats = self.rule.loss(records, logprobs, self.rule.size(records))
            means = mean_stats([stats])
            bad += means.pop("nonfinite")
            del means["count"]
            metrics |= {f"loss/{name}": float(loss)} | {f"{key}/{name}": value for key, value in means.items()}
            for turn in turns:
                turn.old_logprobs = turn.advantages = None
        return metrics | {"nonfinite_terms": bad}

    def _by_adapter(self, records: Sequence[Record]) -> dict[str, list[Record]]:
        by_adapter: dict[str, list[Record]] = {}
        for record in records:
            by_adapter.setdefault(self.learner.adapter_of[record.agent], []).append(record)
        return by_adapter
