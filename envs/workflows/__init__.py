"""Workflows for every task source: order of turns and observations."""
