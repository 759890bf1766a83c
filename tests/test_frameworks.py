"""Agent frameworks as they are, with no more of ours than the address in the environment.

A package that does not go with our pins runs in an interpreter of its own: MAFRT_TEST_PYTHON_CREWAI and
MAFRT_TEST_PYTHON_GOOGLE_ADK name them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from mafrt.environment.registry import make_env

FOLDER = Path(__file__).with_name("frameworks")


def call(name: str, **arguments):
    """A call of a tool as models write it."""
    said = json.dumps({"name": name, "arguments": arguments})
    return f"<tool_call>\n{said}\n</tool_call>"


CALLED = call("add", a=2, b=3)


def python_with(module: str) -> str:
    """The interpreter that has a module; skips the test where none has."""
    python = os.environ.get(f"MAFRT_TEST_PYTHON_{module.upper().replace('.', '_')}", sys.executable)
    found = "import importlib.util as u, sys; sys.exit(not all(map(u.find_spec, sys.argv[1:])))"
    parts = module.split(".")
    names = [".".join(parts[: end + 1]) for end in range(len(parts))]
    if subprocess.run([python, "-c", found, *names], check=False).returncode:
        pytest.skip(f"{module} is not installed")
    return python


def played(module: str, *words: str, answers: tuple[str, ...]):
    """What the agent saw in each call, and the outcome; the last answer is given again and again."""
    script = FOLDER / f"with_{module.replace('.', '_')}.py"
    env = make_env(
        "program",
        command=" ".join([python_with(module), str(script), *words]),
        agents=["solver"],
        timeout_s=120,
    )
    seen = [env.reset(seed=1)[0]["solver"]]
    while True:
        result = env.step({"solver": answers[min(len(seen), len(answers)) - 1]})
        if result.terminated or result.truncated:
            return seen, result.info["outcome"]
        seen.append(result.observations["solver"])


@pytest.mark.slow
@pytest.mark.parametrize("model", ["openai-chat:solver", "openai-responses:solver", "anthropic:solver"])
def test_pydantic_ai(model):
    seen, outcome = played("pydantic_ai", model, answers=(CALLED, call("final_result", total=5)))
    assert outcome == 1.0 and len(seen) == 2
    assert seen[1][-2:] == [{"role": "assistant", "content": CALLED}, {"role": "tool", "content": "5"}]
    assert "You add." in seen[0][0]["content"] and '"name": "add"' in seen[0][0]["content"]


@pytest.mark.slow
def test_smolagents():
    seen, outcome = played("smolagents", answers=(CALLED, call("final_answer", answer="5")))
    assert outcome == 1.0 and len(seen) == 2 and "5" in seen[1][-1]["content"]


@pytest.mark.slow
def test_crewai():
    seen, outcome = played("crewai", answers=(CALLED, "five"))
    assert outcome == 1.0 and len(seen) == 2 and seen[1][-1] == {"role": "tool", "content": "5"}


@pytest.mark.slow
@pytest.mark.parametrize("tongue", ["anthropic", "openai"])
def test_google_adk(tongue):
    seen, outcome = played("google.adk", tongue, answers=(CALLED, "five"))
    assert outcome == 1.0 and len(seen) == 2 and "5" in seen[1][-1]["content"] and seen[1][-1]["role"] == "tool"
