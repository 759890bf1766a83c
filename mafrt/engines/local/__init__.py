"""Sampling in process, on the shared base itself."""
