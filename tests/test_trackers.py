"""Curves in TensorBoard, Weights & Biases and trackio: numbers, settings and episodes as text, offline."""

from __future__ import annotations

import json
import os
import sys

import pytest
from helpers_warm import run_python
from toy import make

from mafrt.config.train_config import RunConfig
from mafrt.core.errors import ConfigError
from mafrt.storage.metrics import MetricsWriter
from mafrt.storage.run_dir import RunDir


def test_tensorboard_has_settings_and_an_episode_of_each_evaluation(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    make(tmp_path / "run", iterations=1).run()
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard"), size_guidance={"tensors": 0})
    events.Reload()
    texts = {
        tag: [event.tensor_proto.string_val[0].decode() for event in events.Tensors(tag)]
        for tag in events.Tags()["tensors"]
    }
    assert "    iterations: 1" in texts["settings/text_summary"][0]
    assert len(texts["episode/text_summary"]) == 2  # before and after
    assert all(line.startswith("    ") for text in texts["episode/text_summary"] for line in text.splitlines())
    assert "    first: " in texts["episode/text_summary"][0]
    assert "_hparams_/session_start_info" in events.summary_metadata
    assert "score" in events.Tags()["scalars"]


def test_a_tracker_that_is_not_installed_is_refused_at_once(monkeypatch):
    monkeypatch.setattr("mafrt.config.train_config.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="report_to is wandb, which is not installed; run: pip install wandb"):
        RunConfig(report_to="wandb")
    with pytest.raises(ConfigError, match="report_to is weave, which keeps nothing without its service"):
        RunConfig(report_to="weave")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_a_service_gets_the_curves_offline(tmp_path, name):
    """In a process of its own: the clients keep threads, and read their settings when they are imported."""
    (tmp_path / "trains.py").write_text(
        f"import sys\nsys.path.insert(0, {os.path.dirname(__file__)!r})\n"
        "from pathlib import Path\nfrom toy import make\n"
        f"make(Path({str(tmp_path / 'run')!r}), iterations=2, report_to={name!r}).run()\n"
    )
    environment = {
        **os.environ,
        "WANDB_MODE": "offline",
        "TRACKIO_DIR": str(tmp_path / "trackio"),
        "HOME": str(tmp_path),
    }
    done = run_python(tmp_path / "trains.py", env=environment, timeout=240)
    assert done.returncode == 0, done.stderr
    assert "cannot be written" not in done.stderr, done.stderr
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 2
    if name == "wandb":
        [record] = (tmp_path / "run" / "wandb").glob("offline-run-*/*.wandb")
        assert b"eval/greedy" in record.read_bytes() and b"first:" in b"".join(
            path.read_bytes() for path in record.parent.rglob("*.html")
        )
    else:
        import sqlite3

        [database] = (tmp_path / "trackio").rglob("mafrt*.db")
        with sqlite3.connect(database) as connection:
            rows = [json.loads(row[0]) for row in connection.execute("select metrics from metrics")]
        assert any("eval/greedy" in row for row in rows) and any("score" in row for row in rows)


def test_a_machine_without_tensorboard_trains_all_the_same(tmp_path, monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with RunDir.open(tmp_path / "run", {}) as run, MetricsWriter(run) as writer:
        writer.write(1, {"score": 0.5})
    assert "TensorBoard is missing" in caplog.text and not run.tensorboard.exists()
    assert '"score": 0.5' in run.metrics.path.read_text()
