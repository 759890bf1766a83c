"""Does the MathChat recipe hold over many seeds, at four times its rate and for three times its length?

The recipe of configs/mathchat.yaml, with `--coach rules`: batches of 16 episodes, few enough for the noise of single
episodes to move the weights.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from bench.reproduce._experiment import parse
from bench.reproduce._stability import Stability
from bench.reproduce.mathchat_process_rewards import AccuracyCurve, settings, train

FALL = 0.1
"""A team that ends so far below its best, or below its start, has broken down."""
RECIPE = Stability(
    name="mathchat_stability",
    claim="Small batches do not spoil what was learnt, with ten seeds and at four times the rate.",
    title="MathChat, held-out problems",
    label="team accuracy",
    curve=AccuracyCurve,
    scores=lambda run: run.accuracy,
    broken=lambda run: run.accuracy[-1] < max(run.accuracy[0], max(run.accuracy) - FALL),
    columns={"best": lambda run: max(run.accuracy)},
)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv, __doc__ or "", iterations=30)
    rate = float(settings(args.iterations)["lr"])
    RECIPE.measure(args, lambda seed, factor: train(args, seed, {"lr": rate * factor}, every=5))
    return 0


if __name__ == "__main__":
    sys.exit(main())
