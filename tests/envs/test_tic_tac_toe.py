"""Tic-tac-toe by hand, its solver and splits; the league of self-play as a schedule and in a short run."""

from __future__ import annotations

import pytest
import torch
from helpers_models import tiny_base

from mafrt.algorithms import ALGORITHMS
from mafrt.config.team import Team
from mafrt.config.train_config import TrainConfig
from mafrt.core.errors import CheckpointError, ConfigError
from mafrt.environment.checker import check_env
from mafrt.environment.registry import make_env
from mafrt.envs.games import TicTacToe, baseline_scores, play
from mafrt.envs.games.tic_tac_toe import best_cells, canonical, value, winner
from mafrt.runners.algorithm import resolve_rule
from mafrt.runners.checks import check_opponents
from mafrt.runners.identity import Provenance
from mafrt.runners.league import League
from mafrt.runners.schedules import AgentAdapters, self_play
from mafrt.scripts import train

SEATS = Team.of(("x", "o"))


def shared_team() -> Team:
    from dataclasses import replace

    return replace(SEATS, agents=tuple(replace(agent, adapter="player") for agent in SEATS.agents))


def test_the_contract_holds():
    env = make_env("tic_tac_toe")
    assert env.unwrapped.held_out == {"split": "test", "opponent": "random"}
    check_env(env)
    check_env(make_env("tic_tac_toe", **env.unwrapped.held_out))


def test_the_solver_by_hand():
    assert value("." * 9) == 0 and winner("xxxoo....") == "x" and winner("xox......") is None
    assert value("xx.oo....") == 1 and best_cells("xx.oo....") == [2]  # x to move, and wins at once
    assert value("xx..o....") == 0 and best_cells("xx..o....") == [2]  # o has to stop x, and holds the draw
    assert value("xx.x.o.o.") == -1  # o has to stop two lines
    assert canonical("x........") == canonical("..x......") == canonical("........x") != canonical("....x....")


def test_a_game_by_hand():
    game = TicTacToe()
    game.board = "xo......."
    assert game.shown() == "You are X.\nX O 3\n4 5 6\n7 8 9\nSay the number of a free cell."
    game.brief = True
    assert game.shown() == "X X O 3 4 5 6 7 8 9"
    game.brief = False
    assert game.step({"x": "I take 4"}).observations["o"].startswith("You are O.\nX O 3\nX 5 6")
    game.step({"o": "5"})
    result = game.step({"x": "7"})
    assert result.terminated and result.rewards == {"x": 1.0, "o": -1.0} and "outcome" not in result.info
    game.board = "xo......."
    illegal = game.step({"x": "2"})
    assert illegal.terminated and illegal.rewards == {"x": -1.0} and illegal.info["measures"]["legal"] == 0.0
    assert game.step({"x": "34"}).terminated and game.step({"x": "none"}).terminated


def test_against_the_solver_only_best_play_keeps_the_value():
    kept = {}
    for player in ("optimal", "random"):
        kept[player] = []
        for seed in range(40):
            game = TicTacToe(opponent="optimal", split="test")
            outcome = play(game, player, seed)
            kept[player].append(outcome >= (game.promised + 1) / 2)
    assert all(kept["optimal"]) and sum(kept["random"]) < 30


def test_the_scale_of_the_scripted_players():
    scores = baseline_scores(TicTacToe(split="test", opponent="random"), episodes=100)
    assert scores["optimal"] > 0.9 > 0.75 > scores["random"] > scores["constant"]


def test_held_out_positions_are_no_rotation_of_training_ones():
    keys = {}
    for split in ("train", "test"):
        game = TicTacToe(split=split)
        keys[split] = set()
        for seed in range(200):
            game.rng.seed(seed)
            keys[split].add(game.reset()[1]["task"].partition("|")[0])
            [cell] = best_cells(game.board)[:1]
            assert not game.step({game.seat: str(cell + 1)}).terminated  # both seats act in every game
    assert not keys["train"] & keys["test"] and len(keys["test"]) > 10


def test_the_schedule_of_a_league_by_hand():
    cast = AgentAdapters.of(("x", "o"), adapters={"x": "p", "o": "p"})
    schedule = self_play(cast, 2, 3, seed=0)
    assert [schedule.member_at(i) for i in (0, 1, 3, 6, 7)] == ["p_past0", None, "p_past1", "p_past0", None]
    plans = [schedule.plan(iteration) for iteration in range(60)]
    assert plans == [self_play(cast, 2, 3, seed=0).plan(iteration) for iteration in range(60)]
    for iteration, plan in enumerate(plans):
        own = "x" if iteration % 2 == 0 else "o"
        if len(plan.agents) == 1:  # the other seat is an earlier self
            assert plan.agents == (own,) and plan.adapters[own] == "p"
            [other] = {"x", "o"} - {own}
            assert plan.adapters[other] in (["p_past0"] if iteration < 3 else ["p_past0", "p_past1"])
        else:
            assert plan.agents == ("x", "o") and set(plan.adapters.values()) == {"p"}
    assert {len(plan.agents) for plan in plans} == {1, 2}


@pytest.mark.parametrize(
    ("team", "settings", "why"),
    [
        (SEATS, {}, "share one adapter"),
        (shared_team(), {"agent_iteration_interval": 2}, "decides which agent learns"),
        (shared_team(), {"algorithm": "happo"}, "decides which agent learns"),
        (shared_team(), {"async_steps": 1}, "async_steps"),
    ],
)
def test_a_league_that_cannot_be_is_refused(team, settings, why):
    with pytest.raises(ConfigError, match=why):
        resolve_rule(TrainConfig.of(league=2, **settings), team)


PAID_APART = {"at_grpo", "c3", "dr_mas", "gdpo", "ippo", "opd", "rae", "reinforce_pp", "reinforce_pp_baseline"}
PAID_APART |= {"self_distill", "spin"}


@pytest.mark.parametrize("name", sorted(ALGORITHMS))
def test_rules_that_add_up_what_opponents_are_paid_are_refused(name):
    settings = ALGORITHMS[name]
    check_opponents(TicTacToe(opponent="random"), settings)  # one outcome for both seats
    if name in PAID_APART:
        check_opponents(TicTacToe(), settings)
        return
    with pytest.raises(ConfigError, match=f"'{settings.name}' adds up what several agents.*take rae, dr_mas, c3, ippo"):
        check_opponents(TicTacToe(), settings)


def test_a_refused_rule_is_refused_before_a_model_is_loaded(tmp_path, capsys):
    words = ["--env", "tic_tac_toe", "--algorithm", "grpo", "--n_samples", "4", "--n_rollout_threads", "8"]
    words += ["--model_name_or_path", str(tmp_path / "nothing"), "--run_dir", str(tmp_path / "run")]
    assert train.main(words) == 2
    assert "against each other" in capsys.readouterr().err and not (tmp_path / "run").exists()


def test_members_hold_earlier_weights_and_come_back(tmp_path):
    base = tiny_base()
    from mafrt.config.agent import LoraSpec
    from mafrt.core.atomic_files import save_tensors

    base.add_adapter("p", LoraSpec(rank=2), seed=1)
    schedule = self_play(AgentAdapters.of(("x", "o"), adapters={"x": "p", "o": "p"}), 2, 1, seed=0)
    league = League(base, schedule)
    with torch.no_grad():
        for parameter in base.adapter_parameters("p"):
            parameter.fill_(0.5)
    league.renew(0)
    saved = league.state()
    save_tensors(tmp_path / "league.pt", saved)
    with torch.no_grad():
        for parameter in base.adapter_parameters("p"):
            parameter.fill_(0.7)
    assert all((p == 0.5).all() for p in base.adapter_parameters("p_past0"))
    league.renew(2)
    assert all((p == 0.7).all() for p in base.adapter_parameters("p_past0"))
    league.load(tmp_path / "league.pt")
    assert all((p == 0.5).all() for p in base.adapter_parameters("p_past0"))
    with pytest.raises(CheckpointError, match="is missing"):
        league.load(tmp_path / "none.pt")
    other = League(base, self_play(schedule.assigned, 3, 1, seed=0))
    with pytest.raises(CheckpointError, match="holds a league of 2"):
        other.load(tmp_path / "league.pt")


def league_run(folder, iterations, resume=None):
    from mafrt.runners.on_policy import OnPolicy
    from mafrt.storage.load_path import resolve

    settings = TrainConfig.of(
        algorithm="reinforce_pp",
        iterations=iterations,
        n_rollout_threads=4,
        max_new_tokens=2,
        league=2,
        league_interval=1,
        lr=0.01,
        eval_episodes=0,
        save_interval=2,
    )
    found = None if resume is None else resolve(resume)
    runner = OnPolicy(TicTacToe(), shared_team(), tiny_base(), settings, run_dir=folder, provenance=Provenance(found))
    runner.run()
    weights = {
        name: [p.clone() for p in runner.base.adapter_parameters(name)]
        for name in ("player", "player_past0", "player_past1")
    }
    return runner, weights


@pytest.mark.slow
def test_a_league_run_moves_one_adapter_and_resumes_exactly(tmp_path):
    _, whole = league_run(tmp_path / "whole", 4)
    first, _ = league_run(tmp_path / "half", 2)
    assert first.assign_adapters().adapters["x"] and first.player.adapters == {"x": "player", "o": "player"}
    _, again = league_run(tmp_path / "half", 4, resume=tmp_path / "half")
    for name, parameters in whole.items():
        assert all(torch.equal(a, b) for a, b in zip(parameters, again[name], strict=True)), name
    assert any(not torch.equal(a, b) for a, b in zip(whole["player"], whole["player_past1"], strict=True))
