"""What a model's predictions are worth, handed in as the task's metric takes them. In the judging room.

The Modeler's work is judged by this score, and the Analyst's by how much of it reaches submission.csv.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from mafrt.envs.dsbench.ground_truth import Answers
from mafrt.envs.dsbench.metrics import Array
from mafrt.envs.dsbench.scoring import MOST_PROBLEM, score_submission
from mafrt.envs.dsbench.tables import parse_table


def score_predictions() -> dict[str, Any]:
    """The score of guess.npy and chances.npy, rows in the order of test.csv, against answers.json, as JSON."""
    import numpy as np

    answers = Answers.from_json(Path("answers.json").read_bytes())
    ids = [str(cell) for cell in parse_table(Path("test.csv").read_bytes())[answers.id_column]]
    guess = np.load("guess.npy", allow_pickle=False)
    chances = np.load("chances.npy", allow_pickle=False) if Path("chances.npy").exists() else None
    columns = handed_in(answers, guess, chances)
    if columns is None or any(len(column) != len(ids) for column in columns.values()):
        return asdict(score_submission(answers, None))
    import pandas as pd

    table = pd.DataFrame({answers.id_column: ids, **columns})
    score = score_submission(answers, table.to_csv(index=False).encode())
    return {**asdict(score), "problem": score.problem and score.problem[:MOST_PROBLEM]}


def handed_in(answers: Answers, guess: Array, chances: Array | None) -> Mapping[str, Sequence[Any]] | None:
    """Columns of a submission from a model's predictions; None where they do not fit the task.

    Args:
        guess: `[rows]` or `[rows, targets]`.
        chances: `[rows, classes]`, classes in scikit-learn's order, or `[targets, rows, classes]`; None: the model has
            none.
    """
    import numpy as np

    kind, targets = answers.metric.kind, answers.targets
    if kind not in ("scores", "probabilities", "ranking") or chances is None:
        guess = guess.reshape(len(guess), -1)
        if guess.shape[1] != len(targets):
            return None
        if answers.metric.least is not None and guess.dtype.kind in "iuf":
            guess = np.maximum(guess, answers.metric.least)
        return {name: list(guess[:, place]) for place, name in enumerate(targets)}
    if chances.ndim == 3:
        return {name: list(chances[place][:, -1]) for place, name in enumerate(targets)}
    classes = answers.classes[0]
    if chances.ndim != 2 or chances.shape[1] != len(classes):
        return None
    if kind == "ranking":
        between = "," if any(" " in one for one in classes) else " "
        best = np.argsort(-chances, axis=1, kind="stable")[:, :3]
        return {targets[0]: [between.join(classes[place] for place in row) for row in best]}
    if len(classes) == 2:
        return {targets[0]: list(chances[:, 1])}
    return {name: list(chances[:, place]) for place, name in enumerate(classes)}
