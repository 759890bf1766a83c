"""DSBenchEnv in the real sandbox: competent teams, saboteurs, stages, what agents see, and who is to blame."""

from __future__ import annotations

import copy
import json
import pickle
import random
import time
from dataclasses import replace

import pytest
from dsbench_team import competent, play, program
from helpers_dsbench import saboteurs, tasks_folder
from helpers_extras import need
from helpers_sandbox import ensure_bubblewrap

from mafrt.core.errors import ConfigError, EnvError, SandboxError
from mafrt.environment.checker import check_env
from mafrt.envs.dsbench import DSBenchEnv, process_rewards, workspace
from mafrt.envs.dsbench.builtin import builtin_tasks
from mafrt.envs.dsbench.builtin_tables import BUILTIN
from mafrt.envs.dsbench.demonstrations import careless, demonstrations, good, says
from mafrt.envs.dsbench.env import EpisodeProgress
from mafrt.envs.dsbench.roles import ANALYST, APPROVE, DONE, ENGINEER, MODELER, ROLES, says_done, turns_of
from mafrt.envs.dsbench.scoring import SubmissionScore
from mafrt.envs.dsbench.workspace import FileSummary

need("pandas", "sklearn")

pytestmark = pytest.mark.takes(slow=19)


@pytest.fixture(scope="module")
def tasks():
    return (*builtin_tasks("train", tasks_folder()), *builtin_tasks("eval", tasks_folder()))


@pytest.fixture(scope="module")
def env(tasks):
    ensure_bubblewrap()
    return DSBenchEnv(tasks=tasks, timeout_s=20)


@pytest.fixture
def brief(env):
    small = env.spawn()
    small.style, small.lab, small.word = "brief", True, APPROVE
    return small


RIDES, FLOWERS = 4, 18
MODELS = {RIDES: "power", FLOWERS: "forest"}


def scores(results):
    """Agent -> its judgement after its last turn."""
    found = {}
    for result in results:
        for agent, evidence in result.info["evidence"].items():
            found[agent] = evidence if agent not in found else found[agent].updated(evidence)
    return {agent: evidence.rules for agent, evidence in found.items()}


SOME = (RIDES, FLOWERS, 1, 9, 20, 25)
"""of both data types, training and held out; CI runs all"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "number", [number if number in SOME else pytest.param(number, marks=pytest.mark.ci) for number in range(26)]
)
def test_a_competent_team_beats_the_baseline(env, number):
    results = play(env, competent(env.tasks[number]), number)
    info = results[-1].info
    assert info["measures"]["success"] == info["measures"]["above_baseline"] == 1.0
    assert info["outcome"] > 0.9
    assert all(judged.score >= 7 for judged in scores(results).values())
    assert len(results) == 6  # a program and the word, three times


@pytest.mark.slow
@pytest.mark.parametrize("number", [RIDES, FLOWERS])
@pytest.mark.parametrize("wordy", [False, True])
def test_the_helper_module_does_the_same_in_few_words(brief, number, wordy):
    task, known = brief.tasks[number], BUILTIN[number]
    answer = "labels" if number == RIDES else "chances"
    plain = [f"drop({known.leak!r})\nfill()\ncode()\nsave()", f"fit({MODELS[number]!r})", f"write({answer}())"]
    words = [good(task)[role] for role in ROLES] if wordy else plain
    team = {role: [f"```python\n{code}\n```\n{APPROVE}"] for role, code in zip(ROLES, words, strict=True)}
    results = play(brief, team, number)
    assert len(results) == 3
    assert results[-1].info["outcome"] > 0.7


DESERVED = {
    "shuffled ids": (1.0, "no better than a constant"),
    "one row": (0.0, "has 1 row; expected 60"),
    "NaN": (0.0, "has 60 missing values in 'count'"),
    "infinity": (0.0, "expected finite numbers"),
    "symlink": (0.0, "submission.csv is missing"),
    "not a table": (0.0, "is not UTF-8 text"),
    "formula": (0.0, "'=cmd|calc' in 'count'"),
    "copied answers": (0.0, "submission.csv is missing"),
    "pickle bomb": (0.0, "is no model (its pickle asks for posix)"),
    "silent analyst": (0.0, "submission.csv is missing"),
    "silent team": (0.0, "X_train.pkl and y_train.pkl and X_test.pkl not there"),
    "endless engineer": (0.0, "X_train.pkl and y_train.pkl and X_test.pkl not there"),
}
BLAMED = {"pickle bomb": MODELER, "silent team": ENGINEER, "endless engineer": ENGINEER}


@pytest.mark.slow
@pytest.mark.parametrize("name", DESERVED)
def test_a_saboteur_gets_what_it_deserves(env, name):
    small = env.spawn()
    small.bench = workspace.Bench(env.bench.sandbox, timeout_s=3, memo=env.bench.memo)
    results = play(small, saboteurs(env.tasks[RIDES])[name], RIDES)
    success, why = DESERVED[name]
    info = results[-1].info
    assert info["measures"]["success"] == success
    assert info["outcome"] == 0.0
    judged = scores(results)
    blamed = BLAMED.get(name, ANALYST)
    assert why in judged[blamed].reason
    assert judged[blamed].score <= (4 if success else 1)
    for innocent in set(ROLES[: ROLES.index(blamed)]):
        assert judged[innocent].score >= 9


def test_all_saboteurs_are_listed(env):
    assert set(saboteurs(env.tasks[RIDES])) == set(DESERVED)


def test_the_answers_are_out_of_reach(env):
    """A program sees its workspace and nothing of where the answers lie."""
    task = env.tasks[RIDES]
    folder = task.train_path.parents[2]
    look = (
        f"import os\nprint(sorted(os.listdir('.')), os.path.exists({str(folder)!r}))\n"
        f"print(open({str(folder / 'answers' / task.id / 'test_answer.csv')!r}).read()[:20])"
    )
    env.reset(seed=0, options={"task": RIDES})
    result = env.step({ENGINEER: program(look)})
    shown = result.info["evidence"][ENGINEER]
    assert "['test.csv', 'train.csv'] False" in shown.tool_output
    assert "FileNotFoundError" in shown.tool_output or "PermissionError" in shown.tool_output
    assert shown.rules.score == 0.0
    assert "looks for answers" in shown.rules.reason


def test_what_an_agent_sees(env):
    observations, info = env.reset(seed=0, options={"task": FLOWERS})
    assert (info["task"], info["metric"], info["data_type"]) == ("flower-species", "log_loss", "classification")
    [chat] = observations.values()
    opening = chat[0]["content"]
    for part in (
        "Sizes of petals and sepals",
        "log_loss (less is better)",
        "has the columns id, setosa, versicolor, virginica and one row for each of the 126 rows of test.csv",
        "- train.csv: 294 rows, 8 columns",
        "say DONE on a line of its own",
    ):
        assert part in opening
    assert json.dumps(sorted(env.task.answers.ids)) not in opening
    first = env.step({ENGINEER: program("print('so', 6 * 7)\nopen('y_train.pkl', 'w').write('?')", done=True)})
    chat = first.observations[ENGINEER]
    assert [message["role"] for message in chat] == ["user", "assistant", "tool"]
    answer = chat[-1]["content"]
    assert "so 42" in answer
    assert "y_train.pkl: broken" in answer
    assert "Missing: X_train.pkl, X_test.pkl." in answer  # it said DONE, and is told
    assert "You have 3 turns left." in answer
    second = env.step({ENGINEER: program("1/0")})
    assert "ZeroDivisionError" in second.observations[ENGINEER][-1]["content"]
    assert second.info["evidence"][ENGINEER].facts["status"] == "error"
    third = env.step({ENGINEER: "Let me think about it."})
    assert "There was no program to run." in third.observations[ENGINEER][-1]["content"]
    fourth = env.step({ENGINEER: "I give up, sorry.\n```python\nprint(1"})
    # Its turns are over; the next one sees what it said and what is there.
    chat = fourth.observations[MODELER]
    assert len(chat) == 1
    assert "data_engineer said:\nI give up, sorry." in chat[0]["content"]
    assert "y_train.pkl: broken" in chat[0]["content"]
    assert "Train a model on X_train.pkl" in chat[0]["content"]


def test_files_that_are_there_without_the_word_do_not_end_a_stage(env):
    env.reset(seed=0, options={"task": RIDES})
    text = competent(env.tasks[RIDES])[ENGINEER][0]
    result = env.step({ENGINEER: text})
    assert "The required files are there. Say DONE" in result.observations[ENGINEER][-1]["content"]
    assert result.info["evidence"][ENGINEER].rules.score == 9.0
    result = env.step({ENGINEER: DONE})
    assert set(result.observations) == {MODELER}
    assert result.info["evidence"][ENGINEER].rules.score == 10.0
    listed = result.observations[MODELER][0]["content"]
    assert "X_test.pkl: 60 rows" in listed


def test_equal_programs_on_equal_files_run_once(env, monkeypatch):
    calls = []
    real = env.bench.opened()

    class Counting:
        tier = real.tier

        def execute(self, *args, **kwargs):
            calls.append(args[0])
            return real.execute(*args, **kwargs)

    monkeypatch.setattr(workspace.Bench, "opened", lambda self: Counting())
    text = program("print('only once')", done=False)
    for _ in range(3):
        env.reset(seed=0, options={"task": RIDES})
        env.step({ENGINEER: text})
    assert sum("only once" in call for call in calls) == 1
    failing = program("import os\nos.kill(os.getpid(), 9)", done=False)
    for _ in range(2):
        env.reset(seed=0, options={"task": RIDES})
        result = env.step({ENGINEER: failing})
    assert result.info["evidence"][ENGINEER].facts["status"] == "killed"
    assert sum("getpid" in call for call in calls) == 2  # what the machine may be to blame for is not remembered


def table_file(values):
    import pandas as pd

    return pickle.dumps(pd.DataFrame({"x": values}))


def test_a_pickle_that_changes_a_class_lies_about_no_other_file(env):
    """`Index.__getitem__ = dict`, by names that tables need: whatever that process reads after it is broken."""
    put = b"X" + len(b"__getitem__").to_bytes(4, "little") + b"__getitem__"
    spoils = b"\x80\x02cpandas\nIndex\nN}" + put + b"cbuiltins\ndict\ns\x86b."
    files = {"a.pkl": spoils, "b.pkl": table_file([1, 2]), "c.csv": b"x\n1\n", "d.pkl": table_file([1, None, 3])}
    found = workspace.Bench(env.bench.sandbox).look(files)
    assert found["a.pkl"].kind == "type"  # it was read, and not refused
    alone = {name: workspace.Bench(env.bench.sandbox).look({name: data})[name] for name, data in files.items()}
    assert found == alone
    assert [found[name].rows for name in ("b.pkl", "c.csv", "d.pkl")] == [2, 1, 3]


@pytest.mark.slow
@pytest.mark.parametrize("call", ["look_at_all", "of_submission", "of_predictions"])
def test_what_cannot_be_asked_together_is_asked_alone(env, monkeypatch, call):
    def judged():
        bench = workspace.Bench(env.bench.sandbox)
        small = env.spawn()
        small.bench = bench
        results = play(small, competent(env.tasks[RIDES]), RIDES)
        return [(result.info["evidence"], result.info.get("outcome")) for result in results]

    real, refused = workspace.judge, []

    def limited(sandbox, ours, asked, given, **limits):
        if asked[1] == call:
            refused.append(call)
            raise workspace.Undecided("reading it took more than 60 s")
        return real(sandbox, ours, asked, given, **limits)

    expected = judged()
    monkeypatch.setattr(workspace, "judge", limited)
    assert judged() == expected
    assert refused


def test_an_episode_asks_nine_times(env, monkeypatch):
    """Its three programs, and nine questions about their files: an unpickled file has an execution of its own."""
    asked = []
    real = env.bench.opened()

    class Counting:
        tier = real.tier

        def execute(self, code, *args, **kwargs):
            asked.append(code)
            return real.execute(code, *args, **kwargs)

    small = env.spawn()
    small.bench = workspace.Bench(env.bench.sandbox)
    monkeypatch.setattr(workspace.Bench, "opened", lambda self: Counting())
    play(small, competent(env.tasks[RIDES]), RIDES)
    assert len(asked) == 3 + 9


def test_a_sandbox_that_fails_loses_the_episode_and_blames_nobody(env, monkeypatch):
    class Broken:
        tier = "bwrap"

        def execute(self, *args, **kwargs):
            raise SandboxError("gone")

    env.reset(seed=0, options={"task": RIDES})
    monkeypatch.setattr(workspace.Bench, "opened", lambda self: Broken())
    with pytest.raises(EnvError, match="the sandbox failed, so nothing is known about a program: gone"):
        env.step({ENGINEER: program("print('never run')")})


@pytest.mark.parametrize(
    "text", [program("print(6 * 7)"), program("1/0", done=False), "Only words.", "```python\nx", ""]
)
def test_transition_is_pure_and_is_the_first_part_of_a_step(env, text):
    env.reset(seed=0, options={"task": FLOWERS})
    first = EpisodeProgress(chat=({"role": "assistant", "content": "before"},), turns=1)
    for state in (env.stage, first):
        actions = {ENGINEER: text}
        copies = copy.deepcopy((state, actions, env.stage, env.files))
        after = env.transition(state, actions)
        assert env.transition(state, actions) == after
        assert (state, actions, env.stage, env.files) == copies
        assert after.turns == state.turns + 1 and after.chat == (*state.chat, {"role": "assistant", "content": text})
    after = env.transition(env.stage, {ENGINEER: text})
    assert (after.pending is not None) == ("print" in text or "1/0" in text)
    assert after.done == (DONE in text)
    result = env.step({ENGINEER: text})
    stage = result.info["state"]
    assert (stage.role, stage.turns, stage.chat[:-1]) == (after.role, after.turns, after.chat)
    assert stage.chat[-1]["role"] == "tool" and stage.pending is None
    ran = result.info["evidence"][ENGINEER].facts["status"] in ("ok", "error")
    assert ran == (after.pending is not None)


@pytest.mark.slow
def test_the_contract_is_kept(brief):
    check_env(brief)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("DONE", True),
        ("All good.\n**DONE.**", True),
        ("```python\nDONE\n```", False),
        ("```python\nprint(1)\n```\nDONE", True),
        ("I am DONE with it", False),
        ("done", False),
        ("```python\nDONE", False),
    ],
)
def test_how_an_agent_says_that_it_is_done(text, said):
    assert says_done(text) is said


@pytest.mark.parametrize("piece", ["\n", "\r\n", " \n", "*\n", "_", "> ", "DONE ", "**DONE** x\n"])
def test_no_text_keeps_the_search_for_done(piece):
    started = time.process_time()
    assert not says_done(piece * 60_000 + "x")
    assert time.process_time() - started < 2  # quadratic work takes longer


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"style": "short"}, "There is no style 'short'"),
        ({"turns": 0}, "turns must be a whole number"),
        ({"split": "test"}, "There is no split 'test'"),
        ({"tasks": ()}, "tasks is empty"),
    ],
)
def test_settings_that_cannot_be(settings, why):
    with pytest.raises(ConfigError, match=why):
        DSBenchEnv(**settings)


def test_a_sandbox_without_the_libraries_is_refused(tasks, monkeypatch):
    monkeypatch.setattr("mafrt.envs.dsbench.workspace.NEEDED", ("pandas", "no_such_library"))
    with pytest.raises(ConfigError, match=r"cannot import .* 'no_such_library'\); run pip install .pandas"):
        DSBenchEnv(tasks=tasks)


def test_tables_larger_than_the_workspace_are_refused(tasks):
    with pytest.raises(ConfigError, match="raise workspace_mib or leave the task out"):
        DSBenchEnv(tasks=tasks, workspace_mib=0)


# The rules, on facts that need no sandbox.

X, Y, T = (
    FileSummary("table", 100, 5, ("a",)),
    FileSummary("table", 100, 1, ("count",)),
    FileSummary("table", 60, 5, ("a",)),
)
DATA = {"X_train.pkl": X, "y_train.pkl": Y, "X_test.pkl": T}
MODEL = {"model.pkl": FileSummary("model", of="sklearn.ensemble.Forest", asks=("sklearn", "numpy"))}
WORKS = {"rows": 60, "constant": False}


def shape(kind="table", rows=100, columns=5, **more):
    return FileSummary(kind, rows, columns, **more)


@pytest.mark.parametrize(
    ("files", "score", "why"),
    [
        (DATA, 10, "fit each other"),
        ({**DATA, "X_test.pkl": shape(rows=50)}, 2, "X_test.pkl has 50 rows, test.csv 60"),
        ({**DATA, "y_train.pkl": shape(rows=99)}, 2, "X_train.pkl has 100 rows, y_train.pkl 99"),
        ({**DATA, "X_train.pkl": shape(columns=4)}, 2, "4 columns, X_test.pkl 5"),
        ({**DATA, "X_train.pkl": shape("broken", None, why="odd")}, 2, "is no table (odd)"),
        ({**DATA, "X_train.pkl": shape(names=("count",))}, 0, "gives the answers away"),
        ({**DATA, "X_train.pkl": shape(missing=3)}, 5, "3 missing values"),
        ({**DATA, "X_test.pkl": shape(rows=60, words=("w",))}, 5, "holds words, such as column 'w'"),
        ({"X_train.pkl": X}, 3, "y_train.pkl and X_test.pkl not there"),
    ],
)
def test_rules_of_the_engineer(tasks, files, score, why):
    judged = process_rewards.judge(ENGINEER, process_rewards.Work(tasks[RIDES], files), "ok", "code", True)
    assert judged.score == score
    assert why in judged.reason


def test_rules_of_the_modeler(tasks):
    def judge(files, probe, status="ok", done=True, given=DATA):
        given = process_rewards.Work(tasks[RIDES], given)
        return process_rewards.judge(
            MODELER, process_rewards.Work(tasks[RIDES], files, probe), status, "code", done, given
        ).score

    assert judge({**DATA, **MODEL}, WORKS) == 10
    assert judge({**DATA, **MODEL}, WORKS, done=False) == 9
    assert judge({**DATA, **MODEL}, {**WORKS, "constant": True}) == 4
    assert judge({**DATA, **MODEL}, {"error": "ValueError"}) == 2
    assert judge({**DATA, **MODEL}, {"rows": 3}) == 2
    assert judge(DATA, None) == 3
    assert judge(DATA, None, status="error") == 1
    assert judge(DATA, None, status=None) == 0
    # With nothing to work on it is not to blame, and there is nothing to gain by what it says of it.
    holes = {**DATA, "X_train.pkl": shape(missing=1)}
    for bad in ({}, holes):
        assert {judge(bad, None, status="error", done=done, given=bad) for done in (False, True)} == {5}
    assert judge({}, None, status=None, given={}) == 5
    assert judge({**holes, **MODEL}, {**WORKS, "constant": True}, given=holes) == 5
    assert judge({**holes, **MODEL}, WORKS, given=holes) == 10  # it has mended them, or its model can do with holes
    # What it spoils itself is no excuse.
    assert judge(holes, None) == 3
    assert judge({}, None, status="error") == 1


@pytest.mark.parametrize(("worth", "modeler", "analyst"), [(1.0, 10, 7.5), (0.5, 7.5, 10), (0.4, 7, 10), (0.0, 5, 5)])
def test_a_model_is_worth_its_predictions_and_an_analyst_what_is_left_of_them(tasks, worth, modeler, analyst):
    """The submission is worth 0.5; with a model worth nothing, it is not valid."""

    def work(score=None):
        known = SubmissionScore(True, None, 0.7, worth, worth > 0)
        return process_rewards.Work(tasks[RIDES], {**DATA, **MODEL}, WORKS, score, None, known)

    given = process_rewards.Work(tasks[RIDES], DATA)
    assert process_rewards.judge(MODELER, work(), "ok", "code", True, given).score == modeler
    score = SubmissionScore(True, None, 0.6, 0.5, True) if worth else SubmissionScore(False, "has 1 row")
    assert process_rewards.judge(ANALYST, work(score), "ok", "code", True, work()).score == analyst


@pytest.mark.slow
def test_the_score_of_a_model_is_that_of_its_predictions_as_the_metric_takes_them(brief):
    """Whatever the Analyst hands in; here plain classes where probabilities are asked for."""
    right = good(brief.tasks[FLOWERS])
    texts = {role: [f"```python\n{code}\n```\n{APPROVE}"] * 4 for role, code in right.items()}
    results = play(brief, texts, FLOWERS)
    judged = scores(results)
    assert judged[MODELER].score == pytest.approx(5 + 5 * results[-1].info["outcome"])
    assert judged[ANALYST].score == 10
    spoilt = play(brief, {**texts, ANALYST: [f"```python\nWrite(Give())\n```\n{APPROVE}"] * 4}, FLOWERS)
    assert scores(spoilt)[MODELER] == judged[MODELER]
    assert scores(spoilt)[ANALYST].score <= 2


def test_rules_of_the_analyst(tasks):
    def judge(score, status="ok", given=({**DATA, **MODEL}, WORKS), files=None):
        work = process_rewards.Work(tasks[RIDES], {**DATA, **MODEL} if files is None else files, WORKS, score)
        return process_rewards.judge(
            ANALYST, work, status, "code", True, process_rewards.Work(tasks[RIDES], *given)
        ).score

    assert judge(SubmissionScore(True, None, 0.5, 1.0, True)) == 10
    assert judge(SubmissionScore(True, None, 0.8, 0.5, True)) == 7.5
    assert judge(SubmissionScore(True, None, 2.0, 0.0, False)) == 4
    assert judge(SubmissionScore(False, "has 1 row")) == 2
    assert judge(None) == 3
    assert judge(None, status="timeout") == 1
    assert judge(None, files={**DATA, "X_test.pkl": shape(missing=1)}) == 3  # it wrote holes into it: no excuse
    # Without a model it is not to blame, whatever it hands in.
    for score in (None, SubmissionScore(False, "has 1 row"), SubmissionScore(True, None, 2.0, 0.0, False)):
        assert judge(score, given=(DATA,)) == judge(score, given=({**DATA, **MODEL}, {"error": "x"})) == 5


@pytest.mark.parametrize(
    ("files", "probe", "score", "blamed"),
    [
        ({}, None, None, ENGINEER),
        ({**DATA, "X_test.pkl": shape(rows=9)}, {"rows": 9}, SubmissionScore(False, "has 9 rows"), ENGINEER),
        ({**DATA, "X_train.pkl": shape(missing=1)}, None, None, ENGINEER),  # it kept the Modeler from its work
        (DATA, None, None, MODELER),
        ({**DATA, **MODEL}, {"error": "x"}, None, MODELER),
        ({**DATA, **MODEL}, WORKS, None, ANALYST),
        ({**DATA, **MODEL}, WORKS, SubmissionScore(False, "has 1 row"), ANALYST),
        ({**DATA, "X_train.pkl": shape(missing=1), **MODEL}, WORKS, SubmissionScore(False, "has 1 row"), ANALYST),
        ({}, None, SubmissionScore(True, None, 0.5, 1.0, True), None),
    ],
)
def test_who_is_to_blame(tasks, files, probe, score, blamed):
    stages = [{name: files[name] for name in DATA if name in files}, files, files]
    works = [process_rewards.Work(tasks[RIDES], found, probe) for found in stages[:2]]
    found = process_rewards.root_cause([*works, process_rewards.Work(tasks[RIDES], files, probe, score)])
    assert (found[0] if found else None) == blamed


BROKEN = {**DATA, "X_test.pkl": shape(rows=9)}
HOLES = {**DATA, "X_train.pkl": shape(missing=1)}


@pytest.mark.parametrize(
    ("stages", "probes", "blamed"),
    [
        ([DATA, BROKEN, BROKEN], [None] * 3, MODELER),  # it spoilt the tables that it was handed
        ([DATA, {**DATA, **MODEL}, {**BROKEN, **MODEL}], [None, WORKS, {"rows": 9}], ANALYST),
        ([DATA, {**DATA, **MODEL}, DATA], [None, WORKS, None], ANALYST),  # it deleted the model
        ([DATA, {**DATA, **MODEL}, {**DATA, **MODEL}], [None, {"error": "x"}, {"error": "x"}], MODELER),
        ([BROKEN, DATA, DATA], [None] * 3, MODELER),  # mended, and then no model
        ([BROKEN, DATA, BROKEN], [None] * 3, ANALYST),
        ([HOLES, HOLES, HOLES], [None] * 3, ENGINEER),
        ([DATA, HOLES, HOLES], [None] * 3, MODELER),
        ([HOLES, {**HOLES, **MODEL}, HOLES], [None, WORKS, None], ANALYST),  # the model could do with holes
    ],
)
def test_who_spoils_what_others_made_is_to_blame(tasks, stages, probes, blamed):
    works = [process_rewards.Work(tasks[RIDES], files, probe) for files, probe in zip(stages, probes, strict=True)]
    found = process_rewards.root_cause(works)
    assert found is not None and found[0] == blamed


# Demonstrations for very small models.


@pytest.mark.nightly
@pytest.mark.slow
def test_careless_programs_cost_what_they_are_to_cost(brief):
    """Each careless choice, alone among good ones, leaves the team with less than the good ones get."""

    def outcome(team):
        texts = {role: [f"```python\n{code}\n```\n{APPROVE}"] * 4 for role, code in team.items()}
        return play(brief, texts, RIDES)[-1].info

    task = brief.tasks[RIDES]
    best = outcome(good(task))
    assert best["outcome"] > 0.9
    invalid = 0
    for role in ROLES:
        for code in careless(task)[role]:
            found = outcome({**good(task), role: code})
            invalid += not found["measures"]["success"]
            assert found["outcome"] < 0.5, code
    # Lost columns, constants, wrong models and zeros leave a valid submission; nothing else does.
    assert invalid == 9


def test_demonstrators_are_careless_half_of_the_time(tasks):
    rng = random.Random(0)
    chat = [{"role": "user", "content": "Problem: rmsle one answer"}]
    right, wrong = good(tasks[RIDES]), careless(tasks[RIDES])
    for role in ROLES:
        texts = [says(rng, tasks[RIDES], role, chat) for _ in range(600)]
        programs = [text.split("```")[1].removeprefix("python\n").strip() for text in texts]
        assert set(programs) == {right[role], *wrong[role]}
        assert right[role] not in wrong[role]
        assert 0.44 < sum(code in wrong[role] for code in programs) / 600 < 0.56
        assert 0.85 < sum(says_done(text, APPROVE) for text in texts) / 600 < 0.95


def test_of_a_task_that_is_not_built_in_demonstrators_know_no_column_to_drop(tasks):
    programs = good(replace(tasks[RIDES], id="my-own"))
    assert programs == {ENGINEER: "Check()\nPlan()\nWrite()", MODELER: "Solve()", ANALYST: "Write(Give())"}


@pytest.mark.slow
@pytest.mark.ci
def test_demonstrations_are_what_agents_see_and_say(env):
    records = demonstrations(env.tasks[:1], 3, seed=0)
    assert records == demonstrations(env.tasks[:1], 3, seed=0)
    assert {record["agent"] for record in records} == set(ROLES)
    opening = "Problem: roc_auc shares of each\nnumber 2 is a mistake. They are added together.\n"
    opening += "test 60 train 140 missing 10"
    assert records[0]["messages"] == [{"role": "user", "content": opening}]
    for record in records:
        assert record["response"].startswith(("```python\n", APPROVE))


def test_each_agent_may_have_its_own_number_of_turns():
    assert turns_of(4) == turns_of([4]) == dict.fromkeys(ROLES, 4)
    assert turns_of((4, 6, 2)) == {"data_engineer": 4, "modeler": 6, "analyst": 2}
    for wrong in ((4, 6), (4, 6, 0), (1, 2, 3, 4), True, 2.0, ("4", "4", "4")):
        with pytest.raises(ConfigError, match="turns must be a whole number of at least 1, or one for each of"):
            turns_of(wrong)
