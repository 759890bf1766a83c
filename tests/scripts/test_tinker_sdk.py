"""The stock SDK `tinker` against the server, in an interpreter of its own; nothing of it is changed but its address."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from mafrt.core.shipped import base_folder
from mafrt.models.shared_base import SharedBase
from mafrt.scripts.tinker_server.checkpoints import Checkpoints
from mafrt.scripts.tinker_server.limits import Limits
from mafrt.scripts.tinker_server.server import TinkerServer
from mafrt.scripts.tinker_server.service import Service, names_of

pytestmark = [pytest.mark.takes(slow=25), pytest.mark.slow, pytest.mark.ci]
ROOT = Path(__file__).parents[2]

SCRIPT = """
import json, sys
import tinker
from tinker import types

service = tinker.ServiceClient()
client = service.create_lora_training_client(base_model="teaching-base", rank=4, seed=1).result()
tokenizer, said = client.get_tokenizer(), {}
ids = tokenizer.encode("Problem: Tom has 3 pens and gets 4 more.")
data = [types.Datum(model_input=types.ModelInput.from_ints(ids[:-1]),
                    loss_fn_inputs={"target_tokens": ids[1:], "weights": [1.0] * (len(ids) - 1)})] * 3
said["losses"] = []
for _ in range(4):
    passed = client.forward_backward(data, "cross_entropy")
    stepped = client.optim_step(types.AdamParams(learning_rate=3e-3))
    said["losses"].append(passed.result().metrics["loss:sum"])
    stepped.result()
sampler = client.save_weights_and_get_sampling_client().result()
made = sampler.sample(types.ModelInput.from_ints(ids[:6]), 3, types.SamplingParams(max_tokens=6, seed=1),
                      include_prompt_logprobs=True, topk_prompt_logprobs=2).result()
said["samples"] = [[len(each.tokens), len(each.logprobs)] for each in made.sequences]
scored = sampler.compute_logprobs(types.ModelInput.from_ints(ids)).result()
own = client.forward(data[:1], "cross_entropy").result().loss_fn_outputs[0]["logprobs"].to_numpy()
said["apart"] = float(max(abs(a - b) for a, b in zip(scored[1:], own)))
state, weights = client.save_state("a").result().path, client.save_weights_for_sampler("a").result().path
again = service.create_training_client_from_state_with_optimizer(state).result()
said["again"] = abs(again.forward(data, "cross_entropy").result().metrics["loss:sum"]
                    - client.forward(data, "cross_entropy").result().metrics["loss:sum"])

def custom(data, logprobs):
    loss = -sum(each.sum() for each in logprobs)
    return loss, {"mine:sum": loss.item()}

said["custom"] = client.forward_backward_custom(data, custom).result().metrics["mine:sum"]
said["sampler"] = service.create_sampling_client(model_path=weights).result().get_base_model()
saved = tinker.RestClient().list_checkpoints(client.model_id).result().checkpoints
said["saved"] = sorted(each.checkpoint_type for each in saved)
try:
    client.forward_backward(data, "gspo").result()
except Exception as error:
    said["refused"] = str(error)
service.close("success").result()
print("SAID" + json.dumps(said))
"""


@pytest.fixture(scope="module")
def sdk(tmp_path_factory):
    """An interpreter with the SDK, torch among its packages for custom losses."""
    if given := os.environ.get("MAFRT_TEST_TINKER_PYTHON"):
        return given
    folder = tmp_path_factory.mktemp("sdk")
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    # Behind the SDK's own packages: torch from where this process has it.
    [packages] = folder.glob("lib/python*/site-packages")
    (packages / "torch.pth").write_text(str(Path(torch.__file__).parents[1]))
    python = str(folder / "bin" / "python")
    made = subprocess.run([python, "-m", "pip", "install", "-q", "tinker==0.38.*"], capture_output=True, text=True)
    if made.returncode and "No matching distribution" in made.stderr + made.stdout:
        pytest.skip("the package index cannot be reached, or has no tinker 0.38")
    assert made.returncode == 0, made.stderr
    return python


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    server, folder = TinkerServer(), str(base_folder("teaching-base"))
    checkpoints = Checkpoints(tmp_path_factory.mktemp("runs"), 10)
    base = SharedBase.load("teaching-base", dtype="float32")
    server.service = Service(base, names_of(folder, "teaching-base"), folder, checkpoints, Limits())
    yield server
    server.close()


def run(sdk, served, *words):
    settings = {"TINKER_BASE_URL": served.url, "TINKER_API_KEY": "tml-test-of-the-sdk", "TINKER_TELEMETRY": "0"}
    made = subprocess.run([sdk, *words], env={**os.environ, **settings}, capture_output=True, text=True, timeout=600)
    assert made.returncode == 0, made.stderr
    return made.stdout


@pytest.mark.nightly
def test_the_stock_client(sdk, served):
    said = json.loads(run(sdk, served, "-c", SCRIPT).split("SAID")[1])
    assert said["losses"] == sorted(said["losses"], reverse=True)
    assert all(0 < tokens == logprobs <= 6 for tokens, logprobs in said["samples"]) and len(said["samples"]) == 3
    assert said["apart"] < 1e-4 and said["again"] < 1e-3 and said["custom"] > 0
    assert said["sampler"] and said["saved"] == ["sampler", "training"] and "cross_entropy" in said["refused"]


@pytest.mark.nightly
def test_the_example_of_a_team(sdk, served):
    out = run(sdk, served, str(ROOT / "examples/tinker_team.py"), "2", "4")
    assert out.count("reward") == 2
