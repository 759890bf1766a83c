"""Reading files that a user names: regular files of a bounded size, and YAML and JSON without surprises.

A device such as /dev/zero never ends, opening a pipe blocks, duplicate keys hide one of two values, and deep nesting
overflows the stack of a parser. Each becomes an ordinary error here, of the kind that callers handle anyway.
"""

from __future__ import annotations

import errno
import gzip
import io
import json
import os
import re
import stat
import tempfile
import zlib
from collections.abc import Hashable, Iterator
from pathlib import Path
from typing import IO, Any

from mafrt.core.text import has_controls

MOST_MIB = 64
"""Largest file that `read_file` takes, unless told otherwise."""

LONGEST_LINE_MIB = 256
"""Longest line of `lines_of`: a file that lost its line breaks, or a sparse one, would be read into memory whole."""

TOO_LONG = "it holds a number of more than 4300 digits"

DEEPEST = 100
"""Levels of nesting that `parse_yaml` takes."""
MOST_REPEATED = 10_000
"""Nodes that the aliases of a YAML file may repeat, all together."""


def read_file(path: str | os.PathLike[str], *, most_mib: float = MOST_MIB) -> bytes:
    """The content of a regular file.

    Raises:
        OSError: it cannot be read, is a folder, device or pipe, or is larger than `most_mib`; `strerror` says so.
    """
    # Without O_NONBLOCK, opening a pipe that nothing writes to waits for ever.
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0))
    mode, most = os.fstat(descriptor).st_mode, int(most_mib * 2**20)
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        problem = "is a folder" if stat.S_ISDIR(mode) else "is a device or a pipe, not a file"
        raise OSError(errno.EINVAL, problem, str(path))
    with open(descriptor, "rb") as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise OSError(errno.EFBIG, f"is larger than {most_mib:g} MiB", str(path))
    return content


def unpacked(content: bytes, *, most_mib: float = MOST_MIB) -> bytes:
    """The content of a file that gzip may have packed. Raises OSError, whose `strerror` says what to do."""
    if not content.startswith(b"\x1f\x8b"):
        return content
    most = int(most_mib * 2**20)
    try:
        with gzip.open(io.BytesIO(content)) as file:
            content = file.read(most + 1)
    except (EOFError, OSError, zlib.error) as error:
        raise OSError(errno.EINVAL, f"cannot be unpacked by gzip ({error}); fetch it again") from error
    if len(content) > most:
        raise OSError(errno.EFBIG, f"is larger than {most_mib:g} MiB when unpacked; give a part of it")
    return content


def read_text(path: str | os.PathLike[str], *, most_mib: float = MOST_MIB) -> str:
    """The text of a regular file in UTF-8, without a byte order mark.

    Raises:
        OSError: as `read_file`.
        UnicodeDecodeError: it is not UTF-8.
    """
    return read_file(path, most_mib=most_mib).decode("utf-8-sig")


def lines_of(file: IO[bytes] | gzip.GzipFile) -> Iterator[bytes]:
    """The lines of a file of records, with their ends. Raises OSError for one beyond `LONGEST_LINE_MIB`."""
    most = LONGEST_LINE_MIB * 2**20
    while line := file.readline(most + 1):
        if len(line) > most:
            raise OSError(errno.EFBIG, f"holds a line of more than {LONGEST_LINE_MIB} MiB")
        yield line


def read_list(path: str | os.PathLike[str]) -> list[str]:
    """The lines of a file, without empty ones and comments (`#` to the end of a line). Raises as `read_text`."""
    lines = (re.sub(r"(^|\s)#.*", "", line).strip() for line in read_text(path).splitlines())
    return [line for line in lines if line]


def parse_json(text: str | bytes) -> Any:
    """`text` as JSON.

    Raises:
        ValueError: it is not JSON, names a key twice, or is nested too deeply.
    """
    try:
        return json.loads(text, object_pairs_hook=_without_duplicates)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except json.JSONDecodeError:
        raise
    except ValueError as error:
        raise ValueError(TOO_LONG if "set_int_max_str_digits" in str(error) else str(error)) from None


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"the key {twice!r} appears twice")
    return made


def parse_yaml(text: str) -> Any:
    """`text` as YAML, without tags that build objects.

    Raises:
        yaml.YAMLError: it is not YAML, names a key twice, is nested deeper than `DEEPEST` levels, or its aliases repeat
            more than `MOST_REPEATED` nodes.
    """
    import yaml

    class Loader(yaml.SafeLoader):
        """Counts levels and nodes, and refuses duplicate keys."""

        level = written = repeated = 0

        def compose_node(self, parent: Any, index: Any) -> Any:
            self.level += 1
            if self.level > DEEPEST:
                raise yaml.YAMLError(f"it is nested deeper than {DEEPEST} levels")
            alias = self.check_event(yaml.events.AliasEvent)
            before = self.written + self.repeated
            try:
                node = super().compose_node(parent, index)
            finally:
                self.level -= 1
            if not alias:
                self.written += 1
                sizes[node] = self.written + self.repeated - before
            elif node not in sizes:
                raise yaml.YAMLError("an alias stands within what it names")
            else:
                # Nine lines of nine aliases each are nine to the ninth nodes for whoever walks them.
                self.repeated += sizes[node]
                if self.repeated > MOST_REPEATED:
                    raise yaml.YAMLError(f"its aliases repeat more than {MOST_REPEATED} values")
            return node

        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            seen: set[Hashable] = set()
            for key_node, _ in node.value:
                if key_node.tag == "tag:yaml.org,2002:merge":
                    continue
                key = self.construct_object(key_node, deep=True)
                if isinstance(key, Hashable):
                    if key in seen:
                        line = key_node.start_mark.line + 1
                        raise yaml.YAMLError(f"the key {key!r} appears twice, again in line {line}")
                    seen.add(key)
            return super().construct_mapping(node, deep)

        def construct_number(self, node: Any) -> Any:
            """A number; text for what YAML 1.1 reads in base 60 or 8, such as 1:30 and 010."""
            text: str = node.value
            if ":" in text or (text.lstrip("+-").startswith("0") and text.lstrip("+-0").isdigit()):
                return text
            whole = node.tag == "tag:yaml.org,2002:int"
            try:
                return self.construct_yaml_int(node) if whole else self.construct_yaml_float(node)
            except ValueError:
                raise yaml.YAMLError(f"{TOO_LONG}, in line {node.start_mark.line + 1}") from None

    for kind in ("int", "float"):
        Loader.add_constructor(f"tag:yaml.org,2002:{kind}", Loader.construct_number)

    sizes: dict[Any, int] = {}
    loader = Loader(text)
    try:
        return loader.get_single_data()
    except RecursionError:
        raise yaml.YAMLError("it is nested too deeply") from None
    finally:
        loader.dispose()


def is_writable(folder: str | os.PathLike[str]) -> str | None:
    """None if a file can be made in `folder`, which need not exist yet; else the reason why not."""
    path = Path(folder).expanduser().absolute()
    if has_controls(str(folder)):
        return "its name holds control characters"
    while not path.exists():
        if path.is_symlink():
            return f"{path} is a link that leads nowhere"
        path = path.parent
    if not path.is_dir():
        return f"{path} is a file"
    try:
        with tempfile.TemporaryFile(dir=path):
            return None
    except OSError as error:
        return f"{path}: {error.strerror or error}"


def is_file_writable(file: Path) -> str | None:
    """None if `file` can be written, in a folder that exists; else the reason why not."""
    if file.is_dir():
        return "it is a folder"
    if file.exists() and not file.is_file():  # root would put a file in the place of /dev/null
        return "it is a device or a pipe"
    if not file.parent.is_dir():
        return f"there is no {file.parent}"
    return "its name holds control characters" if has_controls(file.name) else is_writable(file.parent)
