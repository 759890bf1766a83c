"""Files of tensors and JSON, and the random states that go through them."""

from __future__ import annotations

import errno
import random
from pathlib import Path

import pytest
from test_checkpoint import names

from mafrt.core import atomic_files, rng_state
from mafrt.core.errors import CheckpointError


def test_random_states_go_through_json_and_back(tmp_path):
    import numpy
    import torch

    def draw():
        return random.random(), random.gauss(0, 1), numpy.random.rand(), numpy.random.randn(), torch.randn(3).tolist()

    rng_state.seed_random_state(2**40)
    first = rng_state.random_state()
    draw()
    rng_state.seed_random_state(2**40)
    assert rng_state.random_state() == first
    random.gauss(0, 1), numpy.random.randn()  # leaves a second Gaussian waiting in both
    atomic_files.save_json(tmp_path / "random.json", rng_state.random_state())
    expected = draw()
    assert draw() != expected
    rng_state.restore_random_state(atomic_files.load_json(tmp_path / "random.json"))
    assert draw() == expected


def test_tensors_load_without_running_what_is_in_the_file(tmp_path):
    import torch

    parameter = torch.nn.Parameter(torch.randn(4))
    optimizer = torch.optim.AdamW([parameter], lr=0.1)
    parameter.sum().backward()
    optimizer.step()
    atomic_files.save_tensors(tmp_path / "o.pt", {"solver": optimizer.state_dict()})
    found = atomic_files.load_tensors(tmp_path / "o.pt")["solver"]
    assert torch.equal(found["state"][0]["exp_avg"], optimizer.state_dict()["state"][0]["exp_avg"])
    assert found["param_groups"] == optimizer.state_dict()["param_groups"]

    class Payload:
        def __reduce__(self):
            return (Path(tmp_path / "ran").touch, ())

    torch.save(Payload(), tmp_path / "bad.pt")
    (tmp_path / "empty.pt").touch()
    (tmp_path / "text.pt").write_text("hello")
    (tmp_path / "cut.pt").write_bytes((tmp_path / "o.pt").read_bytes()[:500])
    for name in ("bad", "empty", "text", "cut", "missing"):
        with pytest.raises(CheckpointError, match=rf"{name}\.pt holds no plain tensors"):
            atomic_files.load_tensors(tmp_path / f"{name}.pt")
    assert not (tmp_path / "ran").exists()


def test_json_is_strict_and_replaced_as_a_whole(tmp_path):
    path = tmp_path / "a.json"
    atomic_files.save_json(path, {"x": 0.1 + 0.2})
    assert atomic_files.load_json(path) == {"x": 0.30000000000000004}
    with pytest.raises(ValueError, match="JSON compliant"):
        atomic_files.save_json(path, {"x": float("inf")})
    assert names(tmp_path) == ["a.json"]
    path.write_text('{"x": 1')
    with pytest.raises(CheckpointError, match="cannot be read as JSON"):
        atomic_files.load_json(path)


@pytest.mark.parametrize("at", ["writing", "first rename", "second rename", "none"])
def test_a_folder_is_replaced_whole_or_stays(tmp_path, monkeypatch, at):
    folder, renamed = tmp_path / "made", []
    folder.mkdir()
    (folder / "x").write_text("old")
    real = Path.rename

    def rename(path, target):
        renamed.append(path)
        if at == ["first rename", "second rename"][len(renamed) - 1]:
            raise KeyboardInterrupt
        return real(path, target)

    monkeypatch.setattr(Path, "rename", rename)

    def write():
        with atomic_files.new_folder(folder) as draft:
            draft.mkdir()
            (draft / "x").write_text("new")
            if at == "writing":
                raise OSError(errno.ENOSPC, "No space left on device")

    if at == "none":
        write()
    else:
        with pytest.raises((OSError, KeyboardInterrupt)):
            write()
    monkeypatch.undo()
    with pytest.raises(ValueError, match="next"), atomic_files.new_folder(folder):
        raise ValueError("the next one does not come to an end")
    assert [path.name for path in tmp_path.iterdir()] == ["made"]
    assert (folder / "x").read_text() == ("new" if at == "none" else "old")
