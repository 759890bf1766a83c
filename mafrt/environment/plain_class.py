"""A class without a base class, as MARFT's README shows it, as a `mafrt.Env`; Gymnasium environments of texts too.

    class Game:
        def reset(self): return "Guess a number."                  # or one text per agent, or {agent: text}
        def step(self, action): return observation, reward, done, info

- `agents` (names) or `n_agents` (a number; the names are then agent_0, agent_1, ...) says who plays; without them
  there is one agent, `agent`.
- One text is shown to every agent, a list has one per agent, in order. All of them act in every step; a dict
  {agent: text} lets only those agents act that it names.
- `step` receives a text where there is one agent, a dict if the observations were one, else a list in the agents'
  order.
- A single reward goes to every agent that acted, a list has one per agent. `done` ends the episode, a list when all of
  it is true. Gymnasium's five values (`terminated`, `truncated`) and its `reset` with an info are taken too.
- Observations of MRLM, which hold messages, are shown as chats; `step` then gets a message and may return
  `(observation, reward)` (`from_mrlm.py`).
- If `reset` takes a `seed`, it gets one. If not, `random` and numpy's global generator are seeded for the episode, and
  other code in the process does not see it.
"""

from __future__ import annotations

import inspect
import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

from mafrt.core.errors import EnvError
from mafrt.core.text import brief
from mafrt.core.types import Observation, StepResult
from mafrt.environment import from_mrlm
from mafrt.environment.base import AdaptedEnv


class PlainEnv(AdaptedEnv):
    """Base of the classes that `mafrt.environment.registry` makes; `factory` builds the user's object."""

    factory: ClassVar[Any]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.adopt(type(self).factory(*args, **kwargs))
        self.agents = _agents_of(self.inner)
        turns = getattr(self.inner, "max_turns", None)
        if not hasattr(self.inner, "max_steps") and isinstance(turns, int) and turns > 0:
            self.max_steps = turns
        space = getattr(self.inner, "action_space", None)
        if space is not None and not callable(space) and "Text" not in [k.__name__ for k in type(space).__mro__]:
            raise EnvError(
                f"{self.class_name}: the action space is {space}; agents of this library act by texts, so wrap the "
                "environment in one with a Text space"
            )

    def reset(
        self, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, Observation], dict[str, Any]]:
        drawn = self.rng.randrange(2**31)
        self._generators = _seeded_states(drawn)
        takes = inspect.signature(self.inner.reset).parameters
        with self._own_generators():
            result = self.inner.reset(seed=drawn) if "seed" in takes else self.inner.reset()
        info: dict[str, Any] = {}
        self._shown: Any = None
        self._chat: list[dict[str, str]] = []
        if isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], Mapping):
            result, info = result[0], dict(result[1])
        return self._observed(result), info

    def transition(self, state: Any, actions: dict[str, str]) -> Any:
        return self.inner.transition(state)

    def step(self, actions: dict[str, str]) -> StepResult:
        given: Any = dict(actions) if self._by_name else [actions[agent] for agent in self.agents]
        text = actions[self.agents[0]] if not self._by_name and len(self.agents) == 1 else None
        if text is not None:
            given = text if self._shown is None else from_mrlm.message_of(text, self._shown)
        with self._own_generators():
            result = self.inner.step(given)
        if isinstance(result, tuple) and len(result) == 2 and from_mrlm.is_observation(result[0]):
            result = _five_values(*result)
        if not isinstance(result, tuple) or len(result) not in (4, 5):
            raise EnvError(
                f"{self.class_name}.step() must return (observation, reward, done, info), found {brief(result)}"
            )
        observation, reward, done, *cut, info = result
        terminated, truncated = _all_true(done), bool(cut) and _all_true(cut[0])
        over = terminated or truncated
        known = dict(info) if isinstance(info, Mapping) else {}
        return StepResult(
            {} if over else self._observed(observation, text),
            self._rewards(reward, actions),
            terminated,
            truncated,
            known,
        )

    def _observed(self, result: Any, message: str | None = None) -> dict[str, Observation]:
        """The observations of the agents that act next; `message`: what the only agent said before."""
        self._by_name = isinstance(result, Mapping)
        if from_mrlm.is_observation(result):
            self._shown, self._chat = result, from_mrlm.chat_of(result, self._chat, message)
            return dict.fromkeys(self.agents, self._chat)
        if isinstance(result, Mapping):
            return dict(result)
        if isinstance(result, str):
            return dict.fromkeys(self.agents, result)
        texts = _listed(result)
        if texts is None or len(texts) != len(self.agents):
            raise EnvError(
                f"{self.class_name}: the observation must be a text, {{agent: text}}, or a list of {len(self.agents)} "
                f"texts, one for each of {', '.join(self.agents)}; found {brief(result)}"
            )
        return {agent: str(text) for agent, text in zip(self.agents, texts, strict=True)}

    def _rewards(self, reward: Any, actions: Mapping[str, str]) -> dict[str, Any]:
        """The reward of each agent."""
        if isinstance(reward, Mapping):
            return dict(reward)
        amounts = _listed(reward)
        if amounts is None:
            return dict.fromkeys(actions, reward)
        if len(amounts) != len(self.agents):
            raise EnvError(
                f"{self.class_name}.step(): the reward must be a number or {len(self.agents)} numbers, one for each "
                f"agent; found {brief(reward)}"
            )
        return {agent: amount for agent, amount in zip(self.agents, amounts, strict=True) if agent in actions}

    @contextmanager
    def _own_generators(self) -> Iterator[None]:
        """Within it, the process's global generators are the episode's own."""
        before = _states()
        _restore(self._generators)
        try:
            yield
        finally:
            self._generators = _states()
            _restore(before)

    def close(self) -> None:
        close = getattr(self.inner, "close", None)
        if callable(close):
            close()


def _five_values(observation: Any, reward: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
    """Observation and reward of MRLM as Gymnasium's values; the parts of the reward are measures."""
    info = dict(getattr(observation, "info", None) or {})
    if parts := getattr(reward, "components", None):
        info["measures"] = {f"reward/{name}": amount for name, amount in parts.items()}
    return observation, getattr(reward, "value", reward), bool(getattr(observation, "done", False)), False, info


def _agents_of(inner: Any) -> tuple[str, ...]:
    """The names of the agents of a user's object."""
    names = getattr(inner, "agents", None)
    if isinstance(names, Sequence) and not isinstance(names, str) and names:
        return tuple(map(str, names))
    count = getattr(inner, "n_agents", None) or getattr(inner, "num_agents", None)
    if isinstance(count, int) and not isinstance(count, bool) and count > 1:
        return tuple(f"agent_{i}" for i in range(count))
    return ("agent",)


def _listed(value: Any) -> list[Any] | None:
    """The items of a list, tuple or array; None for any other value."""
    if isinstance(value, (list, tuple)):
        return list(value)
    if getattr(value, "ndim", 0) >= 1:  # an array: MARFT's environments return them
        return [item.item() if hasattr(item, "item") else item for item in value.ravel()]
    return None


def _all_true(done: Any) -> bool:
    flags = list(done.values()) if isinstance(done, Mapping) else _listed(done)
    return bool(done) if flags is None else bool(flags) and all(map(bool, flags))


def _numpy_random() -> Any:
    """numpy's random module, if the process has imported it."""
    return getattr(sys.modules.get("numpy"), "random", None)


def _states() -> tuple[Any, Any]:
    """The states of the global generators of `random` and of numpy."""
    numpy = _numpy_random()
    return random.getstate(), None if numpy is None else numpy.get_state()


def _restore(states: tuple[Any, Any]) -> None:
    random.setstate(states[0])
    numpy = _numpy_random()
    if numpy is not None and states[1] is not None:
        numpy.set_state(states[1])


def _seeded_states(seed: int) -> tuple[Any, Any]:
    """The states that the global generators have after they are seeded."""
    numpy = _numpy_random()
    return random.Random(seed).getstate(), None if numpy is None else numpy.RandomState(seed).get_state()
