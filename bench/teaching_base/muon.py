"""Muon, the optimizer of the pretraining (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/).

The momentum of a weight matrix is replaced by the nearest matrix with singular values near one, so
that all directions of it learn at the same pace. On this model it needs about half of AdamW's steps.
Matrices of one shape are handled in one batch, since each alone is too small to keep a CPU busy.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

# Quintic Newton-Schulz coefficients of the source: steep at zero, and within [.7, 1.2] after 5 steps.
COEFFICIENTS = (3.4445, -4.7750, 2.0315)


def orthogonalize(matrices: torch.Tensor, steps: int = 5) -> torch.Tensor:
    """[batch, rows, columns] -> the same, with all singular values near one."""
    a, b, c = COEFFICIENTS
    tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.mT if tall else matrices
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    found: torch.Tensor = x.mT if tall else x
    return found


class Muon(torch.optim.Optimizer):
    """For hidden weight matrices only; embeddings and vectors belong to AdamW."""

    def __init__(
        self, params: Iterable[torch.nn.Parameter], lr: float = 0.02, momentum: float = 0.95, weight_decay: float = 0.0
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            shapes: dict[torch.Size, list[torch.nn.Parameter]] = {}
            for parameter in group["params"]:
                if parameter.grad is not None:
                    shapes.setdefault(parameter.shape, []).append(parameter)
            for shape, parameters in shapes.items():
                updates = []
                for parameter in parameters:
                    state = self.state[parameter]
                    gradient = parameter.grad
                    assert gradient is not None
                    velocity = state.setdefault("velocity", torch.zeros_like(parameter))
                    velocity.lerp_(gradient, 1 - group["momentum"])
                    updates.append(gradient.lerp(velocity, group["momentum"]))
                # Keeps the size of the change of an output unit independent of the shape.
                scale = max(1.0, shape[0] / shape[1]) ** 0.5
                for parameter, update in zip(parameters, orthogonalize(torch.stack(updates)), strict=True):
                    parameter.mul_(1 - group["lr"] * group["weight_decay"]).add_(update, alpha=-group["lr"] * scale)
