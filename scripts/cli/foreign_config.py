"""Configuration files of MRLM and of MARTI, which are nested, as settings of mafrt: `--config theirs.yaml`.

Those of verl (Dr. MAS, MAVERL) are not read, but answered.

A key is read by a rule of its own (`RULES`), else as the setting of that name here, else as the one that
`setting_synonyms` gives for it where values mean the same. A key that has no such meaning is left out with a sentence,
and an unknown one is an error.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import PurePath
from typing import Any, NamedTuple

from mafrt.coach import WITHOUT_MODEL
from mafrt.config.algorithm import AlgorithmSettings, algorithm_class
from mafrt.config.schema import Setting, describe, unknown
from mafrt.config.setting_synonyms import names_without_effect, synonym, synonyms
from mafrt.core.errors import ConfigError
from mafrt.core.text import brief, shortened
from mafrt.scripts.cli.settings import TRAIN, ModelSettings
from mafrt.scripts.cli.unknown_flags import advice, advice_on_path

PAGE = "docs/coming_from.md"
SECTIONS = {
    "MRLM": ("training", "ppo", "grpo", "dpo", "sft", "model", "eval_envs", "policy_env", "distributed", "output"),
    "verl": ("actor_rollout_ref", "trainer", "data", "algorithm"),
    "MARTI": ("workflow_args", "workflow_func_path", "default_agent", "tools_config"),
}
"""Keys that tell whose file it is."""
VERL = "verl"
MOST_ANSWERS = 16
"""Keys of a file of verl that are answered at a time."""
LABELS_OF_ENVS = frozenset(
    ("env_type", "mode", "reward_clip", "custom_class", "custom_kwargs", "remote", "server_address")
)


class Task(NamedTuple):
    """An environment of MRLM here."""

    command: str
    settings: Mapping[str, Any]
    flags: Mapping[str, str]
    """key there -> setting of the command"""


_SOLVER = {"profile_path": "profiles/math_single.json"}
_ROUNDS = dict.fromkeys(("max_turns", "max_attempts"), "horizon")
_CODER = dict.fromkeys(("max_turns", "max_attempts"), "coder_turns")
_DATA = {"dataset": "dataset_path"}
_DEBATE = {"dataset_path": "arithmetic:train:claims=1", "profile_path": "profiles/pro_con.json", "verdict": "rules"}
TASKS = {
    "code": Task("train_code", {}, {**_DATA, **_CODER, "timeout": "program_timeout"}),
    "math": Task("train_math", _SOLVER, {**_DATA, **_ROUNDS}),
    "debate": Task("train_math", {"workflow": "pro_con", **_DEBATE}, _DATA),
    "tool": Task(
        "train_math",
        {"workflow": "tools", **_SOLVER},
        {**_DATA, **dict.fromkeys(("max_turns", "max_attempts"), "tool_turns")},
    ),
}
WORKFLOWS = {
    "mathchat": ("train_math", {"workflow": "mathchat", "profile_path": "profiles/mathchat.json"}),
    "dsbench": ("train_dsbench", {}),
}
"""Beginning of the file name of a workflow of MARTI -> command and settings."""
ALGORITHMS = {"reinforce_plus_plus": "reinforce_pp", "reinforce++": "reinforce_pp", "gae": "ppo", "group_norm": "grpo"}
OFFLINE = {"dpo": "train_dpo", "sft": "train_sft"}
_FORMATS = {"fp16": "bfloat16", "float16": "bfloat16", "bf16": "bfloat16", "fp32": "float32", "auto": None}
_PREDICTED = {"behavioral_cloning": "turns", "world_model": "observations", "combined": "both"}


def library_of(stored: Mapping[str, Any]) -> str | None:
    """Whose configuration this is; None: one of ours, or of an unknown library."""
    nested = {name for name, value in stored.items() if isinstance(value, (Mapping, list))} | {"workflow_func_path"}
    return next((name for name, keys in SECTIONS.items() if nested & stored.keys() & {*keys}), None)


def command_of(stored: Mapping[str, Any]) -> str | None:
    """The command for the training that the file describes; None: the file leaves it open, or cannot be read."""
    file = _flat(stored)
    try:
        if (path := file.get("workflow_func_path")) is not None:
            return _workflow(path)[0]
        envs = _environments(file)
    except ConfigError:  # raised again by `read_foreign`, with the name of the file
        return None
    if (command := OFFLINE.get(str(file.get("training.algorithm")).lower())) is not None:
        return command
    kinds = {env["env_type"] for env in envs}
    if len(kinds) == 1 and kinds <= TASKS.keys() and not any(env.get("server_address") for env in envs):
        return TASKS[kinds.pop()].command
    return "train" if envs else None


def read_foreign(
    stored: Mapping[str, Any], command: str, known: Mapping[str, Setting], algorithm: str | None, where: str
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The settings of `command`, which has `known`, from a file of another library; and lines for the user: the
    settings that were read, and the keys that were left out, each with the setting to give instead.

    Raises:
        ConfigError: a key that is not known, a value that has no meaning here, or a file for another command.
    """
    try:
        return _read(stored, command, known, algorithm, where)
    except ConfigError as error:
        raise ConfigError(f"In {where}: {error}") from error


def _read(
    stored: Mapping[str, Any], command: str, known: Mapping[str, Setting], algorithm: str | None, where: str
) -> tuple[dict[str, Any], tuple[str, ...]]:
    if library_of(stored) == VERL:
        answers = {path: words for path in _flat(stored) if (words := advice_on_path(path, known))}
        told = "; ".join(f"{path}: {words}" for path, words in list(answers.items())[:MOST_ANSWERS])
        raise ConfigError(f"it is a configuration of verl, which is not read; {told or 'see'} ({PAGE}).")
    fitting = command_of(stored)
    if fitting not in (None, command):
        raise ConfigError(f"it is a configuration of {library_of(stored)} that fits mafrt {fitting}; give it there.")
    file = _flat(stored)
    settings: dict[str, Any] = {}
    left: dict[str, list[str]] = {}
    for path, value in file.items():
        # What is off there is as it would be without the key.
        found = {} if value is None or value == -1 else _meaning(path, value, file, known)
        if found is None:
            meant = advice(path.rpartition(".")[2], known)
            left.setdefault(meant or f"mafrt {command} has no such setting", []).append(path)
        for setting, given in (found or {}).items():
            if setting in known:
                settings[setting] = given
            else:
                left.setdefault(f"mafrt {command} has no such setting", []).append(path)
    for env in _environments(file):
        for name in _unread(env):
            left.setdefault(advice(name, known) or f"mafrt {command} has no such setting", []).append(
                f"eval_envs.{name}"
            )
    _without_unused(settings, left)
    read = " ".join(f"{name}={json.dumps(value)}" for name, value in settings.items())
    notes = [f"{where} is read as a configuration of {library_of(stored)} ({PAGE}): {read}"]
    notes += [
        f"Left out {', '.join(dict.fromkeys(paths))}: {why.removeprefix('leave it out: ')}."
        for why, paths in left.items()
    ]
    if isinstance(lr := settings.get("lr"), (int, float)) and lr < 1e-5 and command not in OFFLINE.values():
        notes.append(f"lr {lr:g} is a rate of full fine-tuning; adapters mostly learn with ten times as much.")
    return settings, tuple(notes)


def _meaning(path: str, value: Any, file: Mapping[str, Any], known: Mapping[str, Setting]) -> dict[str, Any] | None:
    """The settings that a key stands for; None: it is to be left out, with a sentence.

    Raises:
        ConfigError: an unknown key.
    """
    name = path.rpartition(".")[2]
    meant = synonym(name, known)
    rule, translation = RULES.get(path, RULES.get(name)), VALUES.get(path, VALUES.get(name))
    try:
        if rule is not None:
            return rule(value, file)
        if translation is not None:
            given = translation[1](value)
            return {} if given is None else {translation[0]: given}
    except ConfigError:
        raise
    except (TypeError, ValueError, ArithmeticError):  # a text where a number belongs, a list, 0 samples
        raise ConfigError(
            f"{shortened(path)} is {brief(value)}, which cannot be read, or not with what the file says beside it "
            f"({PAGE})."
        ) from None
    if (
        name in names_without_effect()
        or path.startswith("tools_config.")
        or (name in synonyms() and isinstance(value, (bool, list, dict)) and not value)
    ):
        return {}
    if name in known and (meant is None or meant.flag is not None):
        return {name: value}
    if meant is None and name in OURS:  # another command has it
        return None
    if meant is None:
        keys = {*known, *synonyms(), *RULES, *VALUES, *names_without_effect()}
        raise ConfigError(f"{unknown('key', shortened(path), keys)} ({PAGE})")
    return {meant.flag: value} if meant.exact and meant.flag is not None else None


def _without_unused(settings: dict[str, Any], left: dict[str, list[str]]) -> None:
    """Take out settings that the file's algorithm does not have; there a file may hold those of others."""
    if not isinstance(chosen := settings.get("algorithm"), str):
        return
    kind, every = algorithm_class(chosen), AlgorithmSettings.flags(None)
    used = {name for name in kind.settings() if kind.critic_input is not None or not name.startswith("critic_")}
    for name in [name for name in settings if name in every and name not in {*used, "algorithm"}]:
        del settings[name]
        left.setdefault(f"algorithm {chosen} has no such setting", []).append(name)


def _flat(stored: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """`{"training": {"num_epochs": 3}}` as `{"training.num_epochs": 3}`; values of keys with a rule stay whole."""
    flat: dict[str, Any] = {}
    for key, value in stored.items():
        path = f"{prefix}{key}"
        if isinstance(value, Mapping) and not {path, str(key)} & {*RULES, *VALUES, *names_without_effect()}:
            flat |= _flat(value, f"{path}.")
        else:
            flat[path] = value
    return flat


# --------------------------------------------------------------------------------------------------------- the rules


def _last(file: Mapping[str, Any], name: str) -> Any:
    """The value of the key `name` in any section; None: there is none."""
    return next((value for path, value in file.items() if path.rpartition(".")[2] == name), None)


def _workflow(path: Any) -> tuple[str, Mapping[str, Any]]:
    name = PurePath(str(path)).stem
    for start, found in WORKFLOWS.items():
        if name.startswith(start):
            return found
    raise ConfigError(
        f"the workflow is {shortened(repr(name))}, and of MARTI's mathchat and dsbench are here; write it as a "
        f"workflow of your own (docs/workflows.md), and see {PAGE}."
    )


def _environments(file: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The environments of a file of MRLM, which are those that it trains on too; equal ones once."""
    found = file.get("eval_envs") or []
    envs = found if isinstance(found, list) else [found]
    for env in envs:
        kind = env.get("env_type") if isinstance(env, Mapping) else None
        if not isinstance(kind, str) or (kind not in TASKS and not (kind == "custom" and env.get("custom_class"))):
            raise ConfigError(
                f"eval_envs holds {shortened(repr(kind))}; known are {', '.join(TASKS)}, and custom with a "
                f"custom_class ({PAGE})."
            )
    return [env for place, env in enumerate(envs) if env not in envs[:place]]


def _read_environments(value: Any, file: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of the environment of MRLM."""
    envs = _environments(file)
    if not envs:
        return {}
    if len(envs) > 1:
        kinds = list(dict.fromkeys(str(env["env_type"]) for env in envs))
        raise ConfigError(
            f"eval_envs holds {len(envs)} environments ({', '.join(kinds)}), each with a prompt of its own there, and "
            "an agent has one role prompt here; take eval_envs out of the file, write a team file whose prompt fits "
            f"all of them, and type --env {','.join(kinds)} --profile_path TEAM.json ({PAGE}#mrlm)."
        )
    [env] = envs
    kind = env["env_type"]
    if env.get("server_address"):
        return {"env": f"grpc://{env['server_address']}/{kind}"}
    if kind == "custom":
        module, _, name = str(env["custom_class"]).rpartition(".")
        given = dict(env.get("custom_kwargs") or {})
        named = str(env["custom_class"]) if ":" in str(env["custom_class"]) else f"{module}:{name}"
        return {"env": named, **({"env_kwargs": (json.dumps(given),)} if given else {})}
    task = TASKS[kind]
    settings = {task.flags[name]: given for name, given in env.items() if name in task.flags and given is not None}
    return {**task.settings, **settings}


def _unread(env: Mapping[str, Any]) -> list[str]:
    """Keys of an environment that are left out. ConfigError for an unknown one."""
    read = {*LABELS_OF_ENVS, *(TASKS[env["env_type"]].flags if env["env_type"] in TASKS else ())}
    left = [str(name) for name, value in env.items() if value is not None and name not in read]
    for name in left:
        if synonym(name) is None and name != "timeout":
            raise ConfigError(
                f"eval_envs: {unknown('key', shortened(name), {*read, 'problems', 'difficulty_range'})} ({PAGE})"
            )
    return left


def _algorithm(value: Any, file: Mapping[str, Any]) -> dict[str, Any]:
    name = str(value).lower()
    return {} if name in OFFLINE else {"algorithm": ALGORITHMS.get(name, name)}


def _iterations(value: Any, file: Mapping[str, Any]) -> dict[str, Any]:
    """MRLM's epochs are iterations of collecting and learning; those of DPO and SFT are passes over the records."""
    return {"epochs" if str(file.get("training.algorithm")).lower() in OFFLINE else "iterations": value}


def _batch_size(value: Any, file: Mapping[str, Any]) -> dict[str, Any]:
    if str(file.get("training.algorithm")).lower() in OFFLINE:
        return {"batch_size": value}
    played = _last(file, "num_rollouts_per_iteration") or _last(file, "episodes_per_iteration")
    return {"num_mini_batch": max(1, -(-int(played) // int(value)))} if played else {"n_rollout_threads": value}


def _prompts(value: Any, file: Mapping[str, Any]) -> dict[str, Any]:
    """MARTI's `rollout_batch_size` counts prompts, and its `train_batch_size` the samples of an optimizer step."""
    played = int(value) * int(_last(file, "n_samples_per_prompt") or 1)
    step = _last(file, "train_batch_size")
    return {"n_rollout_threads": played, **({"num_mini_batch": max(1, played // int(step))} if step else {})}


def _window(value: Any, file: Mapping[str, Any]) -> dict[str, Any]:
    answer = _last(file, "generate_max_len")
    return {"context_window": int(value) + int(answer)} if answer else {}


def _coach(value: Any, file: Mapping[str, Any]) -> dict[str, Any]:
    if not isinstance(value, str):
        raise TypeError("a coach is a text")
    provider = "vertex" if _last(file, "use_vertex_ai") else "google"
    return {"coach": value if ":" in value or value in WITHOUT_MODEL else f"{provider}:{value}"}


def _agents(value: Any, file: Mapping[str, Any]) -> dict[str, Any]:
    """Who of MARTI's agents does not learn; the agents themselves are those of the workflow."""
    entries = [item.items() for item in value if isinstance(item, Mapping)] if isinstance(value, list) else []
    agents = [(name, entry) for items in entries for name, entry in items if isinstance(entry, Mapping)]
    frozen = [str(name).removeprefix("agent_") for name, entry in agents if entry.get("is_tuning") is False]
    return {"freeze": frozen} if frozen else {}


def _evaluated(value: Any, file: Mapping[str, Any]) -> dict[str, Any]:
    folder = str(_last(file, "extra_eval_dir") or ".")
    names = [value] if isinstance(value, str) else value
    return {"eval_dataset_path": ",".join(str(PurePath(folder) / f"{name}.json") for name in names)}


def _stage_turns(value: Any, file: Mapping[str, Any]) -> dict[str, Any]:
    stages = ("data_engineer", "modeler", "analyst")
    return {"agent_turns": [_last(file, f"{stage}_max_turns") or value for stage in stages]}


def _preferences(value: Any, file: Mapping[str, Any]) -> dict[str, Any]:
    path = value.get("path") if isinstance(value, Mapping) else value
    if not isinstance(path, str):
        raise ConfigError(f"dataset names no file; write the pairs as JSON lines, and give their path ({PAGE}).")
    return {"records_path": path}


OURS = frozenset(name for kind in (*TRAIN, ModelSettings) for name in describe(kind))
Rule = Callable[[Any, Mapping[str, Any]], dict[str, Any]]
RULES: dict[str, Rule] = {
    "training.algorithm": _algorithm,
    "advantage_estimator": _algorithm,
    "num_epochs": _iterations,
    "num_iterations": _iterations,
    "batch_size": _batch_size,
    "rollout_batch_size": _prompts,
    "prompt_max_len": _window,
    "coach_model": _coach,
    "eval_envs": _read_environments,
    "dataset": _preferences,
    "extra_eval_tasks": _evaluated,
    "agents": _agents,
    "data_engineer_max_turns": _stage_turns,
    "workflow_func_path": lambda value, file: dict(_workflow(value)[1]),
    "experiment_name": lambda value, file: (
        {} if _last(file, "output_dir") or _last(file, "save_dir") else {"run_dir": f"runs/{value}"}
    ),
    # Read with another key, or by the command itself.
    **dict.fromkeys(
        (
            "train_batch_size",
            "use_vertex_ai",
            "is_reasoning_model",
            "random_sample_train",
            "stratified_sampling",
            "modeler_max_turns",
            "analyst_max_turns",
        ),
        lambda value, file: {},
    ),
}
"""Key, or section and key -> its settings, from the value and the whole file."""

VALUES: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "prompt_data": ("dataset_path", lambda value: str(value).rpartition("@")[2]),
    "normalize_advantages": ("normalize_advantages", lambda value: "batch" if value else "none"),
    "normalize_reward": ("normalize_advantages", lambda value: "batch" if value else None),
    "torch_dtype": ("dtype", lambda value: _FORMATS.get(value, value)),
    "use_fp16": ("dtype", lambda value: "bfloat16" if value else None),  # their loss is scaled, ours is not
    "fp16": ("dtype", lambda value: "bfloat16" if value else None),
    "use_bf16": ("dtype", lambda value: "bfloat16" if value else None),
    "bf16": ("dtype", lambda value: "bfloat16" if value else None),
    "device": ("device", lambda value: None if value == "auto" else value),
    "lora_rank": ("lora_rank", lambda value: value or None),
    "sft.mode": ("predict", lambda value: _PREDICTED.get(value, value)),
    "mask_truncated_completions": ("mask_cut_turns", bool),
    "use_wandb": ("report_to", lambda value: "wandb" if value else None),
    "use_kl_loss": ("kl_in", lambda value: "loss" if value else "reward"),
    "use_kl_estimator_k3": ("kl_estimator", lambda value: "k3" if value else None),
    "tools_config.tools.code_interpreter.base_url": (
        "sandbox",
        lambda value: f"fusion:{str(value).removesuffix('/run_code')}",
    ),
}
"""Key, or section and key -> the setting, and its value; None: as without the key."""
