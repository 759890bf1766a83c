"""Checks of a run before the first token is sampled."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from mafrt.algorithms import Algorithm
from mafrt.coach import Coach, RulesCoach
from mafrt.coach.own_coach import check_coach
from mafrt.config.team import Team
from mafrt.config.train_config import RunConfig, TrainConfig
from mafrt.core.distributed import ALONE, Processes
from mafrt.core.errors import CheckpointError, ConfigError, EnvError, PromptTooLongError
from mafrt.core.types import Evidence
from mafrt.engines.checks import check_engine, reach_servers
from mafrt.environment.base import Env
from mafrt.environment.session import session_of
from mafrt.models.load_bases import check_template
from mafrt.rollout.prompts import AgentTokenizer, encode_prompt
from mafrt.rollout.stratified_order import strata_of
from mafrt.rollout.tree_player import scorable
from mafrt.runners.async_rollout import check_async
from mafrt.runners.limits import check_limits
from mafrt.storage.load_path import resolve

if TYPE_CHECKING:
    from mafrt.models.several_bases import Bases
    from mafrt.runners.algorithm import RunAlgorithm

_CHECKED = 1000
"""max number of tasks whose first prompts are checked, evenly spaced over all tasks"""
_CHECKED_COSTLY = 4
"""the same for environments whose `reset` is costly"""


def check_run(
    env: Env,
    team: Team,
    config: TrainConfig,
    rule: RunAlgorithm,
    coach: Coach | None,
    models: Mapping[str, str],
    *,
    eval_env: Env | None = None,
    processes: Processes = ALONE,
    sharded: bool = False,
    tokens_given: bool = False,
) -> None:
    """Refuse a run that cannot learn: all that is known without a model. The command line asks before it loads one,
    and `OnPolicy` in any case.

    Args:
        coach: of the run, or None.
        models: adapter -> its base.
        eval_env: the environment of evaluations, where it is another one.
        processes: those of the run.
        sharded: whether the base is sharded over them.
        tokens_given: whether `max_new_tokens` was asked for; a default is cut to the window instead.

    Raises:
        ConfigError: names the setting, what was found, and what to do.
    """
    tree, judging = rule.tree_samples > 1, coach is not None
    if coach is not None:
        check_coach(coach)
    check_team(env, team)
    check_evaluated(env if eval_env is None else eval_env, config.run)
    check_teacher(rule.settings, team)
    check_limits(config, team, models, tokens_given=tokens_given)
    check_several(team, models, config, rule)
    check_processes(processes, config, judged=judging and tree)
    if config.play.stratify:
        strata_of(env, config.play.stratify)
    check_opponents(env, rule.settings)
    paid = coach if config.algorithm.process_weight else None
    check_tree(env, rule.tree_samples, paid, continues=config.algorithm.tree_continues)
    check_replays(env, rule.settings, processes.size, config.play.audit_turns)
    check_async(config, team, sharded=sharded)


def check_teacher(settings: Algorithm, team: Team) -> None:
    """Raise CheckpointError unless the folder that is named as a teacher has an adapter for each of the team's."""
    if (path := getattr(settings, "teacher_path", None)) is None:
        return
    try:
        source = resolve(path)
        for adapter in team.adapters:
            source.adapter(adapter)
    except CheckpointError as error:
        raise CheckpointError(str(error).replace("--load_path", "--teacher_path")) from None


def check_evaluated(eval_env: Env, run: RunConfig) -> None:
    """Raise ConfigError where weights would be chosen, restored or a run ended by the scores on a test split."""
    parts = getattr(eval_env.unwrapped, "envs", {"": eval_env.unwrapped}).values()
    if run.eval_episodes and run.keep_best and "test" in (eval_env.split, *(part.split for part in parts)):
        raise ConfigError(
            f"evaluations play the test split of {eval_env.class_name}, and keep_best (with on_collapse "
            f"{run.on_collapse}) would choose weights by it; take the validation split (--eval_split validation), or "
            "choose nothing: --no-keep_best."
        )


def check_team(env: Env, team: Team) -> None:
    """Raise ConfigError unless the team has every agent of `env`."""
    missing = [name for name in env.agents if name not in team.names]
    if missing:
        raise ConfigError(
            f"{env.class_name} has the agents {', '.join(env.agents)}, but the team has no {', '.join(missing)} "
            f"(it has {', '.join(team.names)}); give a profile with these roles."
        )


def check_processes(processes: Processes, config: TrainConfig, *, judged: bool = False) -> None:
    """Raise ConfigError unless every process has tasks to play, and no setting needs a single process."""
    play = config.play
    groups = play.n_rollout_threads // play.n_samples
    # Samples of a task stay in one process, so there must be a task for each.
    if groups < processes.size:
        raise ConfigError(
            f"n_rollout_threads is {play.n_rollout_threads}, which with n_samples {play.n_samples} makes {groups} "
            f"tasks in an iteration, too few for {processes.size} processes; raise it to at least "
            f"{processes.size * play.n_samples}, or start fewer processes."
        )
    # Elsewhere one process judges for all; during the rollout each would need a judge of its own.
    if processes.size > 1 and (judged or config.coach.coach_feedback):
        raise ConfigError(
            f"{'this rule needs a coach' if judged else 'coach_feedback judges'} during the rollout, and "
            f"{processes.size} processes would each have a budget and a cache of their own; "
            f"{'' if judged else 'switch it off, or '}start one process."
        )


def check_sampler(config: TrainConfig, team: Team, model: str) -> None:
    """Raise ConfigError, MissingExtraError or EngineDownError for an engine that cannot sample for this team."""
    shapes = {name: team.lora_for(name, config.team.lora) for name in team.adapters}
    check_engine(
        config.engine,
        {name: shape.rank for name, shape in shapes.items()},
        {name: shape.targets for name, shape in shapes.items()},
        [name for name, shape in shapes.items() if shape.scope == "action"],
    )
    check_budget(config)
    reach_servers(config.engine, model)


def check_budget(config: TrainConfig) -> None:
    """Raise ConfigError for a budget of thought on an engine that keeps none."""
    if config.play.thinking_budget and config.engine.engine != "local":
        raise ConfigError(
            f"thinking_budget is {config.play.thinking_budget}, but engine {config.engine.engine} does not say which "
            "tokens it has put in; use --engine local, or --thinking_budget 0."
        )


def check_several(team: Team, models: Mapping[str, str], config: TrainConfig, rule: RunAlgorithm) -> None:
    """Refuse a team on several bases where that cannot be exact. Needs no model; nothing is refused on one base.

    Args:
        models: adapter -> its base (`mafrt.models.load_bases.models_of`).

    Raises:
        ConfigError: a rule or a setting that needs one base.
    """
    names = tuple(dict.fromkeys(models.values()))
    if len(names) < 2:
        return
    where = f"the team sits on {len(names)} bases ({', '.join(names)}), but "
    if rule.settings.one_base:
        raise ConfigError(
            where + f"{rule.name} {rule.settings.one_base}; give all agents one model, or take another algorithm, such "
            "as ppo or grpo."
        )
    if config.engine.engine == "vllm":
        raise ConfigError(where + "vLLM serves one here; leave --engine vllm out.")


def check_bases(base: Bases) -> None:
    """Refuse several bases that cannot serve one team.

    Raises:
        ConfigError: they are sharded.
        ModelError: a tokenizer has no chat template.
    """
    if len(base.parts) < 2:
        return
    if base.sharded or base.main.zero is not None:
        raise ConfigError("The team sits on several bases, which cannot be sharded; leave FSDP and --deepspeed out.")
    for name, part in base.parts.items():
        check_template(part.tokenizer, name)


def check_tree(env: Env, samples: int, coach: Coach | None, *, continues: bool = False) -> None:
    """Raise ConfigError unless every agent of `env` can be scored in the step in which it speaks, where trees grow.

    `coach` is None where its judgements have no weight. Alternatives that are played to the end (`continues`) can
    always be scored; there the environment has to be forked in the middle of an episode.
    """
    if samples == 1:
        return
    if continues:
        problem = _fork_problem(env)
        if problem is not None:
            raise ConfigError(
                f"alternatives of a turn are played to the end on copies of the episode, and {env.class_name} cannot "
                f"be copied ({problem}); define fork(self), or compare whole episodes: --tree_samples 1 --n_samples 8."
            )
        return

    def judged(evidence: Evidence | None) -> bool:
        if isinstance(coach, RulesCoach):
            return evidence is not None and evidence.rules is not None
        return coach is not None

    if blind := [agent for agent in env.agents if agent not in scorable(env, judged)]:
        raise ConfigError(
            f"with tree_samples {samples}, alternatives of a turn are scored before one is carried on, and "
            f"{env.class_name} neither pays {', '.join(blind)} in the step in which it speaks nor ends with it; "
            "turn a coach on (such as --coach rules), pay it in step(), or compare whole episodes with "
            "--tree_samples 1 --n_samples 8."
        )


def check_opponents(env: Env, settings: Algorithm) -> None:
    """Raise ConfigError for credit that adds up what agents are paid, in an environment of opponents."""
    if env.opponents and settings.adds_agents:
        raise ConfigError(
            f"algorithm {settings.name!r} adds up what several agents are paid, and in {env.class_name} they are paid "
            "against each other, so that the sum tells nothing of a turn; take rae, dr_mas, c3, ippo or reinforce_pp."
        )


def check_replays(env: Env, settings: Algorithm, processes: int = 1, audit_turns: int = 0) -> None:
    """Raise ConfigError where episodes are to be played again and `env` or the run cannot do it."""
    if not settings.needs_contribution and not audit_turns:
        return
    asks = f"audit_turns is {audit_turns}, which plays turns again"
    if settings.needs_contribution:
        asks = f"algorithm {settings.name!r} plays episodes again without one of the agents"
    elif not settings.has_advantages:
        raise ConfigError(f"{asks} to check their advantages, and {settings.name!r} has none; leave it out.")
    if settings.needs_contribution and len(env.agents) < 2:
        raise ConfigError(f"{asks}, and {env.class_name} has one agent; take another algorithm, such as grpo.")
    if processes > 1:
        raise ConfigError(f"{asks}, in one process; start one instead of {processes}.")
    problem = _fork_problem(env)
    if problem is not None:
        raise ConfigError(
            f"{asks}, and {env.class_name} cannot be played again ({problem}); take an environment whose random "
            "numbers all come from self.rng and whose state is set in reset(), as in math or tic_tac_toe."
        )


def _fork_problem(env: Env) -> str | None:
    """Why a running episode of `env` cannot be copied; None if it can."""
    probe = session_of(env).spawn()
    try:
        probe.reset(seed=0, options={"task": 0} if env.num_tasks else None)
        probe.fork().close()
    except EnvError as error:
        return str(error)
    finally:
        probe.close()
    return None


def check_window(window: int | None, trained: int) -> int:
    """The context window to use. Raises ConfigError if more is asked for than the base was trained for."""
    if window is not None and not 1 < window <= trained:
        raise ConfigError(
            f"context_window is {window}, but the base was trained for up to {trained} tokens; choose a value in "
            f"[2, {trained}]."
        )
    return window or trained


def check_prompts(env: Env, team: Team, voices: Mapping[str, AgentTokenizer]) -> None:
    """Encode the first prompts of the tasks. Raises PromptTooLongError, naming the first task that does not fit."""
    count = env.num_tasks or 1
    step = max(1, -(-count // (_CHECKED_COSTLY if env.unwrapped.costly_reset else _CHECKED)))
    probe = session_of(env).spawn()
    for task in range(0, count, step):
        observations, info = probe.reset(seed=0, options={"task": task} if env.num_tasks else None)
        for agent, seen in observations.items():
            window = voices[agent].context_window
            length = len(
                encode_prompt(voices[agent].tokenizer, team.agent(agent).prompt, seen, team.agent(agent).prompt_at)
            )
            if length >= window:
                raise PromptTooLongError(
                    f"Task {info.get('task', task)!r} gives {agent!r} a prompt of {length} tokens, which leaves no "
                    f"room for an answer in a context window of {window}; raise --context_window or leave the task out."
                )
    probe.close()
