"""One whole iteration of GRPO, play and update, against TRL's GRPOTrainer with PEFT.

Both sample `--prompts` x `--samples` answers of exactly `--tokens` tokens per agent from the same base, prompts (by the
same chat template) and fresh adapters, and take one optimizer step. K agents are one iteration here and K iterations
of TRL, which trains one adapter; the ratio is K TRL iterations over one of ours. TRL runs as fast as it can here: no
reference model, no gradient checkpointing, the whole batch at once, and in a process of its own (`_trl.py`).

`limit` is the time of the matrix products alone, at the speed of one large product measured in the same run: each
prompt and answer token once through the blocks in play, and in learning forward and backward, prompts once per group.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from bench import _measure
from bench._bars import over_trl
from bench._gpu import roofline
from bench._measure import positive
from bench._shapes import SHAPES, write_random_base
from bench._trl import Trl, Work
from mafrt.config.agent import AgentSpec
from mafrt.config.team import Team
from mafrt.config.train_config import TrainConfig
from mafrt.core.shipped import SHIPPED
from mafrt.core.signals import StopRequest
from mafrt.core.types import StepResult
from mafrt.cpu.malloc import keep_freed_memory
from mafrt.engines.local.engine import LocalEngine
from mafrt.engines.registry import register_engine
from mafrt.environment.base import Env
from mafrt.envs.math.tasks import load_tasks
from mafrt.models.memory_estimate import shape_of
from mafrt.models.shared_base import SharedBase
from mafrt.runners.on_policy import OnPolicy
from mafrt.scripts.cli.loading import work_offline_if_unreachable
from mafrt.scripts.cli.strict_parser import StrictParser

ROLE = "Plan the steps, then calculate."
LR = 1e-6
ENDLESS = "endless"
"""The local engine without end tokens: every answer has the same length, so iterations are equally long."""


def endless(base: SharedBase, config: TrainConfig, window: int) -> LocalEngine:
    return LocalEngine(base, eos_ids=())


register_engine(ENDLESS, endless)


def run(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Measure and return one JSON-able dict; raises `_measure.Disagreement` where the rivals do not agree."""
    args = _parser().parse_args(argv)
    shape = {k: getattr(args, k) for k in ("model", "prompts", "samples", "tokens", "rank", "dtype", "device")}
    with tempfile.TemporaryDirectory() as folder:
        args.model = write_random_base(args.model, args.layers, Path(folder))
        return _run(args, shape if args.layers is None else {**shape, "layers": args.layers})


def _run(args: argparse.Namespace, shape: dict[str, Any]) -> dict[str, Any]:
    work_offline_if_unreachable(args.model)
    torch.set_num_threads(args.threads)
    keep_freed_memory()  # as every command of this library does
    rows = []
    for count in args.adapters:
        rows.append(_measure_one(args, count))
        print(_line(rows[-1]), flush=True)
    return {
        "bench": "iteration",
        "shape": shape,
        "clock": args.clock,
        "machine": _measure.machine(),
        "rows": rows,
        "bars": _bars(shape, rows),
    }


def _bars(shape: dict[str, Any], rows: Sequence[dict[str, Any]]) -> dict[str, bool]:
    least = over_trl(shape["model"], shape["dtype"])
    return {
        f"K={row['K']}: TRL / ours per agent at least {least:g}": row["trl/ours per agent"]["median"] >= least
        for row in rows
    }


def _parser() -> argparse.ArgumentParser:
    parser = StrictParser(prog="mafrt bench iteration", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", default="teaching-base", help=f"the base, such as smollm2, or {', '.join(SHAPES)}")
    parser.add_argument("--layers", type=positive, help="of a random base (Qwen3.5: 4 or more); default: all")
    parser.add_argument("--adapters", type=positive, nargs="+", default=[1, 4], help="numbers of agents K")
    parser.add_argument("--prompts", type=positive, default=4, help="prompts per agent")
    parser.add_argument("--samples", type=positive, default=8, help="answers to each prompt")
    parser.add_argument("--tokens", type=positive, default=32, help="tokens of every answer")
    parser.add_argument("--rank", type=positive, default=8, help="rank of every adapter, on all linear layers")
    parser.add_argument(
        "--dtype",
        choices=["float32", "bfloat16"],
        default="float32",
        help="of the base; log-probs are compared in float32",
    )
    parser.add_argument("--rounds", type=positive, default=5, help="timed iterations")
    parser.add_argument("--warmup", type=positive, default=3, help="iterations before, until the heap has its size")
    parser.add_argument("--threads", type=positive, default=1, help="torch threads")
    parser.add_argument("--clock", choices=sorted(_measure.CLOCKS), default="wall", help="cpu: on a busy machine")
    parser.add_argument("--device", type=_measure.usable_device, default="cpu", help="cpu or cuda")
    return parser


class Asked(Env):
    """Every agent answers the same problem once; a reward that varies, and means nothing."""

    bounded = True

    def __init__(self, problems: Sequence[str], names: Sequence[str]) -> None:
        self.agents = tuple(names)
        self.problems = problems
        self.num_tasks = len(problems)

    def reset(self, seed: Any = None, options: Any = None) -> Any:
        task = options["task"] if options else self.rng.randrange(len(self.problems))
        return dict.fromkeys(self.agents, self.problems[task]), {"task": str(task)}

    def step(self, actions: dict[str, str]) -> StepResult:
        rewards = {name: reward(text) for name, text in actions.items()}
        return StepResult({}, rewards, True, False, {"outcome": sum(rewards.values()) / len(rewards)})


def reward(text: str) -> float:
    return len(set(text)) / (len(text) + 1)


class Ours:
    """A run of this library, one iteration at a time."""

    def __init__(self, args: argparse.Namespace, problems: Sequence[str], count: int) -> None:
        names = [f"agent{k}" for k in range(count)]
        config = TrainConfig.of(
            algorithm="grpo",
            iterations=args.warmup + args.rounds,
            n_rollout_threads=args.prompts * args.samples,
            n_samples=args.samples,
            max_new_tokens=args.tokens,
            lora_rank=args.rank,
            lora_alpha=2.0 * args.rank,
            lr=LR,
            ppo_epoch=1,
            num_mini_batch=1,
            eval_episodes=0,
            engine=ENDLESS,
        )
        self.base = SharedBase.load(args.model, dtype=args.dtype, device=args.device)
        team = Team(tuple(AgentSpec(name, ROLE) for name in names))
        self.runner = OnPolicy(Asked(problems, names), team, self.base, config)
        self.runner.stop = StopRequest()
        self.clock, self.device = _measure.CLOCKS[args.clock], args.device
        self.play = 0.0

    def step(self) -> float:
        """Seconds of one iteration; `play` has those of its sampling."""
        started = self.clock()
        batch = self.runner.collect()
        _measure.synchronize(self.device)
        self.play = self.clock() - started
        self.batch = batch
        self.runner.learn(batch)
        _measure.synchronize(self.device)
        seconds = self.clock() - started
        if self.device.startswith("cuda"):
            # Our micro-batches are as large as the memory; the other trainer, on the same GPU, needs some too.
            torch.cuda.empty_cache()
        return seconds


def _measure_one(args: argparse.Namespace, count: int) -> dict[str, Any]:
    problems = _problems(args.prompts)
    messages = [[{"role": "system", "content": ROLE}, {"role": "user", "content": text}] for text in problems]
    ours = Ours(args, problems, count)
    # A cheap reward that differs between answers, as ours: equal ones would give no gradient.
    trl = Trl(Work(args, messages, reward, LR, args.warmup + args.rounds))
    for _ in range(args.warmup):
        ours.step()
        trl.step()
    _check(args, ours, trl, count)
    times: dict[str, list[float]] = {"ours": [], "trl": [], "play": []}
    for number in range(args.rounds):
        # In turn, so that a machine which slows down slows both.
        for rival in ("ours", "trl") if number % 2 == 0 else ("trl", "ours"):
            times[rival].append((ours if rival == "ours" else trl).step())
        times["play"].append(ours.play)
    trl.close()
    said = [(turn.agent, *turn.prompt_ids, *turn.action_ids) for e in ours.batch.episodes for turn in e.turns]
    limit = _flop(ours) / roofline.measure(args.device, ours.base.model.dtype, small=args.device == "cpu").flop_s
    # TRL trains one adapter at a time, so a team of K takes K of its steps.
    whole = [count * seconds for seconds in times["trl"]]
    middle = {name: sorted(values)[len(values) // 2] for name, values in times.items()}
    return {
        "K": count,
        "answers": len(said),
        "distinct": len(set(said)),
        "ours_s": round(middle["ours"], 3),
        "play_s": round(middle["play"], 3),
        "learn_s": round(middle["ours"] - middle["play"], 3),
        "limit_s": round(limit, 3),
        "trl_s": round(middle["trl"], 3),
        "trl/ours per agent": _measure.ratio(whole, times["ours"]),
    }


def _flop(ours: Ours) -> float:
    """Floating point operations that an iteration cannot do without; those of adapters and attention are left out."""
    shape = shape_of(ours.base.config.to_dict())
    turns = [turn for episode in ours.batch.episodes for turn in episode.turns]
    prompts = sum(len(ids) for _, ids in {(turn.agent, tuple(turn.prompt_ids)) for turn in turns})
    said = [(turn.agent, tuple(turn.prompt_ids), tuple(turn.action_ids)) for turn in turns]

    def forward(answers: int) -> float:
        return 2.0 * (shape.block_weights * (prompts + answers) + shape.vocabulary * shape.hidden * answers)

    # Play samples every answer; learning reads equal ones once, forward and backward: the base is frozen, so there are
    # no gradients of weights.
    return forward(sum(len(own[2]) for own in said)) + 2 * forward(sum(len(own[2]) for own in set(said)))


def _problems(count: int) -> list[str]:
    tasks = load_tasks(str(SHIPPED / "envs/math/data/word_problems_train.jsonl"))
    return [task.problem for task in tasks[:count]]


def _check(args: argparse.Namespace, ours: Ours, trl: Trl, count: int) -> None:
    """Same prompts, as many tokens, and the same log-probabilities, or no timing."""
    turns = [turn for episode in ours.batch.episodes for turn in episode.turns]
    tokens = [len(turn.action_ids) for turn in turns]
    if tokens != [args.tokens] * (count * args.prompts * args.samples):
        raise _measure.Disagreement(f"found answers of {sorted(set(tokens))} tokens; not timed")
    if trl.prompt not in [list(turn.prompt_ids) for turn in turns]:
        raise _measure.Disagreement("TRL's prompt is none of ours; not timed")
    ids = [*turns[0].prompt_ids, *turns[0].action_ids]
    with torch.no_grad():
        hidden = ours.base.forward(torch.tensor([ids], device=args.device), None, torch.tensor([-1]))
        mine = ours.base.logits(hidden).float().log_softmax(-1).cpu()
    other = trl.logprobs(ids)
    if args.dtype == "float32":
        _measure.agree("log-probs", mine, other, tolerance=1e-2)
    else:
        # Both round, each in its own order: single rare tokens differ by some nats, as each does from float32.
        mean = (mine - other).abs().mean()
        _measure.agree("mean of the log-probs' differences", mean, torch.zeros_like(mean), tolerance=0.25)


def _line(row: dict[str, Any]) -> str:
    ratio = row["trl/ours per agent"]
    return (
        f"K={row['K']:<3} ours {row['ours_s']:7.2f} s (play {row['play_s']:.2f}, learn {row['learn_s']:.2f}, "
        f"limit {row['limit_s']:.2f})  "
        f"TRL {row['trl_s']:7.2f} s an agent  TRL / ours per agent {ratio['median']:.2f} "
        f"({ratio['q1']:.2f} to {ratio['q3']:.2f})"
    )
