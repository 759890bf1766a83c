"""States with many tensors are written as a few, and come back as they were."""

from __future__ import annotations

from collections import OrderedDict

import pytest
import torch

from mafrt.core import atomic_files
from mafrt.core.errors import CheckpointError
from mafrt.core.flat_tensors import CONTENT, PLACES, TENSORS, flattened, restored


def state():
    parameter = torch.nn.Parameter(torch.arange(6.0).view(2, 3))
    optimizer = torch.optim.AdamW([parameter], betas=(0.8, 0.9))
    parameter.grad = torch.ones(2, 3)
    optimizer.step()
    return {
        "solver": optimizer.state_dict(),
        "net": OrderedDict(weight=torch.ones(3, 1, dtype=torch.bfloat16).t(), empty=torch.zeros(0, 4)),
        "numbers": [torch.tensor(7), None, "text", (1.5, torch.tensor([True, False]))],
    }


def same(one, other):
    assert type(one) is type(other)
    if isinstance(one, torch.Tensor):
        assert one.dtype == other.dtype and torch.equal(one, other)
    elif isinstance(one, dict):
        assert list(one) == list(other)
        for key in one:
            same(one[key], other[key])
    elif isinstance(one, list | tuple):
        assert len(one) == len(other)
        for pair in zip(one, other, strict=True):
            same(*pair)
    else:
        assert one == other


def test_a_state_comes_back_bit_by_bit(tmp_path):
    assert len(flattened(state())[TENSORS]) == 4  # float32, bfloat16, int64, bool
    atomic_files.save_tensors(tmp_path / "state.pt", state())
    found = atomic_files.load_tensors(tmp_path / "state.pt")
    same(found, state())
    found["solver"]["state"][0]["exp_avg"].add_(1)
    same(found["solver"]["state"][0]["exp_avg_sq"], state()["solver"]["state"][0]["exp_avg_sq"])


def test_plain_containers_are_one_text_and_others_stay():
    plain = {"solver": state()["solver"], 3: [(), float("inf"), True, {}]}
    assert isinstance(flattened(plain)[CONTENT], str)
    same(restored(flattened(plain)), plain)
    assert isinstance(flattened(state())[CONTENT], dict)  # an OrderedDict is no plain dictionary


def test_a_state_that_torch_wrote_is_read_as_it_is(tmp_path):
    torch.save(state(), tmp_path / "state.pt")
    same(atomic_files.load_tensors(tmp_path / "state.pt"), state())


def test_places_outside_the_tensors_are_refused(tmp_path):
    broken = flattened({"a": torch.ones(3)}) | {PLACES: "[[0, 2, [3]]]"}
    torch.save(broken, tmp_path / "state.pt")
    with pytest.raises(CheckpointError, match="can be loaded"):
        atomic_files.load_tensors(tmp_path / "state.pt")
    same(restored({"a": 1}), {"a": 1})
