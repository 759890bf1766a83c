"""The commands of `mafrt` and what each does, in the order of its help."""

from __future__ import annotations

GROUPS = {
    "Every day": {
        "train": "train a team on any environment",
        "evaluate": "evaluate a trained team, or the untrained base",
        "report": "make a report of runs: one HTML file with curves and conversations",
        "show": "print a recorded episode in the terminal",
        "chat": "talk to a trained team in the terminal",
        "export": "export a trained team: PEFT folders, role prompts, model cards",
        "info": "print versions, installed extras, memory of a training",
    },
    "Training by task": {
        "train_math": "train a team to solve math problems",
        "train_tasks": "train a team on tasks of your own, graded by a function of your own",
        "train_code": "train a team to write programs that pass tests",
        "train_dsbench": "train a team to solve tabular modelling tasks with code",
        "train_search": "train a team to answer questions by search",
        "train_sft": "fine-tune a team on answers to imitate, from files or recorded episodes",
        "train_dpo": "tune a team to preferences, from files or recorded episodes",
    },
    "Data and environments": {
        "check_env": "check that an environment keeps its contract",
        "collect": "collect good recorded episodes as chat JSONL for fine-tuning",
        "prepare_data": "prepare DAPO-Math, NQ or HotpotQA from local files",
        "get_base": "fetch a base model that has a name, such as smollm2",
    },
    "Servers": {
        "serve": "serve an environment to trainers elsewhere",
        "serve_team": "serve a trained team behind an OpenAI-compatible address",
        "serve_vllm": "start vLLM servers for a team, on which training samples",
        "serve_tinker": "serve a base behind the Tinker API, an adapter per training client",
        "serve_retriever": "serve a corpus for search",
    },
    "Other": {
        "bench": "run a benchmark (in a checkout)",
        "completion": "print the completion script of bash, zsh or fish",
    },
}
COMMANDS = {name: what for group in GROUPS.values() for name, what in group.items()}
"""Each is the module of that name in `mafrt.scripts`, with a `main(argv) -> exit code`."""
