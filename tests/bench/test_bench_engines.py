"""Rivals from other systems: the file for llama.cpp holds the model, and a missing package is told in one sentence."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from argparse import Namespace

import pytest
import torch

from bench._gguf import write_gguf
from bench._models import Rivals, random_model
from bench._other_engines import ENGINES, open_engine
from mafrt.core.errors import ConfigError

pytestmark = pytest.mark.takes(slow=34)

SHAPE = Namespace(vocab=64, width=64, mlp=96, layers=2)


def llama(**changes):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    shape = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, **changes}
    shape |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32}
    return LlamaForCausalLM(LlamaConfig(**shape)).eval()


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize("model", [lambda: random_model(SHAPE, 32), llama], ids=["qwen3", "llama"])
def test_a_gguf_file_read_back_by_transformers_is_the_same_model(tmp_path, model):
    gguf = pytest.importorskip("gguf")
    from transformers import AutoModelForCausalLM

    written = model()
    write_gguf(written, tmp_path / "model.gguf", "float32")
    vocabulary = gguf.GGUFReader(tmp_path / "model.gguf").get_field("tokenizer.ggml.tokens").contents()
    assert vocabulary == [f"<{number}>" for number in range(64)]
    # transformers does not read the width of a head, so it is given the configuration.
    read = AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file="model.gguf", config=written.config, dtype=torch.float32
    )
    ids = torch.tensor([[5, 9, 17, 33]])
    with torch.no_grad():
        assert torch.equal(read(ids).logits, written(ids).logits)


def test_a_tied_head_is_not_written_twice(tmp_path):
    gguf = pytest.importorskip("gguf")
    write_gguf(llama(tie_word_embeddings=True), tmp_path / "model.gguf", "bfloat16")
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(tmp_path / "model.gguf").tensors}
    assert "output.weight" not in tensors
    kinds = gguf.GGMLQuantizationType
    assert tensors["blk.0.attn_q.weight"].tensor_type == kinds.BF16
    assert tensors["blk.0.attn_norm.weight"].tensor_type == kinds.F32


def test_a_family_that_llama_cpp_is_no_rival_for_is_refused(tmp_path):
    from transformers import GPT2Config, GPT2LMHeadModel

    other = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=16, vocab_size=32))
    with pytest.raises(ConfigError, match="plain Qwen3 and Llama models; found 'gpt2'"):
        write_gguf(other, tmp_path / "model.gguf", "float32")


@pytest.mark.parametrize("name", list(ENGINES))
def test_a_missing_package_is_named(tmp_path, monkeypatch, name):
    monkeypatch.setitem(ENGINES, name, "no_such_package")
    with pytest.raises(ConfigError, match=f"{name} is not installed: found no package 'no_such_package'"):
        open_engine(name, Rivals(None, None, None), tmp_path, dtype="float32", window=8, rows=1, threads=1)


@pytest.mark.nightly
@pytest.mark.ci
@pytest.mark.slow
@pytest.mark.parametrize("name", list(ENGINES))
def test_another_engine_says_our_tokens_and_is_timed(name):
    if importlib.util.find_spec(ENGINES[name]) is None:
        pytest.skip(f"{name} IS NOT INSTALLED: no rival of that name")
    small = ["--width", "64", "--mlp", "64", "--layers", "1", "--vocab", "64", "--prompt", "12", "--tokens", "4"]
    words = [*small, "--adapters", "2", "--rows", "1", "--batch", "4", "--draws", "64", "--rounds", "1"]
    # In a process of its own: vLLM stays in the one that has loaded it.
    command = [sys.executable, "-m", "mafrt.scripts.bench", "rollout", *words, "--engines", name]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert ("vllm/ours" in found["rows"][0]) == (name == "vllm")
    assert found["bare"][0][f"{name}/bare greedy"]["median"] > 0
    assert found["bare"][0][f"{name}/bare sampled"]["median"] > 0
