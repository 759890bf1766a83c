"""Environments of `verifiers` in another interpreter: the protocol with a stand-in, and the real package."""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from mafrt.config import permission
from mafrt.config.team import Team
from mafrt.core.errors import ConfigError, EnvError
from mafrt.core.types import Episode, StepResult
from mafrt.environment.contract import checked_step
from mafrt.environment.registry import make_env, takes
from mafrt.envs.verifiers import process
from mafrt.rollout.player import RunningEpisode
from mafrt.scripts import evaluate, train
from mafrt.scripts.cli.loading import team_for

HERE = Path(__file__).parents[1]
ROOT = HERE.parent
ENVS = HERE / "verifiers_envs"
VERSION = "0.4.0"


@pytest.fixture(autouse=True)
def ends_processes():
    yield
    process.close_all()
    process._INTERPRETERS.clear()


def package(folder: Path, version: str = VERSION, init: str = "") -> str:
    """An interpreter that has the stand-in."""
    parts = {
        "verifiers/__init__.py": init,
        "verifiers/v1/__init__.py": (HERE / "verifiers_standin.py").read_text(),
        "verifiers/v1/clients/base.py": "class httpx:\n    create_ssl_context = staticmethod(dict)\n",
        "verifiers/v1/dialects/chat.py": "message_to_wire = dict\n",
        f"verifiers-{version}.dist-info/METADATA": f"Metadata-Version: 2.1\nName: verifiers\nVersion: {version}\n",
    }
    for name in ("harnesses/utils/compaction", "harnesses/utils/mcp", "clients/eval"):
        parts[f"verifiers/v1/{name}.py"] = ""
    for name, text in parts.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return script(folder, f'PYTHONPATH={folder} exec {sys.executable} "$@"')


def script(folder: Path, text: str) -> str:
    file = folder / "python"
    file.write_text(f"#!/bin/sh\n{text}\n")
    file.chmod(0o755)
    return str(file)


@pytest.fixture
def standin(tmp_path):
    python = package(tmp_path)

    def make(name="standin", **given):
        return make_env(f"verifiers:{name}", env_python=python, **given)

    return make


def played(env, answer="x", task=0):
    """All observations and the last result of an episode."""
    seen, info = env.reset(seed=1, options={"task": task})
    shown = [seen]
    while True:
        result = env.step(dict.fromkeys(seen, answer))
        if result.terminated or result.truncated:
            return shown, result, info
        seen = result.observations
        shown.append(seen)


# -------------------------------------------------------------------------------------------------------- the stand-in


def test_each_trace_is_paid_at_its_own_last_turn(standin):
    env = standin()
    assert env.agents == ("first", "second") and env.opponents and env.held_out == {"split": "test"}
    shown, result, info = played(env)
    assert [list(seen) for seen in shown] == [["first"], ["second"], ["first"]]
    assert shown[0]["first"] == [{"role": "user", "content": info["problem"]}]
    # The first trace of `first` ended in step 0; an agent without a recorded reward has none.
    assert result.rewards == {"first": 0.5} and result.info["earlier"] == [("first", 0, 1.0)]
    assert result.info["measures"] == {"first/reward": 0.75, "first/right": 0.75, "first/seen": 2.0, "failed": 0.0}


def test_splits_share_no_task_and_leave_none_out(standin):
    parts = [[task["prompt"] for task in standin(split=name).tasks] for name in ("train", "validation", "test")]
    assert [len(part) for part in parts] == [16, 2, 2]
    assert sorted(itertools.chain(*parts)) == sorted(f"task {place}" for place in range(20))
    assert len(standin(max_tasks=10).tasks) == 8
    assert [len(standin(split=name, number=2).tasks) for name in ("train", "test")] == [2, 2]  # too few to hold out


def test_agents_that_the_environment_does_not_train_are_frozen(standin):
    env = standin(how="frozen")
    assert [agent.freeze for agent in team_for(env, None, None).agents] == [False, True]
    assert not any(agent.freeze for agent in team_for(env, Team.of(env.agents), None).agents)  # the user's word counts


def test_agents_with_a_client_of_their_own_are_not_of_the_team(standin):
    assert standin(agents={"judge": {"model": "m", "client": "elsewhere"}}).agents == ("first", "second")


def test_all_environments_of_an_interpreter_share_one_process(standin):
    one, other = standin(), standin(how="frozen")
    assert one.unwrapped._place is other.unwrapped._place
    pid = one.unwrapped._place.life().process.pid
    played(one), played(other)
    assert one.unwrapped._place.life().process.pid == pid


def test_a_failed_episode_is_lost_or_paid_what_was_said(standin):
    with pytest.raises(EnvError, match=r"verifiers:standin failed: EnvError: run\(\): ValueError: no JSON"):
        played(standin(how="fails"))
    _, result, _ = played(standin(how="fails", failed_reward=-1))
    assert result.rewards == {"first": -1.0, "second": -1.0} and result.info["measures"]["failed"] == 1.0


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("dies", "was lost: the process of verifiers ended with code 3"),
        ("exits", "raised SystemExit: enough"),
        ("nan", "recorded float nan as reward of first; expected a finite number"),
    ],
)
def test_what_breaks_costs_its_episode_and_no_other(standin, how, words):
    broken, whole = standin(how=how), standin()
    with pytest.raises(EnvError, match=words):
        played(broken)
    assert played(whole)[1].rewards == {"first": 0.5}


def test_what_hangs_ends_at_the_deadline(standin):
    for how in ("silent", "blocks"):
        with pytest.raises(EnvError, match="made no call and did not end within 1 s"):
            played(standin(how=how, timeout_s=1.0))


def test_an_episode_that_is_given_up_ends_and_another_begins(standin):
    env = standin()
    env.reset(seed=1)
    env.close()
    assert played(env)[1].terminated


def test_the_process_ends_with_the_trainer(standin):
    env = standin()
    life = env.unwrapped._place.life()
    life.process.stdin.close()
    assert life.process.wait(10) == 0


# ---------------------------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"name": "nope"}, "verifiers:nope is not there: there is no taskset 'nope'"),
        ({"name": "team+standin"}, "is not there: there is no environment 'team'"),
        ({"name": "no/such/file.py"}, "is not there: there is no file .*no/such/file.py"),
        ({"name": "broken"}, "raised RuntimeError: no luck today"),
        ({"name": "mute"}, r"verifiers:mute raised Mute: \(its text raises ValueError\)"),
        ({"name": "leaves"}, "verifiers:leaves raised SystemExit( |$)"),
        ({"name": ""}, "names no taskset; expected verifiers:ID"),
        ({"name": "no/such/file.py+standin"}, "is not there: there is no file .*no/such/file.py"),
        ({"taskset": {"id": "other"}}, "names its taskset twice: leave the id 'other' out"),
        ({"name": "other+standin", "id": "third"}, "names its environment twice: leave the id 'third' out"),
        ({"how": "raises"}, "raised OSError: the data is gone"),
        ({"taskset": {"size": "x"}}, "does not take these settings: taskset.size: Input should be a valid integer"),
        ({"taskset": 3}, "does not take these settings: taskset: Input should be a valid dictionary"),
        ({"number": 0}, "has no tasks"),
        ({"how": "exports nothing"}, "could not be loaded: TypeError: the module exports no Taskset"),
        ({"how": "no agents"}, "has no agent that could be played here: it declares none, or each has a client"),
        ({"agents": {"second": {"max_turns": 0}}}, "gives its agent 'second' max_turns=0, with which it never speaks"),
        ({"agents": {"first": {"model": "gpt"}}}, "names the model 'gpt' for its agent 'first'"),
        ({"agents": {"first": {"harness": HERE}}}, "must be plain JSON"),
        ({"split": "dev"}, "split is 'dev'; choose one of train, validation, test"),
        ({"max_tasks": 0}, "max_tasks is 0"),
        ({"timeout_s": 0}, "timeout_s is 0"),
        ({"failed_reward": "x"}, "failed_reward is 'x'"),
    ],
)
def test_bad_settings_are_told_in_a_sentence(standin, given, words):
    with pytest.raises((EnvError, ConfigError), match=words) as told:
        standin(**given)
    assert "\n" not in str(told.value)


@pytest.mark.slow
def test_what_never_loads_is_given_up_and_the_next_one_loads(standin, monkeypatch):
    monkeypatch.setattr(process, "LOAD_S", 1.0)
    with pytest.raises(EnvError, match="verifiers:sleeps did not load within 1 s"):
        standin("sleeps")
    monkeypatch.undo()
    assert played(standin())[1].terminated


def test_a_harness_that_runs_code_wants_its_place_named(tmp_path):
    python = package(tmp_path)
    standin = tmp_path / "verifiers/v1/__init__.py"
    standin.write_text(standin.read_text().replace('return "bash"', 'return "own"'))
    with pytest.raises(EnvError, match=r"runs what its agent 'first' writes .*name the place"):
        make_env("verifiers:standin", env_python=python)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "is no program that can be run; make an interpreter with it"),
        (f'exec {sys.executable} -I -S "$2"', "has no package verifiers; run: .*pip install 'verifiers==0.4"),
        ("exit 4", "did not answer as an interpreter of Python: ended with code 4"),
        ("echo hello; sleep 2", "did not answer as an interpreter of Python: wrote a line that is no JSON object"),
        ("echo '[1]'; sleep 2", "did not answer as an interpreter of Python"),
        ("head -c 30000000 /dev/zero; sleep 2", "wrote a line of more than 17 MiB"),
    ],
)
def test_an_interpreter_that_is_none(tmp_path, text, words):
    python = "no/such/python" if text is None else script(tmp_path, text)
    with pytest.raises(EnvError, match=words):
        make_env("verifiers:standin", env_python=python)


def test_this_interpreter_is_not_told_to_install_what_would_replace_its_packages():
    if importlib.util.find_spec("verifiers") is not None:
        pytest.skip("verifiers is installed here")
    with pytest.raises(EnvError, match=r"has no package verifiers; make an interpreter with it .*venv vf") as told:
        make_env("verifiers:standin")
    assert f"{sys.executable} -m pip" not in str(told.value)


def test_another_version_and_one_that_cannot_be_imported(tmp_path):
    for version, init, words in (
        ("0.3.9", "", "has verifiers 0.3.9, expected 0.4.x; run: .* -m pip install 'verifiers==0.4"),
        (VERSION, "import no_such_module_at_all", "cannot import verifiers: ModuleNotFoundError: .*no_such_module"),
    ):
        folder = tmp_path / version
        folder.mkdir()
        with pytest.raises(EnvError, match=words):
            make_env("verifiers:standin", env_python=package(folder, version, init))


@pytest.mark.slow
def test_a_process_that_lies_after_its_greeting_is_ended(tmp_path):
    hello = """echo '{"version": "0.4.0"}'; echo '{"ready": true}'; read line; """
    loaded = """echo '{"id": 1, "tasks": ["x"]}'; echo '{"id": 1, "loaded": {"agents": ["a"], "untrained": []}}'"""
    for lie, words in (
        (f"{loaded}; echo rubbish; sleep 2", "could not begin|was lost"),
        (loaded.partition(";")[2], "told of no tasks, or of no agents"),
        ("""echo rubbish; sleep 2""", "was lost: the process of verifiers wrote a line that is no JSON object"),
        ("exit 1", "was lost: the process of verifiers ended with code 1"),
        ("""echo '{"id": 1, "error": "is \\u001b[31m red"}'; sleep 2""", "verifiers:standin is"),
    ):
        python = script(tmp_path, hello + lie)
        with pytest.raises(EnvError, match=words) as told:
            env = make_env("verifiers:standin", env_python=python)
            env.reset(seed=1)
        assert "\x1b" not in str(told.value)
        process.close_all()
        process._INTERPRETERS.clear()


def test_team_files_and_flags_are_checked_before_a_model_is_loaded(tmp_path, capsys):
    python = package(tmp_path)
    team = tmp_path / "team.json"
    team.write_text(json.dumps([{"role": "solver"}, {"role": "second"}]))
    own = ["--env", "verifiers:standin", "--env_python", python]
    for words, told in (
        ([*own, "--profile_path", str(team)], "has the agents solver, second"),
        (["--env", "math", "--env_python", python], "math is played by this interpreter; leave --env_python out"),
        (["--env", "verifiers:standin", "--env_python", "/no/python"], "env_python /no/python is no program"),
        ([*own, "--env_kwargs", "how=raises"], "the data is gone"),
    ):
        for command in (train, evaluate):
            assert command.main(words) != 0
            said = capsys.readouterr()
            assert told in said.err and "Loading" not in said.out, said


def test_a_run_folder_may_not_name_an_interpreter_or_a_file_of_its_own(tmp_path):
    demands = [(key, kind) for key, _, kind in permission.demands({"env_python": "/tmp/x"})]
    assert demands == [("env_python", "command")]
    (tmp_path / "evil.py").write_text("")
    with permission.of_command():
        permission.reading(tmp_path)
        for given in (
            {"name": f"{tmp_path}/evil.py"},
            {"name": f"{tmp_path}/evil.py+x"},
            {"name": "x", "taskset": {"task": {"r": f"{tmp_path}/evil.py:f"}}},
        ):
            with pytest.raises(ConfigError, match="lies in the folder of a run"):
                make_env("verifiers", **given)


@pytest.mark.parametrize("package", ["verifiers", "textarena", "reasoning_gym", "openenv"])
def test_a_package_alone_names_no_environment(package):
    with pytest.raises(EnvError, match=f"{package} alone names no environment; expected {package}:NAME"):
        make_env(package)


@pytest.mark.parametrize("package", ["verifiers", "textarena", "reasoning_gym", "openenv"])
def test_a_name_is_not_given_twice(package):
    with pytest.raises(EnvError, match=f"{package}:one has its name already; leave the setting name='other' out"):
        make_env(f"{package}:one", name="other")


def test_names_with_the_prefix_are_environments_of_the_package():
    assert takes("verifiers:anything", "env_python") and not takes("verifiers:anything", "sandbox")


# ------------------------------------------------------------------------------------------------- pay of earlier turns


def test_earlier_turns_are_paid_as_if_they_had_been_paid_then(standin):
    from mafrt.core.types import Turn

    live = RunningEpisode(0, standin(), None, Episode("e", "g"), {})
    for step in (0, 1):
        turn = Turn("first", [1], [2], [0.0], "eos", "x", step, step, 0)
        live.episode.turns.append(turn)
        live.last_turn["first"] = turn
        live.env_step = step
    live.take(StepResult({}, {"first": 0.5}, True, False, {"earlier": [("first", 0, 1.0)]}))
    assert [(turn.reward, turn.late) for turn in live.episode.turns] == [(1.0, []), (0.5, [])]
    with pytest.raises(EnvError, match="pays 'first' for step 9, in which it did not act"):
        live.take(StepResult({}, {}, True, False, {"earlier": [("first", 9, 1.0)]}))


@pytest.mark.parametrize("given", [3, [3], [("who", 0, 1.0)], [("first", -1, 1.0)], [("first", 0, float("inf"))]])
def test_earlier_pay_that_is_none_is_refused(given):
    with pytest.raises(EnvError, match="must be a list of"):
        checked_step(("first",), "X.step()", StepResult({}, {}, True, False, {"earlier": given}))


# -------------------------------------------------------------------------------------------------------- the package


@pytest.fixture(scope="module")
def real():
    """An interpreter with the package; made once and kept, for it takes minutes."""
    folder = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "mafrt" / f"test-verifiers-{VERSION}"
    python = folder / "bin" / "python"
    if not python.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        new = Path(tempfile.mkdtemp(dir=folder.parent))
        subprocess.run([sys.executable, "-m", "venv", new], check=True)
        pip = [new / "bin/python", "-m", "pip", "install", "-q", f"verifiers=={VERSION}"]
        done = subprocess.run(pip, capture_output=True, text=True)
        if done.returncode:
            shutil.rmtree(new)
            pytest.skip(f"verifiers=={VERSION} cannot be installed from PyPI: {done.stderr.strip()[-200:]}")
        new.rename(folder)
    return str(python)


@pytest.mark.nightly
@pytest.mark.ci
@pytest.mark.slow
def test_the_real_package_plays_turns_teams_tools_and_their_own_environments(real, tmp_path, monkeypatch):
    one = make_env(f"verifiers:{ENVS}/one_turn.py", env_python=real)
    assert one.agents == ("agent",) and not one.opponents
    _, right, _ = played(one, "\\boxed{11}")
    assert right.rewards == {"agent": 1.0} and right.info["measures"]["boxed"] == 1.0
    test = make_env(f"verifiers:{ENVS}/one_turn.py", env_python=real, split="test")
    problems = [{task["prompt"] for task in each.tasks} for each in (one, test)]
    assert len(problems[1]) > 50 and not problems[0] & problems[1]  # the taskset's own splits

    shown, wrong, _ = played(make_env(f"verifiers:{ENVS}/second_try.py", env_python=real), "\\boxed{-1}")
    assert len(shown) == 2 and shown[1]["agent"][-1]["content"].startswith("That is wrong.")
    assert wrong.rewards == {"agent": 0.0}

    team = make_env(f"verifiers:{ROOT}/examples/verifiers_team.py", env_python=real)
    shown, result, _ = played(team, "\\boxed{11}")
    assert [list(each) for each in shown] == [["proposer"], ["solver"]]
    assert shown[1]["solver"][0]["content"].startswith("You are the Actor")
    assert result.rewards == {"proposer": 1.0, "solver": 1.0}

    best = make_env(f"verifiers:best-of-n+{ENVS}/one_turn.py", env_python=real, n=3)
    shown, result, _ = played(best, "\\boxed{11}")
    assert len(shown) == 3 and result.rewards == {"agent": 1.0}
    assert result.info["earlier"] == [("agent", 0, 1.0), ("agent", 1, 1.0)]
    assert result.info["measures"]["pass_at_n"] == 1.0

    user = make_env(f"verifiers:user-sim+{ENVS}/one_turn.py", env_python=real, user={"max_turns": 2})
    assert user.untrained == ("user",)
    shown, result, _ = played(user, "\\boxed{11}")
    assert {name for each in shown for name in each} == {"user", "assistant"}
    assert result.rewards == {"assistant": 1.0} and result.info["measures"]["assistant/user_turns"] == 2.0

    for settings, words in (
        ({"agent": {"max_turn": 3}}, "agent.max_turn: Extra inputs are not permitted"),
        ({"taskset": {"split": "dev"}}, "taskset.split: Input should be 'train' or 'test'"),
        ({"agent": {"harness": {"id": "bash"}}}, "runs what its agent 'agent' writes"),
    ):
        with pytest.raises(EnvError, match=words):
            make_env(f"verifiers:{ENVS}/one_turn.py", env_python=real, **settings)


@pytest.mark.nightly
@pytest.mark.ci
@pytest.mark.slow
def test_tools_and_a_judge_of_the_real_package(real):
    call = '<tool_call>\n{"name": "sums_add", "arguments": {"a": 2, "b": 3}}\n</tool_call>'
    env = make_env(f"verifiers:{ENVS}/tools.py", env_python=real, timeout_s=120.0)
    assert env.agents == ("solver", "judge")
    seen, _ = env.reset(seed=1, options={"task": 0})
    assert "sums_add" in seen["solver"][0]["content"]
    seen = env.step({"solver": call}).observations
    assert seen["solver"][-1] == {"role": "tool", "content": "5"}
    seen = env.step({"solver": "it is 5"}).observations
    assert list(seen) == ["judge"]
    result = env.step({"judge": "yes"})
    assert result.rewards == {"solver": 1.0, "judge": 1.0}


@pytest.mark.nightly
@pytest.mark.ci
@pytest.mark.slow
def test_a_team_of_the_real_package_trains_is_killed_and_goes_on(real, tmp_path):
    words = [sys.executable, "-m", "mafrt.scripts.main", "train"]
    run = tmp_path / "run"
    flags = ["--algorithm", "dr_mas", "--n_rollout_threads", "16", "--n_samples", "4", "--max_new_tokens", "48"]
    flags += ["--iterations", "4", "--save_interval", "1", "--eval_episodes", "0", "--env_python", real]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    first = [*words, "--env", f"verifiers:{ROOT}/examples/verifiers_team.py", *flags]
    whole = subprocess.run([*first, "--run_dir", str(tmp_path / "whole")], env=env, capture_output=True, text=True)
    assert whole.returncode == 0, whole.stderr
    started = subprocess.Popen(
        [*first, "--run_dir", str(run)], env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    until = time.monotonic() + 300
    while not (run / "checkpoints" / "step_000002").exists() and time.monotonic() < until:
        time.sleep(0.1)
    started.send_signal(signal.SIGKILL)
    started.wait()
    resumed = [*words, "--load_path", str(run), "--env_python", real]
    done = subprocess.run(resumed, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lines = [(each / "metrics.jsonl").read_text().splitlines() for each in (run, tmp_path / "whole")]
    assert len(lines[0]) == 4 and lines[0] == lines[1]
    assert (run / "checkpoints/step_000004/proposer").is_dir() and (run / "checkpoints/step_000004/solver").is_dir()
