"""Credit as the tests of the estimators want it: without the normalisation that comes after them."""

from __future__ import annotations

import dataclasses
from typing import Any

from mafrt import algorithms
from mafrt.algorithms.rewards import CreditContext, Row
from mafrt.algorithms.rewards import reward_rows as library_rows
from mafrt.config.algorithm_groups import RewardSettings


def assign(episodes, rule="gae", **settings: Any) -> dict[str, float]:
    """`algorithms.assign` with `normalize_advantages` none unless it is given."""
    return algorithms.assign(episodes, rule, **{"normalize_advantages": "none", **settings})


def reward_rows(episodes, **settings: Any) -> tuple[list[list[Row]], int]:
    """`reward_rows` with settings and context in one."""
    names = {item.name for item in dataclasses.fields(CreditContext)}
    context = {name: value for name, value in settings.items() if name in names}
    own = {name: value for name, value in settings.items() if name not in names}
    return library_rows(episodes, RewardSettings(**own), CreditContext(**context))
