"""Prompts of the agents: tasks, files, earlier turns, and results of their programs.

`full` is for models that read: a page of instructions. `brief` is for very small ones, whose window and vocabulary are
small too: a few lines, and the helper module `lab` instead of pandas.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from mafrt.core.transcript import quoted
from mafrt.environment.tool_calls import shorten
from mafrt.envs.dsbench.roles import ANALYST, DONE, ENGINEER, MODELER, REQUIRED
from mafrt.envs.dsbench.tasks import TabularTask
from mafrt.envs.dsbench.workspace import LAB, FileSummary

if TYPE_CHECKING:
    from mafrt.sandbox import Execution

SAID, OUTPUT, PROMPT, BRIEF, COLUMNS = 2000, 3000, 8000, 400, 20
"""Characters of an upstream message, a program's output, a description, a brief one; columns named of a file."""

_DUTIES = {
    ENGINEER: (
        "Look at train.csv and test.csv, then clean and encode them. Write X_train.pkl (features of the training "
        "rows), y_train.pkl (their targets) and X_test.pkl (features of every row of test.csv, in its order, with the "
        "columns of X_train.pkl). The targets and the id are no features."
    ),
    MODELER: "Train a model on X_train.pkl and y_train.pkl that predicts X_test.pkl well, and write it to model.pkl.",
    ANALYST: "Use model.pkl and X_test.pkl to write submission.csv, and check it against what is asked for.",
}
SECTIONS = ("Files in the workspace", "Files written", "Missing")
"""What begins a section of a message, beside the task and what agents said."""
_KINDS = {
    "values": "numbers",
    "labels": "classes as they are called in train.csv",
    "scores": "numbers that are larger the likelier the positive (last) class is, such as probabilities",
    "probabilities": "probabilities in [0, 1]",
    "ranking": "up to three classes in one cell, best guess first, with spaces between them",
    "text": "text",
}


def handed_in(task: TabularTask) -> str:
    """Required format of submission.csv."""
    answers = task.answers
    columns: Sequence[str] = answers.targets
    what = _KINDS[answers.metric.kind]
    if answers.metric.kind in ("scores", "probabilities") and len(answers.classes[0]) > 2:
        columns, what = answers.classes[0], "a probability for each class, in a column of its name"
    return (
        f"submission.csv has the columns {', '.join((answers.id_column, *columns))} and one row for each of the "
        f"{len(answers.ids)} rows of test.csv; it takes {what}."
    )


def full_task(
    role: str, task: TabularTask, shapes: Mapping[str, FileSummary], transcript: Sequence[tuple[str, str]], lab: bool
) -> str:
    """The opening message of a stage."""
    better = "more" if task.answers.metric.higher else "less"
    sections = ("Task", "Score", *SECTIONS, *(f"{name} said" for name in (*_DUTIES, *dict(transcript))))
    parts = [
        f"Task: {task.id}\n{quoted(shorten(task.description, PROMPT), sections, inside=False)}",
        f"Score: {task.answers.metric.name} ({better} is better). {handed_in(task)}",
        "Files in the workspace:\n" + "\n".join(f"- {line}" for line in listed(shapes)),
    ]
    parts += [f"{name} said:\n{quoted(shorten(text, SAID), sections, inside=False)}" for name, text in transcript]
    if lab:
        parts.append(
            f"The module {LAB} is there and imported; its source says what it can do. In short: fill(), code(), "
            'drop("column"), save() prepare tables, fit("forest"), fit("linear") or fit("power") trains a model, '
            "write(labels()), write(chances()) or write(ranking()) writes submission.csv."
        )
    parts.append(
        f"You are the {role.replace('_', ' ')}. {_DUTIES[role]}\n"
        "Write one program per message, in a ```python block; it runs in the workspace, with pandas, scikit-learn and "
        "scipy and without a network, and you get to see what it prints. Files stay, variables do not. When "
        f"{' and '.join(REQUIRED[role])} {'is' if len(REQUIRED[role]) == 1 else 'are'} there, say {DONE} on a line of "
        "its own."
    )
    return "\n\n".join(parts)


def brief_task(role: str, task: TabularTask, shapes: Mapping[str, FileSummary]) -> str:
    """The opening message of a stage, in few tokens: the metric, the record's `brief` description, the files."""
    shown = {name: shape for name, shape in shapes.items() if name in _NEEDS[role]}
    files = " ".join(f"{_SHORT[name]} {shape.rows or 0}" for name, shape in shown.items())
    holes = shapes["train.csv"].missing if "train.csv" in shapes else 0
    more = f" missing {holes}" if role == ENGINEER and holes else ""
    metric = task.answers.metric
    about = task.meta.get("brief")
    told = f"{shorten(about.strip(), BRIEF)}\n" if isinstance(about, str) and about.strip() else ""
    told = quoted(told, ("Problem",), inside=False)
    return f"Problem: {metric.name} {_BRIEF_KINDS[metric.kind]}\n{told}{files}{more}"


_BRIEF_KINDS = {
    "values": "one answer",
    "labels": "one answer",
    "scores": "shares of each",
    "probabilities": "shares of each",
    "ranking": "three answers",
    "text": "one answer",
}
_NEEDS = {
    ENGINEER: ("train.csv", "test.csv"),
    MODELER: ("X_train.pkl", "y_train.pkl", "X_test.pkl"),
    ANALYST: ("X_test.pkl", "model.pkl", "test.csv"),
}
_SHORT = {"train.csv": "train", "test.csv": "test", "X_train.pkl": "x", "y_train.pkl": "y", "X_test.pkl": "z"}
_SHORT |= {"model.pkl": "model"}


def listed(shapes: Mapping[str, FileSummary]) -> list[str]:
    """One line for each file."""
    # A program chooses the names of columns, and a line break in one would begin a line of its own.
    return [" ".join(f"{name}: {shape.brief(COLUMNS)}".splitlines()) for name, shape in sorted(shapes.items())]


def printed(done: Execution, timeout_s: float, memory_mib: int) -> str:
    """Output of a program, with the error if it failed."""
    parts = [done.stdout.rstrip()]
    if done.status == "error":
        parts.append(done.stderr.rstrip() or f"The program ended with exit code {done.exit_code}.")
    elif done.status != "ok":
        parts.append(
            {
                "timeout": f"The program was stopped after {timeout_s:g} s.",
                "memory": f"The program needed more than {memory_mib} MiB of memory.",
                "killed": f"The program was killed. {done.stderr.strip()}".strip(),
            }[done.status]
        )
    parts += [f"{name} was not kept: {why}." for name, why in sorted(done.refused.items())]
    return "\n".join(part for part in parts if part)


def full_answer(output: str, changed: Mapping[str, FileSummary], missing: Sequence[str], done: bool, left: int) -> str:
    """Tool message to an agent after its turn."""
    parts = [shorten(output, OUTPUT) or "(nothing was printed)"]
    if changed:
        parts.append("Files written:\n" + "\n".join(f"- {line}" for line in listed(changed)))
    if missing:
        parts.append(f"Missing: {', '.join(missing)}.")
    elif not done:
        parts.append(f"The required files are there. Say {DONE} on a line of its own to hand over, or go on.")
    parts.append(f"You have {left} turn{'s' if left != 1 else ''} left.")
    return "\n".join(parts)


def brief_answer(output: str, missing: Sequence[str]) -> str:
    """The brief style: failure or success, and missing files."""
    last = output.strip().splitlines()[-1:] or [""]
    parts = [f"error {last[0].split(':')[0][-40:]}" if "Error" in last[0] else ""]
    parts += ["missing " + " ".join(_SHORT.get(name, "result") for name in missing)] if missing else ["there"]
    return "\n".join(part for part in parts if part)
