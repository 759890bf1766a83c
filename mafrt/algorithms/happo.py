"""HAPPO's M: the product of the policy ratios of the agents updated earlier in the iteration, per joint step.

    M = 1 ; after the update of agent i:  M <- M * exp(mean over tokens of log pi_new - log pi_old) of i's turn

One M per joint step, multiplied into the loss terms of the agents updated later (`PolicyTerms.weights`); it is a
constant without gradient. Agents that did not speak in the step, or did not learn, contribute 1. Before the first
update M is 1 everywhere and the update is MAPPO's.

Source: Kuba 2022 (2109.11251) algorithm 4; HARL. A joint step is a maximal run of turns in which each agent speaks at
most once: agents that act simultaneously, or one round of agents that speak in turn (one joint action in MARFT,
2504.16129, too). A new joint step starts with the step of the environment in which an agent speaks again, so that the
order of those who speak at the same time changes nothing.

Deviations: the ratio is the geometric mean over the turn's tokens and M is clamped, since a product over hundreds of
tokens and several agents would be 0 or infinite. A ratio that is not finite counts as 1, and is counted.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence

from mafrt.algorithms.stats import mean, std
from mafrt.core.errors import ConfigError
from mafrt.core.types import Episode, Turn


def joint_steps(turns: Sequence[Turn]) -> list[int]:
    """Index of the joint step that each turn of an episode belongs to, in speaking order."""
    steps: list[int] = []
    step, spoken = 0, set[str]()
    for _, together in itertools.groupby(turns, lambda turn: turn.env_step):
        speakers = [turn.agent for turn in together]
        for place, speaker in enumerate(speakers):
            if speaker in spoken or (not place and not spoken.isdisjoint(speakers)):
                step, spoken = step + 1, set()
            spoken.add(speaker)
            steps.append(step)
    return steps


class CompoundRatio:
    """M of every joint step of a batch, through one iteration of sequential updates."""

    def __init__(self, episodes: Sequence[Episode], *, low: float = 0.5, high: float = 2.0) -> None:
        if not 0.0 < low <= 1.0 <= high < math.inf:
            raise ConfigError(f"M is clamped to [{low}, {high}]; expected 0 < low <= 1 <= high.")
        self.low, self.high = low, high
        self.nonfinite = 0
        self._turns = [turn for episode in episodes for turn in episode.turns]
        self._step_of = [(index, step) for index, episode in enumerate(episodes) for step in joint_steps(episode.turns)]
        self._factors = dict.fromkeys(self._step_of, 1.0)

    def weights(self) -> list[float]:
        """Current M of each turn of the batch, episode after episode: the weight of its loss terms."""
        return [self._factors[step] for step in self._step_of]

    def update(self, moved: Iterable[tuple[int, Sequence[float]]]) -> None:
        """Multiply one agent's ratios into M.

        Args:
            moved: position of each of the agent's turns in the batch (as in `weights`), with its log-probs under the
                updated weights, one per action token.
        """
        for position, new in moved:
            turn = self._turns[position]
            old = turn.logprobs if turn.old_logprobs is None else turn.old_logprobs
            if not old:
                continue
            log_ratio = mean([n - o for n, o in zip(new, old, strict=True)])
            if not math.isfinite(log_ratio):
                self.nonfinite += 1
                continue
            step = self._step_of[position]
            # exp of more than 20 could overflow and lies outside any sensible clamp.
            ratio = math.exp(max(-20.0, min(20.0, log_ratio)))
            self._factors[step] = max(self.low, min(self.high, self._factors[step] * ratio))

    def spread(self, agent: str) -> dict[str, float]:
        """`compound_std/AGENT`: current spread of M over the turns of the agent about to be updated."""
        factors = [weight for turn, weight in zip(self._turns, self.weights(), strict=True) if turn.agent == agent]
        return {f"compound_std/{agent}": std(factors, unbiased=False)} if factors else {}

    def metrics(self) -> dict[str, float]:
        """Mean, spread and extremes of M over the joint steps; turns whose ratio was not finite."""
        factors = list(self._factors.values())
        if not factors:
            return {}
        return {
            "compound_mean": mean(factors),
            "compound_std": std(factors, unbiased=False),
            "compound_min": min(factors),
            "compound_max": max(factors),
            "compound_nonfinite": float(self.nonfinite),
        }
