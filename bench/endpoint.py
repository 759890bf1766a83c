"""Overhead of the chat API: calls made side by side against the engine alone, on the same prompts and seeds.

- `served`: a client process makes all calls at once with the stock openai client (`AsyncOpenAI`), as users of
  `mafrt serve_team` do. Timed in that process, from the first request to the last answer.
- `program`: one episode a call, played through `mafrt train --program`'s environment: the program's client runs in a
  thread of the trainer, and its start is timed too.
- `played`: the same episodes as an ordinary environment; `program` is compared with it.

Bar: served / engine <= 1.3.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from bench import _measure
from bench._measure import positive
from mafrt.config.agent import AgentSpec, LoraSpec
from mafrt.config.team import Team
from mafrt.core.seeding import seed_of
from mafrt.core.types import SamplingParams, StepResult
from mafrt.environment.base import Env
from mafrt.environment.chat_api.server import ChatServer
from mafrt.environment.session import session_of
from mafrt.envs.program import ProgramEnv
from mafrt.rollout.player import Player, Start
from mafrt.scripts.cli.strict_parser import StrictParser
from mafrt.scripts.serving.answers import TeamAnswers
from mafrt.scripts.serving.engine_queue import EngineQueue
from mafrt.scripts.serving.trained_team import TrainedTeam

BAR = 1.3
TEAM = Team((AgentSpec("reasoner", prompt="You plan."), AgentSpec("actor", prompt="You solve.")))
Calls = list[tuple[str, str, int]]
"""(agent, text, seed)"""


def run(argv: Sequence[str]) -> dict[str, Any]:
    """Print the table; returns ratios by way, and the machine."""
    parser = StrictParser(prog="mafrt bench endpoint", description=__doc__)
    parser.add_argument("--base", default="teaching-base", help="a model folder, or teaching-base")
    parser.add_argument("--calls", type=positive, default=32, help="calls made at once")
    parser.add_argument("--tokens", type=positive, default=48, help="tokens of each answer")
    parser.add_argument("--rounds", type=positive, default=9, help="timed rounds")
    parser.add_argument("--threads", type=positive, default=1, help="torch threads")
    args = parser.parse_args(argv)
    import torch

    torch.set_num_threads(args.threads)
    with _Bench(args) as bench:
        _measure.interleave(bench.rivals(), rounds=1, warmup=1)
        bench.check()
        bench.seconds.clear()
        times = _measure.interleave(bench.rivals(), rounds=args.rounds, warmup=0)
    # The client's clock, without the way to its process.
    times["served"] = bench.seconds[-args.rounds :]
    ratios = {
        "served/engine": _measure.ratio(times["served"], times["engine"]),
        "program/played": _measure.ratio(times["program"], times["played"]),
    }
    row: dict[str, Any] = {"base": args.base, "calls": args.calls, "tokens": args.tokens}
    medians = {name: round(sorted(each)[len(each) // 2], 4) for name, each in times.items()}
    print("| way | seconds |\n|---|---|")
    for name, seconds in medians.items():
        print(f"| {name} | {seconds:.3f} |")
    for name, ratio in ratios.items():
        print(f"{name}: {ratio['median']:.2f} ({ratio['q1']:.2f} to {ratio['q3']:.2f})")
    return {
        "bench": "endpoint",
        "machine": _measure.machine(),
        "rows": [row | {f"{name}_s": seconds for name, seconds in medians.items()} | ratios],
        "bars": {f"served at most {BAR:g} of the engine alone": ratios["served/engine"]["median"] <= BAR},
    }


class _Bench:
    """The base, a server, a client process, and the four ways."""

    def __init__(self, args: argparse.Namespace) -> None:
        from mafrt.engines.local.engine import LocalEngine
        from mafrt.models.shared_base import SharedBase
        from mafrt.runners.build import voices_of

        self.calls: Calls = [
            (TEAM.names[n % 2], f"Problem: Tom has {n} pens and gets {n + 3} more. How many pens does he have?", n)
            for n in range(args.calls)
        ]
        base = SharedBase.load(args.base)
        for seed, name in enumerate(TEAM.adapters):
            base.add_adapter(name, LoraSpec(), seed=seed)
        self.engine = LocalEngine(base, eos_ids=())
        sampling = dict.fromkeys(TEAM.names, SamplingParams(max_new_tokens=args.tokens))
        team = TrainedTeam(TEAM, base, EngineQueue(self.engine), sampling, voices_of(base, TEAM, None), "auto")
        answers = TeamAnswers()
        answers.ready(team, None)
        self.team, self.server = team, ChatServer(answers)
        self.player = Player(self.engine, base.tokenizer, TEAM, sampling, base.context_window)
        self.requests = [
            team.request(agent, [{"role": "user", "content": text}], seed_of(seed, "call", 0))
            for agent, text, seed in self.calls
        ]
        code = f"from {__name__} import client; client({self.server.url + '/v1'!r})"
        self.client = subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.seconds: list[float] = []
        self.texts: dict[str, list[str]] = {}

    def __enter__(self) -> _Bench:
        return self

    def __exit__(self, *_: Any) -> None:
        self.client.communicate(timeout=30)
        self.server.close()
        self.team.close()

    def rivals(self) -> dict[str, Callable[[], object]]:
        program = ProgramEnv(program=f"{__name__}:one_call", agents=TEAM.names)
        programs = [session_of(program if not n else program.spawn()) for n in range(len(self.calls))]
        direct = [session_of(_OneCall()) for _ in self.calls]
        return {
            "engine": self._alone,
            "served": self._served,
            "played": lambda: self._play("played", direct),
            "program": lambda: self._play("program", programs),
        }

    def _alone(self) -> None:
        self.texts["engine"] = [completion.text for completion in self.engine.generate(self.requests)]

    def _served(self) -> None:
        assert self.client.stdin is not None and self.client.stdout is not None
        self.client.stdin.write(json.dumps(self.calls) + "\n")
        self.client.stdin.flush()
        seconds, self.texts["served"] = json.loads(self.client.stdout.readline())
        self.seconds.append(seconds)

    def _play(self, name: str, envs: Sequence[Env]) -> None:
        starts = iter([Start(f"{n:05d}", f"{n}", reset_seed=n, seed=n) for n in range(len(envs))])
        episodes, _ = self.player.play(envs, lambda slot, finished: next(starts, None))
        self.texts[name] = [turn.text for episode in episodes for turn in episode.turns]

    def check(self) -> None:
        """Raise Disagreement unless the ways give the same texts."""
        for one, other in (("served", "engine"), ("program", "played")):
            mine, theirs = self.texts[one], self.texts[other]
            same = sum(a == b for a, b in zip(mine, theirs, strict=True))
            if same < 0.9 * len(theirs):  # rows may part where two logits are equal to within rounding
                raise _measure.Disagreement(f"{one}: found {same} of {len(theirs)} texts of {other}; not timed")


def client(url: str) -> None:
    """A process that makes all calls of a line of its input at once, and answers with the seconds and the texts."""
    from openai import AsyncOpenAI

    api = AsyncOpenAI(base_url=url, api_key="not needed", max_retries=0, timeout=600)
    loop = asyncio.new_event_loop()

    async def one(agent: str, text: str, seed: int) -> str:
        reply = await api.chat.completions.create(model=agent, messages=[{"role": "user", "content": text}], seed=seed)
        return reply.choices[0].message.content or ""

    async def every(calls: Calls) -> list[str]:
        return await asyncio.gather(*(one(*call) for call in calls))

    for line in sys.stdin:
        calls = json.loads(line)
        started = time.perf_counter()
        texts = loop.run_until_complete(every(calls))
        print(json.dumps([time.perf_counter() - started, texts]), flush=True)


# ------------------------------------------------------------------------------------------------- episodes of one call


def _task(seed: int) -> tuple[str, str]:
    return TEAM.names[seed % 2], f"Problem: Tom has {seed % 50} pens and gets {seed % 7} more. How many has he?"


class _OneCall(Env):
    """One turn of one agent."""

    agents = TEAM.names

    def reset(self, seed: Any = None, options: Any = None) -> Any:
        agent, text = _task(self.rng.randrange(2**31))
        return {agent: [{"role": "user", "content": text}]}, {}

    def step(self, actions: dict[str, str]) -> StepResult:
        return StepResult({}, {}, True, False, {"outcome": 1.0})


_SHARED: dict[str, Any] = {}


def one_call(task: dict[str, Any], base_url: str) -> float:
    """The same episode as a program."""
    from openai import OpenAI

    if not _SHARED:
        _SHARED["client"] = OpenAI(base_url="http://127.0.0.1", api_key="not needed", max_retries=0)
    agent, text = _task(task["seed"])
    client = _SHARED["client"].with_options(base_url=base_url)
    client.chat.completions.create(model=agent, messages=[{"role": "user", "content": text}])
    return 1.0
