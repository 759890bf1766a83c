"""Short programs, good and careless ones, for very small models in the `brief` style.

The demonstrators know the helper module and, of a built-in task, its right choices; they make no slip of the pen. Their
mistakes are choices, as in the teaching base's own corpus: they keep the column that has to go or drop another, leave
missing values in, forget the test rows, drop incomplete rows, train a constant or the wrong kind of model, hand in
the wrong kind of predictions, zeros or a part of the rows. A model that imitates them samples both kinds, `CARELESS` of
its programs the careless one, and can learn from the results of both.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from mafrt.core.types import Message
from mafrt.environment.session import Session
from mafrt.envs.dsbench.builtin_tables import builtin_of
from mafrt.envs.dsbench.env import DSBenchEnv
from mafrt.envs.dsbench.roles import ANALYST, APPROVE, ENGINEER, MODELER
from mafrt.envs.dsbench.tasks import TabularTask

CARELESS = 0.5
"""Share of programs that are careless ones."""
SAID_DONE = 0.9
"""Share of programs that come with the word that the stage is done."""

PLAYED_AT_ONCE = 4

COLUMNS = range(1, 7)
"""Numbers of columns that programs drop."""
MODELS = {"groups": "Solve()", "sum": "Solve(2)", "product": "Solve(3)"}
"""By the form of a built-in task."""
ANSWERS = {
    "values": "Write(Give())",
    "labels": "Write(Give())",
    "text": "Write(Give())",
    "scores": "Write(Conclude())",
    "probabilities": "Write(Conclude())",
    "ranking": "Write(Choose())",
}
"""By the kind of the metric."""


def good(task: TabularTask) -> dict[str, str]:
    """The right program of each agent, in the words of the helper module that the teaching base knows.

    Of a task that is not built in, no column is known that has to go, and the model is a forest.
    """
    known = builtin_of(task.id)
    first = "" if known is None else f"reject({known.position})\n"
    return {
        ENGINEER: f"{first}Check()\nPlan()\nWrite()",
        MODELER: MODELS["groups" if known is None else known.form],
        ANALYST: ANSWERS[task.answers.metric.kind],
    }


def careless(task: TabularTask) -> dict[str, tuple[str, ...]]:
    """Programs that each make one mistake, by agent."""
    right = good(task)
    sound, answer = right[ENGINEER], right[ANALYST]
    others = [f"reject({number})\nCheck()\nPlan()\nWrite()" for number in COLUMNS]
    texts = [text for text in ("Check()\nPlan()\nWrite()", *others) if text != sound]
    return {
        ENGINEER: (
            *texts,
            sound.replace("Check()\n", ""),
            sound.replace("Plan()\n", ""),
            sound.replace("Check()", "reject()"),
            sound.replace("Write()", "Write(1)"),
        ),
        MODELER: (*(text for text in MODELS.values() if text != right[MODELER]), "Solve(0)", "Propose()"),
        ANALYST: (
            *(text for text in dict.fromkeys(ANSWERS.values()) if text != answer),
            answer.removeprefix("Write(").removesuffix(")"),
            answer.replace("()", "(9)"),
            "Write(0)",
        ),
    }


def says(rng: random.Random, task: TabularTask, role: str, chat: Sequence[Message]) -> str:
    """A demonstrator's turn; if its files already exist, it may just report that."""
    if chat[-1]["role"] == "tool" and chat[-1]["content"] == "there":
        return APPROVE
    program = rng.choice(careless(task)[role]) if rng.random() < CARELESS else good(task)[role]
    done = f"\n{APPROVE}" if rng.random() < SAID_DONE else ""
    return f"```python\n{program}\n```{done}"


def demonstrations(
    tasks: Sequence[TabularTask], episodes: int, seed: int, sandbox: str = "bwrap", turns: int | Sequence[int] = 4
) -> list[dict[str, Any]]:
    """Records for SFT (docs/dpo_sft.md): prompts and answers of each agent in really played episodes."""
    env = DSBenchEnv(tasks=tasks, style="brief", sandbox=sandbox, turns=turns)
    with ThreadPoolExecutor(PLAYED_AT_ONCE) as pool:
        played = pool.map(lambda episode: _episode(Session(env.spawn()), env.tasks, episode, seed), range(episodes))
        return [record for records in played for record in records]


def _episode(env: Session, tasks: Sequence[TabularTask], number: int, seed: int) -> list[dict[str, Any]]:
    rng = random.Random(f"demonstrations-{seed}-{number}")
    task = number % len(tasks)
    observations, _ = env.reset(seed=number, options={"task": task})
    records: list[dict[str, Any]] = []
    while observations:
        [(role, chat)] = observations.items()
        assert not isinstance(chat, str)
        text = says(rng, tasks[task], role, chat)
        records.append({"agent": role, "messages": list(chat), "response": text})
        observations = dict(env.step({role: text}).observations)
    return records
