"""Direct preference optimisation (DPO; Rafailov 2023, 2305.18290) of every agent's adapter, without play.

    L = - mean over the adapter's pairs of log sigmoid(beta * [(log pi - log pi_ref)(chosen)
                                                             - (log pi - log pi_ref)(rejected)])

log pi(answer) is the sum over its tokens at temperature 1. The reference is the base with no adapter, or the adapter as
it was before the first step; its log-probabilities are computed once, before training, and live in the checkpoints.
Preferences come from files (`runners/offline/dataset.py`) or from the turns of recorded episodes (`pairs_of`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from mafrt.algorithms.losses import Stats
from mafrt.algorithms.preference_losses import dpo_loss
from mafrt.config.schema import check_choice, check_number
from mafrt.core.types import Episode
from mafrt.runners.offline.dataset import Record
from mafrt.runners.offline.replay import RecordedTurn
from mafrt.training.critic import Critic
from mafrt.training.learner import Learner

_AT_ONCE = 512
"""Max records whose per-token reference log-probs are in memory at once."""


class Dpo:
    """Preferences as a log-likelihood ratio test; see `mafrt.algorithms.preference_losses.dpo_loss`.

    Args:
        beta: scale of the log-ratios, above 0; usually .1 to .5.
        reference: `base`, which has no adapter, or `initial`, the adapters before the first step (the result of SFT).
    """

    name, turns = "dpo", 2

    def __init__(self, beta: float = 0.1, reference: Literal["base", "initial"] = "base") -> None:
        check_number("beta", beta, above=0)
        check_choice("reference", reference, ("base", "initial"))
        self.beta, self.reference = beta, reference

    def settings(self) -> dict[str, Any]:
        return {"reference": self.reference}

    @torch.no_grad()
    def refer(self, records: Sequence[Record], learner: Learner) -> None:
        """Fill `reference` of every record; `learner` knows the adapters as they are before the first step."""
        critic = Critic(learner.base, learner.learn, None, "token", seed=0)
        for start in range(0, len(records), _AT_ONCE):
            part = records[start : start + _AT_ONCE]
            turns = [turn for record in part for turn in record.turns]
            if self.reference == "base":
                episodes = [Episode("", "", turns=turns)]
                critic.annotate(episodes, learner.temperatures, values=False, reference=True)
                logprobs = [turn.ref_logprobs or [] for turn in turns]
            else:
                logprobs = learner.logprobs(turns)
            sums = iter([float(torch.tensor(values, dtype=torch.float64).sum()) for values in logprobs])
            for record in part:
                record.reference = tuple(next(sums) for _ in record.turns)
                for turn in record.turns:
                    turn.ref_logprobs = None

    def size(self, records: Sequence[Record]) -> int:
        return len(records)

    def loss(self, records: Sequence[Record], logprobs: Sequence[Tensor], denominator: int) -> tuple[Tensor, Stats]:
        # In double precision: sums over long answers are subtracted from each other.
        policy = torch.stack([values.double().sum() for values in logprobs]).view(-1, 2)
        reference = torch.tensor([r.reference for r in records], dtype=torch.float64, device=policy.device)
        return dpo_loss(*policy.unbind(1), *reference.unbind(1), beta=self.beta, denominator=denominator)


def pairs_of(turns: Sequence[RecordedTurn], min_gap: float = 0.0) -> list[Record]:
    """Preferences among recorded turns: same problem, same agent, same prompt token by token, different return.

    Repeated answers count once, with their mean return (an early speaker's return depends on the turns after it).
    Of n different answers in one context the best is paired with the worst, the second best with the second worst, and
    so on, so each is used once at most; pairs with returns that differ by `min_gap` or less are left out.
    The result does not depend on the order of `turns`.
    """
    contexts: dict[tuple[Any, ...], dict[tuple[int, ...], list[RecordedTurn]]] = {}
    for recorded in turns:
        context = (recorded.problem, recorded.turn.agent, tuple(recorded.turn.prompt_ids))
        contexts.setdefault(context, {}).setdefault(tuple(recorded.turn.action_ids), []).append(recorded)
    pairs = []
    for context in sorted(contexts):
        answers = [
            (_mean([recorded.worth for recorded in same]), ids, same[0]) for ids, same in contexts[context].items()
        ]
        answers.sort(key=lambda answer: answer[:2])
        for (low, _, worse), (high, _, better) in zip(answers, reversed(answers), strict=True):
            if high - low <= min_gap:
                break
            pairs.append(Record((better.turn, worse.turn), better.where))
    return pairs


def _mean(values: Sequence[float]) -> float:
    return sum(sorted(values)) / len(values)
