"""`router`: the words of an agent choose who speaks next, by a YAML file.

    start: solver
    max_turns: 6
    routes:
      solver: verifier
      verifier:
        - {says: "verdict: approve", to: end}
        - {to: solver}

A route is a name, or a list of rules read from the top: the first one whose `says` (a regular expression, case
ignored) is found in the agent's text decides, and one without `says` always does. `end` ends the episode; so does the
turn number `max_turns`, so that circles are bounded. The latest text of each agent with `with_answer` is graded.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mafrt.config.schema import unknown
from mafrt.config.team import Team
from mafrt.core.errors import ConfigError
from mafrt.core.reading import parse_yaml, read_text
from mafrt.core.types import Evidence, Observation
from mafrt.environment.python_tool import Ran
from mafrt.envs.workflows.chain import Chain
from mafrt.envs.workflows.state import Key, TaskState, TurnRules, latest, written

END = "end"
MOST_TURNS = 64
MOST_TEXT = 20_000
"""Characters of a text in which rules are looked for, from its end."""


@dataclass(frozen=True)
class Route:
    """The next speaker if `says` is found in a turn; None: in any case."""

    to: str
    says: re.Pattern[str] | None = None


@dataclass(frozen=True)
class Routes:
    """The content of a file of routes."""

    start: str
    max_turns: int
    rules: Mapping[str, tuple[Route, ...]]

    def after(self, speaker: str, text: str) -> str:
        """The next speaker, or `end`."""
        # A pattern of the user's may take quadratic time, which a bounded text keeps short.
        tail = text[-MOST_TEXT:]
        for rule in self.rules[speaker]:
            if rule.says is None or rule.says.search(tail):
                return rule.to
        return END


class Router(Chain):
    """The agents speak in the order that their own words choose.

    Measure: `cut`, whether `max_turns` ended the episode.
    """

    def __init__(
        self, team: Team, horizon: int, judge_lines: bool, routes: str | None = None, sees: str | None = None
    ) -> None:
        super().__init__(team, horizon, judge_lines, sees)
        if routes is None:
            raise ConfigError("workflow 'router' needs --routes FILE, a YAML file of start, max_turns and routes")
        self.routes = read_routes(routes, self.names)
        self.max_steps = self.routes.max_turns
        # The patterns are the user's, and a regular expression can take for ever.
        self.bounded = False

    def observe(self, state: TaskState) -> dict[str, Observation]:
        if state.over:
            return {}
        name = self._speaker(state)
        return {name: written(state.problem, self.seen(state.said, name), self.names)}

    def _speaker(self, state: TaskState) -> str:
        return self.routes.start if not state.said else self.names[state.position]

    def transition(self, state: TaskState, actions: Mapping[str, str]) -> TaskState:
        name = self._speaker(state)
        following = self.routes.after(name, actions[name])
        transcript = (*state.said, (name, actions[name]))
        ended = following == END or len(transcript) >= self.routes.max_turns
        return replace(state, said=transcript, position=len(self.names) if ended else self.names.index(following))

    def answers(self, state: TaskState) -> dict[str, str] | None:
        if not state.said or state.position < len(self.names):
            return None
        latest_texts = latest(state)
        return {name: latest_texts.get(name, "") for name in self.answering}

    def judged(self, state: TaskState, score: float) -> TaskState:
        return replace(state, round=1, over=True)

    def measures(self, state: TaskState, key: Key) -> dict[str, float]:
        speaker, text = state.said[-1]
        return {"cut": float(self.routes.after(speaker, text) != END)}

    def evidence(self, before: TaskState, after: TaskState, ran: Ran | None, rules: TurnRules) -> dict[str, Evidence]:
        name, text = after.said[len(before.said)]
        return self.answer_or_plan(name, text, self.seen(before.said, name), rules)


def read_routes(path: str | Path, names: tuple[str, ...]) -> Routes:
    """Read and check a file of routes.

    Raises:
        ConfigError: names the file, the agent and the wrong part.
    """
    where = f"routes {path}"
    try:
        content = parse_yaml(read_text(Path(path).expanduser()))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{where}: cannot be read ({error})") from error
    except Exception as error:
        # Compared by name, because yaml is imported only where a file is read.
        if type(error).__module__.partition(".")[0] != "yaml":
            raise
        raise ConfigError(f"{where}: is not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{where}: expected start, max_turns and routes, found {type(content).__name__}")
    for key in content.keys() - {"start", "max_turns", "routes"}:
        raise ConfigError(f"{where}: {unknown('key', str(key), ['start', 'max_turns', 'routes'])}")
    routes, turns = content.get("routes"), content.get("max_turns", 2 * len(names))
    if isinstance(turns, bool) or not isinstance(turns, int) or not 1 <= turns <= MOST_TURNS:
        raise ConfigError(f"{where}: max_turns is {turns!r}; choose a whole number in [1, {MOST_TURNS}]")
    if not isinstance(routes, dict) or not routes:
        raise ConfigError(f"{where}: routes must map agents to those that follow, found {routes!r}")
    start = _agent(content.get("start", names[0]), names, f"{where}: start")
    rules = {
        _agent(name, names, f"{where}: routes"): _rules(given, names, f"{where}: {name}")
        for name, given in routes.items()
    }
    for rule in [Route(start), *(rule for some in rules.values() for rule in some)]:
        # Found now, since a route that leads nowhere would show only when it is taken.
        if rule.to != END and rule.to not in rules:
            raise ConfigError(f"{where}: {rule.to} may speak and has no route; add one, such as `{rule.to}: end`")
    return Routes(start, turns, rules)


def _rules(given: Any, names: tuple[str, ...], where: str) -> tuple[Route, ...]:
    entries = given if isinstance(given, list) else [{"to": given}]
    rules = []
    for entry in entries:
        if not isinstance(entry, dict) or "to" not in entry or entry.keys() - {"says", "to"}:
            raise ConfigError(f"{where}: a rule is {{says: PATTERN, to: AGENT}}, found {entry!r}")
        says = entry.get("says")
        try:
            pattern = None if says is None else re.compile(str(says), re.IGNORECASE)
        except re.error as error:
            raise ConfigError(f"{where}: {says!r} is no regular expression ({error})") from error
        rules.append(Route(_agent(entry["to"], (*names, END), where), pattern))
    return tuple(rules)


def _agent(name: Any, names: tuple[str, ...], where: str) -> str:
    if name not in names:
        raise ConfigError(f"{where}: {unknown('agent', str(name), names)}")
    return str(name)
