"""Is the quickstart's gain more than a better way to read the untrained base?

On the same held-out problems: the untrained base at several temperatures, its majority vote, the best constant answer,
imitation of the right ones among as many episodes as training plays (rejection sampling), and the trained team.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mafrt.core.shipped import SHIPPED
from mafrt.scripts.reproduce._commands import run

CONFIG = SHIPPED / "configs" / "quickstart.yaml"
TEMPERATURES = (0.3, 0.7, 1.0)
VOTES = 32
LR = 1e-3
"""of the imitation"""


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--tasks", type=int, default=256, help="held-out problems")
    parser.add_argument("--iterations", type=int, default=30, help="of the quickstart, 128 episodes each")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--output", type=Path, default=Path("runs/reproduce/quickstart_baselines"))
    return parser.parse_args(argv)


def majority(answers: Sequence[str | None]) -> str | None:
    """The answer that was given most often, the first of several; texts without an answer do not vote."""
    votes = Counter(answer for answer in answers if answer is not None)
    return votes.most_common(1)[0][0] if votes else None


def vote(tasks: int, samples: int, seed: int) -> float:
    """Share of the problems that a majority of the untrained team's sampled answers solves."""
    from mafrt import LocalEngine, SharedBase
    from mafrt.config.agent import LoraSpec
    from mafrt.config.team import Team
    from mafrt.config.train_config import TrainConfig
    from mafrt.envs.math import MathEnv, extract_answer, verify_many
    from mafrt.rollout.player import Player
    from mafrt.runners.build import place_adapters, sampling_of
    from mafrt.runners.evaluation import evaluate

    team = Team.load(SHIPPED / "profiles" / "quickstart.json")
    env, base = MathEnv(team=team, split="test"), SharedBase.load("teaching-base")
    place_adapters(base, team, LoraSpec(), 0)
    config = TrainConfig.of(max_new_tokens=48)
    sampling = {name: sampling_of(config, team, name) for name in team.names}
    player = Player(LocalEngine(base), base.tokenizer, team, sampling, base.context_window)
    found = evaluate(env, player, tasks=tasks, samples=samples, greedy=False, seed=seed, keep=lambda _: True)
    assert found is not None
    answers: dict[str, list[str | None]] = {}
    for episode in found.episodes:
        answers.setdefault(episode.group, []).append(extract_answer(episode.turns[-1].text))
    pairs = [(f"\\boxed{{{majority(given)}}}", env.tasks[int(group)].answer) for group, given in answers.items()]
    return sum(verify_many(pairs)) / len(pairs)


def constant(tasks: int) -> float:
    """Score of the constant answer that solves most of the held-out problems."""
    from mafrt.envs.math import load_tasks

    answers = Counter(task.answer for task in load_tasks(split="test")[:tasks])
    return answers.most_common(1)[0][1] / answers.total()


def evaluated(args: argparse.Namespace, name: str, *words: object) -> dict[str, float]:
    """Metrics of `mafrt evaluate` on the held-out problems."""
    from mafrt.scripts import evaluate

    path = args.output / f"{name}.json"
    if not path.is_file():
        common = ("--tasks", args.tasks, "--k", 4, "--seed", args.seed, "--max_new_tokens", 48, "--output", path)
        run(evaluate.main, *common, *words)
    found: dict[str, float] = json.loads(path.read_text(encoding="utf-8"))["metrics"]
    return found


def trained(args: argparse.Namespace) -> Path:
    """The run of the quickstart."""
    from mafrt.scripts import train_math

    folder: Path = args.output / "trained"
    if not (folder / "summary.json").is_file():
        words = ("--config", CONFIG, "--iterations", args.iterations, "--seed", args.seed, "--eval_episodes", 0)
        run(train_math.main, *words, "--run_dir", folder)
    return folder


def imitated(args: argparse.Namespace) -> Path:
    """Adapters that imitate the right episodes among as many as training plays."""
    from mafrt.scripts import train_math, train_sft

    played, folder = args.output / "played", args.output / "imitation"
    if not (played / "summary.json").is_file():
        words = ("--config", CONFIG, "--iterations", args.iterations, "--seed", args.seed, "--eval_episodes", 0)
        run(train_math.main, *words, "--run_dir", played, "--freeze", "all")
    if not (folder / "adapters").is_dir():
        records = ("--episodes_path", played, "--profile_path", "profiles/quickstart.json")
        run(train_sft.main, *records, "--lr", LR, "--epochs", 1, "--batch_size", 64, "--run_dir", folder)
    return folder / "adapters"


def rows(args: argparse.Namespace) -> list[tuple[str, float, float | None]]:
    """(name, sampled, greedy) of every rival and of the trained team."""
    found: list[tuple[str, float, float | None]] = [("best constant answer", constant(args.tasks), None)]
    for heat in TEMPERATURES:
        metrics = evaluated(args, f"base_{heat}", "--temperature", heat)
        found.append((f"untrained, temperature {heat}", metrics["eval/avg@4"], metrics["eval/greedy"]))
    found.append((f"untrained, majority of {VOTES}", vote(args.tasks, VOTES, args.seed), None))
    for name, folder in (("rejection sampling", imitated(args)), ("trained", trained(args))):
        profile: tuple[Any, ...] = ("--profile_path", "profiles/quickstart.json")
        metrics = evaluated(args, name.replace(" ", "_"), "--load_path", folder, *profile)
        found.append((name, metrics["eval/avg@4"], metrics["eval/greedy"]))
    return found


def table(found: Sequence[tuple[str, float, float | None]]) -> str:
    lines = ["| team | sampled | greedy |", "|---|---|---|"]
    lines += [
        f"| {name} | {sampled:.3f} | {'' if greedy is None else f'{greedy:.3f}'} |" for name, sampled, greedy in found
    ]
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    args.output.mkdir(parents=True, exist_ok=True)
    text = table(rows(args))
    (args.output / "table.md").write_text(text + "\n", encoding="utf-8")
    print(text)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
