"""The on-policy loop: play -> coach -> value -> credit -> learn -> log -> checkpoint -> evaluate.

An iteration is a pure function of the weights, the optimizers, the position in the data and the seed. That is all a
checkpoint holds, and why a resumed run repeats exactly what an uninterrupted one would have done.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mafrt import engines
from mafrt.coach import Coach
from mafrt.config.team import LoraSpec, Team
from mafrt.config.train_config import TrainConfig
from mafrt.core.errors import (
    ProcessLostError,
)
from mafrt.core.rng_state import seed_random_state
from mafrt.core.seeding import seed_of
from mafrt.core.signals import StopRequest
from mafrt.engines import Engine
from mafrt.environment.base import Env
from mafrt.environment.workers import guarded
from mafrt.runners.algorithm import resolve_rule
from mafrt.runners.async_rollout import STATE, Ahead, check_async
from mafrt.runners.checks import check_processes, check_prompts, check_team, check_tree, check_window
from mafrt.runners.collect import Batch, Playing
from mafrt.runners.doctor import Doctor
from mafrt.runners.evaluation import evaluate
from mafrt.runners.identity import describe_run, refuse_changes
from mafrt.runners.judge import Coaching, prepare_coach
from mafrt.runners.limits import check_limits
from mafrt.runners.loop import Learnt, Loop, Progress, Summary, divides
from mafrt.runners.run_state import RunState, digest, restore, save
from mafrt.runners.schedules import Plan
from mafrt.storage.load_path import Loadable
from mafrt.storage.run_dir import RunDir, episode_record

if TYPE_CHECKING:
    from mafrt.models.shared_base import SharedBase


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
        timeout_s = config.play.env_timeout_s
        self.env = env = guarded(env, timeout_s)
        self.eval_env = env if eval_env is None else guarded(eval_env, timeout_s)
        self.team, self.base, self.config = team, base, config
        self.processes = base.processes
        check_processes(self.processes, config)
        self.stop = StopRequest()
        self.run_dir = Path(run_dir) if run_dir else None
        self.resume = resume
        self.args = dict(args) if args is not None else config.flat()
        self.progress = progress
        # Nothing here draws from the global generators, but an environment or a library may.
        seed_random_state(config.run.seed)
        spec = LoraSpec(config.team.lora_rank, config.team.lora_alpha, config.team.lora_targets)
        place_adapters(base, team, spec, config.run.seed, resume)
        check_team(env, team)
        check_limits(config, team, base.name, tokens_given=False)
        self.record = describe_run(team, self.args, command=command, env=env, eval_env=eval_env, base=base)
        refuse_changes(resume, self.record, accept=accept_changes)
        window = check_window(config.play.context_window, base.context_window)
        for played in {id(env): env, id(self.eval_env): self.eval_env}.values():
            check_prompts(played, team, base.tokenizer, window)
        self._own_coach = prepare_coach(config, env) if coach is None else None
        coach = coach or self._own_coach
        if coach is not None:
            coach.load(base)
        check_tree(env, self.rule.tree_samples, coach if config.algorithm.process_weight else None)
        check_async(config, team, sharded=base.sharded)
        ahead = Ahead[Batch](base, team.adapters) if config.play.async_steps else None
        self._own_engine = None if engine else make_engine(base, config, window)
        self.engine: Engine = engine or self._own_engine  # type: ignore[assignment]
        self.coaching = (
            Coaching(coach, config, team, base, self.engine, self.rule.settings.level, lambda: self.stop.requested)
            if coach
            else None
        )
        context = replace(self.rule.context(), **(self.coaching.credit if self.coaching else {}))
        sampling = {agent.name: sampling_of(config, team, agent.name) for agent in team.agents}
        feedback = None if self.coaching is None else self.coaching.feedback
        self.player = make_player(self.engine, base, team, config, self.rule, sampling, window, context, feedback)
        if feedback is not None and self.rule.tree_samples > 1:
            check_processes(self.processes, config, judged=True)
        self.playing = Playing(
            env,
            base,
            config,
            self.rule,
            self.player,
            context,
            self.coaching,
            ahead,
            lambda: self.stop.requested,
        )
        self.learning = Learning(base, team, config, self.rule, sampling, self.engine, context, self.coaching)
        self.state = RunState()
        self.doctor = Doctor(team.names if "all" not in config.team.freeze else ())
        if resume is not None:
            restore(resume, self.state, base, team, self.learning.valuation, self.learning.learner)
            self.learning.kl_coef = self.state.kl_coef
            if ahead is not None:
                ahead.load(resume.path / "state" / STATE)

    def run(self) -> Summary:
        """Train until the last iteration, or until SIGTERM or Ctrl-C; both leave a checkpoint."""
        with StopRequest() as stop:
            self.stop = stop
            # No process changes the run's folder while another may still be reading from it.
            self.processes.same(self._identity(), "the run")
            loop = Loop(self, self.config.run, stop, processes=self.processes, progress=self.progress)
            opened = None if self.coaching is None else self._open_coach
            try:
                return loop.run(self.run_dir, self.args, self.resume, self.record, opened)
            except ProcessLostError:
                raise  # the background rollout may be waiting for the lost process too
            except Exception as error:
                stop.request(str(error))
                self.playing.wait()  # no sampling while engine and interpreter are being closed
                raise

    def close(self) -> None:
        """Release the runner's own coach and engine: connections and processes."""
        if self._own_engine is not None:
            engines.close(self._own_engine)
        if self._own_coach is not None:
            self._own_coach.close()

    def cast(self) -> Plan:
        """Give every agent the adapter that the schedule has for it in this iteration."""
        plan = self.rule.schedule.plan(self.state.iteration)
        self.player = self.player.cast(plan.adapters)
        return plan

    # ------------------------------------------------------------------------------- what the loop asks for

    @property
    def iteration(self) -> int:
        return self.state.iteration

    @property
    def iterations(self) -> int:
        return self.config.run.iterations

    @property
    def before(self) -> dict[str, float] | None:
        return self.state.before

    @before.setter
    def before(self, metrics: dict[str, float] | None) -> None:
        self.state.before = metrics

    def evaluation_due(self) -> bool:
        run, done = self.config.run, self.state.iteration
        return run.eval_episodes > 0 and (done in (0, run.iterations) or divides(run.eval_interval, done))

    def evaluate(self) -> dict[str, float] | None:
        """Play the evaluation tasks with the adapters as they are; None if it was interrupted."""
        self.playing.wait()
        self.cast()
        with self.base.whole():
            evaluation = evaluate(
                self.eval_env,
                self.player,
                tasks=self.config.run.eval_episodes,
                samples=self.config.run.eval_samples,
                greedy=True,
                seed=seed_of(self.config.run.seed, "evaluation"),
                interrupted=lambda: self.stop.requested,
                processes=self.processes,
            )
        if evaluation is None:
            return None
        metrics = evaluation.metrics()
        if self.processes.main:
            tasks = max(len(evaluation.scores), len(evaluation.greedy_scores))
            self.doctor.look_at_evaluation(self.state.iteration, metrics, tasks)
        return metrics

    def collect(self) -> Batch:
        """Play and judge the episodes of the next iteration."""
        return self.playing.batch(self.state.iteration, self.state.drawn)

    def learn(self, batch: Batch) -> Learnt:
        """Value, credit and update; with `async_steps`, the next batch is played meanwhile."""
        if self.playing.ahead is None:
            engines.rest(self.engine)
        elif self.state.iteration + 1 < self.config.run.iterations:
            self.playing.start(self.state.iteration + 1, batch.drawn)
        metrics = self.learning.learn(batch.episodes, batch.stats, self.state.iteration)
        self.state.iteration, self.state.drawn = self.state.iteration + 1, batch.drawn
        self.state.tokens, self.state.kl_coef = self.state.tokens + batch.stats.tokens, self.learning.kl_coef
        if self.processes.main:
            self.doctor.look(self.state.iteration, metrics, batch.episodes)
        run = self.config.run
        return Learnt(
            metrics,
            self.coaching.taken() if self.coaching is not None else {},
            [episode_record(episode, tokens=run.log_tokens) for episode in batch.episodes] if run.log_episodes else (),
            batch.stats.tokens,
        )

    def save(self, disk: RunDir | None) -> None:
        """Write a checkpoint; all processes take part."""
        if self.run_dir is None:
            return
        adapters = digest(self.base, self.team.adapters)
        self.processes.same(adapters, f"the weights after iteration {self.state.iteration}")
        ahead, learning = self.playing.ahead, self.learning
        extra = {} if ahead is None else {STATE: ahead.state()}
        save(disk, self.state, self.base, self.team, learning.valuation, learning.learner, self.config.run, extra)

    def findings(self) -> list[str]:
        return self.doctor.lines()

    def finish(self, disk: RunDir | None) -> None:
        self.playing.wait()

    def _open_coach(self, disk: RunDir) -> None:
        assert self.coaching is not None
        self.coaching.open(disk.path)

    def _identity(self) -> dict[str, Any]:
        """Everything that has to be the same in all processes."""
        return {
            "iteration": self.state.iteration,
            "base": self.base.fingerprint(),
            "adapters": digest(self.base, self.team.adapters),
            "settings": self.config.flat(),
        }
