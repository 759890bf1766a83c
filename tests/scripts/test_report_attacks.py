"""Files of a run that were not written by us: the report is made all the same, and no number of it is infinite."""

from __future__ import annotations

import gzip
import json
import os

import pytest

from mafrt.scripts import report, show
from mafrt.scripts.reporting.run_data import MOST_COLUMNS, read_run


@pytest.fixture
def run(tmp_path):
    folder = tmp_path / "run"
    (folder / "transcripts").mkdir(parents=True)
    (folder / "args.yaml").write_text("seed: 1\n")
    return folder


def made(run):
    target = run.parent / "report.html"
    assert report.main([str(run), "--output", str(target)]) == 0
    return target.read_text(encoding="utf-8")


@pytest.mark.parametrize("number", ["1e400", "-1e400", "NaN", "Infinity", "9" * 400, "true", '"x"', "null", "[1]"])
def test_numbers_that_are_none(run, number):
    lines = [f'{{"iteration": {n}, "score": {number}, "reward/a": 1}}' for n in (1, 2)]
    lines.append(f'{{"iteration": {number}, "score": 1}}')
    (run / "metrics.jsonl").write_text("\n".join(lines))
    episode = f'{{"iteration": 1, "outcome": {number}, "turns": [{{"agent": "a", "text": "x", "reward": {number}, '
    episode += f'"paid": {number}, "coach": {{"score": {number}}}}}]}}'
    (run / "episodes.jsonl").write_text(episode)
    text = made(run)
    assert "Infinity" not in text.partition("<script")[0] and ":Infinity" not in text and ":NaN" not in text
    assert show.main([str(run)]) == 0 and show.main([str(run), "--episode", "0"]) == 0


def test_a_pipe_and_a_folder_among_transcripts(run):
    os.mkfifo(run / "transcripts" / "train_000001.jsonl.gz")
    (run / "transcripts" / "train_000002.jsonl.gz").mkdir()
    with gzip.open(run / "transcripts" / "train_000003.jsonl.gz", "wt") as file:
        file.write(
            json.dumps({"format": 1}) + "\n" + json.dumps({"turns": [{"agent": "a\u202eb\n", "text": "x"}]}) + "\n"
        )
    assert made(run)
    assert show.main([str(run), "--episode", "0"]) == 0


@pytest.mark.slow
def test_fifty_thousand_numbers_are_cut_with_a_sentence(run):
    line = json.dumps({"iteration": 1} | {f"m{n}": 1.0 for n in range(50_000)})
    (run / "metrics.jsonl").write_text(f"{line}\n" * 3)
    data = read_run(run)
    assert len(data.metrics.columns) == MOST_COLUMNS and any("45000 numbers" in each for each in data.problems)


def test_a_damaged_first_line_is_told(run):
    (run / "metrics.jsonl").write_text('{"iteration": 1, "sc\n{"iteration": 2, "score": 1}\n')
    data = read_run(run)
    assert data.metrics.iterations == [2] and any("1 line of metrics.jsonl" in each for each in data.problems)


def test_a_summary_of_many_levels_is_told(run):
    (run / "summary.json").write_text("[" * 200_000)
    assert made(run) and any("summary.json" in each for each in read_run(run).problems)
