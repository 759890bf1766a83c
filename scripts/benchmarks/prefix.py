"""n answers to one prompt: learning and sampling that compute the prompt once, against row by row.

Rivals, all with the same weights, prompt and answers:
- `shared`: one pass over all rows, the prompt computed once;
- `unshared`: one pass over all rows, each with a prompt of its own;
- `rows`: one pass for each row;
- `action` (update only): `shared` with adapters that act on the answer only (`--adapter_scope action`), so that the
  prompt needs no backward pass.

Before timing, losses and gradients of the updates, and tokens and log-probabilities of the sampler, must be those of
`rows`; `action` is compared with its own pass for each row. The slope is that of the seconds over n (least squares):
the cost of one further answer.

Bars: at n=8 `shared` is at least 2.5 times as fast as `rows`, in the update and in the rollout.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from mafrt.core.types import Completion, Request, SamplingParams
from mafrt.engines.local.engine import LocalEngine
from mafrt.models.shared_base import SharedBase
from mafrt.scripts.benchmarks import _measure
from mafrt.scripts.benchmarks._measure import positive
from mafrt.scripts.benchmarks._models import build_base
from mafrt.scripts.benchmarks._tables import table

AGENT = "agent0"
UPDATES = ("shared", "unshared", "rows", "action")


def run(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Measure and return one JSON-able dict; raises `_measure.Disagreement` where the rivals do not agree."""
    args = _parser().parse_args(argv)
    torch.set_num_threads(args.threads)
    # 10 more positions than needed: the answer's last token is sampled, not fed.
    base = build_base(args, [args.rank], window=args.prompt + args.answer + 10, spread=0.02)
    rows = []
    for part, measure in (("update", _measure_update), ("rollout", _measure_rollout)):
        for count in args.answers:
            rows.append({"part": part, "n": count} | measure(base, args, count))
            print(_line(rows[-1]), flush=True)
    slopes = {part: _slopes([row for row in rows if row["part"] == part]) for part in ("update", "rollout")}
    print("\n" + table([("", {"bench": "prefix", "rows": rows})]))
    for part, slope in slopes.items():
        each = ", ".join(f"{name} {value * 1e3:.1f} ms" for name, value in slope.items())
        if slope:
            print(f"one further answer, {part}: {each}")
    return {
        "bench": "prefix",
        "shape": {k: getattr(args, k) for k in ("width", "layers", "mlp", "vocab", "rank", "prompt", "answer")},
        "clock": args.clock,
        "machine": _measure.machine(),
        "rows": rows,
        "seconds_per_answer": slopes,
        "bars": {
            f"{part} at n=8: rows / shared >= 2.5": row["rows/shared"]["median"] >= 2.5
            for row in rows
            for part in [row["part"]]
            if row["n"] == 8
        },
    }


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="mafrt bench prefix", description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "--answers", type=positive, nargs="+", default=[1, 2, 4, 8, 16, 32], help="answers n to the prompt"
    )
    parser.add_argument("--prompt", type=positive, default=256, help="tokens of the prompt")
    parser.add_argument("--answer", type=positive, default=64, help="tokens of an answer")
    _measure.add_model_flags(parser, vocab=512, rounds=5)
    return parser


def _measure_update(base: SharedBase, args: argparse.Namespace, count: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(count)
    prompt = torch.randint(5, args.vocab, (1, args.prompt), generator=generator).expand(count, -1)
    ids = torch.cat((prompt, torch.randint(5, args.vocab, (count, args.answer), generator=generator)), 1)
    ids = ids.to(args.device)
    whole = torch.zeros(count, dtype=torch.long)
    late = torch.zeros(ids.shape, dtype=torch.long)
    late[:, : args.prompt] = -1
    advantage = torch.linspace(-1, 1, max(count, 2), device=args.device)[:count, None].expand(-1, args.answer)
    positions = torch.arange(ids.shape[1], device=args.device)

    def one(index: Tensor, rows: slice, positions: Tensor | None = None) -> Tensor:
        hidden = base.forward(ids[rows], None, index[rows], position_ids=positions)
        spoken = hidden[:, args.prompt - 1 : -1].flatten(0, 1)
        logprobs, entropy = base.token_logprobs(spoken, ids[rows, args.prompt :].flatten())
        loss = -(logprobs * advantage[rows].flatten()).sum() - 0.01 * entropy.sum()
        loss.backward()
        return loss.detach()

    def update(index: Tensor, parts: Sequence[slice], positions: Tensor | None = None) -> Tensor:
        for parameter in base.adapter_parameters(AGENT):
            parameter.grad = None
        return torch.stack([one(index, part, positions) for part in parts]).sum()

    everything, each = [slice(None)], [slice(row, row + 1) for row in range(count)]
    rivals: dict[str, Callable[[], Tensor]] = {
        "shared": lambda: update(whole, everything),
        # Equal beginnings are computed once only where positions are counted and not given.
        "unshared": lambda: update(whole, everything, positions.expand(count, -1)),
        "rows": lambda: update(whole, each),
        "action": lambda: update(late, everything),
    }
    expected = _gradient(base, rivals["rows"])
    worst = max(_agree(base, name, rivals[name], expected) for name in ("shared", "unshared"))
    worst = max(worst, _agree(base, "action", rivals["action"], _gradient(base, lambda: update(late, each))))
    times = _measure.interleave(rivals, rounds=args.rounds, warmup=1, clock=args.clock, device=args.device)
    return _row(times, worst)


def _gradient(base: SharedBase, update: Callable[[], Tensor]) -> tuple[Tensor, Tensor]:
    loss = update()
    return loss, torch.cat([p.grad.flatten() for p in base.adapter_parameters(AGENT) if p.grad is not None]).clone()


def _agree(base: SharedBase, name: str, update: Callable[[], Tensor], expected: tuple[Tensor, Tensor]) -> float:
    """Differences of loss and gradient, each as a share of the largest entry."""
    return max(
        _measure.agree(f"{name}, {what}", ours / scale, theirs / scale, tolerance=1e-5)
        for what, ours, theirs in zip(("loss", "gradient"), _gradient(base, update), expected, strict=True)
        for scale in [max(1.0, float(theirs.abs().max()))]
    )


def _measure_rollout(base: SharedBase, args: argparse.Namespace, count: int) -> dict[str, Any]:
    engine = LocalEngine(base, eos_ids=())
    generator = torch.Generator().manual_seed(count)
    prompt = torch.randint(5, args.vocab, (args.prompt,), generator=generator).tolist()
    asked = SamplingParams(max_new_tokens=args.answer)
    shared = [Request(prompt, AGENT, asked, seed=seed) for seed in range(count)]
    # Another first token makes it another prompt.
    unshared = [Request([5 + seed, *prompt[1:]], AGENT, asked, seed=seed) for seed in range(count)]
    rivals: dict[str, Callable[[], list[Completion]]] = {
        "shared": lambda: engine.generate(shared),
        "unshared": lambda: engine.generate(unshared),
        "rows": lambda: [engine.generate([request])[0] for request in shared],
    }
    expected = {"shared": rivals["rows"](), "unshared": [engine.generate([request])[0] for request in unshared]}
    worst = 0.0
    for name, answers in expected.items():
        for ours, theirs in zip(rivals[name](), answers, strict=True):
            if ours.ids != theirs.ids:
                raise _measure.Disagreement(f"{name}: found other tokens than row by row; not timed")
            pair = torch.tensor(ours.logprobs), torch.tensor(theirs.logprobs)
            worst = max(worst, _measure.agree(f"{name}, log-probs", *pair, tolerance=1e-4))
    times = _measure.interleave(rivals, rounds=args.rounds, warmup=1, clock=args.clock, device=args.device)
    return _row(times, worst)


def _row(times: Mapping[str, list[float]], worst: float) -> dict[str, Any]:
    row: dict[str, Any] = {"parity": worst} | {f"{name}_s": _measure.quartiles(own) for name, own in times.items()}
    row |= {f"{name}/shared": _measure.ratio(times[name], times["shared"]) for name in ("rows", "unshared")}
    if "action" in times:
        row["rows/action"] = _measure.ratio(times["rows"], times["action"])
    return row


def _slopes(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Seconds of one further answer, by rival; nothing where a single n was measured."""
    if len({row["n"] for row in rows}) < 2:
        return {}
    names = [name for name in UPDATES if f"{name}_s" in rows[0]]
    counts = [row["n"] for row in rows]
    return {
        name: statistics.linear_regression(counts, [row[f"{name}_s"]["median"] for row in rows]).slope for name in names
    }


def _line(row: Mapping[str, Any]) -> str:
    seconds = "  ".join(f"{n} {row[f'{n}_s']['median'] * 1e3:8.1f} ms" for n in UPDATES if f"{n}_s" in row)
    return f"{row['part']:>7} n={row['n']:<3} {seconds}  rows/shared {row['rows/shared']['median']:.2f}"
