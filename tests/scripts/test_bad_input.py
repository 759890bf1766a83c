"""Wrong input typed at the command line: one sentence each, at once, and nothing is written."""

from __future__ import annotations

import errno
import importlib
import logging
import math
import os
import shutil
import threading
import time
from pathlib import Path

import pytest
import yaml

from mafrt.config.setting_synonyms import synonym, synonyms
from mafrt.config.team import Team
from mafrt.core.atomic_files import load_json, new_folder, write_atomic
from mafrt.core.errors import CheckpointError, ConfigError
from mafrt.core.reading import is_file_writable, parse_json, parse_yaml, read_file
from mafrt.scripts import evaluate, train, train_dsbench, train_math, train_sft
from mafrt.scripts.cli.command_names import COMMANDS
from mafrt.scripts.cli.run_main import run_main
from mafrt.scripts.cli.values import read_yaml
from mafrt.storage import checkpoint

DEEP = "[" * 100_000


@pytest.fixture(autouse=True)
def workdir(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def refused(capsys, main, *argv):
    capsys.readouterr()
    assert main([str(word) for word in argv]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error") and said.count("\n") == 1, said
    return said


@pytest.mark.parametrize(
    "words, named",
    [
        (["--seed", "12345678901234567890123"], "seed is"),
        (["--n_rollout_threads", "1000000000"], "n_rollout_threads is"),
        (["--lora_rank", "100000"], "lora_rank is"),
        (["--lora_rank", "500"], "128 wide"),
        (["--lr", "1e99"], "lr is"),
        (["--max_new_tokens", "100000"], "2048 tokens"),
        (["--max_new_tokens", "200", "--context_window", "200"], "200 tokens"),
        (["--iterations", "10000000000"], "iterations is"),
        (["--run_dir", "/proc/none/run"], "cannot be written"),
        (["--run_dir", "two\nlines"], "control characters"),
        (["--run_dir", "red\x1b[31m/run"], "control characters"),
        (["--config", "sixty.yaml"], "seed in sixty.yaml is '1:30'; expected a whole number"),
        (["--run_dir", "file/run"], "is a file"),
        (["--profile_path", "/dev/zero"], "is a device or a pipe"),
        (["--profile_path", "pipe"], "is a device or a pipe"),
        (["--config", "pipe"], "is a device or a pipe"),
        (["--config", "/dev/zero"], "is a device or a pipe"),
        (["--config", "deep.yaml"], "nested deeper"),
        (["--config", "twice.yaml"], "'lr' appears twice"),
        (["--profile_path", "deep.json"], "nested too deeply"),
        (["--profile_path", "twice.json"], "'role' appears twice"),
        (["--profile_path", "large.json"], "larger than 64 MiB"),
    ],
)
def test_refused_before_a_model_is_loaded(capsys, monkeypatch, workdir, words, named):
    monkeypatch.setattr("mafrt.scripts.cli.train.load_base", lambda *_: pytest.fail("the model was loaded"))
    Path("file").write_text("")
    Path("deep.yaml").write_text("lr: " + DEEP)
    Path("deep.json").write_text(DEEP)
    Path("twice.yaml").write_text("lr: 1\nlr: 2\n")
    Path("sixty.yaml").write_text("seed: 1:30\n")
    Path("twice.json").write_text('[{"role": "reasoner", "role": "actor"}]')
    if "large.json" in words:
        with open("large.json", "wb") as file:
            file.truncate(65 << 20)
    os.mkfifo("pipe")
    before = sorted(workdir.iterdir())
    assert named in refused(capsys, train_math.main, *words)
    assert sorted(workdir.iterdir()) == before


def test_an_error_shows_no_control_character_to_the_terminal(capsys):
    said = refused(capsys, train_math.main, "--load_path", "no\x1b[31mred")
    assert "no\ufffd[31mred does not exist" in said and "\x1b" not in said


def test_numbers_of_yaml_are_in_base_ten():
    read = parse_yaml("[010, -07, 0, 0.5, -0, 1_000, 0x10, 1:30, 1:30.5, .inf, 1e-4, 1.0e+3]")
    assert read == ["010", "-07", 0, 0.5, 0, 1000, 16, "1:30", "1:30.5", math.inf, "1e-4", 1000.0]


@pytest.mark.parametrize("flag", ["--tasks", "--k", "--seed", "--baseline_votes", "--max_batch_rows"])
def test_an_evaluation_that_no_machine_could_play_is_refused(capsys, monkeypatch, flag):
    monkeypatch.setattr(evaluate, "load_base", lambda *_: pytest.fail("the model was loaded"))
    words = ["--env", "sudoku", "--baselines", flag, "10" * 12]
    assert f"{flag[2:]} is 10" in refused(capsys, evaluate.main, *words)


@pytest.mark.parametrize("flag", ["--iterations", "--lr", "--seed", "--lora_rank", "--env_max_lost"])
def test_a_number_of_400_digits_is_refused(capsys, flag):
    said = refused(capsys, train_math.main, flag, "9" * 400)
    assert f"{flag[2:]} is " in said and len(said) < 1000
    Path("big.yaml").write_text(f"{flag[2:]}: {'9' * 400}\n")
    assert f"{flag[2:]} in big.yaml is " in refused(capsys, train_math.main, "--config", "big.yaml")


def test_an_output_is_checked_before_the_work(capsys, monkeypatch):
    monkeypatch.setattr(evaluate, "load_base", lambda *_: pytest.fail("the model was loaded"))
    Path("numbers.json").write_text("mine")
    assert "--overwrite" in refused(capsys, evaluate.main, "--output", "numbers.json")
    assert Path("numbers.json").read_text() == "mine"
    assert "cannot be written" in refused(capsys, evaluate.main, "--output", "/proc/numbers.json")
    assert "there is no none" in refused(capsys, evaluate.main, "--output", "none/numbers.json")


@pytest.mark.parametrize("main", [train_math.main, evaluate.main, train_sft.main])
def test_a_hub_id_fails_at_once_where_no_hub_is(capsys, monkeypatch, main):
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    Path("r.jsonl").write_text('{"agent": "a", "prompt": "x", "response": "y"}\n')
    words = ["--records_path", "r.jsonl"] if main is train_sft.main else []
    started = time.monotonic()
    said = refused(capsys, main, *words, "--model_name_or_path", "Nobody/no-such-model")
    assert "cannot be reached" in said and "local cache" in said
    assert time.monotonic() - started < 120  # users are promised ten on a quiet machine


@pytest.mark.parametrize(
    "flag, right",
    [
        ("learning_rate", "lr"),
        ("max_steps", "iterations"),
        ("warmup_ratio", "lr_warmup"),
        ("num_generations", "n_samples"),
        ("adv_estimator", "algorithm"),
        ("ppo_epochs", "ppo_epoch"),
        ("experiment_name", "run_dir"),
    ],
)
def test_flags_of_other_libraries_are_answered_with_the_right_one(capsys, flag, right):
    assert f"here it is --{right}" in refused(capsys, train_math.main, f"--{flag}", "1")
    assert f"here it is --{right}" in refused(capsys, train_math.main, f"--{flag.replace('_', '-')}=1")
    Path("c.yaml").write_text(f"{flag}: 1\n")
    assert f"here it is --{right}" in refused(capsys, train_math.main, "--config", "c.yaml")


@pytest.mark.slow
def test_every_synonym_names_a_flag_that_exists():
    scripts = [importlib.import_module(f"mafrt.scripts.{name}") for name in COMMANDS]
    known = {name for script in scripts if hasattr(script, "COMMAND") for name in script.COMMAND.settings()}
    for name in synonyms():
        meant = synonym(name, known)
        assert meant.flag is None or meant.flag in known, name
    assert synonym("no_such_flag") is None
    assert synonym("num_episodes", {"tasks"}).flag == "tasks" and synonym("num_episodes").flag == "epochs"


def test_a_typing_error_in_another_librarys_flag_is_understood(capsys):
    assert "here it is --lr." in refused(capsys, train_math.main, "--learnig_rate", "1")


def test_dashes_are_taken_for_underscores(capsys):
    settings = train_math.COMMAND.read(
        ["--max-new-tokens", "7", "--eval-samples=3", "--no-log-episodes", "--lr", "-1e-4"]
    )
    assert settings["max_new_tokens"] == 7 and settings["eval_samples"] == 3 and settings["log_episodes"] is False
    assert settings["lr"] == -1e-4


def test_usage_names_the_console_command(capsys):
    with pytest.raises(SystemExit):
        train.main(["--help"])
    assert capsys.readouterr().out.startswith("usage: mafrt train ")


# --------------------------------------------------------------------------------------------- reading in general


def test_only_regular_files_are_read(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path, why in ((tmp_path, "folder"), (tmp_path / "pipe", "device or a pipe"), ("/dev/zero", "device or a pipe")):
        with pytest.raises(OSError, match=why):
            read_file(path)
    (tmp_path / "f").write_bytes(b"x" * 2000)
    with pytest.raises(OSError, match="larger than"):
        read_file(tmp_path / "f", most_mib=0.001)
    assert read_file(tmp_path / "f") == b"x" * 2000


@pytest.mark.slow
@pytest.mark.parametrize("text", [DEEP, "{" * 5000, "- " * 5000 + "x", "a: &x [1]\na: *x", "? [1]\n: 2\n? [1]\n: 3"])
def test_yaml_that_is_no_settings_ends_in_a_yaml_error(text):
    with pytest.raises(yaml.YAMLError):
        parse_yaml(text)


def test_yaml_aliases_and_merges_still_work():
    nine = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
        f"{chr(98 + i)}: &{chr(98 + i)} [{', '.join(['*' + chr(97 + i)] * 9)}]\n" for i in range(9)
    )
    for text, words in (
        (nine, "repeat more than"),
        ("a: &a [*a]", "within what it names"),
        ("a: &a {b: [*a]}", "within"),
    ):
        with pytest.raises(yaml.YAMLError, match=words):
            parse_yaml(text)
    assert parse_yaml("a: &x {b: 1}\nc: *x\nd: {<<: *x, e: 2}") == {"a": {"b": 1}, "c": {"b": 1}, "d": {"b": 1, "e": 2}}


def test_json_with_a_key_twice_or_too_deep_is_no_json(tmp_path):
    for text in ('{"a": 1, "a": 2}', DEEP, '{"a": [{"b": 1, "b": 1}]}'):
        with pytest.raises(ValueError):
            parse_json(text)
        (tmp_path / "x.json").write_text(text)
        with pytest.raises(CheckpointError, match="cannot be read as JSON"):
            load_json(tmp_path / "x.json")
        with pytest.raises(ConfigError, match="team file"):
            Team.load(tmp_path / "x.json")
    assert parse_json('{"a": {"b": 1}, "b": 1}') == {"a": {"b": 1}, "b": 1}


def test_a_pipe_as_manifest_holds_nothing_up(tmp_path, capsys):
    run = tmp_path / "run"
    (run / "checkpoints" / "step_000001").mkdir(parents=True)
    os.mkfifo(run / "checkpoints" / "step_000001" / "manifest.json")
    (run / "args.yaml").write_text("{}")
    (run / "run.json").write_text("{}")
    assert train_math.main(["--load_path", str(run)]) == 2
    assert "no checkpoint in" in capsys.readouterr().err


def test_settings_files_that_hold_something_else(tmp_path):
    for text, why in (("- 1", "a list"), ("3", "a int"), ("a: [", "not valid YAML")):
        (tmp_path / "c.yaml").write_text(text)
        with pytest.raises(ConfigError, match=why):
            read_yaml(tmp_path / "c.yaml")
    (tmp_path / "c.yaml").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="not text"):
        read_yaml(tmp_path / "c.yaml")


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        OSError(errno.EDQUOT, "Disk quota exceeded"),
        OSError(errno.EROFS, "Read-only file system"),
        OSError(errno.EACCES, "Permission denied", "/x\ny"),
        shutil.Error([("a", "b", "[Errno 28] No space left on device: 'a' -> 'b'")]),
        OSError("1024 requested and 32 written"),
        FileNotFoundError(errno.ENOENT, "No usable temporary directory found in ['/tmp', '/var/tmp']"),
        RuntimeError("Error while serializing: IoError(Os { message: No space left on device })"),
    ],
)
def test_what_a_disk_refuses_is_one_sentence(capsys, error):
    def main(argv):
        raise error

    assert run_main(main, []) == 2
    assert len(capsys.readouterr().err.strip().splitlines()) == 1
    for other in (OSError(errno.ECONNREFUSED, "refused"), RuntimeError("a fault of ours")):
        error = other
        with pytest.raises(type(other)):
            run_main(main, [])


def test_a_full_disk_names_the_file(monkeypatch, tmp_path):
    def full(file):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match=r"No space left on device: .*args\.yaml"):
        write_atomic(tmp_path / "args.yaml", b"x")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("number, advice", [(errno.EMFILE, "ulimit -n"), (errno.EFBIG, "ulimit -f")])
def test_a_limit_of_the_process_is_named_with_what_lifts_it(capsys, tmp_path, number, advice):
    def main(argv):
        raise OSError(number, os.strerror(number), *argv)

    for argv in ([], ["x"]):
        assert run_main(main, argv) == 2 and advice in capsys.readouterr().err
    with pytest.raises(CheckpointError, match=f"earlier checkpoints are untouched: .*{advice}.*, then go on"):
        checkpoint.save(tmp_path, 1, {"x": lambda path: main([])})


def test_a_full_disk_names_the_folder_that_is_made(tmp_path):
    with pytest.raises(OSError) as met, new_folder(tmp_path / "made"):
        raise OSError(errno.ENOSPC, "No space left on device")
    assert met.value.filename == str(tmp_path / "made")


def test_no_file_takes_the_place_of_a_device_or_a_pipe(capsys, tmp_path):
    """Root would replace /dev/null."""
    os.mkfifo(tmp_path / "pipe")
    assert is_file_writable(tmp_path / "pipe") == "it is a device or a pipe"
    said = refused(capsys, train_dsbench.main, "--demonstrations", tmp_path / "pipe")
    assert "is a device or a pipe; name a file" in said


def test_what_a_disk_refuses_to_a_thread_is_one_sentence(capsys, monkeypatch):
    def main(argv):
        for argument in (OSError(errno.ENOSPC, "No space left on device"), RuntimeError("a fault of ours")):
            thread = threading.Thread(target=(lambda error: (_ for _ in ()).throw(error).send), args=(argument,))
            thread.start()
            thread.join()
        return 0

    monkeypatch.setattr(threading, "excepthook", threading.excepthook)
    assert run_main(main, []) == 0
    first, *rest = capsys.readouterr().err.splitlines()
    assert first == "ERROR: a file cannot be written: no space is left on the device."
    assert rest[-1] == "RuntimeError: a fault of ours"


@pytest.mark.parametrize("flag", ["--a.b.c", "--x.v", "--model.m", "--a.e", "--run.o", "--a.p"])
def test_a_letter_at_the_end_of_a_path_is_no_short_option(capsys, flag):
    assert train_math.main([flag, "3"]) == 2
    said = capsys.readouterr().err
    assert f"{flag!r}" in said and not any(word in said for word in ("--config FILE", "--debug", "--run_dir", "--port"))


@pytest.mark.parametrize(
    "words",
    [
        "--target_kl none --ppo_epoch 1",
        "--entropy_coef 0 --entropy_schedule constant",
        "--lr 0 --lr_schedule constant",
        "--lr 0 --lr_warmup 0",
        "--dual_clip none --ppo_epoch 1",
        "--eval_episodes 0 --no-keep_best --eval_interval 0",
        "--save_interval 0 --keep_every 0",
        "--overlong_penalty 0",
        "--coach none --process_weight 0",
        "--n_agents none",
    ],
)
def test_what_is_off_may_be_said_beside_a_setting_without_which_it_does_nothing(capsys, words, tmp_path):
    place = ["--run_dir", str(tmp_path / "run"), "--model_name_or_path", str(tmp_path / "none")]
    assert train_math.main([*place, *words.split()]) == 2
    assert "no effect" not in capsys.readouterr().err


def test_a_warning_names_its_process_where_there_are_several_and_only_there(capsys, monkeypatch):
    for size, begins in (("2", "WARNING (process 1 of 2): "), ("1", "WARNING: ")):
        monkeypatch.setenv("RANK", "1" if size == "2" else "0")
        monkeypatch.setenv("WORLD_SIZE", size)
        run_main(lambda argv: logging.getLogger("mafrt.any").warning("it is so") or 0, [])
        assert capsys.readouterr().err.splitlines()[0] == f"{begins}it is so"


def test_a_base_that_is_not_there_is_told_before_one_is_loaded(capsys):
    assert train.main(["--env", "math", "--model_name_or_path", "./gone"]) == 2
    out, told = capsys.readouterr()
    assert "./gone" in told and "Loading" not in out
