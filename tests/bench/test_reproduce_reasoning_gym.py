"""Tasks of reasoning-gym: the answers from which the form is learnt, and the table."""

from __future__ import annotations

import json

import pytest
from helpers_extras import need

from bench.reproduce import reasoning_gym
from mafrt.config.team import Team
from mafrt.environment.registry import make_env

need("reasoning_gym")


@pytest.mark.parametrize("name", list(reasoning_gym.TASKS)[:2])
def test_the_form_is_learnt_from_right_answers_to_training_tasks(name, tmp_path):
    (tmp_path / "team.json").write_text(json.dumps(reasoning_gym.TEAM))
    team = Team.load(tmp_path / "team.json")
    records = list(reasoning_gym.demonstrations(name, reasoning_gym.TASKS[name], team, 6))
    settings = {"level": 0, "size": reasoning_gym.TRAINED_ON, "config": reasoning_gym.TASKS[name]}
    env = make_env(f"reasoning_gym:{name}", team=team, **settings)
    for task, record in enumerate(records, reasoning_gym.TRAINED_ON - 6):
        seen, _ = env.reset(seed=1, options={"task": task})
        assert seen == {"solver": record["prompt"]}
        assert env.step({"solver": record["response"]}).info["outcome"] == 1.0


def test_a_table_has_the_start_the_seeds_and_what_needs_no_training(tmp_path, monkeypatch, capsys):
    asked = []

    def evaluated(args, name, adapters, path, *words):
        asked.append((adapters.parent.name, words[:1]))
        rows = [{"name": "this team"}, {"name": "vote", "sampled": 0.5, "greedy": None, "solved": 0.25}]
        return {"sampled": len(asked) / 10, "greedy": 0.5, "solved": 0.5, "baselines": rows}

    monkeypatch.setattr(reasoning_gym, "run", lambda *words, **_: None)
    monkeypatch.setattr(reasoning_gym, "evaluate", evaluated)
    (tmp_path / "spell_backward/start/adapters").mkdir(parents=True)
    assert reasoning_gym.main(["--data_sets", "spell_backward", "--seeds", "4", "5", "--output", str(tmp_path)]) == 0
    assert asked == [("start", ()), ("seed_4", ("--baselines",)), ("seed_5", ())]
    said = capsys.readouterr().out.splitlines()
    assert said[2:] == (tmp_path / "table.md").read_text().splitlines()[2:]
    assert said[2].startswith("| spell_backward | 0.100") and said[3].endswith("| 0.200; 0.300 |")
    assert said[4:] == ["| vote | 0.500 |  | 0.250 | |"]
