"""An export served by a real vLLM with its printed command, and `serve_team` on it, against the local engine."""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM IS NOT INSTALLED: nothing is served with it (requirements-scale.txt)", allow_module_level=True)

from openai import APIConnectionError, OpenAI

from mafrt.config.team import Team
from mafrt.core.shipped import TEACHING_BASE
from mafrt.core.types import Request, SamplingParams
from mafrt.engines.local.engine import LocalEngine
from mafrt.models.shared_base import SharedBase
from mafrt.rollout.prompts import encode_prompt
from mafrt.scripts import export, train_math

pytestmark = [pytest.mark.takes(slow=30), pytest.mark.slow, pytest.mark.ci]

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
    argv += ["--profile_path", "profiles/quickstart_math.json", "--threads", "1", "--coach", "rules", "--lr", "0.01"]
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
    with contextlib.suppress(ProcessLookupError):  # it may have ended by itself
        os.killpg(process.pid, signal.SIGTERM)
    try:
        process.wait(timeout=60)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)


@pytest.mark.nightly
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


# ------------------------------------------------------------------------------------------------ the printed command

CPU_FLAGS = "--dtype float32 --enforce-eager --gpu-memory-utilization 0.1 --host 127.0.0.1 --port"
"""Added to the printed command: the local engine's number format, no compilation, little memory, a free port."""


def vllm_environment(folder: Path) -> dict[str, str]:
    """The environment with the installed `vllm` script first on the path.

    The script asks for the version of a distribution named vllm. The build for CPUs is named vllm-cpu, so an entry of
    that name is put beside it.
    """
    name = next(name for name in ("vllm", "vllm-cpu") if is_installed(name))
    found = importlib.metadata.distribution(name)
    script = next(Path(file.locate()) for file in found.files or () if file.name == "vllm" and "bin" in file.parts)
    # The model runs in the engine's process: two processes import vLLM, and not three.
    ours = {**ON_CPU, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    environment = {**ours, "PATH": f"{script.resolve().parent}{os.pathsep}{os.environ['PATH']}"}
    if name != "vllm":
        version = f"{found.version}+cpu"  # as vllm.platforms names this build
        entry = folder / f"vllm-{version}.dist-info"
        entry.mkdir()
        (entry / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")
        environment["PYTHONPATH"] = str(folder)
    return environment


def is_installed(name: str) -> bool:
    try:
        importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def models(client: OpenAI, server: subprocess.Popen, log: Path) -> set[str]:
    """Names of the models, once the server answers."""
    deadline = time.monotonic() + 400
    while time.monotonic() < deadline:
        assert server.poll() is None, log.read_text()[-3000:]
        try:
            return {model.id for model in client.models.list()}
        except APIConnectionError:
            time.sleep(1)
    raise AssertionError(log.read_text()[-3000:])


@pytest.mark.nightly
def test_the_printed_command_serves_every_agent(exported, tmp_path):
    card = (exported / "README.md").read_text()
    [command] = [line for line in card.splitlines() if line.startswith("vllm serve")]
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    # The card has the base's name, as hubs know it; the one that ships with mafrt is on none.
    words = [*shlex.split(command.replace(" teaching-base ", f" {TEACHING_BASE} ")), *CPU_FLAGS.split(), str(port)]
    (tmp_path / "names").mkdir()
    log = tmp_path / "log"
    with open(log, "wb") as out:
        server = subprocess.Popen(
            ["bash", "-c", f"exec {shlex.join(words)}"],
            env=vllm_environment(tmp_path / "names"), cwd=exported, stdout=out, stderr=out, start_new_session=True,
        )  # fmt: skip
    try:
        expected = greedy(exported)
        assert expected["reasoner"] != expected["actor"]
        with OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="x", max_retries=0, timeout=120) as client:
            assert models(client, server, log) == {str(TEACHING_BASE), "reasoner", "actor"}
            for name, text in expected.items():
                system = {"role": "system", "content": (exported / name / "role_prompt.txt").read_text()}
                reply = client.chat.completions.create(
                    model=name, messages=[system, *ASK], temperature=0, max_tokens=24
                )
                assert reply.choices[0].message.content == text
    finally:
        stopped(server)


@pytest.mark.nightly
def test_a_team_trains_on_servers_that_one_command_has_started(tmp_path):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    words = [sys.executable, "-m", "mafrt.scripts.main", "serve_vllm", "--device", "cpu", "--port", port]
    words += ["--profile_path", "profiles/quickstart_math.json", "--context_window", "256"]
    with subprocess.Popen(words, env=ON_CPU, stdout=subprocess.PIPE, text=True) as servers:
        try:
            assert servers.stdout is not None
            said = next((line for line in servers.stdout if "--vllm_servers" in line), "")
            assert f"http://127.0.0.1:{port};" in said
            train = ["--iterations", "1", "--n_rollout_threads", "4", "--max_new_tokens", "12", "--eval_episodes", "0"]
            train += ["--profile_path", "profiles/quickstart_math.json", "--engine", "vllm", "--context_window", "256"]
            train += [
                "--vllm_servers",
                f"http://127.0.0.1:{port}",
                "--run_dir",
                str(tmp_path / "run"),
                "--coach",
                "rules",
            ]
            assert train_math.main(train) == 0
        finally:
            servers.send_signal(signal.SIGTERM)
    assert (tmp_path / "run/checkpoints/step_000001/reasoner/adapter_model.safetensors").exists()
