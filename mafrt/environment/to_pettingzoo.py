"""A `mafrt.Env` as PettingZoo's turn-based (AEC) and parallel environment, with texts as observations and actions.

Rewards are the environment's; on the last step every agent's includes the outcome, unless `add_outcome=False`. The
observation of an agent that does not act is the empty text.

Needs pettingzoo and gymnasium (the extra [pettingzoo]).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pettingzoo import AECEnv, ParallelEnv

from mafrt.core.types import Observation, StepResult
from mafrt.environment.base import Env
from mafrt.environment.session import session_of
from mafrt.environment.to_gymnasium import AnyText, TypedText, as_text


class _Adapted:
    """The parts that both forms share."""

    def __init__(self, env: Env, add_outcome: bool = True) -> None:
        self._session, self._add_outcome = session_of(env), add_outcome
        self.possible_agents = list(self._session.agents)
        self.agents = list(self.possible_agents)
        self._observation_spaces = {agent: AnyText() for agent in self.possible_agents}
        self._action_spaces = {agent: AnyText() for agent in self.possible_agents}
        self.metadata = {"render_modes": [], "name": self._session.class_name, "is_parallelizable": False}
        self.render_mode = None

    def observation_space(self, agent: str) -> AnyText:
        return self._observation_spaces[agent]

    def action_space(self, agent: str) -> AnyText:
        return self._action_spaces[agent]

    def render(self) -> None:
        """Nothing is drawn: observations are texts."""

    def close(self) -> None:
        self._session.close()

    def _rewards_of(self, result: StepResult) -> dict[str, float]:
        """The reward of every agent for one step."""
        over = result.terminated or result.truncated
        shared = float(result.info.get("outcome") or 0.0) if over and self._add_outcome else 0.0
        return {agent: float(result.rewards.get(agent, 0.0)) + shared for agent in self.possible_agents}

    def _shown(self, observations: Mapping[str, Observation]) -> dict[str, str]:
        return {agent: TypedText(as_text(observations.get(agent, ""))) for agent in self.possible_agents}

    def _infos(self, info: Mapping[str, Any], acting: Mapping[str, Observation]) -> dict[str, dict[str, Any]]:
        """The info of every agent; `acts` says whether its next action is read."""
        return {agent: {**info, "acts": agent in acting} for agent in self.possible_agents}


class ParallelPettingZoo(_Adapted, ParallelEnv[str, str, str]):
    """All agents act in every step; the texts of those whose turn it is not are ignored (`infos[agent]["acts"]`)."""

    def reset(
        self, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, str], dict[str, dict[str, Any]]]:
        """Begin an episode; `options={"task": i}` picks a task. Raises EnvError as `Session.reset` does."""
        observations, info = self._session.reset(seed=seed, options=options)
        self.agents, self._acting = list(self.possible_agents), tuple(observations)
        return self._shown(observations), self._infos(info, observations)

    def step(self, actions: dict[str, str]) -> tuple[dict[str, str], dict[str, float], Any, Any, Any]:
        """Take the texts of the agents whose turn it is. Raises EnvError as `Session.step` does."""
        result = self._session.step({agent: actions[agent] for agent in self._acting})
        over = result.terminated or result.truncated
        acting = {} if over else result.observations
        self._acting = tuple(acting)
        if over:
            self.agents = []
        terminated = dict.fromkeys(self.possible_agents, result.terminated)
        truncated = dict.fromkeys(self.possible_agents, result.truncated)
        return self._shown(acting), self._rewards_of(result), terminated, truncated, self._infos(result.info, acting)


class AecPettingZoo(_Adapted, AECEnv[str, str, str]):
    """Agents act one by one; those that act at the same time are asked in order, and see nothing of each other."""

    agent_selection: str

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> None:
        """Begin an episode; `options={"task": i}` picks a task. Raises EnvError as `Session.reset` does."""
        observations, info = self._session.reset(seed=seed, options=options)
        self.agents = list(self.possible_agents)
        self.rewards: dict[str, float] = dict.fromkeys(self.agents, 0.0)
        self._cumulative_rewards = dict.fromkeys(self.agents, 0.0)
        self.terminations = dict.fromkeys(self.agents, False)
        self.truncations = dict.fromkeys(self.agents, False)
        self._skip_agent_selection = None
        self._ask(observations, info)

    def observe(self, agent: str) -> str:
        return self._texts[agent]

    def step(self, action: str | None) -> None:
        """Take the text of `agent_selection`, or None if it is done. Raises EnvError as `Session.step` does."""
        agent = self.agent_selection
        if self.terminations[agent] or self.truncations[agent]:
            self._was_dead_step(action)
            return
        assert action is not None
        self._cumulative_rewards[agent] = 0.0
        self._clear_rewards()
        self._actions[agent] = action
        self._waiting.pop(0)
        if self._waiting:
            self.agent_selection = self._waiting[0]
            return
        result = self._session.step(self._actions)
        self.rewards = self._rewards_of(result)
        self.terminations = dict.fromkeys(self.agents, result.terminated)
        self.truncations = dict.fromkeys(self.agents, result.truncated)
        over = result.terminated or result.truncated
        self._ask({} if over else result.observations, result.info)
        self._accumulate_rewards()

    def _ask(self, observations: Mapping[str, Observation], info: Mapping[str, Any]) -> None:
        """Queue the agents that act next."""
        self._texts, self.infos = self._shown(observations), self._infos(info, observations)
        self._waiting, self._actions = list(observations), dict[str, str]()
        self.agent_selection = self._waiting[0] if self._waiting else self.agents[0]
