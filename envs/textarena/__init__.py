"""Games of the package `textarena`, a seat for each agent: `--env textarena:NAME-v0`."""

from mafrt.envs.textarena.env import TextArena

__all__ = ["TextArena"]
