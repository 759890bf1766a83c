"""Measurements of mafrt, which are not installed.

Benchmarks, one file each: `mafrt bench NAME` calls `run(argv) -> dict` of module NAME. `reproduce/` repeats published
comparisons, `make_base` and `make_games_base` make the bases that ship: `python -m bench.make_base`.
"""
