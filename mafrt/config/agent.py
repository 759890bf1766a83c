"""One agent of a team: name, prompt, adapter, and the settings in which it differs from the run's.

A field that is None takes the run's setting of the same name. `mafrt.config.team` reads team files into these.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any, Literal

from mafrt.config.schema import (
    AboveOne,
    ClipRange,
    Count,
    CountOrZero,
    NotNegative,
    Positive,
    PositiveShare,
    check_fields,
)
from mafrt.core.errors import ConfigError

NAME = re.compile(r"[A-Za-z0-9_.-]+")
"""Valid names of agents and adapters, which become folder names and metric names."""

LONGEST_NAME = 100
"""Characters of a name: file systems take names of 255 bytes, and some files have more than the agent's in theirs."""

# Beside the adapter folders, a checkpoint holds these; an adapter of the same name would overwrite them.
RESERVED = frozenset({".", "..", "state", "critic.pth", "manifest.json"})

LORA_SETTINGS = ("lora_rank", "lora_alpha", "lora_targets", "adapter_scope")
OPTIMIZER_SETTINGS = ("lr", "optimizer", "weight_decay", "max_grad_norm")
LOSS_SETTINGS = ("clip_param", "clip_high", "dual_clip", "entropy_coef", "kl_coef")
REWARD_SETTINGS = ("reward_weight", "outcome_weight", "process_weight")
ADAPTER_SETTINGS = ("model", "lora", *LORA_SETTINGS, *OPTIMIZER_SETTINGS, *LOSS_SETTINGS)
"""Settings of an adapter: agents that share one may not ask for different ones."""


def name_problem(name: object) -> str | None:
    """Why `name` cannot be the name of an agent or adapter, or None if it can."""
    if not isinstance(name, str) or not NAME.fullmatch(name):
        return f"{name!r} is not a valid name (letters, digits, '_', '.' and '-' only)"
    if len(name) > LONGEST_NAME:
        return f"{name[:20]!r}... has {len(name)} characters; a name has at most {LONGEST_NAME}"
    if name.lower() in RESERVED:
        return f"{name!r} is a name that checkpoints use for themselves; choose another"
    return None


ALL_LINEAR = "all-linear"
"""PEFT's name for every linear layer of a model but its head"""


@dataclass(frozen=True)
class LoraSpec:
    """Shape of one LoRA adapter: the update of a layer is `alpha / rank * B A`.

    >>> mafrt.LoraSpec(rank=16, alpha=32, targets=("q_proj", "v_proj")).rank
    16
    """

    rank: Count = 8
    alpha: Positive = 16.0
    targets: tuple[str, ...] = (ALL_LINEAR,)
    """What is adapted: `all-linear`, all linear layers and experts of the decoder blocks but routers; or ends of paths,
    such as `q_proj` or `experts.down_proj`; or regular expressions for whole paths."""
    scope: Literal["all", "action"] = "all"
    """Tokens on which the adapter acts: all, or the agent's own action with the invocation before it."""

    def __post_init__(self) -> None:
        if isinstance(self.targets, str) or not all(isinstance(t, str) and t for t in self.targets):
            raise ConfigError(f"lora targets must be a list of layer names, found {self.targets!r}")
        object.__setattr__(self, "targets", tuple(self.targets))
        if not self.targets:
            raise ConfigError("lora targets is empty; name at least one linear layer, such as 'q_proj'")
        check_fields(self, "lora ")


@dataclass(frozen=True)
class AgentSpec:
    """One agent. Fields that are None take the run's default.

    >>> mafrt.AgentSpec("solver", prompt="You solve it.", with_answer=True, lr=1e-4).adapter
    'solver'
    """

    name: str
    """The key `role` in team files."""
    prompt: str = ""
    """The agent's system prompt; empty: no system message."""
    prompt_at: Literal["start", "end"] = "start"
    """Place of the prompt: `start`: the system message; `end`: the end of the last user message, so that prompts of
    different agents begin alike."""
    with_answer: bool = False
    """Whether this agent's answer counts when the task is verified."""
    adapter: str = ""
    """The adapter it speaks with; its own name unless given. Several agents may share one."""
    model: str | None = None
    """Folder or hub id of its own base, where it differs from the run's."""
    sees: str | None = None
    """Its view of the transcript, in workflows that take one."""
    tools: tuple[str, ...] | None = None
    """Its tools in the workflow `tools`, in place of the run's; empty: it calls none."""
    freeze: bool = False
    """Whether it acts and never learns."""
    lora: LoraSpec | None = None
    """Shape of its adapter, all values; `lora_rank`, `lora_alpha`, `lora_targets`, `adapter_scope` set single ones
    instead."""
    lora_rank: Count | None = None
    lora_alpha: Positive | None = None
    lora_targets: tuple[str, ...] | None = None
    adapter_scope: Literal["all", "action"] | None = None
    lr: NotNegative | None = None
    optimizer: Literal["adamw", "paged_adamw_8bit"] | None = None
    weight_decay: NotNegative | None = None
    max_grad_norm: Positive | None = None
    clip_param: ClipRange | None = None
    clip_high: Positive | None = None
    dual_clip: AboveOne | None = None
    entropy_coef: NotNegative | None = None
    kl_coef: NotNegative | None = None
    """A fixed weight, also where `kl_target` steers that of the others."""
    reward_weight: float | None = None
    outcome_weight: float | None = None
    process_weight: float | None = None
    temperature: NotNegative | None = None
    top_p: PositiveShare | None = None
    top_k: CountOrZero | None = None
    max_new_tokens: Count | None = None
    stop: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        if not self.adapter:
            object.__setattr__(self, "adapter", self.name)
        for field_name, name in (("role", self.name), ("adapter", self.adapter)):
            if problem := name_problem(name):
                raise ConfigError(f"{field_name}: {problem}")
        where = f"agent {self.name!r}: "
        for name in ("tools", "stop"):
            if (value := getattr(self, name)) is not None:
                object.__setattr__(self, name, _texts(f"{where}{name}", value))
        if self.lora is not None and not isinstance(self.lora, LoraSpec):
            raise ConfigError(f"{where}lora must be a LoraSpec, found {self.lora!r}")
        flat = self.given(LORA_SETTINGS)
        if self.lora is not None and flat:
            raise ConfigError(f"{where}lora and {next(iter(flat))} are both given; put {next(iter(flat))} into lora")
        try:
            spec = LoraSpec(**_as_lora(flat))
        except ConfigError as error:
            raise ConfigError(f"{where}{error}") from error
        if self.lora_targets is not None:
            object.__setattr__(self, "lora_targets", spec.targets)
        check_fields(self, where)
        for name in ("model", "sees"):
            if getattr(self, name) == "":
                raise ConfigError(f"{where}{name} is empty; give a name, or leave it out.")

    def given(self, names: Collection[str]) -> dict[str, Any]:
        """The named settings that are not None."""
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}

    def lora_shape(self, default: LoraSpec) -> LoraSpec:
        """Shape of its adapter: `lora`, or the run's `default` with its own values in place."""
        return self.lora or replace(default, **_as_lora(self.given(LORA_SETTINGS)))


def _as_lora(settings: dict[str, Any]) -> dict[str, Any]:
    """Settings of an agent under their names in `LoraSpec`."""
    return {name.removeprefix("lora_").removeprefix("adapter_"): value for name, value in settings.items()}


def _texts(name: str, value: object) -> tuple[str, ...]:
    """A text, or a list of texts, as a tuple of texts that are not empty. Raises ConfigError."""
    texts = (value,) if isinstance(value, str) else value
    if not isinstance(texts, (list, tuple)) or not all(isinstance(text, str) and text for text in texts):
        raise ConfigError(f"{name} must be a list of texts that are not empty, found {value!r}")
    return tuple(texts)
