"""`mafrt info TEAM`: which agent sits on which base, with parameters and memory. Needs no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from mafrt.config.agent import LoraSpec
from mafrt.config.team import Team
from mafrt.core.errors import ConfigError
from mafrt.core.shipped import base_folder
from mafrt.core.text import counted
from mafrt.models.load_bases import models_of
from mafrt.models.memory_estimate import MemoryInputs, ModelShape, adapter_weights, footprint, model_shape
from mafrt.storage.report import aligned


@dataclass(frozen=True)
class TeamRow:
    """One adapter on its base."""

    adapter: str
    model: str
    shape: ModelShape
    lora: LoraSpec
    agents: tuple[str, ...]
    learns: bool

    @property
    def parameters(self) -> int:
        return adapter_weights(self.shape, MemoryInputs(rank=self.lora.rank, targets=self.lora.targets))


def seats_of(team: Team, model: str, rank: int) -> list[TeamRow]:
    """The adapters of a team, each with its base. Raises ConfigError for a base whose size is not known."""
    seats = []
    for adapter, name in models_of(team, model).items():
        agents = [agent for agent in team.agents if agent.adapter == adapter]
        shape = model_shape(str(base_folder(name) or name))
        lora = team.lora_for(adapter, LoraSpec(rank=rank, alpha=2.0 * rank))
        if unknown := [target for target in shape.named(lora.targets) if target not in shape.linears]:
            raise ConfigError(
                f"adapter {adapter!r} has the target {unknown[0]!r}; the memory of {name} is known for "
                f"{', '.join(shape.linears)}"
            )
        learns = not all(agent.freeze for agent in agents)
        seats.append(TeamRow(adapter, name, shape, lora, tuple(agent.name for agent in agents), learns))
    return seats


def team_table(team: Team, model: str, use: MemoryInputs) -> str:
    """Two tables: an adapter a line, and a base a line with the sum below.

    Args:
        team: the agents.
        model: base of the agents that name none.
        use: rank of adapters that name none, micro-batch, rows and context.
    """
    seats = seats_of(team, model, use.rank)
    rows: list[tuple[str, ...]] = [("agents", "base", "adapter", "rank", "parameters", "learns")]
    for seat in seats:
        learns = "yes" if seat.learns else "no"
        rows.append(
            (", ".join(seat.agents), seat.model, seat.adapter, str(seat.lora.rank), f"{seat.parameters:,}", learns)
        )
    names = tuple(dict.fromkeys(seat.model for seat in seats))
    copies = f"{len(names)} bases, one copy of each" if len(names) > 1 else "one base"
    title = f"{counted(len(team.agents), 'agents')}, {counted(len(seats), 'adapters')}, {copies}"
    return "\n".join([title, *aligned(rows), "", "GB on one GPU in bf16:", *aligned(_memory(seats, names, use))])


def _memory(seats: Sequence[TeamRow], names: Sequence[str], use: MemoryInputs) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = [
        ("base", "agents", "parameters", "base", "adapters", "activations", "keys, values", "peak")
    ]
    bases, adapters, cached, activations = 0.0, 0.0, 0.0, 0.0
    for name in names:
        of_base = [seat for seat in seats if seat.model == name]
        shape = of_base[0].shape
        memory = footprint(shape, replace(use, agents=0))
        own_adapters = 0.0
        for seat in of_base:
            how = replace(use, agents=1, rank=seat.lora.rank, targets=seat.lora.targets)
            own_adapters += footprint(shape, how).adapters
        agents = str(sum(len(seat.agents) for seat in of_base))
        weights = f"{shape.block_weights + shape.other_weights:,}"
        peak = memory.base + own_adapters + max(memory.activations, memory.keys_and_values)
        parts = (memory.base, own_adapters, memory.activations, memory.keys_and_values, peak)
        rows.append((name, agents, weights, *(f"{part / 1e9:.2f}" for part in parts)))
        bases, adapters, cached = bases + memory.base, adapters + own_adapters, cached + memory.keys_and_values
        # Bases learn one after the other, so only the largest activations are in memory.
        activations = max(activations, memory.activations)
    if len(names) > 1:
        total = (bases, adapters, activations, cached, bases + adapters + max(activations, cached))
        rows.append(("together", str(sum(len(s.agents) for s in seats)), "", *(f"{part / 1e9:.2f}" for part in total)))
    return rows
