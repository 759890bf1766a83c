"""Games that are learnt: from a start that has seen legal random play, by reinforcement learning alone.

Most games start from the games base, which saw legal random play in its pretraining. For `haggle`, whose brief form it
has not seen, and for `referential` on the teaching base, records of legal random play are imitated first (the start,
shared by all arms and seeds). Each arm is trained with each seed (configs/game_*.yaml), and start and
teams play held-out instances, beside the scripted players. With `--baselines` the first team's table also has what
needs no reinforcement learning: other temperatures, and imitation of the start's own solved episodes, as many as
training has played. Every stage is a mafrt command whose results lie in the output folder; a stage that is there is not
run again.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench._tables import over_seeds
from bench.reproduce._commands import run
from bench.reproduce._figure import need_matplotlib
from mafrt.core.shipped import SHIPPED

Words = tuple[object, ...]
SAMPLES = 2  # answers to each held-out instance beside the greedy one


@dataclass(frozen=True)
class Recipe:
    """One game: its start, its arms, and the opponents or settings that its evaluations play."""

    legal: Words = ()
    """of train_sft: how legal random play is imitated; none: the games base has seen it in this form"""
    base: str = "games-base"
    episodes: int = 200
    """of legal random play"""
    habits: Words = ()
    """of train_sft: how `habit_episodes` are imitated after it; none: they are not"""
    habit_episodes: int = 12
    habit_agents: tuple[str, ...] = ()
    profile: str | Path | None = None
    kwargs: Mapping[str, object] = field(default_factory=dict)
    max_new_tokens: int = 1
    """of the longest answer in an evaluation, its end not counted"""
    arms: Mapping[str, Words] = field(default_factory=lambda: {"trained": ()})
    """label -> words beside the config"""
    against: Mapping[str, Mapping[str, str]] = field(default_factory=lambda: {"held out": {}})
    """label -> further arguments of the environment in an evaluation"""
    baselines: bool = True
    """whether `--baselines` scores it"""
    drawn: tuple[str, ...] = ("score",)
    """metrics of training whose mean the figure shows, of the arms that have them"""
    drawn_as: str = "training score"


RECIPES = {
    "referential": Recipe(
        legal=("--lr", 5e-3, "--batch_size", 16),
        base="teaching-base",
        habits=("--lr", 5e-3, "--batch_size", 16, "--epochs", 40),
        habit_agents=("scout",),
        profile="profiles/referential.json",
        kwargs={"brief": True, "things": 3, "offered": 3},
        arms={"one agent at a time": (), "both at once": ("--agent_iteration_interval", 0)},
        baselines=False,
    ),
    "plan_path": Recipe(kwargs={"brief": True}, max_new_tokens=8),
    "sokoban": Recipe(
        kwargs={"brief": True},
        max_new_tokens=10,
        arms={
            "scores of the solver": (),
            "outcome alone": ("--coach", "none", "--outcome_weight", 1, "--gamma", 1),
        },
    ),
    "sudoku": Recipe(kwargs={"brief": True}, max_new_tokens=3),
    "haggle": Recipe(
        legal=("--lr", 3e-3, "--batch_size", 16, "--lora_rank", 16),
        episodes=400,
        kwargs={"brief": True},
        max_new_tokens=8,
    ),
    "tic_tac_toe": Recipe(
        baselines=False,
        profile="profiles/tic_tac_toe.json",
        kwargs={"brief": True},
        max_new_tokens=1,
        arms={
            "scores of the solver": (),
            "outcome alone": ("--coach", "none"),
            "outcome alone, league of 4": ("--coach", "none", "--league", 4),
        },
        against={"random": {}, "solver": {"opponent": "optimal"}},
        # The score is the sum of both seats' pay, which is 0 however well they play.
        drawn=("coach_score/x", "coach_score/o"),
        drawn_as="score of a move by the solver, 0 to 10",
    ),
}


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--games", nargs="+", choices=list(RECIPES), default=list(RECIPES))
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--arms", nargs="+", help="of a game, by number from 1 on; default: all")
    parser.add_argument("--iterations", type=int, help="of training; default: the config's own")
    parser.add_argument("--tasks", type=int, default=100, help="held-out instances of an evaluation")
    parser.add_argument(
        "--baselines",
        action="store_true",
        help="where the games base plays: score what needs no reinforcement learning",
    )
    parser.add_argument("--only_start", action="store_true", help="make the starts, and train nothing")
    parser.add_argument("--output", type=Path, default=Path("runs/reproduce/games"))
    return parser.parse_args(argv)


def start(name: str, recipe: Recipe, out: Path) -> Path | None:
    """The adapters that all arms and seeds start from; None where the base is the start."""
    if not recipe.legal:
        return None
    from mafrt.environment.registry import make_env
    from mafrt.envs.games.base import Game
    from mafrt.envs.games.legal_play import write_legal_play
    from mafrt.scripts import train_sft

    game = make_env(name, **recipe.kwargs).unwrapped
    assert isinstance(game, Game)
    team: Words = ("--profile_path", recipe.profile) if recipe.profile else ()
    legal, folder = out / f"{name}_legal", out / f"{name}_start"
    if not (legal / "adapters").is_dir():
        write_legal_play(game, out / f"{name}_legal.jsonl", recipe.episodes)
        words: Words = ("--records_path", out / f"{name}_legal.jsonl", "--model_name_or_path", recipe.base)
        run(train_sft.main, *words, *recipe.legal, *team, "--run_dir", legal)
    if not recipe.habits:
        return legal / "adapters"
    if not (folder / "adapters").is_dir():
        records = out / f"{name}_habits.jsonl"
        write_legal_play(game, records, recipe.habit_episodes, seed=102, agents=recipe.habit_agents)
        words = ("--records_path", records, "--model_name_or_path", recipe.base, *recipe.habits)
        words += (*team, "--load_path", legal / "adapters")
        run(train_sft.main, *words, "--run_dir", folder)
    return folder / "adapters"


def train(name: str, arm: int, seed: int, begin: Path | None, args: argparse.Namespace) -> Path:
    """The adapters of one arm with one seed: the best by its own evaluations, or the last ones if it has none."""
    from mafrt.scripts import train as command

    folder: Path = args.output / f"{name}_{arm}_{seed}"
    if not (folder / "summary.json").is_file():
        words: Words = (
            "--config",
            SHIPPED / "configs" / f"game_{name}.yaml",
            *(("--load_path", begin) if begin else ()),
        )
        words += list(RECIPES[name].arms.values())[arm - 1]
        words += ("--iterations", args.iterations) if args.iterations else ()
        run(command.main, *words, "--seed", seed, "--run_dir", folder, makes=folder / "summary.json")
    return folder / "best" if (folder / "best").is_dir() else folder


def evaluate(
    name: str, label: str, key: str, adapters: Path | None, args: argparse.Namespace, baselines: bool = False
) -> dict[str, Any]:
    """What `mafrt evaluate` measures on held-out instances: `metrics`, `baselines`; without adapters, of the base."""
    from mafrt.scripts import evaluate as command

    recipe = RECIPES[name]
    path: Path = args.output / f"{name}_{key}_{label.replace(' ', '_')}.json"
    if not path.is_file():
        kwargs = {"split": "test", **recipe.kwargs, **({"opponent": "random"} if name == "tic_tac_toe" else {})}
        kwargs |= recipe.against[label]
        words: Words = ("--env", name, "--env_kwargs", *(f"{k}={str(v).lower()}" for k, v in kwargs.items()))
        words += ("--profile_path", recipe.profile) if recipe.profile else ()
        words += ("--model_name_or_path", recipe.base)
        words += ("--load_path", adapters) if adapters else ()
        words += ("--tasks", args.tasks, "--k", SAMPLES, "--max_new_tokens", recipe.max_new_tokens)
        words += ("--baselines", "--baseline_episodes", played(adapters)) if adapters and baselines else ()
        run(command.main, *words, "--output", path)
    measured: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return measured


def players(name: str, label: str) -> dict[str, float]:
    """Mean outcome of the scripted players on 200 held-out instances."""
    from mafrt.environment.registry import make_env
    from mafrt.envs.games.base import Game, baseline_scores

    against = {"opponent": "random"} if name == "tic_tac_toe" else {}
    game = make_env(
        name, **{"split": "test", **RECIPES[name].kwargs, **against, **RECIPES[name].against[label]}
    ).unwrapped
    assert isinstance(game, Game)
    return baseline_scores(game)


def table(
    found: Mapping[str, Sequence[Mapping[str, float]]],
    scripted: Mapping[str, float],
    baselines: Sequence[Mapping[str, Any]] = (),
) -> str:
    """A Markdown table: scripted players, baselines, the start, and each arm over its seeds."""
    lines = ["| player | seeds | sampled | greedy | least of the seeds, sampled |", "|---|---|---|---|---|"]
    lines += [f"| {name} player | - | {score:.3f} | | |" for name, score in scripted.items()]
    for baseline in baselines:
        if baseline["name"].startswith(("start,", "imitation")):
            numbers = ("" if baseline[key] is None else f"{baseline[key]:.3f}" for key in ("sampled", "greedy"))
            lines.append(f"| {baseline['name']} | 1 | {' | '.join(numbers)} | |")
    for name, runs in found.items():
        sampled, greedy = [run[f"eval/avg@{SAMPLES}"] for run in runs], [run["eval/greedy"] for run in runs]
        cells = [name, len(runs), over_seeds(sampled), over_seeds(greedy), f"{min(sampled):.3f}"]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def curve(folder: Path, keys: Sequence[str]) -> list[float]:
    """Mean of metrics in every iteration of a run, or of the run that a `best` lies in; empty if it lacks them."""
    run_dir = folder.parent if folder.name == "best" else folder
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return [statistics.fmean(line[key] for key in keys) for line in lines if all(key in line for key in keys)]


def played(folder: Path) -> int:
    """Episodes that a run was trained on."""
    return int(sum(curve(folder, ["episodes"])))


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    if not args.only_start:
        need_matplotlib()
    from bench.reproduce._figure import curves, seeds

    args.output.mkdir(parents=True, exist_ok=True)
    parts = []
    for name in args.games:
        recipe = RECIPES[name]
        begin = start(name, recipe, args.output)
        if args.only_start:
            continue
        arms = [number for number in range(1, len(recipe.arms) + 1) if not args.arms or str(number) in args.arms]
        labels = dict(zip(range(1, len(recipe.arms) + 1), recipe.arms, strict=True))
        runs = {arm: [train(name, arm, seed, begin, args) for seed in args.seeds] for arm in arms}
        for against in recipe.against:
            average, final = f"avg@{SAMPLES}", dict[str, tuple[float, float, float]]()
            found = {"start": [evaluate(name, against, "start", begin, args)["metrics"]]}
            beside: list[dict[str, Any]] = []
            for arm, folders in runs.items():
                scores = found[labels[arm]] = []
                for seed, folder in zip(args.seeds, folders, strict=True):
                    first = args.baselines and recipe.baselines and arm == arms[0] and seed == args.seeds[0]
                    measured = evaluate(name, against, f"{arm}_{seed}", folder, args, baselines=first)
                    scores.append(measured["metrics"])
                    if arm == arms[0]:
                        final[str(seed)] = (measured["metrics"][f"eval/{average}"], *measured["intervals"][average])
                    beside += measured["baselines"] if first else []
            if len(args.seeds) > 3:
                shown = seeds(f"{name}, {against}: held-out results by seed", final, average)
                (args.output / f"{name}_seeds.svg").write_text(shown, encoding="utf-8")
            parts.append(f"{name}, {against}\n\n{table(found, players(name, against), beside)}")
        drawn = {labels[arm]: [curve(folder, recipe.drawn) for folder in folders] for arm, folders in runs.items()}
        drawn = {label: found for label, found in drawn.items() if all(found)}
        if drawn:
            svg = curves(f"{name}: {len(args.seeds)} seeds and their mean", drawn, recipe.drawn_as)
            (args.output / f"{name}.svg").write_text(svg, encoding="utf-8")
    if args.only_start:
        return 0
    text = "\n\n".join(parts)
    (args.output / "table.md").write_text(text + "\n", encoding="utf-8")
    print(text)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
