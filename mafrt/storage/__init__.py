"""Checkpoints, run folders, metrics, and the resolution of `--load_path`."""
