"""Online preference learning from the team's own play (SPIN): no advantages in the loss, but pairs of answers.

Every iteration plays groups, pairs answers of one agent to one prompt by their rewards, and takes DPO steps on the
pairs against a reference that is the adapters' own past, renewed every `ref_update_freq` iterations.

Source: SPIN, Chen 2024 (2401.01335): the opponent is the previous iterate, and the reference moves with it. Deviation:
SPIN's better answer comes from a data set; here both come from own play and the reward decides, as in online DPO (Guo
2024, 2402.04792). The pairs and the loss are those of `train_dpo` (`runners/offline/dpo.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import ClassVar, Literal

from mafrt.algorithms.base import structural
from mafrt.algorithms.group_relative import GroupRelative
from mafrt.config.algorithm_groups import PolicyLossSettings
from mafrt.config.schema import Count, NotNegative, Positive


@dataclass(frozen=True)
class Spin(GroupRelative):
    """DPO on pairs from own play, against the adapters as they were some iterations ago."""

    outcome_to: Literal["last", "end", "each", "all"] = "all"
    unit: Literal["trajectory", "row"] = structural("row")
    group: Literal["problem", "agent", "turn"] = structural("agent")
    beta: Positive = 0.1
    """weight of the log-ratios; larger values keep the adapters closer to the reference"""
    ref_update_freq: Count = 1
    """iterations after which the reference becomes a copy of the adapters"""
    min_gap: NotNegative = 0.0
    """two answers make a pair if their rewards differ by more than this"""

    paper: ClassVar[str] = "SPIN (2401.01335)"
    updater: ClassVar[str] = "mafrt.runners.preference_update:PreferenceUpdater"
    has_advantages: ClassVar[bool] = False
    one_base: ClassVar[str] = "learns pairs on one base"
    metrics: ClassVar[Mapping[str, tuple[str, str]]] = {
        "pairs/AGENT": ("pairs of the agent's answers to one prompt that the rewards tell apart", "pairs"),
    }
    unused: ClassVar[frozenset[str]] = frozenset(item.name for item in fields(PolicyLossSettings))
