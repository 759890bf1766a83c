"""VDN and QMIX as a stage: Q of every turn in place of a critic's values, learnt by temporal differences of the team.

    L = mean over joint steps of (Q_tot(s, q) - y)^2 / 2
    y = r_team + gamma * ((1 - lambda) * Q_tot'(s', q') + lambda * y')        y = r_team at the end, Q' of the target

It stands where `Critic` stands and has the same few methods. Everything is read from the frozen base, in passes
with no adapter: Q_i from the hidden state before the turn's first token, which has seen the context, and the mean of
those of its own tokens; the state s of a joint step from the last token of the transcript before it, with the name of
who speaks next (`mafrt.training.critic_input`).

A joint step is what is said at the same time, one step of the environment. Where agents speak in turn, each turn is a
joint step of its own, and the temporal differences carry what a later speaker earns back to an earlier one. Taking a
round for one joint step would let the Q of the last speaker, who has seen what the others said, explain all of the
reward, and leave nothing for them to be told apart by.

Features are few numbers per turn, so a small memory of joint steps is kept, in float32, and saved with the
checkpoint. Episodes lie in it one after the other; the step after one is its successor unless the episode ended.

Sources: VDN 1706.05296, QMIX 1803.11485 (target network and target mixer), PyMARL; returns over several steps are what
Hu 2021 (2102.03479) found to matter most for QMIX. Deviations: the target's Q' is of what the team did say next
(SARSA), since a maximum over all that can be said cannot be taken; the memory is short, so that it stays near the
policy. The target is Polyak-averaged after each step instead of copied every few hundred. A step with a turn of unknown
reward is never learnt from, though the step before it may bootstrap from its Q'.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from mafrt.algorithms.losses import value_loss
from mafrt.algorithms.value_decomposition import Mixed
from mafrt.config.train_config import LearnConfig
from mafrt.core.atomic_files import load_tensors, save_tensors
from mafrt.core.errors import CheckpointError
from mafrt.core.seeding import permutation
from mafrt.core.types import Episode, Turn
from mafrt.models.q_mixer import TeamValue, follow, target_of
from mafrt.training.batch import collate, dealt, micro_batches
from mafrt.training.critic_input import central_prompts
from mafrt.training.optimizers import critic_optimizer, load_moments

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
    """[N] float32: what all turns of the step earned together"""
    known: Tensor
    """[N] bool: the reward is known and everything is finite"""
    last: Tensor
    """[N] bool: the episode ended with this step"""

    def __len__(self) -> int:
        return len(self.reward)

    def extended(self, other: Memory, most: int) -> Memory:
        """Both, without the oldest steps beyond `most`. Successors come later, so they never go first."""
        return Memory(*(torch.cat([getattr(self, f.name), getattr(other, f.name)])[-most:] for f in fields(self)))


@dataclass(frozen=True)
class MixedFeatures:
    """A batch as joint steps, and what the credit rule needs of it."""

    steps: Memory
    """with rewards still to be filled in"""
    turns: list[list[Turn]]
    """the turns of each step"""
    credit: dict[str, Any] = field(default_factory=dict)
    """`joint` of `mafrt.algorithms.value_decomposition`"""


class MixerCritic:
    """Heads, mixer, their target copy, optimizer and memory.

    Args:
        base: its no-adapter passes give the features.
        learn: mini-batches, gradient norm and epsilon, as of the adapters.
        settings: learning rate, epochs, memory, target and discount. Its `gae_lambda` is the share of a temporal
            difference's target that is the return that was seen, and not the target's Q' of the next step.
        agents: names, in the team's order.
        seed: of the initialisation and of the mini-batches.
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
        self._begin()
        self.memory = self._blank(0)

    def _begin(self) -> None:
        """Target by copy and a fresh optimizer, for the weights as they are."""
        self.target = target_of(self.net)
        self.optimizer = critic_optimizer(self.net.parameters(), self.settings.critic_lr, self.learn)

    def _blank(self, steps: int) -> Memory:
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

        `values` has to be true; the flag is there because `Critic` has it. The order of `episodes` changes nothing.
        """
        episodes = sorted(episodes, key=lambda episode: episode.id)
        turns: list[list[Turn]] = []
        last: list[bool] = []
        for episode in episodes:
            own: dict[int, list[Turn]] = {}
            for turn in episode.turns:
                own.setdefault(turn.env_step, []).append(turn)
            turns += own.values()
            last += [False] * (len(own) - 1) + [True] * bool(own)
        steps = self._blank(len(turns))
        steps.last = torch.tensor(last, dtype=torch.bool)
        spoken = [turn for some in turns for turn in some if turn.action_ids]
        seen = dict(zip(map(id, spoken), self._read(spoken, temperatures if reference else None), strict=True))
        place: dict[int, tuple[int, int]] = {}
        for n, some in enumerate(turns):
            for turn in some:
                if turn.action_ids:
                    place[id(turn)] = n, self.agents[turn.agent]
                    steps.x[place[id(turn)]] = seen[id(turn)]
                    steps.spoke[place[id(turn)]] = True
        if self.kind == "qmix" and turns:
            prompts = central_prompts(episodes, self.base.tokenizer, self.base.context_window)
            before = [prompts[id(some[0])] for some in turns]
            rows = [
                replace(some[0], prompt_ids=ids[:-1], action_ids=ids[-1:])
                for some, ids in zip(turns, before, strict=True)
            ]
            steps.s = torch.stack(self._read(rows, None))[:, self.base.hidden_size :]  # the mean over one token
        q = self.net.own(*self._on_device(steps.x, steps.spoke)) if turns else torch.zeros(0, len(self.agents))
        worth = q.cpu().tolist()
        for turn in spoken:
            n, agent = place[id(turn)]
            turn.values = [worth[n][agent]] * len(turn.action_ids)

        @torch.no_grad()
        def joint(turn: Turn, values: Sequence[float]) -> list[float]:
            """Q_tot of the turn's joint step with each of `values` in the place of its Q_i."""
            n, agent = place[id(turn)]
            own = q[n].repeat(len(values), 1)
            own[:, agent] = torch.tensor(values, device=own.device)
            (state,) = self._on_device(steps.s[n].expand(len(values), -1))
            return self.net.mixer(own, state).tolist()

        return MixedFeatures(steps, turns, {"joint": joint})

    def _read(self, rows: Sequence[Turn], temperatures: Mapping[str, float] | None) -> list[Tensor]:
        """The hidden state before a row's action and the mean over it, [2 d] float32 on the CPU, each normalised.

        With temperatures, fills `ref_logprobs`.
        """
        found: dict[int, Tensor] = {}
        processes = self.base.processes
        mine = dealt(rows, processes)
        for part in micro_batches(mine, rows, self.learn.micro_batch_tokens, self.base):
            batch = collate(part, lambda _: -1, self.base.pad_id, self.base.device)
            states = self.base.forward(batch.input_ids, None, batch.adapter_index)
            states = states.reshape(-1, states.shape[-1])
            counts = torch.tensor([len(row.action_ids) for row in part], device=states.device)
            before = states[batch.predict[counts.cumsum(0) - counts]].float()
            said = torch.zeros_like(before).index_add(0, batch.row, states[batch.predict + 1].float())
            both = [_normalised(before), _normalised(said / counts[:, None])]
            found |= dict(zip(map(id, part), torch.cat(both, -1).cpu(), strict=True))
            if temperatures is not None:
                heat = batch.gather([[temperatures[row.agent]] * len(row.action_ids) for row in part])
                logprobs, _ = self.base.token_logprobs(states[batch.predict], batch.targets, temperature=heat)
                for row, ref in zip(part, batch.scatter(logprobs), strict=True):
                    row.ref_logprobs = ref
        if processes.size > 1:
            numbers = {id(row): number for number, row in enumerate(rows)}
            whole = torch.zeros(len(rows), 2 * self.base.hidden_size, device=self.base.device)
            for row in mine:
                whole[numbers[id(row)]] = found[id(row)].to(whole.device)
            processes.sum([whole])
            found = dict(zip(map(id, rows), whole.cpu(), strict=True))
            if temperatures is not None:
                told = [[numbers[id(row)], row.ref_logprobs] for row in mine]
                for number, ref in (item for part in processes.gather(told) for item in part):
                    rows[number].ref_logprobs = ref
        return [found[id(row)] for row in rows]

    def update(self, features: MixedFeatures, iteration: int) -> dict[str, float]:
        """Take the batch, whose turns' `returns` are their rewards by now, into the memory, and learn from it.

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
            # As many as are new, drawn from all that are remembered: the memory's length does not make it slower.
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
        """y of every step in memory, [N] on the CPU; what it is for a step of unknown reward means nothing."""
        m = self.memory
        ahead = self.target(*self._on_device(m.x, m.spoke, m.s)).cpu().tolist()
        wanted = m.reward.tolist()
        known, last = m.known.tolist(), m.last.tolist()
        for n in reversed(range(len(wanted) - 1)):
            if not last[n]:
                # Behind a step of unknown reward nothing can be summed up: its Q' stands for all that follows.
                trust = self.td_lambda if known[n + 1] else 0.0
                seen = trust * wanted[n + 1] if trust else 0.0
                wanted[n] += self.gamma * ((1.0 - trust) * ahead[n + 1] + seen)
        return torch.tensor(wanted)

    def _step(self, piece: Tensor, wanted: Tensor) -> tuple[float, float | None]:
        """One step on some of the memory: the loss and the gradient's norm, None if it was not finite and skipped."""
        m, processes, steps = self.memory, self.base.processes, len(piece)
        if processes.size > 1:
            own = slice(processes.rank, None, processes.size)
            piece, wanted = piece[own], wanted[own]
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
        if not torch.isfinite(norm):
            return loss.item(), None
        self.optimizer.step()
        follow(self.target, self.net, self.settings.target_tau)
        return loss.item(), norm.item()

    def _on_device(self, *tensors: Tensor) -> list[Tensor]:
        return [tensor.to(self.base.device) for tensor in tensors]

    def save(self, path: Path) -> None:
        """Write heads and mixer."""
        save_tensors(path, {"kind": self.kind, "agents": list(self.agents), "state": self.net.state_dict()})

    def load(self, path: Path) -> None:
        """Take heads and mixer from what `save` wrote; the target is their copy. Raises CheckpointError."""
        found = load_tensors(path)
        was = (found.get("kind"), found.get("agents")) if isinstance(found, dict) else (None, None)
        if was != (self.kind, list(self.agents)):
            raise CheckpointError(
                f"{path} holds {was[0] or 'a critic'} for agents {was[1]}, expected {self.kind} for "
                f"{list(self.agents)}; load it with the algorithm and team it was trained with, or leave it out."
            )
        try:
            self.net.load_state_dict(found["state"])
        except (KeyError, RuntimeError) as error:
            raise CheckpointError(f"{path} does not fit this base or critic_hidden_size ({error}).") from None
        self._begin()

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
    """Each row at mean 0 and deviation 1, since a mean over many tokens is smaller than a single state."""
    return torch.nn.functional.layer_norm(states, states.shape[-1:])
