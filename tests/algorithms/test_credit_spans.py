"""Spans say where a turn is paid, and never how much: a judge's overall score is the sum, whatever it quotes."""

from __future__ import annotations

import pytest
from helpers_credit import assign, reward_rows

from mafrt.core.types import Episode, Scored, Turn

TEXT = "2+2=4 so 5"


def decode(ids) -> str:
    return "".join(map(chr, ids))


def judged(score: float, *spans: tuple[str, float], text: str = TEXT) -> Episode:
    turn = Turn("a", [1], list(map(ord, text)), [-1.0] * len(text), "eos", text, 0, 0, 0)
    turn.coach = Scored(score, spans=spans)
    turn.values = [0.0] * len(text)
    return Episode("e", f"{score}{spans}", [turn])


# A judge that quotes much, one that invents its quotations, and one that quotes nothing.
VERBOSE = (("2+2=4", 8.0), ("2", 8.0), ("so 5", 8.0), ("=", 8.0))
INVENTED = (("the answer is seven", 9.0),)


@pytest.mark.parametrize("spans", [VERBOSE, INVENTED, (*VERBOSE, *INVENTED), ()])
@pytest.mark.parametrize("score", [0.0, 1.0, 5.0, 10.0])
def test_a_turn_is_paid_its_overall_score_whatever_is_quoted(score, spans):
    [[row]], _ = reward_rows([judged(score, *spans)], decode=decode)
    assert sum(row.token_rewards.values()) == pytest.approx(score / 10)
    assert row.reward == pytest.approx(score / 10)


@pytest.mark.parametrize("rule", ["ppo", "reinforce_pp"])
def test_a_bad_answer_never_earns_more_than_a_good_one_and_the_log_shows_what_was_paid(rule):
    bad, good = judged(1.0, *INVENTED), judged(10.0)
    for episode, paid in ((bad, 0.1), (good, 1.0)):
        metrics = assign([episode], rule, decode=decode, gae_lambda=1.0) if rule == "ppo" else assign(
            [episode], rule, decode=decode
        )  # fmt: skip
        assert metrics["reward/a"] == pytest.approx(paid)
        assert episode.turns[0].returns[0] == pytest.approx(paid)


def test_shares_by_hand():
    # 6 in all. 8 for "2+2=4" (token 4), 2 for "so 5" (token 9): .8 and .2 of .6. What is not found goes to the last.
    [[row]], lost = reward_rows([judged(6.0, ("2+2=4", 8.0), ("so 5", 2.0))], decode=decode)
    assert row.token_rewards == pytest.approx({4: 0.48, 9: 0.12}) and lost == 0
    [[row]], lost = reward_rows([judged(6.0, ("2+2=4", 6.0), ("nowhere", 4.0))], decode=decode)
    assert row.token_rewards == pytest.approx({4: 0.36, 9: 0.24}) and lost == 1
    # All spans at 0: equal shares.
    [[row]], _ = reward_rows([judged(6.0, ("2+2=4", 0.0), ("so 5", 0.0))], decode=decode)
    assert row.token_rewards == pytest.approx({4: 0.3, 9: 0.3})


def test_a_clip_bounds_the_turn_and_not_each_span():
    episode = judged(8.0, ("2+2=4", 6.0), ("so 5", 2.0))
    assign([episode], "reinforce_pp", decode=decode, reward_clip=0.4)
    assert episode.turns[0].returns[0] == pytest.approx(0.4) and episode.turns[0].returns[9] == pytest.approx(0.1)
