"""One check of everything that runs on a GPU: parity first, then learning, speed, memory and kernels.

`bash scripts/gpu_check.sh` starts it on a machine with a GPU; `mafrt bench gpu --device cpu --small` runs the same
code on a CPU, with models small enough for a test.
"""
