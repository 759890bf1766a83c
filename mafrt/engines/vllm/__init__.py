"""Sampling through vLLM, in process or on servers."""
