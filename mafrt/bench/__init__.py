"""Benchmarks, one file each: `python -m mafrt.bench NAME` runs `mafrt.bench.NAME.run(argv) -> dict`."""
