"""Evaluation scores of a run with 95% intervals over tasks."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from mafrt.runners.intervals import interval
from mafrt.scripts.reporting.episodes import Recorded
from mafrt.scripts.reporting.run_data import RunData
from mafrt.storage.transcript_files import read_transcript, transcript_files


@dataclass(frozen=True)
class EvaluationScore:
    """A score of an evaluation."""

    name: str
    """metric, such as eval/avg@4"""
    iteration: int
    value: float
    interval: tuple[float, float] | None
    """95%, over tasks; None: the evaluation's episodes are not recorded, or are of one task"""
    tasks: int | None
    """recorded tasks that the interval is over"""

    def __str__(self) -> str:
        if self.interval is None:
            return f"{self.value:.3f}"
        return f"{self.value:.3f} ({self.interval[0]:.3f} to {self.interval[1]:.3f})"


def last_scores(run: RunData, iteration: int) -> list[EvaluationScore]:
    """The scores of the newest evaluation up to `iteration`, and none if there was no evaluation."""
    rows = [row for row, done in enumerate(run.evaluations.iterations) if done <= iteration]
    if not rows:
        return []
    row = rows[-1]
    done = run.evaluations.iterations[row]
    scores = []
    for name, values in run.evaluations.columns.items():
        value = values[row]
        if value is None or not name.startswith(("eval/avg@", "eval/greedy")):
            continue
        kind = "greedy" if name == "eval/greedy" else "sampled"
        means = task_means(run.path, done, kind)
        scores.append(EvaluationScore(name, done, value, interval(means), len(means) or None))
    return scores


def task_means(run: Path, iteration: int, kind: str) -> list[float]:
    """Mean score of each recorded task of one evaluation."""
    scores: dict[str, list[float]] = {}
    for file in transcript_files(run):
        if file.kind != "evaluation" or file.iteration != iteration:
            continue
        for content in read_transcript(file).episodes:
            episode = Recorded(0, kind, iteration, content, {})
            if str(content.get("id", "")).startswith(kind) and episode.score is not None:
                scores.setdefault(episode.group, []).append(episode.score)
    return [sum(values) / len(values) for values in scores.values()]
