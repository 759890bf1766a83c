"""C3: every alternative is played to the end, and its advantage is recomputed here from the rules of the game."""

from __future__ import annotations

import pytest
from helpers_late import TEAM, Late, Paid, Uncopied, digit
from helpers_models import tiny_tokenizer

from mafrt import algorithms
from mafrt.core.errors import ConfigError
from mafrt.core.types import SamplingParams
from mafrt.engines.scripted import ScriptedEngine
from mafrt.rollout.continued_tree import ContinuedTreePlayer
from mafrt.rollout.player import Start
from mafrt.rollout.tree_player import show_advantages, to_learn
from mafrt.runners.checks import check_tree


class Against(Late):
    """a, b, a say a number each; at the end a is paid x + z - y, and b the opposite."""

    opponents = True

    def step(self, actions):
        result = super().step(actions)
        if not result.terminated:
            return result
        x, y, z = self.said
        return result._replace(rewards={"a": float(x + z - y), "b": float(y - x - z)}, info={})


def grow(env, samples=3, starts=2):
    tokenizer = tiny_tokenizer()
    asked = []

    def say(request):
        asked.append(request)
        return digit(request.seed)

    how = dict.fromkeys(TEAM.names, SamplingParams(max_new_tokens=20))

    def worth(episodes):
        return algorithms.turn_rewards(episodes, "c3", outcome_to="end")

    player = ContinuedTreePlayer(
        ScriptedEngine(say, tokenizer), tokenizer, TEAM, how, 500, samples=samples, worth=worth
    )
    queue = iter([Start(f"e{i}", f"g{i}", i, i) for i in range(starts)])
    episodes, stats = player.play([env], lambda slot, done: next(queue, None))
    return episodes, stats, asked


def test_an_alternative_is_worth_what_the_team_gets_after_it():
    episodes, stats, _ = grow(Late())
    assert stats.tree_turns == 6 and not stats.tree_unscored and not stats.tree_errors
    for episode in episodes:
        kept = [int(turn.text) for turn in episode.turns]
        assert len(episode.branches) == 9 and episode.outcome == 100 * kept[0] + 10 * kept[1] + kept[2]
        for branch in episode.branches:
            [turn] = branch.turns
            # The others go on with the same random numbers, so they say what they say in the episode itself.
            said = list(kept)
            said[turn.turn] = int(turn.text)
            assert branch.outcome == 100 * said[0] + 10 * said[1] + said[2]
            assert branch.info["continued"] == 2 - turn.turn
            assert branch.info["carried"] == (branch.info["alternative"] == 0)
            assert branch.info["alternative"] != 0 or int(turn.text) == kept[turn.turn]


def test_of_opponents_an_alternative_is_worth_what_its_speaker_gets():
    episodes, _, _ = grow(Against())
    for episode in episodes:
        kept = [int(turn.text) for turn in episode.turns]
        for branch in episode.branches:
            [turn] = branch.turns
            said = list(kept)
            said[turn.turn] = int(turn.text)
            of_a = said[0] + said[2] - said[1]
            assert turn.reward == (of_a if turn.agent == "a" else -of_a)


def test_the_advantage_is_the_return_minus_the_mean_of_the_others():
    episodes, _, _ = grow(Late(), samples=4)
    trained = to_learn(episodes)
    algorithms.assign(trained, "c3", outcome_to="end")
    for episode in episodes:
        for position in range(3):
            group = [branch for branch in episode.branches if branch.turns[0].turn == position]
            assert len(group) == 4
            for branch in group:
                others = [other.outcome for other in group if other is not branch]
                expected = branch.outcome - sum(others) / 3
                assert branch.turns[0].advantages == pytest.approx([expected] * len(branch.turns[0].action_ids))
    show_advantages(episodes)
    assert episodes[0].turns[0].advantages == episodes[0].branches[0].turns[0].advantages


def test_rewards_on_the_way_count_from_the_turn_on_and_late_ones_too():
    episodes, _, _ = grow(Paid(), samples=2, starts=1)
    [episode] = episodes
    kept = [int(turn.text) for turn in episode.turns]
    # a is paid for both of its turns; the bonus after b's turn goes to a's turn before it.
    assert [turn.reward for turn in episode.turns] == [kept[0] / 2 + 1, kept[1] / 2, kept[2] / 2]
    for branch in episode.branches:
        [turn] = branch.turns
        said = list(kept)
        said[turn.turn] = int(turn.text)
        later = sum(said[turn.turn :]) / 2 + (1.0 if turn.turn <= 1 else 0.0)
        assert turn.reward == pytest.approx(later), turn.turn


def test_environments_that_pay_at_the_end_are_served_and_those_that_cannot_be_copied_refused():
    check_tree(Late(), 4, None, continues=True)
    with pytest.raises(ConfigError, match="neither pays b"):
        check_tree(Late(), 4, None)
    with pytest.raises(ConfigError, match=r"Uncopied cannot be copied .*there is one of me.*--n_samples 8") as caught:
        check_tree(Uncopied(), 4, None, continues=True)
    assert "\n" not in str(caught.value)


def test_it_trains():
    import toy

    runner = toy.make(algorithm="c3", n_rollout_threads=4, iterations=1, eval_episodes=0, ppo_epoch=1)
    before = [p.clone() for p in runner.base.adapter_parameters("first")]
    runner.run()
    after = runner.base.adapter_parameters("first")
    assert any((old != new).any() for old, new in zip(before, after, strict=True))
