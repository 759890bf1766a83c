"""A game of numbers that pays at its end, for rules that play alternatives to the end."""

from __future__ import annotations

from mafrt.config.team import Team
from mafrt.core.types import StepResult
from mafrt.environment.base import Env

TEAM = Team.of(["a", "b"])


class Late(Env):
    """a, b, a say a number each. Nothing is paid before the end: the outcome is 100 x + 10 y + z."""

    agents = ("a", "b")
    bounded = True

    def reset(self, seed=None, options=None):
        self.said = []
        return {"a": "-"}, {}

    def step(self, actions):
        [(_, text)] = actions.items()
        self.said.append(int(text) if text.isdigit() else 0)
        if len(self.said) == 3:
            x, y, z = self.said
            return StepResult({}, {}, True, False, {"outcome": float(100 * x + 10 * y + z)})
        return StepResult({"ba"[len(self.said) - 1]: " ".join(map(str, self.said))}, {}, False, False, {})


class Paid(Late):
    """The same, and every speaker is paid half its number at once; a gets 1 more when b has spoken."""

    def step(self, actions):
        [name] = actions
        result = super().step(actions)
        late = {"a": 1.0} if name == "b" else {}
        return result._replace(rewards={name: self.said[-1] / 2, **late})


class Uncopied(Late):
    def fork(self):
        raise ValueError("there is one of me")


def digit(seed: int) -> str:
    return str(seed % 7)
