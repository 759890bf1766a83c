"""Experiments with other projects' packages: `verifiers` and tinker_cookbook."""

from __future__ import annotations

import json
import sys

import pytest

from bench.reproduce import tinker_cookbook, verifiers

pytestmark = pytest.mark.takes(slow=10)


def test_the_reward_of_a_recipe_is_told_by_its_first_and_last_steps():
    runs = [[0.0] * 5 + [0.5] + [1.0] * 5, [0.2] * 5 + [0.9] * 5]
    lines = tinker_cookbook.table({"as it is": runs, "learning rate 0": runs[:1]}).splitlines()
    # Of two seeds t is 12.706: (.2 / sqrt(2)) * 12.706 / sqrt(2) = 1.271 to both sides of .1, half of it beside .95.
    assert lines[2] == "| as it is | 2 | 0.100 (-1.171 to 1.371) | 0.950 (0.315 to 1.585) |"
    assert lines[3] == "| learning rate 0 | 1 | 0.000 | 1.000 |"


def test_the_recipe_finds_base_and_problems_under_its_own_names(tmp_path):
    for _ in range(2):  # as after a run that was stopped
        tinker_cookbook.prepare(tmp_path)
    assert (tmp_path / tinker_cookbook.NAME / "config.json").is_file()
    datasets = pytest.importorskip("datasets")
    row = datasets.load_dataset(str(tmp_path / "openai/gsm8k"), name="main", split="test", cache_dir=tmp_path / "x")[0]
    assert row["question"].startswith("Problem: ") and row["answer"].startswith("#### ")


def test_whole_runs_are_read_and_not_made_again(tmp_path):
    args = tinker_cookbook.argparse.Namespace(output=tmp_path, steps=2)
    (tmp_path / "rate_0_seed_7").mkdir()
    lines = [json.dumps({"env/all/reward/total": value}) for value in (0.25, 0.5)]
    (tmp_path / "rate_0_seed_7/metrics.jsonl").write_text("\n".join(lines))
    assert tinker_cookbook.rewards(args, "http://nobody", 0.0, 7) == [0.25, 0.5]


@pytest.mark.parametrize(
    ("main", "words", "told"),
    [
        (verifiers.main, ["--environments", "no/such.py"], "give files of environments by --environments"),
        (tinker_cookbook.main, ["--python", "no/python"], "is no program that can be run"),
        (tinker_cookbook.main, ["--python", "PLAIN"], "cannot import tinker_cookbook and math_verify; run: "),
    ],
)
def test_what_is_not_there_is_told_before_anything_begins(main, words, told, tmp_path, capsys):
    plain = tmp_path / "python"
    plain.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S "$@"\n')
    plain.chmod(0o755)
    words = [word.replace("PLAIN", str(plain)) for word in words]
    assert main([*words, "--output", str(tmp_path / "out")]) == 2
    said = capsys.readouterr().err
    assert told in said and said.count("\n") == 1 and not (tmp_path / "out").exists()
