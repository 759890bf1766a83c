"""The scripts end to end: demonstrations, warm start, training with the rules as coach, evaluation."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from helpers_dsbench import tasks_folder
from helpers_extras import need
from helpers_sandbox import ensure_bubblewrap

from mafrt.envs.dsbench import builtin
from mafrt.scripts import evaluate, train_dsbench, train_sft

need("pandas", "sklearn")

pytestmark = pytest.mark.takes(slow=40)

CONFIGS = Path(__file__).parents[2] / "configs"


@pytest.fixture(scope="module")
def cache():
    patch = pytest.MonkeyPatch()
    patch.setenv("MAFRT_CACHE", str(tasks_folder()))
    ensure_bubblewrap()
    torch.set_num_threads(1)
    yield
    patch.undo()


@pytest.mark.nightly
@pytest.mark.ci
@pytest.mark.slow
def test_from_demonstrations_to_an_evaluation(cache, tmp_path, capsys):
    config = ["--config", str(CONFIGS / "dsbench.yaml")]
    records = tmp_path / "demonstrations.jsonl"
    assert train_dsbench.main([*config, "--demonstrations", str(records), "--demonstration_episodes", "4"]) == 0
    assert {json.loads(line)["agent"] for line in records.read_text().splitlines()} == {
        "data_engineer",
        "modeler",
        "analyst",
    }
    first = records.read_bytes()
    assert train_dsbench.main([*config, "--demonstrations", str(records), "--demonstration_episodes", "4"]) == 0
    assert records.read_bytes() == first == records.with_name("demonstrations.jsonl.1").read_bytes()
    start = ["--config", str(CONFIGS / "dsbench_start.yaml"), "--records_path", str(records), "--epochs", "1"]
    assert train_sft.main([*start, "--run_dir", str(tmp_path / "start")]) == 0
    run = tmp_path / "run"
    flags = ["--iterations", "1", "--n_rollout_threads", "4", "--n_samples", "2", "--agent_turns", "1"]
    flags += ["--eval_samples", "1", "--load_path", str(tmp_path / "start" / "adapters"), "--run_dir", str(run)]
    assert train_dsbench.main([*config, *flags]) == 0
    line = json.loads((run / "metrics.jsonl").read_text().splitlines()[0])
    assert 0 <= line["measure/success"] <= 1
    assert 0 <= line["coach_score/modeler"] <= 10
    assert line["coach_unscored_share"] == 0
    [first, *_] = [json.loads(text) for text in (run / "episodes.jsonl").read_text().splitlines()]
    assert set(first["turns"][0]["evidence"]) >= {"rules", "facts"}
    found = [json.loads(text) for text in (run / "evaluations.jsonl").read_text().splitlines()]
    assert [one["when"] for one in found] == ["before", "after"]
    assert "eval/measure/success" in found[0]
    capsys.readouterr()
    assert evaluate.main(["--load_path", str(run), "--env", "dsbench", "--k", "1", "--tasks", "2", "--no-greedy"]) == 0
    said = capsys.readouterr().out
    assert "measure/success" in said
    assert "tasks" in said


def test_two_types_in_every_batch(cache):
    """The default of the script: batches are stratified by data_type."""
    from mafrt.rollout.stratified_order import StratifiedOrder, strata_of

    settings = train_dsbench.COMMAND.read([])
    assert settings["stratify"] == "data_type"
    stage_tasks = builtin.builtin_tasks("train")

    class Env:
        tasks, num_tasks = stage_tasks, len(stage_tasks)

    order = StratifiedOrder(strata_of(Env(), "data_type"), 1, 4)
    for batch in range(6):
        types = [stage_tasks[order(batch * 4 + i)].data_type for i in range(4)]
        assert sorted(types) == ["classification"] * 2 + ["regression"] * 2


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        (["--data_root", "nowhere"], "data_root nowhere is not a folder"),
        (["--eval_dataset_path", "x.json"], "eval_dataset_path is given, but nothing to train on"),
        (["--dataset_path", "x.json"], "x.json cannot be read"),
        (["--stratify", "colour"], "stratify is 'colour', which the record of task tumour-diagnosis lacks"),
        (["--profile_path", "profiles/mathchat.json"], "The team file has the agents"),
        (["--style", "short"], "style"),
        (["--demonstrations", "x.jsonl", "--demonstration_episodes", "0"], "demonstration_episodes is 0"),
        (["--demonstrations", "."], "is a folder; name a file"),
    ],
)
def test_what_cannot_be_is_refused_before_a_model_is_loaded(cache, capsys, flags, why):
    assert train_dsbench.main(flags) == 2
    said = capsys.readouterr()
    assert why in said.err
    assert "Loading" not in said.out


@pytest.mark.slow
def test_builtin_tasks_pass_the_check(cache, capsys):
    assert train_dsbench.main(["--check"]) == 0
    said = capsys.readouterr().out
    assert "18 of 18 tasks can be used" in said
    assert "8 of 8 tasks can be used" in said
    assert "data_type: classification 9, regression 9" in said
