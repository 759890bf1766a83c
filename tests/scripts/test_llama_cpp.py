"""A team's adapters in llama.cpp itself: every agent answers as its PEFT folder does."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch

from bench._gguf import write_gguf
from mafrt.scripts.exporting.gguf_adapters import served_by_llama, write_gguf_adapter

pytestmark = [pytest.mark.slow, pytest.mark.ci]
PACKAGE = "xllamacpp==2026.10.11549"
PROMPT, LENGTH = [5, 9, 17, 33, 2], 8
ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]

# Reads the adapters as `llama-server` reads the words of our command.
SERVER = """
import json, sys
import xllamacpp

folder, (_, _, base, _, adapters), prompt, length = sys.argv[1], *map(json.loads, sys.argv[2:])
params = xllamacpp.CommonParams()
params.model.path, params.n_ctx, params.n_parallel, params.verbosity = base, 256, 4, 0
params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
params.cache_type_k = params.cache_type_v = 0  # float32
params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
given = [word.split(":") for word in adapters.split(",")]
params.lora_adapters = [xllamacpp.CommonAdapterLoraInfo(f"{folder}/{path}", float(scale)) for path, scale in given]
server, said = xllamacpp.Server(params), []
for named in ({}, *({"lora": [{"id": number, "scale": 1.0}]} for number in range(len(given)))):
    asked = {"prompt": prompt, "n_predict": length, "temperature": 0.0, "samplers": ["temperature"], "n_probs": 1}
    answer = server.handle_completions({**asked, **named})
    said.append([(each["id"], each["logprob"]) for each in answer["choices"][0]["logprobs"]["content"]])
print("SAID" + json.dumps(said))
"""


@pytest.fixture(scope="module")
def packages(tmp_path_factory):
    """A folder with llama.cpp's package."""
    folder = tmp_path_factory.mktemp("llama")
    pip = [sys.executable, "-m", "pip", "install", "-qq", "--no-deps", "--target", str(folder), PACKAGE]
    done = subprocess.run(pip, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"{PACKAGE} cannot be installed: {done.stderr[-200:]}")
    return str(folder)


@torch.no_grad()
def greedy(model):
    """Tokens and log-probabilities."""
    ids, said = list(PROMPT), []
    for _ in range(LENGTH):
        logprobs = model(torch.tensor([ids])).logits[0, -1].log_softmax(-1)
        ids.append(int(logprobs.argmax()))
        said.append((ids[-1], float(logprobs.max())))
    return said


@pytest.mark.cases(1)
@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_every_agent_answers_as_its_peft_folder_does(packages, tmp_path, family):
    pytest.importorskip("gguf")
    from peft import LoraConfig, get_peft_model
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    shape = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2}
    shape |= {"intermediate_size": 96, "vocab_size": 64, "head_dim": 16, "max_position_embeddings": 64}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, initializer_range=0.2, **shape)).eval()
    model.save_pretrained(tmp_path / "base")
    write_gguf(model, tmp_path / "base.gguf", "float32")
    wanted = [greedy(model)]
    own = [LoraConfig(r=3, lora_alpha=6, target_modules=ALL, init_lora_weights=False, alpha_pattern={"v_proj": 12},
                      rank_pattern={"o_proj": 2}),
           LoraConfig(r=2, lora_alpha=8, target_modules=ALL, init_lora_weights=False)]  # fmt: skip
    adapted = get_peft_model(model, own[0], "solver")
    adapted.add_adapter("judge", own[1])
    for name in ("solver", "judge"):
        adapted.set_adapter(name)
        wanted.append(greedy(adapted))
        adapted.save_pretrained(tmp_path, selected_adapters=[name])
        write_gguf_adapter(tmp_path / name / "adapter.gguf", tmp_path / name, str(tmp_path / "base"))
    words = served_by_llama(str(tmp_path / "base.gguf"), ["solver", "judge"]).split()
    command = [sys.executable, "-c", SERVER, str(tmp_path), *map(json.dumps, (words, PROMPT, LENGTH))]
    environ = {**os.environ, "PYTHONPATH": packages}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    # The first answer names no adapter: the base alone, and not the sum of all.
    found = json.loads(done.stdout.split("SAID")[1])
    assert [[token for token, _ in said] for said in found] == [[token for token, _ in said] for said in wanted]
    for one, other in zip(found, wanted, strict=True):
        assert [value for _, value in one] == pytest.approx([value for _, value in other], abs=1e-4)
