"""Credit: each turn's share of the team's reward, and the losses made of it.

    metrics = algorithms.assign(episodes, "ppo", gamma=1.0, gae_lambda=0.95)

fills `turn.advantages` and `turn.returns`, one number per action token, and returns metrics. A turn that is out of
the loss has None in both. Nothing else is changed, no model and no network is needed, and the order of the episodes
does not matter. Statistics run over the episodes given: pass the batch of all processes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mafrt.algorithms.base import Algorithm, Trajectories, algorithm, structural
from mafrt.algorithms.credit import assign, groups_without_spread, turn_rewards
from mafrt.algorithms.rewards import CreditContext, Row
from mafrt.config.algorithm import REGISTRY, make_algorithm, register_algorithm
from mafrt.config.resolve import place_of
from mafrt.core.errors import ConfigError

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
    "make_algorithm",
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
    if type(chosen).credit is Algorithm.credit and chosen.updater is Algorithm.updater:
        raise ConfigError(
            f"algorithm {name}{place_of(type(chosen))} has no credit(); say there how its advantages are computed."
        )
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
