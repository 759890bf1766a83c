"""State of a run between iterations: save to and restore from a checkpoint."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from mafrt.config.team import Team
from mafrt.config.train_config import RunConfig
from mafrt.core import atomic_files, rng_state
from mafrt.core.errors import CheckpointError
from mafrt.core.flat_tensors import on_cpu
from mafrt.sandbox import tiers_in_use
from mafrt.storage import checkpoint
from mafrt.storage.load_path import LoadSource
from mafrt.storage.run_dir import RunDir

if TYPE_CHECKING:
    from mafrt.models.several_bases import Bases
    from mafrt.runners.build import AnyCritic

log = logging.getLogger(__name__)


class OptimizerHolder(Protocol):
    """The part of a learner that checkpoints and the held-out guard use."""

    slowdown: float
    """factor on all learning rates"""

    def forget(self, adapter: str) -> None:
        """Reset the moments of an adapter's optimizer."""

    def state(self) -> dict[str, Any]:
        """Optimizer state by adapter."""

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Take over the result of `state`."""


@dataclass(frozen=True)
class DataStart:
    """Where a run began with its present tasks: a run that goes on with others begins a pass of its own over them."""

    tasks: str | None = None
    """digest of the tasks (`identity.training_data`); None: not known"""
    drawn: int = 0
    """tasks drawn before"""
    iteration: int = 0
    """iterations completed before"""


def data_start(loaded: LoadSource | None, tasks: str) -> DataStart:
    """Where `tasks` began, or begin now because `loaded` was trained on others; a checkpoint may not say on which."""
    if loaded is None or loaded.checkpoint is None:
        return DataStart(tasks)
    stored = atomic_files.load_json(loaded.state("run.json"))
    try:
        before = DataStart(**stored.get("data", {}))
        if before.tasks in (None, tasks):
            return replace(before, tasks=tasks)
        log.warning(
            "the tasks have changed: a pass over the new ones begins with iteration %d", stored["iteration"] + 1
        )
        return DataStart(tasks, stored["drawn"], stored["iteration"])
    except (KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{loaded.path}: its state is damaged ({type(error).__name__}: {error})") from error


@dataclass
class RunState:
    """Everything besides weights and optimizers that the next iteration depends on, or the final table shows."""

    iteration: int = 0
    """iterations completed"""
    drawn: int = 0
    """tasks drawn: the position in the data"""
    tokens: int = 0
    """tokens sampled in all iterations"""
    before: dict[str, float] | None = None
    """metrics of the evaluation before training"""
    kl_coef: float | None = None
    """weight of the KL penalty that a target has steered to; None before the first iteration, or without a target"""
    data: DataStart = DataStart()
    """the tasks that are trained on, and where the run began with them"""
    memory: dict[str, float] = field(default_factory=dict)
    """what the rule remembers from batch to batch (`CreditContext.memory`)"""


def digest(base: Bases, adapters: Iterable[str]) -> str:
    """16 hex digits of all weights of these adapters: equal in all processes of a run."""
    digested = hashlib.sha256()
    for name in adapters:
        for weights in on_cpu(base.adapter_parameters(name)):
            digested.update(weights.contiguous().numpy().tobytes())
    return digested.hexdigest()[:16]


def save(
    disk: RunDir | None,
    state: RunState,
    base: Bases,
    team: Team,
    critic: AnyCritic,
    learner: OptimizerHolder,
    run: RunConfig,
    extra: Mapping[str, Any] | None = None,
) -> None:
    """Write checkpoint `state.iteration`. Raises CheckpointError, with earlier ones untouched, if it cannot.

    All processes call it, since optimizer state may be spread over them; the one that has `disk` writes. `extra` are
    further files of tensors among the state, by name.
    """
    tensors = {"optimizers.pt": {"adapters": learner.state(), "critic": critic.state()}, **(extra or {})}
    base.processes.lead(lambda: _write(disk, state, base, team, critic, tensors, run) if disk else None)


def _write(
    disk: RunDir,
    state: RunState,
    base: Bases,
    team: Team,
    critic: AnyCritic,
    tensors: Mapping[str, Any],
    run: RunConfig,
) -> None:
    writers: dict[str, checkpoint.Writer] = {
        name: lambda folder, name=name: base.save_adapter(name, folder)  # type: ignore[misc]
        for name in team.adapters
    }
    if critic.present:
        writers["critic.pth"] = critic.save
    for name, content in tensors.items():
        writers[f"state/{name}"] = lambda path, content=content: atomic_files.save_tensors(path, content)  # type: ignore[misc]
    versions = {name: base.versions[name] for name in team.adapters}
    writers["state/run.json"] = lambda path: atomic_files.save_json(
        path, {**asdict(state), "versions": versions, "random": rng_state.random_state()}
    )
    checkpoint.save(
        disk.checkpoints,
        state.iteration,
        writers,
        meta={"base": base.fingerprint(), "team": list(team.names)},
        sandbox_tier=tiers_in_use(),
        keep_last=run.keep_last,
        keep_every=run.keep_every,
    )


def restore(
    loaded: LoadSource, state: RunState, base: Bases, team: Team, critic: AnyCritic, learner: OptimizerHolder
) -> None:
    """Bring everything to where `loaded` left it; a folder of adapters gives initial weights only.

    Raises:
        CheckpointError: an adapter is missing or foreign, or the state does not fit the team.
    """
    if loaded.kind == "run" and loaded.checkpoint is None:
        return
    for name in team.adapters:
        base.load_adapter(name, loaded.adapter(name))
    if loaded.critic is not None and critic.present:
        _load_critic(loaded, loaded.critic, critic)
    if loaded.checkpoint is None:
        return
    check_base(loaded, base)
    stored = atomic_files.load_json(loaded.state("run.json"))
    optimizers = atomic_files.load_tensors(loaded.state("optimizers.pt"))
    try:
        learner.load_state(optimizers["adapters"])
        critic.load_state(optimizers["critic"])
        state.iteration, state.drawn, state.tokens = stored["iteration"], stored["drawn"], stored["tokens"]
        state.before, state.kl_coef = stored["before"], stored["kl_coef"]
        # In place, since the rule holds it; a checkpoint of a rule that remembers nothing may have none.
        state.memory.update({name: float(value) for name, value in stored.get("memory", {}).items()})
        for name in ("iteration", "drawn", "tokens"):
            value = getattr(state, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise ValueError(f"{name} is {value!r}")
        for name in team.adapters:
            # Loading counted as a change; a resumed run must number its versions as the whole one does.
            base.versions[name] = stored["versions"][name]
        # Last: nothing may draw between here and the first iteration.
        rng_state.restore_random_state(stored["random"])
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"The state in {loaded.path} does not fit this team ({type(error).__name__}: {error}); resume with the "
            "team and settings it was saved with, or give a folder with the adapters alone to start from them."
        ) from error


def _load_critic(loaded: LoadSource, path: Path, critic: AnyCritic) -> None:
    """Take over the critic; one beside foreign adapters that cannot be read is set aside, and a fresh one starts."""
    try:
        critic.load(path)
    except CheckpointError as error:
        if loaded.checkpoint is not None:
            raise
        log.warning("the critic is set aside and a fresh one is trained: %s", error)


def check_base(loaded: LoadSource, base: Bases) -> None:
    """Raise CheckpointError if `loaded` is of another base model."""
    was = (loaded.checkpoint.meta if loaded.checkpoint else {}).get("base")
    if was and was != base.fingerprint():
        raise CheckpointError(
            f"{loaded.path} was trained on another base model (its configuration hashes to {was}, this one to "
            f"{base.fingerprint()}); give the --model_name_or_path it was trained with."
        )
