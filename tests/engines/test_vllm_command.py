"""`mafrt serve_vllm`: what it starts, keeps up and ends. Its interpreter is a stand-in for one with vLLM."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import stat
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from helpers_families import tiny, whole
from helpers_models import tiny_tokenizer
from helpers_warm import WarmProcess, start_python

from mafrt.config.train_config import EngineConfig
from mafrt.core.errors import EngineDownError, ModelError
from mafrt.core.shipped import TEACHING_BASE
from mafrt.engines.vllm import in_process
from mafrt.models.shared_base import SharedBase
from mafrt.scripts import serve_vllm
from mafrt.scripts.serve_vllm import COMMAND, Server, VllmSettings

STAND_IN = """
import http.server, json, os, sys
from pathlib import Path

words = sys.argv[1:]
folder = Path(__file__).parent
if words[0] == "-c":
    print(os.environ.get("GPUS", ""))
    sys.exit(0)
if (folder / "ill").exists():
    sys.exit("no memory")
port = int(words[words.index("--port") + 1])
kept = {name: os.environ[name] for name in os.environ if name.startswith(("VLLM", "CUDA"))}
(folder / f"{port}.json").write_text(json.dumps({"pid": os.getpid(), "words": words, "environment": kept}))


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        body = json.dumps({"data": [{"id": "base", "root": "base"}]}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


@pytest.fixture
def python(tmp_path):
    (tmp_path / "stand_in.py").write_text(STAND_IN)
    script = tmp_path / "python"
    script.write_text(f'#!/bin/sh\nexec {sys.executable} {tmp_path / "stand_in.py"} "$@"\n')
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    return script


def free_ports() -> int:
    """The first of two that are free."""
    while True:
        with socket.socket() as first, socket.socket() as second:
            first.bind(("127.0.0.1", 0))
            port: int = first.getsockname()[1]
            try:
                second.bind(("127.0.0.1", port + 1))
            except (OSError, OverflowError):
                continue
            return port


def start(*words: object) -> WarmProcess:
    return start_python("-m", "mafrt.scripts.main", "serve_vllm", "--device", "cpu", *map(str, words))


def gone(pid: int) -> bool:
    deadline = time.monotonic() + 90
    while time.monotonic() < deadline:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
            return True
        time.sleep(0.05)
    return False


@pytest.mark.slow
@pytest.mark.parametrize("kind", [signal.SIGTERM, signal.SIGKILL])
def test_servers_know_the_team_and_end_with_the_command(python, tmp_path, kind):
    port, team = free_ports(), tmp_path / "team.json"
    agents = [{"role": name, "lora_rank": rank} for name, rank in (("a", 4), ("b", 20))]
    team.write_text(json.dumps({"agents": agents}))
    running = start("--python", python, "--profile_path", team, "--servers", 2, "--port", port)
    while "\n" not in (said := running.stdout):
        assert running.poll() is None, running.stderr
        time.sleep(0.02)
    assert f"--vllm_servers http://127.0.0.1:{port},http://127.0.0.1:{port + 1};" in said, said
    kept = [json.loads((tmp_path / f"{port + number}.json").read_text()) for number in range(2)]
    words = dict(zip(kept[0]["words"], kept[0]["words"][1:], strict=False))
    assert words["--max-lora-rank"] == "32" and words["--max-loras"] == "3"
    assert words["--logprobs-mode"] == "processed_logprobs" and words["--host"] == "127.0.0.1"
    assert kept[1]["environment"]["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] == "1"
    running.send_signal(kind)
    running.wait(120)
    assert all(gone(server["pid"]) for server in kept)


@pytest.mark.slow
def test_a_server_that_ends_before_it_answers_is_one_sentence(python, tmp_path):
    (tmp_path / "ill").touch()
    running = start("--python", python, "--port", free_ports())
    assert running.wait(120) == 2
    said = running.stdout + running.stderr
    assert "ended with status 1 before it answered" in said and "Traceback" not in said


def test_one_that_has_lived_for_a_while_is_started_again_and_another_is_not(python, tmp_path, capsys):
    port = free_ports()
    asked = VllmSettings(python=str(python), port=port, device="cpu")
    words, [environment] = serve_vllm.command(asked, COMMAND.read(["--python", str(python), "--device", "cpu"]))
    server = Server(words, environment, asked, 0)
    server.start()
    try:
        while not server.answers():
            time.sleep(0.05)
        first = server._process
        assert first is not None
        first.kill()
        first.wait()
        with pytest.raises(EngineDownError, match="ended with status -9"):
            server.keep_up()
        server.began -= 2 * serve_vllm.STEADY_S
        server.keep_up()
        assert "started again" in capsys.readouterr().out
        while not server.answers():
            assert server.status is None
            time.sleep(0.05)
    finally:
        server.end()
    assert server.status is not None


def test_every_server_has_gpus_of_its_own(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,5,6,7")
    asked = VllmSettings(servers=2, gpus_per_server=2, device="cuda")
    settings = COMMAND.read(["--servers", "2", "--gpus_per_server", "2", "--device", "cuda"])
    words, environments = serve_vllm.command(asked, settings)
    assert [each["CUDA_VISIBLE_DEVICES"] for each in environments] == ["2,5", "6,7"]
    assert words[words.index("--tensor-parallel-size") + 1] == "2" and "--enforce-eager" not in words


def test_as_many_gpus_as_the_servers_take_are_asked_for_in_their_interpreter(python, monkeypatch, capsys):
    words = ["--device", "cuda", "--servers", "2", "--gpus_per_server", "2", "--python", str(python)]
    for seen in ("", "3"):
        monkeypatch.setenv("GPUS", seen)
        assert serve_vllm.main(words) == 2
        assert "need 4 GPUs" in capsys.readouterr().err
    monkeypatch.setenv("GPUS", "a warning 4")
    serve_vllm._check_gpus(str(python), COMMAND.read(words).make(VllmSettings))


@pytest.mark.parametrize(
    ("host", "url"),
    [("::", "127.0.0.1"), ("::1", "[::1]"), ("10.1.2.3", "10.1.2.3"), ("localhost", "localhost")],
)
def test_the_address_of_a_server_is_one_that_can_be_reached(host, url):
    asked = VllmSettings(host=host, port=9000, device="cpu")
    assert Server([], {}, asked, 1).url == f"http://{url}:9001"


def test_the_token_is_not_among_the_words(monkeypatch):
    monkeypatch.setenv("MAFRT_VLLM_TOKEN", "a secret")
    words, [environment] = serve_vllm.command(VllmSettings(device="cpu"), COMMAND.read(["--device", "cpu"]))
    assert environment["VLLM_API_KEY"] == "a secret" and "a secret" not in " ".join(words)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--servers", "0"], "servers is 0"),
        (["--host", "0.0.0.0"], "set a token"),
        (["--python", "/nowhere/python"], "no interpreter"),
        (["--python", "/bin/false"], "has no vLLM"),
        (["--gpu_memory_utilization", "2"], "gpu_memory_utilization"),
        (["--device", "tpu"], "cpu or cuda"),
        (["--port", "70000"], "port is 70000"),
        (["--profile_path", "nowhere.json"], "no team file"),
        (["--context_window", "0"], "context_window is 0"),
        (["--gpus_per_server", "3"], "does not divide the model's 4 heads"),
    ],
)
def test_wrong_words_are_one_sentence(words, said, monkeypatch, capsys):
    monkeypatch.delenv("MAFRT_VLLM_TOKEN", raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert serve_vllm.main(words) == 2
    assert re.search(said, capsys.readouterr().err)


def test_a_port_that_is_taken_is_told_before_anything_starts(python, capsys):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert serve_vllm.main(["--python", str(python), "--device", "cpu", "--port", str(port)]) == 2
    assert f"port {port}" in capsys.readouterr().err


def other(base, file, change):
    whole = json.loads((base / file).read_text())
    (base / file).write_text(json.dumps(whole | change))


def piped(base, file):
    (base / file).unlink()
    os.mkfifo(base / file)


BASES = {
    "a list": lambda base: (base / "config.json").write_text("[1]"),
    "cut": lambda base: (base / "config.json").write_text("{"),
    "deep": lambda base: (base / "config.json").write_text("[" * 100_000),
    "a million layers": lambda base: (base / "config.json").write_text('{"num_hidden_layers": 1000000}'),
    "own code": lambda base: other(
        base, "config.json", {"model_type": "x", "auto_map": {"AutoModelForCausalLM": "a.B"}}
    ),
    "another task": lambda base: other(base, "config.json", {"architectures": ["Qwen3ForTokenClassification"]}),
    "a pipe": lambda base: piped(base, "model.safetensors"),
    "cut weights": lambda base: os.truncate(base / "model.safetensors", 5000),
    "a broken tokenizer": lambda base: (base / "tokenizer.json").write_text("{"),
    "a tokenizer of another kind": lambda base: (base / "tokenizer.json").write_text("[]"),
    "a length that is text": lambda base: other(base, "tokenizer_config.json", {"model_max_length": "x"}),
    "a piped tokenizer": lambda base: piped(base, "tokenizer.json"),
    "an expression without end": lambda base: other(
        base, "tokenizer.json",
        {"normalizer": {"type": "Replace", "pattern": {"Regex": "(a+)+$"}, "content": ""}},
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", BASES)
def test_a_base_that_no_trainer_could_load_is_told_before_a_server_is_started(tmp_path, capfd, kind):
    shutil.copytree(TEACHING_BASE, tmp_path / "base")
    BASES[kind](tmp_path / "base")
    words = ["--model_name_or_path", str(tmp_path / "base"), "--python", str(tmp_path / "none")]
    assert serve_vllm.main(words) == 2
    said = capfd.readouterr().err
    assert str(tmp_path / "base") in said and said.count("\n") == 1


@pytest.mark.slow
@pytest.mark.parametrize(("family", "kept", "sees"), [("lfm2", False, False), ("llama", True, False),
                                                      ("gemma3", True, True), ("llava", True, True)])  # fmt: skip
def test_a_cpu_keeps_no_states_of_prompts_that_begin_alike_and_no_tower_is_served(
    family, kept, sees, tmp_path, monkeypatch
):
    """vLLM 0.32 keeps states for prompts in chunks alone, which it cannot do there, and refuses to start; for towers it
    wants the settings of an image processor, which a text needs no more than the towers themselves."""
    (whole if sees else tiny)(family).save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    where = ["--model_name_or_path", str(tmp_path)]
    words, _ = serve_vllm.command(VllmSettings(device="cpu", model_name_or_path=where[1]), COMMAND.read(where))
    assert ("--no-enable-prefix-caching" in words) is not kept
    assert ("--language-model-only" in words) is sees
    asked = []

    def start(settings, *_):
        asked.append(settings)
        raise ModelError("no vLLM here")

    monkeypatch.setattr(in_process, "check_engine", lambda *_: None)
    monkeypatch.setattr(in_process, "_start", start)
    with pytest.raises(ModelError, match="no vLLM here"):
        in_process.VllmEngine(SharedBase.load(where[1], device="cpu"), EngineConfig(engine="vllm"))
    assert asked[0]["enable_prefix_caching"] is kept and not asked[0]["enable_chunked_prefill"]
    assert asked[0].get("language_model_only", False) is sees


@pytest.mark.parametrize(("known", "words"), [
    ({}, "found \"'Config' object has no attribute 'conv_dim'\""),
    ({"Some": SimpleNamespace(supports_lora=True, __name__="Some")}, "has no attribute 'conv_dim'"),
    ({"Some": SimpleNamespace(__name__="SomeOfVllm")}, "^vLLM's class for base, SomeOfVllm, takes no adapters"),
])  # fmt: skip
def test_what_vllm_does_not_serve_is_one_sentence(known, words, monkeypatch):
    """Whatever its classes raise over a configuration, and before its start where they take no adapters."""

    def fail(**_):
        raise AttributeError("'Config' object has no attribute 'conv_dim'")

    models = {name: SimpleNamespace(load_model_cls=lambda cls=cls: cls) for name, cls in known.items()}
    stand_in = SimpleNamespace(LLM=fail, ModelRegistry=SimpleNamespace(models=models), lora=None)
    for name in ("vllm", "vllm.lora", "vllm.lora.request"):
        monkeypatch.setitem(sys.modules, name, stand_in)
    with pytest.raises(ModelError, match=words):
        in_process._start({}, "base", ("Other", "Some"))


def test_an_address_of_pydantic_is_no_reason():
    error = ValueError("1 validation error for VllmConfig\n  Assertion failed, no\n    For further information visit "
                       "https://errors.pydantic.dev/2/v/x")  # fmt: skip
    assert in_process._last_line(error) == "Assertion failed, no"


def test_code_of_a_base_is_run_where_a_flag_says_so():
    words, _ = serve_vllm.command(
        VllmSettings(device="cpu", trust_remote_code=True), COMMAND.read(["--trust_remote_code"])
    )
    assert "--trust-remote-code" in words
