"""The tables of the built-in tasks: from scikit-learn's own data sets or generated, made untidy by a seeded hand.

Each maker takes numpy's generator and returns a table with its target columns; ids and the split are added by
`mafrt.envs.dsbench.builtin`. Faults of real tables are included on purpose: missing values, categories as words, dates,
numbers with a unit, columns that say nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas

Maker = Callable[[Any], "pandas.DataFrame"]


@dataclass(frozen=True)
class Builtin:
    """A task that ships."""

    id: str
    split: str
    """train or eval"""
    data_type: str
    """classification or regression"""
    metric: str
    targets: tuple[str, ...]
    story: str
    make: Maker
    """numpy generator -> rows with features and targets"""


def holes(rng: Any, table: pandas.DataFrame, columns: Sequence[str], share: float) -> pandas.DataFrame:
    """Some cells of these columns go missing."""
    table = table.copy()
    for name in columns:
        table[name] = table[name].astype(object).mask(rng.random(len(table)) < share)
    return table


def dates(rng: Any, rows: int, start: str, days: int) -> Any:
    """Random days, as pandas dates."""
    import pandas as pd

    return pd.Timestamp(start) + pd.to_timedelta(rng.integers(0, days, rows), unit="D")


def _from_sklearn(name: str) -> tuple[Any, Any]:
    import sklearn.datasets

    dataset = getattr(sklearn.datasets, f"load_{name}")(as_frame=True)
    features = dataset.data.rename(columns=lambda c: str(c).replace(" (cm)", "").replace(" ", "_").replace("/", "_"))
    return features, dataset.target


def tumours(rng: Any) -> pandas.DataFrame:
    features, target = _from_sklearn("breast_cancer")
    table = features.iloc[:, [0, 1, 4, 5, 6, 8, 24, 25, 27, 28]].copy()
    # Blurred as another clinic's instruments would: the original is nearly separable, which leaves nothing to do.
    table += rng.normal(size=table.shape) * table.std().to_numpy() * 1.6
    table["ward"] = rng.choice(["north", "south", "east"], len(table))
    table = holes(rng, table.round(4), ["mean_texture", "mean_smoothness", "worst_smoothness"], 0.08)
    table["benign"] = target
    return table


def wines(rng: Any) -> pandas.DataFrame:
    features, target = _from_sklearn("wine")
    picked = features[["alcohol", "malic_acid", "ash", "magnesium", "flavanoids", "hue", "proline"]]
    # Two bottles of each wine, tasted with some noise.
    table = picked.loc[picked.index.repeat(2)].reset_index(drop=True)
    table += rng.normal(size=table.shape) * table.std().to_numpy() * 0.7
    table["colour"] = ["dark" if hue < 0.8 else "bright" if hue > 1.1 else "red" for hue in table["hue"]]
    table = holes(rng, table.drop(columns="hue").round(3), ["ash", "magnesium", "colour"], 0.07)
    table["grape"] = target.map({0: "barolo", 1: "grignolino", 2: "barbera"}).repeat(2).to_numpy()
    return table


def digits(rng: Any) -> pandas.DataFrame:
    features, target = _from_sklearn("digits")
    chosen = rng.permutation(len(features))[:600]
    pixels = [name for name in features if features[name].var() > 20][:24]
    table = features.iloc[chosen][pixels].reset_index(drop=True)
    table["pen"] = rng.choice(["ball", "felt", "ink"], len(table))
    table = holes(rng, table, pixels[::4], 0.06)
    words = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
    table["digit"] = [words[value] for value in target.iloc[chosen]]
    return table


def diabetes(rng: Any) -> pandas.DataFrame:
    features, target = _from_sklearn("diabetes")
    table = features.copy()
    table["sex"] = (table["sex"] > 0).map({True: "F", False: "M"})
    table["age"] = (table["age"] * 270 + 48).round()
    table[["s1", "s2", "s3", "s4", "s5", "s6"]] = (table[["s1", "s2", "s3", "s4", "s5", "s6"]] * 1000).round(1)
    table["visit"] = dates(rng, len(table), "2019-01-01", 700).strftime("%Y-%m-%d")
    table = holes(rng, table.round(4), ["bmi", "bp", "s3", "sex"], 0.06)
    table["progression"] = target
    return table


def rides(rng: Any) -> pandas.DataFrame:
    import numpy as np
    import pandas as pd

    rows = 420
    day = dates(rng, rows, "2021-01-01", 730)
    hour = rng.integers(0, 24, rows)
    weather = rng.choice(["clear", "cloudy", "rain"], rows, p=[0.5, 0.3, 0.2])
    season = 0.9 * np.sin(2 * np.pi * (day.day_of_year - 100) / 365)
    warmth = 12 + 11 * season + rng.normal(0, 3, rows)
    rush = np.where(day.day_of_week < 5, np.exp(-((hour - 8) ** 2) / 6) + np.exp(-((hour - 17) ** 2) / 8), 0.3)
    level = 3 + 0.06 * warmth + 1.5 * rush - 2 * (hour < 6) - 1.1 * (weather == "rain")
    table = pd.DataFrame(
        {
            "datetime": [f"{d:%Y-%m-%d} {h:02d}:00:00" for d, h in zip(day, hour, strict=True)],
            "hour": hour,
            "weather": weather,
            "temperature": warmth.round(1),
            "humidity": (65 - warmth + rng.normal(0, 9, rows)).round(),
            "holiday": rng.choice(["no", "yes"], rows, p=[0.95, 0.05]),
        }
    )
    table = holes(rng, table, ["temperature", "humidity", "weather"], 0.06)
    table["count"] = rng.poisson(np.exp(level))
    return table


def sales(rng: Any) -> pandas.DataFrame:
    import numpy as np
    import pandas as pd

    rows = 480
    day = dates(rng, rows, "2020-01-01", 900)
    shop, product = rng.choice(["Bergen", "Lyon", "Porto", "Graz"], rows), rng.choice(["mug", "hat", "poster"], rows)
    size = pd.Series(shop).map({"Bergen": 1.0, "Lyon": 1.6, "Porto": 0.7, "Graz": 1.2}).to_numpy()
    taste = pd.Series(product).map({"mug": 40, "hat": 90, "poster": 25}).to_numpy()
    promo = rng.random(rows) < 0.2
    swing = 1 + 0.35 * np.sin(2 * np.pi * day.day_of_year / 365) + 0.3 * (day.day_of_week >= 5)
    table = pd.DataFrame(
        {
            "date": day.strftime("%Y-%m-%d"),
            "shop": shop,
            "product": product,
            "price": [f"{p:.2f} EUR" for p in taste / 6 + rng.normal(0, 1, rows)],
            "promo": np.where(promo, "yes", "no"),
        }
    )
    table = holes(rng, table, ["promo", "price"], 0.05)
    table["num_sold"] = rng.poisson(size * taste * swing * (1 + 0.6 * promo))
    return table


def rents(rng: Any) -> pandas.DataFrame:
    import pandas as pd

    rows = 400
    area, rooms = rng.gamma(9, 8, rows).round(), rng.integers(1, 6, rows)
    quarter = rng.choice(["old town", "harbour", "hills", "station"], rows)
    built = rng.integers(1900, 2022, rows)
    place = pd.Series(quarter).map({"old town": 5.0, "harbour": 3.0, "hills": 7.0, "station": 0.0}).to_numpy()
    lift = rng.choice(["yes", "no"], rows)
    rent = 150 + area * (8 + place) + 45 * rooms + 1.5 * (built - 1900) + 40 * (lift == "yes")
    table = pd.DataFrame(
        {
            "area_m2": area,
            "rooms": rooms,
            "quarter": quarter,
            "built": built,
            "lift": lift,
            "listed": dates(rng, rows, "2023-01-01", 365).strftime("%d.%m.%Y"),
        }
    )
    table = holes(rng, table, ["area_m2", "built", "lift", "quarter"], 0.05)
    table["rent"] = (rent * rng.lognormal(0, 0.08, rows)).round()
    return table


def essays(rng: Any) -> pandas.DataFrame:
    import numpy as np
    import pandas as pd

    rows = 420
    words, errors = rng.gamma(6, 60, rows).round(), rng.poisson(9, rows)
    topic, school = rng.choice(["nature", "city", "work"], rows), rng.choice(list("ABCDE"), rows)
    rare = rng.beta(2, 8, rows)
    skill = 0.006 * words - 0.16 * errors + 6 * rare + 0.5 * (topic == "city") + rng.normal(0, 0.45, rows)
    grade = np.digitize(skill, np.quantile(skill, [0.08, 0.3, 0.65, 0.88])) + 1
    table = pd.DataFrame(
        {
            "words": words,
            "errors": errors,
            "rare_words": rare.round(3),
            "topic": topic,
            "school": school,
            "handed_in": dates(rng, rows, "2022-09-01", 120).strftime("%Y-%m-%d"),
        }
    )
    table = holes(rng, table, ["words", "rare_words", "topic"], 0.06)
    table["grade"] = grade
    return table


def flowers(rng: Any) -> pandas.DataFrame:
    features, target = _from_sklearn("iris")
    table = features.loc[features.index.repeat(2)].reset_index(drop=True)
    table += rng.normal(size=table.shape) * 0.35
    table["garden"] = rng.choice(["east", "west"], len(table))
    table["picked"] = dates(rng, len(table), "2020-05-01", 60).strftime("%Y-%m-%d")
    table = holes(rng, table.round(2), ["sepal_length", "petal_width", "garden"], 0.06)
    table["species"] = target.map({0: "setosa", 1: "versicolor", 2: "virginica"}).repeat(2).to_numpy()
    return table


def loans(rng: Any) -> pandas.DataFrame:
    import numpy as np
    import pandas as pd

    rows = 450
    income, amount = rng.lognormal(3.6, 0.5, rows).round(1), rng.lognormal(2.6, 0.6, rows).round(1)
    job = rng.choice(["clerk", "nurse", "driver", "artist"], rows)
    late = rng.poisson(0.8, rows)
    risk = pd.Series(job).map({"clerk": -0.4, "nurse": -0.6, "driver": 0.2, "artist": 0.9}).to_numpy()
    odds = -1.5 + 2.6 * (amount / income - 0.4) + 0.9 * late + 1.2 * risk
    table = pd.DataFrame(
        {
            "income": income,
            "amount": amount,
            "job": job,
            "late_payments": late,
            "opened": dates(rng, rows, "2015-01-01", 2500).strftime("%Y-%m-%d"),
            "branch": rng.choice(["b1", "b2", "b3"], rows),
        }
    )
    table = holes(rng, table, ["income", "job", "late_payments"], 0.06)
    table["default"] = np.where(rng.random(rows) < 1 / (1 + np.exp(-3 * odds)), "yes", "no")
    return table


def air(rng: Any) -> pandas.DataFrame:
    import numpy as np
    import pandas as pd

    rows = 420
    day = dates(rng, rows, "2018-01-01", 700)
    hour = rng.integers(0, 24, rows)
    wind, traffic = rng.gamma(3, 1.4, rows), rng.choice(["low", "mid", "high"], rows)
    cars = pd.Series(traffic).map({"low": 0.4, "mid": 1.0, "high": 1.9}).to_numpy()
    cold = 10 - 9 * np.sin(2 * np.pi * (day.day_of_year - 100) / 365)
    smoke = cars * (1 + 0.4 * np.sin(hour / 24 * 2 * np.pi)) / (0.6 + 0.3 * wind)
    table = pd.DataFrame(
        {
            "date": day.strftime("%Y-%m-%d"),
            "hour": hour,
            "wind": wind.round(2),
            "traffic": traffic,
            "cold": (cold + rng.normal(0, 2, rows)).round(1),
            "sensor": (smoke * 5 + rng.normal(0, 1.2, rows)).round(2),
        }
    )
    table = holes(rng, table, ["wind", "sensor", "traffic"], 0.06)
    table["soot"] = (12 * smoke + 0.4 * cold + rng.normal(0, 1.5, rows)).round(2)
    table["ozone"] = (60 - 2.0 * cold - 5 * smoke + rng.normal(0, 3, rows)).round(1)
    return table


def concrete(rng: Any) -> pandas.DataFrame:
    import numpy as np
    import pandas as pd

    rows = 420
    cement, water, age = rng.uniform(120, 520, rows), rng.uniform(130, 230, rows), rng.choice([3, 7, 28, 90], rows)
    kind = rng.choice(["river", "crushed", "slag"], rows)
    strength = 24 * (cement / water) * np.log1p(age) / 3.4 + 5 * (kind == "crushed") - 4 * (kind == "slag")
    table = pd.DataFrame(
        {
            "cement": cement.round(1),
            "water": water.round(1),
            "age_days": age,
            "aggregate": kind,
            "poured": dates(rng, rows, "2017-01-01", 1500).strftime("%Y-%m-%d"),
            "lab": rng.choice(["x", "y"], rows),
        }
    )
    table = holes(rng, table, ["cement", "water", "aggregate"], 0.05)
    table["strength"] = (strength + rng.normal(0, 3.5, rows)).round(2)
    return table


BUILTIN = (
    Builtin("tumour-diagnosis", "train", "classification", "roc_auc", ("benign",),
            "Measurements of cell nuclei. Predict the probability that the tumour is benign (1).", tumours),
    Builtin("wine-grapes", "train", "classification", "accuracy", ("grape",),
            "Chemical analysis of wines from one region. Predict the grape.", wines),
    Builtin("pen-digits", "train", "classification", "map_at_3", ("digit",),
            "Pixels of a handwritten digit. Give up to three digits as words, best guess first, with spaces between.",
            digits),
    Builtin("diabetes-progression", "train", "regression", "rmse", ("progression",),
            "Blood values of patients. Predict how far the disease has come after a year.", diabetes),
    Builtin("city-rides", "train", "regression", "rmsle", ("count",),
            "Hourly weather and calendar of a bike scheme. Predict how many bikes are taken.", rides),
    Builtin("shop-sales", "train", "regression", "smape", ("num_sold",),
            "Souvenirs sold in four shops. Predict the number sold.", sales),
    Builtin("flat-rents", "train", "regression", "mae", ("rent",),
            "Adverts of flats. Predict the monthly rent.", rents),
    Builtin("essay-grades", "train", "classification", "quadratic_weighted_kappa", ("grade",),
            "Counts from school essays. Predict the grade, a whole number from 1 to 5.", essays),
    Builtin("flower-species", "eval", "classification", "log_loss", ("species",),
            "Sizes of petals and sepals. Give a probability for each species, in a column of its name.", flowers),
    Builtin("loan-defaults", "eval", "classification", "f1", ("default",),
            "Loans of a small bank. Predict whether the borrower defaults, yes or no.", loans),
    Builtin("street-air", "eval", "regression", "mcrmse", ("soot", "ozone"),
            "Weather and traffic beside a street. Predict soot and ozone.", air),
    Builtin("concrete-strength", "eval", "regression", "r2", ("strength",),
            "Recipes of concrete. Predict its strength.", concrete),
)  # fmt: skip
"""Eight for training and four held out."""
