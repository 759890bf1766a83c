"""Tasks of reasoning-gym: its own scores, splits that share nothing, and answers that try to act."""

from __future__ import annotations

import signal

import pytest
from helpers_extras import need

import mafrt
from mafrt.core.bounded_worker import OutOfTime
from mafrt.core.errors import ConfigError, EnvError
from mafrt.envs.reasoning_gym import _worker
from mafrt.envs.reasoning_gym.env import PROMPT, ReasoningGym, answer_of

pytestmark = pytest.mark.takes(slow=13)

need("reasoning_gym")
SMALL = {"size": 12, "held_out_size": 4}
ONE_DIGIT = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}


def scored(env, task, text):
    env.reset(seed=0, options={"task": task})
    return env.step({"solver": text}).info["outcome"]


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("leg_counting", {}),
        ("chain_sum", {"min_terms": 2, "max_terms": 2}),
        ("polynomial_multiplication", {}),  # by sympy.parse_expr
        ("simple_integration", {}),
        ("number_sorting", {}),  # by eval
        ("string_insertion", {}),
        ("bitwise_arithmetic", {}),
        ("composite", {"datasets": [{"name": "leg_counting"}, {"name": "chain_sum", "weight": 2}]}),
    ],
)
def test_the_reference_answer_is_worth_1_and_another_less(name, config):
    env = mafrt.make_env(f"reasoning_gym:{name}", config=config, **SMALL)
    assert env.agents == ("solver",) and env.num_tasks == 12
    for task in (0, 5):
        _, info = env.reset(seed=0, options={"task": task})
        assert scored(env, task, f"I think so.\n<answer>{info['answer']}</answer>") == 1.0
        assert scored(env, task, "<answer>no idea</answer>") < 0.5


def test_splits_share_no_task_and_those_of_test_are_everybodys():
    # Sums of two digits: many training tasks would be test tasks too.
    made = {
        (split, seed): [
            question
            for _, question, _ in ReasoningGym(
                "chain_sum", ONE_DIGIT, size=60, held_out_size=15, split=split, seed=seed
            ).tasks
        ]
        for split in ("train", "validation", "test")
        for seed in (0, 1)
    }
    assert made["test", 0] == made["test", 1] and made["validation", 0] == made["validation", 1]
    assert made["train", 0] != made["train", 1]
    held_out = set(made["test", 0]) | set(made["validation", 0])
    assert not held_out & set(made["train", 0]) and not set(made["test", 0]) & set(made["validation", 0])
    assert ReasoningGym.held_out == {"split": "test"}


def test_few_questions_are_shared_out_and_none_is_held_out_twice():
    # Some 200 sums: held-out tasks that came first took nine of ten of them, and training saw the others all the time.
    made = {
        split: [question for _, question, _ in ReasoningGym("chain_sum", level=0, size=2000, split=split).tasks]
        for split in ("train", "validation", "test")
    }
    assert len(made["train"]) == 2000 and len(set(made["train"])) > 100
    assert all(20 < len(set(made[split])) == len(made[split]) < 60 for split in ("validation", "test"))


def test_levels_are_mixed_in_equal_shares():
    env = ReasoningGym("chain_sum", level=[0, 3], size=20, held_out_size=4)
    lengths = [question.count("+") + question.count(" - ") for _, question, _ in env.tasks]
    assert max(lengths[::2]) < max(lengths[1::2])


@pytest.mark.parametrize(
    "answer",
    [
        "__import__('os').system('echo')",
        "().__class__.__base__.__subclasses__()",
        "[x for x in (1, 2)]",
        "(lambda: 1)()",
        "Symbol('x').__class__",
        "sympify('1+1')",
        "open('/etc/passwd')",
        "f'{1}'",
        "eval('1')",
        "print(1)",
        "{}.get(1)",
        "Symbol('x', real=True)",
        "sqrt('2')",
        "(x := 1)",
        "x",
    ],
)
def test_an_answer_is_never_more_than_arithmetic(answer):
    with pytest.raises((ValueError, SyntaxError)):
        _worker.arithmetic(answer)


def test_arithmetic_is_evaluated():
    assert _worker.arithmetic("[[1, 2], [-3, 4.5]]") == [[1, 2], [-3, 4.5]]
    assert _worker.arithmetic("0xff & 12 << 1") == 0xFF & 12 << 1
    with pytest.raises(ValueError, match="executed"):
        _worker.names_of_sympy("import os")


@pytest.mark.nightly  # five seconds of a core
@pytest.mark.slow
def test_an_answer_that_takes_for_ever_is_wrong_and_the_next_is_scored():
    env = mafrt.make_env("reasoning_gym:countdown", **SMALL)
    assert scored(env, 0, "<answer>9**9**9**9</answer>") < 0.5
    _, info = env.reset(seed=0, options={"task": 1})
    assert scored(env, 1, f"<answer>{info['answer']}</answer>") == 1.0


@pytest.mark.slow
def test_answers_that_try_to_act_are_wrong_and_harm_nobody(tmp_path):
    env = mafrt.make_env("reasoning_gym:n_queens", **SMALL)
    assert scored(env, 0, f"<answer>[open('{tmp_path}/x', 'w')]</answer>") < 0.5
    countdown = mafrt.make_env("reasoning_gym:countdown", **SMALL)
    for answer in (f"open('{tmp_path}/x', 'w')", "1" * 9000, "(" * 900, "\ud800", "x" * 10**6):
        assert scored(countdown, 0, f"<answer>{answer}</answer>") < 0.5
    assert not list(tmp_path.iterdir())
    _, info = env.reset(seed=0, options={"task": 1})
    assert scored(env, 1, f"<answer>{info['answer']}</answer>") == 1.0


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("<answer>4</answer> no, <answer> 5 </answer>", "5"),
        ("so \\boxed{7}", "7"),
        ("first\n\n 12 \n", "12"),
        ("", None),
        ("<answer>3", "<answer>3"),
        ("<answer></answer>", ""),
        ("in <answer> tags: <answer>5</answer>", "5"),
    ],
)
def test_where_the_answer_of_a_text_stands(text, answer):
    assert answer_of(text) == answer


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "settings", "words"),
    [
        ("leg_countin", {}, "did you mean 'leg_counting'"),
        ("leg_counting", {"config": {"min_animal": 3}}, "did you mean 'min_animals'"),
        ("leg_counting", {"config": {"min_animals": -1}}, "min_animals must be positive"),
        ("leg_counting", {"config": [1]}, "an object of names and values"),
        ("leg_counting", {"config": {"min_animals": {1}}}, "cannot be written as JSON"),
        ("leg_counting", {"level": "easy"}, "expected a whole number"),
        ("acre", {"level": 1}, "has no levels"),
        ("chain_sum", {"level": 99}, "the levels 0 to"),
        ("leg_counting", {"level": [0, 99]}, "the levels 0 to"),
        ("leg_counting", {"config": {"min_animals": "three"}}, "min_animals is 'three'; expected a whole number"),
        ("leg_counting", {"config": {"min_animals": [3]}}, r"min_animals is \[3\]; expected a whole number"),
        ("leg_counting", {"config": {"min_animals": 3.5}}, "min_animals is 3.5; expected a whole number"),
        ("leg_counting", {"config": {"min_animals": True}}, "min_animals is True; expected a whole number"),
        ("leg_counting", {"config": {"min_animals": None}}, "min_animals is None; expected a whole number"),
        ("leg_counting", {"level": []}, "expected a whole number from 0 on"),
        ("basic_arithmetic", {"config": {"operators": "+"}}, r"operators is '\+'; expected list\[str\]"),
        ("calendar_arithmetic", {"config": {"tasks": [1]}}, r"tasks is \[1\]; expected Optional\[list\[str\]\]"),
        ("simple_equations", {"config": {"operators_weights": 1}}, r"operators_weights is 1; expected list\[float\]"),
        ("caesar_cipher", {"config": {"delimiter": 5}}, "delimiter is 5; expected a text"),
        ("chain_sum", {"config": {"allow_negation": "no"}}, "allow_negation is 'no'; expected true or false"),
        ("composite", {}, "at least one dataset"),
        ("composite", {"config": {"datasets": "leg_counting"}}, "a list of {name, weight, config}"),
        ("composite", {"config": {"datasets": ["leg_counting"]}}, "a list of {name, weight, config}"),
        ("composite", {"config": {"datasets": [{"weight": 1}]}}, "a list of {name, weight, config}"),
        ("composite", {"config": {"datasets": [{"name": "aiw", "wieght": 1}]}}, "a list of {name, weight, config}"),
        ("composite", {"config": {"datasets": [{"name": "aiw", "config": 1}]}}, "a list of {name, weight, config}"),
        ("composite", {"config": {"datasets": [{"name": "aiw", "weight": "2"}]}}, "a weight is '2'"),
        ("composite", {"config": {"datasets": [{"name": "aiw", "weight": 0}]}}, "a weight is 0"),
        ("composite", {"config": {"datasets": [{"name": "leg_countin"}]}}, "did you mean 'leg_counting'"),
        ("composite", {"config": {"datasets": [{"name": 3}]}}, "has no data set 3"),
        ("composite", {"config": {"datasets": [{"name": "composite"}]}}, "holds no other composite"),
        (
            "composite",
            {"config": {"datasets": [{"name": "leg_counting", "config": {"min_animal": 3}}]}},
            "did you mean 'min_animals'",
        ),
        ("leg_counting", {"size": 0}, "size is 0"),
        ("leg_counting", {"split": "dev"}, "choose one of train, validation, test"),
        ("leg_counting", {"sizes": 2}, "did you mean 'size'"),
        (
            "count_bits",
            {"config": {"min_n": 1, "max_n": 1}},
            "train has none",
        ),
    ],
)
def test_bad_settings_are_one_sentence(name, settings, words):
    with pytest.raises((ConfigError, EnvError), match=words) as refused:
        mafrt.make_env(f"reasoning_gym:{name}", **settings)
    assert "\n" not in str(refused.value)


@pytest.mark.slow
@pytest.mark.parametrize("asked", [{"numbers": {"train": 1}, "split": "train", "shift": 0}, {"place": 0}])
@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("jugs", {"num_jugs": 6, "difficulty": 60}),
        ("maze", {"min_grid_size": 150, "max_grid_size": 200, "min_dist": 5000, "max_dist": 9000}),
    ],
)
def test_settings_that_make_a_task_exponential_are_told_soon(name, config, asked, monkeypatch):
    import reasoning_gym  # noqa: F401 - takes longer than a task may here

    def interrupt(signum, frame):  # as the process does
        raise OutOfTime

    monkeypatch.setattr(_worker, "TASK_CPU_S", 0.2)
    before = signal.signal(signal.SIGPROF, interrupt)
    try:
        said = _worker.prepare({"task": {"name": name, "config": config, "levels": []}, **asked})
    finally:
        signal.signal(signal.SIGPROF, before)
    assert said is not None and "no task within 0.2 s" in said["unusable"]
    assert signal.getitimer(signal.ITIMER_PROF)[0] == 0


def test_a_workflow_of_several_agents_and_the_rules_of_its_turns():
    team = mafrt.Team.of(("planner", "solver"))
    env = mafrt.make_env("reasoning_gym:leg_counting", team=team, horizon=2, **SMALL)
    _, info = env.reset(seed=0, options={"task": 0})
    assert env.step({"planner": "Count."}).observations.keys() == {"solver"}
    result = env.step({"solver": "<answer>none</answer>"})
    assert not result.terminated and result.info["outcome"] < 1.0
    env.step({"planner": "Count again."})
    result = env.step({"solver": f"<answer>{info['answer']}</answer>"})
    assert result.terminated and result.info["outcome"] == 1.0
    assert "<answer>" in PROMPT


@pytest.mark.slow
def test_it_trains(tmp_path):
    from mafrt.scripts import train

    words = ["--env", "reasoning_gym:leg_counting", "--env_kwargs", "size=16", "held_out_size=4", "--iterations", "1"]
    words += [
        "--n_rollout_threads",
        "8",
        "--eval_episodes",
        "4",
        "--max_new_tokens",
        "8",
        "--run_dir",
        str(tmp_path / "r"),
    ]
    assert train.main(words) == 0
