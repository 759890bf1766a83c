"""Evaluate a team: avg@k and pass@k of sampled answers, and the greedy score, on held-out tasks."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mafrt.config.schema import describe
from mafrt.config.team import LoraSpec, Team
from mafrt.config.train_config import EngineConfig, TrainConfig
from mafrt.core.errors import ConfigError
from mafrt.engines.checks import check_engine, reach_servers
from mafrt.scripts.cli.command import Command, Settings, run_main
from mafrt.scripts.cli.loading import env_arguments, load_base, load_team, resolve, stored_args, team_for, with_sandbox
from mafrt.scripts.cli.processes import only_one
from mafrt.scripts.cli.settings import EvaluateSettings, ModelSettings, SampleSettings, WorkflowSettings
from mafrt.scripts.train_math import math_env, problems

if TYPE_CHECKING:
    from mafrt.environment.base import Env
    from mafrt.models.shared_base import SharedBase
    from mafrt.runners.evaluation import Evaluation
    from mafrt.storage.load_path import Loadable

SEEDS_BY_DEFAULT = 100
NOT_CARRIED_OVER = frozenset({"load_path", "dataset_path", "seed", *describe(EngineConfig)})
"""Settings of a run that mean something else in its evaluation, or belonged to the machines that it ran on."""

COMMAND = Command(
    "evaluate",
    "Evaluate a trained team, or the untrained base, on held-out tasks.",
    (EvaluateSettings, WorkflowSettings, ModelSettings, SampleSettings, EngineConfig),
    epilog="A run brings its own base, team, workflow and sampling; --config and flags win over them.",
)


def evaluate(argv: Sequence[str]) -> int:
    """Read the settings, load what they name, play, print a table."""
    settings = COMMAND.read(argv)
    only_one(COMMAND.name)
    loaded = resolve(settings)
    stored = stored_args(loaded)
    settings = COMMAND.read(argv, below={k: v for k, v in stored.items() if k not in NOT_CARRIED_OVER})
    asked = settings.make(EvaluateSettings)
    config = TrainConfig.of(**vars(settings.make(SampleSettings)), **vars(settings.make(EngineConfig)))
    check_engine(config.engine, {}, {})
    reach_servers(config.engine, settings["model_name_or_path"])
    output = Path(asked.output).expanduser() if asked.output else None
    if output is not None and (output.is_dir() or not output.parent.is_dir()):
        raise ConfigError(f"output {output} cannot be written; give a file name in a folder that exists.")
    env, team = environment(settings, stored)
    print(f"Loading {settings['model_name_or_path']} ...", flush=True)
    base = load_base(settings)
    place(base, team, loaded)

    from mafrt import engines
    from mafrt.rollout.player import Player
    from mafrt.runners import evaluation
    from mafrt.runners.build import make_engine, sampling_of
    from mafrt.runners.checks import check_prompts, check_window

    started = time.perf_counter()
    sampling = {name: sampling_of(config, team, name) for name in team.names}
    window = check_window(config.play.context_window, base.context_window)
    check_prompts(env, team, base.tokenizer, window)
    engine = make_engine(base, config, window)
    try:
        found = evaluation.evaluate(
            env,
            Player(engine, base.tokenizer, team, sampling, window, config.play.reasoning),
            tasks=asked.tasks or env.num_tasks or SEEDS_BY_DEFAULT,
            samples=asked.k,
            greedy=asked.greedy,
            seed=asked.seed,
        )
    finally:
        engines.close(engine)
    assert found is not None  # None means interrupted, and nothing here interrupts it
    print(table(found, time.perf_counter() - started))
    if output is not None:
        write(output, found, settings)
        print(f"numbers in {output}")
    return 0


def environment(settings: Settings, stored: Mapping[str, Any]) -> tuple[Env, Team]:
    """What is played, and by whom; `stored` are the settings of the run, if there is one."""
    of_dsbench = "agent_turns" in stored and settings["env"] in (None, "dsbench")  # a run of train_dsbench
    if of_dsbench and not settings["env_kwargs"]:
        return dsbench_environment(settings, stored)
    if settings["env"] is not None:
        from mafrt.environment.registry import make_env

        team = load_team(settings, "profiles/dsbench.json" if settings["env"] == "dsbench" else None)
        words = settings["env_kwargs"]
        if "env_kwargs" not in settings.given:
            words = (*words, *(stored.get("eval_env_kwargs") or ()))
        kwargs = with_sandbox(settings["env"], env_arguments(words, "env_kwargs"), settings)
        if settings["env"] == "dsbench":
            kwargs.setdefault("split", "eval")
        env = make_env(settings["env"], **kwargs)
        return env, team_for(env, team, settings["n_agents"])

    if "coder_turns" in stored:  # a run of train_code
        return code_environment(settings, stored)
    from mafrt.envs.math import load_tasks

    team = load_team(settings, "profiles/quickstart.json")
    fields = {name: settings[name] for name in ("problem_field", "answer_field")}
    if settings["dataset_path"] is not None:
        tasks: Sequence[Any] = load_tasks(settings["dataset_path"], split="test", **fields)
    else:
        training, held_out = problems({**stored, **fields})
        tasks = held_out or training
    env = math_env(settings, tasks, team)
    return env, env.team


def dsbench_environment(settings: Settings, stored: Mapping[str, Any]) -> tuple[Env, Team]:
    """What a run of train_dsbench held out, or the records that are named instead."""
    from mafrt.scripts.train_dsbench import dsbench_env, read_tasks

    if settings["dataset_path"] is not None:
        stored = {**stored, "dataset_path": settings["dataset_path"], "eval_dataset_path": settings["dataset_path"]}
    training, held_out, notes = read_tasks(stored)
    for note in notes:
        print(note)
    env = dsbench_env({**stored, "sandbox": settings["sandbox"]}, held_out or training)
    return env, team_for(env, load_team(settings, "profiles/dsbench.json"), settings["n_agents"])


def code_environment(settings: Settings, stored: Mapping[str, Any]) -> tuple[Env, Team]:
    """What a run of train_code held out, or the problems that are named instead."""
    from mafrt.envs.code import load_tasks
    from mafrt.scripts.train_code import code_env, problems

    team = load_team(settings, "profiles/code_single.json")
    if settings["dataset_path"] is not None:
        tasks = load_tasks(settings["dataset_path"], split="test")
    else:
        training, held_out = problems(stored)
        tasks = held_out or training
    env = code_env({**stored, "sandbox": settings["sandbox"]}, tasks, team)
    return env, env.team


def place(base: SharedBase, team: Team, loaded: Loadable | None) -> None:
    """Give every agent its adapter: the trained one, or one that changes nothing yet."""
    if loaded is None or not loaded.adapters:
        from mafrt.runners.build import place_adapters

        return place_adapters(base, team, LoraSpec(), 0)
    for name in team.adapters:
        base.load_adapter(name, loaded.adapter(name))
    return None


def table(found: Evaluation, seconds: float) -> str:
    """The numbers for people."""
    from mafrt.storage.report import duration

    tasks = max(len(found.scores), len(found.greedy_scores))
    rows = [(name.removeprefix("eval/"), f"{value:.3f}") for name, value in found.metrics().items()]
    rows += [("tasks", str(tasks)), ("time", duration(seconds))]
    if found.lost:
        rows.append(("episodes lost", str(found.lost)))
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name.ljust(width)}  {value}" for name, value in rows)


def write(path: Path, found: Evaluation, settings: Settings) -> None:
    """Write numbers, scores of every task, and the settings they came from."""
    from mafrt.core.atomic_files import write_atomic

    content = {
        "metrics": found.metrics(),
        "samples": found.samples,
        "lost": found.lost,
        "scores": {task: list(scores) for task, scores in found.scores.items()},
        "greedy_scores": dict(found.greedy_scores),
        "settings": settings.values,
    }
    write_atomic(path, (json.dumps(content, default=list) + "\n").encode())


def main(argv: Sequence[str] | None = None) -> int:
    return run_main(evaluate, argv)


if __name__ == "__main__":
    sys.exit(main())
