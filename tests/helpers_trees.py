"""Small decision trees, with the exact gradient of what they pay, and the expected gradient of a rule's credit.

Every state has one logit, at probability .4 of choice 1. Both gradients are sums over all ways in which a tree can be
played: the exact one over single plays, that of a rule over all groups of `SAMPLES` plays. Nothing is drawn.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from mafrt.algorithms import ALGORITHMS, assign
from mafrt.core.types import Episode, Scored, Turn

P = 0.4
"""Probability of choice 1 in every state."""
SAMPLES = 3
"""Plays of a group."""


class _MoreError(Exception):
    """A play asks for more choices than it was given."""


@dataclass
class Play:
    """One play of a tree with given choices."""

    bits: Sequence[int]
    step: int = -1
    turns: list[Turn] = field(default_factory=list)
    asked: list[tuple[str, str, int]] = field(default_factory=list)
    """(agent, state, choice) of each turn; the state is empty where there is no choice"""
    paid: dict[str, float] = field(default_factory=dict)
    outcome: float | None = None

    def say(self, *agents: str, state: str = "", lengths: tuple[int, int] = (1, 1)) -> list[int]:
        """One environment step: each agent chooses in its own `state`; answers have `lengths` tokens by choice."""
        self.step += 1
        chosen = []
        for agent in agents:
            if len([1 for _, known, _ in self.asked if known]) >= len(self.bits):
                raise _MoreError
            bit = self.bits[len([1 for _, known, _ in self.asked if known])]
            self._turn(agent, bit, lengths[bit], f"{agent}/{state}")
            chosen.append(bit)
        return chosen

    def silent(self, agent: str) -> None:
        """A step in which an agent says nothing."""
        self.step += 1
        self._turn(agent, 0, 0, "")

    def _turn(self, agent: str, bit: int, tokens: int, state: str) -> None:
        ids = [3 + bit] + [9] * (tokens - 1) if tokens else []
        prompt = [7, *state.encode()]
        turn = Turn(agent, prompt, ids, [-1.0] * tokens, "eos", "x", len(self.turns), self.step, 0)
        turn.values = [0.0] * tokens
        self.turns.append(turn)
        self.asked.append((agent, state, bit))

    def pay(self, agent: str, amount: float) -> None:
        """Pay an agent with the step that was just played, as the player records it."""
        turn = next(turn for turn in reversed(self.turns) if turn.agent == agent)
        turn.reward = (turn.reward or 0.0) + amount
        if turn.env_step != self.step:
            turn.late = [*turn.late, (self.step, amount)]
        self.paid[agent] = self.paid.get(agent, 0.0) + amount

    def judge(self, *scores: float) -> None:
        """The coach's scores of all turns."""
        for turn, score in zip(self.turns, scores, strict=True):
            turn.coach = Scored(score)
            self.paid[turn.agent] = self.paid.get(turn.agent, 0.0) + score / 10

    @property
    def probability(self) -> float:
        return math.prod(P if bit else 1 - P for _, state, bit in self.asked if state)

    def episode(self, name: str) -> Episode:
        """A fresh copy."""
        turns = [Turn(**{**vars(turn), "values": list(turn.values or [])}) for turn in self.turns]
        return Episode(name, "problem", turns, self.outcome)


def plays(tree: Callable[[Play], None]) -> list[Play]:
    """All plays of a tree."""
    found, open_ = [], [()]
    while open_:
        bits = open_.pop()
        play = Play(bits)
        try:
            tree(play)
        except _MoreError:
            open_ += [(*bits, 1), (*bits, 0)]
        else:
            found.append(play)
    assert sum(play.probability for play in found) == 1.0 or abs(sum(p.probability for p in found) - 1) < 1e-12
    return found


Gradient = dict[str, float]
"""State -> derivative by its logit."""


def exact(tree: Callable[[Play], None], *, own: bool) -> Gradient:
    """The gradient of E[all pay and the outcome], or for each agent's states of what this agent is paid (`own`)."""
    gradient: Gradient = {}
    for play in plays(tree):
        for agent, state, bit in play.asked:
            if state:
                paid = play.paid.get(agent, 0.0) if own else sum(play.paid.values())
                worth = paid + (play.outcome or 0.0)
                gradient[state] = gradient.get(state, 0.0) + play.probability * worth * (bit - P)
    return gradient


def expected(tree: Callable[[Play], None], rule: str, **settings: object) -> Gradient:
    """The expected gradient of a rule's credit: the sum of A d log p / d logit, a play."""
    every = plays(tree)
    gradient = dict.fromkeys(sorted({state for play in every for _, state, _ in play.asked if state}), 0.0)
    given = dict(settings)
    if ALGORITHMS[rule].critic_reads:
        given.setdefault("gae_lambda", 1.0)  # with values of 0, unbiased
    if rule == "dapo":
        given["overlong_buffer"] = 0.0
    if rule == "qmix":
        given["joint"] = lambda row, values: [0.0] * len(values)
    for group in itertools.combinations_with_replacement(range(len(every)), SAMPLES):
        counts = [group.count(place) for place in set(group)]
        orders = math.factorial(SAMPLES) / math.prod(map(math.factorial, counts))
        weight = orders * math.prod(every[place].probability for place in group) / SAMPLES
        episodes = [every[place].episode(str(n)) for n, place in enumerate(group)]
        assign(episodes, rule, normalize_advantages="none", **given)
        for place, episode in zip(group, episodes, strict=True):
            for (_, state, bit), turn in zip(every[place].asked, episode.turns, strict=True):
                if state and turn.advantages:
                    gradient[state] += weight * turn.advantages[0] * (bit - P)
    return gradient


def cosine(one: Gradient, other: Gradient) -> float:
    """Cosine of two gradients; 0 where one of them is 0."""
    dot = math.fsum(one[state] * other[state] for state in one)
    norms = math.sqrt(math.fsum(v * v for v in one.values()) * math.fsum(v * v for v in other.values()))
    return dot / norms if norms else 0.0


# ------------------------------------------------------------------------------------------------------------ trees


def costs_now_pays_later(play: Play) -> None:
    play.pay("a", 0.0) if play.say("a") == [0] else _second(play, -1.0, 3.0)


def only_the_first_turn_pays(play: Play) -> None:
    [go] = play.say("a")
    play.pay("a", 1.0)
    if go:
        play.say("a", state="2")


def _second(play: Play, first: float, second: float) -> None:
    play.pay("a", first)
    play.say("a", state="2")
    play.pay("a", second)


def equal_totals(play: Play) -> None:
    [go] = play.say("a")
    play.pay("a", 0.1 if go else 0.6)
    if go:
        [on] = play.say("a", state="2")
        play.pay("a", 0.2 if on else 0.5)
        if on:
            play.say("a", state="3")
            play.pay("a", 0.3)


def half_a_point_a_turn(play: Play) -> None:
    for turn in range(3):
        [go] = play.say("a", state=str(turn))
        play.pay("a", 0.5)
        if not go:
            return


def unavoidable_winner(play: Play) -> None:
    for turn, agent in enumerate("abab"):
        [go] = play.say(agent, state=str(turn))
        if turn >= 2 and not go:
            break
    play.pay("a", 1.0)
    play.pay("b", -1.0)


def opponents(play: Play) -> None:
    [first] = play.say("a")
    [second] = play.say("b", state=str(first))
    won = 1.0 if first != second else -1.0
    if first and second:
        [third] = play.say("a", state="again")
        won = 2.0 if third else -1.0
    play.pay("a", won)
    play.pay("b", -won)


def silent_agent(play: Play) -> None:
    [first] = play.say("a")
    play.silent("b")
    play.pay("b", 1.0 if first else 0.25)
    [second] = play.say("a", state=str(first))
    play.pay("a", 0.5 * second)


def one_earns_for_the_other(play: Play) -> None:
    [first] = play.say("a")
    play.pay("a", -0.5 * first)
    [second] = play.say("b", state=str(first))
    play.pay("b", 2.0 * first + 0.25 * second)


def late_pay(play: Play) -> None:
    [first] = play.say("a")
    [second] = play.say("b", state=str(first))
    play.pay("a", 1.0 * second)
    play.pay("b", 0.25 * first)


def at_the_same_time(play: Play) -> None:
    first, second = play.say("a", "b")
    play.pay("a", 1.0 * second)
    play.pay("b", -0.25 * first)
    if first and second:
        play.say("b", state="2")
        play.pay("b", 0.5)


def unequal_lengths(play: Play) -> None:
    [go] = play.say("a", lengths=(1, 4))
    play.pay("a", 0.5 - go)
    if go:
        [on] = play.say("a", state="2", lengths=(3, 1))
        play.pay("a", 1.5 + on)


def at_the_end(play: Play) -> None:
    [first] = play.say("a")
    [second] = play.say("b", state=str(first))
    play.outcome = float(first == second)


def by_turn_and_at_the_end(play: Play) -> None:
    [go] = play.say("a")
    play.pay("a", -0.5 * go)
    play.outcome = 0.25
    if go:
        [right] = play.say("b", state="2")
        play.pay("b", 0.25)
        play.outcome = 0.5 + right


def scores_of_a_coach(play: Play) -> None:
    [go] = play.say("a")
    if not go:
        play.judge(6.0)
        return
    [right] = play.say("a", state="2")
    play.judge(2.0, 9.0 if right else 5.0)


TEAM = {
    "costs now, pays later": costs_now_pays_later,
    "only turn 1 pays": only_the_first_turn_pays,
    "equal totals": equal_totals,
    ".5 a turn": half_a_point_a_turn,
    "silent agent": silent_agent,
    "pays the other": one_earns_for_the_other,
    "late pay": late_pay,
    "at the same time": at_the_same_time,
    "unequal lengths": unequal_lengths,
    "at the end": at_the_end,
    "by turn and at the end": by_turn_and_at_the_end,
    "coach": scores_of_a_coach,
}
AGAINST = {"unavoidable winner": unavoidable_winner, "opponents": opponents}
