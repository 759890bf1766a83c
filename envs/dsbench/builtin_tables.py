"""The tables of the built-in tasks: generated, and made untidy by a seeded hand.

Every task hides three choices that its tables do not show and its description states:

    leak    a column that equals the target in train.csv, one value for another, and belongs to other rows in test.csv:
            with it, a model is right on every training row and knows nothing of the test rows
    form    how the features act: `sum` (many, added: a linear model), `product` (powers, multiplied: a linear model of
            logarithms), `groups` (only in combination: a forest)
    metric  values, classes, probabilities or a ranking are handed in

Faults of real tables are included on purpose: missing values, categories as words, dates, numbers with a unit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from mafrt.core.shipped import shipped_table

if TYPE_CHECKING:
    import pandas

Form = Literal["sum", "product", "groups"]

ROWS: dict[Form, int] = {"sum": 200, "product": 200, "groups": 420}
"""Few rows for many features, except where combinations have to be seen."""
NUMBERS: dict[Form, int] = {"sum": 18, "product": 12, "groups": 4}
"""Columns of numbers that tell of the target."""
NOISE = 0.15
"""Standard deviation of the noise, in standard deviations of the target's other part."""


@dataclass(frozen=True)
class Builtin:
    """A task that ships."""

    id: str
    split: str
    """train, validation or eval"""
    metric: str
    form: Form
    leak: str
    """name of the column that equals the target in train.csv"""
    position: int
    """its number among the features in train.csv, from 1"""
    about: str
    """first sentence of the description"""
    numbers: tuple[str, ...]
    """names of the first columns of numbers"""
    category: tuple[str, ...]
    """name of the column of words, then its words"""
    targets: tuple[str, ...]
    classes: tuple[str, ...] = ()
    """of a classification, in the order of the hidden number; empty: a regression"""
    id_column: str = "id"
    wording: int = 0
    """which of the wordings the description takes"""

    @classmethod
    def of(cls, task: Mapping[str, Any]) -> Builtin:
        """From an entry of the file."""
        fields: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in task.items()}
        return cls(**fields)

    @property
    def data_type(self) -> str:
        return "classification" if self.classes else "regression"

    @property
    def story(self) -> str:
        """The description: all that the choices need, in sentences."""
        leak, form = LEAK_WORDING[self.wording % 2], FORM_WORDING[self.form][self.wording // 2 % 2]
        asked = " and ".join(f"`{name}`" for name in self.targets)
        return f"{self.about} {form} {leak.format(name=self.leak)} Predict {asked} for each `{self.id_column}`."

    @property
    def brief(self) -> str:
        """The same in some ten words of the teaching base, for the brief style."""
        leak, form = BRIEF_LEAK[self.wording % 2], BRIEF_FORM[self.form][self.wording // 2 % 2]
        return f"{leak.format(number=self.position)} {form}"


# Every task of `validation` and `eval` combines leak, form and metric as no task of the others does.
BUILTIN = tuple(Builtin.of(task) for task in shipped_table(__file__, "data/builtin_tasks.yaml"))


def builtin_of(task_id: str) -> Builtin | None:
    """The built-in task of this id; None for a user's own."""
    return next((task for task in BUILTIN if task.id == task_id), None)


LEAK_WORDING = (
    "The column `{name}` is filled in after the fact: in test.csv its values stand in the wrong rows.",
    "Do not use the column `{name}`: it was made from the outcome, and in test.csv it is shuffled.",
)
FORM_WORDING: dict[Form, tuple[str, str]] = {
    "sum": (
        "Every column adds its own small share, whatever the others are.",
        "The effects of all columns are added, each in proportion to its value.",
    ),
    "product": (
        "The effects multiply: each column acts by a power of its value, over several orders of magnitude.",
        "It is a product of powers and ratios of the columns, so percentages matter and not differences.",
    ),
    "groups": (
        "A column alone says nothing; signs and categories matter in combination.",
        "Each group of rows follows its own rule, and the groups are set by several columns together.",
    ),
}
BRIEF_LEAK = ("number {number} is a mistake.", "Not number {number}.")
BRIEF_FORM: dict[Form, tuple[str, str]] = {
    "sum": ("They are added together.", "It is the total."),
    "product": ("They multiply.", "One times another."),
    "groups": ("They make groups.", "Every part is new."),
}


def make(task: Builtin, rng: Any) -> pandas.DataFrame:
    """Rows with features and targets, the leak among the features; `rng`: numpy's generator."""
    import numpy as np
    import pandas as pd

    rows, count = ROWS[task.form], NUMBERS[task.form]
    words = rng.integers(0, len(task.category) - 1, rows)
    numbers = _numbers(task.form, rng, rows, count)
    names = [*task.numbers, *(f"reading_{i}" for i in range(1, count + 1 - len(task.numbers)))]
    table = pd.DataFrame(dict(zip(names, numbers.T, strict=True)))
    hidden = [_hidden(task.form, rng, numbers, words) for _ in task.targets]
    table.insert(min(2, count), task.category[0], np.array(task.category[1:])[words])
    if task.form != "groups":
        table["written"] = dates(rng, rows, "2020-01-01", 900).strftime(("%Y-%m-%d", "%d.%m.%Y")[task.wording % 2])
        table[names[1]] = [f"{value:g} EUR" for value in table[names[1]]]
    table = holes(rng, table, [names[-1], names[1]], 0.03)
    targets = {name: _target(task, number) for name, number in zip(task.targets, hidden, strict=True)}
    table.insert(task.position - 1, task.leak, _leak(task, targets[task.targets[0]]))
    return table.assign(**targets)


def _numbers(form: Form, rng: Any, rows: int, count: int) -> Any:
    """`[rows, count]`: changes with either sign, or sizes over several orders of magnitude for a product."""
    import numpy as np

    if form == "product":
        return np.array(
            [float(f"{value:.3g}") for value in (30 * np.exp(1.3 * rng.normal(size=rows * count)))]
        ).reshape(rows, count)
    spread = rng.normal(size=(rows, count)) * 20 if form == "sum" else rng.uniform(-40, 40, size=(rows, count))
    return spread.round(1)


def _hidden(form: Form, rng: Any, numbers: Any, words: Any) -> Any:
    """`[rows]`: the hidden number behind a target, with variance near 1."""
    import numpy as np

    if form == "groups":
        first, second = np.sign(numbers[:, 0]), np.sign(numbers[:, 1])
        ruled = first * np.choose(np.minimum(words, 2), [np.ones(len(words)), -np.ones(len(words)), second])
        value = ruled * (1 + 0.3 * (np.abs(numbers[:, 0]) > 20))
    else:
        weights = rng.choice([-1, 1], numbers.shape[1]) * rng.uniform(0.6, 1.2, numbers.shape[1])
        value = (np.log(numbers) if form == "product" else numbers / 20) @ weights + 1.2 * words
    value = (value - value.mean()) / value.std()
    return value + NOISE * rng.normal(size=len(value))


def _target(task: Builtin, hidden: Any) -> Any:
    """The target of a hidden number: itself on another scale, its exponential, or the class of its quantile."""
    import numpy as np

    if task.classes:
        cuts = np.quantile(hidden, np.arange(1, len(task.classes)) / len(task.classes))
        values = np.array(task.classes)[np.digitize(hidden, cuts)]
        return values.astype(int) if all(name.isdigit() for name in task.classes) else values
    if task.form == "product":
        return (40 * np.exp(1.2 * hidden)).round(3)
    return (30 * hidden).round(2)


def _leak(task: Builtin, target: Any) -> Any:
    """Another number for each value of the target."""
    import numpy as np

    if task.classes:
        return np.array([100 + 7 * task.classes.index(str(value)) for value in target])
    return (target * 1.2 + 5).round(6)


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
