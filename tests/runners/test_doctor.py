"""The doctor names what is wrong with a run, with the offending text and a remedy; each fault is injected here."""

from __future__ import annotations

import json

import pytest
from toy import Digits, settings

from mafrt import Env, StepResult
from mafrt.config.team import Team
from mafrt.core.types import Episode, Scored, Turn
from mafrt.rollout.player import PlayStats
from mafrt.runners.algorithm import resolve_rule
from mafrt.runners.collect import batch_metrics
from mafrt.runners.doctor import WINDOW, Doctor
from mafrt.runners.on_policy import OnPolicy


def episode(reward=None, outcome=None, text="so 7", coach=None):
    turn = Turn("solver", [1], [2, 3], [-0.1, -0.2], "eos", text, turn=0, env_step=0, adapter_version=0)
    turn.reward, turn.coach = reward, coach
    return Episode("e", "g", [turn], outcome=outcome)


GOOD = [episode(outcome=0.0), episode(outcome=1.0)]
HEALTHY = {
    "score": 0.5,
    "entropy/solver": 1.0,
    "kl/solver": 0.01,
    "ref_kl/solver": 0.1,
    "explained_variance/solver": 0.3,
    "groups_no_spread": 0.3,
    "truncated_share/solver": 0.05,
    "env_lost_share": 0.0,
    "ratio_mean/solver": 1.0,
    "rollbacks": 0.0,
}


def names(iterations, episodes=GOOD):
    doctor = Doctor(["solver"])
    for number, metrics in enumerate(iterations, start=1):
        doctor.look(number, metrics, episodes)
    return set(doctor.diagnoses)


def test_a_healthy_run_has_no_findings():
    assert names([HEALTHY] * 20) == set()
    assert names([{}], []) == set()


@pytest.mark.parametrize(
    "change, name",
    [
        ({"explained_variance/solver": -7.0}, "harmful_critic/solver"),
        ({"kl/solver": 3.0}, "kl_explosion/solver"),
        ({"ref_kl/solver": 20.0}, "kl_explosion/solver"),
        ({"groups_no_spread": 1.0}, "groups_without_spread"),
        ({"truncated_share/solver": 0.8}, "truncated/solver"),
        ({"env_lost_share": 0.2}, "lost_episodes"),
        ({"engine_gap/solver": 2.0}, "engine_gap/solver"),
        ({"engine_gap/solver": 2.0, "staleness/solver": 1.0}, "stale_samples/solver"),
        ({"ratio_mean/solver": 0.01}, "stale_samples/solver"),
        ({"ratio_mean/solver": 40.0}, "stale_samples/solver"),
        ({"rollbacks": 1.0}, "not_finite"),
        ({"skipped_updates": 2.0}, "not_finite"),
        ({"flat_returns/solver": 1.0}, "flat_returns/solver"),
    ],
)
def test_each_symptom_has_its_diagnosis_and_a_remedy(change, name, caplog):
    ill = {**HEALTHY, **change}
    assert names([ill] * WINDOW) == {name}
    assert "Remedy: " in caplog.text
    assert caplog.text.count("Remedy: ") == 1  # said once, however long it lasts


def test_a_symptom_that_has_to_last_is_no_diagnosis_at_once():
    for change in ({"explained_variance/solver": -7.0}, {"groups_no_spread": 1.0}, {"flat_returns/solver": 1.0}):
        assert names([{**HEALTHY, **change}] * (WINDOW - 1)) == set()


def test_a_collapsed_entropy_counts_only_where_the_score_is_low():
    fallen = {**HEALTHY, "entropy/solver": 0.001, "score": 0.1}
    assert names([{**HEALTHY, "score": 0.1}, *[fallen] * WINDOW]) == {"entropy_collapse/solver"}
    learnt = {**HEALTHY, "entropy/solver": 0.001, "score": 0.99}
    assert names([HEALTHY, *[learnt] * WINDOW]) == set()


def test_equal_rewards_are_named_with_the_last_answer():
    doctor = Doctor(["solver"])
    flat = [episode(outcome=0.0, text=f"answer {n}\n\x1b[31m") for n in range(32)]
    (found,) = doctor.look(1, HEALTHY, flat)
    assert found.name == "equal_rewards" and "All 32 rewards were 0; nothing to learn" in found.sentence
    assert "answer 31" in found.sentence and "\x1b" not in found.sentence
    assert doctor.look(2, HEALTHY, flat) == [] and "2 times" in doctor.lines()[0]
    assert names([HEALTHY], [episode(outcome=1.0)] * 8) == set()  # everything solved is success
    assert names([HEALTHY], [episode(outcome=0.0, coach=Scored(5.0, "ok"))] * 8) == set()  # the coach tells them apart


def test_an_environment_that_never_pays_is_named():
    assert names([HEALTHY], [episode()] * 4) == {"no_reward"}


def test_a_held_out_score_that_falls_beyond_its_interval():
    doctor = Doctor(["solver"])
    assert doctor.look_at_evaluation(0, {"eval/avg@4": 0.5, "eval/greedy": 0.6}, 200) == []
    assert doctor.look_at_evaluation(5, {"eval/avg@4": 0.46}, 200) == []
    (found,) = doctor.look_at_evaluation(10, {"eval/avg@4": 0.1}, 200)
    assert found.name == "falling_score" and "0.500 to 0.100" in found.sentence
    assert Doctor([]).look_at_evaluation(0, {}, 0) == []


class Silent(Env):
    """Pays nobody."""

    agents = ("first",)

    def reset(self, seed=None, options=None):
        return {"first": "Say anything."}, {}

    def step(self, actions):
        return StepResult({}, {}, True, False, {"outcom": 1.0})


@pytest.mark.slow
def test_a_run_says_it_live_and_in_its_summary(tmp_path, caplog):
    from helpers_models import tiny_base

    config = settings(iterations=2, eval_episodes=0, n_samples=1, n_rollout_threads=4)
    runner = OnPolicy(Silent(), Team.of(["first"]), tiny_base(), config, run_dir=tmp_path / "run")
    summary = runner.run()
    assert any("nothing to learn" in finding for finding in summary.findings)
    assert "None of 4 episodes has a reward" in caplog.text
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["iteration"] for line in lines] == [1, 2]


@pytest.mark.parametrize("limit, share", [(1, 0.0), (2, 1.0)])
def test_an_answer_of_one_token_is_not_cut(limit, share):
    team = Team.of(["solver"])
    cut = Turn(
        "solver", [1], [2, 3][:limit], [-0.1, -0.2][:limit], "length", "7", turn=0, env_step=0, adapter_version=0
    )
    played = [Episode("e", "g", [cut], outcome=1.0)]
    found = batch_metrics(resolve_rule(settings(), team), team, played, [cut], PlayStats())
    assert found["truncated_share/solver"] == share


@pytest.mark.slow
def test_a_run_that_learns_has_no_findings(tmp_path):
    from helpers_models import tiny_base

    runner = OnPolicy(Digits(), Team.of(Digits.agents), tiny_base(), settings(iterations=3))
    assert [name for name in runner.run().findings if "were cut at max_new_tokens" not in name] == []
