"""`gigpo`, `reinforce_pp`, HAPPO's M and the registry, against numbers worked by hand."""

from __future__ import annotations

import dataclasses
import math
import time
from difflib import SequenceMatcher
from itertools import permutations
from pathlib import Path

import pytest
from helpers_credit import assign
from hypothesis import given
from hypothesis import strategies as st

from mafrt.algorithms import ALGORITHMS, algorithm, check_needs
from mafrt.algorithms.gigpo import _alike
from mafrt.algorithms.happo import CompoundRatio, joint_steps
from mafrt.core.errors import ConfigError
from mafrt.core.types import Episode, Scored, Turn
from mafrt.storage.metrics import explain
from mafrt.storage.transcripts import transcript_of


def turn(agent: str, index: int, reward: float | None = None, tokens: int = 1, prompt=(7,), **fields) -> Turn:
    return Turn(
        agent, list(prompt), [3] * tokens, [-1.0] * tokens, "eos", "x", index, index, 0, reward=reward, **fields
    )


# -- GiGPO ---------------------------------------------------------------------------------------------------------


def two_walks() -> list[Episode]:
    """Both start in state 1; the first goes on to state 2, the second comes back to state 1."""
    return [
        Episode("0", "p", [turn("a", 0, 0.0, prompt=(1,)), turn("a", 1, 1.0, prompt=(2,))]),
        Episode("1", "p", [turn("a", 0, 0.0, prompt=(1,)), turn("a", 1, 0.0, prompt=(1,))]),
    ]


def test_gigpo_by_hand():
    # gamma=.5, mean only, weight 2. Totals 1, 0: A_E = +-.5.
    # Step returns: first 0 + .5*1 = .5, then 1; second 0, then 0.
    # State 1 holds .5, 0, 0: mean 1/6 -> 1/3, -1/6, -1/6. State 2 holds 1 alone: 0.
    # A = .5 + 2/3, .5 + 0 ; -.5 - 1/3 twice
    episodes = two_walks()
    metrics = assign(episodes, "gigpo", gamma=0.5, norm="mean", step_weight=2.0)
    got = [t.advantages[0] for e in episodes for t in e.turns]
    assert got == pytest.approx([7 / 6, 0.5, -5 / 6, -5 / 6])
    assert [t.returns[0] for e in episodes for t in e.turns] == pytest.approx([0.5, 1.0, 0.0, 0.0])
    assert (metrics["anchors"], metrics["anchors_of_one"], metrics["groups"]) == (2.0, 1.0, 1.0)


def test_gigpo_with_deviation():
    # A_E: +-.7071. State 1: deviation of .5, 0, 0 = sqrt((1/9 + 2/36)/2) = .2886751: (1/3)/.2886751 = 1.1547005
    episodes = two_walks()
    assign(episodes, "gigpo", gamma=0.5)
    got = [t.advantages[0] for e in episodes for t in e.turns]
    assert got == pytest.approx([0.7071068 + 1.1547005, 0.7071068, -0.7071068 - 0.5773503, -1.2844571], abs=1e-5)


def test_gigpo_without_step_part_is_grpo_on_totals():
    one, other = two_walks(), two_walks()
    assign(one, "gigpo", step_weight=0.0)
    assign(other, "grpo", reduce="sum")
    assert [t.advantages for e in one for t in e.turns] == [t.advantages for e in other for t in e.turns]


def test_agents_do_not_share_an_anchor():
    # The same prompt seen by a (return 1) and by b (return 0): groups of one, no step part.
    episodes = [Episode("0", "p", [turn("a", 0, 1.0)]), Episode("1", "p", [turn("b", 0, 0.0)])]
    assert assign(episodes, "gigpo")["anchors_of_one"] == 2.0


def test_similar_anchors_do_not_depend_on_the_order():
    def episodes():
        texts = ["the cat sat", "the cat sits", "a dog ran off"]
        return [Episode(str(i), "p", [turn("a", 0, float(i), prompt=map(ord, text))]) for i, text in enumerate(texts)]

    def anchor(t: Turn) -> str:
        return "".join(map(chr, t.prompt_ids))

    straight, back = episodes(), episodes()
    metrics = assign(straight, "gigpo", similarity=0.8, anchor=anchor, norm="mean")
    assert metrics["anchors"] == 2.0 and metrics["anchors_of_one"] == 1.0
    assign(back[::-1], "gigpo", similarity=0.8, anchor=anchor, norm="mean")
    assert [e.turns[0].advantages for e in straight] == [e.turns[0].advantages for e in back]
    # Totals 0, 1, 2: A_E = -1, 0, 1. The two cats, returns 0 and 1: -.5, .5; the dog alone: 0.
    assert [e.turns[0].advantages[0] for e in straight] == pytest.approx([-1.5, 0.5, 1.0])


def test_a_chain_of_similar_anchors_is_cut_the_same_way_whatever_comes_first():
    # Each of the four agrees with its neighbours in 3 of 4 letters (.75), with the next but one in 2.
    def advantages(order):
        episodes = {i: Episode(str(i), "p", [turn("a", 0, float(i * i), prompt=[i])]) for i in range(4)}
        words = ["abcd", "abcx", "abyx", "azyx"]
        assign([episodes[i] for i in order], "gigpo", similarity=0.75, anchor=lambda t: words[t.prompt_ids[0]])
        return [episodes[i].turns[0].advantages for i in range(4)]

    assert len({str(advantages(order)) for order in permutations(range(4))}) == 1


@pytest.mark.slow
@given(st.lists(st.integers(0, 2), max_size=25), st.lists(st.integers(0, 2), max_size=25), st.floats(0, 1))
def test_anchors_are_as_similar_as_difflib_says(a, b, similarity):
    assert _alike(a, b, similarity) is (SequenceMatcher(None, a, b, autojunk=False).ratio() >= similarity)


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ((7,) * 3000, (7, 8) * 1500),
        ((7, 8) * 1500, (7, 7, 8) * 1000),
        ((7,) * 2000 + (8,), (8,) + (7,) * 2000),
        (tuple(n % 9 // 8 for n in range(3000)), tuple((n * n) % 9 // 8 for n in range(3000))),
    ],
)
@pytest.mark.parametrize("similarity", [0.4, 0.75, 0.95])
def test_no_prompt_keeps_the_comparison_of_anchors(a, b, similarity):
    started = time.process_time()
    _alike(a, b, similarity)
    assert time.process_time() - started < 5  # difflib's own takes minutes


# -- REINFORCE++ ---------------------------------------------------------------------------------------------------


def test_reinforce_pp_by_hand():
    # kl_coef=.5, gamma=.5. logpi - logpi_ref = [.2, -.4]; reward 3 clipped to 1 on the last token.
    # r = [-.1, .2 + 1] = [-.1, 1.2] ; A = [-.1 + .5*1.2, 1.2] = [.5, 1.2]
    # mean .85. Its deviation, .35, is of the divergence alone, since there is one reward, and is not scaled up to 1.
    one = turn("a", 0, 3.0, tokens=2, old_logprobs=[-0.8, -1.4], ref_logprobs=[-1.0, -1.0])
    assign([Episode("0", "p", [one])], "reinforce_pp", kl_coef=0.5, gamma=0.5, reward_clip=1.0)
    assert one.returns == pytest.approx([0.5, 1.2])
    assert one.advantages == pytest.approx([-0.35, 0.35], abs=1e-6)


def test_reinforce_pp_normalises_by_token_and_by_agent():
    # a: return 1 on 3 tokens, 0 on 1 token: mean .75, variance .75*.25 = .1875, deviation .4330127
    # .25/.4330127 = .5773503, -.75/.4330127 = -1.7320508. b: one value only: no spread: 0.
    turns = [turn("a", 0, 1.0, tokens=3), turn("b", 1, 100.0, tokens=2), turn("a", 2, 0.0)]
    assign([Episode("0", "p", turns)], "reinforce_pp", turn_credit="own", reward_clip=1000.0)
    assert turns[0].advantages == pytest.approx([0.5773503] * 3, abs=1e-6)
    assert turns[2].advantages == pytest.approx([-1.7320508], abs=1e-6)
    assert turns[1].advantages == [0.0, 0.0] and turns[1].returns == [100.0, 100.0]


def test_reinforce_pp_with_a_critic_by_hand():
    # gamma .5. First turn: r = [0, 1], V = [.5, .25]: returns [.5, 1], A = [0, .75]. Second: r = 0, V = .25: A = -.25.
    # Mean of 0, .75, -.25: 1/6; squares (0 + .5625 + .0625)/3 - 1/36 = .1805556, deviation .4249183.
    # (0 - .1666667)/.4249183 = -.392232 ; .5833333/.4249183 = 1.372813 ; -.4166667/.4249183 = -.980581
    turns = [turn("a", 0, 1.0, tokens=2, values=[0.5, 0.25]), turn("a", 1, 0.0, values=[0.25])]
    metrics = assign(
        [Episode("0", "p", turns)], "reinforce_pp", turn_credit="own", critic=True, gamma=0.5, outcome_weight=0.0
    )
    assert turns[0].returns == pytest.approx([0.5, 1.0]) and turns[1].returns == pytest.approx([0.0])
    assert turns[0].advantages == pytest.approx([-0.392232, 1.372813], abs=1e-5)
    assert turns[1].advantages == pytest.approx([-0.980581], abs=1e-5)
    # Errors of the prediction: 0, .75, -.25, variance .1805556. Returns .5, 1, 0: variance .1666667.
    # 1 - .1805556/.1666667 = -.0833333
    assert metrics["explained_variance/a"] == pytest.approx(-0.0833333, abs=1e-6)
    # gae_lambda .5: delta = [.5*.25 - .5, 1 - .25] = [-.375, .75]; A = [-.375 + .25*.75, .75] = [-.1875, .75]
    assign([Episode("0", "p", turns)], "reinforce_pp", turn_credit="own", critic=True, gamma=0.5, gae_lambda=0.5)
    assert turns[0].returns == pytest.approx([0.3125, 1.0])


def test_reinforce_pp_with_a_critic_clips_the_reward_first():
    one, other = turn("a", 0, 30.0, values=[4.0]), turn("a", 1, 0.0, values=[0.0])
    assign(
        [Episode("0", "p", [one, other])], "reinforce_pp", turn_credit="own", critic=True
    )  # 10 - 4 = 6 and 0: +-3 / 3
    assert one.returns == [10.0] and one.advantages == pytest.approx([1.0]) and other.advantages == pytest.approx([-1])


def test_reinforce_pp_with_a_critic_by_turn():
    # One step a turn: A = 1 - .4 = .6 on all three tokens, 0 - .2 = -.2 on the one of the other turn.
    # Mean over tokens (1.8 - .2)/4 = .4, deviation sqrt((3 * .04 + .36)/4) = .3464102; .2/.3464 = .57735, -1.73205
    turns = [turn("a", 0, 1.0, tokens=3, values=[0.4]), turn("a", 1, 0.0, values=[0.2])]
    assign([Episode("0", "p", turns)], "reinforce_pp", turn_credit="own", critic=True, level="action", gamma=0.5)
    assert turns[0].returns == pytest.approx([1.0] * 3) and turns[0].advantages == pytest.approx(
        [0.57735] * 3, abs=1e-5
    )
    assert turns[1].advantages == pytest.approx([-1.73205], abs=1e-5)


def test_the_error_of_the_critic_alone_teaches_nothing():
    turns = [turn("a", 0, 1.0, values=[0.5]), turn("a", 1, 1.0, values=[0.9])]
    assign([Episode("0", "p", turns)], "reinforce_pp", turn_credit="own", critic=True)
    assert [t.advantages for t in turns] == [[0.0], [0.0]] and [t.returns for t in turns] == [[1.0], [1.0]]


def test_baseline_is_the_problems_mean():
    # p: 1, 0 -> +-.5 ; q: 5, 7 -> -+1. The turn's reward is clipped after the baseline: with 4 nothing is cut,
    # without a baseline 5 and 7 would be.
    rewards = {"p": (1.0, 0.0), "q": (5.0, 7.0)}
    episodes = [Episode(f"{g}{i}", g, [turn("a", 0, r)]) for g, rs in rewards.items() for i, r in enumerate(rs)]
    metrics = assign(episodes, "reinforce_pp_baseline", reward_clip=4.0)
    assert [e.turns[0].returns[0] for e in episodes] == pytest.approx([0.5, -0.5, -1.0, 1.0])
    assert metrics["groups"] == 2.0 and metrics["groups_of_one"] == 0.0
    # deviation sqrt((.25 + .25 + 1 + 1)/4) = .7905694
    assert episodes[0].turns[0].advantages == pytest.approx([0.5 / 0.7905694], abs=1e-6)
    assign(episodes, "reinforce_pp", reward_clip=4.0)
    assert [e.turns[0].returns[0] for e in episodes] == [1.0, 0.0, 4.0, 4.0]


def test_the_baseline_counts_a_trajectory_once_however_often_it_speaks():
    # First: one turn of 1. Second: three turns of 0. One number each, 1 and 0: baseline .5, deviation .5 -> +-1. Over
    # turns the mean would be .25, over tokens less.
    first = Episode("0", "p", [turn("a", 0, 1.0, tokens=2)])
    second = Episode("1", "p", [turn("a", i, 0.0, tokens=9) for i in range(3)])
    assign([first, second], "reinforce_pp_baseline")
    assert first.turns[0].returns[0] == 0.5 and first.turns[0].advantages == pytest.approx([1.0] * 2)
    assert all(t.advantages == pytest.approx([-1.0] * 9) for t in second.turns)


def test_spans_lose_the_baseline_once():
    # First: .9 in all, two thirds at token 0 and a third, .3, at token 1. Second: .3. Mean .6, so the returns from the
    # first token on are .9 - .6 = .3 and .3 - .6 = -.3; half of .6 is taken from each span: .3 - .3 = 0.
    first = turn("a", 0, coach=Scored(9.0, spans=(("x", 8.0), ("y", 4.0))))
    first.action_ids = [ord("x"), ord("y")]
    second = turn("a", 0, coach=Scored(3.0))
    episodes = [Episode("0", "p", [first]), Episode("1", "p", [second])]
    assign(episodes, "reinforce_pp_baseline", decode=lambda ids: "".join(map(chr, ids)))
    assert first.returns == pytest.approx([0.3, 0.0]) and second.returns == pytest.approx([-0.3])


def test_reference_is_needed_only_with_beta():
    episode = Episode("0", "p", [turn("a", 0, 1.0)])
    assign([episode], "reinforce_pp")
    with pytest.raises(ConfigError, match="needs a reference"):
        assign([episode], "reinforce_pp", kl_coef=0.1)


@pytest.mark.parametrize("bad", [math.nan, -math.inf])
def test_old_logprob_that_is_not_finite_drops_the_turn(bad):
    sick = turn("a", 0, 1.0, old_logprobs=[bad], ref_logprobs=[-1.0])
    well = turn("a", 1, 1.0, old_logprobs=[-1.0], ref_logprobs=[-1.0])
    metrics = assign([Episode("0", "p", [sick, well])], "reinforce_pp", kl_coef=0.1)
    assert sick.advantages is None and well.returns == [1.0] and metrics["turns_nonfinite"] == 1.0


# -- HAPPO ---------------------------------------------------------------------------------------------------------


def test_joint_steps_are_rounds():
    episode = Episode("0", "p", [turn(agent, i) for i, agent in enumerate(["a", "b", "a", "c", "b", "b"])])
    assert joint_steps(episode.turns) == [0, 0, 1, 1, 1, 2]


def test_a_step_of_the_environment_is_never_split():
    for order in ("ab", "ba"):
        spoken = [turn("a", 0), *(dataclasses.replace(turn(agent, i), env_step=1) for i, agent in enumerate(order, 1))]
        assert joint_steps(spoken) == [0, 1, 1]


def test_compound_ratio_by_hand():
    # Episode 0: a, b, a, b (two rounds); episode 1: b alone. a's first turn moved by +.2 and +.4: mean .3,
    # its second by log 4, clamped to 2.
    first = Episode("0", "p", [turn("a", 0, tokens=2), turn("b", 1), turn("a", 2), turn("b", 3)])
    second = Episode("1", "p", [turn("b", 0)])
    m = CompoundRatio([first, second])
    assert m.weights() == [1.0] * 5
    m.update([(0, [-0.8, -0.6]), (2, [-1.0 + math.log(4.0)])])
    # The last turn is episode 1's, in which a did not speak.
    assert m.weights() == pytest.approx([math.exp(0.3), math.exp(0.3), 2.0, 2.0, 1.0])
    # b's turn halves the first round's M: exp(.3) * .5 = .6749294
    m.update([(1, [-1.0 + math.log(0.5)])])
    assert m.weights()[0] == pytest.approx(0.6749294)
    metrics = m.metrics()
    assert metrics["compound_max"] == 2.0 and metrics["compound_min"] == pytest.approx(0.6749294)
    assert metrics["compound_mean"] == pytest.approx((0.6749294 + 2.0 + 1.0) / 3)


def test_ratio_that_is_not_finite_counts_as_one():
    episode = Episode("0", "p", [turn("a", 0), turn("b", 1)])
    m = CompoundRatio([episode])
    m.update([(0, [math.nan])])
    assert m.weights()[1] == 1.0 and m.metrics()["compound_nonfinite"] == 1.0


def test_old_logprobs_go_before_the_samplers():
    episode = Episode("0", "p", [turn("a", 0, old_logprobs=[-2.0]), turn("b", 1)])
    m = CompoundRatio([episode])
    m.update([(0, [-1.9])])
    assert m.weights()[1] == pytest.approx(math.exp(0.1))


@pytest.mark.parametrize("clamp", [(0.0, 2.0), (1.1, 2.0), (0.5, 0.9), (0.5, math.inf)])
def test_clamp_must_hold_one(clamp):
    with pytest.raises(ConfigError):
        CompoundRatio([], low=clamp[0], high=clamp[1])


def test_happo_has_one_advantage_for_a_joint_step():
    # Two rounds of a and b, V = .1, .2 and .3, .4, rewards 1, 0 and 0, 1; gamma = 1, lambda = .5. A step is worth what
    # it earned: second round 1 - .3 = .7; first 1 + .3 - .1 + .5 * .7 = 1.55, for both of its speakers.
    values, rewards = (0.1, 0.2, 0.3, 0.4), (1.0, 0.0, 0.0, 1.0)
    turns = [turn("ab"[i % 2], i, rewards[i], tokens=2, values=[values[i]] * 2) for i in range(4)]
    assign([Episode("0", "p", turns)], "happo", gae_lambda=0.5)
    assert [t.advantages for t in turns] == [pytest.approx([want] * 2) for want in (1.55, 1.55, 0.7, 0.7)]
    assert [t.returns[0] for t in turns] == pytest.approx([1.65, 1.65, 1.0, 1.0])


def test_happo_normalises_over_both_speakers_of_a_step():
    episodes = [
        Episode(str(i), "p", [turn("a", 0, 0.0, values=[0.0]), turn("b", 1, reward, tokens=5, values=[0.0] * 5)])
        for i, reward in enumerate((1.0, 0.0))
    ]
    assign(episodes, "happo", normalize_advantages="batch")
    assert [t.advantages[0] for e in episodes for t in e.turns] == pytest.approx([1.0, 1.0, -1.0, -1.0])


# -- the registry --------------------------------------------------------------------------------------------------


GIVEN = {"dapo": {"token_limits": {"a": 9, "b": 9}}, "qmix": {"joint": lambda turn, values: values}}
"""What a runner fills in."""


def test_every_algorithm_runs_with_its_defaults_and_says_where_it_is_from():
    for name, preset in ALGORITHMS.items():
        known = {"values": [0.5], "ref_logprobs": [-1.0], "teacher_logprobs": [-0.5]}
        a, b = turn("a", 0, 1.0, **known), turn("b", 1, 0.0, **known)
        metrics = assign([Episode("0", "p", [a]), Episode("1", "p", [b])], name, **GIVEN.get(name, {}))
        assert a.advantages and b.advantages and a.returns and b.returns
        assert metrics["reward/a"] == (1.0 if preset.reward_weight else a.returns[0])
        assert preset.name == name.replace("gae", "ppo") and preset.summary() and any(c.isdigit() for c in preset.paper)
        assert "\n" not in preset.summary()


def test_presets_differ_only_where_the_table_says():
    # ippo: nothing follows a turn and every turn is paid; mappo: the team's chain, the last turn is paid.
    def episode():
        return Episode("0", "p", [turn("a", 0, values=[0.5]), turn("b", 1, values=[0.25])], outcome=1.0)

    ippo, mappo = episode(), episode()
    assign([ippo], "ippo", gae_lambda=1.0)
    assign([mappo], "mappo", gae_lambda=1.0)
    assert [t.advantages for t in ippo.turns] == [[0.5], [0.75]]
    # b: 1 - .25 = .75 ; a: (0 + .25 - .5) + .75 = .5
    assert [t.advantages for t in mappo.turns] == [[0.5], [0.75]]
    assign([ippo], "ippo", gae_lambda=0.0)
    assign([mappo], "mappo", gae_lambda=0.0)
    assert [t.advantages for t in ippo.turns] == [[0.5], [0.75]]
    assert [t.advantages for t in mappo.turns] == [[-0.25], [0.75]]


@pytest.mark.parametrize(("rule", "near"), [("gro", "grpo"), ("reinforce_p", "reinforce_pp"), ("drmas", "dr_mas")])
def test_unknown_rule_names_the_nearest(rule, near):
    with pytest.raises(ConfigError, match=f"did you mean '{near}'"):
        assign([], rule)


@pytest.mark.parametrize(("setting", "near"), [("lambda", "gae_lambda"), ("outcome", "outcome_"), ("gama", "gamma")])
def test_unknown_setting_names_the_nearest(setting, near):
    with pytest.raises(ConfigError, match=f"did you mean '{near}"):
        assign([], "gae", **{setting: 1})


def test_a_setting_of_another_rule_is_unknown():
    with pytest.raises(ConfigError, match="'grpo' has no gae_lambda; it belongs to cory"):
        assign([], "grpo", gae_lambda=0.9)


def test_no_episodes_are_no_error():
    for name in ALGORITHMS:
        assert assign([], name, **GIVEN.get(name, {}))["turns"] == 0.0
        assert assign([Episode("0", "p")], name, **GIVEN.get(name, {}))["turns"] == 0.0


def test_the_page_names_every_algorithm():
    page = (Path(__file__).parents[2] / "docs" / "algorithms.md").read_text()
    assert not [name for name in ALGORITHMS if f"`{name}`" not in page]


def test_every_metric_of_a_rule_is_in_the_glossary():
    for name in ALGORITHMS:
        episode = Episode("0", "p", [turn("a", 0, 1.0, values=[0.5]), turn("a", 1, 0.0, values=[0.5])])
        for metric in assign([episode], name, **GIVEN.get(name, {})):
            assert explain(metric).text  # raises for an unknown one


FULL = {"critic": "transcript", "samples_per_problem": 8, "reference": True, "agents": 2}


@pytest.mark.parametrize(
    ("name", "settings", "lack", "words"),
    [
        ("gae", {}, {"critic": None}, "needs a critic"),
        ("mappo", {}, {"critic": "context"}, "whole transcript"),
        ("grpo", {}, {"samples_per_problem": 1}, "at least 2 per problem"),
        ("happo", {}, {"agents": 1}, "several agents"),
        ("reinforce_pp", {"kl_coef": 0.1}, {"reference": False}, "reference"),
    ],
)
def test_needs_are_said_before_a_model_is_loaded(name, settings, lack, words):
    check_needs(algorithm(name, **settings), **FULL)
    with pytest.raises(ConfigError, match=words):
        check_needs(algorithm(name, **settings), **{**FULL, **lack})


def test_what_is_not_needed_is_not_asked_for():
    check_needs("gae", critic="context", samples_per_problem=1, reference=False, agents=1)
    check_needs("dr_mas", critic=None, samples_per_problem=2, reference=False, agents=1)
    assert algorithm("happo").schedule == "sequential" and algorithm("marft").schedule == "round_robin"


# -- the path from the pay to the advantage ------------------------------------------------------------------------


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_transcript_holds_the_path_from_pay_to_advantage(name):
    """An advantage other than 0 has a return, and what that was compared with: a mean, a value or the sum's terms."""
    episodes = []
    for place in range(12):
        turns = [turn(agent, n, (place * (n + 2)) % 3 / 2, 2, (1, n * (place % 2))) for n, agent in enumerate("aba")]
        for one in turns:
            one.values, one.influence, one.contribution = [place / 9, 0.3], place / 12, place % 5 / 5
            one.teacher_logprobs, one.ref_logprobs = [-0.3, -0.4], [-0.1, -0.3]
        episodes.append(Episode(str(place), f"g{place // 4}", turns, outcome=float(place % 3 == 0)))
    more = {"joint": lambda row, numbers: [2 * x for x in numbers]} if name == "qmix" else {}
    assign(episodes, name, token_limits={"a": 10, "b": 10}, **more)
    learnt = [one for episode in episodes for one in episode.turns if any(one.advantages or ())]
    assert learnt
    for one in learnt:
        shown = transcript_of(Episode("e", "g", [one], None), str)["turns"][0]
        valued = "value" in shown and ALGORITHMS[name].critic_reads is not None
        assert one.advantages == one.returns or valued or {"baseline", "terms"} & shown.keys()


def test_the_terms_of_an_advantage_add_up_to_it():
    episodes = [
        Episode(str(n), "g", [turn("a", 0, 0.5 * n), turn("a", 1, 1.0)], outcome=float(n > 1)) for n in range(4)
    ]
    for name in ("gigpo", "gdpo"):
        assign(episodes, name)
        for one in (one for episode in episodes for one in episode.turns):
            assert len(one.terms) > 1
            # gdpo divides the sums by their deviation over the batch.
            assert name == "gdpo" or one.advantages == pytest.approx([sum(one.terms.values())])
