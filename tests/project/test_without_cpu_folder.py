"""`mafrt/cpu` can be deleted: the library trains without it, with equal results up to rounding."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers_warm import run_python
from safetensors.torch import load_file
from test_layers import imports, modules

pytestmark = pytest.mark.takes(slow=16)

ROOT = Path(__file__).parents[2]
TRAIN = """
import sys
# An editable installation would find in the checkout what the copy lacks.
if "gone" in sys.argv:
    sys.meta_path[:] = [finder for finder in sys.meta_path if "editable" not in repr(finder).lower()]
import mafrt
from mafrt.models.compute import compute_for, cpu_part
from mafrt.runners.on_policy import OnPolicy

folder, there = sys.argv[1:]
assert (cpu_part("compute") is not None) == (there == "there")
env = mafrt.make_env("math")
config = mafrt.TrainConfig.of(
    algorithm="grpo", iterations=2, n_rollout_threads=8, n_samples=4, max_new_tokens=12, coach="rules", lr=1e-3,
    eval_episodes=0, kl_coef=0.05,
)
runner = OnPolicy(env, env.unwrapped.team, mafrt.SharedBase.load("teaching-base"), config, run_dir=folder)
runner.run()
for agent in runner.base.adapters:
    runner.base.save_adapter(agent, f"{folder}/saved/{agent}")
print(compute_for("cpu").kernels(runner.base.model.dtype))
"""


def installed(folder: Path, *, without: str) -> Path:
    """The package as a wheel lays it out but for a folder, with what is compiled already."""
    shutil.copytree(ROOT / "mafrt", folder / "mafrt")
    for name in ("envs", "runners", "scripts", "profiles", "configs"):
        shutil.copytree(ROOT / name, folder / "mafrt" / name)
    shutil.rmtree(folder / "mafrt" / without)
    return folder


def train(package: Path | None, folder: Path) -> str:
    """The kernels of a run with a package that lacks the folder, or with the checkout's own."""
    (script := folder.with_suffix(".py")).write_text(TRAIN)
    own = {**os.environ, "OMP_NUM_THREADS": "1"}
    if package is None:
        fork = run_python(script, folder, "there", cwd=folder.parent, env=own)
        assert fork.wait() == 0, fork.stderr[-3000:]
        return fork.stdout.split()[-1]
    command = [sys.executable, str(script), str(folder), "gone"]
    own["PYTHONPATH"] = str(package)
    done = subprocess.run(command, cwd=package, env=own, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.split()[-1]


def spoken(folder: Path) -> list[str]:
    lines = [json.loads(line) for line in (folder / "episodes.jsonl").read_text().splitlines()]
    return [turn["text"] for episode in lines for turn in episode["turns"]]


@pytest.mark.slow
def test_nothing_names_the_folder_but_the_seam():
    naming = [name for name in modules() if any(n.startswith("mafrt.cpu") for n in imports(name, at_once=False))]
    assert {name for name in naming if not name.startswith("mafrt.cpu")} == set()


@pytest.mark.slow
@pytest.mark.ci
def test_the_library_trains_without_the_folder(tmp_path):
    assert train(None, tmp_path / "a") != "torch"
    assert train(installed(tmp_path / "less", without="cpu"), tmp_path / "b") == "torch"
    assert spoken(tmp_path / "a") == spoken(tmp_path / "b")
    saved = sorted((tmp_path / "a" / "saved").rglob("*.safetensors"))
    assert saved
    for path in saved:
        own, other = load_file(path), load_file(tmp_path / "b" / path.relative_to(tmp_path / "a"))
        moved = [key for key in own if "lora_B" in key and own[key].abs().max() > 0]
        assert moved
        for key in moved:
            # Adam divides by the gradient's size, so that rounding shows where a gradient is nearly nothing.
            assert torch.nn.functional.cosine_similarity(own[key].flatten(), other[key].flatten(), dim=0) > 0.999, key
