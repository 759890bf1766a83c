"""A quickstart or game beside rivals that try, in one table.

Trains the team of a config with each seed; then one agent alone, an adapter that speaks in all roles, with the same
episodes and tokens: its rate is the one of RATES that is best on validation tasks with the first seed; where that is an
end of them, up to FURTHER rates beyond it are tried too. The first team is evaluated with `--baselines`, whose choices
are made on training and validation tasks. Every stage is a command whose results lie in the output folder; a stage
that is there is not run again. A game whose form its base has not seen starts from imitated legal random play, as in
`bench.reproduce.games`; so does the agent alone, by its own adapter.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from bench._tables import over_seeds
from bench.reproduce._commands import run
from bench.reproduce.games import RECIPES, start
from mafrt.core.shipped import SHIPPED
from mafrt.environment.registry import make_env
from mafrt.scripts import evaluate, train, train_math

RATES = (1 / 3, 1.0, 3.0)
"""of one agent alone, as factors of the config's, each the same step from the next"""
FURTHER = 2
OWN = frozenset(
    {"role", "agent", "prompt", "prompt_at", "with_answer", "temperature", "top_p", "top_k", "max_new_tokens", "stop"}
)
"""keys of an agent in the team file that are its own also where all agents share one adapter"""
Row = Mapping[str, Any]


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--config", default="game_sudoku", help="name of a file in configs/")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--iterations", type=int, help="of training; default: the config's own")
    parser.add_argument("--tasks", type=int, default=100, help="held-out tasks")
    parser.add_argument("--votes", type=int, default=32, help="tries of a vote")
    parser.add_argument("--output", type=Path, default=Path("runs/reproduce/rivals"))
    return parser.parse_args(argv)


def alone(config: Mapping[str, Any], path: Path) -> Path:
    """Write the team file in which all agents of the config's team speak by one adapter."""
    if "profile_path" in config:
        agents = json.loads((SHIPPED / config["profile_path"]).read_text(encoding="utf-8"))
    else:
        agents = [{"role": name} for name in make_env(config["env"]).agents]
    team = [{**{key: value for key, value in agent.items() if key in OWN}, "adapter": "alone"} for agent in agents]
    path.write_text(json.dumps(team), encoding="utf-8")
    return path


def begun(args: argparse.Namespace, config: Mapping[str, Any], profile: Path | None = None) -> tuple[object, ...]:
    """The words that start a run of this team file, or of the config's own, from imitated play, if it needs that."""
    recipe, out = RECIPES.get(config.get("env", "")), args.output / (profile.stem if profile else "start")
    if recipe is None or not recipe.legal:
        return ()
    out.mkdir(exist_ok=True)
    return ("--load_path", start(config["env"], replace(recipe, profile=profile or recipe.profile), out))


def trained(args: argparse.Namespace, config: Mapping[str, Any], name: str, seed: int, *words: object) -> Path:
    """The folder of a training run."""
    folder: Path = args.output / f"{name}_{seed}"
    if not (folder / "summary.json").is_file():
        words += ("--iterations", args.iterations) if args.iterations else ()
        config_path = SHIPPED / "configs" / f"{args.config}.yaml"
        command = train.main if "env" in config else train_math.main
        whole = ("--config", config_path, *words, "--seed", seed, "--run_dir", folder)
        run(command, *whole, makes=folder / "summary.json")
    return folder


def on_validation(folder: Path) -> float:
    """The best sampled score of a run's own evaluations."""
    lines = [json.loads(line) for line in (folder / "evaluations.jsonl").read_text(encoding="utf-8").splitlines()]
    return float(max(value for line in lines for key, value in line.items() if key.startswith("eval/avg@")))


def tuned(score: Callable[[float], float]) -> tuple[float, int]:
    """The factor with the best score, and how many were tried: RATES, and beyond the end of them where that is best."""
    step, scores = RATES[1] / RATES[0], {factor: score(factor) for factor in RATES}
    for _ in range(FURTHER):
        best = max(scores, key=lambda factor: scores[factor])
        if best not in (min(scores), max(scores)):
            break
        beyond = best / step if best == min(scores) else best * step
        scores[beyond] = score(beyond)
    return max(scores, key=lambda factor: scores[factor]), len(scores)


def evaluated(args: argparse.Namespace, folder: Path, *words: object) -> list[Row]:
    """Rows of a run on held-out tasks, the team's own first."""
    path: Path = args.output / f"{folder.name}.json"  # its name may have a point: with_suffix would cut the seed off
    if not path.is_file():
        best = folder / "best" if (folder / "best").is_dir() else folder
        run(evaluate.main, "--load_path", best, "--tasks", args.tasks, "--k", 4, *words, "--output", path)
    found = json.loads(path.read_text(encoding="utf-8"))
    scores = [each for task in found["scores"].values() for each in task]
    metrics, solved = found["metrics"], sum(score >= 1 for score in scores) / len(scores)
    own = {"name": "", "sampled": metrics["eval/avg@4"], "greedy": metrics["eval/greedy"], "solved": solved}
    return [own, *found["baselines"][1:]]


def over(name: str, rows: Sequence[Row]) -> Row:
    """One row of the same arm with several seeds."""
    return {"name": name} | {key: over_seeds([row[key] for row in rows]) for key in ("sampled", "greedy", "solved")}


def table(rows: Sequence[Row]) -> str:
    def cell(value: object) -> str:
        return "" if value is None else f"{value:.3f}" if isinstance(value, float) else str(value)

    lines = ["| team | sampled | greedy | solved, sampled |", "|---|---|---|---|"]
    return "\n".join(lines + [f"| {' | '.join(cell(value) for value in row.values())} |" for row in rows])


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    args.output.mkdir(parents=True, exist_ok=True)
    config = yaml.safe_load((SHIPPED / "configs" / f"{args.config}.yaml").read_text(encoding="utf-8"))
    first, teams, rivals = args.seeds[0], list[Row](), list[Row]()
    words: tuple[object, ...]
    begin = begun(args, config)
    for seed in args.seeds:
        words = ("--baselines", "--baseline_votes", args.votes) if seed == first else ()
        own, *beside = evaluated(args, trained(args, config, "team", seed, *begin), *words)
        teams.append(own)
        rivals += beside
    profile = alone(config, args.output / "alone.json")
    # One adapter has nobody to take turns with: it learns from all that it says.
    begin = ("--profile_path", profile, *begun(args, config, profile), "--agent_iteration_interval", 0)

    def on_seed(factor: float, seed: int) -> Path:
        return trained(args, config, f"alone_{factor:.2g}", seed, *begin, "--lr", config["lr"] * factor)

    factor, tried = tuned(lambda factor: on_validation(on_seed(factor, first)))
    best = config["lr"] * factor
    single = [evaluated(args, on_seed(factor, seed))[0] for seed in args.seeds]
    label = f"one agent alone in all roles, at the best of {tried} rates ({best:.2g})"
    text = table([over("team", teams), over(label, single), *rivals])
    (args.output / "table.md").write_text(text + "\n", encoding="utf-8")
    print(text)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
