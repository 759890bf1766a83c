"""One agent at a time against all together (MARFT, 2504.16129), with the same number of iterations."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from itertools import pairwise
from statistics import fmean

from bench.reproduce._experiment import before_after, compare, parse, report, spread, train
from bench.reproduce._figure import curves

CLAIM = "Training agent by agent keeps the others still while one learns, which is steadier; it takes longer."
INTERVAL = 4


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv, __doc__ or "", iterations=16)
    runs, lines = compare(
        args,
        {
            "concurrent": lambda seed: train(args, seed),
            "round robin": lambda seed: train(args, seed, agent_iteration_interval=INTERVAL),
        },
    )

    def falls(curve: list[float]) -> float:
        """Mean drop of the training score from one iteration to the next, rises counted as 0."""
        return sum(max(a - b, 0.0) for a, b in pairwise(curve)) / max(len(curve) - 1, 1)

    drop = {name: [falls(curve) for curve in arm_curves] for name, arm_curves in lines.items()}
    on_the_way = {name: [fmean(curve) for curve in arm_curves] for name, arm_curves in lines.items()}

    def below(arm_curves: dict[str, list[float]]) -> str:
        """Whether round robin lies below concurrent training; said only if it does so with every seed."""
        less = [a < b for a, b in zip(arm_curves["round robin"], arm_curves["concurrent"], strict=True)]
        return "yes" if all(less) else "no" if not any(less) else f"not clear ({sum(less)} of {len(less)} seeds)"

    verdict = (
        f"Steadier: {below(drop)} (mean fall from one iteration to the next "
        f"{spread(drop['round robin'])} against {spread(drop['concurrent'])}). Slower: {below(on_the_way)} "
        f"(mean training score over {args.iterations} iterations {spread(on_the_way['round robin'])} against "
        f"{spread(on_the_way['concurrent'])}; intervals of {INTERVAL})."
    )
    facts = {
        name: {"after": [r.after for r in arm_curves], "fall": drop[name], "score": lines[name]}
        for name, arm_curves in runs.items()
    }
    figure = curves("Training score", lines, "score")
    report(args, "round_robin_vs_concurrent", CLAIM, before_after(runs), figure, verdict, facts)
    return 0


if __name__ == "__main__":
    sys.exit(main())
