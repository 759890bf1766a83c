"""The workflows with a sandbox and a judge in them, played by scripted agents through the real sandbox."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers_models import tiny_tokenizer

from mafrt.config.agent import AgentSpec
from mafrt.config.team import Team
from mafrt.core.errors import ConfigError, SandboxError
from mafrt.core.types import SamplingParams
from mafrt.engines.scripted import ScriptedEngine
from mafrt.environment.checker import check_env
from mafrt.environment.session import session_of
from mafrt.envs.math import MathEnv, Task, process_rewards, verify
from mafrt.envs.workflows.solver_verifier import verdict_of
from mafrt.envs.workflows.state import VIEWS
from mafrt.rollout.player import Player, Start
from mafrt.sandbox import Execution

PROFILES = Path(__file__).parents[2] / "profiles"
MATHCHAT = Team.load(PROFILES / "mathchat.json")
PAIR = Team.load(PROFILES / "solver_verifier.json")
TASKS = (Task("t:0", "Mia has 3 pens. She buys 4 more. How many pens does she have now?", "7"),)
FENCE = "```"
PROBLEM = f"Problem: {TASKS[0].problem}"


def program(code: str) -> str:
    return f"{FENCE}python\n{code}\n{FENCE}"


def mathchat(**settings):
    return MathEnv(tasks=TASKS, team=MATHCHAT, workflow="mathchat", **settings)


def play(env, said):
    """Say the texts one after the other: who saw what, and the results."""
    env = session_of(env)
    observations, _ = env.reset(seed=0, options={"task": 0})
    seen, results = [], []
    for text in said:
        ((agent, observation),) = observations.items()
        seen.append((agent, observation))
        results.append(env.step({agent: text}))
        observations = results[-1].observations
    return seen, results


def scores(results):
    return [
        (agent, evidence.rules.score)
        for r in results
        for agent, evidence in r.info["evidence"].items()
        if evidence.rules
    ]


def test_an_episode_word_for_word():
    plan, code = "Add 3 and 4.", program("print(3 + 4)")
    seen, results = play(mathchat(), [plan, code, "The result is 7.", "3 + 4 = 7. \\boxed{7}"])
    asked = f"{PROBLEM}\nproblem_solver: {plan}"
    assert seen == [
        ("problem_solver", PROBLEM),
        ("code_executor", asked),
        (
            "code_executor",
            [
                {"role": "user", "content": asked},
                {"role": "assistant", "content": code},
                {"role": "tool", "content": "7"},
            ],
        ),
        ("verifier", f"{asked}\ncode_executor: {code}\ntool: 7\ncode_executor: The result is 7."),
    ]
    assert [r.terminated for r in results] == [False, False, False, True]
    assert results[-1].info["outcome"] == 1.0 and results[-1].info["correct"] == {"verifier": True}
    evidence = results[1].info["evidence"]["code_executor"]
    assert evidence.tool_output == "7" and evidence.facts == {"status": "ok"}
    assert scores(results) == [("problem_solver", 10), ("code_executor", 10), ("code_executor", 10), ("verifier", 10)]


def test_an_error_comes_back_and_the_program_can_be_mended():
    said = ["Add them.", program("print(3 + four)"), program("print(3 + 4)"), "\\boxed{7}"]
    seen, results = play(mathchat(), said)
    assert seen[2][0] == "code_executor" and "NameError: name 'four' is not defined" in seen[2][1][-1]["content"]
    # Two turns are used up: the second program's result goes straight to the Verifier.
    assert seen[3][0] == "verifier" and seen[3][1].endswith(f"code_executor: {said[2]}\ntool: 7")
    failed, mended = results[1].info["evidence"]["code_executor"], results[2].info["evidence"]["code_executor"]
    assert failed.facts == {"status": "error"} and failed.rules.score == 1 and "NameError" in failed.rules.reason
    assert mended.rules.score == 10
    # The plan cannot be judged by itself: first by the program that failed, then by the one that did not.
    plans = [r.info["evidence"]["problem_solver"] for r in results[:3]]
    assert [p.rules and p.rules.score for p in plans] == [None, 2, 7]
    assert results[3].info["evidence"]["verifier"].rules.score == 5  # right, but only stated


def test_turns_of_the_executor_are_a_setting_and_a_turn_without_program_is_its_last():
    said = ["p", program("a"), program("b"), program("print(7)"), "\\boxed{7}"]
    seen, _ = play(mathchat(tool_turns=3), said)
    assert [agent for agent, _ in seen] == ["problem_solver", *["code_executor"] * 3, "verifier"]
    seen, results = play(mathchat(tool_turns=3), ["p", "It is 7.", "\\boxed{7}"])
    assert [agent for agent, _ in seen] == ["problem_solver", "code_executor", "verifier"]
    assert seen[2][1].endswith("\ncode_executor: It is 7.")
    assert results[1].info["evidence"]["code_executor"].rules.score == 4  # right, but nothing was run
    seen, _ = play(mathchat(tool_turns=1), ["p", program("print(7)"), "\\boxed{7}"])
    assert [agent for agent, _ in seen] == ["problem_solver", "code_executor", "verifier"]
    assert mathchat(tool_turns=3, horizon=2).max_steps == 10


def test_what_looks_like_a_call_is_answered_without_a_run():
    said = ["p", f"{FENCE}python\nprint(7", "<tool_call>{}</tool_call>", "\\boxed{7}"]
    seen, results = play(mathchat(), said)
    assert seen[2][1][-1] == {"role": "tool", "content": "Nothing was run: a code block is not closed with ```."}
    evidence = results[1].info["evidence"]["code_executor"]
    assert evidence.facts == {"status": "no call"} and evidence.rules.score == 1


def test_code_that_is_not_python_and_output_that_is_long():
    seen, _ = play(mathchat(), ["p", program("print 7"), "x", "\\boxed{7}"])
    assert "SyntaxError" in seen[2][1][-1]["content"]
    seen, _ = play(mathchat(), ["p", program("print('x' * 9999)\nraise ValueError('the end')"), "x", "\\boxed{7}"])
    output = seen[2][1][-1]["content"]
    assert output.startswith("xxx") and "left out" in output and output.endswith("ValueError: the end")
    assert len(output) < 2100
    seen, _ = play(mathchat(), ["p", program("x = 7"), "x", "\\boxed{7}"])
    assert seen[2][1][-1] == {"role": "tool", "content": ""}


@pytest.mark.parametrize(
    ("sees", "executor", "again", "verifier"),
    [
        ("all", "\nproblem_solver: p", "\nproblem_solver: p", "\nproblem_solver: p\ncode_executor: {}\ntool: 7"),
        ("previous", "\nproblem_solver: p", "\nproblem_solver: p", "\ncode_executor: {}\ntool: 7"),
        ("problem", "", "", ""),
    ],
)
def test_who_sees_what_is_a_setting(sees, executor, again, verifier):
    code = program("print(7)")
    closing = "" if sees == "problem" else "\ncode_executor: It is 7."
    seen, _ = play(mathchat(sees=sees), ["p", code, "It is 7.", "\\boxed{7}"])
    assert seen[1][1] == PROBLEM + executor
    assert seen[2][1][0]["content"] == PROBLEM + again and seen[2][1][2]["content"] == "7"
    assert seen[3][1] == PROBLEM + verifier.format(code) + closing


def test_the_previous_agent_in_a_chain():
    said = (("a", "1"), ("b", "2"), ("judge", "no"), ("a", "3"), ("tool", "4"), ("a", "5"))
    names, previous = ("a", "b"), VIEWS["previous"]
    assert previous(said, "b", names) == said[3:]
    assert previous(said[:3], "a", names) == said[1:3]  # a sees b and the judge
    assert previous((), "a", names) == () and VIEWS["problem"](said, "a", names) == ()
    team = Team.of(["a", "b", "c"])
    seen, _ = play(MathEnv(tasks=TASKS, team=team, sees="previous"), ["1", "2", "3"])
    assert [o for _, o in seen] == [PROBLEM, f"{PROBLEM}\na: 1", f"{PROBLEM}\nb: 2"]


def test_a_second_round_begins_with_the_plan_again():
    said = ["p", program("print(8)"), "It is 8.", "\\boxed{8}", "q", program("print(7)"), "It is 7.", "\\boxed{7}"]
    seen, results = play(mathchat(horizon=2), said)
    assert [agent for agent, _ in seen] == ["problem_solver", "code_executor", "code_executor", "verifier"] * 2
    assert seen[4][1].endswith("\nverifier: \\boxed{8}\njudge: The answer is incorrect.")
    assert seen[6][1][0]["content"].endswith("\njudge: The answer is incorrect.\nproblem_solver: q")
    assert results[-1].info["outcome"] == 1.0 and results[-1].terminated


# -------------------------------------------------------------------------------------------------- solver_verifier


def pair(horizon=3):
    return MathEnv(tasks=TASKS, team=PAIR, workflow="solver_verifier", horizon=horizon)


def test_the_verifier_ends_it_by_approving():
    seen, results = play(pair(), ["\\boxed{8}", "Not 8. Verdict: reject", "\\boxed{7}", "Verdict: approve"])
    assert seen[2] == ("solver", f"{PROBLEM}\nsolver: \\boxed{{8}}\nverifier: Not 8. Verdict: reject")
    assert seen[3][1].endswith("\nsolver: \\boxed{7}")
    assert [r.terminated for r in results] == [False, False, False, True]
    assert results[-1].info["outcome"] == 1.0
    assert scores(results) == [("solver", 0), ("verifier", 10), ("solver", 5), ("verifier", 10)]


def test_a_wrong_answer_that_is_approved_stands_and_rounds_end():
    _, results = play(pair(), ["\\boxed{8}", "Verdict: approve"])
    assert results[-1].terminated and results[-1].info["outcome"] == 0.0
    assert scores(results)[-1] == ("verifier", 1)
    _, results = play(pair(horizon=1), ["\\boxed{7}", "Verdict: reject"])
    assert results[-1].terminated and results[-1].info["outcome"] == 1.0  # the answer that stands is verified
    _, results = play(pair(horizon=2), ["\\boxed{7}", "hm", "\\boxed{7}", "hm"])
    assert [r.terminated for r in results] == [False, False, False, True]
    assert scores(results)[-1] == ("verifier", 0)


@pytest.mark.parametrize(
    ("text", "verdict"),
    [
        ("Verdict: approve", "approve"),
        ("All steps hold. <verify>approve</verify>", "approve"),  # Dr. MAS
        ("<verify> Reject </verify>", "reject"),
        ("<verify>approve</verify> or <verify>reject</verify>", "reject"),
        ("Verdict: reject. No: <verify>approve</verify>", "approve"),
        ("<verify></verify> approve", None),
        ("verdict - **Reject**", "reject"),
        ("Verdict: approve? No. Verdict: reject", "reject"),
        ("I approve.", None),
        ("", None),
    ],
)
def test_verdicts(text, verdict):
    assert verdict_of(text) == verdict


# ------------------------------------------------------------------------------------------------- the rules' scores


def right(text):
    return verify(text, "7")


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ("Add 3 and 4.", 10),
        ("Subtract 5 from 12.", 10),
        ("Multiply 2 by 3, then add 1.", 10),
        ("First, divide 28 by 4.", 10),
        ("Add 3 and 5.", 1),
        ("3 + 4 = 7", 10),
        ("So 2 * 3 = 6 and 6 + 1 = 8.", 1),
        ("\\boxed{7}", 10),
        ("", 0),
        ("...", 0),
        ("Find out how many there are.", None),
        ("Add 3 and 4, and remember the 9.", None),  # numbers left over: not understood
        ("Divide 7 by 0.", None),
    ],
)
def test_plans(text, score):
    found = process_rewards.MathRules(right).plan(text)
    assert (found and found.score) == score


@pytest.mark.parametrize(
    ("status", "stdout", "stderr", "score"),
    [
        ("ok", "7\n", "", 10),
        ("ok", "3 + 4\nresult: 7\n", "", 10),
        ("ok", "\\frac{14}{2}", "", 10),
        ("ok", "8", "", 3),
        ("ok", "", "", 2),
        ("error", "7\n", "ZeroDivisionError: x\n", 1),
        ("timeout", "7\n", "", 1),
    ],
)
def test_programs(status, stdout, stderr, score):
    assert process_rewards.program(Execution(status, stdout, stderr, 0), right).score == score


@pytest.mark.parametrize(
    ("text", "printed", "score"),
    [
        ("The result is 7.", "7", 10),
        ("The result is 8.", "8", 5),
        ("The program printed nothing.", "", 5),
        ("The result is 9.", "8", 0),
        ("", "", 0),
        ("It is 7.", None, 4),
        ("It is 8.", None, 0),
    ],
)
def test_reports(text, printed, score):
    assert process_rewards.MathRules(right).report(text, printed).score == score


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ("12 - 5 = 7. \\boxed{7}", 10),
        ("3 * 2 = 6. 6 + 1 = 7. \\boxed{7.0}", 10),
        ("\\boxed{7}", 5),
        ("12 - 5 = 8. \\boxed{7}", 5),  # a step that does not hold
        ("2 + 3 = 5. \\boxed{7}", 5),  # a step that does not lead there
        ("3 + 5 = 8. \\boxed{8}", 2),
        ("\\boxed{8}", 0),
        ("7", 0),
    ],
)
def test_answers(text, score):
    assert process_rewards.MathRules(right).answer(text).score == score


def test_every_turn_is_judged_in_the_end():
    """A plan nobody can carry out, and no program: the team's answer tells."""
    for answer, score in (("\\boxed{7}", 7), ("\\boxed{8}", 2)):
        _, results = play(mathchat(), ["Think.", "no program", answer])
        assert results[0].info["evidence"]["problem_solver"].rules is None
        assert results[-1].info["evidence"]["problem_solver"].rules.score == score


# --------------------------------------------------------------------------------------------------------- settings


def test_settings_are_checked():
    for kwargs, words in [
        ({"team": PAIR, "workflow": "mathchat"}, "is played by three agents"),
        ({"team": Team.of(["a", "b"]), "workflow": "solver_verifier"}, "needs an agent that answers"),
        (
            {"team": Team((AgentSpec("a", with_answer=True),)), "workflow": "solver_verifier"},
            "judges without answering",
        ),
        ({"team": Team.of(["a", "tool"])}, "no agent may be called 'tool'"),
        ({"sees": "nothing"}, "There is no view 'nothing'"),
        ({"tool_turns": 2}, "workflow 'chain' has no setting tool_turns"),
        ({"team": MATHCHAT, "workflow": "mathchat", "tool_turns": 0}, "tool_turns is 0; choose a value of at least 1"),
    ]:
        with pytest.raises(ConfigError) as caught:
            MathEnv(tasks=TASKS, **kwargs)
        assert words in str(caught.value) and "\n" not in str(caught.value)


def test_without_bubblewrap_nothing_begins(monkeypatch, tmp_path):
    """One sentence that names the command which installs it, before any model is loaded."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("mafrt.sandbox.factory._shared", {})
    with pytest.raises(SandboxError) as caught:
        mathchat()
    assert "apt" in str(caught.value) and "bubblewrap" in str(caught.value)
    MathEnv(tasks=TASKS)  # who runs no programs needs none


class Flaky:
    """A sandbox whose every second run fails for reasons of its own."""

    tier, runs = "flaky", 0

    def execute(self, code, files={}, fetch=(), timeout_s=10.0, memory_mib=1024):  # noqa: B006
        self.runs += 1
        if self.runs % 2:
            raise SandboxError("its warm interpreter died twice in a row")
        return Execution("ok", "7\n", "", 0)

    def close(self):
        pass


def test_a_sandbox_that_fails_loses_the_episode_and_is_no_wrong_answer(monkeypatch):
    flaky = Flaky()
    monkeypatch.setattr("mafrt.environment.python_tool.shared_sandbox", lambda name: flaky)
    tokenizer = tiny_tokenizer()
    answers = {
        "problem_solver": ["Add 3 and 4."],
        "code_executor": [program("print(3 + 4)")],
        "verifier": ["\\boxed{7}"],
    }
    sampling = {name: SamplingParams(max_new_tokens=99) for name in MATHCHAT.names}
    player = Player(ScriptedEngine(answers, tokenizer), tokenizer, MATHCHAT, sampling, 1000)
    waiting = iter([Start(f"e{i}", "g", i, i, task=0) for i in range(4)])
    episodes, stats = player.play([mathchat(tool_turns=1)], lambda slot, done: next(waiting, None))
    assert [e.outcome for e in episodes] == [1.0, 1.0] and stats.env_errors == 2
    assert "nothing is known about a program" in str(stats.last_error)


@pytest.mark.parametrize("workflow", ["mathchat", "solver_verifier"])
@pytest.mark.parametrize("sees", ["all", "previous", "problem"])
def test_the_contract(workflow, sees):
    team = MATHCHAT if workflow == "mathchat" else PAIR
    check_env(MathEnv(team=team, workflow=workflow, horizon=2, sees=sees))
