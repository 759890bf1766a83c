"""Kernels for CPUs, in C: compiled by the machine's own compiler when they are first needed."""
