"""Does the DSBench recipe hold over many seeds, and at four times its rate?

The recipe of configs/dsbench.yaml, with `--coach rules`, from the same imitation.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from bench.reproduce._experiment import parse
from bench.reproduce._stability import Stability
from bench.reproduce.dsbench_process_rewards import SuccessCurve, config, train, warm_start
from mafrt.envs.dsbench import DSBenchEnv

BROKEN = 0.142
"""Score of the best fixed programs (dsbench_constants.py); a team below it in the end has broken down."""
RECIPE = Stability(
    name="dsbench_stability",
    claim="The recipe survives ten seeds and four times its rate.",
    title="DSBench, held-out tasks",
    label="normalised score",
    curve=SuccessCurve,
    scores=lambda run: run.score,
    broken=lambda run: run.score[-1] <= BROKEN,
    columns={"success after": lambda run: run.success[-1]},
)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv, __doc__ or "", iterations=12)
    start, rate = warm_start(args.output / "dsbench"), float(config()["lr"])
    style, turns = config()["style"], config()["agent_turns"]
    env, held_out = DSBenchEnv(style=style, turns=turns), DSBenchEnv(split="eval", style=style, turns=turns)
    RECIPE.measure(
        args, lambda seed, factor: train(args, seed, {"lr": rate * factor}, env.spawn(), held_out.spawn(), start)
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
