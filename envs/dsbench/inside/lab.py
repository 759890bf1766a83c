"""A small workbench for the agents: each step of a tabular task in one call.

It lies in the workspace as `lab.py`, next to `task.json` (metric, targets, id). The tables of the Data Engineer live in
this module until `save()` writes them; the others read files. Nothing here is hidden from the agents, and every step
can be done by hand instead.

    Data Engineer   fill()  code()  drop("column")  drop(3)  drop()  save()  save(test=False)
    Modeler         fit()   fit("linear")   fit("power")   fit("mean")   fit(write=False)
    Analyst         labels()   chances()   ranking()   zeros()   write(table)

At the end stand the same steps under other names: whole words of the teaching base's small vocabulary, which it can
learn to say within a minute.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

_tables: dict[str, Any] = {}


def task() -> dict[str, Any]:
    """Prediction target and metric."""
    about: dict[str, Any] = json.loads(Path("task.json").read_text())
    return about


def _load() -> dict[str, Any]:
    import pandas as pd

    if not _tables:
        about = task()
        train = pd.read_csv("train.csv").dropna(subset=about["targets"])
        _tables["y"] = train[about["targets"]]
        _tables["train"] = train.drop(columns=[*about["targets"], about["id"]])
        _tables["test"] = pd.read_csv("test.csv").drop(columns=about["id"])
        _tables["names"] = list(_tables["train"])
    return _tables


def _words(column: Any) -> bool:
    import pandas as pd

    return not (pd.api.types.is_numeric_dtype(column) or pd.api.types.is_bool_dtype(column))


def fill() -> None:
    """Missing numbers become the median of the training rows, missing words the word `missing`."""
    tables = _load()
    for name in tables["train"]:
        column = tables["train"][name]
        value = "missing" if _words(column) else column.median()
        for part in ("train", "test"):
            tables[part][name] = tables[part][name].fillna(value)


def code() -> None:
    """Words become numbers: a number with a unit its number, a date its parts, other words a column each."""
    import pandas as pd

    tables = _load()
    for name in list(tables["train"]):
        column = tables["train"][name]
        if not _words(column):
            continue
        real = column[column != "missing"].dropna()
        if pd.to_numeric(real.map(_number), errors="coerce").notna().mean() > 0.9:
            _replace(name, lambda c, n=name: {n: pd.to_numeric(c.map(_number), errors="coerce")})
        elif _dates(real).notna().mean() > 0.9:
            _replace(name, lambda c, n=name: _calendar(n, _dates(c)))
        else:
            known = real.value_counts().index[:12]
            _replace(name, lambda c, n=name, k=known: {f"{n}={v}": (c == v).astype(float) for v in k})


def _number(cell: Any) -> float | None:
    match = re.fullmatch(r"\s*([-+]?\d+(?:\.\d+)?)\s*[A-Za-z%]*\s*", str(cell))
    return float(match[1]) if match else None


def _dates(column: Any) -> Any:
    import pandas as pd

    german = bool(re.match(r"\d\d\.\d\d\.\d{4}", str(column.iloc[0]))) if len(column) else False
    return pd.to_datetime(column, errors="coerce", format="%d.%m.%Y" if german else "ISO8601")


def _calendar(name: str, dates: Any) -> dict[str, Any]:
    parts = {"year": dates.dt.year, "day": dates.dt.day_of_year, "weekday": dates.dt.day_of_week}
    return {f"{name}_{part}": values.fillna(values.median()).astype(float) for part, values in parts.items()}


def _replace(name: str, make: Any) -> None:
    import pandas as pd

    for part in ("train", "test"):
        column = _tables[part][name]
        made = pd.DataFrame(make(column), index=column.index)
        # A number that was missing is a word by now; the median of the training rows takes its place.
        if made.isna().any(axis=None) and not column.isna().any():
            made = made.fillna(pd.DataFrame(make(_tables["train"][name])).median() if part == "test" else made.median())
        _tables[part] = pd.concat([_tables[part].drop(columns=name), made], axis=1)


def drop(column: str | int | None = None) -> None:
    """Leave out a column, by its name or by its number among the features of train.csv, from 1.

    Without a column: leave out every row with a missing value, of the training and of the test rows.
    """
    tables = _load()
    if column is None:
        tables["train"] = tables["train"].dropna()
        tables["y"] = tables["y"].loc[tables["train"].index]
        tables["test"] = tables["test"].dropna()
        return
    if isinstance(column, int) and not 1 <= column <= len(tables["names"]):
        raise ValueError(f"there is no column {column}; there are {len(tables['names'])}")
    name = tables["names"][column - 1] if isinstance(column, int) else column
    for part in ("train", "test"):
        tables[part] = tables[part].drop(columns=name)


def save(test: bool = True) -> None:
    """Write X_train.pkl, y_train.pkl and, unless `test` is False, X_test.pkl."""
    tables = _load()
    tables["train"].to_pickle("X_train.pkl")
    tables["y"].to_pickle("y_train.pkl")
    if test:
        tables["test"].to_pickle("X_test.pkl")


def fit(kind: str = "forest", write: bool = True) -> Any:
    """Train on X_train.pkl and y_train.pkl; writes model.pkl unless `write` is False.

    `kind`: `forest`, `linear`, `power` (a linear model of logarithms: features, and a target that is a number, have to
    be above -1) or `mean`.
    """
    import joblib
    import numpy as np
    import pandas as pd

    features = pd.read_pickle("X_train.pkl")  # noqa: S301
    target = pd.read_pickle("y_train.pkl")  # noqa: S301
    features = features.astype(float)
    if not np.isfinite(features.to_numpy()).all():
        raise ValueError("X_train.pkl holds missing values")
    classes = task()["data_type"] == "classification"
    if kind == "power" and ((features <= -1).any(axis=None) or (not classes and (target <= -1).any(axis=None))):
        raise ValueError("there are numbers of -1 and below, which have no logarithm here")
    model = _model(kind, classes)
    target = target.to_numpy()
    model.fit(features.to_numpy(), target[:, 0] if target.shape[1] == 1 else target)
    if write:
        joblib.dump(model, "model.pkl")
    return model


def _model(kind: str, classes: bool) -> Any:
    import numpy as np
    from sklearn.compose import TransformedTargetRegressor
    from sklearn.dummy import DummyClassifier, DummyRegressor
    from sklearn.ensemble import ExtraTreesClassifier, ExtraTreesRegressor
    from sklearn.linear_model import LogisticRegression, Ridge
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import FunctionTransformer, StandardScaler

    linear = LogisticRegression(max_iter=500) if classes else Ridge()
    if kind == "forest":
        forest = ExtraTreesClassifier if classes else ExtraTreesRegressor
        return forest(60, min_samples_leaf=2, random_state=0, n_jobs=1)
    if kind == "linear":
        return make_pipeline(StandardScaler(), linear)
    if kind == "power":
        logs = make_pipeline(FunctionTransformer(np.log1p), StandardScaler(), linear)
        return logs if classes else TransformedTargetRegressor(logs, func=np.log1p, inverse_func=np.expm1)
    if kind == "mean":
        return DummyClassifier(strategy="prior") if classes else DummyRegressor()
    raise ValueError(f"there is no kind {kind!r} of model; there are forest, linear, power and mean")


def _table(columns: dict[str, Any]) -> Any:
    import pandas as pd

    about = task()
    return pd.DataFrame({about["id"]: pd.read_csv("test.csv")[about["id"]], **columns})


def _predictions() -> tuple[Any, Any]:
    import joblib
    import pandas as pd

    features = pd.read_pickle("X_test.pkl")  # noqa: S301
    return joblib.load("model.pkl"), features.astype(float).to_numpy()


def labels(rows: int | None = None) -> Any:
    """First `rows` of a table of ids and plain predictions: numbers, or classes."""
    about, (model, features) = task(), _predictions()
    guess = model.predict(features).reshape(len(features), -1)
    if about["metric"] == "rmsle":  # which takes nothing below 0
        guess = guess.clip(min=0)
    return _table({name: guess[:, i] for i, name in enumerate(about["targets"])})[:rows]


def chances(rows: int | None = None) -> Any:
    """First `rows` of a table of ids and probabilities: of the last of two classes, or of each class."""
    targets, (model, features) = task()["targets"], _predictions()
    shares = model.predict_proba(features)
    if isinstance(shares, list):  # a forest with several targets
        return _table({name: each[:, -1] for name, each in zip(targets, shares, strict=True)})[:rows]
    if len(model.classes_) == 2:
        return _table({targets[0]: shares[:, 1]})[:rows]
    return _table({str(name): shares[:, i] for i, name in enumerate(model.classes_)})[:rows]


def ranking(rows: int | None = None) -> Any:
    """First `rows` of a table of ids and the three likeliest classes in one cell, best first."""
    import numpy as np

    model, features = _predictions()
    best = np.argsort(-model.predict_proba(features), axis=1)[:, :3]
    return _table({task()["targets"][0]: [" ".join(str(model.classes_[i]) for i in row) for row in best]})[:rows]


def zeros() -> Any:
    """A table of ids and zeros."""
    return _table(dict.fromkeys(task()["targets"], 0))


def write(table: Any) -> None:
    """Write submission.csv."""
    table.to_csv("submission.csv", index=False)


# The same in the words of the teaching base.

Check, Plan, reject, Give, Conclude, Choose = fill, code, drop, labels, chances, ranking


def Solve(kind: int = 1) -> Any:
    """`fit`: 0 mean, 1 forest, 2 linear, 3 power."""
    return fit(("mean", "forest", "linear", "power")[kind])


def Propose() -> Any:
    """`fit`, and nothing is written."""
    return fit(write=False)


def Write(what: Any = None) -> None:
    """`save` without anything or, with 1, without the test rows; with 0, `write(zeros())`; of a table, `write`."""
    if what is None:
        save()
    elif isinstance(what, int):
        save(test=False) if what else write(zeros())
    else:
        write(what)
