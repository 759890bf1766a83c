"""Every learning rule by name: what it is, where it is from, what it needs, and its vetted defaults.

An `Algorithm` is a preset: a credit rule with settings, and what the loss and the schedule should be for it. Nothing
here runs a model; `check_needs` tells a user what is missing before one is loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

from mafrt.algorithms.gae import GaeSettings, gae
from mafrt.algorithms.gigpo import GigpoSettings, gigpo
from mafrt.algorithms.group_relative import GroupSettings, group
from mafrt.algorithms.maporl import MaporlSettings, maporl
from mafrt.algorithms.reinforce_pp import ReinforceSettings, reinforce_pp
from mafrt.algorithms.validation import unknown
from mafrt.algorithms.value_decomposition import MixedSettings, mixed
from mafrt.core.errors import ConfigError

RULES: Mapping[str, tuple[Callable[..., dict[str, float]], type]] = MappingProxyType(
    {
        "gae": (gae, GaeSettings),
        "maporl": (maporl, MaporlSettings),
        "group": (group, GroupSettings),
        "gigpo": (gigpo, GigpoSettings),
        "mixed": (mixed, MixedSettings),
        "reinforce_pp": (reinforce_pp, ReinforceSettings),
    }
)
"""The families: function and settings class. Every algorithm is one of them with settings."""


@dataclass(frozen=True)
class Algorithm:
    """A named preset."""

    name: str
    summary: str
    """One line for `--list_algorithms`."""
    paper: str
    family: str
    """Key of `RULES`."""
    credit: Mapping[str, Any] = field(default_factory=dict)
    """Settings of the family and of the rewards that differ from their defaults."""
    loss: Mapping[str, Any] = field(default_factory=dict)
    """What the loss should be: `level`, `clip_low`, `clip_high`, `denominator` (token, turn or constant), `kl_in`..."""
    schedule: str = "concurrent"
    critic: Literal["context", "transcript"] | None = None
    """What its critic reads: the turn's own context, the whole transcript so far and the speaker's name, or none."""
    needs_groups: bool = False
    needs_several_agents: bool = False
    mixer: Literal["vdn", "qmix"] | None = None
    """What joins the agents' Q to the team's, in place of a critic's values."""
    interval: int = 1
    """Iterations per agent (`round_robin`) or per casting (`swap`) where the run names none."""
    sampling_rounds: int = 0
    """Rounds of fresh tasks in place of those whose samples are all worth the same (DAPO), where the run names none."""
    tree_samples: int | None = None
    """Alternatives of every turn (AT-GRPO), where the run has one sample per task and names none; None: no trees."""

    def needs_reference(self, settings: Mapping[str, Any]) -> bool:
        """Whether these credit settings read `ref_logprobs`."""
        chosen = {**self.credit, **settings}
        return bool(chosen.get("beta", 0.0) or chosen.get("kl_coef", 0.0))


_PAID_ALL = {"outcome_to": "all"}
_LIST = (
    Algorithm(
        "gae",
        "PPO: clipped ratio with a critic, advantages over the team's words in speaking order",
        "Schulman 2016 (1506.02438), 2017 (1707.06347)",
        "gae",
        critic="context",
    ),
    Algorithm(
        "ppo",
        "another name of gae",
        "Schulman 2017 (1707.06347)",
        "gae",
        critic="context",
    ),
    Algorithm(
        "marft",
        "PPO over the team's speaking order, one agent's adapter learning per interval",
        "MARFT (2504.16129)",
        "gae",
        {"bootstrap": "team", "level": "action"},
        {"level": "action", "denominator": "turn", "normalize": "token"},
        "round_robin",
        critic="context",
        needs_several_agents=True,
        interval=5,
    ),
    Algorithm(
        "cory",
        "a pioneer answers, an observer answers after it, both earn the sum, and they swap roles in intervals",
        "CORY (2410.06101)",
        "gae",
        {"bootstrap": "none", "share": "sum"},
        schedule="swap",
        critic="context",
        needs_several_agents=True,
        interval=5,
    ),
    Algorithm(
        "maporl",
        "PPO on scores of this and later rounds, with bonuses for correcting oneself and one's peers",
        "MAPoRL (2502.18439)",
        "maporl",
        _PAID_ALL,
        critic="context",
        needs_several_agents=True,
    ),
    Algorithm(
        "ippo",
        "independent PPO: each turn its own episode, each agent its own reward",
        "de Witt 2020 (2011.09533)",
        "gae",
        {"bootstrap": "none", "outcome_to": "all"},
        critic="context",
    ),
    Algorithm(
        "mappo",
        "PPO with a critic that reads the whole transcript and the speaker's name",
        "Yu 2022 (2103.01955)",
        "gae",
        {"bootstrap": "team"},
        critic="transcript",
        needs_several_agents=True,
    ),
    Algorithm(
        "happo",
        "MAPPO one agent after the other, later agents weighted by how the earlier ones moved",
        "Kuba 2022 (2109.11251)",
        "gae",
        {"bootstrap": "team"},
        schedule="sequential",
        critic="transcript",
        needs_several_agents=True,
    ),
    Algorithm(
        "reinforce_pp",
        "REINFORCE++: per-token returns within a turn, normalised over all of an agent's tokens",
        "REINFORCE++ (2501.03262)",
        "reinforce_pp",
        _PAID_ALL,
        {"kl_in": "reward"},
    ),
    Algorithm(
        "reinforce_pp_baseline",
        "REINFORCE++ with the problem's mean reward subtracted first",
        "REINFORCE++ (2501.03262)",
        "reinforce_pp",
        {**_PAID_ALL, "baseline": True},
        {"kl_in": "reward"},
        needs_groups=True,
    ),
    Algorithm(
        "grpo",
        "a trajectory against the other trajectories of its problem, in standard deviations",
        "DeepSeekMath (2402.03300)",
        "group",
        _PAID_ALL,
        needs_groups=True,
    ),
    Algorithm(
        "dapo",
        "grpo with a higher upper clip, a penalty for overlong turns, and fresh tasks for groups without spread",
        "DAPO (2503.14476)",
        "group",
        {**_PAID_ALL, "overlong_buffer": 0.2},
        {"clip_high": 0.28},
        needs_groups=True,
        sampling_rounds=3,
    ),
    Algorithm(
        "dr_grpo",
        "grpo without the division by the deviation, and the loss over a constant length",
        "Liu 2025 (2503.20783)",
        "group",
        {**_PAID_ALL, "scale": False},
        {"denominator": "constant"},
        needs_groups=True,
    ),
    Algorithm(
        "rloo",
        "a trajectory against the mean of the others of its problem",
        "Ahmadian 2024 (2402.14740)",
        "group",
        {**_PAID_ALL, "scale": False, "baseline": "leave_one_out"},
        needs_groups=True,
    ),
    Algorithm(
        "dr_mas",
        "a turn against the same agent's turns on its problem, so agents' reward scales never mix",
        "Dr. MAS (2602.08847)",
        "group",
        {**_PAID_ALL, "unit": "row", "group": "agent"},
        needs_groups=True,
    ),
    Algorithm(
        "at_grpo",
        "a turn against its alternatives from the same state, or the same agent's at the same turn of its problem",
        "AT-GRPO (2510.11062)",
        "group",
        {**_PAID_ALL, "unit": "row", "group": "turn"},
        needs_groups=True,
        tree_samples=4,
    ),
    Algorithm(
        "gigpo",
        "grpo plus each turn's return among turns that stood in the same place",
        "GiGPO (2505.10978)",
        "gigpo",
        needs_groups=True,
    ),
    Algorithm(
        "vdn",
        "the team's value is the sum of the agents' Q; a turn against the same agent's others, by Q",
        "VDN, Sunehag 2017 (1706.05296)",
        "mixed",
        critic="context",
        needs_groups=True,
        needs_several_agents=True,
        mixer="vdn",
    ),
    Algorithm(
        "qmix",
        "the team's value is a monotone mixture of the agents' Q; a turn against the same agent's others, by Q_tot",
        "QMIX, Rashid 2018 (1803.11485)",
        "mixed",
        {"mixer": "given"},
        critic="context",
        needs_groups=True,
        needs_several_agents=True,
        mixer="qmix",
    ),
)
ALGORITHMS: Mapping[str, Algorithm] = MappingProxyType({algorithm.name: algorithm for algorithm in _LIST})


def algorithm(name: str) -> Algorithm:
    """The preset of that name.

    Raises:
        ConfigError: there is none; names the nearest.
    """
    if name not in ALGORITHMS:
        raise unknown("rule", name, ALGORITHMS)
    return ALGORITHMS[name]


def check_needs(
    name: str,
    settings: Mapping[str, Any] | None = None,
    *,
    critic: str | None,
    samples_per_problem: int,
    reference: bool,
    agents: int,
) -> None:
    """Say what the algorithm does not get, before any model is loaded.

    Args:
        name: of the algorithm.
        settings: credit settings that go before the preset's.
        critic: what the run's critic reads ("context" or "transcript"), None without one.
        samples_per_problem: episodes that share a group.
        reference: whether `ref_logprobs` are filled.
        agents: size of the team.

    Raises:
        ConfigError: a critic, groups, a reference or several agents are needed and not there.
    """
    chosen = algorithm(name)
    if chosen.critic and not critic:
        raise ConfigError(f"algorithm {name!r} needs a critic and the run has none; turn it on, or take 'grpo'.")
    if chosen.critic == "transcript" and critic != "transcript":
        raise ConfigError(
            f"algorithm {name!r} needs a critic that reads the whole transcript and the run's reads the turn's own "
            "context; make it central, or take 'gae'."
        )
    if chosen.needs_groups and samples_per_problem < 2:
        raise ConfigError(
            f"algorithm {name!r} compares the samples of one problem and gets {samples_per_problem} of each; "
            "ask for at least 2 per problem (--n_samples 8), or take 'gae'."
        )
    if chosen.needs_several_agents and agents < 2:
        raise ConfigError(f"algorithm {name!r} needs several agents and the team has {agents}; take 'gae'.")
    if chosen.needs_reference(settings or {}) and not reference:
        raise ConfigError(
            f"algorithm {name!r} with a KL penalty in the reward needs the reference's log-probs; turn them on, or set "
            "its weight (kl_coef, or beta of reinforce_pp) to 0."
        )
