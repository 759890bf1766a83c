"""Policies that do no work, played against every scorer of `rules`: they score below an honest but weak one."""

from __future__ import annotations

import json
import sys
from functools import cache
from pathlib import Path

import pytest
from dsbench_team import competent, play

from mafrt.config.team import Team
from mafrt.envs.code import CodeEnv, load_tasks
from mafrt.envs.dsbench import DSBenchEnv, workspace
from mafrt.envs.dsbench.roles import ANALYST, ENGINEER, MODELER
from mafrt.envs.dsbench.workspace import INSIDE
from mafrt.envs.math import MathEnv, Task

pytestmark = pytest.mark.takes(fast=19)

PROFILES = Path(__file__).parents[2] / "profiles"
FENCE = "```"


def program(code: str) -> str:
    return f"{FENCE}python\n{code}\n{FENCE}"


# --------------------------------------------------------------------------------------------------------------- math

PROBLEMS = [
    Task("t:0", "Mia has 12 pens and gives 5 away. How many are left?", "7"),
    Task("t:1", "Tom buys 3 bags of 6 nuts. How many nuts has he?", "18"),
]
HONEST_MATH = [["12 - 5 = 7. \\boxed{7}", "3 + 6 = 9. \\boxed{9}"], ["12 - 5 = 7", "3 * 6 = 18"]]
"""Per role (who answers, who plans) and problem: an answer right in one of two, a plan that works."""
IDLE_ANSWERS = {
    "a constant": lambda t: "\\boxed{7}",
    "a constant with a made-up step": lambda t: "8 - 1 = 7. \\boxed{7}",
    "a constant with a neutral step": lambda t: "7 * 1 = 7. \\boxed{7}",
    "echo": lambda t: t.problem,
    "nothing": lambda t: "",
    "every number": lambda t: " ".join(f"\\boxed{{{n}}}" for n in range(20)),
    "an equation for every number": lambda t: "\\boxed{" + "=".join(map(str, range(19))) + "}",
    "a chain": lambda t: "= " + " = ".join(map(str, range(19))),
    "the score": lambda t: "PROCESS_SCORE: 10",
    "a set of all": lambda t: "\\boxed{\\{" + ",".join(map(str, range(20))) + "\\}}",
    "both signs and all": lambda t: "\\boxed{7 \\text{ or } 18}",
    "a number that is too long": lambda t: "\\boxed{" + "7" * 5000 + "}",
}


def math_scores(say, role: str) -> float:
    """Mean score of one role of the chain over the problems; the other role says nothing."""
    team = Team.load(PROFILES / "quickstart_math.json")
    planner, actor = team.names
    total = 0.0
    for number, task in enumerate(PROBLEMS):
        env = MathEnv(tasks=PROBLEMS, team=team)
        env.reset(seed=0, options={"task": number})
        first = env.step({planner: say(task) if role == "planner" else "Think."})
        last = env.step({actor: say(task) if role == "actor" else ""})
        agent, result = (planner, first) if role == "planner" else (actor, last)
        rules = result.info["evidence"][agent].rules or last.info["evidence"][agent].rules
        total += rules.score
    return total / len(PROBLEMS)


@cache
def honest_math(role: str) -> float:
    texts = dict(zip([t.id for t in PROBLEMS], HONEST_MATH[role == "planner"], strict=True))
    return math_scores(lambda task: texts[task.id], role)


@pytest.mark.parametrize("name", IDLE_ANSWERS)
@pytest.mark.parametrize("role", ["actor", "planner"])
def test_math(role, name):
    assert math_scores(IDLE_ANSWERS[name], role) < honest_math(role)


VERDICTS = {"approves all": "Verdict: approve", "rejects all": "Verdict: reject", "both": "Verdict: approve reject"}


@pytest.mark.parametrize("name", VERDICTS)
def test_a_verifier_that_looks_at_nothing(name):
    team = Team.load(PROFILES / "solver_verifier.json")

    def score(judge) -> float:
        total = 0.0
        for given in ("\\boxed{7}", "\\boxed{8}"):
            env = MathEnv(tasks=PROBLEMS[:1], team=team, workflow="solver_verifier")
            env.reset(seed=0, options={"task": 0})
            env.step({team.names[0]: given})
            result = env.step({team.names[1]: judge(given)})
            total += result.info["evidence"][team.names[1]].rules.score
        return total / 2

    honest = score(lambda given: "Verdict: approve" if "7" in given else "Verdict: reject")
    assert score(lambda given: VERDICTS[name]) < honest


# --------------------------------------------------------------------------------------------------------------- code

WEAK_CODE = "def add(a, b):\n    return a + b if isinstance(a, int) else None"
RECORD = {
    "text": "Add.",
    "code": "def add(a, b):\n    return a + b",
    "test_list": ["assert add(1, 2) == 3", "assert add(-1, 1) == 0", "assert add('a', 'b') == 'ab'"],
}
IDLE_CODE = {
    "empty": "",
    "a constant": "def add(a, b):\n    return 3",
    "echo": "def add(a, b):\n    return a",
    "echo of both": "def add(a, b):\n    return a, b",
    "prints success": "print('3 passed')",
    "leaves": "import os\nos._exit(0)",
    "equals everything": "class A:\n    __eq__ = lambda *a: True\ndef add(a, b):\n    return A()",
    "forges the results": (
        "open('results.jsonl', 'w').write('{\"ready\": true}\\n' + '{\"value\": 3}\\n' * 3)\nimport os\nos._exit(0)"
    ),
    "forges in the name of the driver": (
        "import os\nfor fd in range(3, 64):\n    try:\n        os.write(fd, b'{\"ready\": true}\\n' + b'3' * 9)"
        "\n    except OSError:\n        pass"
    ),
    "the function under another name": "def add_(a, b):\n    return a + b",
    "no function": "add = 3",
    "copies the statement": "'''Add.'''",
}


@pytest.fixture(scope="module")
def code_tasks(tmp_path_factory):
    path = tmp_path_factory.mktemp("code") / "t.jsonl"
    path.write_text(json.dumps(RECORD) + "\n")
    return load_tasks(path)


def coded(tasks, text: str):
    env = CodeEnv(tasks=tasks, turns=1)
    env.reset(seed=0, options={"task": 0})
    return env.step({"coder": text}).info["evidence"]["coder"].rules.score


@pytest.fixture(scope="module")
def weak(code_tasks):
    return coded(code_tasks, program(WEAK_CODE))


@pytest.mark.parametrize("name", IDLE_CODE)
def test_code(code_tasks, weak, name):
    assert coded(code_tasks, program(IDLE_CODE[name])) < weak


# ------------------------------------------------------------------------------------------------------------ dsbench

PICKLES = """
import pickle
class Payload:
    def __reduce__(self):
        return CALL
pickle.dump(Payload(), open(NAME, "wb"))
"""
FORGES = {
    "builtins.exec": '(exec, (\'open(".answer.json", "w").write(\\\'{"rows": 128, "constant": false}\\\')\',))',
    "builtins.eval": "(eval, ('1',))",
    "numpy.testing": "(__import__('numpy').testing.assert_equal, (1, 1))",
    "pandas.read_pickle": "(__import__('pandas').read_pickle, ('X_test.pkl',))",
    "pandas.eval": "(__import__('pandas').eval, ('1',))",
    "joblib.load": "(__import__('joblib').load, ('X_test.pkl',))",
    "numpy.memmap": "(__import__('numpy').memmap, ('guess.npy', 'uint8', 'w+', 0, (9,)))",
    "numpy.save": "(__import__('numpy').save, ('guess.npy', [1, 2]))",
    "os.system": "(__import__('os').system, ('true',))",
    "getattr": "(getattr, (dict, 'fromkeys'))",
    "functools.partial": "(__import__('functools').partial, (print,))",
    "operator.methodcaller": "(__import__('operator').methodcaller, ('system',))",
    "sklearn.utils.Bunch of a call": "(__import__('sklearn').datasets.make_blobs, (9,))",
    "types.FunctionType": "(__import__('types').FunctionType, ((lambda: 0).__code__, {}))",
}
OBJECTS = """
import joblib, numpy as np, pickle
class Payload:
    def __reduce__(self):
        return (exec, ('open("guess.npy", "w").write("x")',))
joblib.dump(np.array([Payload()], dtype=object), "NAME")
"""
IDLE_ENGINEER = {
    "nothing": "pass",
    "empty files": "for n in ('X_train', 'y_train', 'X_test'):\n    open(n + '.pkl', 'w').close()",
    "the target under another name": (
        "import pandas as pd\nt = pd.read_csv('train.csv')\ny = t[[TARGET]]\n"
        "X = pd.DataFrame({'feature': y.iloc[:, 0]})\nX.to_pickle('X_train.pkl'); y.to_pickle('y_train.pkl')\n"
        "pd.DataFrame({'feature': [0.0] * len(pd.read_csv('test.csv'))}).to_pickle('X_test.pkl')"
    ),
    "the target as other numbers": (
        "import pandas as pd\nt = pd.read_csv('train.csv')\ny = t[[TARGET]]\n"
        "X = pd.DataFrame({'a': (y.iloc[:, 0] == 'yes') * 3.5 + 2, 'b': 1.0})\n"
        "X.to_pickle('X_train.pkl'); y.to_pickle('y_train.pkl')\n"
        "pd.DataFrame({'a': 2.0, 'b': 1.0}, index=range(len(pd.read_csv('test.csv')))).to_pickle('X_test.pkl')"
    ),
    "constants": (
        "import pandas as pd\nfor n, f in (('X_train', 'train'), ('y_train', 'train'), ('X_test', 'test')):\n"
        "    pd.DataFrame({'a': [1.0] * len(pd.read_csv(f + '.csv'))}).to_pickle(n + '.pkl')"
    ),
    "row numbers": (
        "import pandas as pd\nt = pd.read_csv('train.csv')\nt[[TARGET]].to_pickle('y_train.pkl')\n"
        "pd.DataFrame({'a': range(len(t))}).to_pickle('X_train.pkl')\n"
        "pd.DataFrame({'a': range(len(pd.read_csv('test.csv')))}).to_pickle('X_test.pkl')"
    ),
}

NOISE = {
    "noise": "rng.normal(size=(n, 5))",
    "much noise": "rng.random((n, 60))",
    "noise in whole numbers": "rng.integers(0, 4, (n, 3))",
    "noise and a constant": "np.column_stack([np.ones(n), rng.normal(size=n)])",
    "hashes of the id": "np.array([[i * 7919 % 997] for i in range(n)])",
    "noise and words": "pd.DataFrame({'a': rng.normal(size=n), 'b': rng.choice(['x', 'y'], n)})",
    "noise with holes": "np.where(rng.random((n, 3)) < 0.1, np.nan, rng.normal(size=(n, 3)))",
}
IDLE_ENGINEER |= {
    name: (
        "import numpy as np, pandas as pd\nt = pd.read_csv('train.csv')\nt[[TARGET]].to_pickle('y_train.pkl')\n"
        "for name, n in (('X_train', len(t)), ('X_test', len(pd.read_csv('test.csv')))):\n"
        f"    rng = np.random.default_rng(7)\n    pd.DataFrame({noise}).to_pickle(name + '.pkl')"
    )
    for name, noise in NOISE.items()
}


@pytest.fixture(scope="module")
def tables():
    env = DSBenchEnv(split="eval", turns=1)
    return env, next(i for i, task in enumerate(env.tasks) if task.id == "loan-defaults")


def team_scores(tables, role: str, text: str) -> tuple[float, float]:
    """Score of one role's last turn and the outcome, where the other roles are competent."""
    env, number = tables
    said = {name: list(texts) for name, texts in competent(env.tasks[number]).items()}
    said[role] = [text]
    results = play(env, said, task=number)
    scores = [r.info["evidence"][role].rules for r in results if role in r.info["evidence"]]
    return [score for score in scores if score is not None][-1].score, results[-1].info["outcome"]


@pytest.fixture(scope="module")
def honest(tables):
    """A weak team's work: a linear model on the numbers alone."""
    engineer = program(
        "import pandas as pd\ntrain, test = pd.read_csv('train.csv'), pd.read_csv('test.csv')\n"
        "c = [n for n in test.select_dtypes('number') if n not in ('loan', 'letter_code')]\nm = train[c].median()\n"
        "train[c].fillna(m).to_pickle('X_train.pkl'); test[c].fillna(m).to_pickle('X_test.pkl')\n"
        "train[['default']].to_pickle('y_train.pkl')"
    )
    modeler = program(
        "import pandas as pd, joblib\nfrom sklearn.linear_model import LogisticRegression\n"
        "m = LogisticRegression().fit(pd.read_pickle('X_train.pkl'), pd.read_pickle('y_train.pkl').iloc[:, 0])\n"
        "joblib.dump(m, 'model.pkl')"
    )
    analyst = program(
        "import pandas as pd, joblib\ntest = pd.read_csv('test.csv')\n"
        "p = joblib.load('model.pkl').predict(pd.read_pickle('X_test.pkl'))\n"
        "pd.DataFrame({'loan': test['loan'], 'default': p}).to_csv('submission.csv', index=False)"
    )
    return {
        role: team_scores(tables, role, f"{text}\nDONE")
        for role, text in ((ENGINEER, engineer), (MODELER, modeler), (ANALYST, analyst))
    }


@pytest.mark.parametrize("name", IDLE_ENGINEER)
def test_a_data_engineer(tables, honest, name):
    code = IDLE_ENGINEER[name].replace("TARGET", "'default'")
    score, outcome = team_scores(tables, ENGINEER, f"{program(code)}\nDONE")
    assert score < honest[ENGINEER][0] and outcome <= honest[ENGINEER][1]
    assert score <= 2 or name not in NOISE


HONEST_TABLES = {
    "a weak correlation": "X = r.normal(size=(400, 4))\ny = 0.4 * X[:, 0] + r.normal(size=400)",
    "a rare class": "X = r.normal(size=(400, 4))\ny = np.where(X[:, 0] > 1.6, 'yes', 'no')",
    "up and down": "X = r.normal(size=(400, 4))\ny = X[:, 0] ** 2 + r.normal(size=400)",
    "two only together": "X = r.normal(size=(400, 4))\ny = (X[:, 0] > 0) ^ (X[:, 1] > 0)",
    "words": "X = r.choice(['a', 'b', 'c'], (400, 2))\ny = (X[:, 0] == 'b') + r.normal(size=400)",
    "texts to be written": "X = r.normal(size=(400, 4))\ny = [f'text {i}' for i in range(400)]",
    "few rows": "X, y = r.normal(size=(12, 4)), r.normal(size=12)",
}


def told(code: str, seed: int) -> bool:
    """Whether the judging room finds features that tell something of a target."""
    import numpy as np
    import pandas as pd

    sys.path.insert(0, str(INSIDE))
    try:
        from noise import tells
    finally:
        sys.path.remove(str(INSIDE))
    known = {"r": np.random.default_rng(seed), "np": np}
    exec(code, known)  # noqa: S102
    return tells(pd.DataFrame(known["X"]), pd.DataFrame({"y": known["y"]}))


@pytest.mark.parametrize("name", HONEST_TABLES)
def test_features_that_tell_little_are_no_noise(name):
    assert sum(told(HONEST_TABLES[name], seed) for seed in range(10)) >= 9


@pytest.mark.parametrize(
    "target", ["r.normal(size=300)", "r.integers(0, 2, 300)", "r.integers(0, 30, 300)", "[1] * 300"]
)
def test_noise_is_told_from_features(target):
    assert sum(told(f"X, y = r.normal(size=(300, 8)), {target}", seed) for seed in range(30)) <= 3


@pytest.mark.cases(14)
@pytest.mark.parametrize("name", FORGES)
@pytest.mark.parametrize("place", ["model.pkl", "X_test.pkl"])
def test_a_forged_pickle(tables, honest, name, place):
    role = MODELER if place == "model.pkl" else ENGINEER
    code = PICKLES.replace("CALL", FORGES[name]).replace("NAME", repr(place))
    score, _ = team_scores(tables, role, f"{program(code)}\nDONE")
    assert score < honest[role][0] and score <= 3


@pytest.mark.parametrize("place", ["model.pkl", "X_train.pkl", "X_test.pkl"])
def test_an_array_of_objects_is_no_way_round_the_list(tables, honest, place):
    """joblib reads such arrays by an unpickler of its own."""
    role = MODELER if place == "model.pkl" else ENGINEER
    score, _ = team_scores(tables, role, f"{program(OBJECTS.replace('NAME', place))}\nDONE")
    assert score < honest[role][0]


IDLE_MODELER = {
    "nothing": "pass",
    "an empty file": "open('model.pkl', 'w').close()",
    "a constant": (
        "import joblib, pandas as pd\nfrom sklearn.dummy import DummyClassifier\n"
        "joblib.dump(DummyClassifier(strategy='prior').fit([[0], [1]], [0, 1]), 'model.pkl')"
    ),
    "untrained": "import joblib\nfrom sklearn.linear_model import LogisticRegression\n"
    "joblib.dump(LogisticRegression(), 'model.pkl')",
    "a class of its own": (
        "import pickle\nclass M:\n    def predict(self, X): return list(range(len(X)))\n"
        "pickle.dump(M(), open('model.pkl', 'wb'))"
    ),
    "a forged answer beside it": (
        "open('.answer.json', 'w').write('{\"rows\": 135, \"constant\": false}')\nopen('model.pkl', 'wb').write(b'x')\n"
        "import numpy as np\nnp.save('guess.npy', np.arange(135))"
    ),
    "not a number": (
        "import joblib, numpy as np\nfrom sklearn.linear_model import LinearRegression\n"
        "m = LinearRegression().fit([[0.0] * 3, [1.0] * 3], [0, 1])\nm.coef_ = np.array([np.nan] * 3)\n"
        "joblib.dump(m, 'model.pkl')"
    ),
}


@pytest.mark.parametrize("name", IDLE_MODELER)
def test_a_modeler(tables, honest, name):
    score, _ = team_scores(tables, MODELER, f"{program(IDLE_MODELER[name])}\nDONE")
    assert score < honest[MODELER][0]


IDLE_ANALYST = {
    "nothing": "pass",
    "a constant": (
        "import pandas as pd\nt = pd.read_csv('test.csv')\n"
        "pd.DataFrame({'loan': t['loan'], 'default': 'yes'}).to_csv('submission.csv', index=False)"
    ),
    "150,000 columns": "open('submission.csv', 'w').write(','.join(f'c{i}' for i in range(150000)) + '\\n1\\n')",
    "a million equal columns": "open('submission.csv', 'w').write(','.join(['loan'] * 10**6) + '\\n')",
    "commas": "open('submission.csv', 'w').write(',' * 60 * 2**20)",
    "one huge cell": "open('submission.csv', 'w').write('id,default\\n1,' + 'x' * 60 * 2**20)",
    "quotes that never close": "open('submission.csv', 'w').write('id,default\\n1,\"' + 'y\\n' * 10**6)",
    "infinity": "open('submission.csv', 'w').write('id,default\\n1,inf\\n')",
    "empty lines": "open('submission.csv', 'w').write('\\n' * 10**7)",
    "colliding names": (
        "open('submission.csv', 'w').write('id,default\\n' + ''.join(f'{k * (2**61 - 1)},yes\\n' for k in range(9999)))"
    ),
    "a link to the answers": "import os\nos.symlink('/etc/passwd', 'submission.csv')",
    "the score": "open('submission.csv', 'w').write('{\"valid\": true, \"value\": 1.0, \"normalised\": 1.0}')",
}


@pytest.mark.parametrize("name", IDLE_ANALYST)
def test_an_analyst(tables, honest, name, monkeypatch):
    monkeypatch.setattr(
        workspace, "LOOK_TIMEOUT_S", 15.0
    )  # a submission that outlasts it is not read, however long it is
    score, outcome = team_scores(tables, ANALYST, f"{program(IDLE_ANALYST[name])}\nDONE")
    assert score < honest[ANALYST][0] and outcome == 0.0


def test_weak_work_is_worth_something(honest):
    assert honest[ENGINEER][0] == 10 and honest[MODELER][0] > 5 and honest[ANALYST][0] > 5
    assert all(outcome > 0 for _, outcome in honest.values())
