"""Asks model.pkl for predictions on X_test.pkl and writes what came of it to `.probe.json`. Runs in the sandbox only.

It says whether the Modeler's work can be used, whatever the Analyst makes of it.
"""

from __future__ import annotations

import json
from pathlib import Path


def main() -> None:
    import joblib
    import numpy as np
    import pandas as pd

    found: dict[str, object]
    try:
        features = pd.read_pickle("X_test.pkl")  # noqa: S301
        model = joblib.load("model.pkl")
        try:
            guess = np.asarray(model.predict(features))
        except (ValueError, TypeError, KeyError, AttributeError):
            guess = np.asarray(model.predict(np.asarray(features)))
        guess = guess.reshape(len(guess), -1)
        constant = bool(len(guess) > 1 and (guess == guess[0]).all())
        if constant and hasattr(model, "predict_proba"):
            chances = np.asarray(model.predict_proba(np.asarray(features)))
            constant = bool((chances == chances[..., :1, :]).all())
        found = {"rows": len(guess), "constant": constant}
    except Exception as error:  # whatever the model does, that is what is to be found out
        found = {"error": f"{type(error).__name__}: {str(error)[:200]}"}
    Path(".probe.json").write_text(json.dumps(found))
