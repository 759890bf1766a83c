"""Running a snippet in the sandbox, against a fresh interpreter in the same walls.

Two snippets: `trivial` prints a number; `fit` reads a table with pandas and fits scikit-learn's logistic regression.
Each at several concurrencies: that many threads, each of which waits for its result before it sends the next one.
Milliseconds are the caller's latency, including the wait for a free slot.

Bars, at concurrency 1: trivial at most 25 ms, fit at most 60 ms. `--soak N` runs N executions and counts
leaked processes, files and descriptors.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from bench import _measure
from bench._measure import positive
from mafrt.engines.vllm.watchdog import descendants
from mafrt.sandbox import bwrap
from mafrt.sandbox.image import executable
from mafrt.sandbox.inside import confine
from mafrt.sandbox.zygote_sandbox import WarmSandbox
from mafrt.scripts.cli.strict_parser import StrictParser

TABLE = "x,y,t\n" + "".join(f"{i * 7 % 11},{i * 3 % 7},{i % 2}\n" for i in range(200))
SNIPPETS = {
    "trivial": "print(6 * 7)",
    "fit": f"""
import io
import pandas as pd
from sklearn.linear_model import LogisticRegression
frame = pd.read_csv(io.StringIO({TABLE!r}))
model = LogisticRegression().fit(frame[["x", "y"]], frame["t"])
print(round(model.score(frame[["x", "y"]], frame["t"]), 3))
""",
}
BARS_MS = {"trivial": 25.0, "fit": 60.0}


def run(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Measure and return one JSON-able dict; raises `_measure.Disagreement` where the rivals do not agree."""
    args = _parser().parse_args(argv)
    workers = args.workers or max(2, os.cpu_count() or 1)
    with WarmSandbox("bwrap", workers) as sandbox:
        rows = [] if args.soak else _latencies(args, sandbox)
        soak = _soak(sandbox, args.soak, workers) if args.soak else None
        versions = sandbox.versions
    bars = {
        f"{row['snippet']} at most {BARS_MS[row['snippet']]:g} ms": row["ms"] <= BARS_MS[row["snippet"]]
        for row in rows
        if row["concurrency"] == 1
    }
    if soak is not None:
        bars["nothing is left"] = not any(soak["left"].values())
    return {
        "bench": "sandbox",
        "machine": _measure.machine(),
        "workers": workers,
        "versions": versions,
        "rows": rows,
        "soak": soak,
        "bars": bars,
        "bars_met": all(bars.values()) if bars else None,
    }


def _parser() -> argparse.ArgumentParser:
    parser = StrictParser(prog="mafrt bench sandbox", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--concurrency", type=positive, nargs="+", default=[1, 8, 32], help="threads that ask at once")
    parser.add_argument("--calls", type=positive, default=96, help="timed executions per snippet and concurrency")
    parser.add_argument("--fresh_calls", type=int, default=32, help="the same, of fresh interpreters; 0: none")
    parser.add_argument("--workers", type=int, default=0, help="snippets that run at a time; 0: one per core")
    parser.add_argument(
        "--soak",
        type=int,
        default=0,
        help="instead: number of executions, then count leaked processes, files and descriptors",
    )
    return parser


def _latencies(args: argparse.Namespace, sandbox: WarmSandbox) -> list[dict[str, Any]]:
    rows = []
    for name, code in SNIPPETS.items():
        said = sandbox.execute(code).stdout
        if (fresh := _fresh(code)) != said or not said:
            raise _measure.Disagreement(f"{name}: the sandbox says {said!r}, a fresh interpreter {fresh!r}; not timed")
        for concurrency in args.concurrency:
            ours, took = _timed(partial(_warm, sandbox, code), said, concurrency, args.calls)
            theirs, _ = _timed(partial(_fresh, code), said, concurrency, args.fresh_calls)
            rows.append(
                {
                    "snippet": name,
                    "concurrency": concurrency,
                    "ms": round(statistics.median(ours), 1),
                    "p90_ms": round(sorted(ours)[int(0.9 * (len(ours) - 1))], 1),
                    "per_s": round(len(ours) / took, 1),
                    "fresh_ms": round(statistics.median(theirs), 1) if theirs else None,
                    "load_1min": round(os.getloadavg()[0], 1),
                }
            )
            print(_line(rows[-1]), flush=True)
    return rows


def _timed(call: Callable[[], str], expected: str, threads: int, calls: int) -> tuple[list[float], float]:
    """Milliseconds of each call, and the seconds of all; raises Disagreement if one says something else."""
    if not calls:
        return [], 0.0
    times: list[float] = []
    wrong: list[str] = []

    def ask() -> None:
        for _ in range(max(1, round(calls / threads))):
            start = time.perf_counter()
            said = call()
            times.append(1000 * (time.perf_counter() - start))
            if said != expected:
                wrong.append(said)

    together = [threading.Thread(target=ask) for _ in range(threads)]
    start = time.perf_counter()
    for thread in together:
        thread.start()
    for thread in together:
        thread.join()
    if wrong:
        raise _measure.Disagreement(f"found {wrong[0]!r}, expected {expected!r}; not timed")
    return times, time.perf_counter() - start


def _warm(sandbox: WarmSandbox, code: str) -> str:
    return sandbox.execute(code).stdout


def _fresh(code: str) -> str:
    """The same walls, and an interpreter that imports everything itself."""
    program = ["bwrap", "--unshare-all", *bwrap.root(), "--tmpfs", confine.WORKDIR, "--chdir", confine.WORKDIR]
    command = [*program, executable(), "-s", "-B", "-c", code]
    environment = {
        "PATH": os.environ.get("PATH", os.defpath),
        "PYTHONPATH": bwrap.PACKAGES,
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
    }
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False).stdout


def _soak(sandbox: WarmSandbox, count: int, threads: int) -> dict[str, Any]:
    """Run many executions, some of which fail, and count the leaked resources."""
    codes = (
        "print(6 * 7)",
        "open('a', 'w').write('x' * 1000); print(6 * 7)",
        "import os; os.fork(); print(6 * 7)",
        "1 / 0",
        "import ctypes; ctypes.string_at(0)",
    )
    _timed(partial(_warm, sandbox, codes[0]), "42\n", threads, 50)
    before = _settled(sandbox)
    done = [0] * threads
    statuses: dict[str, int] = {}
    lock = threading.Lock()

    def work(own: int) -> None:
        for i in range(own, count, threads):
            execution = sandbox.execute(codes[i % len(codes)], {"in.csv": b"a,b\n1,2\n"}, ["a"])
            with lock:
                statuses[execution.status] = statuses.get(execution.status, 0) + 1
            done[own] += 1

    start = time.perf_counter()
    together = [threading.Thread(target=work, args=(own,)) for own in range(threads)]
    for thread in together:
        thread.start()
    for thread in together:
        thread.join()
    took = time.perf_counter() - start
    deadline = time.monotonic() + 20
    while any(_left(before, after := _inventory(sandbox)).values()) and time.monotonic() < deadline:
        time.sleep(0.2)
    return {
        "executions": sum(done),
        "statuses": statuses,
        "seconds": round(took, 1),
        "per_s": round(sum(done) / took, 1),
        "restarts": sandbox.counts.restarts,
        "before": before,
        "after": after,
        "left": _left(before, after),
    }


def _left(before: dict[str, int], after: dict[str, int]) -> dict[str, int]:
    """Resources that grew; memory may differ by a few MiB."""
    return {name: max(0, after[name] - before[name] - (20 if name == "zygote_mib" else 0)) for name in before}


def _settled(sandbox: WarmSandbox) -> dict[str, int]:
    """The inventory at rest: right after an execution, a spare process may still be on its way, and would be a leak."""
    inventory, since = _inventory(sandbox), time.monotonic()
    deadline = since + 20
    while time.monotonic() < min(since + 0.5, deadline):
        time.sleep(0.05)
        if (now := _inventory(sandbox)) != inventory:
            inventory, since = now, time.monotonic()
    return inventory


def _inventory(sandbox: WarmSandbox) -> dict[str, int]:
    zygote = Path(f"/proc/{sandbox.zygote_pid}")
    pages = int((zygote / "statm").read_text().split()[1])
    return {
        "processes": len(descendants(sandbox.zygote_pid)),
        "our_descriptors": len(os.listdir("/proc/self/fd")),
        "zygote_descriptors": len(os.listdir(zygote / "fd")),
        "files": len([name for name in os.listdir("/tmp") if name.startswith("mafrt-sandbox-")]),
        "mounts": len((zygote / "mounts").read_text().splitlines()),
        "zygote_mib": pages * os.sysconf("SC_PAGE_SIZE") // 2**20,
    }


def _line(row: dict[str, Any]) -> str:
    fresh = f"   fresh {row['fresh_ms']:7.1f} ms" if row["fresh_ms"] is not None else ""
    head = f"{row['snippet']:8} at {row['concurrency']:2}: {row['ms']:7.1f} ms (p90 {row['p90_ms']:.1f})"
    return f"{head} {row['per_s']:6.1f}/s{fresh}   load {row['load_1min']}"
