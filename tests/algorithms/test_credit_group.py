"""Group rules against numbers worked by hand: whom each rule compares a turn with, and what it divides by."""

from __future__ import annotations

import math

import pytest

from mafrt.algorithms import assign
from mafrt.core.errors import ConfigError
from mafrt.core.types import Episode, Turn


def turn(agent: str, index: int, reward: float | None, tokens: int = 2, prompt=(7,), **fields) -> Turn:
    return Turn(
        agent, list(prompt), [3] * tokens, [-1.0] * tokens, "eos", "x", index, index, 0, reward=reward, **fields
    )


def duo() -> list[Episode]:
    """One problem, two trajectories: solver, verifier, solver with reward 1 each; solver, verifier with 0 each."""
    first = [turn("solver", 0, 1.0), turn("verifier", 1, 1.0), turn("solver", 2, 1.0)]
    return [Episode("0", "p", first), Episode("1", "p", [turn("solver", 0, 0.0), turn("verifier", 1, 0.0)])]


def numbers(episodes: list[Episode]) -> list[list[float]]:
    """One advantage per turn; all its tokens must share it."""
    out = []
    for episode in episodes:
        out.append([])
        for t in episode.turns:
            assert t.advantages is not None and len(set(t.advantages)) == 1
            assert len(t.advantages) == len(t.action_ids) == len(t.returns or ())
            out[-1].append(t.advantages[0])
    return out


@pytest.mark.parametrize(
    ("rule", "want"),
    [
        # Trajectories 1 and 0: mean .5, unbiased deviation sqrt(.5) = .7071; .5 / .7071 = .7071
        ("grpo", [[0.7071068] * 3, [-0.7071068] * 2]),
        ("dr_grpo", [[0.5] * 3, [-0.5] * 2]),
        # 1 against the other's 0, and 0 against the other's 1
        ("rloo", [[1.0] * 3, [-1.0] * 2]),
        # solver 1, 1, 0: mean 2/3, deviation sqrt((1/9 + 1/9 + 4/9) / 2) = .57735; (1/3)/.57735 = .57735,
        # (-2/3)/.57735 = -1.1547. verifier 1, 0: +-.7071
        ("dr_mas", [[0.5773503, 0.7071068, 0.5773503], [-1.1547005, -0.7071068]]),
        # turn 0: solver 1, 0; turn 1: verifier 1, 0; turn 2: solver alone -> 0
        ("at_grpo", [[0.7071068, 0.7071068, 0.0], [-0.7071068, -0.7071068]]),
    ],
)
def test_by_hand(rule, want):
    episodes = duo()
    assign(episodes, rule, turn_credit="own")
    for got, expected in zip(numbers(episodes), want, strict=True):
        assert got == pytest.approx(expected, abs=2e-6)


@pytest.mark.parametrize("rule", ["grpo", "dr_grpo", "rloo", "dr_mas", "at_grpo"])
def test_a_team_reward_is_the_same_as_paying_every_row(rule):
    paid, outcome = duo(), duo()
    for episode in outcome:
        episode.outcome = episode.turns[0].reward
        for t in episode.turns:
            t.reward = None
    assign(paid, rule, turn_credit="own")
    assign(outcome, rule, turn_credit="own")
    assert numbers(paid) == numbers(outcome)


def test_agents_that_speak_at_the_same_turn_do_not_mix():
    # A router let the searcher speak second in one trajectory and the answerer in the other two.
    second = ["searcher", "answerer", "answerer"]
    episodes = [
        Episode(str(i), "p", [turn("router", 0, 0.0), turn(agent, 1, float(i))]) for i, agent in enumerate(second)
    ]
    for rule in ("at_grpo", "dr_mas"):
        metrics = assign(episodes, rule, turn_credit="own")
        assert [n[1] for n in numbers(episodes)] == pytest.approx([0.0, -0.7071068, 0.7071068], abs=2e-6)
        assert metrics["groups"] == 3.0 and metrics["groups_of_one"] == 1.0 and metrics["groups_no_spread"] == 0.5


def test_leave_one_out_with_three():
    # 1, 2, 6: 1 - (2+6)/2 = -3 ; 2 - (1+6)/2 = -1.5 ; 6 - (1+2)/2 = 4.5
    episodes = [Episode(str(i), "p", [turn("a", 0, r)]) for i, r in enumerate([1.0, 2.0, 6.0])]
    assign(episodes, "rloo")
    assert [n[0] for n in numbers(episodes)] == pytest.approx([-3.0, -1.5, 4.5])


def test_scale_is_the_unbiased_deviation_plus_eps():
    # 0, 0, 3: mean 1, deviation sqrt((1+1+4)/2) = sqrt(3). With eps = sqrt(3): 2 / (2 sqrt(3)) = .57735
    episodes = [Episode(str(i), "p", [turn("a", 0, r)]) for i, r in enumerate([0.0, 0.0, 3.0])]
    assign(episodes, "grpo", eps=math.sqrt(3.0))
    assert [n[0] for n in numbers(episodes)] == pytest.approx([-0.2886751, -0.2886751, 0.5773503], abs=1e-6)


def test_trajectory_is_the_mean_of_its_rows_or_their_sum():
    # Rows 1, 0 against 2: means .5 and 2 -> -+.75; sums 1 and 2 -> -+.5
    def episodes():
        return [Episode("0", "p", [turn("a", 0, 1.0), turn("b", 1, 0.0)]), Episode("1", "p", [turn("a", 0, 2.0)])]

    means, sums = episodes(), episodes()
    assign(means, "dr_grpo", turn_credit="own")
    assign(sums, "dr_grpo", reduce="sum", turn_credit="own")
    assert numbers(means) == [pytest.approx([-0.75] * 2), pytest.approx([0.75])]
    assert numbers(sums) == [pytest.approx([-0.5] * 2), pytest.approx([0.5])]


def test_knobs_are_independent():
    # Trajectories by agent: solver means 1 and 0, verifier 1 and 0: +-.5 each, and the first solver's two rows share.
    episodes = duo()
    metrics = assign(episodes, "dr_grpo", group="agent", turn_credit="own")
    assert numbers(episodes) == [pytest.approx([0.5] * 3), pytest.approx([-0.5] * 2)]
    assert metrics["groups"] == 2.0
    # Rows of the whole problem: 1, 1, 1, 0, 0: mean .6
    assign(episodes, "dr_grpo", unit="row", turn_credit="own")
    assert numbers(episodes) == [pytest.approx([0.4] * 3), pytest.approx([-0.6] * 2)]


def test_group_of_one_and_group_without_spread_teach_nothing_and_are_counted():
    # Three equal rewards whose mean is off by a rounding must not become a direction: exactly 0.
    flat = [Episode(str(i), "flat", [turn("a", 0, 0.1)]) for i in range(3)]
    alone = [Episode("3", "alone", [turn("a", 0, 5.0)])]
    spread = [Episode(str(i), "spread", [turn("a", 0, float(i))]) for i in (4, 5)]
    metrics = assign(flat + alone + spread, "grpo")
    assert [n[0] for n in numbers(flat + alone)] == [0.0] * 4
    assert metrics["groups"] == 3.0 and metrics["groups_of_one"] == 1.0
    assert metrics["groups_no_spread"] == 0.5  # one of the two groups that have more than one member
    assert metrics["advantage_std/a"] > 0


def test_problems_do_not_mix():
    first, second = duo(), duo()
    for episode in second:
        episode.group = "q"
        for t in episode.turns:
            t.reward = 100.0 * (t.reward or 0.0)
    alone = duo()
    assign(alone, "dr_grpo")
    assign(first + second, "dr_grpo")
    assert numbers(first) == numbers(alone)


@pytest.mark.parametrize("rule", ["dr_mas", "at_grpo", "reinforce_pp"])
def test_another_agents_rewards_change_nothing(rule):
    before, after = duo(), duo()
    for i, episode in enumerate(after):
        episode.turns[1].reward = -50.0 + i
    assign(before, rule, turn_credit="own")
    assign(after, rule, turn_credit="own")
    for one, other in zip(before, after, strict=True):
        for a, b in zip(one.turns, other.turns, strict=True):
            if a.agent == "solver":
                assert a.advantages == b.advantages


def test_grpo_does_mix_agents():
    before, after = duo(), duo()
    after[1].turns[1].reward = 50.0
    assign(before, "grpo")
    assign(after, "grpo")
    assert before[0].turns[0].advantages != after[0].turns[0].advantages


def test_length_of_an_answer_does_not_change_the_statistic():
    short, long = duo(), duo()
    for t in long[0].turns:
        t.action_ids, t.logprobs = t.action_ids * 40, t.logprobs * 40
    assign(short, "grpo")
    assign(long, "grpo")
    assert numbers(short) == numbers(long)


def test_sum_with_an_unknown_row_takes_the_trajectory_out():
    episodes = duo()
    episodes[0].turns[1].reward = math.nan
    metrics = assign(episodes, "grpo", reduce="sum", turn_credit="own")
    assert [t.advantages for t in episodes[0].turns] == [None] * 3
    assert metrics["turns_nonfinite"] == 3.0 and metrics["groups_of_one"] == 1.0
    metrics = assign(episodes, "grpo", turn_credit="own")
    assert episodes[0].turns[0].advantages == pytest.approx([0.7071068] * 2, abs=2e-6)
    assert metrics["turns_nonfinite"] == 1.0


def test_rewards_too_large_for_a_statistic_never_become_an_advantage():
    episodes = [Episode(str(i), "p", [turn("a", 0, r)]) for i, r in enumerate([1.7e308, 1.7e308, -1.0])]
    metrics = assign(episodes, "dr_grpo")
    assert [e.turns[0].advantages for e in episodes] == [None] * 3
    assert metrics["turns_nonfinite"] == 3.0


@pytest.mark.parametrize(
    "bad", [{"unit": "rows"}, {"group": "team"}, {"scale": "yes"}, {"baseline": "loo"}, {"eps": -1}]
)
def test_settings_are_checked(bad):
    with pytest.raises(ConfigError):
        assign(duo(), "grpo", **bad)


def test_normalising_afterwards():
    # dr_grpo gives +-.5 to 6 and 4 tokens: mean .1, variance .25 - .01 = .24, deviation .4898979
    # (.5 - .1) / .4898979 = .8164966 ; (-.5 - .1) / .4898979 = -1.2247449
    episodes = duo()
    assign(episodes, "dr_grpo", normalize_advantages="batch", turn_credit="own")
    assert numbers(episodes) == [pytest.approx([0.8164966] * 3, abs=1e-6), pytest.approx([-1.2247449] * 2, abs=1e-6)]
    # Per agent: solver 4 and 2 tokens: mean 1/6, variance 1/4 - 1/36 = 2/9, deviation .4714045:
    # (1/3)/.4714045 = .7071068, (-2/3)/.4714045 = -1.4142136 ; verifier +-1
    assign(episodes, "dr_grpo", normalize_advantages="agent", turn_credit="own")
    assert numbers(episodes) == [
        pytest.approx([0.7071068, 1.0, 0.7071068], abs=1e-6),
        pytest.approx([-1.4142136, -1.0], abs=1e-6),
    ]
    assert episodes[0].turns[0].returns == [1.0, 1.0]  # returns are from before


def test_metrics_are_from_before_normalising():
    plain = assign(duo(), "dr_grpo")
    assert plain == assign(duo(), "dr_grpo", normalize_advantages="agent")


def test_normalising_action_level_counts_turns():
    # gae, action level, no bootstrap, V=0: advantages 1 (5 tokens) and 0 (1 token); by turns: mean .5, deviation .5
    turns = [turn("a", 0, 1.0, tokens=5, values=[0.0]), turn("a", 1, 0.0, tokens=1, values=[0.0])]
    assign([Episode("0", "p", turns)], "gae", level="action", bootstrap="none", normalize_advantages="batch")
    assert turns[0].advantages == pytest.approx([1.0] * 5) and turns[1].advantages == pytest.approx([-1.0])


def test_metrics_per_agent():
    # dr_grpo: solver rewards 1, 1, 0; advantages .5 on 4 tokens, -.5 on 2: mean 1/6, deviation .4714045
    metrics = assign(duo(), "dr_grpo", turn_credit="own")
    assert metrics["reward/solver"] == pytest.approx(2 / 3) and metrics["reward/verifier"] == 0.5
    assert metrics["advantage_mean/solver"] == pytest.approx(1 / 6)
    assert metrics["advantage_std/solver"] == pytest.approx(0.4714045)
    assert metrics["turns"] == 5.0 and metrics["turns_unjudged"] == metrics["turns_nonfinite"] == 0.0
