"""An environment with everything that a reply can hold; light to import, since servers in tests load it."""

from __future__ import annotations

from typing import Any

from mafrt.core.types import Evidence, Scored, StepResult
from mafrt.environment.base import Env


class Walk(Env):
    """Two agents by turns, for a number of steps that the seed decides; rewards, evidence and messages on the way."""

    agents = ("left", "right")
    bounded = True
    num_tasks = 50

    def __init__(self, floor: int = 0) -> None:
        self.floor = floor

    def reset(self, seed: Any = None, options: Any = None) -> Any:
        self.task = options["task"] if options else 0
        self.left, self.value = self.rng.randint(2, 5), self.rng.random()
        return {"left": f"{self.task}: {self.value:.6f}"}, {"task": str(self.task), "answer": self.value}

    def step(self, actions: dict[str, str]) -> StepResult:
        [(name, text)] = actions.items()
        if text == "raise":
            raise ValueError("as asked")
        self.left -= 1
        self.value += self.rng.random() * len(text)
        info: dict[str, Any] = {"evidence": {name: Evidence(tool_output=text, rules=Scored(5.0, "half"))}}
        if not self.left:
            return StepResult(
                {}, {name: 1.0}, True, False, info | {"outcome": self.value, "measures": {"m": self.value}}
            )
        following = "right" if name == "left" else "left"
        seen = [{"role": "user", "content": f"{self.value:.6f}"}, {"role": "tool", "content": "é\n"}]
        return StepResult({following: seen}, {name: self.value}, False, False, info)
