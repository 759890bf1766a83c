"""Credit: who gets how much of what the team earned.

    metrics = credit.assign(episodes, rule="gae", gamma=1.0, gae_lambda=0.95)

fills `turn.advantages` and `turn.returns`, one number per action token, and returns metrics. A turn that is out of
the loss has None in both. Nothing else is changed, no model and no network is needed, and the order of the episodes
does not matter. Statistics run over the episodes given: pass the batch of all processes.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from mafrt.algorithms.normalize import credit_metrics, normalize
from mafrt.algorithms.registry import ALGORITHMS, RULES, Algorithm, algorithm, check_needs
from mafrt.algorithms.rewards import RewardSettings, reward_rows
from mafrt.algorithms.stats import mean, no_spread
from mafrt.algorithms.validation import choice, unknown
from mafrt.core.types import Episode

__all__ = [
    "ALGORITHMS",
    "Algorithm",
    "algorithm",
    "assign",
    "check_needs",
    "groups_without_spread",
    "settings_of",
    "turn_rewards",
]


def assign(episodes: Sequence[Episode], rule: str = "gae", **settings: Any) -> dict[str, float]:
    """Fill the advantages and returns of every turn.

    Args:
        episodes: the global batch. `turn.values` must be filled for rules with a critic.
        rule: a name of `ALGORITHMS`.
        settings: of the rule, of the rewards (`RewardSettings`), and `normalize_advantages` (none, batch or agent),
            which centres and scales the finished advantages, token by token. They go before the preset's.

    Returns:
        `reward/AGENT`, `advantage_mean/AGENT`, `advantage_std/AGENT`, `explained_variance/AGENT`, `ref_kl/AGENT` (where
        the reference's log-probabilities are filled), counts of turns out of the loss, and how many groups there were
        and could teach nothing.

    Raises:
        ConfigError: an unknown rule or setting (names the nearest), a value out of range, a missing critic or
            reference.
    """
    run, _ = RULES[algorithm(rule).family]
    rule_settings, rewarding, how = _read(rule, settings)
    trajectories, spans_lost = reward_rows(episodes, rewarding)
    metrics = run(trajectories, rule_settings)
    rows = [row for trajectory in trajectories for row in trajectory]
    for row in rows:
        numbers = (*(row.turn.advantages or ()), *(row.turn.returns or ()))
        if not all(map(math.isfinite, numbers)):
            row.drop("nonfinite")
    metrics |= credit_metrics(rows) | {"spans_unlocated": float(spans_lost)}
    # Afterwards, since a normalised deviation is 1 and would tell nobody anything.
    normalize(rows, how, by_turn=getattr(rule_settings, "level", "token") == "action")
    return metrics


def groups_without_spread(episodes: Sequence[Episode], rule: str, **settings: Any) -> list[str]:
    """Groups that can teach nothing: all samples are worth the same, or fewer than two are of known worth. Sorted.

    A sample's worth is the mean reward of its turns, the overlong penalty left out: DAPO (2503.14476, eq. 11) asks
    whether answers differ in being right, and a group of wrong answers of unequal length does not. So is a penalty for
    the divergence from the reference. Takes what `assign` takes, and like it leaves advantages and returns to be
    filled.
    """
    _, rewarding, _ = _read(rule, settings)
    trajectories, _ = reward_rows(episodes, dataclasses.replace(rewarding, overlong_buffer=0.0, kl_coef=0.0))
    worth: dict[str, list[float]] = {episode.group: [] for episode in episodes}
    for episode, rows in zip(episodes, trajectories, strict=True):
        known = [row.reward for row in rows if row.dropped is None]
        if known:
            worth[episode.group].append(mean(known))
    return sorted(group for group, numbers in worth.items() if len(numbers) < 2 or no_spread(numbers))


def turn_rewards(episodes: Sequence[Episode], rule: str, **settings: Any) -> list[list[float | None]]:
    """The reward of each turn of each episode, as `assign` would see it; None where it is not known.

    A penalty for the divergence from the reference is left out. Takes what `assign` takes, and like it leaves
    advantages and returns to be filled.
    """
    _, rewarding, _ = _read(rule, settings)
    trajectories, _ = reward_rows(episodes, dataclasses.replace(rewarding, kl_coef=0.0))
    return [[None if row.dropped else row.reward for row in rows] for rows in trajectories]


def _read(rule: str, settings: Mapping[str, Any]) -> tuple[Any, RewardSettings, str]:
    """The settings of the rule and of the rewards, and `normalize_advantages`: the preset's, where not given."""
    preset = algorithm(rule)
    kind = RULES[preset.family][1]
    chosen = {**preset.credit, **settings}
    how = chosen.pop("normalize_advantages", "none")
    choice("normalize_advantages", how, ("none", "batch", "agent"))
    own, rewarding = _names(kind), _names(RewardSettings)
    for name in chosen:
        if name not in own | rewarding:
            raise unknown(f"setting of rule {rule!r}", name, own | rewarding | {"normalize_advantages"})
    return (
        kind(**{k: v for k, v in chosen.items() if k in own}),
        RewardSettings(**{k: v for k, v in chosen.items() if k in rewarding}),
        how,
    )


def settings_of(rule: str) -> dict[str, Any]:
    """Every setting of a rule with its default in that preset."""
    preset = algorithm(rule)
    kinds = (RULES[preset.family][1], RewardSettings)
    defaults = {f.name: f.default for kind in kinds for f in dataclasses.fields(kind)}
    return {**defaults, "normalize_advantages": "none", **preset.credit}


def _names(kind: type) -> set[str]:
    """Names of a settings class's fields."""
    return {f.name for f in dataclasses.fields(kind)}
