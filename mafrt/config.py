"""Settings of a training run: one frozen dataclass per concern, checked when it is made.

The command line is generated from these fields (the docstring under a field is its help text), so a setting has
one name, one default and one meaning everywhere. Standard library only: this is read before any model is loaded.
"""

from __future__ import annotations

import ast
import difflib
import inspect
import math
import textwrap
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from functools import cache
from typing import Any, Literal, get_args, get_origin, get_type_hints

from mafrt.errors import ConfigError

LEVELS = ("token", "action")


@dataclass(frozen=True)
class PlayConfig:
    """How episodes are played."""

    n_rollout_threads: int = 32
    """environments played side by side in one process"""
    n_samples: int = 1
    """episodes played of each task; they form its group"""
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

    def __post_init__(self) -> None:
        _at_least(self, 1, "n_rollout_threads", "n_samples", "episode_length", "max_new_tokens", "max_batch_rows")
        _at_least(self, 0, "top_k")
        if self.dynamic_sampling_rounds is not None:
            _at_least(self, 0, "dynamic_sampling_rounds")
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
    outcome_to: Literal["last", "each", "all"] | None = None
    """who receives the outcome: the episode's last turn, every agent's last, or all; default: the algorithm's own"""
    share: Literal["own", "sum"] | None = None
    """a turn keeps its own reward, or carries its episode's sum, the outcome counted once; default: the algorithm's"""
    overlong_buffer: float | None = None
    """last share of max_new_tokens, in which the overlong penalty grows; 0 for none; default: the algorithm's own"""
    overlong_penalty: float | None = None
    """reward that a turn loses which uses max_new_tokens up; default: the algorithm's own"""
    normalize_advantages: Literal["none", "batch", "agent"] | None = None
    """centre and scale advantages: not at all, over the batch, or per agent; default: the algorithm's own"""

    def __post_init__(self) -> None:
        _choices(self)
        for name in ("gamma", "gae_lambda", "overlong_buffer"):
            value = getattr(self, name)
            if value is not None and not 0 <= value <= 1:
                raise ConfigError(f"{name} is {value}; choose a value in [0, 1].")
        if self.overlong_penalty is not None:
            _at_least(self, 0, "overlong_penalty")


@dataclass(frozen=True)
class LearnConfig:
    """How advantages become new adapter weights."""

    lr: float = 1e-4
    """learning rate of the adapters"""
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
    """weight of the k3 KL penalty to the base without adapter, in the loss"""
    value_clip: float | None = 0.2
    """clip range of the value update; none switches it off"""
    huber_delta: float = 10.0
    """where the value loss turns linear (Huber)"""
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

    def __post_init__(self) -> None:
        _choices(self)
        _at_least(self, 1, "ppo_epoch", "critic_epoch", "num_mini_batch", "micro_batch_tokens", "critic_hidden_size")
        _at_least(self, 1, "replay_steps")
        if not 0 < self.target_tau <= 1:
            raise ConfigError(f"target_tau is {self.target_tau}; choose a value in (0, 1].")
        _at_least(self, 0, "lr", "critic_lr", "entropy_coef", "kl_coef", "weight_decay", "warmup_steps")
        if not 0 < self.clip_param < 1:
            raise ConfigError(f"clip_param is {self.clip_param}; choose a value in (0, 1).")
        if self.dual_clip is not None and self.dual_clip <= 1:
            raise ConfigError(f"dual_clip is {self.dual_clip}; choose a value above 1, or leave it out.")
        for name in ("max_grad_norm", "huber_delta", "opti_eps"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"{name} is {getattr(self, name)}; choose a value above 0.")


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
        _at_least(self, 1, "lora_rank")
        _at_least(self, 0, "agent_iteration_interval")
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
        _at_least(self, 0, "iterations", "save_interval", "keep_every", "eval_interval", "eval_episodes", "seed")
        _at_least(self, 1, "keep_last", "eval_samples")


@dataclass(frozen=True)
class TrainConfig:
    """Everything that a runner needs to know. `TrainConfig.of(iterations=200, lr=1e-4)` sorts flat names in."""

    play: PlayConfig = field(default_factory=PlayConfig)
    credit: CreditConfig = field(default_factory=CreditConfig)
    learn: LearnConfig = field(default_factory=LearnConfig)
    team: TeamConfig = field(default_factory=TeamConfig)
    run: RunConfig = field(default_factory=RunConfig)

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


@dataclass(frozen=True)
class Setting:
    """One field as the command line sees it."""

    name: str
    kind: type
    """bool, int, float or str; of the elements where `many`"""
    default: Any
    help: str
    optional: bool
    many: bool
    choices: tuple[str, ...] | None


def sections() -> dict[str, type]:
    """The dataclasses that make up `TrainConfig`, by field name."""
    return {
        "play": PlayConfig,
        "credit": CreditConfig,
        "learn": LearnConfig,
        "team": TeamConfig,
        "run": RunConfig,
    }


@cache
def describe(kind: type) -> dict[str, Setting]:
    """The settings of one section: types and defaults from the fields, help from the text under each field."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(kind))).body[0]
    assert isinstance(tree, ast.ClassDef)
    helps: dict[str, str] = {}
    for before, after in zip(tree.body, tree.body[1:], strict=False):
        if isinstance(before, ast.AnnAssign) and isinstance(before.target, ast.Name) and isinstance(after, ast.Expr):
            helps[before.target.id] = ast.literal_eval(after.value)
    hints = get_type_hints(kind)
    found = {}
    for item in fields(kind):
        hint, optional, many, choices = hints[item.name], False, False, None
        if type(None) in get_args(hint):
            optional = True
            hint = next(arg for arg in get_args(hint) if arg is not type(None))
        if get_origin(hint) is tuple:
            many, hint = True, get_args(hint)[0]
        if get_origin(hint) is Literal:
            choices, hint = get_args(hint), str
        found[item.name] = Setting(item.name, hint, item.default, helps[item.name], optional, many, choices)
    return found


def unknown(what: str, name: str, known: Iterable[str] | Mapping[str, Any]) -> str:
    """The sentence for an unknown name, with the nearest known one."""
    names = sorted(known)
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(names)}."
    return f"There is no {what} {name!r}; {hint}"


def _at_least(config: Any, least: float, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        if not (isinstance(value, (int, float)) and math.isfinite(value) and value >= least):
            raise ConfigError(f"{name} is {value!r}; choose a value of at least {least}.")


def _choices(config: Any) -> None:
    kind: type = type(config)
    for name, setting in describe(kind).items():
        value = getattr(config, name)
        if setting.choices and value not in setting.choices and not (setting.optional and value is None):
            raise ConfigError(f"{name} is {value!r}; choose one of {', '.join(setting.choices)}.")
