"""Does the DSBench recipe hold over many seeds, and at four times its rate?

The recipe of configs/dsbench.yaml, with `--coach rules`, from the same imitation; every run is kept in
dsbench_stability.json, and a run that is there is not made again. Held-out tasks are only looked at: no weights are
chosen by them, so a run that breaks down stays broken.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from mafrt.envs.dsbench import DSBenchEnv
from mafrt.scripts.reproduce._experiment import parse, report, spread
from mafrt.scripts.reproduce._figure import curves
from mafrt.scripts.reproduce.dsbench_process_rewards import SuccessCurve, config, train, warm_start

CLAIM = "The recipe survives ten seeds and four times its rate."
RATES = {"four times the rate": 4, "the recipe's rate": 1}
BROKEN = 0.142
"""Score of the best fixed programs (dsbench_constants.py); a team below it in the end has broken down."""


def kept(path: Path) -> dict[str, dict[str, SuccessCurve]]:
    """Arm -> seed -> its curve, of earlier calls."""
    if not path.is_file():
        return {}
    read = json.loads(path.read_text(encoding="utf-8"))
    return {arm: {seed: SuccessCurve(**curve) for seed, curve in runs.items()} for arm, runs in read.items()}


def table(arms: Mapping[str, Sequence[SuccessCurve]]) -> str:
    """Held-out scores at the start and the end, the worst seed, and how many broke down."""
    lines = ["| arm | seeds | success after | score before | score after | broken down |", "|---|---|---|---|---|---|"]
    for name, runs in arms.items():
        cells = (
            str(len(runs)),
            spread([run.success[-1] for run in runs]),
            spread([run.score[0] for run in runs]),
            spread([run.score[-1] for run in runs]),
            str(sum(run.score[-1] <= BROKEN for run in runs)),
        )
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv, __doc__ or "", iterations=12)
    start, rate = warm_start(args.output / "dsbench"), float(config()["lr"])
    style, turns = config()["style"], config()["agent_turns"]
    env, held_out = DSBenchEnv(style=style, turns=turns), DSBenchEnv(split="eval", style=style, turns=turns)
    path = args.output / "dsbench_stability.json"
    done = kept(path)
    for name, factor in RATES.items():
        runs = done.setdefault(name, {})
        for seed in args.seeds:
            if str(seed) not in runs:
                runs[str(seed)] = train(args, seed, {"lr": rate * factor}, env.spawn(), held_out.spawn(), start)
                plain = {arm: {key: vars(curve) for key, curve in own.items()} for arm, own in done.items()}
                path.write_text(json.dumps(plain, indent=1), encoding="utf-8")
            shown = " ".join(f"{value:.2f}" for value in runs[str(seed)].score)
            print(f"{name}, seed {seed}: score {shown}", flush=True)
    arms = {name: [done[name][str(seed)] for seed in args.seeds] for name in RATES}
    scores = {name: [run.score for run in runs] for name, runs in arms.items()}
    steps = next(iter(arms.values()))[0].episodes
    figure = curves("DSBench, held-out tasks", scores, "normalised score", xlabel="episodes played", steps=steps)
    broken = [sum(run.score[-1] <= BROKEN for run in runs) for runs in arms.values()]
    gains = [statistics.fmean(run.score[-1] - run.score[0] for run in runs) for runs in arms.values()]
    verdict = (
        f"{'Holds' if not any(broken) else 'Does not hold'}: of {len(args.seeds)} seeds each, {broken[0]} broke down "
        f"at four times the rate and {broken[1]} at the recipe's; mean gains {gains[0]:.3f} and {gains[1]:.3f}."
    )
    facts = {arm: {key: vars(curve) for key, curve in own.items()} for arm, own in done.items()}
    report(args, "dsbench_stability", CLAIM, table(arms), figure, verdict, facts)
    return 0


if __name__ == "__main__":
    sys.exit(main())
