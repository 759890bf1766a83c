"""Credit: each turn's share of the team's reward, and the losses made of it.

    metrics = algorithms.assign(episodes, "ppo", gamma=1.0, gae_lambda=0.95)

fills `turn.advantages` and `turn.returns`, one number per action token, and returns metrics. A turn that is out of
the loss has None in both. Nothing else is changed, no model and no network is needed, and the order of the episodes
does not matter. Statistics run over the episodes given: pass the batch of all processes.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from mafrt.algorithms.base import Algorithm, Trajectories, structural
from mafrt.algorithms.normalize import credit_metrics, normalize, observed_returns
from mafrt.algorithms.rewards import CreditContext, Row, are_opponents, fill_later, pays_by_turn, reward_rows
from mafrt.algorithms.stats import mean, no_spread, total
from mafrt.config.algorithm import REGISTRY, make_algorithm, register_algorithm
from mafrt.config.resolve import user_line
from mafrt.core.errors import ConfigError, MafrtError
from mafrt.core.types import Episode

__all__ = [
    "ALGORITHMS",
    "Algorithm",
    "CreditContext",
    "Row",
    "Trajectories",
    "algorithm",
    "assign",
    "check_needs",
    "groups_without_spread",
    "register_algorithm",
    "structural",
    "turn_rewards",
]


class _Presets(Mapping[str, Algorithm]):
    """Every registered algorithm with its own defaults, by name."""

    def __getitem__(self, name: str) -> Algorithm:
        if name not in REGISTRY:
            raise KeyError(name)
        return algorithm(name)

    def __iter__(self) -> Any:
        return iter(REGISTRY.names())

    def __len__(self) -> int:
        return len(REGISTRY.names())


ALGORITHMS: Mapping[str, Algorithm] = _Presets()


def algorithm(name: str, **settings: Any) -> Algorithm:
    """The algorithm of a name or `package.module:Class`, with settings in place of its defaults.

    Raises:
        ConfigError: there is none (names the nearest), a setting that it does not use, or a bad value.
    """
    chosen = make_algorithm(name, settings)
    if not isinstance(chosen, Algorithm):
        raise ConfigError(f"algorithm {name}: {type(chosen).__name__} has no credit(); inherit from Algorithm.")
    return chosen


def assign(
    episodes: Sequence[Episode],
    rule: str | Algorithm = "ppo",
    context: CreditContext | None = None,
    **settings: Any,
) -> dict[str, float]:
    """Fill the advantages and returns of every turn.

    Args:
        episodes: the global batch. `turn.values` must be filled for rules with a critic.
        rule: an algorithm, or the name of one.
        context: facts about the batch that are no settings.
        settings: of the algorithm, in place of its own; or of the context.

    Returns:
        `reward/AGENT`, `advantage_mean/AGENT`, `advantage_std/AGENT`, `explained_variance/AGENT`, `ref_kl/AGENT` (where
        the reference's log-probabilities are filled), counts of turns out of the loss, and counts of groups with and
        without spread.

    Raises:
        ConfigError: an unknown rule or setting (names the nearest), a value out of range, a missing critic or
            reference, or an error in a user's `credit` (names file and line).
    """
    chosen, about = _resolve(rule, context, settings)
    kl_coef = chosen.kl_coef if about.kl_coef is None else about.kl_coef
    trajectories, spans_lost = reward_rows(
        episodes, chosen, about, kl_coef=kl_coef if chosen.kl_in == "reward" else 0.0
    )
    about = _told(about, trajectories)
    observed = observed_returns(trajectories)
    metrics = _credit(chosen, trajectories, about)
    rows = [row for trajectory in trajectories for row in trajectory]
    for row in rows:
        numbers = (*(row.turn.advantages or ()), *(row.turn.returns or ()))
        if not all(map(math.isfinite, numbers)):
            row.drop("nonfinite")
        row.turn.paid = None if row.dropped else row.reward
        row.turn.parts = None if row.dropped else row.parts()
    metrics |= credit_metrics(rows, observed) | {"spans_unlocated": float(spans_lost)}
    if about.by_turn:
        metrics["paid_by_turn"] = 1.0
    # After the metrics: a normalised deviation is 1 and carries no information.
    normalize(rows, chosen.normalize_advantages, by_turn=_by_turn(chosen), observed=observed)
    return metrics


def _told(context: CreditContext, trajectories: Trajectories) -> CreditContext:
    """The context with the facts that were left to be inferred from the batch."""
    by_turn = pays_by_turn(trajectories) if context.by_turn is None else context.by_turn
    opponents = are_opponents(trajectories) if context.opponents is None else context.opponents
    return dataclasses.replace(context, by_turn=by_turn, opponents=opponents)


def _credit(chosen: Algorithm, trajectories: Trajectories, context: CreditContext) -> dict[str, float]:
    """`credit` of the algorithm; an error in a user's own becomes one sentence."""
    try:
        return dict(chosen.credit(trajectories, context))
    except MafrtError:
        raise
    except Exception as error:
        where = user_line(error)
        if not where:
            raise
        raise ConfigError(f"algorithm {chosen.name}: credit() raised {type(error).__name__}: {error}{where}") from error


def _by_turn(chosen: Algorithm) -> bool:
    """Whether all tokens of a turn share one advantage; statistics then weigh turns equally instead of tokens."""
    shared = chosen.level == "action" or getattr(chosen, "joint_advantage", False)
    return shared and chosen.critic_reads is not None and chosen.mixer is None


def groups_without_spread(
    episodes: Sequence[Episode], rule: str | Algorithm, context: CreditContext | None = None, **settings: Any
) -> list[str]:
    """Names of the groups without a learning signal, sorted: all rewards equal, or fewer than two known.

    A sample's reward is the mean over its turns, and pay by turn is added up, both without the
    overlong and KL penalties: DAPO (2503.14476, eq. 11) filters on correctness, and wrong answers of unequal length
    are equally wrong. Arguments as of `assign`; advantages and returns are not written.
    """
    chosen, about = _resolve(rule, context, settings)
    trajectories, _ = reward_rows(episodes, dataclasses.replace(chosen, overlong_buffer=0.0), about)
    by_turn = _told(about, trajectories).by_turn and getattr(chosen, "turn_credit", "to_go") == "to_go"
    rewards: dict[str, list[float]] = {episode.group: [] for episode in episodes}
    for episode, rows in zip(episodes, trajectories, strict=True):
        known = [row for row in rows if row.dropped is None]
        if known:
            # Pay by turn is added up, since a mean would call a long episode equal to a short one.
            paid = total(row.pay for row in known) if by_turn else 0.0
            rewards[episode.group].append(mean([r.reward - (r.pay if by_turn else 0.0) for r in known]) + paid)
    return sorted(group for group, numbers in rewards.items() if len(numbers) < 2 or no_spread(numbers))


def turn_rewards(
    episodes: Sequence[Episode], rule: str | Algorithm, context: CreditContext | None = None, **settings: Any
) -> list[list[float | None]]:
    """Worth of each turn of each episode, without the KL penalty; None where unknown.

    It is the turn's reward as `assign` computes it, and where turns are paid as they come, later pay (`Row.later`).
    Arguments as of `assign`; advantages and returns are not written.
    """
    chosen, about = _resolve(rule, context, settings)
    trajectories, _ = reward_rows(episodes, chosen, about)
    about = _told(about, trajectories)
    if about.by_turn and chosen.share == "own" and getattr(chosen, "turn_credit", "to_go") == "to_go":
        fill_later(trajectories, own=bool(about.opponents))
    return [[None if row.dropped else row.reward + row.later for row in rows] for rows in trajectories]


def _resolve(
    rule: str | Algorithm, context: CreditContext | None, settings: Mapping[str, Any]
) -> tuple[Algorithm, CreditContext]:
    """The algorithm and the context, with `settings` sorted into the two."""
    about = context or CreditContext()
    names = {item.name for item in dataclasses.fields(CreditContext)} - {"kl_coef"}
    of_context = {name: value for name, value in settings.items() if name in names}
    own = {name: value for name, value in settings.items() if name not in names}
    chosen = algorithm(rule, **own) if isinstance(rule, str) else make_algorithm(rule, own)
    assert isinstance(chosen, Algorithm)
    return chosen, dataclasses.replace(about, **of_context)


def check_needs(
    rule: str | Algorithm,
    *,
    critic: str | None,
    samples_per_problem: int,
    reference: bool,
    agents: int,
) -> None:
    """Refuse an algorithm whose needs are not met, before any model is loaded.

    Args:
        rule: the algorithm, or its name.
        critic: input of the run's critic ("context" or "transcript"), None without one.
        samples_per_problem: episodes that share a group.
        reference: whether `ref_logprobs` are filled.
        agents: size of the team.

    Raises:
        ConfigError: a critic, groups, a reference or several agents are needed and not there.
    """
    chosen = algorithm(rule) if isinstance(rule, str) else rule
    name = chosen.name
    if chosen.critic_reads and not critic:
        raise ConfigError(f"algorithm {name!r} needs a critic and the run has none; turn it on, or take 'grpo'.")
    if chosen.critic_reads == "transcript" and critic != "transcript":
        raise ConfigError(
            f"algorithm {name!r} needs a critic that reads the whole transcript and the run's reads the turn's own "
            "context; make it central, or take 'ppo'."
        )
    if chosen.needs_groups and samples_per_problem < 2:
        raise ConfigError(
            f"algorithm {name!r} compares the samples of one problem and gets {samples_per_problem} of each; "
            "ask for at least 2 per problem (--n_samples 8), or take 'ppo'."
        )
    if chosen.needs_several_agents and agents < 2:
        raise ConfigError(f"algorithm {name!r} needs several agents and the team has {agents}; take 'ppo'.")
    if chosen.kl_coef and not reference:
        raise ConfigError(
            f"algorithm {name!r} with a KL penalty needs the reference's log-probs; turn them on, or set kl_coef to 0."
        )
