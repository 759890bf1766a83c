"""Foreign bytes as text that can be shown, logged and tokenised."""

from __future__ import annotations

import re

_CONTROLS = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]")


def readable_name(name: str) -> str:
    """A file's name as it may be shown: control characters and halves of surrogate pairs read as U+FFFD."""
    return (
        _CONTROLS.sub("\ufffd", name.encode("utf-8", "replace").decode())
        .replace("\n", "\ufffd")
        .replace("\t", "\ufffd")
    )


def readable(data: bytes) -> str:
    """Decode UTF-8 with U+FFFD for invalid bytes and for control characters, which could drive a terminal."""
    return _CONTROLS.sub("\ufffd", data.decode("utf-8", "replace").replace("\r\n", "\n"))
