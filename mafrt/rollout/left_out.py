"""The contribution of an agent: the team's return, less that of the same episode with the agent left out.

The episode is played again up to the agent's first turn, and from there on with the agent silent: it says nothing,
whenever it is asked. The others go on as they are, with the same random numbers.

    contribution_i = R - (R without i)

Source: CCPO (2603.21563), whose solver answers without the thinker.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from mafrt.core.errors import EnvError
from mafrt.core.types import Completion, Episode, Request
from mafrt.environment.base import Env
from mafrt.rollout.player import Answers, Player, PlayStats, RunningEpisode
from mafrt.rollout.replay import paid, play_on, resumed


@dataclass(eq=False, repr=False, kw_only=True)
class MutedPlayer(Player):
    """Plays on with one agent silent in each episode."""

    muted: Mapping[str, str] = field(default_factory=dict)
    """key of a live item -> its silent agent"""

    def _answers(self, asked: Sequence[tuple[RunningEpisode, str, Request]], stats: PlayStats) -> dict[str, Answers]:
        spoken = [one for one in asked if self.muted.get(one[0].key) != one[1]]
        answers: dict[str, Answers] = {item.key: {} for item, _, _ in asked}
        completions = iter(self._generate([request for _, _, request in spoken], stats)) if spoken else iter(())
        for item, agent, request in asked:
            silent = self.muted.get(item.key) == agent
            answers[item.key][agent] = (request, Completion([], [], "eos", "", 0) if silent else next(completions))
        return answers


def fill_contributions(
    player: Player, env: Env, episodes: Sequence[Episode], reward_weight: float, outcome_weight: float
) -> dict[str, float]:
    """Fill `contribution` of all turns.

    Args:
        player: played the episodes.
        env: spawns siblings to play in.
        episodes: the batch.
        reward_weight, outcome_weight: of the environment's rewards and of the outcome in a return.

    Returns:
        `left_out/AGENT`, the team's mean return without the agent, and `left_out_lost`, the number of replays that
        the environment lost.
    """
    tried: list[tuple[int, str, RunningEpisode]] = []
    lost = 0
    for number, episode in enumerate(episodes):
        for agent in sorted({turn.agent for turn in episode.turns}):
            first = min(turn.env_step for turn in episode.turns if turn.agent == agent)
            try:
                tried.append((number, agent, resumed(player, env, episode, first, f"{number:06d}/{agent}")))
            except EnvError:
                lost += 1
    gone = play_on(_muted(player, {live.key: agent for _, agent, live in tried}), [t[2] for t in tried], PlayStats())
    without: dict[tuple[int, str], float] = {}
    for number, agent, live in tried:
        live.env.close()
        if live.key not in gone:
            without[number, agent] = paid(live.episode, reward_weight, outcome_weight)
    for number, episode in enumerate(episodes):
        whole = paid(episode, reward_weight, outcome_weight)
        for turn in episode.turns:
            less = without.get((number, turn.agent))
            turn.contribution = None if less is None else whole - less
    metrics = {"left_out_lost": float(lost + len(gone))}
    for name in sorted({agent for _, agent in without}):
        of_agent = [worth for (_, agent), worth in without.items() if agent == name]
        metrics[f"left_out/{name}"] = sum(of_agent) / len(of_agent)
    return metrics


def _muted(player: Player, muted: Mapping[str, str]) -> MutedPlayer:
    """The player of single turns, without feedback, with silent agents."""
    single = player.sampling_as(player.sampling)
    settings: dict[str, Any] = {item.name: getattr(single, item.name) for item in fields(Player) if item.init}
    return MutedPlayer(**settings, muted=muted)
