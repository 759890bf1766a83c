"""Cost of a worker process to the step of an environment: the same trivial steps in this process and in workers."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from bench._measure import machine, positive
from mafrt.core.types import StepResult
from mafrt.environment.base import Env
from mafrt.environment.session import Session
from mafrt.environment.workers import guarded
from mafrt.scripts.cli.strict_parser import StrictParser


class Trivial(Env):
    """Answers with a text of fixed length, at once."""

    agents = ("a",)
    max_steps = None

    def __init__(self, characters: int) -> None:
        self.text = "x" * characters

    def reset(self, seed: Any = None, options: Any = None) -> Any:
        return {"a": self.text}, {}

    def step(self, actions: dict[str, str]) -> StepResult:
        return StepResult({"a": self.text}, {"a": 1.0}, False, False, {})


def run(argv: Sequence[str]) -> dict[str, Any]:
    """Print the table; returns milliseconds per step by way and number of environments, as JSON-able numbers."""
    parser = StrictParser(prog="mafrt bench environment", description=__doc__)
    parser.add_argument("--steps", type=positive, default=500, help="steps of each environment")
    parser.add_argument("--envs", type=positive, nargs="+", default=[1, 32], help="environments side by side")
    parser.add_argument("--characters", type=positive, default=1000, help="length of observations and actions")
    args = parser.parse_args(argv)
    rows: list[dict[str, Any]] = []
    print("| environments | in process, ms a step | in workers, ms a step | more |\n|---|---|---|---|")
    for count in args.envs:
        local = _measure([Session(Trivial(args.characters)) for _ in range(count)], args)
        first = guarded(Trivial(args.characters), 60.0)
        remote = _measure([first, *(first.spawn() for _ in range(count - 1))], args)
        rows.append({"environments": count, "process_ms": local, "worker_ms": remote, "more_ms": remote - local})
        print(f"| {count} | {local:.3f} | {remote:.3f} | {remote - local:.3f} |")
    return {
        "bench": "environment",
        "machine": machine(),
        "rows": rows,
        "bars": {"at most 1 ms more a step": all(row["more_ms"] <= 1.0 for row in rows)},
    }


def _measure(sessions: Sequence[Session], args: argparse.Namespace) -> float:
    """Milliseconds per step and environment: the median over rounds in which each environment takes one step."""
    action = {"a": "y" * args.characters}
    for session in sessions:
        session.reset(seed=0)
    times = []
    for _ in range(args.steps):
        started = time.perf_counter()
        if len(sessions) == 1 or not sessions[0].blocking:
            for session in sessions:
                session.step(action)
        else:
            with ThreadPoolExecutor(len(sessions)) as pool:  # as the player does in each of its steps
                list(pool.map(lambda session: session.step(action), sessions))
        times.append((time.perf_counter() - started) / len(sessions))
    return 1000 * statistics.median(times)
