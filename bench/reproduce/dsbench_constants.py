"""What programs that read nothing are worth on DSBench's built-in tasks.

Every triple of fixed programs, one for each agent and the same for all tasks, is played on the held-out tasks: the
right programs of all tasks, those that drop no column, and a constant. The table has the best triples and, for
comparison, each task's own right triple.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import indent
from typing import TYPE_CHECKING

from mafrt.envs.dsbench.builtin import builtin_tasks
from mafrt.envs.dsbench.demonstrations import ANSWERS, COLUMNS, MODELS, good
from mafrt.envs.dsbench.env import workspace_files
from mafrt.envs.dsbench.roles import ROLES
from mafrt.envs.dsbench.scoring import score_submission
from mafrt.envs.dsbench.workspace import Bench

if TYPE_CHECKING:
    from mafrt.envs.dsbench.tasks import TabularTask
    from mafrt.envs.dsbench.workspace import Bench

Triple = tuple[str, str, str]
"""Programs of the Data Engineer, the Modeler and the Analyst."""

SHOWN = 5
"""Triples in the table."""


@dataclass(frozen=True)
class Programs:
    """Fixed programs of each agent; all their combinations are played."""

    engineer: tuple[str, ...]
    modeler: tuple[str, ...]
    analyst: tuple[str, ...]


def fixed_programs() -> Programs:
    """All programs that are right for some task that could be built, and those of a team that does nothing."""
    prepare = "Check()\nPlan()\nWrite()"
    engineers = (prepare, *(f"reject({number})\n{prepare}" for number in COLUMNS))
    return Programs(engineers, (*MODELS.values(), "Solve(0)"), (*dict.fromkeys(ANSWERS.values()), "Write(0)"))


def scores(bench: Bench, task: TabularTask, programs: Programs) -> dict[Triple, float]:
    """Normalised score of every triple on one task; one execution for each Data Engineer."""
    by_triple: dict[Triple, float] = {}
    for engineer in programs.engineer:
        done, files = bench.run(_all_in_one(engineer, programs), workspace_files(task, lab=True))
        if done.status != "ok":
            raise RuntimeError(f"the programs of {task.id} ended with {done.status}: {done.stderr[-300:]}")
        for m, modeler in enumerate(programs.modeler):
            for a, analyst in enumerate(programs.analyst):
                data = files.get(f"submission_{m}_{a}.csv")
                # The programs are ours, so that their tables are read here by what reads others in the judging room.
                worth = score_submission(task.answers, data).normalised
                by_triple[engineer, modeler, analyst] = worth
    return by_triple


def _all_in_one(engineer: str, programs: Programs) -> str:
    """A program that writes the submission of every Modeler and Analyst after this Data Engineer."""
    parts = ["import os", "from lab import *", _attempt(engineer)]
    for m, modeler in enumerate(programs.modeler):
        parts += ["if os.path.exists('model.pkl'): os.remove('model.pkl')", _attempt(modeler)]
        for a, analyst in enumerate(programs.analyst):
            kept = f"if os.path.exists('submission.csv'): os.rename('submission.csv', 'submission_{m}_{a}.csv')"
            parts += [_attempt(analyst), kept]
    return "\n".join(parts)


def _attempt(program: str) -> str:
    return f"try:\n{indent(program, '    ')}\nexcept Exception as error:\n    print(error)"


def constant_scores(tasks: Sequence[TabularTask], programs: Programs, sandbox: str) -> dict[str, dict[Triple, float]]:
    """Task -> triple -> normalised score."""
    # One execution writes the submissions of a dozen triples.
    bench = Bench(sandbox, max_files=256, timeout_s=120.0)
    return {task.id: scores(bench, task, programs) for task in tasks}


def means(scores: Mapping[str, Mapping[Triple, float]]) -> list[tuple[float, Triple]]:
    """(mean score over the tasks, triple), the best first."""
    triples = next(iter(scores.values()))
    return sorted(
        ((statistics.fmean(one[triple] for one in scores.values()), triple) for triple in triples), reverse=True
    )


def right(scores: Mapping[str, Mapping[Triple, float]], tasks: Sequence[TabularTask]) -> dict[str, float]:
    """Task -> score of its own right triple."""
    programs = {task.id: good(task) for task in tasks}
    return {name: scores[name][tuple(texts[role] for role in ROLES)] for name, texts in programs.items()}  # type: ignore[index]


def table(scores: Mapping[str, Mapping[Triple, float]], own: Mapping[str, float]) -> str:
    """Markdown: the best fixed triples, and the right programs of each task."""
    lines = ["| programs, the same for every task | mean score | tasks above .5 |", "|---|---|---|"]
    for mean, triple in means(scores)[:SHOWN]:
        told = "; ".join(f"`{' '.join(text.split())}`" for text in triple)
        lines.append(f"| {told} | {mean:.3f} | {sum(one[triple] > 0.5 for one in scores.values())} of {len(scores)} |")
    each = ", ".join(f"{name} {worth:.3f}" for name, worth in own.items())
    lines += ["", f"Each task's own right programs: {statistics.fmean(own.values()):.3f} ({each})."]
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--split", choices=("train", "eval"), default="eval", help="tasks that are played")
    parser.add_argument("--sandbox", default="bwrap", help="where programs run")
    parser.add_argument("--output", type=Path, default=Path("runs/reproduce"), help="folder of table and numbers")
    args = parser.parse_args(argv)
    tasks = builtin_tasks(args.split)
    scores = constant_scores(tasks, fixed_programs(), args.sandbox)
    text = table(scores, right(scores, tasks))
    args.output.mkdir(parents=True, exist_ok=True)
    (args.output / "dsbench_constants.md").write_text(text + "\n", encoding="utf-8")
    facts = {name: [[*triple, worth] for triple, worth in one.items()] for name, one in scores.items()}
    (args.output / "dsbench_constants.json").write_text(json.dumps(facts, indent=1), encoding="utf-8")
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
