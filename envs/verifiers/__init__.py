"""Environments of `verifiers` (Prime Intellect), each agent with its own adapter; the package has its own interpreter."""

from mafrt.envs.verifiers.env import VerifiersEnv

__all__ = ["VerifiersEnv"]
