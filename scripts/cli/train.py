"""The body that all training scripts share: settings in, a run on disk and a table out."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mafrt.config import permission
from mafrt.config.algorithm import AlgorithmSettings
from mafrt.core.distributed import Processes, started
from mafrt.core.errors import ConfigError
from mafrt.core.gpus import unusable_gpu
from mafrt.core.progress import reporting
from mafrt.core.reading import is_writable
from mafrt.core.text import counted
from mafrt.core.threads import ThreadWatch
from mafrt.runners.algorithm import resolve_rule
from mafrt.runners.async_rollout import check_async
from mafrt.runners.checks import check_run, check_sampler
from mafrt.runners.epochs import with_epochs
from mafrt.runners.identity import Provenance, describe_run, refuse_changes
from mafrt.runners.judge import prepare_coach
from mafrt.runners.loop import check_length
from mafrt.runners.micro_batch import free_bytes, micro_batch_tokens
from mafrt.runners.on_policy import OnPolicy
from mafrt.runners.progress import Terminal
from mafrt.scripts.cli.command import Command, Settings
from mafrt.scripts.cli.dependent_flags import of_rule, of_team, refuse_ineffective
from mafrt.scripts.cli.go_on import PAUSED, go_on, interrupted, on_cluster
from mafrt.scripts.cli.loading import (
    check_format,
    check_models,
    load_base,
    models_of,
    refuse_idle_limits,
    resolve,
    stored_args,
)
from mafrt.scripts.cli.processes import ProcessLayout, join
from mafrt.scripts.cli.recorded_run import PreparedRun, command_of
from mafrt.scripts.cli.settings import ScaleSettings, train_config
from mafrt.storage import report
from mafrt.storage.args_file import ARGS
from mafrt.storage.run_dir import check_entries, is_unused, set_aside
from mafrt.storage.run_record import RECORD

if TYPE_CHECKING:
    from mafrt.coach.base import Coach
    from mafrt.config.team import Team
    from mafrt.config.train_config import TrainConfig
    from mafrt.models.several_bases import Bases
    from mafrt.runners.loop import Progress, RunSummary
    from mafrt.storage.load_path import LoadSource

NOT_REPEATED = frozenset(
    {*permission.OF_A_CALL, "accept_changes"} | {name for name in vars(ScaleSettings()) if name.startswith("ray")}
)
"""Settings of location, not of content: `--config args.yaml` repeats the run in a folder of its own."""

SHAPE = (
    "model_name_or_path",
    "profile_path",
    "n_agents",
    "dtype",
    "lora_rank",
    "lora_alpha",
    "lora_targets",
    "adapter_scope",
)
"""Settings that come along with the adapters of another kind of run."""


@dataclass(frozen=True)
class CheckedRun:
    """A run that can begin: everything that needs no model has been checked."""

    settings: Settings
    loaded: LoadSource | None
    prepared: PreparedRun
    config: TrainConfig
    models: Mapping[str, str]
    """adapter -> base"""
    coach: Coach | None


def train(command: Command, argv: Sequence[str], prepare: Callable[[Settings], PreparedRun]) -> int:
    """Read the settings, resume if asked to, train, and print the result. Returns the exit code."""
    settings, loaded = _read(command, argv)
    if not started()[0]:  # told before anything can fail
        print("\n".join(settings.notes), end="\n" if settings.notes else "", flush=True)
    if settings["ray"] is not None:
        from mafrt.scripts.cli.ray_cluster import train_on_ray  # it starts this command on the cluster

        name = re.sub(r"[^A-Za-z0-9_.-]+", "_", (settings.values.get("env") or command.name).rpartition(":")[2])
        return train_on_ray(command, argv, settings, choose_run_dir(settings, loaded, name))
    checked = _check(command, settings, loaded, prepare)
    config, prepared, coach = checked.config, checked.prepared, checked.coach
    placement = join(settings, config)
    processes = placement.processes
    say = print if processes.main else quietly
    # Chosen by one process, since the name holds the time of day.
    run_dir = Path(processes.lead(lambda: str(choose_run_dir(settings, loaded, prepared.name))))
    for note in prepared.notes:
        say(note)
    if coach is not None:
        say(f"Turns are judged by: {coach.name}")
    base = _load(checked, placement, say)

    config, args = _sized(checked, base, processes, say)
    terminal, threads = Terminal(config.run.iterations), ThreadWatch()

    def after_iteration(progress: Progress) -> None:
        terminal.iteration(progress)
        # A number that the user gave is left alone.
        if settings["threads"] is None and (collapse := threads.look()) is not None:
            print(collapse, file=sys.stderr, flush=True)

    runner = OnPolicy(
        prepared.env,
        prepared.team,
        base,
        config,
        eval_env=prepared.eval_env,
        run_dir=run_dir,
        coach=coach,
        provenance=Provenance(loaded, settings["accept_changes"], args, command.name),
    )
    if settings["device"] is None and (why := unusable_gpu()) is not None:
        runner.doctor.note(1, "unused_gpu", f"{why}.")  # in the summary too: a run on the CPU may look fine, but slow
    # Only now, when everything that may be refused has been checked: a mistyped flag must not move a run.
    moves = settings["set_aside"] and not is_same(loaded, run_dir)
    if moves and (aside := processes.lead(lambda: str(set_aside(run_dir) or ""))):
        say(f"The earlier run is now in {aside}.")
    first = " (evaluating first)" if config.run.eval_episodes and not (loaded and loaded.step) else ""
    names = ", ".join(prepared.team.names)
    many = f" with {processes.size} processes" if processes.size > 1 else ""
    length = counted(config.run.iterations, "iterations")
    say(f"Training {names} for {length} in {run_dir}{many}{first} ...", flush=True)
    try:
        try:
            with reporting(terminal.stage if processes.main else None):
                summary = runner.run(after_iteration if processes.main else None)
        finally:
            terminal.close()
            runner.close()
            if coach is not None:
                coach.close()
        processes.close()
        return close(command, summary, prepared.team, config.run.seed, run_dir) if processes.main else 0
    except KeyboardInterrupt as error:
        if processes.main and (code := interrupted(error, command, run_dir)) is not None:
            return code
        raise


def _read(command: Command, argv: Sequence[str]) -> tuple[Settings, LoadSource | None]:
    """The settings, above those of the run that goes on, and that run or the adapters to start from."""
    settings = command.read(argv)
    loaded = resolve(settings)
    stored, record = stored_args(loaded)
    if loaded is not None and loaded.checkpoint is not None and "rule" in loaded.checkpoint.meta:
        print(f"The adapters of {loaded.path}, which learnt without play, are the initial weights.")
        # Its optimizers and position belong to another way of learning.
        loaded = replace(loaded, kind="adapters", checkpoint=None, run=None)
        settings = command.read(argv, below={name: stored[name] for name in SHAPE if name in stored})
    elif loaded is not None:
        _refuse_foreign(stored, command, loaded)
        settings = command.read(argv, below=stored, record=record)
    return settings, loaded


def _check(
    command: Command, settings: Settings, loaded: LoadSource | None, prepare: Callable[[Settings], PreparedRun]
) -> CheckedRun:
    """Refuse before any model is loaded a run that cannot learn, or that is not the one that was begun."""
    config = train_config(settings)
    prepared = prepare(settings)
    env, team = prepared.env, prepared.team
    refuse_idle_limits(settings, env)
    if "epochs" in settings.flags and ("iterations" in settings.flags) == (config.run.epochs > 0):
        raise ConfigError("--epochs and --iterations exclude each other, and --epochs 0 asks for no passes; give one.")
    config = with_epochs(config, env)
    if loaded is not None and loaded.resumes:
        check_length(loaded.step, config.run.iterations)
    check_format(settings)
    models = models_of(settings, team)
    now = describe_run(team, settings.values, command=command.name, env=env, eval_env=prepared.eval_env)
    # Before a model is loaded, and again by the runner, which knows the base.
    refuse_changes(loaded, now, accept=settings["accept_changes"])
    rule = resolve_rule(config, team)
    known = of_team(team, config.team.freeze, config.learn.lr) | of_rule(rule)
    refuse_ineffective(settings.flags, {**settings.values, **known})
    coach = prepare_coach(config, env)
    given = "max_new_tokens" in settings.given
    layout = Processes(*started())
    check_run(env, team, config, rule, coach, models, eval_env=prepared.eval_env, processes=layout, tokens_given=given)
    check_sampler(config, team, settings["model_name_or_path"])
    check_models(settings, team)  # what is wrong with the words is told first: it takes no network and no fork
    return CheckedRun(settings, loaded, prepared, config, models, coach)


def _load(checked: CheckedRun, placement: ProcessLayout, say: Callable[..., None]) -> Bases:
    """The bases of the team, placed on the processes of the run."""
    check_async(checked.config, checked.prepared.team, sharded=placement.shards)
    names = list(dict.fromkeys(checked.models.values()))
    if len(names) > 1 and (placement.shards or placement.zero is not None):
        raise ConfigError("The team sits on several bases, which cannot be sharded; leave FSDP and --deepspeed out.")
    say(f"Loading {', '.join(names)} ...", flush=True)
    return load_base(checked.settings, checked.prepared.team, placement)


def _sized(
    checked: CheckedRun, base: Bases, processes: Processes, say: Callable[..., None]
) -> tuple[TrainConfig, dict[str, Any]]:
    """The settings with micro-batches that fit into the free memory, and the content of args.yaml."""
    settings, config, loaded = checked.settings, checked.config, checked.loaded
    others = AlgorithmSettings.flags(settings["algorithm"]).keys()  # of which only the algorithm's own are recorded
    args = {name: value for name, value in settings.values.items() if name not in NOT_REPEATED | others}
    args |= config.algorithm.flat()
    args |= on_cluster()[1]  # the servers of a cluster end with this process
    if loaded is not None and loaded.resumes:
        args["load_path"] = None  # its history comes along, so that the settings alone describe the run
    if "micro_batch_tokens" in settings.named or processes.size > 1:
        return config, args
    tokens = micro_batch_tokens(base, config, free_bytes(base.main.device))
    if tokens != config.learn.micro_batch_tokens:
        say(f"Micro-batches have {tokens} tokens, which the free memory holds; --micro_batch_tokens chooses.")
    args["micro_batch_tokens"] = tokens  # a run that goes on splits its batches alike
    return replace(config, learn=replace(config.learn, micro_batch_tokens=tokens)), args


def quietly(*_: object, **__: object) -> None:
    """Output of every process but the first."""


def _refuse_foreign(stored: Mapping[str, Any], command: Command, loaded: LoadSource | None) -> None:
    run = loaded.run if loaded else None
    foreign = sorted(stored.keys() - command.settings(stored.get("algorithm")).keys())
    if foreign:
        other = (run and command_of(run)) or "train"
        remedy = f"go on with it by mafrt {other}"
        if other == command.name:  # its own command, so that another version of mafrt has written them
            remedy = f"this version has none of that name, so take them out of its {ARGS}"
        raise ConfigError(
            f"The run {run} has the settings {', '.join(foreign)}, which {command.name} does not know; {remedy}."
        )


def choose_run_dir(settings: Settings, loaded: LoadSource | None, name: str) -> Path:
    """The folder of the run; ConfigError if it holds another one that may not be set aside, or cannot go on."""
    if loaded is not None and loaded.run is not None and is_same(loaded, Path(settings["run_dir"] or loaded.run)):
        check_entries(loaded.run)
    if settings["run_dir"] is None:
        if loaded is not None and loaded.resumes and loaded.run is not None:
            return loaded.run
        # Seconds are in the name, and a number is added where two runs start within one.
        stem = Path("runs") / f"{name}-{datetime.now():%Y-%m-%d-%H%M%S}"
        return next(path for n in range(1, 1000) if not (path := Path(f"{stem}.{n}" if n > 1 else stem)).exists())
    run_dir = Path(settings["run_dir"]).expanduser()
    if (why := is_writable(run_dir)) is not None:
        raise ConfigError(f"run_dir {run_dir} cannot be written ({why}); give another one.")
    if is_same(loaded, run_dir) or not run_dir.exists():
        return run_dir
    if not run_dir.is_dir():
        raise ConfigError(f"run_dir {run_dir} is a file; give a folder that does not exist yet.")
    if not is_unused(run_dir) and not settings["set_aside"]:
        there = [entry.name for entry in run_dir.iterdir()]
        holds = RECORD in there or ARGS in there
        run = f", or go on with the run in it by mafrt {command_of(run_dir) or 'COMMAND'} --load_path {run_dir}"
        raise ConfigError(
            f"run_dir {run_dir} is not empty{'' if holds else ' and holds no run'}; give another one, let --set_aside "
            f"rename it{run if holds else ''}."
        )
    return run_dir


def is_same(loaded: LoadSource | None, run_dir: Path) -> bool:
    """Whether the run in `run_dir` is the one that goes on."""
    run = loaded.run if loaded is not None and loaded.resumes else None
    return run is not None and run_dir.exists() and run_dir.samefile(run)


def close(command: Command, summary: RunSummary, team: Team, seed: int, run_dir: Path) -> int:
    """Write summary.json and print the table, or the command that resumes a stopped run."""
    if summary.stopped_by is not None:
        # A sentence is a reason, one word a signal.
        if " " in summary.stopped_by:  # the coach's reason, and not the name of a signal
            state = "Paused" if summary.paused else "Stopped"
            print(f"{state} after iteration {summary.iterations}: {summary.stopped_by}. Everything is saved.")
        else:
            print(f"Stopped by {summary.stopped_by} after iteration {summary.iterations}; everything is saved.")
        print(f"Go on with: {go_on(command, run_dir)}")
        return PAUSED if summary.paused else 0
    for finding in summary.findings:
        print(f"Diagnosis: {finding}")
    before, after = summary.before or {}, summary.after or {}
    audited = report.audits(run_dir)
    report.write_summary(
        run_dir,
        {
            "before": sampled(before),
            "after": sampled(after),
            "greedy_before": before.get("eval/greedy"),
            "greedy_after": after.get("eval/greedy"),
            "train_seconds": round(summary.seconds, 3),
            "seed": seed,
            "iterations": summary.iterations,
            "findings": list(summary.findings),
            **({"credit_audit": audited} if audited else {}),
        },
    )
    print()
    if audited:
        print(f"{report.audit_table(audited)}\n")
    print(
        report.end_of_run(
            run_dir,
            before,
            after,
            iterations=summary.iterations,
            seconds=summary.seconds,
            checkpoint=run_dir / "checkpoints" / f"step_{summary.iterations:06d}",
            adapters=team.adapters,
            go_on=go_on(command, run_dir),
        )
    )
    return 0


def sampled(metrics: Mapping[str, float]) -> float | None:
    """The mean score of sampled episodes, for any k."""
    return next((value for name, value in metrics.items() if re.fullmatch(r"eval/avg@\d+", name)), None)
