"""A competent team that needs no model: for tests, for demonstrations, and to try a setup out.

    team = competent(task)                        # role -> texts of its turns, in order
    play(env, team)                               # the last step's info

The programs use pandas and scikit-learn only, as an agent's own would.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mafrt.environment.base import Env
from mafrt.environment.session import session_of
from mafrt.envs.dsbench.builtin_tables import builtin_of
from mafrt.envs.dsbench.roles import ANALYST, DONE, ENGINEER, MODELER
from mafrt.envs.dsbench.tasks import TabularTask

Team = Mapping[str, Sequence[str]]
"""Texts of each agent, turn by turn; after the last one it is silent."""

_ENGINEER = """\
import re
import pandas as pd

train = pd.read_csv("train.csv").dropna(subset={targets})
test = pd.read_csv("test.csv")
y = train[{targets}]
both = pd.concat([train.drop(columns={targets}), test]).drop(columns={unused})
for name in list(both):
    column = both[name]
    if pd.api.types.is_numeric_dtype(column):
        both[name] = column.fillna(column.iloc[: len(y)].median())
        continue
    texts = column.dropna().astype(str)
    numbers = pd.to_numeric(texts.str.extract(r"^([-+]?\\d+(?:\\.\\d+)?) ?[A-Za-z%]*$")[0], errors="coerce")
    german = texts.str.match(r"\\d\\d\\.\\d\\d\\.\\d{{4}}$").mean() > 0.9
    days = pd.to_datetime(texts, errors="coerce", format="%d.%m.%Y" if german else "ISO8601")
    both = both.drop(columns=name)
    if numbers.notna().mean() > 0.9:
        found = pd.to_numeric(column.astype(str).str.extract(r"([-+]?\\d+(?:\\.\\d+)?)")[0], errors="coerce")
        both[name] = found.fillna(numbers.median()).to_numpy()
    elif days.notna().mean() > 0.9:
        when = pd.to_datetime(column, errors="coerce", format="%d.%m.%Y" if german else "ISO8601")
        for part in ("year", "day_of_year", "day_of_week"):
            values = getattr(when.dt, part)
            both[f"{{name}}_{{part}}"] = values.fillna(values.median()).to_numpy()
    else:
        for value in texts.value_counts().index[:15]:
            both[f"{{name}}={{value}}"] = (column == value).astype(float).to_numpy()
both.iloc[: len(y)].to_pickle("X_train.pkl")
both.iloc[len(y) :].to_pickle("X_test.pkl")
y.to_pickle("y_train.pkl")
print(both.shape, int(both.isna().sum().sum()), "missing")"""

_MODELER = """\
import joblib
import numpy as np
import pandas as pd
from sklearn.compose import TransformedTargetRegressor
from sklearn.ensemble import ExtraTreesClassifier, ExtraTreesRegressor
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer, StandardScaler

X, y = pd.read_pickle("X_train.pkl"), pd.read_pickle("y_train.pkl")
classification, form = {classification}, {form!r}
linear = LogisticRegression(max_iter=500) if classification else Ridge()
if form == "groups":
    kind = ExtraTreesClassifier if classification else ExtraTreesRegressor
    model = kind(100, min_samples_leaf=2, random_state=0, n_jobs=1)
elif form == "sum":
    model = make_pipeline(StandardScaler(), linear)
else:
    model = make_pipeline(FunctionTransformer(np.log1p), StandardScaler(), linear)
    if not classification:
        model = TransformedTargetRegressor(model, func=np.log1p, inverse_func=np.expm1)
model.fit(X, y.iloc[:, 0] if y.shape[1] == 1 else y)
joblib.dump(model, "model.pkl")
print(type(model).__name__, X.shape)"""

_ANALYST = """\
import joblib
import numpy as np
import pandas as pd

model, X = joblib.load("model.pkl"), pd.read_pickle("X_test.pkl")
table = pd.DataFrame({{{id!r}: pd.read_csv("test.csv")[{id!r}]}})
targets, metric = {targets}, {metric!r}
if metric in ("roc_auc", "log_loss", "map_at_3"):
    chances = model.predict_proba(X)
    if isinstance(chances, list):
        for name, each in zip(targets, chances):
            table[name] = each[:, -1]
    elif metric == "map_at_3":
        best = np.argsort(-chances, axis=1)[:, :3]
        table[targets[0]] = [" ".join(str(model.classes_[i]) for i in row) for row in best]
    elif len(model.classes_) == 2:
        table[targets[0]] = chances[:, 1]
    else:
        for i, name in enumerate(model.classes_):
            table[str(name)] = chances[:, i]
else:
    guess = np.asarray(model.predict(X)).reshape(len(X), -1)
    for i, name in enumerate(targets):
        table[name] = np.maximum(guess[:, i], 0) if metric == "rmsle" else guess[:, i]
table.to_csv("submission.csv", index=False)
print(table.head(3))"""


def program(code: str, done: bool = True) -> str:
    """A message with a program, and whether the stage is said to be done."""
    return f"```python\n{code}\n```" + (f"\n{DONE}" if done else "")


def competent(task: TabularTask) -> dict[str, list[str]]:
    """A team that does sound work on any task of the format, and says so when it is through.

    Of a built-in task it knows the column that has to go and the kind of model; of another, it keeps all columns and
    trains a forest.
    """
    answers, builtin = task.answers, builtin_of(task.id)
    known = {
        "unused": [answers.id_column] if builtin is None else [answers.id_column, builtin.leak],
        "form": "groups" if builtin is None else builtin.form,
        "id": answers.id_column,
        "targets": list(answers.targets),
        "metric": answers.metric.name,
        "classification": bool(answers.classes),
    }
    texts = {ENGINEER: _ENGINEER, MODELER: _MODELER, ANALYST: _ANALYST}
    # The first program comes without the word, to see what it printed; then the word alone.
    return {role: [program(code.format(**known), done=False), DONE] for role, code in texts.items()}


def play(env: Env, team: Team, task: int = 0, seed: int = 0) -> list[Any]:
    """Play one episode with scripted agents; every step's result."""
    env = session_of(env)
    observations, _ = env.reset(seed=seed, options={"task": task})
    spoken = dict.fromkeys(team, 0)
    results = []
    while True:
        [role] = observations
        texts = team[role]
        said = texts[spoken[role]] if spoken[role] < len(texts) else ""
        spoken[role] += 1
        result = env.step({role: said})
        results.append(result)
        if result.terminated or result.truncated:
            return results
        observations = dict(result.observations)
