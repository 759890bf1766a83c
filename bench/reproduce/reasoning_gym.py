"""Tasks of reasoning-gym with SmolLM2: before and after reinforcement learning, beside what needs none of it.

SmolLM2 talks where a number is asked for. So a start imitates the answers of a few training tasks, which teaches how an
answer looks, and each seed trains from there. Adapters are chosen on validation tasks; the test tasks of the table were
looked at by nothing else. The first seed is evaluated with `--baselines`, among them imitation of its own right answers
with as many episodes as training plays, tuned on validation tasks. Scores are the data set's own, which pay a little
for what is nearly right; solved are those of 1. A stage whose results are there is not run again.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench._tables import over_seeds
from bench.reproduce._commands import run
from mafrt.config.team import Team
from mafrt.core.types import Observation
from mafrt.environment.registry import make_env

TASKS: dict[str, dict[str, int]] = {
    "spell_backward": {},
    "chain_sum": {"max_terms": 3},
    "leg_counting": {"max_animals": 2},
    "letter_counting": {},
    "simple_equations": {},
}
"""Data sets of five kinds at level 0, two of them with settings that give them more than some 200 and 100 questions."""
TEAM = [{"role": "solver", "prompt": "Give the answer only.", "with_answer": True}]
TRAINED_ON = 2000
"""training tasks of each data set; the last of them are imitated"""
IMITATE = ("--batch_size", 8, "--lora_rank", 16, "--lora_alpha", 32)
LEARN = ("--algorithm", "grpo", "--n_samples", 8, "--ppo_epoch", 1, "--lr", 3e-4, "--lora_rank", 16, "--lora_alpha", 32)
SAMPLES = 4


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--data_sets", nargs="+", default=list(TASKS), choices=TASKS, help="of reasoning-gym")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--imitated", type=int, default=64, help="answers from which the form is learnt")
    parser.add_argument("--iterations", type=int, default=40, help="of training")
    parser.add_argument("--episodes", type=int, default=64, help="of an iteration")
    parser.add_argument("--tasks", type=int, default=100, help="test tasks")
    parser.add_argument("--max_new_tokens", type=int, default=8, help="of an answer")
    parser.add_argument("--model_name_or_path", default="smollm2")
    parser.add_argument("--output", type=Path, default=Path("runs/reproduce/reasoning_gym"))
    return parser.parse_args(argv)


def answer_of_task(agent: str, info: Mapping[str, Any]) -> str:
    return str(info["answer"])


def demonstrations(
    name: str,
    config: dict[str, int],
    team: Team,
    number: int,
    say: Callable[[str, Mapping[str, Any]], str] = answer_of_task,
) -> Iterator[dict[str, str]]:
    """Records of the last `number` training tasks, played with what `say` gives for an agent and a task's info."""
    env = make_env(f"reasoning_gym:{name}", team=team, level=0, size=TRAINED_ON, config=config)
    for task in range(TRAINED_ON - number, TRAINED_ON):
        first, info = env.reset(seed=task, options={"task": task})
        seen: Mapping[str, Observation] = first
        while seen:
            ((agent, text),) = seen.items()
            said = say(agent, info)
            yield {"agent": agent, "prompt": str(text), "response": said}
            seen = env.step({agent: said}).observations


def evaluate(args: argparse.Namespace, name: str, adapters: Path, path: Path, *words: object) -> dict[str, Any]:
    found = tested(args, (*played(args, name, TASKS[name]), "--k", SAMPLES, *words), adapters, path)
    metrics = found["metrics"]
    own = {"sampled": metrics[f"eval/avg@{SAMPLES}"], "greedy": metrics["eval/greedy"], "solved": solved(found)}
    return own | {"baselines": found["baselines"]}


def tested(args: argparse.Namespace, words: Sequence[object], adapters: Path, path: Path) -> dict[str, Any]:
    """What `mafrt evaluate` finds on the test tasks; read from `path` if it is there."""
    from mafrt.scripts import evaluate as command

    if not path.is_file():
        run(command.main, *words, "--load_path", adapters, "--tasks", args.tasks, "--output", path)
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def solved(found: Mapping[str, Any]) -> float:
    """The share of sampled answers whose score is 1."""
    scores = [score for each in found["scores"].values() for score in each]
    return float(sum(score >= 1 for score in scores) / len(scores))


def played(args: argparse.Namespace, name: str, config: dict[str, int], team: str = "team.json") -> tuple[object, ...]:
    """The words that say what is played."""
    settings = {"level": 0, "size": TRAINED_ON, "config": config}
    env = ("--env", f"reasoning_gym:{name}", "--env_kwargs", json.dumps(settings))
    return (*env, *base(args, team), "--max_new_tokens", args.max_new_tokens)


def base(args: argparse.Namespace, team: str = "team.json") -> tuple[object, ...]:
    return ("--model_name_or_path", args.model_name_or_path, "--profile_path", args.output / team)


def imitated(
    args: argparse.Namespace, start: Path, said: Iterator[dict[str, str]], rate: float = 5e-4, team: str = "team.json"
) -> Path:
    """The adapters that have imitated these records, which are written beside their folder."""
    from mafrt.scripts import train_sft

    if not (start / "adapters").is_dir():
        records = start.with_suffix(".jsonl")
        records.write_text("".join(json.dumps(each) + "\n" for each in said), encoding="utf-8")
        run(train_sft.main, "--records_path", records, *base(args, team), *IMITATE, "--lr", rate, "--run_dir", start)
    return start / "adapters"


def learnt(args: argparse.Namespace, name: str) -> list[str]:
    """Train on one data set; the lines of its table."""
    from mafrt.scripts import train

    out: Path = args.output / name
    out.mkdir(parents=True, exist_ok=True)
    said = demonstrations(name, TASKS[name], Team.load(args.output / "team.json"), args.imitated)
    start = imitated(args, out / "start", said)
    before = evaluate(args, name, start, out / "start.json")
    runs = []
    for seed in args.seeds:
        folder = out / f"seed_{seed}"
        if not (folder / "summary.json").is_file():
            run(
                train.main, *played(args, name, TASKS[name]), *LEARN, "--load_path", start, "--seed", seed,
                *("--iterations", args.iterations, "--n_rollout_threads", args.episodes, "--eval_interval", 10),
                *("--eval_episodes", 64, "--run_dir", folder), makes=folder / "summary.json",
            )  # fmt: skip
        words = ("--baselines", "--baseline_votes", 8) if seed == args.seeds[0] else ()
        runs.append(evaluate(args, name, folder / "best", out / f"seed_{seed}.json", *words))
    columns = ("sampled", "greedy", "solved")
    lines = [f"| {name} | {' | '.join(f'{before[key]:.3f}' for key in columns)} | |"]
    each = "; ".join(f"{one['sampled']:.3f}" for one in runs)
    means = " | ".join(over_seeds([one[key] for one in runs]) for key in columns)
    lines.append(f"| trained, {len(runs)} seeds | {means} | {each} |")
    for row in runs[0]["baselines"][1:]:
        cells = " | ".join("" if row[key] is None else f"{row[key]:.3f}" for key in columns)
        lines.append(f"| {row['name']} | {cells} | |")
    return lines


def write_table(args: argparse.Namespace, head: str, rows: Callable[[argparse.Namespace, str], list[str]]) -> None:
    """Write the `rows` of each data set below `head`, after every one of them, and print all in the end."""
    lines = [head, re.sub("[^|]+", "---", head)]
    for name in args.data_sets:
        lines += rows(args, name)
        (args.output / "table.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    print("\n".join(lines))


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    args.output.mkdir(parents=True, exist_ok=True)
    (args.output / "team.json").write_text(json.dumps(TEAM), encoding="utf-8")
    write_table(args, "| data set | sampled | greedy | solved, sampled | by seed, sampled |", learnt)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
