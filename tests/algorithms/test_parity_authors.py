"""Multi-agent rules against frozen outputs of their authors' code.

As a script it renews the list in bench/results/algorithms.md.

The tables are made by bench/reproduce/parity_authors.py; deviations that the list states are asserted here too.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from helpers_losses import clipped_loss

from mafrt.algorithms import assign
from mafrt.algorithms.audit import audit_metrics
from mafrt.algorithms.happo import CompoundRatio
from mafrt.core.types import Audit, Episode, Turn

FOLDER = Path(__file__).parents[1] / "parity"
DOCS = Path(__file__).parents[2] / "bench" / "results" / "algorithms.md"
BEGIN, END = "<!-- parity -->\n", "<!-- end of parity -->"
COMPARISONS = json.loads((FOLDER / "comparisons.json").read_text(encoding="utf-8"))
TABLES = {name: json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8")) for name in COMPARISONS}


def cases(name):
    return [(row["input"], row["output"]) for row in TABLES[name]["cases"]]


def markdown():
    lines = ["| authors' code | here | result |", "|---|---|---|"]
    for name, rows in COMPARISONS.items():
        source = TABLES[name]["source"]
        lines.append(f"| **{source['repository']}** at `{source['commit'][:10]}` | | |")
        lines += [f"| {theirs} | {here} | {result} |" for theirs, here, result in rows]
    return "\n".join(lines) + "\n"


def test_the_list_of_the_page_is_that_of_the_data():
    page = DOCS.read_text(encoding="utf-8")
    assert page.partition(BEGIN)[2].partition(END)[0] == markdown(), (
        "run: python tests/algorithms/test_parity_authors.py"
    )
    assert {path.stem for path in FOLDER.glob("*.json")} == {*COMPARISONS, "comparisons"}
    assert all(len(table["source"]["commit"]) == 40 for table in TABLES.values())


def spoken(agent, number, *, old=-1.0, reward=None, value=0.0):
    return Turn(agent, [1], [2], [old], "eos", "x", number, number, 0, reward=reward, values=[value])


@pytest.mark.parametrize(("case", "theirs"), cases("harl"))
def test_happo(case, theirs):
    agents, steps = len(case["old"]), len(case["values"])
    turns = [
        spoken(
            f"a{agent}",
            step * agents + agent,
            old=case["old"][agent][step],
            reward=case["rewards"][step] if agent == agents - 1 else 0.0,
            value=case["values"][step],
        )
        for step in range(steps)
        for agent in range(agents)
    ]
    episode = Episode("e", "g", turns)
    assign([episode], "happo", gamma=1.0, gae_lambda=1.0, normalize_advantages="none")
    ratio = CompoundRatio([episode], low=0.01, high=100.0)
    for agent in range(agents):
        own = range(agent, steps * agents, agents)
        weights = [ratio.weights()[place] for place in own]
        advantages = [turns[place].advantages[0] for place in own]
        assert weights == pytest.approx(theirs["factors"][agent], abs=1e-6)
        assert advantages == pytest.approx(theirs["advantages"][agent], abs=1e-9)
        new, old = torch.tensor(case["new"][agent]).double(), torch.tensor(case["old"][agent]).double()
        loss, _ = clipped_loss(
            new,
            old,
            torch.tensor(advantages).double(),
            denominator=steps,
            turn=torch.arange(steps),
            weights=torch.tensor(weights).double(),
        )
        assert float(loss) == pytest.approx(theirs["losses"][agent], abs=1e-6)
        ratio.update((place, [case["new"][agent][step]]) for step, place in enumerate(own))


def worth(rounds, alphas):
    turns = [
        spoken("abc"[agent], t * len(scores) + agent, reward=score)
        for t, scores in enumerate(rounds)
        for agent, score in enumerate(scores)
    ]
    assign([Episode("e", "g", turns)], "maporl", normalize_advantages="none", **alphas)
    return torch.tensor([turn.advantages[0] for turn in turns]).reshape(len(rounds), -1)


@pytest.mark.parametrize(("case", "theirs"), cases("maporl"))
def test_maporl(case, theirs):
    plain = worth(case["rounds"], {})
    own = dict(zip(("alpha0", "alpha1"), case["alpha"][:2], strict=True))
    others = dict(zip(("alpha2", "alpha3"), case["alpha"][2:], strict=True))
    # Deviation: the sign of the influence. Bonuses of 1 and 10 are of own changes, of 100 and 1000 of influence.
    ours = (worth(case["rounds"], own) - plain) - (worth(case["rounds"], others) - plain)
    # Deviation: their first round pays nothing, where ours pays for influence.
    assert not any(theirs["bonuses"][0])
    for t, (row, wanted) in enumerate(zip(ours.tolist()[1:], theirs["bonuses"][1:], strict=True), 1):
        for agent, (mine, their) in enumerate(zip(row, wanted, strict=True)):
            if not undecided(case["rounds"], t, agent):
                # Theirs adds .001 to a bonus of exactly -1, which marks a finished question there.
                assert mine == pytest.approx(their, abs=2e-3), (t, agent)


def undecided(rounds, t, agent):
    """Whether the others' mean is the threshold in a round that the bonus looks at: the deviation of the list."""
    near = [rounds[k] for k in (t - 1, t, t + 1) if 0 <= k < len(rounds)]
    means = [sum(s for place, s in enumerate(some) if place != agent) / (len(some) - 1) for some in near]
    return any(abs(value - 0.5) < 1e-9 for value in means)


def test_the_table_of_maporl_has_every_kind_of_bonus_and_few_undecided_ones():
    found = [b for _, out in cases("maporl") for some in out["bonuses"] for b in some]
    assert {1.0, 10.0, 100.0, 1000.0} <= {abs(round(b)) for b in found}
    places = [(c["rounds"], t, a) for c, _ in cases("maporl") for t in range(3) for a in range(len(c["rounds"][0]))]
    assert sum(undecided(*place) for place in places) < len(places) / 3


@pytest.mark.parametrize(("case", "theirs"), cases("pettingllms"))
def test_the_groups_of_at_grpo(case, theirs):
    episodes = {}
    for (rollout, _, agent), reward in zip(case["rows"], case["rewards"], strict=True):
        group = f"p{rollout // case['samples']}"
        episode = episodes.setdefault(rollout, Episode(f"{rollout:02d}", group))
        episode.turns.append(spoken("ab"[agent], len(episode.turns), reward=reward))
    assign(list(episodes.values()), "at_grpo", turn_credit="own")
    turns = [turn for episode in episodes.values() for turn in episode.turns]
    groups: dict[int, list[int]] = {}
    for place, group in enumerate(theirs["groups"]):
        groups.setdefault(group, []).append(place)
    for places in groups.values():
        rewards = torch.tensor([case["rewards"][place] for place in places], dtype=torch.float64)
        alone = len(places) == 1
        wanted = torch.zeros(1) if alone else (rewards - rewards.mean()) / (rewards.std() + 1e-6)
        assert [turns[place].advantages[0] for place in places] == pytest.approx(wanted.tolist(), abs=1e-6)


@pytest.mark.parametrize(("case", "theirs"), cases("c3"))
def test_c3(case, theirs):
    branches = [
        Episode(f"e/{n}", "g", [spoken("a", 0)], outcome=value, info={"alternative": n, "ended": "terminated"})
        for n, value in enumerate(case["returns"])
    ]
    assign(branches, "c3", outcome_to="end")
    assert [b.turns[0].advantages[0] for b in branches] == pytest.approx(theirs["advantages"], abs=1e-9)
    audited = []
    for advantage, gain in case["pairs"]:
        turn = spoken("a", 0)
        turn.advantages, turn.audit = [advantage], Audit(gain, 0.0, None)
        audited.append(turn)
    assert audit_metrics([Episode("e", "g", audited)])["audit_fidelity/a"] == pytest.approx(theirs["fidelity"])


@pytest.mark.parametrize(("case", "theirs"), cases("ccpo"))
def test_ccpo(case, theirs):
    episodes = []
    for number, (joint, solo) in enumerate(zip(case["joint"], case["solo"], strict=True)):
        turn = spoken("thinker", 0)
        turn.contribution = (joint - solo) / 2  # of outcomes 0 and 1
        episodes.append(Episode(str(number), "g", [turn], outcome=(joint + 1) / 2))
    assign(episodes, "ccpo")
    wanted = torch.tensor(theirs["thinker"], dtype=torch.float64)
    rewards = [episode.turns[0].returns[0] for episode in episodes]
    assert [2 * reward - 1 for reward in rewards] == pytest.approx(wanted.tolist(), abs=1e-6)
    # GRPO's advantages of both are the same, since they do not see the scale.
    scaled = (wanted - wanted.mean()) / (wanted.std() + 1e-6)
    assert [e.turns[0].advantages[0] for e in episodes] == pytest.approx(scaled.tolist(), abs=1e-5)


if __name__ == "__main__":
    page = DOCS.read_text(encoding="utf-8")
    head, _, rest = page.partition(BEGIN)
    DOCS.write_text(head + BEGIN + markdown() + END + rest.partition(END)[2], encoding="utf-8")
