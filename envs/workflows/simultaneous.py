"""Agents that speak at the same time: `vote`, `debate`, `summary` and `mixture`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from mafrt.config.team import Team
from mafrt.core.errors import ConfigError
from mafrt.core.types import Evidence, Observation
from mafrt.environment.python_tool import Ran
from mafrt.envs.workflows.state import Key, TaskState, TurnRules, Workflow, latest, written


class Debate(Workflow):
    """All agents answer at once for `horizon` rounds; from the second on each sees the others' latest answers.

    Du et al. 2023 (arXiv:2305.14325). The majority of the last answers decides; in a tie the earlier agent's answer.
    With `judge`, the last agent of the team takes no part: it reads the last answers and gives its own, which decides.
    The judge reads them in an order that changes with the problem, so that no seat is favoured.

    Measures: `agreement` (share of the speakers with the decisive answer), `tie`, and `kept` (share of the speakers
    whose last answer is their first).
    """

    profile = "profiles/solvers.json"

    def __init__(self, team: Team, horizon: int, judge_lines: bool, judge: bool = False) -> None:
        super().__init__(team, horizon, judge_lines)
        self.judge = self.names[-1] if judge else None
        self.speakers = tuple(name for name in self.names if name != self.judge)
        if len(self.speakers) < 2:
            beside = " beside the last one" if judge else ""
            raise ConfigError(
                f"workflow {type(self).__name__.lower()!r} needs at least two agents that answer{beside}, found "
                f"{', '.join(self.names)}; take a larger team, or the workflow 'single'"
            )
        self.answering = self.names
        self.max_steps = horizon + judge

    def observe(self, state: TaskState) -> dict[str, Observation]:
        if state.over:
            return {}
        if state.round >= self.horizon:
            assert self.judge is not None
            return {self.judge: written(state.problem, self._for_judge(state), self.names)}
        last_texts = latest(state)
        return {name: written(state.problem, self._for_speaker(last_texts, name), self.names) for name in self.speakers}

    def _for_speaker(self, last_texts: Mapping[str, str], name: str) -> Sequence[tuple[str, str]]:
        # Its own words first, so that an agent knows which of the answers is its own.
        head = [(name, last_texts[name])] if name in last_texts else []
        return head + [(other, last_texts[other]) for other in self.speakers if other != name and other in last_texts]

    def _for_judge(self, state: TaskState) -> Sequence[tuple[str, str]]:
        last_texts = latest(state)
        # Judges prefer the first answer they read, so the order changes from problem to problem.
        shift = len(state.problem) % len(self.speakers)
        return [(name, last_texts[name]) for name in (*self.speakers[shift:], *self.speakers[:shift])]

    def transition(self, state: TaskState, actions: Mapping[str, str]) -> TaskState:
        speakers = self.speakers if state.round < self.horizon else (self.judge,)
        transcript = (*state.said, *((name, actions[name]) for name in speakers if name is not None))
        return replace(state, said=transcript, round=state.round + 1)

    def answers(self, state: TaskState) -> dict[str, str] | None:
        if state.round < self.max_steps:
            return None
        last_texts = latest(state)
        names = self.speakers if self.judge is None else (self.judge,)
        return {name: last_texts[name] for name in names}

    def decide(self, answers: Mapping[str, str], key: Key) -> dict[str, str]:
        winner = majority(answers, key)
        return {winner: answers[winner]}

    def judged(self, state: TaskState, score: float) -> TaskState:
        return replace(state, over=True)

    def measures(self, state: TaskState, key: Key) -> dict[str, float]:
        spoken = [(name, text) for name, text in state.said if name in self.speakers]
        first, last = dict(reversed(spoken)), dict(spoken)
        keys = {name: key(text) for name, text in last.items()}
        counts = Counter(value for value in keys.values() if value is not None).most_common()
        winner = keys[majority(last, key)]
        return {
            "agreement": sum(value is not None and value == winner for value in keys.values()) / len(keys),
            "tie": float(len(counts) > 1 and counts[0][1] == counts[1][1]),
            "kept": sum(key(first[name]) == keys[name] for name in keys) / len(keys),
        }

    def evidence(self, before: TaskState, after: TaskState, ran: Ran | None, rules: TurnRules) -> dict[str, Evidence]:
        return {name: Evidence(rules=rules.answer(text)) for name, text in after.said[len(before.said) :]}


class Vote(Debate):
    """All agents answer at once, without seeing each other, and the majority decides (self-consistency)."""

    def __init__(self, team: Team, horizon: int = 1, judge_lines: bool = True) -> None:
        if horizon != 1:
            raise ConfigError(f"workflow 'vote' has one round, found horizon {horizon}; take 'debate'")
        super().__init__(team, 1, judge_lines)


class Mixture(Debate):
    """Layers of proposers and an aggregator: mixture of agents (Wang et al. 2024, arXiv:2406.04692).

    All but the last agent answer for `horizon` layers, from the second on seeing the others' answers of the layer
    before; the last agent reads the last layer and answers for the team.
    """

    def __init__(self, team: Team, horizon: int, judge_lines: bool) -> None:
        super().__init__(team, horizon, judge_lines, judge=True)


class Summary(Mixture):
    """All but the last agent answer at once, without seeing each other; the last one reads all and answers."""

    def __init__(self, team: Team, horizon: int = 1, judge_lines: bool = True) -> None:
        if horizon != 1:
            raise ConfigError(f"workflow 'summary' has one round, found horizon {horizon}; take 'mixture'")
        super().__init__(team, 1, judge_lines)


def majority(answers: Mapping[str, str], key: Key) -> str:
    """The first agent that gives the most frequent answer; the first agent of all if none gives any."""
    keys = {name: key(text) for name, text in answers.items()}
    counts = Counter(value for value in keys.values() if value is not None)
    if not counts:
        return next(iter(answers))
    most = max(counts.values())
    return next(name for name, value in keys.items() if value is not None and counts[value] == most)
