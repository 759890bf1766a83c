"""Views: the part of a transcript that an agent sees, and the text that it reads.

A view is a name, or a function of one's own `view(said, agent, names)` that returns the visible (role, text) pairs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from mafrt.config.resolve import load_object
from mafrt.config.schema import unknown
from mafrt.config.team import Team
from mafrt.core.errors import ConfigError
from mafrt.core.transcript import quoted, speakers
from mafrt.envs.workflows.state import SPEAKS_AS, TaskState

Said = Sequence[tuple[str, str]]
View = Callable[[Said, str, tuple[str, ...]], Said]
"""(transcript, agent that sees it, names in team order) -> the visible part."""


def see_all(said: Said, agent: str, names: tuple[str, ...]) -> Said:
    """Everything that was said."""
    return said


def see_problem(said: Said, agent: str, names: tuple[str, ...]) -> Said:
    """Nothing but the problem."""
    return ()


def see_previous(said: Said, agent: str, names: tuple[str, ...]) -> Said:
    """The turns of the agent that spoke last, with the tool's answers to it and the judge's line."""
    start = len(said)
    previous = next((role for role, _ in reversed(said) if role not in SPEAKS_AS), None)
    while start and said[start - 1][0] in (previous, *SPEAKS_AS):
        start -= 1
    while start < len(said) and said[start][0] in SPEAKS_AS:
        start += 1
    return said[start:]


def see_predecessors(said: Said, agent: str, names: tuple[str, ...]) -> Said:
    """The latest turn of each agent before it in the team (spatial)."""
    return _latest_of(said, names[: names.index(agent)])


def see_own(said: Said, agent: str, names: tuple[str, ...]) -> Said:
    """Its own past turns, with what the environment said after them (temporal)."""
    return _turns_of(said, (agent,))


def see_own_and_predecessors(said: Said, agent: str, names: tuple[str, ...]) -> Said:
    """Its own past turns, and the latest turn of each agent before it (temporal and spatial)."""
    own = {position for position, _ in _positions(said, (agent,))}
    before = {position for position, _ in _latest_positions(said, names[: names.index(agent)])}
    return [line for position, line in enumerate(said) if position in own | before]


VIEWS: Mapping[str, View] = {
    "all": see_all,
    "previous": see_previous,
    "problem": see_problem,
    "predecessors": see_predecessors,
    "own": see_own,
    "own+predecessors": see_own_and_predecessors,
}


def views_of(team: Team, sees: str | None) -> dict[str, View]:
    """The view of each agent: its own from the team file, else the run's, else all.

    Raises:
        ConfigError: no such view, or an object that is no function.
    """
    return {agent.name: view(agent.sees or sees or "all") for agent in team.agents}


def view(name: str) -> View:
    """A view by name, `package.module:function` or `file.py:function`. Raises ConfigError."""
    if name in VIEWS:
        return VIEWS[name]
    if ":" not in name:
        raise ConfigError(f"sees: {unknown('view', name, VIEWS)}")
    own = load_object(name)
    if not callable(own):
        raise ConfigError(f"sees {name}: expected a function of (said, agent, names), found {own!r}")
    return own


def written(
    problem: str, said: Said, names: Sequence[str] = (), note: str | None = None, headings: Sequence[str] = ()
) -> str:
    """`Problem: ...`, then a line `role: text` for each visible utterance.

    Neither the problem nor an utterance can write a line of another one: see `mafrt.core.transcript.quoted`.

    Args:
        names: of all who may speak; those who did are known.
        note: a line of the workflow after the problem.
        headings: all such lines that the workflow writes.
    """
    begins = speakers((*names, *dict(said)))
    first = f"Problem: {quoted(problem, begins, headings=headings)}" + (f"\n{note}" if note else "")
    return first + "".join(f"\n{role}: {quoted(text, begins, headings=headings)}" for role, text in said)


def transcript(state: TaskState) -> str:
    """The whole transcript as text."""
    return written(state.problem, state.said)


def _positions(said: Said, agents: Sequence[str]) -> list[tuple[int, tuple[str, str]]]:
    """Lines of the agents, and the environment's lines that answer them."""
    chosen, speaker = [], None
    for position, (role, text) in enumerate(said):
        speaker = speaker if role in SPEAKS_AS else role
        if speaker in agents:
            chosen.append((position, (role, text)))
    return chosen


def _turns_of(said: Said, agents: Sequence[str]) -> Said:
    return [line for _, line in _positions(said, agents)]


def _latest_positions(said: Said, agents: Sequence[str]) -> list[tuple[int, tuple[str, str]]]:
    last = {role: position for position, (role, _) in enumerate(said) if role in agents}
    return [(position, said[position]) for position in sorted(last.values())]


def _latest_of(said: Said, agents: Sequence[str]) -> Said:
    return [line for _, line in _latest_positions(said, agents)]
