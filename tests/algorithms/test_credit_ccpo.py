"""CCPO: contributions recomputed from the rules of a game, and the formula with numpy."""

from __future__ import annotations

import numpy as np
import pytest
from helpers_late import TEAM, Late, Paid, Uncopied, digit
from helpers_models import tiny_tokenizer

from mafrt import algorithms
from mafrt.core.errors import ConfigError
from mafrt.core.records import pack_episode, unpack_episode
from mafrt.core.types import Episode, SamplingParams, Turn
from mafrt.engines.scripted import ScriptedEngine
from mafrt.environment.registry import make_env
from mafrt.rollout.left_out import fill_contributions
from mafrt.rollout.player import Player, Start
from mafrt.runners.checks import check_replays

CCPO = algorithms.algorithm("ccpo")


def played(env, starts=4, group="g"):
    tokenizer = tiny_tokenizer()
    how = dict.fromkeys(TEAM.names, SamplingParams(max_new_tokens=20))
    player = Player(ScriptedEngine(lambda r: digit(r.seed), tokenizer), tokenizer, TEAM, how, 500)
    queue = iter([Start(f"e{i}", group, i, i) for i in range(starts)])
    episodes, _ = player.play([env], lambda slot, done: next(queue, None))
    return player, episodes


@pytest.mark.parametrize(("env", "reward", "outcome"), [(Late, 1.0, 1.0), (Late, 0.0, 0.5), (Paid, 2.0, 0.1)])
def test_a_contribution_is_what_is_lost_without_the_agent(env, reward, outcome):
    player, episodes = played(env())
    metrics = fill_contributions(player, env(), episodes, reward, outcome)

    def worth(x, y, z):  # Paid: half of each number at once, and 1 for a when b has spoken
        rewards = (x + y + z) / 2 + 1 if env is Paid else 0.0
        return reward * rewards + outcome * (100 * x + 10 * y + z)

    said = [[int(turn.text) for turn in episode.turns] for episode in episodes]
    # The others say what they said, since their random numbers are the same; a silent agent counts as 0.
    without = {"a": [worth(0, y, 0) for x, y, z in said], "b": [worth(x, 0, z) for x, y, z in said]}
    for number, (episode, (x, y, z)) in enumerate(zip(episodes, said, strict=True)):
        for turn in episode.turns:
            assert turn.contribution == pytest.approx(worth(x, y, z) - without[turn.agent][number])
    assert metrics["left_out/a"] == pytest.approx(np.mean(without["a"])) and metrics["left_out_lost"] == 0.0


def test_an_episode_that_goes_another_way_is_counted_and_never_guessed():
    class Moody(Late):
        def reset(self, seed=None, options=None):
            first, info = super().reset()
            return (first if not played_before else {"b": "-"}), info

    played_before = []
    player, episodes = played(Moody(), starts=2)
    played_before.append(True)
    metrics = fill_contributions(player, Moody(), episodes, 1.0, 1.0)
    assert metrics["left_out_lost"] > 0
    assert all(turn.contribution is None for episode in episodes for turn in episode.turns if turn.agent == "b")


def test_the_formula():
    rng = np.random.default_rng(0)
    episodes, totals, bonus = [], [], []
    for number in range(4):
        turns = []
        own = {"a": rng.normal(), "b": rng.normal()}
        for place, agent in enumerate("aba"):
            turn = Turn(agent, [1], [2, 3], [-0.1] * 2, "eos", "x", place, place, 0, float(place == 1))
            turn.contribution = own[agent]
            turns.append(turn)
        episodes.append(Episode(str(number), "p", turns, outcome=float(number % 2)))
        totals.append(1.0 + number % 2)
        bonus.append(own)
    metrics = algorithms.assign(episodes, "ccpo", contribution_weight=0.5)
    for agent in "ab":
        rewards = np.array(totals) + 0.5 * np.array([own[agent] for own in bonus])
        wanted = (rewards - rewards.mean()) / (rewards.std(ddof=1) + 1e-6)
        for episode, number in zip(episodes, wanted, strict=True):
            for turn in episode.turns:
                assert turn.agent != agent or turn.advantages == pytest.approx([number] * 2)
        assert metrics[f"contribution/{agent}"] == pytest.approx(np.mean([own[agent] for own in bonus]))


def test_environments_that_cannot_serve_it_are_refused_before_a_model_is_loaded():
    check_replays(Late(), CCPO)
    check_replays(Uncopied(), algorithms.algorithm("ccpo", contribution_weight=0.0))
    with pytest.raises(ConfigError, match=r"'ccpo' .*Uncopied cannot be played again .*from self.rng"):
        check_replays(Uncopied(), CCPO)
    with pytest.raises(ConfigError, match="in one process; start one instead of 2"):
        check_replays(Late(), CCPO, 2)

    class Alone(Late):
        agents = ("a",)

    with pytest.raises(ConfigError, match="Alone has one agent"):
        check_replays(Alone(), CCPO)


@pytest.mark.parametrize("name", ["math", "referential", "plan_path", "sudoku", "sokoban", "haggle", "tic_tac_toe"])
def test_the_environments_that_the_sentence_names_can(name):
    check_replays(make_env(name), CCPO)


def test_a_record_keeps_how_an_episode_began():
    _, episodes = played(Late(), starts=1)
    assert unpack_episode(pack_episode(episodes[0])) == episodes[0] and episodes[0].start == Start("e0", "g", 0, 0)


@pytest.mark.slow
def test_it_trains():
    import toy

    runner = toy.make(algorithm="ccpo", n_samples=4, n_rollout_threads=8, iterations=1, eval_episodes=0, ppo_epoch=1)
    before = [p.clone() for p in runner.base.adapter_parameters("second")]
    found = {}
    runner.run(lambda progress: found.update(progress.metrics))
    after = runner.base.adapter_parameters("second")
    assert any((old != new).any() for old, new in zip(before, after, strict=True))
    assert {"left_out/first", "contribution/second", "left_out_lost"} <= set(found)
