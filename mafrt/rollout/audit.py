"""Audit of credit: a sample of turns is played again, to find out how much each was worth.

For a turn, its history is frozen. The turn itself and `ALTERNATIVES` others that the agent says to the same prompt are
each continued `REPLAYS` times to the end, by the team as it is. So

    gain      = mean return after the turn - mean return after its alternatives
    noise     = variance of the returns after the turn: of the luck of all that follows
    influence = P(next turns differ | other alternative) - P(next turns differ | same alternative)

The r-th continuations of all alternatives share their random numbers, which leaves expectations as they are;
the two probabilities compare continuations with different ones, so that influence is 0 on average where the next
speaker does not listen. Returns are what the environment pays: rewards and outcome with their weights.

Source: the audits of C3 (2603.06859, `c3/analysis/metrics.py`). Deviations: V is the mean of the alternatives without
the turn itself; influence is a difference of probabilities, since the mutual information of a few samples is biased
upwards. A run with `coach_feedback` is replayed without the notes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mafrt.core.errors import EnvError
from mafrt.core.seeding import seed_of
from mafrt.core.types import Audit, Completion, Episode, Request, Turn
from mafrt.environment.base import Env
from mafrt.rollout.player import Answers, Player, PlayStats, RunningEpisode
from mafrt.rollout.replay import paid, play_on, resumed

ALTERNATIVES = 2
REPLAYS = 2


@dataclass
class _Continuation:
    """A turn or an alternative, continued once."""

    turn: int
    """position in the sample"""
    alternative: int
    """0: the turn itself"""
    replay: int
    live: RunningEpisode
    answers: Answers


def fill_audits(
    player: Player,
    env: Env,
    episodes: Sequence[Episode],
    count: int,
    seed: int,
    reward_weight: float,
    outcome_weight: float,
) -> dict[str, float]:
    """Fill `audit` of `count` turns, as evenly over the agents as they allow.

    Args:
        player: played the episodes.
        env: spawns siblings to play in.
        episodes: the batch.
        count: turns to audit.
        seed: of the run; the sample and its continuations follow from it and the episodes' ids.
        reward_weight, outcome_weight: of the environment's rewards and of the outcome in a return.

    Returns:
        `audit_turns`, the number of turns that were audited, and `audit_lost`, those whose replay went wrong.
    """
    sample = _sample(episodes, count, seed)
    others = _alternatives(player, [turn for _, turn in sample], seed)
    tried: list[_Continuation] = []
    for number, (episode, turn) in enumerate(sample):
        for alternative in range(ALTERNATIVES + 1):
            for replay in range(REPLAYS):
                request_and_answer = _recorded(player, turn) if alternative == 0 else others[number][alternative - 1]
                key = f"{number:06d}/{alternative}/{replay}"
                again = seed_of(seed, "audit", episode.id, turn.turn, replay)
                try:
                    live = resumed(player, env, episode, turn.env_step, key, again)
                except EnvError:
                    continue
                beside = [other for other in episode.turns if other.env_step == turn.env_step and other is not turn]
                answers = {other.agent: _recorded(player, other) for other in beside} | {turn.agent: request_and_answer}
                tried.append(_Continuation(number, alternative, replay, live, answers))
    single = player.sampling_as(player.sampling)
    given = {trial.live.key: trial.answers for trial in tried}
    gone = play_on(single, [trial.live for trial in tried], PlayStats(), given)
    for trial in tried:
        trial.live.env.close()
    done = 0
    for number, (_, turn) in enumerate(sample):
        payee = turn.agent if env.opponents else None
        of_turn = [trial for trial in tried if trial.turn == number and trial.live.key not in gone]
        if len(of_turn) == REPLAYS * (ALTERNATIVES + 1):
            returns = [paid(trial.live.episode, reward_weight, outcome_weight, payee) for trial in of_turn]
            turn.audit = _audit(of_turn, returns, turn.env_step)
            done += 1
    return {"audit_turns": float(done), "audit_lost": float(len(sample) - done)}


def _sample(episodes: Sequence[Episode], count: int, seed: int) -> list[tuple[Episode, Turn]]:
    """`count` turns, one agent after the other, in an order drawn from the seed."""
    agents: dict[str, list[tuple[int, Episode, Turn]]] = {}
    for episode in episodes:
        for turn in episode.turns:
            if episode.start is not None and turn.action_ids:
                place = seed_of(seed, "audited", episode.id, turn.turn)
                agents.setdefault(turn.agent, []).append((place, episode, turn))
    for queue in agents.values():
        queue.sort(key=lambda one: one[0])
    most = max(map(len, agents.values()), default=0)
    order = [queue[place] for place in range(most) for _, queue in sorted(agents.items()) if place < len(queue)]
    return [(episode, turn) for _, episode, turn in order[:count]]


def _request(player: Player, turn: Turn, seed: int) -> Request:
    return Request(turn.prompt_ids, player.adapters[turn.agent], player.sampling[turn.agent], seed)


def _recorded(player: Player, turn: Turn) -> tuple[Request, Completion]:
    completion = Completion(turn.action_ids, turn.logprobs, turn.stop, turn.text, turn.adapter_version)
    return _request(player, turn, 0), completion


def _alternatives(player: Player, turns: Sequence[Turn], seed: int) -> list[list[tuple[Request, Completion]]]:
    """`ALTERNATIVES` other answers to each turn's prompt."""
    requests = [
        _request(player, turn, seed_of(seed, "other", place, number))
        for place, turn in enumerate(turns)
        for number in range(ALTERNATIVES)
    ]
    answered = list(zip(requests, player.engine.generate(requests), strict=True)) if requests else []
    return [answered[place * ALTERNATIVES : (place + 1) * ALTERNATIVES] for place in range(len(turns))]


def _audit(of_turn: Sequence[_Continuation], returns: Sequence[float], step: int) -> Audit:
    """The audit of one turn from all its continuations."""
    actual = [value for trial, value in zip(of_turn, returns, strict=True) if trial.alternative == 0]
    alternatives = [value for trial, value in zip(of_turn, returns, strict=True) if trial.alternative != 0]
    centre = sum(actual) / len(actual)
    noise = sum((value - centre) ** 2 for value in actual) / (len(actual) - 1)
    nexts = {(trial.alternative, trial.replay): _next_texts(trial.live.episode, step) for trial in of_turn}
    same: list[float] = []
    other: list[float] = []
    for (alternative, replay), text in nexts.items():
        for (second, again), next_text in nexts.items():
            if replay < again:
                (same if alternative == second else other).append(float(text != next_text))
    silent = not any(nexts.values())
    influence = None if silent else sum(other) / len(other) - sum(same) / len(same)
    return Audit(gain=centre - sum(alternatives) / len(alternatives), noise=noise, influence=influence)


def _next_texts(episode: Episode, step: int) -> tuple[str, ...]:
    """What is said in the step after `step`; empty if nothing is."""
    return tuple(turn.text for turn in episode.turns if turn.env_step == step + 1)
