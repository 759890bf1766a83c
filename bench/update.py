"""One gradient of a team: a mixed batch of small, unequal, unsorted groups, against PEFT and against a forward.

Rivals, all with the same weights, tokens, loss and chunked log-probs:
- `update`: this library: one forward and backward for the whole batch;
- `forward`: the update's own forward half, log-probs and loss included. A LoRA update costs 2N forward and 2N backward
  FLOP a token, so 2.0 times its forward is the floor;
- `no_grad`: the same without recording anything for a backward, as an evaluation would run it;
- `peft_loop`: PEFT, `set_adapter` and a pass of its own for each agent's rows, cut to the longest of them;
- `peft_mixed`: PEFT, one pass with `adapter_names` (differentiable in eval mode).

Rows are padded on the right. PEFT gets no attention mask, which is its fastest way: under a causal mask the padding
reaches no real token. The library gets the mask, to skip the padding.

Bars: update <= 2.2 forward and <= 2.1 no_grad at any K; both PEFT ways >= 2 updates at K=16; K=1 no slower than PEFT.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bench import _measure
from bench._bars import NO_GRAD
from bench._measure import positive
from bench._models import build_rivals, cast
from mafrt.cpu.malloc import keep_freed_memory
from mafrt.models.shared_base import SharedBase
from mafrt.scripts.cli.loading import work_offline_if_unreachable
from mafrt.scripts.cli.strict_parser import StrictParser

NAMES = "peft_loop", "peft_mixed"
SHAPE = ("model", "width", "layers", "mlp", "vocab", "rank", "rows", "tokens", "dtype", "entropy_coef")


@dataclass
class PaddedBatch:
    """`ids`, `mask` `[B, T]` (1 = real, padded on the right); `actions` `[B, T]` is True where a token was sampled."""

    ids: Tensor
    mask: Tensor
    actions: Tensor
    owner: list[int]


def run(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Measure and return one JSON-able dict; raises `_measure.Disagreement` where the rivals do not agree."""
    args = _parser().parse_args(argv)
    torch.set_num_threads(args.threads)
    if args.model:
        work_offline_if_unreachable(args.model)
    keep_freed_memory()  # as every command of this library does; the rivals, in the same process, gain by it too
    rows = []
    for count in args.adapters:
        rows.append(_measure_one(args, count))
        print(_line(rows[-1]), flush=True)
    shape = {k: getattr(args, k) for k in SHAPE}
    bars = {
        "update<=2.2 forward at any K": all(row["update/forward"]["median"] <= 2.2 for row in rows),
        f"update<={NO_GRAD:g} no_grad at any K": all(row["update/no_grad"]["median"] <= NO_GRAD for row in rows),
        ">=2x PEFT at K=16": all(row[f"{n}/update"]["median"] >= 2 for row in rows if row["K"] == 16 for n in NAMES),
        "K=1 no slower than PEFT": all(
            row[f"{n}/update"]["median"] >= 1 for row in rows if row["K"] == 1 for n in NAMES
        ),
    }
    return {
        "bench": "update",
        "shape": shape,
        "clock": args.clock,
        "machine": _measure.machine(),
        "rows": rows,
        "bars": bars,
    }


def _parser() -> argparse.ArgumentParser:
    parser = StrictParser(prog="mafrt bench update", description=__doc__.split("\n")[0])
    parser.add_argument("--model", help="a base such as smollm2; default: a random one of the given shape")
    parser.add_argument("--adapters", type=positive, nargs="+", default=[1, 2, 4, 8, 16], help="numbers of adapters K")
    parser.add_argument("--rows", type=positive, default=2, help="mean rows per adapter; they really are 1 to 2*rows-1")
    parser.add_argument("--tokens", type=positive, default=48, help="longest row in tokens; a third is the prompt")
    _measure.add_model_flags(parser, vocab=512, rounds=15)
    parser.add_argument(
        "--dtype",
        choices=["float32", "bfloat16"],
        default="float32",
        help="of the base; parity is checked in float32 first",
    )
    parser.add_argument("--entropy_coef", type=float, default=0.0, help="entropy bonus of the loss, as in training")
    return parser


def _measure_one(args: argparse.Namespace, count: int) -> dict[str, Any]:
    models = build_rivals(args, count, window=args.tokens, spread=0.02)
    base, peft = models.base, models.peft
    batch = padded_batch(args, count)
    rivals = _rivals(base, peft, batch, count, args.entropy_coef)
    worst = _check(rivals, base, peft, count)
    # Parity is checked in float32 first: in half precision a wrong result could hide behind the rounding.
    if args.dtype != "float32":
        cast(models, args.dtype)
    times = _measure.interleave(rivals, rounds=args.rounds, clock=args.clock, device=args.device)
    row: dict[str, Any] = {
        "K": count,
        "rows": len(batch.owner),
        "tokens": int(batch.mask.sum()),
        "parity": worst,
        "update_s": round(sorted(times["update"])[args.rounds // 2], 5),
        "update/forward": _measure.ratio(times["update"], times["forward"]),
        "update/no_grad": _measure.ratio(times["update"], times["no_grad"]),
    }
    for name in NAMES:
        row[f"{name}/update"] = _measure.ratio(times[name], times["update"])
    return row


def padded_batch(args: argparse.Namespace, count: int) -> PaddedBatch:
    """Rows in random order, `1..2*rows-1` per adapter, with a tail of short ones."""
    rng = random.Random(count)
    # Unequal and shuffled groups, as a mini-batch has them; equal ones would flatter any grouping.
    owner = [k for k in range(count) for _ in range(rng.randint(1, 2 * args.rows - 1) if count > 1 else args.rows)]
    rng.shuffle(owner)
    lengths = [max(8, int(args.tokens * (0.4 + 0.6 * rng.random()))) for _ in owner]
    lengths[0] = args.tokens
    ids = torch.randint(0, args.vocab, (len(owner), args.tokens), generator=torch.Generator().manual_seed(count))
    steps = torch.arange(args.tokens)
    mask = (steps < torch.tensor(lengths)[:, None]).long()
    # The first third is the prompt, which has no loss.
    actions = mask.bool() & (steps >= args.tokens // 3)
    return PaddedBatch(ids.to(args.device), mask.to(args.device), actions.to(args.device), owner)


def policy_loss(
    base: SharedBase, hidden: Tensor, batch: PaddedBatch, bonus: float, rows: Tensor | slice = slice(None)
) -> Tensor:
    """A policy loss: every row with an advantage of its own, and `bonus` times the entropy, which is computed anyway.

    Without a bonus no gradient of the entropy is computed, as in training.
    """
    actions, ids = batch.actions[rows, 1 : hidden.shape[1]], batch.ids[rows, 1 : hidden.shape[1]]
    advantage = torch.linspace(-1, 1, len(batch.owner), device=ids.device)[rows, None].expand_as(ids)[actions]
    logprobs, entropy = base.token_logprobs(hidden[:, :-1][actions], ids[actions], entropy_grad=bonus != 0)
    loss = -(logprobs * advantage).sum()
    return loss - bonus * entropy.sum() if bonus else loss


def _rivals(
    base: SharedBase, peft: Any, batch: PaddedBatch, count: int, bonus: float
) -> dict[str, Callable[[], Tensor]]:
    index = torch.tensor(batch.owner)
    names = [f"agent{k}" for k in batch.owner]
    groups = [(f"agent{k}", (index == k).nonzero()[:, 0].to(batch.ids.device)) for k in range(count)]
    groups = [(name, rows) for name, rows in groups if len(rows)]
    ours = [p for name in base.adapters for p in base.adapter_parameters(name)]
    theirs = [p for name, p in peft.named_parameters() if "lora_" in name]
    inner = peft.get_base_model().model

    def clear(parameters: list[Any]) -> None:
        for parameter in parameters:
            parameter.grad = None

    def update() -> Tensor:
        clear(ours)
        loss = policy_loss(base, base.forward(batch.ids, batch.mask, index), batch, bonus)
        loss.backward()
        return loss.detach()

    def forward() -> Tensor:
        return policy_loss(base, base.forward(batch.ids, batch.mask, index), batch, bonus).detach()

    def no_grad() -> Tensor:
        with torch.no_grad():
            return forward()

    def peft_loop() -> Tensor:
        clear(theirs)
        total = torch.zeros((), device=batch.ids.device)
        for name, rows in groups:
            peft.set_adapter(name)
            longest = int(batch.mask[rows].sum(1).max())
            hidden = inner(input_ids=batch.ids[rows, :longest], use_cache=False).last_hidden_state
            loss = policy_loss(base, hidden, batch, bonus, rows)
            loss.backward()
            total += loss.detach()
        return total

    def peft_mixed() -> Tensor:
        clear(theirs)
        for parameter in theirs:  # `set_adapter` freezes all but one
            parameter.requires_grad_(True)
        with peft._enable_peft_forward_hooks(adapter_names=names):
            hidden = inner(input_ids=batch.ids, use_cache=False).last_hidden_state
        loss = policy_loss(base, hidden, batch, bonus)
        loss.backward()
        return loss.detach()

    return {
        "update": update,
        "forward": forward,
        "no_grad": no_grad,
        "peft_loop": peft_loop,
        "peft_mixed": peft_mixed,
    }


def _check(rivals: dict[str, Callable[[], Tensor]], base: SharedBase, peft: Any, count: int) -> float:
    """Same loss and same gradient of every adapter, relative to its largest entry, or no timing."""
    # The rounding of float32 adds up over layers. On the 30 of SmolLM2 the worst matrix of 16 adapters is 1.3e-3 from
    # its gradient in float64 (with MKL's order of sums 6e-4), the median one 5e-6.
    tolerance = 1e-4 * max(1.0, base.config.num_hidden_layers / 2)
    expected = rivals["update"]()
    grads: dict[str, dict[str, Any]] = {
        name: {p: a.grad for p, (a, _) in base.adapter_layers(name).items()} for name in base.adapters
    }
    worst = 0.0
    for rival in ("forward", "no_grad", *NAMES):
        worst = max(worst, _measure.agree(f"K={count} {rival} loss", rivals[rival](), expected, tolerance=2e-3))
        if rival in ("forward", "no_grad"):
            continue
        parameters = dict(peft.named_parameters())
        for name, layers in grads.items():
            for path, grad in layers.items():
                theirs = parameters[f"base_model.model.{path}.lora_A.{name}.weight"].grad
                scale = grad.abs().max()
                found = f"K={count} {rival} {name} {path}"
                worst = max(worst, _measure.agree(found, theirs / scale, grad / scale, tolerance=tolerance))
    return worst


def _line(row: dict[str, Any]) -> str:
    cells = [
        f"{key} {row[key]['median']:5.2f}"
        for key in ("update/forward", "update/no_grad", *(f"{n}/update" for n in NAMES))
    ]
    return (
        f"K={row['K']:<3} {row['rows']:3} rows {row['tokens']:6} tokens {row['update_s'] * 1e3:8.1f} ms  "
        + "  ".join(cells)
    )
