"""Two questions about the same bytes in one execution, neither of which unpickles anything. Runs in the sandbox."""

from __future__ import annotations

from typing import Any

import look
import predictions

from mafrt.envs.dsbench.model_scoring import score_predictions
from mafrt.envs.dsbench.scoring import score_files


def of_predictions() -> dict[str, Any]:
    """`{"probe": ..., "score": ...}` of a model's predictions; no score where they are none."""
    probe = predictions.main()
    return {"probe": probe, "score": None if "error" in probe else score_predictions()}


def of_submission(most_columns: int) -> dict[str, Any]:
    """`{"score": ..., "look": ...}` of submission.csv."""
    return {"score": score_files(), "look": look.look("submission.csv", most_columns)}
