"""The scripts in `examples/` with the real packages, with scripted answers in place of a model."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from mafrt.config.train_config import TrainConfig
from mafrt.environment.registry import make_env
from mafrt.scripts import train

pytestmark = pytest.mark.takes(slow=21)

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
PROGRAMS = [
    "plain_openai",
    pytest.param("langgraph_team", marks=pytest.mark.slow),
    pytest.param("openai_agents", marks=pytest.mark.slow),
]


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_plays_its_two_agents(name, tmp_path):
    (tmp_path / "tasks.jsonl").write_text('{"problem": "2 + 2?", "answer": "4"}\n')
    env = make_env("program", program=f"{EXAMPLES / name}.py:run_episode", tasks=str(tmp_path / "tasks.jsonl"))
    assert env.agents == ("reasoner", "actor")
    for answer, outcome in (("so \\boxed{4}", 1.0), ("so \\boxed{5}", 0.0)):
        seen, _ = env.reset(seed=1, options={"task": 0})
        assert seen == {"reasoner": [{"role": "user", "content": "Problem: 2 + 2?"}]}
        seen = env.step({"reasoner": "Add."}).observations
        assert seen == {"actor": [{"role": "user", "content": "Problem: 2 + 2?\n\nreasoner: Add."}]}
        result = env.step({"actor": answer})
        assert result.terminated and result.info["outcome"] == outcome


@pytest.mark.parametrize("name", ["plain_openai", "langgraph_team", "openai_agents", "shell_agent"])
def test_the_command_in_each_example_parses(name):
    text = (EXAMPLES / f"{name}.py").read_text()
    command = text.split('"""')[1].split("mafrt train ")[1].replace("\\\n", " ").replace("\\", " ")
    assert train.COMMAND.read(command.split())["program"] == f"examples/{name}.py:run_episode"


# ------------------------------------------------------------------------------------------- scripts of their own


def run(name, *arguments):
    """The `main` of an example, as its command runs it."""
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.main(*arguments)


TRAINING = ["own_environment", "own_workflow", "router", "own_rule", "own_coach", "debate", "self_play"]


@pytest.fixture
def few_evaluations(monkeypatch):
    """Two held-out problems once, in place of sixteen four times."""
    of = TrainConfig.of
    monkeypatch.setattr(TrainConfig, "of", lambda **named: of(**{**named, "eval_episodes": 2, "eval_samples": 1}))


@pytest.mark.cases(4)
@pytest.mark.slow
@pytest.mark.ci
@pytest.mark.parametrize("name", TRAINING)
def test_an_example_trains(name, few_evaluations, capsys):
    run(name, 1, 4)
    assert "before: {'eval/" in (out := capsys.readouterr().out) and "after: {'eval/" in out


@pytest.mark.slow
def test_a_loop_of_ones_own(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    run("from_python", 2, 2, 4)
    assert "1: score" in capsys.readouterr().out
    assert (tmp_path / "actor_adapter" / "adapter_model.safetensors").is_file()


@pytest.mark.slow
def test_an_evaluation_with_intervals(capsys):
    run("evaluate_with_intervals", 6)
    out = capsys.readouterr().out
    assert "temperature 0.5" in out and "difference, task by task: " in out


@pytest.mark.nightly
@pytest.mark.slow
def test_dpo_from_episodes_and_a_served_team(capsys, tmp_path):
    assert run("dpo_from_episodes", 1, 32) == 0
    folder = capsys.readouterr().out.split("--load_path ")[-1].split()[0]
    run("serve_and_chat", Path(folder).parent / "played")
    out = capsys.readouterr().out
    assert "models: ['reasoner', 'actor', 'team']" in out and "team: " in out


def test_examples_are_short():
    scripts = sorted(EXAMPLES.glob("*.py"))
    assert len(scripts) >= 10
    for script in scripts:
        assert script.read_text().count("\n") < 80, script.name
