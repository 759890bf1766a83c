"""Tools of MCP servers, by the official client: programs over stdio, and servers over streamable HTTP.

Servers are named in a file in the usual form:

    {"mcpServers": {"time": {"command": "mcp-server-time", "args": ["--local-timezone", "UTC"]},
                    "web": {"url": "http://127.0.0.1:9000/mcp"}}}

A server is connected once in each process and shared by all episodes; it is connected again after it failed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import sys
import threading
from collections.abc import AsyncIterator, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mafrt.config import permission
from mafrt.config.schema import unknown
from mafrt.core import reading
from mafrt.core.errors import ConfigError
from mafrt.core.extras import package
from mafrt.core.http_bounds import bounded
from mafrt.core.http_request import is_http_address
from mafrt.core.text import brief, error_line, has_controls
from mafrt.envs.tools.base import Tool, Toolbox
from mafrt.envs.tools.failed import Failed

MOST_TOOLS = 128
"""Of one file of servers: all are in every prompt."""
MOST_ANSWERED, MOST_PARTS = 100_000, 100
"""Characters and parts of an answer that are read."""
MOST_LINE = 4 * 2**20
"""Bytes of one message; the client keeps a program's line, and a body of JSON over HTTP, whole however long it is"""
TIMEOUT_S = 60.0
"""Of one call, and of connecting."""
LONGEST_S = 3600
_BOUNDED = Path(__file__).with_name("_bounded_lines.py")
_FIELDS = ("command", "args", "env", "url", "timeout_s")


@dataclass(frozen=True)
class ServerSpec:
    """One entry of the file."""

    name: str
    command: str | None = None
    args: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    url: str | None = None
    timeout_s: float = TIMEOUT_S


class McpServer:
    """A connection to a server, in an event loop of its own thread."""

    def __init__(self, spec: ServerSpec) -> None:
        self.spec = spec
        self._lock = threading.Lock()
        self._process: int | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._client: Any = None
        self._ended: asyncio.Event | None = None

    def tools(self) -> list[Any]:
        """The tools that the server offers, on all its pages; a few more than `MOST_TOOLS` at most. Raises Failed."""
        offered: list[Any] = []
        seen: set[str | None] = {None}
        page = self._ask(lambda client: client.list_tools())
        while True:
            offered += page.tools
            if (cursor := page.next_cursor) in seen or len(offered) > MOST_TOOLS or len(seen) > MOST_TOOLS:
                return offered
            seen.add(cursor)
            page = self._ask(lambda client, cursor=cursor: client.list_tools(cursor=cursor))

    def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """The texts of a tool's answer. Raises Failed if the server says that it failed, hangs, or is gone."""
        result = self._ask(lambda client: client.call_tool(name, dict(arguments)))
        parts = [
            getattr(part, "text", None)
            or getattr(getattr(part, "resource", None), "text", None)
            or f"[{getattr(part, 'type', 'content')}]"
            for part in result.content[:MOST_PARTS]
        ]
        text = "\n".join(str(part)[:MOST_ANSWERED] for part in parts)[:MOST_ANSWERED]
        if result.is_error:
            raise Failed(text or f"the server {self.spec.name} reports an error.")
        return text or "The tool answered nothing."

    def close(self) -> None:
        """End the connection. May be called more than once."""
        with self._lock:
            self._drop()

    def _ask(self, question: Any) -> Any:
        name, timeout_s = self.spec.name, self.spec.timeout_s
        with self._lock:
            loop, client = self._connected()
            asked = question(client)
            try:
                future = asyncio.run_coroutine_threadsafe(asked, loop)
            except RuntimeError:  # the loop ended this moment, with its connection
                asked.close()
                self._client = self._loop = self._ended = None
                raise Failed(f"the server {name} failed (its connection ended).") from None
        try:
            return future.result(timeout_s)
        except FutureTimeoutError:
            future.cancel()
            why = f"the server {name} did not answer within {timeout_s:g} s."
        except Exception as error:
            if type(error).__name__ == "MCPError" and "onnection closed" not in str(error):
                # The server's own answer: the connection is sound.
                raise Failed(f"the server {name} refused the call ({error_line(error)}).") from error
            why = f"the server {name} failed ({type(error).__name__}: {error_line(error)})."
        with self._lock:
            if self._client is client:
                self._drop()
        raise Failed(why)

    def _connected(self) -> tuple[asyncio.AbstractEventLoop, Any]:
        """Loop and client of this process; threads do not survive a fork."""
        # The loop ends by itself when a server over HTTP is gone.
        if self._client is None or self._loop is None or self._loop.is_closed() or self._process != os.getpid():
            ready: Future[Any] = Future()
            threading.Thread(target=self._serve, args=(ready,), daemon=True, name="mafrt-mcp").start()
            try:
                self._loop, self._client, self._ended = ready.result(self.spec.timeout_s)
            except FutureTimeoutError:
                ready.cancel()
                raise Failed(f"the server {self.spec.name} did not answer within {self.spec.timeout_s:g} s.") from None
            except Exception as error:
                cause: BaseException = error
                while isinstance(cause, BaseExceptionGroup):
                    cause = cause.exceptions[0]
                why = f"{type(cause).__name__}: {error_line(cause)}"
                raise Failed(f"the server {self.spec.name} cannot be reached ({why}).") from error
            self._process = os.getpid()
        assert self._loop is not None
        return self._loop, self._client

    def _drop(self) -> None:
        if self._loop is not None and self._ended is not None and self._process == os.getpid():
            with contextlib.suppress(RuntimeError):  # it has ended by itself
                self._loop.call_soon_threadsafe(self._ended.set)
        self._client = self._loop = self._ended = None

    def _serve(self, ready: Future[Any]) -> None:
        async def run() -> None:
            ended = asyncio.Event()
            async with contextlib.AsyncExitStack() as stack:
                async with asyncio.timeout(self.spec.timeout_s):  # or the thread stays for as long as the server drips
                    client = await stack.enter_async_context(_client(self.spec))
                # The client would hold structured answers to the server's own schema, in this process: a pattern of
                # that can take for ever, and hold all threads up. They are not read here, only an answer's texts.
                client.session.validate_tool_result = _taken
                if ready.set_running_or_notify_cancel():
                    ready.set_result((asyncio.get_running_loop(), client, ended))
                    await ended.wait()

        try:
            asyncio.run(run())
        except BaseException as error:  # the thread ends here in any case; the caller gets the reason
            if not ready.done():
                ready.set_exception(error)


async def _taken(name: str, result: Any) -> None:
    """In place of the client's `validate_tool_result`."""


def _client(spec: ServerSpec) -> Any:
    from mcp import Client, StdioServerParameters
    from mcp.client.stdio import stdio_client

    # What goes wrong is the answer to the call; the client's own lines of it come with tracebacks.
    logging.getLogger("mcp.client").setLevel(logging.CRITICAL)

    if spec.url is not None:
        return Client(_over_http(spec.url))
    assert spec.command is not None
    if shutil.which(spec.command, path=spec.env.get("PATH")) is None:
        raise FileNotFoundError(f"there is no command {spec.command!r}")
    bounded = ["-I", "-S", str(_BOUNDED), str(MOST_LINE), spec.command, *spec.args]
    parameters = StdioServerParameters(command=sys.executable, args=bounded, env=dict(spec.env) or None)
    return Client(stdio_client(parameters, errlog=open(os.devnull, "w")))


@contextlib.asynccontextmanager
async def _over_http(url: str) -> AsyncIterator[Any]:
    """The client's own transport, with every body bounded."""
    from mcp.client.streamable_http import streamable_http_client
    from mcp.shared._httpx_utils import create_mcp_http_client

    async with create_mcp_http_client() as client:
        bounded(client, MOST_LINE, unbounded="text/event-stream")  # the client bounds each event itself
        async with streamable_http_client(url, http_client=client, max_sse_event_size=MOST_LINE) as streams:
            yield streams


def read_servers(source: str) -> list[ServerSpec]:
    """The servers that a file names. Raises ConfigError with the fault."""
    if not permission.is_free(f"mcp:{source}") and (run := permission.run_of(source)) is not None:
        raise ConfigError(f"mcp:{source} lies inside the run {run} and names commands; {permission.REMEDY}.")
    try:
        data = reading.parse_json(reading.read_text(source))
    except (OSError, ValueError) as error:
        raise ConfigError(f"mcp:{source} cannot be read ({error_line(error)}); give a JSON file.") from error
    servers = data.get("mcpServers") if isinstance(data, dict) else None
    if not isinstance(servers, dict) or not servers:
        raise ConfigError(f'mcp:{source}: expected {{"mcpServers": {{name: ...}}}}, found {brief(data)}.')
    return [_spec(source, name, entry) for name, entry in servers.items()]


def _spec(source: str, name: str, entry: Any) -> ServerSpec:
    where = f"mcp:{source}, server {name!r}"
    if not isinstance(entry, dict) or ("command" in entry) == ("url" in entry):
        raise ConfigError(f"{where}: expected an object with either 'command' or 'url', found {brief(entry)}.")
    if "url" in entry and not (isinstance(entry["url"], str) and is_http_address(entry["url"])):
        raise ConfigError(
            f"{where}: url is {brief(entry['url'])}; expected an address such as http://127.0.0.1:9000/mcp."
        )
    for key in entry:
        if key not in _FIELDS:
            raise ConfigError(f"{where}: {unknown('key', str(key), _FIELDS)}")
    args, env, timeout_s = entry.get("args", []), entry.get("env", {}), entry.get("timeout_s", TIMEOUT_S)
    texts = [entry.get("command", ""), entry.get("url", "")]
    whole = isinstance(args, list) and isinstance(env, dict) and type(timeout_s) in (int, float)
    if has_controls(name) or not 0 < len(name) <= 128:
        raise ConfigError(f"mcp:{source}: a server is called {brief(name)}; expected at most 128 plain characters.")
    if (
        not whole
        or not 0 < timeout_s <= LONGEST_S
        or not all(isinstance(text, str) for text in [*texts, *args, *env.values()])
    ):
        raise ConfigError(f"{where}: expected texts, args as a list, env as an object, timeout_s up to {LONGEST_S}.")
    return ServerSpec(name, entry.get("command"), tuple(args), env, entry.get("url"), float(timeout_s))


def server_tools(source: str) -> Sequence[Tool]:
    """The tools of all servers that a file names.

    Raises:
        ConfigError: a wrong file, or a server that cannot be reached now.
        MissingExtraError: the package mcp is missing.
    """
    specs = read_servers(source)
    package("an MCP server", "tools", "mcp")
    listed: list[Tool] = []
    for spec in specs:
        server = McpServer(spec)
        try:
            offered = server.tools()
        except Failed as failure:
            raise ConfigError(f"mcp:{source}: {failure}") from failure
        if not offered:
            raise ConfigError(f"mcp:{source}: the server {spec.name} offers no tools; leave it out.")
        if len(listed) + len(offered) > MOST_TOOLS:
            raise ConfigError(f"mcp:{source}: {len(offered)} tools of {spec.name}; at most {MOST_TOOLS} are taken.")
        listed += [_tool(server, each) for each in offered]
    return listed


def _tool(server: McpServer, offered: Any) -> Tool:
    def call(arguments: Mapping[str, Any], toolbox: Toolbox) -> str:
        return server.call(offered.name, arguments)

    schema = offered.input_schema if isinstance(offered.input_schema, Mapping) else {"type": "object"}
    return Tool(str(offered.name), str(offered.description or ""), schema, call, True)
