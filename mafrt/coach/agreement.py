"""Does the coach agree with the task's verdict? A judge that is gamed rewards turns that the verifier rejects.

Two signs set off the alarm, both within one batch:
- *upside down*: an agent's scores fall as the outcome rises, by a correlation beyond two standard errors (2 / sqrt(n));
- *blind*: the turns that end rejected episodes (outcome 0 or less) get 5 of 10 or more on average, and less than one
  point under the turns that end accepted ones. Agents who speak earlier may be right where the team fails, so only the
  last turn counts here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from mafrt.algorithms.stats import correlation
from mafrt.core.types import Episode, Scored

LEAST = 16
"""Turns (or rejected episodes, of which half as many do) below which nothing is said."""


def agreement_of(episodes: Sequence[Episode], agents: Sequence[str]) -> tuple[dict[str, float], str | None]:
    """`coach_correlation/AGENT`, `coach_rejected_score` and `coach_accepted_score`, and the alarm, if there is one.

    A number that the batch cannot tell (no outcome, no spread) is left out.
    """
    metrics: dict[str, float] = {}
    alarms = []
    for agent in agents:
        pairs = [
            (turn.coach.score, episode.outcome)
            for episode in episodes
            for turn in episode.turns
            if turn.agent == agent and isinstance(turn.coach, Scored) and episode.outcome is not None
        ]
        r = correlation(pairs)
        if r is None:
            continue
        metrics[f"coach_correlation/{agent}"] = r
        # Two standard errors of a correlation without any relation, so that chance seldom raises the alarm.
        if len(pairs) >= LEAST and r < -2.0 / math.sqrt(len(pairs)):
            alarms.append(f"the coach's scores of {agent} fall as the outcome rises (correlation {r:.2f})")
    lasts = [
        (episode.turns[-1].coach.score, episode.outcome)
        for episode in episodes
        if episode.turns and isinstance(episode.turns[-1].coach, Scored) and episode.outcome is not None
    ]
    rejected = [score for score, outcome in lasts if outcome <= 0]
    accepted = [score for score, outcome in lasts if outcome > 0]
    for name, scores in (("rejected", rejected), ("accepted", accepted)):
        if scores:
            metrics[f"coach_{name}_score"] = sum(scores) / len(scores)
    low = metrics.get("coach_rejected_score", 0.0)
    # Only last turns are compared: an early turn may be good although the episode was lost later.
    if len(rejected) >= LEAST // 2 and low >= 5.0 and low > metrics.get("coach_accepted_score", low) - 1.0:
        alarms.append(f"the coach gives {low:.1f} of 10 to the turns that end episodes which the verifier rejects")
    return metrics, alarms[0] if alarms else None
