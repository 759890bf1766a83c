"""Sampling for a team: K adapters, a few unsorted and unequal rows each, against PEFT, `generate` and the bare base.

Rivals, all with the same weights, prompts and numbers of tokens, and with no end token. For K adapters, greedy:
- `ours`: LocalEngine, all adapters in one batch;
- `bare`: LocalEngine on the same prompts with no adapter, the practical ceiling;
- `switching`: PEFT, `set_adapter` and one `generate` for each adapter's rows;
- `names`: PEFT, one `generate` with `adapter_names`, the published way to mix adapters in a batch;
- `names_loop`: the same PEFT model in a bare decode loop instead of `generate`, to exclude the overhead of
  `generate`. The bars take the faster of the two.

Without adapters, `--batch` rows, greedy and sampled: LocalEngine against transformers' `generate`.

`--engines` adds other systems: `vllm`, with adapters and without, and `llama.cpp`, without.

No two rows share a prompt unless `--samples` says so; sharing is the benchmark `prefix`'s subject. Before timing,
greedy tokens must be equal but for ties, and sampled ones must pass a chi-square test against transformers' own
distribution. Other number formats than float32 are checked in float32 first; in their own, sampling alone is checked.

Bars: K=4: >=2x adapter_names, >=2x switching, >=.85 of the bare base; K=16: >=3x adapter_names, >=.8 of the bare base
(.75 in bfloat16); K=1: no slower than PEFT; the bare base >=2x `generate` at 64 rows, greedy and sampled.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from bench import _measure
from bench._bars import ADAPTER_NAMES, BARE_SHARE
from bench._distribution import check_distribution
from bench._measure import positive
from bench._models import Rivals, build_rivals, cast, sharpen
from bench._other_engines import ENGINES, Engine, open_engine
from bench._rollout_rivals import (
    PEFT_WAYS,
    at_temperature_1,
    check_greedy,
    forget_end_tokens,
    generate_rivals,
    logits_after,
    team_rivals,
)
from mafrt.core.types import Request, SamplingParams
from mafrt.cpu.malloc import keep_freed_memory
from mafrt.engines.local.engine import LocalEngine
from mafrt.scripts.cli.loading import work_offline_if_unreachable
from mafrt.scripts.cli.strict_parser import StrictParser

SHAPE = ("model", "width", "mlp", "layers", "vocab", "rank", "prompt", "tokens", "samples", "dtype")


def run(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Measure and return one JSON-able dict; raises `_measure.Disagreement` where the rivals do not agree."""
    args = _parser().parse_args(argv)
    if args.model:
        work_offline_if_unreachable(args.model)
    torch.set_num_threads(args.threads)
    keep_freed_memory()  # as every command of this library does; the rivals, in the same process, gain by it too
    measured, bare = [], []
    for place, count in enumerate(args.adapters):
        models = build_rivals(args, count, window=args.prompt + args.tokens, spread=0.05)
        forget_end_tokens(models)
        if not args.model:
            sharpen(models)
        with ExitStack() as opened:
            others = _open_engines(args, models, count, "float32", opened)
            found = [_check_team(args, models, count, rows, others) for rows in args.rows]
            bare_check = _check_bare(args, models, others) if place == 0 and args.batch else None
            if args.dtype != "float32":
                cast(models, args.dtype)
                for row in found:
                    row["chi_square_p"] = _chi_square_team(args, models, row["K"], row["rows_per_adapter"])
                if bare_check is not None:
                    bare_check["chi_square_p"] = _chi_square_bare(args, models)
                opened.close()
                others = _open_engines(args, models, count, args.dtype, opened)
            for row in found:
                measured.append(row | _time_team(args, models, row["K"], row["rows_per_adapter"], others))
                print(_line(measured[-1]), flush=True)
            if bare_check is not None:
                bare.append(bare_check | _time_bare(args, models, others))
                print(_bare_line(bare[-1]), flush=True)
    bars = _bars(measured, args.dtype) | _bare_bars(bare)
    return {
        "bench": "rollout",
        "shape": {k: getattr(args, k) for k in SHAPE},
        "clock": args.clock,
        "machine": _measure.machine(),
        "engines": args.engines,
        "rows": measured,
        "bare": bare,
        "bars": bars,
        "bars_met": all(bars.values()) if bars else None,
    }


def _parser() -> argparse.ArgumentParser:
    parser = StrictParser(prog="mafrt bench rollout", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", help="a base such as smollm2; default: a random one of the given shape")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32", help="of the frozen weights")
    parser.add_argument("--adapters", type=positive, nargs="+", default=[1, 2, 4, 8, 16], help="numbers of adapters K")
    parser.add_argument("--rows", type=positive, nargs="+", default=[2, 8], help="mean rows per adapter")
    parser.add_argument("--engines", nargs="+", choices=list(ENGINES), default=[], help="other systems as rivals")
    parser.add_argument("--batch", type=int, default=64, help="rows of the bare base against generate; 0: leave it out")
    parser.add_argument("--samples", type=positive, default=1, help="rows of an adapter that share one prompt")
    parser.add_argument("--prompt", type=positive, default=96, help="longest prompt in tokens; most are much shorter")
    parser.add_argument("--tokens", type=positive, default=32, help="tokens sampled per row")
    parser.add_argument("--draws", type=positive, default=2048, help="sampled tokens of each chi-square test")
    _measure.add_model_flags(parser, vocab=1024, rounds=7)
    return parser


def _open_engines(
    args: argparse.Namespace, models: Rivals, count: int, dtype: str, opened: ExitStack
) -> dict[str, Engine]:
    rows = max(args.batch, *(len(_requests(args, count, rows)) for rows in args.rows))
    others: dict[str, Engine] = {}
    for name in args.engines:
        folder = Path(opened.enter_context(TemporaryDirectory(prefix="mafrt_bench_")))
        engine = open_engine(
            name, models, folder, dtype=dtype, window=args.prompt + args.tokens, rows=rows, threads=args.threads
        )
        others[name] = opened.enter_context(closing(engine))
    return others


def _with_adapters(others: Mapping[str, Engine]) -> dict[str, Engine]:
    """Those of the other engines that decode with adapters."""
    return {name: engine for name, engine in others.items() if engine.with_adapters}


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


def _bare_requests(args: argparse.Namespace) -> list[Request]:
    return [Request(r.prompt_ids, None, r.sampling, r.seed) for r in _requests(args, 1, args.batch)]


def _check_team(
    args: argparse.Namespace, models: Rivals, count: int, rows: int, others: Mapping[str, Engine]
) -> dict[str, Any]:
    requests = _requests(args, count, rows)
    rivals = team_rivals(models, requests, args.device)
    said = {name: rivals[name]() for name in PEFT_WAYS}
    said |= {name: engine.generate(requests) for name, engine in _with_adapters(others).items()}
    ties = check_greedy(models.base, requests, rivals["ours"](), said)
    p = _chi_square_team(args, models, count, rows)
    return {"K": count, "rows_per_adapter": rows, "ties": ties, "chi_square_p": p}


def _chi_square_team(args: argparse.Namespace, models: Rivals, count: int, rows: int) -> float:
    def logits_of(request: Request, ids: list[int]) -> torch.Tensor:
        models.peft.set_adapter(str(request.adapter))
        return logits_after(models.peft.get_base_model(), request, ids, args.device)

    engine = LocalEngine(models.base, eos_ids=())
    return check_distribution(f"K={count}", engine, _requests(args, count, rows), logits_of, args.draws)


def _check_bare(args: argparse.Namespace, models: Rivals, others: Mapping[str, Engine]) -> dict[str, Any]:
    requests = _bare_requests(args)
    rivals = generate_rivals(models, requests, args.device)
    said = {"generate greedy": rivals["generate greedy"]()}
    said |= {name: engine.generate(requests) for name, engine in others.items()}
    ties = check_greedy(models.base, requests, rivals["greedy"](), said)
    return {"rows": args.batch, "ties": ties, "chi_square_p": _chi_square_bare(args, models)}


def _chi_square_bare(args: argparse.Namespace, models: Rivals) -> float:
    return check_distribution(
        "bare base",
        LocalEngine(models.base, eos_ids=()),
        _bare_requests(args),
        lambda request, ids: logits_after(models.plain, request, ids, args.device),
        args.draws,
    )


def _time_team(
    args: argparse.Namespace, models: Rivals, count: int, rows: int, others: Mapping[str, Engine]
) -> dict[str, Any]:
    requests = _requests(args, count, rows)
    rivals = team_rivals(models, requests, args.device)
    rivals |= {name: partial(engine.generate, requests) for name, engine in _with_adapters(others).items()}
    times = _measure.interleave(rivals, rounds=args.rounds, warmup=1, clock=args.clock, device=args.device)
    median = sorted(times["ours"])[args.rounds // 2]
    return {
        "tokens_per_s": round(len(requests) * args.tokens / median),
        **{f"{name}/ours": _measure.ratio(times[name], times["ours"]) for name in ("names", "names_loop")},
        **{f"{name}/ours": _measure.ratio(times[name], times["ours"]) for name in ("switching", "bare")},
        **{f"{name}/ours": _measure.ratio(times[name], times["ours"]) for name in _with_adapters(others)},
    }


def _time_bare(args: argparse.Namespace, models: Rivals, others: Mapping[str, Engine]) -> dict[str, Any]:
    requests = _bare_requests(args)
    rivals = generate_rivals(models, requests, args.device)
    for name, engine in others.items():
        rivals[f"{name} greedy"] = partial(engine.generate, requests)
        rivals[f"{name} sampled"] = partial(engine.generate, at_temperature_1(requests))
    times = _measure.interleave(rivals, rounds=args.rounds, warmup=1, clock=args.clock, device=args.device)
    median = sorted(times["greedy"])[args.rounds // 2]
    ways = ("greedy", "sampled")
    return {
        "tokens_per_s": round(len(requests) * args.tokens / median),
        **{
            f"{name}/bare {way}": _measure.ratio(times[f"{name} {way}"], times[way])
            for name in ("generate", *others)
            for way in ways
        },
    }


def _bars(measured: list[dict[str, Any]], dtype: str) -> dict[str, bool]:
    """Which bars hold, of those whose K and rows were measured. A rival in several versions counts as its fastest."""
    names = ("names", "names_loop")
    share = BARE_SHARE[dtype]
    bars = (
        ("K=4: >=2x adapter_names", 4, names, ADAPTER_NAMES[4]),
        ("K=4: >=2x switching", 4, ("switching",), 2.0),
        ("K=4: >=.85 of the bare base", 4, ("bare",), share[4]),
        ("K=16: >=3x adapter_names", 16, names, ADAPTER_NAMES[16]),
        (f"K=16: >={share[16]:.2g} of the bare base".replace("0.", "."), 16, ("bare",), share[16]),
        ("K=1: no slower than PEFT", 1, ("switching", *names), 1.0),
    )
    passed: dict[str, bool] = {}
    for text, count, rivals, bar in bars:
        for row in measured:
            if row["K"] == count:
                holds = min(row[f"{rival}/ours"]["median"] for rival in rivals) >= bar
                passed[text] = passed.get(text, True) and holds
    return passed


def _bare_bars(bare: list[dict[str, Any]]) -> dict[str, bool]:
    return {
        f"bare base >=2x generate at 64 rows, {way}": row[f"generate/bare {way}"]["median"] >= 2.0
        for row in bare
        if row["rows"] == 64
        for way in ("greedy", "sampled")
    }


def _line(row: dict[str, Any]) -> str:
    cells = [f"{key} {row[key]['median']:5.2f}" for key in row if "/" in key]
    head = f"K={row['K']:<3} {row['rows_per_adapter']} rows each {row['tokens_per_s']:6} tokens/s  "
    return head + "  ".join(cells) + f"  chi-square p {row['chi_square_p']:.3f}"


def _bare_line(row: dict[str, Any]) -> str:
    cells = [f"{key} {row[key]['median']:5.2f}" for key in row if "/" in key]
    head = f"bare base, {row['rows']} rows {row['tokens_per_s']:6} tokens/s  "
    return head + "  ".join(cells) + f"  chi-square p {row['chi_square_p']:.3f}"
