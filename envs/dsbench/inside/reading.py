"""Reads pickles of tables and models, in the sandbox: only exact names are resolved, so that nothing in them runs."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import pickle
import types
import zlib
from typing import IO, Any

from allowed import MODELS, TABLES, pairs

FOR_TABLES = pairs(TABLES)
FOR_MODELS = pairs(TABLES, MODELS)


class Refused(Exception):
    """The pickle asks for something that no table or model needs."""


def read(path: str, model: bool = False) -> Any:
    """The object in a file of pickle or joblib, compressed or not. Raises Refused with the name it asks for."""
    from joblib import numpy_pickle

    allowed = FOR_MODELS if model else FOR_TABLES

    def find(super_find: Any, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):
            return _zone
        if (module, name) not in allowed:
            raise Refused(f"{module}.{name}")
        return super_find(module, name)

    class Careful(numpy_pickle.NumpyUnpickler):
        def find_class(self, module: str, name: str) -> Any:
            return find(super().find_class, module, name)

    class Plain(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            return find(super().find_class, module, name)

    # joblib reads arrays of objects by a `pickle.load` of its own, which knows no limits.
    plain_load = {"load": lambda file, **_: Plain(file).load()}
    numpy_pickle.pickle = types.SimpleNamespace(**{**vars(pickle), **plain_load})
    with open(path, "rb") as file:
        opened = _decompressed(file)
        return Careful(path, opened, ensure_native_byte_order=True).load()


def _zone(owner: Any, name: str) -> Any:
    """Time zones are pickled as `getattr(ZoneInfo, "_unpickle")`."""
    from zoneinfo import ZoneInfo

    if owner is not ZoneInfo or name != "_unpickle":
        raise Refused("builtins.getattr")
    return ZoneInfo._unpickle  # type: ignore[attr-defined]


def _decompressed(file: IO[bytes]) -> IO[bytes]:
    start = file.read(6)
    file.seek(0)
    if start.startswith(b"\x1f\x8b"):
        return gzip.open(file)  # type: ignore[return-value]
    if start.startswith(b"BZh"):
        return bz2.open(file)
    if start.startswith(b"\xfd7zXZ"):
        return lzma.open(file)
    if start[:1] == b"\x78":
        return io.BytesIO(zlib.decompress(file.read()))
    return file
