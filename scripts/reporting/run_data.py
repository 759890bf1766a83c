"""A run folder as a report reads it: as far as it goes, with one sentence for each part that is missing or damaged."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mafrt.core.errors import MafrtError
from mafrt.core.reading import lines_of, parse_json, read_text
from mafrt.core.text import counted, error_line
from mafrt.storage.args_file import ARGS, read_args
from mafrt.storage.run_record import RECORD, RunRecord, load_record

MOST_POINTS = 1500
"""Points of one curve; longer ones are averaged over neighbouring iterations."""
MOST_COLUMNS = 5000
"""Names of numbers that a table holds; a run has some hundred."""


@dataclass
class Table:
    """Lines of numbers as columns: one value per row and name, None where a line lacks it."""

    iterations: list[int] = field(default_factory=list)
    columns: dict[str, list[float | None]] = field(default_factory=dict)
    when: list[str] = field(default_factory=list)
    """of evaluations: before, during or after training"""
    left_out: set[str] = field(default_factory=set)
    """names beyond `MOST_COLUMNS`"""

    def add(self, line: Mapping[str, Any]) -> None:
        rows = len(self.iterations)
        self.iterations.append(int(line["iteration"]))
        self.when.append(str(line.get("when", "")))
        for name, value in line.items():
            if name in ("iteration", "when") or not (value is None or isinstance(value, (int, float))):
                continue
            if name not in self.columns and len(self.columns) >= MOST_COLUMNS:
                self.left_out.add(name)
                continue
            self.columns.setdefault(name, [None] * rows).append(finite(value))
        for column in self.columns.values():
            if len(column) <= rows:
                column.append(None)

    def thinned(self, most: int = MOST_POINTS) -> Table:
        """At most `most` rows, each the mean of neighbouring ones."""
        width = math.ceil(len(self.iterations) / most)
        if width < 2:
            return self
        starts = range(0, len(self.iterations), width)
        return Table(
            [self.iterations[min(start + width, len(self.iterations)) - 1] for start in starts],
            {name: [_mean(values[i : i + width]) for i in starts] for name, values in self.columns.items()},
            [self.when[start] for start in starts],
        )


@dataclass
class RunData:
    """The parts of a run that a report shows, episodes aside."""

    path: Path
    name: str
    settings: dict[str, Any] = field(default_factory=dict)
    record: RunRecord | None = None
    metrics: Table = field(default_factory=Table)
    evaluations: Table = field(default_factory=Table)
    timings: Table = field(default_factory=Table)
    summary: dict[str, Any] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    """what is missing or damaged, one sentence each"""

    @property
    def agents(self) -> list[str]:
        """Names of the team, or those that the metrics mention."""
        if self.record is not None:
            return [str(agent.get("role")) for agent in self.record.team]
        rewarded = [name.partition("/")[2] for name in self.metrics.columns if name.startswith("reward/")]
        return sorted(rewarded)

    @property
    def prompts(self) -> dict[str, str]:
        """Agent -> role prompt."""
        team = [] if self.record is None else self.record.team
        return {str(agent.get("role")): str(agent.get("prompt") or "") for agent in team}


def read_run(path: Path) -> RunData:
    """Read everything but episodes. Never raises for a folder that exists: what cannot be read is a problem."""
    run = RunData(path, path.resolve().name)
    if (path / ARGS).is_file():
        try:
            run.settings = read_args(path / ARGS)
        except MafrtError as error:
            run.problems.append(error_line(error))
    try:
        run.record = load_record(path) if (path / RECORD).is_file() else None
    except MafrtError as error:
        run.problems.append(error_line(error))
    for name in ("metrics", "evaluations", "timings"):
        table = getattr(run, name)
        for line in json_lines(path / f"{name}.jsonl", run.problems):
            table.add(line)
        if table.left_out:
            many = len(table.left_out)
            run.problems.append(
                f"Left out of {name}.jsonl: {counted(many, 'numbers')}; {MOST_COLUMNS} names are shown."
            )
    summary = path / "summary.json"
    if summary.is_file():
        try:
            run.summary = dict(parse_json(read_text(summary)))
        except (OSError, ValueError, TypeError) as error:
            run.problems.append(f"summary.json cannot be read ({error_line(error)}).")
    if not run.settings and not run.metrics.iterations and not run.evaluations.iterations:
        run.problems.append("The folder holds no settings and no metrics of a run.")
    elif not run.metrics.iterations:
        run.problems.append("No iteration is complete yet.")
    return run


def json_lines(path: Path, problems: list[str]) -> Iterator[dict[str, Any]]:
    """The whole lines of a file of JSON lines, each with its `iteration`; a problem for those that are not whole."""
    if not path.is_file():
        return
    bad: list[int] = []
    try:
        with open(path, "rb") as file:
            for number, line in enumerate(lines_of(file), start=1):
                try:
                    record = json.loads(line)
                    record["iteration"] = int(record["iteration"])
                except (ValueError, TypeError, KeyError, RecursionError, OverflowError):
                    bad.append(number)
                    continue
                yield record
    except OSError as error:
        problems.append(f"{path.name} cannot be read ({error_line(error)}).")
    if bad:
        lines, were = ("line", "was") if len(bad) == 1 else ("lines", "were")
        which = ", ".join(map(str, bad[:5])) + (", ..." if len(bad) > 5 else "")
        problems.append(f"{len(bad)} {lines} of {path.name} (number {which}) could not be read and {were} left out.")


_OF_THE_PLACE = re.compile(r"run_dir|threads|device|load_path|set_aside|accept_changes|coach_cache")


def same_but_seed(run: RunData) -> str:
    """A key that runs share if they differ in the seed and in settings of the machine only."""
    same = {name: value for name, value in run.settings.items() if name != "seed" and not _OF_THE_PLACE.fullmatch(name)}
    team = [] if run.record is None else run.record.team
    return json.dumps([same, team], sort_keys=True, default=str) if same else str(run.path.resolve())


def finite(value: object) -> float | None:
    """A number that JSON and a chart can hold, else None: `1e400` reads as infinity."""
    if not isinstance(value, (int, float)):
        return None
    try:
        return value if math.isfinite(float(value)) else None
    except OverflowError:  # a whole number of hundreds of digits
        return None


def _mean(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None
