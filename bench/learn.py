"""Does a rule learn? Every rule on the shipped base: held-out score before and after a short training.

The margin of a rule is the mean over held-out tasks and seeds of (score after - score before), with a 95% interval
from resampling seeds, and tasks within each. A rule passes if its margin is at least `--margin` and the interval lies
above 0.
Each family has a task of its own (`bench._tasks`): rules that compare samples play rounds in which
agents have separate rewards of unequal scale, VDN and QMIX two solvers that see only their summed reward, MAPoRL a
debate, and all others the Reasoner -> Actor chain.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from bench import _tasks
from bench._measure import machine, positive
from mafrt import algorithms
from mafrt.algorithms.ccpo import Ccpo
from mafrt.algorithms.dr_mamr import DrMamr
from mafrt.algorithms.gigpo import GigpoBase
from mafrt.algorithms.group_relative import GroupRelative
from mafrt.algorithms.maporl import MaporlBase
from mafrt.algorithms.presets import C3
from mafrt.algorithms.value_decomposition import Mixed
from mafrt.config.train_config import TrainConfig
from mafrt.core.errors import ConfigError, MafrtError
from mafrt.core.seeding import seed_of
from mafrt.core.signals import StopRequest
from mafrt.cpu.malloc import keep_freed_memory
from mafrt.runners.evaluation import EvaluationPlan, evaluate
from mafrt.runners.on_policy import OnPolicy
from mafrt.scripts.cli.strict_parser import StrictParser

if TYPE_CHECKING:
    from mafrt.runners.loop import RunSummary

GROUP = 8
"""samples per task for rules that compare them"""
# C3, CCPO and Dr. MAMR compare totals of episodes, and on `rounds` a wrong answer raises the Reasoner's total.
TASK_OF = {
    C3: "chain",
    Ccpo: "chain",
    DrMamr: "chain",
    GroupRelative: "rounds",
    GigpoBase: "retry",
    Mixed: "pair",
    MaporlBase: "debate",
}
"""estimator -> task; all others play the chain"""
TASKS = ("chain", "rounds", "retry", "pair", "debate")
COMMON: Mapping[str, Any] = {
    "n_rollout_threads": 64,
    "max_new_tokens": 48,
    "lr": 3e-3,
    "ppo_epoch": 1,
    "eval_episodes": 0,
    "save_interval": 0,
}
PAID: Mapping[str, Mapping[str, Any]] = {"rounds": {"outcome_weight": 0.0}, "debate": {"outcome_weight": 0.0}}
"""tasks that pay every turn: the outcome would count a second time"""
OWN: Mapping[str, Mapping[str, Any]] = {
    "maporl": {"n_rollout_threads": 48},
    # As many tasks and samples of each turn as the other rules that compare samples.
    "at_grpo": {"n_samples": 1, "tree_samples": GROUP, "n_rollout_threads": 64 // GROUP},
    "c3": {"n_samples": 1, "tree_samples": GROUP, "n_rollout_threads": 64 // GROUP},
    # One agent learns at a time, so each gets as many iterations as with the other rules.
    "marft": {"iterations": 2.0},
}
"""additional settings of a rule; `iterations` is a factor here"""


@dataclass(frozen=True)
class Result:
    """One rule with one seed."""

    rule: str
    seed: int
    before: Mapping[str, float]
    """mean score of the sampled episodes, by task"""
    after: Mapping[str, float]
    seconds: float
    """CPU time of this process in training, without evaluations; unaffected by other processes"""


def task_of(rule: str) -> str:
    """The task that a rule is trained on unless another is asked for."""
    chosen = algorithms.algorithm(rule)
    return next((task for kind, task in TASK_OF.items() if isinstance(chosen, kind)), "chain")


def whole_or_nothing(summary: RunSummary, iterations: int) -> None:
    """Raise MafrtError if a run was stopped early: a partial run is no result."""
    if summary.stopped_by is not None:
        raise MafrtError(
            f"the run was stopped by {summary.stopped_by} after {summary.iterations} of {iterations} iterations, so it "
            "has no result; start it again."
        )


def train(rule: str, seed: int, iterations: int, tasks: int, samples: int, task: str | None = None) -> Result:
    """Train with one rule and one seed, and evaluate on held-out tasks before and after."""
    import torch

    from mafrt.models.shared_base import SharedBase

    task = task or task_of(rule)
    # A copy, since the number of iterations is taken out of it.
    own = dict(OWN.get(rule, {}))
    rounds = round(iterations * own.pop("iterations", 1.0))
    groups = {"n_samples": GROUP} if algorithms.algorithm(rule).needs_groups else {}
    named = {"algorithm": rule, "seed": seed, "iterations": rounds}
    config = TrainConfig.of(**{**COMMON, **PAID.get(task, {}), **groups, **own, **named})
    env_class: Any = _tasks.ENVIRONMENTS[task]
    held_out = env_class("test")
    # Some libraries draw from the global generator when a model is loaded.
    torch.manual_seed(seed)
    runner = OnPolicy(env_class("train"), env_class.team, SharedBase.load("teaching-base"), config)
    runner.stop = StopRequest()

    def worth() -> dict[str, float]:
        # The adapters that are evaluated are those of the agents, also where the rule has swapped them.
        runner.assign_adapters()
        plan = EvaluationPlan(tasks, samples, greedy=False, seed=seed_of(seed, "bench learn"))
        evaluation = evaluate(held_out, runner.player, plan)
        assert evaluation is not None
        return {name: sum(scores) / len(scores) for name, scores in evaluation.scores.items()}

    before = worth()
    started = time.process_time()
    whole_or_nothing(runner.run(), rounds)
    seconds = time.process_time() - started
    return Result(rule, seed, before, worth(), seconds)


def margin(results: Sequence[Result], resamples: int = 2000) -> dict[str, float]:
    """Mean of after - before, and a 95% bootstrap interval of it that clusters by seed.

    Tasks of one seed share a training run, so they are no independent observations: each resample draws seeds with
    replacement, and then tasks within each drawn seed.
    """
    import numpy

    gains = [numpy.array([r.after[task] - r.before[task] for task in r.before if task in r.after]) for r in results]
    random = numpy.random.default_rng(0)

    def resampled() -> float:
        drawn = [gains[seed] for seed in random.integers(0, len(gains), len(gains))]
        return float(numpy.mean([some[random.integers(0, len(some), len(some))].mean() for some in drawn]))

    low, high = numpy.percentile([resampled() for _ in range(resamples)], [2.5, 97.5])
    return {"margin": float(numpy.mean([some.mean() for some in gains])), "low": float(low), "high": float(high)}


def row(rule: str, task: str, results: Sequence[Result], least: float) -> dict[str, Any]:
    """One line of the table."""

    def mean(values: Sequence[float]) -> float:
        return sum(values) / len(values)

    interval = margin(results)
    return {
        "rule": rule,
        "task": task,
        "seeds": [r.seed for r in results],
        "before": round(mean([mean(list(r.before.values())) for r in results]), 3),
        "after": round(mean([mean(list(r.after.values())) for r in results]), 3),
        **{name: round(value, 3) for name, value in interval.items()},
        "seconds": round(mean([r.seconds for r in results]), 1),
        "learns": interval["margin"] >= least and interval["low"] > 0,
    }


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """The rows as Markdown."""
    lines = [
        "| rule | task | before | after | margin (95% interval) | CPU seconds a seed | learns |",
        "|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| `{r['rule']}` | {r['task']} | {r['before']:.3f} | {r['after']:.3f} | {r['margin']:+.3f} ({r['low']:.3f} to "
        f"{r['high']:.3f}) | {r['seconds']:.0f} | {'yes' if r['learns'] else 'no'} |"
        for r in rows
    ]
    return "\n".join(lines)


def run(argv: Sequence[str]) -> dict[str, Any]:
    """The benchmark; `mafrt bench learn --algorithm all` is the whole table."""
    parser = StrictParser(prog="mafrt bench learn", description=__doc__)
    parser.add_argument("--algorithm", nargs="+", default=["all"], help="rules by name, or all")
    parser.add_argument("--task", choices=TASKS, help="task of all rules; default: each family's own")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--iterations", type=positive, default=16, help="of a run")
    parser.add_argument("--tasks", type=positive, default=128, help="held-out tasks")
    parser.add_argument("--samples", type=positive, default=2, help="sampled episodes per held-out task")
    parser.add_argument("--margin", type=float, default=0.1, help="least rise of the score")
    parser.add_argument("--threads", type=int, default=0, help="threads of torch; 0 leaves its default")
    args = parser.parse_args(argv)
    # `gae` is `ppo` to the credit stage.
    names = sorted(set(algorithms.ALGORITHMS) - {"gae"}) if args.algorithm == ["all"] else args.algorithm
    for name in names:
        algorithms.algorithm(name)
    if not args.seeds:
        raise ConfigError("--seeds is empty; name at least one.")
    if args.threads:
        import torch

        torch.set_num_threads(args.threads)
    keep_freed_memory()
    rows = []
    for name in names:
        results = [train(name, seed, args.iterations, args.tasks, args.samples, args.task) for seed in args.seeds]
        rows.append(row(name, args.task or task_of(name), results, args.margin))
        print(table(rows[-1:]).splitlines()[-1], flush=True)
    print("\n" + table(rows))
    return {
        "benchmark": "learn",
        "machine": machine(),
        "iterations": args.iterations,
        "least_margin": args.margin,
        "rules": rows,
        "all_learn": all(r["learns"] for r in rows),
    }
