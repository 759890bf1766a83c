"""The first half of an iteration: a batch of episodes, played, judged, and filled up where the rule asks for it.

A batch is a pure function of the weights, the iteration, the position in the data and the seed.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from mafrt import algorithms
from mafrt.algorithms import CreditContext
from mafrt.config.train_config import TrainConfig
from mafrt.core import records
from mafrt.core.errors import EnvError
from mafrt.core.types import Episode
from mafrt.environment.base import Env
from mafrt.rollout.distributed_rollout import own_slots, play_together
from mafrt.rollout.dynamic_sampling import resample
from mafrt.rollout.play_stats import PlayStats
from mafrt.rollout.player import Player
from mafrt.rollout.stratified_order import StratifiedOrder, strata_of
from mafrt.rollout.task_stream import TaskStream
from mafrt.runners.algorithm import Rule
from mafrt.runners.async_rollout import Ahead
from mafrt.runners.judge import Coaching

if TYPE_CHECKING:
    from mafrt.models.shared_base import SharedBase


class Batch(NamedTuple):
    """The batch of one iteration."""

    episodes: list[Episode]
    stats: PlayStats
    """other counts"""
    drawn: int
    """the position in the data afterwards"""


class Playing:
    """Plays and judges the batches of a run.

    Args:
        env: its siblings are played, one for each slot of this process.
        base: the shared base; it has the adapters of the team.
        config: all settings.
        rule: whose needs the batches meet.
        player: plays with the adapters of the moment; evaluations use the same one.
        context: of credit, which tells a group without spread.
        coaching: judges each batch; None without a coach.
        ahead: plays one step behind the learner; None to play when the batch is asked for.
        interrupted: whether the run was asked to stop.
    """

    def __init__(
        self,
        env: Env,
        base: SharedBase,
        config: TrainConfig,
        rule: Rule,
        player: Player,
        context: CreditContext,
        coaching: Coaching | None,
        ahead: Ahead[Batch] | None,
        interrupted: Callable[[], bool],
    ) -> None:
        play = config.play
        self.env, self.base, self.config, self.rule = env, base, config, rule
        self.player, self.context, self.coaching = player, context, coaching
        self.ahead, self.interrupted = ahead, interrupted
        self.blocks = play.n_rollout_threads // play.n_samples
        # Batches that are played in a thread of their own must not share a process group with the learner.
        self.processes = base.processes.beside() if ahead else base.processes
        self.envs = [env.spawn() for _ in own_slots(base.processes, play.n_rollout_threads, play.n_samples)]
        self.order = (
            StratifiedOrder(strata_of(env, play.stratify), config.run.seed, self.blocks) if play.stratify else None
        )

    def batch(self, iteration: int, drawn: int) -> Batch:
        """The batch of `iteration`, played now or, one step behind, while the last one was learnt from.

        Args:
            iteration: iterations completed before it.
            drawn: the position in the data before it.

        Raises:
            EnvError: not one episode was finished.
            CoachError, EngineDownError: the coach or the engine cannot go on.
        """
        play = partial(self.play, iteration, drawn)
        return play() if self.ahead is None else self.ahead.batch(play)

    def start(self, iteration: int, drawn: int) -> None:
        """Have the batch of `iteration` played beside the learner, with the weights of now; one step behind only."""
        if self.ahead is not None:
            self.ahead.take()
            self.ahead.start(partial(self.play, iteration, drawn))

    def wait(self) -> None:
        """Block until the background rollout ends; engines are not thread-safe."""
        if self.ahead is not None:
            self.ahead.wait()

    def play(self, iteration: int, drawn: int) -> Batch:
        """Play the batch of `iteration` now; see `batch`."""
        player, play = self._cast(iteration), self.config.play
        first = self._stream(iteration, self.blocks, drawn, 0, turns=play.episode_length * len(player.team.agents))
        episodes, stats = self._play_through(player, first)
        if not episodes and not self.interrupted():
            raise stats.last_error or EnvError("No episode was finished in this iteration; see the log for why.")
        if not self.rule.sampling_rounds:
            return Batch(episodes, stats, first.drawn)
        found = resample(
            episodes,
            stats,
            rounds=self.rule.sampling_rounds,
            flat=lambda some: algorithms.groups_without_spread(some, self.rule.settings, self.context),
            stream=partial(self._stream, iteration),
            play=partial(self._play_through, player),
            blocks=self.blocks,
            drawn=first.drawn,
            dealt=first.rounds,
        )
        stats.sampling_rounds, stats.groups_replaced = found.rounds, found.replaced
        return Batch(found.episodes, stats, found.drawn)

    def _cast(self, iteration: int) -> Player:
        """The player with the adapters that the schedule has for this iteration, or with their copies."""
        cast = self.rule.schedule.plan(iteration).adapters
        if self.ahead is None:
            return self.player.cast(cast)
        return self.player.cast(self.ahead.adapters(cast))

    def _stream(self, iteration: int, tasks: int, drawn: int, dealt: int, turns: int = 1) -> TaskStream:
        play = self.config.play
        return TaskStream(
            slots=tasks * play.n_samples,
            n_samples=play.n_samples,
            turns=turns,
            num_tasks=self.env.num_tasks,
            seed=self.config.run.seed,
            iteration=iteration + 1,
            drawn=drawn,
            rounds=dealt,
            order=self.order,
        )

    def _play_through(self, player: Player, starts: TaskStream) -> tuple[list[Episode], PlayStats]:
        with self.base.whole():
            episodes, stats = play_together(self.processes, player, self.envs, starts, self.interrupted)
            if self.coaching is not None:
                self._judge(self.coaching, episodes)
        return episodes, stats

    def _judge(self, coaching: Coaching, episodes: list[Episode]) -> None:
        """Have the batch judged, by one process for all."""

        def judge() -> list[Any]:
            try:
                coaching.judge(episodes)
            finally:
                coaching.save()
            return records.pack_verdicts(episodes)

        verdicts = self.processes.lead(judge)
        if not self.processes.main:
            records.unpack_verdicts(episodes, verdicts)
