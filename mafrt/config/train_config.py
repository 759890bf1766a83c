"""Settings of a training run: one frozen dataclass per concern, checked when it is made.

The command line is generated from these fields (the docstring under a field is its help text), so a setting has
one name, one default and one meaning everywhere. Standard library only: this is read before any model is loaded.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal

from mafrt.config.schema import at_least, check_choices, describe, unknown
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
        check_choices(self)
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
class CreditConfig:
    """How rewards become advantages. What is None here follows from the algorithm."""

    algorithm: str = "ppo"
    """the learning rule; `mafrt info --algorithms` lists them"""
    level: Literal["token", "action"] | None = None
    """what one decision is: a token, or a whole turn; default: the algorithm's own"""
    bootstrap: Literal["none", "agent", "team"] | None = None
    """what follows a turn: nothing, the same agent's next turn, or anybody's; default: the algorithm's own"""
    gamma: float | None = None
    """discount per step; default: the algorithm's own"""
    gae_lambda: float | None = None
    """lambda of generalised advantage estimation; default: the algorithm's own"""
    reward_weight: float = 1.0
    """weight of the rewards that the environment gives to agents"""
    outcome_weight: float = 1.0
    """weight of the task's verdict for the team"""
    process_weight: float = 1.0
    """weight of the coach's score for a turn, which is divided by 10 first"""
    outcome_veto: bool = False
    """take positive process rewards away where the task's verdict is 0 (or less): no judge is paid against it"""
    outcome_to: Literal["last", "end", "each", "all"] | None = None
    """who receives it: the last turn, all of the last step, every agent's last, or all; default: the algorithm's own"""
    share: Literal["own", "sum"] | None = None
    """a turn keeps its own reward, or carries its episode's sum, the outcome counted once; default: the algorithm's"""
    round_gamma: float | None = None
    """maporl: discount per round, in [0, 1]; default: 1"""
    alpha0: float | None = None
    """maporl: weight of an agent's own change where most peers were right the round before; default: 0"""
    alpha1: float | None = None
    """maporl: weight of an agent's own change where most peers were wrong; default: 0"""
    alpha2: float | None = None
    """maporl: weight of the peers' next change where most of them are right now; default: 0"""
    alpha3: float | None = None
    """maporl: weight of the peers' next change where most of them are wrong now; default: 0"""
    right_above: float | None = None
    """maporl: mean score of the peers from which they count as right; default: 0.5"""
    residual_weight: float | None = None
    """vdn, qmix: weight of what the team earned beyond its Q, in [0, 1]; 0 credits by Q alone; default: 1"""
    overlong_buffer: float | None = None
    """last share of max_new_tokens, in which the overlong penalty grows; 0 for none; default: the algorithm's own"""
    overlong_penalty: float | None = None
    """reward that a turn loses which uses max_new_tokens up; default: the algorithm's own"""
    normalize_advantages: Literal["none", "batch", "agent"] | None = None
    """centre and scale advantages: not at all, over the batch, or per agent; default: the algorithm's own"""

    def __post_init__(self) -> None:
        check_choices(self)
        for name in ("gamma", "gae_lambda", "residual_weight", "overlong_buffer", "round_gamma"):
            value = getattr(self, name)
            if value is not None and not 0 <= value <= 1:
                raise ConfigError(f"{name} is {value}; choose a value in [0, 1].")
        if self.overlong_penalty is not None:
            at_least(self, 0, "overlong_penalty")


@dataclass(frozen=True)
class LearnConfig:
    """How advantages become new adapter weights."""

    lr: float = 1e-4
    """learning rate of the adapters"""
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """what becomes of it over the iterations of the run: it stays, or falls to 0; that of the critic stays"""
    lr_warmup: int = 0
    """iterations in which it rises to lr"""
    critic_lr: float = 5e-4
    """learning rate of the critic"""
    ppo_epoch: int = 2
    """passes over each batch"""
    num_mini_batch: int = 1
    """optimizer steps per pass"""
    critic_epoch: int = 8
    """passes of the critic over each batch; its features are computed once, so they cost little"""
    clip_param: float = 0.2
    """clip range of the probability ratio: from 1 - clip_param to 1 + clip_param"""
    clip_high: float | None = None
    """upper clip range where it differs from the lower one (DAPO); default: the algorithm's, else clip_param"""
    dual_clip: float | None = None
    """lower bound of the objective for negative advantages, as a multiple > 1 of the advantage; default: off"""
    normalization_mode: Literal["sum", "token", "word"] | None = None
    """action level: the turn's log-ratio is summed, or divided by its tokens or words (TWOSOME); default: token"""
    entropy_coef: float = 0.0
    """weight of the entropy bonus"""
    kl_coef: float = 0.0
    """weight of the KL penalty to the base without adapter"""
    kl_in: Literal["loss", "reward"] | None = None
    """where it is paid: in the loss (k3) or in every token's reward (k1); default: the algorithm's own, else loss"""
    kl_target: float | None = None
    """KL in nats per token that kl_coef is steered to, up or down after every iteration; default: kl_coef is fixed"""
    kl_horizon: float = 10000.0
    """turns in which kl_coef follows kl_target: an error of 20% moves it by 20% in so many"""
    importance_cap: float | None = 2.0
    """another engine samples: terms are weighed by min(p_trainer / p_engine, this); none leaves them as they are"""
    value_clip: float | None = 0.2
    """clip range of the value update; none switches it off"""
    huber_delta: float | None = 10.0
    """where the value loss turns linear (Huber); none: it is the squared error"""
    max_grad_norm: float = 1.0
    """gradients of an adapter are scaled down to this norm"""
    weight_decay: float = 0.0
    """decoupled weight decay of AdamW"""
    opti_eps: float = 1e-8
    """epsilon of AdamW"""
    warmup_steps: int = 0
    """iterations in which only the critic learns"""
    target_kl: float | None = None
    """end the epochs of an iteration when the mean KL to the sampling policy exceeds this"""
    critic_hidden_size: int = 128
    """width of the critic's hidden layer"""
    replay_steps: int = 512
    """vdn, qmix: joint steps that the mixer learns from; they are kept in checkpoints"""
    target_tau: float = 0.05
    """vdn, qmix: share of the mixer's weights that its target takes over in each step, in (0, 1]"""
    micro_batch_tokens: int = 8192
    """padded tokens of one backward pass; the gradient does not depend on it"""
    gradient_checkpointing: bool = False
    """recompute activations in the backward pass: less memory, about a third more time"""
    optimizer: Literal["adamw", "paged_adamw_8bit"] = "adamw"
    """optimizer of the adapters; paged_adamw_8bit (bitsandbytes) keeps its state in 8 bits, moved off a full GPU"""
    deepspeed: str | None = None
    """DeepSpeed configuration (ZeRO 1 to 3) for several processes, such as configs/zero2.json; default: none"""

    def __post_init__(self) -> None:
        check_choices(self)
        at_least(self, 1, "ppo_epoch", "critic_epoch", "num_mini_batch", "micro_batch_tokens", "critic_hidden_size")
        at_least(self, 1, "replay_steps")
        if not 0 < self.target_tau <= 1:
            raise ConfigError(f"target_tau is {self.target_tau}; choose a value in (0, 1].")
        at_least(self, 0, "lr", "lr_warmup", "critic_lr", "entropy_coef", "kl_coef", "weight_decay", "warmup_steps")
        if not 0 < self.clip_param < 1:
            raise ConfigError(f"clip_param is {self.clip_param}; choose a value in (0, 1).")
        if self.dual_clip is not None and self.dual_clip <= 1:
            raise ConfigError(f"dual_clip is {self.dual_clip}; choose a value above 1, or leave it out.")
        for name in ("max_grad_norm", "huber_delta", "opti_eps", "kl_target", "kl_horizon", "importance_cap"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ConfigError(f"{name} is {value}; choose a value above 0.")
        if self.kl_target is not None and not self.kl_coef:
            raise ConfigError("kl_target steers kl_coef, which is 0; give the value that it starts from.")


@dataclass(frozen=True)
class TeamConfig:
    """Which adapters learn, and in which intervals."""

    lora_rank: int = 8
    """rank of each adapter"""
    lora_alpha: float = 16.0
    """scale of each adapter is lora_alpha / lora_rank"""
    lora_targets: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    """linear layers that get an adapter"""
    agent_iteration_interval: int = 0
    """iterations per agent, one learning at a time (or per casting: cory); 0: all together, or the algorithm's own"""
    freeze: tuple[str, ...] = ()
    """agents that act but never learn; `all` freezes everybody"""

    def __post_init__(self) -> None:
        at_least(self, 1, "lora_rank")
        at_least(self, 0, "agent_iteration_interval")
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

    engine: Literal["local", "vllm"] = "local"
    """what samples: local, the shared base itself; vllm, a process of its own beside it, or --vllm_servers"""
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
        check_choices(self)
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
    credit: CreditConfig = field(default_factory=CreditConfig)
    learn: LearnConfig = field(default_factory=LearnConfig)
    team: TeamConfig = field(default_factory=TeamConfig)
    run: RunConfig = field(default_factory=RunConfig)
    coach: CoachConfig = field(default_factory=CoachConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)

    @classmethod
    def of(cls, **settings: Any) -> TrainConfig:
        """Build from flat names; raises ConfigError for an unknown one, naming the nearest."""
        parts: dict[str, dict[str, Any]] = {part.name: {} for part in fields(cls)}
        owner = {name: part for part, kind in sections().items() for name in describe(kind)}
        for name, value in settings.items():
            if name not in owner:
                raise ConfigError(unknown("setting", name, owner))
            parts[owner[name]][name] = value
        return cls(**{part: kind(**parts[part]) for part, kind in sections().items()})

    def flat(self) -> dict[str, Any]:
        """All settings by flat name, the inverse of `of`."""
        return {name: value for part in asdict(self).values() for name, value in part.items()}


def sections() -> dict[str, type]:
    """The dataclasses that make up `TrainConfig`, by field name."""
    return {
        "play": PlayConfig,
        "credit": CreditConfig,
        "learn": LearnConfig,
        "team": TeamConfig,
        "run": RunConfig,
        "coach": CoachConfig,
        "engine": EngineConfig,
    }
