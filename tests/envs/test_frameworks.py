"""Agent frameworks as they are, with no more of ours than the address in the environment.

A package that does not go with our pins runs in an interpreter of its own, which a test makes at night;
MAFRT_TEST_PYTHON_CREWAI and MAFRT_TEST_PYTHON_GOOGLE_ADK name others.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from mafrt.core.errors import EnvError
from mafrt.environment.registry import make_env

pytestmark = pytest.mark.takes(slow=8)

FOLDER = Path(__file__).parents[1] / "frameworks"


def call(name: str, **arguments):
    """A call of a tool as models write it."""
    said = json.dumps({"name": name, "arguments": arguments})
    return f"<tool_call>\n{said}\n</tool_call>"


CALLED = call("add", a=2, b=3)


def made_for(tmp_path: Path, module: str, *packages: str) -> str:
    """The interpreter that is named for a module, else a new one with these packages alone; skips where no index is."""
    if given := os.environ.get(variable(module)):
        return given
    subprocess.run([sys.executable, "-m", "venv", tmp_path], check=True)
    python = str(tmp_path / "bin" / "python")
    made = subprocess.run([python, "-m", "pip", "install", "-q", *packages], capture_output=True, text=True)
    if made.returncode and "No matching distribution" in made.stderr + made.stdout:
        pytest.skip(f"the package index cannot be reached, or has no {packages[0]}")
    assert made.returncode == 0, made.stderr
    return python


def variable(module: str) -> str:
    return f"MAFRT_TEST_PYTHON_{module.upper().replace('.', '_')}"


def python_with(module: str) -> str:
    """The interpreter that has a module; skips the test where none has."""
    python = os.environ.get(variable(module), sys.executable)
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


@pytest.mark.cases(1)
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
@pytest.mark.nightly
def test_crewai(tmp_path, monkeypatch):
    monkeypatch.setenv(variable("crewai"), made_for(tmp_path, "crewai", "crewai==1.15.30"))
    seen, outcome = played("crewai", answers=(CALLED, "five"))
    assert outcome == 1.0 and len(seen) == 2 and seen[1][-1] == {"role": "tool", "content": "5"}


@pytest.mark.slow
@pytest.mark.nightly
def test_google_adk(tmp_path, monkeypatch):
    packages = ("google-adk==2.13.0", "litellm==1.110.2", "anthropic==2.14.0")
    monkeypatch.setenv(variable("google.adk"), made_for(tmp_path, "google.adk", *packages))
    for tongue in ("anthropic", "openai"):
        seen, outcome = played("google.adk", tongue, answers=(CALLED, "five"))
        assert outcome == 1.0 and len(seen) == 2 and "5" in seen[1][-1]["content"] and seen[1][-1]["role"] == "tool"
    # A schema beside tools is a tool of its own, but for OpenAI's models, where it is a grammar.
    answers = (CALLED, call("set_model_response", total=5))
    seen, outcome = played("google.adk", "anthropic", "typed", answers=answers)
    assert outcome == 1.0 and len(seen) == 2 and '"name": "set_model_response"' in seen[0][0]["content"]
    with pytest.raises(EnvError, match="a JSON schema is not supported in training"):
        played("google.adk", "openai", "typed", answers=answers)


# ------------------------------------------------------------------------------------------- a harness with a shell

SHELL_AGENT = f"{Path(__file__).parents[2] / 'examples' / 'shell_agent.py'}:run_episode"
DATA = Path(__file__).parents[2] / "envs/code/data/functions_train.jsonl"
DONE = call("bash", command="echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT")


@pytest.fixture
def harness(monkeypatch):
    """mini-swe-agent, which asks the network for prices otherwise."""
    for name in ("LITELLM_LOCAL_MODEL_COST_MAP", "MSWEA_SILENT_STARTUP"):
        monkeypatch.setenv(name, "True")
    return pytest.importorskip("minisweagent")


def write(program: str) -> str:
    return call("bash", command=f"cat > solution.py <<'END'\n{program}\nEND")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "outcome"),
    [
        (json.loads(DATA.read_text().splitlines()[0])["code"], 1.0),
        ("def widest_gap(numbers):\n    return 0", 0.6),  # three of five tests ask for 0
        ("import os\nos._exit(0)", 0.0),
        ("assert False", 0.0),
    ],
)
def test_mini_swe_agent_works_in_the_sandbox_and_is_paid_by_hidden_tests(harness, tmp_path, program, outcome):
    (tmp_path / "tasks.jsonl").write_text(DATA.read_text().splitlines()[0] + "\n")
    env = make_env("program", program=SHELL_AGENT, tasks=str(tmp_path / "tasks.jsonl"), timeout_s=120)
    seen, _ = env.reset(seed=1, options={"task": 0})
    assert env.agents == ("coder",) and '"name": "bash"' in seen["coder"][0]["content"]
    assert "== 4" not in str(seen)  # the tests are hidden
    secret = tmp_path / "secret"
    secret.write_text("of the host")
    for said, told in (
        (write(program), "<returncode>0</returncode>"),
        (call("bash", command=f"cat solution.py; cat {secret}; id > here; ls"), "here"),
        (call("bash", command="cat here && exit 3"), "<returncode>3</returncode>"),
        ("I am done.", "No tool calls found"),
    ):
        shown = env.step({"coder": said}).observations["coder"][-1]["content"]
        assert told in shown and "of the host" not in shown
    result = env.step({"coder": DONE})
    assert result.terminated and result.info["outcome"] == outcome


@pytest.mark.slow
def test_a_prompt_that_is_too_long_ends_the_harness_at_once(harness):
    import httpx
    from litellm.exceptions import ContextWindowExceededError
    from litellm.litellm_core_utils.exception_mapping_utils import exception_type
    from openai import BadRequestError

    from mafrt.envs.program.env import _TOO_LONG

    body = {"message": str(_TOO_LONG), "code": _TOO_LONG.code}
    refused = httpx.Response(400, request=httpx.Request("POST", "http://x"), json={"error": body})
    with pytest.raises(ContextWindowExceededError):
        exception_type("coder", BadRequestError(str(_TOO_LONG), response=refused, body=body), "openai")


@pytest.mark.slow
def test_the_turns_of_mini_swe_agent_train(harness, tmp_path):
    from safetensors.torch import load_file

    from mafrt.scripts import train

    # The tiny base calls no tool and writes no program, so that its episodes are paid by chance.
    paid = tmp_path / "paid.py"
    paid.write_text(
        f"import sys\nsys.path.append({str(Path(SHELL_AGENT).parent)!r})\nimport shell_agent\nAGENTS = ('coder',)\n"
        "def run_episode(task, base_url):\n"
        "    shell_agent.run_episode(task, base_url)\n    return task['seed'] % 3\n"
    )
    words = (
        f"--program {paid}:run_episode --tasks_path {DATA} --run_dir {tmp_path / 'run'} --iterations 2 --device cpu "
        "--n_rollout_threads 2 --episode_length 6 --max_new_tokens 8 --eval_episodes 1 --eval_samples 1"
    )
    assert train.main(words.split()) == 0
    episodes = [json.loads(line) for line in (tmp_path / "run/episodes.jsonl").read_text().splitlines()]
    assert {episode["iteration"] for episode in episodes} >= {1, 2}
    assert {turn["agent"] for episode in episodes for turn in episode["turns"]} == {"coder"}
    weights = load_file(tmp_path / "run/checkpoints/step_000002/coder/adapter_model.safetensors")
    assert any(value.abs().sum() > 0 for name, value in weights.items() if "lora_B" in name)
