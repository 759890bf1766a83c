"""The shared body of the offline scripts: settings, reading, training, and the final report."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from mafrt.config.schema import Checked, Count
from mafrt.config.team import Team
from mafrt.config.train_config import AdapterConfig, LearnConfig, RunConfig, TrainConfig
from mafrt.core.errors import ConfigError, DataError
from mafrt.core.text import counted
from mafrt.runners.checks import check_window
from mafrt.runners.identity import Provenance
from mafrt.runners.limits import check_limits
from mafrt.runners.offline import dataset as reading
from mafrt.runners.offline.dataset import RecordPasses, read_answers
from mafrt.runners.offline.next_states import next_states
from mafrt.runners.offline.replay import EPISODES, holds_tokens, read_episodes, recorded_turns
from mafrt.runners.progress import Terminal, offline_words
from mafrt.scripts.cli.command import Command, Settings
from mafrt.scripts.cli.dependent_flags import of_team, refuse_ineffective
from mafrt.scripts.cli.go_on import go_on, interrupted
from mafrt.scripts.cli.loading import check_format, check_models, load_base, load_team, resolve, stored_args
from mafrt.scripts.cli.processes import only_one
from mafrt.scripts.cli.recorded_run import rebuild
from mafrt.scripts.cli.settings import ModelSettings, PlaceSettings
from mafrt.scripts.cli.train import NOT_REPEATED, SHAPE, choose_run_dir, is_same
from mafrt.storage import report
from mafrt.storage.args_file import ARGS, read_args
from mafrt.storage.run_dir import set_aside
from mafrt.storage.run_record import RECORD, RunRecord, load_record

if TYPE_CHECKING:
    from mafrt.environment.base import Env
    from mafrt.models.shared_base import SharedBase
    from mafrt.runners.loop import RunSummary
    from mafrt.runners.offline.dataset import Answer, Record
    from mafrt.runners.offline.replay import Episodes, RecordedTurn
    from mafrt.runners.offline.sft import RecordRule
    from mafrt.storage.load_path import LoadSource


@dataclass(frozen=True)
class OfflineSettings:
    """Training records."""

    records_path: tuple[str, ...] = ()
    """JSONL files of records, or folders of a Dataset's save_to_disk, see docs/dpo_sft.md"""
    episodes_path: tuple[str, ...] = ()
    """run directories with recorded episodes to learn from"""
    return_of: Literal["episode", "agent"] = "episode"
    """a recorded turn's return: the episode's score, or the agent's own rewards from that turn on"""
    eval_records_path: tuple[str, ...] = ()
    """such files of held-out records, measured before and after training"""
    skip_too_long: bool = False
    """leave out records that do not fit into the context window, instead of refusing them"""
    context_window: int | None = None
    """max tokens of prompt and answer together; default: the context length of the base"""


@dataclass(frozen=True)
class PassSettings(Checked):
    """Optimisation."""

    epochs: Count = 1
    """passes over the records"""
    batch_size: Count = 16
    """records of each adapter in an optimizer step"""
    lr: float = LearnConfig.lr
    """learning rate of the adapters"""
    lr_schedule: Literal["constant", "linear", "cosine"] = LearnConfig.lr_schedule
    """learning-rate schedule over the steps of the run: constant, or decaying to 0"""
    lr_warmup: int = LearnConfig.lr_warmup
    """warm-up steps of the learning rate"""
    max_grad_norm: float = LearnConfig.max_grad_norm
    """gradient clipping norm per adapter"""
    weight_decay: float = LearnConfig.weight_decay
    """decoupled weight decay of AdamW"""
    opti_eps: float = LearnConfig.opti_eps
    """epsilon of AdamW"""
    micro_batch_tokens: int = LearnConfig.micro_batch_tokens
    """padded tokens per backward pass; the gradient does not depend on it"""
    gradient_checkpointing: bool = LearnConfig.gradient_checkpointing
    """recompute activations in the backward pass: less memory, about a third more time"""


@dataclass(frozen=True)
class AdapterSettings(AdapterConfig):
    """The adapters."""

    freeze: tuple[str, ...] = ()
    """agents to leave out: their records are not used"""


@dataclass(frozen=True)
class KeepSettings:
    """Seed and checkpoints."""

    seed: int = RunConfig.seed
    """every random choice of the run follows from it"""
    save_interval: int = 100
    """steps between checkpoints; the last step always makes one"""
    keep_last: int = RunConfig.keep_last
    """newest checkpoints that are kept"""
    keep_every: int = RunConfig.keep_every
    """also keep every checkpoint whose step is a multiple of this; 0: none"""


OFFLINE = (OfflineSettings, PassSettings, AdapterSettings, ModelSettings, PlaceSettings, KeepSettings)
TO_CONFIG = (PassSettings, AdapterSettings, KeepSettings)


@dataclass(frozen=True)
class OfflineTask:
    """The rule of an offline command and the records it reads."""

    rule: Callable[[], RecordRule]
    fields: tuple[str, ...]
    """names of the answers in a record of a file"""
    choose: Callable[[Sequence[RecordedTurn]], list[Record]]
    """makes records out of recorded turns"""
    none_chosen: str
    """why it made none, and what helps"""
    turns: bool = True
    """whether recorded turns are learnt"""
    next_states: bool = False
    """whether the observations that follow recorded turns are learnt"""


@dataclass(frozen=True)
class OfflineData:
    """Data read before the model is loaded."""

    team: Team
    answers: list[tuple[Answer, ...]]
    held_out: list[tuple[Answer, ...]]
    runs: list[tuple[Path, Episodes, Env | None, int]]
    """run directory, its episodes, and the environment and seed to replay them with"""


def study(command: Command, argv: Sequence[str], prepare: Callable[[Settings], OfflineTask]) -> int:
    """Read settings and records, resume if asked to, train, and print the result. Returns the exit code."""
    settings = command.read(argv)
    only_one(command.name)
    loaded, stored, record = _start(command, resolve(settings))
    settings = command.read(argv, below=stored, record=record)
    of_training = {name: settings[name] for kind in TO_CONFIG for name in vars(settings.make(kind))}
    passes = {name: of_training.pop(name) for name in ("epochs", "batch_size")}
    config, task = TrainConfig.of(**of_training), prepare(settings)
    for note in settings.notes:
        print(note)
    source = read(settings, task)
    refuse_ineffective(settings.flags, {**settings.values, **of_team(source.team, config.team.freeze, config.learn.lr)})
    check_format(settings)
    models = check_models(settings, source.team)
    check_limits(config, source.team, models, tokens_given=False)
    if len(set(models.values())) > 1:
        raise ConfigError(
            f"The team sits on several bases ({', '.join(dict.fromkeys(models.values()))}), and records are learnt on "
            "one; give the agents of one base at a time in the team file."
        )
    run_dir = choose_run_dir(settings, loaded, rule_name(command))
    args = {name: value for name, value in settings.values.items() if name not in NOT_REPEATED}
    if loaded is not None and loaded.resumes:
        args["load_path"] = None  # its history comes along, so that the settings alone describe the run
    print(f"Loading {settings['model_name_or_path']} ...", flush=True)
    base = load_base(settings, source.team).main
    records, held_out = encode(source, settings, task, base)

    from mafrt.runners.offline.runner import Offline

    terminal = Terminal(words=offline_words)
    runner = Offline(
        RecordPasses(records, **passes, held_out=held_out),
        task.rule(),
        source.team,
        base,
        config,
        run_dir=run_dir,
        provenance=Provenance(loaded, settings["accept_changes"], args, command.name),
    )
    if settings["set_aside"] and not is_same(loaded, run_dir) and (aside := set_aside(run_dir)):
        print(f"The earlier run is now in {aside}.")
    counts = ", ".join(f"{name} {len(own_records)}" for name, own_records in runner.records.items())
    print(f"Learning from records ({counts}) in {counted(runner.iterations, 'steps')}, in {run_dir} ...", flush=True)
    try:
        try:
            summary = runner.run(terminal.iteration)
        finally:
            terminal.close()
        return _close(command, summary, source.team, run_dir)
    except KeyboardInterrupt as error:
        if (code := interrupted(error, command, run_dir)) is not None:
            return code
        raise


def read(settings: Settings, task: OfflineTask) -> OfflineData:
    """All answers and episodes, checked against the team; without a team file, the agents they name form it."""
    data, team = settings.make(OfflineSettings), load_team(settings)
    runs_of_episodes = [Path(path).parent if Path(path).name == EPISODES else Path(path) for path in data.episodes_path]
    if team is None:
        team = _recorded_team(runs_of_episodes)
    if not data.records_path and not data.episodes_path:
        raise ConfigError("There is nothing to learn from; name files by --records_path, or runs by --episodes_path.")
    answers = read_answers(data.records_path, task.fields, team)
    episodes = [read_episodes(path, team) for path in runs_of_episodes]
    if team is None:
        # Without a team file the agents are those that the records name.
        names = [group[0].agent for group in answers]
        names += [
            turn["agent"] for run_episodes in episodes for _, episode in run_episodes for turn in episode["turns"]
        ]
        team = Team.of(list(dict.fromkeys(names)))
        team.check_size(settings["n_agents"])
    held_out = read_answers(data.eval_records_path, task.fields, team)
    runs = []
    for path, run_episodes in zip(runs_of_episodes, episodes, strict=True):
        # With recorded tokens nothing has to be played again to find the prompts.
        exact = not task.next_states and all(holds_tokens(episode) for _, episode in run_episodes)
        runs.append((path, run_episodes, *((None, 0) if exact else _environment(path))))
    return OfflineData(team, answers, held_out, runs)


def _recorded_team(runs: Sequence[Path]) -> Team | None:
    """The team that played the episodes, whose role prompts stand in their prompts; None if no run has a record."""
    teams = [load_record(run).agents() for run in runs if (run / RECORD).is_file()]
    for run, team in zip(runs, teams, strict=False):
        if team != teams[0]:
            raise ConfigError(f"{run} and {runs[0]} were played by different teams; name one by --profile_path.")
    return teams[0] if teams else None


def encode(
    source: OfflineData, settings: Settings, task: OfflineTask, base: SharedBase
) -> tuple[list[Record], list[Record]]:
    """The records to learn from and the held-out ones, as tokens."""
    data, tokenizer = settings.make(OfflineSettings), base.tokenizer
    window = check_window(data.context_window, base.context_window)
    turns: list[RecordedTurn] = []
    states: list[Record] = []
    for path, episodes, env, seed in source.runs:
        if task.turns:
            new, counts = recorded_turns(episodes, source.team, tokenizer, env=env, seed=seed, return_of=data.return_of)
            turns += new
            print(_report_line(path, counts, len(new)), flush=True)
        if task.next_states and env is not None:
            next_records, counts = next_states(episodes, source.team, tokenizer, env, seed)
            states += next_records
            lost = counts["not_reproduced"]
            left = (
                f"; left out, since played again they came out otherwise: {counted(lost, 'episodes')}" if lost else ""
            )
            print(
                f"{path}: {counted(len(next_records), 'next observations')} of "
                f"{counted(counts['episodes'], 'episodes')}{left}.",
                flush=True,
            )
    records = [*reading.encode(source.answers, source.team, tokenizer), *task.choose(turns), *states]
    if turns and not records:
        raise DataError(task.none_chosen)
    if source.runs and not records and data.return_of == "agent":
        raise DataError("the environment pays no agent by itself, so no turn has a return; take --return_of episode")
    fitting = reading.fit(records, window, skip=data.skip_too_long)
    # Said, since a silent cut would look like learning from all of them.
    if len(fitting) < len(records):
        print(f"Left out, since longer than {window} tokens: {counted(len(records) - len(fitting), 'records')}.")
    held_out = reading.encode(source.held_out, source.team, tokenizer)
    return fitting, reading.fit(held_out, window, skip=data.skip_too_long)


def _start(
    command: Command, loaded: LoadSource | None
) -> tuple[LoadSource | None, Mapping[str, Any], RunRecord | None]:
    """The loadable, its settings and its record: all settings of a run of this command, the adapter shape of others."""
    stored, record = stored_args(loaded)
    if loaded is None or not loaded.resumes:
        return loaded, stored, record
    ours = bool(stored) and command.settings().keys() >= stored.keys()
    state = loaded.checkpoint is not None and loaded.checkpoint.meta.get("rule") == rule_name(command)
    if state or (ours and not loaded.adapters):
        return loaded, stored, record
    if not loaded.adapters:
        raise ConfigError(f"{loaded.path} was stopped before its first checkpoint, so there are no adapters to load.")
    print(f"The adapters of {loaded.path}, which is of another kind of run, are the initial weights.")
    weights = replace(loaded, kind="adapters", checkpoint=None, run=loaded.run if ours else None)
    shape = {name: stored[name] for name in SHAPE if name in stored}
    return (weights, stored, record) if ours else (weights, shape, None)


def rule_name(command: Command) -> str:
    """`sft` of `train_sft`: the rule, as checkpoints know it, and the first part of the default run directory."""
    return command.name.removeprefix("train_")


def _environment(run: Path) -> tuple[Env, int]:
    """The environment of a run, built again from its record, and the run's seed."""
    if not (run / ARGS).is_file():
        raise DataError(f"{run} holds no {ARGS}, so its episodes cannot be played again to find their prompts.")
    return rebuild(run).env, int(read_args(run / ARGS).get("seed", 1))


def _report_line(path: Path, counts: Mapping[str, int], turns: int) -> str:
    parts = [f"{path}: {counted(turns, 'turns')} of {counted(counts['episodes'], 'episodes')}"]
    for name, text in (
        ("not_reproduced", "episodes came out otherwise when played again and are left out"),
        ("no_return", "turns have no return and are left out"),
        ("silent", "turns have no tokens and are left out"),
        ("retokenised", "turns were sampled as other tokens of the same text"),
    ):
        if counts[name]:
            parts.append(f"{counts[name]} {text}")
    return "; ".join(parts) + "."


def _close(command: Command, summary: RunSummary, team: Team, run_dir: Path) -> int:
    from mafrt.runners.offline.runner import ADAPTERS

    if summary.stopped_by is not None:
        print(f"Stopped by {summary.stopped_by} after step {summary.iterations}; everything is saved.")
        print(f"Go on with: {go_on(command, run_dir)}")
        return 0
    before, after = summary.before or {}, summary.after or {}
    report.write_summary(run_dir, {"before": before, "after": after, "steps": summary.iterations})
    if after:
        print(f"\nHeld-out records:\n{report.before_after(before, after)}")
    print(f"\n{counted(summary.iterations, 'steps')} in {report.duration(summary.seconds)}")
    rows = [("metrics", run_dir / "metrics.jsonl"), ("go on", go_on(command, run_dir))]
    rows += [(f"adapter {name}", run_dir / ADAPTERS / name) for name in team.adapters]
    rows.append(("play on", f"--load_path {run_dir / ADAPTERS}"))
    width = max(len(name) for name, _ in rows)
    print("\n".join(f"{name.ljust(width)}  {place}" for name, place in rows))
    return 0
