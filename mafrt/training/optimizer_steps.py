"""Optimizer steps of the adapters. One optimizer per adapter: an idle adapter keeps its weights and its moments.

`TorchOptimizerSteps` sums gradients over the processes and repeats the same step in each. `DeepSpeedOptimizerSteps`
uses ZeRO-1 or ZeRO-2, which shard the moments (and the reduced gradients) over the processes. Both save the whole
optimizer state in one format, so a run can resume with either and with any number of processes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from mafrt.config.train_config import LearnConfig
from mafrt.core.errors import CheckpointError, ConfigError
from mafrt.core.flat_tensors import on_cpu
from mafrt.models.sharding import deepspeed_engine
from mafrt.models.tensors import largest
from mafrt.training.optimizers import load_moments, make_optimizer

if TYPE_CHECKING:
    from mafrt.models.shared_base import SharedBase


class OptimizerSteps(Protocol):
    """Optimizer steps from the gradients stored on the adapters' parameters."""

    optimizers: dict[str, torch.optim.Optimizer]
    """by adapter; of sharded state, this process's part"""

    def step(self, names: Sequence[str]) -> dict[str, Tensor]:
        """Step each named adapter, its gradient clipped to its `max_grad_norm`. Collective.

        Returns:
            Gradient norm before clipping, by name. A norm that is not finite means that no step was made.
        """
        ...

    def forget(self, name: str) -> None:
        """Reset the adapter's moments."""
        ...

    def state(self) -> dict[str, Any]:
        """Full state of each adapter's optimizer in torch's format, on every process. Collective."""
        ...

    def load_state(self, state: Mapping[str, Any]) -> None: ...


class TorchOptimizerSteps:
    """Replicated torch optimizers: gradients are summed, then every process makes the same step."""

    def __init__(self, base: SharedBase, learn: Mapping[str, LearnConfig]) -> None:
        self.base, self.learn = base, learn
        fused = base.device.type in ("cpu", "cuda")
        self.optimizers = {
            name: make_optimizer(base.adapter_parameters(name), config, fused=fused) for name, config in learn.items()
        }

    def step(self, names: Sequence[str]) -> dict[str, Tensor]:
        self.base.processes.sum_gradients(p for name in names for p in self.base.adapter_parameters(name))
        parameters = {name: self.base.adapter_parameters(name) for name in names}
        on_device = {
            name: nn.utils.get_total_norm([p.grad for p in of_adapter if p.grad is not None])
            for name, of_adapter in parameters.items()
        }
        # All norms are read at once, since each reading waits for the device.
        norms = dict(zip(names, on_cpu(list(on_device.values())), strict=True))
        for name, norm in norms.items():
            # A gradient of exactly 0 teaches nothing: momentum and weight decay alone must not move the weights.
            if torch.isfinite(norm) and norm > 0.0:
                nn.utils.clip_grads_with_norm_(parameters[name], self.learn[name].max_grad_norm, on_device[name])
                self.optimizers[name].step()
        return norms

    def forget(self, name: str) -> None:
        self.optimizers[name].state.clear()

    def state(self) -> dict[str, Any]:
        return {name: optimizer.state_dict() for name, optimizer in self.optimizers.items()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        for name, optimizer in self.optimizers.items():
            load_moments(optimizer, state[name])


class _Held(nn.Module):
    """One adapter's parameters as DeepSpeed sees them."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        super().__init__()
        self.parts = nn.ParameterList(nn.Parameter(p.detach().clone()) for p in parameters)


class DeepSpeedOptimizerSteps:
    """One DeepSpeed engine per adapter.

    The engine owns parameters that share memory with the adapter's. The backward pass stores its gradient on the
    adapter. The engine then receives a surrogate loss with that gradient, <parameter, gradient>, and does the rest:
    reduce, shard, clip, step and all-gather. So one backward pass serves all adapters, and idle adapters are untouched.

    Args:
        settings: DeepSpeed's configuration; `zero_optimization.stage` 3 acts as 2 here, since adapters are not sharded.
    """

    def __init__(self, base: SharedBase, learn: Mapping[str, LearnConfig], settings: Mapping[str, Any]) -> None:
        self.base = base
        zero = {key: value for key, value in settings["zero_optimization"].items() if not key.startswith("stage3_")}
        zero["stage"] = min(int(zero["stage"]), 2)
        zero.pop("offload_param", None)
        config = {key: value for key, value in settings.items() if key not in ("bf16", "fp16")}  # adapters are float32
        config |= {
            "zero_optimization": zero,
            "zero_allow_untested_optimizer": True,
        }
        self.optimizers: dict[str, torch.optim.Optimizer] = {}
        self._engines: dict[str, Any] = {}
        for name, settings_of_adapter in learn.items():
            parameters = base.adapter_parameters(name)
            held = _Held(parameters)
            self.optimizers[name] = make_optimizer(list(held.parts), settings_of_adapter)
            clipped = config | {"gradient_clipping": settings_of_adapter.max_grad_norm}
            self._engines[name] = deepspeed_engine(held, clipped, self.optimizers[name])
            for parameter, part in zip(parameters, held.parts, strict=True):
                parameter.data = part.data

    def step(self, names: Sequence[str]) -> dict[str, Tensor]:
        bad, some = torch.zeros(len(names), device=self.base.device), torch.zeros(len(names), device=self.base.device)
        for place, name in enumerate(names):
            if grads := [p.grad for p in self.base.adapter_parameters(name) if p.grad is not None]:
                size = largest(grads)
                bad[place], some[place] = ~torch.isfinite(size), size > 0
        self.base.processes.sum([bad, some])
        norms: dict[str, Tensor] = {}
        for name, sick, moves in zip(names, bad.tolist(), some.tolist(), strict=True):
            if sick:
                norms[name] = torch.tensor(torch.inf)
                continue
            if not moves:
                norms[name] = torch.tensor(0.0)
                continue
            engine = self._ready(name)
            # DeepSpeed averages over the processes, but our gradient is a sum over them.
            engine.backward(self.base.processes.size * self._loss(name))
            engine.step()
            norms[name] = torch.as_tensor(engine.get_global_grad_norm(), dtype=torch.float32)
        return norms

    def _ready(self, name: str) -> Any:
        """The adapter's engine with its float32 copy refreshed: a load or rollback may have changed the weights."""
        engine = self._engines[name]
        engine.optimizer.refresh_fp32_params()
        return engine

    def _loss(self, name: str) -> Tensor:
        """Surrogate loss whose gradient with respect to the engine's parameters is the adapter's gradient."""
        total = torch.zeros((), device=self.base.device)
        parts = self._engines[name].module.parts
        for parameter, part in zip(self.base.adapter_parameters(name), parts, strict=True):
            grad = torch.zeros_like(part) if parameter.grad is None else parameter.grad
            total = total + (part * grad).sum()
        return total

    def forget(self, name: str) -> None:
        self.optimizers[name].state.clear()

    def state(self) -> dict[str, Any]:
        return {name: self._state(name) for name in self._engines}

    def _state(self, name: str) -> dict[str, Any]:
        from deepspeed.utils import safe_get_full_optimizer_state

        parts = list(self._engines[name].module.parts)
        whole = torch.optim.AdamW(parts, **self._options(name)).state_dict()
        states = list(self.optimizers[name].state.values())
        if states and "exp_avg" in states[0]:
            step = torch.as_tensor(states[0]["step"], dtype=torch.float32).cpu()
            for place, part in enumerate(parts):
                moments = {key: safe_get_full_optimizer_state(part, key) for key in ("exp_avg", "exp_avg_sq")}
                whole["state"][place] = {"step": step.clone()} | {
                    key: value.detach().cpu().clone() for key, value in moments.items()
                }
        return whole

    def _options(self, name: str) -> dict[str, Any]:
        group = self.optimizers[name].param_groups[0]
        return {key: group[key] for key in ("lr", "eps", "weight_decay")}

    def load_state(self, state: Mapping[str, Any]) -> None:
        from deepspeed.utils import safe_set_full_optimizer_state

        for name in self._engines:
            moments = state[name]["state"]
            if not moments:
                self.optimizers[name].state.clear()
                continue
            if any("exp_avg" not in moment for moment in moments.values()):
                raise CheckpointError(
                    f"The optimizer state of adapter {name!r} is not AdamW's; resume with the --optimizer of the saved "
                    "run, or leave --deepspeed out."
                )
            self._touch(name)
            for place, part in enumerate(self._engines[name].module.parts):
                for key in ("exp_avg", "exp_avg_sq"):
                    safe_set_full_optimizer_state(part, moments[place][key].to(part.device), key)
            for state_of_one in self.optimizers[name].state.values():
                state_of_one["step"].fill_(float(moments[0]["step"]))

    def _touch(self, name: str) -> None:
        """Make a step with learning rate 0: DeepSpeed allocates the moments only in the first step."""
        groups = self.optimizers[name].param_groups
        rates = [group["lr"] for group in groups]
        for group in groups:
            group["lr"] = 0.0
        engine = self._ready(name)
        engine.backward(0.0 * self._loss(name))
        engine.step()
        for group, rate in zip(groups, rates, strict=True):
            group["lr"] = rate


def make_optimizer_steps(base: SharedBase, learn: Mapping[str, LearnConfig]) -> OptimizerSteps:
    """DeepSpeed's implementation if the base has its configuration (`zero`), else torch's. `learn` is by adapter."""
    if base.zero is None:
        return TorchOptimizerSteps(base, learn)
    for spec in learn.values():
        if spec.optimizer != "adamw":
            raise ConfigError(f"optimizer {spec.optimizer!r} and deepspeed exclude each other; leave one of them out.")
    return DeepSpeedOptimizerSteps(base, learn, base.zero)
