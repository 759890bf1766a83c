"""Builds the parts of a run from its settings. Imports torch: call it after the arguments are parsed."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeAlias, cast

from mafrt import algorithms
from mafrt.algorithms import Algorithm, CreditContext
from mafrt.algorithms.losses import AdaptiveKL
from mafrt.config.agent import ALL_LINEAR, LoraSpec
from mafrt.config.resolve import declared
from mafrt.config.team import Team
from mafrt.config.train_config import TrainConfig
from mafrt.core.distributed import Processes
from mafrt.core.errors import CheckpointError
from mafrt.core.seeding import seed_of
from mafrt.core.types import SamplingParams
from mafrt.engines import forget
from mafrt.engines.checked import CheckedEngine
from mafrt.engines.local.engine import LocalEngine
from mafrt.engines.logprob_check import probe_prompt, self_check, summary
from mafrt.engines.registry import SHIPPED, engine_of
from mafrt.engines.several import SeveralEngines
from mafrt.engines.vllm.in_process import VllmEngine
from mafrt.engines.vllm.server import ServerEngine
from mafrt.models.multi_lora import decoder_blocks
from mafrt.models.outside_text import controls_of
from mafrt.models.several_bases import Bases, SeveralBases
from mafrt.models.sharding import FullyShard, Zero3
from mafrt.models.shared_base import SharedBase
from mafrt.rollout.continued_tree import ContinuedTreePlayer
from mafrt.rollout.player import Feedback, Player
from mafrt.rollout.prompts import AgentTokenizer
from mafrt.rollout.tree_player import TreePlayer
from mafrt.runners.algorithm import RunAlgorithm
from mafrt.runners.checks import check_window
from mafrt.storage.load_path import LoadSource
from mafrt.training.critic import Critic
from mafrt.training.learner import Learner
from mafrt.training.lr_schedule import make_entropy_schedule, make_lr_schedule
from mafrt.training.mixer_critic import MixerCritic
from mafrt.training.policy_objective import Objective
from mafrt.training.several import AnyLearner, SeveralCritics, SeveralLearners

log = logging.getLogger(__name__)

AnyCritic: TypeAlias = Critic | MixerCritic | SeveralCritics

if TYPE_CHECKING:
    from mafrt.engines import Engine
    from mafrt.engines.local.engine import LocalEngine


def place_adapters(base: Bases, team: Team, default: LoraSpec, seed: int, initial: LoadSource | None = None) -> None:
    """Add an adapter to `base` for every adapter of the team that is not there yet.

    Adapter folders in `initial` that are not from a mafrt run keep their own shape (`adapter_config.json`) in place of
    the settings. Raises CheckpointError for one that cannot be loaded.
    """
    # Shapes of folders from elsewhere are taken as they are; those of a checkpoint must be the run's own.
    foreign = initial is not None and initial.kind == "adapters" and initial.checkpoint is None
    for name in team.adapters:
        if name in base.adapters:
            continue
        if foreign and initial is not None:
            base.load_adapter(name, initial.adapter(name))
            loaded, wanted = base.records[name], team.lora_for(name, default)
            if (loaded.rank, loaded.alpha) != (wanted.rank, wanted.alpha):
                log.warning("adapter %s has rank %d and alpha %g, as its folder says", name, loaded.rank, loaded.alpha)
        else:
            spec = team.lora_for(name, default)
            if initial is not None and name in initial.adapters and spec.targets == (ALL_LINEAR,):
                # All layers are those that were all when the run began: another version may have left some out.
                with suppress(CheckpointError):  # loading says why
                    spec = replace(spec, targets=base.targets_of(name, initial.adapter(name)))
            base.add_adapter(name, spec, seed=seed_of(seed, "adapter", name))


def make_critic(base: Bases, team: Team, config: TrainConfig, rule: RunAlgorithm) -> AnyCritic:
    """The rule's critic, or the mixer that takes its place; of several bases, one for each."""
    kind, seed = declared(rule.settings.critic_class), seed_of(config.run.seed, "critic")
    several = isinstance(base, SeveralBases)
    tokenizers = [{name: base.of_agent(name).tokenizer for name in team.names}] if several else []
    parts = {
        name: kind.for_rule(part, config.learn, rule.settings, _on(part, base, team).names, seed, *tokenizers)
        for name, part in base.parts.items()
    }
    return SeveralCritics(parts) if several else cast(AnyCritic, parts[base.name])


def make_learner(
    base: Bases, team: Team, config: TrainConfig, rule: RunAlgorithm, sampling: Mapping[str, SamplingParams]
) -> AnyLearner:
    """The learner, with each adapter's own optimizer and loss settings; of several bases, one for each."""
    parts = {
        name: _make_learner(part, _on(part, base, team), config, rule, sampling) for name, part in base.parts.items()
    }
    return SeveralLearners(parts, base.part_of) if isinstance(base, SeveralBases) else parts[base.name]


def _on(part: SharedBase, base: Bases, team: Team) -> Team:
    """The agents that sit on one base."""
    return Team(tuple(agent for agent in team.agents if base.of_agent(agent.name) is part))


def _make_learner(
    base: SharedBase, team: Team, config: TrainConfig, rule: RunAlgorithm, sampling: Mapping[str, SamplingParams]
) -> Learner:
    # Set on the base, since its blocks are what is computed twice.
    base.gradient_checkpointing(config.learn.gradient_checkpointing)
    return Learner(
        base,
        team,
        config.learn,
        Objective(
            rule.settings,
            {team.agent(name).adapter: settings for name, settings in rule.own.items() if name in team.names},
            turn_tokens=rule.token_limits if rule.settings.constant_length else None,
            cut=frozenset(name for name, how in sampling.items() if how.truncated),
        ),
        seed_of(config.run.seed, "learner"),
        temperatures={name: how.temperature for name, how in sampling.items()},
        lr_schedule=make_lr_schedule(config.learn, config.run.iterations),
        entropy_schedule=make_entropy_schedule(config.learn, config.run.iterations),
    )


def sampling_of(config: TrainConfig, team: Team, name: str) -> SamplingParams:
    """Sampling parameters of an agent: its own settings from the team file where it has some, else the run's."""
    agent, play = team.agent(name), config.play

    # None and not falsity decides, since a temperature of 0 is a value.
    def pick(given: Any, default: Any) -> Any:
        return default if given is None else given

    return SamplingParams(
        max_new_tokens=pick(agent.max_new_tokens, play.max_new_tokens),
        temperature=pick(agent.temperature, play.temperature),
        top_p=pick(agent.top_p, play.top_p),
        top_k=pick(agent.top_k, play.top_k),
        stop=tuple(agent.stop or ()),
        thinking_budget=play.thinking_budget,
        thought_opened=play.reasoning == "on",
    )


def voices_of(base: Bases, team: Team, window: int | None) -> dict[str, AgentTokenizer]:
    """Tokenizer and window of every agent, from the base that it sits on.

    Raises:
        ConfigError: `window`, the one that is asked for, is larger than a base was trained for.
    """
    parts = {name: base.of_agent(name) for name in team.names}
    for name, tokenizer in {part.name: part.tokenizer for part in parts.values()}.items():
        if (marks := controls_of(tokenizer).turns) is None:
            continue
        if marks.openings:
            log.info(
                "%s: its chat template opens turns by ordinary text (%s); in any other text that is written %s.",
                *(name, ", ".join(marks.openings), ", ".join(map(marks.broken, marks.openings))),
            )
        else:
            log.warning(
                "%s: nothing but blanks tells the turns of its chat template apart, so what is said can look like "
                "another turn; take a base whose template marks turns.",
                name,
            )
    return {
        name: AgentTokenizer(part.tokenizer, check_window(window, part.context_window)) for name, part in parts.items()
    }


def make_player(
    engine: Engine,
    base: Bases,
    team: Team,
    config: TrainConfig,
    rule: RunAlgorithm,
    sampling: Mapping[str, SamplingParams],
    window: int,
    context: CreditContext,
    feedback: Feedback | None = None,
) -> Player:
    """The player of single turns, or of trees of alternatives, each of which the rule's credit scores.

    `feedback` judges turns while they are played: its notes are shown with `coach_feedback`, and trees go by its
    verdicts.
    """
    shared = (engine, base.main.tokenizer, team, sampling, window, config.play.reasoning)
    named: dict[str, Any] = {
        "keep_thoughts": config.play.keep_thoughts,
        "feedback": feedback if config.coach.coach_feedback else None,
        "max_lost": config.play.env_max_lost,
        "voices": voices_of(base, team, config.play.context_window),
    }
    if rule.tree_samples == 1:
        return Player(*shared, **named)
    kind = ContinuedTreePlayer if rule.settings.tree_continues else TreePlayer
    return kind(
        *shared,
        **named,
        samples=rule.tree_samples,
        worth=lambda episodes: algorithms.turn_rewards(episodes, rule.settings, context),
        judge=feedback,
    )


def make_kl_control(settings: Algorithm) -> AdaptiveKL | None:
    """Steers the weight of the KL penalty to its target; None where the weight is fixed."""
    if settings.kl_target is None:
        return None
    return AdaptiveKL(settings.kl_coef, settings.kl_target, settings.kl_horizon)


def spread(base: SharedBase, processes: Processes, zero: dict[str, Any] | None = None, *, fsdp: bool = False) -> None:
    """Place `base` on all processes: replicated, or sharded with FSDP or ZeRO-3. Call it before adapters are added.

    Args:
        processes: those of the run.
        zero: DeepSpeed's settings (`mafrt.training.deepspeed_config.read_zero`), if it is used.
        fsdp: shard the base with FSDP2.
    """
    base.processes, base.zero = processes, zero
    if processes.size > 1:
        base.compute.share_machine(base)
    if zero is not None and zero["zero_optimization"]["stage"] == 3:
        base.shard(lambda: Zero3(base.model, base.head, processes.device, zero))
    elif fsdp:
        base.shard(lambda: FullyShard(base.model, decoder_blocks(base.inner), processes))


def make_engine(base: Bases, config: TrainConfig) -> Engine:
    """The engine that the settings ask for; one beside the base is checked against it before anything is sampled.

    Several bases have an engine each.

    Raises:
        ModelError: its log-probs disagree with the base.
        EngineDownError: no server answers.
    """
    window = config.play.context_window
    parts = {
        name: _make_engine(part, config, check_window(window, part.context_window)) for name, part in base.parts.items()
    }
    return SeveralEngines(parts, base.part_of_adapter) if isinstance(base, SeveralBases) else parts[base.name]


def _make_engine(base: SharedBase, config: TrainConfig, window: int) -> Engine:
    name = config.engine.engine
    engine = engine_of(name, base, config, window)
    if name not in SHIPPED:
        # Whatever it says of itself: one that does not take the updates would train to the end and teach nothing.
        engine = checked = CheckedEngine(engine, base, name)
        checks = {name: self_check(engine, base, name, own=True)}
        checked.compares = True
        forget(engine)  # no answer of the check may be used again
        log.info("%s", summary(checks))
    return engine


def make_local_engine(base: SharedBase, config: TrainConfig, window: int) -> LocalEngine:
    """The engine that samples on the shared base itself."""
    return LocalEngine(base, max_batch_rows=config.play.max_batch_rows)


def make_vllm_engine(base: SharedBase, config: TrainConfig, window: int) -> Engine:
    """vLLM in a process of its own or behind servers, checked against the base.

    Raises:
        ModelError: its log-probs disagree with the base.
        EngineDownError: no server answers.
    """
    checks = {}
    if not config.engine.vllm_servers:
        colocated = VllmEngine(base, config.engine, window=window)
        try:
            checks["vLLM"] = self_check(colocated, base)
        except BaseException:
            colocated.close()
            raise
        log.info("%s", summary(checks))
        return colocated
    # All processes of a run hand over the same adapters, under the same names.
    run = base.processes.gather(uuid.uuid4().hex[:8])[0]
    servers = ServerEngine(base, config.engine, window=window, run=run, probe=probe_prompt(base))
    try:
        for url, answers in servers.servers.items():
            if answers:
                with servers.only(url):
                    checks[url] = self_check(servers, base, url)
        servers.keep_probes()
    except BaseException:
        servers.close()
        raise
    log.info("%s", summary(checks))
    return servers
