"""Environments of OpenEnv, on their servers."""

from __future__ import annotations

from mafrt.envs.openenv.env import OpenEnv

__all__ = ["OpenEnv"]
