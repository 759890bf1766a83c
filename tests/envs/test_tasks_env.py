"""Tasks with a reward function: from Python, from the command line, and with every fault named."""

from __future__ import annotations

import json

import pytest

from mafrt.config.team import Team
from mafrt.core.errors import ConfigError, DataError, EnvError
from mafrt.environment.checker import check_env
from mafrt.environment.registry import make_env
from mafrt.envs.construction import subset
from mafrt.envs.math.tasks import load_tasks
from mafrt.envs.tasks import RewardEnv
from mafrt.envs.tasks.build import build
from mafrt.scripts.train import main

REWARDS = """
def score(text, record):
    return float(record["keyword"] in text)

def broken(text, record):
    return record["missing"]

def nothing(text, record):
    return None
"""
WORDS = ("fox", "owl", "bee", "cat", "dog", "ant", "elk", "cow", "hen", "pig")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    lines = [{"question": f"Say {word}.", "keyword": word, "n": n} for n, word in enumerate(WORDS)]
    (tmp_path / "x.jsonl").write_text("\n".join(map(json.dumps, lines)))
    (tmp_path / "my_reward.py").write_text(REWARDS)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_function_grades_with_the_whole_record(folder):
    env = make_env("tasks", dataset_path="x.jsonl", reward="my_reward.py:score")
    check_env(env)
    observations, info = env.reset(seed=0, options={"task": 2})
    assert observations == {"solver": "Problem: Say bee."} and info["task"] == "x:2"
    result = env.step({"solver": "a bee"})
    assert result.terminated and result.info["outcome"] == 1.0
    assert result.info["evidence"]["solver"].rules.score == 10.0
    assert not env.unwrapped.bounded  # a user's function may hang: it runs in a worker


def test_from_python_with_a_function_and_any_workflow(folder):
    env = RewardEnv("x.jsonl", lambda text, record: record["n"] / 10, team=Team.of(tuple("abc")), workflow="summary")
    assert env.num_tasks == 10 and env.agents == ("a", "b", "c") and env.key("x\n The Fox \n") == "the fox"


def test_a_function_that_fails_is_named(folder):
    for name, words in (
        ("broken", "KeyError.*my_reward.py, line 6"),
        ("nothing", "returned NoneType None; expected a finite"),
    ):
        env = make_env("tasks", dataset_path="x.jsonl", reward=f"my_reward.py:{name}")
        env.reset(seed=0)
        with pytest.raises(EnvError, match=words):
            env.step({"solver": "x"})


def test_the_settings_build_training_and_held_out_tasks(folder):
    built = build({"dataset_path": "x.jsonl", "reward": "my_reward.py:score", "train_limit": 4, "seed": 3})
    assert built.train_env.num_tasks == 4 and built.eval_env.num_tasks == 1 and "held out" in built.notes[0]
    held_out = built.eval_env.tasks[0].id
    assert held_out == "x:9" and held_out not in {task.id for task in built.train_env.tasks}


def test_subsets_are_seeded_and_bounded():
    assert subset(range(100), None, 1) == range(100) and subset(range(9), 9, 1) == list(range(9))
    assert subset(range(100), 5, 1) == subset(range(100), 5, 1) != subset(range(100), 5, 2)
    for limit in (0, 101):
        with pytest.raises(ConfigError, match=rf"train_limit is {limit}; choose a value in \[1, 100\]"):
            subset(range(100), limit, 1)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--reward", "my_reward.py:score"], "give --dataset_path"),
        (["--reward", "my_reward.py:scroe", "--dataset_path", "x.jsonl"], "did you mean 'score'"),
        (["--reward", "none.py:f", "--dataset_path", "x.jsonl"], "there is no file none.py"),
        (["--reward=my_reward.py:score", "--dataset_path", "y.jsonl"], "y.jsonl does not exist"),
        (["--reward", "my_reward.py:score", "--dataset_path", "x.jsonl", "--workflow", "vote"], "at least two agents"),
    ],
)
def test_what_is_wrong_is_said_in_one_sentence(folder, capsys, words, message):
    assert main(words) == 2
    assert message in (said := capsys.readouterr().err) and said.count("\n") == 1


def test_verls_records_are_read(tmp_path):
    record = {
        "data_source": "x",
        "prompt": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is 3 + 4?"}],
        "reward_model": {"style": "rule", "ground_truth": "7"},
        "extra_info": {"index": 1, "answer": {"text": "8"}},
    }
    (tmp_path / "v.jsonl").write_text(json.dumps(record))
    (task,) = load_tasks(tmp_path / "v.jsonl")
    assert (task.problem, task.answer) == ("What is 3 + 4?", "7")
    (task,) = load_tasks(tmp_path / "v.jsonl", answer_field="extra_info.answer.text")
    assert task.answer == "8"
    with pytest.raises(DataError, match=r"has no field 'extra_info\.gold'"):
        load_tasks(tmp_path / "v.jsonl", answer_field="extra_info.gold")
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    parquet.write_table(arrow.Table.from_pylist([record]), tmp_path / "v.parquet")
    assert load_tasks(tmp_path / "v.parquet")[0].answer == "7"


@pytest.mark.slow
def test_a_run_with_a_function_learns_stops_and_goes_on_by_itself(folder, capsys):
    words = ["--dataset_path", "x.jsonl", "--reward", "my_reward.py:score", "--iterations", "1", "--run_dir", "run"]
    small = ["--n_rollout_threads", "4", "--max_new_tokens", "4", "--eval_episodes", "0", "--lora_rank", "2"]
    assert main([*words, *small]) == 0
    assert main(["--load_path", "run", "--iterations", "2"]) == 0
    capsys.readouterr()
    (folder / "my_reward.py").write_text(REWARDS + "# changed\n")
    assert main(["--load_path", "run", "--iterations", "3"]) == 2
    assert "the content of reward" in capsys.readouterr().err
