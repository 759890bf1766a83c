"""Baselines of an evaluation: how far the team's start gets on the same tasks without reinforcement learning."""
