"""Reinforcement learning on a pretrained model: does it add what imitation does not?

SmolLM2-135M-Instruct first imitates solved story problems (the start, shared by all arms): few plans, which a person
would have to write, and many calculations, which any calculator writes. From the same adapters, per seed: reinforcement
learning (configs/smollm2_math.yaml), and imitation of the right ones among as many episodes that the start itself plays
(rejection sampling). Settings are chosen on stories:validation; the tables are of stories:test and, whose sentences no
stage has seen, stories:new. Every stage is a mafrt command whose results lie in the output folder; a stage that is
there is not run again.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.reproduce._commands import run
from bench.reproduce._figure import curves, need_matplotlib
from mafrt.core.shipped import SHIPPED
from mafrt.envs.math.stories import distinct
from mafrt.envs.workflows.state import written
from mafrt.runners.intervals import over_seeds
from mafrt.scripts import evaluate as command
from mafrt.scripts import train_math, train_sft

if TYPE_CHECKING:
    from mafrt.envs.math.stories import Story

CONFIGS = SHIPPED / "configs"
TURN_TOKENS = 28
LEARNS, IMITATES = "reinforcement learning", "rejection sampling"
UNCOACHED, ALONE, TWICE = "coach off", "one agent alone", "twice the rate"
ABLATIONS: dict[str, tuple[object, ...]] = {
    UNCOACHED: ("--coach", "none"),
    "actor frozen": ("--freeze", "actor"),
    "reasoner frozen": ("--freeze", "reasoner"),
    "answers by result": ("--score_answers_by", "result"),
    # No plan is there to score its answers by.
    ALONE: ("--score_answers_by", "result"),
    TWICE: ("--lr", 6e-4),  # and twice the rate that the team file gives an agent
}
"""Reinforcement learning without one of its parts, or at another rate: label -> words beside the config."""
ARMS = (LEARNS, IMITATES, *ABLATIONS)
TEAM, FIRST_TEAM = "profiles/smollm2_math.json", "profiles/smollm2_start.json"
"""of all arms but those whose team is written into the output folder; of the warm start and of imitation, the same
without what reinforcement learning alone needs"""
SOLVER = {"role": "solver", "prompt": "Plan the steps, calculate and box the answer.", "with_answer": True}


@dataclass(frozen=True)
class Scores:
    """Held-out scores of one set of adapters."""

    sampled: float
    greedy: float


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--iterations", type=int, default=30, help="of reinforcement learning")
    parser.add_argument("--demonstrations", type=int, default=320, help="solved problems of the warm start")
    parser.add_argument("--calculations", type=int, default=640, help="problems of which it sees the calculation only")
    parser.add_argument("--tasks", type=int, default=400, help="held-out problems of each split")
    parser.add_argument("--validation", type=int, default=128, help="validation problems of each look along the way")
    parser.add_argument("--splits", nargs="+", choices=("test", "new"), default=["test", "new"])
    parser.add_argument("--samples", type=int, default=2, help="sampled answers to each of them")
    parser.add_argument("--model_name_or_path", default="smollm2", help="the base")
    parser.add_argument("--episodes", type=int, default=128, help="of each iteration")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=[LEARNS, IMITATES])
    parser.add_argument("--output", type=Path, default=Path("runs/reproduce/smollm2_math"))
    return parser.parse_args(argv)


def write_demonstrations(path: Path, stories: Sequence[Story], plans: int, alone: bool = False) -> None:
    """Solutions of these problems, and plans of the last `plans` of them, as records for train_sft.

    With `alone`, one solver imitates the same sentences: plan and solution in one turn, or the solution of a problem
    whose plan is given.
    """
    lines = []
    for place, story in enumerate(stories):
        asked, planned = written(story.problem, ()), written(story.problem, (("reasoner", story.plan),))
        shown = place >= len(stories) - plans
        if alone:
            said = f"{story.plan} {story.solution}" if shown else story.solution
            lines.append({"agent": "solver", "prompt": asked if shown else planned, "response": said})
            continue
        if shown:
            lines.append({"agent": "reasoner", "prompt": asked, "response": story.plan})
        lines.append({"agent": "actor", "prompt": planned, "response": story.solution})
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


def team_of(arm: str, out: Path) -> Path | str:
    """The team file of an arm; written, if it is not the shipped one."""
    team = json.loads((SHIPPED / TEAM).read_text(encoding="utf-8"))
    if arm == ALONE:
        team = [SOLVER]
    elif arm == UNCOACHED:  # then the Actor has no reward but the outcome
        team = [{key: value for key, value in agent.items() if key != "outcome_weight"} for agent in team]
    elif arm == TWICE:
        team = [{**agent, "lr": 2 * agent["lr"]} if "lr" in agent else agent for agent in team]
    else:
        return TEAM
    path = out / f"{name_of(arm)}.json"
    path.write_text(json.dumps(team), encoding="utf-8")
    return path


def name_of(arm: str) -> str:
    """The arm's name in file names."""
    return arm.replace(" ", "_")


def start_of(arm: str) -> str:
    """The start of an arm, which is a folder of the output."""
    return "start_alone" if arm == ALONE else "start"


def warm_start(args: argparse.Namespace, arm: str) -> Path:
    """The adapters that an arm starts from; all teams share them."""
    out: Path = args.output
    folder = out / start_of(arm)
    words: tuple[object, ...]
    if not (folder / "adapters").is_dir():
        # Reinforcement learning meets the first training problems, the start imitates the last ones.
        stories, plans = distinct("train"), args.demonstrations
        records = folder.with_suffix(".jsonl")
        write_demonstrations(records, stories[-plans - args.calculations :], plans, alone=arm == ALONE)
        words = ("--config", CONFIGS / "smollm2_start.yaml", "--model_name_or_path", args.model_name_or_path)
        words += ("--profile_path", team_of(arm, out) if arm == ALONE else FIRST_TEAM, "--records_path", records)
        run(train_sft.main, *words, "--run_dir", folder)
    return folder / "adapters"


def answer_tokens(arm: str) -> int:
    """Most tokens of a turn; one agent alone has those of both."""
    return 2 * TURN_TOKENS if arm == ALONE else TURN_TOKENS


def train(args: argparse.Namespace, arm: str, seed: int) -> Path:
    """The adapters of one arm with one seed."""
    out: Path = args.output
    start = warm_start(args, arm)
    words: tuple[object, ...]
    common = ("--model_name_or_path", args.model_name_or_path, "--load_path", start, "--seed", seed)
    sizes = ("--iterations", args.iterations, "--n_rollout_threads", args.episodes)
    math = ("--config", CONFIGS / "smollm2_math.yaml", *common, *sizes, "--eval_episodes", args.validation)
    if arm != IMITATES:
        folder = out / f"{name_of(arm)}_{seed}"
        words = ("--profile_path", team_of(arm, out), "--max_new_tokens", answer_tokens(arm))
        if not (folder / "summary.json").is_file():
            more = (*words, *ABLATIONS.get(arm, ()), "--run_dir", folder)
            run(train_math.main, *math, *more, makes=folder / "summary.json")
        return folder / "best"
    played, folder = out / f"played_{seed}", out / f"imitation_{seed}"
    if not (played / "summary.json").is_file():
        more = ("--run_dir", played, "--freeze", "all", "--eval_episodes", 0)
        run(train_math.main, *math, *more, makes=played / "summary.json")
    if not (folder / "adapters").is_dir():
        words = ("--config", CONFIGS / "smollm2_start.yaml", *common, "--lr", 1e-4, "--episodes_path", played)
        run(train_sft.main, *words, "--records_path", "none", "--run_dir", folder)
    return folder / "adapters"


def evaluate(name: str, arm: str, split: str, adapters: Path, args: argparse.Namespace) -> Scores:
    """Scores of an arm's adapters on a split of the stories."""
    path = args.output / f"{name}_{split}.json"
    if not path.is_file():
        words = ["--load_path", adapters, "--model_name_or_path", args.model_name_or_path]
        words += ["--profile_path", team_of(arm, args.output), "--dataset_path", f"stories:{split}"]
        words += ["--tasks", args.tasks, "--k", args.samples, "--max_new_tokens", answer_tokens(arm), "--output", path]
        run(command.main, *words)
    metrics = json.loads(path.read_text(encoding="utf-8"))["metrics"]
    return Scores(metrics[f"eval/avg@{args.samples}"], metrics["eval/greedy"])


def table(starts: Mapping[str, Scores], arms: Mapping[str, Sequence[Scores]]) -> str:
    """A Markdown table: scores, and gains over the arm's start with intervals clustered by seed."""
    lines = ["| arm | seeds | sampled | greedy | gain sampled | gain greedy |", "|---|---|---|---|---|---|"]
    for name, start in starts.items():
        lines.append(f"| {name.replace('_', ' ')} | - | {start.sampled:.3f} | {start.greedy:.3f} | | |")
    for name, runs in arms.items():
        start = starts[start_of(name)]
        sampled, greedy = [run.sampled for run in runs], [run.greedy for run in runs]
        cells = [f"{statistics.fmean(sampled):.3f}", f"{statistics.fmean(greedy):.3f}"]
        cells += [over_seeds([value - start.sampled for value in sampled], "+.3f")]
        cells += [over_seeds([value - start.greedy for value in greedy], "+.3f")]
        lines.append(f"| {name} | {len(runs)} | {' | '.join(cells)} |")
    return "\n".join(lines)


def figure(out: Path, seeds: Sequence[int]) -> str | None:
    """Validation scores over reinforcement learning, a curve per seed; None without runs."""
    scores: dict[str, list[list[float]]] = {"sampled": [], "greedy": []}
    steps: list[int] = []
    for seed in seeds:
        path = out / f"{name_of(LEARNS)}_{seed}" / "evaluations.jsonl"
        if path.is_file():
            lines: list[dict[str, Any]] = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
            steps = [line["iteration"] for line in lines]
            scores["sampled"].append([line["eval/avg@1"] for line in lines])
            scores["greedy"].append([line["eval/greedy"] for line in lines])
    if not steps:
        return None
    return curves("SmolLM2 on story problems", scores, "validation score", steps=steps)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    need_matplotlib()
    out = args.output
    out.mkdir(parents=True, exist_ok=True)
    trained = {(arm, seed): train(args, arm, seed) for seed in args.seeds for arm in args.arms}
    parts = []
    for split in args.splits:
        starts = {start_of(arm): evaluate(start_of(arm), arm, split, warm_start(args, arm), args) for arm in args.arms}
        evaluated = {
            arm: [evaluate(f"{name_of(arm)}_{seed}", arm, split, trained[arm, seed], args) for seed in args.seeds]
            for arm in args.arms
        }
        parts.append(f"stories:{split}\n\n{table(starts, evaluated)}")
    text = "\n\n".join(parts)
    (out / "table.md").write_text(text + "\n", encoding="utf-8")
    if (svg := figure(out, args.seeds)) is not None:
        (out / "curves.svg").write_text(svg, encoding="utf-8")
    print(text)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
