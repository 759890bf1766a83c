"""Tests that need an optional package."""

from __future__ import annotations

from importlib.util import find_spec

import pytest


def need(*packages: str) -> None:
    """Skip the module that is being collected where a package is missing.

    Unlike `pytest.importorskip` it imports nothing: every process that runs tests collects all of them.
    """
    for name in packages:
        if find_spec(name) is None:
            pytest.skip(f"{name} is not installed", allow_module_level=True)
