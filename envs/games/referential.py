"""`referential`: a scout sees the target number and may say one word; a guesser sees the word and picks a number.

Digits and number words do not get through, so words mean nothing until scout and guesser agree on a code that no prompt
can know (Lewis 1969; Lazaridou 2017, 1612.07182). An instance is a target, the numbers on offer and their order;
held-out instances have other orders, and each target is as frequent in both splits.
"""

from __future__ import annotations

import random
import re

from mafrt.core.errors import ConfigError
from mafrt.core.types import Observation, StepResult
from mafrt.envs.games.base import Game, Player

WORDS = ("Ben", "Tom", "Zoe", "Mia", "Sam", "Leo", "Ana", "Raj", "Mei")
"""words of the scripted players; an agent may say any word"""
LONGEST_WORD = 12
NUMBER_WORDS = frozenset(
    ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "first", "second", "third")
)
SILENCE = "nothing"
_NUMBER = re.compile(r"\d+")
_WORD = re.compile(r"[A-Za-z]+")


def signal_in(text: str) -> str:
    """The first word of a scout's text as the guesser sees it, capitalised: small bases read names as one token.

    `nothing` for no word, or for one that names a number.
    """
    match = _WORD.search(text)
    word = match[0][:LONGEST_WORD].capitalize() if match else SILENCE
    return SILENCE if word.lower() in NUMBER_WORDS else word


class Referential(Game):
    """Scout and guesser; the outcome is 1 if the scout said a word and the guesser names the target.

    Args:
        things: numbers that the code has to tell apart, from 1 on: 2 to 9.
        offered: numbers that the guesser chooses from, the target among them.
        split: `train`, `validation` or `test`.
        brief: observations without instructions.
    """

    agents = ("scout", "guesser")
    max_steps = 2
    bounded = True

    def __init__(self, things: int = 4, offered: int = 4, split: str = "train", brief: bool = False) -> None:
        super().__init__(split, brief)
        if not 2 <= offered <= things <= 9:
            raise ConfigError(f"things is {things} and offered is {offered}; choose 2 <= offered <= things <= 9.")
        self.things, self.offered = things, offered

    def draw(self, rng: random.Random) -> str:
        self.choices = rng.sample(range(1, self.things + 1), self.offered)
        self.target = rng.choice(self.choices)
        self.signal = SILENCE
        return f"{self.choices}|{self.target}"

    def start(self) -> dict[str, Observation]:
        asked = f"The number is {self.target}. Say one word, without a number."
        return {"scout": str(self.target) if self.brief else asked}

    def step(self, actions: dict[str, str]) -> StepResult:
        if "scout" in actions:
            self.signal = signal_in(actions["scout"])
            seen = f"The scout said {self.signal}. Pick one number: {', '.join(map(str, self.choices))}."
            brief = f"{' '.join(map(str, self.choices))} {self.signal}"
            return StepResult({"guesser": brief if self.brief else seen}, {}, False, False, {})
        match = _NUMBER.search(actions["guesser"])
        # Silence loses, or saying nothing would cost no more than a word that means nothing.
        right = float(self.signal != SILENCE and match is not None and match[0] == str(self.target))
        valid = float(self.signal != SILENCE and match is not None and match[0] in map(str, self.choices))
        picked = match[0] if valid and match else None  # None takes no part in a vote over samples
        answers = {"guesser": {"key": picked, "score": right}}
        return StepResult({}, {}, True, False, {"outcome": right, "measures": {"valid": valid}, "answers": answers})

    def move(self, player: Player, agent: str, rng: random.Random) -> str:
        if agent == "scout":
            code = WORDS[self.target - 1] if player == "optimal" else WORDS[0]
            return rng.choice(WORDS) if player == "random" else code
        if player == "optimal":
            return str(WORDS.index(self.signal) + 1 if self.signal in WORDS[: self.things] else self.choices[0])
        return str(rng.choice(self.choices) if player == "random" else 1)
