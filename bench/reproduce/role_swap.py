"""Swap the adapters of two trained roles (AT-GRPO, 2510.11062, reports 96 -> 6 on Plan-Path)."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from bench.reproduce._experiment import parse, report, spread, train, worth
from bench.reproduce._figure import curves
from mafrt.envs.math import MathEnv

CLAIM = "Adapters become specialists: swapping those of two trained roles destroys the team."


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv, __doc__ or "", iterations=16)
    before, after, swapped, lines = [], [], [], []
    for seed in args.seeds:
        run = train(args, seed)
        runner = run.runner
        assert runner is not None
        names = list(runner.player.adapters)
        runner.player = runner.player.with_adapters(
            dict(zip(names, reversed(list(runner.player.adapters.values())), strict=True))
        )
        before.append(run.before)
        after.append(run.after)
        swapped.append(worth(runner, MathEnv(team=runner.team, split="test"), args.tasks, seed))
        lines.append([m["score"] for m in run.metrics])
        print(f"seed {seed}: {run.before:.3f} -> {run.after:.3f}, swapped {swapped[-1]:.3f}", flush=True)
    table = (
        "| team | held-out score |\n|---|---|\n"
        f"| untrained | {spread(before)} |\n| trained | {spread(after)} |\n"
        f"| trained, adapters swapped | {spread(swapped)} |"
    )
    lost = [a - s for a, s in zip(after, swapped, strict=True)]
    verdict = (
        f"{'Holds' if min(lost) > 0.1 else 'Does not hold'}: swapping costs {sum(lost) / len(lost):.3f} of the score "
        f"(least {min(lost):.3f}); the untrained team has {sum(before) / len(before):.3f}."
    )
    facts = {"before": before, "after": after, "swapped": swapped}
    report(args, "role_swap", CLAIM, table, curves("Training score", {"ppo": lines}, "score"), verdict, facts)
    return 0


if __name__ == "__main__":
    sys.exit(main())
