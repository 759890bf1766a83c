"""Flags of other libraries, and the flag of mafrt that does the same.

The names are those of transformers' TrainingArguments, TRL, verl, OpenRLHF and MARFT's launch script.
"""

from __future__ import annotations

from typing import NamedTuple


class Synonym(NamedTuple):
    """Answer to a flag of another library."""

    flag: str | None
    """the flag that does the same; None: there is none"""
    advice: str


_SAME = {
    # transformers and TRL
    "learning_rate": "lr",
    "max_steps": "iterations",
    "num_train_epochs": "epochs",
    "num_iterations": "ppo_epoch",
    "num_ppo_epochs": "ppo_epoch",
    "warmup_ratio": "lr_warmup",
    "num_warmup_steps": "lr_warmup",
    "lr_scheduler_type": "lr_schedule",
    "output_dir": "run_dir",
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
    "num_episodes": "epochs",
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
    "save_dir": "run_dir",
    "log_dir": "run_dir",
    "warmup": "warmup_steps",
}

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
    "config_name": "name the recipe's file by --config; docs/coming_from.md has them",
    "config_path": "name the recipe's file by --config; docs/coming_from.md has them",
    "cuda": "use --device cuda or --device cpu",
    "n_training_threads": "use --threads",
    "hidden_size": "leave it out: the critic is a value head on the base's hidden states",
    "layer_N": "leave it out: the critic is a value head on the base's hidden states",
    "use_centralized_V": "use --algorithm mappo, whose critic reads the whole transcript",
    "adam_offload": "moments of adapters are small; use --optimizer paged_adamw_8bit",
    "use_peft": "every agent has a LoRA adapter; leave it out",
    "bf16": "use --dtype bfloat16",
    "fp16": "use --dtype float16",
    "coder_max_turns": "use --tool_turns N",
    "data_engineer_max_turns": "use --agent_turns N, which is for all agents",
    "modeler_max_turns": "use --agent_turns N, which is for all agents",
    "analyst_max_turns": "use --agent_turns N, which is for all agents",
    "num_gpus": "start several processes with accelerate launch (docs/scale.md)",
    "fsdp": "accelerate launch decides that (docs/scale.md)",
}


_NOTES = {
    "algorithm_name": "MARFT's APPO is --algorithm marft --level action, its TPPO --level token",
    "gradient_cp_steps": "a number of tokens instead of a number of steps",
}
"""More about flags whose values differ too."""

SYNONYMS = (*_SAME, *_NONE)
"""All names that `synonym` knows."""


def synonym(name: str) -> Synonym | None:
    """The answer to a flag or setting `name` of another library; None for one that is not known from there."""
    if name in _NONE:
        return Synonym(None, f"{_NONE[name]}.")
    flag = _SAME.get(name)
    if flag is None:
        return None
    note = f" ({_NOTES[name]})" if name in _NOTES else ""
    return Synonym(flag, f"here it is --{flag}{note}.")
