"""Numbers of a run: one line per iteration in `metrics.jsonl`, the same in TensorBoard, and their glossary."""

from __future__ import annotations

import difflib
import logging
import math
import re
from collections.abc import Iterable, Mapping
from functools import cache, lru_cache
from typing import Any, NamedTuple

from mafrt.config.algorithm import REGISTRY, algorithm_class
from mafrt.core.shipped import shipped_table
from mafrt.storage.run_dir import RunDir
from mafrt.storage.trackers import Trackers

log = logging.getLogger(__name__)


class MetricMeaning(NamedTuple):
    text: str
    unit: str = ""
    """Empty for plain numbers."""


@cache
def glossary() -> Mapping[str, MetricMeaning]:
    """Name -> meaning: those of `glossary.yaml`, and those that the registered algorithms declare."""
    found = {name: MetricMeaning(*entry) for name, entry in shipped_table(__file__, "glossary.yaml").items()}
    declared: dict[str, tuple[tuple[str, str], list[str]]] = {}
    for rule in REGISTRY.names():
        for name, meaning in algorithm_class(rule).metrics.items():
            declared.setdefault(name, (meaning, []))[1].append(rule)
    return found | {
        name: MetricMeaning(f"{text} ({', '.join(rules)})", unit) for name, ((text, unit), rules) in declared.items()
    }


@lru_cache(maxsize=4096)
def explain(name: str) -> MetricMeaning:
    """Meaning of a metric. Raises KeyError, naming the nearest entry, if the glossary does not know it."""
    known = glossary()
    if name in known:
        return known[name]
    for pattern, meaning in _patterns().items():
        if pattern.fullmatch(name):
            return meaning
    near = difflib.get_close_matches(re.sub(r"(?<!eval)/.*", "/AGENT", name), known, n=1)
    raise KeyError(
        f"metric {name!r} is not in mafrt/storage/glossary.yaml, and no algorithm declares it in `metrics`"
        f"{f'; is it {near[0]}?' if near else ''}"
    )


def _compile(pattern: str) -> re.Pattern[str]:
    text = re.escape(pattern).replace("/AGENT", r"/[A-Za-z0-9_.-]+").replace("@K", r"@[1-9][0-9]*")
    text = text.replace("/MEASURE", r"/.+")  # named by the environment, by any text
    return re.compile(text)


@cache
def _patterns() -> dict[re.Pattern[str], MetricMeaning]:
    return {_compile(pattern): meaning for pattern, meaning in glossary().items()}


class MetricsWriter:
    """Writes the numbers of an iteration to `metrics.jsonl`, `timings.jsonl` and the trackers."""

    def __init__(
        self, run: RunDir, *, trackers: tuple[str, ...] = ("tensorboard",), declared: Iterable[str] = ()
    ) -> None:
        """Raises MissingExtraError if the package of a tracker is not installed.

        `declared`: metrics beside those of the glossary, such as those of an algorithm that is not registered.
        """
        self.run = run
        self._declared = [_compile(name) for name in declared]
        self._unknown: set[str] = set()
        self._trackers = Trackers(trackers, run)

    def write(
        self, iteration: int, metrics: Mapping[str, float | None], timings: Mapping[str, float | None] | None = None
    ) -> None:
        """Write one iteration, durably. Non-finite values become null and are counted in `nonfinite_values`.

        `metrics` must depend on seed and data only; wall-clock values belong into `timings`.
        """
        line = {name: None if value is None else _number(value) for name, value in metrics.items()}
        bad = [name for name, value in line.items() if value is not None and not math.isfinite(value)]
        if bad:
            log.warning("iteration %d: not finite: %s", iteration, ", ".join(bad))
        line["nonfinite_values"] = len(bad)
        clock = {name: None if value is None else _number(value) for name, value in (timings or {}).items()}
        for name in {*line, *clock}:
            self._check(name)
        self.run.metrics.append(iteration, [line])
        if clock:
            self.run.timings.append(iteration, [clock])
        self._show(iteration, {**line, **clock})

    def write_evaluation(self, iteration: int, when: str, metrics: Mapping[str, float | None]) -> None:
        """Write an evaluation of the team as it is after `iteration` to `evaluations.jsonl`, and show it.

        `when` is "before", "during" or "after" training.
        """
        line = {name: None if value is None else _number(value) for name, value in metrics.items()}
        for name in line:
            self._check(name)
        self.run.evaluations.append(iteration, [{"when": when, **line}])
        self._show(iteration, line)

    def _show(self, iteration: int, values: Mapping[str, float | None]) -> None:
        finite = {name: value for name, value in values.items() if value is not None and math.isfinite(value)}
        self._trackers.scalars(iteration, finite)

    def write_text(self, iteration: int, name: str, text: str) -> None:
        """Show a text in the trackers, such as an episode."""
        self._trackers.text(iteration, name, text)

    def _check(self, name: str) -> None:
        if name not in self._unknown and not any(pattern.fullmatch(name) for pattern in self._declared):
            try:
                explain(name)
            except KeyError as error:
                self._unknown.add(name)
                log.warning("%s", error.args[0])

    def close(self) -> None:
        self._trackers.close()

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _number(value: Any) -> float | int:
    """A plain number out of a bool, a number or a scalar tensor."""
    if isinstance(value, (bool, int)):
        return int(value)
    return float(value)
