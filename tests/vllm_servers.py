"""vLLM servers that share one import of vLLM, which is most of their start: each is a fork, and so is its engine.

Usage: python vllm_servers.py FOLDER PORT [PORT ...] -- WORDS FOR EACH SERVER. Prints a process id per port; every
server leads a process group of its own, and writes FOLDER/PORT.log. Ends after its servers.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import runpy
import sys
from pathlib import Path
from typing import NoReturn

SERVER = "vllm.entrypoints.openai.api_server"
IMPORTED = (SERVER, "vllm.v1.engine.core", "vllm.v1.worker.cpu_worker")
"""Modules of a server and of its engine; none of them starts a thread, so a fork of them is whole."""


def serve(log: Path, words: list[str]) -> NoReturn:
    os.setsid()
    with open(log, "wb") as out:
        os.dup2(out.fileno(), 1)
        os.dup2(out.fileno(), 2)
    # On CPUs vLLM asks for an engine process that is spawned, which imports everything once more.
    context = multiprocessing.get_context("fork")
    multiprocessing.get_context = lambda method=None: context  # type: ignore[assignment]
    del sys.modules[SERVER]
    sys.argv = [SERVER, *words]
    runpy.run_module(SERVER, run_name="__main__")
    os._exit(0)


def main(folder: Path, ports: list[str], words: list[str]) -> None:
    for name in IMPORTED:
        importlib.import_module(name)
    for port in ports:
        pid = os.fork()
        if pid == 0:
            serve(folder / f"{port}.log", ["--port", port, *words])
        print(pid, flush=True)
    for _ in ports:
        os.wait()


if __name__ == "__main__":
    here = sys.argv.index("--")
    main(Path(sys.argv[1]), sys.argv[2:here], sys.argv[here + 1 :])
