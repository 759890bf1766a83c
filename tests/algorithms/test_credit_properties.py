"""What must hold for every rule and any batch."""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Iterator

import pytest
from helpers_credit import assign
from hypothesis import given, settings
from hypothesis import strategies as st

from mafrt.algorithms import ALGORITHMS
from mafrt.core.types import Episode, Scored, Turn, Unscored

DISTINCT = sorted(set(ALGORITHMS) - {"ppo", "mappo", "happo", "dapo", "qmix"})
"""Every preset once: those are `gae`, `grpo` and `vdn` to the credit stage (what they add has tests of its own)."""
QUARTERS = st.integers(-20, 20).map(lambda n: n / 4)
"""Rewards whose sums are exact, for properties that a rounding would blur."""
NUMBERS = st.floats(-5, 5, allow_nan=False, width=32)
SOMETIMES_SICK = st.one_of(NUMBERS, st.sampled_from([math.nan, math.inf, 0.1]), st.none())
VERDICTS = st.one_of(st.builds(Scored, st.floats(0, 10)), st.just(Unscored("down")), st.none())


@st.composite
def turns(draw, index: int, reward, coach) -> Turn:
    tokens = draw(st.integers(1, 4))

    def some(n=tokens):
        return draw(st.lists(NUMBERS, min_size=n, max_size=n))

    return Turn(
        agent=draw(st.sampled_from("abc")),
        prompt_ids=[draw(st.integers(1, 2))],
        action_ids=[1] * tokens,
        logprobs=some(),
        stop="eos",
        text="",
        turn=index,
        env_step=index,
        adapter_version=0,
        reward=draw(reward),
        coach=draw(coach),
        values=some(),
        ref_logprobs=some(),
    )


@st.composite
def batches(draw, reward=NUMBERS, coach=st.none()) -> list[Episode]:  # noqa: B008
    episodes = []
    for i in range(draw(st.integers(1, 6))):
        spoken = [draw(turns(index, reward, coach)) for index in range(draw(st.integers(0, 4)))]
        group, outcome = draw(st.sampled_from("pq")), draw(st.one_of(st.none(), reward))
        episodes.append(Episode(str(i), group, spoken, outcome))
    return episodes


def of_every_rule(batch: list[Episode]) -> Iterator[tuple[str, list[Episode]]]:
    """A batch is drawn once, which takes longer than all rules do."""
    for rule in DISTINCT:
        yield rule, copy.deepcopy(batch)


def filled(episodes: list[Episode]) -> dict[str, list[tuple]]:
    return {e.id: [(t.advantages, t.returns) for t in e.turns] for e in episodes}


@given(batch=batches(SOMETIMES_SICK, VERDICTS), seed=st.integers(0, 99), how=st.sampled_from(["none", "agent"]))
@settings(max_examples=20, deadline=None)
def test_order_of_the_episodes_changes_not_one_bit(batch, seed, how):
    for rule, episodes in of_every_rule(batch):
        shuffled = copy.deepcopy(episodes)
        random.Random(seed).shuffle(shuffled)
        first = assign(episodes, rule, normalize_advantages=how)
        second = assign(shuffled, rule, normalize_advantages=how)
        assert first == second, rule
        assert filled(episodes) == filled(shuffled), rule


@pytest.mark.parametrize("rule", [*DISTINCT, "ppo", "mappo", "happo"])
@pytest.mark.parametrize("how", [{}, {"gamma": 0.5}, {"truncated": True}])
def test_order_of_those_who_speak_at_the_same_time_changes_no_credit(rule, how):
    """Turns of one to three tokens or none, pay by turn and at the end, unequal values."""
    own = {name: value for name, value in how.items() if name in ALGORITHMS[rule].settings()}
    for seed in range(4):
        rng = random.Random(seed)
        first = []
        for number in range(6):
            turns = []
            for step in range(3):
                for agent in [name for name in "abc" if rng.random() < 0.8] or ["a"]:
                    tokens = 0 if rng.random() < 0.1 else rng.randint(1, 3)
                    rows = {"values": [rng.random() for _ in range(tokens)], "ref_logprobs": [-0.7] * tokens}
                    turn = Turn(agent, [step], [1] * tokens, [-0.5] * tokens, "eos", "x", len(turns), step, 0, **rows)
                    turn.reward = rng.choice([0.0, 0.25, 1.0, -0.5])
                    turns.append(turn)
            episode = Episode(str(number), "pq"[number % 2], turns, rng.choice([0.0, 1.0]))
            episode.truncated = "truncated" in how
            first.append(episode)
        second = copy.deepcopy(first)
        for episode in second:
            episode.turns.sort(key=lambda turn: (turn.env_step, -ord(turn.agent)))
            for place, turn in enumerate(episode.turns):
                turn.turn = place
        found = []
        for episodes in (first, second):
            assign(episodes, rule, **own)
            found.append({(e.id, t.env_step, t.agent): t.advantages for e in episodes for t in e.turns})
        assert found[1] == {place: pytest.approx(advantages, abs=1e-12) for place, advantages in found[0].items()}


@given(batch=batches(SOMETIMES_SICK, VERDICTS))
@settings(max_examples=20, deadline=None)
def test_nothing_that_is_not_finite_comes_out(batch):
    for rule, episodes in of_every_rule(batch):
        metrics = assign(episodes, rule, normalize_advantages="batch", coach=True)
        dropped = 0
        for t in (t for e in episodes for t in e.turns):
            assert (t.advantages is None) == (t.returns is None), rule
            dropped += t.advantages is None
            if t.advantages is not None:
                assert len(t.advantages) == len(t.returns or ()) == len(t.action_ids), rule
                assert all(map(math.isfinite, t.advantages)) and all(map(math.isfinite, t.returns or ())), rule
                assert isinstance(t.coach, Scored) and (t.reward is None or math.isfinite(t.reward)), rule
        assert dropped == sum(metrics[f"turns_{why}"] for why in ("unjudged", "nonfinite", "no_outcome")), rule
        assert all(map(math.isfinite, metrics.values())), rule


@given(batch=batches())
@settings(max_examples=15, deadline=None)
def test_credit_writes_its_own_fields_only(batch):
    for rule, episodes in of_every_rule(batch):
        assign(episodes, rule, kl_coef=0.1) if "reinforce" in rule else assign(episodes, rule)
        for t in (t for e in episodes for t in e.turns):
            t.advantages = t.returns = t.paid = t.parts = t.baseline = t.terms = None
        assert episodes == batch, rule


@pytest.mark.parametrize("rule", ["gae", "ippo", "grpo", "dr_grpo", "rloo", "dr_mas", "at_grpo", "gigpo"])
@given(episodes=batches(), by_turn=st.booleans())
@settings(max_examples=15, deadline=None)
def test_problems_are_independent(rule, episodes, by_turn):
    """Without a normalisation over the batch, dropping all other problems changes nothing.

    Whether turns are paid as they come is a fact of the environment, which is read off the whole batch.
    """
    alone = [e for e in copy.deepcopy(episodes) if e.group == "p"]
    assign(episodes, rule, by_turn=by_turn, opponents=False)
    assign(alone, rule, by_turn=by_turn, opponents=False)
    assert filled(alone) == filled([e for e in episodes if e.group == "p"])


@pytest.mark.parametrize("rule", ["gae", "dr_grpo", "reinforce_pp", "reinforce_pp_baseline"])
@given(episodes=batches())
@settings(max_examples=15, deadline=None)
def test_duplicating_the_batch_changes_nothing(rule, episodes):
    """Means and population deviations do not see how often everything is repeated. (Unbiased ones do: n - 1.)"""
    twice = copy.deepcopy(episodes) + copy.deepcopy(episodes)
    assign(episodes, rule)
    assign(twice, rule)
    single = [x for e in episodes for t in e.turns for x in t.advantages or ()]
    double = [x for e in twice[: len(episodes)] for t in e.turns for x in t.advantages or ()]
    if rule == "dr_grpo":
        lonely = {g for g in "pq" if sum(e.group == g and bool(e.turns) for e in episodes) == 1}
        single = [0.0 if e.group in lonely else x for e in episodes for t in e.turns for x in t.advantages or ()]
    assert double == pytest.approx(single, abs=1e-6)


@pytest.mark.parametrize("rule", ["grpo", "rloo", "dr_mas", "at_grpo"])
@given(episodes=batches(QUARTERS), shift=st.floats(-3, 3))
@settings(max_examples=15, deadline=None)
def test_a_constant_reward_for_all_changes_nothing(rule, episodes, shift):
    shifted = copy.deepcopy(episodes)
    for t in (t for e in shifted for t in e.turns):
        t.reward = (t.reward or 0.0) + shift
    assign(episodes, rule, eps=0.1, turn_credit="own")
    assign(shifted, rule, eps=0.1, turn_credit="own")
    for one, other in zip(episodes, shifted, strict=True):
        for a, b in zip(one.turns, other.turns, strict=True):
            assert a.advantages == pytest.approx(b.advantages, abs=1e-6)


@given(episodes=batches(QUARTERS), scale=st.floats(0.1, 50))
@settings(max_examples=25, deadline=None)
def test_dr_mas_takes_each_agents_reward_scale_out(episodes, scale):
    """Agent a's rewards times a constant, the others' as they are: nobody's advantage changes (eps aside)."""
    scaled = copy.deepcopy(episodes)
    for t in (t for e in scaled for t in e.turns if t.agent == "a"):
        t.reward = (t.reward or 0.0) * scale
    for e in (*episodes, *scaled):
        e.outcome = None
    assign(episodes, "dr_mas", eps=0.0, turn_credit="own")
    assign(scaled, "dr_mas", eps=0.0, turn_credit="own")
    for one, other in zip(episodes, scaled, strict=True):
        for a, b in zip(one.turns, other.turns, strict=True):
            assert a.advantages == pytest.approx(b.advantages, abs=1e-5)


@pytest.mark.slow
@given(episodes=batches(), how=st.sampled_from(["batch", "agent"]))
@settings(max_examples=25, deadline=None)
def test_normalised_advantages_have_mean_0_and_deviation_1_at_most(episodes, how):
    assign(episodes, "gae", normalize_advantages=how)
    groups: dict[str, list[float]] = {}
    for t in (t for e in episodes for t in e.turns):
        groups.setdefault(t.agent if how == "agent" else "", []).extend(t.advantages or ())
    for numbers in filter(None, groups.values()):  # empty where no turn is in the loss
        n = len(numbers)
        assert math.fsum(numbers) / n == pytest.approx(0.0, abs=1e-9)
        deviation = math.sqrt(math.fsum(x * x for x in numbers) / n)
        assert deviation < 1 + 1e-4  # less where the spread is small beside that of the returns
