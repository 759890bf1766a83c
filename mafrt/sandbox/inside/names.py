"""Names of files in the workdir: relative, plain, and inside it."""

from __future__ import annotations

import re

_CONTROLS = re.compile("[\x00-\x1f\x7f-\x9f]")
MAX_CHARS = 255
MAX_PARTS = 16


def fault(name: str) -> str | None:
    """Why `name` cannot name a file of the workdir, or None."""
    if not name or _CONTROLS.search(name):
        return "an empty name, or one with control characters"
    if name.startswith("/"):
        return "an absolute path; only files of the workdir can be named"
    parts = name.split("/")
    if ".." in parts:
        return "a path that leads out of the workdir"
    if "" in parts or "." in parts or len(parts) > MAX_PARTS:
        return "not a plain relative path"
    try:
        encoded = [part.encode() for part in parts]
    except UnicodeEncodeError:
        return "not valid UTF-8"
    if any(len(part) > MAX_CHARS for part in encoded):
        return f"longer than {MAX_CHARS} bytes"
    return None
