"""Mixtures of environments and data sets, passes, generated arithmetic, prepared data, and numbers of evaluations."""

from __future__ import annotations

import errno
import json
import math
import os
import re
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest

from mafrt.config.setting_synonyms import synonym
from mafrt.config.team import Team
from mafrt.config.train_config import TrainConfig
from mafrt.core.errors import ConfigError, DataError
from mafrt.core.types import Episode, StepResult
from mafrt.environment.base import Env
from mafrt.environment.checker import check_env
from mafrt.environment.registry import make_env
from mafrt.environment.session import Session
from mafrt.envs.games import PlanPath, Referential
from mafrt.envs.math import MathEnv, Task, arithmetic
from mafrt.envs.math.build import build
from mafrt.envs.math.tasks import load_tasks
from mafrt.envs.mixed import MixedTasks, is_mixture, named_sets, repeated, weights_of
from mafrt.envs.tools.calculator import compute
from mafrt.rollout.player import RunningEpisode
from mafrt.runners.epochs import with_epochs
from mafrt.runners.evaluation import Evaluation
from mafrt.runners.evaluation_summary import agent_scores, answers_of, episode_lines, majority, numbers
from mafrt.runners.identity import training_data
from mafrt.scripts import evaluate, export, prepare_data, train


def math_env(*answers: int) -> MathEnv:
    tasks = [Task(f"t:{a}", f"Say {a}.", str(a)) for a in answers]
    return MathEnv(tasks=tasks, team=Team.of(("a",)))


def test_a_pass_of_a_mixture_has_every_task_and_the_weights():
    assert repeated({"a": 2, "b": 4}, None) == [("a", 0), ("a", 1), ("b", 0), ("b", 1), ("b", 2), ("b", 3)]
    # 2 of a for each of b: b has 3 tasks, so a needs 6 turns of its 2 tasks.
    assert [name for name, _ in repeated({"a": 2, "b": 3}, {"a": 2.0, "b": 1.0})] == ["a"] * 6 + ["b"] * 3
    env = MixedTasks({"few": math_env(1), "many": math_env(2, 3, 4)}, {"few": 1.0, "many": 1.0})
    assert env.num_tasks == 6
    session = Session(env)
    _, info = session.reset(seed=0, options={"task": 5})
    assert info["task"] == "many/t:4" and info["set"] == "many"
    result = session.step({"a": "\\boxed{4}"})
    assert result.terminated and result.info["measures"]["score/many"] == 1.0
    # The first tasks, all that a short evaluation plays, are of both.
    assert [name for name, _ in env.plan] == ["few", "many"] * 3
    with pytest.raises(ConfigError, match="played by scout, guesser"):
        MixedTasks({"m": math_env(1), "game": Referential()})


def test_environments_without_tasks_mix_by_weight():
    env = MixedTasks({"two": Referential(2, 2), "four": Referential()}, {"two": 3.0})
    names = [Session(env).reset(seed=seed)[1]["set"] for seed in range(40)]
    assert env.num_tasks is None and 22 <= names.count("two") <= 38
    check_env(MixedTasks({"two": Referential(2, 2), "four": Referential()}))


@pytest.mark.parametrize("weight", [0, -1, math.nan, math.inf, 10**400, "2", None])
def test_a_weight_is_a_number_above_0(weight):
    with pytest.raises(ConfigError, match="the weight of two is"):
        MixedTasks({"two": Referential(2, 2)}, {"two": weight})


@pytest.mark.parametrize("text", ["a,", "a@0", "a@x", "x/a.json,y/a.json"])
def test_wrong_mixtures_are_refused(text):
    with pytest.raises(ConfigError):
        named_sets(text)


def test_named_sets_and_weights():
    sets = named_sets("data/a.jsonl@2, arithmetic:test:high=9")
    assert list(sets) == ["a", "arithmetic_test_high_9"] and weights_of(sets) == {
        "a": 2.0,
        "arithmetic_test_high_9": 1.0,
    }
    assert weights_of(named_sets("a,b")) is None


def test_several_training_and_evaluation_sets(tmp_path):
    for name, answer in (("aime", 1), ("amc", 2)):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"problem": f"{name}?", "answer": answer}))
    both = f"{tmp_path}/aime.jsonl,{tmp_path}/amc.jsonl"
    built = build({"dataset_path": both.replace(",", "@3,"), "eval_dataset_path": both})
    assert [task.answer for task in built.train_env.tasks] == ["1", "1", "1", "2"]
    assert isinstance(built.eval_env, MixedTasks) and list(built.eval_env.envs) == ["aime", "amc"]


def test_mixed_environments_from_the_command_line(capsys):
    from mafrt.scripts.cli.command import Settings

    settings: Settings = train.COMMAND.read(["--env", "referential@2,sudoku"])
    with pytest.raises(ConfigError, match="give one team"):
        train.prepare(settings)
    settings = train.COMMAND.read(["--env", "math@2,tasks", "--env_kwargs", '{"maths": {}}'])
    with pytest.raises(ConfigError, match="its keys are math, tasks"):
        train.prepare(settings)
    prepared = train.prepare(train.COMMAND.read(["--env", "math,code", "--profile_path", "profiles/code_single.json"]))
    assert list(prepared.env.unwrapped.envs) == ["math", "code"]
    # Evaluations play what each of them holds out.
    trained, held_out = prepared.env.unwrapped.envs, prepared.eval_env.unwrapped.envs
    assert held_out["math"].tasks[0].id.startswith("word_problems_validation")
    assert not {task.statement for task in held_out["code"].tasks} & {task.statement for task in trained["code"].tasks}


@pytest.mark.parametrize("text, names", [
    ("grpc://a:1,b:2/math", ["grpc://a:1,b:2/math"]),
    ("grpc://@servers.txt/math", ["grpc://@servers.txt/math"]),
    ("grpc://@lists/servers.txt/math", ["grpc://@lists/servers.txt/math"]),
    ("grpc://[::1]:1,[::1]:2", ["grpc://[::1]:1,[::1]:2"]),
    ("grpc://a:1,b:2,c:3", ["grpc://a:1,b:2,c:3"]),
    ("grpc://a:1", ["grpc://a:1"]),
    ("my_game:MyGame", ["my_game:MyGame"]),
])  # fmt: skip
def test_several_servers_of_one_environment_are_no_mixture(text, names):
    assert not is_mixture(text)
    assert [source for source, _ in named_sets(text).values()] == names


def test_servers_in_a_mixture():
    assert is_mixture("math@2,code") and is_mixture("math@2") and is_mixture("a,b")
    found = list(named_sets("grpc://a:1,b:2/math@2,code,grpc://@f/search@0.5").values())
    assert found == [("grpc://a:1,b:2/math", 2.0), ("code", None), ("grpc://@f/search", 0.5)]
    for wrong in ("math@", "math@two", "math,,code", "grpc://a:1,b:2/math@-1,code"):
        with pytest.raises(ConfigError, match="expected NAME"):
            named_sets(wrong)


AMC = [{"problem": f"{n}+1", "answer": str(n + 1)} for n in range(6)]


@pytest.mark.parametrize("words, error", [
    (["--env", "code", "--dataset_path", "missing.jsonl"], "missing.jsonl"),
    (["--env", "search", "--dataset_path", "missing.jsonl"], "missing.jsonl"),
    (["--env", "dsbench", "--dataset_path", "missing.jsonl"], "missing.jsonl"),
    (["--env", "math", "--dataset_path", "missing.jsonl"], "missing.jsonl"),
    (["--env", "sudoku", "--dataset_path", "some.jsonl"], "takes no dataset_path"),
    (["--env", "sudoku", "--workflow", "debate"], "takes no workflow"),
    (["--env", "sudoku", "--problem_field", "question"], "takes no problem_field"),
    (["--env_kwargs", "empty=3"], "without --env"),
    (["--train_limit", "5"], "train_limit"),
    (["--baseline_lr", "0.1"], "without --baselines"),
    (["--overwrite"], "without --output"),
    (["--vllm_timeout", "3"], "without --engine vllm"),
])  # fmt: skip
def test_an_evaluation_refuses_what_it_would_not_use(words, error, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(evaluate, "load_base", lambda *_: pytest.fail("the model was loaded"))
    assert evaluate.main(words) == 2
    assert error in capsys.readouterr().err


@pytest.mark.slow
def test_a_named_environment_is_evaluated_on_the_named_data_or_held_out_tasks(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("amc.json").write_text(json.dumps(AMC))
    Path("aime.json").write_text(json.dumps([{**one, "problem": f"{one['problem']}+0"} for one in AMC[:3]]))

    def tasks(*words: str):
        return evaluate.environment(evaluate.COMMAND.read(words), None)[0].unwrapped

    played = tasks("--env", "math", "--dataset_path", "amc.json").tasks
    assert [task.problem for task in played] == [one["problem"] for one in AMC]
    for name in ("math", "code", "search", "dsbench"):
        held_out, trained = tasks("--env", name), make_env(name).unwrapped
        own, others = ({t.id for t in getattr(env, "questions", None) or env.tasks} for env in (held_out, trained))
        assert not own & others
    both = tasks("--env", "math", "--dataset_path", "amc.json,aime.json")
    # A short evaluation plays both sets.
    assert {name for name, _ in both.plan[:3]} == {"amc", "aime"}


def test_epochs_are_passes_over_the_tasks():
    config = TrainConfig.of(epochs=3, n_rollout_threads=8, n_samples=4)
    # 5 tasks, 2 of which are drawn in an iteration: 15 draws in 8 iterations.
    assert with_epochs(config, math_env(1, 2, 3, 4, 5)).run.iterations == 8
    assert with_epochs(TrainConfig.of(iterations=7), math_env(1)).run.iterations == 7
    with pytest.raises(ConfigError, match="no numbered tasks"):
        with_epochs(config, PlanPath())
    assert synonym("num_train_epochs").flag == "epochs"


@pytest.mark.slow
def test_new_data_begin_a_pass_of_their_own(tmp_path, caplog):
    """A run that goes on with other tasks, in its folder or in another one, plays each of them once per pass."""
    from helpers_models import tiny_base
    from toy import settings

    from mafrt.runners.identity import Provenance
    from mafrt.runners.on_policy import OnPolicy
    from mafrt.storage.load_path import resolve

    def run(folder, env, iterations=None, load=None, **changes):
        sized = {"iterations": iterations} if iterations else {}
        config = settings(
            n_rollout_threads=2, eval_episodes=0, ppo_epoch=1, num_mini_batch=1, log_episodes=True,
            **{"iterations": 0, **sized, **changes},
        )  # fmt: skip
        runner = OnPolicy(
            env, env.team, tiny_base(), config, run_dir=folder,
            provenance=Provenance(resolve(load) if load else None, accept_changes=True),
        )  # fmt: skip
        runner.run()
        lines = [json.loads(line) for line in (folder / "episodes.jsonl").read_text().splitlines()]
        return [(line["iteration"], line["info"]["task"]) for line in lines]

    first, second = math_env(*range(6)), math_env(*range(10, 16))
    whole = [f"t:{n}" for n in range(6)]
    played = run(tmp_path / "a", first, 2)  # 4 of the 6 tasks
    assert len({task for _, task in played}) == 4
    for folder in (tmp_path / "b", tmp_path / "a"):
        played = run(folder, second, 5, load=tmp_path / "a")
        assert sorted(task for n, task in played if n > 2) == sorted(f"t:{n}" for n in range(10, 16))
    assert "a pass over the new ones begins with iteration 3" in caplog.text
    # It is remembered: the next start goes on in the second pass.
    assert {task for n, task in run(tmp_path / "a", second, 8, load=tmp_path / "a") if n > 5} == {
        f"t:{n}" for n in range(10, 16)
    }
    # The same tasks under another name, or read again, go on where they were.
    again = run(tmp_path / "b", math_env(*range(10, 16)), 6, load=tmp_path / "b")
    assert len({task for n, task in again if n == 6}) == 2
    # Passes are counted from there too.
    back = run(tmp_path / "c", first, load=tmp_path / "b", epochs=1)
    assert sorted(task for n, task in back if n > 6) == whole


def test_generated_arithmetic_is_right_distinct_and_split():
    train_tasks = load_tasks("arithmetic:train:kinds=+-/:low=1:high=30:count=300:steps=2")
    test = load_tasks("arithmetic:test:kinds=+-/:low=1:high=30:count=60:steps=2")
    chosen_by = load_tasks("arithmetic:validation:kinds=+-/:low=1:high=30:count=60:steps=2")
    assert len({task.problem for task in (*train_tasks, *chosen_by, *test)}) == 420
    for task in train_tasks[:50]:
        expression = task.problem.removeprefix("What is ").removesuffix("?")
        assert compute(expression) == float(task.answer)
    assert arithmetic.parse("arithmetic:").count == 1000
    for source, words in (
        ("arithmetic:dev", "choose train, validation, test"),
        ("arithmetic:train:kind=+", "did you mean 'kinds'"),
        ("arithmetic:train:kinds=+y", "choose some of .* x .equations"),
        ("arithmetic:train:kinds=x:claims=1", "leave x and < out"),
        ("arithmetic:train:high=x", "expected a whole number"),
        ("arithmetic:train:low=9:high=2", "low < high"),
        ("arithmetic:train:high=3:count=500", "different problems at most"),
    ):
        with pytest.raises(DataError, match=words):
            load_tasks(source)


@pytest.mark.parametrize("steps", [1, 2])
def test_generated_algebra_is_solved_by_its_answers(steps):
    def holds(side: str, x: int) -> int:
        """The value of `3x - 4`."""
        term, _, rest = side.partition(" ")
        value = int(term.removesuffix("x") or 1) * x if "x" in term else int(term)
        return value + int(rest.replace(" ", "") or 0)

    source = f"kinds=x<:low=0:high=20:count=200:steps={steps}"
    tasks = load_tasks(f"arithmetic:train:{source}")
    assert not {task.problem for task in tasks} & {task.problem for task in load_tasks(f"arithmetic:test:{source}")}
    kinds = set()
    for task in tasks:
        text = task.problem.removeprefix("Solve ").removesuffix(" for x.")
        left, relation, right = re.split(r" ([=<>]) ", text)
        kinds.add(relation)
        if relation == "=":
            assert holds(left, int(task.answer)) == holds(right, int(task.answer))
            continue
        solved, bound = task.answer.split()[1:]
        inside = int(bound) + (1 if solved == ">" else -1)
        for x, right_x in ((inside, True), (int(bound), False), (2 * int(bound) - inside, False)):
            a, b = holds(left, x), holds(right, x)
            assert (a < b if relation == "<" else a > b) is right_x, (task, x)
    assert kinds == {"=", "<", ">"}
    mixed = [task.problem for task in load_tasks("arithmetic:train:kinds=+x:count=40")]
    assert {problem.partition(" ")[0] for problem in mixed} == {"Solve", "What"}


def test_sets_without_algebra_are_as_they_were():
    first = [task.problem for task in load_tasks("arithmetic:train:count=3")]
    assert first == ["What is 1 + 35?", "What is 42 + 9?", "What is 45 - 40?"]


def test_data_sets_are_prepared_from_files(tmp_path, capsys):
    template = (
        "Solve the following math problem step by step. The last line is Answer.\n\nWhat is {n}?\n\nRemember to put"
    )
    records = [
        {
            "prompt": [
                {"role": "user", "content": template.format(n=n % 4) + ' your answer on its own line after "Answer:".'}
            ],
            "reward_model": {"ground_truth": str(n % 4)},
        }
        for n in range(12)
    ]
    (tmp_path / "dapo.jsonl").write_text("\n".join(map(json.dumps, records)))
    out = tmp_path / "out"
    words = ["dapo_math", "--input", str(tmp_path / "dapo.jsonl"), "--output", str(out), "--test_size", "1"]
    assert prepare_data.main(words) == 0
    kept = [json.loads(line) for name in ("train", "test") for line in (out / f"{name}.jsonl").read_text().splitlines()]
    assert sorted(record["problem"] for record in kept) == [f"What is {n}?" for n in range(4)]
    hotpot = [{"question": f"q{n}", "answer": "a", "context": [["T", ["Same text."]]]} for n in range(3)]
    (tmp_path / "h.json").write_text(json.dumps(hotpot))
    words = ["hotpot", "--input", str(tmp_path / "h.json"), "--output", str(out), "--test_size", "1"]
    assert prepare_data.main(words) == 0
    assert len((out / "corpus.jsonl").read_text().splitlines()) == 1
    assert json.loads((out / "train.jsonl").read_text().splitlines()[0])["golden_answers"] == ["a"]
    assert prepare_data.main(["nq"]) == 2 and "give the data set" in capsys.readouterr().err
    assert prepare_data.main([*words[:-1], "9"]) == 2


@pytest.mark.parametrize("full_at", [0, 1])
def test_a_full_disk_leaves_the_earlier_parts_of_prepared_data_together(tmp_path, monkeypatch, capsys, full_at):
    out, words = tmp_path / "out", ["dapo_math", "--input", str(tmp_path / "d.jsonl"), "--test_size", "1"]
    words += ["--output", str(out)]
    (tmp_path / "d.jsonl").write_text("".join(f'{{"problem": "{n}", "answer": "{n}"}}\n' for n in range(4)))
    assert prepare_data.main(words) == 0
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    assert before.keys() == {"train.jsonl", "test.jsonl"}
    calls, fsync = [], os.fsync

    def full(file):
        calls.append(file)
        if len(calls) > 2 * full_at:  # of a file and its folder
            raise OSError(errno.ENOSPC, "No space left on device")
        fsync(file)

    monkeypatch.setattr(os, "fsync", full)
    assert prepare_data.main([*words, "--seed", "7"]) == 2
    assert "No space left" in capsys.readouterr().err
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before
    monkeypatch.undo()
    assert prepare_data.main([*words, "--seed", "7"]) == 0
    assert {path.name: path.read_bytes() for path in out.iterdir()} != before


@pytest.mark.parametrize(
    "suffix",
    [
        " Let's think step by step and output the final answer within \\boxed{}.",
        "\nLet's think step by step and output the final answer within \\boxed{}",
        "\n\nPlease reason step by step, and put your final answer within \\boxed{}.",
    ],
)
def test_the_suffix_of_a_prepared_problem_is_taken_off(tmp_path, suffix):
    path = tmp_path / "dapo.jsonl"
    path.write_text(json.dumps({"problem": f"What is 2?{suffix}", "answer": "2"}))
    assert prepare_data.dapo_math([str(path)])[0] == [{"problem": "What is 2?", "answer": "2"}]
    path.write_text(json.dumps({"problem": "Let's think step by step: what is 2?", "answer": "2"}))
    assert prepare_data.dapo_math([str(path)])[0][0]["problem"] == "Let's think step by step: what is 2?"


def episode(group: str, sample: int, key: str | None, outcome: float, kind: str = "sampled") -> Episode:
    answers = {"actor": {"key": key, "score": outcome}}
    return Episode(f"{kind}-{group}-{sample}", group, [], outcome, {"answers": answers})


def test_majority_ties_agents_and_intervals():
    episodes = [
        # Task 1: 7 twice and right, 8 once: 1. Task 2: 3 (right) and 4 tie: their mean, 1/2. Task 3: nothing is said.
        *(episode("1", n, key, float(key == "7")) for n, key in enumerate(("7", "8", "7"))),
        *(episode("2", n, key, float(key == "3")) for n, key in enumerate(("3", "4", None))),
        *(episode("3", n, None, 0.0) for n in range(3)),
        episode("1", 0, "8", 0.0, "greedy"),
    ]
    most = majority(episodes)
    assert most.number.value == pytest.approx(0.5) and most.ties == pytest.approx(1 / 3)
    assert agent_scores(episodes) == {"actor": [pytest.approx(2 / 3), pytest.approx(1 / 3), 0.0]}
    assert majority([Episode("sampled-1", "1")]) is None
    scores = {str(n): (1.0, 0.0) for n in range(9)}
    found = numbers(Evaluation(scores, {}, 2, 0, {}, episodes))
    assert found["avg@2"].value == 0.5 and found["avg@2"].bounds == (0.5, 0.5) and found["pass@2"].bounds[0] < 1.0
    assert str(found["pass@2"]).startswith("1.000  (0.")
    assert episode_lines(episodes[:1], {})[0]["answers"]["actor"]["key"] == "7"


@pytest.mark.slow
def test_evaluate_prints_and_writes_everything_that_was_said(tmp_path, capsys):
    out = tmp_path / "numbers.json"
    words = [
        "--dataset_path",
        "arithmetic:test:count=3,arithmetic:test:count=2:high=9",
        "--k",
        "2",
        "--max_new_tokens",
        "8",
    ]
    assert evaluate.main([*words, "--swap", "--output", str(out)]) == 0
    said = capsys.readouterr().out
    for row in (
        "avg@2",
        "majority@2",
        "agent/actor",
        "measure/score/arithmetic_test_count_2_high_9",
        "reasoner <-> actor",
    ):
        assert row in said
    content = json.loads(out.read_text())
    assert len(content["episodes"]) == 15 and content["swapped"].keys() == {"reasoner <-> actor"}
    turn = content["episodes"][0]["turns"][0]
    assert turn["agent"] == "reasoner" and turn["observation"].startswith("Problem: What is") and turn["role_prompt"]
    assert evaluate.main(["--profile_path", "profiles/code_single.json", "--swap"]) == 2
    assert "two agents with different adapters" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.ci
def test_the_best_adapters_of_a_run_bring_its_base_team_and_environment(tmp_path, capsys):
    run, out = tmp_path / "run", tmp_path / "numbers.json"
    words = ["--env", "sudoku", "--env_kwargs", "brief=true", "--model_name_or_path", "games-base", "--lora_rank", "2"]
    words += ["--n_rollout_threads", "2", "--iterations", "1", "--max_new_tokens", "2", "--eval_episodes", "2"]
    words += ["--eval_samples", "1", "--eval_interval", "1", "--algorithm", "reinforce_pp", "--threads", "1"]
    assert train.main([*words, "--run_dir", str(run)]) == 0
    assert evaluate.main(["--load_path", str(run / "best"), "--tasks", "2", "--k", "1", "--output", str(out)]) == 0
    settings = json.loads(out.read_text())["settings"]
    assert settings["model_name_or_path"] == "games-base" and settings["max_new_tokens"] == 2
    iteration = json.loads((run / "best/best.json").read_text())["iteration"]
    assert export.main([str(run / "best"), "--output", str(tmp_path / "out")]) == 0
    assert f"The team after iteration {iteration} is in" in capsys.readouterr().out
    ours, theirs = (path / "filler/adapter_model.safetensors" for path in (run / "best", tmp_path / "out"))
    assert ours.read_bytes() == theirs.read_bytes()
    score = (run / "best/best.json").read_text()
    for broken in ("{", "[]", '{"iteration": "1"}'):
        (run / "best/best.json").write_text(broken)
        assert evaluate.main(["--load_path", str(run / "best"), "--tasks", "2"]) == 2
        assert "best.json" in capsys.readouterr().err
    (run / "best/best.json").write_text(score)
    # Without its run it is a folder of adapters, of a team that has to be named.
    (run / "best").rename(tmp_path / "best")
    assert evaluate.main(["--load_path", str(tmp_path / "best"), "--tasks", "2"]) == 2
    assert "holds no adapter 'reasoner'" in capsys.readouterr().err


class Holding(Env):
    """An environment of a user's own, whose tasks are of any kind."""

    agents = ("a",)

    def __init__(self, tasks=None, path=None):
        self.tasks, self.num_tasks = tasks, len(tasks or "four")


@dataclass
class Kept:
    prompt: str


def test_other_tasks_are_known_wherever_they_are_held(tmp_path):
    def of(env, **args):
        return training_data(env, args)

    file = tmp_path / "tasks.txt"
    file.write_text("a")
    by_file = of(Holding(path=str(file)))
    file.write_text("b")
    assert of(Holding(path=str(file))) != by_file
    for one, other in (
        (["x", "y"], ["x", "z"]),
        ([{"q": 1}], [{"q": 2}]),
        ([(1, [2])], [(1, [3])]),
        ([Kept("x")], [Kept("y")]),
    ):
        assert of(Holding(one)) == of(Holding(list(one))) != of(Holding(other))
    assert of(Holding([object()])) == of(Holding([object()]))  # nothing is known of them
    few, many = math_env(1, 2), math_env(3, 4)
    mixture = of(MixedTasks({"m": few, "n": many}), dataset_path=["a", "b"])
    assert of(MixedTasks({"m": math_env(1, 2), "n": many}), dataset_path=["c", "d"]) == mixture  # moved files
    for envs in ({"m": many, "n": few}, {"m": few, "n": math_env(3, 5)}, {"m": few, "n": math_env(3, 4, 5)}):
        assert of(MixedTasks(envs)) != mixture


@pytest.mark.parametrize("answers", ["a, b", 7, [1, 2], {"a": "yes"}, {"b": {"key": [], "score": 1}}, None])
def test_answers_of_an_environment_s_own_form_are_not_taken_for_ours(answers):
    live = SimpleNamespace(episode=Episode("0", "0", []), last_turn={}, env_step=0)
    RunningEpisode.take(live, StepResult({}, {}, True, False, {"answers": answers, "outcome": 1.0}))
    assert set(answers_of(live.episode)) <= {"b"} and live.episode.outcome == 1.0
    assert (majority([live.episode]) is None) != isinstance(answers, dict)
