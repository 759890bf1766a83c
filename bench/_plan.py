"""The measurements of BENCHMARKS.md, and running them one after the other, each in a process of its own."""

from __future__ import annotations

import datetime
import json
import os
import shlex
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from mafrt.core.atomic_files import write_atomic


@dataclass(frozen=True)
class Planned:
    """A measurement: a benchmark with the arguments that its figures are published for."""

    name: str
    """of its result's file"""
    title: str
    """in a table of several measurements"""
    bench: str
    arguments: str = ""

    @property
    def command(self) -> str:
        return f"mafrt bench {self.bench} {self.arguments}".strip()


SHORT = "--rounds 3 --warmup 2"
LARGE = "--width 1024 --mlp 3072 --layers 28 --vocab 151936"
PLAN = (
    Planned("update", "random model", "update"),
    Planned("rollout", "random model, float32", "rollout", "--adapters 4 16 --rounds 5"),
    Planned("rollout_bfloat16", "random model, bfloat16", "rollout", "--adapters 4 16 --rounds 5 --dtype bfloat16"),
    Planned(
        "iteration_smollm2_bfloat16",
        "SmolLM2-135M, bfloat16",
        "iteration",
        f"--model smollm2 --dtype bfloat16 --adapters 1 4 {SHORT}",
    ),
    Planned(
        "iteration_smollm2",
        "SmolLM2-135M, float32",
        "iteration",
        "--model smollm2 --adapters 1 4 --rounds 2 --warmup 1",
    ),
    Planned("iteration", "teaching base, float32", "iteration", "--adapters 1 4 --prompts 16 --rounds 9 --warmup 5"),
    Planned("prefix", "random model", "prefix", "--prompt 128 --answer 32 --rounds 5"),
    Planned("memory", "random model", "memory"),
    Planned("growth", "random model", "growth", "--rounds 2"),
    Planned("resume", "teaching base", "resume", "--rounds 5"),
    Planned("resume_smollm2", "SmolLM2-135M", "resume", "--model smollm2 --adapters 1 4 --rounds 3"),
    Planned("handover", "teaching base", "handover"),
    Planned("handover_smollm2", "SmolLM2-135M", "handover", "--model smollm2 --adapters 4 --rounds 3"),
    Planned(
        "rollout_smollm2_bfloat16",
        "SmolLM2-135M, bfloat16",
        "rollout",
        "--model smollm2 --dtype bfloat16 --adapters 4 16 --rows 2 --rounds 3 --draws 512 --batch 0",
    ),
    Planned("update_smollm2", "SmolLM2-135M, float32", "update", "--model smollm2 --adapters 1 4 16 --rounds 5"),
    Planned(
        "update_smollm2_bfloat16",
        "SmolLM2-135M, bfloat16",
        "update",
        "--model smollm2 --adapters 1 4 16 --rounds 5 --dtype bfloat16",
    ),
    Planned("update_qwen3", "dimensions of Qwen3-0.6B", "update", f"{LARGE} --adapters 1 4 --rounds 3"),
    Planned("turns", "random model", "turns", "--rounds 5"),
    Planned(
        "rollout_engines",
        "random model, float32",
        "rollout",
        "--adapters 4 16 --rounds 3 --engines vllm llama.cpp --draws 512",
    ),
    Planned(
        "rollout_engines_bfloat16",
        "random model, bfloat16",
        "rollout",
        "--adapters 4 16 --rounds 3 --engines vllm llama.cpp --draws 512 --dtype bfloat16",
    ),
    Planned("endpoint", "teaching base", "endpoint"),
    Planned("endpoint_smollm2", "SmolLM2-135M", "endpoint", "--base smollm2 --tokens 24 --rounds 3"),
    Planned("environment", "", "environment"),
    Planned("sandbox", "", "sandbox"),
    Planned("coach", "", "coach"),
)


TITLES = {planned.name: planned.title for planned in PLAN}


def measure(planned: Planned, folder: Path) -> str | None:
    """Run one and keep its result in `folder`; returns why there is none, in a line."""
    print(f"\n{planned.name}: {planned.command}", flush=True)
    began, last = time.monotonic(), ""
    words = [sys.executable, "-m", "mafrt.scripts.bench", planned.bench, *shlex.split(planned.arguments)]
    # What a program says on the way is shown; of its errors the last line is the reason.
    with TemporaryFile("w+") as errors:
        with subprocess.Popen(
            words, stdout=subprocess.PIPE, stderr=errors, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
        ) as program:
            assert program.stdout is not None
            for line in program.stdout:
                if last:
                    print(last, flush=True)
                last = line.rstrip("\n")
        if program.returncode:
            errors.seek(0)
            said = [line.strip() for line in errors if line.strip()]
            return said[-1] if said else f"it ended with status {program.returncode}"
    record: dict[str, Any] = {
        "command": planned.command,
        "date": datetime.date.today().isoformat(),
        "seconds": round(time.monotonic() - began),
        "result": json.loads(last),
    }
    write_atomic(result_file(planned.name, folder), (json.dumps(record, indent=1) + "\n").encode())
    return None


def result_file(name: str, folder: Path) -> Path:
    return folder / f"{name}.json"
