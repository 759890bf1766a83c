"""Our rules against frozen outputs of the authors' own code (tests/parity, made by bench/reproduce/parity_tables.py).

Known deviations are asserted too, so that they are as bench/results/algorithms.md states them.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
import torch
from helpers_losses import clipped_loss

from mafrt.algorithms import assign
from mafrt.core.types import Episode, Turn

TABLE = json.loads((Path(__file__).parents[1] / "parity" / "verl_core_algos.json").read_text(encoding="utf-8"))
CASES = [(row["input"], row["output"]) for row in TABLE["cases"]]


def episodes_of(case):
    episodes = []
    for place, (group, length) in enumerate(zip(case["groups"], case["lengths"], strict=True)):
        turn = Turn("a", [1], [2] * length, [-0.5] * length, "eos", "x", 0, 0, 0)
        turn.values = list(case["values"][place])
        episodes.append(Episode(f"{place:02d}", f"g{group}", [turn], outcome=case["scores"][place]))
    return episodes


def advantages(case, rule, **settings):
    episodes = episodes_of(case)
    assign(episodes, rule, **settings)
    return [episode.turns[0].advantages for episode in episodes], [episode.turns[0].returns for episode in episodes]


def flat(rows):
    return [number for row in rows for number in row]


def test_the_table_says_where_it_is_from():
    assert TABLE["source"]["repository"] == "volcengine/verl" and len(TABLE["source"]["commit"]) == 40


@pytest.mark.parametrize("rule", ["grpo", "dr_grpo", "rloo"])
@pytest.mark.parametrize(("case", "theirs"), CASES)
def test_group_rules(case, theirs, rule):
    ours, _ = advantages(case, rule)
    sizes = Counter(case["groups"])
    for place, row in enumerate(theirs[rule]):
        if sizes[case["groups"][place]] == 1:
            # Deviation: verl gives a group of one its raw score; alone there is nothing to compare with, ours is 0.
            assert row == pytest.approx([case["scores"][place]] * len(row), abs=1e-5) and not any(ours[place])
        else:
            assert ours[place] == pytest.approx(row, abs=1e-5)


@pytest.mark.parametrize(("case", "theirs"), CASES)
def test_gae(case, theirs):
    raw, returns = advantages(case, "ppo", gamma=1.0, gae_lambda=0.95, normalize_advantages="none")
    # Their advantages are whitened over the batch's tokens, with the unbiased variance and 1e-8 under the root.
    assert flat(returns) == pytest.approx(flat(theirs["gae_returns"]), abs=1e-9)
    numbers = torch.tensor(flat(raw), dtype=torch.float64)
    white = (numbers - numbers.mean()) * torch.rsqrt(numbers.var() + 1e-8)
    assert white.tolist() == pytest.approx(flat(theirs["gae"]), abs=1e-6)


@pytest.mark.parametrize(("case", "theirs"), CASES)
def test_reinforce_plus_plus(case, theirs):
    ours, _ = advantages(case, "reinforce_pp", gamma=1.0)
    ratio = torch.tensor(flat(theirs["reinforce_pp"])) / torch.tensor(flat(ours))
    tokens = len(flat(ours))
    # Deviation: our deviation divides by the number of tokens, theirs by one less; a constant factor.
    assert ratio.tolist() == pytest.approx([((tokens - 1) / tokens) ** 0.5] * tokens, rel=1e-4)


@pytest.mark.parametrize(("case", "theirs"), CASES[:3])
def test_aggregation_is_verls_token_mean(case, theirs):
    ours, _ = advantages(case, "dr_grpo")
    numbers = torch.tensor(flat(ours))
    zeros = torch.zeros_like(numbers)
    row = torch.tensor([place for place, some in enumerate(ours) for _ in some])
    loss, _ = clipped_loss(zeros, zeros, numbers, denominator=len(numbers), turn=row)
    assert float(loss) == pytest.approx(theirs["aggregated"]["token-mean"], abs=1e-6)
    # The other modes weigh sequences, and differ on these batches.
    assert abs(float(loss) - theirs["aggregated"]["seq-mean-token-sum"]) > 1e-3
