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


# ------------------------------------------------------------------------------------------ recipes of tinker_cookbook

COOKBOOK = "0.5.8"
NAME = "Qwen/Qwen3-8B-Base"
"""One of the names that its recipes know; here it is the teaching base's."""
RECIPE = """
import json, runpy, sys
import datasets

def load_dataset(source, *words, split=None, **more):
    rows = []
    # Two of the recipes take batches of 128 rows, one of them as many as there are.
    for n in range({"HuggingFaceH4/no_robots": 256, "openai/gsm8k": 4}.get(source, 24)):
        asked, said = f"What is {n} plus 4?", str(n + 4)
        chat = [{"role": "user", "content": asked}, {"role": "assistant", "content": said}]
        rows.append({"messages": chat, "question": asked, "answer": f"#### {n + 4}", "problem": asked, "solution": said,
                     "final_answer": str(n + 4), "instruction": asked, "output": said})
    table = datasets.Dataset.from_list(rows)
    return table if split else datasets.DatasetDict({"train": table, "test": table})

datasets.load_dataset = load_dataset  # the hub's sets are large, and elsewhere
sys.argv = sys.argv[1:]
runpy.run_module("tinker_cookbook.recipes." + sys.argv[0], run_name="__main__", alter_sys=True)
"""
RECIPES = """
sl_loop batch_size=8 max_length=512 max_steps=2
rl_loop batch_size=2 group_size=4 max_tokens=16 max_steps=2
sl_basic max_steps=1
rl_basic max_tokens=16 max_steps=1
chat_sl.train RENDERED dataset=chat.jsonl batch_size=8 max_length=512 eval_every=2 rolling_save_every=1 max_steps=3
prompt_distillation.train RENDERED file_path=chat.jsonl batch_size=8 max_length=512 max_steps=2
math_rl.train RENDERED groups_per_batch=2 loss_fn=ppo save_every=1 max_steps=2
math_rl.train RENDERED groups_per_batch=2 loss_fn=cispo max_steps_off_policy=1 num_substeps=2 max_steps=3
math_rl.train RENDERED groups_per_batch=4 loss_fn=dro stream_minibatch_config.groups_per_batch=4
    stream_minibatch_config.num_minibatches=2 compute_post_kl=True max_steps=2
preference.shorter.train RENDERED batch_size=2 group_size=4 max_tokens=16 eval_every=0 max_steps=2
multiplayer_rl.guess_number.train RENDERED batch_size=2 group_size=4 max_tokens=8 eval_every=0 max_steps=1
distillation.on_policy_distillation RENDERED teacher_model=NAME groups_per_batch=2 group_size=2 lora_rank=16
    max_tokens=16 max_steps=2
sdft.train RENDERED dataset=toolalpaca groups_per_batch=2 lora_rank=16 max_tokens=16 topk=5 eval_every=0 max_steps=2
rubric.train RENDERED groups_per_batch=2 grader_llm_name=NAME grader_renderer_name=role_colon max_tokens=8
    train_jsonl_path=rubric.jsonl test_jsonl_path=rubric.jsonl max_steps=1
"""
RENDERED = "renderer_name=role_colon behavior_if_log_dir_exists=delete"


@pytest.fixture(scope="module")
def cookbook(sdk, tmp_path_factory):
    """The interpreter, a folder for the recipes, and the address of a server of a base of that name."""
    if subprocess.run([sdk, "-c", "import tinker_cookbook, math_verify"], capture_output=True).returncode:
        wanted = f"tinker-cookbook[math-rl]=={COOKBOOK}"
        made = subprocess.run([sdk, "-m", "pip", "install", "-q", wanted], capture_output=True, text=True)
        if made.returncode and "No matching distribution" in made.stderr + made.stdout:
            pytest.skip("the package index cannot be reached, or has no such tinker-cookbook")
        assert made.returncode == 0, made.stderr
    folder = tmp_path_factory.mktemp("cookbook")
    (folder / "Qwen").mkdir()
    (folder / NAME).symlink_to(base_folder("teaching-base"))
    chat = [{"role": "user", "content": "What is 3 plus 4?"}, {"role": "assistant", "content": "7"}]
    (folder / "chat.jsonl").write_text((json.dumps({"messages": chat}) + "\n") * 24)
    item = {"rubric_str": "Right?", "extraction_regex": "(\\d)", "grader_output_format_instruction": "Give 0 or 1."}
    (folder / "rubric.jsonl").write_text((json.dumps({"convo": chat[:1], "rubric_items": [item]}) + "\n") * 8)
    server, base = TinkerServer(), SharedBase.load("teaching-base", dtype="float32")
    server.service = Service(base, [NAME], NAME, Checkpoints(folder / "runs", 10), Limits())
    yield sdk, folder, server.url
    server.close()


@pytest.mark.nightly
@pytest.mark.parametrize("recipe", RECIPES.replace("\n    ", " ").strip().splitlines(), ids=lambda one: one.split()[0])
def test_recipes_of_the_cookbook_run_to_their_end(cookbook, tmp_path, recipe):
    sdk, folder, url = cookbook
    module, *words = recipe.replace("NAME", NAME).replace("RENDERED", RENDERED).split()
    settings = {"TINKER_BASE_URL": url, "TINKER_API_KEY": "tml-cook", "TINKER_TELEMETRY": "0", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sdk, "-c", RECIPE, module, f"model_name={NAME}", f"log_path={tmp_path / 'log'}", *words],
        cwd=folder, env={**os.environ, **settings}, capture_output=True, text=True, timeout=900,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    lines = [json.loads(line) for line in (tmp_path / "log/metrics.jsonl").read_text().splitlines()]
    steps = int(recipe.rpartition("=")[2])
    assert len(lines) == steps or ("off_policy" in recipe and lines)
    # The sampler's log-probabilities are the trainer's.
    apart = [line[name] for line in lines for name in line if name == "optim/kl_sample_train_v1"]
    assert all(abs(each) < 1e-4 for each in apart) or "off_policy" in recipe
