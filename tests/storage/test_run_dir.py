"""Run directories: nothing is written over, and a resumed run's files equal those of one that was never stopped."""

from __future__ import annotations

import errno
import json
import logging
import os
import random
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from mafrt.core import atomic_files
from mafrt.core.errors import CheckpointError, ConfigError
from mafrt.core.types import Episode, Scored, Turn, Unscored
from mafrt.storage import args_file, checkpoint, episode_lines, json_lines, load_path, report, run_dir, run_record
from mafrt.storage.run_dir import RunDir

ARGS = {"iterations": 9, "lr": 1e-5, "freeze": ("a",), "target_kl": None, "load_path": None, "prompt": "größer"}


def play(run: RunDir, start: int, end: int, *, every: int = 2, die_at: int | None = None, pause_s: float = 0.0) -> None:
    """A run in miniature: evaluation before, lines, then the checkpoint of each second iteration."""
    for done in range(start, end + 1):
        time.sleep(pause_s)
        if done > start:
            run.metrics.append(done, [{"score": 1 / done}])
            run.episodes.append(done, [{"id": f"{done}-{i}", "text": "x" * done} for i in range(3)])
            run.timings.append(done, [{"seconds": random.random()}])
            if done == die_at:
                return
            if done % every == 0:
                save(run, done)
        if done % 3 == 0:
            run.evaluations.append(done, [{"when": "during", "eval/greedy": done / 100}])


def save(run: RunDir, step: int) -> Path:
    return checkpoint.save(run.checkpoints, step, {"state/run.json": lambda path: atomic_files.save_json(path, step)})


def text(path: Path) -> dict[str, bytes]:
    return {name: (path / f"{name}.jsonl").read_bytes() for name in ("metrics", "evaluations", "episodes")}


def iterations(path: Path) -> list[int]:
    return [json.loads(line)["iteration"] for line in path.read_text().split("\n")[:-1]]


@pytest.fixture
def whole(tmp_path):
    """A run of nine iterations that was never stopped."""
    with RunDir.open(tmp_path / "whole", ARGS) as run:
        play(run, 0, 9)
    return tmp_path / "whole"


@pytest.mark.parametrize("die_at", [1, 2, 3, 4, 7, 9])
def test_a_resumed_run_has_the_same_lines(tmp_path, whole, die_at):
    path = tmp_path / "killed"
    with RunDir.open(path, ARGS) as run:
        play(run, 0, 9, die_at=die_at)
    for name in ("metrics", "episodes", "timings"):
        with open(path / f"{name}.jsonl", "ab") as file:
            file.write(b'{"iteration": 1, "torn')
    found = load_path.resolve(path)
    assert found.step == (die_at - 1) // 2 * 2
    with RunDir.open(path, ARGS, found) as run:
        assert run.step == (found.step or None)
        play(run, found.step, 9)
    assert text(path) == text(whole)
    assert iterations(path / "timings.jsonl") == iterations(whole / "timings.jsonl")


@pytest.mark.slow
@pytest.mark.ci
def test_killed_with_9_amid_lines_and_resumed(tmp_path, whole):
    """A real process, killed at random instants until it gets through."""
    path = tmp_path / "killed"
    code = f"""
        import sys
        from pathlib import Path
        sys.path.insert(0, {str(Path(__file__).parent)!r})
        from test_run_dir import ARGS, RunDir, load_path, play
        path = Path({str(path)!r})
        found = load_path.resolve(path) if path.exists() else None
        with RunDir.open(path, ARGS, found) as run:
            print("go", flush=True)
            play(run, found.step if found else 0, 9, pause_s=0.02)  # longer in all than the longest wait for a kill
    """
    rng, kills = random.Random(3), 0
    while True:
        child = subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE)
        assert child.stdout is not None and child.stdout.readline() == b"go\n"
        try:
            child.wait(timeout=rng.uniform(0, 0.15) if kills < 8 else None)
        except subprocess.TimeoutExpired:
            child.kill()
            kills += 1
        child.stdout.close()
        if child.wait() == 0:
            break
    assert kills > 0
    assert text(path) == text(whole)


def test_a_run_is_never_written_over(tmp_path, whole):
    before = text(whole)
    with pytest.raises(ConfigError, match=rf"already holds a run; .*--config {whole}/args.yaml --load_path {whole}"):
        RunDir.open(whole, ARGS)
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "thesis.tex").write_text("precious")
    with pytest.raises(ConfigError, match="already holds a run"):
        RunDir.open(tmp_path / "folder", ARGS)
    with pytest.raises(ConfigError, match="already holds a run"):
        RunDir.open(tmp_path / "folder", ARGS, load_path.resolve(whole))
    with pytest.raises(ConfigError, match="is a file; give another --run_dir"):
        RunDir.open(tmp_path / "folder" / "thesis.tex", ARGS)
    with pytest.raises(ConfigError, match=r"cannot be made \(Not a directory\)"):
        RunDir.open(tmp_path / "folder" / "thesis.tex" / "run", ARGS)
    assert text(whole) == before
    assert [path.name for path in (tmp_path / "folder").iterdir()] == ["thesis.tex"]


def test_a_run_that_was_killed_at_its_very_beginning_can_begin_again(tmp_path):
    (tmp_path / "run").mkdir()
    for name in (".lock", ".args.yaml.tmp"):
        (tmp_path / "run" / name).touch()
    RunDir.open(tmp_path / "run", ARGS).close()
    assert args_file.read_args(tmp_path / "run" / "args.yaml")["iterations"] == 9


@pytest.mark.parametrize("there", [None, ".lock", ".args.yaml.tmp"])
@pytest.mark.parametrize("place", ["run_dir.write_args", "run_record.RunRecord.save"])
def test_a_beginning_that_a_full_disk_ends_leaves_nothing_and_can_begin_again(tmp_path, monkeypatch, place, there):
    path, record = tmp_path / "run", run_record.RunRecord([{"role": "a"}])
    if there:
        path.mkdir()
        (path / there).touch()
    before = sorted(path.glob("*"))

    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(f"mafrt.storage.{place}", full)
        with pytest.raises(OSError, match="No space left"):
            RunDir.open(path, ARGS, record=record)
    assert path.exists() == (there is not None)
    assert {entry.name for entry in path.glob("*")} <= {*(entry.name for entry in before), ".lock"}
    RunDir.open(path, ARGS, record=record).close()
    assert args_file.read_args(path / "args.yaml")["iterations"] == 9


@pytest.mark.parametrize("there", [True, False])
def test_a_run_that_began_and_ended_meanwhile_is_not_taken_for_ones_own(tmp_path, monkeypatch, there):
    path, lock = tmp_path / "run", run_dir._lock
    if there:
        path.mkdir()

    def late(folder):
        monkeypatch.setattr(run_dir, "_lock", lock)
        RunDir.open(folder, ARGS).close()  # of another process, between the first look and the lock
        return lock(folder)

    monkeypatch.setattr(run_dir, "_lock", late)
    with pytest.raises(ConfigError, match="already holds a run"):
        RunDir.open(path, ARGS)
    assert (path / "args.yaml").is_file() and (path / "checkpoints").is_dir()
    assert not run_dir.is_locked(path)


def test_one_process_at_a_time_and_a_dead_one_does_not_count(tmp_path):
    path = tmp_path / "run"
    # The child forks a grandchild that outlives it, as a worker pool would.
    code = f"""
        import os, sys, time
        from mafrt.storage.run_dir import RunDir
        run = RunDir.open({str(path)!r}, {{}})
        if os.fork() == 0:
            os.close(1)
            time.sleep(30)
            os._exit(0)
        print("open", flush=True)
        time.sleep(30)
    """
    child = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, start_new_session=True
    )
    try:
        assert child.stdout is not None and child.stdout.readline() == b"open\n"
        with pytest.raises(ConfigError, match="another process is writing"):
            RunDir.open(path, {}, load_path.resolve(path))
        child.kill()
        child.wait()
        RunDir.open(path, {}, load_path.resolve(path)).close()
    finally:
        subprocess.run(["kill", "-9", "--", f"-{child.pid}"], check=False)
        child.stdout.close()


def test_going_on_from_an_earlier_checkpoint_sets_later_ones_aside(whole, caplog):
    found = load_path.resolve(whole / "checkpoints" / "step_000006")
    with RunDir.open(whole, ARGS, found) as run:
        assert run.step == 6
        assert iterations(whole / "metrics.jsonl") == [1, 2, 3, 4, 5, 6]
        assert iterations(whole / "evaluations.jsonl") == [0, 3]
    assert "step_000008.aside" in caplog.text
    assert load_path.resolve(whole).step == 6


def test_a_checkpoint_of_another_run_brings_its_history_along(tmp_path, whole):
    expected = text(whole)
    branch = tmp_path / "branch"
    found = load_path.resolve(whole / "checkpoints" / "step_000006")
    with RunDir.open(branch, {**ARGS, "load_path": "x"}, found):
        assert iterations(branch / "metrics.jsonl") == [1, 2, 3, 4, 5, 6]
    # Stopped before its own first checkpoint, it starts from the other run's once more, not from nothing.
    again = load_path.resolve(branch)
    assert (again.step, again.run, again.path) == (6, branch, found.path)
    with RunDir.open(branch, ARGS, again) as run:
        play(run, 6, 9)
    assert text(branch) == text(whole) == expected
    assert load_path.resolve(branch).path == branch / "checkpoints" / "step_000008"
    assert args_file.read_args(branch / "args.yaml")["load_path"] == "x"


def test_a_run_from_initial_adapters_starts_from_them_again(tmp_path):
    adapters, path = tmp_path / "adapters", tmp_path / "run"
    (adapters / "a").mkdir(parents=True)
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (adapters / "a" / name).touch()
    with RunDir.open(path, ARGS, load_path.resolve(adapters)) as run:
        run.metrics.append(1, [{}])
    again = load_path.resolve(path)
    assert (again.kind, again.run, set(again.adapters)) == ("adapters", path, {"a"})
    assert again.resumes and again.step == 0
    with RunDir.open(path, ARGS, again):
        assert (path / "metrics.jsonl").read_bytes() == b""


# ------------------------------------------------------------------------------------------------------------- lines


def test_a_bad_line_amid_good_ones_goes_alone(tmp_path):
    path = tmp_path / "metrics.jsonl"
    good = [json_lines.encode_line({"iteration": i, "x": i}) for i in (1, 2, 3, 4)]
    path.write_bytes(good[0] + b"\0" * 9 + b"\n" + good[1] + b'{"x": 1}\n' + good[2] + good[3])
    json_lines.keep_until(path, 3)
    assert path.read_bytes() == good[0] + good[1] + good[2]
    path.write_bytes(good[0] + good[1][:-1])
    json_lines.keep_until(path, 3)
    assert path.read_bytes() == good[0]


GOOD = [json_lines.encode_line({"iteration": number, "x": number}) for number in (1, 2, 3, 4)]


@pytest.mark.parametrize(
    "content, left, number",
    [
        (b"{broken\n" + GOOD[1], GOOD[1], "1"),
        (b"{broken\n", b"", "1"),
        (GOOD[0][:-6] + b"\n" + GOOD[1], GOOD[1], "1"),
        (GOOD[0] + GOOD[1][:9] + GOOD[2], GOOD[0], "2"),
        (GOOD[0] + GOOD[1][:-2] + GOOD[2], GOOD[0], "2"),
        (GOOD[0] + GOOD[1][:-1], GOOD[0], "2"),
        (b"\n" + GOOD[0], GOOD[0], "1"),
        (b"\xff\xfe\n" + GOOD[0], GOOD[0], "1"),
        (b"[1, 2]\n" + GOOD[0], GOOD[0], "1"),
        (b'{"iteration": 1, "x": NaN,}\n' + GOOD[1], GOOD[1], "1"),
    ],
)
def test_a_damaged_line_is_left_out_with_a_warning_and_the_file_is_kept(tmp_path, caplog, content, left, number):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(content)
    json_lines.keep_until(path, 3, parse=True)
    assert path.read_bytes() == left
    assert f"(number {number})" in caplog.text and "metrics.jsonl.damaged" in caplog.text
    assert (tmp_path / "metrics.jsonl.damaged").read_bytes() == content
    json_lines.copy_until(tmp_path / "metrics.jsonl.damaged", path, 3, parse=True)
    assert path.read_bytes() == left and "left out of" in caplog.text


@pytest.mark.parametrize("tail", [GOOD[3], GOOD[3][:-9], b"\0" * 99, b'{"iter'])
def test_what_a_stopped_run_leaves_after_its_checkpoint_is_no_damage(tmp_path, caplog, tail):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b"".join(GOOD[:3]) + tail)
    json_lines.keep_until(path, 3, parse=True)
    assert path.read_bytes() == b"".join(GOOD[:3])
    assert not caplog.text and list(tmp_path.iterdir()) == [path]


def test_lines_hold_any_text_and_any_number():
    odd = 'Größe 数学 \ud800 "\n\r\t\x85\u2028\u2029 \x00'
    record = {"iteration": 1, "text": odd, "nan": float("nan"), "inf": [float("inf"), -1.5], "set": {2, 1}}
    line = json_lines.encode_line(record)
    assert line.count(b"\n") == 1 and len(line.decode().splitlines()) == 1
    assert json.loads(line) == {"iteration": 1, "text": odd, "nan": None, "inf": [None, -1.5], "set": [1, 2]}
    assert "数学" in json_lines.encode_line({"text": "数学"}).decode()
    import numpy
    import torch

    assert json_lines.json_safe({1: numpy.float32(0.5), "t": torch.tensor(2), "p": Path("a"), "b": True}) == {
        "1": 0.5,
        "t": 2,
        "p": "a",
        "b": True,
    }


def test_a_refused_line_is_not_left_half_written(tmp_path):
    """The kernel refuses what lies beyond 4096 bytes, in the middle of a line."""
    path = tmp_path / "run"
    code = f"""
        import resource
        from mafrt.core.errors import CheckpointError
        from mafrt.storage.run_dir import RunDir
        run = RunDir.open({str(path)!r}, {{}})
        run.metrics.append(1, [{{"text": "x" * 3000}}])
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
        try:
            run.metrics.append(2, [{{"text": "x" * 3000}}])
        except CheckpointError as error:
            print(error)
        run.metrics.append(2, [{{"text": "short"}}])
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True)
    assert "cannot append to" in done.stdout and "ulimit -f" in done.stdout, done.stderr
    assert iterations(path / "metrics.jsonl") == [1, 2]


def test_an_episode_is_logged_with_rewards_and_verdicts():
    def turn(**more) -> Turn:
        return Turn("solver", [1, 2], [3, 4, 5], [-0.1] * 3, "eos", "say", 0, 0, 7, **more)

    episode = Episode("e", "g", [turn(reward=0.5, advantages=[1.0, 2.0, 3.0], coach=Scored(9.0, "good")), turn()], 1.0)
    episode.turns[1].coach = Unscored("timed out")
    record = episode_lines.episode_record(episode)
    assert json.loads(json_lines.encode_line(record))["turns"][0] == {
        "agent": "solver",
        "turn": 0,
        "env_step": 0,
        "text": "say",
        "stop": "eos",
        "tokens": 3,
        "prompt_tokens": 2,
        "adapter_version": 7,
        "reward": 0.5,
        "coach": {"score": 9.0, "reason": "good", "spans": []},
        "advantage": 2.0,
    }
    assert record["turns"][1]["coach"] == {"unscored": "timed out"} and record["turns"][1]["reward"] is None
    assert (record["id"], record["group"], record["outcome"]) == ("e", "g", 1.0)


# ---------------------------------------------------------------------------------------------------------- settings


def test_settings_come_back_as_they_were(tmp_path, whole):
    assert args_file.read_args(whole / "args.yaml") == {**ARGS, "freeze": ["a"]}
    assert "größer" in (whole / "args.yaml").read_text()


def test_changed_settings_are_told_and_the_old_ones_kept(whole, caplog):
    with caplog.at_level(logging.WARNING):
        RunDir.open(whole, {**ARGS, "load_path": "runs/x"}, load_path.resolve(whole)).close()
    assert "settings changed" not in caplog.text
    RunDir.open(whole, {**ARGS, "iterations": 20}, load_path.resolve(whole)).close()
    assert "settings changed (the old ones are in args.until_000008.yaml): iterations" in caplog.text
    assert args_file.read_args(whole / "args.yaml")["iterations"] == 20
    assert args_file.read_args(whole / "args.until_000008.yaml")["iterations"] == 9


@pytest.mark.parametrize("name", ["openai_api_key", "apikey", "hf_token", "password", "CLIENT_SECRET"])
def test_secrets_stay_out_of_the_settings(tmp_path, name):
    with pytest.raises(ConfigError, match="looks like a secret"):
        args_file.write_args(tmp_path / "args.yaml", {name: "sk-123"})
    assert not (tmp_path / "args.yaml").exists()
    args_file.write_args(tmp_path / "args.yaml", {name: None, "max_new_tokens": 3, "token": "word"})


@pytest.mark.parametrize("content", [b"- a\n- b\n", b"\xff\xfe", b"a: [1", b"a: !!python/object/apply:os.system [ls]"])
def test_settings_that_are_none_are_one_sentence(tmp_path, content):
    (tmp_path / "args.yaml").write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        args_file.read_args(tmp_path / "args.yaml")
    assert "\n" not in str(caught.value)


def test_set_aside_finds_a_free_name(tmp_path):
    assert run_dir.set_aside(tmp_path / "run") is None
    for number in (1, 2):
        (tmp_path / "run").mkdir()
        assert run_dir.set_aside(tmp_path / "run") == tmp_path / f"run.{number}"
    assert not (tmp_path / "run").exists()


# ------------------------------------------------------------------------------------------------------- end of a run


def test_the_table_of_before_and_after():
    before = {"eval/greedy": 0.2, "eval/avg@4": 0.275, "gone": 1}
    after = {"eval/avg@4": 0.8251, "eval/greedy": None, "new": 123456.0}
    assert report.before_after(before, after).split("\n") == [
        "             before   after  change",
        "-----------------------------------",
        "eval/avg@4    0.275   0.825  +0.550",
        "eval/greedy   0.200       -",
        "new               -  123456",
        "gone              1       -",
    ]


def test_the_end_of_a_run_says_where_things_lie(tmp_path):
    text = report.end_of_run(
        "runs/x",
        {},
        {},
        iterations=3,
        seconds=200,
        checkpoint="runs/x/checkpoints/step_000003",
        adapters=("solver",),
        go_on="mafrt train --load_path runs/x",
    )
    assert text.split("\n") == [
        "3 iterations in 3 min 20 s",
        "",
        "settings        runs/x/args.yaml",
        "metrics         runs/x/metrics.jsonl",
        "episodes        runs/x/episodes.jsonl",
        "curves          tensorboard --logdir runs/x/tensorboard",
        "report          mafrt report runs/x",
        "adapter solver  runs/x/checkpoints/step_000003/solver",
        "go on           mafrt train --load_path runs/x",
    ]


@pytest.mark.parametrize(
    "seconds,text", [(0.4, "0 s"), (59.7, "1 min 00 s"), (3599, "59 min 59 s"), (7500, "2 h 05 min")]
)
def test_durations(seconds, text):
    assert report.duration(seconds) == text


def test_the_summary_is_json_whatever_is_in_it(tmp_path):
    path = report.write_summary(tmp_path, {"before": 0.5, "after": float("nan"), "seed": 1})
    assert json.loads(path.read_text()) == {"before": 0.5, "after": None, "seed": 1}
    with pytest.raises(CheckpointError):
        atomic_files.load_json(tmp_path / "nothing.json")


def test_a_pipe_or_a_folder_in_the_place_of_a_file_is_refused(tmp_path):
    """Opening a pipe that nothing reads would wait for ever."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    for place in ("pipe", "folder"):
        with pytest.raises(CheckpointError, match="no regular file"):
            json_lines.keep_until(tmp_path / place, 3)


def test_an_iteration_of_many_digits_is_a_damaged_line(tmp_path, caplog):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"iteration": 1, "a": 1}\n{"iteration": ' + b"9" * 5000 + b"}\n")
    json_lines.keep_until(path, 3, parse=True)
    assert path.read_bytes() == b'{"iteration": 1, "a": 1}\n' and "number 2" in caplog.text


@pytest.mark.parametrize("text", ["", "\n", "# nothing\n"])
def test_settings_that_were_lost_are_not_the_defaults(text, tmp_path):
    (tmp_path / "args.yaml").write_text(text)
    with pytest.raises(ConfigError, match="is empty"):
        args_file.read_args(tmp_path / "args.yaml")


IN_THE_PLACE = {
    "folder": lambda path: path.mkdir(),
    "file": lambda path: path.write_text("x"),
    "pipe": os.mkfifo,
    "link to nothing": lambda path: path.symlink_to("/nowhere"),
    "link to itself": lambda path: path.symlink_to(path.name),
    "device": lambda path: path.symlink_to("/dev/null"),
}


@pytest.mark.parametrize("kind", IN_THE_PLACE)
def test_a_run_whose_files_are_something_else_is_refused_before_anything_is_written(tmp_path, whole, kind):
    source = load_path.resolve(whole)
    names = ["transcripts", "tensorboard", "best"]
    if kind != "file":
        names += [f"{name}.jsonl" for name in run_dir.LINE_FILES] + ["summary.json", "args.yaml", "run.json", ".lock"]
    for name in names:
        if kind == "folder" and "." not in name:
            continue
        entry, aside = whole / name, tmp_path / "aside"
        there = entry.exists()
        if there:
            entry.rename(aside)
        IN_THE_PLACE[kind](entry)
        before = {path: path.lstat().st_mtime_ns for path in whole.rglob("*")}
        with pytest.raises(ConfigError, match=f"{name} is no regular"):
            RunDir.open(whole, {**ARGS, "lr": 1.0}, source)
        assert {path: path.lstat().st_mtime_ns for path in whole.rglob("*")} == before, name
        entry.rmdir() if kind == "folder" else entry.unlink()
        if there:
            aside.rename(entry)
    with RunDir.open(whole, ARGS, source):
        pass


def test_a_run_without_an_intact_checkpoint_is_told_of_once(whole, caplog):
    for point in (whole / "checkpoints").iterdir():
        (point / "manifest.json").write_text("{", encoding="utf-8")
    with pytest.raises(CheckpointError, match=r"no checkpoint in .* is intact"):
        load_path.resolve(whole)
    assert caplog.text == ""
