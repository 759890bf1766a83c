"""`mafrt evaluate --baselines`: prefixes, constant players, imitation, and the table on the same held-out tasks."""

from __future__ import annotations

import json
import random
from types import SimpleNamespace

import pytest
import torch
from helpers_models import add_random_adapter, tiny_base

from mafrt.config.team import Team
from mafrt.core.errors import ConfigError
from mafrt.core.types import Episode, Request, SamplingParams, Turn
from mafrt.engines.prefixed import DemonstratingEngine, PrefixedEngine, VotingEngine, filled
from mafrt.engines.scripted import ScriptedEngine
from mafrt.environment.registry import make_env
from mafrt.envs.games import PlanPath, baseline_scores
from mafrt.envs.math import MathEnv, Task
from mafrt.runners.evaluation import EvaluationPlan
from mafrt.scripts import evaluate
from mafrt.scripts.baselines import build
from mafrt.scripts.baselines import table as baselines
from mafrt.scripts.baselines.build import start_of, validation_env
from mafrt.scripts.baselines.demonstrations import changed, search
from mafrt.scripts.baselines.imitation import PASSES, RATES, imitate, solved_turns


class Letters:
    """A tokenizer of single characters."""

    eos_token_id = None

    def encode(self, text, add_special_tokens=True):
        return [ord(letter) for letter in text]

    def decode(self, ids, skip_special_tokens=False):
        return "".join(map(chr, ids))


def test_prefixes_are_filled_from_the_prompt():
    prompt = "Tom has 12 pens and 3 hats.\nreasoner: Divide 40 by 4.\nactor:"
    assert [filled(t, prompt) for t in ("{opening}", "{first} /", "{last}", "so")] == ["12", "40 /", "4", "so"]
    assert filled("{first}{opening}!", "no numbers") == "!"


def test_the_prefixed_engine_puts_words_into_the_mouth_of_its_adapters():
    tokenizer = Letters()
    scripted = ScriptedEngine({"actor": ["+ 1"], "reasoner": ["Add."]}, tokenizer)
    engine = PrefixedEngine(scripted, tokenizer, {"actor": "{first} "})
    asked = [Request(tokenizer.encode("7 pens"), name, SamplingParams(), 0) for name in ("actor", "reasoner")]
    actor, reasoner = engine.generate(asked)
    assert (actor.text, tokenizer.decode(actor.ids), len(actor.logprobs)) == ("7 + 1", "7 + 1", 5)
    assert reasoner.text == "Add."
    assert [tokenizer.decode(request.prompt_ids) for request in scripted.requests] == ["7 pens7 ", "7 pens"]


def test_demonstrations_stand_before_the_prompts_that_leave_them_room():
    scripted = ScriptedEngine({"a": ["x"], "b": ["y"]}, Letters())
    engine = DemonstratingEngine(scripted, {"a": [1, 2]}, window=6)
    engine.generate([Request(ids, name, SamplingParams(max_new_tokens=2), 0) for ids, name in _ASKED])
    assert [request.prompt_ids for request in scripted.requests] == [[1, 2, 7, 8], [7, 8, 9], [7, 8]]


_ASKED = (([7, 8], "a"), ([7, 8, 9], "a"), ([7, 8], "b"))


def test_a_vote_says_the_most_frequent_text_and_of_two_the_first():
    scripted = ScriptedEngine({"a": ["no", "yes", " yes ", "p", "q", "q", "r", "s", "r"]}, Letters())
    engine = VotingEngine(scripted, 3)
    asked = [Request([1], "a", SamplingParams(), seed) for seed in (0, 1, 2)]
    assert [said.text for said in engine.generate(asked)] == ["yes", "q", "r"]
    assert len({request.seed for request in scripted.requests}) == 9
    tied = ScriptedEngine({"a": ["u", "v"]}, Letters())
    assert VotingEngine(tied, 2).generate(asked[:1])[0].text == "u"


def _solved(prompt, answer, outcome, stop="eos"):
    turn = Turn("solver", [prompt], [answer], [0.0], stop, "x", turn=0, env_step=0, adapter_version=0)
    return Episode("e", "g", [turn], outcome=outcome)


def test_the_search_finds_the_demonstration_that_helps_within_its_episodes():
    """Of ten turns that solve their tasks, the sight of one makes everything right."""
    played = []

    def play(shown, batch):
        right = float((3, 3) in shown.get("own", ()))
        played.append(10)
        return [_solved(n, n, max(right, float(n == batch % 10))) for n in range(9)] + [_solved(0, 99, 1.0, "length")]

    def score(shown):
        played.append(4)
        return float((3, 3) in shown.get("own", ()))

    shown, tried = search(play, score, {"solver": "own"}, episodes=2000, cost=4, seed=1)
    assert (3, 3) in shown["own"] and len(shown["own"]) <= 8 and tried > 1
    assert sum(played) <= 2000 and not any(99 in each for each in shown["own"])
    shown, _ = search(play, lambda shown: -len(shown), {"solver": "own"}, episodes=300, cost=4, seed=1)
    assert shown == {}, "what is no better on validation tasks is not taken"


def test_a_child_differs_in_the_demonstrations_of_one_adapter():
    rng, pool = random.Random(1), {"a": dict.fromkeys(((1,), (2,), (3,))), "b": dict.fromkeys(((4,),))}
    parent = {"a": ((1,), (2,)), "b": ((4,),)}
    children = [changed(parent, "a", pool, rng) for _ in range(50)]
    assert all(child["b"] == parent["b"] and child["a"] != () for child in children if child["a"])
    assert {len(child["a"]) for child in children} == {1, 2, 3}


def test_rivals_without_a_model():
    train, held_out = (
        MathEnv(tasks=[Task(f"{a}", "?", a) for a in answers], team=Team.of(("a",)))
        for answers in (("4", "5", "5"), ("5", "6", "7", "5"))
    )
    plan = EvaluationPlan(40, samples=1, greedy=True, seed=1)
    assert baselines.share_solved([[1.0, 0.5], [0.0]]).value == 0.25
    parts = SimpleNamespace(env=held_out, train_env=train, plan=plan)
    [row] = baselines.Baselines.without_model(parts)
    assert (row.name, row.sampled.value) == ("constant answer 5", 0.5)
    game = SimpleNamespace(env=PlanPath(split="test"), train_env=PlanPath(), plan=plan)
    scores = {row.name: row.sampled.value for row in baselines.Baselines.without_model(game)}
    assert scores["optimal player"] == 1.0 and max(scores["random player"], scores["constant player"]) < 0.7
    assert baseline_scores(PlanPath(split="test"), episodes=5)["optimal"] == 1.0


def test_imitation_takes_the_solved_episodes_and_equal_turns_once():
    def episode(number, outcome):
        turn = Turn("a", [1], [number], [0.0], "eos", "x", turn=0, env_step=0, adapter_version=0)
        return Episode(str(number), "g", [turn], outcome=outcome)

    records = solved_turns([episode(5, 1.0), episode(6, 0.5), episode(5, 1.0), episode(7, 1.0)], 1.0)
    assert [record.turns[0].action_ids for record in records] == [[5], [7]]


@pytest.mark.slow
def test_rate_and_passes_of_the_imitation_are_those_that_score_best():
    """A stand-in for the score: the log-probability of what is imitated, and of its opposite."""
    base = tiny_base()
    add_random_adapter(base, "solver")
    team = Team.of(("solver",))
    before = [p.detach().clone() for p in base.adapter_parameters("solver")]
    turn = Turn("solver", [5, 6, 7], [8, 9, 10], [0.0] * 3, "eos", "x", turn=0, env_step=0, adapter_version=0)
    records = solved_turns([Episode("1", "g", [turn], outcome=1.0)], 1.0)

    def likely():
        index = torch.tensor([base.adapter_index("solver")])
        with torch.no_grad():
            table = base.logits(base.forward(torch.tensor([[5, 6, 7, 8, 9, 10]]), None, index))[0].log_softmax(-1)
        return sum(table[place, token].item() for place, token in zip((2, 3, 4), (8, 9, 10), strict=True))

    low = likely()
    scores = []

    def score():
        scores.append(likely())
        return scores[-1]

    rate, passes = imitate(records, team, base, 1e-2, 1, score)
    assert len(scores) == 1 + len(RATES) * PASSES and scores[0] == low
    best = scores.index(max(scores)) - 1
    assert likely() == max(scores) > low
    assert (rate, passes) == (1e-2 * RATES[best // PASSES], best % PASSES + 1)
    for own, first in zip(base.adapter_parameters("solver"), before, strict=True):
        own.data.copy_(first)
    base.bump("solver")
    assert imitate(records, team, base, 1e-2, 1, lambda: -likely())[1] == 0  # worse at once: the start stays
    assert all(map(torch.equal, base.adapter_parameters("solver"), before))


def test_the_imitation_of_a_run_is_chosen_on_its_validation_tasks():
    settings = evaluate.COMMAND.read(["--env", "sudoku", "--env_kwargs", "brief=true"])
    train_env = make_env("sudoku", brief=True)
    found = validation_env(settings, None, train_env)
    assert (train_env.split, found.split) == ("train", "validation")


def test_other_held_out_tasks_of_a_run_leave_it_its_training_tasks(tmp_path, monkeypatch):
    """So rivals of one training can be scored on every public set."""
    rebuilt = SimpleNamespace(env="the run's training tasks")
    monkeypatch.setattr(build, "run_of", lambda loaded: loaded)
    monkeypatch.setattr(build, "rebuild", lambda run: rebuilt)
    settings = evaluate.COMMAND.read(["--dataset_path", "arithmetic:test:count=4"])
    assert build.training_env(settings, tmp_path, Team.of(("a",))) == rebuilt.env
    with pytest.raises(ConfigError, match="load_path"):
        build.training_env(settings, None, Team.of(("a",)))


def test_the_start_of_a_run_is_found_from_any_working_directory(tmp_path):
    base = tiny_base()
    add_random_adapter(base, "solver")
    base.save_adapter("solver", tmp_path / "start" / "solver")
    run = tmp_path / "run"
    run.mkdir()
    (run / "origin.json").write_text(json.dumps({"load_path": str(tmp_path / "start")}))
    typed = {"load_path": "start"}  # relative to a working directory of the past
    assert start_of(typed, run) == {"solver": tmp_path / "start" / "solver"}
    assert start_of({}, run) == {} and start_of({"load_path": str(tmp_path / "start")}, None) == start_of(typed, run)


@pytest.mark.slow
@pytest.mark.ci
def test_the_whole_table_on_the_untrained_base(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(baselines, "PREFIX_TASKS", 2)
    monkeypatch.setattr(baselines, "CHOICE_TASKS", 2)
    monkeypatch.setattr(baselines, "BATCH_TASKS", 2)
    monkeypatch.setattr(baselines, "PREFIXES", ("{first}", "\\boxed{"))
    words = ["--tasks", "3", "--k", "1", "--max_new_tokens", "24", "--threads", "1", "--baselines"]
    words += ["--baseline_votes", "2", "--baseline_episodes", "16", "--output", str(tmp_path / "out.json")]
    assert evaluate.main(words) == 0
    rows = json.loads((tmp_path / "out.json").read_text())["baselines"]
    names = [row["name"] for row in rows]
    assert names[0] == "this team" and names[1].startswith("constant answer ")
    assert names[2:6] == [*(f"start, temperature {heat}" for heat in ("0.3", "0.7", "1")), "start, majority@2"]
    assert names[6].startswith("start, answer begins ") and names[7].startswith(
        "start, in every turn the most frequent"
    )
    assert names[8].startswith("start, best of ") and names[9].startswith("imitation of the solved ones of 16 ")
    # The untrained team is its own start, so temperature 1 plays the same samples.
    assert (rows[0]["sampled"], rows[0]["greedy"]) == (rows[4]["sampled"], rows[4]["greedy"])
    assert "start, majority@2" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--dataset_path", "arithmetic:test:count=4"], "leave it out"),
        (["--baseline_votes", "0"], "baseline_votes is 0"),
        (["--baseline_lr", "0"], "baseline_lr is 0"),
    ],
)
def test_baselines_that_cannot_be_measured_are_refused(words, why, capsys):
    assert evaluate.main(["--baselines", *words]) == 2
    assert why in capsys.readouterr().err
