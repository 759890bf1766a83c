"""Quickstarts beside their rivals: the table, the agent that is alone, and the whole chain on one iteration."""

from __future__ import annotations

import json
import re

import pytest

from bench.reproduce import rivals
from bench.reproduce.rivals import alone, evaluated, on_validation, over, table, tuned
from mafrt.scripts.baselines import table as baselines

pytestmark = pytest.mark.takes(slow=40)


def test_the_table():
    runs = [{"name": "", "sampled": score, "greedy": score, "solved": score} for score in (0.1, 0.2, 0.3)]
    rows = [over("team", runs), {"name": "b", "sampled": 0.25, "greedy": None, "solved": 0.0}]
    mean = "0.200 (-0.048 to 0.448)"  # deviation .1, three seeds: 4.303 * .1 / sqrt(3) = .248
    assert table(rows).splitlines()[2:] == [f"| team | {mean} | {mean} | {mean} |", "| b | 0.250 |  | 0.000 |"]


def test_one_agent_alone_speaks_in_all_roles_by_one_adapter(tmp_path):
    found = json.loads(alone({"env": "sudoku"}, tmp_path / "team.json").read_text())
    assert found == [{"role": "chooser", "adapter": "alone"}, {"role": "filler", "adapter": "alone"}]
    config = {"profile_path": "profiles/smollm2_math.json"}  # whose Actor has a rate of its own
    reasoner, actor = json.loads(alone(config, tmp_path / "team.json").read_text())
    assert set(actor) == {"role", "prompt", "with_answer", "adapter"} and reasoner["adapter"] == actor["adapter"]
    config = {"profile_path": "profiles/referential.json"}  # whose scout is sampled at a temperature of its own
    assert [agent.get("temperature") for agent in json.loads(alone(config, tmp_path / "team.json").read_text())] == [
        None,
        0.5,
    ]


def test_a_rate_is_judged_by_the_best_evaluation_of_its_run(tmp_path):
    lines = [{"eval/avg@2": score, "eval/pass@2": 1.0, "eval/greedy": 1.0} for score in (0.2, 0.6, 0.4)]
    (tmp_path / "evaluations.jsonl").write_text("\n".join(map(json.dumps, lines)))
    assert on_validation(tmp_path) == 0.6


def test_rates_beyond_an_end_are_tried_where_it_is_best():
    assert tuned(lambda factor: -abs(factor - 1)) == (1.0, 3)
    assert tuned(lambda factor: -abs(factor - 9)) == (pytest.approx(9), 5)  # 1/3, 1, 3, 9, and 27 beyond it
    assert tuned(lambda factor: -factor) == (pytest.approx(1 / 27), 5)


def test_every_seed_of_an_agent_alone_has_scores_of_its_own(tmp_path, monkeypatch):
    made = []

    def evaluate(main, *words):
        path = words[words.index("--output") + 1]
        made.append(path.name)
        metrics = {"eval/avg@4": len(made), "eval/greedy": 1}
        path.write_text(json.dumps({"scores": {"task": [1, 0]}, "metrics": metrics, "baselines": [{}]}))

    monkeypatch.setattr(rivals, "run", evaluate)
    args = rivals.parse(["--output", str(tmp_path)])
    found = [evaluated(args, tmp_path / f"alone_0.33_{seed}")[0]["sampled"] for seed in (1, 2)]
    assert found == [1, 2] and made == ["alone_0.33_1.json", "alone_0.33_2.json"]


@pytest.mark.nightly
@pytest.mark.ci
@pytest.mark.slow
def test_the_whole_chain_runs(tmp_path, monkeypatch):
    for name in ("PREFIX_TASKS", "CHOICE_TASKS", "BATCH_TASKS"):
        monkeypatch.setattr(baselines, name, 2)
    monkeypatch.setattr(rivals, "RATES", (1.0, 3.0))
    words = ["--config", "quickstart_math", "--seeds", "1", "--tasks", "4", "--iterations", "1", "--votes", "2"]
    assert rivals.main([*words, "--output", str(tmp_path / "out")]) == 0
    names = [line.split(" | ")[0] for line in (tmp_path / "out/table.md").read_text().splitlines()[2:]]
    # Two are tried, and one or two beyond the end of them that is best.
    assert names[0] == "| team" and re.match(r"\| one agent alone in all roles, at the best of [34] rates", names[1])
    assert "| start, majority@2" in names
    assert names[-1].startswith("| imitation of the solved ones of 128 episodes, ")
