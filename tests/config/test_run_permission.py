"""A run folder is data: nothing that its files name is run, imported or called unless the user typed it."""

from __future__ import annotations

import io
import json
import os
import shutil
import sys
import threading
from pathlib import Path

import pytest
import yaml
from huggingface_hub.errors import LocalEntryNotFoundError

from mafrt.config import permission
from mafrt.config.resolve import load_object
from mafrt.core.errors import ConfigError, ModelError
from mafrt.core.shipped import TEACHING_BASE
from mafrt.scripts import chat, collect, evaluate, export, report, serve_team, show, train, train_math, train_tasks
from mafrt.scripts.cli.loading import load_team, work_offline_if_unreachable

pytestmark = pytest.mark.takes(slow=11)

SHORT = ["--iterations", "1", "--n_rollout_threads", "4", "--max_new_tokens", "4", "--eval_episodes", "0"]
EVIL = """
import os
open(os.environ["MARKER"], "a").write("ran\\n")
from mafrt import Env, StepResult

class Evil(Env):
    agents = ("actor",)
    def reset(self, seed=None, options=None):
        return {"actor": "go"}, {}
    def step(self, actions):
        return StepResult({}, {}, True, False, {"outcome": 1.0})

def score(*_):
    return 1.0
"""
GOOD = EVIL.replace('open(os.environ["MARKER"], "a").write("ran\\n")\n', "").replace("Evil", "Good")


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    place = tmp_path_factory.mktemp("made")
    before = os.getcwd()
    os.chdir(place)
    try:
        assert train_math.main(["--run_dir", "run", *SHORT]) == 0
    finally:
        os.chdir(before)
    return place / "run"


@pytest.fixture
def run(made, tmp_path, monkeypatch):
    """A run that came from elsewhere, and a working directory beside it; `marker` appears if its code ran."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("MARKER", str(tmp_path / "marker"))
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    monkeypatch.setattr(serve_team, "load_team", not_served)
    for name in ("evil", "evil_package", "evil_package.sub", "good"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    folder = tmp_path / "shared"
    shutil.copytree(made, folder)
    (folder / "evil.py").write_text(EVIL)
    (folder / "evil_package").mkdir()
    (folder / "evil_package" / "__init__.py").write_text(EVIL)
    (folder / "evil_package" / "sub.py").write_text(EVIL)
    return folder


def not_served(source):
    raise ConfigError("everything before the loading of the base is done")


def change(run, record=None, **settings):
    args = yaml.safe_load((run / "args.yaml").read_text())
    (run / "args.yaml").write_text(yaml.safe_dump({**args, **settings}))
    stored = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps({**stored, **(record or {})}))


def untouched(run, capsys, *calls):
    """Every command ends in a sentence or does its work; none runs the run's code. Returns what they said."""
    said = []
    for main, *words in calls:
        capsys.readouterr()
        code = main([str(word) for word in words])
        out = capsys.readouterr()
        assert not (run.parent / "marker").exists(), (main, words)
        assert code in (0, 2) and "Traceback" not in out.err
        said.append(out.err if code else "")
    return said


def players(run, *more):
    return [
        (evaluate.main, "--load_path", run, "--k", "1", "--tasks", "1", *more),
        (chat.main, "--load_path", run, *more),
        (serve_team.main, "--load_path", run, *more),
        (train.main, "--load_path", run, "--iterations", "2", *more),
    ]


def readers(run, tmp_path):
    return [
        (report.main, run, "--output", tmp_path / "r.html"),
        (show.main, run),
        (collect.main, run, "--output", tmp_path / "c.jsonl", "--min_score", "-1"),
        (export.main, run, "--output", tmp_path / "exported"),
    ]


@pytest.mark.slow
def test_code_of_a_base_wants_a_flag_and_a_file_is_none(run, capsys, tmp_path):
    base = run / "base"
    shutil.copytree(TEACHING_BASE, base)
    config = json.loads((base / "config.json").read_text())
    config["auto_map"] = {"AutoConfig": "evil.Evil", "AutoModelForCausalLM": "evil.Evil"}
    config["model_type"] = "evil"
    (base / "config.json").write_text(json.dumps(config))
    shutil.copy(run / "evil.py", base / "evil.py")
    change(run, model_name_or_path=str(base), trust_remote_code=True)
    said = untouched(run, capsys, *players(run), (train_math.main, "--config", run / "args.yaml", "--run_dir", "x"))
    assert all("--trust_remote_code" in each and each.count("\n") == 1 for each in said)
    # A file of one's own is no permission for it either.
    Path("mine.yaml").write_text(yaml.safe_dump({"model_name_or_path": str(base), "trust_remote_code": True}))
    [own] = untouched(run, capsys, (train_math.main, "--config", "mine.yaml", "--run_dir", "y"))
    assert "mine.yaml" in own and "--trust_remote_code" in own
    untouched(run, capsys, *readers(run, tmp_path), *players(run, "--no-trust_remote_code"))


@pytest.mark.slow  # all together
@pytest.mark.parametrize("name", ["evil:Evil", "evil_package:Evil", "evil_package.sub:Evil", "FILE:Evil", "LINK:Evil"])
@pytest.mark.parametrize("where", ["beside", "inside"])
def test_a_module_inside_the_run_is_not_imported(run, capsys, tmp_path, monkeypatch, name, where):
    if where == "inside":
        monkeypatch.chdir(run)
        sys.path.insert(0, str(run))  # as `python -m mafrt` has it
    link = tmp_path / "link"
    link.symlink_to(run)
    name = name.replace("FILE", str(run / "evil.py")).replace("LINK", str(link / "evil.py"))
    file = run / "evil.py" if "package" not in name else run / "evil_package" / "__init__.py"
    environment = {"path": name, "arguments": {}, "file": str(file), "sha256": None}
    change(run, {"environment": environment, "eval_environment": None, "command": None})
    untouched(run, capsys, *players(run), *readers(run, tmp_path))
    change(run, {"command": "train"}, env=name)
    said = untouched(run, capsys, *players(run))
    assert said[0].count("\n") == said[3].count("\n") == 1


@pytest.mark.slow  # all together
@pytest.mark.parametrize(
    "settings",
    [
        {"coach": "evil:Evil"},
        {"algorithm": "evil:Evil"},
        {"engine": "evil:Evil"},
        {"workflow": "evil:Evil"},
        {"sees": "RUN/evil.py:score"},
        {"tools": ["mcp:RUN/servers.json"], "workflow": "tools"},
        {"profile_path": "RUN/team.json"},
        {"sandbox": "fusion:http://192.0.2.1:80", "workflow": "tools", "tools": ["python"]},
        {"coach": "openai:x", "coach_base_url": "https://judge.invalid/v1"},
        {"engine": "vllm", "vllm_servers": ["http://192.0.2.1:8001"]},
        {"tools": ["search:http://192.0.2.1/retrieve"], "workflow": "tools"},
    ],
)
def test_no_setting_of_a_run_names_its_own_code_or_another_machine(run, capsys, monkeypatch, settings):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-x")
    command = {"command": sys.executable, "args": ["-c", "import os; open(os.environ['MARKER'], 'w')"]}
    (run / "servers.json").write_text(json.dumps({"mcpServers": {"x": command}}))
    (run / "team.json").write_text(json.dumps([{"agent": "evil:score"}, {"agent": f"{run}/evil.py:score"}]))
    for module in ("team.json", "servers.json"):
        assert (run / module).is_file()
    text = json.dumps(settings).replace("RUN", str(run))
    change(run, **json.loads(text))
    monkeypatch.chdir(run)
    said = untouched(run, capsys, (train_math.main, "--load_path", run, "--iterations", "2"), *players(run))
    others = {"profile_path"}  # the recorded team stands in for a file inside the run
    assert settings.keys() & others or said[0].count("\n") == 1, said[0]
    untouched(run, capsys, (train_math.main, "--config", "args.yaml", "--run_dir", "../again"))


@pytest.mark.slow  # all together
@pytest.mark.parametrize(
    "environment",
    [
        {"path": "os:system", "arguments": {"command": "touch $MARKER"}},
        {"path": "subprocess:Popen", "arguments": {"args": ["sh", "-c", "touch $MARKER"]}},
        {"path": "mafrt.storage.run_dir:set_aside", "arguments": {"run_dir": "mine"}},
        {"path": "mafrt.config.resolve:os.system", "arguments": {"command": "touch $MARKER"}},
        {"path": "yaml:unsafe_load", "arguments": {"stream": "!!python/object/apply:os.system ['touch $MARKER']"}},
        {"path": "numpy.testing:rundocs", "arguments": {"filename": "RUN/evil.py"}},
        {"path": "program", "arguments": {"command": "sh -c 'touch $MARKER'", "agents": ["actor"]}},
        {"path": "mafrt.envs.program.env:ProgramEnv", "arguments": {"command": ["touch", "x"], "agents": ["actor"]}},
        {"path": "program", "arguments": {"program": "RUN/evil.py:score", "agents": ["actor"]}},
        {"path": "grpc://192.0.2.1:50051/x", "arguments": {}},
        {"path": "search", "arguments": {"retriever": "http://192.0.2.1/retrieve"}},
        {"path": "evil:Evil", "arguments": {}, "file": "x.py"},
        {"path": "a.b.c.d:Evil", "arguments": {}, "file": "/x.py"},
    ],
)
def test_a_record_reaches_nothing_that_is_installed(run, capsys, environment):
    Path("mine").mkdir()
    Path("mine/kept").touch()
    environment = json.loads(json.dumps({"file": None, "sha256": None, **environment}).replace("RUN", str(run)))
    change(run, {"environment": environment, "eval_environment": None, "command": None})
    said = untouched(run, capsys, *players(run))
    assert said[0].count("\n") == 1 and Path("mine/kept").exists()
    args = yaml.safe_dump({"env": environment["path"], "env_kwargs": [json.dumps(environment["arguments"])]})
    (run / "args.yaml").write_text(args)
    change(run, {"command": "train"})
    assert untouched(run, capsys, *players(run))[0].count("\n") == 1


@pytest.mark.slow
def test_a_reward_and_a_program_inside_the_run_are_not_run(run, capsys):
    Path("x.jsonl").write_text('{"problem": "1 + 1?", "answer": "2"}\n')
    change(run, {"command": "train_tasks"}, reward=f"{run}/evil.py:score", dataset_path="x.jsonl")
    untouched(run, capsys, *players(run), (train_tasks.main, "--load_path", run, "--iterations", "2"))
    for settings in ({"program": f"{run}/evil.py:score"}, {"command": "sh -c 'touch $MARKER'"}):
        args = {"env": None, **settings}
        (run / "args.yaml").write_text(yaml.safe_dump(args))
        change(run, {"command": "train"})
        assert untouched(run, capsys, *players(run))[3].count("\n") == 1


@pytest.mark.slow
@pytest.mark.parametrize("command", ["reproduce.games", "cli.train", "get_base", "../evil", "os", 7, ["train"], {}])
def test_a_record_chooses_among_commands_that_train(run, capsys, command):
    change(run, {"command": command})
    untouched(run, capsys, *players(run))


@pytest.mark.slow
def test_what_the_user_typed_is_permission(run, capsys, tmp_path):
    environment = {"path": "evil:Evil", "arguments": {}, "file": str(run / "evil.py"), "sha256": None}
    change(run, {"environment": environment, "eval_environment": None, "command": None})
    words = ["--load_path", str(run), "--k", "1", "--tasks", "1", "--max_new_tokens", "4"]
    assert evaluate.main(words) == 2
    assert "--trust_run" in capsys.readouterr().err
    sys.path.append(str(run))
    evaluate.main([*words, "--trust_run"])
    assert (tmp_path / "marker").exists()
    # The permission ends with the command.
    (tmp_path / "marker").unlink()
    sys.modules.pop("evil", None)
    assert evaluate.main(words) == 2 and not (tmp_path / "marker").exists()


@pytest.mark.slow
@pytest.mark.ci
def test_ones_own_module_outside_the_run_goes_on_working(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "good", raising=False)
    Path("good.py").write_text(GOOD)
    assert train.main(["--env", "good:Good", "--run_dir", "run", *SHORT]) == 0
    assert train.main(["--load_path", "run", "--iterations", "2"]) == 0
    assert train.main(["--config", "run/args.yaml", "--run_dir", "again", "--iterations", "1"]) == 0
    assert evaluate.main(["--load_path", "run", "--k", "1", "--tasks", "1"]) == 0


class Hub:
    """Stands where transformers asks for the files of a hub id."""

    def __init__(self, monkeypatch):
        self.asked = []
        for name in ("hf_hub_download", "snapshot_download"):
            monkeypatch.setattr(f"transformers.utils.hub.{name}", self.download)

    def download(self, repo_id, *_, local_files_only=False, **__):
        if not local_files_only:
            self.asked.append(repo_id)
        raise LocalEntryNotFoundError("not in the cache")


@pytest.mark.slow
@pytest.mark.parametrize("words", [[], ["--merged"], ["--gguf", "base.gguf"]], ids=str)
@pytest.mark.parametrize("args", ["kept", "broken", "gone", "a pipe", "not text"])
def test_an_export_fetches_nothing_that_only_a_run_names(run, capsys, tmp_path, monkeypatch, args, words):
    hub, name = Hub(monkeypatch), "nobody/of-a-run"
    stored = json.loads((run / "run.json").read_text())
    change(run, {"base": {**stored["base"], "name": name, "path": None}}, model_name_or_path=name)
    file = run / "args.yaml"
    if args != "kept":
        file.unlink()
    if args == "a pipe":
        os.mkfifo(file)
    elif args in ("broken", "not text"):
        file.write_bytes(b"a: [" if args == "broken" else b"\xff\xfe")
    untouched(run, capsys, (export.main, run, "--output", tmp_path / "exported", *words))
    assert not hub.asked
    export.main([str(run), "--output", str(tmp_path / "again"), "--trust_run"])
    assert {*hub.asked} == {name}


@pytest.mark.parametrize("name", ["nobody/of-a-run", "gpt0", "a--b", "a..b", "5", "x" * 97])
def test_a_base_that_only_a_run_names_lies_in_the_cache_or_is_typed(tmp_path, monkeypatch, name):
    def reached(*_):
        raise ConnectionError("the hub was asked")

    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr(threading.Thread, "start", reached)
    with permission.of_command():
        permission.reading(tmp_path)
        with pytest.raises(ModelError, match="no permission to fetch it"):
            work_offline_if_unreachable(name)
        assert not permission.is_ours(name)
        permission.typed([name])
        with pytest.raises(ConnectionError):
            work_offline_if_unreachable(name)


@pytest.mark.parametrize("where", ["outside", "inside"])
def test_a_team_file_of_ones_own_may_name_a_base(tmp_path, where):
    (tmp_path / "run").mkdir()
    file = tmp_path / "run" / "team.json" if where == "inside" else tmp_path / "team.json"
    file.write_text(json.dumps([{"role": "a", "prompt": "secret", "model": "somebody/base"}]))
    with permission.of_command():
        permission.reading(tmp_path / "run")
        load_team(train.COMMAND.read(["--env", "math", "--profile_path", str(file)]))
        assert permission.is_ours("somebody/base") is (where == "outside") and not permission.is_ours("secret")


def test_a_folder_that_anybody_may_write_to_is_not_searched(tmp_path, monkeypatch):
    from mafrt.config.resolve import add_source_folder

    monkeypatch.setattr(sys, "path", list(sys.path))
    tmp_path.chmod(0o777)
    add_source_folder("evil:Evil", str(tmp_path / "evil.py"))
    assert str(tmp_path) not in sys.path
    tmp_path.chmod(0o700)
    add_source_folder("evil:Evil", str(tmp_path / "evil.py"))
    assert str(tmp_path) in sys.path


@pytest.mark.parametrize(
    "address",
    ["http://127.0.0.1.evil.example/x", "http://127.0.0.1@evil.example", "HTTPS://evil", "http://localhost.evil:80",
     "grpc://10.0.0.1:1/x", "fusion:http://evil", "search:HTTP://evil", " http://evil", "file:///etc/passwd", "http://",
     "grpc://127.0.0.1:1,evil:2/x", "grpc://localhost,@servers.txt/x", "math=0.5,grpc://evil:1/x=0.5",
     "grpc://127.0.0.1:1/x,grpc://evil:1/x", "http://127.0.0.1,http://evil"],
)  # fmt: skip
def test_addresses_of_other_machines_are_told_from_this_one(address):
    with pytest.raises(ConfigError, match="address"):
        permission.refuse_demands({"x": [{"y": address}]}, "the run")
    permission.refuse_demands(
        {"x": "http://127.0.0.1:8000/v1", "y": "grpc://localhost:1,127.0.0.1:2/a", "z": "http://[::1]/"}, ""
    )


@pytest.mark.parametrize("address", ["evil:6379", "10.0.0.1:6379", "localhost.evil:1", "ray://evil:10001", "@evil"])
def test_a_run_names_no_cluster_of_another_machine(address):
    with pytest.raises(ConfigError, match="address"):
        permission.refuse_demands({"ray": address}, "the run")
    for here in ("auto", "local", "127.0.0.1:6379", "ray://localhost:10001"):
        permission.refuse_demands({"ray": here}, "the run")


@pytest.mark.parametrize("name", ["os:system", "subprocess:run", "builtins:exec", "mafrt.core.text:re.compile"])
def test_parts_of_python_are_never_objects_of_ours(name):
    with pytest.raises(ConfigError):
        load_object(name)


@pytest.mark.slow
def test_no_run_decides_what_a_command_writes_or_who_may_reach_it(run, capsys, tmp_path):
    mine, records = tmp_path / "mine.json", tmp_path / "records"
    mine.write_text("mine")
    change(run, output=str(mine), overwrite=True, record_dir=str(records), host="0.0.0.0")
    untouched(run, capsys, *players(run)[:3])
    assert mine.read_text() == "mine" and not records.exists()
    settings = yaml.safe_load((run / "args.yaml").read_text())
    (run / "args.yaml").write_text(yaml.safe_dump({"output": str(mine), "k": 1}))
    [said] = untouched(run, capsys, (evaluate.main, "--config", run / "args.yaml", "--tasks", "1"))
    assert "holds output, which only you decide; type --output" in said and mine.read_text() == "mine"
    (run / "args.yaml").write_text(yaml.safe_dump({**settings, "run_dir": str(records), "set_aside": True}))
    untouched(run, capsys, (train_math.main, "--load_path", run, "--iterations", "2"))
    assert not records.exists()
