"""Reward functions as users have them: ours, TRL's and verl's, by their signatures.

- `f(text, record)` or `f(text)`: the answer, and the whole record; it returns a number, or a dict with `score`.
- TRL's `f(completions, **columns)`: lists of one, the answer and each field of the record; it returns a list of one.
- verl's `f(data_source, solution_str, ground_truth, extra_info=None)`: the answer and these fields; it returns as ours.

Async functions, callable objects and partials count as functions. In TRL's form None is no opinion. Further
numbers of a dict are measures of the episode.
"""

from __future__ import annotations

import asyncio
import copy
import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

from mafrt.config.resolve import load_object
from mafrt.core.errors import ConfigError, EnvError
from mafrt.core.text import brief, real_number

Reward = Callable[..., Any]
SCORES = ("score", "reward")
"""Names of the grade in a dict, the first that is there."""
FORMS = "(text, record), (text), TRL's (completions, **columns), or verl's (data_source, solution_str, ground_truth)"
_NOT_GIVEN = ("completion_ids", "prompt_ids", "trainer_state", "log_extra", "log_metric", "environments")
"""What TRL's trainer gives to a function beside the columns, and what is not there for an answer as text."""
_OF_OTHERS = ("completions", "prompts", "solution_str", "data_source", "ground_truth", "extra_info", *_NOT_GIVEN)
"""Names that no parameter of `f(text, record)` has: it would be called with something else than it reads."""


@dataclass(frozen=True)
class Grade:
    """What a reward function said of an answer."""

    score: float | None
    """None: no opinion"""
    measures: Mapping[str, float] = field(default_factory=dict)
    """further numbers, by name"""


@dataclass(frozen=True)
class RewardFunction:
    """A reward function behind one call, `grade(text, record)`."""

    function: Reward
    name: str
    arguments: Callable[[str, Mapping[str, Any]], tuple[tuple[Any, ...], dict[str, Any]]]
    """(text, record) -> positional and named arguments"""
    listed: bool = False
    """whether it takes and returns lists of one"""

    def grade(self, text: str, record: Mapping[str, Any]) -> Grade:
        """The grade of an answer. Raises EnvError for a result that is none, and what the function raises.

        The function gets a record of its own: what it does to it reaches no other answer.
        """
        positional, named = self.arguments(text, copy.deepcopy(dict(record)))
        result = self.function(*positional, **named)
        if inspect.isawaitable(result):
            result = asyncio.run(_awaited(result))
        if self.listed:
            result = self._only(result)
        measures = {}
        if isinstance(result, Mapping):
            if not any(name in result for name in SCORES):
                raise EnvError(
                    f"the reward function {self.name} returned {brief(result)}; expected a dict with 'score'"
                )
            numbers = {str(name): real_number(value) for name, value in result.items() if name not in SCORES}
            measures = {name: value for name, value in numbers.items() if value is not None}
            result = next(result[name] for name in SCORES if name in result)
        # In the other forms it is more likely a `return` that was forgotten.
        if result is None and self.listed:
            return Grade(None, measures)
        score = real_number(result)
        if score is None:
            raise EnvError(f"the reward function {self.name} returned {brief(result)}; expected a finite number")
        return Grade(score, measures)

    def _only(self, result: Any) -> Any:
        try:
            if isinstance(result, (str, bytes, Mapping, Set)):  # they give up letters and keys one by one
                raise TypeError
            [only] = result
        except (TypeError, ValueError):
            raise EnvError(
                f"the reward function {self.name} returned {brief(result)} for one completion; expected a list of one"
            ) from None
        return only


async def _awaited(result: Awaitable[Any]) -> Any:
    return await result


def reward_function(reward: str | Reward | None, records: Sequence[Mapping[str, Any]] = ()) -> RewardFunction:
    """The function that grades, by `file.py:function` or as an object.

    `records`: some that it will be called with, whose fields are compared with the names that it asks for.
    Raises ConfigError, with the user's file and line, if there is none of that name or none that can be called here.
    """
    if reward is None:
        raise ConfigError("no reward function is given; name one by --reward my.py:score")
    function = load_object(reward) if isinstance(reward, str) else reward
    if not callable(function):
        raise ConfigError(f"reward {reward}: expected a function of (text, record), found {brief(function)}")
    name = getattr(function, "__qualname__", None) or type(function).__name__
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):  # written in C
        return RewardFunction(function, name, lambda text, record: ((text, record), {}))
    named = {p.name for p in parameters.values() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    bare = getattr(function, "func", function)
    yields = inspect.isgeneratorfunction(bare) and "completions" not in named
    if inspect.isclass(bare) or yields or inspect.isasyncgenfunction(bare):
        made = "an object of its own" if inspect.isclass(bare) else "a generator"
        raise ConfigError(f"reward {name} gives {made}, which is no number; give a function that returns one.")
    asked = {
        p.name for p in parameters.values() if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    }
    anything = any(p.kind == p.VAR_KEYWORD for p in parameters.values())
    shown = f"{name}{inspect.signature(function)}{_place(function)}"
    if "completions" in named:
        _check_columns(shown, asked - {"completions", "prompts"}, records)
        return RewardFunction(function, name, _as_trl(named, anything), listed=True)
    if "solution_str" in named:
        if other := asked - {"data_source", "solution_str", "ground_truth", "extra_info"}:
            raise ConfigError(
                f"reward {shown} asks for {', '.join(sorted(other))}, which mafrt does not give; expected {FORMS}."
            )
        return RewardFunction(function, name, _as_verl(named, anything))
    places = [p for p in parameters.values() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    most = 2 if any(p.kind == p.VAR_POSITIONAL for p in parameters.values()) else len(places)
    least = sum(p.default is p.empty for p in places)
    if not most >= 1 or least > 2 or asked - {p.name for p in places}:
        raise ConfigError(f"reward {shown}: its parameters are of no known form; expected {FORMS}.")
    asked_in_order = [p.name for p in places if p.default is p.empty]
    if mistaken := [name for name in asked_in_order if name in _OF_OTHERS]:
        raise ConfigError(f"reward {shown} asks for {mistaken[0]}, which its form has not; expected {FORMS}.")
    if len(asked_in_order) == 2 and (second := asked_in_order[1]) != "record" and any(second in r for r in records):
        raise ConfigError(
            f"reward {shown}: its second argument would be the whole record, and not its {second!r}; name it record, "
            f"and read record[{second!r}]."
        )
    if most == 1:
        return RewardFunction(function, name, lambda text, record: ((text,), {}))
    return RewardFunction(function, name, lambda text, record: ((text, record), {}))


def _place(function: Any) -> str:
    """` (FILE, line N)` of a function; empty if it is unknown."""
    code = getattr(inspect.unwrap(getattr(function, "func", function)), "__code__", None)
    code = code or getattr(vars(type(function)).get("__call__"), "__code__", None)
    return f" ({code.co_filename}, line {code.co_firstlineno})" if code else ""


def _check_columns(shown: str, asked: set[str], records: Sequence[Mapping[str, Any]]) -> None:
    for column in sorted(asked):
        if column in _NOT_GIVEN:
            raise ConfigError(
                f"reward {shown} asks for {column}, which TRL's trainer has and mafrt has not; leave it out."
            )
        if lacking := next((record for record in records if column not in record), None):
            raise ConfigError(
                f"reward {shown} asks for the column {column!r}, which a record lacks; it has "
                f"{', '.join(map(repr, lacking))}."
            )


def _as_trl(
    named: set[str], anything: bool
) -> Callable[[str, Mapping[str, Any]], tuple[tuple[Any, ...], dict[str, Any]]]:
    def arguments(text: str, record: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        prompt = record.get("prompt", record.get("problem"))
        # In TRL a prompt of messages has completions of messages.
        completion = [{"role": "assistant", "content": text}] if isinstance(prompt, list) else text
        given = {**{name: [value] for name, value in record.items()}, "prompts": [prompt], "completions": [completion]}
        return (), {name: value for name, value in given.items() if anything or name in named}

    return arguments


def _as_verl(
    named: set[str], anything: bool
) -> Callable[[str, Mapping[str, Any]], tuple[tuple[Any, ...], dict[str, Any]]]:
    def arguments(text: str, record: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        model = record.get("reward_model")
        truth = model.get("ground_truth") if isinstance(model, Mapping) else None
        given = {
            "data_source": record.get("data_source"),
            "solution_str": text,
            "ground_truth": record.get("answer") if truth is None else truth,
            "extra_info": record.get("extra_info"),
        }
        return (), {name: value for name, value in given.items() if anything or name in named}

    return arguments
