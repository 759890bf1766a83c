"""Does a recipe hold over many seeds, and at a multiple of its rate? The part that does not depend on the task.

Every run is kept in NAME.json, and a run that is there is not made again. Held-out tasks are only looked at: no weights
are chosen by them, so a run that breaks down stays broken.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from bench.reproduce._experiment import LearningCurve, report, spread
from bench.reproduce._figure import curves

RATES = {"four times the rate": 4, "the recipe's rate": 1}
_Curve = TypeVar("_Curve", bound=LearningCurve)


@dataclass(frozen=True)
class Stability(Generic[_Curve]):
    """One recipe under test."""

    name: str
    """of its files"""
    claim: str
    title: str
    """of the figure"""
    label: str
    """of its vertical axis"""
    curve: type[_Curve]
    scores: Callable[[_Curve], list[float]]
    """held-out scores of a run, from before the training to after it"""
    broken: Callable[[_Curve], bool]
    columns: Mapping[str, Callable[[_Curve], float]]
    """further columns of the table"""

    def kept(self, path: Path) -> dict[str, dict[str, _Curve]]:
        """Arm -> seed -> its curve, of earlier calls."""
        if not path.is_file():
            return {}
        read = json.loads(path.read_text(encoding="utf-8"))
        return {arm: {seed: self.curve(**curve) for seed, curve in runs.items()} for arm, runs in read.items()}

    def table(self, arms: Mapping[str, Sequence[_Curve]]) -> str:
        """Held-out scores at the start and the end, the worst seed, and how many broke down."""
        names = ["arm", "seeds", *self.columns, "score before", "score after", "broken down"]
        lines = [f"| {' | '.join(names)} |", "|---" * len(names) + "|"]
        for name, runs in arms.items():
            scores = [self.scores(run) for run in runs]
            cells = [name, str(len(runs)), *(spread([value(run) for run in runs]) for value in self.columns.values())]
            cells += [spread([line[0] for line in scores]), spread([line[-1] for line in scores])]
            lines.append(f"| {' | '.join(cells)} | {sum(map(self.broken, runs))} |")
        return "\n".join(lines)

    def measure(self, args: argparse.Namespace, train: Callable[[int, int], _Curve]) -> None:
        """Train what is not there, `train(seed, factor on the rate)`, and write table, figure and numbers."""
        path = args.output / f"{self.name}.json"
        done = self.kept(path)
        for name, factor in RATES.items():
            runs = done.setdefault(name, {})
            for seed in args.seeds:
                if str(seed) not in runs:
                    runs[str(seed)] = train(seed, factor)
                    path.parent.mkdir(parents=True, exist_ok=True)
                    path.write_text(json.dumps(_plain(done), indent=1), encoding="utf-8")
                shown = " ".join(f"{value:.2f}" for value in self.scores(runs[str(seed)]))
                print(f"{name}, seed {seed}: score {shown}", flush=True)
        arms = {name: [done[name][str(seed)] for seed in args.seeds] for name in RATES}
        lines = {name: [self.scores(run) for run in runs] for name, runs in arms.items()}
        steps = next(iter(arms.values()))[0].episodes
        figure = curves(self.title, lines, self.label, xlabel="episodes played", steps=steps)
        broken = [sum(map(self.broken, runs)) for runs in arms.values()]
        gains = [statistics.fmean(line[-1] - line[0] for line in some) for some in lines.values()]
        verdict = (
            f"{'Holds' if not any(broken) else 'Does not hold'}: of {len(args.seeds)} seeds each, {broken[0]} broke "
            f"down at four times the rate and {broken[1]} at the recipe's; mean gains {gains[0]:.3f} and "
            f"{gains[1]:.3f}."
        )
        report(args, self.name, self.claim, self.table(arms), figure, verdict, _plain(done))


def _plain(done: Mapping[str, Mapping[str, LearningCurve]]) -> dict[str, dict[str, object]]:
    return {arm: {seed: vars(curve) for seed, curve in runs.items()} for arm, runs in done.items()}
