"""Generated games: instances from a seed, held out by construction, solvable, and paid as their rules say."""

from __future__ import annotations

import copy
import json
import random

import pytest

from mafrt.core.errors import ConfigError
from mafrt.environment.checker import check_env
from mafrt.environment.registry import make_env
from mafrt.envs.games import Game, Haggle, PlanPath, Referential, Sokoban, Sudoku, baseline_scores, play
from mafrt.envs.games.base import SPLITS, split_of
from mafrt.envs.games.legal_play import write_legal_play
from mafrt.envs.games.referential import signal_in
from mafrt.envs.games.routes import STEPS
from mafrt.envs.games.sudoku import free, solutions
from mafrt.envs.games.tic_tac_toe import TicTacToe, after, value

GAMES: dict[str, type[Game]] = {
    "referential": Referential,
    "plan_path": PlanPath,
    "sudoku": Sudoku,
    "sokoban": Sokoban,
    "haggle": Haggle,
}


def paid(info):
    """Everything but the answers that a vote compares, and the scores of the turns."""
    return {key: value for key, value in info.items() if key not in ("answers", "evidence")}


def scored(result, agent):
    """The rules' score of the turn that led to `result`."""
    return result.info["evidence"][agent].rules.score


@pytest.mark.parametrize("name", list(GAMES))
def test_the_contract_holds_and_the_name_is_registered(name):
    env = make_env(name)
    assert type(env.unwrapped) is GAMES[name] and env.unwrapped.held_out == {"split": "test"}
    check_env(env)


@pytest.mark.slow
@pytest.mark.parametrize("name", list(GAMES))
def test_the_solver_wins_and_random_and_constant_players_do_not(name):
    scores = baseline_scores(GAMES[name](split="test"), episodes=40)
    assert scores["optimal"] == 1.0
    # Nearly any agreement is worth something, so haggling has a high floor.
    assert max(scores["random"], scores["constant"]) < (0.8 if name == "haggle" else 0.7)


@pytest.mark.slow
@pytest.mark.parametrize("name", list(GAMES))
def test_held_out_instances_are_never_drawn_in_training(name):
    keys = {}
    for split in SPLITS:
        game = GAMES[name](split=split)
        keys[split] = set()
        for seed in range(40):
            game.rng.seed(seed)
            key = game.reset()[1]["task"]
            assert split_of(key) == split
            keys[split].add(key)
            game.rng.seed(seed)
            assert game.reset()[1]["task"] == key
    assert not keys["train"] & keys["test"] and len(keys["test"]) > 3
    assert keys["validation"] and not keys["validation"] & (keys["train"] | keys["test"])


@pytest.mark.parametrize("split", SPLITS)
def test_no_constant_guess_beats_chance_in_any_split(split):
    game, targets = Referential(split=split), []
    for seed in range(400):
        game.rng.seed(seed)
        game.reset()
        targets.append(game.target)
    # 100 of 400 each, with a standard deviation of 8.7.
    assert all(65 < targets.count(number) < 135 for number in range(1, 5))


def test_referential_by_hand():
    game = Referential(things=3, offered=3)
    game.rng.seed(1)
    acting, _ = game.reset()
    assert acting == {"scout": f"The number is {game.target}. Say one word, without a number."}
    seen = game.step({"scout": "7! Ben, it is"}).observations["guesser"]
    assert seen.startswith("The scout said Ben. Pick one number: ")
    result = game.step({"guesser": f"I take {game.target}, not 9"})
    answers = {"guesser": {"key": str(game.target), "score": 1.0}}
    assert result.terminated and result.info == {"outcome": 1.0, "measures": {"valid": 1.0}, "answers": answers}
    game.step({"scout": "3"})
    silent = game.step({"guesser": str(game.target)}).info
    assert silent["outcome"] == 0.0 and silent["answers"]["guesser"]["key"] is None


@pytest.mark.parametrize(
    "said, seen", [("three", "nothing"), ("3", "nothing"), ("", "nothing"), ("tom", "Tom"), ("x" * 90, "X" + "x" * 11)]
)
def test_numbers_do_not_get_through(said, seen):
    assert signal_in(said) == seen


def test_brief_observations_have_no_instructions():
    game = Referential(brief=True)
    game.rng.seed(1)
    assert game.reset()[0] == {"scout": str(game.target)}
    seen = game.step({"scout": "Zoe"}).observations["guesser"]
    assert seen == " ".join(map(str, game.choices)) + " Zoe"
    with pytest.raises(ConfigError, match="brief is 'yes'; expected true or false"):
        Referential(brief="yes")


@pytest.mark.parametrize("name", ["plan_path", "sokoban"])
def test_brief_routes_are_letters(name):
    game = GAMES[name](brief=True)
    game.rng.seed(3)
    drawn = game.reset()[0]["planner"]
    assert drawn == game.drawing() and " " not in drawn and drawn.count("\n") == game.size - 1
    best = game.move("optimal", "planner", game.rng)
    assert set(best) <= set("udlr")
    assert game.step({"planner": best}).observations == {"mover": best}
    assert game.move("optimal", "mover", game.rng) == best
    assert game.step({"mover": f"{best[0].upper()} {best[1:]}"}).info["outcome"] == 1.0
    assert len(game.move("random", "planner", game.rng)) == 2 * game.size


def test_a_random_route_is_stopped_by_no_wall():
    game = PlanPath()
    for seed in range(20):
        game.rng.seed(seed)
        game.reset()
        place = game.here
        for step in game.move("random", "planner", game.rng).split():
            there = game._after(place, step)
            assert there != place
            place = there


def test_votes_compare_answers_as_they_were_said():
    game = PlanPath(size=2, walls=0)
    game.here, game.goal, game.blocked, game.way, game.plan = (0, 0), (0, 1), frozenset(), 1, ""
    info = game.step({"mover": "right up up up up"}).info  # the voter does not know that one step was enough
    assert info["answers"] == {"mover": {"key": "right up up up up", "score": 1.0}}
    assert game.step({"mover": "I stay"}).info["answers"] == {"mover": {"key": None, "score": 0.0}}
    puzzle = Sudoku()
    puzzle.rng.seed(1)
    puzzle.reset()
    first, second = (cell for cell in range(16) if not puzzle.grid[cell])
    right, wrong = str(puzzle.solution[second]), str(puzzle.solution[first] % 4 + 1)
    puzzle.step({"chooser": f"{second // 4 + 1} {second % 4 + 1}"})
    puzzle.step({"filler": right})
    puzzle.step({"chooser": f"{first // 4 + 1} {first % 4 + 1}"})
    lost = copy.deepcopy(puzzle).step({"filler": wrong}).info
    assert lost["answers"] == {"filler": {"key": None, "score": 0.5}}  # its players see that it is lost
    info = puzzle.step({"filler": str(puzzle.solution[first])}).info
    key = " ".join(sorted(f"{cell}={puzzle.solution[cell]}" for cell in (first, second)))
    assert info["answers"] == {"filler": {"key": key, "score": 1.0}}


def test_a_random_move_of_sokoban_moves_the_walker():
    game = Sokoban()
    for seed in range(20):
        game.rng.seed(seed)
        game.reset()
        state = game.walker, game.box
        for step in game.move("random", "planner", game.rng).split():
            following = game.after(*state, step)
            assert following[0] != state[0]
            state = following


def test_few_steps_beyond_the_shortest_way_are_taken():
    game = PlanPath(size=2, walls=0)
    game.here, game.goal, game.blocked, game.way, game.plan = (0, 0), (0, 1), frozenset(), 1, ""
    assert game.step({"mover": "down up right"}).info["outcome"] == 1.0
    assert game.step({"mover": "down up down up right"}).info["outcome"] == 0.0


def test_a_brief_sudoku_is_the_grid_alone():
    game = Sudoku(brief=True)
    game.rng.seed(3)
    drawn = game.reset()[0]["chooser"]
    assert drawn == game.drawing() and len(drawn) == 19 and drawn.count("_") == 2
    cell = game.move("optimal", "chooser", game.rng)
    assert len(cell) == 2
    seen = game.step({"chooser": cell}).observations["filler"]
    assert len(seen) == 19 and seen.count("?") == 1 and seen.count("_") == 1


def test_each_agent_can_have_its_own_scripted_player(tmp_path):
    game = PlanPath(brief=True)
    write_legal_play(game, tmp_path / "heard.jsonl", 20, player={"planner": "random", "mover": "optimal"})
    records = [json.loads(line) for line in (tmp_path / "heard.jsonl").read_text().splitlines()]
    assert all(record["prompt"] == record["response"] for record in records if record["agent"] == "mover")
    assert len({record["response"] for record in records}) > 10


def test_plan_path_by_hand():
    game = PlanPath(size=2, walls=1)
    game.here, game.goal, game.blocked = (0, 0), (1, 1), frozenset({(0, 1)})
    game.way = len(game.route(game.here))
    assert game.route(game.here) == ["down", "right"] and game.drawing() == "S #\n. G"
    game.step({"planner": "down right"})
    assert game.step({"mover": "Right, down."}).info["outcome"] == 0.25  # a wall, then half of the way
    assert paid(game.step({"mover": "down right up"}).info) == {"outcome": 1.0, "measures": {"reached": 1.0}}
    assert game.step({"mover": "downright"}).info["outcome"] == 0.0


def test_a_plan_and_its_execution_are_scored_apart():
    game = PlanPath(size=2, walls=1)
    game.here, game.goal, game.blocked, game.way = (0, 0), (1, 1), frozenset({(0, 1)}), 2
    for plan, worth in {"down right": 10, "down": 5, "up down": 5, "down up": 5, "right": 0, "Go!": 0}.items():
        assert scored(game.step({"planner": plan}), "planner") == worth, plan
    game.step({"planner": "right right down"})
    for route, worth in {"right right down": 10, "right": 10 / 3, "down right": 0, "": 0}.items():
        assert scored(game.step({"mover": route}), "mover") == pytest.approx(worth), route
    assert scored(game.step({"mover": "right right down up up up"}), "mover") == 5
    game.step({"planner": "No way."})
    assert scored(game.step({"mover": "I wait."}), "mover") == 10 and scored(game.step({"mover": "up"}), "mover") == 0


def test_plans_of_sokoban_are_scored_by_the_moves_that_are_left():
    game = Sokoban(size=3, walls=1)
    game.blocked, game.walker, game.box, game.target = frozenset({(0, 0)}), (1, 0), (1, 1), (2, 1)
    game.way = len(game.solution(game.walker, game.box))
    whole = "down right right up up left down"
    for count in range(8):
        plan = " ".join(whole.split()[:count])
        assert scored(game.step({"planner": plan}), "planner") == pytest.approx(10 * count / 7)
    stuck = game.step({"planner": "right"})
    assert scored(stuck, "planner") == 0 and "no way any more" in stuck.info["evidence"]["planner"].rules.reason


def test_every_step_of_a_plan_and_of_its_execution_is_quoted_for_itself():
    game = PlanPath(size=2, walls=1, brief=True)
    game.here, game.goal, game.blocked, game.way = (0, 0), (1, 1), frozenset({(0, 1)}), 2

    def spans(agent: str, text: str) -> tuple[tuple[str, float], ...]:
        return game.step({agent: text}).info["evidence"][agent].rules.spans

    # Back and down again comes no nearer than before; what is said after the goal is no step.
    assert spans("planner", "d-udrr") == (("d", 5.0), ("d-udr", 5.0))
    assert spans("planner", "\N{LATIN CAPITAL LETTER I WITH DOT ABOVE}D!") == (
        ("\N{LATIN CAPITAL LETTER I WITH DOT ABOVE}D", 5.0),
    )
    assert spans("planner", "rr") == ()
    game.plan = "dr"
    assert spans("mover", "dr") == (("d", 1.0), ("dr", 1.0), ("", 1.0))  # and stops there
    assert spans("mover", "drr") == (("d", 1.0), ("dr", 1.0))
    assert spans("mover", "u") == ()


@pytest.mark.parametrize("settings", [{}, {"size": 5, "walls": 3, "pulls": 3}])
def test_moves_that_are_left_in_a_room_are_those_of_a_search_from_there(settings):
    game = Sokoban(**settings)
    for seed in range(20):
        game.draw(random.Random(seed))
        reached, moves, seen = [(game.walker, game.box)], 0, {(game.walker, game.box)}
        while not any(box == game.target for _, box in reached):
            reached = list({game.after(*state, step) for state in reached for step in STEPS} - seen)
            seen.update(reached)
            moves += 1
        assert game.left(game.walker, game.box) == moves == game.way


def test_sokoban_by_hand():
    game = Sokoban(size=3, walls=1)
    game.blocked, game.walker, game.box, game.target = frozenset({(0, 0)}), (1, 0), (1, 1), (2, 1)
    # Round the wall there is no way: S goes down and right, and up beside the box, to push it down from above.
    assert game.drawing() == "# . .\nS B .\n. G ."
    game.way = len(game.solution(game.walker, game.box))
    assert game.solution(game.walker, game.box) == ["down", "right", "right", "up", "up", "left", "down"]
    game.step({"planner": "Go."})
    assert game.step({"mover": "right"}).info["outcome"] == 0.0  # pushed aside, and no nearer
    solved = game.step({"mover": "Down right right up up left down!"})
    assert paid(solved.info) == {"outcome": 1.0, "measures": {"solved": 1.0}}
    assert game.after((1, 1), (1, 2), "right") == ((1, 1), (1, 2))  # the box stands at the border


@pytest.mark.parametrize("settings", [{}, {"size": 6, "walls": 4, "pulls": 4}])
def test_every_room_can_be_solved_and_is_not_solved_yet(settings):
    game = Sokoban(**settings)
    for seed in range(30):
        game.draw(random.Random(seed))
        moves = game.solution(game.walker, game.box)
        assert moves and len(moves) == game.way and game.target not in (game.box, game.walker)


def test_haggling_by_hand():
    game = Haggle(offers=2)
    game.rng.seed(1)
    game.reset()
    game.things, game.values = (1, 2, 1), {"ann": (4, 1, 4), "ben": (0, 5, 0)}
    assert game.best() == (1, 0, 1) and game.points("ben", game.rest((1, 0, 1))) == 10
    assert game.shown().startswith("There are 1 books, 2 hats, 1 balls. Your points for one: books 4, hats 1, balls 4.")
    offered = game.step({"ann": "I keep 1, 1 and 1"})
    seen = offered.observations["ben"]
    assert "books 0, hats 5, balls 0.\nYou are offered 0 1 0. Say accept" in seen
    rules = offered.info["evidence"]["ann"].rules
    assert rules.score == pytest.approx(10 * 14 / 18)  # of each kind 4, 1 + 5, and 4
    assert rules.spans[:3] == (("I keep 1", 4.0), ("I keep 1, 1", 6.0), ("I keep 1, 1 and 1", 4.0))
    assert rules.spans[3:] == (("", 14 / 3),)  # and nothing behind the numbers
    assert "You are offered 1 0 1. This was the last offer." in game.step({"ben": "0 2 0"}).observations["ann"]
    agreed = game.step({"ann": "I accept"})
    assert agreed.info["outcome"] == 1.0 and agreed.info["measures"]["points/ann"] == 0.8  # 8 and 10 of 18
    assert game.step({"ann": "2 0 0"}).info["measures"] == {
        "agreed": 0.0,
        "legal": 0.0,
        "efficiency": 0.0,
        "points/ann": 0.0,
        "points/ben": 0.0,
    }
    own = Haggle(pay="own")
    own.reset()
    own.things, own.values = game.things, game.values
    own.step({"ann": "1 1 1"})
    paid = own.step({"ben": "accept"})
    assert paid.rewards == {"ann": 0.9, "ben": 0.5} and "outcome" not in paid.info


def test_sudoku_by_hand():
    grid = (1, 2, 3, 4, 3, 4, 1, 2, 2, 1, 4, 3, 4, 3, 2, 1)
    emptied = (0, *grid[1:15], 0)
    assert free(emptied, 0) == [1] and solutions(emptied) == [grid]
    game = Sudoku(empty=2)
    game.solution, game.grid, game.right = grid, emptied, 0
    assert "? 2 3 4" in game.step({"chooser": "row 1, column 1"}).observations["filler"]
    after = game.step({"filler": "1"})
    assert not after.terminated and game.grid[0] == 1
    game.step({"chooser": "4 4"})
    assert paid(game.step({"filler": "2"}).info) == {"outcome": 0.5, "measures": {"solved": 0.0}}
    game.grid = emptied
    assert game.step({"chooser": "1 2"}).terminated  # not empty
    assert game.step({"chooser": "none"}).terminated


def test_offers_are_scored_as_if_they_were_accepted():
    game = Haggle(offers=2)
    game.reset(1)
    game.things, game.values = (1, 2, 1), {"ann": (4, 1, 4), "ben": (0, 5, 0)}
    first = game.step({"ann": "1 1 1"})
    assert scored(first, "ann") == pytest.approx(10 * 14 / 18)
    assert "14 of at most 18" in first.info["evidence"]["ann"].rules.reason
    assert scored(game.step({"ben": "0 2 0"}), "ben") == 10
    assert scored(game.step({"ann": "1 2 1"}), "ann") == 0  # offers are used up
    assert scored(game.step({"ann": "accept"}), "ann") == 10
    assert scored(game.step({"ben": "5 5 5"}), "ben") == 0


def test_a_brief_offer_is_numbers_alone():
    game = Haggle(offers=2, brief=True)
    game.reset(1)
    game.things, game.values = (1, 2, 1), {"ann": (4, 1, 4), "ben": (0, 5, 0)}
    assert game.shown() == "1 2 1\n4 1 4"
    assert game.step({"ann": "1 1 1"}).observations["ben"] == "1 2 1\n0 5 0\n0 1 0"
    assert game.step({"ben": "0 2 0"}).observations["ann"] == "1 2 1\n4 1 4\n1 0 1 last"


def test_moves_of_tic_tac_toe_are_scored_by_best_play():
    game = TicTacToe()
    for board, cell, worth in (
        ("xx.oo....", 3, 10),  # wins
        ("xx.oo....", 6, 5),  # stops o
        ("xx.oo....", 7, 0),  # lets o win
        ("x...o....", 5, 0),  # taken
        ("x........", 5, 10),
        ("x........", 2, 0),
    ):
        game.board = board
        seat = "x" if board.count("x") == board.count("o") else "o"
        assert scored(game.step({seat: str(cell)}), seat) == worth, (board, cell)
    won = "x.o.x.o.."  # x wins by 9; by another cell it may only draw
    game.board = won
    values = {cell: -value(after(won, cell - 1)) for cell in (2, 4, 6, 8, 9)}
    for cell, left in values.items():
        game.board = won
        assert scored(game.step({"x": str(cell)}), "x") == 5 * (left + 1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "settings"),
    [("plan_path", {}), ("sokoban", {}), ("sudoku", {"empty": 8}), ("haggle", {}), ("tic_tac_toe", {})],
)
def test_rules_score_the_solver_highest_and_idle_players_least(name, settings):
    """One agent is played by the solver, at random, by a constant or not at all, the other one by the solver."""
    env = make_env(name, **settings).unwrapped
    for agent in env.agents:
        means = {}
        for player in ("optimal", "random", "constant", "silent"):
            scores, rng = [], random.Random(1)
            for seed in range(40):
                env.rng.seed(seed)
                acting, _ = env.reset()
                while acting:
                    said = {who: env.move(player if who == agent else "optimal", who, rng) for who in acting}
                    said |= dict.fromkeys(said.keys() & {agent}, "") if player == "silent" else {}
                    result = env.step(said)
                    scores += [scored(result, agent)] if agent in said else []
                    acting = {} if result.terminated else result.observations
            means[player] = sum(scores) / len(scores)
        assert means["silent"] == 0 and means["optimal"] == pytest.approx(10)
        # To accept whatever the solver offers is right.
        others = [means["random"], means["constant"]] if agent != "ben" else [means["random"]]
        assert max(others) < 9.7, (agent, means)


def test_every_puzzle_has_one_solution():
    game = Sudoku(empty=6)
    for seed in range(12):
        game.draw(random.Random(seed))
        assert game.grid.count(0) == 6 and solutions(game.grid) == [game.solution]


@pytest.mark.slow
@pytest.mark.parametrize("name", list(GAMES))
def test_legal_random_play_knows_the_moves_and_not_the_game(name, tmp_path):
    game = GAMES[name]()
    count = write_legal_play(game, tmp_path / "legal.jsonl", episodes=30)
    records = [json.loads(line) for line in (tmp_path / "legal.jsonl").read_text().splitlines()]
    assert len(records) == count >= 60 and {r["agent"] for r in records} == set(game.agents)
    assert all(record["response"] for record in records)
    again = tmp_path / "again.jsonl"
    write_legal_play(game, again, episodes=30)
    assert again.read_text() == (tmp_path / "legal.jsonl").read_text()


@pytest.mark.parametrize(
    "make",
    [
        lambda: Referential(things=10),
        lambda: Referential(things=3, offered=4),
        lambda: PlanPath(size=9),
        lambda: PlanPath(walls=-1),
        lambda: Sudoku(empty=11),
        lambda: Sudoku(split="dev"),
        lambda: Sokoban(size=2),
        lambda: Sokoban(pulls=0),
        lambda: Haggle(offers=1),
        lambda: Haggle(pay="none"),
    ],
)
def test_settings_out_of_range_are_one_sentence(make):
    with pytest.raises(ConfigError, match=r" is .*; choose "):
        make()


def test_play_is_a_function_of_the_seed():
    game = Referential()
    assert [play(game, "random", seed) for seed in range(20)] == [play(Referential(), "random", s) for s in range(20)]
