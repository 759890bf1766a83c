"""Imports transformers' `generation` package without scikit-learn.

Every model class of transformers imports that package, and that imports scikit-learn, SciPy and pandas where they are
installed, for one curve of a decoding method that mafrt does not use. This is a quarter of the processor time until a
base is loaded.
"""

from __future__ import annotations

import sys
from typing import Any

PART = "transformers.generation.candidate_generator"
"""The module that draws the curve."""


def import_generation() -> None:
    """Import `PART` as if scikit-learn were not installed, then let it import scikit-learn when the curve is drawn.

    Does nothing if the module is there already, or if transformers does not ask about scikit-learn.
    """
    from transformers import utils

    if PART in sys.modules or not hasattr(utils, "is_sklearn_available"):
        return
    installed = utils.is_sklearn_available
    utils.is_sklearn_available = lambda: False
    try:
        from transformers.generation import candidate_generator as part
    finally:
        utils.is_sklearn_available = installed
    module: Any = part
    module.is_sklearn_available = installed
    if installed():
        module.roc_curve = _roc_curve


def _roc_curve(*args: Any, **words: Any) -> Any:
    from sklearn.metrics import roc_curve

    return roc_curve(*args, **words)
