"""Programming problems: reading them, playing them through the real sandbox, and the shipped ones."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import pytest

from mafrt.config.team import Team
from mafrt.core.errors import ConfigError, DataError, EnvError
from mafrt.environment.checker import check_env
from mafrt.environment.python_tool import PythonTool
from mafrt.environment.registry import make_env
from mafrt.environment.session import session_of
from mafrt.envs.code import CodeEnv, Grader, load_tasks
from mafrt.envs.code.other_results import with_other_results
from mafrt.envs.code.state import NOTHING

pytestmark = pytest.mark.takes(fast=6, slow=13)

PROFILES = Path(__file__).parents[2] / "profiles"
SINGLE = Team.load(PROFILES / "code_single.json")
PAIR = Team.load(PROFILES / "coder_tester.json")
FENCE = "```"
MBPP = {
    "task_id": 2,
    "text": "Write a function to add two numbers.",
    "code": "def add(a, b):\n    return a + b",
    "test_list": ["assert add(1, 2) == 3", "assert add(-1, 1) == 0", "assert add('a', 'b') == 'ab'"],
    "test_setup_code": "",
}
HUMAN_EVAL = {
    "task_id": "HumanEval/0",
    "prompt": 'from typing import List\n\n\ndef total(xs: List[int]) -> int:\n    """Sum of xs."""\n',
    "entry_point": "total",
    "canonical_solution": "    return sum(xs)\n",
    "test": (
        "METADATA = {}\n\n\ndef check(candidate):\n"
        "    assert candidate([1, 2]) == 3\n"
        "    assert abs(candidate([1, 1]) - 2.0) < 1e-6\n"
        "    import random\n"
        "    for _ in range(20):\n"
        "        xs = [random.randint(0, 9) for _ in range(4)]\n"
        "        found = candidate(list(xs))\n"
        "        assert found == sum(xs)\n"
        "    try:\n"
        "        candidate(3)\n"
        "        assert False\n"
        "    except TypeError:\n"
        "        pass\n"
    ),
}
APPS_STDIN = {
    "problem_id": 7,
    "question": "Read two numbers and print their sum.",
    "input_output": json.dumps({"inputs": ["1 2\n", "3\n4\n"], "outputs": ["3\n", "7\n"]}),
    "solutions": json.dumps(["import sys\nprint(sum(map(int, sys.stdin.read().split())))"]),
}
APPS_CALL = {
    "problem_id": 8,
    "question": "Return both numbers, halved.",
    "starter_code": "class Solution:\n    def halves(self, a: int, b: int) -> list:\n",
    "input_output": {"fn_name": "halves", "inputs": [[2, 4], [1, 0]], "outputs": [[[1, 2]], [[0.5, 0]]]},
    "solutions": ["class Solution:\n    def halves(self, a, b):\n        return a / 2, b / 2"],
}


def program(code: str) -> str:
    return f"{FENCE}python\n{code}\n{FENCE}"


def write(path: Path, *records) -> Path:
    path.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in records), encoding="utf-8")
    return path


@pytest.fixture
def tasks(tmp_path):
    return load_tasks(write(tmp_path / "tasks.jsonl", MBPP, HUMAN_EVAL, APPS_STDIN, APPS_CALL))


# ---------------------------------------------------------------------------------------------------------- reading


def test_what_the_agents_are_shown(tasks):
    assert [task.id for task in tasks] == ["2", "HumanEval/0", "7", "8"]
    assert [task.tests for task in tasks] == [3, 4, 2, 2]
    assert tasks[0].shown == "Write a function to add two numbers.\nDefine `add(a, b)`."
    assert tasks[1].shown == f"Complete this function.\n{HUMAN_EVAL['prompt'].rstrip()}"
    assert tasks[2].shown == "Read two numbers and print their sum."
    assert tasks[3].shown == "Return both numbers, halved.\nDefine `halves(a: int, b: int)`."
    assert not any("assert" in task.shown for task in tasks)


def test_equalities_of_literals_are_compared_without_running_anything(tasks):
    assert [test.expected for test in tasks[0].calls] == [3, 0, "ab"] and tasks[0].asserts is None
    assert tasks[1].calls == () and tasks[1].asserts is not None


def test_a_signature_without_a_reference_comes_from_the_tests(tmp_path):
    [task] = load_tasks(write(tmp_path / "t.jsonl", {"text": "x", "test_list": ["assert f(1, [2]) == 3"]}))
    assert task.signature == "f(a, b)" and task.id == "t:0" and task.reference is None


@pytest.mark.parametrize(
    ("record", "words"),
    [
        ({"question": "x"}, "holds no tests; it has the keys 'question', expected test and entry_point (HumanEval)"),
        ("[1]", "expected an object, found list [1]"),
        ("{", "is not JSON"),
        ({**MBPP, "text": ""}, "no statement found"),
        ({**MBPP, "test_list": []}, "'test_list' must be a list of asserts that is not empty"),
        ({**MBPP, "test_list": ["assert add(1, 2 == 3"]}, "test_list is not Python ('(' was never closed"),
        ({**MBPP, "test_list": ["add(1, 2)"]}, "holds no assert, so nothing would be tested"),
        ({**MBPP, "test_list": ["assert 1 == 1"]}, "no test calls a function of the program"),
        ({**MBPP, "code": "def add(a, b:"}, "code is not Python"),
        ({**HUMAN_EVAL, "test": "assert total([]) == 0"}, "'test' must define check(candidate)"),
        ({**HUMAN_EVAL, "test": "def check(candidate):\n    pass"}, "holds no assert"),
        ({**HUMAN_EVAL, "entry_point": "sum_up"}, "the prompt defines no function 'sum_up'"),
        ({**HUMAN_EVAL, "prompt": 3}, "'prompt' must be a text that is not empty, found int 3"),
        ({**APPS_STDIN, "input_output": "{"}, "'input_output' is not JSON"),
        ({**APPS_STDIN, "input_output": {"inputs": ["1"], "outputs": []}}, "'inputs' and 'outputs' of the same length"),
        ({**APPS_STDIN, "input_output": {"inputs": [], "outputs": []}}, "'inputs' and 'outputs' of the same length"),
        ({**APPS_CALL, "input_output": {"fn_name": "f", "inputs": ["1"], "outputs": ["1"]}}, "a list of arguments"),
        (MBPP, "the id '2' is that of"),
    ],
)
def test_a_record_that_cannot_be_graded_is_named(tmp_path, record, words):
    path = write(tmp_path / "tasks.jsonl", MBPP, record)
    with pytest.raises(DataError) as caught:
        load_tasks(path)
    assert words in str(caught.value) and str(caught.value).startswith(f"{path}, line 2: ")
    assert "\n" not in str(caught.value)


def test_files_that_cannot_be_read(tmp_path):
    for source, words in [
        (tmp_path / "none.jsonl", "does not exist"),
        (tmp_path, "cannot be read"),
        (write(tmp_path / "empty.jsonl"), "is empty; expected records"),
    ]:
        with pytest.raises(DataError, match=words):
            load_tasks(source)
    with pytest.raises(DataError, match="no split 'dev' of the shipped functions"):
        load_tasks(split="dev")


# ---------------------------------------------------------------------------------------------------------- playing


def play(env, said, task=0):
    """Say the texts one after the other: who saw what, and the results."""
    env = session_of(env)
    observations, _ = env.reset(seed=0, options={"task": task})
    seen, results = [], []
    for text in said:
        ((agent, observation),) = observations.items()
        seen.append((agent, observation))
        results.append(env.step({agent: text}))
        observations = results[-1].observations
    return seen, results


def judged(result):
    [evidence] = result.info["evidence"].values()
    return evidence


@pytest.mark.slow
def test_a_right_program_ends_it_at_once(tasks):
    env = CodeEnv(tasks=tasks, team=SINGLE)
    solutions = [MBPP["code"], "def total(xs):\n    return sum(xs)", "print(sum(map(int, open(0).read().split())))"]
    for number, solution in enumerate([*solutions, APPS_CALL["solutions"][0]]):
        seen, [result] = play(env, [program(solution)], number)
        assert seen == [("coder", f"Problem: {tasks[number].shown}")]
        assert result.terminated and result.info["outcome"] == 1.0 and judged(result).rules.score == 10
        assert judged(result).tool_output is None


def test_the_outcome_is_the_fraction_of_tests_and_wrong_answers_get_no_second_turn(tasks):
    _, [result] = play(CodeEnv(tasks=tasks), [program("def add(a, b):\n    return 3 if a == 1 else 9")])
    assert result.terminated and result.info["outcome"] == pytest.approx(1 / 3)
    assert judged(result).facts == {"status": "ok", "passed": 1, "tests": 3}
    assert judged(result).rules.score == pytest.approx(2 + 8 / 3)


@pytest.mark.slow
def test_errors_come_back_for_another_turn(tasks):
    wrong, right = program("def add(a, b):\n    return a + c"), program(MBPP["code"])
    seen, results = play(CodeEnv(tasks=tasks), [wrong, right])
    chat = seen[1][1]
    assert [m["role"] for m in chat] == ["user", "assistant", "tool"] and chat[1]["content"] == wrong
    assert 'File "solution.py", line 2, in add\n    return a + c\n' in chat[2]["content"]
    assert chat[2]["content"].endswith("NameError: name 'c' is not defined")
    assert results[0].info["evidence"]["coder"].tool_output == chat[2]["content"]
    assert results[1].terminated and results[1].info["outcome"] == 1.0
    for text, words, score in [
        (program("def add(a, b:"), "SyntaxError", 1),
        ("I would add them.", NOTHING, 0),
        (f"{FENCE}python\ndef add", "not closed", 0),
        (program("def plus(a, b):\n    return a + b"), "the program defines no function 'add'", 2),
        (program("import sys\nsys.exit(0)"), "SystemExit", 2),
    ]:
        seen, results = play(CodeEnv(tasks=tasks), [text, right])
        assert words in seen[1][1][-1]["content"], text
        assert judged(results[0]).rules.score == score and results[1].info["outcome"] == 1.0


def test_turns_end_and_the_last_program_counts(tasks):
    wrong = program("def add(a, b):\n    return undefined")
    env = CodeEnv(tasks=tasks, turns=3)
    assert env.max_steps == 3
    _, results = play(env, [wrong, wrong, wrong])
    assert [r.terminated for r in results] == [False, False, True] and results[-1].info["outcome"] == 0.0
    # A last turn without a program leaves the one before in place, and none at all is worth nothing.
    half = program("def add(a, b):\n    return a + b if a != 1 else b + missing")
    _, results = play(CodeEnv(tasks=tasks), [half, "I give up."])
    assert results[-1].terminated and results[-1].info["outcome"] == pytest.approx(2 / 3)
    _, results = play(CodeEnv(tasks=tasks), ["x", "y"])
    assert results[-1].terminated and results[-1].info["outcome"] == 0.0


def test_what_the_tests_expect_is_shown_to_nobody(tmp_path):
    record = {**MBPP, "test_list": ["assert add(11, 22) == 987654", "assert add(1, 'a') == 987654"]}
    env = CodeEnv(write(tmp_path / "t.jsonl", record), team=PAIR)
    said = [program(MBPP["code"]), program(MBPP["code"]), program("assert add(1, 2) == 4"), program(MBPP["code"])]
    seen, results = play(env, said)
    everything = json.dumps([seen, [r.info["evidence"][a].tool_output for r in results for a in r.info["evidence"]]])
    assert "987654" not in everything


def test_coder_and_tester(tasks):
    wrong, right = program("def add(a, b):\n    return a - b"), program(MBPP["code"])
    checks = program("assert add(2, 3) == 5, add(2, 3)")
    env = CodeEnv(tasks=tasks[:1], team=PAIR, turns=1)
    seen, results = play(env, [wrong, checks, right])
    assert [agent for agent, _ in seen] == ["coder", "tester", "coder"]
    # -: the program raises for texts, and has no more turns, so the Tester sees what happened.
    assert seen[1][1].startswith(f"Problem: {tasks[0].shown}\ncoder: {wrong}\ntool: Traceback")
    assert f"\ntester: {checks}\ntool: Traceback" in seen[2][1] and seen[2][1].endswith("AssertionError: -1")
    assert results[1].info["evidence"]["tester"].rules.score == 10
    assert results[1].info["evidence"]["tester"].facts == {"status": "error", "program_right": False}
    assert results[2].terminated and results[2].info["outcome"] == 1.0
    assert env.max_steps == 3 and CodeEnv(tasks=tasks, team=PAIR, turns=2, reviews=2).max_steps == 8


@pytest.mark.parametrize(
    ("code", "said", "score", "over"),
    [
        ("return a + b", program("assert add(2, 3) == 5"), 10, True),
        ("return a + b", program("assert add(2, 3) == 6"), 1, False),  # fails for a right program
        ("return 3", program("assert add(1, 2) == 3"), 4, True),  # misses what is wrong
        ("return 3", program("assert add(2, 3) == 5"), 10, False),
        ("return 3", program("assert True"), 2, True),
        ("return 3", program("assert add(2, 3) == 6"), 1, False),  # right to reject, for a wrong reason
        ("return 3", "Looks good.", 0, True),
        ("return 3", program("assert add(2, 3 == 5"), 1, False),
    ],
)
def test_checks_are_judged_by_the_reference_and_the_hidden_tests(tasks, code, said, score, over):
    _, results = play(CodeEnv(tasks=tasks, team=PAIR), [program(f"def add(a, b):\n    {code}"), said])
    assert results[1].info["evidence"]["tester"].rules.score == score
    assert results[1].terminated == over
    if over:
        assert results[1].info["outcome"] == (1.0 if "a + b" in code else pytest.approx(1 / 3))


# --------------------------------------------------------------------------------------------------------- settings


def test_settings_are_checked(tasks):
    for kwargs, words in [
        ({"turns": 0}, "turns is 0; choose a value of at least 1"),
        ({"reviews": True}, "reviews is True; expected a whole number"),
        ({"team": Team.of(["a", "b", "c"])}, "written by one agent, or by a Coder and a Tester"),
        ({"team": Team.of(["tool"])}, "no agent may be called 'tool'"),
        ({"tasks": ()}, "tasks is empty"),
    ]:
        with pytest.raises(ConfigError) as caught:
            CodeEnv(**{"tasks": tasks, **kwargs})
        assert words in str(caught.value)
    with pytest.raises(EnvError, match="did you mean 'dataset_path'"):
        make_env("code", dataset_pth="x")


@pytest.mark.slow
@pytest.mark.parametrize("team", [SINGLE, PAIR], ids=["single", "pair"])
def test_the_contract(tasks, team):
    check_env(CodeEnv(team=team))
    check_env(CodeEnv("programs", team=team))
    check_env(CodeEnv(tasks=tasks, team=team))


# ------------------------------------------------------------------------------------------------- the shipped ones


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "split", "count"),
    [
        ("functions", "train", 37),
        ("functions", "validation", 11),
        ("functions", "test", 16),
        ("programs", "train", 300),
        ("programs", "validation", 60),
        ("programs", "test", 100),
    ],
)
def test_every_reference_solution_passes_its_tests(name, split, count):
    shipped = load_tasks(name, split=split)
    assert len(shipped) == count
    grader = Grader(PythonTool())
    some = shipped if name == "functions" else shipped[:: count // 20]
    for task in some:
        grade = grader.grade(task, task.reference)
        assert (grade.passed, grade.status) == (task.tests, "ok"), (task.id, grade)
        # And tests can fail: a program that always gives the same passes few of them.
        lazy = grader.grade(task, "print(0)" if not task.signature else f"def {task.signature}:\n    return 0")
        assert lazy.fraction <= 0.6, (task.id, lazy)


def test_held_out_problems_are_others():
    for name in ("functions", "programs"):
        train, test = load_tasks(name), load_tasks(name, split="test")
        assert not {t.statement for t in train} & {t.statement for t in test}
        assert not {t.id for t in train} & {t.id for t in test}
    names = [t.signature.split("(")[0] for split in ("train", "test") for t in load_tasks(split=split)]
    assert len(set(names)) == len(names)


@pytest.mark.cases(18)
@pytest.mark.parametrize(
    "checks",
    [
        "# assert add(1, 2)\npass",
        "assert add or True",
        "assert add(1, 2) == 3 or True",
        "assert add is not None",
        "assert True, add(1, 2)",
        "add(1, 2)\nassert 1 == 1",
        "try:\n    assert add(1, 2) == 9\nexcept Exception:\n    pass",
        "def never():\n    assert add(1, 2) == 3",
        "if False:\n    assert add(1, 2) == 3",
        "'assert add(1, 2) == 3'",
        "assert callable(add)",
        "import sys\nsys.exit(0)\nassert add(1, 2) == 3",
        "assert type(add).__name__ == 'function'",
        "assert add.__name__ == 'add'",
        "assert add.__code__.co_argcount == 2",
        "assert isinstance(add(1, 2), int)",
        "try:\n    add(1)\nexcept TypeError:\n    pass\nelse:\n    assert add is None",
        "if '_Nothing' in globals():\n    assert add(1, 2) == 99\nelse:\n    assert add",
    ],
)
@pytest.mark.parametrize("code", ["return a + b", "return 3"])
def test_checks_that_cannot_fail_earn_nothing(tasks, checks, code):
    _, results = play(CodeEnv(tasks=tasks, team=PAIR), [program(f"def add(a, b):\n    {code}"), program(checks)])
    assert results[1].info["evidence"]["tester"].rules.score <= 2


@pytest.mark.parametrize(
    "checks", ["assert add(1, 2) > 0", "assert add('a', 'b').startswith('a')", "assert not add(1, -1)"]
)
def test_weak_checks_of_what_a_program_does_are_checks(tasks, checks):
    _, results = play(CodeEnv(tasks=tasks, team=PAIR), [program("def add(a, b):\n    return a + b"), program(checks)])
    assert results[1].info["evidence"]["tester"].rules.score == 10


@pytest.mark.parametrize(
    ("given", "other"),
    [
        ("True", "False"), ("3", "-1000006"), ("'ab'", "'~ba~'"), ("b''", "b'~~'"), ("[1, 2]", "[2, 1, None]"),
        ("(1,)", "(1, None)"), ("{1: 2}", "{1: 2, None: None}"), ("None", "0"), ("object()", "None"),
    ],
)  # fmt: skip
def test_other_results_are_of_the_same_type(tmp_path, given, other):
    made = with_other_results(f"def f(x):\n    def g():\n        return {given}\n    return g()", ["f"])
    (tmp_path / "made.py").write_text(made)
    f = runpy.run_path(str(tmp_path / "made.py"))["f"]
    assert repr(f(1)) == other and f.__name__ == "f"


def test_there_are_no_other_results_of_a_function_that_returns_none():
    for text, names in (("def f(x):\n    x.sort()", ["f"]), ("f = len", ["f"]), ("def f(:", ["f"]), ("x = 1", [])):
        assert with_other_results(text, names) is None


@pytest.mark.parametrize(
    "ending",
    [
        "import sys\nsys.exit(0)",
        "raise SystemExit",
        "import os\nos._exit(0)",
        "import atexit, os\natexit.register(os._exit, 0)\nimport builtins\nbuiltins.AssertionError = SystemExit",
    ],
)
def test_a_wrong_program_does_not_silence_good_checks_by_leaving_early(tasks, ending):
    wrong = program(f"def add(a, b):\n    return a - b\n{ending}")
    env = CodeEnv(tasks=tasks[:1], team=PAIR, turns=1)
    _, results = play(env, [wrong, program("assert add(2, 3) == 5")])
    assert results[1].info["evidence"]["tester"].rules.score == 10
