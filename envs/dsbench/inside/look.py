"""Describes files of a workspace. Runs in the sandbox, with no agent's code beside it.

Tables are unpickled with a list of exact names (`allowed.py`), each in an execution of its own, so that a file can at
most lie about itself: a pickle may change attributes of the classes that it names. Models are not unpickled at all: the
names that their pickle asks for are read off its opcodes. So models and CSV files may share an execution.
"""

from __future__ import annotations

import os
import pickle
import pickletools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from reading import Refused, read

NAMES = 40
MOST_CELLS = 20_000_000
"""Cells of a CSV file that is read, empty ones included."""


def table(value: Any) -> dict[str, Any]:
    """Rows, columns, and their faults."""
    import numpy as np
    import pandas as pd

    if isinstance(value, pd.Series):
        value = value.to_frame()
    if hasattr(value, "toarray") and hasattr(value, "shape"):
        return {"kind": "matrix", "rows": int(value.shape[0]), "columns": int(value.shape[1])}
    if isinstance(value, (list, tuple)):
        value = np.asarray(value, dtype=object)
    if isinstance(value, np.ndarray):
        if value.ndim > 2 or value.ndim < 1:
            return {"kind": "array", "rows": int(value.shape[0]) if value.ndim else 0, "columns": int(value.ndim)}
        value = pd.DataFrame(value.reshape(len(value), -1)).infer_objects()
    if not isinstance(value, pd.DataFrame):
        return {"kind": type(value).__name__}
    words = [str(c) for c, kind in zip(value.columns, value.dtypes, strict=True) if not _numeric(kind)]
    return {
        "kind": "table",
        "rows": len(value),
        "columns": value.shape[1],
        "names": [str(name)[:60] for name in value.columns[:NAMES]],
        "missing": int(value.isna().sum().sum()),
        "words": [word[:60] for word in words[:NAMES]],
    }


def _numeric(kind: Any) -> bool:
    import pandas as pd

    return bool(pd.api.types.is_numeric_dtype(kind) or pd.api.types.is_bool_dtype(kind))


def model(path: str) -> dict[str, Any]:
    """The class of a pickled model and everything its pickle asks for, read without running it."""
    asked: list[str] = []
    texts: list[str] = []
    with open(path, "rb") as file:
        try:
            for opcode, argument, _ in pickletools.genops(file):
                if opcode.name == "GLOBAL":
                    asked.append(str(argument).replace(" ", "."))
                elif opcode.name == "STACK_GLOBAL":
                    asked.append(".".join(texts[-2:]))
                elif isinstance(argument, str):
                    texts = [*texts[-1:], argument]
                if len(asked) >= 500:
                    break
        except (ValueError, KeyError, IndexError, UnicodeDecodeError) as error:
            # joblib puts arrays between the opcodes; what came before them names the model.
            if not asked:
                return {"kind": "broken", "why": f"is no pickle ({str(error)[:80]})"}
    return {
        "kind": "model",
        "class": asked[0][:80] if asked else "",
        "asks": sorted({a.split(".")[0][:60] for a in asked})[:NAMES],
    }


def look(path: str, most_columns: int) -> dict[str, Any]:
    """Description of a file; `broken` with the reason if it cannot be read, or is a CSV file with more columns."""
    import pandas as pd

    try:
        if path.endswith(".csv"):
            with open(path, "rb") as file:
                if (commas := file.readline().count(b",")) >= most_columns:
                    return {"kind": "broken", "why": f"has {commas + 1} columns; at most {most_columns} are read"}
                # Counted before they are read: pandas takes a minute for a hundred million cells.
                cells = sum(part.count(b",") + part.count(b"\n") for part in iter(lambda: file.read(2**20), b""))
                if cells > MOST_CELLS:
                    return {"kind": "broken", "why": f"has {cells} cells; at most {MOST_CELLS} are read"}
            return table(pd.read_csv(path))
        if path.startswith("model") and path.endswith((".pkl", ".joblib")):
            return model(path)
        if path.endswith((".pkl", ".pickle", ".joblib")):
            return table(read(path))
        return {"kind": "file", "bytes": Path(path).stat().st_size}
    except Refused as refused:
        return {"kind": "broken", "why": f"asks for {refused}, which no table needs"}
    except (pickle.UnpicklingError, EOFError, ImportError, AttributeError, ValueError, TypeError) as error:
        return {"kind": "broken", "why": f"{type(error).__name__}: {str(error)[:120]}"}
    except (KeyError, IndexError, OSError, MemoryError, RecursionError, UnicodeError) as error:
        return {"kind": "broken", "why": f"{type(error).__name__}: {str(error)[:120]}"}


def look_at_all(names: Sequence[str], most_columns: int) -> dict[str, Any]:
    """`{"seen": [...]}`: for each place the description of the file `PLACE/NAME`, none of which is unpickled."""
    return {"seen": [_look_in(place, name, most_columns) for place, name in enumerate(names)]}


def _look_in(place: int, name: str, most_columns: int) -> dict[str, Any]:
    """In the file's own folder, since messages hold the path that was opened."""
    home = os.getcwd()
    os.chdir(str(place))
    try:
        return look(name, most_columns)
    finally:
        os.chdir(home)
