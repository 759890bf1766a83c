"""Settings of a training run: one frozen dataclass per concern, checked when it is made.

The command line is generated from these fields (the docstring under a field is its help text), so a setting has
one name, one default and one meaning everywhere. Standard library only: this is read before any model is loaded.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from typing import Any, Literal

from mafrt.config.agent import LoraSpec
from mafrt.config.algorithm import DEFAULT_ALGORITHM, AlgorithmSettings, make_algorithm
from mafrt.config.schema import (
    Checked,
    Count,
    CountOrZero,
    NotNegative,
    Positive,
    PositiveShare,
    Share,
    describe,
)
from mafrt.config.setting_synonyms import synonym
from mafrt.core.errors import ConfigError


@dataclass(frozen=True)
class SamplingConfig(Checked):
    """How agents' answers are sampled."""

    temperature: float = 1.0
    """softmax temperature of sampled answers; > 0"""
    top_p: PositiveShare = 1.0
    """nucleus sampling: keep the likeliest tokens with this total probability; 1 keeps all"""
    top_k: CountOrZero = 0
    """keep the k likeliest tokens; 0 keeps all"""
    max_new_tokens: Count = 256
    """max tokens of a turn"""
    context_window: int | None = None
    """max tokens of prompt and answer together; default: the context length of the base"""
    max_batch_rows: Count = 256
    """max rows of one forward pass of the local engine"""
    reasoning: Literal["auto", "on", "off"] = "auto"
    """thoughts that other agents see: auto strips them, on: every answer starts inside one, off keeps them"""
    thinking_budget: CountOrZero = 0
    """tokens of thought after which its closing mark is put in, which nothing is learnt from; 0: no limit"""
    keep_thoughts: bool = False
    """show an agent its own earlier turns as it sampled them, thoughts included, whatever the chat template strips"""
    sandbox: str = "bwrap"
    """sandbox for programs of agents: bwrap, fusion:URL, or degraded (docs/sandbox.md)"""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.temperature <= 0:
            raise ConfigError(f"temperature is {self.temperature}, but sampling needs a value above 0.")


@dataclass(frozen=True)
class PlayConfig(SamplingConfig):
    """Rollout settings."""

    n_rollout_threads: Count = 32
    """environments played in parallel, over all processes"""
    n_samples: Count = 1
    """episodes per task; they form its group"""
    stratify: str | None = None
    """task field, such as data_type, to stratify by: every batch gets its share of each value; default: none"""
    tree_samples: Count | None = None
    """at_grpo: alternatives per turn, of which the best continues; 1 for none; default: 4 if n_samples is 1"""
    audit_turns: CountOrZero = 0
    """turns of every iteration that are played again to audit their credit (docs/algorithms.md); 0: none"""
    dynamic_sampling_rounds: CountOrZero | None = None
    """max rounds of replacing tasks whose samples all have the same return; default: the algorithm's"""
    episode_length: Count = 1
    """turns per agent collected from each environment in an iteration; whole episodes are played until then"""
    async_steps: int = 0
    """1: sample the next batch during the update, one step off-policy and corrected; 0: on-policy"""
    env_timeout_s: float | None = 60.0
    """timeout in seconds of reset and step of your own environment, in a worker process; none: no limit, no worker"""
    env_max_lost: Share = 0.25
    """max share of a batch's episodes, in [0, 1], lost to environment errors before the run stops"""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.env_timeout_s is not None and not 0 < self.env_timeout_s < 1e6:
            raise ConfigError(f"env_timeout_s is {self.env_timeout_s}; choose a value above 0, or none for no limit.")
        if self.async_steps not in (0, 1):
            raise ConfigError(f"async_steps is {self.async_steps}; choose 0, or 1 to sample one update behind.")
        if self.n_rollout_threads % self.n_samples:
            raise ConfigError(
                f"n_rollout_threads is {self.n_rollout_threads}, which n_samples ({self.n_samples}) does not divide; "
                "choose a multiple, so that every task gets all its samples."
            )


@dataclass(frozen=True)
class LearnConfig(Checked):
    """Optimizer settings of all algorithms."""

    lr: NotNegative = 1e-4
    """learning rate of the adapters"""
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """learning-rate schedule of the adapters over the run, constant or decaying to 0; the critic's is constant"""
    lr_warmup: CountOrZero = 0
    """warm-up iterations of the learning rate"""
    entropy_schedule: Literal["constant", "linear"] = "constant"
    """weight of the entropy bonus over the run: constant, or falling to 0, so that the team explores first"""
    lr_follows_signal: bool = True
    """scale each step by the square root of the share of turns with an advantage other than 0"""
    step_kl: Positive | None = None
    """max KL of an iteration's update per adapter, nats per token; a larger step is scaled back; default: no limit"""
    ppo_epoch: Count = 2
    """passes over each batch"""
    num_mini_batch: Count = 1
    """optimizer steps per pass"""
    max_grad_norm: Positive = 1.0
    """gradient clipping norm per adapter"""
    weight_decay: NotNegative = 0.0
    """decoupled weight decay of AdamW"""
    opti_eps: Positive = 1e-8
    """epsilon of AdamW"""
    micro_batch_tokens: Count = 8192
    """tokens computed per backward pass; the gradient does not depend on it"""
    gradient_checkpointing: bool = False
    """recompute activations in the backward pass: less memory, about a third more time"""
    optimizer: Literal["adamw", "paged_adamw_8bit"] = "adamw"
    """optimizer of the adapters; paged_adamw_8bit (bitsandbytes): 8-bit state, paged to CPU memory on a full GPU"""
    deepspeed: str | None = None
    """DeepSpeed configuration (ZeRO 1 to 3) for several processes, such as configs/zero2.json; default: none"""


@dataclass(frozen=True)
class AdapterConfig(Checked):
    """Shape of the adapters, and frozen agents."""

    lora_rank: Count = 8
    """rank of each adapter"""
    lora_alpha: Positive = 16.0
    """scale of each adapter is lora_alpha / lora_rank"""
    lora_targets: tuple[str, ...] = LoraSpec.targets
    """linear layers that get an adapter: all-linear, names such as q_proj, or regular expressions for whole paths"""
    adapter_scope: Literal["all", "action"] = "all"
    """tokens on which an adapter acts; action: the agent's own action only (activated LoRA), so that all agents share
    the base's cache of a transcript"""
    freeze: tuple[str, ...] = ()
    """agents that act but never learn; `all` freezes the whole team"""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.lora_targets:
            raise ConfigError("lora_targets is empty; name at least one linear layer, such as q_proj.")

    @property
    def lora(self) -> LoraSpec:
        """Shape of the adapters of agents without a shape of their own."""
        return LoraSpec(self.lora_rank, self.lora_alpha, self.lora_targets, self.adapter_scope)


@dataclass(frozen=True)
class TeamConfig(AdapterConfig):
    """Adapters and frozen agents."""

    league: CountOrZero = 0
    """earlier selves kept as opponents in a game of two agents that share an adapter; 0: no league"""
    league_interval: Count = 5
    """iterations after which the present weights join the league"""


@dataclass(frozen=True)
class TranscriptConfig(Checked):
    """Share and size of the recorded conversations."""

    transcript_share: Share = 1.0
    """share of the tasks, in [0, 1], whose episodes go to transcripts/ with observations and advantages; 0: none"""
    transcript_max_mib: Positive = 2.0
    """max MiB of the transcripts of one iteration or evaluation, before compression; further tasks are left out"""


@dataclass(frozen=True)
class RunConfig(TranscriptConfig):
    """Length, checkpoints, evaluations and logs of a run."""

    iterations: CountOrZero = 100
    """training iterations, each a rollout and an update"""
    epochs: CountOrZero = 0
    """passes over the training tasks, in place of iterations; 0: iterations decide"""
    seed: CountOrZero = 1
    """every random choice of the run follows from it"""
    save_interval: CountOrZero = 10
    """iterations between checkpoints; the last iteration always makes one"""
    keep_last: Count = 2
    """number of newest checkpoints to keep"""
    keep_every: CountOrZero = 0
    """also keep every checkpoint whose step is a multiple of this; 0: none"""
    eval_interval: CountOrZero = 0
    """iterations between evaluations; 0 evaluates before and after only"""
    eval_episodes: CountOrZero = 64
    """tasks of one evaluation"""
    eval_samples: Count = 4
    """sampled answers per task in an evaluation, for avg@k and pass@k"""
    eval_temperature: float | None = None
    """temperature of those samples, for all agents; default: each agent's own in training"""
    eval_split: Literal["validation", "test"] = "validation"
    """held-out tasks of the evaluations in training; no choice may look at test, so it asks for --no-keep_best"""
    keep_best: bool = True
    """keep the adapters of the best evaluation, in RUN_DIR/best and in checkpoints"""
    on_collapse: Literal["rollback", "stop", "warn"] = "rollback"
    """when the evaluation score falls beyond its interval: back to the best weights at half the rates, end, or go on"""
    max_rollbacks: CountOrZero = 3
    """falls of the evaluation score after which the run stops instead of going back once more"""
    log_episodes: bool = True
    """write the turns of all agents to episodes.jsonl"""
    log_tokens: bool = False
    """also write token ids of prompts and answers, for exact offline training; the file gets much larger"""
    report_to: Literal["none", "wandb", "trackio"] = "none"
    """tracker of the curves besides TensorBoard; WANDB_MODE=offline keeps those of wandb on this machine"""

    def __post_init__(self) -> None:
        if str(self.report_to) == "weave":
            raise ConfigError(
                "report_to is weave, which keeps nothing without its service; use wandb, or trackio for this machine."
            )
        super().__post_init__()
        if self.eval_temperature is not None and self.eval_temperature <= 0:
            raise ConfigError(
                f"eval_temperature is {self.eval_temperature:g}; choose a value above 0, since every evaluation plays "
                "each task at temperature 0 as well."
            )
        if self.report_to != "none" and find_spec(self.report_to) is None:
            raise ConfigError(
                f"report_to is {self.report_to}, which is not installed; run: pip install {self.report_to}"
            )

    @property
    def trackers(self) -> tuple[str, ...]:
        """Names of all trackers of the run."""
        return ("tensorboard",) if self.report_to == "none" else ("tensorboard", self.report_to)


@dataclass(frozen=True)
class CoachConfig(Checked):
    """The coach that scores each turn, and its limits."""

    coach: str = "none"
    """none, rules, local, openai:MODEL, anthropic:MODEL, google:MODEL, vertex:MODEL, or own package.module:Class"""
    coach_base_url: str | None = None
    """base URL of the API, such as http://127.0.0.1:8000/v1; default: the provider's"""
    coach_rubric: str | None = None
    """file of criteria, or the name of one that ships; default: the environment's own"""
    coach_adapter: str | None = None
    """local: folder of the judge's own adapter; default: the base without adapter judges"""
    coach_feedback: bool = False
    """show the coach's reason to the agents that act next; the coach then never sees the ground truth"""
    coach_max_unscored: Share = 0.05
    """max share of unscored turns in a batch, in [0, 1]; above it the update is skipped"""
    coach_concurrency: Count = 16
    """max concurrent calls"""
    coach_timeout: Positive = 60.0
    """timeout of one call in seconds"""
    coach_deadline: Positive = 300.0
    """total seconds for a reply, retries included; a coach that fails this long pauses the run"""
    coach_max_tokens: Count = 2048
    """max tokens of a reply, reasoning included"""
    coach_budget: NotNegative | None = None
    """max dollars spent on the coach; needs both prices; default: no limit"""
    coach_max_calls: CountOrZero | None = None
    """max calls to the coach in the run; default: no limit"""
    coach_price_in: NotNegative | None = None
    """dollars per million input tokens; default: unknown, so cost is not counted"""
    coach_price_out: NotNegative | None = None
    """dollars per million output tokens; default: unknown"""
    coach_cache: str | None = "~/.cache/mafrt/coach.sqlite"
    """cache file of verdicts; none switches it off"""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.coach_budget is not None and None in (self.coach_price_in, self.coach_price_out):
            raise ConfigError(
                f"coach_budget is {self.coach_budget} and the prices are not known; give coach_price_in and "
                "coach_price_out, in dollars per million tokens."
            )


@dataclass(frozen=True)
class EngineConfig(Checked):
    """The sampling engine (docs/scale.md)."""

    engine: str = "local"
    """local (the shared base itself), vllm (a process of its own, or --vllm_servers), or own package.module:Class"""
    vllm_servers: tuple[str, ...] = ()
    """vLLM servers that sample together, such as http://127.0.0.1:8001, or a list as @FILE; token: MAFRT_VLLM_TOKEN"""
    vllm_adapter_dir: str | None = None
    """shared folder from which servers read adapters, same path on both; default: in memory, for loopback servers"""
    vllm_timeout: Positive = 600.0
    """timeout in seconds after which a silent server counts as dead"""
    vllm_concurrency: Count = 256
    """max concurrent requests per server"""
    vllm_sleep: bool = True
    """free vLLM's GPU memory during updates; no effect without a GPU"""
    max_loras: Count | None = None
    """max adapters in one vLLM batch; default: as many as the team has"""
    max_lora_rank: Count | None = None
    """max adapter rank of vLLM; default: the smallest supported rank that fits the team"""
    gpu_memory_utilization: PositiveShare | None = None
    """max share of the device's memory for vLLM; default: 0.4 on a GPU, 0.1 on a CPU"""
    tensor_parallel_size: Count = 1
    """GPUs per vLLM, over which the base is sharded"""


@dataclass(frozen=True)
class TrainConfig:
    """All settings of a runner, in groups; `of` sorts the names of flags in.

    >>> config = mafrt.TrainConfig.of(algorithm="grpo", n_samples=4, lr=1e-4)
    >>> config.play.n_samples, config.learn.lr, config.algorithm.name
    (4, 0.0001, 'grpo')
    >>> config == mafrt.TrainConfig(play=mafrt.PlayConfig(n_samples=4), learn=mafrt.LearnConfig(lr=1e-4),
    ...                             algorithm=mafrt.make_algorithm("grpo"))
    True
    >>> mafrt.TrainConfig.of(learning_rate=1e-4)  # names of other libraries are answered with ours
    Traceback (most recent call last):
        ...
    mafrt.core.errors.ConfigError: There is no setting 'learning_rate'; here it is 'lr'.
    """

    play: PlayConfig = field(default_factory=PlayConfig)
    algorithm: AlgorithmSettings = field(default_factory=make_algorithm)
    """the settings class of the learning rule, filled"""
    learn: LearnConfig = field(default_factory=LearnConfig)
    team: TeamConfig = field(default_factory=TeamConfig)
    run: RunConfig = field(default_factory=RunConfig)
    coach: CoachConfig = field(default_factory=CoachConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)

    @classmethod
    def of(cls, *, algorithm: str | AlgorithmSettings = DEFAULT_ALGORITHM, **settings: Any) -> TrainConfig:
        """Build from flat names.

        Args:
            algorithm: name of a registered algorithm, `package.module:Class`, or its filled settings.
            settings: of any section, or of the algorithm; for the algorithm None means its own default.

        Raises:
            ConfigError: an unknown setting (names the nearest), one that the algorithm does not use, or a bad value.
        """
        parts: dict[str, dict[str, Any]] = {part: {} for part in sections()}
        owner = {name: part for part, kind in sections().items() for name in describe(kind)}
        of_algorithm: dict[str, Any] = {}
        for name, value in settings.items():
            if name in owner:
                parts[owner[name]][name] = value
            else:
                of_algorithm[name] = value
        for name in of_algorithm:
            meant = synonym(name, owner)
            if meant is not None and name not in AlgorithmSettings.flags():
                advice = (
                    meant.advice if meant.flag is None else meant.advice.replace(f"--{meant.flag}", repr(meant.flag))
                )
                raise ConfigError(f"There is no setting {name!r}; {advice}")
        return cls(
            algorithm=make_algorithm(algorithm, of_algorithm, others=owner),
            **{part: kind(**parts[part]) for part, kind in sections().items()},
        )

    def flat(self) -> dict[str, Any]:
        """All settings by flat name, the inverse of `of`."""
        sections_flat = {name: value for part in sections() for name, value in asdict(getattr(self, part)).items()}
        return {**sections_flat, **self.algorithm.flat()}


def sections() -> dict[str, type]:
    """The dataclasses that make up `TrainConfig` beside the algorithm's, by field name."""
    return {
        "play": PlayConfig,
        "learn": LearnConfig,
        "team": TeamConfig,
        "run": RunConfig,
        "coach": CoachConfig,
        "engine": EngineConfig,
    }
