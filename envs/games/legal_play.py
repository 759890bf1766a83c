"""Episodes of legal random play, as records to imitate: a base that has seen them knows the moves and not the game."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path

from mafrt.envs.games.base import Game


def legal_play(game: Game, episodes: int, seed: int) -> Iterator[dict[str, str]]:
    """Records `{agent, prompt, response}` of the random player on instances of the game's split."""
    rng = random.Random(f"legal-{seed}")
    for number in range(episodes):
        game.rng.seed(f"legal-{seed}-{number}")
        acting, _ = game.reset()
        while acting:
            said = {agent: game.move("random", agent, rng) for agent in acting}
            for agent, text in said.items():
                yield {"agent": agent, "prompt": str(acting[agent]), "response": text}
            result = game.step(said)
            acting = {} if result.terminated or result.truncated else dict(result.observations)


def write_legal_play(game: Game, path: Path, episodes: int = 500, seed: int = 1) -> int:
    """Write them as JSON lines, for `mafrt train_sft --records_path`; returns how many."""
    lines = [json.dumps(record) for record in legal_play(game, episodes, seed)]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return len(lines)
