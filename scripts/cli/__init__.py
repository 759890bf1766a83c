"""Shared code of the command-line scripts."""
