"""`rl_basic` of tinker_cookbook as it is, against our server of the Tinker API: its reward with and without learning.

The recipe's GSM8K is replaced by the shipped word problems, in a folder of its name, and its model by the shipped base,
in a folder of one of the names that the cookbook knows; all else is set by its own flags. A base of 0.9M numbers was
taught to answer in the form of chats, so that the renderer is one for chats. A run that is in the output folder is not
made again.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import mafrt.envs.math
from bench._tables import over_seeds
from bench.reproduce._commands import tabled
from mafrt.core.errors import ConfigError
from mafrt.core.shipped import base_folder
from mafrt.models.shared_base import SharedBase
from mafrt.scripts.tinker_server.checkpoints import Checkpoints
from mafrt.scripts.tinker_server.limits import Limits
from mafrt.scripts.tinker_server.server import TinkerServer
from mafrt.scripts.tinker_server.service import Service

NAME = "Qwen/Qwen3-8B-Base"
BUILDER = "dataset_builder"
WORDS = (
    f"model_name={NAME}",
    f"{BUILDER}=tinker_cookbook.recipes.math_rl.math_env:Gsm8kDatasetBuilder",
    f"{BUILDER}.model_name_for_tokenizer={NAME}",
    f"{BUILDER}.renderer_name=qwen3_instruct",
    f"{BUILDER}.batch_size=8",
    f"{BUILDER}.group_size=8",
    "max_tokens=48",
    "lora_rank=16",
    "save_every=0",
)
RATE = 0.003
ENDS = 5
"""steps whose mean is the reward at the beginning, and at the end"""
CARD = """---
configs:
- config_name: main
  data_files:
  - split: train
    path: train.jsonl
  - split: test
    path: test.jsonl
---
"""


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--python", type=Path, default=Path("cookbook/bin/python"), help="interpreter of the cookbook")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3], help="orders of the problems")
    parser.add_argument("--steps", type=int, default=40, help="of every run")
    parser.add_argument("--output", type=Path, default=Path("runs/reproduce/tinker_cookbook"))
    args = parser.parse_args(argv)
    needed = f"python3 -m venv cookbook && cookbook/bin/pip install {PACKAGES}"
    if shutil.which(args.python) is None:
        raise ConfigError(f"python {args.python} is no program that can be run; make an interpreter with it: {needed}")
    if subprocess.run([args.python, "-c", "import tinker_cookbook, math_verify"], capture_output=True).returncode:
        raise ConfigError(f"python {args.python} cannot import tinker_cookbook and math_verify; run: {needed}")
    return args


PACKAGES = "'tinker==0.38.*' 'tinker-cookbook[math-rl]==0.5.8' torch"


def prepare(folder: Path) -> None:
    """The base and the problems under the names by which the recipe asks for them."""
    base, problems = folder / NAME, folder / "openai/gsm8k"
    for each in (base.parent, problems):
        each.mkdir(parents=True, exist_ok=True)
    shipped = base_folder("teaching-base")
    assert shipped is not None
    if not base.is_symlink():
        base.symlink_to(shipped)
    (problems / "README.md").write_text(CARD, encoding="utf-8")
    data = Path(mafrt.envs.math.__file__).parent / "data"
    for split in ("train", "test"):
        rows = map(json.loads, (data / f"word_problems_{split}.jsonl").read_text(encoding="utf-8").splitlines())
        lines = [{"question": f"Problem: {row['problem']}", "answer": f"#### {row['answer']}"} for row in rows]
        (problems / f"{split}.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n", encoding="utf-8")


def rewards(args: argparse.Namespace, url: str, rate: float, seed: int) -> list[float]:
    """Mean reward of each step of a run."""
    name = f"rate_{rate:g}_seed_{seed}"
    metrics: Path = args.output / name / "metrics.jsonl"
    if not metrics.is_file() or len(metrics.read_text(encoding="utf-8").splitlines()) < args.steps:
        shutil.rmtree(metrics.parent, ignore_errors=True)
        settings = {"TINKER_BASE_URL": url, "TINKER_API_KEY": "tml-cook", "TINKER_TELEMETRY": "0"}
        settings["HF_HUB_OFFLINE"] = "1"  # the problems are in the folder
        own = (f"{BUILDER}.seed={seed}", f"learning_rate={rate}", f"max_steps={args.steps}", f"log_path={name}")
        subprocess.run(
            [str(args.python), "-m", "tinker_cookbook.recipes.rl_basic", *WORDS, *own],
            cwd=args.output, env={**os.environ, **settings}, check=True,
        )  # fmt: skip
    return [json.loads(line)["env/all/reward/total"] for line in metrics.read_text(encoding="utf-8").splitlines()]


def table(curves: Mapping[str, Sequence[Sequence[float]]]) -> str:
    """Markdown: a row for each way, means over seeds of the first and of the last steps."""
    lines = [f"| | seeds | first {ENDS} steps | last {ENDS} steps |", "|---|---|---|---|"]
    for way, runs in curves.items():
        first, last = ([statistics.fmean(part) for part in parts] for parts in (
            [run[:ENDS] for run in runs], [run[-ENDS:] for run in runs]
        ))  # fmt: skip
        lines.append(f"| {way} | {len(runs)} | {over_seeds(first)} | {over_seeds(last)} |")
    return "\n".join(lines)


def experiment(args: argparse.Namespace) -> str:
    args.python, args.output = args.python.absolute(), args.output.absolute()
    prepare(args.output)
    server, base = TinkerServer(), SharedBase.load("teaching-base", dtype="float32")
    server.service = Service(base, [NAME], NAME, Checkpoints(args.output / "checkpoints", 10), Limits())
    try:
        return table(
            {
                "`rl_basic`": [rewards(args, server.url, RATE, seed) for seed in args.seeds],
                "the same with `learning_rate=0`": [rewards(args, server.url, 0.0, seed) for seed in args.seeds],
            }
        )
    finally:
        server.close()


main = partial(tabled, parse=parse, make=experiment)


if __name__ == "__main__":
    sys.exit(main(None))
