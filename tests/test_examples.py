"""The scripts in `examples/` with the real packages, with scripted answers in place of a model."""

from __future__ import annotations

from pathlib import Path

import pytest

from mafrt.environment.registry import make_env
from mafrt.scripts import train

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
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


@pytest.mark.parametrize("name", ["plain_openai", "langgraph_team", "openai_agents"])
def test_the_command_in_each_example_parses(name):
    text = (EXAMPLES / f"{name}.py").read_text()
    command = text.split('"""')[1].split("mafrt train ")[1].replace("\\\n", " ").replace("\\", " ")
    assert train.COMMAND.read(command.split())["program"] == f"examples/{name}.py:run_episode"
