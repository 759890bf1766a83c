"""`train_code`, and `train_math --workflow mathchat`, from the command line: runs, resumes, evaluations, bad input."""

from __future__ import annotations

import json

import pytest
import torch
from helpers_flags import later_wins
from test_cli import fingerprint, refused

from mafrt.sandbox import factory, shared_sandbox
from mafrt.sandbox.types import TIERS
from mafrt.scripts import evaluate, train, train_code, train_math

pytestmark = pytest.mark.takes(slow=15)

SHORT = ["--iterations", "2", "--n_rollout_threads", "4", "--max_new_tokens", "24", "--eval_episodes", "0"]
SHORT += ["--save_interval", "1", "--coach_cache", "none"]


@pytest.fixture
def workdir(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.set_num_threads(1)
    return tmp_path


def episodes(run):
    return [json.loads(line) for line in (run / "episodes.jsonl").read_text().splitlines()]


def manifests(run):
    return [json.loads(path.read_text()) for path in sorted((run / "checkpoints").glob("*/manifest.json"))]


@pytest.mark.slow
@pytest.mark.ci
def test_the_base_trains_on_programs_and_is_evaluated(workdir, capsys, monkeypatch):
    opened = factory._shared  # sandboxes of earlier tests in this process are not of this run
    monkeypatch.setattr(factory, "_shared", {name: kept for name, kept in opened.items() if name == "bwrap"})
    argv = ["--profile_path", "profiles/coder_tester.json", "--coach", "rules", "--run_dir", "run", *SHORT]
    assert train_code.main(argv) == 0
    tier = shared_sandbox("bwrap").tier
    assert [p["sandbox_tier"] for p in manifests(workdir / "run")] == [tier, tier] and tier in TIERS
    found = episodes(workdir / "run")
    assert len(found) == 8 and {e["info"]["task"].split("/")[0] for e in found} == {"programs"}
    first = found[0]["turns"][0]
    assert first["agent"] == "coder" and first["evidence"]["rules"]["score"] == first["coach"]["score"]
    assert all(0 <= e["outcome"] <= 1 for e in found)
    assert evaluate.main(["--load_path", "run", "--k", "1", "--tasks", "4", "--no-greedy", "--output", "n.json"]) == 0
    assert len(json.loads((workdir / "n.json").read_text())["scores"]) == 4
    # What the program does not depend on does not change with the clock: the same run again is the same, byte for byte.
    assert train_code.main(["--config", "run/args.yaml", "--run_dir", "again"]) == 0
    assert episodes(workdir / "again") == found
    same = ("episodes.jsonl", "metrics.jsonl")
    assert [fingerprint(workdir / "run")[str(workdir / "run" / n)] for n in same] == [
        fingerprint(workdir / "again")[str(workdir / "again" / n)] for n in same
    ]


@pytest.mark.slow
def test_a_team_of_three_votes_on_programs_stops_and_goes_on(workdir):
    words = ["--env", "code", "--workflow", "vote", "--profile_path", "profiles/math_trio.json", "--coach", "rules"]
    words += later_wins(*SHORT, "--run_dir", "run", "--iterations", "1", "--n_rollout_threads", "2")
    assert train.main(words) == 0
    assert train.main(["--load_path", "run", "--iterations", "2"]) == 0
    found = episodes(workdir / "run")
    assert len(found) == 4 and all(len(e["turns"]) == 3 and "agreement" in e["info"]["measures"] for e in found)
    assert all(turn["coach"]["score"] == turn["evidence"]["rules"]["score"] for e in found for turn in e["turns"])
    assert evaluate.main(["--load_path", "run", "--k", "1", "--tasks", "2", "--no-greedy"]) == 0


@pytest.mark.slow
def test_a_run_without_programs_names_no_sandbox(workdir, monkeypatch):
    monkeypatch.setattr(factory, "_shared", {})  # other tests of this process have opened sandboxes
    assert train_math.main(later_wins(*SHORT, "--run_dir", "run", "--iterations", "1")) == 0
    assert [manifest["sandbox_tier"] for manifest in manifests(workdir / "run")] == [None]


@pytest.mark.nightly
@pytest.mark.slow
def test_mathchat_resumes_exactly(workdir):
    words = ["--workflow", "mathchat", "--profile_path", "profiles/mathchat.json", "--coach", "rules", *SHORT]
    assert train_math.main([*words, "--run_dir", "whole"]) == 0
    assert train_math.main(later_wins(*words, "--run_dir", "part", "--iterations", "1")) == 0
    assert train_math.main(["--load_path", "part", "--iterations", "2"]) == 0
    for name in ("episodes.jsonl", "metrics.jsonl"):
        assert (workdir / "part" / name).read_bytes() == (workdir / "whole" / name).read_bytes()
    turns = [turn for e in episodes(workdir / "whole") for turn in e["turns"]]
    ran = [t for t in turns if t.get("evidence", {}).get("facts", {}).get("status") == "ok"]
    assert ran and all(t["agent"] == "code_executor" for t in ran)
    assert all("coach" in t and "score" in t["coach"] for t in turns)
    assert evaluate.main(["--load_path", "whole", "--k", "1", "--tasks", "2", "--no-greedy"]) == 0


@pytest.mark.slow
def test_bad_input_is_one_sentence(workdir, capsys):
    (workdir / "bad.jsonl").write_text('{"text": "x", "test_list": ["assert f(1 == 2"]}\n')
    (workdir / "good.jsonl").write_text('{"text": "x", "test_list": ["assert f(1) == 2"]}\n')
    assert "bad.jsonl, line 1: test_list is not Python" in refused(
        capsys, train_code.main, "--dataset_path", "bad.jsonl", "--run_dir", "run"
    )
    assert "does not exist" in refused(capsys, train_code.main, "--dataset_path", "function", "--run_dir", "run")
    assert "coder_turns" in refused(capsys, train_code.main, "--coder_turn", 2)
    assert "at least 1" in refused(capsys, train_code.main, "--coder_turns", 0, "--run_dir", "run")
    assert "mafrt.envs" not in refused(
        capsys, train_code.main, "--profile_path", "profiles/math_trio.json", "--run_dir", "run"
    )
    assert "sandbox" in refused(capsys, train_code.main, "--sandbox", "docker", "--run_dir", "run")
    assert "leave --sandbox out" in refused(
        capsys, train.main, "--env", "test_tool_calls:Hears", "--sandbox", "degraded", "--run_dir", "run"
    )
    words = ("--workflow", "mathchat", "--profile_path", "profiles/math_dual.json", "--run_dir", "run")
    assert "played by three agents" in refused(capsys, train_math.main, *words)
    assert "no setting tool_turns" in refused(capsys, train_math.main, "--tool_turns", 2, "--run_dir", "run")
    assert not (workdir / "run").exists()


def test_a_missing_sandbox_is_one_sentence_with_the_command(workdir, capsys, monkeypatch):
    monkeypatch.setenv("PATH", str(workdir))
    monkeypatch.setattr("mafrt.sandbox.factory._shared", {})
    said = refused(capsys, train_code.main, "--run_dir", "run")
    assert "bubblewrap" in said and "apt" in said
    assert not (workdir / "run").exists()
