"""The groups of settings that algorithms share: rewards, policy loss, schedule, critic, mixer.

Each field is declared here once; an algorithm inherits the groups that it uses, and may change a default.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from mafrt.config.schema import (
    AboveOne,
    Checked,
    ClipRange,
    Count,
    CountOrZero,
    NotNegative,
    Positive,
    PositiveShare,
    Share,
)
from mafrt.core.errors import ConfigError


@dataclass(frozen=True)
class RewardSettings(Checked):
    """Weights of the parts of a turn's reward, and the turns that receive them."""

    reward_weight: float = 1.0
    """weight of the rewards that the environment gives to agents"""
    outcome_weight: float = 1.0
    """weight of the task's verdict for the team"""
    process_weight: float = 1.0
    """weight of the coach's score for a turn, which is divided by 10 first"""
    outcome_veto: bool = False
    """drop positive process rewards where the task's verdict is 0 or less, so that the coach cannot overrule it"""
    outcome_to: Literal["last", "end", "each", "all"] = "last"
    """turns that receive the outcome: the last, all of the last step, every agent's last, or all"""
    share: Literal["own", "sum"] = "own"
    """a turn keeps its own reward, or carries its episode's sum, the outcome counted once"""
    overlong_buffer: Share = 0.0
    """final share of max_new_tokens over which the overlong penalty grows; 0 for none"""
    overlong_penalty: NotNegative = 1.0
    """penalty of a turn that uses up max_new_tokens"""
    truncation: Literal["bootstrap", "mask", "terminate"] = "terminate"
    """for an episode cut at max_steps: bootstrap from the critic, mask it out of the loss, or treat it as ended"""
    mask_cut_turns: bool = False
    """leave turns cut by max_new_tokens out of the loss"""


@dataclass(frozen=True)
class PolicyLossSettings(Checked):
    """The policy loss."""

    level: Literal["token", "action"] = "token"
    """unit of an action and of its probability ratio: a token, or a whole turn"""
    normalization_mode: Literal["sum", "token", "word"] | None = None
    """action level: the turn's log-ratio is summed, or divided by its tokens or words (TWOSOME); default: token"""
    clip_param: ClipRange = 0.2
    """clip range of the probability ratio: from 1 - clip_param to 1 + clip_param"""
    clip_high: Positive | None = None
    """upper clip range where it differs from the lower one (DAPO), on a task of ours not shown to help; default:
    clip_param"""
    dual_clip: AboveOne | None = None
    """lower bound of the objective for negative advantages, as a multiple > 1 of the advantage; default: off"""
    entropy_coef: NotNegative = 0.0
    """weight of the entropy bonus"""
    kl_coef: NotNegative = 0.0
    """weight of the KL penalty to the reference"""
    reference: Literal["base", "initial"] | None = None
    """of the KL penalty: the base, or the adapters as the run starts; default: initial with adapters to start from"""
    kl_in: Literal["loss", "reward"] = "loss"
    """apply the KL penalty in the loss (kl_estimator) or in every token's reward (k1)"""
    kl_estimator: Literal["k1", "k2", "k3", "k3_corrected"] = "k2"
    """in the loss: k2 or k3_corrected have the gradient of KL(policy, ref), k3 that of KL(ref, policy), k1 none"""
    kl_target: Positive | None = None
    """target KL in nats per token, to which kl_coef adapts after every iteration; default: kl_coef is fixed"""
    kl_horizon: Positive = 10000.0
    """time constant of the adaptive kl_coef in turns: an error of 20% changes it by 20% in this many"""
    importance_cap: Positive | None = 2.0
    """cap of the importance weight p_trainer / p_engine where another engine samples; none: no weighting"""
    target_kl: Positive | None = None
    """end the epochs of an iteration when the mean KL to the sampling policy exceeds this; default: off"""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.kl_target is not None and not self.kl_coef:
            raise ConfigError("kl_target steers kl_coef, which is 0; give the value that it starts from.")
        if self.normalization_mode is not None and self.level != "action":
            raise ConfigError(
                f"normalization_mode is {self.normalization_mode}, which divides the log-ratio of a whole turn, and "
                "level is token; leave it out, or set level to action."
            )


@dataclass(frozen=True)
class ScheduleSettings(Checked):
    """Schedule of the learning agents."""

    agent_iteration_interval: CountOrZero = 0
    """iterations per agent, one learning at a time (or per casting: cory), on two tasks of ours not shown to help; 0:
    all agents learn together"""


@dataclass(frozen=True)
class CriticSettings(Checked):
    """The critic's network and update, in a rule with a critic or a mixer."""

    critic_lr: NotNegative = 5e-4
    """learning rate of the critic"""
    critic_epoch: Count = 8
    """passes of the critic over each batch; its features are computed once, so they cost little"""
    critic_hidden_size: Count = 128
    """width of the critic's hidden layer"""
    huber_delta: Positive | None = 10.0
    """error at which the value loss turns linear (Huber); none: squared error"""
    warmup_steps: CountOrZero = 0
    """iterations in which only the critic learns"""


@dataclass(frozen=True)
class ValueHeadSettings(CriticSettings):
    """A critic that predicts returns with a value head."""

    value_clip: Positive | None = 0.2
    """clip range of the value update, in standard deviations of the returns with value_norm; none switches it off"""
    value_norm: bool = True
    """fit the critic to returns in standard deviations from their running mean (ValueNorm, Yu 2022)"""


@dataclass(frozen=True)
class MixerSettings(CriticSettings):
    """Q heads, mixer and replay memory (VDN, QMIX)."""

    replay_steps: Count = 512
    """joint steps that the mixer learns from; they are kept in checkpoints"""
    target_tau: PositiveShare = 0.05
    """share of the mixer's weights that its target takes over in each step, in (0, 1]"""
