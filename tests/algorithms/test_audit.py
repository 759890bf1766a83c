"""Audits of credit: the worth of turns by replay, and metrics that tell perfect credit from shuffled credit."""

from __future__ import annotations

import random

import numpy as np
import pytest
from helpers_late import TEAM, Late, Uncopied, digit
from helpers_models import tiny_tokenizer

from mafrt import algorithms
from mafrt.algorithms.audit import audit_metrics
from mafrt.algorithms.stats import rank_correlation
from mafrt.core.errors import ConfigError
from mafrt.core.records import pack_turn, unpack_turn
from mafrt.core.types import SamplingParams
from mafrt.engines.scripted import ScriptedEngine
from mafrt.rollout.audit import ALTERNATIVES, REPLAYS, fill_audits
from mafrt.rollout.player import Player, Start
from mafrt.runners.checks import check_replays
from mafrt.storage import report


class Listened(Late):
    """a says x, b hears it, a says z; the outcome is the first number."""

    def step(self, actions):
        result = super().step(actions)
        return result._replace(info={"outcome": float(self.said[0])}) if result.terminated else result


def played(env, starts=40, *, echo=False):
    """Episodes of a scripted team; with `echo` an agent repeats the last digit that it sees."""
    tokenizer = tiny_tokenizer()
    how = dict.fromkeys(TEAM.names, SamplingParams(max_new_tokens=20))

    def say(request):
        seen = [c for c in tokenizer.decode(request.prompt_ids) if c.isdigit()]
        return seen[-1] if echo and seen else digit(request.seed)

    player = Player(ScriptedEngine(say, tokenizer), tokenizer, TEAM, how, 500)
    queue = iter([Start(f"e{i:02d}", f"g{i}", i, i) for i in range(starts)])
    episodes, _ = player.play([env], lambda slot, done: next(queue, None))
    return player, episodes


def audited(env, count=30, **how):
    player, episodes = played(env, **how)
    metrics = fill_audits(player, env, episodes, count, 1, 1.0, 1.0)
    return episodes, [turn for e in episodes for turn in e.turns if turn.audit], metrics


@pytest.mark.slow
def test_the_gain_is_the_turn_less_its_alternatives():
    _, turns, metrics = audited(Listened())
    assert metrics == {"audit_turns": 30.0, "audit_lost": 0.0} and len(turns) == 30
    assert 13 <= sum(turn.agent == "a" for turn in turns) <= 17
    first = [turn for turn in turns if turn.turn == 0]
    # The outcome is the first number alone: its gain has no noise, and no later turn has any.
    for turn in first:
        assert turn.audit.noise == 0.0 and abs(turn.audit.gain - int(turn.text)) <= 6
        # The mean of the alternatives, recomputed: whole numbers from 0 to 6 each.
        assert (int(turn.text) - turn.audit.gain) * ALTERNATIVES == pytest.approx(
            round((int(turn.text) - turn.audit.gain) * ALTERNATIVES)
        )
    assert all(turn.audit.gain == turn.audit.noise == 0.0 for turn in turns if turn.turn)
    late = [turn for turn in audited(Late())[1] if turn.turn == 0]
    assert any(turn.audit.noise > 0 for turn in late)  # there the later numbers count too


@pytest.mark.slow
def test_influence_tells_a_team_that_listens_from_one_that_does_not():
    def influence(echo):
        return [t.audit.influence for t in audited(Listened(), 60, echo=echo)[1] if t.turn == 0]

    # An echo differs if and only if the digit does, 6 times out of 7; without one the next digit is luck.
    assert np.mean(influence(True)) > 0.7 and abs(np.mean(influence(False))) < 0.2
    assert all(t.audit.influence is None for t in audited(Listened(), 60)[1] if t.turn == 2)


@pytest.mark.slow
def test_perfect_credit_has_fidelity_1_and_shuffled_credit_about_0():
    episodes, turns, _ = audited(Listened(), 120)
    first = [turn for turn in turns if turn.turn == 0]
    for turn in turns:
        turn.advantages = None
    for turn in first:
        turn.advantages = [turn.audit.gain] * len(turn.action_ids)
    metrics = audit_metrics(episodes)
    assert metrics["audit_fidelity/a"] == pytest.approx(1.0) and len(first) > 15
    assert metrics["audit_variance/a"] == pytest.approx(np.var([t.audit.gain for t in first], ddof=1))
    gains, chance, found = [turn.audit.gain for turn in first], random.Random(1), []
    for _ in range(100):
        chance.shuffle(gains)
        for turn, gain in zip(first, gains, strict=True):
            turn.advantages = [gain]
        found.append(audit_metrics(episodes)["audit_fidelity/a"])
    assert abs(np.mean(found)) < 0.1


@pytest.mark.slow
def test_the_rules_differ_where_credit_is_due():
    """c3 credits the turn that decides; the outcome of the whole team is luck for the turns that do not."""
    episodes, _, _ = audited(Listened(), 120)
    for episode in episodes:
        episode.group = "g"
    algorithms.assign(episodes, "dr_mas", outcome_to="all")
    metrics = audit_metrics(episodes)
    assert metrics["audit_fidelity/a"] > 0.3
    assert "audit_fidelity/b" not in metrics  # no turn of b is worth anything: there is nothing to agree with


def test_rank_correlation_against_numpy():
    rng = np.random.default_rng(0)
    x, y = rng.integers(0, 5, 40).astype(float), rng.normal(size=40)

    def ranks(v):
        return np.array([(v < one).sum() + ((v == one).sum() + 1) / 2 for one in v])

    assert rank_correlation(list(zip(x, y, strict=True))) == pytest.approx(np.corrcoef(ranks(x), ranks(y))[0, 1])
    assert rank_correlation([(1.0, 1.0), (1.0, 2.0)]) is None


def test_an_audit_survives_a_record():
    _, turns, _ = audited(Listened(), 3)
    assert unpack_turn(pack_turn(turns[0])) == turns[0] and REPLAYS == 2


def test_bad_input():
    rule = algorithms.algorithm("ppo")
    check_replays(Uncopied(), rule)
    with pytest.raises(ConfigError, match="audit_turns is 8, which plays turns again, and Uncopied cannot be"):
        check_replays(Uncopied(), rule, audit_turns=8)
    with pytest.raises(ConfigError, match="'spin' has none"):
        check_replays(Late(), algorithms.algorithm("spin"), audit_turns=8)


@pytest.mark.slow
def test_a_run_logs_its_audits_and_learns_the_same(tmp_path):
    import toy

    found = {}
    for turns in (0, 12):
        runner = toy.make(audit_turns=turns, n_rollout_threads=8, iterations=1, eval_episodes=0, ppo_epoch=1)
        runner.run(lambda progress, turns=turns: found.update({turns: dict(progress.metrics)}))
    assert found[12]["audit_turns"] == 12.0
    for name in ("audit_fidelity", "audit_variance", "audit_noise"):
        assert {f"{name}/first", f"{name}/second"} <= set(found[12])
    # Audits read and change nothing.
    assert {k: v for k, v in found[12].items() if not k.startswith("audit_")} == found[0]


def test_the_end_of_a_run_has_a_row_for_every_agent(tmp_path):
    (tmp_path / "metrics.jsonl").write_text(
        '{"iteration": 1, "audit_fidelity/a": 0.2, "audit_noise/b": 0.5, "audit_turns": 4}\n'
        '{"iteration": 2, "audit_fidelity/a": 0.4, "audit_noise/b": null}\n'
    )
    numbers = report.audits(tmp_path)
    assert numbers == {"audit_fidelity/a": pytest.approx(0.3), "audit_noise/b": 0.5}
    head, a, b = report.audit_table(numbers).splitlines()
    assert head.split() == ["credit,", "audited", "fidelity", "variance", "noise", "influence"]
    assert a.split() == ["a", "0.300", "-", "-", "-"] and b.split() == ["b", "-", "-", "0.500", "-"]
    assert report.audits(tmp_path / "none") == {}
