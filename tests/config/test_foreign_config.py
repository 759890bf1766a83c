"""Configuration files of MRLM and MARTI, as their pages show them, given to `--config`."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import pytest
import yaml

from mafrt.core.errors import ConfigError
from mafrt.scripts import train
from mafrt.scripts.cli.foreign_config import RULES, TASKS, VALUES, command_of, library_of

SEEDS = Path(__file__).parents[1] / "data" / "seeds"


def read(stored, tmp_path, command=None):
    """The settings of a file, by the command that it describes."""
    path = tmp_path / "theirs.yaml"
    path.write_text(stored if isinstance(stored, str) else yaml.safe_dump(stored))
    name = command or command_of(yaml.safe_load(path.read_text())) or "train_math"
    return import_module(f"mafrt.scripts.{name}").COMMAND.read(["--config", str(path)])


def mrlm(**changes):
    return {"training": {"algorithm": "ppo"}, "eval_envs": [{"env_type": "math"}], **changes}


def test_mrlms_experiment_is_read(tmp_path):
    settings = read((SEEDS / "mrlm.yaml").read_text(), tmp_path)
    wanted = {
        "run_dir": "runs/code_generation_ppo",
        "algorithm": "ppo",
        "iterations": 100,
        "n_rollout_threads": 16,
        "lr": 5e-6,
        "clip_param": 0.2,
        "gamma": 0.99,
        "gae_lambda": 0.95,
        "model_name_or_path": "Qwen/Qwen2.5-1.5B-Instruct",
        "dtype": "bfloat16",
        "coder_turns": 3,
    }
    assert wanted.items() <= settings.values.items() and settings.given == wanted.keys()
    read_as, *others = settings.notes
    assert "configuration of MRLM" in read_as and "docs/coming_from.md" in read_as and "lr=5e-06" in read_as
    assert any("distributed.strategy" in note and "accelerate launch" in note for note in others)


@pytest.mark.parametrize(
    ("name", "command", "wanted"),
    [
        (
            "marti_mathchat",
            "train_math",
            {"workflow": "mathchat", "coach": "vertex:gemini-2.5-flash", "tool_turns": 2},
        ),
        (
            "marti_dsbench",
            "train_dsbench",
            {"coach": "vertex:gemini-2.5-pro", "agent_turns": (4, 4, 4), "stratify": "data_type"},
        ),
    ],
)
def test_martis_files_are_read(name, command, wanted, tmp_path):
    text = (SEEDS / f"{name}.yaml").read_text()
    assert command_of(yaml.safe_load(text)) == command
    settings = read(text, tmp_path)
    assert wanted.items() <= settings.values.items() and "configuration of MARTI" in settings.notes[0]


def test_train_hands_a_file_to_the_command_that_it_describes(tmp_path, monkeypatch):
    seen = []
    for name in ("train_code", "train_dsbench", "train_math", "train_dpo"):
        monkeypatch.setattr(
            import_module(f"mafrt.scripts.{name}"), "main", lambda argv, name=name: seen.append(name) or 0
        )
    (tmp_path / "dpo.yaml").write_text("training: {algorithm: dpo}\ndataset: {path: pairs.jsonl}\n")
    files = [SEEDS / f"{name}.yaml" for name in ("mrlm", "marti_dsbench", "marti_mathchat")] + [tmp_path / "dpo.yaml"]
    for file in files:
        assert train.main(["--config", str(file)]) == 0
    assert seen == ["train_code", "train_dsbench", "train_math", "train_dpo"]


def test_a_file_for_another_command_says_which(tmp_path):
    with pytest.raises(ConfigError, match="fits mafrt train_math"):
        read(mrlm(), tmp_path, "train_code")


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ({"training": {"num_rollouts_per_iteration": 64, "batch_size": 24}}, {"num_mini_batch": 3}),
        ({"training": {"use_bf16": True, "lr_scheduler": "cosine"}}, {"dtype": "bfloat16", "lr_schedule": "cosine"}),
        ({"model": {"generation": {"max_new_tokens": 7, "temperature": 0.7}}}, {"max_new_tokens": 7}),
        ({"model": {"lora_r": 4, "lora_target_modules": ["q_proj"]}}, {"lora_rank": 4, "lora_targets": ("q_proj",)}),
        ({"training": {"algorithm": "grpo"}, "grpo": {"group_size": 4}}, {"n_samples": 4, "algorithm": "grpo"}),
        ({"output": {"save_dir": "out"}, "experiment_name": "e"}, {"run_dir": "out"}),
        ({"eval_envs": [{"env_type": "debate"}]}, {"workflow": "pro_con", "verdict": "rules"}),
        ({"eval_envs": [{"env_type": "tool", "max_turns": 5}]}, {"workflow": "tools", "tool_turns": 5}),
        ({"eval_envs": [{"env_type": "math", "max_turns": 5}]}, {"horizon": 5}),
        ({"eval_envs": [{"env_type": "code", "max_attempts": 2}] * 2}, {"coder_turns": 2}),
        (
            {"eval_envs": [{"env_type": "custom", "custom_class": "a.b.Game", "custom_kwargs": {"n": 1}}]},
            {"env": "a.b:Game", "env_kwargs": ('{"n": 1}',)},
        ),
        (
            {"eval_envs": [{"env_type": "code", "remote": True, "server_address": "h:50051"}]},
            {"env": "grpc://h:50051/code"},
        ),
    ],
)
def test_keys_of_mrlm(changes, wanted, tmp_path):
    assert wanted.items() <= read(mrlm(**changes), tmp_path).values.items()


@pytest.mark.parametrize(
    ("agent", "wanted"),
    [
        ({"rollout_batch_size": 32, "n_samples_per_prompt": 2, "train_batch_size": 16}, (64, 2, 4)),
        ({"rollout_batch_size": 16, "train_batch_size": 16}, (16, 1, 1)),
    ],
)
def test_marti_counts_prompts_and_samples(agent, wanted, tmp_path):
    settings = read({"default_agent": agent}, tmp_path)
    assert (settings["n_rollout_threads"], settings["n_samples"], settings["num_mini_batch"]) == wanted


def test_more_keys_of_marti(tmp_path):
    stored = {
        "workflow_func_path": "a/mathchat_workflow.py",
        "workflow_args": {"coach_model": "gemini-2.5-pro", "reward_outcome_weight": 0.0, "reward_process_weight": 1.0},
        "agents": [{"agent_verifier": {"is_tuning": False}}, {"agent_problem_solver": {"is_tuning": True}}],
        "tools_config": {"tools": {"code_interpreter": {"base_url": "http://h:8080/run_code", "timeout": 30}}},
        "prompt_data": "json@./data/MATH",
        "extra_eval_tasks": ["aime", "amc"],
        "extra_eval_dir": "bench",
        "default_agent": {"prompt_max_len": 24, "generate_max_len": 4, "critic_learning_rate": 1e-3, "save_steps": -1}
        | {"advantage_estimator": "reinforce_plus_plus"},
        "use_wandb": "SECRET",
    }
    settings = read(stored, tmp_path)
    wanted = {
        "coach": "google:gemini-2.5-pro",
        "outcome_weight": 0.0,
        "process_weight": 1.0,
        "freeze": ("verifier",),
        "sandbox": "fusion:http://h:8080",
        "dataset_path": "./data/MATH",
        "eval_dataset_path": "bench/aime.json,bench/amc.json",
        "context_window": 28,
        "report_to": "wandb",
        "algorithm": "reinforce_pp",
        "save_interval": 10,
    }
    assert wanted.items() <= settings.values.items()
    stored["workflow_args"]["coach_model"] = "rules"  # a name of ours is no model of a provider
    assert read(stored, tmp_path).values["coach"] == "rules"
    assert not any("SECRET" in note for note in settings.notes)
    assert any("critic_lr" in note and "no such setting" in note for note in settings.notes)


@pytest.mark.parametrize(
    ("stored", "match"),
    [
        (mrlm(training={"learnig_rate": 1}), "training.learnig_rate.*learning_rate"),
        (mrlm(eval_envs=[{"env_type": "math"}, {"env_type": "code"}]), r"--env math,code .*coming_from\.md"),
        (mrlm(eval_envs=[{"env_type": "math", "max_turns": n} for n in (1, 2)]), "2 environments"),
        (mrlm(eval_envs=[{"env_type": "math"}, {"env_type": "math", "server_address": "h:1"}]), "2 environments"),
        (mrlm(eval_envs=[{"env_type": "debate"}, {"env_type": "custom", "custom_class": "a.B"}]), "debate, custom"),
        (mrlm(eval_envs=[{"env_type": "chess"}]), "eval_envs holds 'chess'; known are code"),
        (mrlm(eval_envs=[{"env_type": "math", "max_turn": 3}]), "'max_turn'; did you mean 'max_turns'"),
        ({"workflow_func_path": "x/moa.py"}, "'moa'.*docs/workflows.md"),
        (mrlm(training={"algorithm": "sac"}), "no algorithm 'sac'"),
        (mrlm(training={"lr_scheduler": "step"}), "lr_schedule in .* is 'step'"),
        ({"training": {"algorithm": "dpo"}, "dataset": {"name": "Anthropic/hh-rlhf"}}, "names no file"),
    ],
)
def test_what_has_no_meaning_is_one_sentence(stored, match, tmp_path):
    with pytest.raises(ConfigError, match=match) as caught:
        read(stored, tmp_path)
    assert "theirs.yaml" in str(caught.value)


MARTI = {"workflow_func_path": "x/dsbench_workflow.py", "default_agent": {"generate_max_len": 10}}


@pytest.mark.parametrize(
    ("stored", "match"),
    [
        (mrlm(eval_envs=[{"env_type": []}]), "eval_envs holds"),
        (mrlm(eval_envs=[{"env_type": "x" * 5000}]), "eval_envs holds"),
        (mrlm(eval_envs=[{"env_type": "math", True: 1}]), "eval_envs: .*'True'"),
        (mrlm(eval_envs=[{"env_type": "custom", "custom_class": "a.B", "custom_kwargs": [1]}]), "eval_envs is list"),
        (mrlm(model={"torch_dtype": ["bf16"]}), "torch_dtype is list"),
        (mrlm(ppo={"batch_size": 0, "episodes_per_iteration": 4}), "batch_size is int 0"),
        (mrlm(ppo={"batch_size": 4, "episodes_per_iteration": "many"}), "batch_size is int 4"),
        (mrlm(sft={"mode": {"a": 1}}), "sft.mode is dict"),
        ({**MARTI, "rollout_batch_size": "x"}, "rollout_batch_size is str"),
        ({**MARTI, "rollout_batch_size": float("inf")}, "rollout_batch_size is float inf"),
        ({**MARTI, "prompt_max_len": [1]}, "prompt_max_len is list"),
        ({**MARTI, "extra_eval_tasks": 3}, "extra_eval_tasks is int"),
        ({**MARTI, "coach_model": ["gemini"]}, "coach_model is list"),
        ({**MARTI, "k" * 5000: 1}, "kkk"),
        ({**MARTI, "workflow_func_path": "y" * 5000}, "the workflow is"),
    ],
)
def test_a_value_that_no_rule_can_read_is_one_sentence(stored, match, tmp_path):
    with pytest.raises(ConfigError, match=match) as caught:
        read(stored, tmp_path, None if "training" in stored else "train_dsbench")
    assert len(str(caught.value)) < 1000


def test_one_environment_needs_no_list(tmp_path):
    env = {"env_type": "math", "max_turns": 3}
    assert read(mrlm(eval_envs=env), tmp_path).values == read(mrlm(eval_envs=[env]), tmp_path).values


def test_files_of_ours_are_none_of_theirs():
    for path in (SEEDS.parents[2] / "configs").rglob("*.yaml"):
        stored = yaml.safe_load(path.read_text())
        assert not isinstance(stored, dict) or library_of(stored) is None, path


def test_rules_name_settings_that_exist():
    known = {
        name
        for command in ("train_math", "train_code", "train_sft", "train_dpo", "train_dsbench", "train")
        for name in import_module(f"mafrt.scripts.{command}").COMMAND.settings()
    }
    named = {setting for setting, _ in VALUES.values()}
    named |= {name for task in TASKS.values() for name in (*task.settings, *task.flags.values())}
    assert named <= known and not VALUES.keys() & RULES.keys()
