"""The recipes for real models: their settings fit, their teams play, their prompts fit the windows of the family."""

from __future__ import annotations

import json
import re
from importlib import import_module
from pathlib import Path

import pytest
import yaml
from helpers_models import tiny_tokenizer

from mafrt.config.setting_synonyms import synonym
from mafrt.environment.session import Session
from mafrt.envs.search import retrieval
from mafrt.models.load_bases import models_of
from mafrt.rollout.prompts import encode_prompt
from mafrt.runners.algorithm import resolve_rule
from mafrt.runners.epochs import with_epochs
from mafrt.runners.limits import check_limits
from mafrt.scripts.cli.settings import train_config

RECIPES = sorted(
    path for path in (Path(__file__).parents[2] / "configs" / "recipes").glob("*.yaml") if "team" not in path.name
)
OTHERS = """
reward_funcs reward_weights scale_rewards loss_type importance_sampling_level epsilon epsilon_high delta beta
num_iterations steps_per_generation generation_batch_size num_generations num_generations_eval max_completion_length
min_p mask_truncated_completions sync_ref_model ref_model_mixup_alpha use_vllm vllm_mode vllm_server_base_url
vllm_server_host vllm_server_port vllm_max_model_length vllm_enable_sleep_mode vllm_gpu_memory_utilization
vllm_importance_sampling_cap max_tool_calling_iterations log_completions disable_dropout router_aux_loss_coef
learning_rate warmup_ratio save_strategy eval_strategy logging_steps bf16 tf32 torch_compile use_liger_kernel
use_cpu data_seed hub_model_id run_name use_dora r load_best_model_at_end overwrite_output_dir target_modules
target_parameters attn_implementation dataset_config adv_estimator filter_groups rollout_n rollout_is grad_clip
ppo_mini_batch_size offload_optimizer param_offload reward_model remote_rm_url init_kl_coef seq_len max_async_level
rollouts_per_example ckpt_interval env_id judge_model judge_prompt fast_inference vf_coef use_popart
use_recurrent_policy share_policy world_size local_rank
"""
"""settings of TRL, PEFT, verl, OpenRLHF, prime-rl, Unsloth and MAPPO, as they are typed"""

MARFT = [
    "seed",
    "env_name",
    "algorithm_name",
    "experiment_name",
    "dataset_name",
    "dataset_path",
    "flag",
    "num_mini_batch",
    "ppo_epoch",
    "lr",
    "critic_lr",
    "gradient_cp_steps",
    "n_rollout_threads",
    "episode_length",
    "horizon",
    "n_agents",
    "profile_path",
    "load_path",
    "agent_iteration_interval",
    "warmup_steps",
    "normalization_mode",
]


def command_of(recipe: Path) -> str:
    return "train_dsbench" if "dsbench" in recipe.name else "train_search" if "search" in recipe.name else "train_math"


def data(folder: Path, name: str) -> list[str]:
    """Flags that put small files in the place of the recipe's own."""
    if name == "train_dsbench":
        return ["--sandbox", "degraded"]
    records = [
        {"question": f"What is {n} + 1?", "answer": str(n + 1), "golden_answers": [str(n + 1)]} for n in range(520)
    ]
    path = folder / "data.jsonl"
    path.write_text("\n".join(map(json.dumps, records)))
    return ["--dataset_path", str(path), "--eval_dataset_path", str(path), "--sandbox", "degraded"]


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_is_ready_to_run(recipe, tmp_path, monkeypatch):
    monkeypatch.setattr(retrieval.HttpRetriever, "check", lambda self: None)  # no retriever runs here
    name = command_of(recipe)
    script = import_module(f"mafrt.scripts.{name}")
    settings = script.COMMAND.read(["--config", str(recipe), *data(tmp_path, name)])
    assert yaml.safe_load(recipe.read_text()).keys() <= settings.values.keys()
    config = train_config(settings)
    prepared = script.prepare(settings)
    config = with_epochs(config, prepared.env)
    assert config.run.iterations > 1
    models = models_of(prepared.team, settings["model_name_or_path"])
    check_limits(config, prepared.team, models, tokens_given=True)
    resolve_rule(config, prepared.team)
    session = Session(prepared.env.unwrapped.spawn())
    seen = session.reset(seed=0)[0]
    room = config.play.context_window - config.play.max_new_tokens
    for _ in range(3):
        for agent, observation in seen.items():
            assert prepared.team.agent(agent).prompt
            assert 0 < len(encode_prompt(tiny_tokenizer(), prepared.team.agent(agent).prompt, observation)) < room * 4
        if recipe.stem == "dr_mas_search":
            break
        result = session.step(dict.fromkeys(seen, "Verdict: reject \\boxed{1}"))
        if result.terminated or result.truncated:
            break
        seen = result.observations


def test_every_flag_of_marfts_launch_script_is_taken_or_answered():
    from mafrt.scripts.train_math import COMMAND

    known = COMMAND.read(["--algorithm", "marft"]).values
    unanswered = [flag for flag in MARFT if flag not in known and synonym(flag) is None]
    assert not unanswered


def test_what_other_trainers_call_their_main_settings_is_taken_or_answered():
    from mafrt.scripts.train_math import COMMAND

    known = COMMAND.read(["--algorithm", "grpo"]).values
    assert not [flag for flag in OTHERS.split() if flag not in known and synonym(flag) is None]


@pytest.mark.slow
def test_every_flag_of_the_page_exists():
    from mafrt.algorithms import ALGORITHMS
    from mafrt.config.algorithm import AlgorithmSettings
    from mafrt.scripts.main import COMMANDS

    known = {"config"}
    scripts = "train train_math train_tasks train_search train_dsbench train_sft train_dpo evaluate collect serve"
    for name in sorted(COMMANDS.keys() & set(scripts.split())):
        known |= set(import_module(f"mafrt.scripts.{name}").COMMAND.settings(None))
    known |= {"corpus_path", "memory", "program"}
    known |= {flag for name in ALGORITHMS for flag in AlgorithmSettings.flags(name)}
    page = (Path(__file__).parents[2] / "docs" / "coming_from.md").read_text()
    ours = [line.rsplit(" | ", 1)[-1] for line in page.splitlines() if line.startswith("|")]
    assert {flag for cell in ours for flag in re.findall(r"--(\w+)", cell)} <= known
