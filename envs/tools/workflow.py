"""`tools`: agents one after the other, each of which may call tools before it has done."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from mafrt.config.schema import check_number
from mafrt.config.team import Team
from mafrt.core.errors import ConfigError
from mafrt.core.types import Evidence, Message, Observation, Scored
from mafrt.environment.tool_calls import tool_message
from mafrt.envs.tools.base import ERROR, AnsweredCall, Files, Tool, Toolbox, listed
from mafrt.envs.tools.registry import named_tools
from mafrt.envs.workflows.chain import Chain
from mafrt.envs.workflows.state import TOOL, EpisodeTool, Key, TaskState, TurnRules, WorkflowTool, written


class ToolWorkflow(Chain):
    """A chain whose agents call tools.

    The chat template gets the schemas of the agent's tools: its own from the team file, else those of the run. An agent
    without tools calls none, and has one turn, as in a chain. A turn with calls is answered by a tool message, and the
    agent speaks again; a turn without one is its last, and so is the turn after `tool_turns` turns with calls. The
    agents after it see its calls and their answers in the transcript.
    """

    uses_tools = True
    plans = False
    tool = "tools"

    def __init__(
        self,
        team: Team,
        horizon: int,
        judge_lines: bool,
        sees: str | None = None,
        tool_turns: int = 4,
        tools: Sequence[str] = ("calculator",),
    ) -> None:
        super().__init__(team, horizon, judge_lines, sees)
        check_number("tool_turns", tool_turns, least=1, whole=True)
        self.tools, self.tool_turns = tuple(tools), tool_turns
        self.max_steps = horizon * len(self.names) * (tool_turns + 1)
        self.schemas: Mapping[str, str] = {}
        self.boxes: Mapping[str, Toolbox] = {}

    def make_tool(self, sandbox: str) -> WorkflowTool:
        toolbox = team_toolbox(self.team, self.tools, sandbox)
        self.schemas, self.boxes = toolbox.schemas(), toolbox.boxes
        return toolbox

    def observe(self, state: TaskState) -> dict[str, Observation]:
        if state.over:
            return {}
        name = self.names[state.position]
        begun = len(state.said) - 2 * state.turns
        if name not in self.schemas:
            return super().observe(state)
        chat: list[Message] = [
            {"role": "tools", "content": self.schemas[name]},
            {"role": "user", "content": written(state.problem, self.seen(state.said[:begun], name), self.names)},
        ]
        for role, text in state.said[begun:]:
            chat.append(tool_message(text) if role == TOOL else {"role": "assistant", "content": text})
        return {name: chat}

    def transition(self, state: TaskState, actions: Mapping[str, str]) -> TaskState:
        after = super().transition(state, actions)
        name = self.names[state.position]
        text = actions[name]
        called = name in self.boxes and self.boxes[name].calls(text)
        if state.turns >= self.tool_turns or not called:
            return replace(after, turns=0)
        return replace(after, position=state.position, turns=state.turns + 1, pending=text)

    def measures(self, state: TaskState, key: Key) -> dict[str, float]:
        """`tool_turns`: turns with calls; `tool_errors`: share of them in which a call failed."""
        answers = [text for role, text in state.said if role == TOOL]
        failed = sum(any(line.startswith(ERROR) for line in text.splitlines()) for text in answers)
        return {"tool_turns": float(len(answers)), "tool_errors": failed / len(answers) if answers else 0.0}

    def evidence(
        self, before: TaskState, after: TaskState, ran: list[AnsweredCall] | None, rules: TurnRules
    ) -> dict[str, Evidence]:
        (name, _), *answered = after.said[len(before.said) :]
        if not answered or answered[0][0] != TOOL:
            return super().evidence(before, after, None, rules)
        output = answered[0][1]
        failed = [called.answer for called in ran or () if called.answer.startswith(ERROR)]
        facts = {"calls": len(ran or ()), "failed": len(failed)}
        return {name: Evidence(output, rules.bad_call(failed[0]) if failed else _made(output, rules), facts)}


def _made(output: str, rules: TurnRules) -> Scored:
    """Score of calls that were answered. At once: the agent speaks again, and what follows scores that turn alone."""
    right = rules.shows_right(output)
    return Scored(10.0 if right else 5.0, "The tools gave the right answer." if right else "The calls were answered.")


@dataclass
class TeamToolbox(EpisodeTool):
    """Toolboxes by agent. Agents without tools have none, and call nothing."""

    boxes: Mapping[str, Toolbox]
    first_files: Files = field(default_factory=dict)
    """files at the start of an episode"""
    files: Files = field(default_factory=dict)
    """of all agents; replaced, never written into"""

    def __post_init__(self) -> None:
        self.files = dict(self.first_files)

    def fresh(self) -> TeamToolbox:
        return TeamToolbox({agent: box.fresh() for agent, box in self.boxes.items()}, self.first_files)

    def copy(self) -> TeamToolbox:
        twin = self.fresh()
        twin.files = self.files
        return twin

    def run(self, text: str, agent: str | None = None) -> list[AnsweredCall]:
        """Make the calls of a text with the tools of its agent. Raises EnvError if the sandbox failed."""
        box = self.boxes.get(agent) if agent is not None else None
        if box is None:
            return []
        box.files = self.files
        try:
            return box.run(text)
        finally:
            self.files = box.files

    def says(self, ran: list[AnsweredCall]) -> str:
        return next(iter(self.boxes.values())).says(ran)

    def schemas(self) -> dict[str, str]:
        """Agent -> the schemas of its tools, as JSON."""
        return {agent: listed(box.schemas()) for agent, box in self.boxes.items()}


def team_toolbox(team: Team, of_run: Sequence[str], sandbox: str = "bwrap") -> TeamToolbox:
    """The tools of every agent: its own from the team file, else those of the run. What two agents name is made once.

    Raises:
        ConfigError: no such tool, or an MCP server or retriever that does not answer; names the agent of own tools.
        SandboxError: there is no such sandbox here.
    """
    made: dict[str, tuple[Sequence[Tool], Files]] = {}
    boxes: dict[str, Toolbox] = {}
    files: dict[str, Any] = {}
    for agent in team.agents:
        names = of_run if agent.tools is None else agent.tools
        if not names and agent.tools is not None:
            continue
        try:
            made |= {name: named_tools(name, sandbox) for name in names if name not in made}
            boxes[agent.name] = Toolbox([tool for name in names for tool in made[name][0]])
        except ConfigError as error:
            if agent.tools is None:
                raise
            raise ConfigError(f"agent {agent.name!r}: tools: {error}") from error
        for name in names:
            files |= made[name][1]
    if not boxes:
        raise ConfigError("no agent of the team has tools; give one some, or take the workflow 'chain'")
    return TeamToolbox(boxes, files)
