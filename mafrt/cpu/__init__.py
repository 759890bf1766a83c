"""Everything made for CPUs: kernels in C, compiled by the machine's own compiler when they are first needed.

`mafrt.models.compute` imports `compute` from here. Without this folder, or without a compiler, the reference in torch
computes, with equal results up to rounding.
"""
