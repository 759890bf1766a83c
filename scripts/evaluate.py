"""Evaluate a team: avg@k and pass@k of sampled answers, and the greedy score, on held-out tasks."""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mafrt import engines
from mafrt.config.agent import LoraSpec
from mafrt.config.schema import describe
from mafrt.config.team import Team
from mafrt.config.train_config import EngineConfig, TrainConfig
from mafrt.core.atomic_files import write_atomic
from mafrt.core.errors import ConfigError, MafrtError
from mafrt.core.progress import reporting
from mafrt.core.reading import is_file_writable, is_writable
from mafrt.engines.checks import check_engine, reach_servers
from mafrt.environment.registry import make_env, profile_of, takes
from mafrt.environment.session import session_of
from mafrt.environment.workers import guarded
from mafrt.envs.math import load_tasks
from mafrt.envs.math.build import evaluation_env, load_sets, several
from mafrt.envs.mixed import MixedTasks, is_mixture, named_sets
from mafrt.envs.workflows.config import FieldSettings, WorkflowSettings
from mafrt.envs.workflows.registry import team_file
from mafrt.rollout.player import Player
from mafrt.rollout.thought_notes import note_thoughts
from mafrt.runners import evaluation
from mafrt.runners import evaluation_summary as summary
from mafrt.runners.checks import check_budget, check_prompts, check_window
from mafrt.runners.evaluation import EvaluationPlan
from mafrt.runners.identity import describe_run, refuse_changes
from mafrt.runners.judge import decoder
from mafrt.runners.limits import check_limits
from mafrt.runners.progress import Terminal
from mafrt.scripts.baselines import build as baselines
from mafrt.scripts.cli.command import Command, Settings
from mafrt.scripts.cli.dependent_flags import refuse_ineffective
from mafrt.scripts.cli.loading import (
    check_models,
    env_arguments,
    load_base,
    load_team,
    refuse_idle_limits,
    resolve_played,
    stored_args,
    team_for,
    with_places,
)
from mafrt.scripts.cli.processes import only_one
from mafrt.scripts.cli.recorded_run import rebuild, recorded_settings, run_of
from mafrt.scripts.cli.run_main import run_main
from mafrt.scripts.cli.settings import BaselineSettings, EvaluateSettings, ModelSettings, RecordSettings, SampleSettings
from mafrt.storage.report import duration
from mafrt.storage.run_record import RECORD, RunRecord, load_record
from mafrt.storage.transcript_files import FOLDER, file_name
from mafrt.storage.transcripts import TranscriptWriter, wanted

if TYPE_CHECKING:
    from mafrt.environment.base import Env
    from mafrt.models.several_bases import Bases
    from mafrt.rollout.player import Player
    from mafrt.runners.evaluation import Evaluation, EvaluationPlan
    from mafrt.scripts.cli.recorded_run import PreparedRun
    from mafrt.storage.load_path import LoadSource

SEEDS_BY_DEFAULT = 100
NOT_CARRIED_OVER = frozenset({"load_path", "dataset_path", "seed", *describe(EngineConfig)})
"""Settings of a run that mean something else in its evaluation, or belonged to the machines that it ran on."""

COMMAND = Command(
    "evaluate",
    "Evaluate a trained team, or the untrained base, on held-out tasks.",
    (
        EvaluateSettings,
        BaselineSettings,
        RecordSettings,
        FieldSettings,
        WorkflowSettings,
        ModelSettings,
        SampleSettings,
        EngineConfig,
    ),
    epilog="A run brings its own base, team, workflow and sampling; --config and flags win over them.",
)


def evaluate(argv: Sequence[str]) -> int:
    """Read the settings, load the named files, play, print a table."""
    settings, loaded = _read(argv)
    asked, recording = settings.make(EvaluateSettings), settings.make(RecordSettings)
    config = TrainConfig.of(**vars(settings.make(SampleSettings)), **vars(settings.make(EngineConfig)))
    check_engine(config.engine, {}, {})
    check_budget(config)
    # Asked before the model is loaded, so that a wrong address is an error within seconds.
    reach_servers(config.engine, settings["model_name_or_path"])
    # Checked before anything is played: an evaluation of an hour must not end at a file that exists.
    if "train_limit" in settings.flags:
        raise ConfigError("train_limit chooses tasks of a training; to play fewer tasks here, give --tasks N.")
    output = _output_file(asked)
    folder = _record_folder(recording.record_dir, overwrite=asked.overwrite)
    env, team = environment(settings, loaded)
    refuse_idle_limits(settings, env)
    casts = role_swaps(team) if asked.swap else {}
    against = baselines.plan(settings, loaded, env, team)
    env = guarded(env, settings["env_timeout_s"])  # workers are forked before the model's threads begin
    models = check_models(settings, team)
    check_limits(config, team, models, tokens_given="max_new_tokens" in settings.given)
    print(f"Loading {', '.join(dict.fromkeys(models.values()))} ...", flush=True)
    base = load_base(settings, team)
    place(base, team, loaded)

    started = time.perf_counter()
    plan = EvaluationPlan(asked.tasks or env.num_tasks or SEEDS_BY_DEFAULT, asked.k, asked.greedy, asked.seed)
    player = _player(base, env, team, config)
    # Progress goes to stderr, so that the numbers on stdout can be piped.
    terminal = Terminal(stream=sys.stderr)
    try:
        with reporting(terminal.stage):
            evaluated = _played(env, player, plan)
            swapped = {name: _played(env, player.with_adapters(cast), plan) for name, cast in casts.items()}
            rows = [] if against is None else against.measure(env, player, base, evaluated, plan)
    finally:
        terminal.close()
        engines.close(player.engine)
    print(table(evaluated, swapped, time.perf_counter() - started))
    if rows:
        print(f"\n{baselines.table(rows, asked.k)}")
    if output is not None:
        write(output, evaluated, swapped, settings, team, rows)
        print(f"numbers, prompts and answers in {output}")
    if folder is not None:
        _record(folder, recording, base, team, evaluated, 0 if loaded is None else loaded.step)
    return 0


def _read(argv: Sequence[str]) -> tuple[Settings, LoadSource | None]:
    """The settings, above those of the evaluated run, and the run or the adapters."""
    # Read twice: the first pass finds the run, whose settings lie below the flags in the second.
    settings = COMMAND.read(argv)
    only_one(COMMAND.name)
    loaded = resolve_played(settings)
    stored, record = stored_args(loaded)
    below = {name: value for name, value in stored.items() if name not in NOT_CARRIED_OVER}
    return COMMAND.read(argv, below=below, record=record), loaded


def _output_file(asked: EvaluateSettings) -> Path | None:
    """The file of `--output`. Raises ConfigError before anything is played if it cannot be written."""
    if not asked.output:
        return None
    output = Path(asked.output).expanduser()
    if why := is_file_writable(output):
        raise ConfigError(f"output {output} cannot be written ({why}); give a file name in a folder that exists.")
    if output.exists() and not asked.overwrite:
        raise ConfigError(f"output {output} exists; give another name, or replace it with --overwrite.")
    return output


def _player(base: Bases, env: Env, team: Team, config: TrainConfig) -> Player:
    """The player of the team, with the engine that the settings ask for; the prompts are checked first."""
    from mafrt.runners.build import make_engine, sampling_of, voices_of

    sampling = {name: sampling_of(config, team, name) for name in team.names}
    play = config.play
    voices = voices_of(base, team, play.context_window)
    note_thoughts([voice.tokenizer for voice in voices.values()], play.reasoning, play.thinking_budget)
    check_prompts(env, team, voices)
    window = check_window(play.context_window, base.main.context_window)
    engine = make_engine(base, config)
    shared = (engine, base.main.tokenizer, team, sampling, window, play.reasoning)
    return Player(*shared, keep_thoughts=play.keep_thoughts, voices=voices)


def _played(env: Env, player: Player, plan: EvaluationPlan) -> Evaluation:
    evaluated = evaluation.evaluate(env, player, plan, keep=lambda _: True)
    assert evaluated is not None  # None means interrupted, and nothing here interrupts it
    return evaluated


def _record(
    folder: Path, recording: RecordSettings, base: Bases, team: Team, evaluated: Evaluation, iteration: int
) -> None:
    """Write the conversations that `recording` asks for."""
    share, most = recording.transcript_share, recording.transcript_max_mib
    decoders = {name: decoder(base.of_agent(name)) for name in team.names}
    writer = TranscriptWriter(folder / FOLDER, team, decoder(base.main), share=share, max_mib=most, decoders=decoders)
    episodes = [episode for episode in evaluated.episodes if wanted(episode.group, share)]
    earlier = set((folder / FOLDER).glob("*"))
    writer.write("evaluation", iteration, episodes)
    if writer.failed:
        raise MafrtError(f"the conversations were not written to {folder}; make room, and evaluate again.")
    for entry in earlier - {folder / FOLDER / file_name("evaluation", iteration)}:
        shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
    print(f"conversations in {folder}; mafrt show {folder} lists them")


def _record_folder(named: str | None, *, overwrite: bool) -> Path | None:
    """The folder for the conversations, made; earlier ones may be replaced. Raises ConfigError if it cannot be used."""
    if named is None:
        return None
    folder = Path(named).expanduser()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"record_dir {folder} cannot be made ({error.strerror}); give another folder.") from None
    if why := is_writable(folder):
        raise ConfigError(f"record_dir {folder} cannot be written ({why}); give another folder.")
    if (folder / RECORD).exists():
        raise ConfigError(f"record_dir {folder} is a run, which records its own evaluations; give another folder.")
    # Conversations of two evaluations in one folder could not be told apart.
    if any((folder / FOLDER).glob("*")) and not overwrite:
        raise ConfigError(f"record_dir {folder} holds conversations; give another, or replace them: --overwrite.")
    return folder


def role_swaps(team: Team) -> dict[str, dict[str, str]]:
    """Every pair of agents with different adapters -> agent -> adapter with these two swapped.

    Raises:
        ConfigError: there is no such pair, or the two sit on different bases.
    """
    adapter_of = {agent.name: agent.adapter for agent in team.agents}
    pairs = [(a, b) for a, b in combinations(team.names, 2) if adapter_of[a] != adapter_of[b]]
    if not pairs:
        raise ConfigError("swap needs two agents with different adapters; leave --swap out.")
    for a, b in pairs:
        # An adapter's matrices have the shapes of its own base.
        if team.agent(a).model != team.agent(b).model:
            raise ConfigError(f"swap: {a} and {b} sit on different bases, so their adapters cannot be swapped.")
    return {f"{a} <-> {b}": adapter_of | {a: adapter_of[b], b: adapter_of[a]} for a, b in pairs}


def environment(settings: Settings, loaded: LoadSource | None) -> tuple[Env, Team]:
    """The environment to play and its team: those of the run, those that are named, or the shipped math problems.

    Raises:
        ConfigError: the run's environment cannot be built again, or something changed since the run was started.
    """
    run = run_of(loaded)
    named = "env" in settings.flags
    if run is not None and not named:
        if "profile_path" in settings.flags:
            load_team(settings)  # refuses a file that is not there, for which a run's own team could stand in
        # The test split, whatever the run chose its weights by.
        prepared = rebuild(run, _changed(settings), split="test")
        recorded = recorded_settings(run, load_record(run))
        data = {name: settings["dataset_path"] or recorded.get(name) for name in ("dataset_path", "eval_dataset_path")}
        refuse_ineffective(settings.flags & describe(FieldSettings).keys(), {**settings.values, **data})
        for note in prepared.notes if settings["dataset_path"] is None else ():
            print(note)
        env = prepared.eval_env or prepared.env
        refuse_changes(loaded, _now(prepared, run, settings), accept=settings["accept_changes"])
        return env, prepared.team
    if settings["env"] is not None:
        return _named_environment(settings, settings["env"])
    team = load_team(settings, team_file(settings["workflow"]) or "profiles/quickstart_math.json")
    source = settings["dataset_path"]
    # The shipped records have fields of their own, so fields that are named belong to the user's files.
    fields = {name: settings[name] for name in ("problem_field", "answer_field")} if source is not None else {}
    tasks = load_sets(source, "test", fields) if source is not None else load_tasks(split="test")
    env = evaluation_env({**settings.values, "eval_dataset_path": source}, tasks, team)
    return env, team_for(env, team, settings["n_agents"])


def _named_environment(settings: Settings, name: str) -> tuple[Env, Team]:
    """The environment of `--env`, on held-out tasks, with the data and the workflow that are named beside it.

    Raises:
        ConfigError: a flag that this environment does not take.
    """
    if is_mixture(name):
        raise ConfigError(f"{name} is a mixture; play one environment at a time, or a run of it by --load_path.")
    team = load_team(settings, profile_of(name))
    kwargs = with_places(name, env_arguments(settings["env_kwargs"], "env_kwargs"), settings)
    for option in ("dataset_path", *describe(FieldSettings), *describe(WorkflowSettings)):
        if option in settings.given and settings[option] is not None:
            if not takes(name, option):
                raise ConfigError(f"The environment {name} takes no {option}; leave --{option} out.")
            kwargs.setdefault(option, settings[option])
    if team is not None and takes(name, "team"):
        kwargs.setdefault("team", team)

    def build(more: Mapping[str, Any]) -> Env:
        given = {**kwargs, **more}
        env = make_env(name, **given)
        held_out = {**env.held_out, **given}
        return make_env(name, **held_out) if held_out != given else env

    source = kwargs.get("dataset_path")
    if source is None or not several(source):
        env = build({})
    else:
        sets = {each: build({"dataset_path": path}) for each, (path, _) in named_sets(source).items()}
        env = session_of(MixedTasks(sets))
    return env, team_for(env, team, settings["n_agents"])


def _changed(settings: Settings) -> dict[str, Any]:
    """Settings given here that go before the run's own where its environment is built again."""
    names_here = {*describe(FieldSettings), *describe(WorkflowSettings)}
    names = {*names_here, "sandbox", "env_python", "env_kwargs", "profile_path", "n_agents"} & settings.flags
    changed = {name: settings[name] for name in names}
    if "env_kwargs" in changed:
        # Arguments that are given now are for what is played now, and must not be overlaid by the run's.
        changed["eval_env_kwargs"] = ()
    if settings["dataset_path"] is not None:
        changed |= {"dataset_path": settings["dataset_path"], "eval_dataset_path": settings["dataset_path"]}
    return changed


def _now(prepared: PreparedRun, run: Path, settings: Settings) -> RunRecord:
    """The record of the run as it would be made now, less the data, team and settings that were named here."""
    args = recorded_settings(run, load_record(run))
    if settings["dataset_path"] is not None:
        args |= {"dataset_path": None, "eval_dataset_path": None}
    now = describe_run(prepared.team, args, env=prepared.env)
    changed = _changed(settings)
    if "profile_path" in changed:
        now = replace(now, team=load_record(run).team)
    return replace(now, environment=None, eval_environment=None) if changed else now


def place(base: Bases, team: Team, loaded: LoadSource | None) -> None:
    """Give every agent its adapter: the trained one, or one that changes nothing yet."""
    if loaded is None or not loaded.adapters:
        from mafrt.runners.build import place_adapters

        return place_adapters(base, team, LoraSpec(), 0)
    for name in team.adapters:
        base.load_adapter(name, loaded.adapter(name))
    return None


def table(evaluation: Evaluation, swapped: Mapping[str, Evaluation], seconds: float) -> str:
    """The numbers for people, with 95% intervals over tasks."""
    tasks = max(len(evaluation.scores), len(evaluation.greedy_scores))
    rows = [(name, str(number)) for name, number in summary.numbers(evaluation).items()]
    if (most := summary.majority(evaluation.episodes)) is not None and evaluation.samples > 1:
        rows.append((f"majority@{evaluation.samples}", f"{most.number}  ties {most.ties:.3f}"))
    rows += [(f"measure/{name}", f"{value:.3f}") for name, value in sorted(evaluation.measures.items())]
    for name, other in swapped.items():
        rows += [(f"{name} {kind}", str(number)) for kind, number in summary.numbers(other).items() if "@" in kind]
        rows += [(f"{name} greedy", str(summary.numbers(other)["greedy"]))] if not evaluation.samples else []
    rows += [("tasks", str(tasks)), ("time", duration(seconds))]
    if evaluation.lost:
        rows.append(("episodes lost", str(evaluation.lost)))
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name.ljust(width)}  {value}" for name, value in rows)


def write(
    path: Path,
    evaluation: Evaluation,
    swapped: Mapping[str, Evaluation],
    settings: Settings,
    team: Team,
    baseline_rows: Sequence[baselines.BaselineRow] = (),
) -> None:
    """Write numbers with intervals, scores of every task, every prompt and answer, and the settings."""
    most = summary.majority(evaluation.episodes)
    intervals = {name: number.bounds for name, number in summary.numbers(evaluation).items()}
    content = {
        "metrics": evaluation.metrics()
        | {f"eval/{name}": n.value for name, n in summary.numbers(evaluation).items() if name.startswith("agent/")}
        | ({f"eval/majority@{evaluation.samples}": most.number.value, "eval/majority_ties": most.ties} if most else {}),
        "intervals": intervals | ({f"majority@{evaluation.samples}": most.number.bounds} if most else {}),
        "samples": evaluation.samples,
        "lost": evaluation.lost,
        "scores": {task: list(scores) for task, scores in evaluation.scores.items()},
        "greedy_scores": dict(evaluation.greedy_scores),
        "swapped": {name: other.metrics() for name, other in swapped.items()},
        "baselines": [each.values() for each in baseline_rows],
        "settings": settings.values,
        "episodes": summary.episode_lines(evaluation.episodes, {agent.name: agent.prompt for agent in team.agents}),
    }
    # At once or not at all, so that a program that waits for the file never reads a half.
    write_atomic(path, (json.dumps(content, default=list) + "\n").encode())


main = partial(run_main, evaluate)

if __name__ == "__main__":
    sys.exit(main())
