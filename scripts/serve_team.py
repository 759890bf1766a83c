"""Serve a trained team behind an OpenAI-compatible address: a model per agent, and one for the workflow."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from mafrt.config.schema import Checked, Count, Port, Positive
from mafrt.config.train_config import EngineConfig
from mafrt.environment.chat_api.server import ChatServer, Limits
from mafrt.environment.local_server import token_for
from mafrt.scripts.cli.command import Command
from mafrt.scripts.cli.run_main import run_main
from mafrt.scripts.cli.settings import BaseSettings, SampleSettings
from mafrt.scripts.serving.answers import TeamAnswers
from mafrt.scripts.serving.trained_team import load_team, read_source
from mafrt.scripts.serving.workflow import workflow_of

TOKEN = "MAFRT_SERVE_TOKEN"
"""Environment variable of the token that clients give as their API key."""


@dataclass(frozen=True)
class ServeSettings(Checked):
    """Server"""

    load_path: str | None = None
    """the run, for its newest checkpoint, or one checkpoint"""
    host: str = "127.0.0.1"
    """address to listen on; any but loopback needs a token in MAFRT_SERVE_TOKEN"""
    port: Port = 8000
    """port to listen on; 0 takes a free one"""
    max_calls: Count = 256
    """max calls in flight; further ones get status 429"""
    call_timeout_s: Positive = 600.0
    """max seconds of one call"""


COMMAND = Command(
    "serve_team",
    "Serve a trained team behind an OpenAI-compatible address: a model per agent, and `team` for its workflow.",
    (ServeSettings, BaseSettings, SampleSettings, EngineConfig),
    epilog="A run brings its own base, team and sampling; --config and flags win over them.",
    words="load_path",
)


def serve(argv: Sequence[str]) -> int:
    source = read_source(COMMAND, argv)
    asked = source.settings.make(ServeSettings)
    token = token_for(asked.host, TOKEN)
    # The port is taken before the model is loaded: one that is in use is then an error at once.
    answers = TeamAnswers()
    limits = Limits(calls=asked.max_calls, timeout_s=asked.call_timeout_s)
    server = ChatServer(answers, host=asked.host, port=asked.port, token=token, limits=limits)
    team = None
    try:
        env = workflow_of(source)
        team = load_team(source)
        answers.ready(team, env)
        with contextlib.suppress(KeyboardInterrupt):
            print(f"Models {', '.join(answers.models(''))} at {server.url}/v1; Ctrl-C ends it.", flush=True)
            server.wait()
    finally:
        server.close()
        if team is not None:
            team.close()
    return 0


main = partial(run_main, serve)

if __name__ == "__main__":
    sys.exit(main())
