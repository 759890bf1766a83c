"""Turns on the generated questions, without fault or careless ones, for tests and for very small models.

The demonstrators know the facts. Their mistakes are choices, made at the rate `CARELESS`: an answer before the passages
hold it, a needless search, a query for another box, a number of another line. A model that imitates them
samples both kinds, and can learn from the results of both.
"""

from __future__ import annotations

import random
import re
from typing import Any

from mafrt.core.types import Message
from mafrt.environment.session import Session
from mafrt.envs.search.env import SearchEnv
from mafrt.envs.search.generated import CorpusFact, World, generated

CARELESS = 0.4
"""Share of turns with a mistake."""
ENOUGH, MORE = "Verdict: approve", "Verdict: reject"


class Demonstrator:
    """Plays the three roles of one episode about `fact`."""

    def __init__(self, world: World, fact: CorpusFact, rng: random.Random, careless: float = CARELESS) -> None:
        self.world, self.fact, self.rng, self.careless = world, fact, rng, careless
        self.told = fact if fact.other is None else world.fact(fact.other[0])
        """the fact that holds the number"""

    def says(self, role: str, observation: str) -> str:
        """The turn of `role` (verifier, search or answer) on what it sees."""
        slip = self.rng.random() < self.careless
        known = [line.removeprefix("tool: ") for line in observation.splitlines()[1:]]
        if role == "verifier":
            return ENOUGH if (self.told.text in known) != slip else MORE
        if role == "search":
            fact = self.told if self.fact.text in known else self.fact
            return str(self.rng.choice(self.world.facts).box if slip else fact.box)
        numbers = re.findall(r"\d+", " ".join(known))
        wrong = sorted(set(numbers) - {str(self.told.number)})
        is_known = self.told.text in known
        number = str(self.told.number) if is_known and not (slip and wrong) else self.rng.choice(wrong or ["1"])
        return f"\\boxed{{{number}}}"


def play(
    env: SearchEnv, world: World, task: int, careless: float, seed: int = 0
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """One episode about fact `task` of `world`: records for SFT (docs/dpo_sft.md), and the last info."""
    session = Session(env.spawn())
    observations, _ = session.reset(seed=task, options={"task": task})
    player = Demonstrator(world, world.facts[task], random.Random(f"search-{seed}-{task}"), careless)
    records: list[dict[str, Any]] = []
    roles = dict(zip(env.agents, ("verifier", "search", "answer"), strict=True))
    while True:
        [(name, seen)] = observations.items()
        assert isinstance(seen, str)
        text = player.says(roles[name], seen)
        messages: list[Message] = [{"role": "user", "content": seen}]
        records.append({"agent": name, "messages": messages, "response": text})
        result = session.step({name: text})
        if result.terminated:
            return records, result.info
        observations = dict(result.observations)


def demonstrations(episodes: int, seed: int, careless: float = CARELESS, **settings: Any) -> list[dict[str, Any]]:
    """Records of episodes in further training worlds: the same boxes and numbers, other facts."""
    records: list[dict[str, Any]] = []
    number = 0
    while number < episodes:
        world = generated("train", 1 + number)
        env = SearchEnv(questions=world.questions, **settings)
        for task in range(min(len(world.facts), episodes - number)):
            records += play(env, world, task, careless, seed)[0]
        number += len(world.facts)
    return records
