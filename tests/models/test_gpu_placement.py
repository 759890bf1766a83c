"""What a run decides for GPUs before a model is loaded: number format, devices, vLLM's share, and what is refused."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from helpers_families import tiny
from helpers_models import tiny_base, tiny_model, tiny_tokenizer
from safetensors.torch import load_file, save_file

from bench._gpu.pretend_cuda import PretendCuda
from mafrt.config.agent import LoraSpec
from mafrt.config.team import Team
from mafrt.config.train_config import EngineConfig, LearnConfig
from mafrt.core import gpus
from mafrt.core.distributed import Processes
from mafrt.core.errors import ConfigError
from mafrt.core.gpus import unusable_gpu
from mafrt.core.shipped import base_folder
from mafrt.engines.local.engine import LocalEngine
from mafrt.engines.vllm import gpu_layout
from mafrt.engines.vllm.gpu_layout import check_gpus, vllm_gpus
from mafrt.engines.vllm.in_process import VllmEngine, _environment
from mafrt.models import pretrained
from mafrt.models.compute import Compute
from mafrt.models.gpu.compute import GpuCompute
from mafrt.models.memory_estimate import model_shape
from mafrt.models.out_of_memory import out_of_memory
from mafrt.models.shared_base import SharedBase
from mafrt.runners import build
from mafrt.runners.micro_batch import free_bytes
from mafrt.scripts import chat, evaluate, info, serve_team, train_math, train_sft
from mafrt.scripts.cli import loading
from mafrt.scripts.cli.processes import ProcessLayout
from mafrt.scripts.cli.run_main import run_main
from mafrt.training.learner import Learner
from mafrt.training.policy_objective import Objective

GB = 10**9


@pytest.fixture
def machine(monkeypatch):
    """A machine with some GPUs, as torch and a launcher describe it; they cannot compute."""

    def make(there=8, rank=0, trainers=1, free=79 * GB, total=80 * GB):
        for name in ("CUDA_VISIBLE_DEVICES", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
            monkeypatch.delenv(name, raising=False)
        if trainers > 1:
            for name, value in (("RANK", rank), ("LOCAL_RANK", rank)):
                monkeypatch.setenv(name, str(value))
            for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
                monkeypatch.setenv(name, str(trainers))
        monkeypatch.setattr(torch.cuda, "is_available", lambda: there > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: there)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: rank)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None: (free, total))
        monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ["sm_80", "sm_90", "compute_90"])
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "Old GPU")

    return make


def checkpoint(folder, dtype):
    """The teaching base as a checkpoint of another number format."""
    shutil.copytree(base_folder("teaching-base"), folder)
    config = json.loads((folder / "config.json").read_text())
    config["dtype"] = config["torch_dtype"] = dtype
    (folder / "config.json").write_text(json.dumps(config))
    for file in folder.glob("*.safetensors"):
        weights = {name: weight.to(getattr(torch, dtype)) for name, weight in load_file(file).items()}
        save_file(weights, file, metadata={"format": "pt"})
    return str(folder)


# ------------------------------------------------------------------------------------------- number format and device


@pytest.mark.parametrize("how", [{"fsdp": True}, {"zero": {"zero_optimization": {"stage": 3}}}])
@pytest.mark.parametrize(
    ("device", "own", "loaded"),
    [
        ("cuda:1", "bfloat16", torch.bfloat16),
        ("cuda:1", "float16", torch.bfloat16),
        ("cuda:1", "float32", torch.float32),
        ("cpu", "bfloat16", torch.float32),
    ],
)
def test_a_base_to_be_sharded_has_the_format_of_its_device(tmp_path, monkeypatch, capsys, how, device, own, loaded):
    spread = []
    monkeypatch.setattr(build, "spread", lambda base, *rest, **more: spread.append(base))
    settings = train_math.COMMAND.read(["--model_name_or_path", checkpoint(tmp_path / "base", own)])
    loading.load_base(settings, Team.of(["solver"]), ProcessLayout(Processes(0, 2, device=device), **how))
    (base,) = spread
    assert base.model.dtype == loaded and base.device == torch.device("cpu"), "it goes to the GPUs in parts"
    base.processes = Processes(0, 2, device=device)
    base.shard(lambda: None)
    assert base.device == torch.device(device), "with its number: cuda alone is GPU 0 to whoever asks"


def test_a_base_that_goes_to_a_gpu_gets_no_form_of_the_cpu():
    stays = SharedBase(tiny_model(), tiny_tokenizer())
    goes = SharedBase(tiny_model(), tiny_tokenizer(), goes_to="cuda:1")
    names = {base: {type(part).__mro__[0].__module__ for part in base.model.modules()} for base in (stays, goes)}
    assert type(goes.compute) is GpuCompute and goes.context.packed is None
    assert not any(name.startswith("mafrt.cpu") for name in names[goes])
    if type(stays.compute) is not Compute:
        assert stays.context.packed is not None, "or the comparison means nothing"


def test_every_process_knows_the_number_of_its_gpu(monkeypatch):
    import accelerate

    from mafrt.core import distributed

    monkeypatch.setattr(distributed, "_joined", False)
    monkeypatch.setattr(distributed, "started", lambda: (5, 8))
    monkeypatch.setattr(distributed, "_new_group", lambda *args: "gloo beside nccl")
    state = SimpleNamespace(backend="nccl", device=torch.device("cuda", 5))
    monkeypatch.setattr(accelerate, "PartialState", lambda **_: state)
    assert distributed.connect(cpu=False).device == "cuda:5"


# ------------------------------------------------------------------------------------------------------------ float16


def gradient(dtype, share):
    """Of one adapter, for a mean over tokens that gives each of them `share`."""
    base = SharedBase(tiny_model(layers=4, width=64).to(dtype), tiny_tokenizer())
    base.add_adapter("one", LoraSpec(rank=8), seed=0)
    # An adapter begins with B = 0, where half of its gradient is 0.
    for number, parameter in enumerate(base.adapter_parameters("one")):
        torch.nn.init.normal_(parameter, std=0.02, generator=torch.Generator().manual_seed(number))
    base.bump("one")
    ids = torch.randint(5, 90, (4, 64), generator=torch.Generator().manual_seed(0))
    states = base.forward(ids, None, torch.zeros(4, dtype=torch.long))
    logprobs, _ = base.token_logprobs(states[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), entropy_grad=False)
    (share * logprobs).sum().backward()
    return torch.cat([p.grad.flatten() for p in base.adapter_parameters("one")]).double() / share


@pytest.mark.slow
def test_gradients_of_long_batches_survive_in_what_a_float16_checkpoint_is_trained_in():
    exact = gradient(torch.float32, 1.0)

    def cosine(dtype, share):
        return float(torch.cosine_similarity(gradient(dtype, share), exact, dim=0))

    # 64 turns of 500 tokens, and an advantage of .05 on top.
    for share in (1.0, 1 / 32000, 0.05 / 32000):
        assert cosine(torch.bfloat16, share) > 0.99
    assert cosine(torch.float16, 0.05 / 32000) < 0.9, "why float16 is refused"


def test_nothing_learns_on_a_float16_base():
    base = SharedBase(tiny_model().half(), tiny_tokenizer())
    base.add_adapter("one", LoraSpec(rank=2), seed=0)
    with pytest.raises(ConfigError, match=r"float16.*--dtype bfloat16"):
        Learner(base, Team.of(["one"]), LearnConfig(), Objective(), 0)


@pytest.mark.parametrize(
    ("command", "words"),
    [(train_math, ()), (train_sft, ("--records_path", "x.jsonl"))],
)
def test_float16_is_refused_before_anything_is_loaded(command, words, monkeypatch, capsys, tmp_path):
    def never(*args, **kwargs):
        raise AssertionError("a base is loaded")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(SharedBase, "load", never)
    record = {
        "agent": "solver",
        "messages": [{"role": "user", "content": "1+1"}, {"role": "assistant", "content": "2"}],
    }
    (tmp_path / "x.jsonl").write_text(json.dumps(record))
    assert command.main(["--dtype", "float16", *words]) == 2
    assert "bfloat16" in capsys.readouterr().err


# -------------------------------------------------------------------------------------------------- GPUs beside vLLM


@pytest.mark.parametrize(
    ("own", "size", "there", "expected"),
    [(0, 1, 1, [0]), (1, 1, 2, [1]), (0, 2, 2, [0, 1]), (1, 2, 2, [1, 0]), (7, 1, 8, [7]), (3, 4, 8, [3, 4, 5, 6])],
)
def test_one_trainer_has_its_own_gpu_first(machine, own, size, there, expected):
    machine(there)
    assert vllm_gpus(own, size, there) == expected


@pytest.mark.parametrize(
    ("trainers", "size", "there"), [(2, 2, 4), (4, 2, 8), (2, 4, 8), (8, 1, 8), (3, 2, 8), (1, 8, 8)]
)
def test_no_two_processes_share_a_gpu(machine, trainers, size, there):
    sets = []
    for rank in range(trainers):
        machine(there, rank, trainers)
        sets.append(vllm_gpus(rank, size, there))
    assert [own[0] for own in sets] == list(range(trainers)), "the first is the trainer's"
    every = [gpu for own in sets for gpu in own]
    assert len(every) == len(set(every)) == trainers * size and max(every) < there


@pytest.mark.parametrize(
    ("device", "rank", "trainers", "size", "seen", "expected"),
    [
        ("cuda", 0, 1, 1, None, "0"),
        ("cuda:0", 0, 1, 1, "6,2", "6"),
        ("cuda:1", 0, 1, 2, "6,2", "2,6"),
        ("cuda:5", 5, 8, 1, None, "5"),
        ("cuda", 5, 8, 1, None, "5"),
        ("cuda:0", 0, 2, 2, None, "0,2"),
        ("cuda:1", 1, 2, 2, None, "1,3"),
        ("cuda:1", 1, 2, 2, "GPU-a, GPU-b,GPU-c,GPU-d", "GPU-b,GPU-d"),
        ("cpu", 1, 2, 1, None, None),
    ],
)
def test_vllm_sees_the_gpus_of_its_own_trainer(machine, monkeypatch, device, rank, trainers, size, seen, expected):
    machine(len(seen.split(",")) if seen else 8, rank, trainers)
    if seen:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", seen)
    with _environment(torch.device(device), size):
        assert os.environ.get("CUDA_VISIBLE_DEVICES") == expected and "LOCAL_RANK" not in os.environ
    assert os.environ.get("CUDA_VISIBLE_DEVICES") == seen


VLLM = {"engine": "vllm"}
QWEN = "Qwen/Qwen3-4B"


@pytest.mark.parametrize(
    ("there", "trainers", "config", "device", "said"),
    [
        (4, 8, {}, None, ["8 processes", "8 GPUs", "sees 4"]),
        (2, 1, {}, "cuda:2", ["cuda:2", "sees 2 GPUs", "from cuda:0 on"]),
        (2, 2, {**VLLM, "tensor_parallel_size": 2}, None, ["4 GPUs", "sees 2", "--tensor_parallel_size"]),
        (1, 1, {**VLLM, "tensor_parallel_size": 2}, None, ["2 GPUs", "sees 1"]),
        (8, 1, {**VLLM, "tensor_parallel_size": 3}, None, ["does not divide", "32 heads", "1, 2, 4, 8"]),
        (8, 1, {**VLLM, "gpu_memory_utilization": 0.95}, None, ["0.95", "8.0 GB", "at most 0.88"]),
        (8, 1, {**VLLM, "gpu_memory_utilization": 0.05}, None, ["0.05", "more than 0.10"]),
    ],
)
def test_layouts_that_cannot_work_are_one_sentence(machine, there, trainers, config, device, said):
    machine(there, 0, trainers)
    with pytest.raises(ConfigError) as refused:
        check_gpus(EngineConfig(**config), QWEN, device)
    assert all(word in str(refused.value) for word in said), str(refused.value)


def test_a_base_too_large_for_the_gpu_twice_is_refused_with_what_helps(machine):
    machine(1, free=14 * GB, total=16 * GB)
    with pytest.raises(ConfigError, match="vllm_servers"):
        check_gpus(EngineConfig(**VLLM), QWEN, None)
    # In four parts, the trainer's base leaves room.
    check_gpus(EngineConfig(**VLLM, gpu_memory_utilization=0.7), QWEN, None, shards=4)


@pytest.mark.parametrize(
    ("there", "trainers", "config", "device"),
    [
        (8, 8, {}, None),
        (8, 4, {**VLLM, "tensor_parallel_size": 2}, None),
        (8, 1, {**VLLM, "tensor_parallel_size": 8}, "cuda:7"),
        (8, 1, VLLM, None),
        (0, 64, {}, None),
        (1, 64, VLLM, "cpu"),
        *((1, 1, VLLM, word) for word in ("gpu", "CUDA", "cuda:-1", "cuda:x", "cuda:" + 20 * "9")),  # told by loading
        (1, 1, {**VLLM, "vllm_servers": ("http://127.0.0.1:1",)}, None),
    ],
)
def test_layouts_that_work_are_not_refused(machine, there, trainers, config, device):
    machine(there, 0, trainers)
    check_gpus(EngineConfig(**config), QWEN, device)


def test_a_base_of_the_hub_is_checked_by_its_config(machine, monkeypatch):
    machine(8)
    config = {"hidden_size": 3584, "num_hidden_layers": 28, "intermediate_size": 18944, "vocab_size": 152064}
    config |= {"num_attention_heads": 28, "num_key_value_heads": 4}
    found = {"somebody/model": config}
    monkeypatch.setattr(gpu_layout, "read_config", lambda name, path: found.get(name, {}))
    with pytest.raises(ConfigError, match="28 heads"):
        check_gpus(EngineConfig(**VLLM, tensor_parallel_size=8), "somebody/model", None)
    with pytest.raises(ConfigError, match=r"at most 0\.79"):
        check_gpus(EngineConfig(**VLLM, gpu_memory_utilization=0.95), "somebody/model", None)
    check_gpus(EngineConfig(**VLLM, tensor_parallel_size=8), "somebody/other", None)


@pytest.mark.parametrize("command", [evaluate, chat, serve_team])
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--tensor_parallel_size", "2"], "2 GPUs, and torch sees 1"),
        (["--gpu_memory_utilization", "0.95"], "gpu_memory_utilization is 0.95"),
        (["--device", "cuda:1"], "cuda:1"),
    ],
)
def test_every_command_that_plays_on_vllm_asks_before_it_loads_a_base(monkeypatch, command, words, said):
    monkeypatch.setattr(loading.load_bases, "load_bases", lambda *args, **kwargs: pytest.fail("a base is loaded"))
    settings = command.COMMAND.read(["--engine", "vllm", *words])
    with PretendCuda(), pytest.raises(ConfigError, match=said):
        loading.load_base(settings, Team.of(["solver"]))


def test_the_share_that_is_said_to_fit_does(machine):
    machine(1)
    check_gpus(EngineConfig(**VLLM, gpu_memory_utilization=0.88), QWEN, None)
    assert model_shape(QWEN).heads == 32


# -------------------------------------------------------------------------------------------------- memory of a GPU


@pytest.mark.parametrize(
    ("error", "ran_out"),
    [
        (torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."), True),
        (RuntimeError("CUDA error: out of memory"), True),
        (torch.AcceleratorError("CUDA error: out of memory"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"), True),
        (RuntimeError("[enforce fail at alloc_cpu.cpp:117] DefaultCPUAllocator: can't allocate memory"), True),
        (RuntimeError("CUDA error: device-side assert triggered"), False),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
    ],
)
def test_every_way_in_which_memory_runs_out_makes_micro_batches_smaller(error, ran_out):
    assert out_of_memory(error) == ran_out


def test_free_memory_is_that_of_the_gpu_that_the_base_is_on(machine, monkeypatch):
    machine(2)
    of_gpu = {torch.device("cuda:0"): (3, 80), torch.device("cuda:1"): (70, 80)}
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None: of_gpu[torch.device(device or "cuda:0")])
    assert free_bytes(torch.device("cuda:1")) == 70 and free_bytes(torch.device("cuda:0")) == 3
    assert free_bytes(torch.device("meta")) is None


@pytest.mark.parametrize(("device", "expected"), [("cuda:1", ["emptied", "awake"]), ("cpu", ["awake"])])
def test_vllm_wakes_up_to_memory_that_torch_has_given_back(machine, monkeypatch, device, expected):
    machine(2)
    done = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: done.append("emptied"))
    engine = object.__new__(VllmEngine)
    engine.base = SimpleNamespace(device=torch.device(device))
    engine._asleep, engine._llm = True, SimpleNamespace(wake_up=lambda: done.append("awake"))
    engine._ask = lambda work: work()
    engine._wake()
    engine._wake()
    assert done == expected


# ------------------------------------------------------------------------------------- a GPU that torch cannot use


@pytest.fixture
def smi(tmp_path, monkeypatch, machine):
    """A driver that knows some GPUs, which torch does not see."""

    def make(names, *, build="13.0"):
        machine(0)
        program = tmp_path / "nvidia-smi"
        program.write_text("#!/bin/sh\n" + ("".join(f"echo '{name}'\n" for name in names) or "exit 9\n"))
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
        monkeypatch.setattr(gpus, "DRIVER", tmp_path / "no driver")
        monkeypatch.setattr(torch.version, "cuda", build)

    return make


def too_old():
    raise RuntimeError(
        "The NVIDIA driver on your system is too old (found version 11040). Please update your GPU driver by ..."
    )


def test_a_cpu_build_beside_a_gpu_is_said_with_the_remedy(smi, capsys):
    smi(["NVIDIA H100", "NVIDIA H100"], build=None)
    said = unusable_gpu()
    assert "NVIDIA H100" in said and "built for CPUs" in said and "install.sh" in said and "\n" not in said
    assert run_main(info.info, []) == 0 and "built for CPUs" in capsys.readouterr().out


def test_an_old_driver_is_said_in_its_own_words(smi, monkeypatch):
    smi(["Tesla V100"])
    monkeypatch.setattr(torch.cuda, "init", too_old)
    said = unusable_gpu()
    assert "Tesla V100" in said and "too old (found version 11040)" in said and "CUDA 13.0 or newer" in said


def test_a_driver_without_its_program_is_found_by_its_folder(smi, monkeypatch, tmp_path):
    smi([], build=None)
    assert unusable_gpu() is None
    (tmp_path / "gpus/0000:01:00.0").mkdir(parents=True)
    monkeypatch.setattr(gpus, "DRIVER", tmp_path / "gpus")
    assert "built for CPUs" in unusable_gpu()


@pytest.mark.parametrize("hidden", ["", "-1"])
def test_gpus_that_are_hidden_on_purpose_are_no_fault(smi, monkeypatch, hidden):
    smi(["NVIDIA H100"], build=None)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
    assert unusable_gpu() is None


@pytest.mark.parametrize(
    ("kinds", "own", "usable"),
    [
        (["sm_80", "sm_90"], (9, 0), True),
        (["sm_80"], (8, 6), True),
        (["sm_86"], (8, 0), False),
        (["sm_80", "sm_90"], (12, 0), False),
        (["sm_80", "compute_90"], (12, 0), True),
        (["sm_90a"], (9, 0), True),
        (["sm_75", "sm_120"], (7, 0), False),
        (["gfx942"], (9, 4), True),
    ],
)
def test_a_gpu_of_another_generation_than_the_build_is_said(machine, monkeypatch, kinds, own, usable):
    machine(1)
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: kinds)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: own)
    said = unusable_gpu()
    assert (said is None) == usable and (usable or "--device cpu" in said)


def test_training_says_it_before_a_base_is_loaded_and_asking_for_the_gpu_is_refused(smi, monkeypatch, capsys):
    smi(["NVIDIA H100"], build=None)
    monkeypatch.setattr(loading.load_bases, "load_bases", lambda *args, **kwargs: tiny_base())
    team = Team.of(["solver"])
    loading.load_base(train_math.COMMAND.read([]), team)
    assert "built for CPUs" in capsys.readouterr().out
    loading.load_base(train_math.COMMAND.read(["--device", "cpu"]), team)
    assert "built for CPUs" not in capsys.readouterr().out
    with pytest.raises(ConfigError, match=r"cuda:0.*built for CPUs"):
        loading.load_base(train_math.COMMAND.read(["--device", "cuda:0"]), team)


@pytest.mark.parametrize("device", ["cuda", "cuda:0", "cuda:-1", "cuda:x", "cuda:" + 20 * "9", "CUDA", "gpu"])
def test_a_device_that_cannot_compute_is_told_to_python_before_a_base_is_read(smi, monkeypatch, device):
    smi(["NVIDIA H100"], build=None)
    monkeypatch.setattr(pretrained, "check_base", lambda *args, **kwargs: pytest.fail("a base is read"))
    number = device.removeprefix("cuda:").isdigit() and len(device) < 9
    said = "built for CPUs" if device == "cuda" or number else "never run on|by its number, as cuda:0"
    with pytest.raises(ConfigError, match=f"device '{device}' cannot be used here: .*({said})"):
        SharedBase.load("teaching-base", device=device)


@pytest.mark.parametrize("device", [[], ["--device", "cuda"], ["--device", "cuda:0"]])
def test_a_gpu_of_another_generation_is_refused_before_a_base_is_loaded(monkeypatch, device):
    """It takes tensors, and fails at the first kernel."""
    monkeypatch.setattr(loading.load_bases, "load_bases", lambda *args, **kwargs: pytest.fail("a base is loaded"))
    settings = train_math.COMMAND.read(device)
    older = mock.patch.object(torch.cuda, "get_device_capability", lambda device=None: (6, 1))
    said = r"sm_61.*built for sm_90.*--device cpu"
    with PretendCuda(), older, pytest.raises(ConfigError, match=said):
        loading.load_base(settings, Team.of(["solver"]))


def test_no_machine_waits_for_a_driver_that_hangs(smi, monkeypatch):
    smi(["NVIDIA H100"], build=None)

    def hangs(*args, **kwargs):
        raise subprocess.TimeoutExpired("nvidia-smi", 20)

    monkeypatch.setattr(subprocess, "run", hangs)
    assert unusable_gpu() is None


# ------------------------------------------------------------------------------------------ families that are tried


@pytest.mark.slow
@pytest.mark.ci
@pytest.mark.parametrize("kind", ["qwen3_5_text", "olmo2", "glm4"])
def test_a_family_that_is_tried_takes_the_same_way_as_on_a_cpu(kind):
    def way(device):
        base = SharedBase(tiny(kind).to(device), tiny_tokenizer(), kind)
        engine = LocalEngine(base, eos_ids=(), decoding="expanded")  # beside the forms that are a device's own
        return engine.decoding, base.packs, base.through_head

    with PretendCuda():
        there = way("cuda")
    assert there == way("cpu")
