"""Sampling for a team: K adapters, a few unsorted and unequal rows each, against PEFT and against the bare base.

Rivals, all with the same weights, prompts and numbers of tokens, greedy, with no end token:
- `ours`: LocalEngine, all adapters in one batch;
- `bare`: LocalEngine on the same prompts with no adapter, the practical ceiling;
- `switching`: PEFT, `set_adapter` and one `generate` for each adapter's rows;
- `names`: PEFT, one `generate` with `adapter_names`, the published way to mix adapters in a batch;
- `names_loop`: the same PEFT model in a bare decode loop instead of `generate`, to exclude the overhead of
  `generate`. The bars take the faster of the two.

No two rows share a prompt unless `--samples` says so; sharing is the benchmark `prefix`'s subject.

Bars: K=4: >=1.6x adapter_names, >=2x switching, >=.8 of the bare base; K=16: >=2.5x adapter_names at 2 rows an adapter
and >=1.7x at 8, >=.65 of the bare base; K=1: no slower than PEFT.
"""

from __future__ import annotations

import argparse
import importlib.util
import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from mafrt.core.types import Request, SamplingParams
from mafrt.engines.local.engine import LocalEngine
from mafrt.models.shared_base import SharedBase
from mafrt.scripts.benchmarks import _measure
from mafrt.scripts.benchmarks._models import build_pair

Tokens = list[list[int]]


def run(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Measure and return one JSON-able dict; raises `_measure.Disagreement` where the rivals do not agree."""
    args = _parser().parse_args(argv)
    torch.set_num_threads(args.threads)
    measured = []
    for count in args.adapters:
        base, peft = build_pair(args, count, window=args.prompt + args.tokens, spread=0.05)
        for rows in args.rows:
            measured.append(_measure_one(args, base, peft, count, rows))
            print(_line(measured[-1]), flush=True)
    shape = {k: getattr(args, k) for k in ("width", "mlp", "layers", "vocab", "rank", "prompt", "tokens", "samples")}
    bars = _bars(measured)
    return {
        "bench": "rollout",
        "shape": shape,
        "clock": args.clock,
        "machine": _measure.machine(),
        "vllm": "installed; no rival for it here" if importlib.util.find_spec("vllm") else "not installed",
        "rows": measured,
        "bars": bars,
        "bars_met": all(bars.values()) if bars else None,
    }


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="mafrt bench rollout", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--adapters", type=int, nargs="+", default=[1, 2, 4, 8, 16], help="numbers of adapters K")
    parser.add_argument("--rows", type=int, nargs="+", default=[2, 8], help="mean rows per adapter")
    parser.add_argument("--samples", type=int, default=1, help="rows of an adapter that share one prompt")
    parser.add_argument("--prompt", type=int, default=96, help="longest prompt in tokens; most are much shorter")
    parser.add_argument("--tokens", type=int, default=32, help="tokens sampled per row")
    _measure.add_model_flags(parser, vocab=1024, rounds=7)
    return parser


def _requests(args: argparse.Namespace, count: int, rows: int) -> list[Request]:
    """`rows` per adapter on average (1 to 2*rows-1), in random order, prompts mostly short with a tail of long ones."""
    rng = random.Random(100 * count + rows)
    sampling = SamplingParams(max_new_tokens=args.tokens, temperature=0.0)
    made: list[Request] = []
    for k, size in enumerate(_sizes(rng, count, rows)):
        for sample in range(size):
            if sample % args.samples == 0:
                length = max(4, int(args.prompt * rng.random() ** 2))
                prompt = [rng.randrange(1, args.vocab) for _ in range(length)]
            made.append(Request(prompt, f"agent{k}", sampling, seed=len(made)))
    rng.shuffle(made)
    return made


def _sizes(rng: random.Random, count: int, rows: int) -> list[int]:
    """Unequal sizes of the adapters' groups whose mean is exactly `rows`."""
    sizes = [rows] * count
    for first in range(0, count - 1, 2):
        shift = rng.randint(0, rows - 1)
        sizes[first], sizes[first + 1] = rows - shift, rows + shift
    return sizes


def _measure_one(args: argparse.Namespace, base: SharedBase, peft: Any, count: int, rows: int) -> dict[str, Any]:
    requests = _requests(args, count, rows)
    rivals = _rivals(args, base, peft, requests)
    ties = _check(base, requests, rivals)
    times = _measure.interleave(rivals, rounds=args.rounds, warmup=1, clock=args.clock, device=args.device)
    median = sorted(times["ours"])[args.rounds // 2]
    loop, published = _measure.ratio(times["names_loop"], times["ours"]), _measure.ratio(times["names"], times["ours"])
    return {
        "K": count,
        "rows_per_adapter": rows,
        "ties": ties,
        "tokens_per_s": round(len(requests) * args.tokens / median),
        "names/ours": published,
        "names_loop/ours": loop,
        "switching/ours": _measure.ratio(times["switching"], times["ours"]),
        "bare/ours": _measure.ratio(times["bare"], times["ours"]),
    }


def _rivals(
    args: argparse.Namespace, base: SharedBase, peft: Any, requests: Sequence[Request]
) -> dict[str, Callable[[], Tokens]]:
    engine = LocalEngine(base, eos_ids=())
    bare = [Request(r.prompt_ids, None, r.sampling, r.seed) for r in requests]
    names = [str(r.adapter) for r in requests]
    groups = {name: [i for i, owner in enumerate(names) if owner == name] for name in sorted(set(names))}
    device = args.device
    everything = _left_padded([r.prompt_ids for r in requests], device)
    padded = {name: _left_padded([requests[i].prompt_ids for i in rows], device) for name, rows in groups.items()}
    fixed: dict[str, Any] = {"do_sample": False, "max_new_tokens": args.tokens, "pad_token_id": 0, "eos_token_id": None}

    def ours() -> Tokens:
        return [completion.ids for completion in engine.generate(requests)]

    def bare_base() -> Tokens:
        return [completion.ids for completion in engine.generate(bare)]

    def switching() -> Tokens:
        sampled: Tokens = [[] for _ in requests]
        for name, rows in groups.items():
            peft.set_adapter(name)
            ids, mask = padded[name]
            out = peft.generate(input_ids=ids, attention_mask=mask, **fixed)[:, ids.shape[1] :]
            for row, tokens in zip(rows, out.tolist(), strict=True):
                sampled[row] = tokens
        return sampled

    def by_names() -> Tokens:
        ids, mask = everything
        out = peft.generate(input_ids=ids, attention_mask=mask, adapter_names=names, **fixed)
        return out[:, ids.shape[1] :].tolist()

    def by_names_loop() -> Tokens:
        with torch.no_grad(), peft._enable_peft_forward_hooks(adapter_names=names):
            return _greedy_loop(peft.get_base_model(), *everything, args.tokens).tolist()

    return {"ours": ours, "bare": bare_base, "switching": switching, "names": by_names, "names_loop": by_names_loop}


def _left_padded(prompts: Sequence[Sequence[int]], device: str) -> tuple[Tensor, Tensor]:
    width = max(len(p) for p in prompts)
    ids = torch.tensor([[0] * (width - len(p)) + list(p) for p in prompts])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
    return ids.to(device), mask.to(device)


def _greedy_loop(model: Any, ids: Tensor, mask: Tensor, steps: int) -> Tensor:
    """Greedy decoding with nothing around the model's forward; `[rows, steps]`."""
    from transformers.cache_utils import DynamicCache

    cache, tokens = DynamicCache(), []
    position = (mask.cumsum(1) - 1).clamp(min=0)
    for _ in range(steps):
        hidden = model.model(
            input_ids=ids, attention_mask=mask, position_ids=position, past_key_values=cache, use_cache=True
        ).last_hidden_state
        ids = model.lm_head(hidden[:, -1]).argmax(1, keepdim=True)
        tokens.append(ids)
        mask = torch.cat((mask, mask.new_ones(len(mask), 1)), 1)
        position = position[:, -1:] + 1
    return torch.cat(tokens, 1)


def _check(base: SharedBase, requests: Sequence[Request], rivals: dict[str, Callable[[], Tokens]]) -> int:
    """All rivals but the bare base give the same tokens, or no timing.

    Rows may part where two logits are equal to within rounding; returns how often they did.
    """
    ours, ties = rivals["ours"](), 0
    for name in ("switching", "names", "names_loop"):
        for request, mine, theirs in zip(requests, ours, rivals[name](), strict=True):
            if mine == theirs:
                continue
            place = next((i for i, (a, b) in enumerate(zip(mine, theirs, strict=False)) if a != b), None)
            if place is None:
                raise _measure.Disagreement(f"{name}: found {len(theirs)} tokens, expected {len(mine)}; not timed")
            ids = torch.tensor([[*request.prompt_ids, *mine[:place]]], device=base.device)
            with torch.no_grad():
                hidden = base.forward(ids, None, torch.tensor([base.adapter_index(request.adapter)]))
                logits = base.logits(hidden[0, -1])
            two = logits[[mine[place], theirs[place]]]
            _measure.agree(f"{name} token {place}", two[0], two[1], tolerance=1e-4 * float(logits.abs().max()))
            ties += 1
    return ties


def _bars(measured: list[dict[str, Any]]) -> dict[str, bool]:
    """Which bars hold, of those whose K and rows were measured. A rival in several versions counts as its fastest."""
    names = ("names", "names_loop")
    bars = (
        ("K=4: >=1.6x adapter_names", 4, (2, 8), names, 1.6),
        ("K=4: >=2x switching", 4, (2, 8), ("switching",), 2.0),
        ("K=4: >=.8 of the bare base", 4, (2, 8), ("bare",), 0.8),
        ("K=16: >=2.5x adapter_names at 2 rows", 16, (2,), names, 2.5),
        ("K=16: >=1.7x adapter_names at 8 rows", 16, (8,), names, 1.7),
        ("K=16: >=.65 of the bare base", 16, (2, 8), ("bare",), 0.65),
        ("K=1: no slower than PEFT", 1, (2, 8), ("switching", *names), 1.0),
    )
    passed: dict[str, bool] = {}
    for text, count, sizes, rivals, bar in bars:
        for row in measured:
            if row["K"] == count and row["rows_per_adapter"] in sizes:
                holds = min(row[f"{rival}/ours"]["median"] for rival in rivals) >= bar
                passed[text] = passed.get(text, True) and holds
    return passed


def _line(row: dict[str, Any]) -> str:
    cells = [f"{key} {row[key]['median']:5.2f}" for key in row if "/" in key]
    head = f"K={row['K']:<3} {row['rows_per_adapter']} rows each {row['tokens_per_s']:6} tokens/s  "
    return head + "  ".join(cells)
