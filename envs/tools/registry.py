"""Tools by name, as `--tools` takes them: calculator, python, files, files:FOLDER, search:FILE or URL, mcp:FILE."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mafrt.config.schema import unknown
from mafrt.core.errors import ConfigError, EnvError
from mafrt.environment.python_tool import PythonTool
from mafrt.envs.search.env import RetrieverChoice
from mafrt.envs.tools.base import Files, Tool, Toolbox, parameters
from mafrt.envs.tools.calculator import calculator
from mafrt.envs.tools.failed import Failed
from mafrt.envs.tools.files import MOST_FILES, QUOTA_MIB, file_tools, read_folder
from mafrt.envs.tools.mcp_servers import server_tools

TOPK = 3


def python(sandbox: str) -> Tool:
    """Runs programs in the sandbox, with the workspace's files. Raises SandboxError if there is no such sandbox."""
    runner = PythonTool(sandbox)

    def call(arguments: Mapping[str, Any], toolbox: Toolbox) -> str:
        ran, toolbox.files = runner.run_in_workspace(arguments["code"], toolbox.files, QUOTA_MIB, MOST_FILES)
        output = runner.says(ran) or "The program printed nothing."
        if ran.status != "ok":
            raise Failed(output)
        return output

    text = "Run a Python program and read what it prints. It sees the files of the workspace."
    return Tool("python", text, parameters({"code": ("string", "the program")}), call, True)


def search(source: str) -> Tool:
    """Searches a corpus file by BM25, or asks a retriever behind a URL. Raises ConfigError, DataError."""
    remote = source.startswith(("http://", "https://"))
    retriever = (RetrieverChoice(retriever=source) if remote else RetrieverChoice(corpus_path=source)).open(())

    def call(arguments: Mapping[str, Any], toolbox: Toolbox) -> str:
        try:
            passages = retriever.search(arguments["query"], arguments.get("topk", TOPK))
        except EnvError as error:
            raise Failed(f"{error}.") from error
        return "\n".join(passage.shown() for passage, _ in passages) or "Nothing was found."

    topk = {"type": "integer", "minimum": 1, "maximum": 20, "description": f"number of passages, {TOPK} by default"}
    schema = parameters({"query": ("string", "words to search for")})
    schema["properties"]["topk"] = topk
    return Tool("search", "Search for passages of text.", schema, call, bounded=remote)


def mcp(source: str) -> Sequence[Tool]:
    """The tools of MCP servers. Raises ConfigError for one that does not answer."""
    return server_tools(source)


MAKERS: Mapping[str, Callable[[str, str], Sequence[Tool]]] = {
    "calculator": lambda source, sandbox: [calculator()],
    "python": lambda source, sandbox: [python(sandbox)],
    "files": lambda source, sandbox: file_tools(),
    "search": lambda source, sandbox: [search(source)],
    "mcp": lambda source, sandbox: mcp(source),
}
"""Name of a tool -> its tools, from the text behind the colon and the sandbox."""
NEEDS = {"files": "files or files:FOLDER", "search": "search:FILE or search:URL", "mcp": "mcp:FILE"}


def make_toolbox(names: Sequence[str], sandbox: str = "bwrap") -> Toolbox:
    """The tools that are named.

    Raises:
        ConfigError: no such tool, or an MCP server or retriever that does not answer.
        SandboxError: there is no such sandbox here.
    """
    if not names:
        raise ConfigError(f"tools is empty; name some: {', '.join(MAKERS)}.")
    made = [named_tools(name, sandbox) for name in names]
    files = {path: content for _, contents in made for path, content in contents.items()}
    return Toolbox([tool for tools, _ in made for tool in tools], files)


def named_tools(name: str, sandbox: str = "bwrap") -> tuple[Sequence[Tool], Files]:
    """The tools of one name, such as `calculator` or `files:FOLDER`, and the files that they bring.

    Raises:
        ConfigError: no such tool, or an MCP server or retriever that does not answer.
        SandboxError: there is no such sandbox here.
    """
    kind, colon, source = name.partition(":")
    if kind not in MAKERS:
        raise ConfigError(unknown("tool", name, MAKERS))
    if bool(colon) and kind in ("calculator", "python"):
        raise ConfigError(f"the tool {kind} takes nothing behind a colon, found {name!r}.")
    if not source and (colon or kind in ("search", "mcp")):
        raise ConfigError(f"tools holds {name!r}; expected {NEEDS[kind]}.")
    return MAKERS[kind](source, sandbox), read_folder(source) if kind == "files" and source else {}
