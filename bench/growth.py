"""Growth of time with agents, with answers to a prompt, and with the context, in play and in learning.

Axes:
- `agents`: K agents of mixed ranks, `--rows` rows each, so that the work grows with K;
- `agents, same work`: K agents share as many rows as the largest K has, so that the work is the same whatever K is;
- `answers`: n answers to one prompt;
- `context`: one answer to a prompt of c tokens.

`play` samples the answers, prompts included; `update` is one forward and backward over prompts and answers, with
log-probabilities and entropies, and one optimizer step of every agent.

Two fits of the medians over an axis, by least squares: time = a + b x, and the exponent of time ~ x^p. `last p` is the
exponent between the two largest x, where constant costs count least.

Before timing, at the smallest and the largest x: the sampler's log-probabilities must be those of a forward over
the whole sequence, an agent's gradient that of a pass over its own rows alone, and the forward that of the model with
a cache and its own attention, which computes every prompt for itself.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench import _measure
from bench._growth_fits import AxisFit, figure, fit_axis
from bench._measure import positive
from bench._models import build_base
from bench._tables import table
from bench.memory import MIXED_RANKS
from bench.reproduce._figure import need_matplotlib
from mafrt.config.train_config import LearnConfig
from mafrt.core.errors import ConfigError
from mafrt.core.reading import is_file_writable
from mafrt.core.types import Request, SamplingParams
from mafrt.cpu.malloc import keep_freed_memory
from mafrt.engines.local.engine import LocalEngine
from mafrt.models.kv_cache import KVCache
from mafrt.models.shared_base import SharedBase
from mafrt.scripts.cli.strict_parser import StrictParser
from mafrt.training.optimizer_steps import OptimizerSteps, make_optimizer_steps

PARTS = ("play", "update")
SHAPE = ("width", "mlp", "layers", "vocab", "rank", "rows", "prompt", "answer")


@dataclass(frozen=True)
class Work:
    """One point of an axis: rows `[rows, prompt + answer]` of tokens, and the adapter of each."""

    x: int
    ids: Tensor
    owner: Tensor
    prompt: int

    @property
    def adapters(self) -> list[int]:
        return sorted(set(self.owner.tolist()))


def run(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Measure and return one JSON-able dict; raises `_measure.Disagreement` where the results are not exact."""
    parser = _parser()
    args = parser.parse_args(argv)
    for name in ("agents", "answers", "context"):
        if len(set(getattr(args, name))) < 2:
            parser.error(f"a slope needs two points; give --{name} two values")
    if args.figure is not None:
        _check_figure(args.figure)
    torch.set_num_threads(args.threads)
    keep_freed_memory()  # as every command of this library does
    ranks = [MIXED_RANKS[number % len(MIXED_RANKS)] for number in range(max(args.agents))]
    longest = max(args.prompt, args.shared_prompt, *args.context) + args.answer
    base = build_base(args, ranks, window=longest + 1, spread=0.02)
    steps = make_optimizer_steps(base, dict.fromkeys(base.adapters, LearnConfig(lr=1e-12)))
    fits: list[AxisFit] = []
    worst = 0.0
    for axis, works in _axes(args).items():
        worst = max(worst, *(_check(base, axis, work) for work in (works[0], works[-1])))
        for part in PARTS:
            fits.append(_measure_axis(args, base, steps, axis, part, works))
            print(fits[-1].line(), flush=True)
    records = [fit.record() for fit in fits]
    print("\n" + table([("", {"bench": "growth", "fits": records})]))
    if args.figure is not None:
        args.figure.write_text(figure(fits), encoding="utf-8")
        print(f"\nfigure: {args.figure}")
    return {
        "bench": "growth",
        "shape": {k: getattr(args, k) for k in SHAPE},
        "clock": args.clock,
        "machine": _measure.machine(),
        "parity": worst,
        "fits": records,
    }


def _check_figure(path: Path) -> None:
    """Raises ConfigError, before anything is measured, where the figure cannot be written."""
    if path.suffix != ".svg":
        raise ConfigError(f"figure is {path}; expected a file name that ends in .svg.")
    if why := is_file_writable(path):
        raise ConfigError(f"figure {path} cannot be written ({why}); give a file name in a folder that exists.")
    need_matplotlib()


def _parser() -> argparse.ArgumentParser:
    parser = StrictParser(prog="mafrt bench growth", description=(__doc__ or "").split("\n")[0])
    powers = [2**i for i in range(14)]
    parser.add_argument("--agents", type=positive, nargs="+", default=powers[:7], help="numbers of agents K")
    parser.add_argument(
        "--answers", type=positive, nargs="+", default=powers[:6], help="numbers of answers n to a prompt"
    )
    parser.add_argument(
        "--context", type=positive, nargs="+", default=powers[7:], help="lengths c of a prompt, in tokens"
    )
    parser.add_argument("--rows", type=positive, default=1, help="rows of each agent")
    parser.add_argument("--prompt", type=positive, default=32, help="tokens of the agents' prompts")
    parser.add_argument("--shared_prompt", type=positive, default=256, help="tokens of the prompt with n answers")
    parser.add_argument("--answer", type=positive, default=16, help="tokens of every answer")
    parser.add_argument("--figure", type=Path, help="an SVG file to draw the measurements into; needs matplotlib")
    _measure.add_model_flags(parser, vocab=512, rounds=3)
    parser.set_defaults(width=128, mlp=384, layers=2)
    return parser


def _axes(args: argparse.Namespace) -> dict[str, list[Work]]:
    most = max(args.agents) * args.rows

    def agents(count: int, rows: int) -> Work:
        ids = _tokens(args, rows, args.prompt + args.answer, seed=count)
        return Work(count, ids, torch.arange(rows) % count, args.prompt)

    def answers(count: int) -> Work:
        prompt = _tokens(args, 1, args.shared_prompt, seed=1).expand(count, -1)
        ids = torch.cat((prompt, _tokens(args, count, args.answer, seed=2)), 1)
        return Work(count, ids, torch.zeros(count, dtype=torch.long), args.shared_prompt)

    def context(length: int) -> Work:
        return Work(length, _tokens(args, 1, length + args.answer, seed=3), torch.zeros(1, dtype=torch.long), length)

    return {
        "agents": [agents(count, count * args.rows) for count in sorted(args.agents)],
        "agents, same work": [agents(count, most) for count in sorted(args.agents)],
        "answers": [answers(count) for count in sorted(args.answers)],
        "context": [context(length) for length in sorted(args.context)],
    }


def _tokens(args: argparse.Namespace, rows: int, width: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(5, args.vocab, (rows, width), generator=generator).to(args.device)


def _requests(work: Work) -> list[Request]:
    asked = SamplingParams(max_new_tokens=work.ids.shape[1] - work.prompt)
    prompts = work.ids[:, : work.prompt].tolist()
    return [Request(p, f"agent{work.owner[row]}", asked, seed=row) for row, p in enumerate(prompts)]


def _loss(base: SharedBase, work: Work, rows: Tensor | slice = slice(None)) -> Tensor:
    """Every row with an advantage of its own, and an entropy bonus."""
    ids = work.ids[rows]
    hidden = base.forward(ids, None, work.owner[rows])
    logprobs, entropy = base.token_logprobs(
        hidden[:, work.prompt - 1 : -1].flatten(0, 1), ids[:, work.prompt :].flatten()
    )
    count = ids.shape[1] - work.prompt
    advantage = torch.linspace(-1, 1, len(work.ids) + 1, device=ids.device)[1:][rows].repeat_interleave(count)
    return -(logprobs * advantage).sum() - 0.01 * entropy.sum()


def _measure_axis(
    args: argparse.Namespace, base: SharedBase, steps: OptimizerSteps, axis: str, part: str, works: Sequence[Work]
) -> AxisFit:
    """All points in turn in each round, so that a machine that slows down slows them all."""
    engine = LocalEngine(base, eos_ids=())

    def play(work: Work) -> Callable[[], object]:
        requests = _requests(work)
        return lambda: engine.generate(requests)

    def update(work: Work) -> Callable[[], object]:
        names = [f"agent{k}" for k in work.adapters]

        def call() -> None:
            _loss(base, work).backward()
            steps.step(names)
            for name in names:
                for parameter in base.adapter_parameters(name):
                    parameter.grad = None

        return call

    make = play if part == "play" else update
    rivals = {str(work.x): make(work) for work in works}
    times = _measure.interleave(rivals, rounds=args.rounds, warmup=1, clock=args.clock, device=args.device)
    return fit_axis(axis, part, [work.x for work in works], list(times.values()))


def _check(base: SharedBase, axis: str, work: Work) -> float:
    """The largest difference found; raises Disagreement where it is more than rounding."""
    where = f"{axis}, {work.x}"
    worst = _check_play(base, where, work)
    # Of an agent's own rows alone, the first and the last agent's.
    _loss(base, work).backward()
    together = {number: _gradient(base, number) for number in work.adapters}
    for number in {work.adapters[0], work.adapters[-1]}:
        _loss(base, work, (work.owner == number).nonzero()[:, 0]).backward()
        alone = _gradient(base, number)
        scale = float(alone.abs().max())
        worst = max(
            worst,
            _measure.agree(f"{where}, gradient", together[number] / scale, alone / scale, tolerance=1e-5),
        )
    return worst


def _check_play(base: SharedBase, where: str, work: Work) -> float:
    """The sampler, the packed forward and the model's own forward with a cache give the same log-probabilities."""
    answers = LocalEngine(base, eos_ids=()).generate(_requests(work))
    said = torch.tensor([answer.ids for answer in answers], device=base.device)
    ids = torch.cat((work.ids[:, : work.prompt], said), 1)
    mine = torch.tensor([answer.logprobs for answer in answers]).flatten()

    def scored(hidden: Tensor) -> Tensor:
        return base.token_logprobs(hidden[:, work.prompt - 1 : -1].flatten(0, 1), said.flatten())[0].cpu()

    with torch.no_grad():
        packed = scored(base.forward(ids, None, work.owner))
        own = scored(base.forward(ids, None, work.owner, past_key_values=KVCache(ids.shape[1])))
    return max(
        _measure.agree(f"{where}, {name}", other, own, tolerance=1e-3)
        for name, other in (("sampler", mine), ("packed forward", packed))
    )


def _gradient(base: SharedBase, number: int) -> Tensor:
    """The gradient of adapter `number`, flat, which is cleared."""
    parameters = base.adapter_parameters(f"agent{number}")
    gradient = torch.cat([p.grad.flatten() for p in parameters if p.grad is not None])
    for parameter in parameters:
        parameter.grad = None
    return gradient
