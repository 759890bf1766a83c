"""One agent at a time against all together (MARFT, 2504.16129), with the same number of iterations."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from itertools import pairwise

from mafrt.scripts.reproduce._experiment import before_after, compare, curves, parse, report, train

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

    drop = {name: sum(map(falls, found)) / len(found) for name, found in lines.items()}
    end = {name: sum(r.after for r in found) / len(found) for name, found in runs.items()}
    steadier = drop["round robin"] < drop["concurrent"]
    slower = end["round robin"] < end["concurrent"]
    verdict = (
        f"Steadier: {'yes' if steadier else 'no'} (mean fall from one iteration to the next "
        f"{drop['round robin']:.3f} against {drop['concurrent']:.3f}). Slower: {'yes' if slower else 'no'} "
        f"(held-out score {end['round robin']:.3f} against {end['concurrent']:.3f} after {args.iterations} iterations; "
        f"intervals of {INTERVAL})."
    )
    facts = {name: {"after": [r.after for r in found], "fall": drop[name]} for name, found in runs.items()}
    figure = curves("Training score", lines, "score")
    report(args, "round_robin_vs_concurrent", CLAIM, before_after(runs), figure, verdict, facts)
    return 0


if __name__ == "__main__":
    sys.exit(main())
