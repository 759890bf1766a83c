"""Rewards of turns: every part, every payee, and what leaves the loss."""

from __future__ import annotations

import math

import pytest
from helpers_credit import assign, reward_rows
from hypothesis import given, settings
from hypothesis import strategies as st

from mafrt.config.algorithm_groups import RewardSettings
from mafrt.core.errors import ConfigError
from mafrt.core.types import Episode, Scored, Turn, Unscored


def turn(agent: str, index: int, *, tokens: int = 1, text: str = "", **fields) -> Turn:
    ids = list(range(tokens)) if not text else [ord(c) for c in text]
    return Turn(agent, [1], ids, [0.0] * len(ids), "eos", text, index, index, 0, **fields)


def decode(ids) -> str:
    return "".join(map(chr, ids))


def rewards(episode: Episode, **settings) -> list[float | None]:
    rows, _ = reward_rows([episode], **settings)
    return [None if row.dropped else row.reward for row in rows[0]]


def test_three_parts_are_weighed():
    # 2 * .5 + .3 * 8/10 + 4 * .25 = 1 + .24 + 1 = 2.24
    episode = Episode("e", "g", [turn("a", 0, reward=0.5, coach=Scored(8.0))], outcome=0.25)
    got = rewards(episode, reward_weight=2.0, process_weight=0.3, outcome_weight=4.0)
    assert got == pytest.approx([2.24])


@pytest.mark.parametrize(
    ("outcome_to", "want"),
    [("last", [0, 0, 0, 1]), ("each", [0, 0, 1, 1]), ("all", [1, 1, 1, 1])],
)
def test_outcome_goes_to(outcome_to, want):
    # a speaks first and third, b second and fourth.
    episode = Episode("e", "g", [turn(agent, i) for i, agent in enumerate("abab")], outcome=1.0)
    assert rewards(episode, outcome_to=outcome_to) == want


def test_no_reward_from_the_environment_is_not_a_failed_judgement():
    assert rewards(Episode("e", "g", [turn("a", 0)])) == [0.0]


@pytest.mark.parametrize("missing", [None, Unscored("time-out")])
def test_unjudged_turn_leaves_the_loss_and_is_counted(missing):
    judged, not_judged = turn("a", 0, coach=Scored(10.0)), turn("b", 1, reward=1.0, coach=missing)
    metrics = assign([Episode("e", "g", [judged, not_judged])], "reinforce_pp", turn_credit="own")
    assert not_judged.advantages is None and not_judged.returns is None
    assert judged.returns == [1.0]
    assert metrics["turns_unjudged"] == 1.0 and metrics["turns"] == 2.0
    assert "reward/b" not in metrics


def test_unjudged_turn_is_out_of_the_baseline():
    # Judged rewards 1, 0: mean .5, deviation .7071 -> +-.7071. A third sample counted as 0 would change both.
    turns = [turn("a", 0, coach=coach) for coach in (Scored(10.0), Scored(0.0), Unscored("down"))]
    assign([Episode(str(i), "g", [t]) for i, t in enumerate(turns)], "dr_mas")
    assert turns[0].advantages == pytest.approx([0.70710578], abs=1e-6)
    assert turns[1].advantages == pytest.approx([-0.70710578], abs=1e-6)
    assert turns[2].advantages is None


def test_coach_may_be_declared_on_when_it_failed_everywhere():
    episode = Episode("e", "g", [turn("a", 0), turn("b", 1)], outcome=1.0)
    assert assign([episode], "grpo")["turns_unjudged"] == 0.0
    assert assign([episode], "grpo", coach=True)["turns_unjudged"] == 2.0
    assert assign([episode], "grpo", coach=True, process_weight=0.0)["turns_unjudged"] == 0.0


@pytest.mark.parametrize(("outcome", "want"), [(0.0, 0.0), (1.0, 0.9 + 1.0), (None, 0.9)])
def test_veto_takes_praise_for_a_wrong_answer(outcome, want):
    episode = Episode("e", "g", [turn("a", 0, coach=Scored(9.0))], outcome=outcome)
    assert rewards(episode, outcome_veto=True) == pytest.approx([want])


def test_veto_leaves_blame_and_the_environments_reward():
    # A negative weight makes the process reward a penalty: -.9 stays, and so does the environment's .5.
    episode = Episode("e", "g", [turn("a", 0, reward=0.5, coach=Scored(9.0))], outcome=0.0)
    assert rewards(episode, outcome_veto=True, process_weight=-1.0) == pytest.approx([0.5 - 0.9])


def test_spans_are_paid_on_their_last_token():
    # "2+2=4 so 5": "2+2=4" ends at token 4, "so 5" at token 9. 3/10, of which 8 of 9 and 1 of 9; the environment's 1 on
    # the last token.
    coach = Scored(3.0, spans=(("2+2=4", 8.0), ("so 5", 1.0)))
    episode = Episode("e", "g", [turn("a", 0, text="2+2=4 so 5", reward=1.0, coach=coach)])
    rows, lost = reward_rows([episode], decode=decode)
    assert rows[0][0].token_rewards == pytest.approx({4: 0.3 * 8 / 9, 9: 1 + 0.3 / 9})
    assert rows[0][0].reward == pytest.approx(1.3)
    assert lost == 0


def test_a_span_that_is_not_there_falls_back_to_the_last_token():
    coach = Scored(3.0, spans=(("nowhere", 10.0), ("ab", 5.0)))
    episode = Episode("e", "g", [turn("a", 0, text="abcd", coach=coach)])
    rows, lost = reward_rows([episode], decode=decode)
    assert rows[0][0].token_rewards == pytest.approx({1: 0.1, 3: 0.2})
    assert lost == 1
    assert assign([episode], "reinforce_pp")["spans_unlocated"] == 2.0  # no decode: none can be found


def test_an_empty_quotation_is_the_end_of_the_turn():
    coach = Scored(3.0, spans=(("ab", 5.0), ("", 10.0)))
    rows, lost = reward_rows([Episode("e", "g", [turn("a", 0, text="abcd", coach=coach)])], decode=decode)
    assert rows[0][0].token_rewards == pytest.approx({1: 0.1, 3: 0.2})
    assert lost == 0


def test_span_ends_where_its_token_ends():
    # Tokens of several characters: "ab" | "cd" | "ef"; "bc" is complete with the second token.
    pieces = ["ab", "cd", "ef"]
    one = turn("a", 0, tokens=3, coach=Scored(10.0, spans=(("bc", 10.0),)))
    rows, _ = reward_rows([Episode("e", "g", [one])], decode=lambda ids: "".join(pieces[i] for i in ids))
    assert rows[0][0].token_rewards == pytest.approx({1: 1.0, 2: 0.0})


@given(st.lists(st.text("ab", min_size=1, max_size=3), min_size=1, max_size=9), st.text("ab", min_size=1, max_size=4))
@settings(max_examples=100, deadline=None)
def test_a_span_is_found_where_reading_on_token_by_token_finds_it(pieces, quote):
    one = turn("a", 0, tokens=len(pieces), coach=Scored(10.0, spans=((quote, 10.0),)))
    rows, lost = reward_rows([Episode("e", "g", [one])], decode=lambda ids: "".join(pieces[i] for i in ids))
    ends = [i for i in range(len(pieces)) if quote in "".join(pieces[: i + 1])]
    assert lost == (not ends)
    paid = [i for i, reward in rows[0][0].token_rewards.items() if reward]
    assert paid == ends[:1] or (not ends and paid == [len(pieces) - 1])


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", ["reward", "outcome", "score", "span"])
def test_a_reward_that_is_not_finite_drops_its_turn(bad, where):
    coach = Scored(bad if where == "score" else 1.0, spans=(("a", bad),) if where == "span" else ())
    sick = turn("b", 1, text="a", reward=bad if where == "reward" else 0.0, coach=coach, values=[0.0])
    well = turn("a", 0, reward=1.0, coach=Scored(1.0), values=[0.0])
    episode = Episode("e", "g", [well, sick], outcome=bad if where == "outcome" else None)
    metrics = assign([episode], "gae", bootstrap="none", decode=decode)
    assert sick.advantages is None and sick.returns is None
    assert well.advantages == pytest.approx([1.1])
    assert metrics["turns_nonfinite"] == 1.0
    assert all(math.isfinite(value) for value in metrics.values())


def test_a_part_without_weight_is_not_read():
    episode = Episode("e", "g", [turn("a", 0, reward=math.nan, coach=Scored(math.nan))], outcome=1.0)
    assert rewards(episode, reward_weight=0.0, process_weight=0.0) == [1.0]


def test_shared_rewards_are_the_sum():
    # CORY: r1 = .25, r2 = .5; both get .75. The outcome is in the sum once.
    episode = Episode("e", "g", [turn("p", 0, reward=0.25), turn("o", 1, reward=0.5)], outcome=2.0)
    assert rewards(episode, share="sum") == [2.75, 2.75]
    assert rewards(episode, share="sum", outcome_weight=0.0) == [0.75, 0.75]


def test_an_unknown_share_makes_the_sum_unknown():
    episode = Episode("e", "g", [turn("p", 0, reward=0.25), turn("o", 1, reward=math.nan)])
    assert rewards(episode, share="sum") == [None, None]


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        ({"outcome_to": "eech"}, "each"),
        ({"reward_weight": math.nan}, "finite"),
        ({"reward_weight": "1"}, "finite"),
        ({"outcome_veto": 1}, "true or false"),
        ({"share": "all"}, "own, sum"),
    ],
)
def test_bad_settings_say_what_was_expected(bad, words):
    with pytest.raises(ConfigError, match=words):
        RewardSettings(**bad)


def test_each_agent_may_be_paid_by_weights_of_its_own():
    # a: 2 * .5 + 0 * 8/10 + 1 * 1 = 2; b: 1 * .5 + 3 * 8/10 + 0 * 1 = 2.9
    turns = [turn("a", 0, reward=0.5, coach=Scored(8.0)), turn("b", 1, reward=0.5, coach=Scored(8.0))]
    own = {
        "a": RewardSettings(reward_weight=2.0, process_weight=0.0),
        "b": RewardSettings(process_weight=3.0, outcome_weight=0.0),
    }
    episode = Episode("e", "g", turns, outcome=1.0)
    assert rewards(episode, outcome_to="all", agent_rewards=own) == pytest.approx([2.0, 2.9])


def test_an_agent_that_is_not_paid_by_the_coach_need_not_be_judged():
    turns = [turn("a", 0, coach=Unscored("time-out")), turn("b", 1, coach=Unscored("time-out"))]
    own = {"a": RewardSettings(process_weight=0.0)}
    assert rewards(Episode("e", "g", turns, outcome=1.0), outcome_to="all", agent_rewards=own) == [1.0, None]


def test_a_turn_holds_the_path_from_its_pay_to_its_advantage():
    """Two samples of a problem; turn 1 is paid .2 by the environment in both, turn 2 1 and 0 by the coach.

    Returns of the first turns: .2 + 1 (later) and .2; their mean is .7. Of the second turns 1 and 0; their mean is .5.
    """
    episodes = []
    for number, score in enumerate((10.0, 0.0)):
        first = Turn("a", [7], [3], [-1.0], "eos", "x", 0, 0, 0, reward=0.2)
        second = Turn("a", [7, 8], [3], [-1.0], "eos", "x", 1, 1, 0, coach=Scored(score, ""))
        first.coach = Scored(0.0, "")
        episodes.append(Episode(str(number), "p", [first, second]))
    assign(episodes, "dr_mas", coach=True)
    [good, bad] = [episode.turns for episode in episodes]
    assert good[0].paid == pytest.approx(0.2) and good[0].parts == pytest.approx({"reward": 0.2, "later": 1.0})
    assert good[0].returns == pytest.approx([1.2]) and good[0].baseline == pytest.approx(0.7)
    assert good[1].parts == pytest.approx({"coach": 1.0}) and good[1].baseline == pytest.approx(0.5)
    assert bad[0].parts == pytest.approx({"reward": 0.2}) and bad[1].parts == {}
    for turns in (good, bad):
        for turn in turns:
            # The sign of the advantage is that of the difference.
            assert (turn.returns[0] - turn.baseline) * turn.advantages[0] > 0
