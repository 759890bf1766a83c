"""`mafrt train ... --ray ADDRESS`: the run's processes and its servers on the nodes of a Ray cluster.

Ray places, watches and replaces; what is placed are the commands that a user would start by hand. A process of the run
is the same `mafrt train` with the variables that `torchrun` sets, so every layout and rule works as it does there. When
a node, an actor or a process is lost, all processes are ended and started again with `--load_path`, which goes on from
the run's last checkpoint. Servers stay, and a lost one is started again where there is room.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import re
import secrets
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from mafrt.core.atomic_files import write_atomic
from mafrt.core.errors import ConfigError, EngineDownError
from mafrt.core.extras import package
from mafrt.core.signals import StopRequest
from mafrt.core.text import counted, error_line
from mafrt.engines.checks import TOKEN as VLLM_TOKEN
from mafrt.environment.registry import REMOTE
from mafrt.scripts import serve_vllm
from mafrt.scripts.cli import ray_node
from mafrt.scripts.cli.command import Command, Settings, underscored
from mafrt.scripts.cli.go_on import ON_CLUSTER, PAUSED, go_on, interrupted
from mafrt.scripts.cli.settings import ScaleSettings
from mafrt.storage.args_file import ARGS
from mafrt.storage.checkpoint import candidates

ENV_TOKEN = "MAFRT_ENV_TOKEN"
CONNECT_S = 5.0
"""Seconds in which the cluster's address has to answer."""
JOIN = "import ray, sys; ray.init(address=sys.argv[1], log_to_driver=False)"
JOIN_S = 60.0
"""Seconds in which a cluster takes a program in."""
ROOM_S = 600.0
"""Seconds to wait for nodes with room."""
LOST_S = 60.0
"""Seconds after a failure in which the other processes end by themselves, and Ray finds out which node is lost."""
SERVER_S = 900.0
"""Seconds in which a server has to listen."""
PLAYED = ("env", "env_kwargs", "eval_env_kwargs")
"""Settings that environment servers replace."""
SAMPLED = ("engine", "vllm_servers", "vllm_adapter_dir")
"""Settings that vLLM servers replace."""


@dataclass(frozen=True)
class Layout:
    """The processes of a run on a cluster."""

    nodes: int
    per_node: int
    gpus: bool

    @property
    def bundle(self) -> dict[str, float]:
        """What Ray sets aside on each node."""
        return {"CPU": self.per_node, **({"GPU": self.per_node} if self.gpus else {})}


@dataclass
class Servers:
    """Servers of one kind, and the file that names those that listen."""

    kind: str
    words: list[str]
    number: int
    file: Path
    gpus: int = 0
    scheme: str = ""
    actors: dict[int, Any] = field(default_factory=dict)
    listening: dict[int, str] = field(default_factory=dict)
    """HOST:PORT by number"""
    heard: set[int] = field(default_factory=set)
    """those that have listened at some time, whose words are therefore right"""
    again_at: dict[int, float] = field(default_factory=dict)
    """when one that was lost is started again (`time.monotonic`)"""
    lost: bool = False
    """whether one was lost since the processes were started"""

    def publish(self) -> None:
        if self.listening:  # an empty list would be an error, and an old one does no harm
            write_atomic(self.file, "".join(f"{self.scheme}{place}\n" for place in self.listening.values()).encode())


class LostError(Exception):
    """A node, an actor or a process is gone; the sentence says which."""


def train_on_ray(command: Command, argv: Sequence[str], settings: Settings, run_dir: Path) -> int:
    """Train on a cluster; the exit code is that of the run's processes.

    Raises:
        ConfigError, MissingExtraError: ray, the cluster, its room or the shared folder is missing.
    """
    scale = settings.make(ScaleSettings)
    if "RANK" in os.environ:
        raise ConfigError(
            "--ray starts the processes itself, but a launcher has started this one; leave out one of them."
        )
    ray = connected(scale.ray or "auto")
    try:
        # After Ray, which has a handler of its own for SIGTERM.
        with StopRequest() as stop:
            layout = layout_of([node for node in ray.nodes() if node["Alive"]], scale, settings["device"])
            return Launcher(ray, command, argv, settings, layout, run_dir.absolute(), stop).run()
    except KeyboardInterrupt as error:
        if (code := interrupted(error, command, run_dir)) is not None:
            return code
        raise
    finally:
        ray.shutdown()


def connected(address: str) -> Any:
    """The module `ray`, connected to the cluster at `auto` or HOST:PORT."""
    ray = package("--ray", "ray", "ray")
    host, _, port = address.rpartition(":")
    if address != "auto" and not (re.fullmatch(r"[\w.:\[\]-]+", host) and port.isdigit()):
        raise ConfigError(
            f"ray is {address!r}; give auto on a machine of the cluster, or HOST:PORT as `ray start --head` tells it."
        )
    remedy = "start one with `ray start --head`, or give --ray its HOST:PORT"
    try:
        if address != "auto":  # Ray itself would try for many minutes, in lines of its own
            socket.create_connection((host.strip("[]"), int(port)), CONNECT_S).close()
            subprocess.run([sys.executable, "-c", JOIN, address], capture_output=True, timeout=JOIN_S, check=False)
        ray.init(address=address, log_to_driver=False, logging_level="ERROR")
    except subprocess.TimeoutExpired:
        raise ConfigError(f"What listens at {address} is no Ray cluster that takes programs in; {remedy}.") from None
    except (OSError, OverflowError) as error:
        why = "none runs here" if address == "auto" else error_line(error)
        raise ConfigError(f"There is no Ray cluster at {address} ({why}); {remedy}.") from None
    except (RuntimeError, ValueError) as error:  # such as another version of Ray or Python
        raise ConfigError(f"The Ray cluster at {address} cannot be used: {error_line(error)}") from None
    return ray


def layout_of(nodes: Sequence[Mapping[str, Any]], scale: ScaleSettings, device: str | None) -> Layout:
    """The layout that is asked for, or the largest. Raises ConfigError if the cluster has no room for it."""
    gpus = [int(node["Resources"].get("GPU", 0)) for node in nodes]
    on_gpus = device != "cpu" and (any(gpus) or device is not None)
    per_node = scale.ray_procs_per_node or (min(filter(None, gpus), default=1) if on_gpus else 1)
    layout = Layout(0, per_node, on_gpus)
    fitting = [node for node in nodes if all(node["Resources"].get(k, 0) >= v for k, v in layout.bundle.items())]
    asked = scale.ray_nodes or max(1, len(fitting))
    kind = "GPU" if on_gpus else "CPU"
    if len(fitting) < asked:
        has = ", ".join(str(int(node["Resources"].get(kind, 0))) for node in nodes)
        raise ConfigError(
            f"{counted(asked, 'nodes')} with {counted(per_node, kind + 's')} each asked for, "
            f"and {len(fitting)} of the cluster's {len(nodes)} have them ({kind}s: {has}); lower --ray_nodes or "
            "--ray_procs_per_node, or add nodes."
        )
    servers, per_server = scale.ray_vllm, gpus_of_server(scale) * on_gpus
    needed = {
        "GPU": asked * per_node * on_gpus + servers * per_server,
        "CPU": asked * per_node + servers + scale.ray_envs,
    }
    for name, number in needed.items():
        there = sum(node["Resources"].get(name, 0) for node in nodes)
        if there < number:
            raise ConfigError(
                f"The processes and servers take {number} {name}s, and the cluster has {there:g}; lower --ray_nodes, "
                "--ray_procs_per_node, --ray_vllm or --ray_envs, or add nodes."
            )
    return Layout(asked, per_node, on_gpus)


def gpus_of_server(scale: ScaleSettings) -> int:
    """GPUs of one vLLM server; refuses wrong flags for it."""
    return int(serve_vllm.COMMAND.read(shlex.split(scale.ray_vllm_flags)).make(serve_vllm.VllmSettings).gpus_per_server)


class Launcher:
    """Starts the processes and the servers of one run, and starts them again."""

    def __init__(
        self,
        ray: Any,
        command: Command,
        argv: Sequence[str],
        settings: Settings,
        layout: Layout,
        run_dir: Path,
        stop: StopRequest,
    ) -> None:
        self.ray, self.command, self.layout, self.run_dir, self.stop = ray, command, layout, run_dir, stop
        self.scale = settings.make(ScaleSettings)
        # Beside the run, whose own folder has to be empty at the start.
        self.shared = run_dir.with_name(f"{run_dir.name}.ray")
        # As `srun` does, the variables of this shell go along: keys, caches, and the layout of accelerate. They are
        # arguments of a call and no `runtime_env`, which Ray shows to everyone who sees its dashboard.
        of_node = ("CUDA_VISIBLE_DEVICES", "LOCAL_RANK")
        self.environment = {k: v for k, v in os.environ.items() if not k.startswith("RAY_") and k not in of_node}
        if layout.per_node > 1:
            self.environment.setdefault("OMP_NUM_THREADS", "1")  # as `torchrun` does
        self.words = [*without(argv, of_ray), "--ray", "none"]
        # What is recorded is what was asked for: a run's servers end with it, and it may go on elsewhere.
        replaced = [*PLAYED * bool(self.scale.ray_envs), *SAMPLED * bool(self.scale.ray_vllm)]
        asked = {name: settings[name] for name in replaced if name in settings.values}
        flags = [flag for name, value in typed(self.scale).items() for flag in (f"--{name}", str(value))]
        os.environ[ON_CLUSTER] = self.environment[ON_CLUSTER] = json.dumps([flags, asked])
        self.servers = [*self._env_servers(settings), *self._vllm_servers(settings)]
        self._calls: dict[Any, tuple[Any, Callable[[Any], None], Callable[[str], None], Callable[[str], None]]] = {}
        """calls on their way: the actor, and what to do with the answer, without one, and with what was raised"""

    def run(self) -> int:
        """Train until the processes end by themselves, or cannot be brought back."""
        self.shared.mkdir(parents=True, exist_ok=True)
        failures, before = 0, -1
        try:
            while True:
                try:
                    code = self._attempt()
                except LostError as error:
                    newest = max((step for step, _ in candidates(self.run_dir / "checkpoints")), default=0)
                    failures, before = (1 if newest > before else failures + 1), newest
                    if self.stop.requested or failures > self.scale.ray_restarts:
                        print(f"{error}.\nGo on with: {go_on(self.command, self.run_dir)}")
                        return PAUSED
                    print(f"{error}; all processes are started again from iteration {newest}.", flush=True)
                else:
                    if code == 0:
                        shutil.rmtree(self.shared, ignore_errors=True)
                    return code
        finally:
            for servers in self.servers:
                self._end(list(servers.actors.values()))

    # ------------------------------------------------------------------------------------------------ the processes

    def _attempt(self) -> int:
        """Start all processes, and wait for their end. Raises LostError."""
        group = self.ray.util.placement_group([self.layout.bundle] * self.layout.nodes, strategy="STRICT_SPREAD")
        nodes: list[Any] = []
        try:
            self._await(group.ready(), f"{counted(self.layout.nodes, 'nodes')} with room")
            nodes = [self._actor(group, index) for index in range(self.layout.nodes)]
            self._check_folders(nodes)
            self._await_servers()
            self._start(nodes)
            return self._watch(nodes)
        except self.ray.exceptions.RayError as error:
            raise LostError(f"A node of the cluster is lost ({error_line(error)})") from None
        finally:
            self._end(nodes)
            self.ray.util.remove_placement_group(group)

    def _actor(self, group: Any = None, index: int = 0, gpus: int = 0) -> Any:
        """An actor in a part of the placement group, or anywhere."""
        place: Any = "SPREAD"
        amount: dict[str, Any] = {"num_cpus": 1, "num_gpus": gpus}
        if group is not None:
            strategies = importlib.import_module("ray.util.scheduling_strategies")
            place = strategies.PlacementGroupSchedulingStrategy(group, index)
            amount = {"num_cpus": self.layout.per_node, "num_gpus": self.layout.bundle.get("GPU", 0)}
        self.ray.cloudpickle.register_pickle_by_value(ray_node)
        return self.ray.remote(ray_node.RayNode).options(**amount, scheduling_strategy=place).remote()

    def _check_folders(self, nodes: Sequence[Any]) -> None:
        """ConfigError unless every node sees this Python, this folder and the run's."""
        given = self.shared / f"shared-{secrets.token_hex(4)}"
        given.write_text("", encoding="utf-8")
        replies = [given.with_name(f"{given.name}-{number}") for number in range(len(nodes))]
        needed = [sys.executable, os.getcwd()]
        calls = [node.look.remote(needed, str(given), str(answer)) for node, answer in zip(nodes, replies, strict=True)]
        for (address, missing), reply in zip(self.ray.get(calls), replies, strict=True):
            if missing or not reply.exists():
                raise ConfigError(
                    f"The node {address} does not see {missing[0] if missing else given} of this machine; the "
                    "checkout, .venv and the run's folder lie under one path on all nodes (docs/scale.md)."
                )
        for path in (given, *replies):
            path.unlink()

    def _start(self, nodes: Sequence[Any]) -> None:
        words = self._words()
        address, port = self.ray.get(nodes[0].free_place.remote())
        size, each = self.layout.nodes * self.layout.per_node, self.layout.per_node
        for number, node in enumerate(nodes):
            commands = []
            for local in range(each):
                place = {
                    "RANK": number * each + local,
                    "WORLD_SIZE": size,
                    "LOCAL_RANK": local,
                    "LOCAL_WORLD_SIZE": each,
                }
                place |= {"GROUP_RANK": number, "MASTER_ADDR": address, "MASTER_PORT": port}
                commands.append((words, self.environment | {name: str(value) for name, value in place.items()}))
            self.ray.get(node.start.remote(commands, os.getcwd()))

    def _words(self) -> list[str]:
        """The command of every process: as it was typed, or going on with the run."""
        words = program(self.command.name)
        begun = (self.run_dir / ARGS).exists()
        if not begun:
            return [*words, *without(self.words, lambda name: name == "run_dir"), "--run_dir", str(self.run_dir)]
        placed = ("run_dir", "load_path", "set_aside")
        return [*words, *without(self.words, lambda name: name in placed), "--load_path", str(self.run_dir)]

    def _watch(self, nodes: Sequence[Any]) -> int:
        """The exit code of the processes. Raises LostError when one is lost."""
        codes: list[list[int | None]] = [[None] * self.layout.per_node for _ in nodes]
        reported_at = [0.0] * len(nodes)
        failed_at: float | None = None
        told = False

        def follow(number: int) -> None:
            def take(report: ray_node.Report) -> None:
                for where, line in report.lines:
                    print(line, end="", file=sys.stdout if where == 1 else sys.stderr, flush=True)
                codes[number], reported_at[number] = report.codes, time.monotonic()
                if None in report.codes:
                    follow(number)

            self._call(nodes[number], nodes[number].report.remote(), take, lost)

        def lost(why: str) -> None:
            raise LostError(f"A node of the cluster is lost ({why})")

        for number in range(len(nodes)):
            follow(number)
        while True:
            self._turn()
            ended = [code for part in codes for code in part]
            if any(code is not None and code < 0 for code in ended):
                which = signal.Signals(-min(code or 0 for code in ended)).name
                raise LostError(f"A process was ended by {which}")
            if None not in ended:
                code = max(code or 0 for code in ended)
                if code == PAUSED and any(servers.lost for servers in self.servers):
                    raise LostError("All servers of a kind were lost")
                return code
            if any(ended):
                failed_at = failed_at or time.monotonic()
                if time.monotonic() > failed_at + LOST_S:
                    if any(None in part and at < failed_at for part, at in zip(codes, reported_at, strict=True)):
                        raise LostError("A node of the cluster is silent")
                    return max(code or 0 for code in ended)
            if self.stop.requested and not told:
                told = True
                for node in nodes:
                    node.signal.remote(signal.Signals[self.stop.reason or "SIGTERM"].value)

    # -------------------------------------------------------------------------------------------------- the servers

    def _env_servers(self, settings: Settings) -> list[Servers]:
        if not self.scale.ray_envs:
            return []
        env = settings.values.get("env")
        if env is None or env.startswith(REMOTE) or "," in env or "@" in env:
            raise ConfigError("--ray_envs serves one environment, named by --env; give that, or leave --ray_envs out.")
        words = [*program("serve"), "--env", env]
        for name in ("env_kwargs", "eval_env_kwargs"):
            if settings[name]:
                words += [f"--{name}", *settings[name]]
        file = self.shared / "environments.txt"
        self.environment.setdefault(ENV_TOKEN, secrets.token_urlsafe())
        self.words = without(self.words, lambda name: name in PLAYED)
        self.words += ["--env", f"{REMOTE}@{file}/{env.rpartition(':')[2]}", "--env_kwargs", "--eval_env_kwargs"]
        return [Servers("environment", words, self.scale.ray_envs, file)]

    def _vllm_servers(self, settings: Settings) -> list[Servers]:
        if not self.scale.ray_vllm:
            return []
        words = program("serve_vllm")
        for name in ("model_name_or_path", "profile_path", "lora_rank", "context_window"):
            if settings[name] is not None:
                words += [f"--{name}", str(settings[name])]
        words += ["--device", "cuda" if self.layout.gpus else "cpu", *shlex.split(self.scale.ray_vllm_flags)]
        file = self.shared / "vllm.txt"
        self.environment.setdefault(VLLM_TOKEN, secrets.token_urlsafe())
        self.words = [*without(self.words, lambda name: name in SAMPLED), "--engine", "vllm"]
        self.words += ["--vllm_servers", f"@{file}", "--vllm_adapter_dir", str(self.shared / "adapters")]
        gpus = gpus_of_server(self.scale) if self.layout.gpus else 0
        return [Servers("vLLM", words, self.scale.ray_vllm, file, gpus, "http://")]

    def _await_servers(self) -> None:
        """Start the servers that do not run, and wait until one of each kind listens, at the start until all do."""
        for servers in self.servers:
            servers.lost = False
            everyone = not servers.actors
            for number in range(servers.number):
                if number not in servers.actors and number not in servers.again_at:
                    self._serve(servers, number)
            until = time.monotonic() + SERVER_S
            while len(servers.listening) < (servers.number if everyone else 1):
                self._turn()
                self._refuse_wait(until, f"{servers.kind} servers")

    def _serve(self, servers: Servers, number: int) -> None:
        log = f"{servers.file.with_suffix('')}-{number}.log"

        def refused(why: str) -> None:
            if number not in servers.heard:
                raise EngineDownError(f"The {servers.kind} server {number + 1} {why}; its last words are in {log}.")
            lost(why)

        def lost(why: str) -> None:
            print(f"The {servers.kind} server {number + 1} is lost ({why}), and is started again.", flush=True)
            servers.lost = True
            servers.listening.pop(number, None)
            servers.publish()
            self._end([servers.actors.pop(number)])
            servers.again_at[number] = time.monotonic() + 5.0

        def listens(place: str) -> None:
            servers.listening[number] = place
            servers.heard.add(number)
            servers.publish()
            follow()

        def follow() -> None:
            report = actor.report.remote()
            self._call(actor, report, lambda told: follow() if None in told.codes else lost("it ended"), lost)

        actor = servers.actors[number] = self._actor(gpus=servers.gpus)
        call = actor.serve.remote(servers.words, self.environment, os.getcwd(), log, SERVER_S)
        self._call(actor, call, listens, lost, refused)

    # ------------------------------------------------------------------------------------------------- calls to Ray

    def _call(
        self,
        actor: Any,
        call: Any,
        done: Callable[[Any], None],
        lost: Callable[[str], None],
        refused: Callable[[str], None] | None = None,
    ) -> None:
        """Have one of three called later: with the answer, with why there is none, or with what the call raised."""
        self._calls[call] = actor, done, lost, refused or lost

    def _turn(self) -> None:
        """Take the answers that arrive within a moment."""
        if not self._calls:
            time.sleep(0.2)
        ready = self.ray.wait(list(self._calls), num_returns=1, timeout=0.2)[0] if self._calls else []
        for call in ready:
            _, done, lost, refused = self._calls.pop(call)
            try:
                answer = self.ray.get(call)
            except self.ray.exceptions.RayTaskError as error:
                refused(error_line(error.cause))
            except self.ray.exceptions.RayError as error:
                lost(error_line(error))
            else:
                done(answer)
        for servers in self.servers:
            for number in [number for number, at in servers.again_at.items() if at < time.monotonic()]:
                del servers.again_at[number]
                self._serve(servers, number)

    def _await(self, call: Any, what: str) -> None:
        """Wait for a call, while the servers are watched. Raises LostError."""
        begun = time.monotonic()
        warned = False
        while not self.ray.wait([call], timeout=0.0)[0]:
            self._turn()
            if not warned and time.monotonic() > begun + CONNECT_S:
                warned = True
                print(f"Waiting for {what} ...", flush=True)
            self._refuse_wait(begun + ROOM_S, what)
        self.ray.get(call)

    def _refuse_wait(self, until: float, what: str) -> None:
        if self.stop.requested:
            raise LostError(f"Stopped by {self.stop.reason} while waiting for {what}")
        if time.monotonic() > until:
            raise LostError(f"The cluster has no {what}")

    def _end(self, actors: Sequence[Any]) -> None:
        """End actors and, before anything else is started, their processes."""
        for actor in actors:
            # Their end, which is wanted, would else be taken for a loss of those that are started next.
            self._calls = {call: call_state for call, call_state in self._calls.items() if call_state[0] is not actor}
            with contextlib.suppress(self.ray.exceptions.RayError):  # it is lost already, or is killed now
                self.ray.get(actor.end.remote(), timeout=30.0)
            self.ray.kill(actor)


def program(command: str) -> list[str]:
    """The words that start a command; by the console script, so that what a run advises can be pasted."""
    console = Path(sys.executable).with_name("mafrt")
    return [str(console), command] if console.exists() else [sys.executable, "-m", f"mafrt.scripts.{command}"]


def of_ray(name: str) -> bool:
    """Whether a setting is about the cluster."""
    return name == "ray" or name.startswith("ray_")


def typed(scale: ScaleSettings) -> dict[str, Any]:
    """The settings about the cluster that are not the defaults."""
    values = {one.name: getattr(scale, one.name) for one in fields(scale) if of_ray(one.name)}
    return {name: value for name, value in values.items() if value != getattr(ScaleSettings, name)}


def without(argv: Sequence[str], dropped: Callable[[str], bool]) -> list[str]:
    """The words without the flags of these names and their values."""
    words_left, keep = [], True
    for word in argv:
        if word.startswith("--"):
            keep = not dropped(underscored(word).partition("=")[0].removeprefix("--").removeprefix("no-"))
        if keep:
            words_left.append(word)
    return words_left
