"""Environments and an engine in, episodes out."""
