"""The on-policy loop: play -> coach -> value -> credit -> learn -> log -> checkpoint -> evaluate.

An iteration is a pure function of the weights, the optimizers, the position in the data and the seed. A checkpoint
holds exactly these, so a resumed run repeats an uninterrupted one.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mafrt import engines
from mafrt.algorithms.audit import audit_metrics
from mafrt.coach import Coach
from mafrt.config.resolve import declared
from mafrt.config.team import Team
from mafrt.config.train_config import TrainConfig
from mafrt.core.atomic_files import load_tensors
from mafrt.core.errors import ProcessLostError
from mafrt.core.rng_state import seed_random_state
from mafrt.core.seeding import seed_of
from mafrt.core.signals import StopRequest
from mafrt.environment.base import Env
from mafrt.environment.workers import guarded
from mafrt.rollout.thought_notes import note_thoughts
from mafrt.rollout.tree_player import show_advantages, to_learn
from mafrt.runners.algorithm import resolve_rule, with_reference
from mafrt.runners.async_rollout import STATE, AsyncRollout
from mafrt.runners.checks import check_bases, check_prompts, check_run, check_window
from mafrt.runners.collect import CollectedBatch, Collector, batch_metrics
from mafrt.runners.doctor import Doctor
from mafrt.runners.epochs import with_epochs
from mafrt.runners.evaluation import EvaluationPlan, evaluate
from mafrt.runners.held_out_guard import STATE as BEST_STATE
from mafrt.runners.held_out_guard import HeldOutGuard
from mafrt.runners.identity import FROM_PYTHON, Provenance, describe_run, refuse_changes, training_data
from mafrt.runners.judge import Judge, decoder, prepare_coach
from mafrt.runners.league import STATE as LEAGUE_STATE
from mafrt.runners.league import League
from mafrt.runners.loop import IterationResult, Loop, Progress, RunSummary, divides
from mafrt.runners.progress import shown
from mafrt.runners.run_state import RunState, data_start, digest, restore, save
from mafrt.runners.schedules import IterationPlan, SelfPlay
from mafrt.storage.checkpoint import REFERENCE
from mafrt.storage.episode_lines import episode_record
from mafrt.storage.load_path import LoadSource
from mafrt.storage.run_dir import RunDir
from mafrt.storage.transcripts import TranscriptWriter, as_text, wanted

if TYPE_CHECKING:
    from mafrt.models.several_bases import Bases
    from mafrt.runners.update import Updater

log = logging.getLogger(__name__)


class OnPolicy:
    """Trains the adapters of `team` on `base` by playing `env`.

    Args:
        env: the environment; copies are made with `env.spawn()`.
        team: its agents; each uses its adapter, added to `base` if missing.
        base: the shared base, or the bases of the team (`SeveralBases`).
        config: all settings.
        eval_env: the environment of evaluations; `env` by default.
        coach: scores the turns; made from the settings by default.
        run_dir: output folder; None: nothing is written.
        provenance: the run or the adapters to go on from, and the settings to record; by default a new run.

    Raises:
        ConfigError: settings that contradict each other, the team or the environment.
        CheckpointError: `provenance.resume` does not fit.

    >>> env, base = mafrt.make_env("math"), mafrt.SharedBase.load("teaching-base")
    >>> config = mafrt.TrainConfig.of(algorithm="grpo", iterations=1, n_rollout_threads=4, n_samples=2,
    ...                               max_new_tokens=4, eval_episodes=0)
    >>> runner = mafrt.OnPolicy(env, env.unwrapped.team, base, config)
    >>> runner.run().iterations, runner
    (1, <OnPolicy: grpo for reasoner, actor, iteration 1 of 1>)
    """

    def __init__(
        self,
        env: Env,
        team: Team,
        base: Bases,
        config: TrainConfig,
        *,
        eval_env: Env | None = None,
        coach: Coach | None = None,
        run_dir: str | Path | None = None,
        provenance: Provenance = FROM_PYTHON,
    ) -> None:
        from mafrt.runners.build import place_adapters

        config = with_reference(config, provenance.resume)
        self.rule = resolve_rule(config, team)
        timeout_s = config.play.env_timeout_s
        self.env = guarded(env, timeout_s)
        self.eval_env = self.env if eval_env is None else guarded(eval_env, timeout_s)
        self.team, self.base, self.processes = team, base, base.processes
        data = data_start(provenance.resume, training_data(self.env, provenance.settings(config)))
        self.config = config = with_epochs(config, self.env, data.iteration)
        self.stop = StopRequest()
        self.run_dir = Path(run_dir) if run_dir else None
        self.resume, self.args = provenance.resume, provenance.settings(config)
        # Nothing here draws from the global generators, but an environment or a library may.
        seed_random_state(config.run.seed)
        # Before the checks of the bases, which read the shapes of the adapters that are placed.
        place_adapters(base, team, config.team.lora, config.run.seed, self.resume)
        self.record = describe_run(
            team, self.args, command=provenance.command, env=self.env, eval_env=eval_env, base=base
        )
        # Checked before the engine and the coach start: a refused run must cost nothing.
        refuse_changes(self.resume, self.record, accept=provenance.accept_changes)
        self._own_coach = prepare_coach(config, self.env) if coach is None else None
        check_run(
            self.env,
            team,
            config,
            self.rule,
            coach or self._own_coach,
            {agent.adapter: base.of_agent(agent.name).name for agent in team.agents},
            eval_env=self.eval_env,
            processes=self.processes,
            sharded=base.sharded,
        )
        check_bases(base)
        self._check_prompts()
        self.state = RunState(data=data)
        self._build_stages(coach or self._own_coach)
        self.transcripts: TranscriptWriter | None = None
        self._sample: str | None = None
        blind = self.rule.settings.blind_to(self.rule.tree_samples > 1)
        self._blind = None if self.rule.name == "ippo" and self.env.opponents else blind
        """what credit leaves out where turns are paid as they come: a form of its paper; None once it is said"""
        self.league = League(base, self.rule.schedule) if isinstance(self.rule.schedule, SelfPlay) else None
        self.guard = HeldOutGuard(base, team.adapters, self.updater.learner, config.run)
        learning = tuple(name for name in team.names if name not in team.frozen(config.team.freeze))
        self.doctor = Doctor(learning, masks_cut_turns=self.rule.settings.mask_cut_turns)
        if self.resume is not None:
            self._restore(self.resume)

    def __repr__(self) -> str:
        done, names = f"{self.iteration} of {self.iterations}", ", ".join(self.team.names)
        return f"<OnPolicy: {self.rule.name} for {names}, iteration {done}>"

    def _check_prompts(self) -> None:
        """Play scripted episodes to see whether the bases can read the prompts, in training and evaluation."""
        from mafrt.runners.build import voices_of

        play = self.config.play
        voices = voices_of(self.base, self.team, play.context_window)
        note_thoughts([voice.tokenizer for voice in voices.values()], play.reasoning, play.thinking_budget)
        for played in [self.env] if self.eval_env is self.env else [self.env, self.eval_env]:
            check_prompts(played, self.team, voices)

    def _build_stages(self, coach: Coach | None) -> None:
        """The engine and the stages of an iteration: player, judge, collector, updater."""
        from mafrt.runners.build import make_engine, make_player, sampling_of

        base, team, config, rule = self.base, self.team, self.config, self.rule
        # Loaded before the engine, so that a coach's missing adapter is named before minutes are spent on vLLM.
        if coach is not None:
            coach.load(base.main)
        async_rollout = AsyncRollout[CollectedBatch](base, team.adapters) if config.play.async_steps else None
        window = check_window(config.play.context_window, base.main.context_window)
        self.engine = make_engine(base, config)
        level = rule.settings.level
        self.judge = None if coach is None else Judge(coach, config, team, base, self.engine, level, self._stopping)
        judged = self.judge.credit if self.judge else {}
        context = replace(rule.context(), opponents=self.env.opponents, memory=self.state.memory, **judged)
        sampling = {agent.name: sampling_of(config, team, agent.name) for agent in team.agents}
        feedback = None if self.judge is None else self.judge.feedback
        self.player = make_player(self.engine, base, team, config, rule, sampling, window, context, feedback)
        self.collector = Collector(
            self.env,
            base,
            config,
            rule,
            self.player,
            context,
            self.judge,
            async_rollout,
            self._stopping,
            self.state.data.drawn,
        )
        parts = (base, team, config, rule, sampling, self.engine, context)
        self.updater: Updater = declared(rule.settings.updater)(*parts)

    def _stopping(self) -> bool:
        # Read at each call: `run` replaces the request to stop after the judge and the collector were given this.
        return self.stop.requested

    def _restore(self, resume: LoadSource) -> None:
        """Bring weights, optimizers and position to where `resume` left them."""
        restore(resume, self.state, self.base, self.team, self.updater.critic, self.updater.learner)
        if self.updater.kl is not None and self.state.kl_coef is not None:
            self.updater.kl.coef = self.state.kl_coef
        state = resume.path / "state"
        if (reference := self.updater.reference) is not None:
            if resume.checkpoint is None:
                reference.renew()  # the adapters that have just been loaded
            else:
                reference.load_state(load_tensors(resume.state(REFERENCE)))
        self.guard.load(state / BEST_STATE)
        if self.league is not None and resume.checkpoint is not None:
            self.league.load(state / LEAGUE_STATE)
        if self.collector.async_rollout is not None:
            self.collector.async_rollout.load(state / STATE)

    def run(self, progress: Callable[[Progress], None] | bool | None = None) -> RunSummary:
        """Train until the last iteration, or until SIGTERM or Ctrl-C; both leave a checkpoint.

        `progress` is called after every iteration. True shows a bar, or lines where there is no terminal; None shows
        it in a notebook only.
        """
        if progress is None or isinstance(progress, bool):
            with shown(self.iterations, progress) as after_iteration:
                return self._run(after_iteration)
        return self._run(progress)

    def _run(self, progress: Callable[[Progress], None] | None) -> RunSummary:
        with StopRequest() as stop:
            self.stop = stop
            # No process changes the run's folder while another may still be reading from it.
            self.processes.same(self._identity(), "the run")
            loop = Loop(self, self.config.run, stop, processes=self.processes, progress=progress)
            try:
                return loop.run(self.run_dir, self.args, self.resume, self.record, self._open)
            except ProcessLostError:
                raise  # the background rollout may be waiting for the lost process too
            except Exception as error:
                stop.request(str(error))
                self.collector.wait()  # no sampling while engine and interpreter are being closed
                raise

    def close(self) -> None:
        """Release the runner's own coach and engine: connections and processes."""
        engines.close(self.engine)
        if self._own_coach is not None:
            self._own_coach.close()

    def assign_adapters(self) -> IterationPlan:
        """Give every agent the adapter that the schedule has for it in this iteration."""
        plan = self.rule.schedule.plan(self.state.iteration)
        # Earlier selves are opponents in training only: an evaluation is of the present weights.
        present = plan.adapters if self.league is None else self.league.schedule.assigned.adapters
        # A new player instead of a changed one: a background rollout may still be using the old one.
        self.player = self.player.with_adapters(present)
        return plan

    # ---------------------------------------------------------------------------- the `Training` protocol

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

    @property
    def metrics(self) -> Collection[str]:
        return self.rule.settings.metrics

    def evaluation_due(self) -> bool:
        run, done = self.config.run, self.state.iteration
        return run.eval_episodes > 0 and (done in (0, run.iterations) or divides(run.eval_interval, done))

    def evaluate(self) -> dict[str, float] | None:
        """Play the evaluation tasks with the adapters as they are; None if it was interrupted."""
        self.collector.wait()
        self.assign_adapters()
        # Answers differ in length between processes, so a sharded base is gathered for play.
        with self.base.whole():
            evaluation = evaluate(
                self.eval_env,
                self.player,
                self._evaluation_plan(),
                interrupted=self._stopping,
                processes=self.processes,
                keep=lambda group: wanted(group, self.config.run.transcript_share),
            )
        if evaluation is None:
            return None
        metrics = evaluation.metrics()
        fallen = self.guard.look(self.state.iteration, evaluation)
        if self.guard.stops:
            self.stop.request(fallen or "The evaluation score fell")
        if self.processes.main:
            if fallen is not None:
                self.doctor.note(self.state.iteration, "fallen_score", fallen)
            elif not self.config.run.keep_best:
                tasks = max(len(evaluation.scores), len(evaluation.greedy_scores))
                self.doctor.look_at_evaluation(self.state.iteration, metrics, tasks)
            if self.run_dir is not None:
                self.guard.write(self.run_dir)
            self._sample = as_text(evaluation.episodes[0]) if evaluation.episodes else None
            if self.transcripts is not None:
                self.transcripts.write("evaluation", self.state.iteration, evaluation.episodes)
        return metrics

    def _evaluation_plan(self) -> EvaluationPlan:
        run = self.config.run
        seed = seed_of(run.seed, "evaluation")
        return EvaluationPlan(
            run.eval_episodes, run.eval_samples, greedy=True, seed=seed, temperature=run.eval_temperature
        )

    def sample(self) -> str | None:
        return self._sample

    # -------------------------------------------------------------------------------------------- one iteration

    def collect(self) -> CollectedBatch:
        """Play and judge the episodes of the next iteration."""
        if self.league is not None:
            self.league.renew(self.state.iteration)
        return self.collector.batch(self.state.iteration, self.state.drawn)

    def learn(self, batch: CollectedBatch) -> IterationResult:
        """Value, credit and learn; with `async_steps`, the next batch is played meanwhile."""
        state, run, updater, rule = self.state, self.config.run, self.updater, self.rule
        iteration, plan, tree = state.iteration, rule.schedule.plan(state.iteration), rule.tree_samples > 1
        if self.collector.async_rollout is None:
            # The engine's cache memory is given back to the learner for the time of the update.
            engines.rest(self.engine)
        else:
            self.collector.start(iteration + 1, batch.drawn)

        episodes = to_learn(batch.episodes) if tree else batch.episodes
        turns = [turn for episode in episodes for turn in episode.turns]
        features = updater.value(episodes, plan, iteration)
        metrics = updater.credit(episodes, features, plan) | batch.stats.replayed
        if tree:
            show_advantages(batch.episodes)
        if self.config.play.audit_turns:
            metrics |= audit_metrics(batch.episodes)
        if self.judge is not None:
            metrics |= self.judge.metrics(batch.episodes)
        if self.judge is None or not self.judge.too_few(batch.episodes):
            metrics |= updater.update(episodes, features, plan, iteration)
        if updater.kl is not None:
            metrics["kl_coef"] = updater.kl.coef
            # After the update, so that the whole batch was learnt with one coefficient.
            divergence = [value for name, value in metrics.items() if name.startswith("ref_kl/")]
            updater.kl.update(sum(divergence) / len(divergence) if divergence else math.nan, len(turns))
            state.kl_coef = updater.kl.coef

        metrics |= batch_metrics(rule, self.team, batch.episodes, turns, batch.stats)
        metrics |= {f"lr/{name}": updater.learner.rate(plan.adapters[name], iteration) for name in plan.agents}
        metrics |= {f"trained/{name}": float(name in plan.agents) for name in self.team.names}
        metrics |= {f"adapter_version/{name}": float(self.base.versions[name]) for name in self.team.adapters}
        # Sorted, so that files of two runs can be compared line by line.
        metrics = dict(sorted(metrics.items()))
        state.iteration, state.drawn = iteration + 1, batch.drawn
        state.tokens += batch.stats.tokens
        if self._blind is not None and "paid_by_turn" in metrics:
            log.info("%s pays by turn, and %s: %s", self.env.class_name, rule.name, self._blind)
            self._blind = None
        if self.processes.main:
            self.doctor.look(state.iteration, metrics, batch.episodes)
            if self.transcripts is not None:
                self.transcripts.write("train", state.iteration, batch.episodes)
        return IterationResult(
            metrics,
            self.judge.taken() if self.judge is not None else {},
            [episode_record(episode, tokens=run.log_tokens) for episode in batch.episodes] if run.log_episodes else (),
            batch.stats.tokens,
        )

    def save(self, disk: RunDir | None) -> None:
        """Write a checkpoint; all processes take part."""
        if self.run_dir is None:
            return
        adapters = digest(self.base, self.team.adapters)
        # Diverged processes would go on silently; a checkpoint is the place where it matters most.
        self.processes.same(adapters, f"the weights after iteration {self.state.iteration}")
        async_rollout, updater = self.collector.async_rollout, self.updater
        extra = {} if async_rollout is None else {STATE: async_rollout.state()}
        if self.guard.iteration is not None:
            extra[BEST_STATE] = self.guard.state()
        if self.league is not None:
            extra[LEAGUE_STATE] = self.league.state()
        if updater.reference is not None:
            extra[REFERENCE] = updater.reference.state()
        save(disk, self.state, self.base, self.team, updater.critic, updater.learner, self.config.run, extra)

    def findings(self) -> list[str]:
        return self.doctor.lines()

    def finish(self, disk: RunDir | None) -> None:
        self.collector.wait()

    def _open(self, disk: RunDir) -> None:
        """Called in the process that writes, with the run's folder."""
        if self.judge is not None:
            self.judge.open(disk.path)
        run = self.config.run
        self.transcripts = TranscriptWriter(
            disk.transcripts,
            self.team,
            decoder(self.base.main),
            share=run.transcript_share,
            max_mib=run.transcript_max_mib,
            decoders={name: decoder(self.base.of_agent(name)) for name in self.team.names},
        )

    def _identity(self) -> dict[str, Any]:
        """Everything that has to be the same in all processes."""
        return {
            "iteration": self.state.iteration,
            "base": self.base.fingerprint(),
            "adapters": digest(self.base, self.team.adapters),
            "settings": self.config.flat(),
        }
