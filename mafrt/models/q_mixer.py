"""Networks of VDN and QMIX: a Q head per agent, and a mixer from the agents' Q to the team's Q_tot.

    VDN   Q_tot = sum_i Q_i                                                        Sunehag 2017, 1706.05296
    QMIX  Q_tot = |W2(s)| . ELU(|W1(s)| q + b1(s)) + V(s)                          Rashid 2018, 1803.11485, eq. 4-6

Shapes: `x` [B, A, f] features of each agent's turn, `spoke` [B, A] True where the agent spoke in the joint step, `s`
[B, d] the state, `q` [B, A], Q_tot [B]. The Q of an agent that was silent is 0 and gets no gradient.
"""

from __future__ import annotations

import copy
from typing import Literal, cast

import torch
from torch import Tensor, nn

from mafrt.models.value_head import ValueHead

WIDTH = 32
"""Hidden units of the mixing network, as in PyMARL."""


class SumMixer(nn.Module):
    """VDN's mixer."""

    def forward(self, q: Tensor, s: Tensor) -> Tensor:
        return q.sum(-1)


class Monotone(nn.Module):
    """QMIX's mixer. Hypernetworks on the state produce the weights; their absolute values make Q_tot monotone in every
    Q_i, so the greedy choice of each agent is the greedy choice of the team.

    V(s) is Linear -> ReLU -> Linear. Deviations: the state is normalised as in `ValueHead`, and to length 1, so that
    the size of an Adam step does not depend on the base's width; and the hypernetworks' biases make the initial mixture
    nearly the sum, so that QMIX starts close to VDN.
    """

    def __init__(self, agents: int, state_size: int, width: int = WIDTH) -> None:
        super().__init__()
        self.agents, self.state_size, self.width = agents, state_size, width
        self.w1 = nn.Linear(state_size, agents * width)
        self.b1 = nn.Linear(state_size, width)
        self.w2 = nn.Linear(state_size, width)
        out = nn.Linear(width, 1)
        self.v = nn.Sequential(nn.Linear(state_size, width), nn.ReLU(), out)
        # |W1| about 1 and |W2| about 1 / width; ELU(x) is about x near 0. W1's spread tells the hidden units apart.
        nn.init.uniform_(self.w1.bias, 0.5, 1.5)
        nn.init.constant_(self.w2.bias, 1.0 / width)
        with torch.no_grad():
            self.w2.weight.div_(width)
        for layer in (self.b1, out):
            nn.init.zeros_(layer.weight)
            nn.init.zeros_(layer.bias)

    def forward(self, q: Tensor, s: Tensor) -> Tensor:
        s = nn.functional.layer_norm(s.float(), (self.state_size,)) / self.state_size**0.5
        w1 = self.w1(s).abs().view(-1, self.agents, self.width)
        hidden = nn.functional.elu((q.unsqueeze(-1) * w1).sum(1) + self.b1(s))
        return cast(Tensor, (hidden * self.w2(s).abs()).sum(-1) + self.v(s).squeeze(-1))


class TeamValue(nn.Module):
    """One head per agent and the mixer over them, in float32."""

    def __init__(
        self, kind: Literal["vdn", "qmix"], agents: int, size: int, hidden: int, state_size: int | None = None
    ) -> None:
        """`size`: features of a turn; `state_size`: features of the state, default `size`."""
        super().__init__()
        self.heads = nn.ModuleList(ValueHead(size, hidden) for _ in range(agents))
        self.mixer: nn.Module = SumMixer() if kind == "vdn" else Monotone(agents, state_size or size)

    def own(self, x: Tensor, spoke: Tensor) -> Tensor:
        """Q_i of every agent, [B, A]."""
        q = torch.stack([head(x[:, i]) for i, head in enumerate(self.heads)], dim=-1)
        return torch.where(spoke, q, torch.zeros((), device=q.device))

    def forward(self, x: Tensor, spoke: Tensor, s: Tensor) -> Tensor:
        """Q_tot, [B]."""
        return cast(Tensor, self.mixer(self.own(x, spoke), s))


def target_of(net: TeamValue) -> TeamValue:
    """Copy of heads and mixer without gradients."""
    return copy.deepcopy(net).requires_grad_(False)


@torch.no_grad()
def follow(target: TeamValue, net: TeamValue, tau: float) -> None:
    """Polyak averaging: target <- (1 - tau) * target + tau * net, heads and mixer alike."""
    for slow, fast in zip(target.parameters(), net.parameters(), strict=True):
        slow.lerp_(fast, tau)
