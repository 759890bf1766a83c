"""`mafrt evaluate --baselines`: prefixes, constant players, imitation, and the table on the same held-out tasks."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
from helpers_models import add_random_adapter, tiny_base

from mafrt.config.team import Team
from mafrt.core.types import Episode, Request, SamplingParams, Turn
from mafrt.engines.prefixed import PrefixedEngine, filled
from mafrt.engines.scripted import ScriptedEngine
from mafrt.envs.games import PlanPath, baseline_scores
from mafrt.envs.math import MathEnv, Task
from mafrt.runners.evaluation import EvaluationPlan
from mafrt.scripts import evaluate
from mafrt.scripts.baselines import table as baselines
from mafrt.scripts.baselines.build import start_of
from mafrt.scripts.baselines.imitation import solved_turns


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


def test_rivals_without_a_model():
    train, held_out = (
        MathEnv(tasks=[Task(f"{a}", "?", a) for a in answers], team=Team.of(("a",)))
        for answers in (("4", "5", "5"), ("5", "6", "7", "5"))
    )
    plan = EvaluationPlan(40, samples=1, greedy=True, seed=1)
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
def test_the_whole_table_on_the_untrained_base(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(baselines, "PREFIX_TASKS", 2)
    monkeypatch.setattr(baselines, "PREFIXES", ("{first}", "\\boxed{"))
    words = ["--tasks", "3", "--k", "1", "--max_new_tokens", "24", "--threads", "1", "--baselines"]
    words += ["--baseline_votes", "2", "--baseline_episodes", "16", "--output", str(tmp_path / "out.json")]
    assert evaluate.main(words) == 0
    rows = json.loads((tmp_path / "out.json").read_text())["baselines"]
    names = [row["name"] for row in rows]
    assert names[0] == "this team" and names[1].startswith("constant answer ")
    assert names[2:6] == [*(f"start, temperature {heat}" for heat in ("0.3", "0.7", "1")), "start, majority@2"]
    assert names[6].startswith("start, answer begins ") and names[7].startswith("imitation of the solved ones of 16 ")
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
