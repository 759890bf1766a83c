"""The number format of the base is measured, repeatable, and the user's to choose."""

from __future__ import annotations

import pytest
from helpers_models import tiny_base

from mafrt.config.team import Team
from mafrt.core.distributed import Processes
from mafrt.models import load_bases, precision
from mafrt.models.precision import bfloat16_gain, choose_dtype
from mafrt.runners import build
from mafrt.scripts import train_math
from mafrt.scripts.cli import loading
from mafrt.scripts.cli.processes import ProcessLayout


@pytest.fixture
def speed(monkeypatch):
    """Sets the measured gain."""
    return lambda gain: monkeypatch.setattr(precision, "bfloat16_gain", lambda dtype="bfloat16": gain)


@pytest.fixture
def large(tmp_path, monkeypatch):
    monkeypatch.setattr(precision, "SMALL_BYTES", 100)
    (tmp_path / "model-00001-of-00002.safetensors").write_bytes(b"x" * 60)
    (tmp_path / "model-00002-of-00002.safetensors").write_bytes(b"x" * 60)
    return tmp_path


@pytest.mark.parametrize(
    ("gain", "dtype"), [(0.005, "float32"), (1.4, "float32"), (1.5, "bfloat16"), (7.0, "bfloat16")]
)
def test_bfloat16_is_chosen_where_its_products_are_faster(speed, large, gain, dtype):
    speed(gain)
    assert choose_dtype(None, None, large).dtype == choose_dtype(None, None, None).dtype == dtype
    assert f"{gain:.2g} times" in choose_dtype(None, None, large).reason


def test_a_small_base_stays_in_float32(speed, tmp_path):
    speed(7.0)
    (tmp_path / "model.safetensors").write_bytes(b"x" * 1000)
    assert choose_dtype(None, None, tmp_path) == precision.DtypeChoice("float32", "a small base")


def test_the_user_wins_then_the_run_and_slowness_is_said(speed, large):
    speed(0.005)
    assert choose_dtype("bfloat16", "float32", large).dtype == "bfloat16"
    assert "slow here: its products run at 0.005 times" in choose_dtype("bfloat16", None, large).reason
    assert "slow here" in choose_dtype(None, "bfloat16", large).reason
    assert choose_dtype("float32", "bfloat16", large) == precision.DtypeChoice("float32", "as asked")
    speed(3.0)
    assert choose_dtype(None, "float32", large) == precision.DtypeChoice("float32", "as before")
    assert choose_dtype(None, "bfloat16", large) == precision.DtypeChoice("bfloat16", "as before")


def test_the_measurement_is_a_ratio_of_speeds():
    assert 1e-4 < bfloat16_gain() < 100


@pytest.mark.parametrize(("size", "dtype"), [(1, "bfloat16"), (2, None)])
def test_training_measures_unless_several_processes_have_to_agree(speed, large, monkeypatch, capsys, size, dtype):
    speed(2.0)
    loaded = {}
    base = tiny_base()

    def load(team, name, **kwargs):
        loaded.update(kwargs)
        return base

    monkeypatch.setattr(load_bases, "load_bases", load)
    monkeypatch.setattr(build, "spread", lambda *args, **kwargs: None)
    settings = train_math.COMMAND.read(["--model_name_or_path", str(large), "--device", "cpu"])
    loading.load_base(settings, Team.of(["solver"]), ProcessLayout(Processes(0, size)))
    assert loaded["dtype"]() == dtype
    assert ("Number format of the base: bfloat16" in capsys.readouterr().out) == (size == 1)
