"""Rule-based process rewards: scores in 0..10 from files found in the sandbox and from the verified score.

    Data Engineer   10 the three files are there and fit each other and the task, all numbers, nothing missing;
                     5 they fit, but hold words or missing values; 3 one is not there; 2 they do not fit, or the
                     features are constants, row numbers or noise
    Modeler          5 + 5 times the normalised score of its predictions, handed in as the metric takes them, if
                     model.pkl predicts every row of X_test.pkl; 4 it always says the same; 3 it is not there;
                     2 it cannot be used
    Analyst          5 + 5 times the normalised score of submission.csv, as a share of that of the model's predictions;
                     4 if it is no better than the baseline, 2 if it is not valid, 3 if it is not there
    all roles        1 the program failed; 0 none was written and nothing is there, or answers were looked for;
                     1 less where the work is right and the agent does not say that it is done

An agent that receives unusable files gets 5, unless it repairs them. Most episodes of a weak team are of this kind, so
with any other score agents would learn to react to such files instead of doing their work. When the team fails, the
agent that made the root cause gets at most 1 for its last turn: the first one, in the order of the work, whose files do
not fit, or that spoilt the files it received.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mafrt.core.types import Scored
from mafrt.envs.dsbench.roles import ANALYST, ENGINEER, MODELER, REQUIRED, ROLES
from mafrt.envs.dsbench.scoring import SubmissionScore
from mafrt.envs.dsbench.tasks import TabularTask
from mafrt.envs.dsbench.workspace import FileSummary

_PEEKS = re.compile(r"test_answer|answer_dir|/answers?\b|\.\./|/proc/|/etc/|\bos\.walk\(\s*['\"]/")
DANGEROUS = frozenset({"os", "posix", "nt", "subprocess", "sys", "socket", "shutil", "pty", "importlib", "runpy"})


@dataclass(frozen=True)
class Work:
    """Facts about the workspace after a turn."""

    task: TabularTask
    shapes: Mapping[str, FileSummary]
    probe: Mapping[str, Any] | None = None
    """predictions of model.pkl on X_test.pkl, if both exist"""
    score: SubmissionScore | None = None
    """of submission.csv, if it is there"""
    features: Mapping[str, Any] | None = None
    """`idle`, `noise` and `copies` of the Data Engineer's tables, if they are there"""
    model_score: SubmissionScore | None = None
    """of model.pkl's predictions, if they could be made"""

    def missing(self, role: str) -> tuple[str, ...]:
        """Files that this agent has to make and that are not there."""
        return tuple(name for name in REQUIRED[role] if name not in self.shapes)


def data_defect(work: Work) -> str | None:
    """Why the Data Engineer's files cannot be used, or None."""
    if absent := work.missing(ENGINEER):
        return f"{' and '.join(absent)} not there"
    x, y, test = (work.shapes[name] for name in REQUIRED[ENGINEER])
    for name, shape in zip(REQUIRED[ENGINEER], (x, y, test), strict=True):
        if shape.kind == "broken" or shape.rows is None:
            return f"{name} is no table ({shape.why or shape.kind})"
    rows, targets = len(work.task.answers.ids), work.task.answers.targets
    if test.rows != rows:
        return f"X_test.pkl has {test.rows} rows, test.csv {rows}"
    if x.rows != y.rows or not x.rows:
        return f"X_train.pkl has {x.rows} rows, y_train.pkl {y.rows}"
    if x.columns != test.columns:
        return f"X_train.pkl has {x.columns} columns, X_test.pkl {test.columns}"
    if leaked := [name for name in targets if name in x.names]:
        return f"X_train.pkl holds the target {leaked[0]!r}, which gives the answers away"
    if work.features and (copies := work.features.get("copies")) is not None:
        return f"the column {copies!r} of X_train.pkl is the target under another name, which gives the answers away"
    return None


def data_flaw(work: Work) -> str | None:
    """Fault of the Data Engineer's files that hinders the next agent, or None."""
    if worthless := useless_features(work):
        return worthless
    for name in ("X_train.pkl", "X_test.pkl"):
        shape = work.shapes.get(name)
        if shape is not None and shape.words:
            return f"{name} holds words, such as column {shape.words[0]!r}"
        if shape is not None and shape.missing:
            return f"{name} has {shape.missing} missing values"
    return None


def useless_features(work: Work) -> str | None:
    """Why the features cannot help any model, or None."""
    if work.features and work.features.get("idle"):
        return "X_train.pkl holds nothing but constants and row numbers"
    if work.features and work.features.get("noise"):
        return "the features of X_train.pkl tell no more of the target than of a shuffled one"
    return None


def model_defect(work: Work) -> str | None:
    """Why the Modeler's file cannot be used, or None."""
    if work.missing(MODELER):
        return "model.pkl not there"
    shape = work.shapes["model.pkl"]
    if danger := dangerous(shape):
        return f"model.pkl is no model ({danger})"
    if work.probe is None:
        return None  # without X_test.pkl the model cannot be tried
    if "error" in work.probe:
        return f"model.pkl cannot predict X_test.pkl ({work.probe['error']})"
    if work.probe.get("rows") != work.shapes["X_test.pkl"].rows:
        return f"model.pkl predicts {work.probe.get('rows')} rows of {work.shapes['X_test.pkl'].rows}"
    return None


def dangerous(shape: FileSummary) -> str | None:
    """Why a pickled model is not even tried, or None."""
    if shape.kind != "model":
        return shape.why or shape.kind
    if bad := sorted(DANGEROUS & set(shape.asks)):
        return f"its pickle asks for {bad[0]}"
    return None


def peeks(code: str | None) -> bool:
    """Whether a program looks for answers, or anywhere outside its workspace."""
    return bool(code and _PEEKS.search(code))


def judge(role: str, work: Work, status: str | None, code: str | None, done: bool, given: Work | None = None) -> Scored:
    """The score of a turn from the files after it.

    Args:
        given: files handed over by the previous agent; None for the first one.
        status: how the program went (`ok`, `error`, ...); None if there was none, `no call` if it could not be read.
        done: whether the agent said that its stage is done.
    """
    if peeks(code):
        return Scored(0.0, "The program looks for answers outside the workspace.")
    blocked, scored = None if given is None else _blocked(role, given), _OWN[role](work)
    failed = status not in (None, "ok")
    if blocked and (failed or scored.score <= 5):
        return Scored(5.0, f"What was handed on cannot be used: {blocked}.")
    if scored.score >= 4 and not failed:
        if done or scored.score < 5:
            return scored
        return Scored(scored.score - 1, f"{scored.reason} It is not said to be done.")
    if status is None:
        return Scored(0.0, f"No program was written. {scored.reason}")
    return Scored(1.0, f"The program failed ({status}). {scored.reason}") if failed else scored


def _blocked(role: str, given: Work) -> str | None:
    """Reason why an agent cannot use its input files, or None."""
    if defect := data_defect(given) or data_flaw(given):
        return defect
    if role != ANALYST:
        return None
    if defect := model_defect(given):
        return defect
    weak = given.model_score is not None and given.model_score.valid and given.model_score.normalised == 0.0
    return "the model's predictions are no better than a constant" if weak else None


def _engineer(work: Work) -> Scored:
    if absent := work.missing(ENGINEER):
        return Scored(3.0, f"{' and '.join(absent)} not there.")
    if defect := data_defect(work):
        return Scored(0.0 if "gives the answers away" in defect else 2.0, f"The files do not fit: {defect}.")
    if flaw := data_flaw(work):
        return Scored(2.0 if useless_features(work) else 5.0, f"The files fit, but {flaw}.")
    return Scored(10.0, "The files fit each other and the task.")


def _modeler(work: Work) -> Scored:
    if defect := model_defect(work):
        return Scored(3.0 if work.missing(MODELER) else 2.0, f"There is no usable model: {defect}.")
    if work.probe is None:
        return Scored(4.0, "There is a model, but no X_test.pkl to try it on.")
    if work.probe.get("constant"):
        return Scored(4.0, "The model says the same for every row.")
    if work.model_score is None:
        return Scored(10.0, "The model predicts every row of X_test.pkl.")
    worth = work.model_score.normalised
    return Scored(5.0 + 5.0 * worth, f"The model predicts every row of X_test.pkl, worth {worth:.2f} of 1.")


def _analyst(work: Work) -> Scored:
    if work.score is None:
        return Scored(3.0, "submission.csv is not there.")
    if not work.score.valid:
        return Scored(2.0, f"submission.csv {work.score.problem}.")
    if not work.score.above_baseline:
        return Scored(4.0, "submission.csv is valid, but no better than a constant.")
    best = 1.0 if work.model_score is None else work.model_score.normalised
    share = work.score.normalised / best if work.score.normalised < best else 1.0
    return Scored(5.0 + 5.0 * share, "submission.csv is valid and better than a constant.")


_OWN = {ENGINEER: _engineer, MODELER: _modeler, ANALYST: _analyst}


def root_cause(handed: Sequence[Work]) -> tuple[str, str] | None:
    """The agent at fault for a failure of the team, and the fault; None if the team did not fail.

    `handed`: files at the end of each stage. The agent at fault is the one in whose stage the fault arose that stayed
    until the end: a Modeler may spoil the Data Engineer's tables, and an Analyst the model.
    """
    last = handed[-1]
    if last.score is not None and last.score.valid:
        return None
    if defect := data_defect(last):
        return ROLES[_since(handed, data_defect)], defect
    if wrong := model_defect(last):
        # A missing model is the Modeler's fault, unless the Data Engineer's files could not be used.
        culprit = _since(handed, lambda work: model_defect(work) or data_defect(work), first=1)
        if culprit == 1 and (flaw := data_flaw(last)):
            return ROLES[_since(handed, data_flaw)], flaw
        return ROLES[culprit], wrong
    problem = "is missing" if last.score is None else last.score.problem
    return ANALYST, f"submission.csv {problem}"


def _since(handed: Sequence[Work], fault: Callable[[Work], str | None], first: int = 0) -> int:
    """The stage from which on a fault was there until the end."""
    stage = len(handed) - 1
    while stage > first and fault(handed[stage - 1]):
        stage -= 1
    return stage
