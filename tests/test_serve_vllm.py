"""`serve_team` on a real vLLM, against the local engine with the exported adapters."""

from __future__ import annotations

import importlib.util
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM IS NOT INSTALLED: serve_team is untested on it (requirements-scale.txt)", allow_module_level=True)

from openai import OpenAI

from mafrt.config.team import Team
from mafrt.core.shipped import TEACHING_BASE
from mafrt.core.types import Request, SamplingParams
from mafrt.engines.local.engine import LocalEngine
from mafrt.models.shared_base import SharedBase
from mafrt.rollout.prompts import encode_prompt
from mafrt.scripts import export, train_math

pytestmark = pytest.mark.slow

ASK = [{"role": "user", "content": "Problem: Tom has 3 pens and gets 4 more. How many pens does he have?"}]
ON_CPU = {
    **os.environ,
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "OMP_NUM_THREADS": "1",
}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run whose adapters have learnt something in two large steps."""
    folder = tmp_path_factory.mktemp("export") / "run"
    argv = ["--iterations", "2", "--n_rollout_threads", "16", "--max_new_tokens", "24", "--eval_episodes", "0"]
    argv += ["--profile_path", "profiles/quickstart.json", "--threads", "1", "--coach", "rules", "--lr", "0.01"]
    assert train_math.main([*argv, "--run_dir", str(folder)]) == 0
    return folder


@pytest.fixture(scope="module")
def exported(run, tmp_path_factory):
    target = tmp_path_factory.mktemp("export") / "team"
    assert export.main([str(run), "--output", str(target)]) == 0
    return target


def greedy(exported: Path) -> dict[str, str]:
    """What each agent answers on the local engine, from the exported files alone."""
    team, base = Team.load(exported / "team.json"), SharedBase.load(str(TEACHING_BASE))
    for agent in team.agents:
        base.load_adapter(agent.adapter, exported / agent.adapter)
    engine, sampling = LocalEngine(base), SamplingParams(max_new_tokens=24, temperature=0.0)
    requests = [
        Request(encode_prompt(base.tokenizer, agent.prompt, ASK), agent.adapter, sampling, 0) for agent in team.agents
    ]
    return {agent.name: done.text for agent, done in zip(team.agents, engine.generate(requests), strict=True)}


def stopped(process: subprocess.Popen) -> None:
    """End a server and the processes it has started."""
    os.killpg(process.pid, signal.SIGTERM)
    try:
        process.wait(timeout=60)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)


def test_serve_team_on_vllm_answers_as_the_local_engine(run, exported):
    words = [sys.executable, "-m", "mafrt.scripts.serve_team", str(run), "--engine", "vllm", "--port", "0"]
    server = subprocess.Popen(
        [*words, "--threads", "1"], env=ON_CPU, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        address = next(found[0] for line in server.stdout if (found := re.search(r"http://\S+/v1", line)))
        expected = greedy(exported)
        with OpenAI(base_url=address, api_key="x", max_retries=0, timeout=120) as client:
            for name in ("reasoner", "actor"):
                reply = client.chat.completions.create(model=name, messages=ASK, temperature=0, max_tokens=24)
                assert reply.choices[0].message.content == expected[name]
                chunks = client.chat.completions.create(
                    model=name, messages=ASK, temperature=0, max_tokens=24, stream=True
                )
                assert "".join(c.choices[0].delta.content or "" for c in chunks) == expected[name]
    finally:
        stopped(server)
