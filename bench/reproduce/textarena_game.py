"""Self-play in a game of TextArena: one policy in both seats, from a start that has seen legal random play.

The games base has never seen the game, so that some games of legal random play are imitated first. The start and the
policy of each seed play held-out games (seeds of their own) against a player of random legal moves. The table has the
outcomes, 0 for a loss to 1 for a win. Every stage is a mafrt command; a stage whose results are there is not run again.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from bench._tables import over_seeds
from bench.reproduce._commands import run
from mafrt.environment.registry import make_env
from mafrt.envs.textarena.env import listed_moves

GAME = "textarena:TicTacToe-v0"
TEAM = [{"role": f"player_{seat}", "prompt": mark, "adapter": "player"} for seat, mark in enumerate("OX")]
LEARN_LEGAL = ("--lr", 5e-3, "--batch_size", 16, "--lora_rank", 32)
LEARN = ("--algorithm", "reinforce_pp", "--ppo_epoch", 1, "--num_mini_batch", 2, "--lr", 2e-3, "--lora_rank", 32)
SAMPLES = 2


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--imitated", type=int, default=150, help="games of legal random play")
    parser.add_argument("--iterations", type=int, default=40, help="of training")
    parser.add_argument("--games", type=int, default=64, help="of an iteration")
    parser.add_argument("--held_out", type=int, default=200, help="games of an evaluation, each played twice")
    parser.add_argument("--output", type=Path, default=Path("runs/reproduce/textarena"))
    return parser.parse_args(argv)


def legal_play(games: int) -> Iterator[dict[str, str]]:
    """Records of random legal moves in both seats. A move is said without its brackets, which TextArena adds."""
    env, chance = make_env(GAME, brief=True), random.Random(1)
    for game in range(games):
        seen, _ = env.reset(seed=game, options={"task": game})
        while seen:
            ((agent, text),) = seen.items()
            move = chance.choice(listed_moves(str(text))).strip("[]")
            yield {"agent": agent, "prompt": str(text), "response": move}
            seen = dict(env.step({agent: move}).observations)


def random_player(games: int) -> float:
    """Mean outcome of random legal moves against the random player on the held-out games, four times each."""
    env, chance, outcomes = make_env(GAME, brief=True, opponent="random", split="test"), random.Random(2), list[float]()
    for game in list(range(games)) * 4:
        seen, _ = env.reset(seed=game, options={"task": game})
        while seen:
            ((agent, text),) = seen.items()
            result = env.step({agent: chance.choice(listed_moves(str(text)))})
            seen = dict(result.observations)
        outcomes.append(result.info["outcome"])
    return statistics.fmean(outcomes)


def evaluate(adapters: Path, path: Path, args: argparse.Namespace) -> dict[str, Any]:
    from mafrt.scripts import evaluate as command

    if not path.is_file():
        run(
            command.main, *("--env", GAME, "--env_kwargs", "brief=true", "opponent=random"),
            *("--profile_path", args.output / "team.json", "--model_name_or_path", "games-base"),
            *("--load_path", adapters, "--tasks", args.held_out, "--k", SAMPLES, "--max_new_tokens", 1),
            *("--output", path),
        )  # fmt: skip
    measured: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return measured


def main(argv: Sequence[str] | None = None) -> int:
    from mafrt.scripts import train, train_sft

    args = parse(argv)
    out: Path = args.output
    out.mkdir(parents=True, exist_ok=True)
    team, records, start = out / "team.json", out / "legal.jsonl", out / "start"
    team.write_text(json.dumps(TEAM), encoding="utf-8")
    base = ("--model_name_or_path", "games-base", "--profile_path", team)
    if not (start / "adapters").is_dir():
        records.write_text("\n".join(map(json.dumps, legal_play(args.imitated))) + "\n", encoding="utf-8")
        run(train_sft.main, "--records_path", records, *base, *LEARN_LEGAL, "--run_dir", start)
    found = {"start": [evaluate(start / "adapters", out / "start.json", args)]}
    for seed in args.seeds:
        folder = out / f"seed_{seed}"
        if not (folder / "summary.json").is_file():
            run(
                train.main, *("--env", GAME, "--env_kwargs", "brief=true", *base, "--load_path", start / "adapters"),
                *(*LEARN, "--iterations", args.iterations, "--n_rollout_threads", args.games, "--max_new_tokens", 1),
                *("--eval_episodes", 0, "--seed", seed, "--run_dir", folder), makes=folder / "summary.json",
            )  # fmt: skip
        found.setdefault("trained", []).append(evaluate(folder, out / f"seed_{seed}.json", args))
    lines = ["| player | sampled | greedy | ended by an illegal move | by seed, sampled |", "|---|---|---|---|---|"]
    lines.append(f"| random player | {random_player(args.held_out):.3f} | | | |")
    for name, runs in found.items():
        sampled, greedy, illegal = (
            [each["metrics"][f"eval/{key}"] for each in runs] for key in (f"avg@{SAMPLES}", "greedy", "measure/illegal")
        )
        cells = [name, over_seeds(sampled), over_seeds(greedy), over_seeds(illegal)]
        own = "; ".join(
            f"{each['metrics'][f'eval/avg@{SAMPLES}']:.3f} ({low:.3f} to {high:.3f})"
            for each in runs
            for low, high in [each["intervals"][f"avg@{SAMPLES}"]]
        )
        lines.append(f"| {' | '.join([*map(str, cells), own])} |")
    (out / "table.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    print("\n".join(lines))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
