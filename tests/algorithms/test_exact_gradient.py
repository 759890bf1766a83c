"""Every rule's credit against the exact gradient of what a decision tree pays (`helpers_trees`).

`python tests/algorithms/test_exact_gradient.py` prints the table of bench/results/algorithms.md.
"""

from __future__ import annotations

import math
from functools import cache
from pathlib import Path

import pytest
from helpers_trees import AGAINST, SAMPLES, TEAM, cosine, equal_totals, exact, expected, plays, unavoidable_winner

from mafrt.algorithms import ALGORITHMS, assign
from mafrt.core.types import Episode, Turn

PAGE = Path(__file__).parents[2] / "bench" / "results" / "algorithms.md"
RULES = [name for name in ALGORITHMS if name not in ("gae", "spin", "opd", "self_distill")]
"""The same as ppo; pairs and no advantages; no reward (`test_distillation` has the gradient of its KL)."""
UNSCALED = ["rloo", "rae", "ppo", "marft", "mappo", "happo", "cory", "vdn", "qmix"]
PAPERS = {
    ("maporl", None): "a mean over the rounds that are left",
    ("gigpo", "equal totals"): "gamma .95: pay counts less the later it comes",
    ("gdpo", "by turn and at the end"): "each kind of pay is normalised by itself",
}
"""Forms of a paper that are kept: (rule, tree or all trees) -> why they are not the gradient."""


def kept(rule: str, tree: str) -> bool:
    return (rule, tree) in PAPERS or (rule, None) in PAPERS


def trees(rule: str) -> dict:
    """The trees on which a rule may be used, each with whether an agent's own pay is its aim."""
    against = {} if ALGORITHMS[rule].adds_agents else AGAINST
    return {name: (tree, rule == "ippo" or name in AGAINST) for name, tree in {**TEAM, **against}.items()}


@cache
def gradients(rule: str, name: str) -> tuple[dict[str, float], dict[str, float]]:
    """The exact gradient on a tree, and what a rule's credit comes to."""
    tree, own = trees(rule)[name]
    return exact(tree, own=own), expected(tree, rule)


def size(gradient: dict[str, float]) -> float:
    return math.sqrt(math.fsum(value * value for value in gradient.values()))


@pytest.mark.parametrize("rule", RULES)
def test_credit_points_along_the_gradient(rule):
    for name in trees(rule):
        right, found = gradients(rule, name)
        if kept(rule, name):
            continue
        if size(right) < 1e-12:
            assert size(found) < 1e-9, name
        else:
            assert cosine(right, found) > 0.9, name


@pytest.mark.parametrize("rule", UNSCALED)
def test_rules_without_a_deviation_have_the_gradient_itself(rule):
    for name in trees(rule):
        right, found = gradients(rule, name)
        assert found == pytest.approx(right, abs=1e-9), name


def test_a_mean_that_holds_oneself_shortens_the_gradient_by_one_nth():
    for name, tree in TEAM.items():
        shorter = {state: value * (SAMPLES - 1) / SAMPLES for state, value in exact(tree, own=False).items()}
        assert expected(tree, "dr_grpo") == pytest.approx(shorter, abs=1e-9), name


def test_without_its_discount_gigpo_is_0_where_all_totals_are_equal():
    assert size(expected(equal_totals, "gigpo", gamma=1.0)) < 1e-9


@pytest.mark.parametrize("rule", ["dr_mas", "at_grpo", "reinforce_pp", "gdpo"])
def test_the_papers_form_is_there_by_name_and_points_elsewhere(rule):
    right = exact(TEAM["costs now, pays later"], own=False)
    assert cosine(right, expected(TEAM["costs now, pays later"], rule, turn_credit="own")) < 0.5


@pytest.mark.parametrize("rule", RULES)
def test_the_order_of_those_who_speak_at_the_same_time_changes_nothing(rule):
    for settings in ({}, {"gamma": 0.5}):
        if settings and "gamma" not in ALGORITHMS[rule].settings():
            continue
        found = []
        for order in (1, -1):
            episodes = []
            for number, play in enumerate(plays(TEAM["at the same time"])):
                episode = play.episode(str(number))
                episode.turns[:2] = episode.turns[:2][::order]
                episodes.append(episode)
            given = {"gae_lambda": 1.0} if ALGORITHMS[rule].critic_reads else {}
            given |= {"overlong_buffer": 0.0} if rule == "dapo" else {}
            given |= {"joint": lambda row, values: [0.0] * len(values)} if rule == "qmix" else {}
            level = {"level": "action"} if rule == "ppo" else {}
            if settings and (ALGORITHMS[rule].critic_reads and rule not in ("vdn", "qmix", "happo")):
                continue  # a critic discounts every turn of a chain
            assign(episodes, rule, normalize_advantages="none", **given, **settings, **level)
            found.append({(n, t.agent, t.env_step): t.advantages for n, e in enumerate(episodes) for t in e.turns})
        assert not found or found[0] == found[1]


def test_opponents_are_said_or_inferred():
    def first_move(**context):
        episodes = [play.episode(str(n)) for n, play in enumerate(plays(unavoidable_winner))]
        assign(episodes, "dr_mas", **context)
        return [episode.turns[0].advantages for episode in episodes], [e.turns[0].returns for e in episodes]

    inferred, said, team = first_move(), first_move(opponents=True), first_move(opponents=False)
    assert inferred == said and said[1][0] == [1.0] and team[1][0] == [0.0]


def table() -> str:
    """Cosine of every rule's expected gradient with the exact one, by tree."""
    names = [*TEAM, *AGAINST]
    lines = ["| rule | " + " | ".join(names) + " |", "|---" * (len(names) + 1) + "|"]
    for rule in RULES:
        cells = []
        for name in names:
            if name not in trees(rule):
                cells.append("-")
                continue
            right, found = gradients(rule, name)
            if size(right) < 1e-12:
                cells.append("0" if size(found) < 1e-9 else f"{size(found):.2f} for 0".lstrip("0"))
            else:
                cells.append(f"{cosine(right, found):.2f}".replace("0.", "."))
        lines.append(f"| `{rule}` | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def test_the_page_has_this_table():
    shown = PAGE.read_text().split("<!-- exact gradients -->\n")[1].split("\n<!-- end of exact gradients -->")[0]
    assert shown == table(), "python tests/algorithms/test_exact_gradient.py prints it"


# ------------------------------------------------------------------------------------- rounding, and what is unknown


def spoken(agent="a", index=0, reward=0.0, kl=None, tokens=1, **fields) -> Turn:
    turn = Turn(agent, [7], [3] * tokens, [-1.0] * tokens, "eos", "x", index, index, 0, reward=reward, **fields)
    if kl is not None:
        turn.ref_logprobs = [-1.0 - kl] * tokens
    return turn


@pytest.mark.parametrize("rule", ["dr_mas", "grpo", "at_grpo", "gdpo", "gigpo", "reinforce_pp", "ppo", "happo"])
def test_a_penalty_is_not_scaled_up_where_all_rewards_are_equal(rule):
    worst = 0.0
    for case in range(40):
        reward = 0.1 + 0.037 * case
        episodes = []
        for n in range(6):
            turn = spoken(reward=None, kl=0.013 * n + 0.0007 * case)
            turn.values = [0.0]
            episodes.append(Episode(str(n), "p", [turn], outcome=reward))
        how = {"normalize_advantages": ALGORITHMS[rule].normalize_advantages}
        if rule == "happo":
            for episode in episodes:
                episode.turns.append(spoken("b", 1, None, kl=0.01, values=[0.0]))
        assign(episodes, rule, kl_coef=0.05, kl_in="reward", **how)
        worst = max(worst, *(abs(a) for e in episodes for t in e.turns for a in t.advantages))
    assert worst < 0.02  # the penalties themselves differ by .05 * .065


@pytest.mark.parametrize("rule", [rule for rule in RULES if rule not in ("rae", "vdn", "qmix")])
def test_nor_where_several_agents_have_penalties(rule):
    """Of the rules that compare samples; others have a mean of their own."""
    episodes = []
    for n in range(6):
        turns = [spoken("a", 0, 0.3, kl=0.013 * n), spoken("b", 1, 0.3, kl=0.007 * n)]
        for turn in turns:
            turn.values = [0.0]
        episodes.append(Episode(str(n), "p", turns))
    given = {"overlong_buffer": 0.0} if rule == "dapo" else {}
    how = {"normalize_advantages": ALGORITHMS[rule].normalize_advantages}
    assign(episodes, rule, kl_coef=0.05, kl_in="reward", **how, **given)
    assert max(abs(a) for e in episodes for t in e.turns for a in t.advantages) < 0.05


def test_gdpo_keeps_the_coefficient_of_the_penalty_and_an_agents_own_weights():
    def spread(coef):
        episodes = [Episode(str(n), "p", [spoken(reward=float(n), kl=(n == 1) * 1.0)]) for n in range(3)]
        assign(episodes, "gdpo", kl_coef=coef, kl_in="reward")
        return episodes[1].turns[0].advantages[0]  # of the middle reward: 0 without the penalty

    small, large = spread(0.01), spread(0.5)
    assert abs(large) > 10 * abs(small) > 0
    # Rewards of the agent and the outcome disagree; with an own outcome weight of 3 the outcome decides.
    from mafrt.config.algorithm_groups import RewardSettings

    def first(**own):
        episodes = [Episode(str(n), "p", [spoken(reward=float(-n))], outcome=float(n)) for n in range(2)]
        assign(episodes, "gdpo", agent_rewards={"a": RewardSettings(**own)} if own else None)
        return episodes[1].turns[0].advantages[0]

    assert first() == 0.0 and first(outcome_weight=3.0) > 0.5 and first(reward_weight=3.0) < -0.5


def test_a_trajectory_alone_in_its_group_gets_0_with_several_turns():
    alone = Episode("0", "alone", [spoken(index=0, reward=1.0), spoken(index=1, reward=5.0)])
    others = [Episode(str(n), "p", [spoken(index=0, reward=float(n)), spoken(index=1)]) for n in (1, 2)]
    for form in ("to_go", "own"):
        assign([alone, *others], "reinforce_pp_baseline", turn_credit=form)
        assert [turn.advantages for turn in alone.turns] == [[0.0], [0.0]]
        assert others[0].turns[0].advantages != [0.0]


@pytest.mark.parametrize("rule", ["ppo", "marft", "mappo", "happo", "vdn", "cory", "ippo"])
def test_an_unknown_outcome_on_an_empty_last_turn_never_becomes_0(rule):
    turns = [spoken("a", 0, values=[0.5]), spoken("b", 1, values=[], tokens=0)]
    episode = Episode("0", "p", turns, outcome=math.nan)
    known = Episode("1", "p", [spoken("a", 0, values=[0.5])], outcome=1.0)
    assign([episode, known], rule)
    assert turns[0].advantages is None and known.turns[0].advantages is not None


@pytest.mark.parametrize(("rule", "name"), [("dr_mamr", "influence"), ("ccpo", "contribution")])
def test_one_unknown_number_leaves_the_others_of_its_group_in_the_loss(rule, name):
    for unknown in (math.nan, math.inf, None):
        episodes = [Episode(str(n), "p", [spoken("a"), spoken("b", 1)], outcome=float(n % 2)) for n in range(4)]
        for n, episode in enumerate(episodes):
            setattr(episode.turns[0], name, unknown if n == 2 else 0.4 + 0.1 * n)
        assign(episodes, rule)
        assert all(turn.advantages is not None for episode in episodes for turn in episode.turns)
        # Unknown says nothing: with every other equal, it is compared by the outcome alone.
        for n, episode in enumerate(episodes):
            setattr(episode.turns[0], name, unknown if n == 2 else 0.4)
        assign(episodes, rule)
        assert episodes[2].turns[0].advantages == pytest.approx(episodes[0].turns[0].advantages)


def test_gdpos_penalty_in_a_group_that_hardly_differs_leaves_the_other_groups_their_size():
    penalties = (0.1, -0.2, 0.05, 0.0)
    near = [Episode(f"n{n}", "near", [spoken(reward=1e-5 * n, kl=kl)]) for n, kl in enumerate(penalties)]
    far = [Episode(f"f{n}", "far", [spoken(reward=float(n % 2), kl=0.0)]) for n in range(4)]
    assign(near + far, "gdpo", kl_coef=0.05, kl_in="reward")
    assert min(abs(episode.turns[0].advantages[0]) for episode in far) > 0.4


@pytest.mark.parametrize("pay", [4.0, 8.0, 50.0])
@pytest.mark.parametrize("rule", ["reinforce_pp", "reinforce_pp_baseline"])
def test_equal_pay_above_the_clip_teaches_nothing(rule, pay):
    """Four turns of the same pay: the sum of what comes later is above `reward_clip`, and the same for all."""
    episodes = [Episode(str(n), "p", [spoken(index=i, reward=pay, kl=0.1 * n) for i in range(4)]) for n in range(3)]
    assign(episodes, rule, kl_coef=0.01)
    assert max(abs(advantage) for e in episodes for turn in e.turns for advantage in turn.advantages) < 0.01


def test_rewards_that_the_clip_makes_equal_do_not_scale_a_penalty_up():
    episodes = [Episode(str(n), "p", [spoken(reward=11 + 1e-4 * n, kl=0.1 * n)]) for n in range(4)]
    assign(episodes, "reinforce_pp", kl_coef=0.01)
    assert 0.0 < max(abs(episode.turns[0].advantages[0]) for episode in episodes) < 0.01


@pytest.mark.parametrize("rule", ["happo", "maporl"])
def test_nor_does_it_after_one_of_them_spoke_alone(rule):
    """a, then a and b at the same time, whose values differ, then a again."""
    found = []
    for order in (1, -1):
        both = [spoken("a", 1, 0.5, values=[0.3]), spoken("b", 1, 0.0, values=[0.9])][::order]
        turns = [spoken("a", 0, 1.0, values=[0.2]), *both, spoken("a", 2, -1.0, values=[0.1])]
        assign([Episode("0", "p", turns, 1.0)], rule, normalize_advantages="none")
        found.append({(turn.agent, turn.env_step): turn.advantages for turn in turns})
    assert found[0] == found[1]


def test_a_joint_step_without_words_is_in_no_loss_and_not_left_over():
    turns = [spoken("a", 0, values=[0.5]), spoken("a", 1, 2.0, values=[], tokens=0)]
    assign([Episode("0", "p", turns)], "happo", normalize_advantages="none")
    assert turns[0].returns == [2.0] and turns[1].advantages == []


def test_a_roles_mean_is_of_its_first_turns_alone():
    # The first turn is cut: what the second is paid from there on is no measure of an episode.
    from mafrt.algorithms.rewards import CreditContext

    turns = [spoken(index=0, reward=4.0), spoken(index=1, reward=1.0)]
    turns[0].stop = "length"
    context = CreditContext()
    assign([Episode("0", "p", turns)], "rae", context, mask_cut_turns=True, baseline_decay=0.5)
    assert turns[1].returns == [1.0] and context.memory == {}


if __name__ == "__main__":
    print(table())
