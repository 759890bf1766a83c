"""Proposer and solver: the grammar, the value, and a reward that peaks where the solver succeeds half of the time."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from helpers_warm import run_python

from mafrt import algorithms
from mafrt.core.errors import ConfigError
from mafrt.core.types import Episode, Turn
from mafrt.environment.checker import check_env
from mafrt.environment.registry import make_env
from mafrt.envs.games import ProposeSolve
from mafrt.envs.games.propose_solve import learnability, read_task, value


def test_the_contract_holds():
    check_env(make_env("propose_solve"))


@pytest.mark.parametrize(
    ("text", "result"),
    [("7 + 1", 8), ("7-10", -3), ("2 + 3*7.", 23), ("7*7*7*7", 2401), ("9 - 2*3 - 7", -4), (" 7 * 0 + 5 ", 5)],
)
def test_tasks_of_the_grammar_have_their_value(text, result):
    assert value(read_task(text, 7)) == result


def test_the_value_agrees_with_pythons_own_arithmetic():
    chance = random.Random(1)
    for _ in range(500):
        parts = [str(chance.randint(0, 999))]
        for _ in range(chance.randint(1, 3)):
            parts += [chance.choice("+-*"), str(chance.randint(0, 999))]
        assert value(parts) == eval(" ".join(parts))  # noqa: S307 - the test wrote the text itself


@pytest.mark.parametrize(
    "text",
    ["", "7", "8 + 1", "7 / 1", "7 ** 9", "(7 + 1)", "7 + 1 = 8", "7 + 1000", "7+1+1+1+1", "77 + 1", "__import__('os')",
     "Task: 7 + 1", "٧ + 7", "7 + -1", "7 + 1\n7 + 2"],
)  # fmt: skip
def test_everything_else_is_no_task_and_pays_nothing(text):
    assert read_task(text, 7) is None
    game = ProposeSolve()
    game.rng.seed(1)
    game.reset()
    game.given = 7
    result = game.step({"proposer": text})
    assert result.terminated and result.rewards == {"proposer": 0.0} and result.info["measures"]["valid"] == 0.0


def played(rights, given=7, task="7 + 5"):
    """Rewards of the proposer and of each attempt, for scripted attempts."""
    game = ProposeSolve(attempts=len(rights))
    game.rng.seed(1)
    game.reset()
    game.given = given
    result, solver = game.step({"proposer": task}), []
    for right in rights:
        assert result.observations == {"solver": "Compute 7 + 5."} and not result.terminated
        result = game.step({"solver": "so it is 12" if right else "it is 7 + 5"})
        solver.append(result.rewards["solver"])
    assert result.terminated and solver == [float(right) for right in rights]
    return result.rewards["proposer"]


def test_the_proposers_reward_peaks_at_one_half():
    rewards = [played([True] * right + [False] * (8 - right)) for right in range(9)]
    # 4 p (1 - p) at eighths: 4 * 1/8 * 7/8 = .4375, 4 * 1/4 * 3/4 = .75, 4 * 3/8 * 5/8 = .9375.
    assert rewards == [0.0, 0.4375, 0.75, 0.9375, 1.0, 0.9375, 0.75, 0.4375, 0.0]


def test_credit_prefers_the_task_of_middling_difficulty():
    """Three proposals for one number; the solver is right in 0, 2 and 4 of 4 attempts."""
    episodes = []
    for number, right in enumerate((0, 2, 4)):
        turn = Turn("proposer", [1], [2], [-0.1], "eos", "x", 0, 0, 0, reward=learnability(right, 4))
        episodes.append(Episode(str(number), "use 7", [turn]))
    algorithms.assign(episodes, "dr_mas")
    easy, middle, hard = (episode.turns[0].advantages[0] for episode in episodes)
    assert middle > 0 > easy == hard


def test_bad_settings():
    with pytest.raises(ConfigError, match="attempts is 1"):
        ProposeSolve(attempts=1)
    with pytest.raises(ConfigError, match="largest is 5000"):
        ProposeSolve(largest=5000)


@pytest.mark.slow
@pytest.mark.ci
def test_the_example_trains_both():
    script = Path(__file__).parents[2] / "examples" / "propose_solve.py"
    done = run_python(script, "1", "8", "20")
    assert done.returncode == 0, done.stderr
    assert "after:" in done.stdout
