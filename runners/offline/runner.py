"""The offline training loop: draw -> forward and backward -> step -> log -> checkpoint.

One iteration is one optimizer step of every adapter that has records left. Each adapter passes over its own records
`epochs` times in an order of its own, which depends on the seed and its name alone; so the records of
other adapters do not affect it. The records of a step are a pure function of the iteration, and a resumed run equals
an uninterrupted one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import torch

from mafrt.config.team import Team
from mafrt.config.train_config import TrainConfig
from mafrt.core import atomic_files
from mafrt.core.errors import CheckpointError, DataError
from mafrt.core.signals import StopRequest
from mafrt.models.shared_base import SharedBase
from mafrt.runners.build import place_adapters
from mafrt.runners.identity import FROM_PYTHON, Provenance, describe_run, refuse_changes
from mafrt.runners.loop import IterationResult, Loop, Progress, RunSummary
from mafrt.runners.offline.dataset import Record, RecordPasses, batch_at, digest, steps_per_epoch
from mafrt.runners.offline.sft import RecordLearner, RecordRule
from mafrt.runners.run_state import check_base
from mafrt.sandbox import tiers_in_use
from mafrt.storage import checkpoint
from mafrt.storage.load_path import LoadSource
from mafrt.storage.run_dir import RunDir
from mafrt.training.lr_schedule import make_lr_schedule

ADAPTERS = "adapters"
"""In the run directory, once the run is complete: the adapter folders, initial weights for later runs."""


class Offline:
    """Trains the adapters of `team` on `base` with fixed records.

    Args:
        data: the records, and how they are passed over; those of frozen agents are left out.
        rule: the loss.
        team: its adapters learn, and are added to `base` if missing. An agent's own `lr` counts.
        base: the shared base.
        config: of `learn` the optimizer's settings, `micro_batch_tokens` and `gradient_checkpointing`, of `team` the
            adapters' shape and `freeze`, of `run` the seed and the checkpoints; all else is about play.
        run_dir: output folder; None: nothing is written.
        provenance: the run or the adapters to go on from, and the settings to record; by default a new run.

    Raises:
        ConfigError: settings that contradict each other or the team.
        DataError: no learning agent has a record.
        CheckpointError: `provenance.resume` does not fit.
    """

    def __init__(
        self,
        data: RecordPasses,
        rule: RecordRule,
        team: Team,
        base: SharedBase,
        config: TrainConfig,
        *,
        run_dir: str | Path | None = None,
        provenance: Provenance = FROM_PYTHON,
    ) -> None:
        self.rule, self.team, self.base, self.config = rule, team, base, config
        self.records = _by_learner(data.records, team, config.team.freeze)
        self.batch_size, self.held_out = data.batch_size, list(data.held_out)
        self.run_dir = Path(run_dir) if run_dir else None
        self.resume, self.args = provenance.resume, provenance.settings(config)
        place_adapters(base, team, config.team.lora, config.run.seed, self.resume)
        self.record = describe_run(team, self.args, command=provenance.command, base=base)
        # Checked before the optimizers are made: a refused run must cost nothing.
        refuse_changes(self.resume, self.record, accept=provenance.accept_changes)
        base.gradient_checkpointing(config.learn.gradient_checkpointing)
        self.steps = {
            name: data.epochs * steps_per_epoch(len(records), data.batch_size) for name, records in self.records.items()
        }
        self.iterations = max(self.steps.values())
        lr_schedule = make_lr_schedule(config.learn, self.iterations)
        self.learner = RecordLearner(base, team, config.learn, rule, config.run.seed, lr_schedule)
        self.iteration = 0
        self.before: dict[str, float] | None = None
        if self.resume is not None:
            self._restore(self.resume)

    def run(self, progress: Callable[[Progress], None] | None = None) -> RunSummary:
        """Train until the last iteration, or until SIGTERM or Ctrl-C; both leave a checkpoint.

        `progress` is called after every iteration.
        """
        with StopRequest() as stop:
            everything = [*self._all(), *self.held_out]
            # Computed once: a resumed run takes the references from its checkpoint.
            if any(record.reference is None for record in everything):
                self.learner.refer(everything)
            loop = Loop(self, self.config.run, stop, progress=progress)
            return loop.run(self.run_dir, self.args, self.resume, self.record)

    # ---------------------------------------------------------------------------- the `Training` protocol

    metrics: Collection[str] = ()

    def evaluation_due(self) -> bool:
        return bool(self.held_out) and self.iteration in (0, self.iterations)

    def evaluate(self) -> dict[str, float]:
        """Measure the held-out records with the adapters as they are."""
        measured = self.learner.measure(self.held_out)
        return {f"eval/{name}": value for name, value in measured.items() if name != "nonfinite_terms"}

    def collect(self) -> list[Record]:
        """The records of the next iteration."""
        return self.batch(self.iteration)

    def learn(self, batch: list[Record]) -> IterationResult:
        """One optimizer step of every adapter that has records left."""
        metrics = self.learner.step(batch, self.iteration)
        metrics |= {f"trained/{name}": float(self.iteration < self.steps.get(name, 0)) for name in self.team.adapters}
        self.iteration += 1
        return IterationResult(dict(sorted(metrics.items())))

    def sample(self) -> str | None:
        return None

    def findings(self) -> list[str]:
        return []

    def finish(self, disk: RunDir | None) -> None:
        """Save the adapters as initial weights for later runs, if training is complete."""
        if disk is not None and self.iteration == self.iterations:
            for name in self.team.adapters:
                self.base.save_adapter(name, disk.path / ADAPTERS / name)

    def batch(self, iteration: int) -> list[Record]:
        """The records of one iteration: some of every adapter that has not finished its last pass."""
        seed = self.config.run.seed
        return [
            records[index]
            for name, records in self.records.items()
            if iteration < self.steps[name]
            for index in batch_at(iteration, len(records), self.batch_size, seed, name)
        ]

    def _all(self) -> list[Record]:
        return [record for records in self.records.values() for record in records]

    def _must_match(self) -> dict[str, Any]:
        """Values that a resumed run must share with its checkpoint."""
        return {
            "rule": self.rule.name,
            "seed": self.config.run.seed,
            "batch_size": self.batch_size,
            "records": digest(self._all()),
            "held-out records": digest(self.held_out),
            **self.rule.settings(),
        }

    def save(self, disk: RunDir | None) -> None:
        """Write a checkpoint."""
        if disk is None:
            return
        run, base = self.config.run, self.base
        references = [record.reference for record in [*self._all(), *self.held_out] if record.reference is not None]
        tensors = {
            "adapters": self.learner.state(),
            "reference": torch.tensor(references, dtype=torch.float64) if references else None,
        }
        state = {
            "iteration": self.iteration,
            "before": self.before,
            "versions": {name: base.versions[name] for name in self.team.adapters},
            "must_match": self._must_match(),
        }
        writers: dict[str, checkpoint.Writer] = {
            name: lambda folder, name=name: base.save_adapter(name, folder)  # type: ignore[misc]
            for name in self.team.adapters
        }
        writers["state/optimizers.pt"] = lambda path: atomic_files.save_tensors(path, tensors)
        writers["state/run.json"] = lambda path: atomic_files.save_json(path, state)
        meta = {"base": base.fingerprint(), "team": list(self.team.names), "rule": self.rule.name}
        checkpoint.save(
            disk.checkpoints,
            self.iteration,
            writers,
            meta=meta,
            sandbox_tier=tiers_in_use(),
            keep_last=run.keep_last,
            keep_every=run.keep_every,
        )

    def _restore(self, loaded: LoadSource) -> None:
        """Bring everything to where `loaded` left it; a folder of adapters gives initial weights only."""
        if loaded.kind == "run" and loaded.checkpoint is None:
            return
        for name in self.team.adapters:
            self.base.load_adapter(name, loaded.adapter(name))
        if loaded.checkpoint is None:
            return
        check_base(loaded, self.base)
        stored = atomic_files.load_json(loaded.state("run.json"))
        was = stored.get("must_match") if isinstance(stored, dict) else None
        for name, value in self._must_match().items():
            if was is None or was.get(name) != value:
                kind = "another kind of run" if was is None else f"other {name} ({was.get(name)}, here {value})"
                raise CheckpointError(
                    f"{loaded.path} was written with {kind}, so it cannot be resumed from there; resume with its own "
                    "settings and records, or give a folder that holds its adapter folders alone to start from them."
                )
        tensors = atomic_files.load_tensors(loaded.state("optimizers.pt"))
        try:
            self.learner.load_state(tensors["adapters"])
            self.iteration, self.before = stored["iteration"], stored["before"]
            for name in self.team.adapters:
                self.base.versions[name] = stored["versions"][name]
            if tensors["reference"] is not None:
                for record, values in zip([*self._all(), *self.held_out], tensors["reference"].tolist(), strict=True):
                    record.reference = tuple(values)
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"The state in {loaded.path} is damaged ({type(error).__name__}: {error})."
            ) from error


def _by_learner(records: Sequence[Record], team: Team, freeze: Sequence[str]) -> dict[str, list[Record]]:
    """Adapter -> its records, without those of frozen agents."""
    frozen = team.frozen(freeze)
    by_adapter: dict[str, list[Record]] = {name: [] for name in team.adapters}
    for record in records:
        if record.agent not in frozen:
            by_adapter[team.agent(record.agent).adapter].append(record)
    by_adapter = {name: part for name, part in by_adapter.items() if part}
    if not by_adapter:
        others = f" ({len(records)} are of frozen agents)" if records else ""
        raise DataError(f"there is no record to learn from{others}; give records of an agent that may learn")
    return by_adapter
