"""Workflows for math problems: order of turns and observations."""
