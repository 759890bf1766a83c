"""A `mafrt.Env` as a Gymnasium environment: one stream of turns with texts as observations and actions.

    env = GymnasiumEnv(make_env("math"))
    observation, info = env.reset(seed=0)                       # info["agent"]: the name of the agent that acts
    observation, reward, terminated, truncated, info = env.step("The answer is \\\\boxed{7}.")

Agents that act at the same time are asked one after the other, and the environment steps after the last of them. The
reward of a step is the team's: the sum of all agents' rewards, and the outcome on the last step.

Needs gymnasium (the extra [pettingzoo]).
"""

from __future__ import annotations

from typing import Any

import gymnasium
from gymnasium.spaces import Text

from mafrt.core.types import Observation
from mafrt.environment.base import Env
from mafrt.environment.session import session_of

LONGEST = 10_000_000
"""Characters of the longest text in the space."""
LONGEST_SAMPLE = 64
"""Characters of the longest text that `sample` draws."""


class AnyText(Text):
    """Every text, the empty one included; Gymnasium's `Text` knows finite alphabets only."""

    def __init__(self, seed: int | None = None) -> None:
        super().__init__(LONGEST, min_length=0, seed=seed)

    def contains(self, x: Any) -> bool:
        """Whether `x` is a text of at most `LONGEST` characters."""
        return isinstance(x, str) and len(x) <= LONGEST

    def sample(self, mask: Any = None, probability: Any = None) -> str:
        """A text of up to `LONGEST_SAMPLE` letters and digits, for tests."""
        if mask is None and probability is None:
            mask = (int(self.np_random.integers(0, LONGEST_SAMPLE + 1)), None)
        return super().sample(mask, probability)


class TypedText(str):
    """A text with the dtype of its space, which PettingZoo's `api_test` asks every observation for."""

    dtype = AnyText().dtype


def as_text(observation: Observation) -> str:
    """An observation as one text; of messages, a line `role: content` each."""
    if isinstance(observation, str):
        return observation
    return "\n".join(f"{message['role']}: {message['content']}" for message in observation)


class GymnasiumEnv(gymnasium.Env[str, str]):
    """One agent's view of a team: the next agent to act is shown its observation."""

    metadata = {"render_modes": []}  # noqa: RUF012 (Gymnasium's own form)

    def __init__(self, env: Env) -> None:
        self._session = session_of(env)
        self.observation_space, self.action_space = AnyText(), AnyText()
        self._waiting: list[str] = []
        """Agents that have to act before the environment steps, in order."""
        self._actions: dict[str, str] = {}

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        """Begin an episode; `options={"task": i}` picks a task. Raises EnvError as `Session.reset` does."""
        super().reset(seed=seed)
        observations, info = self._session.reset(seed=int(self.np_random.integers(2**31)), options=options)
        return self._ask(observations), {**info, "agent": self._waiting[0]}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Take the text of the agent that acts. Raises EnvError as `Session.step` does."""
        self._actions[self._waiting.pop(0)] = action
        if self._waiting:
            agent = self._waiting[0]
            return self._shown[agent], 0.0, False, False, {"agent": agent}
        result = self._session.step(self._actions)
        reward = float(sum(result.rewards.values()))
        over = result.terminated or result.truncated
        if over:
            reward += float(result.info.get("outcome") or 0.0)
        observation = self._ask({} if over else result.observations)
        named = {} if over else {"agent": self._waiting[0]}
        return observation, reward, result.terminated, result.truncated, {**result.info, **named}

    def _ask(self, observations: Any) -> str:
        """Queue the agents that act next. Returns the first one's observation; the empty text if there is none."""
        self._shown = {agent: as_text(observation) for agent, observation in observations.items()}
        self._waiting, self._actions = list(self._shown), {}
        return next(iter(self._shown.values()), "")

    def close(self) -> None:
        self._session.close()
