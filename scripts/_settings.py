"""Settings of the scripts themselves, beside `mafrt.config`: what is trained or evaluated, and where it lies.

The text under a field is its help on the command line. A default of None says in its help what happens then.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from mafrt.config import CreditConfig, LearnConfig, PlayConfig, RunConfig, TeamConfig, TrainConfig
from mafrt.errors import ConfigError

TRAIN = (PlayConfig, CreditConfig, LearnConfig, TeamConfig, RunConfig)
"""The sections of `TrainConfig`, in the order of `--help`."""


@dataclass(frozen=True)
class ModelSettings:
    """The base and the team on it."""

    model_name_or_path: str = "teaching-base"
    """folder or Hugging Face id of the frozen base; teaching-base is the small one that ships with mafrt"""
    profile_path: str | None = None
    """team file, JSON or YAML; default: one agent, with its own adapter, for each that environment or records name"""
    n_agents: int | None = None
    """agents that the team must have; default: as many as it has"""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """number format of the base; default: float32 on a CPU, the model's own on a GPU"""
    device: str | None = None
    """where the base lies, such as cpu or cuda:0; default: a GPU if there is one"""
    trust_remote_code: bool = False
    """run Python code that comes with the model; leave it off for models you have not read"""


@dataclass(frozen=True)
class PlaceSettings:
    """Where the run lies."""

    run_dir: str | None = None
    """folder of the run; default: runs/ENVIRONMENT-DATE, or the run that is resumed"""
    set_aside: bool = False
    """rename an earlier run in run_dir to run_dir.1, .2, ... instead of refusing to start"""
    load_path: str | None = None
    """a run or one of its checkpoints, which goes on, or a folder of adapter folders to start from"""


@dataclass(frozen=True)
class EnvSettings:
    """The environment."""

    env: str | None = None
    """a built-in environment such as math, or package.module:Class"""
    env_kwargs: tuple[str, ...] = ()
    """arguments of its constructor: key=value ..., or one JSON object"""
    eval_env_kwargs: tuple[str, ...] = ()
    """arguments that differ where it is played for evaluation"""
    check_env: bool = True
    """before training, play it with scripted agents and refuse it if it breaks the contract"""


@dataclass(frozen=True)
class MathSettings:
    """The problems."""

    dataset_path: str | None = None
    """JSON, JSONL, Parquet or a Hugging Face data set id; default: the shipped word problems"""
    eval_dataset_path: str | None = None
    """held-out problems; default: the shipped ones, or the last tenth (at most 200) of one's own"""


@dataclass(frozen=True)
class WorkflowSettings:
    """How the team works on them."""

    problem_field: str | None = None
    """field of a record that holds the problem; default: found by its usual names"""
    answer_field: str | None = None
    """field of a record that holds the answer; default: found by its usual names"""
    workflow: str = "chain"
    """who speaks next and what it sees"""
    horizon: int = 1
    """rounds that the team has for a problem; each agent speaks once in a round"""


@dataclass(frozen=True)
class EvaluateSettings:
    """What is evaluated, and how."""

    load_path: str | None = None
    """a run, a checkpoint or a folder of adapter folders; default: the base, untrained"""
    dataset_path: str | None = None
    """problems to solve; default: what the run held out, or the shipped held-out ones"""
    env: str | None = None
    """play this environment instead of solving problems; default: what the run was trained on"""
    env_kwargs: tuple[str, ...] = ()
    """arguments of its constructor; default: those of the run"""
    tasks: int = 0
    """tasks to play; 0 plays all, or 100 seeds where the environment has no numbered tasks"""
    k: int = 16
    """sampled answers per task, for avg@k and pass@k; 0 leaves them out"""
    greedy: bool = True
    """also play each task once at temperature 0"""
    seed: int = 1
    """every random choice of the evaluation follows from it"""
    output: str | None = None
    """JSON file for the numbers, per-task scores included; default: none is written"""

    def __post_init__(self) -> None:
        for name in ("tasks", "k", "seed"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} is {getattr(self, name)}; choose a value of at least 0.")
        if not self.k and not self.greedy:
            raise ConfigError("k is 0 and greedy is off, so nothing would be played; switch one of them on.")


@dataclass(frozen=True)
class SampleSettings:
    """How the agents sample; a run's own settings where one is loaded."""

    temperature: float = 1.0
    """softmax temperature of the sampled answers; > 0"""
    top_p: float = 1.0
    """nucleus sampling: keep the likeliest tokens with this total probability; 1 keeps all"""
    top_k: int = 0
    """keep the k likeliest tokens; 0 keeps all"""
    max_new_tokens: int = 256
    """tokens an agent may say in one turn"""
    context_window: int | None = None
    """tokens of prompt and answer together; default: what the base was trained for"""
    max_batch_rows: int = 256
    """rows that one forward pass of the local engine may hold"""


def train_config(settings: object) -> TrainConfig:
    """The `TrainConfig` of a command whose groups include `TRAIN`."""
    make = settings.make  # type: ignore[attr-defined]
    return TrainConfig(*(make(kind) for kind in TRAIN))
