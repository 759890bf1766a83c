"""Parts that all games share: instances from a seed, held-out instances by construction, and scripted players."""

from __future__ import annotations

import hashlib
import random
from types import MappingProxyType
from typing import Any, Literal

from mafrt.config.schema import check_bool, check_choice
from mafrt.core.errors import ConfigError
from mafrt.core.types import Evidence, Observation, Scored, StepResult
from mafrt.environment.base import Env
from mafrt.envs.construction import SPLITS

HELD_OUT, VALIDATED = 4, 12
"""one instance in so many is in the test split, and of the others one in so many in the validation split"""
MOST_DRAWS = 10_000
Player = Literal["optimal", "random", "constant"]
PLAYERS: tuple[Player, ...] = ("optimal", "random", "constant")


def split_of(key: str) -> str:
    """Split of an instance by the hash of its key, so that no instance is in two.

    Only the part before `|` counts: a game keeps an answer that has to be equally frequent in all splits behind it.
    """
    digest = hashlib.sha256(key.partition("|")[0].encode()).digest()
    if digest[0] % HELD_OUT == 0:
        return "test"
    return "validation" if digest[5] % VALIDATED == 0 else "train"


def scored(agent: str, rules: Scored) -> dict[str, Any]:
    """Part of a step's info: the solver's score of the agent's turn, which `--coach rules` reads."""
    return {"evidence": {agent: Evidence(rules=rules)}}


class Game(Env):
    """A game whose instances are drawn from a seed, with a solver that knows the best moves.

    A subclass defines `draw`, `start`, `step` and `move`.

    Args:
        split: `train`, `validation` or `test`.
        brief: observations without instructions, for small bases: every word that is always the same costs time, and
            hides the ones that differ.
    """

    held_out = MappingProxyType({"split": "test"})
    validation = MappingProxyType({"split": "validation"})
    bounded = True

    def __init__(self, split: str = "train", brief: bool = False) -> None:
        check_choice("split", split, SPLITS)
        check_bool("brief", brief)
        self.split, self.brief = split, brief

    def draw(self, rng: random.Random) -> str:
        """Draw an instance into the game's fields; returns its key, which is equal for equal instances only."""
        raise NotImplementedError

    def start(self) -> dict[str, Observation]:
        """Observations of the agents that act first."""
        raise NotImplementedError

    def move(self, player: Player, agent: str, rng: random.Random) -> str:
        """The text that a scripted player says for `agent` now; `optimal` looks at the whole state."""
        raise NotImplementedError

    def reset(
        self, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, Observation], dict[str, Any]]:
        for _ in range(MOST_DRAWS):
            key = self.draw(self.rng)
            if split_of(key) == self.split:
                return self.start(), {"task": key}
        raise ConfigError(f"{type(self).__name__} has no instance in the split {self.split!r}; choose a larger game.")


def play(game: Game, player: Player, seed: int) -> float:
    """Outcome of one episode of a scripted player; the summed rewards of its last step where there is none."""
    rng = random.Random(f"{player}-{seed}")
    game.rng.seed(seed)
    acting, _ = game.reset()
    while True:
        result: StepResult = game.step({agent: game.move(player, agent, rng) for agent in acting})
        if result.terminated or result.truncated:
            return float(result.info.get("outcome", sum(result.rewards.values())))
        acting = dict(result.observations)


def baseline_scores(game: Game, episodes: int = 200, seed: int = 1) -> dict[str, float]:
    """Player -> mean outcome over `episodes` instances of the game's split."""
    by_player: dict[str, float] = {}
    for player in PLAYERS:
        scores = [play(game, player, seed + number) for number in range(episodes)]
        by_player[player] = sum(scores) / episodes
    return by_player
