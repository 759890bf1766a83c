"""State of an episode on one task, the parts of it that an agent sees, and the base class of workflows. All is pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Protocol

from mafrt.config.resolve import load_object
from mafrt.config.schema import unknown
from mafrt.config.team import Team
from mafrt.core.errors import ConfigError
from mafrt.core.transcript import quoted, speakers
from mafrt.core.types import Evidence, Observation, Scored
from mafrt.environment.python_tool import PythonTool, Ran

JUDGE = "judge"
TOOL = "tool"
SPEAKS_AS = (JUDGE, TOOL)
"""Names under which the environment itself speaks."""
INCORRECT = "The answer is incorrect."

Key = Callable[[str], "str | None"]
"""The answer that a text gives, in a form in which equal answers are equal; None if it gives none."""


@dataclass(frozen=True)
class TaskState:
    """Everything an episode has come to; never changed, only replaced."""

    problem: str
    said: tuple[tuple[str, str], ...] = ()
    """(role, text) in speaking order; the judge's and the tool's lines are among them."""
    round: int = 0
    """Rounds that are complete."""
    position: int = 0
    """Index of the agent who speaks next within the round."""
    over: bool = False
    turns: int = 0
    """Turns the next speaker has just had: it continues after its tool's answer."""
    pending: str | None = None
    """A program to run, or a query to search for, before the next turn."""


class WorkflowTool(Protocol):
    """Runs the program or query that a workflow leaves in `TaskState.pending`."""

    def run(self, text: str) -> Any:
        """Run a program or a query. Raises EnvError if the tool failed, which loses the episode."""

    def says(self, ran: Any) -> str:
        """The text for the agent."""
        ...


class EpisodeTool(WorkflowTool):
    """A tool with a state of its own in each episode."""

    def run(self, text: str, agent: str | None = None) -> Any:
        """Make the calls of a text of `agent`. Raises EnvError if the tool failed, which loses the episode."""
        raise NotImplementedError

    def fresh(self) -> EpisodeTool:
        """The tool at the start of an episode."""
        raise NotImplementedError

    def copy(self) -> EpisodeTool:
        """The tool at the same point of a forked episode."""
        raise NotImplementedError


class TurnRules(Protocol):
    """Scores of turns by rules, as the task source has them; None where only the outcome can tell."""

    def right(self, text: str) -> bool:
        """Whether the answer that a text gives is the right one."""
        ...

    def answer(self, text: str, plan: str | None = None) -> Scored | None:
        """Score of an answer; `plan` is the turn that its agent was to carry out, if there was one."""
        ...

    def plan(self, text: str) -> Scored | None: ...
    def verdict(self, decision: str | None, proposed_right: bool) -> Scored | None: ...
    def program(self, ran: Ran) -> Scored | None: ...
    def bad_call(self, why: str) -> Scored | None: ...
    def report(self, text: str, printed: str | None) -> Scored | None: ...
    def prints_right(self, ran: Ran) -> bool: ...
    def shows_right(self, output: str) -> bool:
        """Whether the answers of tools end in the right answer."""
        ...

    def followed(self, right: bool, what: str) -> Scored | None: ...


class GradedRules:
    """Part of `TurnRules`: verdicts by the answer they judge, programs by whether they end; plans have no score."""

    def plan(self, text: str) -> Scored | None:
        return None

    def verdict(self, decision: str | None, proposed_right: bool) -> Scored:
        """A verdict (`approve`, `reject` or None) on an answer that is right or not."""
        if decision is None:
            return Scored(0.0, "There is no verdict.")
        good = (decision == "approve") == proposed_right
        return Scored(10.0 if good else 1.0, f"The answer is {'right' if proposed_right else 'wrong'}: {decision}.")

    def program(self, ran: Ran) -> Scored:
        ended = ran.status == "ok"
        return Scored(5.0 if ended else 1.0, "The program ran." if ended else f"The program failed ({ran.status}).")

    def bad_call(self, why: str) -> Scored:
        """A tool call that could not be made."""
        return Scored(1.0, why)

    def report(self, text: str, printed: str | None) -> Scored | None:
        return None

    def followed(self, right: bool, what: str) -> Scored:
        """Score of a turn that can only be judged by its consequences."""
        return Scored(7.0 if right else 2.0, f"What followed from it, {what}, was {'right' if right else 'wrong'}.")


class Workflow:
    """Base class of workflows: who speaks next, and with which observation.

    A subclass defines `observe` and `transition`, both pure, and sets `max_steps`. By default the texts of the agents
    with `with_answer` are graded when `finished` says so, and the episode is then over. A subclass is made from the
    team, the number of rounds, whether a failed round is followed by a judge's line, and the options that its
    constructor names.
    """

    bounded: bool = True
    """Whether its methods return in bounded time; a pattern or function of the user's own may not."""
    uses_tools: ClassVar[bool] = False
    """Whether `transition` may leave a program in `state.pending`; `answered` is then the state after it has run."""
    graded: bool = True
    """Whether an episode ends with answers to grade, whose grade is the outcome."""
    profile: ClassVar[str | None] = None
    """The team file, of those that ship, that `train_math` and `evaluate` take where none is named; None: their own."""
    plans: ClassVar[bool] = False
    """Whether turns of agents without `with_answer` are plans for those that answer."""
    tool: ClassVar[str] = "python"
    """The tool that it uses: `python`, `tools`, or `search`, which the task source has to bring."""

    def __init__(self, team: Team, horizon: int, judge_lines: bool) -> None:
        self.team, self.horizon, self.judge_lines = team, horizon, judge_lines
        self.names: tuple[str, ...] = team.names
        self.answering: tuple[str, ...] = tuple(a.name for a in team.agents if a.with_answer)
        self.max_steps = getattr(type(self), "max_steps", None) or horizon * len(self.names)
        """most steps that an episode can take"""

    @property
    def has_plans(self) -> bool:
        """Whether this team has agents that plan."""
        return self.plans and set(self.names) > set(self.answering)

    def make_tool(self, sandbox: str) -> WorkflowTool:
        """The tool that answers `state.pending`.

        Raises:
            ConfigError: the task source has to bring it, and does not.
            SandboxError: there is no such sandbox here.
        """
        if self.tool != "python":
            raise ConfigError(
                f"the workflow needs the tool {self.tool!r}, which these tasks do not have; take another workflow, or "
                "tasks that bring it, as train_search does"
            )
        return PythonTool(sandbox)

    def observe(self, state: TaskState) -> dict[str, Observation]:
        """Observations of the agents that speak next; empty when the episode is over."""
        raise NotImplementedError(f"{type(self).__name__} lacks observe(self, state); define it")

    def transition(self, state: TaskState, actions: Mapping[str, str]) -> TaskState:
        """The state after `actions` were said."""
        raise NotImplementedError(f"{type(self).__name__} lacks transition(self, state, actions); define it")

    def answers(self, state: TaskState) -> dict[str, str] | None:
        """The texts to grade now (agent -> text), or None if it is not time to."""
        if state.position < len(self.names):
            return None
        latest = dict(state.said)
        return {name: latest[name] for name in self.answering if name in latest}

    def decide(self, answers: Mapping[str, str], key: Key) -> dict[str, str]:
        """Of the answers to grade those that count; by default all, and the score is the share of right ones."""
        return dict(answers)

    def judged(self, state: TaskState, score: float) -> TaskState:
        """The state after the verdict on `answers`: over, or at the start of the next round."""
        return replace(state, round=state.round + 1, over=True)

    def payments(self, state: TaskState, key: Key) -> dict[str, float] | None:
        """Rewards of the agents in the step that ends the episode; None: as the setting `rewards` says."""
        return None

    def answered(self, state: TaskState, output: str) -> TaskState:
        """The state after the pending program has run and printed `output`."""
        return replace(state, said=(*state.said, (TOOL, output)), pending=None)

    def measures(self, state: TaskState, key: Key) -> dict[str, float]:
        """Further numbers of a finished episode, averaged over episodes in evaluations."""
        return {}

    def evidence(self, before: TaskState, after: TaskState, ran: Any, rules: TurnRules) -> dict[str, Evidence]:
        """Evidence about the turns between two states (agent -> evidence), for `--coach rules`.

        By default answers are scored as answers, and other turns by the team's result. An agent whose evidence has no
        score is scored when the episode ends.
        """
        by_agent: dict[str, Evidence] = {}
        for name, text in after.said[len(before.said) :]:
            if name in self.names:
                by_agent[name] = Evidence(rules=rules.answer(text) if name in self.answering else None)
        return by_agent

    def answer_or_plan(
        self, name: str, text: str, seen: Sequence[tuple[str, str]], rules: TurnRules
    ) -> dict[str, Evidence]:
        """Evidence about a turn of `name`, who saw `seen`: an answer, or a plan for one."""
        if name not in self.answering:
            return {name: Evidence(rules=rules.plan(text))}
        plans = [words for role, words in seen if role in self.names and role not in self.answering]
        return {name: Evidence(rules=rules.answer(text, plans[-1] if plans else None))}


def latest(state: TaskState) -> dict[str, str]:
    """Agent -> its latest text."""
    return {name: text for name, text in state.said if name not in SPEAKS_AS}


Lines = Sequence[tuple[str, str]]
View = Callable[[Lines, str, tuple[str, ...]], Lines]
"""(transcript, agent that sees it, names in team order) -> the visible part: a name, or a function of one's own."""


def see_all(transcript: Lines, agent: str, names: tuple[str, ...]) -> Lines:
    """Everything that was said."""
    return transcript


def see_problem(transcript: Lines, agent: str, names: tuple[str, ...]) -> Lines:
    """Nothing but the problem."""
    return ()


def see_previous(transcript: Lines, agent: str, names: tuple[str, ...]) -> Lines:
    """The turns of the agent that spoke last, with the tool's answers to it and the judge's line."""
    start = len(transcript)
    previous = next((role for role, _ in reversed(transcript) if role not in SPEAKS_AS), None)
    while start and transcript[start - 1][0] in (previous, *SPEAKS_AS):
        start -= 1
    while start < len(transcript) and transcript[start][0] in SPEAKS_AS:
        start += 1
    return transcript[start:]


def see_predecessors(transcript: Lines, agent: str, names: tuple[str, ...]) -> Lines:
    """The latest turn of each agent before it in the team (spatial)."""
    return [line for _, line in _latest_positions(transcript, names[: names.index(agent)])]


def see_own(transcript: Lines, agent: str, names: tuple[str, ...]) -> Lines:
    """Its own past turns, with what the environment said after them (temporal)."""
    return [line for _, line in _positions(transcript, (agent,))]


def see_own_and_predecessors(transcript: Lines, agent: str, names: tuple[str, ...]) -> Lines:
    """Its own past turns, and the latest turn of each agent before it (temporal and spatial)."""
    past_turns = {position for position, _ in _positions(transcript, (agent,))}
    before = {position for position, _ in _latest_positions(transcript, names[: names.index(agent)])}
    return [line for position, line in enumerate(transcript) if position in past_turns | before]


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
    function: View = load_object(name)
    if not callable(function):
        raise ConfigError(f"sees {name}: expected a function of (transcript, agent, names), found {function!r}")
    return function


def written(
    problem: str, transcript: Lines, names: Sequence[str] = (), note: str | None = None, headings: Sequence[str] = ()
) -> str:
    """`Problem: ...`, the workflow's line `note`, then a line `role: text` for each visible utterance.

    None of them can write a line of another, nor one of `headings`: see `mafrt.core.transcript.quoted`.
    """
    begins = speakers((*names, *dict(transcript)))
    first = f"Problem: {quoted(problem, begins, headings=headings)}" + (f"\n{note}" if note else "")
    return first + "".join(f"\n{role}: {quoted(text, begins, headings=headings)}" for role, text in transcript)


def transcript(state: TaskState, names: Sequence[str]) -> str:
    """The whole transcript as text; no agent of `names` can be made to speak by another's lines."""
    return written(state.problem, state.said, names)


def _positions(transcript: Lines, agents: Sequence[str]) -> list[tuple[int, tuple[str, str]]]:
    """Lines of the agents, and the environment's lines that answer them."""
    chosen, speaker = [], None
    for position, (role, text) in enumerate(transcript):
        speaker = speaker if role in SPEAKS_AS else role
        if speaker in agents:
            chosen.append((position, (role, text)))
    return chosen


def _latest_positions(transcript: Lines, agents: Sequence[str]) -> list[tuple[int, tuple[str, str]]]:
    last = {role: position for position, (role, _) in enumerate(transcript) if role in agents}
    return [(position, transcript[position]) for position in sorted(last.values())]
