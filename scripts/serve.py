"""Serve environments to trainers elsewhere: `mafrt serve --env math`, then `mafrt train --env grpc://HOST:PORT/math`."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from mafrt import __version__
from mafrt.config.schema import Checked, Count, Port, Positive
from mafrt.core.errors import ConfigError
from mafrt.core.extras import package
from mafrt.environment.registry import held_out_of, make_env
from mafrt.environment.session import Session
from mafrt.environment.workers import guarded
from mafrt.runners.identity import environment_record
from mafrt.scripts.cli.command import Command
from mafrt.scripts.cli.loading import env_arguments
from mafrt.scripts.cli.run_main import run_main


@dataclass(frozen=True)
class ServeEnvSettings(Checked):
    """Server"""

    env: str | None = None
    """the environment: a built-in one such as math, or package.module:Class; several as code,math"""
    env_kwargs: tuple[str, ...] = ()
    """arguments of its constructor: key=value ..., or one JSON object; of several {"NAME": {...}}"""
    eval_env_kwargs: tuple[str, ...] = ()
    """arguments that differ for held-out instances; default: those that the environment names, if any"""
    host: str = "127.0.0.1"
    """address to listen on; any but loopback needs a token in MAFRT_ENV_TOKEN"""
    port: Port = 50551
    """port to listen on; 0 takes a free one"""
    max_sessions: Count = 256
    """environments at a time, over all clients; further ones are refused"""
    env_timeout_s: Positive = 60.0
    """seconds that a reset or step may take before its worker process is killed and the episode is lost"""


COMMAND = Command("serve", "Serve environments over gRPC to trainers elsewhere.", (ServeEnvSettings,))


def serve(argv: Sequence[str]) -> int:
    asked = COMMAND.read(argv).make(ServeEnvSettings)
    if asked.env is None:
        raise ConfigError("Name an environment: --env package.module:Class, or a built-in one such as --env math.")
    package("mafrt serve", "grpc", "grpc", "grpc_health")
    from mafrt.environment.remote.messages import TOKEN
    from mafrt.environment.remote.server import EnvironmentServer, ServedEnv

    served = [
        ServedEnv(name, env, held_out, identity_of(env, differing), asked.env_timeout_s)
        for name, env, held_out, differing in environments(asked)
    ]
    token = os.environ.get(TOKEN) or None
    server = EnvironmentServer(served, host=asked.host, port=asked.port, token=token, max_sessions=asked.max_sessions)
    for each in served:
        print(f"{each.name} at grpc://{server.address}/{each.name}; Ctrl-C ends it.", flush=True)
    try:
        with contextlib.suppress(KeyboardInterrupt):
            server.wait()
    finally:
        server.close()
        for each in served:
            each.env.close()
    return 0


def environments(asked: ServeEnvSettings) -> list[tuple[str, Session, Session | None, dict[str, Any]]]:
    """Name, environment, held-out instances and their own arguments, of each that is to be served.

    Raises:
        ConfigError: two have one name, or arguments name none of them.
    """
    assert asked.env is not None
    paths = {path.rpartition(":")[2]: path for path in map(str.strip, asked.env.split(","))}
    if len(paths) < asked.env.count(",") + 1:
        raise ConfigError(f"env is {asked.env!r}, which names two environments alike; serve one of them elsewhere.")
    given, differing = (env_arguments(getattr(asked, name), name) for name in ("env_kwargs", "eval_env_kwargs"))
    if len(paths) == 1:
        given, differing = (dict.fromkeys(paths, arguments) for arguments in (given, differing))
    for name, arguments in [*given.items(), *differing.items()]:
        if name not in paths or not isinstance(arguments, dict):
            raise ConfigError(
                f"env_kwargs holds {name!r}; of several environments it is one JSON object with arguments of "
                f"{', '.join(paths)}, as in {json.dumps({next(iter(paths)): {'size': 4}})!r}."
            )
    made = []
    for name, path in paths.items():
        kwargs = given.get(name, {})
        # Worker processes are forked here, before the server's threads begin.
        env = guarded(make_env(path, **kwargs), asked.env_timeout_s)
        # The server has both, so that a trainer elsewhere can evaluate on held-out tasks without the code.
        # A trainer chooses its best weights by them, so they are not the test's unless those are asked for.
        other = {**held_out_of(env, "validation"), **differing.get(name, {})}
        held_out = guarded(make_env(path, **{**kwargs, **other}), asked.env_timeout_s) if other else None
        made.append((name, env, held_out, other))
    return made


def identity_of(env: Any, differing: dict[str, Any]) -> str:
    """16 hex digits of class, arguments and source: equal on servers that may take each other's episodes."""
    record = environment_record(env)
    arguments = repr(env.unwrapped._init_args) if record.arguments is None else record.arguments
    # The source belongs to it: a resumed run must notice that the environment has changed.
    known = [record.path, arguments, differing, record.sha256 or __version__]
    return hashlib.sha256(json.dumps(known, sort_keys=True, default=str).encode()).hexdigest()[:16]


main = partial(run_main, serve)

if __name__ == "__main__":
    sys.exit(main())
