"""The table of trained programs, and its bad input."""

from __future__ import annotations

import pytest

from bench.reproduce import programs

pytestmark = pytest.mark.takes(slow=10)


def test_the_table_has_means_and_intervals_over_seeds(tmp_path):
    after = (0.90, 0.95, 1.00)
    summaries = [{"before": 0.3, "after": x, "greedy_before": 0.1, "greedy_after": 1.0} for x in after]
    [row] = programs.table({"team": summaries}).splitlines()[2:]
    # Deviation .05 over three seeds, t of two degrees of freedom 4.303: .05 * 4.303 / sqrt(3) = .124 to both sides.
    sampled, gain = "0.950 (0.826 to 1.074)", "0.650 (0.526 to 0.774)"
    before, greedy = "0.300 (0.300 to 0.300)", "0.100 (0.100 to 0.100) | 1.000 (1.000 to 1.000)"
    assert row == f"| team.py | 3 | {before} | {sampled} | {greedy} | {gain} |"
    assert "| 1 | 0.300 | 0.900 | 0.100 | 1.000 | 0.600 |" in programs.table({"team": summaries[:1]})


def test_a_program_that_is_not_there(tmp_path, capsys):
    assert programs.main(["--examples", str(tmp_path), "--output", str(tmp_path / "out")]) == 2
    assert "give the folder of the programs by --examples" in capsys.readouterr().err


@pytest.mark.nightly
@pytest.mark.ci
@pytest.mark.slow
def test_the_whole_chain_runs_and_keeps_what_is_there(tmp_path, capsys):
    words = ["--programs", "plain_openai", "--seeds", "1", "--iterations", "1", "--tasks", "4"]
    assert programs.main([*words, "--output", str(tmp_path)]) == 0
    run = tmp_path / "plain_openai_1" / "summary.json"
    made = run.stat().st_mtime_ns
    assert programs.main([*words, "--output", str(tmp_path)]) == 0
    assert run.stat().st_mtime_ns == made and "| plain_openai.py | 1 | " in (tmp_path / "table.md").read_text()
