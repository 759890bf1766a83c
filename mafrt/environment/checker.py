"""Plays an environment with scripted agents and collects breaches of its contract, as PettingZoo's API tests do.

`mafrt.environment.contract` checks every single result (keys, types, finite rewards). This module holds the checks that
need more than one call: reproducible seeding, purity of `transition`, an end within the turn limit, tasks, independent
siblings.
"""

from __future__ import annotations

import copy
import dataclasses
import random
from typing import Any

from mafrt.config.resolve import user_line
from mafrt.core.errors import EnvDownError, EnvError, MafrtError
from mafrt.core.text import brief, error_line
from mafrt.core.types import StepResult
from mafrt.environment.base import Env
from mafrt.environment.contract import agents_problem
from mafrt.environment.session import Session, attributed, session_of

STEP_CAP = 512
"""Steps after which an episode of an environment without `max_steps` counts as endless."""

_TEXTS = (
    "",
    "yes",
    "The answer is \\boxed{7}.",
    "3 + 4 = 7",
    "I disagree. Let us check each step again.",
    "Ünïcode ∑ 中文 🙂",
    "line one\nline two\n\nline four",
    "<|im_end|> {not: json} `code` \\frac{1}{",
    "word " * 200,
    "```python\nprint(3 + 4)\n```",
    "```python\nassert False, 'not so'\n```",
)


class Breaches(list[str]):
    """Breaches in order; one that shows for every seed is kept once."""

    def add(self, breach: str) -> None:
        if breach not in self:
            self.append(breach)


def check_env(env: Env, *, seeds: tuple[int, ...] = (0, 1, 2)) -> None:
    """Play `env` with scripted agents; raise one EnvError that lists every breach of the contract.

    In this process: one that hangs, hangs here. `mafrt check_env` plays in a worker process, with a deadline.

    >>> mafrt.check_env(mafrt.make_env("tic_tac_toe"))  # nothing to complain about
    """
    raise_problems(env, problems_of(env, seeds=seeds))


def raise_problems(env: Any, problems: list[str]) -> None:
    """Raise one EnvError that lists `problems`, if there are any."""
    if problems:
        name = env.class_name if isinstance(env, Env) else type(env).__name__
        raise EnvError(f"{name} breaks the contract of an environment: " + "; ".join(problems))


def problems_of(env: Any, *, seeds: tuple[int, ...] = (0, 1, 2)) -> list[str]:
    """Everything that breaks the contract, one clause each; an empty list if nothing does."""
    if not isinstance(env, Env):
        return [f"it is a {type(env).__name__}, not a mafrt.Env"]
    session, bare = session_of(env), env.unwrapped
    missing = [name for name in ("reset", "step") if getattr(type(bare), name) is getattr(Env, name)]
    if missing:
        return [f"it does not define {' and '.join(name + '()' for name in missing)}"]
    if problem := agents_problem(bare.agents):
        return [problem]
    if problem := _limits_problem(bare):
        return [problem]
    problems = Breaches()
    agents = bare.agents
    transitions = _TransitionWatch(bare)
    try:
        for seed in seeds:
            _replay(session, seed, problems)
    except EnvDownError as error:  # every further episode would wait for a server as long
        return [str(error)]
    finally:
        transitions.remove()
    for breach in transitions.problems:
        problems.add(breach)
    # The next checks compare whole episodes, which says nothing more about an environment that cannot repeat itself.
    if not problems:
        _check_tasks(session, problems)
        _check_spawn(session, problems)
        _check_fork(session, problems)
    if bare.agents != agents:
        problems.add(f"agents changed while playing, from {agents} to {bare.agents}")
    for _ in range(2):
        _close(bare, problems)
    return problems


def play(env: Env, seed: int | None, options: dict[str, Any] | None = None, action_seed: int = 0) -> list[Any]:
    """One episode with random texts; its transcript: (observations, task), then every (actions, StepResult).

    The transcript is copied, so that an environment which later writes into its results cannot change it. The last
    entry is the text of the error if one was raised.
    """
    env, script = session_of(env), random.Random(action_seed)
    transcript: list[Any] = []
    try:
        observations, info = env.reset(seed=seed, options=options)
        transcript.append(_frozen((observations, info.get("task"))))
        for _ in range(env.max_steps or STEP_CAP):
            actions = {agent: script.choice(_TEXTS) for agent in observations}
            result = env.step(actions)
            transcript.append((actions, _frozen(result[:4]), _said_of(result)))
            if result.terminated or result.truncated:
                return transcript
            observations = dict(result.observations)
        transcript.append(f"an episode did not end within {STEP_CAP} steps; set max_steps")
    except EnvDownError:
        raise
    except MafrtError as error:
        transcript.append(str(error))
    return transcript


def _replay(env: Session, seed: int, problems: Breaches) -> None:
    """The same seed and the same actions must give the same episode, after any other."""
    first = play(env, seed, action_seed=seed)
    if isinstance(first[-1], str):
        problems.add(first[-1])
        return
    play(env, seed + 1, action_seed=seed + 1)
    again = play(env, seed, action_seed=seed)
    if isinstance(again[-1], str):
        problems.add(f"played a second time, {again[-1]}")
    elif first[0] != again[0]:
        problems.add(
            f"reset(seed={seed}) gave different episodes when called twice; draw from self.rng only, and set all state "
            "in reset()"
        )
    elif first != again:
        problems.add(
            f"the same seed ({seed}) and actions gave different results; draw from self.rng only, and set all state in "
            "reset()"
        )


def _check_tasks(env: Session, problems: Breaches) -> None:
    if env.num_tasks is None:
        return
    seen: dict[str, int] = {}
    for task in sorted({0, 1, 2, env.num_tasks // 2, env.num_tasks - 1} & set(range(env.num_tasks))):
        names = []
        for seed in (0, 1):
            try:
                names.append(env.reset(seed=seed, options={"task": task})[1].get("task"))
            except MafrtError as error:
                problems.add(str(error))
                return
        if names[0] is None:
            problems.add('num_tasks is set, but the info of reset() has no "task" that names the task')
            return
        if names[0] != names[1]:
            problems.add(
                f"options['task'] = {task} gave task {names[0]!r} and then {names[1]!r}; it must pick the task"
            )
        elif names[0] in seen:
            problems.add(f"options['task'] = {seen[names[0]]} and {task} gave the same task {names[0]!r}")
        seen[names[0]] = task


def _check_spawn(env: Session, problems: Breaches) -> None:
    """Two siblings played in turns must do the same as each alone."""
    try:
        left, right = env.spawn(), env.spawn()
    except EnvError as error:
        problems.add(str(error))
        return
    except Exception as error:
        problems.add(f"spawn() raised {type(error).__name__}: {error_line(error)}{user_line(error)}")
        return
    first, other = left.unwrapped, right.unwrapped
    if type(first) is not type(env.unwrapped) or first is other or first is env.unwrapped:
        problems.add(f"spawn() must return a {env.class_name} of its own each time, found {brief(first)}")
        return
    if first.agents != env.agents:
        problems.add(f"spawn() gave a sibling with the agents {first.agents} instead of {env.agents}")
        return
    alone = [play(env, seed, action_seed=seed) for seed in (0, 1)]
    together = _interleaved(left, right)
    if together != alone:
        problems.add("two siblings from spawn() disturb each other; they must share read-only data only")
    for sibling in (left, right):
        _close(sibling, problems)


def _interleaved(left: Session, right: Session) -> list[list[Any]]:
    """`play` with seeds 0 and 1 on two environments, stepped in turns."""
    runs: list[list[Any]] = [[], []]
    envs, scripts = (left, right), (random.Random(0), random.Random(1))
    acting: list[dict[str, Any]] = [{}, {}]
    try:
        for i, env in enumerate(envs):
            observations, info = env.reset(seed=i, options=None)
            runs[i].append(_frozen((observations, info.get("task"))))
            acting[i] = observations
        while any(acting):
            for i, env in enumerate(envs):
                if acting[i]:
                    actions = {agent: scripts[i].choice(_TEXTS) for agent in acting[i]}
                    result = env.step(actions)
                    runs[i].append((actions, _frozen(result[:4]), _said_of(result)))
                    acting[i] = {} if result.terminated or result.truncated else dict(result.observations)
    except MafrtError as error:
        runs[0].append(str(error))
    return runs


def _check_fork(session: Session, problems: Breaches) -> None:
    """A fork that the environment makes itself must go on as the episode would have, and leave it alone."""
    if type(session.unwrapped).fork is Env.fork:
        return  # the session plays it again from the start, which has been checked
    whole = play(session, seed=0)
    for steps in range(len(whole) - 1):
        try:
            session.reset(seed=0)
            for actions, *_ in whole[1 : 1 + steps]:
                session.step(actions)
            fork = session.fork()
            for side in (fork, session):
                for actions, result, recorded in whole[1 + steps :]:
                    step = side.step(actions)
                    if (_frozen(step[:4]), _said_of(step)) != (result, recorded):
                        raise EnvError("it went another way")
            _close(fork, problems)
        except Exception as error:
            problems.add(
                f"fork() after {steps} steps does not go on as the episode does ({type(error).__name__}: {error}); "
                "copy all that an episode changes, or leave fork() out"
            )
            return


def _close(env: Env, problems: Breaches) -> None:
    try:
        env.close()
    except Exception as error:
        problems.add(f"close() raised {type(error).__name__}: {error}")


def _limits_problem(env: Env) -> str | None:
    for name in ("max_steps", "num_tasks"):
        value = getattr(env, name)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            return f"{name} must be None or a whole number of at least 1, found {value!r}"
    return None


class _TransitionWatch:
    """Calls every `transition` twice and compares its arguments before and after."""

    def __init__(self, env: Env) -> None:
        self.env, self.problems = env, Breaches()
        self.inner = env.transition
        env.transition = self  # type: ignore[method-assign]

    def remove(self) -> None:
        vars(self.env).pop("transition", None)

    def __call__(self, state: Any, actions: dict[str, str]) -> Any:
        before = copy.deepcopy((state, actions))
        rng, attrs = self.env.rng.getstate(), _shallow(self.env)
        with attributed(self.env, "transition"):
            result = self.inner(state, actions)
        snapshot = copy.deepcopy(result)
        if self.env.rng.getstate() != rng:
            self.problems.add("transition() draws random numbers; draw them in step() or keep them in the state")
            return result
        if changed := sorted(k for k, v in _shallow(self.env).items() if k not in attrs or not _same(attrs[k], v)):
            self.problems.add(f"transition() changes the environment itself ({', '.join(changed)}); do so in step()")
            return result
        if not _same((state, actions), before):
            self.problems.add("transition() changes its arguments; build a new state instead")
            return result
        again = self.inner(*copy.deepcopy(before))
        if not _same(again, snapshot):
            self.problems.add("transition() gave different states for equal arguments; it must depend on nothing else")
        return result


def _shallow(env: Env) -> dict[str, Any]:
    """The environment's attributes; small containers are copied, so that a change inside them shows."""
    bookkeeping = ("rng", "transition")
    return {
        name: copy.copy(value) if isinstance(value, (list, dict, set)) and len(value) < 1000 else value
        for name, value in vars(env).items()
        if name not in bookkeeping
    }


def _same(left: Any, right: Any) -> bool:
    """Equality that also holds for plain objects, which Python compares by identity."""
    if left is right:
        return True
    if type(left) is not type(right):
        return False
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(map(_same, left, right))
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(_same(left[k], right[k]) for k in left)
    if hasattr(left, "tolist"):  # arrays and tensors compare element by element
        return bool(left.tolist() == right.tolist())
    if dataclasses.is_dataclass(left):
        return all(_same(getattr(left, f.name), getattr(right, f.name)) for f in dataclasses.fields(left))
    if left == right:
        return True
    return bool(getattr(left, "__dict__", None)) and _same(vars(left), vars(right))


def _said_of(result: StepResult) -> Any:
    """The parts of a step's info that a run records; the same seed and actions must give the same again."""
    return copy.deepcopy((result.info.get("outcome"), result.info.get("evidence")))


def _frozen(value: Any) -> Any:
    return copy.deepcopy(tuple(value) if isinstance(value, StepResult) else value)
