"""Teams and one agent alone on tasks of reasoning-gym: the texts, the scores of their parts, and the whole chain."""

from __future__ import annotations

import json

import pytest
from helpers_extras import need

from bench.reproduce import reasoning_gym_teams as teams
from bench.reproduce.reasoning_gym import demonstrations
from mafrt.coach.base import Case
from mafrt.config.team import Team
from mafrt.environment.registry import make_env

need("reasoning_gym")
pytestmark = pytest.mark.takes(slow=80, fast=8)


@pytest.mark.slow
@pytest.mark.ci
@pytest.mark.parametrize("name", list(teams.KINDS))
def test_both_sides_are_shown_the_same_right_texts(name, tmp_path):
    shown = {}
    for side, members in teams.SIDES.items():
        (tmp_path / "team.json").write_text(json.dumps(members))
        team, config = Team.load(tmp_path / "team.json"), teams.KINDS[name].config
        records = list(demonstrations(name, config, team, 20, teams.say))
        shown[side] = [record["response"] for record in records]
        # The data set itself takes the answers for right ones, and every part has full marks.
        env = make_env(f"reasoning_gym:{name}", team=team, level=0, size=2000, config=config)
        for task in range(1980, 2000):
            seen, _ = env.reset(seed=1, options={"task": task})
            while seen:
                record = records.pop(0)
                assert seen == {record["agent"]: record["prompt"]}
                assert set(teams.judged(record["agent"], record["prompt"], record["response"]).values()) == {1.0}
                result = env.step({record["agent"]: record["response"]})
                seen = result.observations
            assert result.info["outcome"] == 1.0
    works, answers = shown["team"][::2], shown["team"][1::2]
    assert all(works) and shown["alone"] == [f"{work}\n{answer}" for work, answer in zip(works, answers, strict=True)]


CUBE = """Problem: A cube has:
- a white top side
- a blue right side
- a pink front side
- a tan left side
- a red back side
- a gold bottom side

The cube is rotated so that the side which was before at the bottom is now at the top.

Now the cube is rotated to place its left side at the top.

What is now the color of the top side of the cube?
Provide only the color as your final answer."""
SUM = "Problem: State the final answer to the following arithmetic problem: 4 + 1 - 9 - 2 ="


@pytest.mark.parametrize(
    ("agent", "saw", "said", "score"),
    [
        ("worker", SUM, "4+1=5 5-9=-4", 10),
        ("worker", SUM, "4+1=5 5-9=-3", 5),
        ("worker", SUM, "4+1=5 5-9=-4 -4-2=-6 0", 5),  # more than was asked
        ("worker", SUM, "", 0),
        # An answer is judged by the work that it was given.
        ("finisher", f"{SUM}\nworker: 4+1=5 5-9=-3", "-5", 10),
        ("finisher", f"{SUM}\nworker: 4+1=5 5-9=-3", "-6", 0),
        ("finisher", f"{SUM}\nworker: nothing", "-6", 0),
        # Who says both is not paid for an answer to work that it made easy.
        ("solver", SUM, "4+1=5 5-9=-3\n-5", 5),
        ("solver", SUM, "4+1=5 5-9=-4\n-5", 5),
        ("solver", SUM, "0\n-2", 0),
        ("solver", SUM, "-6", 0),
        ("solver", "Problem: Spell this word backward (example: sun -> nus): tool", "t o o l\nloot", 10),
        ("finisher", "Problem: Solve for z: 5 - 8*z = -19\nworker: 8*z=24", "3", 10),
        ("worker", "Problem: Solve for z: 5 - 8*z = -19", "8*z=24", 10),
        ("finisher", "Problem: Solve for z: 5 - 8*z = -19\nworker: 0*z=24", "3", 0),
        ("worker", CUBE, "left left", 10),
        ("worker", CUBE, "left back", 5),
        ("finisher", f"{CUBE}\nworker: left left", "tan", 10),
        ("finisher", f"{CUBE}\nworker: left left", "red", 0),
        ("finisher", f"{CUBE}\nworker: upwards", "red", 0),
    ],
)
def test_the_coach_scores_a_turn_by_its_own_part(agent, saw, said, score):
    (verdict,) = teams.Parts().judge([Case(agent, said, saw=saw)])
    assert verdict.score == score


def test_a_question_of_another_data_set_is_refused():
    with pytest.raises(ValueError, match="no question of these data sets: 'What is 2"):
        teams.judged("worker", "What is 2?", "2")


def test_the_rate_is_chosen_on_validation_tasks_of_the_trial_seed(tmp_path, monkeypatch):
    def learnt(args, name, side, rewards, rate, seed):
        assert (name, seed) == ("leg_counting", teams.TRIAL_SEED)
        scores = (1.0, -rate)  # the start's own score chooses nothing
        lines = [{"eval/avg@1": each, "eval/greedy": 0.0} for each in scores]
        (tmp_path / "evaluations.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        return tmp_path

    monkeypatch.setattr(teams, "learnt", learnt)
    args = teams.parse(["--output", str(tmp_path)])
    assert teams.chosen(args, "team", "outcome only") == 1e-4
    assert teams.TRIAL_SEED not in args.seeds


@pytest.mark.slow
@pytest.mark.ci
def test_the_whole_chain_runs_and_is_not_run_twice(tmp_path, capsys):
    words = ["--model_name_or_path", "teaching-base", "--data_sets", "chain_sum", "--seeds", "1", "2"]
    words += ["--iterations", "2", "--trial", "1", "--episodes", "8", "--imitated", "16", "--tasks", "3"]
    words += ["--validation", "2", "--tried_on", "chain_sum", "--output", str(tmp_path / "out")]
    assert teams.main(words) == 0
    first = (tmp_path / "out/table.md").read_text()
    for side in teams.SIDES:
        assert f"{side}, start |" in first
        assert all(f"| {side}, {rewards} | " in first for rewards in teams.REWARDS)
    assert first.count("**team minus alone") == 2 and capsys.readouterr().out.endswith(first)
    # Process rewards reach every agent of both sides.
    for side, agents in (("team", ("worker", "finisher")), ("alone", ("solver",))):
        (folder,) = (tmp_path / "out/chain_sum").glob(f"{side}_process_*_1")
        line = json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])
        assert all(f"coach_score/{agent}" in line and line[f"trained/{agent}"] == 1 for agent in agents)
    made = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*.safetensors")}
    assert teams.main(words) == 0
    assert (tmp_path / "out/table.md").read_text() == first
    assert made == {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*.safetensors")}
