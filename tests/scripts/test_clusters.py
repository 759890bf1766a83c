"""The recipes for clusters, as far as one machine can run them: stand-ins for SLURM, real torchrun on loopback."""

from __future__ import annotations

import json
import os
import shlex
import socket
import subprocess
from pathlib import Path

import pytest
import yaml
from helpers_warm import write_python

pytestmark = pytest.mark.takes(slow=10)

ROOT = Path(__file__).parents[2]
SLURM, SKY, RAY = (ROOT / "examples/cluster" / name for name in ("slurm.sh", "sky.yaml", "ray.sh"))
TOY = ["--device", "cpu", "--threads", "1", "--iterations", "2", "--n_rollout_threads", "4", "--eval_episodes", "0"]
TOY += ["--max_new_tokens", "8", "--lr", "1e-3"]
PROGRAMS = {
    # Every node runs the command, as a task of its own.
    "srun": """shift
        for node in $(seq "$SLURM_NNODES"); do "$@" & tasks+=($!); done
        for task in "${tasks[@]}"; do wait "$task"; done""",
    "scontrol": 'test "$1 $2 $3" = "show hostnames $SLURM_JOB_NODELIST"; printf "127.0.0.1\\n127.0.0.2\\n"',
    "sbatch": 'grep "^#SBATCH" "$1" >directives',
}


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


@pytest.fixture
def cluster(tmp_path):
    """A checkout with stand-ins for SLURM's programs. `torchrun` writes its words down, or is the real one."""
    (tmp_path / ".venv/bin").mkdir(parents=True)
    (tmp_path / "bin").mkdir()
    (tmp_path / "scripts").symlink_to(ROOT / "scripts")
    for name, body in PROGRAMS.items():
        program(tmp_path / "bin" / name, body)
    # Nodes start at one moment: each writes its line whole.
    program(tmp_path / ".venv/bin/torchrun", 'exec 9>>words; flock 9; printf "%s\\0" "$@" >&9; printf "\\n" >&9')
    return tmp_path


def program(path: Path, body: str) -> None:
    path.write_text(f"#!/usr/bin/env bash\nset -e\n{body}\n")
    path.chmod(0o755)


def run(cluster: Path, *words: str, **variables: str) -> str:
    env = {**os.environ, "PATH": f"{cluster}/bin:{os.environ['PATH']}", "OMP_NUM_THREADS": "1", **variables}
    done = subprocess.run(["bash", *words], cwd=cluster, env=env, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def slurm(cluster: Path, *words: str) -> str:
    job = {"SLURM_JOB_NODELIST": "node[1-2]", "SLURM_NNODES": "2", "SLURM_JOB_ID": "7"}
    return run(cluster, str(SLURM), *words, **job)


def calls(cluster: Path) -> list[list[str]]:
    """What torchrun was called with, on each node."""
    return [line.split("\0")[:-1] for line in (cluster / "words").read_text().splitlines()]


def test_slurm_starts_one_torchrun_on_each_node_and_goes_on_when_started_again(cluster):
    subprocess.run(["bash", "-n", str(SLURM)], check=True)
    slurm(cluster, "run", "scripts/train_math.py", "--role", "two words")
    first, second = calls(cluster)
    assert first == second and first[-5:] == ["scripts/train_math.py", "--run_dir", "run", "--role", "two words"]
    assert dict(zip(first[:-5:2], first[1:-5:2], strict=True)) == {
        "--nnodes": "2", "--nproc_per_node": "1", "--rdzv_backend": "c10d", "--rdzv_id": "7",
        "--rdzv_endpoint": "127.0.0.1:29500",
    }  # fmt: skip
    (cluster / "run/checkpoints/step_000002").mkdir(parents=True)
    slurm(cluster, "run", "scripts/train_math.py", "--role", "two words")
    assert calls(cluster)[-1][-3:] == ["scripts/train_math.py", "--load_path", "run"]


def test_skypilot_starts_one_torchrun_on_each_node(cluster):
    task = yaml.safe_load(SKY.read_text())
    assert task["num_nodes"] == 2 and (ROOT / shlex.split(task["setup"])[1]).is_file()
    node = {**task["envs"], "SKYPILOT_NUM_NODES": "2", "SKYPILOT_NUM_GPUS_PER_NODE": "8", "SKYPILOT_NODE_RANK": "1"}
    node |= {"SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2", "RUN": "run"}
    run(cluster, "-euo", "pipefail", "-c", task["run"], **node)
    (cluster / "run/checkpoints/step_000002").mkdir(parents=True)
    run(cluster, "-euo", "pipefail", "-c", task["run"], **node)
    first, second = calls(cluster)
    assert first[:10] == second[:10] == [
        "--nnodes", "2", "--nproc_per_node", "8", "--node_rank", "1", "--master_addr", "10.0.0.1",
        "--master_port", "29500",
    ]  # fmt: skip
    assert first[10:] == [task["envs"]["SCRIPT"], "--run_dir", "run", *task["envs"]["FLAGS"].split()]
    assert second[10:] == [task["envs"]["SCRIPT"], "--load_path", "run"]


def test_ray_starts_the_cluster_once_and_goes_on_when_started_again(cluster):
    program(cluster / ".venv/bin/ray", 'echo "$@" >>started; [ "$1" != status ] || [ -e running ]; touch running')
    program(cluster / ".venv/bin/mafrt", 'printf "%s\\0" "$@" >>words; printf "\\n" >>words')
    run(cluster, str(RAY), "run", "train_math", "--role", "two words")
    (cluster / "run/checkpoints/step_000002").mkdir(parents=True)
    run(cluster, str(RAY), "run", "train_math", "--role", "two words")
    first, second = calls(cluster)
    assert first == ["train_math", "--run_dir", "run", "--role", "two words", "--ray", "auto"]
    assert second == ["train_math", "--load_path", "run", "--ray", "auto"]
    run(cluster, str(RAY), "node", HEAD="10.0.0.1")
    started = [line.split()[:3] for line in (cluster / "started").read_text().splitlines()]
    head, node = ["start", "--head", "--port"], ["start", "--address", "10.0.0.1:6379"]
    assert started == [["status"], head, ["status"], node]


@pytest.mark.nightly
@pytest.mark.slow
def test_two_nodes_learn_what_two_processes_of_one_node_learn(cluster, monkeypatch):
    python = cluster / "bin" / "python"
    for name, value in {**write_python(python), "PYTHON_EXEC": str(python)}.items():
        monkeypatch.setenv(name, value)
    torchrun = f'exec {python} -u -m torch.distributed.run "$@"'
    program(cluster / ".venv/bin/torchrun", torchrun.replace('"$@"', f'"${{@/:29500/:{free_port()}}}"'))
    slurm(cluster, "slurm", "scripts/train_math.py", *TOY)
    program(cluster / ".venv/bin/torchrun", torchrun)
    run(cluster, ".venv/bin/torchrun", "--nproc_per_node", "2", "--master_port", str(free_port()),
        "scripts/train_math.py", "--run_dir", "one", *TOY)  # fmt: skip
    alone, port, nodes = ["--nnodes", "2", "--nproc_per_node", "1"], str(free_port()), []
    for rank in range(2):
        words = [*alone, "--node_rank", str(rank), "--master_addr", "127.0.0.1", "--master_port", port]
        command = ["bash", ".venv/bin/torchrun", *words, "scripts/train_math.py", "--run_dir", "two", *TOY]
        nodes.append(subprocess.Popen(command, cwd=cluster, env={**os.environ, "OMP_NUM_THREADS": "1"}))
    assert [node.wait(500) for node in nodes] == [0, 0]
    for name in ("metrics.jsonl", "episodes.jsonl"):
        one = (cluster / "one" / name).read_text()
        assert one and (cluster / "slurm" / name).read_text() == one and (cluster / "two" / name).read_text() == one
    assert len([json.loads(line) for line in (cluster / "one/metrics.jsonl").read_text().splitlines()]) == 2
