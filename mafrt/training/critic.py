"""Values and reference log-probabilities from one pass of the base with no adapter, and the critic's update.

The critic reads the frozen base's own hidden states, so its features are computed once per batch and serve every
epoch; the same pass gives the reference policy's log-probabilities when a KL penalty asks for them.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mafrt.algorithms import Algorithm
from mafrt.algorithms.losses import value_loss
from mafrt.config.algorithm_groups import ValueHeadSettings
from mafrt.config.train_config import LearnConfig
from mafrt.core.flat_tensors import on_cpu
from mafrt.core.seeding import permutation
from mafrt.core.transcript import quoted, speakers
from mafrt.core.types import Episode, Turn
from mafrt.models.outside_text import encode_outside
from mafrt.models.value_head import ValueHead, load_critic, save_critic
from mafrt.training.optimizers import critic_optimizer, load_moments
from mafrt.training.token_scores import base_pass, exchange

if TYPE_CHECKING:
    from mafrt.models.shared_base import SharedBase


@dataclass(frozen=True)
class Features:
    """Inputs of the critic for one batch."""

    turns: list[Turn]
    hidden: list[Tensor | None]
    """per turn: [action tokens, hidden size] at token level, [1, hidden size] at action level; None if the turn belongs
    to another process"""


class Critic:
    """The critic with its optimizer.

    Args:
        base: its hidden states without adapter are the features.
        learn: mini-batches, gradient norm and epsilon, shared with the adapters.
        settings: learning rate, epochs and clipping of the critic; None: no critic, only the reference is read.
        level: `token` values every action token, `action` values a turn at its first position.
        seed: for the head's initialisation and the mini-batches.
        central: the critic reads the whole transcript and the speaker's name instead of the turn's prompt.
        agents: agents whose turns it reads; None: all.
        tokenizers: agent -> the tokenizer of its prompts, where it is not that of `base`.

    >>> base = mafrt.SharedBase.load("teaching-base")
    >>> mafrt.Critic.for_rule(base, mafrt.LearnConfig(), mafrt.make_algorithm("ppo"), ["solver"], seed=0)
    <Critic on teaching_base: a value per token, learning rate 0.0005>
    """

    def __init__(
        self,
        base: SharedBase,
        learn: LearnConfig,
        settings: ValueHeadSettings | None,
        level: str,
        seed: int,
        *,
        central: bool = False,
        agents: Collection[str] | None = None,
        tokenizers: Mapping[str, Any] | None = None,
    ) -> None:
        self.base = base
        self.agents = None if agents is None else frozenset(agents)
        self.tokenizers = dict(tokenizers or {})
        self.learn = learn
        self.present = settings is not None
        self.settings = settings or ValueHeadSettings()
        self.level = level
        self.central = central
        self.seed = seed
        # The head's initialisation must not advance the global generator, whose state is part of a resume.
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.head = ValueHead(base.hidden_size, self.settings.critic_hidden_size).to(base.device)
        self.optimizer = critic_optimizer(self.head.parameters(), self.settings.critic_lr, learn)

    def __repr__(self) -> str:
        what = "token" if self.level == "token" else "turn"
        return f"<Critic on {Path(self.base.name).name}: a value per {what}, learning rate {self.settings.critic_lr}>"

    @classmethod
    def for_rule(
        cls,
        base: SharedBase,
        learn: LearnConfig,
        rule: Algorithm,
        agents: Sequence[str],
        seed: int,
        tokenizers: Mapping[str, Any] | None = None,
    ) -> Critic:
        """The critic of a rule, which inherits `ValueHeadSettings` if it has one; else only the reference is read.

        Args:
            agents: those on `base`.
            tokenizers: of all agents, where some sit on another base.
        """
        settings = rule if rule.critic_reads is not None and isinstance(rule, ValueHeadSettings) else None
        central = rule.critic_reads == "transcript"
        alone = None if tokenizers is None else agents
        return cls(base, learn, settings, rule.level, seed, central=central, agents=alone, tokenizers=tokenizers)

    def save(self, path: Path) -> None:
        """Write the head."""
        save_critic(self.head, path)

    def load(self, path: Path) -> None:
        """Load the head from a `critic.pth` and start a fresh optimizer. Raises CheckpointError."""
        self.replace_head(load_critic(path, hidden_size=self.base.hidden_size, device=self.base.device))

    @torch.no_grad()
    def annotate(
        self, episodes: Sequence[Episode], temperatures: Mapping[str, float], *, values: bool, reference: bool
    ) -> Features:
        """Fill `values` and, if asked, `ref_logprobs` of every turn that has action tokens.

        Args:
            episodes: the batch.
            temperatures: sampling temperature of each agent, applied to the reference too.
        """
        turns = [turn for episode in episodes for turn in episode.turns if self._reads(turn)]
        prompts_seen = [turn.prompt_ids for turn in turns]
        if not (values and self.central):
            return Features(turns, self._pass(turns, prompts_seen, temperatures, values=values, reference=reference))
        central = central_prompts(episodes, self.base.tokenizer, self.base.context_window, self.tokenizers)
        prompts = [
            ids
            for episode, episode_prompts in zip(episodes, central, strict=True)
            for turn, ids in zip(episode.turns, episode_prompts, strict=True)
            if self._reads(turn)
        ]
        # The central prompts are not those that the agents saw, so the reference takes a pass of its own.
        features = Features(turns, self._pass(turns, prompts, temperatures, values=True, reference=False))
        if reference:
            self._pass(turns, prompts_seen, temperatures, values=False, reference=True)
        return features

    def _reads(self, turn: Turn) -> bool:
        return bool(turn.action_ids) and (self.agents is None or turn.agent in self.agents)

    def replace_head(self, head: ValueHead) -> None:
        """Take another head, with a fresh optimizer."""
        self.head = head
        self.optimizer = critic_optimizer(self.head.parameters(), self.settings.critic_lr, self.learn)

    def _pass(
        self,
        turns: Sequence[Turn],
        prompts: Sequence[list[int]],
        temperatures: Mapping[str, float],
        *,
        values: bool,
        reference: bool,
    ) -> list[Tensor | None]:
        """One forward over all turns, each after its prompt of `prompts`; returns the features per turn if `values`.

        Several processes share the turns. Afterwards each knows all values, and the features of its own turns.
        """
        if not (values or reference):
            return []
        features: list[Tensor | None] = [None] * len(turns)
        done_here: list[int] = []
        rows = [replace(turn, prompt_ids=ids) for turn, ids in zip(turns, prompts, strict=True)]
        max_tokens, asked = self.learn.micro_batch_tokens, temperatures if reference else None
        for indices, batch, states in base_pass(self.base, rows, max_tokens, asked):
            done_here += indices
            if values:
                hidden = states[batch.predict]
                pieces = hidden.split([len(turn.action_ids) for turn in batch.turns])
                # The head is float32 whatever the precision of the base.
                token_values = batch.scatter(self.head(hidden.float()))
                for index, turn_values, piece in zip(indices, token_values, pieces, strict=True):
                    rows[index].values = turn_values
                    # Only the first position is kept at action level; a clone frees the rest of the batch.
                    features[index] = piece if self.level == "token" else piece[:1].clone()
        fields = [name for name, filled in (("values", values), ("ref_logprobs", reference)) if filled]
        exchange(self.base.processes, done_here, rows, fields)
        for turn, row in zip(turns, rows, strict=True):
            for name in fields:
                setattr(turn, name, getattr(row, name))
        return features if values else []

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
        processes, device = self.base.processes, self.base.device
        returns = torch.tensor([v for _, turn in pairs for v in (turn.returns or [])[:count]], device=device)
        old = torch.tensor([v for _, turn in pairs for v in (turn.values or [])[:count]], device=device)
        x, here = self._rows(pairs, count)
        bad = torch.zeros(len(returns), device=device)
        bad[here] = 1.0 - torch.isfinite(x).all(-1).float()
        # Only the process that holds a row sees that it is not finite, and all have to leave it out.
        processes.sum([bad])
        sound = torch.isfinite(returns) & torch.isfinite(old) & (bad == 0)
        # Rows are numbered over all processes, so mini-batches do not depend on the number of processes.
        place = torch.full((len(returns),), -1, device=device)
        place[here] = torch.arange(len(here), device=device)
        place, returns, old = place[sound], returns[sound], old[sound]
        old = (old - self.head.centre) / self.head.scale  # the clip is around the head's output before the update
        if self.settings.value_norm:
            # Statistics are updated before the targets are computed, so head and targets share one scale.
            self.head.follow(returns)
        targets = (returns - self.head.centre) / self.head.scale
        first: list[Tensor] = []
        norms: list[float] = []
        for epoch in range(self.settings.critic_epoch):
            order = torch.tensor(permutation(len(place), self.seed, iteration, epoch), device=device)
            for piece in order.tensor_split(min(self.learn.num_mini_batch, max(len(place), 1))):
                if not len(piece):
                    continue
                rows_here = piece[place[piece] >= 0] if processes.size > 1 else piece
                loss, _ = value_loss(
                    self.head.normalised(x[place[rows_here]]),
                    old[rows_here],
                    targets[rows_here],
                    clip=self.settings.value_clip,
                    huber_delta=self.settings.huber_delta,
                    denominator=len(piece),
                )
                self.optimizer.zero_grad(set_to_none=True)
                loss.backward()
                processes.sum_gradients(self.head.parameters())
                norm = torch.nn.utils.clip_grad_norm_(self.head.parameters(), self.learn.max_grad_norm).item()
                if math.isfinite(norm):
                    self.optimizer.step()
                    norms.append(norm)
                # The first pass shows the error before the head has fitted this batch.
                if epoch == 0:
                    first.append(loss.detach())
        processes.sum(first)
        metrics = {"value_loss": sum(loss.item() for loss in on_cpu(first)) / max(len(first), 1)}
        if norms:
            metrics["grad_norm/critic"] = sum(norms) / len(norms)
        return metrics

    def _rows(self, pairs: Sequence[tuple[Tensor | None, Turn]], count: int | None) -> tuple[Tensor, Tensor]:
        """This process's features, [rows, d] float32, and their indices among the rows of all processes."""
        device, first = self.base.device, 0
        here: list[Tensor] = []
        for hidden, turn in pairs:
            rows = len((turn.returns or [])[:count])
            if hidden is not None:
                here.append(torch.arange(first, first + rows, device=device))
            first += rows
        if not here:
            return torch.zeros(0, self.base.hidden_size, device=device), torch.zeros(0, dtype=torch.long, device=device)
        return torch.cat([hidden for hidden, _ in pairs if hidden is not None]).float(), torch.cat(here)

    def state(self) -> dict[str, Any]:
        """The optimizer's state; the head itself is saved as `critic.pth`."""
        return self.optimizer.state_dict() if self.present else {}

    def load_state(self, state: dict[str, Any]) -> None:
        if self.present:
            load_moments(self.optimizer, state)


def central_prompts(
    episodes: Sequence[Episode], tokenizer: Any, context_window: int, tokenizers: Mapping[str, Any] | None = None
) -> list[list[list[int]]]:
    """For every turn, the prompt of a critic that sees the whole team's transcript (MAPPO; Yu 2022, 2103.01955).

    It holds the first speaker's prompt, each earlier turn as `AGENT: TEXT` (hidden ones included), and the
    speaker's name. A transcript that leaves no room for the turn is truncated on the left.

    Args:
        tokenizer: of the base that reads the prompts.
        tokenizers: agent -> the tokenizer of its own prompts, where it is another.

    Returns:
        Token ids, `[episode][turn]`.
    """
    prompts: list[list[list[int]]] = []
    for episode in episodes:
        prompts.append([])
        if not episode.turns:
            continue
        first = episode.turns[0]
        prompt_tokenizer = (tokenizers or {}).get(first.agent, tokenizer)
        names = speakers({turn.agent for turn in episode.turns})
        transcript = prompt_tokenizer.decode(first.prompt_ids, skip_special_tokens=True).rstrip()
        for turn in episode.turns:
            ids = encode_outside(tokenizer, f"{transcript}\n{turn.agent}:")
            room = max(context_window - len(turn.action_ids), 1)
            prompts[-1].append(list(ids[-room:]))
            transcript += f"\n{turn.agent}: {quoted(turn.text, names)}"
    return prompts
