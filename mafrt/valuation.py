"""Values and reference log-probabilities from one pass of the base with no adapter, and the critic's update.

The critic reads the frozen base's own hidden states, so its features are computed once per batch and serve every
epoch; the same pass gives the reference policy's log-probabilities when a KL penalty asks for them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mafrt.batch import collate, split
from mafrt.config import LearnConfig
from mafrt.critic import ValueHead, load_critic
from mafrt.losses import value_loss
from mafrt.seeding import permutation
from mafrt.types import Turn

if TYPE_CHECKING:
    from mafrt.policy import SharedBase


@dataclass(frozen=True)
class Features:
    """What the critic reads of a batch."""

    turns: list[Turn]
    hidden: list[Tensor]
    """per turn: [action tokens, hidden size] at token level, [1, hidden size] at action level"""


class Valuation:
    """The critic with its optimizer.

    Args:
        base: its no-adapter pass gives the features.
        learn: learning rate, epochs, clipping of the critic.
        level: `token` values every action token, `action` values a turn at its first position.
        seed: of the head's initialisation and of the mini-batches.
    """

    def __init__(self, base: SharedBase, learn: LearnConfig, level: str, seed: int) -> None:
        self.base = base
        self.learn = learn
        self.level = level
        self.seed = seed
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.head = ValueHead(base.hidden_size, learn.critic_hidden_size).to(base.device)
        self.optimizer = self._optimizer()

    def _optimizer(self) -> torch.optim.AdamW:
        return torch.optim.AdamW(self.head.parameters(), lr=self.learn.critic_lr, eps=self.learn.opti_eps, weight_decay=0.0)

    def load(self, path: Path) -> None:
        """Take the head from a `critic.pth`, with a fresh optimizer. Raises CheckpointError."""
        self.head = load_critic(path, hidden_size=self.base.hidden_size, device=self.base.device)
        self.optimizer = self._optimizer()

    @torch.no_grad()
    def annotate(
        self, turns: Sequence[Turn], temperatures: Mapping[str, float], *, values: bool, reference: bool
    ) -> Features:
        """Fill `values` and, if asked, `ref_logprobs` of every turn that has action tokens.

        Args:
            turns: all turns of the batch.
            temperatures: at which each agent samples; the reference is read at the same.
        """
        spoken = [turn for turn in turns if turn.action_ids]
        hidden: dict[int, Tensor] = {}
        for part in split(spoken, self.learn.micro_batch_tokens):
            batch = collate(part, lambda _: -1, self.base.pad_id, self.base.device)
            states = self.base.forward(batch.input_ids, None, batch.adapter_index)
            rows = states.reshape(-1, states.shape[-1])[batch.predict]
            sizes = [len(turn.action_ids) for turn in part]
            if values:
                for turn, worth in zip(part, batch.scatter(self.head(rows.float())), strict=True):
                    turn.values = worth
                for turn, piece in zip(part, rows.split(sizes), strict=True):
                    hidden[id(turn)] = piece if self.level == "token" else piece[:1].clone()
            if reference:
                heat = batch.gather([[temperatures[turn.agent]] * len(turn.action_ids) for turn in part])
                logprobs, _ = self.base.token_logprobs(rows, batch.targets, temperature=heat)
                for turn, found in zip(part, batch.scatter(logprobs), strict=True):
                    turn.ref_logprobs = found
        return Features(spoken, [hidden[id(turn)] for turn in spoken] if values else [])

    def update(self, features: Features, iteration: int) -> dict[str, float]:
        """Fit the head to the returns. Returns `value_loss` (mean over the first pass) and `grad_norm/critic`."""
        pairs = [
            (hidden, turn)
            for hidden, turn in zip(features.hidden, features.turns, strict=True)
            if turn.returns is not None and turn.values is not None
        ]
        if not pairs:
            return {}
        count = 1 if self.level == "action" else None
        x = torch.cat([hidden for hidden, _ in pairs]).float()
        device = x.device
        returns = torch.tensor([v for _, turn in pairs for v in (turn.returns or [])[:count]], device=device)
        old = torch.tensor([v for _, turn in pairs for v in (turn.values or [])[:count]], device=device)
        sound = torch.isfinite(returns) & torch.isfinite(old) & torch.isfinite(x).all(-1)
        x, returns, old = x[sound], returns[sound], old[sound]
        first: list[float] = []
        norms: list[float] = []
        for epoch in range(self.learn.critic_epoch):
            order = torch.tensor(permutation(len(x), self.seed, iteration, epoch), device=device)
            for piece in order.tensor_split(min(self.learn.num_mini_batch, max(len(x), 1))):
                if not len(piece):
                    continue
                loss, _ = value_loss(
                    self.head(x[piece]),
                    old[piece],
                    returns[piece],
                    clip=self.learn.value_clip,
                    huber_delta=self.learn.huber_delta,
                    denominator=len(piece),
                )
                self.optimizer.zero_grad(set_to_none=True)
                loss.backward()
                norm = torch.nn.utils.clip_grad_norm_(self.head.parameters(), self.learn.max_grad_norm)
                if torch.isfinite(norm):
                    self.optimizer.step()
                    norms.append(norm.item())
                if epoch == 0:
                    first.append(loss.item())
        metrics = {"value_loss": sum(first) / max(len(first), 1)}
        if norms:
            metrics["grad_norm/critic"] = sum(norms) / len(norms)
        return metrics

    def state(self) -> dict[str, Any]:
        """The optimizer's state; the head itself is saved as `critic.pth`."""
        return self.optimizer.state_dict()

    def load_state(self, state: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state)
