"""The on-policy loop: play -> coach -> value -> credit -> learn -> log -> checkpoint -> evaluate.

An iteration is a pure function of the weights, the optimizers, the position in the data and the seed. That is all a
checkpoint holds, and why a resumed run repeats exactly what an uninterrupted one would have done.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mafrt import engines
from mafrt.coach import Coach
from mafrt.config.team import LoraSpec, Team
from mafrt.config.train_config import TrainConfig
from mafrt.core.errors import (
    BudgetSpentError,
    CoachError,
    CoachInterruptedError,
    EngineDownError,
    MafrtError,
    ProcessLostError,
)
from mafrt.core.rng_state import seed_random_state
from mafrt.core.seeding import seed_of
from mafrt.core.signals import StopRequest
from mafrt.engines import Engine
from mafrt.environment.base import Env
from mafrt.rollout.distributed_rollout import stopping
from mafrt.rollout.tree_player import TreePlayer
from mafrt.runners.algorithm import resolve_rule
from mafrt.runners.async_rollout import STATE, Ahead, check_async
from mafrt.runners.checks import check_processes, check_prompts, check_team, check_tree, check_window
from mafrt.runners.collect import Batch, Playing
from mafrt.runners.evaluation import evaluate
from mafrt.runners.identity import describe_run, refuse_changes
from mafrt.runners.judge import Coaching, prepare_coach
from mafrt.runners.run_state import RunState, digest, restore, save
from mafrt.runners.schedules import Plan
from mafrt.storage.load_path import Loadable
from mafrt.storage.metrics import MetricsWriter
from mafrt.storage.run_dir import RunDir, episode_record

if TYPE_CHECKING:
    from mafrt.models.shared_base import SharedBase


@dataclass(frozen=True)
class Progress:
    """What a progress bar shows after an iteration."""

    iteration: int
    iterations: int
    reward: float
    """mean score of the iteration's episodes"""
    tokens_per_s: float
    """tokens sampled and learnt from, over the whole iteration"""
    seconds: float
    """of the iteration"""
    metrics: Mapping[str, float]
    """everything that `metrics.jsonl` has of it"""


@dataclass(frozen=True)
class Summary:
    """How a run went."""

    before: dict[str, float] | None
    """metrics of the evaluation before training; None if there was none"""
    after: dict[str, float] | None
    """metrics of the evaluation after training; None if there was none or the run was stopped"""
    iterations: int
    """iterations completed"""
    seconds: float
    """of training in this process, evaluations before and after left out"""
    run_dir: Path | None
    stopped_by: str | None
    """what ended the run early: the name of a signal, or why the coach or the engine could not go on"""
    paused: bool = False
    """whether somebody has to mend something before the run can go on (a coach or an engine that is down)"""


class OnPolicy:
    """Trains the adapters of `team` on `base` by playing `env`.

    Args:
        env: what is played; siblings are made with `env.spawn()`.
        team: its agents; each speaks with its adapter, added to `base` if it is not there yet.
        base: the shared base.
        config: all settings.
        eval_env: what is played to evaluate; `env` itself by default.
        run_dir: where everything is written; nothing is written without one.
        resume: what `--load_path` resolved to: a checkpoint to go on from, or initial adapters.
        engine: what samples; the local engine on `base` by default.
        coach: who scores turns; made from the settings by default.
        args: what goes to `args.yaml`; the config by default.
        command: the script that starts the run, for `run.json`; None from Python.
        accept_changes: go on with `resume` although its environment, team, data, rubric or base changed since.
        progress: called after every iteration.

    Raises:
        ConfigError: settings that contradict each other, the team or the environment.
        CheckpointError: `resume` does not fit.
    """

    def __init__(
        self,
        env: Env,
        team: Team,
        base: SharedBase,
        config: TrainConfig,
        *,
        eval_env: Env | None = None,
        run_dir: str | Path | None = None,
        resume: Loadable | None = None,
        engine: Engine | None = None,
        coach: Coach | None = None,
        args: Mapping[str, Any] | None = None,
        command: str | None = None,
        accept_changes: bool = False,
        progress: Callable[[Progress], None] | None = None,
    ) -> None:
        from mafrt.runners.build import make_engine, make_player, place_adapters, sampling_of
        from mafrt.runners.update import Learning

        self.rule = resolve_rule(config, team)
        self.env, self.eval_env = env, eval_env or env
        self.team, self.base, self.config = team, base, config
        self.processes = base.processes
        check_processes(self.processes, config)
        self.stop = StopRequest()
        self.run_dir = Path(run_dir) if run_dir else None
        self.resume = resume
        self.args = dict(args) if args is not None else config.flat()
        self.progress = progress or (lambda _: None)
        # Nothing here draws from the global generators, but an environment or a library may.
        seed_random_state(config.run.seed)
        spec = LoraSpec(config.team.lora_rank, config.team.lora_alpha, config.team.lora_targets)
        place_adapters(base, team, spec, config.run.seed)
        check_team(env, team)
        self.record = describe_run(team, self.args, command=command, env=env, eval_env=eval_env, base=base)
        refuse_changes(resume, self.record, accept=accept_changes)
        window = check_window(config.play.context_window, base.context_window)
        for played in {id(env): env, id(self.eval_env): self.eval_env}.values():
            check_prompts(played, team, base.tokenizer, window)
        self._own_coach = prepare_coach(config, env) if coach is None else None
        coach = coach or self._own_coach
        if coach is not None:
            coach.load(base)
        check_tree(env, self.rule.tree_samples, coach if config.credit.process_weight else None)
        check_async(config, team, sharded=base.sharded)
        ahead = Ahead[Batch](base, team.adapters) if config.play.async_steps else None
        self._own_engine = None if engine else make_engine(base, config, window)
        self.engine: Engine = engine or self._own_engine  # type: ignore[assignment]
        self.coaching = Coaching(coach, config, team, base, self.engine, self.rule.level) if coach else None
        of_credit = {**self.rule.credit, **(self.coaching.credit if self.coaching else {})}
        sampling = {agent.name: sampling_of(config, team, agent.name) for agent in team.agents}
        self.player = make_player(self.engine, base, team, config, self.rule, sampling, window, of_credit)
        if self.coaching is not None and config.coach.coach_feedback:
            self.player.feedback = self.coaching.feedback
        if self.coaching is not None and isinstance(self.player, TreePlayer):
            check_processes(self.processes, config, judged=True)
            self.player.judge = self.coaching.feedback
        self.playing = Playing(
            env,
            base,
            config,
            self.rule,
            self.player,
            of_credit,
            self.coaching,
            ahead,
            lambda: self.stop.requested,
            self.run_dir,
        )
        self.learning = Learning(base, team, config, self.rule, sampling, self.engine, of_credit, self.coaching)
        self.paused = False
        self.state = RunState()
        self.saved: int | None = None
        if resume is not None:
            restore(resume, self.state, base, team, self.learning.valuation, self.learning.learner)
            self.learning.kl_coef = self.state.kl_coef
            if ahead is not None:
                ahead.load(resume.path / "state" / STATE)

    def run(self) -> Summary:
        """Train until the last iteration, or until SIGTERM or Ctrl-C; both leave a checkpoint."""
        with StopRequest() as stop:
            self.stop = stop
            if self.coaching is not None:
                self.coaching.coach.interrupted = lambda: stop.requested
            # Nobody changes the run's folder while another process may still be reading from it.
            self.processes.same(self._identity(), "the run")
            try:
                disk = None if self.run_dir is None else self._open(self.run_dir)
                if disk is None:
                    return self._train(None, None)
                with disk, MetricsWriter(disk) as writer:
                    return self._train(disk, writer)
            except ProcessLostError:
                raise  # play, too, may be waiting for whoever is gone
            except Exception as error:
                stop.request(str(error))
                self.playing.wait()  # nobody may sample while engine and interpreter come to their end
                raise

    def close(self) -> None:
        """Release what the runner itself has made: a coach's connections, an engine's processes."""
        if self._own_engine is not None:
            engines.close(self._own_engine)
        if self._own_coach is not None:
            self._own_coach.close()

    def cast(self) -> Plan:
        """Give every agent the adapter that the schedule has for it in this iteration."""
        plan = self.rule.schedule.plan(self.state.iteration)
        self.player.adapters = self.learning.learner.adapter_of = plan.adapters
        return plan

    def _open(self, run_dir: Path) -> RunDir | None:
        """The run's folder in the process that writes; None in the others. What is wrong with it ends all of them."""
        found: list[RunDir] = []
        self.processes.lead(lambda: found.append(RunDir.open(run_dir, self.args, self.resume, self.record)))
        return found[0] if found else None

    def _identity(self) -> dict[str, Any]:
        """What has to be the same in all processes."""
        return {
            "iteration": self.state.iteration,
            "base": self.base.fingerprint(),
            "adapters": digest(self.base, self.team.adapters),
            "settings": self.config.flat(),
        }

    def _train(self, disk: RunDir | None, writer: MetricsWriter | None) -> Summary:
        state, run = self.state, self.config.run
        after, seconds = None, 0.0
        if self.coaching is not None and disk is not None:
            self.coaching.open(disk.path)
        while not self._stopping():
            # Evaluations come before the iteration, not after: a run that is stopped amid one repeats it, exactly.
            if self._evaluation_due():
                self.playing.wait()
                with self._pausing():
                    found = self._evaluate(disk, writer)
                    if state.iteration == 0:
                        state.before = found
                    if state.iteration == run.iterations:
                        after = found
            if state.iteration == run.iterations or self._stopping():
                break
            batch, started = None, time.perf_counter()
            with self._pausing(), self._keeping(disk):
                batch = self.playing.batch(state.iteration, state.drawn)
            if batch is None or self._stopping():
                break  # half an iteration teaches nothing; the resumed run plays it again, and whole
            played = time.perf_counter()
            if self.playing.ahead is None:
                engines.rest(self.engine)
            elif state.iteration + 1 < run.iterations:
                self.playing.start(state.iteration + 1, batch.drawn)
            metrics = self.learning.learn(batch.episodes, batch.stats, state.iteration)
            state.iteration, state.drawn = state.iteration + 1, batch.drawn
            state.tokens, state.kl_coef = state.tokens + batch.stats.tokens, self.learning.kl_coef
            learnt = time.perf_counter()
            seconds += learnt - started
            timings = {
                "seconds_play": played - started,
                "seconds_learn": learnt - played,
                "tokens_per_s": batch.stats.tokens / (learnt - started),
            }
            if self.coaching is not None:
                timings |= self.coaching.taken()
            if disk is not None and writer is not None:
                writer.write(state.iteration, metrics, timings)
                if run.log_episodes:
                    records = [episode_record(episode, tokens=run.log_tokens) for episode in batch.episodes]
                    disk.episodes.append(state.iteration, records)
            if state.iteration == run.iterations or _divides(run.save_interval, state.iteration):
                self._checkpoint(disk)
            speed, took = timings["tokens_per_s"], learnt - started
            self.progress(Progress(state.iteration, run.iterations, metrics["score"], speed, took, metrics))
        self.playing.wait()
        self._checkpoint(disk)
        return Summary(state.before, after, state.iteration, seconds, self.run_dir, self.stop.reason, self.paused)

    @contextmanager
    def _pausing(self) -> Iterator[None]:
        """Within it, a coach or an engine that cannot go on asks the run to stop.

        The iteration is lost, not what was learnt before it; what was judged of it lies in the coach's cache.
        """
        try:
            yield
        except CoachInterruptedError:
            pass  # whoever asked for it has already asked the run to stop
        except (CoachError, EngineDownError) as error:
            if self.stop.requested:
                return  # Ctrl-C ends an engine's process too, and is no accident
            self.paused = not isinstance(error, BudgetSpentError)
            self.stop.request(str(error))

    @contextmanager
    def _keeping(self, disk: RunDir | None) -> Iterator[None]:
        """Within it, an error leaves a checkpoint: nothing has moved since the last iteration."""
        try:
            yield
        except (CoachError, EngineDownError, ProcessLostError):
            raise  # the loop ends with a checkpoint for the first two; a lost process could not take part in one
        except MafrtError:
            if self.state.iteration:
                self._checkpoint(disk)
            raise

    def _stopping(self) -> bool:
        return stopping(self.stop, self.processes)

    def _evaluation_due(self) -> bool:
        run, done = self.config.run, self.state.iteration
        return run.eval_episodes > 0 and (done in (0, run.iterations) or _divides(run.eval_interval, done))

    def _evaluate(self, disk: RunDir | None, writer: MetricsWriter | None) -> dict[str, float] | None:
        """Play the evaluation tasks with the adapters as they are; None if it was interrupted."""
        self.cast()
        with self.base.whole():
            found = evaluate(
                self.eval_env,
                self.player,
                tasks=self.config.run.eval_episodes,
                samples=self.config.run.eval_samples,
                greedy=True,
                seed=seed_of(self.config.run.seed, "evaluation"),
                interrupted=lambda: self.stop.requested,
                processes=self.processes,
            )
        if found is None:
            return None
        metrics = found.metrics()
        if writer is not None:
            done = self.state.iteration
            when = "before" if done == 0 else "after" if done == self.config.run.iterations else "during"
            writer.write_evaluation(done, when, metrics)
        return metrics

    def _checkpoint(self, disk: RunDir | None) -> None:
        """Keep what was learnt, if that has not been done. All processes take part; `disk` is None but in one."""
        if self.run_dir is None or self.saved == self.state.iteration:
            return
        adapters = digest(self.base, self.team.adapters)
        self.processes.same(adapters, f"what was learnt until iteration {self.state.iteration}")
        ahead, learning = self.playing.ahead, self.learning
        extra = {} if ahead is None else {STATE: ahead.state()}
        save(disk, self.state, self.base, self.team, learning.valuation, learning.learner, self.config.run, extra)
        self.saved = self.state.iteration


def _divides(interval: int, iteration: int) -> bool:
    """Whether something with this interval is due after `iteration`; never with interval 0."""
    return interval > 0 and iteration % interval == 0
