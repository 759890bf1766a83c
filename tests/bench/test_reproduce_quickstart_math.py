"""The quickstart beside its baselines: the table, and the whole chain on one iteration."""

from __future__ import annotations

import pytest

from bench.reproduce import quickstart_math_baselines
from bench.reproduce.quickstart_math_baselines import table
from mafrt.scripts.baselines import table as baselines

pytestmark = pytest.mark.takes(slow=18)


def test_the_table():
    rows = [{"name": "a", "sampled": 0.5, "greedy": None}, {"name": "b", "sampled": 0.25, "greedy": 1.0}]
    assert table(rows).splitlines()[2:] == ["| a | 0.500 |  |", "| b | 0.250 | 1.000 |"]


@pytest.mark.ci
@pytest.mark.slow
def test_the_whole_chain_runs(tmp_path, monkeypatch):
    monkeypatch.setattr(baselines, "PREFIX_TASKS", 2)
    words = ["--tasks", "4", "--iterations", "1", "--votes", "2", "--output", str(tmp_path / "out")]
    assert quickstart_math_baselines.main(words) == 0
    names = [line.split(" | ")[0] for line in (tmp_path / "out/table.md").read_text().splitlines()[2:]]
    assert names[0] == "| this team" and "| start, majority@2" in names
    assert names[-1].startswith("| imitation of the solved ones of 128 episodes, ")
