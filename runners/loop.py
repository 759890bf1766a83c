"""The loop that on-policy and offline training share: evaluate -> collect -> learn -> log -> checkpoint.

A `Training` implements collection and update; the loop orders them, writes the files of the run, and ends
on the last iteration, a signal, or a coach or engine that is down. Evaluations come before an iteration: a run that
is stopped in the middle of an iteration repeats it exactly.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from mafrt.config.train_config import RunConfig
from mafrt.core.distributed import ALONE, Processes
from mafrt.core.errors import (
    BudgetSpentError,
    CoachError,
    CoachInterruptedError,
    ConfigError,
    EngineDownError,
    EnvDownError,
    MafrtError,
    ProcessLostError,
)
from mafrt.core.signals import StopRequest
from mafrt.core.text import counted
from mafrt.rollout.distributed_rollout import stopping
from mafrt.storage.load_path import LoadSource
from mafrt.storage.metrics import MetricsWriter
from mafrt.storage.run_dir import RunDir
from mafrt.storage.run_record import RunRecord
from mafrt.storage.trackers import check_services

B = TypeVar("B")


@dataclass(frozen=True)
class IterationResult:
    """Result of one iteration."""

    metrics: Mapping[str, float]
    """line of `metrics.jsonl`"""
    timings: Mapping[str, float] = field(default_factory=dict)
    """line of `timings.jsonl`, besides the seconds that the loop measures"""
    episodes: Sequence[Mapping[str, Any]] = ()
    """lines of `episodes.jsonl`"""
    tokens: int = 0
    """tokens sampled; 0 in offline training"""


@dataclass(frozen=True)
class Progress:
    """State of a run after an iteration, for progress callbacks."""

    iteration: int
    """iterations completed"""
    iterations: int
    """iterations in all"""
    seconds: float
    """duration of the iteration"""
    metrics: Mapping[str, float]
    timings: Mapping[str, float]


@dataclass(frozen=True)
class RunSummary:
    """Result of a run."""

    before: dict[str, float] | None
    """metrics of the evaluation before training; None if there was none"""
    after: dict[str, float] | None
    """metrics of the evaluation after training; None if there was none or the run was stopped"""
    iterations: int
    """iterations completed"""
    seconds: float
    """of training in this process, without evaluations"""
    run_dir: Path | None
    stopped_by: str | None
    """name of the signal that ended the run early, or the reason why the coach or the engine could not go on"""
    paused: bool = False
    """whether the user must fix the coach or the engine before the run can go on"""
    findings: tuple[str, ...] = ()
    """diagnoses of the run (`mafrt.runners.doctor`), one sentence each"""


class Training(Protocol[B]):
    """The part of a run that differs between on-policy and offline training."""

    @property
    def iteration(self) -> int:
        """Iterations completed."""

    @property
    def iterations(self) -> int:
        """Iterations in all."""

    before: dict[str, float] | None
    """metrics of the evaluation before training, kept in checkpoints"""

    @property
    def metrics(self) -> Collection[str]:
        """Names of its own metrics, beside those of the glossary."""

    def evaluation_due(self) -> bool:
        """Whether the adapters are evaluated before the next iteration."""

    def evaluate(self) -> dict[str, float] | None:
        """Metrics of the adapters as they are; None if it was interrupted."""

    def sample(self) -> str | None:
        """An episode of the last evaluation as text; None if there is none."""

    def collect(self) -> B | None:
        """The batch of the next iteration; None if it was interrupted. Moves no weights."""

    def learn(self, batch: B) -> IterationResult:
        """Learn from the batch and count the iteration."""

    def save(self, disk: RunDir | None) -> None:
        """Write a checkpoint of the iteration. All processes call it; `disk` is None in all but one."""

    def findings(self) -> Sequence[str]:
        """Diagnoses so far, one sentence each."""

    def finish(self, disk: RunDir | None) -> None:
        """Called once after the last iteration of this process, before its last checkpoint."""


class Loop(Generic[B]):
    """Runs a `Training` to its end.

    Args:
        training: collects and learns.
        run: intervals of checkpoints.
        stop: the request to stop that signals set.
        processes: those of the run.
        progress: called after every iteration.
    """

    def __init__(
        self,
        training: Training[B],
        run: RunConfig,
        stop: StopRequest,
        *,
        processes: Processes = ALONE,
        progress: Callable[[Progress], None] | None = None,
    ) -> None:
        self.training, self.config, self.stop = training, run, stop
        self.processes, self.progress = processes, progress or (lambda _: None)
        self.paused = False
        # So that the last iteration, which also ends the loop, is saved once.
        self._saved: int | None = None
        self._disk: RunDir | None = None

    def run(
        self,
        run_dir: Path | None,
        args: Mapping[str, Any],
        resume: LoadSource | None,
        record: RunRecord,
        opened: Callable[[RunDir], None] | None = None,
    ) -> RunSummary:
        """Open the run directory, if there is one, and train in it; `opened` is called with it first."""
        check_length(self.training.iteration, self.training.iterations)
        if run_dir is not None:
            self.processes.lead(lambda: check_services(self.config.trackers))
        self._disk = None if run_dir is None else self._open(run_dir, args, resume, record)
        if self._disk is None:
            return self._train(run_dir, None)
        with (
            self._disk,
            MetricsWriter(self._disk, trackers=self.config.trackers, declared=self.training.metrics) as writer,
        ):
            if opened is not None:
                opened(self._disk)
            return self._train(run_dir, writer)

    def _open(
        self, run_dir: Path, args: Mapping[str, Any], resume: LoadSource | None, record: RunRecord
    ) -> RunDir | None:
        """The run's folder in the process that writes, None in the others; an error there ends all of them."""
        opened: list[RunDir] = []
        self.processes.lead(lambda: opened.append(RunDir.open(run_dir, args, resume, record)))
        return opened[0] if opened else None

    def _train(self, run_dir: Path | None, writer: MetricsWriter | None) -> RunSummary:
        training, after, seconds = self.training, None, 0.0
        while not self._stopping():
            if training.evaluation_due():
                with self._pausing():
                    metrics = self._evaluate(writer)
                    if training.iteration == 0:
                        training.before = metrics
                    if training.iteration == training.iterations:
                        after = metrics
                        self._saved = None  # saved again, with the best weights that this evaluation has chosen
            # Looked at again: an evaluation takes long, and a fallen score asks to stop.
            if training.iteration == training.iterations or self._stopping():
                break
            batch, started = None, time.perf_counter()
            with self._pausing(), self._keeping():
                batch = training.collect()
            if batch is None or self._stopping():
                break  # half a batch is discarded; the resumed run collects it again
            collected = time.perf_counter()
            result = training.learn(batch)
            ended = time.perf_counter()
            seconds += ended - started
            timings = self._timings(result, collected - started, ended - collected)
            if self._disk is not None and writer is not None:
                # Lines before the checkpoint: a kill in between leaves lines too many, which a resumed run drops.
                writer.write(training.iteration, result.metrics, timings)
                if result.episodes:
                    self._disk.episodes.append(training.iteration, result.episodes)
            if training.iteration == training.iterations or divides(self.config.save_interval, training.iteration):
                self._checkpoint()
            self.progress(Progress(training.iteration, training.iterations, ended - started, result.metrics, timings))
        # First of all: it ends the background rollout, whose copies are a part of the checkpoint.
        training.finish(self._disk)
        self._checkpoint()
        return RunSummary(
            training.before,
            after,
            training.iteration,
            seconds,
            run_dir,
            self.stop.reason,
            self.paused,
            tuple(training.findings()),
        )

    @staticmethod
    def _timings(result: IterationResult, collecting_s: float, learning_s: float) -> dict[str, float]:
        if not result.tokens:
            return {"seconds_learn": collecting_s + learning_s, **result.timings}
        return {
            "seconds_play": collecting_s,
            "seconds_learn": learning_s,
            "tokens_per_s": result.tokens / (collecting_s + learning_s),
            **result.timings,
        }

    def _evaluate(self, writer: MetricsWriter | None) -> dict[str, float] | None:
        metrics = self.training.evaluate()
        if metrics is not None and writer is not None:
            done = self.training.iteration
            when = "before" if done == 0 else "after" if done == self.training.iterations else "during"
            writer.write_evaluation(done, when, metrics)
            if (sample := self.training.sample()) is not None:
                writer.write_text(done, "episode", sample)
        return metrics

    def _checkpoint(self) -> None:
        """Save the iteration, unless that has been done or there is nowhere to save it."""
        if self._saved != self.training.iteration:
            self.training.save(self._disk)
            self._saved = self.training.iteration

    @contextmanager
    def _pausing(self) -> Iterator[None]:
        """Within it, a coach or an engine that cannot go on asks the run to stop.

        The iteration is lost, but nothing learnt before it; its verdicts stay in the coach's cache.
        """
        try:
            yield
        except CoachInterruptedError:
            pass  # the interruption came with a request to stop
        except (CoachError, EngineDownError, EnvDownError) as error:
            if self.stop.requested:
                return  # Ctrl-C reaches the engine's process too, so this is no failure
            # A spent budget is an end that was asked for; the others are faults that go away.
            self.paused = not isinstance(error, BudgetSpentError)
            self.stop.request(str(error))

    @contextmanager
    def _keeping(self) -> Iterator[None]:
        """Within it, an error leaves a checkpoint: no weights have moved since the last iteration."""
        try:
            yield
        except (CoachError, EngineDownError, EnvDownError, ProcessLostError):
            raise  # the loop ends with a checkpoint for the first two; a lost process could not take part in one
        # What was learnt since the last checkpoint is saved before the error ends the run.
        except MafrtError:
            if self.training.iteration:
                self._checkpoint()
            raise

    def _stopping(self) -> bool:
        return stopping(self.stop, self.processes)


def check_length(done: int, iterations: int) -> None:
    """ConfigError if a run that goes on has more iterations behind it than it is to have in all."""
    if done > iterations:
        raise ConfigError(
            f"The run has {counted(done, 'iterations')} behind it and iterations is {iterations}; give at least {done},"
            " or go back by --load_path RUN/checkpoints/step_... with another --run_dir."
        )


def divides(interval: int, iteration: int) -> bool:
    """Whether something with this interval is due after `iteration`; never with interval 0."""
    return interval > 0 and iteration % interval == 0
