"""Tasks of one's own: a data file, a reward function, and any workflow."""

from mafrt.envs.tasks.env import RewardEnv

__all__ = ["RewardEnv"]
