"""`list_files`, `read_file`, `write_file`: text files of an episode's workspace.

The workspace is held in memory and exists for one episode. There is no disk behind it, so that no path, link or device
can lead out of it; paths that try to are refused all the same.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from mafrt.core.errors import ConfigError
from mafrt.core.reading import read_file
from mafrt.core.text import readable
from mafrt.envs.tools.base import Files, Tool, Toolbox, parameters
from mafrt.envs.tools.failed import Failed
from mafrt.sandbox.inside.names import fault
from mafrt.sandbox.zygote_sandbox import unfit

QUOTA_MIB = 16
MOST_FILES = 64
LONGEST_PATH = 200
_PATH = {"path": ("string", "path within the workspace")}


def inside(path: str) -> str:
    """A path within the workspace, in its plain form. Raises Failed for one that leads elsewhere."""
    parts = PurePosixPath(path).parts
    # A name that no sandbox takes would end every later program of the episode.
    odd = "\\" in path or len(path) > LONGEST_PATH or path.startswith("~")
    if odd or fault("/".join(parts)):
        raise Failed(f"{path[:80]!r} is no path within the workspace; give one such as notes/plan.txt.")
    return "/".join(parts)


def _list(arguments: Mapping[str, Any], toolbox: Toolbox) -> str:
    lines = [f"{name} ({len(content)} bytes)" for name, content in sorted(toolbox.files.items())]
    return "\n".join(lines) or "The workspace is empty."


def _read(arguments: Mapping[str, Any], toolbox: Toolbox) -> str:
    path = inside(arguments["path"])
    if path not in toolbox.files:
        raise Failed(f"there is no file {path!r}; list_files names those that are there.")
    return readable(toolbox.files[path])


def _write(arguments: Mapping[str, Any], toolbox: Toolbox) -> str:
    path, content = inside(arguments["path"]), arguments["content"].encode("utf-8", "replace")
    changed = {**toolbox.files, path: content}
    keep(changed)
    if wrong := unfit("", changed):  # no program could run with such files, and none can be taken away again
        raise Failed(f"{path} cannot be written: {wrong}.")
    toolbox.files = changed
    return f"{len(content)} bytes written to {path}."


def keep(files: Files) -> None:
    """Raises Failed if the files are too many or too large."""
    if len(files) > MOST_FILES:
        raise Failed(f"the workspace holds at most {MOST_FILES} files.")
    if sum(map(len, files.values())) > QUOTA_MIB * 2**20:
        raise Failed(f"the workspace holds at most {QUOTA_MIB} MiB.")


def file_tools() -> list[Tool]:
    """The three tools."""
    content = {**_PATH, "content": ("string", "the new content")}
    return [
        Tool("list_files", "List the files of the workspace.", parameters({}), _list, True),
        Tool("read_file", "Read a text file of the workspace.", parameters(_PATH), _read, True),
        Tool(
            "write_file",
            "Write a text file of the workspace, in place of an earlier one.",
            parameters(content),
            _write,
            True,
        ),
    ]


def read_folder(folder: str) -> dict[str, bytes]:
    """The regular files below a folder, links left out. Raises ConfigError for a folder that cannot be used."""
    root, files = Path(folder).expanduser(), {}
    if not root.is_dir():
        raise ConfigError(f"files:{folder}: there is no such folder.")
    for place, _, names in os.walk(root):
        for name in sorted(names):
            path = Path(place) / name
            if path.is_symlink() or not path.is_file():
                continue
            try:
                files[path.relative_to(root).as_posix()] = read_file(path, most_mib=QUOTA_MIB)
                keep(files)
            except (OSError, Failed) as error:
                raise ConfigError(f"files:{folder}: {path.name} cannot be used ({error}).") from error
    return files
