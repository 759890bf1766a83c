"""The on-policy loop: play -> value -> credit -> learn -> log -> evaluate -> checkpoint.

An iteration is a pure function of the weights, the optimizers, the position in the data and the seed. That is all a
checkpoint holds, and why a resumed run repeats exactly what an uninterrupted one would have done.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mafrt import credit
from mafrt.config import TrainConfig
from mafrt.credit.happo import CompoundRatio
from mafrt.engine import Engine
from mafrt.env import Env
from mafrt.errors import EnvError, MafrtError
from mafrt.loadable import Loadable
from mafrt.metrics import MetricsWriter
from mafrt.random_state import seed_random_state
from mafrt.rollout import Player, PlayStats
from mafrt.rundir import RunDir, episode_record
from mafrt.runners.dynamic_sampling import resample
from mafrt.runners.evaluation import Evaluation, evaluate, score
from mafrt.runners.preflight import check_prompts, check_team, check_window
from mafrt.runners.rule import resolve_rule
from mafrt.runners.schedules import Plan
from mafrt.runners.state import RunState, restore, save
from mafrt.runners.tasks import TaskStream
from mafrt.seeding import seed_of
from mafrt.signals import StopRequest
from mafrt.tally import COUNTS
from mafrt.team import LoraSpec, Team
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
    """name of the signal that ended the run early"""


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
        args: Mapping[str, Any] | None = None,
        progress: Callable[[Progress], None] | None = None,
    ) -> None:
        from mafrt.runners.setup import make_learner, make_local_engine, make_valuation, place_adapters

        self.rule = resolve_rule(config, team)
        self.env, self.eval_env = env, eval_env or env
        self.team, self.base, self.config = team, base, config
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
        self.engine = engine or make_local_engine(base, config)
        self.player = Player(self.engine, base.tokenizer, team, self.sampling, self.context_window)
        self.envs = [env.spawn() for _ in range(config.play.n_rollout_threads)]
        self.state = RunState()
        self.saved: int | None = None
        if resume is not None:
            restore(resume, self.state, base, team, self.valuation, self.learner)

    def run(self) -> Summary:
        """Train until the last iteration, or until SIGTERM or Ctrl-C; both leave a checkpoint."""
        with StopRequest() as stop:
            self.stop = stop
            if self.run_dir is None:
                return self._train(None, None)
            with RunDir.open(self.run_dir, self.args, self.resume) as disk, MetricsWriter(disk) as writer:
                return self._train(disk, writer)

    def _train(self, disk: RunDir | None, writer: MetricsWriter | None) -> Summary:
        state, run = self.state, self.config.run
        after, seconds = None, 0.0
        while not self.stop.requested:
            # Evaluations come before the iteration, not after: a run that is stopped amid one repeats it, exactly.
            if self._evaluation_due():
                found = self._evaluate(disk, writer)
                if state.iteration == 0:
                    state.before = found
                if state.iteration == run.iterations:
                    after = found
            if state.iteration == run.iterations or self.stop.requested:
                break
            started = time.perf_counter()
            try:
                episodes, stats, drawn = self._play()
            except MafrtError:
                # Nothing has moved since the last iteration, so what was learnt until then can be kept.
                if disk is not None and state.iteration and self.saved != state.iteration:
                    self._checkpoint(disk)
                raise
            if self.stop.requested:
                break  # half an iteration teaches nothing; the resumed run plays it again, and whole
            played = time.perf_counter()
            metrics = self._learn(episodes, stats)
            state.iteration, state.drawn, state.tokens = state.iteration + 1, drawn, state.tokens + stats.tokens
            learnt = time.perf_counter()
            seconds += learnt - started
            timings = {
                "seconds_play": played - started,
                "seconds_learn": learnt - played,
                "tokens_per_s": stats.tokens / (learnt - started),
            }
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
        if disk is not None and self.saved != state.iteration:
            self._checkpoint(disk)
        return Summary(state.before, after, state.iteration, seconds, self.run_dir, self.stop.reason)

    def _evaluation_due(self) -> bool:
        run, done = self.config.run, self.state.iteration
        return run.eval_episodes > 0 and (done in (0, run.iterations) or _divides(run.eval_interval, done))

    def _play(self) -> tuple[list[Episode], PlayStats, int]:
        """The iteration's episodes, what else happened, and the position in the data afterwards."""
        play, rule = self.config.play, self.rule
        self.cast()

        def stream(tasks: int, drawn: int, dealt: int, turns: int = 1) -> TaskStream:
            return TaskStream(
                slots=tasks * play.n_samples,
                n_samples=play.n_samples,
                turns=turns,
                num_tasks=self.env.num_tasks,
                seed=self.config.run.seed,
                iteration=self.state.iteration + 1,
                drawn=drawn,
                rounds=dealt,
            )

        def play_through(starts: TaskStream) -> tuple[list[Episode], PlayStats]:
            return self.player.play(self.envs[: starts.slots], starts.next_start, lambda: self.stop.requested)

        blocks = play.n_rollout_threads // play.n_samples
        first = stream(blocks, self.state.drawn, 0, turns=play.episode_length * len(self.team.agents))
        episodes, stats = play_through(first)
        if not episodes and not self.stop.requested:
            raise stats.last_error or EnvError("No episode was finished in this iteration; see the log for why.")
        if not rule.sampling_rounds:
            return episodes, stats, first.drawn
        found = resample(
            episodes,
            stats,
            rounds=rule.sampling_rounds,
            flat=lambda some: credit.groups_without_spread(some, rule.name, **rule.credit),
            stream=stream,
            play=play_through,
            blocks=blocks,
            drawn=first.drawn,
            dealt=first.rounds,
        )
        stats.sampling_rounds, stats.groups_replaced = found.rounds, found.replaced
        return found.episodes, stats, found.drawn

    def cast(self) -> Plan:
        """Give every agent the adapter that the schedule has for it in this iteration."""
        plan = self.rule.schedule.plan(self.state.iteration)
        self.player.adapters = self.learner.adapter_of = plan.adapters
        return plan

    def _learn(self, episodes: list[Episode], stats: PlayStats) -> dict[str, float]:
        """Value, credit and update: fills the turns' fields and moves the adapters whose turn it is."""
        config, iteration = self.config, self.state.iteration
        rule, plan = self.rule, self.cast()
        turns = [turn for episode in episodes for turn in episode.turns]
        heat = {name: how.temperature for name, how in self.sampling.items()}
        features: Any = self.valuation.annotate(
            episodes, heat, values=rule.critic is not None, reference=rule.reference
        )
        if any(how.truncated for how in self.sampling.values()):
            self.learner.recompute_logprobs(turns)
        metrics = credit.assign(episodes, rule=rule.name, **rule.credit, **features.credit)
        if rule.critic is not None:
            metrics |= self.valuation.update(features, iteration)
        if iteration >= config.learn.warmup_steps or rule.critic is None:
            metrics |= self._update(episodes, plan)
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
        if rule.sampling_rounds:
            metrics["sampling_rounds"] = float(stats.sampling_rounds)
            metrics["groups_replaced"] = float(stats.groups_replaced)
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
            found = self.learner.update(turns, group, iteration, weight=ratio.factor)
            metrics |= {name: metrics.get(name, 0.0) + v if name in COUNTS else v for name, v in found.items()}
            mine = [turn for turn in turns if turn.agent in group and turn.action_ids]
            ratio.update(zip(mine, self.learner.logprobs(mine), strict=True))
        return metrics | ratio.metrics()

    def _evaluate(self, disk: RunDir | None, writer: MetricsWriter | None) -> dict[str, float] | None:
        """Play the evaluation tasks with the adapters as they are; None if it was interrupted."""
        self.cast()
        found: Evaluation | None = evaluate(
            self.eval_env,
            self.player,
            tasks=self.config.run.eval_episodes,
            samples=self.config.run.eval_samples,
            greedy=True,
            seed=seed_of(self.config.run.seed, "evaluation"),
            interrupted=lambda: self.stop.requested,
        )
        if found is None:
            return None
        metrics = found.metrics()
        if writer is not None:
            done = self.state.iteration
            when = "before" if done == 0 else "after" if done == self.config.run.iterations else "during"
            writer.write_evaluation(done, when, metrics)
        return metrics

    def _checkpoint(self, disk: RunDir) -> None:
        save(disk, self.state, self.base, self.team, self.valuation, self.learner, self.config.run)
        self.saved = self.state.iteration


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
