"""What tests of whole runs compare: weights, hashes of everything that a run wrote, and a run cut and resumed."""

from __future__ import annotations

import hashlib
import json
import os
import signal
from pathlib import Path

import torch
from toy import make, train

from mafrt.core.atomic_files import load_tensors
from mafrt.storage.load_path import resolve

EXACT = ("metrics.jsonl", "episodes.jsonl", "evaluations.jsonl")


def hashes(run: Path) -> dict[str, str]:
    """SHA-256 of everything that must be equal: weights, critic, optimizers, state, and the lines of the run."""
    newest = resolve(run).path
    found = [newest / name for name in ("first", "second", "state")]
    files = [p for folder in found for p in folder.rglob("*") if p.is_file()]
    files += [p for p in (newest / "critic.pth",) if p.is_file()]
    files = [p for p in files if p.name != "adapter_config.json"] + [run / name for name in EXACT]
    # Which equal objects a pickle stores once is an accident, so optimizer state is compared by content.
    tensors = [path for path in files if path.parent.name == "state" and path.suffix == ".pt"]
    files = [path for path in files if path not in tensors]
    return {path.name: contents(load_tensors(path)) for path in tensors} | {
        str(p.relative_to(newest if newest in p.parents else run)): hashlib.sha256(p.read_bytes()).hexdigest()
        for p in files
    }


def contents(state) -> str:
    """Hash of nested dicts of tensors and plain values."""
    if isinstance(state, dict):
        return repr({key: contents(value) for key, value in sorted(state.items(), key=lambda item: repr(item[0]))})
    if isinstance(state, list | tuple):
        return repr([contents(value) for value in state])  # printed tensors are slow, and cut short
    if isinstance(state, torch.Tensor):
        return hashlib.sha256(state.numpy().tobytes()).hexdigest()
    return repr(state)


def adapters(runner) -> dict[str, list[torch.Tensor]]:
    return {name: [p.detach().clone() for p in runner.base.adapter_parameters(name)] for name in ("first", "second")}


def same(a, b) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def cut_and_resumed(tmp_path, at: int, **settings) -> tuple[dict, dict]:
    """Hashes of a run, and of the same one stopped after iteration `at` and resumed."""
    train(tmp_path / "whole", **settings)
    runner = make(tmp_path / "cut", **settings)
    assert (
        runner.run(lambda p: os.kill(os.getpid(), signal.SIGTERM) if p.iteration == at else None).stopped_by
        == "SIGTERM"
    )
    train(tmp_path / "cut", tmp_path / "cut", **settings)
    return hashes(tmp_path / "whole"), hashes(tmp_path / "cut")


def metrics(run) -> list[dict]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
