"""Every command of docs/coming_from.md is typed: flags exist, settings are accepted until a model would be loaded."""

from __future__ import annotations

import json
import re
import shlex
from importlib import import_module
from pathlib import Path

import pytest

from mafrt.core.errors import ConfigError
from mafrt.scripts.main import COMMANDS, main

PAGE = (Path(__file__).parents[2] / "docs" / "coming_from.md").read_text(encoding="utf-8").partition("## Hardware")[0]
OURS = [line.rsplit(" | ", 1)[-1] for line in PAGE.splitlines() if line.startswith("|")]
TYPED = [code.replace("\\|", "|") for cell in OURS for code in re.findall(r"`([^`]+)`", cell)]
LINES = sorted({code.removeprefix("mafrt ") for code in TYPED if code.startswith("mafrt ")})
FLAGS = sorted({code for code in TYPED if code.startswith("--")})
TRAINED = ("train", "train_math", "train_code", "train_search")
ELSEWHERE = (
    "runs/",
    "openenv:",
    "reasoning_gym:",
    "textarena:",
    "verifiers:",
    "--config",
    "MyGame",
    "MyEnvironment",
    "my_agents",
    "grpc://",
    "humaneval",
    "--env NAME",
    "mcp:",
    "search:",
    "openai:",
)
"""Parts of lines that need a run, a server or a user's own code: only their flags and values are read here."""
VALUES = {"N": "4", "FILE": "x.jsonl", "NAME": "math", "URL": "http://127.0.0.1:9", "K": "4", "DIR": "folder"}
MARFT = (
    "--seed 10 --env_name math_env --algorithm_name APPO --experiment_name experiment_name --dataset_name MATH "
    "--flag train --num_mini_batch 1 --ppo_epoch 1 --lr 1e-6 --critic_lr 5e-5 "
    "--dataset_path ../envs/math/benchmarks/MATH/train.json --model_name_or_path path_to_the_model --n_agents 2 "
    "--agent_iteration_interval 1000 --profile_path profiles/math_dual.json --n_rollout_threads 4 --episode_length 1 "
    "--gradient_cp_steps 2 --context_window 2048 --max_new_tokens 512 --save_interval 1000"
)
"""The flags of marft/scripts/sample_launch_script.sh (github.com/jwliao-ai/MARFT), with its values."""


CUSTOM = """
class CustomEnv:
    n_agents = 1

    def reset(self):
        return "Say yes."

    def step(self, action):
        return "Say yes.", 1.0, True, {}
"""


class Reached(Exception):
    """A model would be loaded now."""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    def stop(*_, **__):
        raise Reached

    monkeypatch.setattr("mafrt.scripts.cli.train.load_base", stop)
    monkeypatch.chdir(tmp_path)
    records = [
        {"question": f"What is {n} + 1?", "answer": str(n + 1), "golden_answers": [str(n + 1)]} for n in range(520)
    ]
    for name in ("x.jsonl", "train.jsonl"):
        (tmp_path / name).write_text("\n".join(map(json.dumps, records)))
    for name in ("train.json", "aime_eval_32.json", "amc_eval_32.json"):
        (tmp_path / name).write_text(json.dumps(records))
    (tmp_path / "my.py").write_text("def score(text, record):\n    return 1.0\n\nf = score\n")
    (tmp_path / "my_env.py").write_text(CUSTOM)
    team = [{"role": "coder", "with_answer": True}, {"role": "tester", "with_answer": True}]
    (tmp_path / "team.yaml").write_text(json.dumps(team))  # JSON is YAML
    return tmp_path


def words_of(line: str) -> list[str]:
    words = shlex.split(line.removesuffix(" ..."))
    return [VALUES.get(word, word) for word in words if word != "..."]


@pytest.mark.parametrize("line", LINES)
def test_a_command_of_the_page_is_accepted(line, folder):
    name, *words = words_of(line)
    assert name in COMMANDS
    if name in TRAINED and words and not any(part in line for part in ELSEWHERE):
        with pytest.raises(Reached):
            main([name, *words, "--run_dir", "out", *(["--sandbox", "degraded"] if "code" in line else [])])
        return
    command = getattr(import_module(f"mafrt.scripts.{name}"), "COMMAND", None)
    if command is not None and not any(word in line for word in ("--config", "--reward")):
        command.read([word for word in words if word != "..."])


@pytest.mark.parametrize("flags", FLAGS)
def test_a_flag_of_the_page_is_read_with_its_value(flags, folder):
    words = words_of(flags)
    scripts = (
        "train_math",
        "train",
        "train_search",
        "train_tasks",
        "train_dsbench",
        "train_dpo",
        "evaluate",
        "train_sft",
    )
    commands = [import_module(f"mafrt.scripts.{name}").COMMAND for name in scripts]
    named = {word.removeprefix("--") for word in words if word.startswith("--")}
    taking = [command for command in commands if named <= command.settings().keys()]
    assert taking, f"no command has all of {flags}"
    if any(not word.startswith("--") for word in words):
        taking[0].read(words)


def test_marfts_launch_line_as_it_is_typed_there(folder, capsys):
    typed = shlex.split(MARFT)
    assert len([word for word in typed if word.startswith("--")]) == 21
    assert main(["train_math", *typed]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and not (folder / "out").exists()
    refused = ["env_name", "algorithm_name", "experiment_name", "dataset_name", "flag", "gradient_cp_steps"]
    assert f"There are no flags {', '.join(f'--{flag}' for flag in refused)}." in said
    for answer in ("--algorithm marft --level action", "here it is --run_dir", "here it is --micro_batch_tokens"):
        assert answer in said
    # With these answers, and a base and data that are there, the line is accepted.
    given = dict(zip(typed[::2], typed[1::2], strict=True))
    for flag in refused:
        del given[f"--{flag}"]
    given |= {"--dataset_path": "train.json", "--model_name_or_path": "teaching-base"}
    given |= {"--algorithm": "marft", "--level": "action", "--run_dir": "out", "--micro_batch_tokens": "4096"}
    with pytest.raises(Reached):
        main(["train_math", *(word for pair in given.items() for word in pair)])


@pytest.mark.parametrize(
    ("name", "here"),
    [
        ("APPO", "marft with level action"),
        ("tppo", "marft with level token"),
        ("Reinforce++", "reinforce_pp"),
        ("group_norm", "grpo"),
    ],
)
def test_names_of_algorithms_elsewhere_are_answered_with_ours(name, here):
    from mafrt.config.train_config import TrainConfig

    with pytest.raises(ConfigError, match=r"docs/coming_from\.md") as caught:
        TrainConfig.of(algorithm=name)
    assert here in str(caught.value)


@pytest.mark.parametrize(
    ("line", "here"),
    [
        ("workflow_args.coach_model=gemini-2.5-flash", ""),
        ("actor_rollout_ref.actor.optim.lr=1e-6", "--lr"),
        ("data.train_batch_size=32", "--n_rollout_threads"),
        ("+trainer.total_epochs=2", "--epochs"),
        ("seed=3", "--seed"),
    ],
)
def test_a_line_of_hydra_is_answered_with_the_flag(line, here, capsys):
    from mafrt.scripts import train_math

    assert train_math.main([line]) == 2
    said = capsys.readouterr().err
    assert "a line of Hydra" in said and "docs/coming_from.md" in said and here in said


def test_a_key_of_an_agent_that_belongs_to_the_run_says_so():
    from mafrt.config.team import Team

    with pytest.raises(ConfigError, match="micro_batch_tokens belongs to the run"):
        Team.parse([{"role": "a", "micro_batch_tokens": 4096}])


def test_the_names_in_other_coaches_prompts_are_read(tmp_path):
    from mafrt.coach.rubric import load_rubric

    path = tmp_path / "coach.txt"
    path.write_text("Judge {agent_output} of {{agent_name}} against {ground_truth_answer}. Sets such as {1, 2} stay.")
    assert (
        load_rubric(str(path), None).text == "Judge {{said}} of {{agent}} against {{truth}}. Sets such as {1, 2} stay."
    )
    path.write_text("Judge it against {ground_truth_answer}.")
    with pytest.raises(ConfigError, match=r"lacks \{\{said\}\}"):
        load_rubric(str(path), None)


def test_a_launch_line_of_hydra_is_answered_whole_without_its_values(capsys):
    words = ["--config-name", "mathchat_with_coach", "default_agent.pretrain=/m", "use_wandb=SECRET"]
    assert main(["train_math", *words, "actor.val_kwargs.temperature=0.6", "env.rollout.n=8"]) == 2
    said = capsys.readouterr().err
    for answer in (
        "configs/recipes/mathchat.yaml",
        "default_agent.pretrain: here it is --model_name_or_path",
        "use_wandb: use --report_to wandb",
        "actor.val_kwargs.temperature: here it is --eval_temperature",
        "env.rollout.n: here it is --n_samples",
    ):
        assert answer in said
    assert "SECRET" not in said and said.count("\n") == 1


EVALUATE_OF_MARFT = (
    "--evaluator_type math --model_path m --data_path d --profile_path p.json --lora_path l --output_dir o "
    "--response_filename r.json --metrics_filename m.json --metrics_timestamp --num_agents 2 --context_window 2048 "
    "--top_k 50 --top_p 0.95 --temperature 0.5 --max_new_tokens 1024 --do_sample"
)
OTHER_LINES = [
    (
        f"evaluate {EVALUATE_OF_MARFT}",
        ["--lora_path: here it is --load_path", "--data_path: here it is --dataset_path", "--num_agents: here it is"],
    ),
    ("evaluate --model M --environment math --num-episodes 20", ["here it is --env", "here it is --tasks"]),
    ("collect --model M --environment code -n 100 -o x", ["mafrt evaluate --env NAME --tasks N --record_dir DIR"]),
    ("collect -n 100 -o x", ["mafrt evaluate --env NAME --tasks N --record_dir DIR"]),
    ("serve --environments code,math --port 5", ["here it is --env"]),
    ("train -c x.yaml -o out", ["use --config FILE", "here it is --run_dir"]),
    ("train --config x.yaml --output out --resume c", ["here it is --run_dir", "here it is --load_path"]),
    ("eval --model M", ["here it is mafrt evaluate"]),
    ("mrlm train", ["write mafrt in its place"]),
    ("run_math.sh eval", ["configs/recipes/dr_mas_math.yaml"]),
]


@pytest.mark.parametrize(("line", "answers"), OTHER_LINES, ids=[line for line, _ in OTHER_LINES])
def test_lines_of_the_other_pages_are_answered(line, answers, folder, capsys):
    (folder / "x.yaml").write_text("iterations: 1\n")
    assert main(shlex.split(line)) == 2
    said = capsys.readouterr().err
    assert all(answer in said for answer in answers) and said.count("\n") == 1


def test_scripts_of_other_libraries_are_answered_with_files_that_exist():
    from mafrt.scripts.main import ELSEWHERE as SCRIPTS

    root = Path(__file__).parents[2]
    for advice in SCRIPTS.values():
        for name in re.findall(r"configs/\S+\.yaml", advice):
            assert (root / name).is_file(), name


OF_MARFT = (  # marft/config.py, without the flags of the launch script
    "cuda cuda_deterministic n_training_threads n_eval_rollout_threads num_env_steps hidden_size use_orthogonal "
    "opti_eps weight_decay use_clipped_value_loss clip_param entropy_coef value_loss_coef use_max_grad_norm "
    "max_grad_norm use_gae gamma gae_lambda use_proper_time_limits use_huber_loss use_value_active_masks "
    "use_policy_active_masks huber_delta use_linear_lr_decay log_interval use_eval eval_interval eval_episodes"
)


def test_every_flag_of_marfts_config_is_taken_or_answered():
    from mafrt.scripts.cli.unknown_flags import advice
    from mafrt.scripts.train_math import COMMAND

    known = COMMAND.settings()
    assert [flag for flag in OF_MARFT.split() if flag not in known and advice(flag, known) is None] == []


def test_a_file_of_verl_is_answered_key_by_key(tmp_path, capsys):
    (tmp_path / "spin.yaml").write_text(
        "actor_rollout_ref: {model_path: m, rollout: {n: 8}}\nalgorithm: {dpo_beta: 0.1}\ntrainer: {total_epochs: 3}\n"
    )
    assert main(["train_math", "--config", str(tmp_path / "spin.yaml")]) == 2
    said = capsys.readouterr().err
    for answer in ("configuration of verl", "rollout.n: here it is --n_samples", "total_epochs: here it is --epochs"):
        assert answer in said
