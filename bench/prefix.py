"""n answers to one prompt, and n turns over one transcript: what rows share is computed once, against row by row.

Rivals, all with the same weights, prompt and answers:
- `shared`: one pass over all rows, the prompt computed once;
- `unshared`: one pass over all rows, each with a prompt of its own;
- `rows`: one pass for each row;
- `action` (update only): `shared` with adapters that act on the answer only (`--adapter_scope action`), so that the
  prompt needs no backward pass.

`update` and `rollout` have n answers to one prompt. `turns` is an update from n turns of one agent, each after all
that was said before, so that the last row holds the others.

Before timing, losses and gradients of the updates, and tokens and log-probabilities of the sampler, must be those of
`rows`; `action` is compared with its own pass for each row. The slope is that of the seconds over n (least squares):
the cost of one further answer.

Bars: at n=8 `shared` is at least 2.5 times as fast as `rows`, in the update and in the rollout; with up to 16 rows an
update is at least .8 times as much faster as it computes fewer tokens.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bench import _measure
from bench._measure import positive
from bench._models import build_base
from bench._tables import table
from mafrt.core.types import Completion, Request, SamplingParams, Turn
from mafrt.engines.local.engine import LocalEngine
from mafrt.models.shared_base import SharedBase
from mafrt.scripts.cli.strict_parser import StrictParser
from mafrt.training.batch import collate

AGENT = "agent0"
UPDATES = ("shared", "unshared", "rows", "action")
MOST_TURNS = 8
SAVED = 0.8
"""share of the tokens saved that the time follows at least"""


def run(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Measure and return one JSON-able dict; raises `_measure.Disagreement` where the rivals do not agree."""
    args = _parser().parse_args(argv)
    torch.set_num_threads(args.threads)
    # 10 more positions than needed: the answer's last token is sampled, not fed.
    most = min(MOST_TURNS, max(args.answers))
    base = build_base(args, [args.rank], window=args.prompt + most * args.answer + 10, spread=0.02)
    rows = []
    for part, measure in PARTS.items():
        for count in args.answers if part != "turns" else [count for count in args.answers if 1 < count <= MOST_TURNS]:
            rows.append({"part": part, "n": count} | measure(base, args, count))
            print(_line(rows[-1]), flush=True)
    slopes = {part: _slopes([row for row in rows if row["part"] == part]) for part in PARTS}
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
        "bars": _bars(rows),
    }


def _bars(rows: Sequence[Mapping[str, Any]]) -> dict[str, bool]:
    bars = {
        f"{row['part']} at n=8: rows / shared >= 2.5": row["rows/shared"]["median"] >= 2.5
        for row in rows
        if row["n"] == 8 and row["part"] != "turns"
    }
    for part in ("update", "turns"):
        own = [row for row in rows if row["part"] == part and row["n"] <= 16]
        if own:
            bars[f"{part}: rows / shared >= .8 of the tokens saved"] = all(
                row["rows/shared"]["median"] >= SAVED * row["tokens"] / row["computed"] for row in own
            )
    return bars


def _parser() -> argparse.ArgumentParser:
    parser = StrictParser(prog="mafrt bench prefix", description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "--answers", type=positive, nargs="+", default=[1, 2, 4, 8, 16, 32], help="answers n to the prompt"
    )
    parser.add_argument("--prompt", type=positive, default=256, help="tokens of the prompt")
    parser.add_argument("--answer", type=positive, default=64, help="tokens of an answer")
    _measure.add_model_flags(parser, vocab=512, rounds=5)
    return parser


@dataclass(frozen=True)
class _Work:
    """Rows to learn from, padded on the right; the last `said` tokens of each have a loss."""

    ids: Tensor
    lengths: Tensor
    """tokens of each row"""
    said: int

    def cut(self, rows: slice) -> _Work:
        """Some rows, as long as the longest of them."""
        lengths = self.lengths[rows]
        return _Work(self.ids[rows, : int(lengths.max())], lengths, self.said)

    @property
    def mask(self) -> Tensor | None:
        """1 = real; None where nothing is padded."""
        steps = torch.arange(self.ids.shape[1])
        return None if bool((self.lengths == len(steps)).all()) else (steps < self.lengths[:, None]).long()

    @property
    def actions(self) -> Tensor:
        """`[rows, tokens]`, True where a token has a loss."""
        steps, ends = torch.arange(self.ids.shape[1]), self.lengths[:, None]
        return (steps < ends) & (steps >= ends - self.said)


def _measure_update(base: SharedBase, args: argparse.Namespace, count: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(count)
    prompt = torch.randint(5, args.vocab, (1, args.prompt), generator=generator).expand(count, -1)
    ids = torch.cat((prompt, torch.randint(5, args.vocab, (count, args.answer), generator=generator)), 1)
    row = _measure_work(base, args, _Work(ids, torch.full((count,), ids.shape[1]), args.answer))
    return row | {"tokens": count * ids.shape[1], "computed": args.prompt + count * args.answer}


def _measure_turns(base: SharedBase, args: argparse.Namespace, count: int) -> dict[str, Any]:
    """An agent's turns, each after all that was said before: `shared` reads all of them off the last row."""
    generator = torch.Generator().manual_seed(count)
    whole = torch.randint(5, args.vocab, (1, args.prompt + count * args.answer), generator=generator)
    lengths = args.prompt + args.answer * torch.arange(1, count + 1)
    spoken = []
    for place, length in enumerate(lengths.tolist()):
        ids, said = whole[0, :length].tolist(), length - args.answer
        spoken.append(Turn(AGENT, ids[:said], ids[said:], [0.0] * args.answer, "length", "", place, place, 0))

    def joined() -> tuple[Tensor, Tensor]:
        batch = collate(spoken, lambda _: 0, 0, torch.device(args.device))
        hidden = base.forward(batch.input_ids, batch.attention_mask, batch.adapter_index)
        return base.token_logprobs(hidden.flatten(0, 1)[batch.predict], batch.targets)

    row = _measure_work(base, args, _Work(whole.expand(count, -1), lengths, args.answer), joined)
    return row | {"tokens": int(lengths.sum()), "computed": int(lengths[-1])}


def _measure_work(
    base: SharedBase,
    args: argparse.Namespace,
    work: _Work,
    joined: Callable[[], tuple[Tensor, Tensor]] | None = None,
) -> dict[str, Any]:
    """`joined`: log-probs and entropies of all rows' tokens in a pass that shares, if not by `base.forward` alone."""
    count = len(work.ids)
    owner = torch.zeros(count, dtype=torch.long)
    # `action`: the adapter acts where there is a loss, and on nothing before.
    late = torch.where(work.actions, 0, -1)
    advantage = torch.linspace(-1, 1, max(count, 2), device=args.device)[:count, None]
    positions = torch.arange(work.ids.shape[1], device=args.device).expand(count, -1)

    def one(index: Tensor, rows: slice, counted: bool) -> Tensor:
        part = work.cut(rows)
        ids, actions = part.ids.to(args.device), part.actions.to(args.device)
        mask = None if part.mask is None else part.mask.to(args.device)
        own = index[rows] if index.dim() == 1 else index[rows, : ids.shape[1]]
        hidden = base.forward(ids, mask, own, position_ids=None if counted else positions[rows, : ids.shape[1]])
        return learn(rows, *base.token_logprobs(hidden[:, :-1][actions[:, 1:]], ids[actions]))

    def learn(rows: slice, logprobs: Tensor, entropy: Tensor) -> Tensor:
        loss = -(logprobs * advantage[rows].expand(-1, work.said).flatten()).sum() - 0.01 * entropy.sum()
        loss.backward()
        return loss.detach()

    def clear() -> None:
        for parameter in base.adapter_parameters(AGENT):
            parameter.grad = None

    def all_joined(forward: Callable[[], tuple[Tensor, Tensor]]) -> Tensor:
        clear()
        return learn(slice(None), *forward())

    def update(index: Tensor, parts: Sequence[slice], counted: bool = True) -> Tensor:
        clear()
        return torch.stack([one(index, part, counted) for part in parts]).sum()

    everything, each = [slice(None)], [slice(row, row + 1) for row in range(count)]
    rivals: dict[str, Callable[[], Tensor]] = {
        "shared": lambda: update(owner, everything) if joined is None else all_joined(joined),
        # Equal beginnings are computed once only where positions are counted and not given.
        "unshared": lambda: update(owner, everything, False),
        "rows": lambda: update(owner, each),
    }
    expected = _gradient(base, rivals["rows"])
    worst = max(_agree(base, name, rivals[name], expected) for name in ("shared", "unshared"))
    if joined is None:
        rivals["action"] = lambda: update(late, everything)
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


PARTS = {"update": _measure_update, "turns": _measure_turns, "rollout": _measure_rollout}


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
