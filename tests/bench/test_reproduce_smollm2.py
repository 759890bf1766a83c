"""The experiment on SmolLM2: its records, its table, and the whole chain of commands on the teaching base."""

from __future__ import annotations

import json

import pytest

from bench._tables import over_seeds
from bench.reproduce import smollm2_math
from bench.reproduce.smollm2_math import Scores, table, write_demonstrations
from mafrt.envs.math.stories import distinct

pytestmark = pytest.mark.takes(slow=24)


def test_records_of_the_warm_start(tmp_path):
    write_demonstrations(tmp_path / "d.jsonl", distinct("train", 5), 5)
    records = [json.loads(line) for line in (tmp_path / "d.jsonl").read_text().splitlines()]
    assert [record["agent"] for record in records] == ["reasoner", "actor"] * 5
    for plan, solution in zip(records[::2], records[1::2], strict=True):
        assert solution["prompt"] == f"{plan['prompt']}\nreasoner: {plan['response']}"
        assert "\\boxed{" in solution["response"]
    write_demonstrations(tmp_path / "d.jsonl", distinct("train", 5), 2)
    fewer = [json.loads(line) for line in (tmp_path / "d.jsonl").read_text().splitlines()]
    assert fewer == [*records[1:7:2], *records[6:]]
    # One agent alone imitates the same sentences.
    write_demonstrations(tmp_path / "d.jsonl", distinct("train", 5), 2, alone=True)
    alone = [json.loads(line) for line in (tmp_path / "d.jsonl").read_text().splitlines()]
    assert {record["agent"] for record in alone} == {"solver"}
    assert [(record["prompt"], record["response"]) for record in alone[:3]] == [
        (record["prompt"], record["response"]) for record in records[1:7:2]
    ]
    assert [(record["prompt"], record["response"]) for record in alone[3:]] == [
        (plan["prompt"], f"{plan['response']} {solution['response']}")
        for plan, solution in zip(records[6::2], records[7::2], strict=True)
    ]


def test_intervals_are_clustered_by_seed():
    # Mean .2, deviation .1, three seeds: 4.303 * .1 / sqrt(3) = .248.
    assert over_seeds([0.1, 0.2, 0.3], "+.3f") == "+0.200 (-0.048 to +0.448)"
    assert over_seeds([0.1]) == "0.100"


def test_the_table_shows_gains_over_the_start():
    text = table({"start": Scores(0.4, 0.5)}, {"rl": [Scores(0.5, 0.7), Scores(0.6, 0.7)]})
    assert text.splitlines()[2:] == [
        "| start | - | 0.400 | 0.500 | | |",
        "| rl | 2 | 0.550 | 0.700 | +0.150 (-0.485 to +0.785) | +0.200 (+0.200 to +0.200) |",
    ]


def test_rivals_are_chosen_on_validation_problems_with_the_first_seed(tmp_path, monkeypatch):
    args = smollm2_math.parse(["--seeds", "4", "5", "--output", str(tmp_path)])
    asked = []

    def imitated(args, seed, rate, passes):
        assert seed == 4
        return rate, passes

    def evaluate(name, arm, split, adapters, args, tasks):
        asked.append((split, tasks))
        return Scores(0.5 - abs(adapters[0] - 3e-4), adapters[1] / 10)

    def learnt(args, arm, seed, flag, rate, *words, name, less):
        (tmp_path / name).mkdir()
        scores = {0: 1.0, 5: rate, 10: 0.0}  # the start's own score chooses nothing
        lines = [{"iteration": step, "eval/avg@1": each, "eval/greedy": 0.0} for step, each in scores.items()]
        (tmp_path / name / "evaluations.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        return tmp_path / name

    monkeypatch.setattr(smollm2_math, "imitated", imitated)
    monkeypatch.setattr(smollm2_math, "evaluate", evaluate)
    monkeypatch.setattr(smollm2_math, "learnt", learnt)
    assert smollm2_math.chosen_imitation(args) == (3e-4, smollm2_math.PASSES)
    assert set(asked) == {("validation", args.validation)}
    assert [smollm2_math.tried_alone(args, rate) for rate in (1e-4, 3e-4)] == [1e-4, 3e-4]


@pytest.mark.nightly
@pytest.mark.ci
@pytest.mark.slow
def test_the_whole_chain_runs_and_is_not_run_twice(tmp_path, capsys):
    words = ["--model_name_or_path", "teaching-base", "--seeds", "1", "--iterations", "1", "--episodes", "8"]
    words += [
        "--demonstrations",
        "16",
        "--calculations",
        "16",
        "--tasks",
        "2",
        "--samples",
        "1",
        "--validation",
        "4",
        "--arms",
        "reinforcement learning",
        "coach off",
        "one agent alone",
    ]
    assert smollm2_math.main([*words, "--output", str(tmp_path / "out")]) == 0
    first = (tmp_path / "out/table.md").read_text()
    assert all(f"| {arm} |" in first for arm in ("start", "start alone", "coach off", "one agent alone"))
    assert "| reinforcement learning | 1 |" in first and (tmp_path / "out/curves.svg").read_text().startswith("<?xml")
    made = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*.safetensors")}
    assert smollm2_math.main([*words, "--output", str(tmp_path / "out")]) == 0
    assert (tmp_path / "out/table.md").read_text() == first
    assert made == {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*.safetensors")}
