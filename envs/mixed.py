"""`MixedTasks`: several environments as one, by weights; the score of each is reported under its name."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping
from operator import itemgetter
from pathlib import PurePath
from typing import Any

from mafrt.core.errors import ConfigError
from mafrt.core.text import brief, real_number
from mafrt.core.types import Observation, StepResult
from mafrt.environment.base import Env
from mafrt.environment.registry import REMOTE

_ONE_MORE_SERVER = re.compile(r"(\[[^\]]*\]|[^/@,:]+):\d+(/.*)?")
"""HOST:PORT, at the end with the environment's name"""


class MixedTasks(Env):
    """Plays one of several environments in each episode.

    Where all have numbered tasks, a pass plays every task at least once, and those of an environment as often as its
    weight asks for. The outcome is also the measure `score/NAME`.
    """

    def __init__(self, envs: Mapping[str, Env], weights: Mapping[str, float] | None = None) -> None:
        """Mix `envs` (name -> environment).

        `weights`: share of the episodes of each, in any unit; default: by their numbers of tasks, or equal.
        Raises ConfigError for environments of different agents, or a weight that is not above 0.
        """
        if not envs:
            raise ConfigError("a mixture needs at least one environment")
        self.envs = {name: env.unwrapped for name, env in envs.items()}
        self.weights = dict(weights or {})
        for name, weight in self.weights.items():
            if name not in self.envs or (real_number(weight) or 0.0) <= 0.0:
                raise ConfigError(f"the weight of {name} is {brief(weight)}; give one above 0, of {', '.join(envs)}")
        first = next(iter(self.envs.values()))
        for name, env in self.envs.items():
            if env.agents != first.agents:
                raise ConfigError(
                    f"the environment {name} is played by {', '.join(env.agents)}, another one of the mixture by "
                    f"{', '.join(first.agents)}; give one team for all (--profile_path)"
                )
        self.agents = first.agents
        limits = [env.max_steps for env in self.envs.values()]
        self.max_steps = None if None in limits else max(limit for limit in limits if limit is not None)
        rubrics = {env.rubric for env in self.envs.values()}
        self.rubric = rubrics.pop() if len(rubrics) == 1 else None
        for name in ("blocking", "costly_reset", "opponents"):  # true of the whole where it is of one
            setattr(self, name, any(getattr(env, name) for env in self.envs.values()))
        self.bounded = all(env.bounded for env in self.envs.values())
        self.plan = self._plan()
        self.num_tasks = len(self.plan) or None

    def _plan(self) -> list[tuple[str, int]]:
        """(environment, task) of every task of a pass; empty if some environment has no numbered tasks.

        The environments alternate by their shares, so that the first tasks of a pass are a sample of all of them.
        """
        sizes = {name: env.num_tasks for name, env in self.envs.items()}
        if not all(sizes.values()):
            return []
        tasks = repeated({name: size or 0 for name, size in sizes.items()}, self.weights)
        counts, drawn, places = Counter(name for name, _ in tasks), Counter[str](), []
        for name, task in tasks:
            places.append(((drawn[name] + 0.5) / counts[name], name, task))
            drawn[name] += 1
        return [(name, task) for _, name, task in sorted(places, key=itemgetter(0))]

    def reset(
        self, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, Observation], dict[str, Any]]:
        chosen, task = (options or {}).get("task"), None
        if self.plan:
            self.name, task = self.plan[self.rng.randrange(len(self.plan)) if chosen is None else chosen]
        else:
            names = list(self.envs)
            self.name = self.rng.choices(names, [self.weights.get(name, 1.0) for name in names])[0]
        env = self.envs[self.name]
        env.rng, env.step_count = self.rng, 0
        observations, info = env.reset(seed=seed, options=None if task is None else {"task": task})
        known = {"task": f"{self.name}/{info['task']}"} if "task" in info else {}
        return observations, {**info, **known, "set": self.name}

    def transition(self, state: Any, actions: dict[str, str]) -> Any:
        return self.envs[self.name].transition(state, actions)

    def step(self, actions: dict[str, str]) -> StepResult:
        env = self.envs[self.name]
        result = StepResult(*env.step(actions))
        env.step_count += 1
        if env.max_steps is not None and env.step_count >= env.max_steps and not result.terminated:
            result = result._replace(truncated=True)
        if not (result.terminated or result.truncated) or result.info.get("outcome") is None:
            return result
        measures = {**result.info.get("measures", {}), f"score/{self.name}": float(result.info["outcome"])}
        return result._replace(info={**result.info, "measures": measures})

    def spawn(self) -> MixedTasks:
        return MixedTasks({name: env.spawn() for name, env in self.envs.items()}, self.weights)

    def close(self) -> None:
        for env in self.envs.values():
            env.close()


def repeated(sizes: Mapping[str, int], weights: Mapping[str, float] | None) -> list[tuple[str, int]]:
    """(set, task) of a pass in which every task occurs, and each set as often as its weight asks for.
    `weights`: share of each set, 1 where it is not named; None or empty: every task once.
    """
    shares = {name: weights.get(name, 1.0) if weights else float(size) for name, size in sizes.items()}
    unit = max(size / shares[name] for name, size in sizes.items())
    return [(name, n % size) for name, size in sizes.items() for n in range(max(size, round(unit * shares[name])))]


def named_sets(text: str) -> dict[str, tuple[str, float | None]]:
    """`a.jsonl@2,b.jsonl` -> name (the file's stem) -> (source, weight or None).

    Raises:
        ConfigError: an empty part, a weight that is no number above 0, or two sets of one name.
    """
    sets: dict[str, tuple[str, float | None]] = {}
    for part in _parts(text):
        source, given = _weighted(part.strip())
        try:
            weight = None if given is None else float(given)
        except ValueError:
            weight = math.nan
        if not source or (weight is not None and not (math.isfinite(weight) and weight > 0)):
            raise ConfigError(f"{text!r} holds {part!r}; expected NAME or NAME@WEIGHT with a weight above 0.")
        name = re.sub(r"[^\w.-]+", "_", PurePath(source).stem if "/" in source or "." in source else source)
        if re.fullmatch(r"[A-Za-z_][\w.-]*:\d*\.?\d+", source.rpartition("/")[2]) and not re.fullmatch(
            r"\w+://[^/]*", source
        ):
            raise ConfigError(f"{text!r} holds {part!r}; expected NAME or NAME@WEIGHT with a weight above 0.")
        if name in sets:
            told = (
                "NAME@2 gives one twice the share"
                if sets[name][0] == source
                else f"servers of one environment are one address, as in {REMOTE}A:1,B:2/NAME"
                if source.startswith(REMOTE) and sets[name][0].startswith(REMOTE)
                else "a set is called as its file or its environment, so rename a file or leave one out"
            )
            raise ConfigError(f"{text!r} holds two sets called {name!r}; {told}.")
        sets[name] = (source, weight)
    return sets


def is_mixture(text: str) -> bool:
    """Whether `text` names several environments, or one with a weight, and not one on several servers."""
    parts = _parts(text)
    return len(parts) > 1 or _weighted(parts[0])[1] is not None


def _parts(text: str) -> list[str]:
    """`text` at its commas, except for those between the servers of one address, `grpc://a:1,b:2/math`."""
    parts: list[str] = []
    for part in text.split(","):
        if parts and parts[-1].startswith(REMOTE) and _ONE_MORE_SERVER.fullmatch(part.strip()):
            parts[-1] += f",{part}"
        else:
            parts.append(part)
    return parts


def _weighted(part: str) -> tuple[str, str | None]:
    """`NAME@WEIGHT` in two; None for a part without a weight. An `@` in a path or an address begins none."""
    source, at, given = part.rpartition("@")
    return (part, None) if not at or "/" in given or source == REMOTE else (source, given)


def weights_of(sets: Mapping[str, tuple[str, float | None]]) -> dict[str, float] | None:
    """The weights of `named_sets`, 1 for a set without one; None if none is given."""
    given = {name: weight for name, (_, weight) in sets.items() if weight is not None}
    return {name: given.get(name, 1.0) for name in sets} if given else None
