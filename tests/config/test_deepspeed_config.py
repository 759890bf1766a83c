"""DeepSpeed configurations: the shipped ones, and what contradicts a run is refused before anything is loaded."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
from pathlib import Path

import pytest
from helpers_warm import run_python

from mafrt.config.train_config import LearnConfig
from mafrt.core.errors import ConfigError, MissingExtraError
from mafrt.training.deepspeed_config import check_fields, read_zero

ROOT = Path(__file__).parents[2]
HAVE = importlib.util.find_spec("deepspeed") is not None


@pytest.fixture
def deepspeed_is_there(monkeypatch):
    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *a: object() if name == "deepspeed" else real(name, *a)
    )


def read(path, processes=2, dtype=None, **learn):
    return read_zero(path, LearnConfig(**learn), dtype=dtype, processes=processes)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_the_shipped_configurations_fit_any_run(stage, deepspeed_is_there):
    path = ROOT / "configs" / f"zero{stage}.json"
    for learn in ({}, {"max_grad_norm": 0.5, "lr": 1e-3}):
        found = read(path, **learn)
        assert found["zero_optimization"]["stage"] == stage and found["train_micro_batch_size_per_gpu"] == 1
        assert "auto" not in json.dumps(found)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{", "not valid JSON"),
        ("[]", "holds a list"),
        ({}, "stage is None; expected 1, 2 or 3"),
        ({"zero_optimization": {"stage": 0}}, "stage is 0"),
        ({"optimizer": {"type": "Lion"}}, "every adapter has an AdamW of its own"),
        ({"scheduler": {"type": "WarmupLR"}}, "learning rates are constant"),
        ({"fp16": {"enabled": True}}, "adapters are float32"),
        ({"gradient_clipping": 0.3}, r"gradient_clipping is 0\.3, but --max_grad_norm decides that; write 1\.0"),
        ({"gradient_accumulation_steps": 4}, "--micro_batch_tokens size batches"),
        ({"train_batch_size": 64}, "it is the number of processes"),
        ({"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}, "offload_optimizer"),
        ({"bf16": {"enabled": True}, "zero_optimization": {"stage": 3}}, "bf16 enabled, but --dtype is float32"),
    ],
)
def test_contradictions_are_refused_with_what_to_change(content, said, tmp_path, deepspeed_is_there):
    path = tmp_path / "ds.json"
    if isinstance(content, dict) and content:
        content = json.dumps({"zero_optimization": {"stage": 2}, **content})
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(ConfigError, match=said):
        read(path, dtype="float32")


def test_a_file_that_is_not_there_names_those_that_ship(tmp_path):
    with pytest.raises(ConfigError, match=r"configs/zero1\.json, configs/zero2\.json, configs/zero3\.json"):
        read(tmp_path / "no.json")


def test_one_process_and_an_8_bit_optimizer_are_refused(deepspeed_is_there):
    path = ROOT / "configs" / "zero1.json"
    with pytest.raises(ConfigError, match="one was started; start them with `accelerate launch`"):
        read(path, processes=1)
    with pytest.raises(ConfigError, match="exclude each other"):
        read(path, optimizer="paged_adamw_8bit")


@pytest.mark.slow
@pytest.mark.skipif(not HAVE, reason="DeepSpeed is not installed")
@pytest.mark.parametrize(
    ("zero", "said"),
    [
        ({"reduce_bucket_sise": 5}, r"zero_optimization\.reduce_bucket_sise, found 5: Extra inputs"),
        ({"offload_param": {"device": "tape"}}, r"zero_optimization\.offload_param\.device, found 'tape'"),
        ({"reduce_bucket_size": "auto", "overlap_comm": "auto"}, None),
    ],
)
def test_settings_that_deepspeed_does_not_know_are_refused_by_name(zero, said, tmp_path):
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({"zero_optimization": {"stage": 3, **zero}}))
    settings = read(path)
    if said is None:
        return check_fields(path, settings)
    with pytest.raises(ConfigError, match=said):
        check_fields(path, settings)


def test_without_deepspeed_one_sentence_says_what_to_install(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *_: None)
    with pytest.raises(MissingExtraError, match="pip install 'deepspeed"):
        read(ROOT / "configs" / "zero1.json")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "environment", "said"),
    [
        (["--deepspeed", "configs/zero2.json"], {}, "one was started"),
        ([], {"ACCELERATE_USE_DEEPSPEED": "true"}, "mafrt sets it up itself"),
        ([], {"WORLD_SIZE": "2", "RANK": "0", "ACCELERATE_USE_FSDP": "true"}, "add --fsdp_version 2"),
        (["--device", "cuda:0"], {"WORLD_SIZE": "2", "RANK": "1"}, "each with a GPU of its own"),
        (["--n_rollout_threads", "1"], {"WORLD_SIZE": "2", "RANK": "0"}, "too few for 2 processes"),
        (["--load_in_4bit", "--load_in_8bit"], {}, "both on"),
    ],
)
def test_the_script_refuses_before_it_loads_anything(words, environment, said, tmp_path):
    script = ROOT / "scripts" / "train_math.py"
    done = run_python(script, "--run_dir", tmp_path / "run", *words, env={**os.environ, **environment}, cwd=ROOT)
    assert done.returncode == 2 and said in done.stderr, done.stderr
    assert done.stderr.count("\n") == 1 and "Loading" not in done.stdout and not (tmp_path / "run").exists()


@pytest.mark.parametrize("command", ["evaluate", "train_sft", "train_dpo"])
def test_commands_of_one_process_refuse_a_launcher_at_once(command, monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    main = importlib.import_module(f"mafrt.scripts.{command}").main
    assert main(["--load_path", "nowhere"] if command == "evaluate" else []) == 2
    error = capsys.readouterr().err
    assert f"(process 1 of 2): {command} runs in one process, and 2 were started" in error and error.count("\n") == 1
