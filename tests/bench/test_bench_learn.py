"""A few rules on the shipped base, one seed each: they raise the held-out score. The whole table is
`mafrt bench learn --algorithm all`."""

from __future__ import annotations

import statistics

import pytest

from bench import learn
from bench._tasks import DebateEnv, RetryEnv, SolverPairEnv, TwoRoundEnv
from mafrt import algorithms
from mafrt.environment.checker import check_env
from mafrt.environment.session import session_of

pytestmark = pytest.mark.takes(slow=30)


def test_every_family_has_a_task_and_groups_are_told_apart_by_theirs():
    assert {learn.task_of(name) for name in algorithms.ALGORITHMS} == set(learn.TASKS)
    own = {"at_grpo": "rounds", "gigpo": "retry", "qmix": "pair", "ppo": "chain"}
    assert {name: learn.task_of(name) for name in own} == own


@pytest.mark.parametrize("kind", [TwoRoundEnv, RetryEnv, SolverPairEnv, DebateEnv])
def test_tasks_keep_the_contract_of_environments(kind):
    check_env(kind("test"), seeds=(0,))


def test_rounds_pay_each_turn_at_once_and_unequally():
    env = session_of(TwoRoundEnv("test"))
    env.reset(seed=1, options={"task": 0})
    answer = env.task.answer
    right = env.step({"reasoner": f"Add {answer} and 0."})
    assert right.rewards == {"reasoner": 10.0} and not right.terminated
    wrong = env.step({"actor": "\\boxed{-1}"})
    assert wrong.rewards == {"actor": 0.0} and not wrong.terminated
    assert env.step({"reasoner": "Think."}).rewards == {"reasoner": 0.0}
    last = env.step({"actor": f"\\boxed{{{answer}}}"})
    assert last.rewards == {"actor": 1.0} and last.terminated and last.info["outcome"] == 1.0


def test_a_second_try_begins_in_the_very_state_of_the_first():
    env = session_of(RetryEnv("test"))
    first, _ = env.reset(seed=1, options={"task": 0})
    asked = env.step({"reasoner": "Think."}).observations
    again = env.step({"actor": "\\boxed{-1}"})
    assert again.observations == first and not again.terminated
    assert env.step({"reasoner": "Think."}).observations == asked
    last = env.step({"actor": f"\\boxed{{{env.task.answer}}}"})
    assert last.terminated and last.info["outcome"] == 1.0
    env.reset(seed=1, options={"task": 0})
    for text in ("Think.", "\\boxed{-1}") * 2:
        assert not env.done
        last = env.step({"reasoner" if text == "Think." else "actor": text})
    assert last.terminated and last.info["outcome"] == 0.0


def test_rules_for_groups_differ_on_their_task_and_would_not_on_the_chain():
    """Reasoner right and wrong, Actor wrong in both: GRPO blames the Actor as well, Dr. MAS does not."""
    from mafrt.core.types import Episode, Turn

    def episode(name: str, plan: float) -> Episode:
        spoken = [("reasoner", plan), ("actor", 0.0)]
        turns = [Turn(a, [1], [2], [-1.0], "eos", "x", i, i, 0, reward=r) for i, (a, r) in enumerate(spoken)]
        return Episode(name, "p", turns, outcome=0.0)

    def actor(rule: str) -> list[float]:
        episodes = [episode("0", 10.0), episode("1", 0.0)]
        algorithms.assign(episodes, rule, outcome_weight=0.0)
        return [e.turns[1].advantages[0] for e in episodes]

    assert actor("grpo") == pytest.approx([0.7071, -0.7071], abs=1e-4)
    assert actor("dr_mas") == actor("at_grpo") == [0.0, 0.0]


@pytest.mark.nightly
@pytest.mark.ci
@pytest.mark.slow
@pytest.mark.parametrize("rule", ["qmix", "at_grpo"])
def test_the_held_out_score_rises(rule):
    # That reinforce_pp learns the chain is tests/envs/test_quickstart_math.py.
    found = learn.margin([learn.train(rule, seed=1, iterations=4, tasks=32, samples=1)])
    assert found["margin"] >= 0.1 and found["low"] > 0, found


def test_a_run_that_was_stopped_has_no_result():
    from mafrt.core.errors import MafrtError
    from mafrt.runners.loop import RunSummary

    learn.whole_or_nothing(RunSummary(None, None, 16, 1.0, None, None), 16)
    with pytest.raises(MafrtError, match="stopped by SIGTERM after 7 of 16 iterations"):
        learn.whole_or_nothing(RunSummary(None, None, 7, 1.0, None, "SIGTERM"), 16)


def test_the_interval_of_a_margin_clusters_by_seed():
    """Gains of .1, .3 and .5 by seed, the same on each of 128 tasks, so all spread lies between the seeds.

    A resample of three seeds has a mean below .17 in 1 + 3 of 27 cases (4 / 27 = 14.8%) and equals .1 in 1 of 27
    (3.7%), so the 95% interval is .1 to .5. Pooled, 384 tasks have a standard error of .163 / sqrt(384) = .0083, and
    the interval would be .0327 wide.
    """
    tasks = [str(number) for number in range(128)]
    results = [
        learn.Result("ppo", seed, dict.fromkeys(tasks, 0.2), dict.fromkeys(tasks, 0.2 + gain), 1.0)
        for seed, gain in enumerate((0.1, 0.3, 0.5))
    ]
    found = learn.margin(results)
    assert found["margin"] == pytest.approx(0.3)
    assert found["low"] == pytest.approx(0.1) and found["high"] == pytest.approx(0.5)
    gains = [r.after[task] - r.before[task] for r in results for task in tasks]
    pooled = 2 * 1.96 * statistics.pstdev(gains) / len(gains) ** 0.5
    assert found["high"] - found["low"] > 2 * pooled


def test_tasks_within_a_seed_are_resampled_too():
    """One seed whose tasks gain 0 and 1 in equal parts: the interval is that of the mean of 100 such tasks.

    Its standard error is .5 / sqrt(100) = .05.
    """
    after = {str(number): float(number % 2) for number in range(100)}
    found = learn.margin([learn.Result("ppo", 1, dict.fromkeys(after, 0.0), after, 1.0)])
    assert found["margin"] == pytest.approx(0.5)
    assert found["high"] - found["low"] == pytest.approx(2 * 1.96 * 0.05, rel=0.15)
