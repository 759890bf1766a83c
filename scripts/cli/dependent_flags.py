"""Flags that do something only together with another setting; typed without it, they are refused."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mafrt.config.team import Team
from mafrt.core.distributed import started
from mafrt.core.errors import ConfigError

if TYPE_CHECKING:
    from mafrt.runners.algorithm import RunAlgorithm


@dataclass(frozen=True)
class DependentFlags:
    """Flags, and the setting without which they have no effect."""

    flags: tuple[str, ...]
    """names; a trailing `*` stands for any ending"""
    used: Callable[[Mapping[str, Any]], object]
    """whether they have an effect, given all values by name; later also those of `of_team` and `of_rule`"""
    remedy: str
    """what to give with them"""

    def covers(self, name: str) -> bool:
        return any(name.startswith(flag[:-1]) if flag.endswith("*") else name == flag for flag in self.flags)


_OFF = (None, False, 0, (), "", "none", "constant")
"""Values of settings that are switched off."""

DEPENDENCES = (
    DependentFlags(("ray_*",), lambda v: v["ray"], "--ray ADDRESS"),
    DependentFlags(("coach_*",), lambda v: v["coach"] != "none", "--coach"),
    DependentFlags(
        ("coach_concurrency", "coach_timeout", "coach_deadline", "coach_max_calls", "coach_price_*", "coach_cache"),
        lambda v: v["coach"] not in ("rules", "local"),
        "a coach behind an API, such as --coach openai:MODEL",
    ),
    DependentFlags(("coach_max_tokens",), lambda v: v["coach"] != "rules", "a coach that is a model"),
    DependentFlags(("kl_horizon",), lambda v: v["kl_target"] is not None, "--kl_target"),
    DependentFlags(("kl_estimator",), lambda v: v["kl_in"] != "reward", "--kl_in loss"),
    DependentFlags(("reference", "kl_in", "kl_estimator"), lambda v: any(v["own"]("kl_coef")), "--kl_coef"),
    DependentFlags(
        ("problem_field", "answer_field"),
        # Other environments take none of these, and say so. `evaluate` alone has yet to read the data of its run.
        lambda v: (
            v["dataset_path"]
            or v.get("eval_dataset_path")
            or ("eval_dataset_path" not in v and v["load_path"])
            or v.get("env") not in (None, "math")
        ),
        "--dataset_path",
    ),
    DependentFlags(
        ("vllm_*", "max_loras", "max_lora_rank", "gpu_memory_utilization", "tensor_parallel_size"),
        lambda v: v["engine"] != "local",
        "--engine vllm",
    ),
    DependentFlags(
        ("max_batch_rows",),
        # `chat` and `serve_team` ask any engine for so many at once.
        lambda v: v["engine"] != "vllm" or not ("k" in v or "n_samples" in v),
        "--engine local",
    ),
    DependentFlags(("entropy_schedule",), lambda v: any(v["own"]("entropy_coef")), "--entropy_coef"),
    DependentFlags(("outcome_to",), lambda v: any(v["own"]("outcome_weight")), "an --outcome_weight"),
    DependentFlags(("outcome_veto",), lambda v: any(v["own"]("process_weight")), "a --process_weight"),
    DependentFlags(("influence_similarity",), lambda v: any(v["own"]("influence_weight")), "an --influence_weight"),
    # Of gigpo, whose episode part reads none of them.
    DependentFlags(("similarity",), lambda v: any(v["own"]("step_weight")), "a --step_weight"),
    DependentFlags(("gamma",), lambda v: v["algorithm"] != "gigpo" or any(v["own"]("step_weight")), "a --step_weight"),
    DependentFlags(
        ("critic_epoch", "huber_delta", "value_clip"), lambda v: any(v["own"]("critic_lr")), "a --critic_lr above 0"
    ),
    DependentFlags(("lr",), lambda v: v["learning"], "an agent that learns (freeze fewer)"),
    DependentFlags(
        (
            *("lr_schedule", "lr_warmup", "lr_follows_signal", "step_kl", "ppo_epoch", "weight_decay", "optimizer"),
            *("gradient_checkpointing", "normalization_mode", "clip_param", "clip_high", "dual_clip", "target_kl"),
            *("entropy_coef", "entropy_schedule", "warmup_steps", "agent_iteration_interval"),
        ),
        lambda v: v["moving"],
        "an agent that learns (freeze fewer, or give an --lr above 0)",
    ),
    DependentFlags(
        ("clip_param", "clip_high", "dual_clip"),
        # A batch's first step has the weights that sampled it. HAPPO's later agents move on from the earlier ones'
        # where they share an adapter, and the ratio of a whole turn adds up the rounding of its tokens.
        lambda v: (
            v["ppo_epoch"] > 1
            or v["num_mini_batch"] > 1
            or "action" in v["own"]("level")
            or (v["sequential"] and v["sharing"])
        ),
        "a --ppo_epoch or --num_mini_batch above 1, since the first step of a batch has nothing to clip",
    ),
    DependentFlags(("target_kl",), lambda v: v["ppo_epoch"] > 1, "a --ppo_epoch above 1, which it could end early"),
    DependentFlags(
        ("value_clip",),
        lambda v: any(passes > 1 for passes in v["own"]("critic_epoch")) or v["num_mini_batch"] > 1,
        "a --critic_epoch or --num_mini_batch above 1, since the first step of a batch has nothing to clip",
    ),
    DependentFlags(
        ("bonus_rule", "right_above"),
        lambda v: any(any(v["own"](f"alpha{n}")) for n in range(4)),
        "one of --alpha0 to --alpha3, the weights of the bonuses",
    ),
    DependentFlags(
        ("agent_iteration_interval",),
        lambda v: len(v["learning"]) > 1 or v["algorithm"] == "cory",
        "two agents that learn",
    ),
    DependentFlags(
        ("keep_last", "keep_every"),
        lambda v: v["save_interval"] or v["load_path"],
        "a --save_interval above 0, since the last checkpoint is the only one",
    ),
    # Of `evaluate`, whose k samples of a task are drawn; the greedy one is not.
    DependentFlags(("temperature", "top_p", "top_k"), lambda v: v["k"] or v["baselines"], "sampled answers (--k N)"),
    # Of `serve_vllm`, where the team is that of a file.
    DependentFlags(("n_agents",), lambda v: v["servers"] and v["profile_path"], "--profile_path FILE"),
    DependentFlags(("ray_vllm_flags",), lambda v: v["ray_vllm"], "--ray_vllm N"),
    DependentFlags(("league_interval",), lambda v: v["league"] > 0, "--league N"),
    DependentFlags(("max_rollbacks",), lambda v: v["on_collapse"] == "rollback", "--on_collapse rollback"),
    DependentFlags(
        ("tasks_path", "eval_tasks_path", "program_timeout_s"),
        lambda v: v["program"] is not None or v["command"] is not None,
        "--program or --command",
    ),
    DependentFlags(
        ("env_kwargs", "eval_env_kwargs"),
        # `train` asks for an environment anyway; a program takes no arguments.
        lambda v: v["env"] or v.get("load_path") or ("program" in v and not v["program"] and not v["command"]),
        "--env",
    ),
    DependentFlags(("baseline_*",), lambda v: v["baselines"], "--baselines"),
    DependentFlags(
        ("min_return", "min_gap", "return_of", "predict"), lambda v: v["episodes_path"], "--episodes_path RUN"
    ),
    DependentFlags(
        ("task_metrics",),
        lambda v: v["data_root"] or v["dataset_path"] or v["load_path"],
        "--dataset_path or --data_root",
    ),
    DependentFlags(("demonstration_episodes",), lambda v: v["demonstrations"], "--demonstrations FILE"),
    DependentFlags(("score_answers_by",), lambda v: v["coach"] == "rules", "--coach rules"),
    DependentFlags(
        # Not eval_dataset_path, which is also compared with the problems of the training.
        (
            "eval_interval",
            "eval_samples",
            "eval_temperature",
            "eval_split",
            "eval_env_kwargs",
            "eval_tasks_path",
            "keep_best",
            "on_collapse",
            "max_rollbacks",
        ),
        lambda v: v["eval_episodes"] > 0,
        "--eval_episodes N",
    ),
    DependentFlags(("log_tokens",), lambda v: v["log_episodes"], "--log_episodes"),
    DependentFlags(("transcript_*",), lambda v: v["record_dir"], "--record_dir FOLDER"),
    DependentFlags(("port",), lambda v: v["live"], "--live"),
    DependentFlags(("output",), lambda v: not v["live"], "a report in a file (so without --live)"),
    DependentFlags(
        ("kind", "iteration", "agent", "search", "min_score", "max_score", "limit"),
        lambda v: v["episode"] is None,
        "a list of episodes (so without --episode)",
    ),
    DependentFlags(("agents", "gpus"), lambda v: v["memory"], "--memory MODEL"),
    DependentFlags(
        ("lora_rank", "reference", "micro_batch_tokens", "rows", "context"),
        lambda v: v["memory"] or v["team"],
        "--memory MODEL or a team file",
    ),
    # One question a call: the first of these that is asked is answered.
    DependentFlags(("environments",), lambda v: not v["algorithms"], "a call of its own, without --algorithms"),
    DependentFlags(
        ("team", "memory"),
        lambda v: not v["algorithms"] and not v["environments"],
        "a call of its own, without --algorithms and --environments",
    ),
    DependentFlags(("memory",), lambda v: not v["team"], "a call of its own, without a team file"),
    DependentFlags(("model_name_or_path",), lambda v: v["team"], "a team file"),
    DependentFlags(
        ("importance_cap",),
        lambda v: v["engine"] != "local" or v["async_steps"],
        "another engine (--engine) or older samples (--async_steps 1), whose probabilities differ",
    ),
    DependentFlags(
        ("process_timeout_s",),
        lambda v: v["ray"] or started()[1] > 1,
        "several processes (accelerate launch, torchrun or --ray)",
    ),
    DependentFlags(("env_python",), lambda v: v["env"] or v.get("load_path"), "--env"),
    DependentFlags(("accept_changes",), lambda v: v["load_path"], "--load_path RUN"),
    DependentFlags(("set_aside",), lambda v: v["run_dir"], "--run_dir FOLDER"),
    DependentFlags(("retriever_timeout_s",), lambda v: v["retriever"] or v["load_path"], "--retriever URL"),
    DependentFlags(("process_weight", "outcome_veto"), lambda v: v["coach"] != "none", "--coach"),
    DependentFlags(
        ("overlong_penalty",),
        lambda v: any(v["own"]("overlong_buffer")),
        "--overlong_buffer SHARE",
    ),
    DependentFlags(("transcript_max_mib",), lambda v: v["transcript_share"] > 0, "--transcript_share SHARE"),
    DependentFlags(
        ("overwrite",), lambda v: any(v.get(n) for n in ("output", "record_dir")), "--output or --record_dir"
    ),
)


def of_team(team: Team, freeze: Collection[str], lr: float) -> dict[str, Any]:
    """What flags depend on and only the team decides: the agents that learn.

    `learning` are the agents that are not frozen, `moving` those of them whose learning rate is above 0,
    `sharing` whether two of these have one adapter.
    """
    frozen = team.frozen(freeze)
    learning = [agent for agent in team.agents if agent.name not in frozen]
    moving = [agent for agent in learning if team.settings_for(agent.adapter, ("lr",)).get("lr", lr)]
    return {
        "learning": learning,
        "moving": moving,
        "sharing": len({agent.adapter for agent in moving}) < len(moving),
    }


def of_rule(rule: RunAlgorithm) -> dict[str, Any]:
    """The algorithm's settings: `own(NAME)` are the values of one, of which the team file may give agents their own.

    Empty for a setting that the algorithm has not. `sequential`: its agents are updated one after the other.
    """
    settings = (rule.settings, *rule.own.values())
    return {
        "own": lambda name: [getattr(each, name) for each in settings if hasattr(each, name)],
        "sequential": rule.settings.schedule == "sequential",
    }


def refuse_ineffective(typed: Collection[str], values: Mapping[str, Any]) -> None:
    """ConfigError for a typed flag that would do nothing with these values."""
    for name in sorted(typed):
        for each in DEPENDENCES:
            # A command without the other setting uses the flag in its own way.
            try:
                ineffective = each.covers(name) and not each.used(values)
            except KeyError:
                continue
            # What is switched off where it is not on is as asked for.
            if ineffective and values[name] not in _OFF:
                raise ConfigError(f"--{name} has no effect without {each.remedy}; give that too, or leave it out.")
