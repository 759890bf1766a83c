"""Runs code that a model wrote, away from the trainer. docs/sandbox.md lists the guarantees of each tier."""

from __future__ import annotations

from mafrt.core.errors import SandboxError
from mafrt.sandbox.factory import open_sandbox, shared_sandbox, tiers_in_use
from mafrt.sandbox.types import EVERYTHING, Execution, Sandbox, Status
from mafrt.sandbox.workspace import Workspace

__all__ = [
    "EVERYTHING",
    "Execution",
    "Sandbox",
    "SandboxError",
    "Status",
    "Workspace",
    "open_sandbox",
    "shared_sandbox",
    "tiers_in_use",
]
