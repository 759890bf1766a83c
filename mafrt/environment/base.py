"""Environments: what a task, a game or a workflow has to say, and what the base class does for it.

An environment is text-level and synchronous, with all agents in one object. Return values come in Gymnasium's order
and names, dicts keyed by agent name as in PettingZoo. Whoever appears in the returned observations acts next, so
turn-by-turn, simultaneous and conditional play share one API. It never sees a token.

The base class owns the random generator (`self.rng`), the turn limit (`max_steps`) and error attribution: whatever
goes wrong in a user's method surfaces as one `EnvError` sentence that names class, method, step and cause.
"""

from __future__ import annotations

import functools
import math
import numbers
import random
from collections.abc import Callable
from typing import Any, TypeVar

from mafrt.config.team import name_problem
from mafrt.core.errors import EnvError, MafrtError
from mafrt.core.types import Evidence, Observation, Scored, StepResult

_SELF = TypeVar("_SELF", bound="Env")


class Env:
    """Base class of environments. A subclass defines `agents`, `reset`, `step` and, as a rule, `transition`.

    `super().__init__()` need not be called. `reset` and `step` of a subclass are wrapped when the class is created:
    the wrapper seeds `self.rng`, counts steps, ends the episode at `max_steps`, and checks what comes back.
    """

    agents: tuple[str, ...] = ()
    """Who takes part: unique names of letters, digits, '_', '.', '-'. Constant from construction on."""
    num_tasks: int | None = None
    """How many tasks there are to choose from with `options={"task": i}`; None: the environment draws its own."""
    max_steps: int | None = 64
    """Turn limit: after so many calls of `step` the episode is truncated. None: no limit."""
    rubric: str | None = None
    """What a coach judges this environment by: a file, or the name of a rubric that ships. None: the general one."""
    blocking: bool = False
    """Whether `step` waits for something outside, such as a sandbox: siblings are then stepped in threads."""

    rng: random.Random
    """The only source of chance that an environment may use; `reset(seed=s)` seeds it."""
    step_count: int
    """Calls of `step` since the last `reset`."""
    done: bool
    """Whether the episode is over (or none has begun)."""

    _init_args: tuple[tuple[Any, ...], dict[str, Any]]

    def __new__(cls: type[_SELF], *args: Any, **kwargs: Any) -> _SELF:
        if cls.__init__ is object.__init__ and (args or kwargs):
            raise TypeError(f"{cls.__name__}() takes no arguments")  # object.__init__ would swallow them here
        env = object.__new__(cls)
        env._init_args = (args, kwargs)
        env.rng = random.Random()
        env.step_count, env.done = 0, True
        env._depth, env._acting = 0, frozenset()
        env._played = None
        return env

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for name, wrap in (("reset", _wrap_reset), ("step", _wrap_step), ("transition", _wrap_transition)):
            if name in cls.__dict__:
                setattr(cls, name, wrap(cls.__dict__[name]))

    def reset(
        self, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, Observation], dict[str, Any]]:
        """Begin an episode.

        `seed=s` makes everything that follows a function of `s` and of the actions; `seed=None` goes on drawing from
        the generator as it is. `options={"task": i}` picks task `i` of `num_tasks`. Returns the observations of those
        who act first, and an info dict whose `"task"` (a string, if given) names the task: episodes of the same task
        form a group.
        """
        raise EnvError(f"{type(self).__name__} lacks reset(self, seed=None, options=None); define it")

    def transition(self, state: Any, actions: dict[str, str]) -> Any:
        """The state that follows `state` when `actions` are said. Pure: it changes neither of its arguments."""
        raise EnvError(f"{type(self).__name__} lacks transition(self, state, actions); define it, or do not call it")

    def step(self, actions: dict[str, str]) -> StepResult:
        """Take what those who were asked have said (agent -> text) and say what comes of it.

        `rewards` may name any agent; a reward belongs to that agent's latest turn, and an agent that is not named gets
        none (which is not 0). On the last step `info["outcome"]`, if given, is the task's verdict for the team.
        `info["evidence"]` (agent -> `Evidence`), if given, is what was found out about that agent's latest turn, and
        `info["measures"]` (name -> number) is what else is to be averaged over episodes, such as a success rate.
        """
        raise EnvError(f"{type(self).__name__} lacks step(self, actions); define it")

    def spawn(self: _SELF) -> _SELF:
        """A fresh sibling that plays independently of this one: the rollout steps many at once.

        The default calls the constructor again with the same arguments. An environment whose constructor is expensive
        overrides it and shares its read-only data.
        """
        args, kwargs = self._init_args
        return type(self)(*args, **kwargs)

    def fork(self: _SELF) -> _SELF:
        """A sibling in the same place of the same episode, which goes on independently (`mafrt.rollout.tree_player`).

        The default spawns one and plays it there, with the seed and the actions so far, which is exact since an
        environment is a function of both; it is checked all the same. An environment that can copy its state overrides
        it.

        Raises:
            EnvError: no episode is under way, or the sibling does not get to the same place.
        """
        name = type(self).__name__
        if self.done or self._played is None:
            raise EnvError(f"{name}.fork() was called before reset() or after the episode ended; call reset() first")
        seed, options, before, first, steps = self._played
        sibling = self.spawn()
        if before is not None:
            sibling.rng.setstate(before)
        observations, _ = sibling.reset(seed=seed, options=options)
        same = observations == first
        for actions, shown in steps:
            if not same or sibling.done:
                break
            same = tuple(sibling.step(dict(actions))[:4]) == shown
        if not same or sibling.done or sibling.step_count != self.step_count:
            raise EnvError(
                f"{name} cannot be forked: played again with the same seed and actions it went another way at step "
                f"{sibling.step_count}; draw from self.rng only, set all state in reset(), or define fork(self)"
            )
        return sibling

    def close(self) -> None:
        """Release what the environment holds. May be called more than once."""

    # Bookkeeping of the wrappers: how deep a call chain through super() is, who was asked to act, and how the episode
    # came to where it is: seed, options, generator if there was no seed, first observations, (actions, what followed).
    _depth: int
    _acting: frozenset[str]
    _played: tuple[int | None, dict[str, Any] | None, Any, Any, list[tuple[dict[str, str], Any]]] | None


def _attributed(env: Env, method: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call the user's method; whatever it raises becomes an EnvError that says where."""
    env._depth += 1
    try:
        return function(env, *args, **kwargs)
    except MafrtError:
        raise
    except Exception as error:
        where = f"{type(env).__name__}.{method}()"
        at = "" if method == "reset" else f" at step {env.step_count}"
        raise EnvError(f"{where} raised {type(error).__name__}{at}: {error}") from error
    finally:
        env._depth -= 1


def _wrap_reset(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def reset(self: Env, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        if self._depth:  # a call through super() from a subclass's reset
            return function(self, seed=seed, options=options)
        where = f"{type(self).__name__}.reset()"
        _check_task(self, options)
        if seed is not None:
            self.rng = random.Random(seed)
        self.step_count, self.done, self._acting, self._played = 0, True, frozenset(), None
        before = self.rng.getstate() if seed is None else None
        result = _attributed(self, "reset", function, seed=seed, options=options)
        if not isinstance(result, tuple) or len(result) != 2:
            raise EnvError(f"{where} must return (observations, info), found {_brief(result)}")
        observations, info = result
        _check_info(where, info)
        _check_observations(self, where, observations)
        if not observations:
            raise EnvError(f"{where} returned no observations, so nobody acts first; return {{agent: observation}}")
        self.done, self._acting = False, frozenset(observations)
        self._played = seed, options, before, dict(observations), []
        return observations, info

    return reset


def _wrap_step(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def step(self: Env, actions: dict[str, str]) -> Any:
        if self._depth:
            return function(self, actions)
        name = type(self).__name__
        if self.done:
            raise EnvError(f"{name}.step() was called before reset() or after the episode ended; call reset() first")
        if set(actions) != self._acting:
            raise EnvError(f"{name}.step() got actions of {_names(actions)}, but {_names(self._acting)} had to act")
        for agent, action in actions.items():
            if not isinstance(action, str):
                raise EnvError(f"{name}.step(): the action of {agent!r} must be a text, found {_brief(action)}")
        # Over until the result says otherwise: an episode in which step() raised cannot go on.
        self.done = True
        result = _attributed(self, "step", function, actions)
        checked = _check_result(self, f"{name}.step()", result)
        self.step_count += 1
        over = checked.terminated or checked.truncated
        if not over and self.max_steps is not None and self.step_count >= self.max_steps:
            checked, over = checked._replace(truncated=True), True
        if not over and not checked.observations:
            raise EnvError(f"{name}.step() returned no observations although the episode is not over; nobody can act")
        self.done, self._acting = over, frozenset() if over else frozenset(checked.observations)
        if not over and self._played is not None:
            shown = (dict(checked.observations), dict(checked.rewards), checked.terminated, checked.truncated)
            self._played[-1].append((dict(actions), shown))
        return checked._replace(observations={}) if over else checked

    return step


def _wrap_transition(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def transition(self: Env, state: Any, actions: dict[str, str]) -> Any:
        if self._depth > 1:
            return function(self, state, actions)
        return _attributed(self, "transition", function, state, actions)

    return transition


def _check_result(env: Env, where: str, result: Any) -> StepResult:
    if not isinstance(result, tuple) or len(result) != 5:
        raise EnvError(
            f"{where} must return StepResult(observations, rewards, terminated, truncated, info), "
            f"found {_brief(result)}"
        )
    observations, rewards, terminated, truncated, info = result
    _check_observations(env, where, observations)
    if not isinstance(rewards, dict):
        raise EnvError(f"{where}: rewards must be a dict {{agent: number}}, found {_brief(rewards)}")
    for agent, reward in rewards.items():
        if agent not in env.agents:
            raise EnvError(f"{where}: reward for {agent!r}, who is not among the agents {_names(env.agents)}")
        if not _finite(reward):
            raise EnvError(f"{where}: the reward of {agent!r} must be a finite number, found {_brief(reward)}")
    for what, flag in (("terminated", terminated), ("truncated", truncated)):
        # numpy's bool is not a bool, but is what a comparison of arrays gives.
        if type(flag).__name__ not in ("bool", "bool_"):
            raise EnvError(f"{where}: {what} must be True or False, found {_brief(flag)}")
    _check_info(where, info)
    _check_evidence(env, where, info.get("evidence", {}))
    if info.get("outcome", 0) is None:  # None means not known, which is the same as not given
        info = {key: value for key, value in info.items() if key != "outcome"}
    numbers_of = {agent: float(reward) for agent, reward in rewards.items()}
    return StepResult(observations, numbers_of, bool(terminated), bool(truncated), info)


def _check_observations(env: Env, where: str, observations: Any) -> None:
    if not isinstance(observations, dict):
        raise EnvError(f"{where}: observations must be a dict {{agent: observation}}, found {_brief(observations)}")
    for agent, observation in observations.items():
        if agent not in env.agents:
            raise EnvError(f"{where}: observation for {agent!r}, who is not among the agents {_names(env.agents)}")
        if isinstance(observation, str):
            continue
        good = isinstance(observation, list) and observation and all(
            isinstance(m, dict)
            and set(m) == {"role", "content"}
            and m["role"] in ("system", "user", "assistant", "tool")
            and isinstance(m["content"], str)
            for m in observation
        )  # fmt: skip
        if not good:
            raise EnvError(
                f"{where}: the observation of {agent!r} must be a text or a list of "
                f'{{"role": ..., "content": ...}} messages, found {_brief(observation)}'
            )


def _check_info(where: str, info: Any) -> None:
    if not isinstance(info, dict):
        raise EnvError(f"{where}: info must be a dict, found {_brief(info)}")
    if "task" in info and not isinstance(info["task"], str):
        raise EnvError(f'{where}: info["task"] must be a text, found {_brief(info["task"])}')
    if info.get("outcome") is not None and not _finite(info["outcome"]):
        raise EnvError(f'{where}: info["outcome"] must be a finite number, found {_brief(info["outcome"])}')


def _check_evidence(env: Env, where: str, found: Any) -> None:
    if not isinstance(found, dict) or not all(isinstance(evidence, Evidence) for evidence in found.values()):
        raise EnvError(f'{where}: info["evidence"] must be a dict {{agent: Evidence}}, found {_brief(found)}')
    for agent, evidence in found.items():
        if agent not in env.agents:
            raise EnvError(f"{where}: evidence about {agent!r}, who is not among the agents {_names(env.agents)}")
        if evidence.tool_output is not None and not isinstance(evidence.tool_output, str):
            raise EnvError(f"{where}: the tool_output of {agent!r} must be a text: {_brief(evidence.tool_output)}")
        if not isinstance(evidence.facts, dict):
            raise EnvError(f"{where}: the facts about {agent!r} must be a dict, found {_brief(evidence.facts)}")
        rules = evidence.rules
        if rules is not None and not (isinstance(rules, Scored) and all(map(_on_scale, _scores(rules)))):
            raise EnvError(f"{where}: the rules on {agent!r} must be Scored with scores 0..10, found {_brief(rules)}")


def _scores(verdict: Scored) -> list[Any]:
    return [verdict.score, *(score for _, score in verdict.spans)]


def _on_scale(score: Any) -> bool:
    return _finite(score) and 0 <= score <= 10


def _check_task(env: Env, options: dict[str, Any] | None) -> None:
    if options is None or "task" not in options:
        return
    task, name = options["task"], type(env).__name__
    if env.num_tasks is None:
        raise EnvError(f"{name} draws its own tasks (num_tasks is None), so reset() takes no options['task']")
    if isinstance(task, bool) or not isinstance(task, int) or not 0 <= task < env.num_tasks:
        raise EnvError(f"{name}.reset(): options['task'] must be in 0..{env.num_tasks - 1}, found {task!r}")


def agents_problem(agents: Any) -> str | None:
    """Why `agents` cannot be the agents of an environment, or None if it can."""
    if not isinstance(agents, tuple) or not agents:
        return f"agents must be a tuple with at least one name, found {_brief(agents)}"
    for agent in agents:
        if problem := name_problem(agent):
            return f"agents: {problem}"
    if len(set(agents)) < len(agents):
        return f"agents holds a name twice: {_names(agents)}"
    return None


def _finite(value: Any) -> bool:
    return isinstance(value, numbers.Real) and math.isfinite(value)


def _names(agents: Any) -> str:
    return ", ".join(map(repr, agents)) or "nobody"


def _brief(value: Any) -> str:
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 80 else text[:77] + '...'}"
