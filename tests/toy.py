"""A toy task that a random model learns within seconds: say characters of a wanted kind.

`first` and `second` speak one after the other; the outcome is the share of digits in what both said.
"""

from __future__ import annotations

import string
import sys
from pathlib import Path
from typing import Any

import torch
from helpers_models import tiny_base

from mafrt import algorithms
from mafrt.config.team import Team
from mafrt.config.train_config import TrainConfig
from mafrt.core.types import StepResult
from mafrt.environment.base import Env
from mafrt.runners.identity import Provenance
from mafrt.runners.loop import RunSummary
from mafrt.runners.on_policy import OnPolicy
from mafrt.storage.load_path import resolve

WORDS = ("ash", "birch", "cedar", "elm", "fir")


class Digits(Env):
    agents = ("first", "second")
    bounded = True
    num_tasks = len(WORDS)

    def reset(self, seed: Any = None, options: Any = None) -> Any:
        self.word = WORDS[options["task"] if options else self.rng.randrange(len(WORDS))]
        self.said = ""
        return {"first": self.word}, {"task": self.word}

    def step(self, actions: dict[str, str]) -> StepResult:
        [(name, text)] = actions.items()
        self.said += text
        share = sum(c in string.digits for c in text) / max(len(text), 1)
        if name == "first":
            return StepResult({"second": f"{self.word} {text}"}, {}, False, False, {})
        whole = sum(c in string.digits for c in self.said) / max(len(self.said), 1)
        return StepResult({}, {name: 0.0 * share}, True, False, {"outcome": whole})


def settings(**changes: Any) -> TrainConfig:
    wanted = {
        "iterations": 6,
        "n_rollout_threads": 16,
        "max_new_tokens": 5,
        "lr": 2e-2,
        "critic_lr": 1e-2,
        "ppo_epoch": 2,
        "num_mini_batch": 2,
        "eval_episodes": 4,
        "eval_samples": 2,
        "save_interval": 2,
        "lora_rank": 4,
        "lora_alpha": 8.0,
        "critic_hidden_size": 16,
    }
    rule = algorithms.algorithm(changes.get("algorithm", "ppo"))
    # A rule without a critic has no use for them.
    critic = set() if rule.critic_reads or changes.get("critic") else {"critic_lr", "critic_hidden_size"}
    return TrainConfig.of(**{**{name: value for name, value in wanted.items() if name not in critic}, **changes})


def make(run_dir: Path | None = None, load_path: Path | None = None, **changes: Any) -> OnPolicy:
    torch.set_num_threads(1)
    env = Digits()
    return OnPolicy(
        env,
        Team.of(env.agents),
        tiny_base(),
        settings(**changes),
        run_dir=run_dir,
        provenance=Provenance(resolve(load_path) if load_path else None),
    )


def train(run_dir: Path | None = None, load_path: Path | None = None, **changes: Any) -> RunSummary:
    return make(run_dir, load_path, **changes).run()


if __name__ == "__main__":  # a process of its own, to be killed: toy.py RUN_DIR LOAD_PATH|- ITERATIONS
    where, load, count = sys.argv[1:4]
    train(Path(where), None if load == "-" else Path(load), iterations=int(count), eval_interval=3)
