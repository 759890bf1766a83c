"""Judging a batch: many calls at once against one after the other, and a repeat from the cache.

The judge is a stub that takes a fixed time for every reply. It is reached in two ways: in process, which leaves our own
part (queue, budget, single flight, cache), and through the real OpenAI SDK to a server on loopback, if that is
installed.

Bars: wall time <= 1.3 x latency x calls / concurrency; a repeat of the batch makes no calls.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import json
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bench import _measure
from bench._measure import positive
from mafrt.coach import Case
from mafrt.coach.api_coach import RemoteCoach
from mafrt.coach.budget import Budget
from mafrt.coach.cache import VerdictCache
from mafrt.coach.judge_prompt import JudgeQuestion
from mafrt.coach.providers import OpenAIProvider, Provider, Reply
from mafrt.coach.retry import Breaker, Retry
from mafrt.coach.rubric import load_rubric
from mafrt.config.train_config import CoachConfig
from mafrt.core.types import Scored
from mafrt.scripts.cli.strict_parser import StrictParser

VERDICT = '{"reason": "as ever", "score": 5}'
BAR = 1.3


class _Stub:
    """A judge that thinks for a fixed time."""

    where = "stub"

    def __init__(self, latency_s: float) -> None:
        self.latency_s = latency_s

    async def ask(self, ask: JudgeQuestion) -> Reply:
        await asyncio.sleep(self.latency_s)
        return Reply(VERDICT, False, 500, 20)

    async def close(self) -> None:
        pass


def serve(latency_s: float, port: Any) -> None:
    """The same judge behind HTTP, in a process of its own: as little as the SDK needs. Sends its port, then serves."""
    message = {"role": "assistant", "content": VERDICT}
    body = {
        "id": "c",
        "object": "chat.completion",
        "created": 1,
        "model": "stub",
        "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 500, "completion_tokens": 20, "total_tokens": 520},
    }
    data = json.dumps(body).encode()
    reply = f"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n".encode() + data

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).lower().split(b"\r\n")
                length = next(line.split(b":")[1] for line in head if line.startswith(b"content-length"))
                await reader.readexactly(int(length))
                await asyncio.sleep(latency_s)
                writer.write(reply)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    async def main() -> None:
        server = await asyncio.start_server(talk, "127.0.0.1", 0)
        port.send(server.sockets[0].getsockname()[1])
        async with server:
            await server.serve_forever()

    asyncio.run(main())


def run(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Measure and return one JSON-able dict; raises `_measure.Disagreement` if a batch comes back unjudged."""
    args = _parser().parse_args(argv)
    ways: dict[str, Callable[[], Provider]] = {"stub": lambda: _Stub(args.latency)}
    server = None
    if importlib.util.find_spec("openai"):
        spawn = multiprocessing.get_context("spawn")
        ours, theirs = spawn.Pipe()
        server = spawn.Process(target=serve, args=(args.latency, theirs), daemon=True)
        server.start()
        address = f"http://127.0.0.1:{ours.recv()}/v1"
        ways["openai SDK"] = lambda: OpenAIProvider("stub", address, 2048, 60.0)
    measured = []
    try:
        for way, make in ways.items():
            for concurrency in args.concurrency:
                measured.append(_measure_one(args, way, make, concurrency))
                print(_line(measured[-1]), flush=True)
    finally:
        if server is not None:
            server.terminate()
    bars = {
        f"{row['way']}, {row['concurrency']} at once: <= {BAR} of latency*calls/concurrency": row["ratio"] <= BAR
        for row in measured
    }
    bars["a repeat makes no calls"] = not any(row["repeat_calls"] for row in measured)
    return {
        "bench": "coach",
        "machine": _measure.machine(),
        "latency_s": args.latency,
        "calls": args.calls,
        "rows": measured,
        "bars": bars,
        "bars_met": all(bars.values()),
    }


def _parser() -> argparse.ArgumentParser:
    parser = StrictParser(prog="mafrt bench coach", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--latency", type=float, default=1.0, help="seconds that the judge takes for a reply")
    parser.add_argument("--calls", type=positive, default=256, help="turns in the batch")
    parser.add_argument("--concurrency", type=positive, nargs="+", default=[8, 16, 64], help="calls at once")
    parser.add_argument("--serial", type=int, default=8, help="turns judged one after the other, for comparison")
    parser.add_argument("--rounds", type=positive, default=3, help="batches, of which the median is reported")
    return parser


def _coach(provider: Provider, concurrency: int, cache: Path | None) -> RemoteCoach:
    return RemoteCoach(
        provider,
        load_rubric("chain"),
        CoachConfig(coach="openai:stub", coach_concurrency=concurrency),
        retry=Retry(300.0),
        breaker=Breaker(300.0),
        budget=Budget(),
        cache=None if cache is None else VerdictCache(cache, "stub"),
    )


def _measure_one(args: argparse.Namespace, way: str, make: Callable[[], Provider], concurrency: int) -> dict[str, Any]:
    def batch(number: int, count: int) -> list[Case]:
        # As long as a turn of a math problem and what led to it.
        return [
            Case("solver", f"{number}-{place} " + "so " * 150, "You solve.", "Problem: " + "x " * 400)
            for place in range(count)
        ]

    def timed(coach: RemoteCoach, cases: list[Case]) -> float:
        started = time.perf_counter()
        verdicts = coach.judge(cases)
        taken = time.perf_counter() - started
        if verdicts != [Scored(5.0, "as ever")] * len(cases):
            raise _measure.Disagreement(f"{way}: found turns without the stub's verdict; not timed")
        return taken

    with tempfile.TemporaryDirectory() as folder:
        coach = _coach(make(), concurrency, Path(folder) / "coach.sqlite")
        timed(coach, batch(-1, concurrency))  # connections, imports
        walls = [timed(coach, batch(number, args.calls)) for number in range(args.rounds)]
        before = coach.counts()["calls"]
        repeat = timed(coach, batch(0, args.calls))
        repeat_calls = int(coach.counts()["calls"] - before)
        coach.close()
    one_by_one = _coach(make(), 1, None)
    timed(one_by_one, batch(-1, 1))
    serial = timed(one_by_one, batch(0, args.serial)) / args.serial * args.calls
    one_by_one.close()
    wall, bound = statistics.median(walls), args.latency * args.calls / concurrency
    return {
        "way": way,
        "concurrency": concurrency,
        "wall_s": round(wall, 3),
        "bound_s": round(bound, 3),
        "ratio": round(wall / bound, 3),
        "spread": [round(min(walls) / bound, 3), round(max(walls) / bound, 3)],
        "serial_s": round(serial, 2),
        "speedup": round(serial / wall, 1),
        "repeat_s": round(repeat, 4),
        "repeat_calls": repeat_calls,
    }


def _line(row: dict[str, Any]) -> str:
    return (
        f"{row['way']:>10} {row['concurrency']:>4} at once: {row['wall_s']:.2f} s, {row['ratio']:.2f} of the bound; "
        f"serial {row['serial_s']:.1f} s, {row['speedup']:.1f}x; repeat {row['repeat_s']:.3f} s, "
        f"{row['repeat_calls']} calls"
    )
