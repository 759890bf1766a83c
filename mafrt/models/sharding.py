"""Sharding of the frozen base over all processes with FSDP2 or DeepSpeed ZeRO-3.

FSDP2 is torch's `fully_shard` (`accelerate launch --use_fsdp --fsdp_version 2`). Only the base is sharded. Adapters
are about 1% of its size and replicated; they are no parameters of the sharded modules, so neither library touches them.

Every forward goes through one root module, since both libraries work in module hooks. The number of decode steps
differs between processes, so the base is gathered on each of them for the duration of play (`whole`), as in TRL. During
play one full base plus the KV cache must fit on each GPU.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from mafrt.core.distributed import Processes


class Root(nn.Module):
    """Wraps the model; its forward runs a given callable inside the sharding library's hooks."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.compute: Callable[[], Any] = lambda: None

    def forward(self) -> Any:
        return self.compute()


class Sharding:
    """Interface between `SharedBase` and a sharding library."""

    def __init__(self, root: Any) -> None:
        self.root = root
        self.is_whole = False
        """whether the base is currently gathered on every process"""
        self.times_gathered = 0
        """number of times it was gathered"""

    def run(self, compute: Callable[[], Any]) -> Any:
        """`compute()` with the weights it uses gathered on demand. Collective, unless the base is whole."""
        if self.is_whole:
            return compute()
        self.root.compute = compute
        return self.root()

    @contextmanager
    def head(self) -> Iterator[None]:
        """Context with the output head gathered, for code that reads its weights without calling it."""
        raise NotImplementedError

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Context with the whole base on every process; forwards are not collective."""
        raise NotImplementedError

    def held(self) -> int:
        """Number of base parameters that this process stores between forwards."""
        raise NotImplementedError


class FullyShard(Sharding):
    """FSDP2: decoder blocks one by one, and embedding, norm and head together.

    Args:
        model: the causal language model, whole.
        blocks: its decoder layers.
        processes: share the weights.
    """

    def __init__(self, model: nn.Module, blocks: Sequence[nn.Module], processes: Processes) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

        # The mesh wants the type alone; this process's own GPU is the current one.
        mesh = init_device_mesh(torch.device(processes.device).type, (processes.size,))
        options: dict[str, Any] = {"mesh": mesh}
        if os.environ.get("FSDP_OFFLOAD_PARAMS", "").lower() == "true":
            options["offload_policy"] = CPUOffloadPolicy()
        root = Root(model)
        self.blocks = [fully_shard(block, **options) for block in blocks]
        super().__init__(fully_shard(root, **options, reshard_after_forward=True))
        self.parts: list[Any] = [self.root, *self.blocks]

    @contextmanager
    def head(self) -> Iterator[None]:
        if self.is_whole:
            yield
            return
        # The head is used outside the root's forward, where FSDP's hooks do not gather it.
        self.root.unshard()
        try:
            yield
        finally:
            self.root.reshard()

    @contextmanager
    def whole(self) -> Iterator[None]:
        self._settle()
        for part in self.parts:
            # Otherwise each decode step would gather every layer again, once for every token.
            part.set_reshard_after_forward(False, recurse=False)
            part.unshard()
        self.is_whole, self.times_gathered = True, self.times_gathered + 1
        try:
            yield
        finally:
            self.is_whole = False
            for part in self.parts:
                part.set_reshard_after_forward(True, recurse=False)
                part.reshard()

    def _settle(self) -> None:
        """Run a first forward through our root: FSDP makes the first module called its root."""
        self.run(lambda: None)

    def held(self) -> int:
        return sum(int(p.to_local().numel()) for p in self.root.parameters() if hasattr(p, "to_local"))


class Zero3(Sharding):
    """DeepSpeed's ZeRO-3 without an optimizer: parameters in parts, gathered layer by layer.

    Args:
        model: the causal language model, whole.
        head: its output head, a part of `model`.
        device: of this process.
        settings: a DeepSpeed configuration; its `zero_optimization` may set buckets, thresholds and offloading.
    """

    def __init__(self, model: Any, head: nn.Module, device: str, settings: Mapping[str, Any]) -> None:
        quiet_deepspeed()
        import deepspeed

        # DeepSpeed assumes float32 unless bf16 is enabled explicitly.
        settings = {**settings, "bf16": {"enabled": model.dtype == torch.bfloat16}}
        for parameter in model.parameters():
            parameter.data = parameter.data.to(model.dtype)  # it takes one format only
        root = Root(model)
        # Parameter by parameter to its part: `initialize` alone would first move the whole module to the GPU.
        deepspeed.zero.Init(module=root, config_dict_or_path=dict(settings))
        engine = deepspeed_engine(root, settings)
        super().__init__(engine.module)
        for module in self.root.modules():
            for name, buffer in list(module.named_buffers(recurse=False)):
                setattr(module, name, buffer.to(device))
        self._offload = engine.optimizer
        self._head = list(head.parameters())

    @contextmanager
    def head(self) -> Iterator[None]:
        import deepspeed

        with nullcontext() if self.is_whole else deepspeed.zero.GatheredParameters(self._head):
            yield

    @contextmanager
    def whole(self) -> Iterator[None]:
        import deepspeed
        from deepspeed.runtime.zero import parameter_offload

        # ZeRO-3's hooks would partition every layer again after its forward; TRL removes them for generation, too.
        self._offload.partition_all_parameters()
        self._offload._remove_module_hooks()
        self._offload.forward_hooks, self._offload.backward_hooks = [], []
        try:
            with deepspeed.zero.GatheredParameters(list(self.root.parameters())):
                self.is_whole, self.times_gathered = True, self.times_gathered + 1
                yield
        finally:
            self.is_whole = False
            for module in self.root.modules():  # also layers wrapped for adapters after the hooks were installed
                if not hasattr(module, "ds_external_parameters"):
                    parameter_offload._init_external_params(module)
            self._offload.setup_zero_stage3_hooks()

    def held(self) -> int:
        return sum(int(p.numel() or p.ds_tensor.numel()) for p in self.root.parameters())


def quiet_deepspeed() -> None:
    """Import DeepSpeed for the available accelerator, with its log output silenced."""
    os.environ.setdefault("DS_ACCELERATOR", "cuda" if torch.cuda.is_available() else "cpu")  # read at import
    from deepspeed.utils import logger

    logger.setLevel(logging.WARNING)


def deepspeed_engine(module: nn.Module, settings: Mapping[str, Any], optimizer: Any = None) -> Any:
    """`deepspeed.initialize` without log output, and without its shared-memory collective (a minute to compile)."""
    quiet_deepspeed()
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed.initialize(model=module, optimizer=optimizer, config=dict(settings))[0]
