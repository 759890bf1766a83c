"""Episodes of legal random play, as records to imitate: a base that has seen them knows the moves and not the game."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from mafrt.envs.games.base import Game, Player


def legal_play(
    game: Game, episodes: int, seed: int, player: Player | Mapping[str, Player] = "random"
) -> Iterator[dict[str, str]]:
    """Records `{agent, prompt, response}` of a scripted player, or of one for each agent, on the game's split."""
    players = player if isinstance(player, Mapping) else dict.fromkeys(game.agents, player)
    rng = random.Random(f"legal-{seed}")
    for number in range(episodes):
        game.rng.seed(f"legal-{seed}-{number}")
        acting, _ = game.reset()
        while acting:
            moves = {agent: game.move(players[agent], agent, rng) for agent in acting}
            for agent, text in moves.items():
                yield {"agent": agent, "prompt": str(acting[agent]), "response": text}
            result = game.step(moves)
            acting = {} if result.terminated or result.truncated else dict(result.observations)


def write_legal_play(
    game: Game,
    path: Path,
    episodes: int = 500,
    seed: int = 1,
    agents: Sequence[str] | None = None,
    player: Player | Mapping[str, Player] = "random",
) -> int:
    """Write records of `agents`, by default all, as JSON lines for `mafrt train_sft --records_path`; returns how many.

    `player` is one for all agents, or agent -> player. With `optimal` the records show whether the base can learn a
    game at all, by imitation.
    """
    lines = [
        record for record in legal_play(game, episodes, seed, player) if agents is None or record["agent"] in agents
    ]
    path.write_text("\n".join(map(json.dumps, lines)) + "\n", encoding="utf-8")
    return len(lines)
