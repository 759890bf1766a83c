"""Talk to the agents of a trained team, or give a problem to the whole team, in the terminal."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from mafrt.config.schema import unknown
from mafrt.config.train_config import EngineConfig
from mafrt.core.errors import ConfigError, MafrtError
from mafrt.core.seeding import seed_of
from mafrt.core.types import Message
from mafrt.scripts.cli.command import Command
from mafrt.scripts.cli.run_main import run_main
from mafrt.scripts.cli.settings import BaseSettings, SampleSettings
from mafrt.scripts.reporting.terminal import safe
from mafrt.scripts.serving.trained_team import load_team, read_source
from mafrt.scripts.serving.workflow import play_problem, workflow_of

if TYPE_CHECKING:
    from mafrt.envs.math import MathEnv
    from mafrt.scripts.serving.trained_team import TrainedTeam


@dataclass(frozen=True)
class ChatSettings:
    """Chat"""

    load_path: str | None = None
    """the run, for its newest checkpoint, or one checkpoint"""
    agent: str | None = None
    """agent to talk to, or `team` for the workflow; default: the workflow if there is one, else the first agent"""
    seed: int = 1
    """sampling follows from it"""


COMMAND = Command(
    "chat",
    "Talk to the agents of a trained team, or give a problem to the whole team, in the terminal.",
    (ChatSettings, BaseSettings, SampleSettings, EngineConfig),
    epilog="A run brings its own base, team and sampling; --config and flags win over them.",
    words="load_path",
)
HELP = "/agent NAME talks to another agent, /new begins a new conversation, /quit ends."


@dataclass
class Conversation:
    """One conversation with an agent, or problems for the team."""

    team: TrainedTeam
    env: MathEnv | None
    agent: str
    seed: int
    messages: list[Message] = field(default_factory=list)
    asked: int = 0

    @property
    def names(self) -> list[str]:
        names = list(self.team.team.names)
        return [*names, "team"] if self.env is not None and "team" not in names else names

    def choose(self, name: str) -> None:
        """Talk to another agent from now on. Raises ConfigError for an unknown one."""
        if name not in self.names:
            raise ConfigError(unknown("agent", name, self.names))
        self.agent, self.messages = name, []

    def say(self, text: str) -> list[tuple[str, str]]:
        """(speaker, text) of every answer to `text`. Raises MafrtError."""
        self.asked += 1
        # Another seed for each question, so that asking again gives another answer and a restart the same ones.
        seed = seed_of(self.seed, "chat", self.asked)
        if self.agent not in self.team.team.names:
            assert self.env is not None
            episode = play_problem(self.team, self.env, text, seed)
            if episode is None:
                raise ConfigError("The problem is too long for the context window.")
            return [(turn.agent, turn.text) for turn in episode.turns]
        messages = [*self.messages, {"role": "user", "content": text}]
        [made] = self.team.queue.generate([self.team.request(self.agent, messages, seed)])
        self.team.remember(self.agent, messages, made.text, made.ids)
        self.messages = [*messages, {"role": "assistant", "content": made.text}]
        return [(self.agent, made.text)]


def chat(argv: Sequence[str]) -> int:
    source = read_source(COMMAND, argv)
    asked = source.settings.make(ChatSettings)
    env = workflow_of(source)
    names = [*source.team.names, *(["team"] if env is not None else [])]
    if asked.agent is not None and asked.agent not in names:
        raise ConfigError(unknown("agent", asked.agent, names))
    team = load_team(source)
    try:
        talk(Conversation(team, env, asked.agent or ("team" if env is not None else names[0]), asked.seed))
    finally:
        team.close()
    return 0


def talk(conversation: Conversation) -> None:
    """Read lines until the end of the input."""
    print(f"You talk to {conversation.agent}; there are {', '.join(conversation.names)}. {HELP}", flush=True)
    while True:
        try:
            line = input(f"{conversation.agent}> ").strip()
        except (EOFError, KeyboardInterrupt):
            print()
            return
        word, _, rest = line.partition(" ")
        try:
            if word in ("/quit", "/exit"):
                return
            if word == "/new":
                conversation.messages = []
            elif word == "/agent":
                conversation.choose(rest.strip())
            elif word.startswith("/"):
                print(HELP)
            elif line:
                for speaker, text in conversation.say(line):
                    # Escape codes in a model's words could otherwise rewrite the terminal.
                    print(f"{safe(speaker)}: {safe(text)}", flush=True)
        # A conversation goes on after a mistake; what was said so far would be lost otherwise.
        except MafrtError as error:
            print(f"error: {safe(error)}", file=sys.stderr, flush=True)


main = partial(run_main, chat)

if __name__ == "__main__":
    sys.exit(main())
