"""The built-in tasks on disk: made by a seeded script on first use, without a network, in the layout of the real ones.

    dsbench_modeling_train.json  dsbench_modeling_validation.json  dsbench_modeling_eval.json
    dsbench_task_metrics.json
    data_resplit/TASK/train.csv  data_resplit/TASK/test.csv  answers/TASK/test_answer.csv

They lie in the user's cache (`$MAFRT_CACHE`, else `$XDG_CACHE_HOME/mafrt`, else `~/.cache/mafrt`) and are read by the
same code as any user's. The folder appears by one atomic rename, so it is never seen incomplete.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mafrt.core.errors import DataError
from mafrt.envs.dsbench.builtin_tables import BUILTIN, Builtin, make
from mafrt.envs.dsbench.ground_truth import make_answers
from mafrt.envs.dsbench.metrics import metric_of
from mafrt.envs.dsbench.records import METRICS_FILE, Loaded, load_records
from mafrt.envs.dsbench.scoring import encode
from mafrt.envs.dsbench.tables import pandas_module

if TYPE_CHECKING:
    import pandas

    from mafrt.envs.dsbench.tasks import TabularTask

VERSION = 3
"""Part of the folder's name: other tables need another number."""
SEED = 20
TEST_SHARE = 0.3


def builtin_tasks(split: str, root: Path | None = None) -> tuple[TabularTask, ...]:
    """The built-in tasks of `train`, `validation` or `eval` (the test), made on first use. Raises DataError."""
    folder = ensure(root)
    loaded: Loaded = load_records(folder / f"dsbench_modeling_{split}.json", folder)
    if loaded.problems:
        raise DataError(f"the built-in tasks in {folder} are damaged ({loaded.problems[0]}); delete the folder")
    return loaded.tasks


def cache_folder() -> Path:
    """Cache folder for data that can be regenerated."""
    if folder := os.environ.get("MAFRT_CACHE"):
        return Path(folder).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "mafrt"


def ensure(root: Path | None = None) -> Path:
    """The folder of the built-in tasks, made if it is not there. Raises DataError if it cannot be written."""
    folder = (root or cache_folder()) / f"dsbench-v{VERSION}"
    if folder.is_dir():
        return folder
    pandas_module()
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        fresh = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
        try:
            write(fresh)
            fresh.chmod(0o755)
            # Another process may have been faster; its tables are the same.
            with contextlib.suppress(FileExistsError):
                _rename(fresh, folder)
        finally:
            shutil.rmtree(fresh, ignore_errors=True)
    except OSError as error:
        raise DataError(
            f"the built-in tasks cannot be written to {folder} ({error.strerror or error}); set MAFRT_CACHE to a "
            "folder that can"
        ) from error
    return folder


def _rename(fresh: Path, folder: Path) -> None:
    try:
        os.rename(fresh, folder)
    except OSError as error:
        if folder.is_dir():
            raise FileExistsError(str(folder)) from error
        raise


def write(folder: Path) -> None:
    """Write all built-in tasks under `folder`; the same files every time."""
    records: dict[str, list[dict[str, Any]]] = {"train": [], "validation": [], "eval": []}
    metrics = {}
    for task in BUILTIN:
        train, test, answers = tables(task)
        for place, name, table in (
            (folder / "data_resplit" / task.id, "train.csv", train),
            (folder / "data_resplit" / task.id, "test.csv", test),
            (folder / "answers" / task.id, "test_answer.csv", answers),
        ):
            place.mkdir(parents=True, exist_ok=True)
            table.to_csv(place / name, index=False, lineterminator="\n")
        records[task.split].append(
            {
                "prompt": task.story,
                "answer": None,
                "metadata": {
                    "task_id": task.id,
                    "task_type": "data_modeling",
                    "data_type": task.data_type,
                    "train_file": f"./data_resplit/{task.id}/train.csv",
                    "test_file": f"./data_resplit/{task.id}/test.csv",
                    "answer_dir": f"./answers/{task.id}",
                    "brief": task.brief,
                },
            }
        )
        metrics[task.id] = {
            "metric": task.metric,
            "task_type": task.data_type,
            "target_column": task.targets[0] if len(task.targets) == 1 else list(task.targets),
            "id_column": task.id_column,
            "reference_score": round(reference(task, train, test, answers), 6),
        }
    for split, entries in records.items():
        (folder / f"dsbench_modeling_{split}.json").write_text(json.dumps(entries, indent=1) + "\n", encoding="utf-8")
    (folder / METRICS_FILE).write_text(json.dumps(metrics, indent=1) + "\n", encoding="utf-8")


def tables(task: Builtin) -> tuple[pandas.DataFrame, pandas.DataFrame, pandas.DataFrame]:
    """Training rows, test rows without the targets, and the answers."""
    import numpy as np

    rng = np.random.default_rng([SEED, [other.id for other in BUILTIN].index(task.id)])
    table = make(task, rng)
    table = table.iloc[rng.permutation(len(table))].reset_index(drop=True)
    table.insert(0, task.id_column, 1000 + np.arange(len(table)))
    count = round(len(table) * TEST_SHARE)
    targets = list(task.targets)
    # The answers have an order of their own, so that joining by position in place of the id scores badly.
    answers = table.iloc[:count][[task.id_column, *targets]].iloc[rng.permutation(count)]
    test = table.iloc[:count].drop(columns=targets)
    test[task.leak] = rng.permutation(test[task.leak].to_numpy())
    return table.iloc[count:], test, answers


def reference(task: Builtin, train: pandas.DataFrame, test: pandas.DataFrame, answers: pandas.DataFrame) -> float:
    """Score of the right kind of model on plainly prepared features without the leak: the level of sound work."""
    import pandas as pd

    targets, key = list(task.targets), task.id_column
    features = _prepared(pd.concat([train.drop(columns=targets), test]).drop(columns=[key, task.leak]))
    model = _sound_model(task)
    model.fit(features[: len(train)], train[targets].to_numpy().squeeze())
    known = make_answers(
        metric_of(task.metric), key, targets, answers.astype(str).reset_index(drop=True), train[targets].astype(str)
    )
    given = pd.DataFrame({key: test[key].astype(str)})
    if known.metric.kind in ("probabilities", "scores", "ranking"):
        chances = model.predict_proba(features[len(train) :])
        for column, name in enumerate(model.classes_):
            given[str(name)] = chances[:, column].astype(str)
        if known.metric.kind != "ranking" and len(model.classes_) == 2:
            given = given.rename(columns={str(model.classes_[1]): targets[0]})[[key, targets[0]]]
    else:
        guesses = model.predict(features[len(train) :]).reshape(len(test), -1)
        for column, name in enumerate(targets):
            given[name] = [str(value) for value in guesses[:, column]]
    return known.metric.compute(known.truth, encode(known, given))


def _prepared(table: pandas.DataFrame) -> Any:
    """`[rows, features]`: numbers with units as numbers, dates as day and weekday, words as one column each."""
    import pandas as pd

    for name in list(table):
        if pd.api.types.is_numeric_dtype(table[name]):
            continue
        numbers = pd.to_numeric(table[name].astype(str).str.replace(" EUR", ""), errors="coerce")
        format = "%d.%m.%Y" if "." in str(table[name].iloc[0]) else "ISO8601"
        days = pd.to_datetime(table[name], errors="coerce", format=format)
        if numbers.notna().mean() > 0.5:
            table[name] = numbers
        elif days.notna().mean() > 0.5:
            table[name], table[f"{name}_day"] = days.dt.day_of_year, days.dt.day_of_week
    features = pd.get_dummies(table)
    return features.fillna(features.median()).to_numpy(dtype=float)


def _sound_model(task: Builtin) -> Any:
    """The kind of model that the form of the task asks for."""
    import numpy as np
    from sklearn.compose import TransformedTargetRegressor
    from sklearn.ensemble import ExtraTreesClassifier, ExtraTreesRegressor
    from sklearn.linear_model import LogisticRegression, Ridge
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import FunctionTransformer, StandardScaler

    classes = task.data_type == "classification"
    if task.form == "groups":
        forest = ExtraTreesClassifier if classes else ExtraTreesRegressor
        return forest(200, min_samples_leaf=2, random_state=0, n_jobs=1)
    linear = LogisticRegression(max_iter=1000) if classes else Ridge()
    if task.form == "sum":
        return make_pipeline(StandardScaler(), linear)
    logs = make_pipeline(FunctionTransformer(np.log1p), StandardScaler(), linear)
    return logs if classes else TransformedTargetRegressor(logs, func=np.log1p, inverse_func=np.expm1)
