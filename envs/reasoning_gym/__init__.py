"""Tasks of the package `reasoning-gym`, for every workflow: `--env reasoning_gym:NAME`."""

from mafrt.envs.reasoning_gym.env import ReasoningGym

__all__ = ["ReasoningGym"]
