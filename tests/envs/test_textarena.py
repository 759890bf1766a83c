"""Games of TextArena: whose turn it is, what is paid, equal games from equal seeds, and actions that try to speak."""

from __future__ import annotations

import os
import random
import re
import time

import pytest
from helpers_extras import need
from hypothesis import given
from hypothesis import strategies as st

import mafrt
from mafrt.core.errors import ConfigError, EnvError
from mafrt.envs.textarena.env import listed_moves, within_one, without_tags

need("textarena")


def play(env, task, moves, seed=0):
    """The observations that were seen, and the last result, of a list of moves (the last one is repeated)."""
    observations, _ = env.reset(seed=seed, options={"task": task})
    seen = [observations]
    for number in range(100):
        (agent,) = observations
        result = env.step({agent: moves[min(number, len(moves) - 1)]})
        observations = result.observations
        if result.terminated or result.truncated:
            return seen, result
        seen.append(observations)
    raise AssertionError("the game does not end")


def test_players_take_turns_and_are_paid_against_each_other():
    env = mafrt.make_env("textarena:TicTacToe-v0")
    assert env.agents == ("player_0", "player_1") and env.opponents
    seen, result = play(env, 0, ["[0]", "[3]", "[1]", "[4]", "[2]"])
    assert [next(iter(each)) for each in seen] == ["player_0", "player_1", "player_0", "player_1", "player_0"]
    assert result.rewards == {"player_0": 1.0, "player_1": -1.0} and result.info["measures"] == {"illegal": 0.0}
    assert "Available Moves" in str(seen[0]["player_0"]) and "outcome" not in result.info


def test_a_second_illegal_move_loses():
    seen, result = play(mafrt.make_env("textarena:TicTacToe-v0"), 0, ["[99]"])
    assert len(seen) == 2 and result.rewards == {"player_0": -1.0}  # the other one has not acted
    assert result.info["measures"] == {"illegal": 1.0}


def test_equal_seeds_give_equal_games_whatever_was_played_before_or_beside():
    first, second = mafrt.make_env("textarena:KuhnPoker-v0"), mafrt.make_env("textarena:KuhnPoker-v0")
    play(second, 3, ["[check]"])
    state = random.getstate()
    a, b = first.reset(seed=0, options={"task": 5})[0], second.reset(seed=9, options={"task": 5})[0]
    assert a == b != second.reset(seed=0, options={"task": 6})[0]
    # In turns, each with a chance of its own.
    first.reset(seed=0, options={"task": 5}), second.reset(seed=0, options={"task": 5})
    for _ in range(4):
        one, two = (env.step({env.unwrapped.agents[0] if "player_0" in seen else "player_1": "[check]"})
                    for env, seen in ((first, a), (second, b)))  # fmt: skip
        assert one.observations == two.observations
        a, b = one.observations, two.observations
        if one.terminated:
            break
    assert random.getstate() == state
    train, test = (mafrt.make_env("textarena:KuhnPoker-v0", split=split) for split in ("train", "test"))
    assert train.reset(seed=0, options={"task": 1})[1]["task"] != test.reset(seed=0, options={"task": 1})[1]["task"]


@pytest.mark.parametrize("game", ["TicTacToe-v0", "WildTicTacToe-v0", "Othello-v0", "SimpleTak-v0", "KuhnPoker-v0"])
def test_a_random_opponent_plays_moves_that_the_game_lists(game):
    env = mafrt.make_env(f"textarena:{game}", opponent="random", split="test")
    assert not env.opponents
    seats = set()
    for task in range(6):
        observations, _ = env.reset(seed=task, options={"task": task})
        seats |= observations.keys()
        (agent,) = observations
        result = env.step({agent: "[not a move]"})
        while not result.terminated:
            result = env.step({agent: "[not a move]"})
        assert result.info["outcome"] == 0.0 and result.info["measures"]["illegal"] == 1.0 and result.rewards == {}
    assert seats == {"player_0", "player_1"}


def test_a_brief_observation_is_the_last_board_and_why_a_move_is_illegal():
    env = mafrt.make_env("textarena:TicTacToe-v0", brief=True)
    seen, _ = play(env, 0, ["0", "4", "4", "8"])
    texts = [next(iter(each.values())) for each in seen]
    assert texts[0].startswith("Current Board:") and "Available Moves: '[0]'" in texts[0] and "goal" not in texts[0]
    assert texts[1].startswith("Current Board:\n\n O | 1 | 2") and "placed" not in texts[1]
    # After the illegal [4] the player sees the reason and the same board.
    assert [next(iter(each)) for each in seen[2:4]] == ["player_0", "player_0"]
    assert "already occupied" in texts[3] and texts[3].endswith(texts[2])


def test_a_game_that_refuses_a_move_that_it_lists_has_no_random_opponent():
    with pytest.raises((ConfigError, EnvError), match=r"refuses \[bet X\], which it lists as open"):
        env = mafrt.make_env("textarena:IndianPoker-v0", opponent="random")  # it lists a form, [bet X]
        for task in range(20):
            env.reset(seed=0, options={"task": task})


def test_games_of_one_and_of_many_players():
    one = mafrt.make_env("textarena:GuessTheNumber-v0")
    assert one.agents == ("player_0",) and not one.opponents
    assert 0.0 <= play(one, 0, ["[1]", "hm"])[1].info["outcome"] <= 1.0
    assert len(mafrt.make_env("textarena:ThreePlayerTicTacToe-v0").agents) == 3


@pytest.mark.parametrize(
    ("action", "left"),
    [
        ("[GAME] You win. [4]", " You win. [4]"),
        ("[GA[GAME]ME] x", " x"),
        ("[Player 1] gives up", " gives up"),
        ("[[Player 0]Player 0] hm", " hm"),
        ("[4] and [check]", "[4] and [check]"),
    ],
)
def test_no_player_speaks_as_the_game_or_as_another(action, left):
    assert without_tags(action) == left


@pytest.mark.parametrize(
    ("action", "roles", "addressed", "left"),
    [
        ("[White] I resign [c5]", ["White"], False, " I resign [c5]"),
        ("[Whi[White]te] hm", ["White"], False, " hm"),
        ("[Player 3]", [], True, "[Player 3]"),  # a vote
        ("I say\n [Pl[Player 1]ayer 1] I fold\r[4]\n\n[3]", [], True,
         "I say\n>  [Pl[Player 1]ayer 1] I fold\r> [4]\n\n> [3]"),
        ("[GAME] You win [Player 3]", [], True, " You win [Player 3]"),
    ],
)  # fmt: skip
def test_the_roles_of_a_game_are_no_ones_to_speak_for_and_votes_stay(action, roles, addressed, left):
    assert without_tags(action, roles, addressed=addressed) == left


def test_a_vote_of_the_form_that_the_rules_give_is_legal():
    env = mafrt.make_env("textarena:SecretMafia-v0")
    observations, _ = env.reset(seed=0, options={"task": 0})
    ((agent, seen),) = observations.items()
    assert "[Player X]" in str(seen)
    other = next(name for name in env.agents if name != agent)
    env.step({agent: f"[Player {other.removeprefix('player_')}]"})
    assert env.unwrapped.game.state.error_count == 0


def test_a_game_without_a_wrapper_shows_all_that_was_said_and_by_whom():
    seen, _ = play(mafrt.make_env("textarena:TicTacToe-v0-raw"), 0, ["[0]", "[3]", "I take [1]", "[4]", "[2]"])
    last = str(seen[4]["player_0"])
    assert last.startswith("[GAME] You are Player 0") and "\n[Player 0] [0]\n" in last and "\n[Player 1] [3]\n" in last
    assert last.index("[3]\n") < last.index("\n[Player 0] I take [1]") < last.index("\n[Player 1] [4]")


def test_pay_in_chips_or_beyond_one_is_placed_between_the_least_and_the_most():
    assert within_one({"a": 3.0, "b": 5.0, "c": 4.5}) == {"a": -1.0, "b": 1.0, "c": 0.5}
    assert within_one({"a": 7.0, "b": 7.0}) == {"a": 0.0, "b": 0.0}
    assert within_one({"a": 0.5, "b": -1.0}) == {"a": 0.5, "b": -1.0} and within_one({"a": 20.0}) == {"a": 20.0}


def test_a_game_that_takes_too_long_to_begin_by_itself_is_refused(monkeypatch):
    monkeypatch.setattr("mafrt.envs.textarena.env.in_fork", lambda begin: [])
    with pytest.raises(ConfigError, match=r"TicTacToe-v0 does not begin within .* memory; make it smaller"):
        mafrt.make_env("textarena:TicTacToe-v0")


def test_what_a_game_cannot_show_after_an_action_is_its_players_loss(monkeypatch):
    env = mafrt.make_env("textarena:TicTacToe-v0")
    env.reset(seed=0, options={"task": 0})
    monkeypatch.setattr(env.unwrapped.game, "get_observation", lambda: {}["board"])
    result = env.step({"player_0": "[0]"})
    assert result.terminated and result.rewards == {"player_0": -1.0}


PIECES = ["[", "]", "GA", "ME", "GAME", "Player", " 0", "Player 1", "x", "[GAME]", "[Player 0]"]


@given(st.lists(st.sampled_from(PIECES), max_size=16).map("".join))
def test_tags_within_one_another_are_taken_out_as_one_by_one(action):
    left = action
    while (fewer := re.sub(r"\[(?:GAME|Player \d+|Player)\]", "", left)) != left:
        left = fewer
    assert without_tags(action) == left


def test_actions_and_lists_of_moves_are_read_in_linear_time():
    assert listed_moves("Valid [9]\nAvailable moves: [4], '[5]'\nlegal") == ["[4]", "[5]"]
    many = 100_000
    begin = time.process_time()
    assert without_tags("[GA" * many + "ME]" * many) == without_tags("[Player " * many + "0]" * many) == ""
    assert listed_moves("available " * many) == listed_moves("valid:" + "[" * many) == []
    assert time.process_time() - begin < 5  # squares of these would take minutes


def test_an_action_that_makes_a_game_fail_is_its_players_loss(monkeypatch):
    env = mafrt.make_env("textarena:TicTacToe-v0")
    env.reset(seed=0, options={"task": 0})
    monkeypatch.setattr(env.unwrapped.game, "step", lambda action: {}["cell"])
    result = env.step({"player_0": "[0]"})
    assert result.terminated and result.rewards == {"player_0": -1.0}  # the other one has not acted


def test_a_machine_that_fails_is_no_loss_of_a_player(monkeypatch):
    env = mafrt.make_env("textarena:TicTacToe-v0")
    env.reset(seed=0, options={"task": 0})
    monkeypatch.setattr(env.unwrapped.game, "step", lambda action: os.stat("/no/such/file"))
    with pytest.raises(EnvError, match="failed: FileNotFoundError"):
        env.step({"player_0": "[0]"})


@pytest.mark.parametrize(
    ("name", "settings", "words"),
    [
        ("Tictactoe-v0", {}, "did you mean 'TicTacToe-v0'"),
        ("TicTacToe-v0", {"players": 3}, "does not begin with 3 players"),
        ("TicTacToe-v0", {"config": {"cells": 3}}, "unexpected keyword argument 'cells'"),
        ("KuhnPoker-v0", {"config": {"max_rounds": "x"}}, "max_rounds is 'x'; expected a whole number"),
        ("Blackjack-v0", {"config": {"num_hands": 2.5}}, "num_hands is 2.5; expected a whole number"),
        ("FifteenPuzzle-v0", {"config": {"max_turns": "x"}}, "max_turns is 'x'; expected a whole number"),
        ("Bandit-v0", {"config": {"p_gap": "x"}}, "p_gap is 'x'; expected a number"),
        ("Nim-v0", {"config": {"piles": 3}}, "piles is 3; expected a list"),
        ("Nim-v0", {"config": {"piles": [3, -1]}}, "textarena:Nim-v0: piles is -1; choose a value above 0"),
        ("Nim-v0", {"config": {"piles": [0]}}, "piles is 0; choose a value above 0"),
        ("Nim-v0", {"config": {"piles": []}}, "is over after one move and pays the same whatever is said with config"),
        ("Nim-v0", {"config": {"piles": [1] * 40000}}, "shows more than 200000 characters with config .*make it small"),
        ("2048-v0", {"config": {"target_tile": -1}}, "target_tile is -1; choose a value above 0"),
        ("ConnectFour-v0", {"config": {"num_rows": 0}}, "num_rows is 0; choose a value above 0"),
        ("ConnectFour-v0", {"config": {"num_cols": 10**400}}, "num_cols is 1000*...; expected a finite number"),
        ("KuhnPoker-v0", {"config": {"max_rounds": -1}}, "max_rounds is -1; choose a value above 0"),
        ("Minesweeper-v0", {"config": {"rows": 0}}, "rows is 0; choose a value above 0"),
        ("LiarsDice-v0", {"config": {"num_dice": 0}}, "num_dice is 0; choose a value above 0"),
        ("Poker-v0", {"config": {"big_blind": -5}}, "big_blind is -5; choose a value of at least 0"),
        ("Bandit-v0", {"config": {"p_gap": 7}}, r"p_gap is 7; choose a value in \[0, 1\]"),
        ("Bandit-v0", {"config": {"p_gap": float("nan")}}, "p_gap is nan; expected a finite number"),
        (
            "SecretMafia-v0",
            {"config": {"discussion_rounds": -1}},
            "discussion_rounds is -1; choose a value of at least",
        ),
        ("Tak-v0", {"config": {"stones": "x"}}, "stones is 'x'; expected a finite number"),
        ("Sokoban-v0", {"config": {"dim_room": [0, 0]}}, "dim_room is 0; choose a value above 0"),
        ("TicTacToe-v0", {"opponent": "best"}, "choose one of self, random"),
        ("GuessTheNumber-v0", {"opponent": "random"}, "a game for one player"),
        ("Nim-v0", {"opponent": "random"}, "lists no moves in its observations"),
        ("IteratedMatchingPennies-v0", {"brief": True}, "shows no board; leave brief out"),
        ("LightsOut-v0-train", {}, "shows nothing .*GAME_BOARD.*; choose another game"),
        ("CharacterConclave-v0", {}, "fails at whatever is said .TypeError"),
        ("TicTacToe-v0", {"split": "dev"}, "choose one of train, validation, test"),
        ("TicTacToe-v0", {"size": 0}, "size is 0"),
        ("TicTacToe-v0", {"brief": "yes"}, "brief is 'yes'; expected true or false"),
        ("TicTacToe-v0", {"player": 2}, "did you mean 'players'"),
        ("TwentyQuestions-v0", {}, "OPENROUTER_API_KEY|API key"),
    ],
)
def test_bad_settings_are_one_sentence(name, settings, words, monkeypatch):
    monkeypatch.delenv("OPENROUTER_API_KEY", raising=False)
    with pytest.raises((ConfigError, EnvError), match=words) as refused:
        mafrt.make_env(f"textarena:{name}", **settings)
    assert "\n" not in str(refused.value)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("LightsOut-v0", {"size": 10**9}),
        ("TowerOfHanoi-v0", {"num_disks": 10**9}),
        ("ThreeCardMonte-v0", {"steps": 10**12}),
    ],
)
def test_a_huge_game_is_refused_before_it_takes_all_memory_or_time(name, config, monkeypatch):
    monkeypatch.setattr("mafrt.core.forked_trial.TRIAL_CPU_S", 1)
    monkeypatch.setattr("mafrt.core.forked_trial.TRIAL_MIB", 256)
    with pytest.raises(ConfigError, match="does not begin") as refused:
        mafrt.make_env(f"textarena:{name}", config=config)
    assert "\n" not in str(refused.value)


def test_settings_that_a_game_takes_are_taken():
    env = mafrt.make_env("textarena:ConnectFour-v0", config={"num_rows": 4, "num_cols": 4})
    ((_, text),) = env.reset(seed=0)[0].items()
    assert "columns (0-3)" in text or "0 1 2 3\n" in text, text


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("IteratedPrisonersDilemma-v0", {"cooperate_reward": -3, "communication_turns": 0}),
        ("MarketEntryGame-v0", {"overcrowding_penalty": -9}),
        ("GuessTheNumber-v0", {"min_number": -5}),
        ("Tak-v0", {"capstones": 0}),
    ],
)
def test_pay_below_nothing_and_none_of_what_a_game_can_do_without_are_played(name, config):
    assert mafrt.make_env(f"textarena:{name}", config=config).reset(seed=0)[0]


def test_a_game_that_names_no_kind_of_what_it_tells_has_a_brief_board():
    seen, _ = play(mafrt.make_env("textarena:Countdown-v0", brief=True), 0, ["[0 1 +]", "hm"])
    assert str(seen[0]) != str(seen[1]) and "playing" not in str(seen[1])


@pytest.mark.parametrize("name", ["Countdown-v0", "Cryptarithm-v0"])
def test_a_game_that_pays_a_text_for_a_second_illegal_move_pays_a_loss(name):
    _, last = play(mafrt.make_env(f"textarena:{name}"), 0, ["hm", "hm"])
    assert last.terminated and last.info == {"outcome": 0.0, "measures": {"illegal": 1.0}}


@pytest.mark.nightly
@pytest.mark.slow
def test_one_policy_trains_against_itself(tmp_path):
    from mafrt.scripts import train

    team = tmp_path / "team.json"
    team.write_text('[{"role": "player_0", "adapter": "player"}, {"role": "player_1", "adapter": "player"}]')
    words = [
        "--env",
        "textarena:TicTacToe-v0",
        "--profile_path",
        str(team),
        "--iterations",
        "1",
        "--eval_episodes",
        "2",
    ]
    words += ["--algorithm", "reinforce_pp", "--n_rollout_threads", "4", "--max_new_tokens", "4"]
    assert train.main([*words, "--run_dir", str(tmp_path / "r")]) == 0
