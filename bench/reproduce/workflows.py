"""Workflows on the shipped word problems: each trained, untrained, and against one agent with as many turns."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from tempfile import NamedTemporaryFile
from typing import TYPE_CHECKING, Any

from bench.reproduce._experiment import SeedRun, before_after, compare, parse, report, train
from bench.reproduce._figure import curves
from mafrt.config.agent import AgentSpec
from mafrt.config.team import Team
from mafrt.envs.math import MathEnv

if TYPE_CHECKING:
    from mafrt.config.team import Team

CLAIM = "A team learns in every workflow, and the workflow's score rises."

PLAN = "You are the Reasoner. Plan which steps to take."
SOLVE = "You are the Actor. Solve it and box the answer."
CHECK = "You are the Verifier. Check it, then approve or reject."
ROUTES = """
start: planner
max_turns: 4
routes:
  planner: actor
  actor:
    - {says: 'boxed', to: end}
    - {to: planner}
"""

# workflow -> prompts by agent (those that solve answer), options of the workflow, turns of an episode
WORKFLOWS: dict[str, tuple[dict[str, str], dict[str, Any], int]] = {
    "solver_verifier": ({"solver": SOLVE, "verifier": CHECK}, {"horizon": 2}, 4),
    "debate": ({"ann": SOLVE, "bob": SOLVE, "cat": SOLVE}, {"horizon": 2}, 6),
    "vote": ({"ann": SOLVE, "bob": SOLVE, "cat": SOLVE}, {}, 3),
    "summary": ({"ann": SOLVE, "bob": SOLVE, "chair": SOLVE}, {}, 3),
    "pro_con": ({"ann": SOLVE, "bob": SOLVE, "jury": SOLVE}, {}, 3),
    "router": ({"planner": PLAN, "actor": SOLVE}, {}, 2),
}


def team_of(prompts: dict[str, str]) -> Team:
    """A team of these agents; those that solve answer."""
    return Team(tuple(AgentSpec(name, prompt, with_answer=prompt == SOLVE) for name, prompt in prompts.items()))


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv, __doc__ or "", iterations=12)
    with NamedTemporaryFile("w", suffix=".yaml") as routes:
        routes.write(ROUTES)
        routes.flush()

        def arm(workflow: str, turns: int) -> Any:
            prompts, options, _ = WORKFLOWS.get(workflow, ({"actor": SOLVE}, {}, 1))
            team = team_of(prompts)
            options = options | ({"routes": routes.name} if workflow == "router" else {})

            def run(seed: int) -> SeedRun:
                env, held_out = (
                    MathEnv(team=team, workflow=workflow, split=split, **options) for split in ("train", "test")
                )
                # One agent plays as many episodes as the team has turns.
                more = {"n_rollout_threads": 64 * turns} if workflow == "single" else {}
                # The debaters of pro_con are paid for winning, and its jury for being right.
                to = "end" if workflow == "pro_con" else "each"
                return train(args, seed, env, team=team, held_out=held_out, outcome_to=to, **more)

            return run

        most = max(turns for _, _, turns in WORKFLOWS.values())
        arms = {f"single, {turns} x 64 episodes": arm("single", turns) for turns in (3, most)}
        arms |= {workflow: arm(workflow, turns) for workflow, (_, _, turns) in WORKFLOWS.items()}
        runs, scores = compare(args, arms)
    rises = {name: min(run.after - run.before for run in some) for name, some in runs.items()}
    flat = [name for name, least in rises.items() if least <= 0]
    verdict = (
        f"{'Holds' if not flat else 'Does not hold for ' + ', '.join(flat)}: the smallest rise of a seed is "
        + ", ".join(f"{name} {least:+.3f}" for name, least in rises.items())
        + "."
    )
    facts = {name: [{"before": run.before, "after": run.after} for run in some] for name, some in runs.items()}
    figure = curves("Training score", scores, "score")
    report(args, "workflows", CLAIM, before_after(runs), figure, verdict, facts)
    return 0


if __name__ == "__main__":
    sys.exit(main())
