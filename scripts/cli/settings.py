"""Settings of the scripts themselves: the model, the data, the run folder, processes.

The text under a field is its help on the command line. Where the default is None, the help states the effective one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from mafrt.config.algorithm import AlgorithmSettings
from mafrt.config.schema import Bounds, Checked, Count, CountOrZero, Positive
from mafrt.config.train_config import (
    CoachConfig,
    EngineConfig,
    LearnConfig,
    PlayConfig,
    RunConfig,
    SamplingConfig,
    TeamConfig,
    TrainConfig,
    TranscriptConfig,
)
from mafrt.core.errors import ConfigError
from mafrt.core.gpus import check_device_name

TRAIN = (PlayConfig, AlgorithmSettings, LearnConfig, TeamConfig, RunConfig, CoachConfig, EngineConfig)
"""The sections of `TrainConfig`, in the order of `--help`."""


@dataclass(frozen=True)
class BaseSettings(Checked):
    """Base model."""

    model_name_or_path: str = "teaching-base"
    """folder or Hugging Face id of the frozen base; teaching-base and games-base ship with mafrt, smollm2 is fetched"""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """number format of the base; float16 is for play only; default: on a GPU the model's own (bfloat16 for float16),
    else float32 or, if measured to pay, bfloat16"""
    device: str | None = None
    """device of the base, such as cpu or cuda:0; default: a GPU if there is one"""
    threads: Annotated[int, Bounds(least=1, most=1024)] | None = None
    """torch threads on a CPU; default: measured at the start, those of the resumed run, or OMP_NUM_THREADS"""
    trust_remote_code: bool = False
    """run Python code that comes with the model; leave it off for models you have not read"""
    load_in_4bit: bool = False
    """keep the frozen base in 4 bits (nf4, bitsandbytes); adapters stay float32"""
    load_in_8bit: bool = False
    """keep the frozen base in 8 bits (LLM.int8, bitsandbytes); adapters stay float32"""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.load_in_4bit and self.load_in_8bit:
            raise ConfigError("load_in_4bit and load_in_8bit are both on; switch one of them off.")
        if self.device is not None:
            check_device_name(self.device)

    @property
    def bits(self) -> Literal[4, 8] | None:
        """Bits per weight of a quantised base; None: not quantised."""
        return 4 if self.load_in_4bit else 8 if self.load_in_8bit else None


@dataclass(frozen=True)
class ModelSettings(BaseSettings):
    """Base model and team."""

    profile_path: str | None = None
    """team file, JSON or YAML; default: one agent, with its own adapter, for each that environment or records name"""
    n_agents: int | None = None
    """agents that the team must have; default: as many as it has"""


@dataclass(frozen=True)
class ScaleSettings(Checked):
    """Several processes, started by `accelerate launch`, `torchrun` or on a Ray cluster (docs/scale.md)."""

    process_timeout_s: Positive = 1800.0
    """timeout in seconds for the other processes, whose rollouts may take longer"""
    ray: str | None = None
    """Ray cluster to run on: auto on one of its machines, or HOST:PORT; default: this machine, without Ray"""
    ray_nodes: Count | None = None
    """nodes of the cluster that train; default: all that have room"""
    ray_procs_per_node: Count | None = None
    """processes on each of them; default: one for each GPU, or one on a CPU"""
    ray_envs: CountOrZero = 0
    """servers on the cluster that play the environment of --env; 0: the processes play it"""
    ray_vllm: CountOrZero = 0
    """vLLM servers on the cluster that sample; 0: none are started"""
    ray_vllm_flags: str = ""
    """further flags of mafrt serve_vllm in one text, such as '--python vllm/bin/python --gpus_per_server 2'"""
    ray_restarts: CountOrZero = 3
    """restarts after lost nodes or processes, without a new checkpoint in between, before the run is given up"""


@dataclass(frozen=True)
class PlaceSettings:
    """Location of the run."""

    run_dir: str | None = None
    """folder of the run; default: runs/ENVIRONMENT-DATE, or the run that is resumed"""
    set_aside: bool = False
    """rename an earlier run in run_dir to run_dir.1, .2, ... instead of refusing to start"""
    load_path: str | None = None
    """a run or checkpoint to resume, or a folder of adapter folders as initial weights"""
    accept_changes: bool = False
    """resume a run whose environment, team, data, rubric or base changed since its start"""


@dataclass(frozen=True)
class EnvSettings:
    """The environment."""

    env: str | None = None
    """a built-in environment such as math, package.module:Class, verifiers:ID, or several as math@2,code"""
    env_kwargs: tuple[str, ...] = ()
    """arguments of its constructor: key=value ..., or one JSON object"""
    eval_env_kwargs: tuple[str, ...] = ()
    """arguments that differ where it is played for evaluation"""
    env_python: str | None = None
    """interpreter with the environment's package, for verifiers:ID; default: this one"""
    check_env: bool = True
    """before training, play it with scripted agents and refuse it if it breaks the contract"""
    program: str | None = None
    """agents that already exist: file.py:function, called as function(task, base_url) for each episode"""
    command: str | None = None
    """the same as a command, with OPENAI_BASE_URL and MAFRT_TASK in its environment"""
    tasks_path: str | None = None
    """tasks of the program, JSONL with one object a line; default: a task is a seed"""
    eval_tasks_path: str | None = None
    """tasks of its evaluations; default: those of training"""
    program_timeout_s: float = 60.0
    """timeout in seconds of the program between two calls"""


@dataclass(frozen=True)
class EvaluateSettings(Checked):
    """Subject and size of the evaluation."""

    load_path: str | None = None
    """a run, a checkpoint or a folder of adapter folders; default: the base, untrained"""
    accept_changes: bool = False
    """evaluate a run although its environment, team, data or base changed since it was started"""
    dataset_path: str | None = None
    """problems to solve, several sets as A,B; default: the held-out problems of the run, or the shipped ones"""
    env: str | None = None
    """play this environment instead of solving problems; default: the run's own"""
    env_kwargs: tuple[str, ...] = ()
    """arguments of its constructor; default: those of the run"""
    env_python: str | None = None
    """interpreter with the environment's package, for verifiers:ID; default: that of the run, or this one"""
    env_timeout_s: float | None = 60.0
    """timeout in seconds of reset and step of your own environment, in a worker process; none: no limit, no worker"""
    tasks: CountOrZero = 0
    """tasks to play; 0 plays all, or 100 seeds where the environment has no numbered tasks"""
    k: CountOrZero = 16
    """sampled answers per task, for avg@k and pass@k; 0 leaves them out"""
    greedy: bool = True
    """also play each task once at temperature 0"""
    swap: bool = False
    """also play with the adapters of every two agents swapped"""
    seed: CountOrZero = 1
    """every random choice of the evaluation follows from it"""
    output: str | None = None
    """JSON file for the numbers, the scores of every task, and every prompt and answer; default: none is written"""
    overwrite: bool = False
    """replace the file of --output if it exists"""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.k and not self.greedy:
            raise ConfigError("k is 0 and greedy is off, so nothing would be played; switch one of them on.")


@dataclass(frozen=True)
class BaselineSettings(Checked):
    """Baselines on the same tasks."""

    baselines: bool = False
    """also score what needs no reinforcement learning: temperatures, votes, prefix, demonstrations, imitation"""
    baseline_votes: Count = 32
    """sampled answers per task of the majority vote, and texts per turn of the vote in every turn"""
    baseline_episodes: CountOrZero = 0
    """episodes of the imitation, and of the search for demonstrations; 0: as many as the run has played, or 3840"""
    baseline_lr: Positive = 1e-3
    """middle one of the three learning rates of the imitation; validation tasks choose among them and up to 4 passes"""


@dataclass(frozen=True)
class RecordSettings(TranscriptConfig):
    """Recorded conversations"""

    record_dir: str | None = None
    """folder for the conversations, which mafrt report and mafrt show read; default: none are recorded"""


@dataclass(frozen=True)
class SampleSettings(SamplingConfig):
    """Sampling; defaults to the settings of the loaded run."""


def train_config(settings: object) -> TrainConfig:
    """The `TrainConfig` of a command whose groups include `TRAIN`."""
    make = settings.make  # type: ignore[attr-defined]
    return TrainConfig(*(make(kind) for kind in TRAIN))
