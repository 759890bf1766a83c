"""The cost of a team's turns over one transcript: adapters on all tokens against adapters on the action only.

T agents speak one after the other. Each reads the transcript of c tokens and everything that was said since, and adds
an answer. With `all`, the transcript is read with every agent's own adapter, T times; with `action` (activated LoRA,
arXiv 2504.12397) the base reads it once for all, so that further agents cost their own words only.

Both scopes have the same weights, prompts and answers; the transcripts are random tokens, and every timed conversation
begins with an empty cache. Before timing, the sampler's log-probabilities are compared with a forward over the whole
sequence. `s/turn` is the slope of the seconds of a conversation over T, `growth` that of the seconds of one further
turn over the transcript's length (least squares).

Bars: a further turn with `action` grows with the transcript at most .35 times as fast as with `all`.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from typing import Any

import torch

from bench import _measure
from bench._measure import positive
from bench._models import build_base
from mafrt.core.types import Completion, Request, SamplingParams
from mafrt.engines.local.engine import LocalEngine
from mafrt.models.shared_base import SharedBase
from mafrt.scripts.cli.strict_parser import StrictParser

SCOPES = ("all", "action")
INVOCATION = (1, 2, 3)
"""Tokens that begin a turn; no transcript holds them."""


def run(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Measure and return one JSON-able dict; raises `_measure.Disagreement` where the results are not exact."""
    parser = _parser()
    args = parser.parse_args(argv)
    if min(len(set(args.turns)), len(set(args.context))) < 2:
        parser.error("a slope needs two numbers of turns and two lengths; give --turns and --context two values each")
    torch.set_num_threads(args.threads)
    window = max(args.context) + max(args.turns) * (args.said + 8)
    base = build_base(args, [args.rank] * max(args.turns), window=window, spread=0.02)
    _add_activated(base)
    worst = _check(base, args)
    rows = []
    for context in args.context:
        seconds: dict[tuple[str, int], list[float]] = {}
        for turns in args.turns:
            talks = {scope: _talk(base, scope, turns, context, args.said) for scope in SCOPES}
            times = _measure.interleave(talks, rounds=args.rounds, warmup=1, clock=args.clock, device=args.device)
            seconds |= {(scope, turns): times[scope] for scope in SCOPES}
            row = {"context": context, "turns": turns, "all/action": _measure.ratio(times["all"], times["action"])}
            row |= {f"{scope}_s": round(statistics.median(times[scope]), 4) for scope in SCOPES}
            rows.append(row)
            print(_line(row), flush=True)
    slopes = {scope: _slopes(rows, scope) for scope in SCOPES}
    growth = {scope: _slope(args.context, list(slopes[scope].values())) for scope in SCOPES}
    for scope in SCOPES:
        each = "  ".join(f"c={context}: {value * 1e3:.1f} ms" for context, value in slopes[scope].items())
        print(f"{scope:>6}  one further turn {each}; growth {growth[scope] * 1e6:.2f} ms per 1,000 tokens")
    return {
        "bench": "turns",
        "shape": {k: getattr(args, k) for k in ("width", "layers", "mlp", "vocab", "rank", "said")},
        "clock": args.clock,
        "machine": _measure.machine(),
        "worst_difference": worst,
        "rows": rows,
        "seconds_per_turn": slopes,
        "growth_seconds_per_token": growth,
        "bars": {"growth of a further turn <= .35 of `all`": growth["action"] <= 0.35 * growth["all"]},
    }


def _parser() -> argparse.ArgumentParser:
    parser = StrictParser(prog="mafrt bench turns", description=__doc__.split("\n")[0])
    parser.add_argument("--turns", type=positive, nargs="+", default=[1, 2, 4, 8], help="agents T that speak in turn")
    parser.add_argument("--context", type=positive, nargs="+", default=[256, 1024, 2048], help="transcript c in tokens")
    parser.add_argument("--said", type=positive, default=8, help="tokens of every answer")
    _measure.add_model_flags(parser, vocab=512, rounds=5)
    return parser


def _add_activated(base: SharedBase) -> None:
    """Beside each adapter `agentK` one of the same weights, `agentK-action`, that acts on the action only."""
    for name, record in list(base.records.items()):
        twin = f"{name}-action"
        base.place_adapter(twin, record.rank, record.alpha, record.layers, seed=0, invocation=INVOCATION)
        base.load_adapter_state(twin, base.adapter_state(name))


def _transcript(base: SharedBase, length: int) -> list[int]:
    generator = torch.Generator().manual_seed(length)
    return torch.randint(len(INVOCATION) + 1, base.config.vocab_size, (length,), generator=generator).tolist()


def _ask(scope: str, agent: int, transcript: Sequence[int], said: int) -> Request:
    name = f"agent{agent}-action" if scope == "action" else f"agent{agent}"
    return Request([*transcript, *INVOCATION], name, SamplingParams(max_new_tokens=said), seed=agent)


def _talk(base: SharedBase, scope: str, turns: int, context: int, said: int) -> Any:
    engine, transcript = LocalEngine(base, eos_ids=()), _transcript(base, context)

    def talk() -> list[Completion]:
        engine.forget()
        seen, answers = list(transcript), []
        for agent in range(turns):
            answers += engine.generate([_ask(scope, agent, seen, said)])
            # Equal lengths, and tokens that both scopes read alike, keep the work equal.
            seen += transcript[agent * said : (agent + 1) * said]
        return answers

    return talk


def _check(base: SharedBase, args: argparse.Namespace) -> float:
    """Largest difference of the engine's log-probabilities from those of a forward over the whole sequence."""
    worst = 0.0
    for scope in SCOPES:
        engine, transcript = LocalEngine(base, eos_ids=()), _transcript(base, min(args.context))
        for length in (len(transcript) // 2, len(transcript)):  # the second one continues the first one's transcript
            asked = [_ask(scope, agent, transcript[:length], args.said) for agent in range(min(2, max(args.turns)))]
            for request, answer in zip(asked, engine.generate(asked), strict=True):
                ids = [*request.prompt_ids, *answer.ids]
                index = torch.full((1, len(ids)), base.adapter_index(request.adapter))
                index[:, : base.active_from(request.adapter, request.prompt_ids)] = -1
                with torch.no_grad():
                    states = base.forward(torch.tensor([ids], device=base.device), None, index)[0]
                    spoken = states[len(request.prompt_ids) - 1 : -1]
                    expected, _ = base.token_logprobs(spoken, torch.tensor(answer.ids, device=base.device))
                sampled = torch.tensor(answer.logprobs)
                worst = max(worst, _measure.agree(f"log-probs, {scope}", sampled, expected.cpu(), tolerance=1e-4))
    return worst


def _slope(xs: Sequence[float], ys: Sequence[float]) -> float:
    return statistics.linear_regression(xs, ys).slope


def _slopes(rows: Sequence[dict[str, Any]], scope: str) -> dict[int, float]:
    """Seconds of one further turn, by the length of the transcript."""
    contexts = dict.fromkeys(row["context"] for row in rows)
    points = {c: [(row["turns"], row[f"{scope}_s"]) for row in rows if row["context"] == c] for c in contexts}
    return {c: _slope(*zip(*own, strict=True)) for c, own in points.items()}


def _line(row: dict[str, Any]) -> str:
    each = row["all/action"]
    return (
        f"c={row['context']:<5} T={row['turns']:<2} all {row['all_s'] * 1e3:8.1f} ms  action "
        f"{row['action_s'] * 1e3:8.1f} ms  all/action {each['median']:.2f} ({each['q1']:.2f} to {each['q3']:.2f})"
    )
