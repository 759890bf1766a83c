"""Environments of `verifiers` (Prime Intellect), an adapter an agent; the package has an interpreter of its own."""

from mafrt.envs.verifiers.env import VerifiersEnv

__all__ = ["VerifiersEnv"]
