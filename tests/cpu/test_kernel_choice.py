"""The kernels of the CPU are printed, recorded, and the same when a run goes on where that can be."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers_models import tiny_base
from helpers_warm import run_command

from mafrt.config.agent import LoraSpec
from mafrt.config.team import Team
from mafrt.cpu import library
from mafrt.cpu.choice import KernelChoice, choose_kernels
from mafrt.models import load_bases
from mafrt.runners.identity import describe_run
from mafrt.scripts import train_math
from mafrt.scripts.cli import loading

needs_compiler = pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
# One thread: their number is measured otherwise, and decides the last bits.
SHORT = ["--iterations", "1", "--n_rollout_threads", "4", "--max_new_tokens", "8", "--eval_episodes", "0"]
SHORT += ["--threads", "1"]


@pytest.fixture(autouse=True)
def unasked(monkeypatch):
    monkeypatch.setenv(library.SWITCH, "")


@pytest.fixture
def machine(monkeypatch):
    """Sets whether this machine has the kernels and a compiler, and whether torch's can still be chosen."""

    def be(kernels, compiler="/usr/bin/cc", early=True, wide=True):
        monkeypatch.setattr(library, "library", lambda: object() if kernels else None)
        monkeypatch.setattr(library, "find_compiler", lambda: compiler)
        monkeypatch.setattr(library, "use_torch", lambda: early)
        monkeypatch.setattr(library, "wide", lambda: wide)

    return be


def test_the_choice_and_its_reason(machine, monkeypatch):
    machine(kernels=True)
    assert str(choose_kernels()) == "Kernels of the CPU: C (compiled once by this machine's cc)."
    assert choose_kernels("c").name == "c" and "\n" not in str(choose_kernels("c"))
    machine(kernels=False, compiler=None)
    assert "torch (no C compiler found; install gcc to be faster)." in str(choose_kernels())
    machine(kernels=False)
    assert "could not be compiled" in str(choose_kernels())
    monkeypatch.setenv(library.SWITCH, "torch")
    assert choose_kernels().reason == "MAFRT_KERNELS=torch"


def test_a_run_of_torch_goes_on_with_torch_unless_asked_otherwise(machine, monkeypatch):
    machine(kernels=True)
    assert choose_kernels("torch") == KernelChoice("torch", "as before", "torch")
    assert "\n" not in str(choose_kernels("torch"))
    monkeypatch.setenv(library.SWITCH, "c")
    assert choose_kernels("torch").name == "c"


@pytest.mark.parametrize("kernels, recorded, named", [(False, "c", "C"), (True, "torch", "torch")])
def test_another_kind_than_the_recorded_one_is_said_in_a_sentence(machine, kernels, recorded, named):
    machine(kernels, early=False)
    first, second = str(choose_kernels(recorded)).splitlines()
    assert first.startswith("Kernels of the CPU: ")
    assert f"recorded with those of {named}" in second and "last bits" in second


@pytest.mark.parametrize("recorded", [None, 3, "of another version"])
def test_a_record_without_them_takes_those_that_are_there(machine, recorded):
    machine(kernels=True)
    assert choose_kernels(recorded) == KernelChoice("c", "compiled once by this machine's cc")


@pytest.mark.slow
@pytest.mark.parametrize("cached", [False, True])
def test_torch_can_be_chosen_only_before_the_kernels_are_loaded(cached):
    code = (
        "import os; from mafrt.cpu import library; "
        f"found = library.name() if {cached} else 'nothing yet'; "
        "print(found, library.use_torch(), library.name(), os.environ.get('MAFRT_KERNELS'))"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    if cached and said[0] == "c":
        assert said[:3] == ["c", "False", "c"]
    else:
        assert said[-3:] == ["True", "torch", "torch"]


def test_loading_a_base_prints_them_on_a_cpu_only(machine, monkeypatch, capsys):
    base = tiny_base()
    machine(kernels=True)
    monkeypatch.setattr(load_bases, "load_bases", lambda *args, **kwargs: base)
    settings = train_math.COMMAND.read(["--device", "cpu"])
    loading.load_base(settings, Team.of(["solver"]))
    assert capsys.readouterr().out.count("Kernels of the CPU: C (") == 1
    monkeypatch.setattr(loading, "_on_cpu", lambda settings: False)
    loading.load_base(settings, Team.of(["solver"]))
    assert "Kernels" not in capsys.readouterr().out


@needs_compiler
def test_they_are_recorded(monkeypatch):
    def recorded():
        return describe_run(Team.of(["solver"]), {}, base=tiny_base()).machine["kernels"]

    monkeypatch.setattr(library, "wide", lambda: True)
    assert recorded() == "c"
    monkeypatch.setattr(library, "wide", lambda: False)
    assert recorded() == "c in decoding"  # torch learns faster in float32


def test_without_avx512_float32_learns_by_torch_unless_the_run_had_the_kernels(machine, monkeypatch):
    machine(kernels=True, wide=False)
    assert "learning is torch's" in choose_kernels().reason and not library.pays(torch.float32)
    assert library.pays(torch.bfloat16)
    assert "\n" not in str(choose_kernels("c in decoding", "float32"))
    assert "learning is torch's" not in choose_kernels("c", "float32").reason and library.pays(torch.float32)


@needs_compiler
def test_without_avx512_answers_are_decoded_by_the_kernels_and_learnt_from_by_torch(monkeypatch):
    monkeypatch.setattr(library, "wide", lambda: False)
    base = tiny_base()
    base.add_adapter("ann", LoraSpec(rank=2, alpha=4.0), seed=5)
    assert type(base.compute.decode_model(base)).__module__ == "mafrt.cpu.lean_decoder"
    assert not base.compute.routes_bare(base)
    monkeypatch.setattr(library, "wide", lambda: True)
    assert base.compute.routes_bare(base)


@pytest.mark.slow
@pytest.mark.ci
@needs_compiler
def test_a_run_of_torch_that_goes_on_equals_the_uninterrupted_one(tmp_path):
    script = Path(train_math.__file__).with_name("train_math.py")

    def train(*words, **environment):
        clean = {name: value for name, value in os.environ.items() if name != library.SWITCH}
        command = [sys.executable, str(script), *map(str, words)]
        done = run_command(command, env={**clean, **environment}, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        return done.stdout

    train("--run_dir", "whole", *SHORT[2:], "--iterations", 2, **{library.SWITCH: "torch"})
    train("--run_dir", "run", *SHORT, **{library.SWITCH: "torch"})
    record = tmp_path / "run" / "run.json"
    assert json.loads(record.read_text())["machine"]["kernels"] == "torch"
    assert "Kernels of the CPU: torch (as before)." in train("--load_path", "run", "--iterations", 2)
    assert json.loads(record.read_text())["machine"]["kernels"] == "torch"
    metrics = [(tmp_path / name / "metrics.jsonl").read_text() for name in ("whole", "run")]
    assert metrics[0] == metrics[1]
