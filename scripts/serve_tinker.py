"""Serve a frozen base behind the Tinker API: every training client is an adapter, and all train in mixed batches."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

from mafrt.config.agent import AgentSpec
from mafrt.config.schema import Bounds, Checked, Count, Port
from mafrt.config.team import Team
from mafrt.core.errors import ConfigError
from mafrt.core.reading import is_writable
from mafrt.core.shipped import base_folder
from mafrt.environment.local_server import LOOPBACK
from mafrt.runners.micro_batch import fitting_tokens, free_bytes
from mafrt.scripts.cli.command import Command
from mafrt.scripts.cli.loading import check_models, load_base
from mafrt.scripts.cli.run_main import run_main
from mafrt.scripts.cli.settings import BaseSettings
from mafrt.scripts.tinker_server.limits import Limits

RANK = 32
"""of the SDK's adapters where a client names none"""
TOKEN = "MAFRT_TINKER_TOKEN"
"""Environment variable of the API keys that are let in, separated by commas: each is a client of its own."""


@dataclass(frozen=True)
class TinkerSettings(Checked):
    """Server"""

    host: str = "127.0.0.1"
    """address to listen on; any but loopback needs a token in MAFRT_TINKER_TOKEN"""
    port: Port = 8000
    """port to listen on; 0 takes a free one"""
    output: str = "runs/tinker"
    """folder of the checkpoints, which outlive the server"""
    slots: Annotated[int, Bounds(least=2)] = 128
    """max adapters in memory: of training clients, and of weights that are sampled from"""
    sessions: Count = 64
    """max open sessions of a client"""
    adapters: Count = 32
    """max training clients in memory of a client"""
    batch_tokens: Count = 262_144
    """max tokens of one forward or backward request"""
    body_mib: Annotated[float, Bounds(above=0, most=4096)] = 16.0
    """max MiB of one request; the SDK cuts its batches at 5"""
    micro_batch_tokens: Count = 8192
    """max tokens of all clients computed together when training, as the free memory holds; results do not depend on
    it"""
    max_batch_rows: Count = 256
    """max sequences sampled side by side"""


COMMAND = Command(
    "serve_tinker",
    "Serve a frozen base behind the Tinker API: each training client of the stock SDK is an adapter of it.",
    (TinkerSettings, BaseSettings),
    epilog=f"Clients set TINKER_BASE_URL to the address, and TINKER_API_KEY to a token of {TOKEN} (on loopback to any "
    "key that begins with tml-).",
)


def serve(argv: Sequence[str]) -> int:
    settings = COMMAND.read(argv)
    asked, model = settings.make(TinkerSettings), settings.make(BaseSettings)
    if asked.adapters > asked.slots and "adapters" in settings.given:
        raise ConfigError(
            f"adapters is {asked.adapters}, and of all clients together {asked.slots} are in memory (slots); choose at "
            f"most {asked.slots}, or more slots."
        )
    tokens = [token.strip() for token in os.environ.get(TOKEN, "").split(",") if token.strip()]
    if asked.host not in LOOPBACK and not tokens:
        raise ConfigError(f"host {asked.host} can be reached from other machines; set a token in {TOKEN}.")
    if model.dtype == "float16":
        raise ConfigError("A base in float16 can be sampled from only; leave --dtype out, or give bfloat16.")
    if (why := is_writable(asked.output)) is not None:
        raise ConfigError(f"output {asked.output} cannot be written to ({why}); name another folder.")
    from mafrt.scripts.tinker_server.server import TinkerServer, check_tokens

    check_tokens(tokens, asked.host)
    team = Team((AgentSpec("client"),))
    check_models(settings, team)
    limits = Limits(
        sessions=asked.sessions,
        adapters=min(asked.adapters, asked.slots),
        slots=asked.slots,
        batch_tokens=asked.batch_tokens,
        body_mib=asked.body_mib,
    )
    # The port is taken before the model is loaded: one that is in use is then an error at once.
    server = TinkerServer(host=asked.host, port=asked.port, tokens=tokens, limits=limits)
    try:
        print(f"Loading {model.model_name_or_path} ...", flush=True)
        base = load_base(settings, team).main
        from mafrt.scripts.tinker_server.checkpoints import Checkpoints
        from mafrt.scripts.tinker_server.service import Service, names_of

        folder = str(base_folder(model.model_name_or_path) or base.name)
        together = asked.micro_batch_tokens
        if "micro_batch_tokens" not in settings.named:
            together = fitting_tokens(base, together, free_bytes(base.device), RANK, ["all-linear"], False)
        if together < asked.micro_batch_tokens:
            print(f"Micro-batches have {together} tokens, which the free memory holds; --micro_batch_tokens chooses.")
        server.service = Service(
            base,
            names_of(folder, model.model_name_or_path),
            folder,
            Checkpoints(Path(asked.output), limits.checkpoints),
            limits,
            rows=asked.max_batch_rows,
            micro_batch_tokens=together,
        )
        with contextlib.suppress(KeyboardInterrupt):
            print(
                f"TINKER_BASE_URL={server.url} serves {model.model_name_or_path} ({folder}); Ctrl-C ends it.",
                flush=True,
            )
            server.wait()
    finally:
        server.close()
    return 0


main = partial(run_main, serve)

if __name__ == "__main__":
    sys.exit(main())
