"""Rollout phase of an iteration: a batch of episodes, played, judged, and resampled where the rule asks for it.

A batch is a pure function of the weights, the iteration, the position in the data and the seed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from mafrt import algorithms
from mafrt.algorithms import CreditContext
from mafrt.config.team import Team
from mafrt.config.train_config import TrainConfig
from mafrt.core.errors import EnvError
from mafrt.core.progress import stage
from mafrt.core.types import Episode, Turn
from mafrt.environment.base import Env
from mafrt.rollout.audit import fill_audits
from mafrt.rollout.distributed_rollout import gathered, judged_by_first
from mafrt.rollout.dynamic_sampling import resample
from mafrt.rollout.left_out import fill_contributions
from mafrt.rollout.player import Player, PlayStats, measures_of
from mafrt.rollout.stratified_order import StratifiedOrder, strata_of
from mafrt.rollout.task_stream import Order, TaskStream, own_slots, shuffled_passes
from mafrt.runners.algorithm import RunAlgorithm
from mafrt.runners.async_rollout import AsyncRollout
from mafrt.runners.judge import Judge

if TYPE_CHECKING:
    from mafrt.models.several_bases import Bases


class CollectedBatch(NamedTuple):
    """The batch of one iteration."""

    episodes: list[Episode]
    stats: PlayStats
    """counts of the rollout"""
    drawn: int
    """position in the data after the batch"""


@dataclass(eq=False, repr=False)
class Collector:
    """Plays and judges the batches of a run."""

    env: Env
    """spawns one environment per slot of this process"""
    base: Bases
    """has the adapters of the team"""
    config: TrainConfig
    rule: RunAlgorithm
    """decides on dynamic sampling and on adapters"""
    player: Player
    """plays with the current adapters; evaluations share it"""
    context: CreditContext
    """credit context, to find groups without spread"""
    judge: Judge | None
    """judges each batch; None without a coach"""
    async_rollout: AsyncRollout[CollectedBatch] | None
    """samples one step behind the learner; None: play synchronously"""
    interrupted: Callable[[], bool]
    """whether the run was asked to stop"""
    data_from: int = 0
    """tasks drawn before the run began with the present ones; passes are counted from there"""

    def __post_init__(self) -> None:
        play, processes = self.config.play, self.base.processes
        self.blocks = play.n_rollout_threads // play.n_samples
        # Batches that are played in a thread of their own must not share a process group with the learner.
        self.processes = processes.beside() if self.async_rollout else processes
        self.envs = [self.env.spawn() for _ in own_slots(processes, play.n_rollout_threads, play.n_samples)]
        self.order = self._order()

    def _order(self) -> Order | None:
        """The tasks of all draws; None for an environment without numbered tasks."""
        seed, first = self.config.run.seed, self.data_from
        if key := self.config.play.stratify:
            order: Order = StratifiedOrder(strata_of(self.env, key), seed, self.blocks)
        elif self.env.num_tasks is not None:
            order = shuffled_passes(self.env.num_tasks, seed)
        else:
            return None
        # Only the order of the tasks begins anew: seeds follow from the draw, and must not come twice.
        return order if not first else lambda draw: order(draw - first)

    def batch(self, iteration: int, drawn: int) -> CollectedBatch:
        """The batch of `iteration` (those completed before it), played now or meanwhile, from position `drawn` on.

        Raises EnvError where not one episode was finished, CoachError or EngineDownError where those cannot go on.
        """
        play = partial(self.play, iteration, drawn)
        return play() if self.async_rollout is None else self.async_rollout.batch(play)

    def start(self, iteration: int, drawn: int) -> None:
        """Start the background rollout of `iteration`, if the run has one, with the current weights."""
        assert self.async_rollout is not None
        # The copies are made in this thread, before the learner changes the weights. Those of a run that ends here
        # play when it goes on with more iterations.
        self.async_rollout.take()
        if iteration < self.config.run.iterations:
            self.async_rollout.start(partial(self.play, iteration, drawn))

    def wait(self) -> None:
        """Block until the background rollout ends; engines are not thread-safe."""
        if self.async_rollout is not None:
            self.async_rollout.wait()

    def play(self, iteration: int, drawn: int) -> CollectedBatch:
        """Play the batch of `iteration` now; see `batch`."""
        adapter_of = self.rule.schedule.plan(iteration).adapters
        if self.async_rollout is not None:
            adapter_of = self.async_rollout.adapters(adapter_of)  # copies, which no update changes
        player = self.player.with_adapters(adapter_of)
        turns = self.config.play.episode_length * len(player.team.agents)
        starts = self._stream(iteration, self.blocks, drawn, 0, turns)
        episodes, stats = self._play_through(player, starts)
        if not episodes and not self.interrupted():
            # The environment's own error is more use than a count of lost episodes.
            raise stats.last_error or EnvError("No episode was finished in this iteration; see the log for why.")
        batch = CollectedBatch(episodes, stats, starts.drawn)
        if self.rule.sampling_rounds:
            batch = self._resampled(batch, player, iteration, starts)
        if self.rule.contribution or self.config.play.audit_turns:
            self._replay(player, batch)
        return batch

    def _resampled(self, batch: CollectedBatch, player: Player, iteration: int, starts: TaskStream) -> CollectedBatch:
        """The batch with further groups in place of those without spread (dynamic sampling, DAPO)."""
        resampled = resample(
            batch.episodes,
            batch.stats,
            rounds=self.rule.sampling_rounds,
            flat=lambda some: algorithms.groups_without_spread(some, self.rule.settings, self.context),
            stream=partial(self._stream, iteration),
            play=partial(self._play_through, player),
            blocks=self.blocks,
            drawn=starts.drawn,
            dealt=starts.rounds,
        )
        batch.stats.sampling_rounds, batch.stats.groups_replaced = resampled.rounds, resampled.replaced
        return CollectedBatch(resampled.episodes, batch.stats, resampled.drawn)

    def _stream(self, iteration: int, tasks: int, drawn: int, dealt: int, turns: int = 1) -> TaskStream:
        play = self.config.play
        return TaskStream(
            slots=tasks * play.n_samples,
            n_samples=play.n_samples,
            turns=turns,
            order=self.order,
            seed=self.config.run.seed,
            iteration=iteration + 1,
            drawn=drawn,
            rounds=dealt,
        )

    def _play_through(self, player: Player, starts: TaskStream) -> tuple[list[Episode], PlayStats]:
        """Play a stream of tasks and judge the episodes: whole groups in each process, and all of them in all."""
        processes, play = self.processes, partial(self._play_share, player, starts)
        with self.base.whole():
            episodes, stats = play() if processes.size == 1 else gathered(processes, play, starts)
            # Within the same context: a coach on the base itself samples with its weights.
            if self.judge is not None and processes.size == 1:
                self.judge.judge(episodes)
            elif self.judge is not None:
                judged_by_first(processes, self.judge.judge, episodes)
        return episodes, stats

    def _play_share(self, player: Player, starts: TaskStream) -> tuple[list[Episode], PlayStats]:
        """Play this process's slots."""
        slots = own_slots(self.processes, starts.slots, starts.n_samples)
        with stage("playing", len(slots)) as advance:
            return player.play(
                self.envs[: len(slots)],
                lambda slot, finished: starts.next_start(slots[slot], finished, advance),
                self.interrupted,
            )

    def _replay(self, player: Player, batch: CollectedBatch) -> None:
        """Play the batch again as far as credit and audits ask for it."""
        settings, audited, (episodes, stats, _) = self.rule.settings, self.config.play.audit_turns, batch
        weights = settings.reward_weight, settings.outcome_weight
        with self.base.whole():
            if self.rule.contribution:
                stats.replayed |= fill_contributions(player, self.env, episodes, *weights)
            if audited:
                stats.replayed |= fill_audits(player, self.env, episodes, audited, self.config.run.seed, *weights)


def batch_metrics(
    rule: RunAlgorithm, team: Team, episodes: Sequence[Episode], turns: Sequence[Turn], stats: PlayStats
) -> dict[str, float]:
    """Metrics of the batch: scores, lengths, the environment's own measures, and lost episodes."""
    scores = [episode.score for episode in episodes]
    metrics = {
        "score": sum(scores) / len(scores),
        "episodes": float(len(episodes)),
        "turns": float(len(turns)),
        "tokens": float(stats.tokens),
        "env_errors": float(stats.env_errors),
        "env_lost_share": stats.lost_share(len(episodes)),
        "prompt_too_long": float(stats.prompt_too_long),
    }
    if rule.tree_samples > 1:
        metrics["tree_unscored"] = stats.tree_unscored / max(stats.tree_turns, 1)
        metrics["tree_errors"] = float(stats.tree_errors)
    if rule.sampling_rounds:
        metrics["sampling_rounds"] = float(stats.sampling_rounds)
        metrics["groups_replaced"] = float(stats.groups_replaced)
    measured = measures_of([episode.info.get("measures", {}) for episode in episodes])
    metrics |= {f"measure/{name}": value for name, value in measured.items()}
    for name in team.names:
        of_agent = [turn for turn in turns if turn.agent == name]
        if of_agent:
            metrics[f"tokens/{name}"] = sum(len(turn.action_ids) for turn in of_agent) / len(of_agent)
            # An answer that may have one token only has no rest that could be missing.
            cut = sum(turn.stop == "length" and len(turn.action_ids) > 1 for turn in of_agent)
            metrics[f"truncated_share/{name}"] = cut / len(of_agent)
    return metrics
