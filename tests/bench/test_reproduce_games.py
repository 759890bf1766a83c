"""The table of learnt games, and its whole chain on one iteration."""

from __future__ import annotations

import pytest

from bench.reproduce import games
from bench.reproduce._commands import run
from bench.reproduce.games import table

pytestmark = pytest.mark.takes(slow=10)


def test_the_table_has_means_and_intervals_over_seeds():
    runs = [{"eval/avg@2": value, "eval/greedy": 1.0} for value in (0.90, 0.95, 1.00)]
    rows = table({"team": runs, "start": runs[:1]}, {"optimal": 1.0}).splitlines()[2:]
    # Deviation .05 over three seeds, t of two degrees of freedom 4.303: .05 * 4.303 / sqrt(3) = .124 to both sides.
    assert rows == [
        "| optimal player | - | 1.000 | | |",
        "| team | 3 | 0.950 (0.826 to 1.074) | 1.000 (1.000 to 1.000) | 0.900 |",
        "| start | 1 | 0.900 | 1.000 | 0.900 |",
    ]


def test_what_needs_no_reinforcement_learning_stands_beside_the_team():
    beside = [
        {"name": "this team", "sampled": 0.9, "greedy": 1.0},
        {"name": "random player", "sampled": 0.3, "greedy": None},
        {"name": "start, temperature 0.7", "sampled": 0.25, "greedy": 0.2},
        {"name": "imitation of the solved ones of 64 episodes", "sampled": 0.5, "greedy": None},
    ]
    assert table({}, {}, beside).splitlines()[2:] == [
        "| start, temperature 0.7 | 1 | 0.250 | 0.200 | |",
        "| imitation of the solved ones of 64 episodes | 1 | 0.500 |  | |",
    ]


def test_a_stage_that_was_stopped_ends_the_experiment(tmp_path):
    made = tmp_path / "summary.json"
    with pytest.raises(SystemExit, match=r"stopped before .*summary\.json was made"):
        run(lambda words: 0, makes=made)  # a training that a signal stops returns 0
    made.touch()
    run(lambda words: 0, makes=made)
    with pytest.raises(SystemExit):
        run(lambda words: 2, makes=made)


@pytest.mark.nightly
@pytest.mark.ci
@pytest.mark.slow
def test_the_whole_chain_runs_and_keeps_what_is_there(tmp_path):
    words = ["--games", "referential", "--arms", "1", "--seeds", "1", "--iterations", "1", "--tasks", "4"]
    words += ["--output", str(tmp_path)]
    assert games.main([*words, "--only_start"]) == 0
    assert (tmp_path / "referential_start" / "adapters" / "scout").is_dir()
    assert not (tmp_path / "referential_1_1").exists()
    assert games.main(words) == 0
    run = tmp_path / "referential_1_1" / "summary.json"
    made = run.stat().st_mtime_ns
    assert games.main(words) == 0
    assert run.stat().st_mtime_ns == made and "| one agent at a time | 1 | " in (tmp_path / "table.md").read_text()
    assert (tmp_path / "referential.svg").read_text().startswith("<?xml")
