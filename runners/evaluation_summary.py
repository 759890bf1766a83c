"""Further numbers of an evaluation whose episodes were kept: intervals, majority@k, and scores of single agents."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mafrt.core.text import real_number
from mafrt.core.types import Episode
from mafrt.runners.evaluation import SOLVED, Evaluation
from mafrt.runners.intervals import interval

GREEDY = "greedy"


@dataclass(frozen=True)
class Number:
    """A mean over tasks with its 95% interval."""

    value: float
    bounds: tuple[float, float] | None
    """None for fewer than two tasks"""

    def __str__(self) -> str:
        return f"{self.value:.3f}" + (f"  ({self.bounds[0]:.3f} to {self.bounds[1]:.3f})" if self.bounds else "")


@dataclass(frozen=True)
class Majority:
    """majority@k: the most frequent answer of the k samples of each task."""

    number: Number
    ties: float
    """share of the tasks in which several answers were equally frequent; their mean score counts"""


def number(values: Sequence[float]) -> Number:
    """The mean of the tasks' values, with its interval."""
    return Number(statistics.fmean(values), interval(values))


def numbers(evaluation: Evaluation) -> dict[str, Number]:
    """avg@k, pass@k, the greedy score, and the score of each agent whose answers are graded."""
    k, scores = evaluation.samples, list(evaluation.scores.values())
    by_name: dict[str, Number] = {}
    if scores:
        by_name[f"avg@{k}"] = number([statistics.fmean(each) for each in scores])
        by_name[f"pass@{k}"] = number([float(max(each) >= SOLVED) for each in scores])
    if evaluation.greedy_scores:
        by_name["greedy"] = number(list(evaluation.greedy_scores.values()))
    for agent, values in agent_scores(evaluation.episodes).items():
        by_name[f"agent/{agent}"] = number(values)
    return by_name


def agent_scores(episodes: Sequence[Episode]) -> dict[str, list[float]]:
    """Agent -> the mean score of its own answers in each task, of the sampled episodes if there are any."""
    by_agent: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for episode in counted(episodes):
        for agent, answer in answers_of(episode).items():
            by_agent[agent][episode.group].append(float(answer["score"]))
    return {agent: [statistics.fmean(each) for each in tasks.values()] for agent, tasks in by_agent.items()}


def majority(episodes: Sequence[Episode]) -> Majority | None:
    """majority@k of the sampled episodes; None where answers cannot be compared, or nothing was sampled.

    The answer of an episode is the first one that decided it; texts without an answer do not vote. A task in which
    none votes scores 0.
    """
    groups: dict[str, list[Episode]] = defaultdict(list)
    for episode in episodes:
        if not episode.id.startswith(GREEDY) and "answers" in episode.info:
            groups[episode.group].append(episode)
    if not groups:
        return None
    values, ties = [], []
    for group in groups.values():
        votes: dict[str, list[float]] = defaultdict(list)
        for episode in group:
            first: Mapping[str, Any] = next(iter(answers_of(episode).values()), {})
            if isinstance(first.get("key"), str):
                votes[first["key"]].append(episode.score)
        most = max(map(len, votes.values()), default=0)
        leading = [statistics.fmean(each) for each in votes.values() if len(each) == most]
        values.append(statistics.fmean(leading) if leading else 0.0)
        ties.append(float(len(leading) > 1))
    return Majority(number(values), statistics.fmean(ties))


def counted(episodes: Sequence[Episode]) -> list[Episode]:
    """The sampled episodes; the greedy ones if nothing was sampled."""
    sampled = [episode for episode in episodes if not episode.id.startswith(GREEDY)]
    return sampled or list(episodes)


def answers_of(episode: Episode) -> Mapping[str, Mapping[str, Any]]:
    """Agent -> key and score of its answer; those of another form, an environment's own, are left out."""
    told = {name: answer for name, answer in episode.info.get("answers", {}).items() if isinstance(answer, Mapping)}
    return {name: answer for name, answer in told.items() if real_number(answer.get("score")) is not None}


def episode_lines(episodes: Sequence[Episode], prompts: Mapping[str, str]) -> list[dict[str, Any]]:
    """Every prompt and answer, as JSON values. `prompts`: agent -> role prompt."""
    return [
        {
            "id": episode.id,
            "group": episode.group,
            "task": episode.info.get("task"),
            "problem": episode.info.get("problem"),
            "answer": episode.info.get("answer"),
            "outcome": episode.outcome,
            "answers": {agent: dict(answer) for agent, answer in answers_of(episode).items()},
            "turns": [
                {
                    "agent": turn.agent,
                    "role_prompt": prompts.get(turn.agent, ""),
                    "observation": turn.observation,
                    "text": turn.text,
                    "stop": turn.stop,
                }
                for turn in episode.turns
            ],
        }
        for episode in episodes
    ]
