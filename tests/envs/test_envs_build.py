"""Environments from their settings alone, as scripts and recorded runs build them; workflows of one's own."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from mafrt.config.team import Team
from mafrt.core.errors import ConfigError, DataError
from mafrt.envs.code import build as code
from mafrt.envs.code.build import CodeSettings
from mafrt.envs.dsbench import build as dsbench
from mafrt.envs.dsbench.build import DsbenchSettings
from mafrt.envs.math import MathEnv, Task
from mafrt.envs.math import build as math
from mafrt.envs.math.build import MathSettings
from mafrt.envs.workflows.config import WorkflowSettings
from mafrt.envs.workflows.registry import WORKFLOWS, make_workflow, register_workflow

BUILDS = {
    "math": (math, {**asdict(MathSettings()), **asdict(WorkflowSettings())}),
    "code": (code, {**asdict(CodeSettings()), **asdict(WorkflowSettings()), "workflow": "coder_tester"}),
    "dsbench": (dsbench, asdict(DsbenchSettings())),
}


@pytest.mark.parametrize("name", BUILDS)
@pytest.mark.parametrize("some", ["all settings", "none"])
def test_an_environment_is_built_from_settings_that_are_json(name: str, some: str) -> None:
    module, settings = BUILDS[name]
    given = json.loads(json.dumps({**settings, "sandbox": "bwrap"})) if some != "none" else {}
    built = module.build(given)
    assert built.train_env.num_tasks > 0 and built.eval_env is not None and built.eval_env.num_tasks > 0
    assert built.notes == () and name == module.NAME
    observations, _ = built.train_env.reset(seed=1, options={"task": 0})
    assert observations


def test_a_file_is_divided_and_it_is_said(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text("".join(json.dumps({"problem": f"{i} + 1?", "answer": str(i + 1)}) + "\n" for i in range(20)))
    built = math.build({"dataset_path": str(path)})
    assert (built.train_env.num_tasks, built.eval_env and built.eval_env.num_tasks) == (18, 1)
    assert built.notes == (
        f"Training on 18 problems of {path}; for evaluation, 1 of the last tenth, which is held out.",
    )
    test = math.build({"dataset_path": str(path), "eval_split": "test"})
    held_out = [env.tasks[0].problem for env in (built.eval_env, test.eval_env)]
    assert held_out == ["18 + 1?", "19 + 1?"] and [e.split for e in (built.eval_env, test.eval_env)] == [
        "validation",
        "test",
    ]
    built = math.build({"dataset_path": str(path), "eval_dataset_path": str(path)})
    assert "20 of 20 evaluation problems (100.0%) are also among" in built.notes[0]
    with pytest.raises(DataError, match="does not exist"):
        math.build({"dataset_path": str(tmp_path / "none.jsonl")})


OWN = """
from mafrt.envs.workflows.chain import Chain

class Blind(Chain):
    def observe(self, state):
        return {} if state.over else {self.names[state.position]: f"Problem: {state.problem}"}

class NoWorkflow:
    def __init__(self, team, horizon, judge_lines):
        pass

class Broken(Chain):
    def __init__(self, team, horizon, judge_lines):
        raise KeyError("sides")
"""
TEAM = Team.load(Path(__file__).parents[2] / "profiles" / "quickstart_math.json")


@pytest.fixture
def own(tmp_path, monkeypatch) -> Path:
    (tmp_path / "my_flow.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_workflow_of_ones_own_is_one_file(own: Path) -> None:
    built = math.build({"workflow": "my_flow:Blind"}, TEAM)
    env = built.train_env
    first, second = TEAM.names
    env.reset(seed=0, options={"task": 0})
    seen = env.step({first: "MARK"}).observations
    assert "MARK" not in str(seen[second]) and env.rubric is None
    assert MathEnv(tasks=[Task("t", "1?", "1")], team=TEAM, workflow=f"{own}/my_flow.py:Blind").max_steps == 2


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("my_flow:Blnd", "did you mean 'Blind'"),
        ("my_flw:Blind", "there is no module 'my_flw'"),
        ("my_flow:NoWorkflow", "is a NoWorkflow, which is no workflow; inherit from"),
        ("my_flow:Broken", r"could not be built: KeyError: 'sides' \(.*my_flow.py, line 14\)"),
        ("chian", "did you mean 'chain'"),
        ("my_flow:", "both parts are needed"),
    ],
)
def test_what_is_no_workflow_is_said_in_one_sentence(own: Path, name: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        math.build({"workflow": name}, TEAM)
    assert "\n" not in str(caught.value)


def test_workflows_are_registered_by_name(own: Path, monkeypatch) -> None:
    monkeypatch.syspath_prepend(own)
    from my_flow import Blind

    monkeypatch.setattr(WORKFLOWS, "_known", dict(WORKFLOWS._known))

    register_workflow("blind-test", Blind)
    register_workflow("blind-test", Blind)
    assert "blind-test" in WORKFLOWS and type(make_workflow("blind-test", TEAM, 1, True)) is Blind
    WORKFLOWS["blind-too"] = Blind
    assert "blind-too" in list(WORKFLOWS)
    with pytest.raises(ConfigError, match="registered already"):
        register_workflow("chain", Blind)
    with pytest.raises(ConfigError, match="must be a class or function"):
        register_workflow("other", "Blind")  # type: ignore[arg-type]
