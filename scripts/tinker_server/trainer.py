"""The thread that trains: requests of all clients that wait run in common micro-batches, each on its own adapter.

A round takes the passes that stand first in every client's queue, forward and backward, and computes them as one mixed
batch; then come the optimizer steps and saves behind them. Gradients of an adapter add up until its step.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mafrt.models.out_of_memory import let_go, out_of_memory
from mafrt.models.tensors import integers, moved
from mafrt.scripts.tinker_server.adam import Moments, adamw, joined, write
from mafrt.scripts.tinker_server.adapter_slots import AdapterSlots, Shape
from mafrt.scripts.tinker_server.limits import refused
from mafrt.scripts.tinker_server.messages import AdamStep, Example, PassRequest, PassResult, Scored, ScoreRequest

log = logging.getLogger(__name__)

SETTLE_S, SETTLE_SHARE = 0.004, 0.02
"""A round begins when no request has come for so many seconds, or this share of the time of the rounds before it."""
WAIT_SHARE = 0.1
"""longest wait for further requests, as a share of the time that the last round took"""
MOST_PADDED = 4
"""positions of a padded micro-batch, for each token that it computes"""
MIXED_TOKENS = {"cpu": 256}
"""Tokens, by device type, from which on a micro-batch takes no further adapter where all its adapters' products are
computed for all its rows: those of the base run near full speed then, and each adapter more costs every row."""
LARGEST_WEIGHT = 1e3
"""An adapter with a larger weight goes back to what it was: activations could overflow, which would show in the rows
of other clients, since adapters of a batch share matrix products."""
LARGEST_GRADIENT = 1e6
"""of a token's log-probability"""


@dataclass(eq=False)
class Adapter:
    """A training client's adapter. Only the trainer's thread changes its weights."""

    shape: Shape
    slot: str
    moments: Moments | None = None
    """None before the first step"""
    gradient: Tensor | None = None
    """sum since the last step, a row of all parameters' numbers; None: none"""


@dataclass(eq=False)
class Job:
    """A request of an adapter, or of a sampler."""

    owner: object
    """requests of one owner are done in order"""
    work: PassRequest | ScoreRequest | Callable[[], Any]
    """a pass, a score, or anything else, done in this thread between two passes"""
    adapter: Adapter | None = None
    slot: str | None = None
    """of a score; None: the bare base"""
    future: Future[Any] = field(default_factory=Future)


@dataclass
class _Row:
    """A sequence of a pass."""

    job: Job
    place: int
    """of the example in its request"""
    index: int
    """of the adapter"""
    tokens: list[int]
    example: Example | None
    """None: of a score"""


class Trainer:
    """Runs the passes of a base's adapters.

    Args:
        slots: the places of the adapters.
        micro_batch_tokens: tokens computed together.
        round_tokens: most tokens that a client has in one round.
    """

    def __init__(self, slots: AdapterSlots, *, micro_batch_tokens: int = 8192, round_tokens: int = 262_144) -> None:
        self.slots, self.base = slots, slots.base
        self.micro_batch_tokens, self.round_tokens = micro_batch_tokens, round_tokens
        adapter_by_adapter = self.base.compute.own_adapter_only
        self.mixed_tokens = micro_batch_tokens if adapter_by_adapter else MIXED_TOKENS.get(self.base.device.type, 4096)
        self.micro_batches = self.mixed = 0
        """micro-batches so far, and those with several adapters"""
        self._jobs: queue.Queue[Job | None] = queue.Queue()
        self._waiting: dict[object, deque[Job]] = {}
        self._last_s, self._closing = 0.0, False
        threads = torch.get_num_threads()

        def run() -> None:
            torch.set_num_threads(threads)  # a new thread takes the default of the machine
            while not self._closing:
                self._round()

        self._thread = threading.Thread(target=run, daemon=True, name="mafrt-trainer")
        self._thread.start()

    def submit(self, job: Job) -> Future[Any]:
        self._jobs.put(job)
        return job.future

    def close(self) -> None:
        """End after the present round; requests that wait are cancelled."""
        self._jobs.put(None)
        self._thread.join(timeout=60)

    # --------------------------------------------------------------------------------------------------------- rounds

    def _round(self) -> None:
        self._gather()
        started = time.monotonic()
        passes: list[Job] = []
        for waiting in self._waiting.values():
            tokens = 0
            while waiting and not callable(waiting[0].work) and (not tokens or tokens < self.round_tokens):
                job = waiting.popleft()
                if job.future.set_running_or_notify_cancel():
                    tokens += _tokens(job)
                    passes.append(job)
        if passes:
            self._pass(passes)
        for waiting in self._waiting.values():
            while waiting and callable(waiting[0].work):
                job = waiting.popleft()
                if job.future.set_running_or_notify_cancel():
                    self._settle([job], lambda job=job: [job.work()])  # type: ignore[misc]
        self._waiting = {owner: waiting for owner, waiting in self._waiting.items() if waiting}
        # A short round of steps and saves says little about the passes that follow it.
        self._last_s = max(time.monotonic() - started, self._last_s / 2)

    def _gather(self) -> None:
        """Take what has come; wait for a first request, and for others that follow closely."""
        settle = max(SETTLE_S, SETTLE_SHARE * self._last_s)
        deadline = time.monotonic() + max(SETTLE_S, WAIT_SHARE * self._last_s)
        idle = not self._waiting
        while True:
            left = None if idle else max(0.0, min(settle, deadline - time.monotonic()))
            try:
                job = self._jobs.get(timeout=left) if left != 0.0 else self._jobs.get_nowait()
            except queue.Empty:
                return
            if job is None:
                self._closing = True
                return
            self._waiting.setdefault(job.owner, deque()).append(job)
            if idle:
                idle, deadline = False, time.monotonic() + max(SETTLE_S, WAIT_SHARE * self._last_s)

    def _settle(self, jobs: Sequence[Job], work: Callable[[], Iterable[Any]]) -> None:
        """Give each job its result, or all of them the error."""
        try:
            for job, result in zip(jobs, work(), strict=True):
                job.future.set_result(result)
        except Exception as error:  # the clients get it; the thread goes on
            for job in jobs:
                if not job.future.done():
                    job.future.set_exception(error)

    # --------------------------------------------------------------------------------------------------------- passes

    def _pass(self, jobs: Sequence[Job]) -> None:
        """Compute passes of several adapters together.

        An adapter whose loss is not finite fails alone: its gradients are as they were, and the others count.
        """
        failed: dict[object, Exception] = {}
        results: dict[Job, Any] = {}
        learning = {job.adapter.slot: job.adapter for job in jobs if job.adapter is not None and _backward(job)}
        try:
            while not self._passes(jobs, results, failed):
                self._clear(learning)
        except Exception as error:
            log.exception("a pass failed")
            failed = {job.owner: error for job in jobs}
        for adapter in learning.values():
            owner = next(job.owner for job in jobs if job.adapter is adapter)
            if owner not in failed:
                self._add_gradient(adapter, owner, failed)
        self._clear(learning)
        for job in jobs:
            if (why := failed.get(job.owner)) is not None:
                job.future.set_exception(why)
            else:
                job.future.set_result(results[job])

    def _passes(self, jobs: Sequence[Job], results: dict[Job, Any], failed: dict[object, Exception]) -> bool:
        """Compute all micro-batches; False if memory ran out, and smaller ones have to begin anew."""
        failed.clear()
        for job in jobs:
            if isinstance(job.work, PassRequest):
                results[job] = PassResult([np.empty(0)] * len(job.work.examples))
        for rows in self._micro_batches(jobs):
            alive, ran_out = [row for row in rows if row.job.owner not in failed], False
            try:
                with self.slots.training:
                    self._micro_batch(alive, results, failed)
            except RuntimeError as error:
                if not out_of_memory(error):
                    raise
                let_go(error)
                ran_out = True
            if ran_out and len(alive) > 1:
                self.micro_batch_tokens = min(self.micro_batch_tokens, sum(len(row.tokens) for row in alive)) // 2
                log.warning("Out of memory in a pass; micro_batch_tokens is now %d.", self.micro_batch_tokens)
                return False
            if ran_out:
                failed[alive[0].job.owner] = refused(f"memory ran out over a row of {len(alive[0].tokens)} tokens")
        return True

    def _clear(self, adapters: Iterable[str]) -> None:
        for slot in adapters:
            for parameter in self.base.adapter_parameters(slot):
                parameter.grad = None

    def _add_gradient(self, adapter: Adapter, owner: object, failed: dict[object, Exception]) -> None:
        parameters = self.base.adapter_parameters(adapter.slot)
        # A copy, since the gradients of all adapters of a pass may share one block of memory.
        gradient = joined(torch.zeros_like(p) if p.grad is None else p.grad for p in parameters)
        # Of their sum, for which no numbers are written: with many clients the look at each cost more than a copy.
        if not bool(gradient.sum().isfinite()):
            failed[owner] = refused("the gradient is not finite; lower the learning rate or the weights of the loss")
        elif adapter.gradient is None:
            adapter.gradient = gradient
        else:
            adapter.gradient += gradient

    def _micro_batches(self, jobs: Sequence[Job]) -> list[list[_Row]]:
        """Rows of all jobs in groups, equal beginnings of an adapter side by side, so that they are computed once."""
        rows: list[_Row] = []
        for job in jobs:
            slot = job.slot if job.adapter is None else job.adapter.slot
            index = self.base.adapter_index(slot)
            if isinstance(job.work, PassRequest):
                rows += [_Row(job, n, index, each.tokens, each) for n, each in enumerate(job.work.examples)]
            elif isinstance(job.work, ScoreRequest):
                rows.append(_Row(job, 0, index, job.work.tokens, None))
        # Where rows are padded, those of like length together.
        rows.sort(key=lambda row: (0 if self.base.shares else len(row.tokens), row.index, row.tokens))
        groups: list[list[_Row]] = []
        size = width = 0
        for row in rows:
            length = len(row.tokens)
            fits = groups and size + length <= self.micro_batch_tokens
            fits = fits and (row.index == groups[-1][-1].index or size < self.mixed_tokens)
            if fits and (len(groups[-1]) + 1) * max(width, length) <= MOST_PADDED * self.micro_batch_tokens:
                groups[-1].append(row)
                size, width = size + length, max(width, length)
            else:
                groups.append([row])
                size, width = length, length
        return groups

    def _micro_batch(self, rows: Sequence[_Row], results: dict[Job, Any], failed: dict[object, Exception]) -> None:
        if not rows:
            return
        self.micro_batches += 1
        self.mixed += len({row.index for row in rows}) > 1
        width = max(len(row.tokens) for row in rows)
        ids = integers(t for row in rows for t in (*row.tokens, *[self.base.pad_id] * (width - len(row.tokens))))
        lengths = torch.tensor([len(row.tokens) for row in rows])
        real = (torch.arange(width) < lengths.unsqueeze(1)).long()
        wanted = [_wanted(row) for row in rows]
        places = torch.cat([at + n * width for n, (at, _) in enumerate(wanted)])
        targets = torch.cat([wanted_ids for _, wanted_ids in wanted])
        index = torch.tensor([row.index for row in rows])
        ids, real, places, targets = moved([ids.view(len(rows), width), real, places, targets], self.base.device)
        train = [row.job.adapter.slot for row in rows if row.job.adapter is not None and _backward(row.job)]
        with torch.set_grad_enabled(bool(train)):
            states = self.base.forward(ids, real if self.base.shares else None, index, train=set(train))
            states = states.reshape(-1, states.shape[-1])
            logprobs, _ = self.base.token_logprobs(states[places], targets, entropy_grad=False)
        values = logprobs.detach().float().cpu()
        parts = values.split([len(wanted_ids) for _, wanted_ids in wanted])
        weights = torch.zeros_like(values)
        starts = np.cumsum([0, *(len(wanted_ids) for _, wanted_ids in wanted)])
        alike: defaultdict[Any, list[int]] = defaultdict(list)
        for n, row in enumerate(rows):
            work = row.job.work
            if isinstance(work, PassRequest) and row.example is not None:
                # Losses of one kind are computed together, whosever they are.
                alike[work.loss.name, *work.settings.items(), *row.example.inputs, work.backward].append(n)
            elif isinstance(work, ScoreRequest):
                try:
                    results[row.job] = self._scored(work, states[n * width :][: len(row.tokens)], parts[n])
                except Exception as error:
                    failed[row.job.owner] = error
        for group in alike.values():
            gradients = self._losses([(rows[n], parts[n]) for n in group], results, failed)
            for n, part in zip(group, gradients, strict=True):
                weights[starts[n] : starts[n + 1]] = part
        for n, row in enumerate(rows):
            if row.job.owner in failed:
                weights[starts[n] : starts[n + 1]] = 0.0
        if train and bool(weights.any()):
            logprobs.backward(weights.to(logprobs.device, logprobs.dtype))

    def _losses(
        self, rows: Sequence[tuple[_Row, Tensor]], results: dict[Job, Any], failed: dict[object, Exception]
    ) -> Sequence[Tensor]:
        """Add the losses of rows of one loss to the results; the gradient of each row's log-probabilities, `[N]`.

        A token's loss is a function of its own log-probability, so that no row's numbers reach another's.
        """
        work, examples = rows[0][0].job.work, [row.example for row, _ in rows if row.example is not None]
        assert isinstance(work, PassRequest)
        inputs = {
            name: torch.from_numpy(np.concatenate([example.inputs[name].reshape(-1) for example in examples]))
            for name in examples[0].inputs
        }
        leaf = torch.cat([part for _, part in rows]).requires_grad_(work.backward)
        losses = work.loss.of(leaf, inputs, work.settings)
        gradient = torch.autograd.grad(losses.sum(), leaf)[0] if work.backward else torch.zeros_like(leaf)
        # NaN compares as False.
        sound = (losses.detach().isfinite() & (gradient.abs() <= LARGEST_GRADIENT)).numpy()
        parts = [len(part) for _, part in rows]
        firsts = np.cumsum([0, *parts[:-1]], dtype=np.intp)
        sums = np.add.reduceat(losses.detach().numpy(), firsts, dtype=np.float64)
        good = np.logical_and.reduceat(sound, firsts)
        for (row, part), loss, fine in zip(rows, sums.tolist(), good.tolist(), strict=True):
            assert row.example is not None
            if not fine:
                why = (
                    f"the loss, or the gradient of a log-probability, is not finite or beyond {LARGEST_GRADIENT:g}; "
                    "look at the logprobs, advantages and weights of the examples"
                )
                if not bool(part.isfinite().all()):
                    why = "the adapter gives log-probabilities that are not finite; go back to a checkpoint"
                failed[row.job.owner] = refused(why)
                continue
            results[row.job].loss += loss
            results[row.job].logprobs[row.place] = part.numpy().reshape(row.example.targets.shape)
        return tuple(gradient.split(parts))

    @torch.no_grad()
    def _scored(self, work: ScoreRequest, states: Tensor, logprobs: Tensor) -> Scored:
        """Log-probabilities of a sequence from its hidden states `[T, d]`; those of its own tokens are there."""
        length = len(work.tokens)
        values = np.full(length, np.nan, np.float32)
        values[work.first :] = logprobs.numpy()
        scored = Scored(values)
        if not work.top and work.targets is None:
            return scored
        top_ids = np.zeros((length, work.top), np.int32)
        top_values = np.full((length, work.top), -99999.0, np.float32)
        targets = None if work.targets is None else np.zeros(work.targets.shape, np.float32)
        step = max(1, 2**22 // self.base.head_size)
        for start in range(work.first, length, step):
            stop = min(start + step, length)
            logp = self.base.logits(states[start - 1 : stop - 1]).float().log_softmax(1)
            if work.top:
                best = logp.topk(work.top, dim=1)
                top_ids[start:stop], top_values[start:stop] = best.indices.cpu().numpy(), best.values.cpu().numpy()
            if targets is not None and work.targets is not None:
                asked = torch.from_numpy(work.targets[start - 1 : stop - 1]).to(logp.device)
                found = logp.gather(1, asked.clamp(min=0)).masked_fill(asked < 0, 0.0)
                targets[start - 1 : stop - 1] = found.cpu().numpy()
        return Scored(values, top_ids if work.top else None, top_values if work.top else None, targets)

    # ---------------------------------------------------------------------------------------------------------- steps

    def step(self, adapter: Adapter, how: AdamStep) -> dict[str, float]:
        """One step of AdamW from the gradients since the last one; without any, nothing moves.

        Raises:
            RefusedError: a weight would be absurd; the adapter is as it was, and its gradients are gone.
        """
        gradient, adapter.gradient = adapter.gradient, None
        if gradient is None:
            return {"grad_norm:mean": 0.0}
        norm = float(gradient.norm())
        if how.clip > 0:
            gradient = gradient * min(1.0, how.clip / (norm + 1e-6))
        parameters = self.base.adapter_parameters(adapter.slot)
        weights = joined(parameters)
        moments = adamw(weights, gradient, adapter.moments, how)
        # NaN compares as False.
        if not float(weights.abs().amax()) <= LARGEST_WEIGHT:
            raise refused(
                f"the step would make a weight that is not finite or beyond {LARGEST_WEIGHT:g}; the adapter is as "
                "it was; lower the learning rate"
            )
        adapter.moments = moments
        with self.slots.training:
            write(parameters, weights)
            self.base.bump(adapter.slot)
        return {"grad_norm:mean": norm}


def _tokens(job: Job) -> int:
    work = job.work
    return work.tokens if isinstance(work, PassRequest) else len(work.tokens) if isinstance(work, ScoreRequest) else 0


def _backward(job: Job) -> bool:
    return isinstance(job.work, PassRequest) and job.work.backward


def _wanted(row: _Row) -> tuple[Tensor, Tensor]:
    """Positions of a row whose next token is scored, and the tokens, `[N]` each."""
    if row.example is None:
        assert isinstance(row.job.work, ScoreRequest)
        first = row.job.work.first
        return torch.arange(first - 1, len(row.tokens) - 1), integers(row.tokens[first:])
    targets = torch.from_numpy(row.example.targets.reshape(-1).copy())
    return torch.arange(len(row.tokens)).repeat_interleave(len(targets) // len(row.tokens)), targets
