"""Checkpoints, run folders, metrics, and what `--load_path` may name."""
