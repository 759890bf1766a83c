"""The base class of environments.

An environment is text-level and synchronous, with all agents in one object. Return values come in Gymnasium's order
and names, dicts keyed by agent name as in PettingZoo. Every agent in the returned observations acts next, so
turn-by-turn, simultaneous and conditional play share one API. An environment never sees a token.

A subclass holds the user's code and nothing else. The library plays it through a `mafrt.Session`, a wrapper object as
in Gymnasium: the session seeds `rng`, counts steps, truncates at `max_steps`, checks results and attributes errors.
`make_env` returns a session; `reset` and `step` of the bare object run the user's code as it stands.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar, TypeVar

from mafrt.core.errors import EnvError
from mafrt.core.types import Observation, Sampled, StepResult

_SELF = TypeVar("_SELF", bound="Env")


class Env:
    """Base class of environments. A subclass defines `agents`, `reset`, `step` and, as a rule, `transition`.

    `super().__init__()` need not be called.

    >>> class Coin(mafrt.Env):
    ...     agents = ("guesser",)
    ...     def reset(self, *, seed=None, options=None):
    ...         self.side = self.rng.choice(["heads", "tails"])
    ...         return {"guesser": "Heads or tails?"}, {}
    ...     def step(self, actions):
    ...         right = float(self.side in actions["guesser"])
    ...         return mafrt.StepResult({}, {"guesser": right}, True, False, {"outcome": right})
    >>> mafrt.check_env(Coin())
    >>> Coin()
    <Coin: guesser>
    """

    agents: tuple[str, ...] = ()
    """Unique names of letters, digits, '_', '.', '-'. Constant from construction on."""
    num_tasks: int | None = None
    """Number of tasks that `options={"task": i}` chooses from; None: the environment draws its own."""
    max_steps: int | None = 64
    """Turn limit: after so many calls of `step` the session truncates the episode. None: no limit."""
    split: str | None = None
    """Which of `train`, `validation` and `test` its instances are, where it knows. No choice may look at `test`."""
    held_out: Mapping[str, Any] = MappingProxyType({})
    """Settings of the constructor that give the test instances: `mafrt evaluate` plays them."""
    validation: Mapping[str, Any] = MappingProxyType({})
    """Settings that give the validation instances: evaluations in training play them, and choose the best weights by
    them. Without any, `held_out` serves."""
    refused: ClassVar[Mapping[str, str]] = {}
    """Settings that other environments have and this one cannot have, each with the reason."""
    profile: ClassVar[str | None] = None
    """Team file of an environment whose roles no other team has; it is the default where none is named."""
    rubric: str | None = None
    """Criteria of a coach: a file, or the name of a rubric that ships. None: the general one."""
    blocking: bool = False
    """Whether `step` waits for something outside, such as a sandbox: siblings are then stepped in threads."""
    costly_reset: bool = False
    """Whether `reset` starts something outside, such as a program: prompts of a few tasks only are checked first."""
    bounded: bool = False
    """Whether `reset` and `step` always return in bounded time, because all they wait for has a deadline of its own.
    Bounded environments run in the trainer's process; others run in worker processes (`mafrt.environment.workers`)."""

    opponents: bool = False
    """Whether agents are paid against each other. What all of them are paid together then says nothing about a turn:
    rules that add it up over the agents are refused, and replayed returns are the speaker's own."""

    rng: random.Random
    """The only source of chance that an environment may use. A session seeds it before `reset`; without a session it
    is not seeded."""
    step_count: int
    """Calls of `step` since the last `reset`, counted by the session."""

    _init_args: tuple[tuple[Any, ...], dict[str, Any]]

    def __new__(cls: type[_SELF], *args: Any, **kwargs: Any) -> _SELF:
        if cls.__init__ is object.__init__ and (args or kwargs):
            raise TypeError(f"{cls.__name__}() takes no arguments")  # object.__init__ would swallow them here
        # Set here and not in __init__, which a subclass may define without calling this one's.
        env = object.__new__(cls)
        # Kept so that `spawn` can make siblings without any help from the subclass.
        env._init_args = (args, kwargs)
        env.rng, env.step_count = random.Random(), 0
        return env

    def __repr__(self) -> str:
        return f"<{self.class_name}: {', '.join(self.agents)}>"

    @property
    def unwrapped(self) -> Env:
        """The user's own object: this one, or the one that a session wraps."""
        return self

    @property
    def class_name(self) -> str:
        """Name of the user's class, for messages."""
        return type(self.unwrapped).__name__

    def reset(
        self, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, Observation], dict[str, Any]]:
        """Begin an episode.

        `seed=s` makes everything that follows a function of `s` and of the actions; `seed=None` goes on drawing from
        the generator as it is. `options={"task": i}` picks task `i` of `num_tasks`. Returns the observations of the
        agents that act first, and an info dict whose `"task"` (a string, if given) names the task: episodes of the
        same task form a group.
        """
        raise EnvError(f"{type(self).__name__} lacks reset(self, seed=None, options=None); define it")

    def transition(self, state: Any, actions: dict[str, str]) -> Any:
        """The state that follows `state` after `actions`. Pure: it changes neither of its arguments."""
        raise EnvError(f"{type(self).__name__} lacks transition(self, state, actions); define it, or do not call it")

    def step(self, actions: dict[str, str]) -> StepResult:
        """Take the texts of all agents that had to act (agent -> text) and return the result.

        `rewards` may name any agent; a reward belongs to that agent's latest turn, and an agent that is not named gets
        none (which is not 0). On the last step `info["outcome"]`, if given, is the task's verdict for the team.
        `info["evidence"]` (agent -> `Evidence`), if given, holds findings about that agent's latest turn, and
        `info["earlier"]`, a list of (agent, step, reward), pays turns of earlier steps as if they had been paid then.
        `info["measures"]` (name -> number) holds further numbers to average over episodes, such as a success rate.
        """
        raise EnvError(f"{type(self).__name__} lacks step(self, actions); define it")

    def sampled(self, answers: Mapping[str, Sampled]) -> None:
        """Take, before `step`, how the answers of the agents were sampled. For environments that report it onwards."""

    def spawn(self: _SELF) -> _SELF:
        """A fresh sibling that plays independently of this one: the rollout steps many at once.

        The default calls the constructor again with the same arguments. An environment whose constructor is expensive
        overrides it and shares its read-only data.
        """
        args, kwargs = self._init_args
        return type(self)(*args, **kwargs)

    def fork(self: _SELF) -> _SELF:
        """A sibling at the same point of the same episode, which goes on independently (`mafrt.rollout.tree_player`).

        Optional: an environment that can copy its state defines it. For others the session plays a fresh sibling to
        the same point, with the seed and the actions so far.
        """
        raise EnvError(f"{type(self).__name__} lacks fork(self); fork a session of it instead: make_env(...).fork()")

    def close(self) -> None:
        """Release resources. May be called more than once."""


class AdaptedEnv(Env):
    """Base of environments that play an object of another kind, `inner`. What `inner` has under the names that `Env`
    declares is taken over, and other attributes are read from it."""

    inner: Any

    def adopt(self, inner: Any) -> None:
        """Wrap `inner`, and take over what it declares."""
        self.inner = inner
        for name in _DECLARED:
            if (
                name not in vars(type(self))
                and (value := getattr(inner, name, None)) is not None
                and not callable(value)
            ):
                setattr(self, name, value)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name == "inner":  # while it is copied or built, there is none yet
            raise AttributeError(name)
        return getattr(self.inner, name)


_DECLARED = [
    name
    for name in Env.__annotations__
    # Names and numbered tasks are the adapter's own, and so are the generator and the steps.
    if not name.startswith("_")
    and name not in ("agents", "num_tasks", "rng", "step_count", "split", "held_out", "validation", "refused")
]
