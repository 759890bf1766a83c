"""Settings of a training run: one frozen dataclass per concern, checked when it is made.

The command line is generated from these fields (the docstring under a field is its help text), so a setting has
one name, one default and one meaning everywhere. Standard library only: this is read before any model is loaded.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from mafrt.config.algorithm import DEFAULT_ALGORITHM, AlgorithmSettings, make_algorithm
from mafrt.config.schema import above, at_least, check_fields, describe
from mafrt.core.errors import ConfigError


@dataclass(frozen=True)
class PlayConfig:
    """How episodes are played."""

    n_rollout_threads: int = 32
    """environments played side by side; several processes share them"""
    n_samples: int = 1
    """episodes played of each task; they form its group"""
    stratify: str | None = None
    """field of the tasks' records, such as data_type: every batch gets its share of each of its values"""
    tree_samples: int | None = None
    """at_grpo: alternatives of every turn, the best of which is carried on; 1 for none; default: 4 if n_samples is 1"""
    dynamic_sampling_rounds: int | None = None
    """rounds in which tasks whose samples are all worth the same make room for fresh ones; default: the algorithm's"""
    episode_length: int = 1
    """turns per agent collected from each environment in an iteration; whole episodes are played until then"""
    max_new_tokens: int = 256
    """tokens an agent may say in one turn"""
    context_window: int | None = None
    """tokens of prompt and answer together; default: what the base was trained for"""
    temperature: float = 1.0
    """softmax temperature while training; > 0"""
    top_p: float = 1.0
    """nucleus sampling: keep the likeliest tokens with this total probability; 1 keeps all"""
    top_k: int = 0
    """keep the k likeliest tokens; 0 keeps all"""
    max_batch_rows: int = 256
    """rows that one forward pass of the local engine may hold"""
    async_steps: int = 0
    """1: sample the next batch while this one is learnt from, one update behind and corrected for; 0: in turn"""
    reasoning: Literal["auto", "on", "off"] = "auto"
    """what others hear of <think>: auto takes thoughts off, on says every answer begins inside one, off leaves them"""
    sandbox: str = "bwrap"
    """where programs of agents run, if the environment runs any: bwrap, fusion:URL, or degraded (docs/sandbox.md)"""
    env_timeout_s: float | None = 60.0
    """seconds that a reset or step of your own environment may take, in a worker process; none: no limit, no worker"""
    env_max_lost: float = 0.25
    """share of a batch's episodes, in [0, 1], that may be lost to errors of the environment before the run stops"""

    def __post_init__(self) -> None:
        check_fields(self)
        at_least(self, 1, "n_rollout_threads", "n_samples", "episode_length", "max_new_tokens", "max_batch_rows")
        at_least(self, 0, "top_k")
        if self.tree_samples is not None:
            at_least(self, 1, "tree_samples")
        if self.dynamic_sampling_rounds is not None:
            at_least(self, 0, "dynamic_sampling_rounds")
        if self.env_timeout_s is not None and not 0 < self.env_timeout_s < 1e6:
            raise ConfigError(f"env_timeout_s is {self.env_timeout_s}; choose a value above 0, or none for no limit.")
        if not 0 <= self.env_max_lost <= 1:
            raise ConfigError(f"env_max_lost is {self.env_max_lost}; choose a value in [0, 1].")
        if self.async_steps not in (0, 1):
            raise ConfigError(f"async_steps is {self.async_steps}; choose 0, or 1 to sample one update behind.")
        if self.temperature <= 0:
            raise ConfigError(f"temperature is {self.temperature}, but sampling for training needs a value above 0.")
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"top_p is {self.top_p}; choose a value in (0, 1].")
        if self.n_rollout_threads % self.n_samples:
            raise ConfigError(
                f"n_rollout_threads is {self.n_rollout_threads}, which n_samples ({self.n_samples}) does not divide; "
                "choose a multiple, so that every task gets all its samples."
            )


@dataclass(frozen=True)
class LearnConfig:
    """How gradients become new adapter weights, whatever the algorithm."""

    lr: float = 1e-4
    """learning rate of the adapters"""
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """shape of the learning rate over the run's iterations: constant, or falling to 0; the critic's is constant"""
    lr_warmup: int = 0
    """iterations in which it rises to lr"""
    ppo_epoch: int = 2
    """passes over each batch"""
    num_mini_batch: int = 1
    """optimizer steps per pass"""
    max_grad_norm: float = 1.0
    """gradients of an adapter are scaled down to this norm"""
    weight_decay: float = 0.0
    """decoupled weight decay of AdamW"""
    opti_eps: float = 1e-8
    """epsilon of AdamW"""
    micro_batch_tokens: int = 8192
    """padded tokens of one backward pass; the gradient does not depend on it"""
    gradient_checkpointing: bool = False
    """recompute activations in the backward pass: less memory, about a third more time"""
    optimizer: Literal["adamw", "paged_adamw_8bit"] = "adamw"
    """optimizer of the adapters; paged_adamw_8bit (bitsandbytes) keeps its state in 8 bits, moved off a full GPU"""
    deepspeed: str | None = None
    """DeepSpeed configuration (ZeRO 1 to 3) for several processes, such as configs/zero2.json; default: none"""

    def __post_init__(self) -> None:
        check_fields(self)
        at_least(self, 1, "ppo_epoch", "num_mini_batch", "micro_batch_tokens")
        at_least(self, 0, "lr", "lr_warmup", "weight_decay")
        above(self, 0, "max_grad_norm", "opti_eps")


@dataclass(frozen=True)
class TeamConfig:
    """Which adapters learn, and in which intervals."""

    lora_rank: int = 8
    """rank of each adapter"""
    lora_alpha: float = 16.0
    """scale of each adapter is lora_alpha / lora_rank"""
    lora_targets: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    """linear layers that get an adapter"""
    freeze: tuple[str, ...] = ()
    """agents that act but never learn; `all` freezes everybody"""

    def __post_init__(self) -> None:
        at_least(self, 1, "lora_rank")
        if self.lora_alpha <= 0:
            raise ConfigError(f"lora_alpha is {self.lora_alpha}; choose a value above 0.")
        if not self.lora_targets:
            raise ConfigError("lora_targets is empty; name at least one linear layer, such as q_proj.")


@dataclass(frozen=True)
class RunConfig:
    """How long, how often, and what is kept."""

    iterations: int = 100
    """rounds of play and learning"""
    seed: int = 1
    """every random choice of the run follows from it"""
    save_interval: int = 10
    """iterations between checkpoints; the last iteration always makes one"""
    keep_last: int = 2
    """newest checkpoints that are kept"""
    keep_every: int = 0
    """also keep every checkpoint whose step this divides; 0 keeps none besides"""
    eval_interval: int = 0
    """iterations between evaluations; 0 evaluates before and after only"""
    eval_episodes: int = 64
    """tasks of one evaluation"""
    eval_samples: int = 4
    """sampled answers per task in an evaluation, for avg@k and pass@k"""
    log_episodes: bool = True
    """write what everybody said to episodes.jsonl"""
    log_tokens: bool = False
    """write the token ids of prompts and answers there too: exact for learning from them, and much larger"""

    def __post_init__(self) -> None:
        at_least(self, 0, "iterations", "save_interval", "keep_every", "eval_interval", "eval_episodes", "seed")
        at_least(self, 1, "keep_last", "eval_samples")


@dataclass(frozen=True)
class CoachConfig:
    """Who scores each turn, and what that may cost."""

    coach: str = "none"
    """none, rules, local, openai:MODEL, anthropic:MODEL, google:MODEL, vertex:MODEL, or own package.module:Class"""
    coach_base_url: str | None = None
    """server to ask instead of the provider's own, such as http://127.0.0.1:8000/v1; default: the provider's"""
    coach_rubric: str | None = None
    """file of criteria, or the name of one that ships; default: the environment's own"""
    coach_adapter: str | None = None
    """local: folder of the judge's own adapter; default: the base without adapter judges"""
    coach_feedback: bool = False
    """show the coach's reason to whoever acts next; the judge then never sees the ground truth"""
    coach_max_unscored: float = 0.05
    """share of a batch's turns without a score above which the update is skipped, in [0, 1]"""
    coach_concurrency: int = 16
    """calls under way at the same time"""
    coach_timeout: float = 60.0
    """seconds that one call may take"""
    coach_deadline: float = 300.0
    """seconds for a reply with all its retries; a coach that fails for so long pauses the run"""
    coach_max_tokens: int = 2048
    """tokens of a reply, the model's reasoning included"""
    coach_budget: float | None = None
    """dollars that the run may spend on its coach; needs the two prices; default: no limit"""
    coach_max_calls: int | None = None
    """calls that the run may make to its coach; default: no limit"""
    coach_price_in: float | None = None
    """dollars per million tokens read by the coach; default: not known, so cost is not counted"""
    coach_price_out: float | None = None
    """dollars per million tokens written by the coach; default: not known"""
    coach_cache: str | None = "~/.cache/mafrt/coach.sqlite"
    """file of verdicts, which are not asked for twice; none switches it off"""

    def __post_init__(self) -> None:
        at_least(self, 1, "coach_concurrency", "coach_max_tokens")
        at_least(self, 0, "coach_max_unscored")
        for name in ("coach_budget", "coach_max_calls", "coach_price_in", "coach_price_out"):
            if getattr(self, name) is not None:
                at_least(self, 0, name)
        if self.coach_max_unscored > 1:
            raise ConfigError(f"coach_max_unscored is {self.coach_max_unscored}; choose a value in [0, 1].")
        for name in ("coach_timeout", "coach_deadline"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} is {getattr(self, name)}; choose a value above 0.")
        if self.coach_budget is not None and None in (self.coach_price_in, self.coach_price_out):
            raise ConfigError(
                f"coach_budget is {self.coach_budget} and the prices are not known; give coach_price_in and "
                "coach_price_out, in dollars per million tokens."
            )


@dataclass(frozen=True)
class EngineConfig:
    """What samples the turns (docs/scale.md)."""

    engine: str = "local"
    """local (the shared base itself), vllm (a process of its own, or --vllm_servers), or own package.module:Class"""
    vllm_servers: tuple[str, ...] = ()
    """addresses of vLLM servers that share the sampling, such as http://127.0.0.1:8001; token: MAFRT_VLLM_TOKEN"""
    vllm_adapter_dir: str | None = None
    """folder that servers read adapters from, under the same path; default: one in memory, for servers on loopback"""
    vllm_timeout: float = 600.0
    """seconds without an answer after which a server counts as dead"""
    vllm_concurrency: int = 256
    """requests under way at each server"""
    vllm_sleep: bool = True
    """give vLLM's GPU memory back while adapters learn; without a GPU nothing happens"""
    max_loras: int | None = None
    """adapters that a batch of vLLM may mix; default: as many as the team has"""
    max_lora_rank: int | None = None
    """largest rank that vLLM makes room for; default: the smallest it knows that holds the team's"""
    gpu_memory_utilization: float | None = None
    """share of the device's memory that vLLM may take; default: 0.4 of a GPU, 0.1 of a CPU's"""
    tensor_parallel_size: int = 1
    """GPUs that one vLLM spreads the base over"""

    def __post_init__(self) -> None:
        check_fields(self)
        at_least(self, 1, "vllm_concurrency", "tensor_parallel_size")
        for name in ("max_loras", "max_lora_rank"):
            if getattr(self, name) is not None:
                at_least(self, 1, name)
        if not self.vllm_timeout > 0:
            raise ConfigError(f"vllm_timeout is {self.vllm_timeout}; choose a value above 0.")
        share = self.gpu_memory_utilization
        if share is not None and not 0 < share <= 1:
            raise ConfigError(f"gpu_memory_utilization is {share}; choose a value in (0, 1].")


@dataclass(frozen=True)
class TrainConfig:
    """Everything that a runner needs to know. `TrainConfig.of(iterations=200, lr=1e-4)` sorts flat names in."""

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
        own: dict[str, Any] = {}
        for name, value in settings.items():
            if name in owner:
                parts[owner[name]][name] = value
            else:
                own[name] = value
        return cls(
            algorithm=make_algorithm(algorithm, own, others=owner),
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
