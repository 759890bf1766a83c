"""A base loads without scikit-learn, and transformers still finds it when it needs it."""

from __future__ import annotations

import importlib.util

import pytest
from helpers_warm import run_python

LOADS = """
import sys
from mafrt import SharedBase
SharedBase.load("teaching-base")
print("sklearn" in sys.modules, "pandas" in sys.modules)
from transformers.generation import candidate_generator
from transformers.utils import is_sklearn_available
print(is_sklearn_available() and candidate_generator.is_sklearn_available())
print([list(map(float, part)) for part in candidate_generator.roc_curve([0, 1], [0.2, 0.7])])
"""


@pytest.mark.slow
@pytest.mark.ci
def test_a_base_loads_without_scikit_learn_which_is_imported_when_it_is_asked_for(tmp_path):
    if importlib.util.find_spec("sklearn") is None:
        pytest.skip("scikit-learn is not installed")
    (tmp_path / "loads.py").write_text(LOADS)
    done = run_python(tmp_path / "loads.py")
    # One negative at .2 below one positive at .7: from (0, 0) up to (0, 1) at .7, then to (1, 1) at .2.
    assert done.stdout.splitlines() == ["False False", "True", "[[0.0, 0.0, 1.0], [0.0, 1.0, 1.0], [inf, 0.7, 0.2]]"], (
        done.stdout + done.stderr
    )
