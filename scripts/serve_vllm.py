"""Start vLLM servers for a team: `mafrt train ... --engine vllm --vllm_servers URL` samples on them.

Each server is a process of its own, in any interpreter that has vLLM: it may be another environment than the trainer's.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from mafrt.config.agent import LoraSpec
from mafrt.config.schema import Checked, Count, Positive, PositiveShare, check_number
from mafrt.core.errors import ConfigError, EngineDownError
from mafrt.core.gpus import gpu_there
from mafrt.core.http_request import StatusError
from mafrt.core.shipped import base_folder
from mafrt.core.text import counted
from mafrt.engines.checks import TOKEN, check_system, room_for_rank, served_bases
from mafrt.engines.vllm.gpu_layout import check_heads
from mafrt.engines.vllm.watchdog import dismiss, watch_what_starts
from mafrt.environment.local_server import token_for
from mafrt.scripts.cli.command import Command, Settings
from mafrt.scripts.cli.loading import load_team, work_offline_if_unreachable
from mafrt.scripts.cli.run_main import run_main

MODULE = "vllm.entrypoints.openai.api_server"
STEADY_S = 60.0
"""A server that dies sooner would die again; one that has lived longer is started anew."""


@dataclass(frozen=True)
class VllmSettings(Checked):
    """vLLM servers"""

    model_name_or_path: str = "teaching-base"
    """folder or Hugging Face id of the frozen base"""
    trust_remote_code: bool = False
    """run code that comes with the base, here and in the servers"""
    profile_path: str | None = None
    """team file, for the number of adapters and their ranks; default: --max_loras and --lora_rank"""
    n_agents: int | None = None
    """agents that the team must have"""
    lora_rank: Count = 8
    """rank of adapters whose agents name none"""
    max_loras: Count | None = None
    """adapters in one batch; default: those of the team, and one place for the bare base"""
    servers: Count = 1
    """servers, on ports that follow one another"""
    host: str = "127.0.0.1"
    """address to listen on; any but loopback needs a token in MAFRT_VLLM_TOKEN"""
    port: int = 8001
    """port of the first server"""
    python: str | None = None
    """interpreter that has vLLM; default: this one"""
    device: str | None = None
    """cpu or cuda; default: a GPU if there is one"""
    gpus_per_server: Count = 1
    """GPUs over which each server spreads the base"""
    gpu_memory_utilization: PositiveShare | None = None
    """max share of the device's memory; default: 0.9 on a GPU, 0.1 on a CPU"""
    dtype: str | None = None
    """number format of the base; default: vLLM's choice on a GPU, float32 on a CPU"""
    context_window: Count | None = None
    """max tokens of a row; default: the model's"""
    start_timeout_s: Positive = 900.0
    """timeout in seconds until all servers answer"""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number("port", self.port, least=1, most=65536 - self.servers)
        if self.device not in (None, "cpu", "cuda"):
            raise ConfigError(f"device is {self.device!r}; choose cpu or cuda (CUDA_VISIBLE_DEVICES names the GPUs).")


COMMAND = Command(
    "serve_vllm",
    "Start vLLM servers for a team; training samples on them with --engine vllm --vllm_servers.",
    (VllmSettings,),
)


def serve(argv: Sequence[str]) -> int:
    settings = COMMAND.read(argv)
    asked = settings.make(VllmSettings)
    check_system("start the servers on a machine that has it")
    token_for(asked.host, TOKEN)  # the servers read it themselves
    words, environments = command(asked, settings)
    _check_python(words[0])
    if _on_gpus(asked):
        _check_gpus(words[0], asked)
    servers = [Server(words, variables, asked, number) for number, variables in enumerate(environments)]
    for number in range(asked.servers):
        _check_port(asked.host, asked.port + number)
    ending = threading.Event()

    def end(number: int, frame: FrameType | None) -> None:
        ending.set()

    for kind in (signal.SIGINT, signal.SIGTERM):
        signal.signal(kind, end)
    folder = Path(tempfile.mkdtemp(prefix="mafrt_vllm_"))
    guardian = watch_what_starts(folder)  # a kill -9 of this process ends them too
    try:
        for server in servers:
            server.start()
        _await(servers, asked.start_timeout_s, ending)
        if not ending.is_set():
            urls = ",".join(server.url for server in servers)
            print(f"Train with --engine vllm --vllm_servers {urls}; Ctrl-C ends the servers.", flush=True)
        while not ending.wait(0.5):
            for server in servers:
                server.keep_up()
    finally:
        dismiss(guardian)
        for server in servers:
            server.end()
        folder.rmdir()
    return 0


def command(asked: VllmSettings, settings: Settings) -> tuple[list[str], list[dict[str, str]]]:
    """The words that start a server, but for its port, and the environment variables of each."""
    from mafrt.models.cache_rows import keeps_states
    from mafrt.models.checkpoint_class import has_towers
    from mafrt.models.pretrained import check_base

    team = load_team(settings)
    default = LoraSpec(rank=asked.lora_rank, alpha=2.0 * asked.lora_rank)
    ranks = [asked.lora_rank] if team is None else [team.lora_for(name, default).rank for name in team.adapters]
    adapters = asked.max_loras or (1 if team is None else len(team.adapters)) + 1
    work_offline_if_unreachable(asked.model_name_or_path)
    _, config, _ = check_base(asked.model_name_or_path, trust_remote_code=asked.trust_remote_code)
    check_heads(asked.model_name_or_path, asked.gpus_per_server, "gpus_per_server")
    gpu = _on_gpus(asked)
    share = asked.gpu_memory_utilization or (0.9 if gpu else 0.1)
    words = [asked.python or sys.executable, "-m", MODULE]
    words += ["--model", str(base_folder(asked.model_name_or_path) or asked.model_name_or_path)]
    words += ["--trust-remote-code"] if asked.trust_remote_code else []
    words += ["--host", asked.host]
    words += ["--language-model-only"] if has_towers(config) else []
    words += ["--enable-lora", "--max-loras", str(adapters), "--max-cpu-loras", str(2 * adapters)]
    words += ["--max-lora-rank", str(room_for_rank(max(ranks))), "--logprobs-mode", "processed_logprobs"]
    words += ["--generation-config", "vllm", "--gpu-memory-utilization", str(share)]
    words += ["--tensor-parallel-size", str(asked.gpus_per_server)]
    if dtype := asked.dtype or (None if gpu else "float32"):
        words += ["--dtype", dtype]
    if asked.context_window is not None:
        words += ["--max-model-len", str(asked.context_window)]
    environment = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1", "VLLM_NO_USAGE_STATS": "1"}
    if token := os.environ.get(TOKEN):
        environment["VLLM_API_KEY"] = token  # not among the words, which other users can list
    if not gpu:
        from mafrt.engines.vllm.in_process import ON_CPU

        # vLLM 0.32 on a CPU dies of a prompt cut into chunks, and compiling does not pay. Without such chunks it keeps
        # no states of recurrences for prompts that begin alike.
        words += ["--enforce-eager", "--no-enable-chunked-prefill"]
        words += ["--no-enable-prefix-caching"] if keeps_states(config) else []
        environment |= ON_CPU
    environment = {name: os.environ.get(name, value) for name, value in environment.items()}
    return words, [environment | (_gpus_of(number, asked) if gpu else {}) for number in range(asked.servers)]


def _check_python(python: str) -> None:
    if shutil.which(python) is None:
        raise ConfigError(f"There is no interpreter {python}; give --python one that has vLLM.")
    found = "import importlib.util, sys; sys.exit(importlib.util.find_spec('vllm') is None)"
    if subprocess.run([python, "-c", found], capture_output=True, check=False).returncode:
        raise ConfigError(
            f"{python} has no vLLM; install it there, or name an interpreter that has it with --python (docs/scale.md)."
        )


def _on_gpus(asked: VllmSettings) -> bool:
    return asked.device == "cuda" or (asked.device is None and gpu_there() is not None)


def _check_gpus(python: str, asked: VllmSettings) -> None:
    count = "import torch; print(torch.cuda.device_count())"
    done = subprocess.run([python, "-c", count], capture_output=True, text=True, check=False).stdout.split()
    there, needed = int(done[-1]) if done and done[-1].isdigit() else 0, asked.servers * asked.gpus_per_server
    if needed > there:
        raise ConfigError(
            f"The servers need {counted(needed, 'GPUs')}, and the torch of {python} sees {there}; lower --servers or "
            "--gpus_per_server, or give --device cpu (mafrt info says why a torch does not see a GPU)."
        )


def _check_port(host: str, port: int) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise ConfigError(
                f"port {port} of {host} cannot be listened on ({error.strerror}); choose another --port."
            ) from None


class Server:
    """One server and its processes."""

    def __init__(self, words: Sequence[str], environment: dict[str, str], asked: VllmSettings, number: int) -> None:
        port = asked.port + number
        self.words = [*words, "--port", str(port)]
        self.environment = {**os.environ, **environment}
        self.url = f"http://{_reached_at(asked.host)}:{port}"
        self.began = 0.0
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        self.began = time.monotonic()
        # A group of its own: all processes that it starts end with it.
        self._process = subprocess.Popen(self.words, env=self.environment, start_new_session=True)

    @property
    def status(self) -> int | None:
        assert self._process is not None
        return self._process.poll()

    def answers(self) -> bool:
        try:
            served_bases(self.url)
        except StatusError as error:
            raise ConfigError(f"{self.url} is another server's ({error}); choose another --port.") from None
        except (OSError, ValueError):
            return False
        return True

    def keep_up(self) -> None:
        """Start it anew if it has died, unless it died at once."""
        if self.status is None:
            return
        if time.monotonic() - self.began < STEADY_S:
            raise EngineDownError(
                f"The server at {self.url} ended with status {self.status}; its last words are above."
            )
        print(f"The server at {self.url} ended with status {self.status}, and is started again.", flush=True)
        self.end()
        self.start()

    def end(self) -> None:
        process = self._process
        if process is None:
            return
        # Twice, since others of its group may be left.
        for kind in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, kind)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(20.0)


def _reached_at(host: str) -> str:
    """The part of an address under which this machine reaches what listens on `host`."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host
    if address.is_unspecified:
        return "127.0.0.1"
    return f"[{host}]" if address.version == 6 else host


def _gpus_of(number: int, asked: VllmSettings) -> dict[str, str]:
    """The GPUs of server `number`, of those that this process may see."""
    seen, each = os.environ.get("CUDA_VISIBLE_DEVICES"), asked.gpus_per_server
    names = seen.split(",") if seen else [str(gpu) for gpu in range((number + 1) * each)]
    return {"CUDA_VISIBLE_DEVICES": ",".join(names[number * each : (number + 1) * each])}


def _await(servers: Sequence[Server], timeout_s: float, ending: threading.Event) -> None:
    deadline, waiting = time.monotonic() + timeout_s, list(servers)
    while waiting and not ending.wait(0.5):
        for server in servers:
            if server.status is not None:
                raise EngineDownError(
                    f"The server at {server.url} ended with status {server.status} before it answered; its last words "
                    "are above."
                )
        waiting = [server for server in waiting if not server.answers()]
        if waiting and time.monotonic() > deadline:
            raise EngineDownError(
                f"{waiting[0].url} does not answer after {timeout_s:g} s; give --start_timeout_s more."
            )


def main(argv: Sequence[str] | None = None) -> int:
    return run_main(serve, argv)


if __name__ == "__main__":
    sys.exit(main())
