"""The command line: strict names, precedence, one sentence for bad input, and the files a run leaves."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import runpy
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from helpers_flags import later_wins
from helpers_warm import run_python, start_python
from tokenizers import Regex, normalizers

from mafrt.algorithms import ALGORITHMS
from mafrt.config.algorithm import AlgorithmSettings
from mafrt.config.team import Team
from mafrt.config.train_config import PlayConfig, RunConfig, TrainConfig
from mafrt.core.errors import ConfigError
from mafrt.core.extras import extras, install, package_name
from mafrt.core.shipped import SHIPPED, shipped
from mafrt.envs.math.build import problems
from mafrt.envs.workflows.registry import WORKFLOWS
from mafrt.scripts import bench, check_env, collect, evaluate, info, show, train, train_code, train_math
from mafrt.scripts import main as console
from mafrt.scripts.cli.command import Command
from mafrt.scripts.cli.go_on import go_on, interrupted
from mafrt.scripts.cli.loading import env_arguments
from mafrt.scripts.cli.run_main import run_main
from mafrt.scripts.cli.settings import TRAIN, train_config
from mafrt.scripts.cli.values import convert, read_yaml
from mafrt.storage.transcript_files import read_transcript, transcript_files

pytestmark = pytest.mark.takes(fast=6, slow=37)

ROOT = Path(__file__).resolve().parents[2]
COMMAND = Command("demo", "A demonstration.", TRAIN)
SHORT = ["--iterations", "1", "--n_rollout_threads", "2", "--max_new_tokens", "4", "--eval_episodes", "0"]
SCRIPTS = sorted(console.COMMANDS)

GOOD_ENV = """
from mafrt import Env, StepResult

class Echo(Env):
    agents = ("speaker",)

    def __init__(self, word="yes"):
        self.word = word

    def reset(self, seed=None, options=None):
        return {"speaker": f"Say {self.word}."}, {}

    def step(self, actions):
        return StepResult({}, {"speaker": float(self.word in actions["speaker"])}, True, False, {})

class Broken(Echo):
    def step(self, actions):
        return StepResult({}, {"nobody": 1.0}, True, False, {})

class Raising(Echo):
    def step(self, actions):
        raise KeyError("a mistake of its own")
"""


@pytest.fixture
def workdir(tmp_path, monkeypatch):
    """An empty current directory, which `--env module:Class` looks into as well."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "my_game", raising=False)
    return tmp_path


def refused(capsys, main, *argv) -> str:
    """The sentence that `main(argv)` ends with: exit code 2, one line on stderr, no traceback."""
    code = main([str(word) for word in argv])
    said = capsys.readouterr().err
    assert code == 2, said
    assert said.startswith("error: ") and said.count("\n") == 1 and said.endswith("\n"), said
    assert "Traceback" not in said
    return said


def fingerprint(folder: Path) -> dict[str, str]:
    """Every file under `folder` with its hash."""
    return {str(p): hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(folder.rglob("*")) if p.is_file()}


# ------------------------------------------------------------------------------------------------- reading settings


def test_defaults_are_those_of_the_dataclasses():
    assert train_config(COMMAND.read([])) == TrainConfig()


def test_flags_win_over_yaml_which_wins_over_defaults(tmp_path):
    config = tmp_path / "a.yaml"
    config.write_text("lr: 3e-5\nseed: 7\nfreeze: [solver]\nvalue_clip: none\n")
    settings = COMMAND.read(["--config", str(config), "--seed", "9", "--gamma=0.5"])
    # 3e-5 is a text to YAML 1.1, which wants 3.0e-5; it has to arrive as a number all the same.
    assert (settings["lr"], settings["seed"], settings["gamma"]) == (3e-5, 9, 0.5)
    assert settings["freeze"] == ("solver",) and settings["value_clip"] is None
    assert settings["iterations"] == RunConfig().iterations
    assert settings.flags == {"seed", "gamma"} and settings.given == {"lr", "seed", "freeze", "value_clip", "gamma"}


def test_a_command_has_defaults_of_its_own_below_the_yaml(tmp_path):
    command = Command("demo", "", TRAIN, defaults={"iterations": 5})
    assert command.read([])["iterations"] == 5
    assert command.read([], below={"iterations": 6, "unheard_of": 1})["iterations"] == 6
    (tmp_path / "a.yaml").write_text("iterations: 7")
    assert command.read(["--config", str(tmp_path / "a.yaml")], below={"iterations": 6})["iterations"] == 7


def test_a_workflow_brings_its_team_unless_one_is_named(tmp_path):
    read, own = train_math.COMMAND.read, ["--profile_path", "mine.json"]
    for name, kind in WORKFLOWS.all():
        wanted = kind.profile or "profiles/quickstart_math.json"
        assert read(["--workflow", name])["profile_path"] == wanted
        assert read(["--workflow", name, *own])["profile_path"] == "mine.json"
        if kind.profile is not None:
            kind(Team.load(shipped(kind.profile)), 2 if name == "search" else 1, True)  # which takes it
    run = {"profile_path": "profiles/math_dual.json", "workflow": "chain"}
    assert read(["--workflow", "vote"], below=run)["profile_path"] == run["profile_path"]
    (tmp_path / "a.yaml").write_text("workflow: debate")
    assert read(["--config", str(tmp_path / "a.yaml")])["profile_path"] == "profiles/solvers.json"


@pytest.mark.parametrize(
    ("argv", "name", "value"),
    [
        (["--freeze", "a", "b"], "freeze", ("a", "b")),
        (["--freeze", "a,b"], "freeze", ("a", "b")),
        (["--freeze", "a", "--freeze", "b"], "freeze", ("a", "b")),
        (["--freeze", "none"], "freeze", ()),
        (["--freeze"], "freeze", ()),
        (["--no-log_episodes"], "log_episodes", False),
        (["--log_episodes"], "log_episodes", True),
        (["--target_kl", "none"], "target_kl", None),
        (["--target_kl", "0.5"], "target_kl", 0.5),
        (["--entropy_coef", "1e-3"], "entropy_coef", 1e-3),
        (["--reward_weight", "-1e-3"], "reward_weight", -1e-3),
        (["--bootstrap", "none"], "bootstrap", "none"),
    ],
)
def test_values(argv, name, value):
    assert COMMAND.read(argv)[name] == value


@pytest.mark.parametrize(
    ("argv", "wanted"),
    [
        (["--lrr", "1"], "There is no flag '--lrr'; did you mean '--lr'?"),
        (["--n_rollout_thread", "1"], "did you mean '--n_rollout_threads'?"),  # an unambiguous beginning is refused
        (["--size", "1"], "There is no flag '--size'; --help all"),  # that of no other thing, critic_hidden_size
        (["--n-sample", "1"], "did you mean '--n_samples'?"),
        (["--lr"], "expected one argument"),
        (["--lr", "fast"], "--lr is 'fast'; expected a number."),
        (["--lr", "nan"], "expected a number"),
        (["--seed", "1.5"], "expected a whole number"),
        (["--seed", "none"], "expected a whole number"),
        (["--level", "tokens"], "choose one of token, action"),
        (["7"], "'7' stands alone"),
        (["--log_episodes", "false"], "takes no value, found 'false'"),
        (["--gamma", "2"], "gamma is 2.0; choose a value in [0, 1]"),
        (["--n_rollout_threads", "5", "--n_samples", "2"], "does not divide"),
    ],
)
def test_bad_flags_are_named(argv, wanted):
    with pytest.raises(ConfigError) as error:
        train_config(COMMAND.read(argv))
    assert wanted in str(error.value)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("lrr: 1", "There is no setting 'lrr'; did you mean 'lr'?"),
        ("1: 2", "There is no setting '1'"),
        ("lr: fast", "lr in"),
        ("lr: true", "expected a number"),
        ("seed: 1.0", "expected a whole number"),
        ("log_episodes: 1", "expected true or false"),
        ("level: [token]", "expected text"),
        ("lora_targets: [[a]]", "expected text"),
        ("- a", "holds a list"),
        ("a: [", "not valid YAML"),
    ],
)
def test_bad_yaml_is_named(tmp_path, text, wanted):
    config = tmp_path / "a.yaml"
    config.write_text(text)
    with pytest.raises(ConfigError) as error:
        COMMAND.read(["--config", str(config)])
    assert wanted in str(error.value) and str(config) in str(error.value)


@pytest.mark.parametrize("value", ["2026-01-01", "2026-01-01 10:00:00", "!!set {a, b}", "!!binary aGk="])
@pytest.mark.parametrize("name", ["freeze", "lora_targets", "tools"])
def test_a_list_of_yaml_holds_texts_and_numbers_only(tmp_path, name, value):
    path = tmp_path / "c.yaml"
    path.write_text(f"{name}: {value}\n")
    with pytest.raises(ConfigError, match=f"{name} in .* is "):
        train_math.COMMAND.read(["--config", str(path)])


def test_yaml_that_cannot_be_read(tmp_path):
    for path in (tmp_path / "missing.yaml", tmp_path):
        with pytest.raises(ConfigError, match="cannot be read"):
            read_yaml(path)
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="not text"):
        read_yaml(tmp_path / "binary.yaml")


def test_every_setting_survives_args_yaml(tmp_path):
    """What `write_args` writes of a run is read back as the same settings."""
    from mafrt.storage.args_file import write_args

    argv = ["--freeze", "a", "b", "--dual_clip", "3", "--value_clip", "none", "--opti_eps", "1e-9", "--seed", "4"]
    settings = COMMAND.read(argv)
    write_args(tmp_path / "args.yaml", settings.values)
    again = COMMAND.read(["--config", str(tmp_path / "args.yaml")])
    assert again.values == settings.values and again.given == set(settings.values)


def test_help_lists_every_flag_with_its_default(capsys):
    with pytest.raises(SystemExit) as left:
        train_math.main(["--help", "all"])
    said = " ".join(capsys.readouterr().out.split())
    assert left.value.code == 0
    for name, setting in train_math.COMMAND.settings().items():
        assert f"--{name} " in said or f"--{name}, " in said
        assert " ".join(setting.help.partition("; default: ")[0].split()) in said
    assert "(default: profiles/quickstart_math.json)" in said and "(default: 0.0001)" in said


def test_help_shows_the_flags_that_matter_and_how_to_see_the_others(capsys):
    for command, flags in ((train_math, 12), (train, 14)):
        with pytest.raises(SystemExit):
            command.main(["--help"])
        said = capsys.readouterr().out
        assert len(re.findall(r"^  --\w+ ", said, re.M)) == flags and "--help all" in said
        assert len(said.splitlines()) < 50
    assert all(f"--{name} " in said for name in ("env", "dataset_path", "reward", "workflow"))  # of train


def test_flags_of_marft_keep_their_names():
    """Those of MARFT's flags that mean the same here (issue 2, point 9)."""
    marft = """model_name_or_path load_path n_agents profile_path agent_iteration_interval n_rollout_threads
    episode_length horizon ppo_epoch num_mini_batch lr critic_lr clip_param gamma gae_lambda entropy_coef warmup_steps
    normalization_mode max_new_tokens context_window save_interval seed dataset_path"""
    assert set(marft.split()) <= train_math.COMMAND.settings().keys()
    assert {"iterations", "run_dir"} <= train_math.COMMAND.settings().keys()


def test_no_two_groups_of_a_command_share_a_name():
    for module in (train, train_math, evaluate, check_env):
        names = [name for kind in module.COMMAND.groups for name in Command("", "", (kind,)).settings()]
        assert len(names) == len(set(names)), module.__name__


def test_env_arguments():
    given = ("size=4", "name=four", 'flags={"a": [1]}', '{"x": null, "y": true}', "path=a=b")
    assert env_arguments(given, "env_kwargs") == {
        "size": 4,
        "name": "four",
        "flags": {"a": [1]},
        "x": None,
        "y": True,
        "path": "a=b",
    }
    for bad in ("size", "=4", "a-b=1", "{a: 1}"):
        with pytest.raises(ConfigError, match="--env_kwargs holds"):
            env_arguments((bad,), "env_kwargs")


def test_env_arguments_come_from_yaml_too(tmp_path):
    (tmp_path / "a.yaml").write_text("env_kwargs: {size: 4, names: 'a,b'}\n")
    settings = train.COMMAND.read(["--config", str(tmp_path / "a.yaml")])
    assert env_arguments(settings["env_kwargs"], "env_kwargs") == {"size": 4, "names": "a,b"}
    settings = train.COMMAND.read(["--env_kwargs", '{"size": 4, "b": 1}', "--env_kwargs", "names=a,b"])
    assert env_arguments(settings["env_kwargs"], "env_kwargs") == {"size": 4, "b": 1, "names": "a,b"}


def test_a_typed_flag_sets_aside_what_answers_the_same_question(tmp_path):
    """`epochs` of a file or a run is no reason to play more iterations than were typed."""
    (tmp_path / "a.yaml").write_text("epochs: 2\nload_in_4bit: true\n")
    settings = train_math.COMMAND.read(["--config", str(tmp_path / "a.yaml"), "--iterations", "3", "--load_in_8bit"])
    assert (settings["iterations"], settings["epochs"]) == (3, 0)
    assert settings["load_in_8bit"] and not settings["load_in_4bit"]
    settings = train_math.COMMAND.read(["--iterations", "3"], below={"epochs": 4, "iterations": 9})
    assert (settings["iterations"], settings["epochs"]) == (3, 0)
    settings = train_math.COMMAND.read(["--config", str(tmp_path / "a.yaml")], below={"iterations": 9, "epochs": 0})
    assert settings["epochs"] == 2
    # args.yaml of a run holds both, and the typed flag is the one that counts.
    (tmp_path / "b.yaml").write_text("epochs: 0\niterations: 7\n")
    assert train_math.COMMAND.read(["--config", str(tmp_path / "b.yaml"), "--epochs", "5"])["epochs"] == 5
    (tmp_path / "c.yaml").write_text("program: mine.py:run\n")
    settings = train.COMMAND.read(["--config", str(tmp_path / "c.yaml"), "--env", "sudoku"])
    assert settings["env"] == "sudoku" and settings["program"] is None


@pytest.mark.parametrize("words, needs", [
    (["--coach_concurrency", "2"], "--coach"),
    (["--coach_rubric", "math"], "--coach"),
    (["--vllm_servers", "http://127.0.0.1:1"], "--engine vllm"),
    (["--gpu_memory_utilization", "0.5"], "--engine vllm"),
    (["--league_interval", "3"], "--league"),
    (["--max_rollbacks", "3", "--on_collapse", "warn"], "--on_collapse rollback"),
    (["--tasks_path", "x.jsonl"], "--program"),
    (["--program_timeout_s", "3"], "--program"),
    (["--program", "a.py:run", "--env_kwargs", "a=1"], "--env"),
    (["--coach", "rules", "--coach_concurrency", "2"], "a coach behind an API"),
    (["--coach", "local", "--coach_price_in", "2"], "a coach behind an API"),
    (["--coach", "rules", "--coach_max_tokens", "9"], "a coach that is a model"),
    (["--kl_horizon", "5", "--kl_coef", "1"], "--kl_target"),
    (["--kl_estimator", "k3", "--kl_in", "reward", "--kl_coef", "1"], "--kl_in loss"),
    (["--on_collapse", "stop", "--eval_episodes", "0"], "--eval_episodes"),
    (["--keep_best", "--eval_episodes", "0"], "--eval_episodes"),
])  # fmt: skip
def test_a_flag_that_would_do_nothing_is_refused(capsys, words, needs):
    assert f"has no effect without {needs}" in refused(capsys, train.main, *words)


@pytest.mark.parametrize(("words", "needs"), [
    (["--problem_field", "question"], "--dataset_path"),
    (["--answer_field", "a.b"], "--dataset_path"),
])  # fmt: skip
def test_a_flag_of_data_without_data_is_refused(capsys, words, needs):
    assert f"has no effect without {needs}" in refused(capsys, train_math.main, *words)


@pytest.mark.slow
def test_a_run_that_has_more_iterations_behind_it_than_asked_for_is_refused(capsys, workdir):
    short = ["--n_rollout_threads", "2", "--max_new_tokens", "4", "--eval_episodes", "0"]
    assert train_math.main([*short, "--iterations", "2", "--run_dir", "run"]) == 0
    capsys.readouterr()
    assert "2 iterations behind it" in refused(capsys, train_math.main, "--load_path", "run", "--iterations", "1")
    # As many as are done is no fault: there is nothing left to train.
    assert train_math.main(["--load_path", "run", "--iterations", "2"]) == 0
    assert len(list(Path("run/checkpoints").iterdir())) == 1


def test_convert_names_where_the_value_stood():
    setting = Command("", "", (PlayConfig,)).settings()["top_k"]
    with pytest.raises(ConfigError, match=r"^top_k in x\.yaml is \[1\]; expected a whole number\.$"):
        convert(setting, [1], "top_k in x.yaml")


# ---------------------------------------------------------------------------------------------------- bad input


def test_unknown_flags_and_commands(capsys):
    assert "did you mean '--seed'?" in refused(capsys, train_math.main, "--sed", 3)
    assert "did you mean '--load_path'?" in refused(capsys, evaluate.main, "--loadpath", "x")
    assert "did you mean 'train_math'?" in refused(capsys, console.main, "train_maths")
    assert "did you mean '--seed'?" in refused(capsys, console.main, "train", "math", "--sed", 3)
    assert "did you mean '--seed'?" in refused(capsys, console.main, "train_math", "--sed", 3)
    assert "There is no flag '--x'" in refused(capsys, info.main, "--x")


@pytest.mark.parametrize(
    ("content", "wanted"),
    [
        (None, "data.jsonl does not exist"),
        ("", "empty"),
        ('{"problem": "1 + 1", "answer": "2"}\n{"problem": "1 + 2"}\n', "line 2"),
        ('{"answer": "2"}\n', "line 1"),
        ('{"problem": "1 + 1", "answer": \n', "line 1"),
    ],
)
def test_bad_data_file(capsys, workdir, content, wanted):
    if content is not None:
        Path("data.jsonl").write_text(content)
    for argv in (
        (train_math.main, "--dataset_path", "data.jsonl"),
        (train_math.main, "--eval_dataset_path", "data.jsonl"),
        (evaluate.main, "--dataset_path", "data.jsonl"),
    ):
        said = refused(capsys, *argv)
        assert wanted in said and "data.jsonl" in said
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    ("profile", "wanted"),
    [
        (None, "There is no team file team.json"),
        ('[{"prompt": "x"}]', "lacks the key 'role'"),
        ('[{"role": "a"}, {"role": "a"}]', "role 'a' appears twice"),
        ('[{"role": "a", "promt": "x"}]', "did you mean 'prompt'?"),
        ('[{"role": "a"', "not JSON"),
        ('[{"role": "a"}]', "with_answer"),
    ],
)
def test_bad_profile(capsys, workdir, profile, wanted):
    if profile is not None:
        Path("team.json").write_text(profile)
    assert wanted in refused(capsys, train_math.main, "--profile_path", "team.json")
    assert not Path("runs").exists()


def test_n_agents_that_contradict_the_team(capsys, workdir):
    assert "n_agents is 3" in refused(capsys, train_math.main, "--n_agents", 3)
    Path("my_game.py").write_text(GOOD_ENV)
    assert "n_agents is 2" in refused(capsys, train.main, "--env", "my_game:Echo", "--n_agents", 2)


@pytest.mark.slow
def test_bad_environments(capsys, workdir):
    Path("my_game.py").write_text(GOOD_ENV)
    Path("team.json").write_text('[{"role": "singer"}]')
    assert "Name an environment" in refused(capsys, train.main)
    assert "did you mean 'math'?" in refused(capsys, train.main, "--env", "maths")
    assert "no module 'your_game'" in refused(capsys, train.main, "--env", "your_game:Echo")
    assert "did you mean 'Echo'?" in refused(capsys, train.main, "--env", "my_game:Ecko")
    for main in (train.main, check_env.main):
        said = refused(capsys, main, "--env", "my_game:Broken")
        assert "breaks the contract" in said and "'nobody'" in said
        assert "a mistake of its own" in refused(capsys, main, "--env", "my_game:Raising")
        assert "colour" in refused(capsys, main, "--env", "my_game:Echo", "--env_kwargs", "colour=red")
    said = refused(capsys, train.main, "--env", "my_game:Echo", "--profile_path", "team.json")
    assert "singer" in said and "speaker" in said
    assert not Path("runs").exists()


def test_an_environment_that_raises_while_training(capsys, workdir):
    """Unchecked, it still ends in one sentence (after the library's warnings), and with no adapter written."""
    Path("my_game.py").write_text(GOOD_ENV)
    argv = later_wins("--env", "my_game:Raising", "--no-check_env", "--run_dir", "run", *SHORT, "--eval_episodes", "2")
    assert train.main(argv) == 2
    last = capsys.readouterr().err.strip().splitlines()[-1]
    assert last.startswith("error: ") and "a mistake of its own" in last
    assert not list(Path("run").rglob("*.safetensors"))


def test_model_that_does_not_exist(capsys, workdir):
    assert "no_model" in refused(capsys, train_math.main, "--model_name_or_path", "./no_model")
    assert "no_model" in refused(capsys, evaluate.main, "--model_name_or_path", "./no_model")
    Path("no_model").mkdir()
    assert "config.json" in refused(capsys, train_math.main, "--model_name_or_path", "./no_model")


def test_device_that_does_not_exist(capsys, workdir):
    for device in ("cuda:99", "toaster"):
        assert f"device '{device}' cannot be used" in refused(capsys, train_math.main, "--device", device)
    assert not Path("runs").exists()


def test_prompt_longer_than_the_context_window(capsys, workdir):
    said = refused(capsys, train_math.main, "--context_window", 16, "--run_dir", "run")
    assert "16" in said and not list(Path(".").rglob("*.safetensors"))


def test_run_dir_that_is_taken(capsys, workdir):
    Path("run").mkdir()
    Path("run/notes.txt").write_text("mine")
    Path("file").write_text("mine")
    assert "cannot be" in refused(capsys, train_math.main, "--run_dir", "file/run", *SHORT)
    before = fingerprint(workdir)
    assert "run_dir run is not empty" in refused(capsys, train_math.main, "--run_dir", "run")
    assert "is a file" in refused(capsys, train_math.main, "--run_dir", "file")
    assert fingerprint(workdir) == before


def test_evaluate_refuses_what_it_cannot_do(capsys, workdir):
    assert "nothing would be played" in refused(capsys, evaluate.main, "--k", 0, "--no-greedy")
    assert "above 0" in refused(capsys, evaluate.main, "--temperature", 0)
    assert "k is -1" in refused(capsys, evaluate.main, "--k", -1)
    assert "cannot be written" in refused(capsys, evaluate.main, "--output", "no_folder/numbers.json")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of two short iterations on the shipped base."""
    run_dir = tmp_path_factory.mktemp("cli") / "run"
    argv = [*SHORT[2:], "--iterations", "2", "--run_dir", str(run_dir), "--save_interval", "1", "--lr", "1e-3"]
    assert train_math.main(argv) == 0
    return run_dir


def lines_of(run):
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_bad_load_paths(capsys, workdir, run):
    before = fingerprint(run)
    for main in (train_math.main, evaluate.main):
        assert "nowhere does not exist" in refused(capsys, main, "--load_path", "nowhere")
        Path("empty").mkdir(exist_ok=True)
        assert "empty holds no run" in refused(capsys, main, "--load_path", "empty")
        # Adapters of another team: the trio's are not those of reasoner and actor.
        words = ["--load_path", run, "--profile_path", "profiles/math_trio.json", "--accept_changes"]
        said = refused(capsys, main, *words)
        assert "holds no adapter" in said and "actor" in said
    assert fingerprint(run) == before


@pytest.mark.slow
def test_missing_and_corrupt_adapters(capsys, workdir, run):
    import shutil

    newest = run / "checkpoints" / "step_000002"
    shutil.copytree(newest / "reasoner", "adapters/reasoner")
    argv = ["--load_path", "adapters", "--run_dir", "new", *SHORT]
    assert "no adapter 'actor'" in refused(capsys, train_math.main, *argv)
    shutil.copytree(newest / "actor", "adapters/actor")
    weights = Path("adapters/actor/adapter_model.safetensors")
    weights.write_bytes(weights.read_bytes()[:-100])
    assert "actor" in refused(capsys, train_math.main, *argv)
    weights.unlink()
    assert "adapter_model.safetensors" in refused(capsys, train_math.main, *argv)
    shutil.copytree(newest, "damaged")
    config = Path("damaged/actor/adapter_config.json")
    config.write_text(config.read_text().replace("}", " }"))
    assert "damaged" in refused(capsys, train_math.main, "--load_path", "damaged", "--run_dir", "new", *SHORT)
    assert not Path("new").exists()


# ----------------------------------------------------------------------------------------------- what a run leaves


def test_a_run_and_its_files(run):
    import yaml

    args = yaml.safe_load((run / "args.yaml").read_text())
    expected = train_math.COMMAND.settings().keys() - {"run_dir", "set_aside", "accept_changes"}
    expected -= {name for name in expected if name.partition("_")[0] == "ray"}  # where it was started, not what it is
    expected -= AlgorithmSettings.flags().keys() - ALGORITHMS["ppo"].flat().keys()
    assert args.keys() == expected and args["lr"] == 1e-3 and args["profile_path"] == "profiles/quickstart_math.json"
    summary = json.loads((run / "summary.json").read_text())
    assert {"before", "after", "greedy_before", "greedy_after", "train_seconds", "seed"} <= summary.keys()
    assert summary["seed"] == 1 and summary["train_seconds"] > 0 and summary["before"] is None
    assert (run / "checkpoints" / "step_000002" / "actor" / "adapter_config.json").is_file()
    assert len((run / "metrics.jsonl").read_text().splitlines()) == 2


@pytest.mark.slow
def test_resuming_takes_the_settings_of_the_run(capsys, run, workdir):
    """Without --config, all settings are the run's own; a flag wins, and iterations may be raised."""
    import shutil

    import yaml

    shutil.copytree(run, "run")
    assert train_math.main(["--load_path", "run", "--iterations", "3"]) == 0
    assert "3 iterations" in capsys.readouterr().out
    args = yaml.safe_load(Path("run/args.yaml").read_text())
    assert args["lr"] == 1e-3 and args["iterations"] == 3 and args["n_rollout_threads"] == 2
    assert Path("run/checkpoints/step_000003").is_dir()
    # The same by the words that the end of a run prints, in a folder of its own.
    argv = ["--config", "run/args.yaml", "--load_path", "run", "--iterations", "4", "--run_dir", "other"]
    assert train_math.main(argv) == 0
    assert not Path("run/checkpoints/step_000004").exists()
    assert len(Path("other/metrics.jsonl").read_text().splitlines()) == 4
    assert yaml.safe_load(Path("other/args.yaml").read_text())["load_path"] is None


def test_a_run_goes_on_only_with_its_own_script(capsys, workdir, run):
    said = refused(capsys, train_code.main, "--load_path", run)
    assert "problem_field" in said and "go on with it by mafrt train_math" in said


@pytest.mark.slow
def test_train_goes_on_with_a_run_of_any_script(workdir, run):
    whole = lines_of(run)
    shutil.copytree(run, "copy")
    assert train.main(["--load_path", "copy", "--iterations", str(len(whole) + 1)]) == 0
    assert lines_of(Path("copy"))[:-1] == whole


@pytest.mark.slow
def test_args_yaml_repeats_a_run(run, workdir):
    assert train_math.main(["--config", str(run / "args.yaml"), "--run_dir", "again"]) == 0
    assert Path("again/metrics.jsonl").read_bytes() == (run / "metrics.jsonl").read_bytes()
    assert Path("again/args.yaml").read_bytes() == (run / "args.yaml").read_bytes()


@pytest.mark.slow
def test_set_aside_keeps_the_earlier_run(capsys, workdir):
    Path("run").mkdir()
    Path("run/notes.txt").write_text("mine")
    # Refused settings move nothing.
    refused(capsys, train_math.main, "--run_dir", "run", "--set_aside", "--profile_path", "none.json")
    assert Path("run/notes.txt").exists()
    assert train_math.main(["--run_dir", "run", "--set_aside", *SHORT[2:], "--iterations", "0"]) == 0
    assert Path("run.1/notes.txt").read_text() == "mine" and Path("run/args.yaml").is_file()


@pytest.mark.slow
def test_evaluate_a_run(capsys, workdir, run):
    argv = ["--load_path", str(run), "--k", "2", "--tasks", "3", "--output", "numbers.json"]
    assert evaluate.main(argv) == 0
    said = capsys.readouterr().out
    assert "avg@2" in said and "pass@2" in said and "greedy" in said
    numbers = json.loads(Path("numbers.json").read_text())
    assert len(numbers["scores"]) == 3 and all(len(scores) == 2 for scores in numbers["scores"].values())
    # Sampling is the run's own, which said at most 4 tokens a turn; a flag wins.
    assert numbers["settings"]["max_new_tokens"] == 4 and numbers["settings"]["seed"] == 1
    assert "numbers.json exists" in refused(capsys, evaluate.main, *argv)
    assert evaluate.main([*argv, "--overwrite", "--max_new_tokens", "5", "--no_greedy"]) == 0
    numbers = json.loads(Path("numbers.json").read_text())
    assert numbers["settings"]["max_new_tokens"] == 5 and not numbers["greedy_scores"]


@pytest.mark.slow
def test_an_evaluation_records_its_conversations(capsys, monkeypatch, workdir, run):
    argv = ["--load_path", str(run), "--k", "1", "--tasks", "3", "--record_dir", "seen", "--transcript_share", "0.99"]
    assert evaluate.main(argv) == 0
    assert "mafrt show seen lists them" in capsys.readouterr().out
    [file] = transcript_files(Path("seen"))
    recorded = read_transcript(file)
    assert (file.kind, file.iteration, recorded.problem) == ("evaluation", 2, None)
    assert {episode["id"].split("-")[0] for episode in recorded.episodes} == {"sampled", "greedy"}
    assert all(turn["observation"] and "evidence" in turn for e in recorded.episodes for turn in e["turns"])
    assert show.main(["seen", "--kind", "sampled"]) == 0 and "3 episodes" in capsys.readouterr().out
    assert "seen holds conversations" in refused(capsys, evaluate.main, *argv)
    assert "is a run, which records" in refused(capsys, evaluate.main, *argv[:-4], "--record_dir", str(run))
    before = file.path.read_bytes()

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("mafrt.core.atomic_files.write_atomic", full)
        assert evaluate.main([*argv, "--overwrite", "--seed", "9"]) == 2
    assert "were not written to seen; make room" in capsys.readouterr().err and file.path.read_bytes() == before
    file.path.rename(file.path.with_name("evaluation_000001.jsonl.gz"))
    assert evaluate.main([*argv, "--overwrite", "--seed", "9"]) == 0
    assert [other.path for other in transcript_files(Path("seen"))] == [file.path] and file.path.read_bytes() != before


@pytest.mark.slow
def test_evaluate_the_untrained_base_and_single_adapters(capsys, workdir, run):
    short = ["--k", "1", "--tasks", "2", "--max_new_tokens", "4"]
    assert evaluate.main(short) == 0
    assert evaluate.main(["--load_path", str(run / "checkpoints" / "step_000001"), *short]) == 0


@pytest.mark.slow
@pytest.mark.ci
def test_train_and_evaluate_ones_own_environment(capsys, workdir):
    Path("my_game.py").write_text(GOOD_ENV)
    argv = ["--env", "my_game:Echo", "--env_kwargs", "word=no"]
    argv += later_wins(*SHORT, "--eval_episodes", "2", "--eval_samples", "1")
    assert train.main([*argv, "--eval_env_kwargs", "word=a"]) == 0
    (run_dir,) = Path("runs").iterdir()
    assert run_dir.name.startswith("Echo-20")
    assert (run_dir / "checkpoints" / "step_000001" / "speaker" / "adapter_model.safetensors").is_file()
    capsys.readouterr()
    assert evaluate.main(["--load_path", str(run_dir), "--k", "1", "--tasks", "2"]) == 0
    assert "tasks" in capsys.readouterr().out


@pytest.mark.cases(4)
@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(ALGORITHMS))
def test_every_algorithm_trains(name, capsys, workdir):
    """Every rule that `mafrt info --algorithms` lists goes through an iteration and moves somebody's adapter."""
    assert train_math.main([*SHORT, "--algorithm", name, "--n_samples", "2", "--lr", "1e-3", "--run_dir", "run"]) == 0
    (line,) = Path("run/metrics.jsonl").read_text().splitlines()
    numbers = json.loads(line)
    assert numbers["trained/reasoner"] + numbers["trained/actor"] >= 1
    assert not numbers["skipped_updates"] and not numbers["nonfinite_values"]


def test_held_out_problems_are_the_end_of_ones_own_file(tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_text("".join(json.dumps({"problem": f"{n} + 1", "answer": str(n + 1)}) + "\n" for n in range(25)))
    training, held_out = problems({"dataset_path": path})
    assert [task.answer for task in held_out] == ["24"] and len(training) == 23
    assert [task.answer for task in problems({"dataset_path": path, "eval_split": "test"})[1]] == ["25"]
    training, held_out = problems({"dataset_path": path, "eval_dataset_path": path})
    assert len(training) == len(held_out) == 25
    path.write_text(path.read_text()[: path.read_text().index("9 +")].rsplit("\n", 1)[0] + "\n")
    training, held_out = problems({"dataset_path": path})
    assert len(training) == 9 and not held_out


@pytest.mark.slow
def test_problems_shared_by_training_and_evaluation_are_reported(capsys, workdir):
    Path("data.jsonl").write_text('{"problem": "1 + 1", "answer": "2"}\n{"problem": "2 + 2", "answer": "4"}\n')
    argv = ["--dataset_path", "data.jsonl", "--eval_dataset_path", "data.jsonl", *SHORT[2:], "--iterations", "0"]
    assert train_math.main(argv) == 0
    assert "2 of 2 evaluation problems" in capsys.readouterr().out


# ------------------------------------------------------------------------------------------------------ the rest


def test_console_command(capsys):
    for argv in ([], ["--help"], ["help"]):
        assert console.main(argv) == 0
        said = capsys.readouterr().out
        assert all(name in said for name in console.COMMANDS)
    assert console.main(["info"]) == 0
    said = capsys.readouterr().out
    assert "torch" in said and "[vllm]" in said
    files = {path.stem for path in (ROOT / "scripts").glob("[!_]*.py")}
    assert set(console.COMMANDS) == files - {"main"}  # every script is a command, and every command a script
    assert bench.main(["--help"]) == 0


def test_benchmarks_are_not_installed(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(bench, "CHECKOUT", tmp_path)
    (tmp_path / "bench").mkdir()  # somebody else's
    assert bench.main(["rollout"]) == 2
    said = capsys.readouterr()
    assert "in a checkout" in said.err and not said.out


def test_check_env_says_what_it_found(capsys, workdir):
    Path("my_game.py").write_text(GOOD_ENV)
    assert check_env.main(["--env", "my_game:Echo", "--env_kwargs", "word=no"]) == 0
    assert "keeps the contract: agents speaker" in capsys.readouterr().out


def test_debug_shows_the_traceback(workdir):
    with pytest.raises(ConfigError):
        train_math.main(["--profile_path", "nothing.json", "--debug"])


def test_shipped_files_are_found_from_anywhere(workdir):
    assert shipped("profiles/quickstart_math.json").is_file() and shipped("configs/quickstart_math.yaml").is_file()
    assert shipped("other/quickstart.json") == Path("other/quickstart.json")
    Path("profiles").mkdir()
    Path("profiles/quickstart_math.json").write_text("[]")
    assert shipped("profiles/quickstart_math.json") == Path("profiles/quickstart_math.json")  # one's own comes first


def test_quickstart_config_is_valid():
    settings = train_math.COMMAND.read(["--config", str(SHIPPED / "configs" / "quickstart_math.yaml")])
    train_config(settings)
    assert settings["set_aside"] and settings["run_dir"] == "runs/quickstart_math"


def test_every_package_is_in_the_wheel(monkeypatch):
    import setuptools

    listed: list[str] = []
    monkeypatch.setattr(setuptools, "setup", lambda packages: listed.extend(packages))
    monkeypatch.chdir(ROOT)
    runpy.run_path("setup.py")
    tops = {"mafrt": "mafrt", "mafrt.envs": "envs", "mafrt.runners": "runners", "mafrt.scripts": "scripts"}
    inner = {
        ".".join((name, *init.parent.relative_to(ROOT / folder).parts))
        for name, folder in tops.items()
        for init in (ROOT / folder).rglob("__init__.py")
    }
    assert set(listed) == inner | {"mafrt.profiles", "mafrt.configs"} and len(listed) == len(set(listed))


def python(*argv: str, cwd: Path, **kwargs) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *argv], cwd=cwd, capture_output=True, text=True, timeout=300, **kwargs)


@pytest.mark.slow
def test_help_loads_neither_torch_nor_transformers(tmp_path):
    """`--help` has to come back in well under a second; these imports alone take longer.

    One interpreter for all scripts: the first that needs such a module is named.
    """
    code = (
        "import runpy, sys\n"
        f"for path in {[str(ROOT / 'scripts' / (name + '.py')) for name in SCRIPTS]!r}:\n"
        "    sys.argv = [path, '--help']\n"
        "    try:\n        runpy.run_path(path, run_name='__main__')\n"
        "    except SystemExit as left:\n        assert not left.code, (path, left.code)\n"
        "    heavy = {'torch', 'transformers', 'numpy', 'peft'} & set(sys.modules)\n"
        "    assert not heavy, (path, heavy)\n"
    )
    done = python("-c", code, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("usage: ") == len(SCRIPTS)


@pytest.mark.slow
def test_a_script_from_another_folder(tmp_path):
    done = python(str(ROOT / "scripts" / "train_math.py"), "--sed", "2", cwd=tmp_path)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr == "error: There is no flag '--sed'; did you mean '--seed'?\n"
    done = python(str(ROOT / "scripts" / "train.py"), "--env", "math", "--profile_path", "nothing.json", cwd=tmp_path)
    assert done.returncode == 2 and done.stderr.startswith("error: There is no team file nothing.json")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("typed", "words"),
    [
        ("/usr/bin/mafrt", "mafrt train_math --load_path runs/x"),
        (str(ROOT / "scripts" / "train_math.py"), "TYPED --load_path runs/x"),
        ("mine.py", "TYPED --load_path runs/x"),
        # An experiment of several stages has flags of its own.
        (str(ROOT / "scripts" / "reproduce" / "games.py"), "mafrt train_math --load_path runs/x"),
    ],
)
def test_the_line_that_goes_on_names_a_command_that_can(monkeypatch, typed, words):
    monkeypatch.setattr(sys, "argv", [typed])
    command = SimpleNamespace(name="train_math")
    found = shlex.split(go_on(command, Path("runs/x")))
    if found[0] != "mafrt":
        assert Path(found.pop(0)).absolute() == Path(sys.executable)
    assert found == words.replace("TYPED", typed).split()


@pytest.mark.slow
def test_a_stopped_run_says_how_to_go_on(tmp_path):
    """SIGTERM: a checkpoint, exit code 0, and words that resume it when typed."""
    script = str(ROOT / "scripts" / "train_math.py")
    argv = [script, *SHORT[2:], "--iterations", "100000", "--run_dir", "run", "--no-log_episodes"]
    process = start_python(*argv, cwd=tmp_path)
    metrics = tmp_path / "run" / "metrics.jsonl"
    deadline = time.monotonic() + 120
    while not (metrics.exists() and metrics.stat().st_size) and time.monotonic() < deadline:
        assert process.poll() is None
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    code, said = process.wait(120), process.stdout
    assert code == 0, said
    done = len(metrics.read_text().splitlines())
    assert f"Stopped by SIGTERM after iteration {done}" in said
    interpreter, *words = shlex.split(said.split("Go on with: ")[1])
    assert interpreter == sys.executable
    again = run_python(*words, "--iterations", str(done + 1), cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    assert len(metrics.read_text().splitlines()) == done + 1


HELD = """
import sys
import time
from pathlib import Path

import mafrt.models.shared_base as module
from mafrt.scripts.main import main


def held(*args, **words):
    Path("loading").touch()
    time.sleep(600)


module.load_pretrained = held
sys.argv = ["mafrt", *sys.argv[1:]]
sys.exit(main())
"""


@pytest.mark.slow
@pytest.mark.ci
@pytest.mark.parametrize("command", ["train_math --run_dir run", "evaluate --env math --record_dir run"])
def test_a_signal_while_a_base_is_loaded_leaves_a_sentence_and_no_file(tmp_path, command):
    (tmp_path / "held.py").write_text(HELD, encoding="utf-8")
    process = start_python("held.py", *command.split(), "--model_name_or_path", "teaching-base", cwd=tmp_path)
    deadline = time.monotonic() + 120
    while not (tmp_path / "loading").exists() and time.monotonic() < deadline:
        assert process.poll() is None, process.stderr
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    assert process.wait(120) == 143, process.stderr
    assert process.stderr.splitlines()[-1:] == ["Stopped by SIGTERM before anything was saved."]
    assert {path.name for path in tmp_path.rglob("*") if path.is_file()} == {"held.py", "loading"}


SLOW_TO_CLOSE = """
import time
from pathlib import Path

from mafrt.engines.local.engine import LocalEngine


class Held(LocalEngine):
    def __init__(self, base, config, window):
        super().__init__(base, max_batch_rows=config.play.max_batch_rows)

    def close(self):
        Path("closing").touch()
        while not Path("close").exists():
            time.sleep(0.01)
"""


@pytest.mark.slow
@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_behind_the_last_save_tells_of_it(tmp_path, second):
    (tmp_path / "held.py").write_text(SLOW_TO_CLOSE, encoding="utf-8")
    argv = ["-m", "mafrt.scripts.main", "train_math", "--engine", "held:Held", *SHORT[2:], "--iterations", "100000"]
    process = start_python(*argv, "--run_dir", "run", cwd=tmp_path)

    def appears(path):
        deadline = time.monotonic() + 120
        while not path.exists() and time.monotonic() < deadline:
            assert process.poll() is None, process.stderr
            time.sleep(0.05)

    appears(tmp_path / "run" / "metrics.jsonl")
    process.send_signal(signal.SIGTERM)
    appears(tmp_path / "closing")
    process.send_signal(second)
    time.sleep(0.2)
    (tmp_path / "close").touch()
    code = process.wait(120)
    if second == signal.SIGTERM:
        assert code == 0 and "Stopped by SIGTERM after iteration" in process.stdout, process.stderr
    else:
        assert code == 130 and "holds the checkpoint of iteration" in process.stderr
    assert "Go on with: " in process.stdout + process.stderr and "before anything" not in process.stderr


@pytest.mark.parametrize(
    "command, config, fits",
    [
        ("train", "dataset_path: stories:train", "the file fits mafrt train_math"),
        ("train_math", "env: referential", "the file fits mafrt train."),
        ("train", "records_path: [a.jsonl]", "the file fits mafrt train_sft"),
        # No command has both, so each name is answered for itself.
        ("train", "dataset_path: stories:train\nenvv: referential", "belongs to mafrt evaluate or train_math or"),
        ("train", "envv: referential\ndataset_path: stories:train", "did you mean"),
    ],
)
def test_a_config_of_another_command_is_told_which(tmp_path, command, config, fits):
    from importlib import import_module

    path = tmp_path / "team.yaml"
    path.write_text(f"lr: 1e-4\n{config}\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=f"There is no setting '.*'.*{fits}"):
        import_module(f"mafrt.scripts.{command}").COMMAND.read(["--config", str(path)])


def test_every_extra_is_listed_and_its_remedy_works_without_an_index_entry_of_ours(capsys):
    """mafrt is on no package index, so advice names the packages themselves."""
    declared = extras()
    assert {"vllm", "coach", "grpc", "tools", "serve", "wandb"} <= declared.keys()
    for extra, requirements in declared.items():
        command = install(extra)
        assert command.startswith("pip install ") and "mafrt" not in command
        assert all(package_name(requirement) in command for requirement in requirements)
    assert info.main([]) == 0
    shown = capsys.readouterr().out
    assert all(f"[{extra}]" in shown for extra in declared)


def test_no_advice_names_a_package_of_ours_on_an_index():
    root = Path(__file__).parents[2]
    files = [path for folder in ("mafrt", "envs", "runners", "scripts", "docs") for path in (root / folder).rglob("*")]
    for path in [*files, root / "README.md"]:
        if path.suffix in (".py", ".md", ".sh"):
            assert not re.search(r"pip install '?mafrt\b", path.read_text(encoding="utf-8")), path


@pytest.mark.parametrize("main, words, said", [
    (collect.main, ["--model", "x"], "--min_score"),
    (train_math.main, ["--use_eval", "true"], "--eval_interval"),
    (train_math.main, ["--use_weave", "true"], "--report_to"),
    (train_math.main, ["--config_name", "mathchat"], "coming_from.md"),
    (train_math.main, ["--zzz", "1"], "--help all lists them"),
    (train_math.main, ["--sed", "1"], "'--seed'"),
])  # fmt: skip
def test_a_hint_is_near_or_there_is_none(capsys, main, words, said):
    told = refused(capsys, main, *words)
    assert said in told and "did you mean '--help'" not in told and "'--sides'" not in told


def test_a_panic_of_a_tokenizer_is_one_sentence(capsys):
    def body(words):
        normalizers.Replace(Regex("(a+)+$"), "").normalize_str("a" * 60 + "!")
        return 0

    assert run_main(body, []) == 2
    assert [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]


def test_a_third_ctrl_c_waits_until_it_is_told_what_is_saved(tmp_path, monkeypatch, capsys):
    (tmp_path / "checkpoints/step_000003").mkdir(parents=True)
    monkeypatch.setattr("mafrt.scripts.cli.go_on.flags_needed", lambda _: os.kill(os.getpid(), signal.SIGINT) or [])
    before = signal.getsignal(signal.SIGINT)
    try:
        code = interrupted(KeyboardInterrupt(), train_math.COMMAND, tmp_path)
    finally:
        then = signal.signal(signal.SIGINT, before)
    assert code == 130 and then == signal.SIG_DFL
    assert "holds the checkpoint of iteration 3" in capsys.readouterr().err
