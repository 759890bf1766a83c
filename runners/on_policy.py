"""The on-policy loop: play -> coach -> value -> credit -> learn -> log -> evaluate -> checkpoint.

An iteration is a pure function of the weights, the optimizers, the position in the data and the seed. That is all a
checkpoint holds, and why a resumed run repeats exactly what an uninterrupted one would have done.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from mafrt import credit, wire
from mafrt import engine as engines
from mafrt.coach import Coach
from mafrt.config import TrainConfig
from mafrt.credit.happo import CompoundRatio
from mafrt.engine import Engine
from mafrt.engine.gap import engine_gap
from mafrt.env import Env
from mafrt.errors import (
    BudgetSpentError,
    CoachError,
    CoachInterruptedError,
    EngineDownError,
    EnvError,
    MafrtError,
    ProcessLostError,
)
from mafrt.loadable import Loadable
from mafrt.metrics import MetricsWriter
from mafrt.processes import Processes
from mafrt.random_state import seed_random_state
from mafrt.rollout import Player, PlayStats
from mafrt.rundir import RunDir, episode_record
from mafrt.runners.ahead import STATE, Ahead, check_async, staleness
from mafrt.runners.coaching import Coaching, prepare_coach
from mafrt.runners.dynamic_sampling import resample
from mafrt.runners.evaluation import Evaluation, evaluate, measures_of, score
from mafrt.runners.preflight import check_processes, check_prompts, check_team, check_tree, check_window
from mafrt.runners.rule import resolve_rule
from mafrt.runners.schedules import Plan
from mafrt.runners.state import RunState, digest, restore, save
from mafrt.runners.strata import StratifiedOrder, strata_of
from mafrt.runners.tasks import TaskStream
from mafrt.runners.together import own_slots, play_together, stopping
from mafrt.seeding import seed_of
from mafrt.signals import StopRequest
from mafrt.tally import COUNTS
from mafrt.team import LoraSpec, Team
from mafrt.tree import TreePlayer, show_advantages, to_learn
from mafrt.types import Episode, SamplingParams

if TYPE_CHECKING:
    from mafrt.learner import Learner
    from mafrt.mixing import Mixing
    from mafrt.policy import SharedBase
    from mafrt.valuation import Valuation


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


Batch: TypeAlias = "tuple[list[Episode], PlayStats, int]"
"""Episodes, what else happened, and the position in the data afterwards."""


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
        progress: Callable[[Progress], None] | None = None,
    ) -> None:
        from mafrt.runners.setup import make_engine, make_kl_control, make_learner, make_valuation, place_adapters

        self.rule = resolve_rule(config, team)
        self.env, self.eval_env = env, eval_env or env
        self.team, self.base, self.config = team, base, config
        self.processes = base.processes
        self._beside = base.processes.beside() if config.play.async_steps else base.processes
        """for play, which may go on in a thread of its own"""
        check_processes(self.processes, config)
        self.run_dir = Path(run_dir) if run_dir else None
        self.resume = resume
        self.args = dict(args) if args is not None else config.flat()
        self.progress = progress or (lambda _: None)
        # Nothing here draws from the global generators, but an environment or a library may.
        seed_random_state(config.run.seed)
        spec = LoraSpec(config.team.lora_rank, config.team.lora_alpha, config.team.lora_targets)
        place_adapters(base, team, spec, config.run.seed)
        check_team(env, team)
        self.context_window = check_window(config.play.context_window, base.context_window)
        for played in {id(env): env, id(self.eval_env): self.eval_env}.values():
            check_prompts(played, team, base.tokenizer, self.context_window)
        self.sampling = {agent.name: sampling_of(config, team, agent.name) for agent in team.agents}
        self.valuation: Valuation | Mixing = make_valuation(base, team, config, self.rule)
        self.learner: Learner = make_learner(base, team, config, self.rule, self.sampling)
        self._own_coach = prepare_coach(config, env) if coach is None else None
        coach = coach or self._own_coach
        if coach is not None:
            coach.load(base)
        check_async(config, sharded=base.sharded)
        self.ahead = Ahead[Batch](base, team.adapters) if config.play.async_steps else None
        self._own_engine = None if engine else make_engine(base, config, self.context_window)
        self.engine: Engine = engine or self._own_engine  # type: ignore[assignment]
        check_tree(env, self.rule.tree_samples, coach if config.credit.process_weight else None)
        self.player = self._player()
        self.coaching: Coaching | None = None
        if coach is not None:
            self.coaching = Coaching(coach, config, team, base, self.engine, self.rule.level)
            if config.coach.coach_feedback:
                self.player.feedback = self.coaching.feedback
            if isinstance(self.player, TreePlayer):
                check_processes(self.processes, config, judged=True)
                self.player.judge = self.coaching.feedback
        self.credit = {**self.rule.credit, **(self.coaching.credit if self.coaching else {})}
        self.kl = make_kl_control(config)
        slots = own_slots(self.processes, config.play.n_rollout_threads, config.play.n_samples)
        self.envs = [env.spawn() for _ in slots]
        key, blocks = config.play.stratify, config.play.n_rollout_threads // config.play.n_samples
        self.order = StratifiedOrder(strata_of(env, key), config.run.seed, blocks) if key else None
        self.state = RunState()
        self.saved: int | None = None
        if resume is not None:
            restore(resume, self.state, base, team, self.valuation, self.learner)
            if self.ahead is not None:
                self.ahead.load(resume.path / "state" / STATE)
            if self.kl is not None and self.state.kl_coef is not None:
                self.kl.coef = self.state.kl_coef

    def _player(self) -> Player:
        """Who plays: single turns, or trees of alternatives."""
        how = (self.engine, self.base.tokenizer, self.team, self.sampling, self.context_window)
        reasoning, samples = self.config.play.reasoning, self.rule.tree_samples
        if samples == 1:
            return Player(*how, reasoning)
        return TreePlayer(
            *how,
            reasoning,
            samples=samples,
            worth=lambda some: credit.turn_rewards(some, self.rule.name, **self.credit),
        )

    def run(self) -> Summary:
        """Train until the last iteration, or until SIGTERM or Ctrl-C; both leave a checkpoint."""
        with StopRequest() as stop:
            self.stop = stop
            if self.coaching is not None:
                self.coaching.coach.interrupted = lambda: stop.requested
            # Nobody changes the run's folder while another process may still be reading from it.
            self.processes.same(self._identity(), "the run")
            if self.run_dir is None:
                return self._train(None, None)
            disk = self._open(self.run_dir)
            if disk is None:
                return self._train(None, None)
            with disk, MetricsWriter(disk) as writer:
                return self._train(disk, writer)

    def close(self) -> None:
        """Release what the runner itself has made: a coach's connections, an engine's processes."""
        if self._own_engine is not None:
            engines.close(self._own_engine)
        if self._own_coach is not None:
            self._own_coach.close()

    def _open(self, run_dir: Path) -> RunDir | None:
        """The run's folder in the process that writes; None in the others. What is wrong with it ends all of them."""
        found: list[RunDir] = []
        self.processes.lead(lambda: found.append(RunDir.open(run_dir, self.args, self.resume)))
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
        after, seconds, paused = None, 0.0, False
        if self.coaching is not None and disk is not None:
            self.coaching.open(disk.path)
        while not self._stopping():
            # Evaluations come before the iteration, not after: a run that is stopped amid one repeats it, exactly.
            if self._evaluation_due():
                if self.ahead is not None:
                    self.ahead.wait()  # one engine, one voice
                try:
                    found = self._evaluate(disk, writer)
                except EngineDownError as error:
                    paused = self._engine_is_down(error)
                    break
                if state.iteration == 0:
                    state.before = found
                if state.iteration == run.iterations:
                    after = found
            if state.iteration == run.iterations or self._stopping():
                break
            started = time.perf_counter()
            try:
                episodes, stats, drawn = self._batch()
            except CoachInterruptedError:
                break
            except EngineDownError as error:
                paused = self._engine_is_down(error)
                break
            except CoachError as error:
                # The iteration is lost, not what was learnt before it; what was judged of it lies in the cache.
                paused = not isinstance(error, BudgetSpentError)
                self.stop.request(str(error))
                break
            except ProcessLostError:
                raise
            except MafrtError:
                # Nothing has moved since the last iteration, so what was learnt until then can be kept.
                if state.iteration:
                    self._checkpoint(disk)
                raise
            if self._stopping():
                break  # half an iteration teaches nothing; the resumed run plays it again, and whole
            played = time.perf_counter()
            if self.ahead is None:
                engines.rest(self.engine)
            elif state.iteration + 1 < run.iterations:
                self.ahead.take()
                self.ahead.start(partial(self._play, state.iteration + 1, drawn))
            metrics = self._learn(episodes, stats)
            state.iteration, state.drawn, state.tokens = state.iteration + 1, drawn, state.tokens + stats.tokens
            learnt = time.perf_counter()
            seconds += learnt - started
            timings = {
                "seconds_play": played - started,
                "seconds_learn": learnt - played,
                "tokens_per_s": stats.tokens / (learnt - started),
            }
            if self.coaching is not None:
                timings |= self.coaching.taken()
            if disk is not None and writer is not None:
                writer.write(state.iteration, metrics, timings)
                if run.log_episodes:
                    records = [episode_record(episode, tokens=run.log_tokens) for episode in episodes]
                    disk.episodes.append(state.iteration, records)
            if state.iteration == run.iterations or _divides(run.save_interval, state.iteration):
                self._checkpoint(disk)
            self.progress(
                Progress(
                    state.iteration,
                    run.iterations,
                    metrics["score"],
                    timings["tokens_per_s"],
                    learnt - started,
                    metrics,
                )
            )
        if self.ahead is not None:
            self.ahead.wait()
        self._checkpoint(disk)
        return Summary(state.before, after, state.iteration, seconds, self.run_dir, self.stop.reason, paused)

    def _engine_is_down(self, error: EngineDownError) -> bool:
        """Have the run stop for it; whether it is paused. Ctrl-C ends the engine's process too, and is no accident."""
        if self.stop.requested:
            return False
        self.stop.request(str(error))
        return True

    def _evaluation_due(self) -> bool:
        run, done = self.config.run, self.state.iteration
        return run.eval_episodes > 0 and (done in (0, run.iterations) or _divides(run.eval_interval, done))

    def _batch(self) -> Batch:
        """The batch of this iteration, played now or, one step behind, while the last one was learnt from."""
        return self._play() if self.ahead is None else self.ahead.batch(self._play)

    def _play(self, iteration: int | None = None, drawn: int | None = None) -> Batch:
        """An iteration's episodes, what else happened, and the position in the data afterwards.

        Args:
            iteration: whose batch it is, by default the next one's.
            drawn: the position in the data before it, by default where the run stands.
        """
        play, rule = self.config.play, self.rule
        iteration = self.state.iteration if iteration is None else iteration
        drawn = self.state.drawn if drawn is None else drawn
        cast = self.rule.schedule.plan(iteration).adapters
        player = self.player
        if self.ahead is None:
            player.adapters = cast
        else:
            player = copy.copy(player)  # its own, since evaluations cast the other
            player.adapters = self.ahead.adapters(cast)
        processes = self._beside

        def stream(tasks: int, drawn: int, dealt: int, turns: int = 1) -> TaskStream:
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

        def play_through(starts: TaskStream) -> tuple[list[Episode], PlayStats]:
            with self.base.whole():
                found = play_together(processes, player, self.envs, starts, lambda: self.stop.requested)
                if self.coaching is not None:
                    self._judge(self.coaching, found[0], processes)
            return found

        blocks = play.n_rollout_threads // play.n_samples
        first = stream(blocks, drawn, 0, turns=play.episode_length * len(self.team.agents))
        episodes, stats = play_through(first)
        if not episodes and not self.stop.requested:
            raise stats.last_error or EnvError("No episode was finished in this iteration; see the log for why.")
        if not rule.sampling_rounds:
            return episodes, stats, first.drawn
        found = resample(
            episodes,
            stats,
            rounds=rule.sampling_rounds,
            flat=lambda some: credit.groups_without_spread(some, rule.name, **self.credit),
            stream=stream,
            play=play_through,
            blocks=blocks,
            drawn=first.drawn,
            dealt=first.rounds,
        )
        stats.sampling_rounds, stats.groups_replaced = found.rounds, found.replaced
        return found.episodes, stats, found.drawn

    def _judge(self, coaching: Coaching, episodes: list[Episode], processes: Processes) -> None:
        """Have the batch judged, by one process for all."""

        def judge() -> list[Any]:
            try:
                coaching.judge(episodes)
            finally:
                coaching.save(self.run_dir)
            return wire.pack_verdicts(episodes)

        verdicts = processes.lead(judge)
        if not processes.main:
            wire.unpack_verdicts(episodes, verdicts)

    def _stopping(self) -> bool:
        return stopping(self.stop, self.processes)

    def cast(self) -> Plan:
        """Give every agent the adapter that the schedule has for it in this iteration."""
        plan = self.rule.schedule.plan(self.state.iteration)
        self.player.adapters = self.learner.adapter_of = plan.adapters
        return plan

    def _learn(self, episodes: list[Episode], stats: PlayStats) -> dict[str, float]:
        """Value, credit and update: fills the turns' fields and moves the adapters whose turn it is."""
        config, iteration = self.config, self.state.iteration
        rule, plan = self.rule, self.cast()
        learnt = to_learn(episodes)
        turns = [turn for episode in learnt for turn in episode.turns]
        heat = {name: how.temperature for name, how in self.sampling.items()}
        features: Any = self.valuation.annotate(learnt, heat, values=rule.critic is not None, reference=rule.reference)
        foreign = engines.is_foreign(self.engine) or self.base.quantised or self.ahead is not None
        if foreign or any(how.truncated for how in self.sampling.values()):
            self.learner.recompute_logprobs(turns)
        stale = {} if self.ahead is None else staleness(turns, self.base.versions, plan.adapters)
        kl_coef = self.kl.coef if self.kl is not None else config.learn.kl_coef
        if rule.kl_in == "loss":
            self.learner.kl_coef = kl_coef
        of_batch = {**rule.kl_settings(kl_coef), **features.credit}
        metrics = credit.assign(learnt, rule=rule.name, **{**self.credit, **of_batch})
        metrics |= stale
        show_advantages(episodes)
        if foreign:
            metrics |= engine_gap(turns, self.sampling)
        if self.coaching is not None:
            metrics |= self.coaching.metrics(episodes)
        if self.coaching is None or not self.coaching.too_few(episodes):
            if rule.critic is not None:
                metrics |= self.valuation.update(features, iteration)
            if iteration >= config.learn.warmup_steps or rule.critic is None:
                metrics |= self._update(learnt, plan)
        if self.kl is not None:
            metrics["kl_coef"] = kl_coef
            self.state.kl_coef = self.kl.update(mean_of(metrics, "ref_kl"), len(turns))
        scores = [score(episode) for episode in episodes]
        spoken = {name: [t for t in turns if t.agent == name] for name in self.team.names}
        metrics |= {
            "score": sum(scores) / len(scores),
            "episodes": float(len(episodes)),
            "turns": float(len(turns)),
            "tokens": float(stats.tokens),
            "env_errors": float(stats.env_errors),
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
        for name, said in spoken.items():
            if said:
                metrics[f"tokens/{name}"] = sum(len(t.action_ids) for t in said) / len(said)
                metrics[f"truncated_share/{name}"] = sum(t.stop == "length" for t in said) / len(said)
            metrics[f"trained/{name}"] = float(name in plan.agents)
        for name in self.team.adapters:
            metrics[f"adapter_version/{name}"] = float(self.base.versions[name])
        return dict(sorted(metrics.items()))

    def _update(self, episodes: list[Episode], plan: Plan) -> dict[str, float]:
        """Move the learning adapters: all at once, or group after group with HAPPO's compound ratio."""
        iteration = self.state.iteration
        turns = [turn for episode in episodes for turn in episode.turns]
        if not plan.compound:
            return self.learner.update(turns, plan.agents, iteration)
        ratio = CompoundRatio(episodes)
        metrics: dict[str, float] = {}
        for group in plan.learners:
            for agent in group:
                metrics |= ratio.spread(agent)
            found = self.learner.update(turns, group, iteration, weight=ratio.factor)
            metrics |= {name: metrics.get(name, 0.0) + v if name in COUNTS else v for name, v in found.items()}
            mine = [turn for turn in turns if turn.agent in group and turn.action_ids]
            ratio.update(zip(mine, self.learner.logprobs(mine), strict=True))
        return metrics | ratio.metrics()

    def _evaluate(self, disk: RunDir | None, writer: MetricsWriter | None) -> dict[str, float] | None:
        """Play the evaluation tasks with the adapters as they are; None if it was interrupted."""
        self.cast()
        with self.base.whole():
            found: Evaluation | None = evaluate(
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
        extra = {} if self.ahead is None else {STATE: self.ahead.state()}
        save(disk, self.state, self.base, self.team, self.valuation, self.learner, self.config.run, extra)
        self.saved = self.state.iteration


def mean_of(metrics: Mapping[str, float], name: str) -> float:
    """Mean of a metric over agents; NaN if it was not measured."""
    found = [value for key, value in metrics.items() if key.startswith(f"{name}/")]
    return sum(found) / len(found) if found else math.nan


def _divides(interval: int, iteration: int) -> bool:
    """Whether something with this interval is due after `iteration`; never with interval 0."""
    return interval > 0 and iteration % interval == 0


def sampling_of(config: TrainConfig, team: Team, name: str) -> SamplingParams:
    """How an agent samples: its own settings from the team file where it has some, else the run's."""
    agent, play = team.agent(name), config.play

    def pick(own: Any, default: Any) -> Any:
        return default if own is None else own

    return SamplingParams(
        max_new_tokens=pick(agent.max_new_tokens, play.max_new_tokens),
        temperature=pick(agent.temperature, play.temperature),
        top_p=pick(agent.top_p, play.top_p),
        top_k=pick(agent.top_k, play.top_k),
        stop=tuple(agent.stop or ()),
    )
