"""The rivals of the quickstart: votes, constant answers, and the table; the whole chain on one iteration."""

from __future__ import annotations

import pytest

from mafrt.scripts.reproduce import quickstart_baselines
from mafrt.scripts.reproduce.quickstart_baselines import constant, majority, table


def test_majority_counts_answers_only():
    assert majority(["3", None, "4", "4", None, None]) == "4"
    assert majority(["7", "5"]) == "7" and majority([None]) is None and majority([]) is None


def test_the_best_constant_answer_is_the_commonest():
    from mafrt.envs.math import load_tasks

    answers = [task.answer for task in load_tasks(split="test")[:50]]
    assert constant(50) == max(answers.count(answer) for answer in answers) / 50 < 0.2


def test_the_table():
    assert table([("a", 0.5, None), ("b", 0.25, 1.0)]).splitlines()[2:] == ["| a | 0.500 |  |", "| b | 0.250 | 1.000 |"]


@pytest.mark.slow
def test_the_whole_chain_runs(tmp_path, monkeypatch):
    monkeypatch.setattr(quickstart_baselines, "VOTES", 3)
    monkeypatch.setattr(quickstart_baselines, "TEMPERATURES", (1.0,))
    assert quickstart_baselines.main(["--tasks", "4", "--iterations", "1", "--output", str(tmp_path / "out")]) == 0
    names = [line.split(" | ")[0] for line in (tmp_path / "out/table.md").read_text().splitlines()[2:]]
    assert names == [
        "| best constant answer",
        "| untrained, temperature 1.0",
        "| untrained, majority of 3",
        "| rejection sampling",
        "| trained",
    ]
