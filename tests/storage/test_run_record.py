"""A run knows its environment, team, data, rubric and base: it can be moved, and changes are named."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from pathlib import Path

import pytest
from helpers_models import tiny_base

import mafrt
from mafrt.config.team import Team
from mafrt.config.train_config import TrainConfig
from mafrt.core.errors import CheckpointError, ConfigError
from mafrt.runners.identity import Provenance
from mafrt.scripts import evaluate, train, train_math
from mafrt.scripts.cli.recorded_run import with_recorded_files
from mafrt.storage.load_path import resolve
from mafrt.storage.run_dir import RunDir, set_aside
from mafrt.storage.run_record import (
    BaseRecord,
    FileRecord,
    RunRecord,
    as_json,
    base_hashes,
    changes,
    file_record,
    load_record,
)

pytestmark = pytest.mark.takes(slow=14)

GAME = """
from mafrt import Env, StepResult


class Echo(Env):
    agents = ("caller", "answerer")

    def __init__(self, word="yes"):
        self.word = str(word)

    def reset(self, seed=None, options=None):
        return {"caller": f"Say {self.word}."}, {}

    def step(self, actions):
        if "caller" in actions:
            return StepResult({"answerer": "Repeat it."}, {}, False, False, {})
        return StepResult({}, {"answerer": 1.0}, True, False, {"outcome": float(self.word in actions["answerer"])})
"""
SHORT = ["--iterations", "1", "--n_rollout_threads", "4", "--max_new_tokens", "8", "--eval_episodes", "0"]
TEAM = [{"role": "reasoner", "prompt": "Plan."}, {"role": "actor", "prompt": "Solve.", "with_answer": True}]
RECORDS = [{"problem": f"What is {n} + {n}?", "answer": str(2 * n)} for n in range(1, 21)]


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A working directory with one's own team, data and environment."""
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    monkeypatch.delitem(sys.modules, "my_echo_game", raising=False)  # of another test, in another folder
    Path("my_echo_game.py").write_text(GAME)
    Path("team.json").write_text(json.dumps(TEAM))
    Path("sums.json").write_text(json.dumps(RECORDS))
    return here


@pytest.fixture
def math_run(place):
    words = ["--dataset_path", "sums.json", "--profile_path", "team.json", "--run_dir", "run"]
    assert train_math.main([*words, *SHORT]) == 0
    return place / "run"


def refused(capsys, main, *argv):
    capsys.readouterr()
    assert main([str(word) for word in argv]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    return said


@pytest.mark.slow
def test_a_moved_run_goes_on_from_another_directory_without_its_team_file(math_run, tmp_path, monkeypatch, capsys):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    shutil.move(math_run, elsewhere / "moved")
    Path("team.json").unlink()
    monkeypatch.chdir(elsewhere)
    assert train_math.main(["--load_path", "moved", "--iterations", "2"]) == 0
    assert len(Path("moved/metrics.jsonl").read_text().splitlines()) == 2
    assert evaluate.main(["--load_path", "moved", "--k", "1"]) == 0
    assert re.search(r"^tasks +1$", capsys.readouterr().out, re.M)  # of the test half of what sums.json holds out
    # The file of settings repeats it too, with the recorded team and the data where they were.
    assert train_math.main(["--config", "moved/args.yaml", "--run_dir", "again", "--iterations", "1"]) == 0
    assert load_record(Path("again")).agents() == Team.parse(TEAM)


@pytest.mark.slow
@pytest.mark.parametrize(
    "file, edit, named",
    [
        ("team.json", lambda text: text.replace("Plan.", "Guess."), "prompt of agent reasoner"),
        ("sums.json", lambda text: text.replace('"answer": "', '"answer": "9'), "the content of dataset_path"),
    ],
)
def test_an_edited_file_is_named_and_refused(math_run, capsys, file, edit, named):
    before = sorted((str(path), path.stat().st_mtime_ns) for path in math_run.rglob("*"))
    Path(file).write_text(edit(Path(file).read_text()))
    for main, words in ((train_math.main, ["--iterations", "2"]), (evaluate.main, ["--k", "1"])):
        said = refused(capsys, main, "--load_path", "run", *words)
        assert named in said and "--accept_changes" in said
    assert sorted((str(path), path.stat().st_mtime_ns) for path in math_run.rglob("*")) == before
    assert train_math.main(["--load_path", "run", "--iterations", "2", "--accept_changes"]) == 0
    assert train_math.main(["--load_path", "run", "--iterations", "3"]) == 0  # accepted once, recorded


@pytest.mark.slow
def test_an_edited_rubric_is_named_and_refused(place, capsys):
    Path("mine.md").write_text("Reward short plans. {{said}}\n")
    words = ["--dataset_path", "sums.json", "--profile_path", "team.json", "--run_dir", "run", "--coach", "local"]
    assert (
        train_math.main(
            [*words, "--coach_rubric", "mine.md", "--coach_max_unscored", "1", "--coach_max_tokens", "16", *SHORT]
        )
        == 0
    )
    Path("mine.md").write_text("Reward long plans. {{said}}\n")
    assert "the content of coach_rubric" in refused(capsys, train_math.main, "--load_path", "run", "--iterations", "2")


@pytest.mark.slow
@pytest.mark.ci
def test_an_environment_of_ones_own_is_evaluated_and_its_source_is_watched(place, tmp_path, monkeypatch, capsys):
    kwargs = ["--env_kwargs", "word=no"]
    assert train.main(["--env", "my_echo_game:Echo", *kwargs, "--run_dir", "run", *SHORT]) == 0
    record = load_record(place / "run")
    assert record.environment.arguments == {"word": "no"} and record.environment.file == str(place / "my_echo_game.py")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    assert evaluate.main(["--load_path", str(place / "run"), "--k", "1", "--tasks", "2"]) == 0
    source = place / "my_echo_game.py"
    source.write_text(GAME.replace('"answerer": 1.0', '"answerer": 2.0'))
    for main, words in ((train.main, ["--iterations", "2"]), (evaluate.main, ["--k", "1"])):
        said = refused(capsys, main, "--load_path", place / "run", *words)
        assert f"the source of the environment ({source})" in said


def python_run(path, env, **more):
    config = TrainConfig.of(iterations=1, n_rollout_threads=2, max_new_tokens=4, eval_episodes=0)
    return mafrt.runners.OnPolicy(
        env=env, team=Team.of(env.agents), base=tiny_base(), config=config, run_dir=path, **more
    )


@pytest.mark.slow
def test_a_run_from_python_is_recorded(place, monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(place))
    from my_echo_game import Echo

    python_run(place / "run", Echo(word="no")).run()
    record = load_record(place / "run")
    assert record.command is None and record.environment.path == "my_echo_game:Echo"
    assert record.environment.arguments == {"word": "no"}
    with pytest.raises(ConfigError, match=r"arguments of the environment \(word\)"):
        python_run(place / "run", Echo(word="yes"), provenance=Provenance(resolve(place / "run")))
    python_run(place / "run", Echo(word="yes"), provenance=Provenance(resolve(place / "run"), accept_changes=True))
    # An argument without a JSON form cannot be recorded, and is not guessed.
    python_run(place / "other", Echo(word=Echo)).run()
    assert load_record(place / "other").environment.arguments is None
    said = refused(capsys, evaluate.main, "--load_path", place / "other", "--k", "1")
    assert "evaluate it from Python" in said and "my_echo_game:Echo" in said


def test_a_run_of_an_earlier_version_is_refused_in_a_sentence(math_run, capsys):
    (math_run / "run.json").unlink()
    for main in (train_math.main, train.main, evaluate.main):
        said = refused(capsys, main, "--load_path", math_run)
        assert "earlier version of mafrt" in said


@pytest.mark.parametrize("text", ["{", "[]", '{"format": 1}', '{"format": 99}', '{"format": 1, "team": 3}'])
def test_a_damaged_record_is_refused_in_a_sentence(math_run, capsys, text):
    (math_run / "run.json").write_text(text)
    assert "run.json" in refused(capsys, train_math.main, "--load_path", math_run, "--iterations", "2")


def test_a_record_survives_the_disk(tmp_path):
    record = RunRecord(TEAM, "train_math", files={"dataset_path": FileRecord("/x", "0")}, machine={"threads": 2})
    record.save(tmp_path)
    assert load_record(tmp_path) == record
    (tmp_path / "run.json").unlink()
    with pytest.raises(CheckpointError, match="earlier version"):
        load_record(tmp_path)


OTHER_KINDS = {
    "team": ["x", {}, [1], None, ["a"], [{"role": "a"}, 7]],
    "command": [5, ["train_math"]],
    "machine": [[], "x", None],
    "sandbox": [1, {}],
    "environment": [{"path": 5, "arguments": {}}, {"path": "x", "arguments": [1]}, {"path": None, "arguments": None}],
    "base": [
        {"name": [], "fingerprint": "x"},
        {"name": "x", "fingerprint": 1},
        {"name": "x", "fingerprint": "x", "path": 2},
    ],
    "files": [{"a": {"path": 1, "sha256": "x"}}, {"a": {"path": "x", "sha256": None}}, [1]],
    "bases": [{"a": {"name": "x", "fingerprint": None}}, {"a": 3}],
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, some in OTHER_KINDS.items() for value in some])
def test_a_field_of_another_kind_is_a_damaged_record(tmp_path, name, value):
    RunRecord(TEAM, "train_math").save(tmp_path)
    stored = json.loads((tmp_path / "run.json").read_text())
    (tmp_path / "run.json").write_text(json.dumps({**stored, name: value}))
    with pytest.raises(CheckpointError, match="is damaged"):
        load_record(tmp_path)


def test_changes_are_named_once_each():
    then = RunRecord(TEAM, files={"a": FileRecord("/a", "1"), "b": FileRecord("/b", "1")})
    assert changes(then, then) == []
    now = RunRecord(TEAM[:1], files={"a": FileRecord("/a", "2"), "c": FileRecord("/c", "1")})
    assert changes(then, now) == ["the team (reasoner, actor, now reasoner)", "the content of a (/a)"]


def test_hashes(tmp_path):
    assert file_record(tmp_path / "none") is None
    (tmp_path / "f").write_text("x")
    first = file_record(tmp_path / "f")
    (tmp_path / "f").write_text("y")
    assert file_record(tmp_path / "f").sha256 != first.sha256 and os.path.isabs(first.path)
    folder = file_record(tmp_path)
    (tmp_path / "g").write_text("z")
    assert file_record(tmp_path).sha256 != folder.sha256
    assert base_hashes(tmp_path) == (None, None)
    os.mkfifo(tmp_path / "a.safetensors")
    (tmp_path / "b.safetensors").mkdir()
    (tmp_path / "c.safetensors").symlink_to("/dev/zero")
    assert base_hashes(tmp_path) == (None, None)
    assert as_json({"a": (1, 2)}) == {"a": [1, 2]} and as_json({"a": object()}) is None and as_json({1: 2}) is None


def test_a_living_run_is_not_set_aside(tmp_path):
    with RunDir.open(tmp_path / "run", {}) as run:
        with pytest.raises(ConfigError, match="another process is writing to it"):
            set_aside(run.path)
        with pytest.raises(ConfigError, match="already writing"):
            RunDir(run.path)
    assert set_aside(tmp_path / "run") == tmp_path / "run.1"


def test_a_base_that_has_a_name_keeps_it_and_a_folder_is_found_by_its_path(tmp_path):
    def model(name):
        record = RunRecord(team=[], base=BaseRecord(name, "x", path=str(tmp_path)))
        return with_recorded_files({"model_name_or_path": name}, record)["model_name_or_path"]

    assert model("smollm2") == "smollm2" and model("teaching-base") == "teaching-base"
    assert model("folder/that/is/elsewhere") == str(tmp_path)
