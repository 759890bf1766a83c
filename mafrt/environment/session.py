"""The wrapper through which the library plays an environment, as Gymnasium's wrappers do.

A session adds to the user's `reset` and `step`: the seed of `rng`, the step count, truncation at `max_steps`, the check
of every result, and one EnvError sentence for every failure, with the file and line of the user's code. It keeps the
seed and the actions of the running episode, so that it can fork an environment that has no `fork` of its own.
"""

from __future__ import annotations

import copy
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from mafrt.config.resolve import user_line
from mafrt.core.errors import EnvError, MafrtError
from mafrt.core.text import brief, error_line
from mafrt.core.types import Observation, StepResult
from mafrt.environment.base import Env
from mafrt.environment.contract import check_task, checked_reset, checked_step, listed


@dataclass
class EpisodeHistory:
    """The running episode so far: enough to play it again."""

    seed: int | None
    options: dict[str, Any] | None
    generator: Any
    """state of `rng` before `reset`, where no seed was given; else None"""
    first: dict[str, Observation]
    """observations of `reset`"""
    steps: list[tuple[dict[str, str], tuple[Any, ...]]] = field(default_factory=list)
    """actions of each step, and the first four fields of its result"""


class Session(Env):
    """An environment as it is played. All that it does not define itself is read from the wrapped environment, what
    `Env` declares included.

    Args:
        env: the user's environment; each session has one of its own.
        watch: called with the method's name before each call of the user's `reset` and `step`.

    >>> session = mafrt.Session(mafrt.make_env("tic_tac_toe"))
    >>> seen, info = session.reset(seed=1)
    >>> list(seen), session.done
    (['x'], False)
    >>> session.fork().step({"x": "nonsense"}).terminated, session.done
    (True, False)
    """

    asks_how_sampled: bool
    """Whether the environment takes how answers were sampled (`Env.sampled`)."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Session:
        # A wrapper has no arguments of its own to be spawned with.
        return object.__new__(cls)  # the attributes that Env.__new__ sets are the wrapped environment's

    def __init__(self, env: Env, watch: Callable[[str], None] | None = None) -> None:
        self._env, self._watch = env.unwrapped, watch
        self._name = self._env.class_name
        object.__setattr__(self, "asks_how_sampled", type(self._env).sampled is not Env.sampled)
        self.done = True
        """Whether the episode is over (or none has begun)."""
        self._acting: frozenset[str] = frozenset()
        self._played: EpisodeHistory | None = None

    def __getattribute__(self, name: str) -> Any:
        # Not __getattr__: a default that `Env` declares would hide the environment's own value.
        if name.startswith("_") or _is_own(type(self), name) or name in object.__getattribute__(self, "__dict__"):
            return object.__getattribute__(self, name)
        return getattr(object.__getattribute__(self, "_env"), name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("_") or name == "done" or _is_own(type(self), name):
            object.__setattr__(self, name, value)
        else:
            setattr(self._env, name, value)

    def __repr__(self) -> str:
        return f"<Session of {self._env!r}>"

    @property
    def unwrapped(self) -> Env:
        return self._env

    def reset(
        self, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, Observation], dict[str, Any]]:
        """Begin an episode; see `Env.reset`. EnvError if the environment breaks its contract."""
        check_task(self._name, self.num_tasks, options)
        self.done, self._acting, self._played = True, frozenset(), None
        observations, info, generator = self._reset(seed, options)
        self.done, self._acting = False, frozenset(observations)
        self._played = EpisodeHistory(seed, copy.deepcopy(options), generator, copy.deepcopy(observations))
        return observations, info

    def _reset(
        self, seed: int | None, options: dict[str, Any] | None
    ) -> tuple[dict[str, Observation], dict[str, Any], Any]:
        """Call the user's `reset`: observations, info, and the generator's state before it if there was no seed."""
        env = self._env
        if seed is not None:
            # A new generator, since a worker or a fork may hold the old one.
            env.rng = random.Random(seed)
        env.step_count = 0
        # Without a seed the state is what a fork needs to play the episode again.
        generator = env.rng.getstate() if seed is None else None
        result = self._call("reset", seed=seed, options=copy.deepcopy(options))
        return *checked_reset(env.agents, f"{self._name}.reset()", result), generator

    def step(self, actions: dict[str, str]) -> StepResult:
        """One step; see `Env.step`. EnvError if the environment breaks its contract, or an agent acts out of turn."""
        name = self._name
        if self.done:
            raise EnvError(f"{name}.step() was called before reset() or after the episode ended; call reset() first")
        # Compared as sets, since a late or missing action would shift the turns of the others.
        if set(actions) != self._acting:
            raise EnvError(f"{name}.step() got actions of {listed(actions)}, but {listed(self._acting)} had to act")
        for agent, action in actions.items():
            if not isinstance(action, str):
                raise EnvError(f"{name}.step(): the action of {agent!r} must be a text, found {brief(action)}")
        # Over until the result says otherwise: an episode in which step() raised cannot go on.
        self.done = True
        result = self._step(actions)
        over = result.terminated or result.truncated
        self.done, self._acting = over, frozenset() if over else frozenset(result.observations)
        if not over and self._played is not None:
            # A caller may edit what it is given.
            self._played.steps.append((dict(actions), copy.deepcopy(tuple(result[:4]))))
        return result

    def _step(self, actions: dict[str, str]) -> StepResult:
        """Call the user's `step` and check its result."""
        env, where = self._env, f"{self._name}.step()"
        result = checked_step(env.agents, where, self._call("step", dict(actions)))
        env.step_count += 1
        if not (result.terminated or result.truncated):
            if env.max_steps is not None and env.step_count >= env.max_steps:
                result = result._replace(truncated=True)
            # Without this the player would wait for ever for an agent to act.
            elif not result.observations:
                raise EnvError(f"{where} returned no observations although the episode is not over; no agent can act")
        # Observations at the end are dropped: no agent acts on them, and a wrong one must not end the run.
        return result._replace(observations={}) if result.terminated or result.truncated else result

    def _call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        if self._watch is not None:
            self._watch(method)
        with attributed(self._env, method), guarded_globals(self._env, method):
            return getattr(self._env, method)(*args, **kwargs)

    def transition(self, state: Any, actions: dict[str, str]) -> Any:
        with attributed(self._env, "transition"):
            return self._env.transition(state, actions)

    def spawn(self) -> Session:
        """A session of a fresh sibling."""
        sibling = self._env.spawn()
        if not isinstance(sibling, Env):
            raise EnvError(f"{self._name}.spawn() must return a {self._name}, found {brief(sibling)}")
        return Session(sibling, self._watch)

    def fork(self) -> Session:
        """A session at the same point of the same episode, which goes on independently.

        An environment with a `fork` of its own makes it. Otherwise a fresh sibling plays the seed and the actions so
        far again, which is exact since an environment is a function of both; that is checked all the same.

        Raises:
            EnvError: no episode is running, or the sibling arrives at another point.
        """
        name = self._name
        if self.done or self._played is None:
            raise EnvError(f"{name}.fork() was called before reset() or after the episode ended; call reset() first")
        if type(self._env).fork is Env.fork:
            return self._played_again(self.spawn())
        with attributed(self._env, "fork"):
            twin = Session(self._env.fork(), self._watch)
        twin.done, twin._acting = False, self._acting
        twin._played = copy.copy(self._played)
        # A list of its own, or both would append to one history.
        twin._played.steps = list(self._played.steps)
        return twin

    def _played_again(self, sibling: Session) -> Session:
        """Bring `sibling` to the point where this session is. Raises EnvError if it arrives at another."""
        played = self._played
        assert played is not None
        if played.generator is not None:
            sibling._env.rng.setstate(played.generator)
        observations, _ = sibling.reset(seed=played.seed, options=played.options)
        same = observations == played.first
        for actions, shown in played.steps:
            if not same or sibling.done:
                break
            same = tuple(sibling.step(dict(actions))[:4]) == shown
        if not same or sibling.done or sibling.step_count != self.step_count:
            raise EnvError(
                f"{self._name} cannot be forked: played again with the same seed and actions it went another way "
                f"at step {sibling.step_count}; draw from self.rng only, set all state in reset(), or define fork(self)"
            )
        return sibling

    def close(self) -> None:
        self._env.close()


_OWN_NAMES: dict[type, frozenset[str]] = {}
"""Names that each class of sessions defines."""


def _is_own(kind: type[Session], name: str) -> bool:
    """Whether a class of sessions defines `name`, and does not inherit it from `Env`."""
    if kind not in _OWN_NAMES:
        parts = [part for part in kind.__mro__ if issubclass(part, Session)]
        _OWN_NAMES[kind] = frozenset(known for part in parts for known in vars(part))
    return name in _OWN_NAMES[kind]


def session_of(env: Env) -> Session:
    """`env` itself if it is a session, else a session of it."""
    return env if isinstance(env, Session) else Session(env)


@contextmanager
def attributed(env: Env, method: str) -> Iterator[None]:
    """Within it, an exception of the user's code becomes an EnvError with class, method, step, cause, file and line."""
    try:
        yield
    except (MafrtError, KeyboardInterrupt):
        raise
    # SystemExit too: an environment that calls exit() must not end the training.
    except BaseException as error:
        at = "" if method == "reset" else f" at step {env.step_count}"
        raise EnvError(
            f"{env.class_name}.{method}() raised {type(error).__name__}{at}: {error_line(error)}{user_line(error)}"
        ) from error


@contextmanager
def guarded_globals(env: Env, method: str) -> Iterator[None]:
    """Put back torch's global switches, which training reads too; EnvError if the user's code has changed them."""
    torch = sys.modules.get("torch")  # an environment that has not imported torch cannot have changed it
    if torch is None or not hasattr(torch, "is_grad_enabled"):
        yield
        return
    before = torch.is_grad_enabled(), torch.get_default_dtype()
    try:
        yield
    finally:
        after = torch.is_grad_enabled(), torch.get_default_dtype()
        # Put back before the error is raised, so that other episodes go on as they were.
        torch.set_grad_enabled(before[0])
        torch.set_default_dtype(before[1])
    if after != before:
        call = f"set_grad_enabled({after[0]})" if after[0] != before[0] else f"set_default_dtype({after[1]})"
        raise EnvError(
            f"{env.class_name}.{method}() called torch.{call}, which changes training; use a context manager such as "
            "`with torch.no_grad():`, which ends with the call"
        )
