"""Which GPUs vLLM takes beside the trainer, and whether they suffice. Answered before a model is loaded."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from mafrt.config.train_config import EngineConfig
from mafrt.core.distributed import started_here
from mafrt.core.errors import ConfigError
from mafrt.core.shipped import base_folder
from mafrt.core.text import counted
from mafrt.models.checkpoint_class import read_config
from mafrt.models.memory_estimate import MODEL_SHAPES, MemoryInputs, ModelShape, footprint, model_shape, shape_of

SHARE = 0.4
"""of a GPU's memory that vLLM may take, unless --gpu_memory_utilization says otherwise"""


def vllm_gpus(trainer_gpu: int, size: int, there: int) -> list[int]:
    """The GPUs of this process's vLLM: the trainer's own, then some on which no trainer sits and no other vLLM.

    Args:
        trainer_gpu: its number. Of several trainers on this machine, each sits on the one of its local rank.
        size: GPUs that a vLLM spreads the base over.
        there: GPUs of this machine.

    Raises:
        ConfigError: there are too few for all trainers of this machine.
    """
    rank, trainers = started_here()
    if trainer_gpu >= there and trainers == 1:
        raise ConfigError(
            f"device is cuda:{trainer_gpu}, and torch sees {counted(there, 'GPUs')}, from cuda:0 on; name another."
        )
    if trainer_gpu >= there or trainers * size > there:
        spread = f" with tensor_parallel_size {size}" if size > 1 else ""
        raise ConfigError(
            f"{trainers} process{'es' if trainers > 1 else ''} on this machine{spread} would need "
            f"{max(trainer_gpu + 1, trainers * size)} GPUs, and torch sees {there}; start fewer processes, lower "
            "--tensor_parallel_size, or sample elsewhere (--vllm_servers)."
        )
    trainers_on = range(trainers) if trainers > 1 else [trainer_gpu]
    others = [gpu for gpu in (*range(trainer_gpu + 1, there), *range(trainer_gpu)) if gpu not in trainers_on]
    return [trainer_gpu, *others[rank * (size - 1) : (rank + 1) * (size - 1)]]


def check_gpus(config: EngineConfig, model: str, device: str | None, *, shards: int = 1, bits: int = 16) -> None:
    """Refuse a layout on GPUs that cannot work. Nothing is checked for a CPU, nor for what names no device.

    Args:
        config: the engine's settings.
        model: folder or name of the base.
        device: that was asked for: `cuda`, `cuda:N` or another word.
        shards: processes that each hold a part of the trainer's base.
        bits: of a weight.

    Raises:
        ConfigError: fewer GPUs than processes need; heads that cannot be shared out; no memory beside the trainer.
    """
    import torch

    named = re.fullmatch(r"cuda(?::([0-9]{1,9}))?", device or "cuda")
    if named is None or not torch.cuda.is_available():
        return
    colocated = config.engine == "vllm" and not config.vllm_servers
    size = config.tensor_parallel_size if colocated else 1
    trainer_gpu = int(named[1] or started_here()[0])
    gpus = vllm_gpus(trainer_gpu, size, torch.cuda.device_count())
    if not colocated:
        return
    shape = check_heads(model, size)
    if shape is not None:
        free, total = torch.cuda.mem_get_info(gpus[0])
        _check_share(config, shape, bits, shards, free, total)


def check_heads(model: str, size: int, flag: str = "tensor_parallel_size") -> ModelShape | None:
    """The model's shape, if it is known before it is loaded. ConfigError if `size` GPUs cannot share out its heads."""
    path = base_folder(model) or Path(model).expanduser()
    try:
        known = model in MODEL_SHAPES or path.is_dir()
        shape = model_shape(str(path)) if known else shape_of(read_config(model, model))
    except (ConfigError, KeyError, TypeError, ValueError):
        return None  # of another kind, or not to be had: loading says why, or vLLM what does not fit
    # vLLM repeats heads of keys and values, but not those of queries.
    fitting = [n for n in range(1, shape.heads + 1) if not shape.heads % n]
    fitting = [n for n in fitting if not shape.kv_heads % n or not n % shape.kv_heads]
    if size not in fitting:
        raise ConfigError(
            f"{flag} is {size}, which does not divide the model's {shape.heads} heads (of keys and values: "
            f"{shape.kv_heads}); choose one of {', '.join(map(str, fitting))}."
        )
    return shape


def _check_share(config: EngineConfig, shape: ModelShape, bits: int, shards: int, free: float, total: float) -> None:
    """The trainer's base lies on the GPU when vLLM starts, which takes its share of the whole memory at once."""
    share = config.gpu_memory_utilization or SHARE
    part = footprint(shape, replace(MemoryInputs(), bits=bits)).base / shards
    # vLLM holds the weights unquantised.
    copy = footprint(shape, replace(MemoryInputs(), bits=max(bits, 16))).base / config.tensor_parallel_size
    left = free - part
    most = int(100 * left / total) / 100
    numbers = f"{share * total / 1e9:.1f} of the GPU's {total / 1e9:.1f} GB"
    beside = f"vLLM's copy of the base takes {copy / 1e9:.1f} GB beside the {part / 1e9:.1f} GB of the trainer's"
    if copy > most * total:
        raise ConfigError(
            f"{beside}, and {free / 1e9:.1f} GB of the GPU's {total / 1e9:.1f} GB are free; spread it over more GPUs "
            "(--tensor_parallel_size), or sample elsewhere (--vllm_servers, or --engine local)."
        )
    if not copy <= share * total <= most * total:
        raise ConfigError(
            f"gpu_memory_utilization is {share:g}, {numbers}, but {beside}, and {free / 1e9:.1f} GB are free; give "
            f"more than {copy / total:.2f} and at most {most:g}."
        )


def visible(device: Any, size: int, seen: str | None) -> str:
    """The value of CUDA_VISIBLE_DEVICES for the vLLM of a trainer on `device`.

    Args:
        seen: its value for the trainer, by which torch numbers the GPUs; None: it is not set.
    """
    import torch

    trainer_gpu = torch.cuda.current_device() if device.index is None else device.index
    there = torch.cuda.device_count()
    names = [name.strip() for name in seen.split(",")] if seen else [str(gpu) for gpu in range(there)]
    return ",".join(names[gpu] for gpu in vllm_gpus(trainer_gpu, size, there))
