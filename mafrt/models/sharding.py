"""One frozen base spread over all processes: each holds a part of every weight, and borrows the rest while it computes.

The work is torch's FSDP2 (`fully_shard`, what `accelerate launch --use_fsdp --fsdp_version 2` asks for) or DeepSpeed's
ZeRO-3. Only the base is sharded. The adapters, a hundredth of it, stay whole everywhere; they are no parameters of the
sharded modules, so neither library ever touches them.

Every forward goes through one root module, since both libraries do their work in hooks of modules. Sampling steps as
often as its answers are long, which differs between processes, so for the time of play the base is put together in each
of them (`whole`), as TRL does. What then has to fit is one base beside the caches of keys and values.
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
    """Holds the model and calls whatever it is told to, inside the hooks of its own forward."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.compute: Callable[[], Any] = lambda: None

    def forward(self) -> Any:
        return self.compute()


class Sharding:
    """What a `SharedBase` needs of the library that shards it."""

    def __init__(self, root: Any) -> None:
        self.root = root
        self.together = False
        """whether the base is whole in every process at the moment"""
        self.gathered = 0
        """how often it has been"""

    def run(self, compute: Callable[[], Any]) -> Any:
        """`compute()`, with the weights there that it calls for. Collective, unless the base is whole."""
        if self.together:
            return compute()
        self.root.compute = compute
        return self.root()

    @contextmanager
    def head(self) -> Iterator[None]:
        """The output head is there, for those who read its weights without calling it."""
        raise NotImplementedError

    @contextmanager
    def whole(self) -> Iterator[None]:
        """The base is whole in every process; forwards are no longer collective."""
        raise NotImplementedError

    def held(self) -> int:
        """Numbers of the base that this process holds while nothing is computed."""
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

        mesh = init_device_mesh(processes.device, (processes.size,))
        options: dict[str, Any] = {"mesh": mesh}
        if os.environ.get("FSDP_OFFLOAD_PARAMS", "").lower() == "true":
            options["offload_policy"] = CPUOffloadPolicy()
        root = Root(model)
        self.blocks = [fully_shard(block, **options) for block in blocks]
        super().__init__(fully_shard(root, **options, reshard_after_forward=True))
        self.parts: list[Any] = [self.root, *self.blocks]

    @contextmanager
    def head(self) -> Iterator[None]:
        if self.together:
            yield
            return
        self.root.unshard()
        try:
            yield
        finally:
            self.root.reshard()

    @contextmanager
    def whole(self) -> Iterator[None]:
        self._settle()
        for part in self.parts:
            part.set_reshard_after_forward(False, recurse=False)
            part.unshard()
        self.together, self.gathered = True, self.gathered + 1
        try:
            yield
        finally:
            self.together = False
            for part in self.parts:
                part.set_reshard_after_forward(True, recurse=False)
                part.reshard()

    def _settle(self) -> None:
        """The first forward decides which module is the root; it has to be ours."""
        self.run(lambda: None)

    def held(self) -> int:
        return sum(int(p.to_local().numel()) for p in self.root.parameters() if hasattr(p, "to_local"))


def decoder_blocks(inner: nn.Module) -> list[nn.Module]:
    """The decoder layers of a Hugging Face model."""
    lists = [module for module in inner.children() if isinstance(module, nn.ModuleList)]
    return [*max(lists, key=lambda blocks: len(blocks), default=nn.ModuleList())]


class Zero3(Sharding):
    """DeepSpeed's ZeRO-3 without an optimizer: parameters in parts, gathered layer by layer.

    Args:
        model: the causal language model, whole.
        head: its output head, a part of `model`.
        device: of this process.
        settings: a DeepSpeed configuration; its `zero_optimization` may set buckets, thresholds and offloading.
    """

    def __init__(self, model: Any, head: nn.Module, device: str, settings: Mapping[str, Any]) -> None:
        # DeepSpeed takes float32 for granted, if it is told of nothing else.
        engine = deepspeed_engine(Root(model), {**settings, "bf16": {"enabled": model.dtype == torch.bfloat16}})
        super().__init__(engine.module)
        for module in self.root.modules():
            for name, buffer in list(module.named_buffers(recurse=False)):
                setattr(module, name, buffer.to(device))
        self._offload = engine.optimizer
        self._head = list(head.parameters())

    @contextmanager
    def head(self) -> Iterator[None]:
        import deepspeed

        with nullcontext() if self.together else deepspeed.zero.GatheredParameters(self._head):
            yield

    @contextmanager
    def whole(self) -> Iterator[None]:
        import deepspeed
        from deepspeed.runtime.zero import parameter_offload

        # The hooks would take every layer apart again after its forward. TRL removes them for generation, too.
        self._offload.partition_all_parameters()
        self._offload._remove_module_hooks()
        self._offload.forward_hooks, self._offload.backward_hooks = [], []
        try:
            with deepspeed.zero.GatheredParameters(list(self.root.parameters())):
                self.together, self.gathered = True, self.gathered + 1
                yield
        finally:
            self.together = False
            for module in self.root.modules():  # layers that took in adapters since the hooks were made first
                if not hasattr(module, "ds_external_parameters"):
                    parameter_offload._init_external_params(module)
            self._offload.setup_zero_stage3_hooks()

    def held(self) -> int:
        return sum(int(p.numel() or p.ds_tensor.numel()) for p in self.root.parameters())


def quiet_deepspeed() -> None:
    """Import DeepSpeed for the accelerator that is there, and keep it from telling what it does."""
    os.environ.setdefault("DS_ACCELERATOR", "cuda" if torch.cuda.is_available() else "cpu")  # it asks when imported
    from deepspeed.utils import logger

    logger.setLevel(logging.WARNING)


def deepspeed_engine(module: nn.Module, settings: Mapping[str, Any], optimizer: Any = None) -> Any:
    """`deepspeed.initialize`, quietly, and without the collective that it would compile on a CPU for a minute."""
    quiet_deepspeed()
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed.initialize(model=module, optimizer=optimizer, config=dict(settings))[0]
