"""Critic of VDN and QMIX: Q of every turn, trained by temporal differences of the team's reward.

    L = mean over joint steps of (Q_tot(s, q) - y)^2 / 2
    y = r_team + gamma * ((1 - lambda) * Q_tot'(s', q') + lambda * y')        y = r_team at the end, Q' of the target

`MixerCritic` has the interface of `Critic`. All features are hidden states of the frozen base without adapter. Q_i
reads the hidden state before the turn's first token, which encodes the context, and the mean over the turn's tokens.
The state s of a joint step is read at the last token of the transcript before it, which ends with the next speaker's
name (`mafrt.training.critic`).

A joint step is one step of the environment: all turns spoken at the same time. Where agents speak in turn, each turn is
its own joint step, and temporal differences carry later rewards back to earlier speakers. A whole round as one joint
step would let the last speaker's Q, which has seen the other turns, explain the whole reward and leave no signal for
the earlier speakers.

Features are small, so a short replay memory of joint steps is kept in float32 and saved with the checkpoint. Episodes
are stored consecutively: the next entry is a step's successor unless the episode ended.

Sources: VDN 1706.05296, QMIX 1803.11485 (target network and target mixer), PyMARL; multi-step returns matter most for
QMIX according to Hu 2021 (2102.03479). Deviations: the target's Q' is that of the team's actual next turn (SARSA),
since the maximum over all texts is intractable; the memory is short to stay close to the policy. The target is
Polyak-averaged after each step instead of copied every few hundred. A step with a turn of unknown reward is never a
regression target, though the step before it may bootstrap from its Q'.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from mafrt.algorithms.losses import value_loss
from mafrt.algorithms.rewards import Row
from mafrt.algorithms.value_decomposition import Mixed
from mafrt.config.train_config import LearnConfig
from mafrt.core.atomic_files import load_tensors, save_tensors
from mafrt.core.errors import CheckpointError
from mafrt.core.flat_tensors import on_cpu
from mafrt.core.seeding import permutation
from mafrt.core.types import Episode, Turn
from mafrt.models.q_mixer import TeamValue, follow, target_of
from mafrt.training.critic import central_prompts
from mafrt.training.optimizers import critic_optimizer, load_moments
from mafrt.training.token_scores import base_pass, exchange

if TYPE_CHECKING:
    from mafrt.models.shared_base import SharedBase


@dataclass
class Memory:
    """Joint steps, oldest first, on the CPU. N steps of A agents, d features (state: d, or 0 for VDN)."""

    x: Tensor
    """[N, A, 2 d] float32: before the turn, and the mean over it"""
    spoke: Tensor
    """[N, A] bool"""
    s: Tensor
    """[N, d or 0] float32"""
    reward: Tensor
    """[N] float32: total reward of the step's turns"""
    known: Tensor
    """[N] bool: the reward is known and everything is finite"""
    last: Tensor
    """[N] bool: the episode ended with this step"""

    def __len__(self) -> int:
        return len(self.reward)

    def extended(self, other: Memory, most: int) -> Memory:
        """Concatenation with `other`, cut to the `most` newest steps. A step never outlives its successor's removal."""
        return Memory(*(torch.cat([getattr(self, f.name), getattr(other, f.name)])[-most:] for f in fields(self)))


@dataclass(frozen=True)
class MixedFeatures:
    """A batch as joint steps, with the inputs of the credit rule."""

    steps: Memory
    """rewards are filled in by `update`"""
    turns: list[list[Turn]]
    """the turns of each step"""
    credit: dict[str, Any] = field(default_factory=dict)
    """`joint` of `mafrt.algorithms.value_decomposition`"""


class MixerCritic:
    """Heads, mixer, their target copy, optimizer and memory.

    Args:
        base: its hidden states without adapter are the features.
        learn: mini-batches, gradient norm and epsilon, shared with the adapters.
        settings: learning rate, epochs, memory, target and discount. Its `gae_lambda` is TD(lambda)'s: the weight of
            the observed return in a target, against the target network's Q' of the next step.
        agents: names, in the team's order.
        seed: for the initialisation and the mini-batches.
    """

    def __init__(
        self,
        base: SharedBase,
        learn: LearnConfig,
        settings: Mixed,
        agents: Sequence[str],
        seed: int,
    ) -> None:
        self.base, self.learn, self.settings, self.seed = base, learn, settings, seed
        self.present = True
        self.kind: Literal["vdn", "qmix"] = "qmix" if settings.mixer == "qmix" else "vdn"
        self.gamma, self.td_lambda = settings.gamma, settings.gae_lambda
        self.agents = {name: index for index, name in enumerate(agents)}
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.net = TeamValue(
                self.kind, len(agents), 2 * base.hidden_size, settings.critic_hidden_size, base.hidden_size
            ).to(base.device)
        self._reset_target_and_optimizer()
        self.memory = self._empty_memory(0)

    @classmethod
    def for_rule(
        cls,
        base: SharedBase,
        learn: LearnConfig,
        rule: Mixed,
        agents: Sequence[str],
        seed: int,
        tokenizers: Mapping[str, Any] | None = None,
    ) -> MixerCritic:
        """The mixer of a rule; all agents sit on one base, so they share its tokenizer."""
        return cls(base, learn, rule, agents, seed)

    def _reset_target_and_optimizer(self) -> None:
        """Reset the target network to a copy of the weights, and the optimizer to a fresh one."""
        self.target = target_of(self.net)
        self.optimizer = critic_optimizer(self.net.parameters(), self.settings.critic_lr, self.learn)

    def _empty_memory(self, steps: int) -> Memory:
        agents, size = len(self.agents), self.base.hidden_size
        return Memory(
            x=torch.zeros(steps, agents, 2 * size),
            spoke=torch.zeros(steps, agents, dtype=torch.bool),
            s=torch.zeros(steps, size if self.kind == "qmix" else 0),
            reward=torch.zeros(steps),
            known=torch.zeros(steps, dtype=torch.bool),
            last=torch.zeros(steps, dtype=torch.bool),
        )

    @torch.no_grad()
    def annotate(
        self, episodes: Sequence[Episode], temperatures: Mapping[str, float], *, values: bool, reference: bool
    ) -> MixedFeatures:
        """Fill `values` (the turn's Q_i on every token) and, if asked, `ref_logprobs` of turns with action tokens.

        `values` must be True; it exists to match `Critic`. The result does not depend on the order of `episodes`.
        """
        joint_steps: list[list[tuple[int, int]]] = []  # (episode, turn) of the turns of each
        last: list[bool] = []
        for number in sorted(range(len(episodes)), key=lambda n: episodes[n].id):
            members: dict[int, list[tuple[int, int]]] = {}
            for position, turn in enumerate(episodes[number].turns):
                members.setdefault(turn.env_step, []).append((number, position))
            joint_steps += members.values()
            last += [False] * (len(members) - 1) + [True] * bool(members)
        turns = [[episodes[e].turns[t] for e, t in keys] for keys in joint_steps]
        steps = self._empty_memory(len(turns))
        steps.last = torch.tensor(last, dtype=torch.bool)
        spoken = [
            (key, step, turn)
            for step, keys in enumerate(joint_steps)
            for key, turn in zip(keys, turns[step], strict=True)
            if turn.action_ids
        ]
        features = self._read([turn for *_, turn in spoken], temperatures if reference else None)
        place: dict[tuple[int, int], tuple[int, int]] = {}  # (episode, turn) -> (joint step, agent)
        for (key, step, turn), feature in zip(spoken, features, strict=True):
            place[key] = step, self.agents[turn.agent]
            steps.x[place[key]] = feature
            steps.spoke[place[key]] = True
        if self.kind == "qmix" and turns:
            prompts = central_prompts(episodes, self.base.tokenizer, self.base.context_window)
            before = [prompts[e][t] for (e, t), *_ in joint_steps]
            rows = [
                replace(members[0], prompt_ids=ids[:-1], action_ids=ids[-1:])
                for members, ids in zip(turns, before, strict=True)
            ]
            steps.s = torch.stack(self._read(rows, None))[:, self.base.hidden_size :]  # the mean over one token
        q = self.net.own(*self._on_device(steps.x, steps.spoke)) if turns else torch.zeros(0, len(self.agents))
        q_values = q.cpu().tolist()
        for key, _, turn in spoken:
            step, agent = place[key]
            turn.values = [q_values[step][agent]] * len(turn.action_ids)

        @torch.no_grad()
        def joint(row: Row, values: Sequence[float]) -> list[float]:
            """Q_tot of the turn's joint step for each candidate of its Q_i in `values`."""
            step, agent = place[row.key]
            q_values = q[step].repeat(len(values), 1)
            q_values[:, agent] = torch.tensor(values, device=q_values.device)
            (state,) = self._on_device(steps.s[step].expand(len(values), -1))
            return list(self.net.mixer(q_values, state).tolist())

        return MixedFeatures(steps, turns, {"joint": joint})

    def _read(self, rows: Sequence[Turn], temperatures: Mapping[str, float] | None) -> list[Tensor]:
        """The hidden state before a row's action and the mean over it, [2 d] float32 on the CPU, each normalised.

        With temperatures, fills `ref_logprobs`.
        """
        features = torch.zeros(len(rows), 2 * self.base.hidden_size)
        done_here: list[int] = []
        for indices, batch, states in base_pass(self.base, rows, self.learn.micro_batch_tokens, temperatures):
            lengths = torch.tensor([len(turn.action_ids) for turn in batch.turns], device=states.device)
            before = states[batch.predict[lengths.cumsum(0) - lengths]].float()
            action = torch.zeros_like(before).index_add(0, batch.turn, states[batch.predict + 1].float())
            both = torch.cat([_normalised(before), _normalised(action / lengths[:, None])], -1)
            features[indices] = both.cpu()
            done_here += indices
        processes = self.base.processes
        if processes.size > 1:
            # Each row is zero in all processes but one, so the sum exchanges the features.
            features = features.to(self.base.device)
            processes.sum([features])
            features = features.cpu()
        exchange(processes, done_here, rows, [] if temperatures is None else ["ref_logprobs"])
        return list(features)

    def update(self, features: MixedFeatures, iteration: int) -> dict[str, float]:
        """Append the batch to the memory and train on it. The turns' `returns` must hold their rewards.

        Returns `value_loss` (mean over the first pass), `grad_norm/critic`, `q_tot` (mean over the batch's steps, after
        the update), `replay_steps`.
        """
        steps = features.steps
        for n, some in enumerate(features.turns):
            if all(turn.returns for turn in some):
                steps.reward[n] = sum(turn.returns[0] for turn in some if turn.returns)
                steps.known[n] = True
        steps.known &= torch.isfinite(steps.reward) & torch.isfinite(steps.x).all(-1).all(-1)
        steps.known &= torch.isfinite(steps.s).all(-1)
        self.memory = self.memory.extended(steps, self.settings.replay_steps)
        usable = self.memory.known.nonzero().squeeze(-1)
        first: list[float] = []
        norms: list[float] = []
        for epoch in range(self.settings.critic_epoch if len(usable) else 0):
            wanted = self._targets()
            # An epoch draws as many steps as the batch added, so its cost does not grow with the memory.
            order = torch.tensor(permutation(len(usable), self.seed, iteration, epoch))[: max(len(steps), 1)]
            for piece in usable[order].tensor_split(min(self.learn.num_mini_batch, len(order))):
                loss, norm = self._step(piece, wanted[piece])
                norms += [norm] if norm is not None else []
                first += [loss] if epoch == 0 else []
        metrics = {"replay_steps": float(len(self.memory))}
        if first:
            with torch.no_grad():
                metrics["q_tot"] = self.net(*self._on_device(steps.x, steps.spoke, steps.s)).mean().item()
            metrics["value_loss"] = sum(first) / len(first)
        if norms:
            metrics["grad_norm/critic"] = sum(norms) / len(norms)
        return metrics

    @torch.no_grad()
    def _targets(self) -> Tensor:
        """y of every step in memory, [N] on the CPU; undefined for a step of unknown reward."""
        m = self.memory
        ahead = self.target(*self._on_device(m.x, m.spoke, m.s)).cpu().tolist()
        wanted = m.reward.tolist()
        known, last = m.known.tolist(), m.last.tolist()
        for n in reversed(range(len(wanted) - 1)):
            if not last[n]:
                # A return cannot be summed across an unknown reward, so that step's Q' replaces the rest.
                trust = self.td_lambda if known[n + 1] else 0.0
                seen = trust * wanted[n + 1] if trust else 0.0
                wanted[n] += self.gamma * ((1.0 - trust) * ahead[n + 1] + seen)
        return torch.tensor(wanted)

    def _step(self, piece: Tensor, wanted: Tensor) -> tuple[float, float | None]:
        """One optimizer step on part of the memory. Returns loss and gradient norm (None: not finite, skipped)."""
        m, processes, steps = self.memory, self.base.processes, len(piece)
        if processes.size > 1:
            every = slice(processes.rank, None, processes.size)
            piece, wanted = piece[every], wanted[every]
        (wanted,) = self._on_device(wanted)
        q_tot = self.net(*self._on_device(m.x[piece], m.spoke[piece], m.s[piece]))
        loss, _ = value_loss(
            q_tot, wanted, wanted, huber_delta=self.settings.huber_delta, denominator=steps
        )  # without a clip, old values are not read
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        processes.sum_gradients(self.net.parameters())
        processes.sum([loss])
        norm = torch.nn.utils.clip_grad_norm_(self.net.parameters(), self.learn.max_grad_norm)
        loss_value, norm_value = (value.item() for value in on_cpu([loss, norm]))
        if not math.isfinite(norm_value):
            return loss_value, None
        self.optimizer.step()
        follow(self.target, self.net, self.settings.target_tau)
        return loss_value, norm_value

    def _on_device(self, *tensors: Tensor) -> list[Tensor]:
        return [tensor.to(self.base.device) for tensor in tensors]

    def save(self, path: Path) -> None:
        """Write heads and mixer."""
        save_tensors(path, {"kind": self.kind, "agents": list(self.agents), "state": self.net.state_dict()})

    def load(self, path: Path) -> None:
        """Load heads and mixer as written by `save`; the target becomes their copy. Raises CheckpointError."""
        content = load_tensors(path)
        was = (content.get("kind"), content.get("agents")) if isinstance(content, dict) else (None, None)
        if was != (self.kind, list(self.agents)):
            raise CheckpointError(
                f"{path} holds {was[0] or 'a critic'} for agents {was[1]}, expected {self.kind} for "
                f"{list(self.agents)}; load it with the algorithm and team it was trained with, or leave it out."
            )
        try:
            self.net.load_state_dict(content["state"])
        except (KeyError, RuntimeError) as error:
            raise CheckpointError(f"{path} does not fit this base or critic_hidden_size ({error}).") from None
        self._reset_target_and_optimizer()

    def state(self) -> dict[str, Any]:
        """Optimizer, target and memory; heads and mixer are saved as `critic.pth`."""
        return {
            "optimizer": self.optimizer.state_dict(),
            "target": self.target.state_dict(),
            "memory": {f.name: getattr(self.memory, f.name) for f in fields(self.memory)},
        }

    def load_state(self, state: dict[str, Any]) -> None:
        load_moments(self.optimizer, state["optimizer"])
        self.target.load_state_dict(state["target"])
        self.memory = Memory(**state["memory"])


def _normalised(states: Tensor) -> Tensor:
    """Rows with mean 0 and deviation 1: the mean over many tokens has a smaller scale than a single state."""
    return torch.nn.functional.layer_norm(states, states.shape[-1:])
