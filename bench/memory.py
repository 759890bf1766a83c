"""Memory of an update: over the number of adapters, and over the size of the vocabulary.

`adapters`: one optimizer step of K adapters of mixed ranks on the same tokens, whatever K is. Its bytes are those of
the base, of adapters with gradients and optimizer states, of the kernels' copies of the adapters, and of the rest: all
that is allocated beside them at the peak. The rest must not grow with K.

`vocabulary`: log-probabilities and their gradient for N tokens, over heads of V tokens. `full` holds the logits of all
tokens, `chunked` is the library's. Its bytes are the peak beside hidden states and head.

Bytes are those that torch allocates (`torch.profiler` on a CPU, the allocator's own peak on a GPU), so neither the
machine's load nor an allocator's rounding shows in them. The time is measured apart. Before that, each adapter's
gradient must be that of a pass over its own rows alone, and both ways to log-probabilities must agree.

Bars: the rest at the largest K is at most 1.15 times that at the smallest; `chunked` takes at most .3 of `full` at the
largest vocabulary.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from bench import _measure
from bench._measure import positive
from bench._models import build_base
from bench._tables import table
from mafrt.models.compute import compute_for
from mafrt.models.logprobs import PLAIN, token_logprobs
from mafrt.models.shared_base import SharedBase
from mafrt.scripts.cli.strict_parser import StrictParser

MIXED_RANKS = (8, 2, 16, 4)
"""of the adapters in turn; one alone has about the mean"""
SHAPE = ("width", "layers", "mlp", "vocab", "rows", "tokens", "scored", "hidden")
MIB = 2**20


def run(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Measure and return one JSON-able dict; raises `_measure.Disagreement` where the results are not exact."""
    parser = _parser()
    args = parser.parse_args(argv)
    if max(args.adapters) > args.rows:
        parser.error(
            f"found {max(args.adapters)} adapters for {args.rows} rows; every adapter needs a row, raise --rows"
        )
    torch.set_num_threads(args.threads)
    adapters = []
    for count in args.adapters:
        adapters.append(_measure_adapters(args, count))
        print(_adapters_line(adapters[-1]), flush=True)
    vocabularies = []
    for size in args.vocabularies:
        vocabularies.append(_measure_vocabulary(args, size))
        print(_vocabulary_line(vocabularies[-1]), flush=True)
    measured = {"bench": "memory", "adapters": adapters, "vocabularies": vocabularies}
    print("\n" + table([("", measured)]) + "\n\n" + table([("", measured)], "vocabulary"))
    grown = adapters[-1]["rest"] / adapters[0]["rest"]
    return {
        "bench": "memory",
        "shape": {
            k: getattr(args, k) for k in ("width", "layers", "mlp", "vocab", "rows", "tokens", "scored", "hidden")
        },
        "clock": args.clock,
        "machine": _measure.machine(),
        "adapters": adapters,
        "vocabularies": vocabularies,
        "bars": {
            "rest at the largest K <= 1.15 of the smallest": grown <= 1.15,
            "chunked <= .3 of full at the largest vocabulary": vocabularies[-1]["share"] <= 0.3,
        },
    }


def _parser() -> argparse.ArgumentParser:
    parser = StrictParser(prog="mafrt bench memory", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--adapters", type=positive, nargs="+", default=[1, 4, 16, 64], help="numbers of adapters K")
    parser.add_argument("--rows", type=positive, default=64, help="rows of the update, shared out among the adapters")
    parser.add_argument("--tokens", type=positive, default=32, help="tokens of a row")
    parser.add_argument(
        "--vocabularies",
        type=positive,
        nargs="+",
        default=[32000, 151936],
        help="sizes V of the heads, in tokens",
    )
    parser.add_argument("--scored", type=positive, default=1024, help="tokens N with log-probabilities")
    parser.add_argument("--hidden", type=positive, default=128, help="channels of their hidden states")
    _measure.add_model_flags(parser, vocab=512, rounds=3)
    return parser


def peak_bytes(call: Callable[[], object], device: str) -> int:
    """Most bytes allocated during a call beyond those before it."""
    if device.startswith("cuda"):
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call()
        return int(torch.cuda.max_memory_allocated() - before)
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        call()
    held = peak = 0
    results: Any = profiler.profiler
    for event in sorted(results.kineto_results.events(), key=lambda event: event.start_ns()):
        if event.name() == "[memory]":
            held += event.nbytes()
            peak = max(peak, held)
    return peak


def _measure_adapters(args: argparse.Namespace, count: int) -> dict[str, Any]:
    ranks = [MIXED_RANKS[number % len(MIXED_RANKS)] for number in range(count)]
    base = build_base(args, ranks, window=args.tokens, spread=0.02)
    ids = torch.randint(5, args.vocab, (args.rows, args.tokens), generator=torch.Generator().manual_seed(1))
    ids, owner = ids.to(args.device), torch.arange(args.rows) % count
    worst = _check(base, ids, owner)
    names = list(base.adapters)
    optimizers = [torch.optim.AdamW(base.adapter_parameters(name), lr=0.0) for name in names]

    def update() -> None:
        # Gradients are kept allocated, so that they count among the adapters' bytes and not among the rest.
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=False)
        _loss(base, ids, owner).backward()
        for optimizer in optimizers:
            optimizer.step()

    update()  # allocates gradients and optimizer states
    rest = peak_bytes(update, args.device)
    # Every step changes the weights, so an update makes the copies again and they are among its bytes.
    copies = _copies(base)
    times = _measure.interleave({"update": update}, rounds=args.rounds, clock=args.clock, device=args.device)
    parameters = [p for name in names for p in base.adapter_parameters(name)]
    states = [t for o in optimizers for state in o.state.values() for t in state.values() if isinstance(t, Tensor)]
    return {
        "K": count,
        "ranks": sorted(set(ranks)),
        "tokens": args.rows * args.tokens,
        "parity": worst,
        "base": _bytes([p for p in base.model.parameters() if not p.requires_grad]),
        "held": _bytes([*parameters, *(p.grad for p in parameters if p.grad is not None), *states]),
        "copies": copies,
        "rest": rest - copies,
        "update_s": _measure.quartiles(times["update"]),
    }


def _copies(base: SharedBase) -> int:
    """Bytes of the adapters' weights once more, as the kernels read them."""
    groups = {id(kept.siblings): kept.siblings for layer in base.adapted_layers.values() if (kept := layer.faster)}
    return _bytes([t for siblings in groups.values() for t in siblings.copies()])


def _loss(base: SharedBase, ids: Tensor, owner: Tensor) -> Tensor:
    hidden = base.forward(ids, None, owner)
    logprobs, _ = base.token_logprobs(hidden[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    return -logprobs.sum()


def _check(base: SharedBase, ids: Tensor, owner: Tensor) -> float:
    """Largest difference of an adapter's gradient from that of its own rows alone, as a share of its largest entry."""
    _loss(base, ids, owner).backward()
    together = {name: _gradients(base, name) for name in base.adapters}
    worst = 0.0
    for name, number in list(base.adapters.items())[:: max(1, len(base.adapters) // 4)]:
        own = owner == number
        _loss(base, ids[own.to(ids.device)], owner[own]).backward()
        alone = _gradients(base, name)
        scale = float(alone.abs().max())
        worst = max(worst, _measure.agree(f"gradient of {name}", together[name] / scale, alone / scale, tolerance=1e-5))
    return worst


def _gradients(base: SharedBase, name: str) -> Tensor:
    """The gradient of an adapter, which is cleared."""
    gradients = []
    for parameter in base.adapter_parameters(name):
        assert parameter.grad is not None
        gradients.append(parameter.grad.flatten())
        parameter.grad = None
    return torch.cat(gradients)


def _bytes(tensors: Sequence[Tensor]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


def _measure_vocabulary(args: argparse.Namespace, size: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(size)
    hidden = torch.randn(args.scored, args.hidden, generator=generator).to(args.device).requires_grad_()
    head = (torch.randn(size, args.hidden, generator=generator) / args.hidden**0.5).to(args.device)
    targets = torch.randint(size, (args.scored,), generator=generator).to(args.device)

    def full() -> Tensor:
        logp = functional.log_softmax(functional.linear(hidden, head), 1)
        return _backward(hidden, logp.gather(1, targets.unsqueeze(1)).squeeze(1))

    def chunked() -> Tensor:
        frozen = compute_for(hidden.device.type).frozen_head(head, None, PLAIN, None)
        return _backward(hidden, token_logprobs(hidden, targets, frozen, entropy_grad=False)[0])

    rivals = {"full": full, "chunked": chunked}
    scale = float(full().abs().max())
    worst = _measure.agree(f"V={size}, gradient", chunked() / scale, full() / scale, tolerance=1e-4)
    peaks = {name: peak_bytes(call, args.device) for name, call in rivals.items()}
    times = _measure.interleave(rivals, rounds=args.rounds, warmup=1, clock=args.clock, device=args.device)
    return {
        "V": size,
        "tokens": args.scored,
        "parity": worst,
        **peaks,
        "share": round(peaks["chunked"] / peaks["full"], 4),
        "chunked/full seconds": _measure.ratio(times["chunked"], times["full"]),
    }


def _backward(hidden: Tensor, logprobs: Tensor) -> Tensor:
    """The gradient of the sum of the log-probabilities."""
    hidden.grad = None
    logprobs.sum().backward()
    assert hidden.grad is not None
    return hidden.grad


def _adapters_line(row: Mapping[str, Any]) -> str:
    return (
        f"K={row['K']:<3} base {row['base'] / MIB:.1f} MiB, adapters with gradients and optimizers "
        f"{row['held'] / MIB:.1f}, rest {row['rest'] / MIB:.1f}; {row['update_s']['median'] * 1e3:.0f} ms"
    )


def _vocabulary_line(row: Mapping[str, Any]) -> str:
    return (
        f"V={row['V']:<7} full {row['full'] / MIB:.0f} MiB, chunked {row['chunked'] / MIB:.0f}: {row['share']:.3f}; "
        f"seconds {row['chunked/full seconds']['median']:.2f}"
    )
