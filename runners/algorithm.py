"""Resolves the settings into one learning rule, checked against the run before a model is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from mafrt import algorithms
from mafrt.algorithms import Algorithm, CreditContext
from mafrt.config.agent import LOSS_SETTINGS, REWARD_SETTINGS
from mafrt.config.algorithm import make_algorithm
from mafrt.config.algorithm_groups import CriticSettings
from mafrt.config.team import Team
from mafrt.config.train_config import TrainConfig
from mafrt.core.errors import ConfigError
from mafrt.runners.schedules import AgentAdapters, CriticWarmup, Schedule, make_schedule, self_play
from mafrt.storage.checkpoint import REFERENCE
from mafrt.storage.load_path import LoadSource


@dataclass(frozen=True)
class RunAlgorithm:
    """An algorithm in a run: its settings, and the values derived from them and the run."""

    settings: Algorithm
    token_limits: Mapping[str, int]
    """agent -> max tokens of a turn"""
    tree_samples: int
    """alternatives per turn, of which the best continues; 1: no trees"""
    sampling_rounds: int
    """rounds in which groups without spread are replaced (DAPO's dynamic sampling)"""
    schedule: Schedule
    own: Mapping[str, Algorithm] = field(default_factory=dict)
    """agent -> its settings, of the agents whose team file changes some"""

    name: str = field(init=False)
    """of the algorithm"""
    critic: Literal["context", "transcript"] | None = field(init=False)
    """input of the critic; None: no critic"""
    reference: bool = field(init=False)
    """whether the reference's log-probabilities are needed"""
    influence: bool = field(init=False)
    """whether credit reads `Turn.influence`"""
    contribution: bool = field(init=False)
    """whether credit reads `Turn.contribution`"""

    def __post_init__(self) -> None:
        settings = self.settings
        derived = {
            "name": settings.name,
            "critic": settings.critic_reads,
            "reference": any(agent_settings.kl_coef > 0 for agent_settings in (settings, *self.own.values())),
            "influence": settings.needs_influence,
            "contribution": settings.needs_contribution,
        }
        for name, value in derived.items():
            object.__setattr__(self, name, value)

    def context(self) -> CreditContext:
        """The context of `algorithms.assign`, as far as it is the same in every iteration."""
        in_reward = self.settings.kl_in == "reward"
        return CreditContext(
            token_limits=self.token_limits,
            agent_rewards=self.own,
            agent_kl={
                name: settings.kl_coef
                for name, settings in self.own.items()
                if in_reward and settings.kl_coef != self.settings.kl_coef
            },
        )


def with_reference(config: TrainConfig, start: LoadSource | None) -> TrainConfig:
    """`config` with the reference of the KL penalty decided: as it says, or by what the run starts from.

    A run that goes on from a checkpoint keeps the one that it has; adapters that a run starts from are the reference,
    since a penalty to the base would undo what they have learnt.
    """
    settings = config.algorithm
    if settings.reference is not None or "reference" not in type(settings).settings():
        return config
    if start is None or (start.checkpoint is None and not start.adapters):
        initial = False
    elif start.checkpoint is None:
        initial = True
    else:
        initial = f"state/{REFERENCE}" in start.checkpoint.files
    return replace(config, algorithm=replace(settings, reference="initial" if initial else "base"))


def resolve_rule(config: TrainConfig, team: Team) -> RunAlgorithm:
    """Check the algorithm's settings against the run. Needs no model.

    Raises:
        ConfigError: something that the algorithm needs and the run lacks, or settings that exclude each other.
    """
    settings = config.algorithm
    if not isinstance(settings, Algorithm):
        raise ConfigError(f"algorithm {settings.name}: the class has no credit(); inherit from Algorithm.")
    _check_temperatures(config, team)
    tree = _tree_samples(settings, config)
    # A tree's later turns are not known when its alternatives are scored, so the outcome cannot be spread over all
    # turns.
    if settings.tree_samples is not None and settings.outcome_to is None:
        settings = replace(settings, outcome_to="all" if tree == 1 else "end")
    algorithms.check_needs(
        settings,
        critic=settings.critic_reads,
        samples_per_problem=max(config.play.n_samples, tree),
        reference=True,
        agents=len(team.names),
    )
    rounds = config.play.dynamic_sampling_rounds
    if rounds and config.play.n_samples < 2:
        raise ConfigError(
            f"dynamic_sampling_rounds is {rounds}, which compares the samples of a task, and n_samples is 1; ask for "
            "at least 2, or leave dynamic_sampling_rounds out."
        )
    return RunAlgorithm(
        settings=settings,
        # Limits of each agent, since DAPO's penalty and Dr. GRPO's constant refer to the answer that was allowed.
        token_limits={agent.name: agent.max_new_tokens or config.play.max_new_tokens for agent in team.agents},
        tree_samples=tree,
        sampling_rounds=settings.sampling_rounds if rounds is None else rounds,
        schedule=_schedule(settings, config, team),
        own=_own_settings(settings, team),
    )


def _own_settings(settings: Algorithm, team: Team) -> dict[str, Algorithm]:
    """Settings of the agents that have a loss or reward setting of their own.

    Raises:
        ConfigError: the algorithm does not use it, or the value does not fit the others.
    """
    changed_settings = {}
    for agent in team.agents:
        # Loss settings belong to the adapter: an agent that shares it has them too, whichever agent names them.
        changes = team.settings_for(agent.adapter, LOSS_SETTINGS) | agent.given(REWARD_SETTINGS)
        if not changes:
            continue
        if "kl_coef" in changes and settings.kl_target is not None:
            changes["kl_target"] = None  # its weight is fixed
        try:
            changed = make_algorithm(settings, changes)
        except ConfigError as error:
            raise ConfigError(f"agent {agent.name!r}: {error}") from error
        assert isinstance(changed, Algorithm)
        changed_settings[agent.name] = changed
    return changed_settings


def _tree_samples(settings: Algorithm, config: TrainConfig) -> int:
    """Alternatives of every turn; 1 without trees.

    Raises:
        ConfigError: trees for a rule that has none, beside groups of another kind, or with an outcome for turns that
            were scored before it was known.
    """
    samples = config.play.n_samples
    tree = config.play.tree_samples or (settings.tree_samples if samples == 1 and settings.tree_samples else 1)
    if tree == 1:
        return 1
    if settings.tree_samples is None:
        raise ConfigError(
            f"tree_samples is {tree}, and algorithm {settings.name!r} does not compare alternatives of a turn; take "
            "'at_grpo', or leave --tree_samples out."
        )
    if samples > 1:
        raise ConfigError(
            f"tree_samples is {tree} and n_samples {samples}, but a turn's alternatives are its group; leave one of "
            "the two out."
        )
    if settings.outcome_to in ("each", "all"):
        raise ConfigError(
            f"outcome_to is {settings.outcome_to!r}, but the alternatives of a turn are scored before later turns "
            "are known; leave it out, or set --tree_samples 1 and --n_samples 8."
        )
    return tree


def _schedule(settings: Algorithm, config: TrainConfig, team: Team) -> Schedule:
    """An interval makes any concurrent rule train one agent at a time; frozen agents never learn."""
    interval = settings.agent_iteration_interval
    frozen = team.frozen(config.team.freeze)
    adapters = {agent.name: agent.adapter for agent in team.agents}
    if config.team.league:
        if interval or settings.schedule != "concurrent":
            raise ConfigError(
                f"a league decides which agent learns, and so does {settings.name!r} with this interval; leave "
                "--league or --agent_iteration_interval out, or take a rule such as dr_mas."
            )
        # The background rollout would sample from members that are being exchanged.
        if config.play.async_steps:
            raise ConfigError("a league renews its members between iterations; leave --async_steps or --league out.")
        assigned = AgentAdapters.of(team.names, frozen=frozen, adapters=adapters)
        return self_play(assigned, config.team.league, config.team.league_interval, config.run.seed)
    by_turns = "round_robin" if interval and settings.schedule == "concurrent" else settings.schedule
    schedule = make_schedule(
        by_turns,
        team.names,
        interval=interval if by_turns in ("round_robin", "swap") else 1,
        seed=config.run.seed,
        frozen=frozen,
        adapters=adapters,
    )
    # Only a critic has anything to warm up; the actors wait for it.
    warmup = settings.warmup_steps if isinstance(settings, CriticSettings) else 0
    return CriticWarmup(schedule, warmup) if warmup else schedule


def _check_temperatures(config: TrainConfig, team: Team) -> None:
    """Refuse to learn from greedy samples: their probabilities under temperature 0 are 0 or 1, without a gradient."""
    frozen = team.frozen(config.team.freeze)
    for agent in team.agents:
        if agent.temperature is not None and agent.temperature <= 0 and agent.name not in frozen:
            raise ConfigError(
                f"agent {agent.name!r} has temperature {agent.temperature:g} and is to learn, but greedy answers teach "
                "nothing; give it a temperature above 0 in the team file, or freeze it (--freeze)."
            )
