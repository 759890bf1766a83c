"""The shipped algorithms: an estimator with the defaults of a paper, one class each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import ClassVar, Literal

from mafrt.algorithms.base import Trajectories, structural
from mafrt.algorithms.gae import Gae, gae
from mafrt.algorithms.gigpo import GigpoBase
from mafrt.algorithms.group_relative import GroupRelative
from mafrt.algorithms.maporl import MaporlBase
from mafrt.algorithms.reinforce_pp import Reinforce
from mafrt.algorithms.rewards import CreditContext, fill_later
from mafrt.algorithms.value_decomposition import Mixed
from mafrt.config.algorithm_groups import ValueHeadSettings
from mafrt.config.schema import Share
from mafrt.core.errors import ConfigError

Bootstrap = Literal["none", "agent", "team"]
Schedule = Literal["concurrent", "round_robin", "sequential", "swap"]
CriticInput = Literal["context", "transcript"] | None


@dataclass(frozen=True)
class Ppo(Gae):
    """PPO: clipped ratio with a critic, advantages over the team's turns in speaking order."""

    paper: ClassVar[str] = "Schulman 2016 (1506.02438), 2017 (1707.06347)"


@dataclass(frozen=True)
class Marft(Gae):
    """PPO over the team's speaking order, one agent's adapter learning per interval."""

    level: Literal["token", "action"] = "action"
    agent_iteration_interval: int = 5

    paper: ClassVar[str] = "MARFT (2504.16129)"
    schedule: ClassVar[Schedule] = "round_robin"
    needs_several_agents: ClassVar[bool] = True


@dataclass(frozen=True)
class Cory(Gae):
    """A pioneer answers, an observer answers after it, both earn the sum, and they swap roles in intervals."""

    bootstrap: Bootstrap = "none"
    share: Literal["own", "sum"] = "sum"
    agent_iteration_interval: int = 5

    paper: ClassVar[str] = "CORY (2410.06101)"
    schedule: ClassVar[Schedule] = "swap"
    needs_several_agents: ClassVar[bool] = True
    one_base: ClassVar[str] = "swaps the adapters of agents, and an adapter fits its own base only"


@dataclass(frozen=True)
class Maporl(MaporlBase):
    """PPO on scores of this and later rounds, with bonuses for correcting oneself and one's peers."""

    paper: ClassVar[str] = "MAPoRL (2502.18439)"
    needs_several_agents: ClassVar[bool] = True


@dataclass(frozen=True)
class Ippo(Gae):
    """Independent PPO: each agent on its own, with its own pay from a turn on."""

    outcome_to: Literal["last", "end", "each", "all"] = "all"
    bootstrap: Bootstrap = "none"

    paper: ClassVar[str] = "de Witt 2020 (2011.09533)"

    def blind_to(self, tree: bool) -> str | None:
        return None if self.share == "sum" else "each agent learns from its own pay alone"

    def credit(self, trajectories: Trajectories, context: CreditContext) -> dict[str, float]:
        # The paper's return; a turn's own pay alone says nothing of what the turn makes possible.
        if context.by_turn and self.bootstrap == "none" and self.share == "own":
            fill_later(trajectories, own=True)
            return gae(trajectories, self, silent="outcome")
        return super().credit(trajectories, context)


@dataclass(frozen=True)
class Mappo(Gae):
    """PPO with a critic that reads the whole transcript and the speaker's name."""

    paper: ClassVar[str] = "Yu 2022 (2103.01955)"
    critic_input: ClassVar[CriticInput] = "transcript"
    needs_several_agents: ClassVar[bool] = True


@dataclass(frozen=True)
class Happo(Gae):
    """MAPPO with sequential updates: later agents' losses are weighted by the earlier agents' policy ratios."""

    joint_advantage: bool = structural(True)
    normalize_advantages: Literal["none", "batch", "agent"] = "batch"

    paper: ClassVar[str] = "Kuba 2022 (2109.11251)"
    compared: ClassVar[str] = "no better than mappo on two tasks of ours"
    schedule: ClassVar[Schedule] = "sequential"
    critic_input: ClassVar[CriticInput] = "transcript"
    needs_several_agents: ClassVar[bool] = True
    unused: ClassVar[frozenset[str]] = frozenset({"agent_iteration_interval"})
    metrics: ClassVar[Mapping[str, tuple[str, str]]] = {
        "compound_mean": ("mean factor on the advantages from agents updated earlier", ""),
        "compound_std": ("deviation of that factor", ""),
        "compound_std/AGENT": ("deviation of that factor over the agent's turns when it was updated itself", ""),
        "compound_min": ("smallest of it", ""),
        "compound_max": ("largest of it", ""),
        "compound_nonfinite": ("turns left out of it because their ratio was not finite", "turns"),
    }


@dataclass(frozen=True)
class ReinforcePP(Reinforce, ValueHeadSettings):
    """REINFORCE++: per-token returns within a turn, normalised over all of an agent's tokens."""

    critic: bool = False
    """subtract a critic's value from every return, before the normalisation"""
    gae_lambda: Share = 1.0
    """lambda of generalised advantage estimation: 0 trusts the critic, 1 the rewards"""

    paper: ClassVar[str] = "REINFORCE++ (2501.03262)"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.critic:
            return
        critic_settings = {*(item.name for item in fields(ValueHeadSettings)), "gae_lambda"}
        for item in fields(self):
            if item.name in critic_settings and getattr(self, item.name) != item.default:
                raise ConfigError(
                    f"{item.name} is a setting of the critic, and algorithm {self.name!r} has none by default; add "
                    f"--critic (critic: true), or leave {item.name} out."
                )

    @property
    def critic_reads(self) -> CriticInput:
        return "context" if self.critic else None

    @property
    def trace_decay(self) -> float:
        return self.gae_lambda


@dataclass(frozen=True)
class ReinforcePPBaseline(Reinforce):
    """REINFORCE++ with the problem's mean reward subtracted first."""

    baseline: bool = structural(True)

    paper: ClassVar[str] = "REINFORCE++ (2501.03262)"
    needs_groups: ClassVar[bool] = True


@dataclass(frozen=True)
class Grpo(GroupRelative):
    """A trajectory against the other trajectories of its problem, in standard deviations."""

    paper: ClassVar[str] = "DeepSeekMath (2402.03300)"


@dataclass(frozen=True)
class Dapo(GroupRelative):
    """GRPO with a higher upper clip, a penalty for overlong turns, and fresh tasks for groups without spread."""

    overlong_buffer: float = 0.2
    clip_high: float | None = 0.28

    paper: ClassVar[str] = "DAPO (2503.14476)"
    sampling_rounds: ClassVar[int] = 3


@dataclass(frozen=True)
class DrGrpo(GroupRelative):
    """GRPO without the division by the deviation, and the loss over a constant length."""

    scale: bool = structural(False)

    paper: ClassVar[str] = "Liu 2025 (2503.20783)"
    constant_length: ClassVar[bool] = True


@dataclass(frozen=True)
class Rloo(GroupRelative):
    """A trajectory against the mean of the others of its problem."""

    scale: bool = structural(False)
    baseline: Literal["mean", "leave_one_out"] = structural("leave_one_out")

    paper: ClassVar[str] = "Ahmadian 2024 (2402.14740)"


@dataclass(frozen=True)
class DrMas(GroupRelative):
    """A turn against the same agent's turns on its problem, so agents' reward scales never mix."""

    unit: Literal["trajectory", "row"] = structural("row")
    group: Literal["problem", "agent", "turn"] = structural("agent")

    paper: ClassVar[str] = "Dr. MAS (2602.08847)"


@dataclass(frozen=True)
class AtGrpo(GroupRelative):
    """A turn against its alternatives from the same state, or the same agent's at the same turn of its problem."""

    outcome_to: Literal["last", "end", "each", "all"] | None = None  # type: ignore[assignment]
    """turns that receive the outcome: all, or all of the last step with trees; default: all, or end with trees"""
    unit: Literal["trajectory", "row"] = structural("row")
    group: Literal["problem", "agent", "turn"] = structural("turn")

    paper: ClassVar[str] = "AT-GRPO (2510.11062)"
    tree_samples: ClassVar[int | None] = 4


@dataclass(frozen=True)
class C3(GroupRelative):
    """A turn against its alternatives from the same history, each played to the end: by the mean of the others."""

    outcome_to: Literal["last", "end", "each", "all"] | None = None  # type: ignore[assignment]
    """turns that receive the outcome: all, or all of the last step with trees; default: all, or end with trees"""
    unit: Literal["trajectory", "row"] = structural("row")
    group: Literal["problem", "agent", "turn"] = structural("turn")
    scale: bool = structural(False)
    baseline: Literal["mean", "leave_one_out"] = structural("leave_one_out")

    paper: ClassVar[str] = "C3 (2603.06859)"
    tree_samples: ClassVar[int | None] = 4
    tree_continues: ClassVar[bool] = True


@dataclass(frozen=True)
class GiGpo(GigpoBase):
    """GRPO plus a step-level advantage among turns from the same state."""

    paper: ClassVar[str] = "GiGPO (2505.10978)"


@dataclass(frozen=True)
class Vdn(Mixed):
    """The team's value is the sum of the agents' Q; a turn against the same agent's others, by Q."""

    paper: ClassVar[str] = "VDN, Sunehag 2017 (1706.05296)"
    mixer: ClassVar[Literal["vdn", "qmix"] | None] = "vdn"


@dataclass(frozen=True)
class Qmix(Mixed):
    """The team's value is a monotone mixture of the agents' Q; a turn against the same agent's others, by Q_tot."""

    paper: ClassVar[str] = "QMIX, Rashid 2018 (1803.11485)"
    compared: ClassVar[str] = "no better than vdn on a task of ours"
    mixer: ClassVar[Literal["vdn", "qmix"] | None] = "qmix"
