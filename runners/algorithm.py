"""From the settings to one learning rule: what the algorithm's preset says, and what the user says instead."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from mafrt import algorithms
from mafrt.config.team import Team
from mafrt.config.train_config import TrainConfig
from mafrt.core.errors import ConfigError
from mafrt.runners.schedules import Schedule, make_schedule

_OWN = (
    "level",
    "bootstrap",
    "gamma",
    "gae_lambda",
    "outcome_to",
    "share",
    "round_gamma",
    "alpha0",
    "alpha1",
    "alpha2",
    "alpha3",
    "right_above",
    "residual_weight",
    "overlong_buffer",
    "overlong_penalty",
    "normalize_advantages",
)
"""settings of `CreditConfig` whose None means the algorithm's own"""


@dataclass(frozen=True)
class Rule:
    """Everything that the algorithm's name decides."""

    name: str
    credit: Mapping[str, Any]
    """settings of `algorithms.assign`"""
    level: Literal["token", "action"]
    """what one probability ratio spans"""
    clip_low: float
    clip_high: float
    normalize: Literal["sum", "token", "word"]
    """how a turn's log-ratio is divided, at action level"""
    constant_length: bool
    """divide a turn's loss by max_new_tokens instead of what was said (Dr. GRPO)"""
    critic: Literal["context", "transcript"] | None
    """what the critic reads: the turn's own context, or the whole transcript and the speaker's name; None: no critic"""
    mixer: Literal["vdn", "qmix"] | None
    """what joins the agents' Q to the team's, in place of a critic; None: nothing"""
    reference: bool
    """whether the reference's log-probabilities are needed"""
    kl_in: Literal["loss", "reward"]
    """where the KL penalty to the reference is paid"""
    kl_name: str
    """the credit setting that holds its weight in the reward"""
    tree_samples: int
    """alternatives of every turn, the best of which is carried on; 1: no trees"""
    sampling_rounds: int
    """rounds in which groups without spread are replaced (DAPO's dynamic sampling)"""
    schedule: Schedule

    def kl_settings(self, coef: float) -> dict[str, float]:
        """The credit settings for a KL penalty of this weight; none if it is paid in the loss."""
        return {self.kl_name: coef} if self.kl_in == "reward" else {}


def resolve_rule(config: TrainConfig, team: Team) -> Rule:
    """Combine preset and settings. Needs no model, so what cannot work is refused before one is loaded.

    Raises:
        ConfigError: an unknown algorithm (names the nearest), a setting that it does not have, or something that it
            needs and the run lacks.
    """
    chosen = config.credit
    preset = algorithms.algorithm(chosen.algorithm)
    known = algorithms.settings_of(preset.name)
    settings: dict[str, Any] = {
        "reward_weight": chosen.reward_weight,
        "outcome_weight": chosen.outcome_weight,
        "process_weight": chosen.process_weight,
        "outcome_veto": chosen.outcome_veto,
        "normalize_advantages": preset.credit.get("normalize_advantages", "agent" if preset.critic else "none"),
    }
    level = chosen.level or preset.loss.get("level", "token")
    for name in _OWN:
        value = getattr(chosen, name)
        if value is None:
            continue
        if name not in known and name != "level":
            raise ConfigError(f"algorithm {preset.name!r} has no {name}; leave --{name} out, or take 'ppo'.")
        settings[name] = value
    if "level" in known:
        settings["level"] = level
    else:
        settings.pop("level", None)
    kl_in = config.learn.kl_in or preset.loss.get("kl_in", "loss")
    kl_name = "beta" if "beta" in known else "kl_coef"
    if kl_in == "reward":
        settings[kl_name] = config.learn.kl_coef
    reference = config.learn.kl_coef > 0
    tree = _tree_samples(preset, config, settings)
    algorithms.check_needs(
        preset.name,
        settings,
        critic=preset.critic,
        samples_per_problem=max(config.play.n_samples, tree),
        reference=reference,
        agents=len(team.names),
    )
    rounds = config.play.dynamic_sampling_rounds
    if rounds and config.play.n_samples < 2:
        raise ConfigError(
            f"dynamic_sampling_rounds is {rounds}, which compares the samples of a task, and n_samples is 1; ask for "
            "at least 2, or leave dynamic_sampling_rounds out."
        )
    if settings.get("overlong_buffer", known["overlong_buffer"]):
        limits = {agent.name: agent.max_new_tokens or config.play.max_new_tokens for agent in team.agents}
        settings["token_limits"] = limits
    high = config.learn.clip_high
    return Rule(
        name=preset.name,
        credit=settings,
        level=level,
        clip_low=config.learn.clip_param,
        clip_high=preset.loss.get("clip_high", config.learn.clip_param) if high is None else high,
        normalize=config.learn.normalization_mode or preset.loss.get("normalize", "token"),
        constant_length=preset.loss.get("denominator") == "constant",
        critic=preset.critic,
        mixer=preset.mixer,
        reference=reference,
        kl_in=kl_in,
        kl_name=kl_name,
        tree_samples=tree,
        sampling_rounds=preset.sampling_rounds if rounds is None else rounds,
        schedule=_schedule(preset, config, team),
    )


def _tree_samples(preset: algorithms.Algorithm, config: TrainConfig, settings: dict[str, Any]) -> int:
    """Alternatives of every turn; 1 without trees. With them, sets who gets the outcome.

    Raises:
        ConfigError: trees for a rule that has none, beside groups of another kind, or with an outcome for turns that
            were scored before it was known.
    """
    samples = config.play.n_samples
    tree = config.play.tree_samples or (preset.tree_samples if samples == 1 and preset.tree_samples else 1)
    if tree == 1:
        return 1
    if preset.tree_samples is None:
        raise ConfigError(
            f"tree_samples is {tree}, and algorithm {preset.name!r} does not compare alternatives of a turn; take "
            "'at_grpo', or leave --tree_samples out."
        )
    if samples > 1:
        raise ConfigError(
            f"tree_samples is {tree} and n_samples {samples}, but a turn's alternatives are its group; leave one of "
            "the two out."
        )
    if settings.setdefault("outcome_to", "end") in ("each", "all"):
        raise ConfigError(
            f"outcome_to is {settings['outcome_to']!r}, but the alternatives of a turn are scored before later turns "
            "are known; leave it out, or set --tree_samples 1 and --n_samples 8."
        )
    return tree


def _schedule(preset: algorithms.Algorithm, config: TrainConfig, team: Team) -> Schedule:
    """An interval makes any concurrent rule train one agent at a time; frozen agents never learn."""
    interval = config.team.agent_iteration_interval
    frozen = config.team.freeze
    return make_schedule(
        "round_robin" if interval and preset.schedule == "concurrent" else preset.schedule,
        team.names,
        interval=interval or preset.interval,
        seed=config.run.seed,
        frozen=team.names if frozen == ("all",) else frozen,
        adapters={agent.name: agent.adapter for agent in team.agents},
    )
