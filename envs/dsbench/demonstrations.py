"""Short programs, good and careless ones, for very small models in the `brief` style.

The demonstrators know the helper module and make no slip of the pen. Their mistakes are choices, as in the teaching
base's own corpus: they leave missing values in, forget the test rows, drop incomplete rows, train a constant, hand
in class labels, zeros or a part of the rows. A model that imitates them samples both kinds, `CARELESS` of its programs
the careless one, and can learn from the results of both.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from mafrt.core.types import Message
from mafrt.environment.session import Session
from mafrt.envs.dsbench.env import DSBenchEnv
from mafrt.envs.dsbench.roles import ANALYST, APPROVE, ENGINEER, MODELER
from mafrt.envs.dsbench.tasks import TabularTask

CARELESS = 0.5
"""Share of programs that are careless ones."""
SAID_DONE = 0.9
"""Share of programs that come with the word that the stage is done."""

PLAYED_AT_ONCE = 4

GOOD: dict[str, tuple[str, ...]] = {
    ENGINEER: ("Check()\nPlan()\nWrite()", "Plan()\nCheck()\nWrite()"),
    MODELER: ("Solve()", "Solve(2)"),
    ANALYST: ("Write(Conclude())",),
}
BAD: dict[str, tuple[str, ...]] = {
    ENGINEER: ("Plan()\nWrite()", "Check()\nWrite()", "reject()\nPlan()\nWrite()", "Check()\nPlan()\nWrite(1)"),
    MODELER: ("Solve(0)", "Propose()"),
    ANALYST: ("Conclude()", "Write(Conclude(9))", "Write(Give())", "Write(0)"),
}
"""In the words of the helper module that the teaching base knows."""


def says(rng: random.Random, role: str, chat: Sequence[Message]) -> str:
    """A demonstrator's turn; if its files already exist, it may just report that."""
    if chat[-1]["role"] == "tool" and chat[-1]["content"] == "there":
        return APPROVE
    programs = BAD if rng.random() < CARELESS else GOOD
    done = f"\n{APPROVE}" if rng.random() < SAID_DONE else ""
    return f"```python\n{rng.choice(programs[role])}\n```{done}"


def demonstrations(
    tasks: Sequence[TabularTask], episodes: int, seed: int, sandbox: str = "bwrap", turns: int = 4
) -> list[dict[str, Any]]:
    """Records for SFT (docs/dpo_sft.md): prompts and answers of each agent in really played episodes."""
    from concurrent.futures import ThreadPoolExecutor

    env = DSBenchEnv(tasks=tasks, style="brief", sandbox=sandbox, turns=turns)
    with ThreadPoolExecutor(PLAYED_AT_ONCE) as pool:
        played = pool.map(lambda episode: _episode(Session(env.spawn()), episode, seed), range(episodes))
        return [record for records in played for record in records]


def _episode(env: Session, number: int, seed: int) -> list[dict[str, Any]]:
    rng = random.Random(f"demonstrations-{seed}-{number}")
    observations, _ = env.reset(seed=number, options={"task": number % len(env.tasks)})
    records: list[dict[str, Any]] = []
    while observations:
        [(role, chat)] = observations.items()
        assert not isinstance(chat, str)
        text = says(rng, role, chat)
        records.append({"agent": role, "messages": list(chat), "response": text})
        observations = dict(env.step({role: text}).observations)
    return records
