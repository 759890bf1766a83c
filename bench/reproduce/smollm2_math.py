"""Reinforcement learning on a pretrained model: does it add what imitation does not?

SmolLM2-135M-Instruct first imitates solved story problems (the start, shared by all arms): few plans, which a person
would have to write, and many calculations, which any calculator writes. From the same adapters, per seed: reinforcement
learning (configs/smollm2_math.yaml), and imitation of the right ones among as many episodes that the start itself plays
(rejection sampling). The rate and the passes of imitation and the rate of one agent alone are chosen with the first
seed. Settings are chosen on stories:validation; the tables are of stories:test and, whose sentences no stage has seen,
stories:new. Every stage is a mafrt command whose results lie in the output folder; a stage that is there is not run
again.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench._tables import over_seeds
from bench.reproduce._commands import run
from bench.reproduce._figure import curves, need_matplotlib
from mafrt.core.shipped import SHIPPED
from mafrt.envs.math.stories import distinct
from mafrt.envs.workflows.state import written
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
RATES = {ALONE: (1e-4, 3e-5, 3e-4), IMITATES: (1e-4, 3e-4, 9e-4)}
"""of the rivals; validation problems choose among them"""
TRIED = 2
"""one of so many iterations is played to try a rate of one agent alone"""
PASSES = 2
"""most passes of imitation; after each one the adapters are scored"""
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
    if arm == IMITATES:
        return imitated(args, seed, *chosen_imitation(args))
    if arm == ALONE:
        rates = {rate: tried_alone(args, rate) for rate in RATES[ALONE]}
        return learnt(args, arm, seed, "--lr", max(rates, key=lambda rate: rates[rate])) / "best"
    return learnt(args, arm, seed) / "best"


def learnt(args: argparse.Namespace, arm: str, seed: int, *words: object, name: str = "", less: int = 1) -> Path:
    """The run of an arm that learns from rewards, or of one that only plays; with one of `less` iterations."""
    folder: Path = args.output / f"{name or name_of(arm)}_{seed}"
    if not (folder / "summary.json").is_file():
        own = ("--profile_path", team_of(arm, args.output), "--max_new_tokens", answer_tokens(arm))
        sizes = ("--iterations", -(-args.iterations // less), "--n_rollout_threads", args.episodes)
        looks = 0 if "--freeze" in words else args.validation
        common = (*sizes, "--eval_episodes", looks, "--seed", seed, "--load_path", warm_start(args, arm))
        math = ("--config", CONFIGS / "smollm2_math.yaml", "--model_name_or_path", args.model_name_or_path, *common)
        whole = (*math, *own, *ABLATIONS.get(arm, ()), *words, "--run_dir", folder)
        run(train_math.main, *whole, makes=folder / "summary.json")
    return folder


def tried_alone(args: argparse.Namespace, rate: float) -> float:
    """The best validation score of one agent alone along a shorter run at this rate."""
    words, name = ("--lr", rate, "--eval_interval", 5), f"tried_alone_{rate:.0e}"
    folder = learnt(args, ALONE, args.seeds[0], *words, name=name, less=TRIED)
    lines = [json.loads(line) for line in (folder / "evaluations.jsonl").read_text(encoding="utf-8").splitlines()]
    return max(float(line["eval/avg@1"] + line["eval/greedy"]) for line in lines if line["iteration"])


def imitated(args: argparse.Namespace, seed: int, rate: float, passes: int) -> Path:
    """The start's adapters after they have imitated the right ones of its own episodes, in so many passes."""
    out: Path = args.output
    played = learnt(args, IMITATES, seed, "--freeze", "all", name="played")
    adapters = warm_start(args, IMITATES)
    for done in range(1, passes + 1):
        folder = out / f"imitation_{rate:.0e}_{done}_{seed}"
        if not (folder / "adapters").is_dir():
            words: tuple[object, ...]
            words = ("--config", CONFIGS / "smollm2_start.yaml", "--model_name_or_path", args.model_name_or_path)
            words += ("--load_path", adapters, "--episodes_path", played, "--records_path", "none")
            run(train_sft.main, *words, "--lr", rate, "--seed", seed, "--run_dir", folder)
        adapters = folder / "adapters"
    return adapters


def chosen_imitation(args: argparse.Namespace) -> tuple[float, int]:
    """The rate and the number of passes whose adapters are best on validation problems, with the first seed."""
    seed, scores = args.seeds[0], {}
    for rate in RATES[IMITATES]:
        for passes in range(1, PASSES + 1):
            adapters = imitated(args, seed, rate, passes)
            name = f"imitation_{rate:.0e}_{passes}_{seed}"
            found = evaluate(name, IMITATES, "validation", adapters, args, args.validation)
            scores[rate, passes] = found.sampled + found.greedy
    return max(scores, key=lambda setting: scores[setting])


def evaluate(
    name: str, arm: str, split: str, adapters: Path, args: argparse.Namespace, tasks: int | None = None
) -> Scores:
    """Scores of an arm's adapters on a split of the stories; `tasks` of it, else those of the tables."""
    path = args.output / f"{name}_{split}.json"
    if not path.is_file():
        words = ["--load_path", adapters, "--model_name_or_path", args.model_name_or_path]
        words += ["--profile_path", team_of(arm, args.output), "--dataset_path", f"stories:{split}"]
        words += [
            "--tasks",
            tasks or args.tasks,
            "--k",
            args.samples,
            "--max_new_tokens",
            answer_tokens(arm),
            "--output",
            path,
        ]
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
