"""Learning from records without play: the loop, and supervised fine-tuning (SFT), its simplest rule.

    SFT of an adapter: L = - mean over the action tokens of its agents' answers of log pi(token | what stands before)

One iteration is one optimizer step of every adapter that has records left: draw -> forward and backward -> step ->
log -> checkpoint. Each adapter passes over its own records `epochs` times in an order of its own, which depends on
the seed and its name alone; so neither the others' records nor how many they have change what it learns. Which records
a step takes is a pure function of the iteration, and a resumed run equals an uninterrupted one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from mafrt import checkpoint, files
from mafrt.config import LearnConfig, TrainConfig, unknown
from mafrt.errors import CheckpointError, ConfigError, DataError
from mafrt.learner import Learner, Objective
from mafrt.loadable import Loadable
from mafrt.losses import Stats, mean_stats
from mafrt.losses_preference import sft_loss
from mafrt.metrics import MetricsWriter
from mafrt.policy import SharedBase
from mafrt.rundir import RunDir
from mafrt.runners.records import Record, Said, batch_at, digest, steps_per_epoch
from mafrt.runners.setup import place_adapters
from mafrt.runners.state import _same_base
from mafrt.signals import StopRequest
from mafrt.tally import Tally
from mafrt.team import LoraSpec, Team
from mafrt.types import Turn

ADAPTERS = "adapters"
"""In the run directory, once the run is complete: the adapter folders, initial weights for whatever comes next."""


class RecordRule(Protocol):
    """What is learnt from a record."""

    name: str
    turns: int
    """answers in a record"""

    def settings(self) -> dict[str, Any]:
        """What a resumed run has to have in common with the one it goes on with."""
        ...

    def refer(self, records: Sequence[Record], learner: Learner) -> None:
        """Fill `reference` of every record, with the adapters as they are before the first step."""
        ...

    def size(self, records: Sequence[Record]) -> int:
        """The denominator of a mini-batch's loss: what the mean runs over."""
        ...

    def loss(self, records: Sequence[Record], logprobs: Sequence[Tensor], denominator: int) -> tuple[Tensor, Stats]:
        """The loss from the log-probabilities of each answer's tokens, `[n]` each, record after record."""
        ...


class Sft:
    """Mean negative log-likelihood of the action tokens; see `mafrt.losses_preference.sft_loss`."""

    name, turns = "sft", 1

    def settings(self) -> dict[str, Any]:
        return {}

    def refer(self, records: Sequence[Record], learner: Learner) -> None:
        """Nothing to refer to."""

    def size(self, records: Sequence[Record]) -> int:
        return sum(len(record.turns[0].action_ids) for record in records)

    def loss(self, records: Sequence[Record], logprobs: Sequence[Tensor], denominator: int) -> tuple[Tensor, Stats]:
        return sft_loss(torch.cat(list(logprobs)), denominator=denominator)


def examples_of(said: Sequence[Said], min_return: float) -> list[Record]:
    """Recorded turns with a return of at least `min_return`, equal ones (agent, prompt, answer) once.

    (As in rejection-sampling fine-tuning, Yuan 2023, 2308.01825.)
    """
    found: dict[tuple[Any, ...], Record] = {}
    for one in said:
        if one.worth >= min_return:
            key = (one.turn.agent, tuple(one.turn.prompt_ids), tuple(one.turn.action_ids))
            found.setdefault(key, Record((one.turn,), one.where))
    return list(found.values())


class RecordLearner(Learner):
    """The learner's optimizers, micro-batches and safety net under a loss on records.

    A record is known to `Learner` by its longest turn; both answers of a pair lie in the same micro-batch.
    """

    def __init__(self, base: SharedBase, team: Team, learn: LearnConfig, rule: RecordRule, seed: int) -> None:
        rates = dict.fromkeys(team.adapters, learn.lr)
        rates |= {agent.adapter: agent.lr for agent in team.agents if agent.lr is not None}
        tokens = max(1, learn.micro_batch_tokens // rule.turns)
        one_step = replace(learn, ppo_epoch=1, num_mini_batch=1, target_kl=None, micro_batch_tokens=tokens)
        adapter_of = {agent.name: agent.adapter for agent in team.agents}
        super().__init__(base, adapter_of, dict.fromkeys(team.names, 1.0), rates, one_step, Objective(), seed)
        self.rule = rule
        self._records: dict[int, Record] = {}
        self._sizes: dict[str, int] = {}

    def step(self, records: Sequence[Record], iteration: int) -> dict[str, float]:
        """One optimizer step of every adapter that has a record among `records`; all others stay bit-identical.

        Returns the metrics of `measure` as they were before the step, and `grad_norm/ADAPTER`, `skipped_updates`,
        `rollbacks`, `nonfinite_terms`.
        """
        mine = self._by_adapter(records)
        longest = [max(record.turns, key=lambda turn: len(turn.action_ids)) for record in records]
        for turn in longest:
            turn.advantages = [1.0] * len(turn.action_ids)  # in the loss, and every token as much as any other
        self._records = {id(turn): record for turn, record in zip(longest, records, strict=True)}
        self._sizes = {name: self.rule.size(part) for name, part in mine.items()}
        found = self.update(longest, list(dict.fromkeys(record.agent for record in records)), iteration)
        kept = {name: value for name, value in found.items() if not name.startswith(("policy_loss/", "epochs"))}
        return kept | self._metrics(mine)

    @torch.no_grad()
    def measure(self, records: Sequence[Record]) -> dict[str, float]:
        """`loss/ADAPTER` and what else the rule tells, on `records`, with the adapters as they are."""
        self.recompute_logprobs([turn for record in records for turn in record.turns])
        return self._metrics(self._by_adapter(records))

    def _metrics(self, mine: Mapping[str, Sequence[Record]]) -> dict[str, float]:
        """The rule's numbers from `old_logprobs`, which are dropped."""
        metrics: dict[str, float] = {}
        bad = 0.0
        for name, records in mine.items():
            turns = [turn for record in records for turn in record.turns]
            logprobs = [torch.tensor(turn.old_logprobs) for turn in turns]
            loss, stats = self.rule.loss(records, logprobs, self.rule.size(records))
            means = mean_stats([stats])
            bad += means.pop("nonfinite")
            del means["count"]
            metrics |= {f"loss/{name}": float(loss)} | {f"{key}/{name}": value for key, value in means.items()}
            for turn in turns:
                turn.old_logprobs = turn.advantages = None
        return metrics | {"nonfinite_terms": bad}

    def _by_adapter(self, records: Sequence[Record]) -> dict[str, list[Record]]:
        found: dict[str, list[Record]] = {}
        for record in records:
            found.setdefault(self.adapter_of[record.agent], []).append(record)
        return found

    def _backward(self, turns: list[Turn], counts: Any, tally: Tally, weight: Any) -> None:
        """Add the gradient of some records of a mini-batch; note the log-probabilities it was taken at."""
        records = [self._records[id(turn)] for turn in turns]
        rows = [turn for record in records for turn in record.turns]
        batch = self._collate(rows)
        logprobs, _ = self._logprobs(batch, list(self._sizes))
        for turn, values in zip(rows, batch.scatter(logprobs), strict=True):
            turn.old_logprobs = values
        pieces = logprobs.split([len(turn.action_ids) for turn in rows])
        each = dict(zip(map(id, rows), pieces, strict=True))
        total = logprobs.new_zeros(())
        for name, part in self._by_adapter(records).items():
            mine = [each[id(turn)] for record in part for turn in record.turns]
            loss, _ = self.rule.loss(part, mine, self._sizes[name])
            tally.add_loss(name, loss)
            total = total + loss
        total.backward()


@dataclass(frozen=True)
class Progress:
    """What is shown after an iteration."""

    iteration: int
    iterations: int
    metrics: Mapping[str, float]
    seconds: float
    """of the iteration"""


@dataclass(frozen=True)
class Summary:
    """How a run went."""

    before: dict[str, float] | None
    """metrics on the held-out records before training; None if there are none"""
    after: dict[str, float] | None
    """metrics on the held-out records after training; None if there are none or the run was stopped"""
    iterations: int
    """iterations completed"""
    seconds: float
    """of training in this process"""
    run_dir: Path | None
    stopped_by: str | None
    """name of the signal that ended the run early"""


class Offline:
    """Trains the adapters of `team` on `base` with fixed records.

    Args:
        records: what is learnt from; those of frozen agents are left out.
        rule: how.
        team: whose adapters learn, added to `base` if they are not there yet. An agent's own `lr` counts.
        base: the shared base.
        config: of `learn` the optimizer's settings, `micro_batch_tokens` and `gradient_checkpointing`, of `team` the
            adapters' shape and `freeze`, of `run` the seed and the checkpoints; all else is about play.
        epochs: passes over the records.
        batch_size: records of each adapter in an optimizer step.
        held_out: records to measure before and after training.
        run_dir: where everything is written; nothing is written without one.
        resume: what `--load_path` resolved to: a checkpoint to go on from, or initial adapters.
        args: what goes to `args.yaml`; the config by default.
        progress: called after every iteration.

    Raises:
        ConfigError: settings that contradict each other or the team.
        DataError: nobody who may learn has a record.
        CheckpointError: `resume` does not fit.
    """

    def __init__(
        self,
        records: Sequence[Record],
        rule: RecordRule,
        team: Team,
        base: SharedBase,
        config: TrainConfig,
        *,
        epochs: int = 1,
        batch_size: int = 16,
        held_out: Sequence[Record] = (),
        run_dir: str | Path | None = None,
        resume: Loadable | None = None,
        args: Mapping[str, Any] | None = None,
        progress: Callable[[Progress], None] | None = None,
    ) -> None:
        for name, value in (("epochs", epochs), ("batch_size", batch_size)):
            if value < 1:
                raise ConfigError(f"{name} is {value}; choose a value of at least 1.")
        self.rule, self.team, self.base, self.config = rule, team, base, config
        self.epochs, self.batch_size = epochs, batch_size
        self.records = _by_learner(records, team, config.team.freeze)
        self.held_out = list(held_out)
        self.run_dir = Path(run_dir) if run_dir else None
        self.resume = resume
        self.args = dict(args) if args is not None else config.flat()
        self.progress = progress or (lambda _: None)
        spec = LoraSpec(config.team.lora_rank, config.team.lora_alpha, config.team.lora_targets)
        place_adapters(base, team, spec, config.run.seed)
        base.gradient_checkpointing(config.learn.gradient_checkpointing)
        self.learner = RecordLearner(base, team, config.learn, rule, config.run.seed)
        self.steps = {name: epochs * steps_per_epoch(len(mine), batch_size) for name, mine in self.records.items()}
        self.iterations = max(self.steps.values())
        self.iteration = 0
        self.before: dict[str, float] | None = None
        self.saved: int | None = None
        if resume is not None:
            self._restore(resume)

    def run(self) -> Summary:
        """Train until the last iteration, or until SIGTERM or Ctrl-C; both leave a checkpoint."""
        with StopRequest() as stop:
            self.stop = stop
            if self.run_dir is None:
                return self._train(None, None)
            with RunDir.open(self.run_dir, self.args, self.resume) as disk, MetricsWriter(disk) as writer:
                return self._train(disk, writer)

    def _train(self, disk: RunDir | None, writer: MetricsWriter | None) -> Summary:
        run, after, seconds = self.config.run, None, 0.0
        everything = [*self._all(), *self.held_out]
        if any(record.reference is None for record in everything):
            self.rule.refer(everything, self.learner)
        while not self.stop.requested:
            if self.held_out and self.iteration in (0, self.iterations):
                found = self._evaluate(writer)
                self.before, after = (found, after) if self.iteration == 0 else (self.before, found)
            if self.iteration == self.iterations:
                break
            started = time.perf_counter()
            metrics = self.learner.step(self.batch(self.iteration), self.iteration)
            metrics |= {
                f"trained/{name}": float(self.iteration < self.steps.get(name, 0)) for name in self.team.adapters
            }
            self.iteration += 1
            took = time.perf_counter() - started
            seconds += took
            if disk is not None and writer is not None:
                writer.write(self.iteration, dict(sorted(metrics.items())), {"seconds_learn": took})
                due = run.save_interval > 0 and self.iteration % run.save_interval == 0
                if due or self.iteration == self.iterations:
                    self._checkpoint(disk)
            self.progress(Progress(self.iteration, self.iterations, metrics, took))
        if disk is not None:
            if self.saved != self.iteration:
                self._checkpoint(disk)
            if self.iteration == self.iterations:
                for name in self.team.adapters:
                    self.base.save_adapter(name, disk.path / ADAPTERS / name)
        return Summary(self.before, after, self.iteration, seconds, self.run_dir, self.stop.reason)

    def batch(self, iteration: int) -> list[Record]:
        """The records of one iteration: some of every adapter that has not finished its last pass."""
        seed = self.config.run.seed
        return [
            mine[index]
            for name, mine in self.records.items()
            if iteration < self.steps[name]
            for index in batch_at(iteration, len(mine), self.batch_size, seed, name)
        ]

    def _all(self) -> list[Record]:
        return [record for mine in self.records.values() for record in mine]

    def _evaluate(self, writer: MetricsWriter | None) -> dict[str, float]:
        """Measure the held-out records with the adapters as they are."""
        found = self.learner.measure(self.held_out)
        metrics = {f"eval/{name}": value for name, value in found.items() if name != "nonfinite_terms"}
        if writer is not None:
            writer.write_evaluation(self.iteration, "after" if self.iteration else "before", metrics)
        return metrics

    def _must_match(self) -> dict[str, Any]:
        """What a resumed run must have in common with the one it goes on with."""
        return {
            "rule": self.rule.name,
            "seed": self.config.run.seed,
            "batch_size": self.batch_size,
            "records": digest(self._all()),
            "held-out records": digest(self.held_out),
            **self.rule.settings(),
        }

    def _checkpoint(self, disk: RunDir) -> None:
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
        writers["state/optimizers.pt"] = lambda path: files.save_tensors(path, tensors)
        writers["state/run.json"] = lambda path: files.save_json(path, state)
        meta = {"base": base.fingerprint(), "team": list(self.team.names), "rule": self.rule.name}
        checkpoint.save(
            disk.checkpoints, self.iteration, writers, meta=meta, keep_last=run.keep_last, keep_every=run.keep_every
        )
        self.saved = self.iteration

    def _restore(self, loaded: Loadable) -> None:
        """Bring everything to where `loaded` left it; a folder of adapters gives initial weights only."""
        if loaded.kind == "run" and loaded.checkpoint is None:
            return
        for name in self.team.adapters:
            self.base.load_adapter(name, loaded.adapter(name))
        if loaded.checkpoint is None:
            return
        _same_base(loaded, self.base)
        found = files.load_json(loaded.state("run.json"))
        was = found.get("must_match") if isinstance(found, dict) else None
        for name, value in self._must_match().items():
            if was is None or was.get(name) != value:
                kind = "another kind of run" if was is None else f"other {name} ({was.get(name)}, here {value})"
                raise CheckpointError(
                    f"{loaded.path} was written with {kind}, so it cannot go on from there; go on with what it was "
                    "started with, or give a folder that holds its adapter folders alone to start from them."
                )
        tensors = files.load_tensors(loaded.state("optimizers.pt"))
        try:
            self.learner.load_state(tensors["adapters"])
            self.iteration, self.before = found["iteration"], found["before"]
            for name in self.team.adapters:
                self.base.versions[name] = found["versions"][name]
            if tensors["reference"] is not None:
                for record, values in zip([*self._all(), *self.held_out], tensors["reference"].tolist(), strict=True):
                    record.reference = tuple(values)
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"The state in {loaded.path} is damaged ({type(error).__name__}: {error})."
            ) from error


def _by_learner(records: Sequence[Record], team: Team, freeze: Sequence[str]) -> dict[str, list[Record]]:
    """Adapter -> its records, without those of frozen agents."""
    for name in freeze:
        if name not in team.names and name != "all":
            raise ConfigError(unknown("agent", name, team.names))
    frozen = team.names if "all" in freeze else freeze
    found: dict[str, list[Record]] = {name: [] for name in team.adapters}
    for record in records:
        if record.agent not in frozen:
            found[team.agent(record.agent).adapter].append(record)
    found = {name: mine for name, mine in found.items() if mine}
    if not found:
        others = f" ({len(records)} are of frozen agents)" if records else ""
        raise DataError(f"there is no record to learn from{others}; give records of an agent that may learn")
    return found
