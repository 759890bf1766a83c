"""Each extension of CONTRIBUTING.md works from its own snippet, in an empty folder, with no edit of the library."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
import yaml
from helpers_warm import run_python

from mafrt.scripts import check_env, evaluate, train, train_math
from mafrt.storage.run_record import load_record

pytestmark = pytest.mark.takes(slow=11)

TEXT = (Path(__file__).parents[2] / "CONTRIBUTING.md").read_text(encoding="utf-8")
FILES = dict(re.findall(r"[Ss]aved as `(\w+\.py)`:\n\n```python\n(.*?)```", TEXT, re.DOTALL))
SHORT = ["--iterations", "1", "--n_rollout_threads", "4", "--max_new_tokens", "8", "--eval_episodes", "0"]


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in FILES:
        monkeypatch.delitem(sys.modules, Path(name).stem, raising=False)


def save(*names):
    for name in names:
        Path(name).write_text(FILES[name], encoding="utf-8")


def turns_of(run):
    return [turn for line in Path(run, "episodes.jsonl").read_text().splitlines() for turn in json.loads(line)["turns"]]


def test_every_kind_of_extension_has_its_snippet():
    names = {"parity.py", "train_parity.py", "flat.py", "blind.py", "brief.py", "house.py", "counted.py"}
    assert set(FILES) == names
    assert all(text.count("\n") < 20 for text in FILES.values())


@pytest.mark.slow
@pytest.mark.ci
def test_an_environment_with_a_script(capsys):
    save("parity.py", "train_parity.py")
    assert check_env.main(["--env", "parity:Parity"]) == 0
    assert "sample episode" in capsys.readouterr().out
    done = run_python("train_parity.py")
    assert done.returncode == 0 and "eval/avg@1" in done.stdout, done.stderr
    assert load_record(Path("parity_run")).environment.path == "parity:Parity"
    assert evaluate.main(["--load_path", "parity_run", "--k", "1", "--tasks", "2", "--max_new_tokens", "4"]) == 0


@pytest.mark.slow
def test_an_algorithm_with_its_own_loss_and_flag():
    save("flat.py")
    words = ["--algorithm", "flat:Flat", "--scale", "2", "--run_dir", "run", *SHORT]
    assert train_math.main(words) == 0
    assert yaml.safe_load(Path("run/args.yaml").read_text())["scale"] == 2.0
    metrics = json.loads(Path("run/metrics.jsonl").read_text())
    assert metrics["trained/actor"] == 1
    assert not list(Path("run").rglob("critic.pth"))


@pytest.mark.slow
def test_a_workflow():
    save("blind.py")
    assert train_math.main(["--workflow", "blind:Blind", "--run_dir", "run", *SHORT]) == 0
    assert {turn["agent"] for turn in turns_of("run")} == {"reasoner", "actor"}


@pytest.mark.slow
def test_a_coach():
    save("brief.py")
    assert train_math.main(["--coach", "brief:Brief", "--coach_max_unscored", "1", "--run_dir", "run", *SHORT]) == 0
    assert any("words" in turn.get("coach", {}).get("reason", "") for turn in turns_of("run"))


@pytest.mark.slow
def test_a_provider_of_judges():
    save("house.py")
    words = ["--coach", "house:House:any-model", "--coach_cache", "none", "--run_dir", "run", *SHORT]
    assert train_math.main(words) == 0
    assert {turn["coach"]["score"] for turn in turns_of("run") if turn["text"]} == {6.0}


@pytest.mark.slow
def test_an_engine(capsys):
    save("counted.py")
    assert train_math.main(["--engine", "counted:Counted", "--run_dir", "run", *SHORT]) == 0
    assert "4 requests" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize(
    "flag, main",
    [("--env", train.main), ("--algorithm", train_math.main), ("--workflow", train_math.main),
     ("--coach", train_math.main), ("--engine", train_math.main)],
)  # fmt: skip
def test_what_is_no_extension_is_refused_with_file_and_line_of_the_user(flag, main, capsys):
    Path("broken.py").write_text("import math\n\nvalue = 1 / 0\n")
    Path("other.py").write_text("class Thing:\n    pass\n\nnumber = 3\n")
    Path("wrong.py").write_text("def f(:\n")
    for path, named in (
        ("broken:Thing", "broken.py, line 3"),
        ("wrong:Thing", "wrong.py, line 1"),
        ("missing:Thing", "missing"),
        ("other:Thingy", "Thing"),
        ("other:number", "number"),
        ("other:Thing", "Thing"),
    ):
        for name in ("broken", "other", "wrong"):
            sys.modules.pop(name, None)
        assert main([flag, path, "--run_dir", "run", *SHORT]) == 2, (flag, path)
        said = capsys.readouterr().err.strip().splitlines()
        assert said[-1].startswith("error") and named in said[-1], said
        assert not Path("run").exists()
