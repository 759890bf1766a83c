"""DeepSpeed configurations: read, and refused where they contradict the run's own settings. Standard library only."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mafrt.config.train_config import LearnConfig
from mafrt.core.errors import ConfigError
from mafrt.core.extras import check_package
from mafrt.core.reading import parse_json, read_text

_OURS = {
    "optimizer": "every adapter has an AdamW of its own, by --lr, --weight_decay and --opti_eps",
    "scheduler": "learning rates are constant",
    "activation_checkpointing": "--gradient_checkpointing recomputes activations",
    "fp16": "adapters are float32 and the base has --dtype",
    "amp": "adapters are float32 and the base has --dtype",
}
"""Sections refused because mafrt owns the setting -> the reason shown to the user."""
_ONE = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


def read_zero(path: Path, learn: LearnConfig, *, dtype: str | None, processes: int) -> dict[str, Any]:
    """The settings for `deepspeed.initialize`.

    Args:
        path: JSON, as `deepspeed.initialize` takes it; "auto" stands for the run's own settings.
        learn: the run's.
        dtype: of the base, None if the user did not set it.
        processes: number of processes started.

    Raises:
        ConfigError: it cannot be read, has no ZeRO stage, or contradicts the run; or there is one process only.
        MissingExtraError: DeepSpeed is not installed.
    """
    settings = _read(path)
    zero = settings.get("zero_optimization")
    zero = zero if isinstance(zero, Mapping) else {}
    stage = zero.get("stage")
    if stage not in (1, 2, 3):
        raise ConfigError(f"{path}: zero_optimization.stage is {stage!r}; expected 1, 2 or 3.")
    for name, instead in _OURS.items():
        if _enabled(settings.get(name)):
            raise ConfigError(f"{path} has {name!r}, but {instead}; take it out of the file.")
    if zero.get("offload_optimizer"):
        raise ConfigError(
            f"{path} has zero_optimization.offload_optimizer, but the moments of adapters are small and stay where the "
            "adapters are; take it out of the file."
        )
    for name in _ONE:
        _agrees(path, name, settings, 1, "--n_rollout_threads, --num_mini_batch and --micro_batch_tokens size batches")
    _agrees(path, "train_batch_size", settings, processes, "it is the number of processes, times 1")
    _agrees(path, "gradient_clipping", settings, learn.max_grad_norm, "--max_grad_norm decides that")
    bf16 = settings.get("bf16") or {}
    if bf16.get("enabled") is True and dtype not in (None, "bfloat16") and stage == 3:
        raise ConfigError(f"{path} has bf16 enabled, but --dtype is {dtype}; change one of them.")
    if learn.optimizer != "adamw":
        raise ConfigError(f"optimizer {learn.optimizer!r} and deepspeed exclude each other; leave one of them out.")
    if processes == 1:
        raise ConfigError(
            f"deepspeed is {path}, which spreads a run over several processes, and one was started; start them with "
            "`accelerate launch` or `torchrun`, or give --deepspeed none."
        )
    check_package("--deepspeed", "deepspeed", "deepspeed")
    ours = {"train_batch_size", "gradient_clipping", "bf16", "zero_optimization", *_ONE, *_OURS}
    rest = {name: value for name, value in settings.items() if name not in ours}
    # "auto" is resolved by transformers' integration only; without it, dropping the key selects DeepSpeed's default.
    zero = {name: value for name, value in zero.items() if value != "auto"}
    return {
        **rest,
        "zero_optimization": zero,
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
    }


def check_fields(path: Path, settings: Mapping[str, Any]) -> None:
    """Raise ConfigError for a setting of `zero_optimization` that DeepSpeed does not take. Slow: imports it."""
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
    from pydantic import ValidationError

    try:
        DeepSpeedZeroConfig(**settings["zero_optimization"])
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"] if part != "[key]")
        raise ConfigError(
            f"{path}: DeepSpeed does not take zero_optimization.{where}, found {first['input']!r}: {first['msg']}."
        ) from None


def _read(path: Path) -> dict[str, Any]:
    try:
        settings = parse_json(read_text(path))
    except OSError as error:
        raise ConfigError(
            f"deepspeed {path} cannot be read ({error.strerror}); give a JSON file, or one that ships: "
            "configs/zero1.json, configs/zero2.json, configs/zero3.json."
        ) from None
    except ValueError as error:
        raise ConfigError(f"deepspeed {path} is not valid JSON: {error}.") from None
    if not isinstance(settings, dict):
        raise ConfigError(f"deepspeed {path} holds a {type(settings).__name__}; expected an object of settings.")
    return settings


def _enabled(section: Any) -> bool:
    """Whether a section is present and not disabled."""
    return bool(section) and not (isinstance(section, Mapping) and section.get("enabled") is False)


def _agrees(path: Path, name: str, settings: Mapping[str, Any], ours: float, why: str) -> None:
    value = settings.get(name, "auto")
    if value not in ("auto", ours):
        raise ConfigError(f'{path}: {name} is {value!r}, but {why}; write {ours!r} or "auto".')
