"""A PettingZoo environment of texts as a `mafrt.Env`; `make_env` wraps one that `--env module:Class` names.

Observations and actions have to be texts (a `Text` space). The seed is drawn from `rng`. An agent that is paid before
its first turn receives that reward with its first turn, since there is no earlier one to pay.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from mafrt.core.errors import EnvError
from mafrt.core.types import Observation, StepResult
from mafrt.environment.base import AdaptedEnv


class FromPettingZoo(AdaptedEnv):
    """Base of the classes that `mafrt.environment.registry` makes; `factory` builds the foreign environment."""

    factory: ClassVar[Any]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.adopt(type(self).factory(*args, **kwargs))
        self.agents = tuple(map(str, self.inner.possible_agents))
        for agent in self.agents:
            space = self.inner.action_space(agent)
            if type(space).__name__ != "AnyText" and "Text" not in [kind.__name__ for kind in type(space).__mro__]:
                raise EnvError(
                    f"{self.class_name}: the action space of agent {agent!r} is {space}; agents of this library act by "
                    "texts, so wrap the environment in one with a Text space"
                )

    def reset(
        self, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, Observation], dict[str, Any]]:
        self._owed: dict[str, float] = {}
        self._spoken: set[str] = set()
        return self._begin(self.rng.randrange(2**31))

    def _begin(self, seed: int) -> tuple[dict[str, Observation], dict[str, Any]]:
        raise NotImplementedError

    def _paid(self, actions: Mapping[str, str], rewards: Mapping[str, Any]) -> dict[str, float]:
        """The rewards of agents that have spoken; those of the others are owed to them."""
        self._spoken |= set(actions)
        for agent, reward in rewards.items():
            self._owed[agent] = self._owed.get(agent, 0.0) + float(reward)
        paid = {agent: reward for agent, reward in self._owed.items() if agent in self._spoken}
        self._owed = {agent: reward for agent, reward in self._owed.items() if agent not in self._spoken}
        return paid

    def close(self) -> None:
        self.inner.close()


class FromParallel(FromPettingZoo):
    """A parallel environment: all live agents act in every step."""

    def _begin(self, seed: int) -> tuple[dict[str, Observation], dict[str, Any]]:
        observations, _ = self.inner.reset(seed=seed)
        return {agent: observations[agent] for agent in self.inner.agents}, {}

    def step(self, actions: dict[str, str]) -> StepResult:
        observations, rewards, terminated, truncated, infos = self.inner.step(actions)
        live = [agent for agent in self.inner.agents if not terminated.get(agent) and not truncated.get(agent)]
        cut = not live and any(truncated.values()) and not any(terminated.values())
        seen = {agent: observations[agent] for agent in live}
        return StepResult(seen, self._paid(actions, rewards), not live and not cut, cut, {"infos": dict(infos)})


class FromAec(FromPettingZoo):
    """A turn-based environment: one agent acts in every step."""

    def _begin(self, seed: int) -> tuple[dict[str, Observation], dict[str, Any]]:
        self.inner.reset(seed=seed)
        agent = self.inner.agent_selection
        return {agent: self.inner.observe(agent)}, {}

    def step(self, actions: dict[str, str]) -> StepResult:
        inner, cut, ended = self.inner, False, False
        [text] = actions.values()
        inner.step(text)
        paid = self._paid(actions, inner.rewards)
        while inner.agents and (inner.terminations[inner.agent_selection] or inner.truncations[inner.agent_selection]):
            ended |= bool(inner.terminations[inner.agent_selection])
            cut |= bool(inner.truncations[inner.agent_selection])
            inner.step(None)  # PettingZoo's way to take a finished agent out
        if not inner.agents:
            return StepResult({}, paid, ended or not cut, cut and not ended, {})
        agent = inner.agent_selection
        return StepResult({agent: inner.observe(agent)}, paid, False, False, {})
