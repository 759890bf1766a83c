"""Dr. MAS against GRPO on agents of unequal reward scale (2602.08847): spikes of the gradient norm.

The Reasoner's right plan is worth `SCALE`, the Actor's right answer 1. GRPO gives both agents the advantage of their
trajectory's mean reward, which the larger scale dominates; Dr. MAS compares each agent with itself alone.
"""

from __future__ import annotations

import re
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from bench.reproduce._experiment import before_after, compare, parse, report, train
from bench.reproduce._figure import curves
from mafrt.config.team import Team
from mafrt.core.shipped import SHIPPED
from mafrt.core.types import StepResult
from mafrt.envs.math import MathEnv

if TYPE_CHECKING:
    from mafrt.environment.base import Env

CLAIM = "With one baseline for agents whose rewards differ in scale, gradient norms spike; one per agent avoids that."
SCALE = 10.0
_PLAN = re.compile(
    r"(Add|Subtract|Multiply|Divide) (\d+) (?:and|from|by) (\d+)"
    r"(?:, then (add|subtract|multiply|divide)(?: by)? (\d+))?\."
)
_DO: Mapping[str, Callable[[float, float], float | None]] = {
    "add": lambda a, b: a + b,
    "subtract": lambda a, b: a - b,
    "multiply": lambda a, b: a * b,
    "divide": lambda a, b: a / b if b else None,
}


def plan_value(text: str) -> float | None:
    """Result of a plan of the teaching base, such as `Subtract 3 from 9, then multiply by 2.`; None: not parsable."""
    match = _PLAN.fullmatch(text.strip())
    if match is None:
        return None
    verb, left, right, *then = match.groups()
    a, b = (float(right), float(left)) if verb == "Subtract" else (float(left), float(right))
    value = _DO[verb.lower()](a, b)
    if value is not None and then[0]:
        value = _DO[then[0]](value, float(then[1]))
    return value


def unequal() -> Env:
    """The chain, with `SCALE` for the Reasoner's right plan and 1 for the Actor's right answer."""

    class Unequal(MathEnv):
        def step(self, actions: dict[str, str]) -> StepResult:
            self.plan = actions.get("reasoner", getattr(self, "plan", ""))
            result = super().step(actions)
            if not result.terminated:
                return result
            planned = plan_value(self.plan)
            right = planned is not None and planned == float(self.task.answer)
            return result._replace(rewards={"reasoner": SCALE * right, "actor": float(result.info["outcome"])})

    return Unequal(team=Team.load(SHIPPED / "profiles" / "quickstart_math.json"))


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv, __doc__ or "", iterations=16)
    shared: dict[str, Any] = {"n_samples": 8, "outcome_weight": 0.0, "max_grad_norm": 1e9}
    runs, _ = compare(
        args,
        {
            "grpo": lambda seed: train(args, seed, env=unequal(), algorithm="grpo", **shared),
            "dr_mas": lambda seed: train(args, seed, env=unequal(), algorithm="dr_mas", **shared),
        },
    )
    norms = {
        name: [[max(m["grad_norm/reasoner"], m["grad_norm/actor"]) for m in r.metrics] for r in spikes]
        for name, spikes in runs.items()
    }

    def spike(curve: list[float]) -> float:
        """Largest norm over the median norm."""
        return max(curve) / max(statistics.median(curve), 1e-12)

    spikes = {name: statistics.fmean(map(spike, of)) for name, of in norms.items()}
    peak = {name: statistics.fmean(map(max, of)) for name, of in norms.items()}
    lines = [f"| {n} | {peak[n]:.3f} | {spikes[n]:.2f} |" for n in norms]
    table = before_after(runs) + "\n\n| arm | peak norm | peak / median |\n|---|---|---|\n" + "\n".join(lines)
    verdict = (
        f"{'Holds' if spikes['dr_mas'] < spikes['grpo'] else 'Does not hold'}: the gradient norm peaks at "
        f"{spikes['grpo']:.2f} times its median with grpo and {spikes['dr_mas']:.2f} times with dr_mas "
        f"(rewards {SCALE:g} : 1, mean over {len(args.seeds)} seeds)."
    )
    facts = {name: {"norms": norms[name], "after": [r.after for r in runs[name]]} for name in runs}
    figure = curves("Largest gradient norm of the two agents", norms, "norm")
    report(args, "dr_mas_vs_grpo", CLAIM, table, figure, verdict, facts)
    return 0


if __name__ == "__main__":
    sys.exit(main())
