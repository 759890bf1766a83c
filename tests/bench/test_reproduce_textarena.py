"""Self-play in a game of TextArena: the records that are imitated, and the player that it is measured with."""

from __future__ import annotations

from helpers_extras import need

from bench.reproduce import textarena_game

need("textarena")


def test_records_are_legal_moves_without_brackets_of_the_player_whose_turn_it_is():
    records = list(textarena_game.legal_play(3))
    assert [record["agent"] for record in records[:3]] == ["player_0", "player_1", "player_0"]
    assert all(f"[{record['response']}]" in record["prompt"].split("Available Moves")[1] for record in records)


def test_a_random_player_wins_about_half_of_its_games():
    assert 0.3 < textarena_game.random_player(20) < 0.7
