"""Training on a Ray cluster: a real one on this machine, whose nodes are killed."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from mafrt.core.errors import ConfigError, EngineDownError
from mafrt.core.signals import StopRequest
from mafrt.scripts.cli import ray_cluster, ray_node
from mafrt.storage.args_file import read_args

HERE = importlib.util.find_spec("ray") is not None
pytestmark = [
    pytest.mark.skipif(not HERE, reason="ray is not installed: --ray is NOT tested here"),
    pytest.mark.takes(slow=240),
]
ROOT = Path(__file__).parents[2]
NEED_DEEPSPEED = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed: ZeRO under Ray is NOT tested"
)
TOY = ["--device", "cpu", "--threads", "1", "--n_rollout_threads", "4", "--eval_episodes", "0"]
TOY += ["--max_new_tokens", "8", "--lr", "1e-2", "--save_interval", "1"]
TOY += ["--env", "stops:Counted", "--algorithm", "stops:Stops", "--iterations", "3"]
STOPS = '''
"""An environment and a rule that stop, once, where a file asks for it: the moment to kill a node."""

import os
import time
from dataclasses import dataclass
from pathlib import Path

import mafrt
from mafrt.algorithms import Algorithm
from mafrt.core.types import StepResult

HERE = Path(__file__).parent


def stop(where):
    ask = HERE / f"{where}.{os.environ.get('RANK', 'server')}"
    if ask.exists() and Path(ask.read_text(), "checkpoints/step_000001").exists():
        ask.unlink()
        reached = ask.with_suffix(ask.suffix + ".reached")
        reached.write_text(str(os.getpid()))
        while reached.exists():
            time.sleep(0.1)


class Counted(mafrt.Env):
    agents = ("first", "second")
    num_tasks = 8

    def reset(self, seed=None, options=None):
        self.task = str((options or {}).get("task", 0))
        return {"first": f"Count to {self.task}."}, {"task": self.task}

    def step(self, actions):
        stop("play")
        [(name, text)] = actions.items()
        reward = {name: sum(letter in "aeiou" for letter in text) / 9}
        if name == "first":
            return StepResult({"second": f"They said {text!r}."}, reward, False, False, {})
        return StepResult({}, reward, True, False, {})


@dataclass(frozen=True)
class Stops(Algorithm):
    def credit(self, trajectories, context):
        for row in (row for rows in trajectories for row in rows if row.dropped is None):
            values = [row.reward] * len(row.turn.action_ids)
            row.fill(advantages=values, returns=values)
        return {}

    def policy_loss(self, terms):
        stop("learn")
        return -(terms.advantages * terms.logprobs).sum() / terms.denominator, {}
'''


class Nodes:
    """A cluster on this machine: a head without room, where the trainer is typed, and nodes of two CPUs."""

    def __init__(self) -> None:
        from ray.cluster_utils import Cluster

        self._cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
        self.address = str(self._cluster.address)
        self._raylets: list[tuple[psutil.Process, Any]] = []

    def have(self, number: int) -> None:
        """Start nodes until there are so many, of which the cluster knows, as of those that were killed."""
        for raylet, node in self._raylets:
            if not raylet.is_running():
                self._cluster.remove_node(node, allow_graceful=False)
        self._raylets = [(raylet, node) for raylet, node in self._raylets if raylet.is_running()]
        while len(self._raylets) < number:
            node = self._cluster.add_node(wait=False, num_cpus=2)
            self._raylets.append((psutil.Process(node.all_processes["raylet"][0].process.pid), node))
        self._cluster.wait_for_nodes(300)

    def kill_node_of(self, pid: int) -> list[psutil.Process]:
        """kill -9 of the node on which a process runs; the processes of ours, which have to end by themselves."""
        above = [process.pid for process in psutil.Process(pid).parents()]
        (raylet,) = [raylet for raylet, _ in self._raylets if raylet.pid in above]
        below = raylet.children(recursive=True)
        begun = [process for process in below if "mafrt" in " ".join(process.cmdline())]
        # With their workers: a server that outlives its own would call an episode failed, which a dead one cannot.
        ours = [*begun, *(worker for process in begun for worker in process.children(recursive=True))]
        for process in [raylet, *(process for process in below if process not in ours)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        raylet.wait(30)
        return ours

    def close(self) -> None:
        self._cluster.shutdown()


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    with pytest.MonkeyPatch.context() as patch:
        # Ray gives its workers a niceness of 15: beside busy neighbours they would hardly run.
        patch.setenv("RAY_worker_niceness", "0")
        # A node that is slow to answer is alive; of a killed one the connection is refused at once.
        patch.setenv("RAY_health_check_timeout_ms", "120000")
        cluster = Nodes()
        yield cluster
        cluster.close()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Of one test and try: what a failed try leaves must not be taken for the next one's."""
    (tmp_path / "stops.py").write_text(STOPS)
    return tmp_path


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of two processes without Ray."""
    folder = tmp_path_factory.mktemp("shared")
    (folder / "stops.py").write_text(STOPS)
    words = ["torch.distributed.run", "--nproc_per_node", "2", "--standalone", "--module", "mafrt.scripts.train"]
    done = subprocess.run([sys.executable, "-m", *words, *TOY, "--run_dir", "alone"], cwd=folder, env=variables())
    assert done.returncode == 0
    return folder / "alone"


def variables(**more: str) -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", **more}


def start(folder: Path, nodes: Nodes, run: str, *words: str, iterations: int = 3, **more: str) -> subprocess.Popen[str]:
    toy = [*TOY[:-1], str(iterations)]
    command = [sys.executable, "-m", "mafrt.scripts.train", *toy, "--run_dir", run, "--ray", nodes.address, *words]
    out: Any = subprocess.PIPE
    return subprocess.Popen(command, cwd=folder, env=variables(**more), stdout=out, stderr=subprocess.STDOUT, text=True)


def finish(process: subprocess.Popen[str], timeout: float = 400.0) -> str:
    try:
        out, _ = process.communicate(timeout=timeout)
    finally:
        process.kill()
    return str(out)


def ask(folder: Path, place: str, run: str) -> Path:
    """Have the process stop there from the run's second iteration on; the file that holds its id while it does."""
    (folder / place).write_text(str(folder / run))
    return folder / f"{place}.reached"


def until(true: Callable[[], object], process: subprocess.Popen[str]) -> None:
    end = time.monotonic() + 300
    while not true():
        if time.monotonic() > end or process.poll() is not None:
            process.kill()
            pytest.fail(f"it never came so far: {process.communicate()[0]}")
        time.sleep(0.1)


def written(file: Path) -> Callable[[], object]:
    return lambda: file.exists() and file.read_text()


def same(run: Path, other: Path) -> None:
    for name in ("metrics.jsonl", "episodes.jsonl"):
        lines = (run / name).read_text()
        assert lines and lines == (other / name).read_text(), name
    assert not run.with_name(f"{run.name}.ray").exists()


@pytest.mark.slow
@pytest.mark.ci
@pytest.mark.cases(1)
@pytest.mark.parametrize("place", ["learn.0", "play.1", ""], ids=["learner", "playing", "nobody"])
def test_two_nodes_learn_what_two_processes_learn_also_when_one_is_killed(folder, nodes, undisturbed, place):
    nodes.have(2)
    run = f"run{place}"
    stopped = ask(folder, place, run) if place else None
    process = start(folder, nodes, run)
    if stopped is not None:
        until(written(stopped), process)
        ours = nodes.kill_node_of(int(stopped.read_text()))
        left = psutil.wait_procs(ours, timeout=20)[1]
        nodes.have(2)
    out = finish(process)
    assert process.returncode == 0, out
    assert stopped is None or (ours and not left), "they die with the actor that started them"
    assert ("started again from iteration 1" in out) == (stopped is not None), out
    same(folder / run, undisturbed)


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.ci
@pytest.mark.parametrize("layout", ["fsdp", pytest.param("zero3", marks=NEED_DEEPSPEED)])
def test_two_nodes_with_a_sharded_base_learn_what_two_processes_learn_with_it(folder, nodes, layout):
    nodes.have(2)
    flags = ["--deepspeed", str(ROOT / f"configs/{layout}.json")] if layout == "zero3" else []
    shell = {"DS_ACCELERATOR": "cpu"} if flags else {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}
    launcher = ["torch.distributed.run", "--nproc_per_node", "2", "--standalone", "--module", "mafrt.scripts.train"]
    command = [sys.executable, "-m", *launcher, *TOY, *flags, "--run_dir", f"{layout}_alone"]
    assert subprocess.run(command, cwd=folder, env=variables(**shell)).returncode == 0
    process = start(folder, nodes, layout, *flags, **shell)
    out = finish(process)
    assert process.returncode == 0, out
    same(folder / layout, folder / f"{layout}_alone")


@pytest.mark.slow
@pytest.mark.ci
def test_episodes_of_a_lost_server_go_elsewhere_and_it_is_started_again(folder, nodes, undisturbed):
    nodes.have(3)
    playing, learning = ask(folder, "play.server", "served"), ask(folder, "learn.0", "served")
    process = start(folder, nodes, "served", "--ray_nodes", "1", "--ray_procs_per_node", "2", "--ray_envs", "2")
    until(written(playing), process)
    listed = folder / "served.ray/environments.txt"
    before = set(listed.read_text().split())
    nodes.kill_node_of(int(playing.read_text()))
    until(written(learning), process)  # so the episodes were played on the other one
    until(lambda: len(now := set(listed.read_text().split())) == 2 and now != before, process)
    learning.unlink()
    out = finish(process)
    assert process.returncode == 0 and "is started again" in out and "all processes" not in out, out
    same(folder / "served", undisturbed)
    flags = f"--ray {nodes.address} --ray_nodes 1 --ray_procs_per_node 2 --ray_envs 2"
    assert f"--load_path {folder / 'served'} {flags}\n" in out
    assert read_args(folder / "served/args.yaml")["env"] == "stops:Counted"


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.ci
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed: --ray_vllm is NOT tested")
def test_a_run_with_a_vllm_server_of_the_cluster_goes_on_there_and_without_it(folder, nodes):
    nodes.have(2)
    run = folder / "sampled"
    out = finish(start(folder, nodes, "sampled", "--ray_nodes", "1", "--ray_vllm", "1"), 900)
    assert f"--load_path {run} --ray {nodes.address} --ray_nodes 1 --ray_vllm 1\n" in out
    assert read_args(run / "args.yaml")["engine"] == "local"
    more = [sys.executable, "-m", "mafrt.scripts.train", "--load_path", str(run), "--iterations"]
    there = ["--ray", nodes.address, "--ray_nodes", "1", "--ray_vllm", "1"]
    for command in ([*more, "4", *there], [*more, "5"]):
        done = subprocess.run(command, cwd=folder, env=variables(), capture_output=True, text=True, timeout=900)
        assert done.returncode == 0, done.stdout + done.stderr
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["iteration"] for row in rows] == [1, 2, 3, 4, 5]


@pytest.mark.slow
@pytest.mark.ci
@pytest.mark.parametrize("ends", [signal.SIGTERM, signal.SIGINT])  # Ray blocks the latter in what it starts
def test_a_signal_to_the_trainer_ends_all_with_a_checkpoint(folder, nodes, ends):
    nodes.have(2)
    process = start(folder, nodes, "ended", iterations=500)
    until((folder / "ended/checkpoints/step_000001").exists, process)
    process.send_signal(ends)
    out = finish(process, 120)
    assert process.returncode == 0 and f"Stopped by {ends.name}" in out and "--load_path" in out, out
    run = str(folder / "ended")
    ours = [one for one in psutil.process_iter(["cmdline"]) if run in (one.info["cmdline"] or ())]
    assert not psutil.wait_procs(ours, timeout=120)[1]


def typed(folder: Path, *words: str, device: str = "cpu", **more: str) -> str:
    """What `mafrt train` says to words that it refuses."""
    command = [sys.executable, "-m", "mafrt.scripts.train", *TOY[:1], device, *TOY[2:], "--run_dir", "refused", *words]
    done = subprocess.run(command, cwd=folder, env=variables(**more), capture_output=True, text=True, timeout=240)
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and done.stderr.startswith("error: "), done.stderr
    assert "Loading" not in done.stdout
    return done.stderr


@pytest.mark.slow
@pytest.mark.ci
def test_what_a_cluster_cannot_do_is_refused_in_a_sentence(folder, nodes):
    nodes.have(2)
    here = ("--ray", nodes.address)
    assert "There is no Ray cluster at 127.0.0.1:1 " in typed(folder, "--ray", "127.0.0.1:1")
    assert "give auto" in typed(folder, "--ray", "ray://127.0.0.1:10001")
    assert "a launcher has started this one" in typed(folder, *here, RANK="0", WORLD_SIZE="1")
    assert "9 nodes with 1 CPU each asked for" in typed(folder, *here, "--ray_nodes", "9")
    assert "2 nodes with 1 GPU each" in typed(folder, *here, "--ray_nodes", "2", device="cuda")
    assert "lower --ray_nodes" in typed(folder, *here, "--ray_envs", "50")
    assert "no effect without --ray" in typed(folder, "--ray_nodes", "2")
    assert "--gpus" in typed(folder, *here, "--ray_vllm", "1", "--ray_vllm_flags", "--gpus 2")


@pytest.mark.slow
@pytest.mark.ci
def test_a_folder_that_a_node_does_not_see_is_refused(folder, nodes, monkeypatch):
    from mafrt.scripts.cli.ray_node import RayNode

    monkeypatch.setattr(RayNode, "__init__", lambda node: setattr(node, "address", "10.0.0.9"))
    given = folder / "given"
    given.touch()
    assert RayNode().look([sys.executable], str(given), str(folder / "reply")) == ("10.0.0.9", [])
    assert (folder / "reply").exists()
    gone = str(folder / "gone")
    assert RayNode().look([gone], str(folder / "nothing"), gone) == ("10.0.0.9", [gone, str(folder / "nothing")])
    assert not Path(gone).exists()


class Told:
    """What stands for Ray and for an actor: a call is the answer itself, and all answers are there at once."""

    def __init__(self, *codes: int | None) -> None:
        self.report = self.end = self.serve = self
        self.codes, self.exceptions = list(codes), pytest.importorskip("ray").exceptions

    def remote(self, *_: Any) -> Told:
        return self

    def wait(self, calls: list[Any], **_: Any) -> tuple[list[Any], list[Any]]:
        time.sleep(0.01)
        return calls, []

    def get(self, call: Any, **_: Any) -> ray_node.Report:
        return ray_node.Report([], call.codes)

    def kill(self, actor: Any) -> None:
        pass


def launcher(nodes: int) -> Any:
    made: Any = object.__new__(ray_cluster.Launcher)
    made.ray, made.layout, made.servers, made._calls = Told(), ray_cluster.Layout(nodes, 1, False), [], {}
    made.stop = StopRequest()
    return made


def test_a_process_that_failed_alone_ends_the_run_and_no_node_is_called_silent(monkeypatch):
    monkeypatch.setattr(ray_cluster, "LOST_S", 0.1)
    assert launcher(2)._watch([Told(2), Told(None)]) == 2


def test_the_end_of_actors_is_not_taken_for_a_loss_of_those_that_follow():
    one, other = Told(None), Told(None)
    made = launcher(2)
    for actor in (one, other):
        made._call(actor, actor, lambda _: None, lambda why: pytest.fail(why))
    made._end([one])
    assert list(made._calls) == [other]


def test_a_server_whose_node_is_lost_before_it_listens_is_started_elsewhere(tmp_path, capsys, monkeypatch):
    made, servers = launcher(1), ray_cluster.Servers("environment", ["serve"], 1, tmp_path / "environments.txt")
    made.environment, made.servers = {}, [servers]
    failures = [made.ray.exceptions.ActorDiedError(), made.ray.exceptions.RayTaskError("serve", "", OSError("full"))]

    def fail(call: Any) -> None:
        raise failures.pop(0)

    actor = Told(None)
    monkeypatch.setattr(made, "_actor", lambda **_: actor)
    monkeypatch.setattr(made, "_end", lambda actors: None)
    monkeypatch.setattr(made.ray, "get", fail)
    made._serve(servers, 0)
    made._turn()
    assert "is started again" in capsys.readouterr().out and set(servers.again_at) == {0} and not servers.actors
    made._serve(servers, 0)
    with pytest.raises(EngineDownError, match=r"environment server 1 .*full"):  # what it said itself is no accident
        made._turn()


def test_a_port_is_kept_for_a_process_that_will_listen_there():
    node = ray_node.RayNode()
    place = node.free_place()
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind(place)
    socket.create_server(place).close()


@pytest.mark.slow
def test_an_address_where_something_else_listens_is_refused(monkeypatch):
    monkeypatch.setattr(ray_cluster, "JOIN_S", 3.0)
    with socket.create_server(("127.0.0.1", 0)) as other, pytest.raises(ConfigError, match="is no Ray cluster"):
        ray_cluster.connected(f"127.0.0.1:{other.getsockname()[1]}")


def test_flags_of_the_launcher_are_no_flags_of_its_processes():
    without = ray_cluster.without
    words = ["--env", "a:B", "--ray=auto", "--ray-nodes", "2", "--env_kwargs", "a=1", "b=2", "--no-set_aside"]
    assert without(words, lambda name: name.startswith("ray")) == [*words[:2], *words[5:]]
    assert without(words, lambda name: name in ("env_kwargs", "set_aside", "env")) == words[2:5]
