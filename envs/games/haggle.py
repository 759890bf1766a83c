"""`haggle`: two agents with private values divide some things by exchanging offers.

Each of three kinds of things is worth a number of points to each agent, and both know only their own numbers. They
speak in turn; an offer says how many of each kind its speaker keeps, `accept` agrees to the other's last offer. An
instance is the numbers of things and the values of both (as in Lewis 2017, 1706.05125); held-out instances are others.
"""

from __future__ import annotations

import random
import re
from dataclasses import replace
from itertools import product
from typing import Any

from mafrt.core.errors import ConfigError
from mafrt.core.types import Observation, Scored, StepResult
from mafrt.envs.games.base import Game, Player, scored

KINDS = ("books", "hats", "balls")
MOST_OF_A_KIND = 3
POINTS = 10
"""value of all things together, for each agent"""
_NUMBER = re.compile(r"\d+")
_ACCEPT = re.compile(r"\baccept\b")

Split = tuple[int, ...]
"""things of each kind that one agent gets"""


class Haggle(Game):
    """Two agents; each is paid its share of its points, and the outcome is the sum of both over the best possible sum.

    Without an agreement, or after an offer that cannot be read, neither agent gets anything. `pay` says what is paid:
    `team`, the outcome alone, so that the two work together; `own`, each agent its own points over `POINTS`, so that
    they haggle.

    Args:
        offers: most offers of a game, 2 to 8.
        pay: `team` or `own`.
        split: `train`, `validation` or `test`.
        brief: observations are numbers alone: the things, the speaker's values, and what it is offered, the last time
            with the word `last`.
    """

    agents = ("ann", "ben")
    bounded = True

    def __init__(self, offers: int = 4, pay: str = "team", split: str = "train", brief: bool = False) -> None:
        super().__init__(split, brief)
        if not 2 <= offers <= 8 or pay not in ("team", "own"):
            raise ConfigError(f"offers is {offers} and pay is {pay!r}; choose 2 to 8 offers and pay 'team' or 'own'.")
        self.offers, self.pay = offers, pay
        self.max_steps = offers + 1

    def draw(self, rng: random.Random) -> str:
        while True:
            self.things = tuple(rng.randint(1, MOST_OF_A_KIND) for _ in KINDS)
            choices = values_of(self.things)
            if len(choices) >= 2:
                break
        self.values = dict(zip(self.agents, (rng.choice(choices), rng.choice(choices)), strict=True))
        self.made, self.speaker = 0, self.agents[0]
        self.last: Split | None = None
        return f"{self.things} {self.values['ann']} {self.values['ben']}"

    def points(self, agent: str, split: Split) -> int:
        """Points of the things in `split` for an agent."""
        return sum(value * count for value, count in zip(self.values[agent], split, strict=True))

    def rest(self, split: Split) -> Split:
        """The things that the other agent gets."""
        return tuple(there - taken for there, taken in zip(self.things, split, strict=True))

    def best(self) -> Split:
        """The split with the largest sum of points, from the view of `ann`; of several, the most even one."""

        def worth(split: Split) -> tuple[int, int]:
            ann, other = self.points("ann", split), self.points("ben", self.rest(split))
            return ann + other, -abs(ann - other)

        return max(product(*(range(count + 1) for count in self.things)), key=worth)

    def start(self) -> dict[str, Observation]:
        return {self.speaker: self.shown()}

    def shown(self) -> str:
        """The things, the speaker's values, and the standing offer as the speaker would get it."""
        if self.brief:
            seen = [self.things, self.values[self.speaker], *([self.rest(self.last)] if self.last else [])]
            told = "\n".join(" ".join(map(str, numbers)) for numbers in seen)
            return told if self.made < self.offers else f"{told} last"
        things = ", ".join(f"{count} {kind}" for count, kind in zip(self.things, KINDS, strict=True))
        values = ", ".join(f"{kind} {value}" for kind, value in zip(KINDS, self.values[self.speaker], strict=True))
        told = f"There are {things}. Your points for one: {values}.\n"
        if self.last is None:
            return f"{told}Say how many you keep of each: three numbers."
        gets = " ".join(map(str, self.rest(self.last)))
        final = "" if self.made < self.offers else " This was the last offer."
        return f"{told}You are offered {gets}.{final} Say accept, or how many you keep of each."

    def step(self, actions: dict[str, str]) -> StepResult:
        [(agent, text)] = actions.items()
        if self.last is not None and _ACCEPT.search(text.lower()):
            other = self._other(agent)
            rules = self._worth(other, self.last)
            return self._over({other: self.last, agent: self.rest(self.last)}, agent, rules)
        found = [number for number in list(_NUMBER.finditer(text))[: len(KINDS)] if len(number[0]) == 1]
        numbers = tuple(int(number[0]) for number in found)
        legal = len(numbers) == len(KINDS) and all(n <= there for n, there in zip(numbers, self.things, strict=True))
        if not legal or self.made == self.offers:
            why = "The last offer is not accepted." if legal else "This is no offer."
            return self._over(None, agent, Scored(0.0, why), legal)
        # Every number is paid for its own kind: the quotation is the offer up to it, which stands in the offer once. To
        # stop behind the last one is worth as much as a number in the mean, or words that nothing is paid for follow.
        worth = self._by_kind(agent, numbers)
        spans = [(text[: number.end()], points) for number, points in zip(found, worth, strict=True)]
        if not text[found[-1].end() :].strip():
            spans.append(("", sum(worth) / len(worth)))
        info = scored(agent, replace(self._worth(agent, numbers), spans=tuple(spans)))
        self.last, self.made = numbers, self.made + 1
        self.speaker = self._other(agent)
        return StepResult({self.speaker: self.shown()}, {}, False, False, info)

    def _other(self, agent: str) -> str:
        return next(other for other in self.agents if other != agent)

    def _by_kind(self, agent: str, split: Split) -> list[float]:
        """Points of both agents from each kind of things, 0 to 10, for an agent's share."""
        values, other = self.values[agent], self.values[self._other(agent)]
        return [float(a * n + b * m) for a, n, b, m in zip(values, split, other, self.rest(split), strict=True)]

    def _worth(self, agent: str, split: Split) -> Scored:
        """Score of an agent's share, offered or accepted: the sum of both agents' points over the largest possible."""
        worth = round(sum(self._by_kind(agent, split)))
        return Scored(10.0 * worth / self._most(), f"Both together get {worth} of at most {self._most()} points.")

    def _most(self) -> int:
        return self.points("ann", self.best()) + self.points("ben", self.rest(self.best()))

    def _over(self, shares: dict[str, Split] | None, speaker: str, rules: Scored, legal: bool = True) -> StepResult:
        points = {agent: 0 if shares is None else self.points(agent, shares[agent]) for agent in self.agents}
        best = self._most()
        info: dict[str, Any] = {
            **scored(speaker, rules),
            "measures": {
                "agreed": float(shares is not None),
                "legal": float(legal),
                "efficiency": sum(points.values()) / best,
                **{f"points/{agent}": points[agent] / POINTS for agent in self.agents},
            },
        }
        if self.pay == "own":
            acted = self.agents if self.made else self.agents[:1]
            return StepResult({}, {agent: points[agent] / POINTS for agent in acted}, True, False, info)
        return StepResult({}, {}, True, False, {"outcome": sum(points.values()) / best, **info})

    def move(self, player: Player, agent: str, rng: random.Random) -> str:
        if player == "constant":
            return "accept" if self.last is not None else "1 1 1"
        if player == "optimal":
            own_share = self.best() if agent == "ann" else self.rest(self.best())
            agreed = self.last is not None and self.rest(self.last) == own_share
            return "accept" if agreed else " ".join(map(str, own_share))
        if self.last is not None and rng.random() < 0.5:
            return "accept"
        return " ".join(str(rng.randint(0, count)) for count in self.things)


def values_of(things: Split) -> list[Split]:
    """All values of one thing of each kind for which all things together are worth `POINTS`."""
    ranges = [range(POINTS // count + 1) for count in things]
    return [v for v in product(*ranges) if sum(a * b for a, b in zip(v, things, strict=True)) == POINTS]
