"""Schedules: the learning agents of each iteration. Pure functions of the iteration, so resuming needs no state.

A frozen agent still acts; its turns stay in the context and out of the loss.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from mafrt.config.schema import check_number, unknown
from mafrt.core.errors import ConfigError


@dataclass(frozen=True)
class IterationPlan:
    """Learning agents and adapters of one iteration."""

    learners: tuple[tuple[str, ...], ...]
    """Groups of agents, updated one group after the other; the agents of a group learn together. Empty: no update."""
    adapters: Mapping[str, str]
    """Adapter that each agent acts and learns with in this iteration."""
    interval: str | None = None
    """The agent of the current interval, where only one learns."""
    compound: bool = False
    """Whether later groups are weighted by how the earlier ones moved (HAPPO's M)."""

    @property
    def agents(self) -> tuple[str, ...]:
        """All agents that learn, in order of their update."""
        return tuple(agent for group in self.learners for agent in group)


class Schedule(Protocol):
    """Maps an iteration to its plan. Equal iterations give equal plans."""

    def plan(self, iteration: int) -> IterationPlan: ...


@dataclass(frozen=True)
class AgentAdapters:
    """The agents of a team, their adapters, and the frozen ones."""

    agents: tuple[str, ...]
    adapters: Mapping[str, str]
    frozen: frozenset[str] = frozenset()

    @classmethod
    def of(
        cls, agents: Sequence[str], *, frozen: Sequence[str] = (), adapters: Mapping[str, str] | None = None
    ) -> AgentAdapters:
        """Check and build; `adapters` defaults to one per agent, of the agent's name.

        Raises:
            ConfigError: no agents, one named twice, a frozen one that is not in the team, an agent without adapter,
                or an adapter that a frozen and a learning agent share (it cannot be both).
        """
        if not agents or len(set(agents)) != len(agents):
            raise ConfigError(f"agents are {list(agents)}; expected at least one, each named once.")
        for name in frozen:
            if name not in agents:
                raise ConfigError(unknown("frozen agent", name, agents))
        chosen = dict(adapters) if adapters is not None else {name: name for name in agents}
        for name in agents:
            if name not in chosen:
                raise ConfigError(f"agent {name!r} has no adapter; adapters are given for {sorted(chosen)}.")
        held = {chosen[name]: name for name in frozen}
        for name in agents:
            if name not in frozen and chosen[name] in held:
                raise ConfigError(
                    f"adapter {chosen[name]!r} is shared by the frozen agent {held[chosen[name]]!r} and the learning "
                    f"agent {name!r}; freeze both or give them adapters of their own."
                )
        return cls(tuple(agents), chosen, frozenset(frozen))

    @property
    def learning(self) -> tuple[str, ...]:
        """Agents that are not frozen, in the team's order."""
        return tuple(name for name in self.agents if name not in self.frozen)


@dataclass(frozen=True)
class Concurrent:
    """All agents learn together in every iteration."""

    assigned: AgentAdapters

    def plan(self, iteration: int) -> IterationPlan:
        learning = self.assigned.learning
        return IterationPlan((learning,) if learning else (), self.assigned.adapters)


@dataclass(frozen=True)
class RoundRobin:
    """One agent learns for `interval` iterations, then the next (MARFT's `agent_iteration_interval`).

    agent = learning[(iteration // interval) % n]; frozen agents have no interval.
    """

    assigned: AgentAdapters
    interval: int

    def plan(self, iteration: int) -> IterationPlan:
        learning = self.assigned.learning
        if not learning:
            return IterationPlan((), self.assigned.adapters)
        name = learning[(iteration // self.interval) % len(learning)]
        return IterationPlan(((name,),), self.assigned.adapters, interval=name)


@dataclass(frozen=True)
class Sequential:
    """All agents within each iteration, one after the other in an order drawn anew (HAPPO, 2109.11251, algorithm 4).

    The order depends on `seed` and the iteration alone.
    """

    assigned: AgentAdapters
    seed: int = 0

    def plan(self, iteration: int) -> IterationPlan:
        order = list(self.assigned.learning)
        random.Random(f"{self.seed}:{iteration}").shuffle(order)
        return IterationPlan(tuple((name,) for name in order), self.assigned.adapters, compound=True)


@dataclass(frozen=True)
class Swap:
    """All agents learn together, and every `interval` iterations the adapters move on by one role (CORY, 2410.06101).

    With two roles they swap. Frozen agents keep theirs. Optimizer state belongs to the adapter and travels with it.
    """

    assigned: AgentAdapters
    interval: int

    def plan(self, iteration: int) -> IterationPlan:
        learning = self.assigned.learning
        adapters = dict(self.assigned.adapters)
        for position, name in enumerate(learning):
            source = learning[(position + iteration // self.interval) % len(learning)]
            adapters[name] = self.assigned.adapters[source]
        return IterationPlan((learning,) if learning else (), adapters)


@dataclass(frozen=True)
class SelfPlay:
    """Two agents with one adapter play against it, or against one of its earlier selves (a league).

    The earlier selves are adapters `NAME_past0`, `NAME_past1`, ...: at every `interval`-th iteration, the first
    included, the next of them in turn becomes a copy of the present weights (`mafrt.runners.league`). The opponent of
    an iteration is drawn evenly from the present self and those that exist. Against itself both seats learn; against an
    earlier self one does, the first agent in even iterations and the second in odd ones.
    (Fictitious self-play, Heinrich 2015; league, Vinyals 2019.)
    """

    assigned: AgentAdapters
    members: tuple[str, ...]
    """adapters of the earlier selves"""
    interval: int
    seed: int = 0

    def plan(self, iteration: int) -> IterationPlan:
        known = min(len(self.members), iteration // self.interval + 1)
        drawn = random.Random(f"league-{self.seed}-{iteration}").randrange(known + 1)
        learning = self.assigned.learning
        if drawn == known or not learning:
            return IterationPlan((learning,) if learning else (), self.assigned.adapters)
        seat, other = self.assigned.agents if iteration % 2 == 0 else self.assigned.agents[::-1]
        return IterationPlan(((seat,),), {**self.assigned.adapters, other: self.members[drawn]})

    def member_at(self, iteration: int) -> str | None:
        """The earlier self that is renewed before `iteration`; None if none is."""
        if iteration % self.interval:
            return None
        return self.members[iteration // self.interval % len(self.members)]


def league_members(adapter: str, size: int) -> tuple[str, ...]:
    """Names of the adapters that hold the earlier selves of `adapter`."""
    return tuple(f"{adapter}_past{number}" for number in range(size))


def self_play(assigned: AgentAdapters, size: int, interval: int, seed: int) -> SelfPlay:
    """The schedule of a league of `size` earlier selves.

    Raises:
        ConfigError: the team is not two agents with one adapter.
    """
    shared = {assigned.adapters[name] for name in assigned.agents}
    if len(assigned.agents) != 2 or len(shared) != 1:
        raise ConfigError(
            f"a league needs two agents that share one adapter, and this team has {len(assigned.agents)} on "
            f"{len(shared)}; give both the same `adapter` in the team file, or leave --league out."
        )
    return SelfPlay(assigned, league_members(shared.pop(), size), interval, seed)


@dataclass(frozen=True)
class CriticWarmup:
    """No agent learns in the first iterations (critic warm-up); then another schedule starts at its iteration 0."""

    schedule: Schedule
    iterations: int

    def plan(self, iteration: int) -> IterationPlan:
        if iteration < self.iterations:
            return IterationPlan((), self.schedule.plan(0).adapters)
        return self.schedule.plan(iteration - self.iterations)


SCHEDULES = ("concurrent", "round_robin", "sequential", "swap")


def make_schedule(
    name: str,
    agents: Sequence[str],
    *,
    interval: int = 1,
    seed: int = 0,
    frozen: Sequence[str] = (),
    adapters: Mapping[str, str] | None = None,
) -> Schedule:
    """The schedule of that name.

    Args:
        name: one of `SCHEDULES`.
        agents: the team's agents in order.
        interval: iterations per agent (`round_robin`) or per casting (`swap`).
        seed: of the order (`sequential`).
        frozen: agents that never learn.
        adapters: agent -> adapter.

    Raises:
        ConfigError: an unknown name (names the nearest), an interval below 1, or agents and adapters that do not fit.
    """
    if name not in SCHEDULES:
        raise ConfigError(unknown("schedule", name, SCHEDULES))
    check_number("agent_iteration_interval", interval, least=1, whole=True)
    assigned = AgentAdapters.of(agents, frozen=frozen, adapters=adapters)
    if name == "concurrent":
        return Concurrent(assigned)
    if name == "round_robin":
        return RoundRobin(assigned, interval)
    if name == "sequential":
        return Sequential(assigned, seed)
    return Swap(assigned, interval)
