"""The tools of a team whose agents have different ones: a toolbox for each agent, and one workspace for all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mafrt.config.team import Team
from mafrt.core.errors import ConfigError
from mafrt.envs.tools.base import AnsweredCall, Files, Tool, Toolbox, listed
from mafrt.envs.tools.registry import named_tools
from mafrt.envs.workflows.state import EpisodeTool


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
