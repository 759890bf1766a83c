"""The contract of `Env.reset` and `Env.step`, checked for each single result; texts are cleaned on the way.

A result that breaks the contract raises an EnvError that names the method, the value found and the value expected.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, cast

from mafrt.config.agent import name_problem
from mafrt.core.errors import EnvError
from mafrt.core.text import brief, clean_deep, clean_text, error_line, has_controls, one_item, real_number
from mafrt.core.types import Evidence, Message, Observation, Scored, StepResult

ROLES = ("system", "user", "assistant", "tool", "tools")
"""Roles of the messages of an observation."""
MOST_MEASURES, LONGEST_MEASURE = 256, 200
"""Numbers in `info["measures"]`, and characters of a name."""
LONGEST_TASK = 100_000
"""Characters of `info["task"]`, which stands in every record of an episode."""


def checked_reset(agents: tuple[str, ...], where: str, result: Any) -> tuple[dict[str, Observation], dict[str, Any]]:
    """The observations and info that `reset` returned. Raises EnvError; `where` names class and method."""
    if not isinstance(result, tuple) or len(result) != 2:
        raise EnvError(f"{where} must return (observations, info), found {brief(result)}")
    info, observations = _checked_info(agents, where, result[1]), _checked_observations(agents, where, result[0])
    if not observations:
        raise EnvError(f"{where} returned no observations, so no agent acts first; return {{agent: observation}}")
    return observations, info


def checked_step(agents: tuple[str, ...], where: str, result: Any) -> StepResult:
    """The result that `step` returned, with rewards as floats. Raises EnvError; `where` names class and method."""
    if not isinstance(result, tuple) or len(result) != 5:
        raise EnvError(
            f"{where} must return StepResult(observations, rewards, terminated, truncated, info), found {brief(result)}"
        )
    observations, rewards, terminated, truncated, info = result
    observations = _checked_observations(agents, where, observations)
    if not isinstance(rewards, dict):
        raise EnvError(f"{where}: rewards must be a dict {{agent: number}}, found {brief(rewards)}")
    amounts: dict[str, float] = {}
    for agent, reward in rewards.items():
        if agent not in agents:
            raise EnvError(f"{where}: reward for {agent!r}, who is not among the agents {listed(agents)}")
        if (amount := real_number(reward)) is None:
            raise EnvError(f"{where}: the reward of {agent!r} must be a finite number, found {brief(reward)}")
        amounts[agent] = amount
    flags = one_item(terminated), one_item(truncated)
    for name, flag, given in zip(("terminated", "truncated"), flags, (terminated, truncated), strict=True):
        if not isinstance(flag, bool):
            raise EnvError(f"{where}: {name} must be True or False, found {brief(given)}")
    info = _checked_info(agents, where, info)
    return StepResult(observations, amounts, *flags, info)


def check_task(env_name: str, num_tasks: int | None, options: dict[str, Any] | None) -> None:
    """Raise EnvError unless `options["task"]`, if given, is the number of a task."""
    if options is None or "task" not in options:
        return
    task = options["task"]
    if num_tasks is None:
        raise EnvError(f"{env_name} draws its own tasks (num_tasks is None), so reset() takes no options['task']")
    if isinstance(task, bool) or not isinstance(task, int) or not 0 <= task < num_tasks:
        raise EnvError(f"{env_name}.reset(): options['task'] must be in 0..{num_tasks - 1}, found {task!r}")


def tools_problem(messages: Sequence[Message]) -> str | None:
    """Why the schemas of tools in an observation are none, as one sentence; None if they are, or if there are none.

    They are the content of its first message, of role `tools`: a JSON list of `{"type": "function", "function": {...}}`
    or of the inner object, `{"name": text, "description": text, "parameters": JSON schema}`, and a message of the user
    follows.
    """
    places = [place for place, message in enumerate(messages) if message["role"] == "tools"]
    if not places:
        return None
    if places != [0]:
        return f"the schemas of tools must be one message, the first, found messages of role 'tools' at {places}"
    if next((m["role"] for m in messages[1:] if m["role"] != "system"), None) != "user":
        roles = ", ".join(message["role"] for message in messages)
        return f"after the schemas of tools the first message must be the user's, found the roles {roles}"
    content = messages[0]["content"]
    try:
        schemas = json.loads(content, parse_constant=_no_number, parse_float=_finite)
    except (ValueError, RecursionError) as error:
        return f"the schemas of tools must be JSON, found {brief(content)} ({error_line(error)})"
    if not isinstance(schemas, list):
        return f"the schemas of tools must be a JSON list, found {brief(content)}"
    for schema in schemas:
        if problem := _schema_problem(schema):
            return f"{problem}, found {brief(schema)}"
    return None


def _schema_problem(schema: Any) -> str | None:
    function = schema.get("function", schema) if isinstance(schema, dict) else None
    if not isinstance(function, dict):
        return "the schema of a tool must be an object"
    if not isinstance(function.get("name"), str) or not function["name"].strip():
        return "the schema of a tool must have a 'name'"
    if has_controls(function["name"]):
        return "the 'name' of a tool must be of one line"
    if not isinstance(function.get("description", ""), str):
        return "the 'description' of a tool must be a text"
    parameters = function.get("parameters") or {}
    if not isinstance(parameters, dict) or not isinstance(parameters.get("properties", {}), dict):
        return "the 'parameters' of a tool must be the JSON schema of an object"
    if not all(isinstance(entry, (dict, bool)) for entry in parameters.get("properties", {}).values()):
        return "each of the 'properties' of a tool's parameters must be a JSON schema"
    needed = parameters.get("required", [])
    if not isinstance(needed, list) or not all(isinstance(name, str) for name in needed):
        return "'required' of a tool's parameters must be a list of names"
    try:
        clean_deep(schema)
    except ValueError as error:
        return f"the schema of a tool must be flatter: {error}"
    return None


def _no_number(name: str) -> float:
    raise ValueError(f"{name} is no number")


def _finite(digits: str) -> float:
    number = float(digits)
    return number if math.isfinite(number) else _no_number(digits)


def agents_problem(agents: Any) -> str | None:
    """Why `agents` cannot be the agents of an environment, or None if it can."""
    if not isinstance(agents, tuple) or not agents:
        return f"agents must be a tuple with at least one name, found {brief(agents)}"
    for agent in agents:
        if problem := name_problem(agent):
            return f"agents: {problem}"
    if len(set(agents)) < len(agents):
        return f"agents holds a name twice: {listed(agents)}"
    return None


def listed(agents: Iterable[str]) -> str:
    """Names for a message."""
    return ", ".join(map(repr, agents)) or "no agent"


def _checked_observations(agents: tuple[str, ...], where: str, observations: Any) -> dict[str, Observation]:
    if not isinstance(observations, dict):
        raise EnvError(f"{where}: observations must be a dict {{agent: observation}}, found {brief(observations)}")
    for agent, observation in observations.items():
        if agent not in agents:
            raise EnvError(f"{where}: observation for {agent!r}, who is not among the agents {listed(agents)}")
        if isinstance(observation, str):
            continue
        good = isinstance(observation, list) and observation and all(
            isinstance(m, dict)
            and set(m) == {"role", "content"}
            and m["role"] in ROLES
            and isinstance(m["content"], str)
            for m in observation
        )  # fmt: skip
        if good and (problem := tools_problem(observation)):
            raise EnvError(f"{where}: the observation of {agent!r}: {problem}")
        if not good:
            raise EnvError(
                f"{where}: the observation of {agent!r} must be a text or a list of "
                f'{{"role": ..., "content": ...}} messages, found {brief(observation)}'
            )
    return cast(dict[str, Observation], clean_deep(observations))


def _checked_info(agents: tuple[str, ...], where: str, info: Any) -> dict[str, Any]:
    """`info` with clean texts and plain numbers; an outcome of None, which means not known, is left out."""
    if not isinstance(info, dict):
        raise EnvError(f"{where}: info must be a dict, found {brief(info)}")
    try:
        info = clean_deep(info)
    except ValueError as error:
        raise EnvError(f"{where}: info must be plain JSON-able facts, but {error}") from None
    if "task" in info and not (isinstance(info["task"], str) and len(info["task"]) <= LONGEST_TASK):
        raise EnvError(
            f'{where}: info["task"] must be a text of {LONGEST_TASK} characters at most: {brief(info["task"])}'
        )
    if (outcome := info.pop("outcome", None)) is not None:
        if (known := real_number(outcome)) is None:
            raise EnvError(f'{where}: info["outcome"] must be a finite number, found {brief(outcome)}')
        info["outcome"] = known
    if (measures := info.get("measures")) is not None:
        info["measures"] = _checked_measures(where, measures)
    if "earlier" in info:
        info["earlier"] = _checked_earlier(agents, where, info["earlier"])
    if "evidence" in info:
        given = info["evidence"]
        if not isinstance(given, dict) or not all(isinstance(evidence, Evidence) for evidence in given.values()):
            raise EnvError(f'{where}: info["evidence"] must be a dict {{agent: Evidence}}, found {brief(given)}')
        info["evidence"] = {agent: _checked_evidence(agents, where, agent, e) for agent, e in given.items()}
    return cast(dict[str, Any], info)


def _checked_measures(where: str, given: Any) -> dict[str, float]:
    """Name -> number. Each name becomes a column of the run's metrics, so they are few and of one line."""
    numbers = {name: real_number(value) for name, value in given.items()} if isinstance(given, dict) else {"": None}
    if None in numbers.values():
        raise EnvError(f'{where}: info["measures"] must be a dict {{name: finite number}}, found {brief(given)}')
    if len(numbers) > MOST_MEASURES:
        raise EnvError(f'{where}: info["measures"] holds {len(numbers)} numbers, expected at most {MOST_MEASURES}')
    for name in numbers:
        if not isinstance(name, str) or not name.strip() or len(name) > LONGEST_MEASURE or has_controls(name):
            raise EnvError(
                f'{where}: info["measures"] must have names of one line and at most {LONGEST_MEASURE} characters, '
                f"found {brief(name)}"
            )
    return cast(dict[str, float], numbers)


def _checked_earlier(agents: tuple[str, ...], where: str, given: Any) -> list[tuple[str, int, float]]:
    """Rewards of earlier steps. Raises EnvError."""
    entries = (
        [tuple(each) if isinstance(each, (list, tuple)) else () for each in given] if isinstance(given, list) else [()]
    )
    for entry in entries:
        step = one_item(entry[1]) if len(entry) == 3 else None
        known = isinstance(step, int) and not isinstance(step, bool) and step >= 0 and entry[0] in agents
        if not known or real_number(entry[2]) is None:
            raise EnvError(
                f'{where}: info["earlier"] must be a list of (agent, number of the step, finite number), found '
                f"{brief(given)}"
            )
    return [(agent, int(step), float(reward)) for agent, step, reward in entries]


def _checked_evidence(agents: tuple[str, ...], where: str, agent: Any, evidence: Evidence) -> Evidence:
    if agent not in agents:
        raise EnvError(f"{where}: evidence about {agent!r}, who is not among the agents {listed(agents)}")
    output, rules = evidence.tool_output, evidence.rules
    if output is not None and not isinstance(output, str):
        raise EnvError(f"{where}: the tool_output of {agent!r} must be a text: {brief(output)}")
    if not isinstance(evidence.facts, dict):
        raise EnvError(f"{where}: the facts about {agent!r} must be a dict, found {brief(evidence.facts)}")
    if rules is not None:
        scores = [rules.score, *(score for _, score in rules.spans)] if isinstance(rules, Scored) else [None]
        if not all(real_number(score) is not None and 0 <= score <= 10 for score in scores):
            raise EnvError(f"{where}: the rules on {agent!r} must be Scored with scores 0..10, found {brief(rules)}")
        spans = tuple((clean_text(quote), float(score)) for quote, score in rules.spans)
        rules = replace(rules, score=float(rules.score), reason=clean_text(rules.reason), spans=spans)
    try:
        facts = clean_deep(evidence.facts)
    except ValueError as error:
        raise EnvError(f"{where}: the facts about {agent!r} must be plain JSON-able values, but {error}") from None
    return Evidence(None if output is None else clean_text(output), rules, facts)
