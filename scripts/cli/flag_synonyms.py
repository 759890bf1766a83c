"""Settings of other libraries, and the one of mafrt that does the same: for flags, lines of Hydra, and keys of YAML.

The names are those of transformers' TrainingArguments, TRL, verl, OpenRLHF, MARFT (launch and evaluation), MARTI, MRLM
and Dr. MAS.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple


class Synonym(NamedTuple):
    """Answer to a flag of another library."""

    flag: str | None
    """the flag that does the same; None: there is none"""
    advice: str
    exact: bool = False
    """whether the same values mean the same"""


_SAME: dict[str, str | tuple[str, ...]] = {
    # Of several, the first that a command has is meant.
    # transformers and TRL
    "learning_rate": "lr",
    "max_steps": "iterations",
    "num_train_epochs": "epochs",
    "num_iterations": "ppo_epoch",
    "num_ppo_epochs": "ppo_epoch",
    "warmup_ratio": "lr_warmup",
    "num_warmup_steps": "lr_warmup",
    "lr_scheduler_type": "lr_schedule",
    "output_dir": ("run_dir", "output"),
    "logging_dir": "run_dir",
    "resume_from_checkpoint": "load_path",
    "save_steps": "save_interval",
    "save_total_limit": "keep_last",
    "eval_steps": "eval_interval",
    "per_device_train_batch_size": "n_rollout_threads",
    "train_batch_size": "n_rollout_threads",
    "batch_size": "n_rollout_threads",
    "gradient_accumulation_steps": "micro_batch_tokens",
    "num_generations": "n_samples",
    "max_completion_length": "max_new_tokens",
    "max_prompt_length": "context_window",
    "max_length": "context_window",
    "max_seq_length": "context_window",
    "beta": "kl_coef",
    "init_kl_coef": "kl_coef",
    "epsilon": "clip_param",
    "epsilon_high": "clip_high",
    "cliprange": "clip_param",
    "cliprange_value": "value_clip",
    "delta": "dual_clip",
    "lam": "gae_lambda",
    "adam_epsilon": "opti_eps",
    "optim": "optimizer",
    "max_gradient_norm": "max_grad_norm",
    "max_norm": "max_grad_norm",
    "model": "model_name_or_path",
    "model_name": "model_name_or_path",
    "model_path": "model_name_or_path",
    "base_model": "model_name_or_path",
    "torch_dtype": "dtype",
    "precision": "dtype",
    "lora_r": "lora_rank",
    "rank": "lora_rank",
    "lora_target_modules": "lora_targets",
    "target_modules": "lora_targets",
    "dataset": "dataset_path",
    "train_file": "dataset_path",
    "train_files": "dataset_path",
    "data_path": "dataset_path",
    "validation_file": "eval_dataset_path",
    "val_files": "eval_dataset_path",
    "eval_dataset": "eval_dataset_path",
    "use_vllm": "engine",
    "vllm_mode": "engine",
    "vllm_gpu_memory_utilization": "gpu_memory_utilization",
    "vllm_tensor_parallel_size": "tensor_parallel_size",
    "random_seed": "seed",
    # verl and OpenRLHF
    "adv_estimator": "algorithm",
    "advantage_estimator": "algorithm",
    "algo": "algorithm",
    "ppo_epochs": "ppo_epoch",
    "ppo_mini_batch_size": "num_mini_batch",
    "n_samples_per_prompt": "n_samples",
    "rollout_n": "n_samples",
    "rollout_batch_size": "n_rollout_threads",
    "clip_ratio": "clip_param",
    "clip_ratio_low": "clip_param",
    "clip_ratio_high": "clip_high",
    "kl_loss_coef": "kl_coef",
    "entropy_coeff": "entropy_coef",
    "actor_lr": "lr",
    "actor_learning_rate": "lr",
    "critic_learning_rate": "critic_lr",
    "response_length": "max_new_tokens",
    "generate_max_len": "max_new_tokens",
    "prompt_max_len": "context_window",
    "total_epochs": "epochs",
    "num_episodes": ("epochs", "tasks"),
    "total_training_steps": "iterations",
    "test_freq": "eval_interval",
    "save_freq": "save_interval",
    "ckpt_path": "run_dir",
    "save_path": "run_dir",
    # MARFT's launch script
    "algorithm_name": "algorithm",
    "experiment_name": "run_dir",
    "num_env_steps": "iterations",
    "profile": "profile_path",
    "team": "profile_path",
    "agents": "profile_path",
    "n_agent": "n_agents",
    "gradient_cp_steps": "micro_batch_tokens",
    "log_dir": "run_dir",
    "warmup": "warmup_steps",
    "n_eval_rollout_threads": "n_rollout_threads",
    # MARFT's evaluation
    "lora_path": "load_path",
    "num_agents": "n_agents",
    "response_filename": "output",
    "metrics_filename": "output",
    # MARTI
    "pretrain": "model_name_or_path",
    "max_epochs": "ppo_epoch",
    "eps_clip": "clip_param",
    "clip_eps_high": "clip_high",
    "lambd": "gae_lambda",
    "l2": "weight_decay",
    "max_samples": ("train_limit", "tasks"),
    "max_ckpt_num": "keep_last",
    "n_eval_samples_per_prompt": "eval_samples",
    "stratify_key": "stratify",
    "reward_process_weight": "process_weight",
    "reward_outcome_weight": "outcome_weight",
    "input_key": "problem_field",
    "label_key": "answer_field",
    "prompt_data": "dataset_path",
    "extra_eval_tasks": "eval_dataset_path",
    "is_reasoning_model": "reasoning",
    "enable_thinking": "reasoning",
    "coach_model": "coach",
    "coach_prompt_template": "coach_rubric",
    "coach_max_output_tokens": "coach_max_tokens",
    "coder_max_turns": "tool_turns",
    "data_engineer_max_turns": "agent_turns",
    "modeler_max_turns": "agent_turns",
    "analyst_max_turns": "agent_turns",
    # MRLM
    "num_epochs": ("iterations", "epochs"),
    "num_rollouts_per_iteration": "n_rollout_threads",
    "episodes_per_iteration": "n_rollout_threads",
    "mini_batch_size": "num_mini_batch",
    "group_size": "n_samples",
    "clip_range": "clip_param",
    "clip_range_vf": "value_clip",
    "value_clip_range": "value_clip",
    "num_grpo_epochs": "ppo_epoch",
    "lr_scheduler": "lr_schedule",
    "eval_every": "eval_interval",
    "save_every": "save_interval",
    "save_dir": "run_dir",
    "output": "run_dir",
    "resume": "load_path",
    "min_reward_threshold": "min_return",
    "filter_reward": "min_score",
    "environment": "env",
    "environments": "env",
    "env_type": "env",
    "max_turns": ("coder_turns", "horizon", "tool_turns", "agent_turns"),
    "max_attempts": ("coder_turns", "horizon", "tool_turns"),
    "difficulty_range": "dataset_path",
    # Dr. MAS and MAVERL's SPIN
    "group_by_agent_id": "algorithm",
    "max_loop_num": "horizon",
    "orchestra_type": "workflow",
    "dpo_beta": "beta",
    "max_response_length": "max_new_tokens",
    "enable_gradient_checkpointing": "gradient_checkpointing",
    "search_url": "retriever",
    "agent_ids": "profile_path",
    "model_ids": "profile_path",
    "model_sharing": "profile_path",
    "val_n": ("eval_samples", "k"),
    "val_batch_size": ("eval_episodes", "tasks"),
    "ppo_mini_update_num": "num_mini_batch",
    "tensor_model_parallel_size": "tensor_parallel_size",
    "rollout_name": "engine",
    "logger": "report_to",
}

_PLACES = ("num_nodes", "num_gpus_per_node")

_NONE = {
    "env_name": "leave it out: the command says which environment it is, as train_math does, or train --env NAME",
    "dataset_name": "leave it out: --dataset_path names the data",
    "user_name": "leave it out",
    "flag": "leave it out: MARFT's --flag only named a run, as --run_dir does",
    "use_wandb": "use --report_to wandb",
    "use_weave": "use --report_to wandb or trackio; weave keeps nothing without its service",
    "use_tensorboard": "leave it out: TensorBoard is always written",
    "use_eval": "give --eval_interval N to evaluate every N iterations",
    "use_linear_lr_decay": "use --lr_schedule linear",
    "defaults": "compositions of Hydra are not read; name one file by --config (docs/coming_from.md has the recipes)",
    **dict.fromkeys(
        ("config_name", "config_path"),
        "use --config configs/recipes/mathchat.yaml of train_math for mathchat_with_coach, --config "
        "configs/recipes/dsbench.yaml of train_dsbench for dsbench_ds_pipeline, or your own YAML",
    ),
    "cuda": "use --device cuda or --device cpu",
    "n_training_threads": "use --threads",
    "hidden_size": "leave it out: the critic is a value head on the base's hidden states",
    "layer_N": "leave it out: the critic is a value head on the base's hidden states",
    "use_centralized_V": "use --algorithm mappo, whose critic reads the whole transcript",
    "adam_offload": "moments of adapters are small; use --optimizer paged_adamw_8bit",
    "use_peft": "every agent has a LoRA adapter; leave it out",
    "bf16": "use --dtype bfloat16",
    "fp16": "use --dtype float16",
    "num_gpus": "start several processes with accelerate launch (docs/scale.md)",
    **dict.fromkeys(
        (
            "fsdp",
            "strategy",
            "nproc_per_node",
            "num_nodes",
            "nnodes",
            "nnode",
            "n_gpus_per_node",
            "node_rank",
            "master_addr",
            "master_port",
            "gpu_ids",
            "fsdp_sharding_strategy",
            "param_offload",
            "optimizer_offload",
        ),
        "accelerate launch decides that (docs/scale.md)",
    ),
    # MARFT
    "cuda_deterministic": "leave it out: every run follows from --seed",
    "use_orthogonal": "leave it out: the critic is a value head on the base's hidden states",
    "use_clipped_value_loss": "use --value_clip X; without it values are not clipped",
    "use_max_grad_norm": "leave it out: --max_grad_norm X says the norm, and a large one never clips",
    "use_gae": "leave it out: --gae_lambda 1 --gamma 1 are plain returns",
    "use_proper_time_limits": "use --truncation bootstrap",
    "use_huber_loss": "use --huber_delta X, as in --huber_delta 10",
    "use_value_active_masks": "leave it out: padding is never counted",
    "use_policy_active_masks": "leave it out: padding is never counted",
    "log_interval": "leave it out: every iteration is logged",
    "evaluator_type": "leave it out: --dataset_path or --env says what is evaluated",
    "metrics_timestamp": "leave it out: name the file by --output",
    "do_sample": "leave it out: mafrt evaluate plays sampled answers and greedy ones (--k 0, --no_greedy)",
    # MARTI
    **dict.fromkeys(
        ("vllm_num_engines", "vllm_sync_backend"), "use --engine vllm, with --vllm_servers for several (docs/scale.md)"
    ),
    "vllm_enable_sleep": "use --engine vllm, which sleeps during updates (--vllm_sleep)",
    **dict.fromkeys(
        (
            "colocate_all_models",
            "colocate_actor_ref",
            "colocate_critic_reward",
            "colocate_credit_ref",
            "deepspeed_enable_sleep",
            "parallel_loading",
        ),
        "leave it out: one frozen base stands for all agents, the reference and the critic",
    ),
    "zero_stage": "use --deepspeed configs/zero2.json or configs/zero3.json with several processes (docs/scale.md)",
    "deepspeed_config": "use --deepspeed FILE with several processes (docs/scale.md)",
    **dict.fromkeys(
        (
            "flash_attn",
            "use_flash_attention",
            "enable_prefix_caching",
            "enforce_eager",
            "packing_samples",
            "max_packed_length",
            "use_remove_padding",
            "enable_chunked_prefill",
            "free_cache_engine",
        ),
        "leave it out: prompts that turns share are computed once as it is",
    ),
    **dict.fromkeys(
        (
            "micro_train_batch_size",
            "micro_rollout_batch_size",
            "log_prob_micro_batch_size_per_gpu",
            "ppo_micro_batch_size_per_gpu",
        ),
        "use --micro_batch_tokens N, which changes memory and no result",
    ),
    "warmup_steps": "use --lr_warmup N, in iterations; here --warmup_steps warms up the critic",
    "lr_warmup_ratio": "use --lr_warmup N, in iterations",
    "lora_dropout": "leave it out: adapters have no dropout, so that sampling and learning see the same weights",
    "use_lora": "leave it out: every agent has a LoRA adapter",
    "normalize_reward": "use --normalize_advantages batch",
    "use_kl_loss": "use --kl_in loss or reward, with --kl_coef",
    "use_kl_estimator_k3": "use --kl_estimator k3",
    "mask_truncated_completions": "use --mask_cut_turns",
    "eval_before_training": "leave it out: with --eval_interval N the first evaluation comes before training",
    "eval_aggregation": "leave it out: evaluations report avg@k, pass@k and the majority",
    "val_before_train": "leave it out: with --eval_interval N the first evaluation comes before training",
    "val_only": "use mafrt evaluate --load_path runs/NAME --k 16",
    "eval_only": "use mafrt evaluate --load_path runs/NAME --k 16",
    "workflow_func_path": "use --workflow NAME or --workflow module:Class (docs/workflows.md)",
    "processor_func_path": "leave it out: records are read as they are",
    "use_vertex_ai": "use --coach vertex:MODEL, or google:MODEL for the Gemini API",
    "vertex_project": "set VERTEX_PROJECT",
    "vertex_location": "set VERTEX_LOCATION",
    "coach_thinking_budget": "leave it out: the model's own is used; --coach_max_tokens bounds the reply",
    "enable_ground_truth_eval": "leave it out: a rubric with {{truth}} lets the coach see the answer (docs/coach.md)",
    "stratified_sampling": "use --stratify FIELD",
    "random_sample_train": "use --train_limit N, a random subset drawn with the seed",
    "shared_agents": "give the agents of the team file one adapter name (docs/team_file.md)",
    "is_tuning": "use --freeze AGENT for one that does not learn",
    **dict.fromkeys(
        ("wandb_project", "wandb_entity", "wandb_org", "wandb_group", "wandb_run_name", "weave_project"),
        "use --report_to wandb, which reads WANDB_API_KEY, WANDB_PROJECT and WANDB_ENTITY",
    ),
    **dict.fromkeys(
        ("num_workers", "enable_metrics", "enable_rate_limiting"), "leave it out: calls of tools need none"
    ),
    # MRLM
    **dict.fromkeys(
        ("reward_scale", "reward_clip_range", "reward_bias"),
        "leave it out: --reward_weight and --outcome_weight scale rewards",
    ),
    **dict.fromkeys(("adam_beta1", "adam_beta2", "adam_betas"), "leave it out: AdamW's own are used"),
    **dict.fromkeys(
        ("repetition_penalty", "length_penalty", "num_beams"),
        "leave it out: a sampled token must have the probability that the learner computes",
    ),
    "device_map": "use --device; several processes share a base by FSDP or ZeRO (docs/scale.md)",
    "tokenizer_name_or_path": "leave it out: the tokenizer is the base's own",
    "model_type": "leave it out: bases are causal language models",
    "problems": "write them as JSON lines and give --dataset_path FILE",
    "max_episode_length": "leave it out: an environment's own limit of turns holds",
    "label_smoothing": "leave it out: the loss of DPO is the paper's",
    "loss_type": "leave it out: the loss of DPO is the paper's",
    "reference_free": "leave it out: --reference base or initial",
    "reward_normalization": "leave it out: grpo compares the samples of a task",
    "normalize_rewards": "leave it out: grpo compares the samples of a task",
    "collect_every": "leave it out: train_sft learns from --records_path or --episodes_path of runs",
    "verbose": "leave it out; --debug shows tracebacks",
    "value_loss_coef": "leave it out: the critic is a head of its own, with --critic_lr",
    "bc_weight": "leave it out: turns and observations weigh by their numbers (--predict both)",
    "world_model_weight": "leave it out: turns and observations weigh by their numbers (--predict both)",
    "filter_low_reward": "use --min_return X",
    "max_trajectories": "leave it out: all records that are named are learnt from",
    **dict.fromkeys(
        (*(f"{part}_{what}" for part in ("actor", "ref", "critic", "reward") for what in _PLACES),),
        "leave it out: all agents share one base, and accelerate launch says where (docs/scale.md)",
    ),
    # Dr. MAS
    "history_length": "leave it out: an agent sees what --sees says of the transcript",
    "filter_overlong_prompts": "leave it out: a prompt that does not fit is cut in its middle, and counted",
    "return_raw_chat": "leave it out: prompts are chats as they are",
    "use_adaptive_ppo_mini_batch_size": "leave it out: --num_mini_batch divides what was played",
    "project_name": "set WANDB_PROJECT, with --report_to wandb",
    "critic_warmup": "use --warmup_steps N",
    "invalid_action_penalty_coef": "leave it out: an answer that is no answer earns nothing",
    "use_invalid_action_penalty": "leave it out: an answer that is no answer earns nothing",
    "agent_specific_parameters": "give the agent's own values in the team file (docs/team_file.md)",
}


_NOTES = {
    "algorithm_name": "MARFT's APPO is --algorithm marft --level action, its TPPO --level token",
    "gradient_cp_steps": "a number of tokens instead of a number of steps",
    "n_eval_rollout_threads": "evaluations play as many environments as training does",
    "train_batch_size": "of all samples; --num_mini_batch says how many optimizer steps they make",
    "rollout_batch_size": "times --n_samples, which it counts too",
    "prompt_max_len": "of prompt and answer together",
    "max_prompt_length": "of prompt and answer together",
    "group_by_agent_id": "dr_mas",
    "orchestra_type": "solver_verifier; search has a command of its own, mafrt train_search",
    "agent_ids": "the team file names the agents, their models and shared adapters",
    "model_ids": "the team file names the agents, their models and shared adapters",
    "model_sharing": "the team file names the agents, their models and shared adapters",
    "coach_model": "vertex:MODEL or google:MODEL",
    "coach_prompt_template": "a text file; {agent_output} and the like are read",
    "difficulty_range": "arithmetic:train with low, high and steps",
    "extra_eval_tasks": "files, as A,B",
    "model": "a trained one is --load_path runs/NAME",
    "model_path": "a trained one is --load_path runs/NAME",
    "response_filename": "one JSON file of numbers and answers",
    "metrics_filename": "one JSON file of numbers and answers",
    "data_engineer_max_turns": "one number, or three as in --agent_turns 4 6 4",
    "modeler_max_turns": "one number, or three as in --agent_turns 4 6 4",
    "analyst_max_turns": "one number, or three as in --agent_turns 4 6 4",
    "is_reasoning_model": "auto strips <think> text from what other agents see",
    "enable_thinking": "auto strips <think> text from what other agents see",
    "warmup_ratio": "iterations and no share",
    "num_warmup_steps": "iterations",
    "gradient_accumulation_steps": "a number of tokens instead of a number of steps",
}
"""More about flags whose values differ too."""

_OTHER_VALUES = {
    *_NOTES,
    *("rollout_name", "logger"),
    *(
        "use_vllm",
        "vllm_mode",
        "optim",
        "delta",
        "rank",
        "max_length",
        "max_seq_length",
        "num_env_steps",
        "logging_dir",
    ),
    *("per_device_train_batch_size", "batch_size", "ppo_mini_batch_size", "mini_batch_size", "search_url", "max_turns"),
    *("max_attempts", "env_type", "environment", "environments", "precision", "log_dir", "ckpt_path", "agents"),
} - {"model", "model_path"}
"""Names whose values do not mean the same here, or not always."""

SYNONYMS = (*_SAME, *_NONE)
"""All names that `synonym` knows."""


def synonym(name: str, options: Collection[str] = ()) -> Synonym | None:
    """The answer to a flag or setting `name` of another library; None for one that is not known from there.

    `options`: names of a command's settings; of several flags the first that is among them is meant.
    """
    if name in _NONE:
        return Synonym(None, f"{_NONE[name]}.")
    flags = _SAME.get(name)
    if flags is None:
        return None
    flags = (flags,) if isinstance(flags, str) else flags
    flag = next((each for each in flags if each in options), flags[0])
    note = f" ({_NOTES[name]})" if name in _NOTES else ""
    return Synonym(flag, f"here it is --{flag}{note}.", name not in _OTHER_VALUES)
