"""The size of micro-batches: as asked for, or as much of the default as the free memory holds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from mafrt.config.train_config import TrainConfig
from mafrt.core.machine_memory import free_memory
from mafrt.models.memory_estimate import MemoryInputs, fitting_micro_batch, shape_of

if TYPE_CHECKING:
    import torch

    from mafrt.models.several_bases import Bases
    from mafrt.models.shared_base import SharedBase


def free_bytes(device: torch.device) -> float | None:
    """Free memory of a device in bytes: of the GPU, or of the machine or container; None where it cannot be known."""
    if device.type == "cuda":
        import torch

        return float(torch.cuda.mem_get_info(device)[0])
    return free_memory() if device.type == "cpu" else None


def micro_batch_tokens(base: Bases, config: TrainConfig, free: float | None) -> int:
    """Tokens of a micro-batch that fit into `free` bytes, at most the setting's.

    The gradient does not depend on it, so a smaller one costs a little time and nothing else.
    """
    team, learn = config.team, config.learn
    given = learn.micro_batch_tokens, free, team.lora_rank, team.lora_targets, learn.gradient_checkpointing
    return min(fitting_tokens(part, *given) for part in base.parts.values())


def fitting_tokens(
    base: SharedBase, asked: int, free: float | None, rank: int, targets: Sequence[str], checkpointing: bool
) -> int:
    """At most `asked` tokens that one base learns from within `free` bytes, with adapters of that rank."""
    try:
        shape = shape_of(base.config.to_dict())
    except (KeyError, TypeError, ValueError):
        return asked  # a model whose memory the formula does not know
    if free is None:
        return asked
    use = MemoryInputs(
        rank=rank,
        targets=tuple(name for name in shape.named(targets) if name in shape.linears),
        bits=32 if base.model.dtype.itemsize == 4 else 16,
        gradient_checkpointing=checkpointing,
        on_cpu=base.device.type == "cpu",
        kernels=base.compute.kernels(base.model.dtype),
    )
    return fitting_micro_batch(shape, use, free, asked)
