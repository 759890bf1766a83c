"""Asks model.pkl for predictions on X_test.pkl and writes them as plain arrays. Runs in the sandbox only.

They are scored in another execution (`predictions.py`), which has the arrays and not the model.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from reading import Refused, read


def plain(values: Any) -> Any:
    """An array that can be saved without pickling: numbers as they are, anything else as text."""
    import numpy as np

    array = np.asarray(values)
    return array if array.dtype.kind in "biuf" else array.astype(str)


def main() -> None:
    import numpy as np

    try:
        features, model = read("X_test.pkl"), read("model.pkl", model=True)
        try:
            guess = model.predict(features)
        except (ValueError, TypeError, KeyError, AttributeError):
            guess = model.predict(np.asarray(features))
        np.save("guess.npy", plain(guess), allow_pickle=False)
        if hasattr(model, "predict_proba"):
            np.save("chances.npy", plain(model.predict_proba(np.asarray(features))), allow_pickle=False)
    except Refused as refused:
        Path("error.txt").write_text(f"its pickle asks for {refused}, which no model of a known package needs")
    except Exception as error:  # the model may raise anything, and this program reports it
        Path("error.txt").write_text(f"{type(error).__name__}: {str(error)[:200]}")
