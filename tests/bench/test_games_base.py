"""The games base: it has seen no held-out instance, knows the moves and not the game, and learns one."""

from __future__ import annotations

import json
from statistics import fmean

import pytest
import torch
from helpers_warm import run_python

from bench import make_games_base
from bench.make_games_base import OBEYING, Part, corpus, turns
from bench.teaching_base.tokenizer import render
from mafrt.core.shipped import SHIPPED, base_folder
from mafrt.envs.games import PlanPath, Sudoku
from mafrt.envs.games.routes import STEPS

pytestmark = pytest.mark.takes(slow=40)


def asked(prompt: str) -> str:
    return render([{"role": "user", "content": prompt}])


@pytest.mark.slow
@pytest.mark.ci
def test_its_corpus_holds_no_held_out_instance():
    seen = {text.partition("<|im_start|>assistant")[0] for text in corpus(0, 4000)}
    held_out, trained = PlanPath(split="test", brief=True), PlanPath(brief=True)
    for game, found in ((held_out, False), (trained, True)):
        prompts = set()
        for seed in range(300):
            game.rng.seed(seed)
            prompts.add(asked(game.reset()[0]["planner"]))
        assert bool(prompts & seen) is found


def test_a_mover_that_obeys_repeats_the_route():
    texts = turns(Part("plan_path", 1.0, players=OBEYING), 7)
    for _ in range(4):
        planned, walked = next(texts), next(texts)
        route = planned.partition("assistant\n")[2]
        assert (
            len(route.partition("<")[0]) == 6
            and walked
            == render([{"role": "user", "content": route.partition("<")[0]}]) + f"<|im_start|>assistant\n{route}"
        )


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--documents", "0"], "--documents is 0; choose a value of at least 1"),
        (["--threads", "-1"], "--threads is -1; choose"),
        (["--learning_rate", "nan"], "--learning_rate is nan; choose a value in (0, 10)"),
        (["--output_dir", "/proc/base"], "--output_dir /proc/base cannot be written"),
    ],
)
def test_wrong_arguments_of_its_maker_are_one_sentence(words, said, capsys):
    with pytest.raises(SystemExit) as ended:
        make_games_base.main(words)
    assert ended.value.code == 2 and said in capsys.readouterr().err


@pytest.fixture(scope="module")
def loaded():
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = base_folder("games-base")
    return AutoModelForCausalLM.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)


def answers(loaded, prompts: list[str]) -> list[str]:
    model, tokenizer = loaded
    chats = [[{"role": "user", "content": prompt}] for prompt in prompts]
    batch = tokenizer.apply_chat_template(
        chats, add_generation_prompt=True, return_tensors="pt", padding=True, return_dict=True
    )
    torch.manual_seed(1)
    out = model.generate(**batch, do_sample=True, top_k=0, max_new_tokens=10)
    return tokenizer.batch_decode(out[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)


def test_its_routes_hit_no_wall_and_miss_most_goals(loaded):
    games = [PlanPath(split="test", brief=True) for _ in range(100)]
    prompts = []
    for seed, game in enumerate(games):
        game.rng.seed(seed)
        prompts.append(game.reset()[0]["planner"])
    names = {name[0]: name for name in STEPS}
    steps = hits = reached = 0
    for game, route in zip(games, answers(loaded, prompts), strict=True):
        assert len(route) == 6 and set(route) <= set(names)
        place = game.here
        for step in route:
            there = game._after(place, names[step])
            hits, steps, place = hits + (there == place), steps + 1, there
        game.step({"planner": route})
        reached += game.step({"mover": route}).info["measures"]["reached"]
    assert hits / steps < 0.1  # a route of random letters: about half
    assert reached < 50


@pytest.mark.slow
def test_it_names_empty_cells_and_guesses_digits(loaded):
    games = [Sudoku(split="test", brief=True) for _ in range(100)]
    prompts = []
    for seed, game in enumerate(games):
        game.rng.seed(seed)
        prompts.append(game.reset()[0]["chooser"])
    named = answers(loaded, prompts)
    going = [
        (game, result.observations["filler"])
        for game, cell in zip(games, named, strict=True)
        if not (result := game.step({"chooser": cell})).terminated
    ]
    assert len(going) > 90
    digits = answers(loaded, [prompt for _, prompt in going])
    assert sum(digit in tuple("1234") for digit in digits) > 0.95 * len(going)
    right = sum(digit == str(game.solution[game.cell]) for (game, _), digit in zip(going, digits, strict=True))
    assert 0.1 < right / len(going) < 0.4


@pytest.mark.nightly
@pytest.mark.ci
@pytest.mark.slow
def test_a_team_on_it_learns_the_way(tmp_path):
    """That nothing rises where everybody is frozen: tests/envs/test_quickstart_math.py."""
    config = SHIPPED / "configs" / "game_plan_path.yaml"
    done = run_python(
        *("scripts/train.py", "--config", config, "--iterations", "8", "--eval_episodes", "0"),
        *("--run_dir", tmp_path / "run", "--threads", "1"),
    )
    assert done.returncode == 0, done.stderr
    scores = [json.loads(line)["score"] for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    # Chance moves a mean of 256 episodes by .03 (one standard error).
    assert fmean(scores[-3:]) > scores[0] + 0.1
