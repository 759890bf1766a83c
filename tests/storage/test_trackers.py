"""Curves in TensorBoard, Weights & Biases and trackio: numbers, settings and episodes as text, offline."""

from __future__ import annotations

import errno
import importlib.machinery
import itertools
import json
import os
import signal
import sys
import types
from pathlib import Path

import pytest
from helpers_warm import run_python
from toy import make

from mafrt.config.train_config import RunConfig
from mafrt.core.errors import ConfigError
from mafrt.storage import checkpoint
from mafrt.storage.load_path import resolve
from mafrt.storage.metrics import MetricsWriter
from mafrt.storage.run_dir import RunDir

pytestmark = pytest.mark.takes(slow=14)


@pytest.mark.slow
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


def shown(folder) -> dict[str, list[tuple[int, float]]]:
    """What TensorBoard shows, by name."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0, "tensors": 0})
    events.Reload()
    return {tag: [(e.step, round(e.value, 6)) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


@pytest.fixture
def service(monkeypatch):
    """A module with the calls of Weights & Biases and trackio; `runs` holds what each of its runs was given."""
    runs: dict[str, list[tuple[int, str]]] = {}
    module = types.ModuleType("trackio")
    module.__spec__ = importlib.machinery.ModuleSpec("trackio", None)
    open_runs = []

    def init(name, group, **_):
        assert name.startswith(group)
        open_runs.append(runs.setdefault(name, []))

    module.init = init
    module.log = lambda values, step: open_runs[-1].extend((step, name) for name in values)
    module.finish = lambda: None
    module.runs = runs
    monkeypatch.setitem(sys.modules, "trackio", module)
    return module


@pytest.mark.cases(1)
@pytest.mark.slow
@pytest.mark.ci
@pytest.mark.parametrize("last", [2, 4, 5])
def test_a_run_that_was_killed_shows_each_iteration_once(tmp_path, service, monkeypatch, last):
    """Killed after 0 to 3 iterations beyond a checkpoint or before the first, as a process does: nothing is closed."""
    from mafrt.storage import trackers

    monkeypatch.setattr("mafrt.config.train_config.find_spec", lambda name: name)
    changes = {"iterations": 6, "save_interval": 4, "eval_interval": 2, "eval_samples": 1, "report_to": "trackio"}
    place, whole = tmp_path / "run", tmp_path / "whole"
    make(whole, **changes).run()

    class KilledError(BaseException):
        pass

    def kill(progress):
        if progress.iteration == last:
            raise KilledError

    with monkeypatch.context() as patch:
        patch.setattr(trackers.Trackers, "close", lambda self: None)
        with pytest.raises(KilledError):
            make(place, **changes).run(kill)
    make(place, place, **changes).run()
    first, second = shown(whole), shown(place)
    timed = {name for name in first if "seconds" in name or "tokens_per_s" in name}
    assert second.keys() == first.keys() and all(second[name] == first[name] for name in first.keys() - timed)
    assert all([n for n, _ in second[name]] == [n for n, _ in first[name]] for name in timed)
    runs = service.runs
    expected, *of_run = runs.values()
    assert len(of_run) == 2 and sorted(of_run[-1]) == sorted(set(of_run[-1]))
    # Texts of evaluations before the kill are with the run that was killed.
    assert set(expected) - set(of_run[-1]) <= {(n, "episode") for n in (0, 2, 4)}


@pytest.mark.slow
def test_a_run_that_stopped_goes_on_in_the_same_curves_and_a_branch_has_them_all(tmp_path, service, monkeypatch):
    monkeypatch.setattr("mafrt.config.train_config.find_spec", lambda name: name)
    changes = {"save_interval": 2, "eval_interval": 2, "eval_samples": 1, "report_to": "trackio"}
    place, branch = tmp_path / "run", tmp_path / "branch"
    make(place, iterations=2, **changes).run()
    make(place, place, iterations=4, **changes).run()
    [whole] = service.runs.values()
    assert sorted(whole) == sorted(set(whole)) and {n for n, name in whole if name == "score"} == {1, 2, 3, 4}
    with RunDir.open(tmp_path / "again" / "run", {}) as run, MetricsWriter(run, trackers=("trackio",)) as writer:
        writer.write(1, {"score": 0.5})  # another run in a folder of the same name
    assert len(service.runs) == 2 and sorted(whole) == sorted(set(whole))
    make(branch, place / "checkpoints" / "step_000002", iterations=3, **changes).run()
    assert {n for n, name in list(service.runs.values())[2] if name == "score"} == {1, 2, 3}
    assert [n for n, _ in shown(branch)["score"]] == [1, 2, 3] and [n for n, _ in shown(place)["score"]] == [1, 2, 3, 4]
    assert shown(branch)["score"][:2] == shown(place)["score"][:2]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_a_service_gets_the_curves_offline(tmp_path, name):
    """In a process of its own: the clients keep threads, and read their settings when they are imported."""
    (tmp_path / "trains.py").write_text(
        f"import sys\nsys.path.insert(0, {str(Path(__file__).parents[1])!r})\n"
        "from pathlib import Path\nfrom toy import make\n"
        f"make(Path({str(tmp_path / 'run')!r}), iterations=2, report_to={name!r}).run()\n"
    )
    environment = {
        **os.environ,
        "WANDB_MODE": "offline",
        "TRACKIO_DIR": str(tmp_path / "trackio"),
        "HOME": str(tmp_path),
        "MAFRT_KERNELS": "torch",  # those in C would be compiled anew for a new home
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


def test_a_disk_that_is_full_when_the_curves_begin_does_not_end_the_run(tmp_path, monkeypatch, caplog):
    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("torch.utils.tensorboard.SummaryWriter.add_text", full)
        with RunDir.open(tmp_path / "run", {"a": 1}) as run, MetricsWriter(run) as writer:
            writer.write(1, {"score": 0.5})
    assert "tensorboard cannot be written any more" in caplog.text and "metrics.jsonl goes on" in caplog.text
    assert '"score": 0.5' in run.metrics.path.read_text()


def written(place, load=None, *, upto=4, dies_at=None, trackers=("tensorboard",)):
    """Write a run's numbers in a process of its own, which is killed before one of its calls of TensorBoard."""
    from torch.utils.tensorboard import SummaryWriter

    if process := os.fork():
        return os.waitpid(process, 0)[1] == 0
    calls = itertools.count()

    def dying(method):
        def call(*args, **kwargs):
            if next(calls) == dies_at:
                os.kill(os.getpid(), signal.SIGKILL)
            return method(*args, **kwargs)

        return call

    for name in ("add_scalar", "add_text", "add_hparams", "flush", "close"):
        setattr(SummaryWriter, name, dying(getattr(SummaryWriter, name)))
    with (
        RunDir.open(place, {"a": 1}, None if load is None else resolve(load)) as run,
        MetricsWriter(run, trackers=trackers) as writer,
    ):
        for n in range(run.step or 0, upto):
            writer.write_evaluation(n, "during", {"eval/greedy": n / 10})
            writer.write(n + 1, {"score": n + 0.5, "turns": n})
            checkpoint.save(run.checkpoints, n + 1, {"state/x": lambda file: file.write_bytes(b"1")}, keep_last=9)
    os._exit(0)


def whole(place, upto=4):
    found = shown(place)
    assert [step for step, _ in found["score"]] == [step for step, _ in found["turns"]] == list(range(1, upto + 1))
    assert [step for step, _ in found["eval/greedy"]] == list(range(upto))


@pytest.mark.slow
@pytest.mark.cases(4)
@pytest.mark.parametrize("dies_at", range(0, 30, 3))
def test_tensorboard_after_a_kill_at_any_call(tmp_path, dies_at):
    run, branch = tmp_path / "run", tmp_path / "branch"
    assert not written(run, dies_at=dies_at)
    written(run, run, dies_at=dies_at // 2)  # and once more while it goes on
    assert written(run, run)
    whole(run)
    written(branch, run / "checkpoints" / "step_000003", dies_at=dies_at)
    assert written(branch, branch)
    whole(branch)


def test_tensorboard_gets_what_was_written_without_it(tmp_path):
    run = tmp_path / "run"
    for upto, trackers in ((1, ("tensorboard",)), (3, ()), (4, ("tensorboard",))):
        assert written(run, run if run.exists() else None, upto=upto, trackers=trackers)
    whole(run)
    assert written(run, run / "checkpoints" / "step_000002")  # back to before it
    whole(run)
