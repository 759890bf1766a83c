"""Multi-process start: checks the launcher's and `--deepspeed` settings before a model is loaded, then joins."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from mafrt.core.distributed import ALONE, Processes, connect, started
from mafrt.core.errors import ConfigError
from mafrt.core.extras import check_package
from mafrt.core.shipped import shipped
from mafrt.engines.vllm.gpu_layout import check_gpus
from mafrt.runners.checks import check_processes
from mafrt.scripts.cli.command import Settings
from mafrt.scripts.cli.settings import BaseSettings, ScaleSettings
from mafrt.training.deepspeed_config import check_fields, read_zero

if TYPE_CHECKING:
    from mafrt.config.train_config import EngineConfig, TrainConfig


@dataclass(frozen=True)
class ProcessLayout:
    """How a run lies on its processes."""

    processes: Processes
    zero: dict[str, Any] | None = None
    """settings of DeepSpeed"""
    fsdp: bool = False

    @property
    def shards(self) -> bool:
        """Whether each process holds a part of the base only."""
        return self.fsdp or (self.zero is not None and self.zero["zero_optimization"]["stage"] == 3)


def join(settings: Settings, config: TrainConfig) -> ProcessLayout:
    """Check the settings, then join the other processes.

    Raises:
        ConfigError, MissingExtraError: settings contradict each other, or a package is missing.
        ProcessLostError: the others are not found.
    """
    rank, size = started()
    scale = settings.make(ScaleSettings)
    check_processes(Processes(rank, size), config)
    zero = None
    if config.learn.deepspeed is not None:
        from mafrt.models.sharding import quiet_deepspeed

        path = shipped(config.learn.deepspeed)
        zero = read_zero(path, config.learn, dtype=settings["dtype"], processes=size)
        quiet_deepspeed()
        check_fields(path, zero)
    fsdp = size > 1 and _asked("ACCELERATE_USE_FSDP")
    if _asked("ACCELERATE_USE_DEEPSPEED"):
        raise ConfigError(
            "The launcher was asked for DeepSpeed (--use_deepspeed), but mafrt sets it up itself; start with "
            "`accelerate launch --multi_gpu` and give --deepspeed configs/zero2.json to the script."
        )
    if fsdp and os.environ.get("FSDP_VERSION", "1") != "2":
        raise ConfigError("FSDP 1 was asked for, but mafrt shards with FSDP 2; add --fsdp_version 2 to the launcher.")
    if fsdp and zero is not None:
        raise ConfigError("FSDP and --deepspeed both would shard the run; leave one of them out.")
    if size > 1 and re.fullmatch(r"cuda:\d+", settings["device"] or ""):
        raise ConfigError(
            f"device is {settings['device']!r}, but {size} processes were started, each with a GPU of its own; leave "
            "--device out, and choose GPUs with CUDA_VISIBLE_DEVICES."
        )
    bits = settings.make(BaseSettings).bits
    check_extras(config, bits)
    placement = ProcessLayout(ALONE, zero, fsdp)
    if bits and placement.shards:
        raise ConfigError(
            f"load_in_{bits}bit is on, and quantised weights cannot be shared out by FSDP or ZeRO-3; a base in {bits} "
            "bits fits whole: start without FSDP, or with configs/zero1.json or zero2.json."
        )
    check_layout(settings, config.engine, size if placement.shards else 1)
    if fsdp:
        # Else transformers leaves the weights out in all processes but the first, for FSDP to send them on.
        os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] = "false"
    return replace(placement, processes=connect(cpu=settings["device"] == "cpu", timeout_s=scale.process_timeout_s))


def check_layout(settings: Settings, engine: EngineConfig, shards: int = 1) -> None:
    """`check_gpus` of a command's settings."""
    bits = settings.make(BaseSettings).bits or (32 if settings["dtype"] == "float32" else 16)
    check_gpus(engine, settings["model_name_or_path"], settings["device"], shards=shards, bits=bits)


def only_one(command: str) -> None:
    """ConfigError if a launcher started several processes of a command that knows of one."""
    size = started()[1]
    if size > 1:
        raise ConfigError(f"{command} runs in one process, and {size} were started; start it without a launcher.")


def check_extras(config: TrainConfig, bits: int | None) -> None:
    """MissingExtraError if bitsandbytes is asked for and not installed."""
    if bits or config.learn.optimizer != "adamw":
        flag = f"--load_in_{bits}bit" if bits else f"--optimizer {config.learn.optimizer}"
        check_package(flag, "quant", "bitsandbytes")


def _asked(name: str) -> bool:
    return os.environ.get(name, "").lower() == "true"
