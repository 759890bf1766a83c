"""Benchmarks, one file each: `mafrt bench NAME` calls `run(argv) -> dict` of module NAME."""
