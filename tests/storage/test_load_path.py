"""What --load_path may name: a run, one of its checkpoints, or a folder of adapters."""

from __future__ import annotations

import pytest
from test_checkpoint import adapter, parts

from mafrt.core import atomic_files
from mafrt.core.errors import CheckpointError
from mafrt.storage import checkpoint, load_path


def test_resolve_a_run_a_checkpoint_and_a_folder_of_adapters(tmp_path):
    run = tmp_path / "run"
    (run / "checkpoints").mkdir(parents=True)
    found = load_path.resolve(run)
    assert (found.kind, found.checkpoint, found.step, found.resumes, found.run) == ("run", None, 0, True, run)
    for step in (1, 2):
        checkpoint.save(run / "checkpoints", step, parts(str(step).encode()))
    for path, kind, step in (
        (run, "run", 2),
        (run / "checkpoints", "run", 2),
        (run / "checkpoints" / "step_000001", "checkpoint", 1),
    ):
        found = load_path.resolve(path)
        assert (found.kind, found.step, found.run, found.resumes) == (kind, step, run, True)
        assert set(found.adapters) == {"solver", "verifier"}
        assert found.adapter("solver") == found.path / "solver"
        assert found.critic == found.path / "critic.pth"
        assert atomic_files.load_json(found.state("run.json")) == {"drawn": 1}
        with pytest.raises(CheckpointError, match=r"no state/optimizers.pt"):
            found.state("optimizers.pt")
        with pytest.raises(CheckpointError, match=r"no adapter 'coder', only solver, verifier; .*team"):
            found.adapter("coder")
    out = tmp_path / "out"
    out.mkdir()
    adapter()(out / "coder")
    (out / "README.md").write_text("mine")
    found = load_path.resolve(str(out))
    assert (found.kind, found.adapters, found.critic) == ("adapters", {"coder": out / "coder"}, None)
    assert (found.step, found.resumes, found.run) == (0, False, None)
    (out / "critic.pth").write_bytes(b"")
    assert load_path.resolve(out).critic == out / "critic.pth"


def test_resolve_says_what_it_found_and_what_it_takes(tmp_path):
    takes = "--load_path takes a run directory, one checkpoint"
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("x")
    for name, message in (
        ("nothing", f"does not exist; {takes}"),
        ("file", f"is a file; {takes}"),
        ("empty", rf"\(found: nothing\); {takes}"),
        ("", rf"\(found: empty, file\); {takes}"),
    ):
        with pytest.raises(CheckpointError, match=message):
            load_path.resolve(tmp_path / name)


def test_resolve_refuses_half_an_adapter_and_half_a_checkpoint(tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    adapter()(out / "solver")
    with pytest.raises(CheckpointError, match="is itself one adapter"):
        load_path.resolve(out / "solver")
    (out / "coder").mkdir()
    (out / "coder" / "adapter_config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"coder has no adapter_model\.safetensors"):
        load_path.resolve(out)
    (out / "coder" / "adapter_config.json").rename(out / "coder" / "adapter_model.bin")
    with pytest.raises(CheckpointError, match=r"coder has no adapter_config\.json"):
        load_path.resolve(out)
    path = checkpoint.save(tmp_path / "run", 1, parts())
    (path / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match="unfinished checkpoint"):
        load_path.resolve(path)
    with pytest.raises(CheckpointError, match=r"no checkpoint in .* is intact"):
        load_path.resolve(tmp_path / "run")


def test_resolve_warns_about_other_versions(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(checkpoint, "versions", lambda: {"torch": "1.0"})
    checkpoint.save(tmp_path, 1, parts())
    monkeypatch.undo()
    load_path.resolve(tmp_path)
    assert "written with other versions" in caplog.text and "torch 1.0 -> 2." in caplog.text
