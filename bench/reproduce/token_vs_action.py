"""Token-level against action-level optimisation (MARFT, 2504.16129): PPO with one ratio per token or per turn."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from bench.reproduce._experiment import before_after, compare, parse, report, train
from bench.reproduce._figure import curves

CLAIM = "Both levels train the team; the token level gives every token its own ratio and credit."


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv, __doc__ or "", iterations=16)
    runs, lines = compare(
        args,
        {
            "token": lambda seed: train(args, seed, level="token"),
            "action": lambda seed: train(args, seed, level="action", normalization_mode="token"),
        },
    )
    rise = {name: sum(r.after - r.before for r in arm_runs) / len(arm_runs) for name, arm_runs in runs.items()}
    both = all(r.after > r.before + 0.1 for arm_runs in runs.values() for r in arm_runs)
    verdict = (
        f"{'Holds' if both else 'Does not hold'}: the held-out score rises by {rise['token']:.3f} at token level and "
        f"by {rise['action']:.3f} at action level (mean over {len(args.seeds)} seeds, {args.iterations} iterations)."
    )
    facts = {name: [{"before": r.before, "after": r.after} for r in arm_runs] for name, arm_runs in runs.items()}
    figure = curves("Training score", lines, "score")
    report(args, "token_vs_action", CLAIM, before_after(runs), figure, verdict, facts)
    return 0


if __name__ == "__main__":
    sys.exit(main())
