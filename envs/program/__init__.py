"""Agents that already exist: a program of the user's that calls an OpenAI-compatible address, as an environment."""

from mafrt.envs.program.env import ProgramEnv

__all__ = ["ProgramEnv"]
