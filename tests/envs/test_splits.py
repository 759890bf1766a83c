"""Three splits by construction: learnt from, chosen by, and reported only; and who refuses what."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace
from pathlib import Path

import pytest
from toy import Digits, make, settings

from mafrt.config.team import Team
from mafrt.core.errors import ConfigError
from mafrt.environment.registry import held_out_of, make_env
from mafrt.envs.construction import SPLITS, named_split, part_of
from mafrt.envs.math import build, load_tasks
from mafrt.envs.math.contamination import find_leaks
from mafrt.envs.math.tasks import Task
from mafrt.envs.mixed import MixedTasks
from mafrt.runners.checks import check_evaluated
from mafrt.scripts import evaluate, train, train_math

pytestmark = pytest.mark.takes(slow=7)

ROOT = Path(__file__).parents[2]
OWN = {
    "math": {},
    "code": {"sandbox": "degraded"},
    "search": {},
    "referential": {},
    "sudoku": {},
    "plan_path": {},
    "sokoban": {},
    "haggle": {},
    "tic_tac_toe": {},
    "propose_solve": {},
    "debate": {},
    "tool": {},
}
"""Shipped environments that make or hold their own tasks, and that need no package."""


def content(env) -> set:
    """What the tasks are, as far as it is told: texts, or the keys of drawn instances."""
    bare = env.unwrapped
    for name in ("tasks", "questions"):
        if hasattr(bare, name):
            return {getattr(t, "problem", None) or getattr(t, "statement", None) or t.text for t in getattr(bare, name)}
    keys = set()
    for seed in range(60):
        bare.rng.seed(seed)
        keys.add(bare.reset()[1]["task"].partition("|")[0])
    return keys


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(OWN))
def test_every_shipped_environment_has_three_splits_that_share_nothing(name):
    try:
        env = make_env(name, **OWN[name])
    except Exception as error:
        if "sandbox" not in str(error):
            raise
        pytest.skip(str(error))
    parts = {"train": env} | {s: make_env(name, **{**OWN[name], **held_out_of(env, s)}) for s in SPLITS[1:]}
    assert {split: part.split for split, part in parts.items()} == {split: split for split in SPLITS}
    found = {split: content(part) for split, part in parts.items()}
    for one, other in itertools.combinations(SPLITS, 2):
        assert found[one] and found[other] and not found[one] & found[other], (one, other)


def test_validation_problems_have_the_numbers_and_answer_of_no_other():
    train_tasks, chosen_by, test = (load_tasks(split=split) for split in SPLITS)
    leaks = find_leaks([*train_tasks, *test], chosen_by)
    assert (leaks.evaluation, len(leaks.shared), len(leaks.same_numbers)) == (256, 0, 0)
    # The test was made before this was counted.
    known = find_leaks(train_tasks, test)
    assert (len(known.shared), len(known.same_numbers)) == (0, 135)
    assert known.calculations.startswith("135 of 256 evaluation problems (52.7%) have the numbers and the answer")


def test_shared_calculations_by_hand():
    def tasks(*pairs):
        return [Task(str(n), problem, answer) for n, (problem, answer) in enumerate(pairs)]

    leaks = find_leaks(
        tasks(("Ann has 3 pens and buys 4.", "7"), ("5 times 6?", "30"), ("How many legs have 2 dogs?", "8")),
        tasks(
            ("Ben had 3 nuts, now 4 more.", "7"),  # the same numbers and answer
            ("Ben had 4 nuts and ate 3.", "1"),  # another answer
            ("5  TIMES 6?", "30"),  # the same text is counted there
            ("What weigh 2 cats?", "8"),  # one number tells nothing apart
            ("5 boxes of 1,000?", "5000"),
        ),
    )
    assert [pair[0] for pair in leaks.same_numbers] == ["0"] and [pair[0] for pair in leaks.shared] == ["2"]


def test_generated_problems_that_chose_the_weights_have_a_test_of_the_same_kind():
    given = {"dataset_path": "arithmetic:train:count=20", "eval_dataset_path": "stories:validation"}
    assert build.build(given).eval_env.split == "validation"
    test = build.build({**given, "eval_split": "test"}).eval_env
    assert test.split == "test" and test.tasks[0].id == "stories:test:0"


def test_the_note_counts_calculations_where_the_test_is_played():
    notes = build.build({"eval_split": "test"}).notes
    assert any("135 of 256 evaluation problems" in note for note in notes)
    assert not build.build({}).notes


@pytest.mark.parametrize(
    ("source", "split"),
    [
        ("stories:test", "test"),
        ("stories:validation", "validation"),
        ("arithmetic:test:low=3", "test"),
        ("stories:validation,arithmetic:test@2", "test"),
        ("openai/gsm8k:main:test", "test"),
        ("openai/gsm8k", None),
        ("data/test.jsonl", None),
        ("new", None),
    ],
)
def test_the_split_that_a_source_names(source, split):
    assert named_split(source) == split


def test_what_is_held_out_of_a_file_is_halved():
    assert [list(part_of(range(5), split)) for split in SPLITS[1:]] == [[0, 1], [2, 3, 4]]
    assert [list(part_of([7], split)) for split in SPLITS[1:]] == [[7], [7]]


# ------------------------------------------------------------------------------------------------ who refuses what


class HeldOut(Digits):
    split = "test"


def test_a_run_does_not_choose_by_the_test_split():
    run = settings(eval_episodes=4).run
    for env in (HeldOut(), MixedTasks({"a": Digits(), "b": HeldOut()})):
        with pytest.raises(ConfigError, match=r"test split.*keep_best.*--eval_split valid.*--no-keep_best") as said:
            check_evaluated(env, run)
        assert "\n" not in str(said.value)
        check_evaluated(env, replace(run, keep_best=False))
        check_evaluated(env, replace(run, eval_episodes=0))
    check_evaluated(Digits(), run)


@pytest.mark.slow
def test_the_runner_refuses_it_too_before_anything_is_played():
    from helpers_models import tiny_base

    from mafrt.runners.on_policy import OnPolicy

    def runner(**changes):
        env = Digits()
        return OnPolicy(env, Team.of(env.agents), tiny_base(), settings(**changes), eval_env=HeldOut())

    with pytest.raises(ConfigError, match="test split of HeldOut"):
        runner()
    runner(keep_best=False)
    make()  # an environment that does not know its split


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        (train_math, "--eval_split", "test"),
        (train_math, "--eval_dataset_path", "stories:test"),
        (train_math, "--dataset_path", "stories:train", "--eval_dataset_path", "stories:validation,arithmetic:test"),
        (train, "--env", "math", "--eval_split", "test"),
        (train, "--env", "haggle", "--eval_env_kwargs", "split=test"),
        (train, "--env", "math,code", "--eval_split", "test", "--profile_path", "profiles/code_single.json"),
    ],
    ids=lambda words: " ".join(words[1:]),
)
def test_the_command_line_refuses_it_before_a_model_is_loaded(words, capsys, tmp_path):
    command, *rest = words
    given = [*rest, "--model_name_or_path", str(tmp_path / "none"), "--run_dir", str(tmp_path / "run")]
    assert command.main(given) == 2
    said = capsys.readouterr().err
    assert "test split" in said and "--no-keep_best" in said
    assert command.main([*given, "--no-keep_best"]) == 2
    assert "test split" not in capsys.readouterr().err  # the model is what is missing now


def test_no_shipped_config_chooses_by_anything_but_validation():
    for path in sorted((ROOT / "configs").glob("*.yaml")):
        text = path.read_text()
        assert not re.search(r"split=|eval_split|_path: \S+:test", text), path.name


@pytest.mark.slow
def test_training_plays_validation_and_evaluate_plays_the_test(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    common = ["--model_name_or_path", "teaching-base", "--iterations", "1", "--eval_episodes", "2", "--lora_rank", "2"]
    common += ["--eval_samples", "1", "--n_rollout_threads", "2", "--max_new_tokens", "2"]
    for command, words in ((train, ["--env", "tic_tac_toe", "--algorithm", "reinforce_pp"]), (train_math, [])):
        run = tmp_path / command.__name__
        assert command.main([*words, *common, "--run_dir", str(run)]) == 0
        read, loaded = evaluate._read(["--load_path", str(run)])
        env, _ = evaluate.environment(read, loaded)
        assert env.unwrapped.split == "test"
        record = (run / "run.json").read_text()
        assert '"split": "test"' not in record
        if command is train:
            assert '"split": "validation"' in record and env.unwrapped.opponent == "random"
