"""What a team on a mixture of experts costs, whose adapters act on every expert: K adapters against the bare base.

Two workloads on a random Qwen3-MoE, with adapters on all linear layers and on the experts' fused parameters:
- `play`: LocalEngine samples `--tokens` tokens for every row, all adapters in one batch, against the same prompts
  without an adapter;
- `learn`: forward and backward of the mixed batch of `bench update`, against the bare base's forward of the same
  tokens, which records nothing. A LoRA update costs 2N forward and 2N backward FLOP a token, so 2 is the floor;
- `peft`: the same gradient by PEFT, which adapts such parameters (`target_parameters`) with one adapter in a model: a
  model for each agent, on the same frozen weights, and a pass of its own for each agent's rows.

Loss and gradients must agree with PEFT's before anything is timed.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from bench import _measure
from bench._measure import positive
from bench._models import NoText, add_spread_adapter, random_model, sharing_weights
from bench.update import PaddedBatch, padded_batch, policy_loss
from mafrt.core.types import Request, SamplingParams
from mafrt.cpu.malloc import keep_freed_memory
from mafrt.engines.local.engine import LocalEngine
from mafrt.models.shared_base import SharedBase
from mafrt.scripts.cli.strict_parser import StrictParser

SHAPE = ("width", "layers", "mlp", "experts", "chosen", "vocab", "rank", "rows", "tokens")


def run(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Measure and return one JSON-able dict; raises `_measure.Disagreement` where the rivals do not agree."""
    args = _parser().parse_args(argv)
    torch.set_num_threads(args.threads)
    keep_freed_memory()  # as every command of this library does; PEFT, in the same process, gains by it too
    rows = []
    for count in args.adapters:
        rows.append(_measure_one(args, count))
        print(_line(rows[-1]), flush=True)
    return {
        "bench": "experts",
        "shape": {name: getattr(args, name) for name in SHAPE},
        "clock": args.clock,
        "machine": _measure.machine(),
        "rows": rows,
    }


def _parser() -> argparse.ArgumentParser:
    parser = StrictParser(prog="mafrt bench experts", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--adapters", type=positive, nargs="+", default=[1, 4, 16], help="numbers of adapters K")
    parser.add_argument("--rows", type=positive, default=2, help="mean rows per adapter; they really are 1 to 2*rows-1")
    parser.add_argument("--tokens", type=positive, default=48, help="longest row in tokens, and tokens sampled per row")
    parser.add_argument("--experts", type=positive, default=16, help="experts of a block")
    parser.add_argument("--chosen", type=positive, default=4, help="experts that each token goes through")
    _measure.add_model_flags(parser, vocab=512, rounds=5)
    return parser


def _measure_one(args: argparse.Namespace, count: int) -> dict[str, Any]:
    model = random_model(args, 2 * args.tokens).to(args.device)
    # Each wraps the layers in place, so that it needs modules of its own; all read the same frozen weights.
    copies = [sharing_weights(model) for _ in range(count)]
    base = SharedBase(model, NoText(), "random Qwen3-MoE")
    for number in range(count):
        add_spread_adapter(base, number, args.rank, 0.02)
    twins = dict(zip(base.adapters, _in_peft(base, copies), strict=True))
    batch = padded_batch(args, count)
    rivals = {**_learning(base, batch, twins), **_playing(base, args, batch)}
    worst = _check(rivals, base, twins)
    times = _measure.interleave(rivals, rounds=args.rounds, clock=args.clock, device=args.device)
    return {
        "K": count,
        "rows": len(batch.owner),
        "parity": worst,
        "play_tokens_per_s": round(len(batch.owner) * args.tokens / sorted(times["play"])[args.rounds // 2]),
        "play/bare": _measure.ratio(times["play"], times["bare_play"]),
        "learn/bare": _measure.ratio(times["learn"], times["bare_forward"]),
        "peft/learn": _measure.ratio(times["peft"], times["learn"]),
    }


def _in_peft(base: SharedBase, copies: Sequence[Any]) -> list[Any]:
    """Each adapter in a model of its own, read from the folder that is saved for it."""
    from peft import PeftModel

    with TemporaryDirectory(prefix="mafrt_bench_") as folder:
        for name in base.adapters:
            base.save_adapter(name, Path(folder) / name)
        return [
            PeftModel.from_pretrained(copy, str(Path(folder) / name), is_trainable=True).eval()
            for name, copy in zip(base.adapters, copies, strict=True)
        ]


def _learning(base: SharedBase, batch: PaddedBatch, twins: Mapping[str, Any]) -> dict[str, Callable[[], Tensor]]:
    index, nobody = torch.tensor(batch.owner), torch.full((len(batch.owner),), -1)
    ours = [p for name in base.adapters for p in base.adapter_parameters(name)]
    rows_of = {name: (index == base.adapter_index(name)).nonzero()[:, 0].to(batch.ids.device) for name in twins}

    def learn() -> Tensor:
        for parameter in ours:
            parameter.grad = None
        loss = policy_loss(base, base.forward(batch.ids, batch.mask, index), batch, 0.0)
        loss.backward()
        return loss.detach()

    @torch.no_grad()
    def bare_forward() -> Tensor:
        return policy_loss(base, base.forward(batch.ids, batch.mask, nobody), batch, 0.0)

    def peft() -> Tensor:
        total = torch.zeros((), device=batch.ids.device)
        for name, twin in twins.items():
            rows = rows_of[name]
            twin.zero_grad()
            longest = int(batch.mask[rows].sum(1).max())
            inner = twin.get_base_model().model
            hidden = inner(input_ids=batch.ids[rows, :longest], use_cache=False).last_hidden_state
            loss = policy_loss(base, hidden, batch, 0.0, rows)
            loss.backward()
            total += loss.detach()
        return total

    return {"learn": learn, "bare_forward": bare_forward, "peft": peft}


def _playing(base: SharedBase, args: argparse.Namespace, batch: PaddedBatch) -> dict[str, Callable[[], Any]]:
    engine, rng = LocalEngine(base, eos_ids=()), random.Random(0)
    sampling = SamplingParams(max_new_tokens=args.tokens, temperature=1.0)
    requests = [
        Request([rng.randrange(1, args.vocab) for _ in range(args.tokens // 3)], f"agent{k}", sampling, seed=number)
        for number, k in enumerate(batch.owner)
    ]
    bare = [replace(request, adapter=None) for request in requests]
    return {"play": lambda: engine.generate(requests), "bare_play": lambda: engine.generate(bare)}


def _check(rivals: Mapping[str, Callable[[], Any]], base: SharedBase, twins: Mapping[str, Any]) -> float:
    """Same loss and same gradient of every adapter as in PEFT, relative to its largest entry, or no timing."""
    loss, theirs = rivals["learn"](), rivals["peft"]()
    worst = _measure.agree("loss", loss, theirs, tolerance=2e-3)
    for name, twin in twins.items():
        grads = {path.replace(".default", ""): p.grad for path, p in twin.named_parameters() if p.requires_grad}
        for stem, pair in base.stored_layers(name).items():
            for part, parameter in zip(("lora_A", "lora_B"), pair, strict=True):
                own, grad = parameter.grad, grads.pop(f"base_model.model.{stem}.{part}.weight")
                scale = grad.abs().max().clamp(min=1e-6)
                worst = max(worst, _measure.agree(f"{name} {stem}", own / scale, grad / scale, tolerance=1e-3))
        if grads:
            raise _measure.Disagreement(f"{name}: PEFT has {len(grads)} parameters more; not timed")
    return worst


def _line(row: dict[str, Any]) -> str:
    cells = [f"{key} {row[key]['median']:5.2f}" for key in ("play/bare", "learn/bare", "peft/learn")]
    return f"K={row['K']:<3} {row['rows']:3} rows  {row['play_tokens_per_s']:6} tokens/s  " + "  ".join(cells)
