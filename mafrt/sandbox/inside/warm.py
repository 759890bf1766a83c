"""Warm-up: libraries are imported and used once before the first snippet, since much is loaded on first use."""

from __future__ import annotations

import contextlib
import importlib
import io

LIBRARIES = ("numpy", "pandas", "sklearn")
"""Those whose versions are told. None of them has to be there."""
PARTS = (
    *("collections", "csv", "datetime", "decimal", "fractions", "functools", "heapq", "itertools", "json", "math"),
    *("re", "statistics", "string", "tempfile", "typing", "unittest", "numpy.random", "numpy.linalg"),
    *(
        f"sklearn.{part}"
        for part in ("compose", "ensemble", "feature_extraction.text", "impute", "linear_model", "metrics")
    ),
    *(f"sklearn.{part}" for part in ("model_selection", "neighbors", "pipeline", "preprocessing", "svm", "tree")),
)
TABLE = "id,x,y,kind,day\n" + "".join(f"{i},{i * 0.5},{i % 2},{'ab'[i % 2]},2020-01-0{i + 1}\n" for i in range(8))


def up() -> dict[str, str]:
    """Import and use the installed libraries; returns their versions."""
    versions = {}
    for name in LIBRARIES:
        with contextlib.suppress(ImportError):
            versions[name] = str(importlib.import_module(name).__version__)
    for name in PARTS:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    if "pandas" in versions:
        _use_pandas()
        if "sklearn" in versions:
            _use_sklearn()
    if "numpy" in versions:
        import numpy

        numpy.random.seed(0)  # for every snippet alike
    return versions


def _use_pandas() -> None:
    import pandas

    frame = pandas.read_csv(io.StringIO(TABLE))
    frame["day"] = pandas.to_datetime(frame["day"])
    frame["length"] = frame["kind"].str.len()
    frame.groupby("kind").agg({"x": "mean"}).to_csv(io.StringIO())
    frame.merge(frame, on="id").sort_values("x_x").fillna(0)
    pandas.get_dummies(frame[["kind", "x"]]).describe()
    frame.pivot_table(index="kind", values="x")
    str(frame)
    frame.info(buf=io.StringIO())


def _use_sklearn() -> None:
    import pandas
    from sklearn.compose import ColumnTransformer
    from sklearn.ensemble import GradientBoostingRegressor, RandomForestClassifier
    from sklearn.impute import SimpleImputer
    from sklearn.linear_model import LogisticRegression, Ridge
    from sklearn.metrics import accuracy_score, mean_squared_error
    from sklearn.model_selection import cross_val_score, train_test_split
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import OneHotEncoder, StandardScaler

    frame = pandas.read_csv(io.StringIO(TABLE))
    columns = ColumnTransformer(
        [("number", make_pipeline(SimpleImputer(), StandardScaler()), ["x"]), ("kind", OneHotEncoder(), ["kind"])]
    )
    # The usual steps of a small study, so that a snippet pays for none of them.
    cross_val_score(make_pipeline(columns, LogisticRegression()), frame[["x", "kind"]], frame["y"], cv=2)
    for model in (LogisticRegression(), Ridge(), RandomForestClassifier(2), GradientBoostingRegressor(n_estimators=2)):
        inputs, rest, wanted, truth = train_test_split(frame[["x", "id"]], frame["y"], stratify=frame["y"])
        predicted = model.fit(inputs, wanted).predict(rest)
    accuracy_score(truth, predicted > 0.5)
    mean_squared_error(truth, predicted)
