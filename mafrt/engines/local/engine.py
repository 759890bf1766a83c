"""The local engine: sampling in process, on the shared base itself, with all adapters in one batch."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeAlias

import torch

from mafrt.core.errors import ConfigError, ModelError, PromptTooLongError
from mafrt.core.types import Completion, Request
from mafrt.engines.local.own_cache import ModelCachePrompts, way_of
from mafrt.engines.local.running_batch import EngineParts, RunningBatch, SamplingGroup, completion_of
from mafrt.engines.local.sampler import NonFiniteLogitsError, check_sampling
from mafrt.engines.local.stop_strings import StopStrings
from mafrt.engines.local.transcript_cache import TranscriptCache
from mafrt.models.decoder import DecodeModel
from mafrt.models.out_of_memory import let_go, out_of_memory
from mafrt.models.state_prompts import StatePrompts

if TYPE_CHECKING:
    from mafrt.engines.local.grammar import Grammar, Grammars
    from mafrt.engines.local.thoughts import Thought, ThoughtMarks
    from mafrt.models.shared_base import SharedBase

log = logging.getLogger(__name__)

Completions: TypeAlias = dict[int, Completion]
"""by the numbers of their requests"""


class LocalEngine:
    """Samples for the whole team on one `SharedBase`.

    Every (adapter, prompt) is prefilled once; its keys and values are shared by all samples of it. Adapters of scope
    `action` share those of a transcript, also over several calls (`transcript_cache.py`). Log-probabilities
    are those of the distribution really sampled from; without top-k and top-p they agree with
    `SharedBase.token_logprobs` on the same ids. There is no copy of the adapters to keep in step: the next call
    samples from their present weights.

    Args:
        base: the model and its adapters.
        max_batch_rows: most rows decoded at once; more requests than that go in several batches.
        eos_ids: tokens that end a generation; None for the base's. Empty: none does, for benchmarks.
        decoding: "auto" takes the form that is made for the device (`mafrt.models.compute`) where there is one that
            covers the model and agrees with it (checked at once), "lean" insists on it, and "expanded" takes the
            model's own forward pass. Families whose cache has a layout of its own keep it as they make it.

    >>> base = mafrt.SharedBase.load("teaching-base")
    >>> engine = mafrt.LocalEngine(base)
    >>> ids = base.tokenizer.encode("3 + 4 =")
    >>> [made] = engine.generate([mafrt.Request(ids, None, mafrt.SamplingParams(max_new_tokens=3), seed=0)])
    >>> len(made.ids) == len(made.logprobs) <= 3
    True
    """

    joins = True
    """whether further requests may join a running batch"""

    def __init__(
        self,
        base: SharedBase,
        *,
        max_batch_rows: int = 256,
        eos_ids: Collection[int] | None = None,
        decoding: Literal["auto", "lean", "expanded"] = "auto",
    ) -> None:
        if max_batch_rows < 1:
            raise ConfigError(f"found max_batch_rows={max_batch_rows}, expected 1 or more")
        self.base = base
        self.max_batch_rows = max_batch_rows
        self._eos = base.eos_ids if eos_ids is None else frozenset(eos_ids)
        self._stops: dict[tuple[str, ...], StopStrings] = {}
        self._grammars: Grammars | None = None
        self._marks: ThoughtMarks | None = None
        self._decoding = decoding
        self.transcripts: TranscriptCache | ModelCachePrompts | StatePrompts = TranscriptCache(base)
        self._gathered = 0
        """when the weights of a sharded base were last laid out for the lean decoder"""
        self._model = DecodeModel(base) if decoding == "expanded" or base.sharded else self._made()
        if self._model.name == DecodeModel.name and not base.sharded:
            self.transcripts = way_of(base)
        elif self._model.stateful:
            self.transcripts = StatePrompts(base)

    def __repr__(self) -> str:
        return f"<LocalEngine on {Path(self.base.name).name}: {self.decoding}, at most {self.max_batch_rows} rows>"

    @property
    def decoding(self) -> str:
        """ "lean", "expanded", "own cache" or "no cache"."""
        if isinstance(self.transcripts, ModelCachePrompts):
            return "own cache" if self.transcripts.cached else "no cache"
        return self._model.name

    def _made(self) -> DecodeModel:
        model: DecodeModel = self.base.compute.decode_model(self.base) or DecodeModel(self.base)
        if self._decoding == "lean" and model.name != "lean":
            raise ConfigError(f"found decoding='lean' for {self.base.name}, but {model.reason}; use decoding='auto'")
        return model

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """One completion per request, in their order.

        A generation ends with one of `eos_ids` ("eos"), when its text reaches a stop string ("stop"), or at
        `max_new_tokens` or the end of the context window ("length"). `ids` hold the token that ended it.

        Raises:
            PromptTooLongError: a prompt leaves no room for a token in the context window.
            ConfigError: an unknown adapter, an empty prompt, sampling parameters out of range.
            NonFiniteLogitsError: the model returned NaN or infinity; it names the adapters.
            ModelError: there is no memory for one answer; of several fewer are sampled at a time.
        """
        for place, request in enumerate(requests):
            self._check(place, request)
        completions: Completions = {}
        with torch.no_grad():
            if self.base.sharding is not None and self._decoding != "expanded":
                # Its weights are there for the time of play only, and elsewhere each time.
                if self._gathered != self.base.sharding.times_gathered:
                    self._model, self._gathered = self._made(), self.base.sharding.times_gathered
            # A caller may write to the base between two calls; transcripts that were read before are then wrong too.
            elif self._model.stale:
                self._model = self._made()
                self.forget()
            numbered = dict(enumerate(requests))
            for batch in _batches(_groups(numbered), self.max_batch_rows):
                self._run(batch, numbered, completions)
        return [completions[place] for place in range(len(requests))]

    def forget(self) -> None:
        """Forget the transcripts that earlier calls have read, so that the next ones do not depend on these calls."""
        if isinstance(self.transcripts, TranscriptCache):
            self.transcripts.clear()

    rest = forget

    def _check(self, place: int, request: Request) -> None:
        self.base.adapter_index(request.adapter)
        check_sampling(request.sampling)
        tokens, window = len(request.prompt_ids), self.base.context_window
        if not tokens:
            raise ConfigError(f"request {place} (adapter {request.adapter!r}): found an empty prompt, expected tokens")
        # One token more than the prompt, since a turn without an answer would teach nothing.
        if tokens + 1 > window:
            raise PromptTooLongError(
                f"request {place} (adapter {request.adapter!r}): found a prompt of {tokens} tokens, expected at most "
                f"{window - 1} (the model's context window of {window} less one to answer); shorten the observation"
            )

        if request.sampling.schema:
            ids = request.sampling.stop_ids
            self._grammar(request.sampling.schema, self._eos if ids is None else frozenset(ids))

    def check(self, request: Request) -> None:
        """Raise PromptTooLongError or ConfigError for a request that cannot be sampled."""
        self._check(0, request)

    @torch.no_grad()
    def begin(self, requests: Mapping[int, Request]) -> RunningBatch:
        """A batch of requests, by number, for a caller that steps it itself. Any number of rows is taken."""
        return RunningBatch(self._parts(), _side_by_side(_groups(requests)), requests)

    @torch.no_grad()
    def join(self, batch: RunningBatch, requests: Mapping[int, Request]) -> None:
        """Add requests to a running batch."""
        batch.join(_side_by_side(_groups(requests)), requests)

    @torch.no_grad()
    def step(self, batch: RunningBatch) -> list[tuple[int, Completion]]:
        """Sample one token for every row of a batch; returns the completions that are done, by number."""
        return [(row.member, completion_of(row, self.base)) for row in batch.step()]

    def _parts(self) -> EngineParts:
        return EngineParts(
            self.base, self._model, self._eos, self._watch, self._grammar, self._thought, self.transcripts
        )

    def _run(self, groups: list[SamplingGroup], requests: Mapping[int, Request], completions: Completions) -> None:
        try:
            self._finish(RunningBatch(self._parts(), groups, requests), completions)
        except NonFiniteLogitsError as error:
            raise self._blame(error, groups) from None
        except RuntimeError as error:
            self._run_in_parts(error, groups, requests, completions)

    def _finish(self, batch: RunningBatch, completions: Completions) -> None:
        while batch.live:
            for row in batch.step():
                completions[row.member] = completion_of(row, self.base)

    def _run_in_parts(
        self, error: RuntimeError, groups: list[SamplingGroup], requests: Mapping[int, Request], done: Completions
    ) -> None:
        """What is left of a batch that found no memory, with half as many rows at a time, as all batches from now on.

        Every request has a seed of its own, so its answer is the same. Raises the error if it is another one.
        """
        left = {n: requests[n] for group in groups for n in group.members if n not in done}
        if not out_of_memory(error):
            raise error
        if len(left) < 2:
            request = next(iter(left.values()))
            raise ModelError(
                f"memory ran out over one answer of up to {request.sampling.max_new_tokens} tokens to a prompt of "
                f"{len(request.prompt_ids)}; lower --context_window or --max_new_tokens, or load the base in --bits 4"
            ) from None
        let_go(error)
        self.forget()
        self.max_batch_rows = len(left) // 2
        log.warning("Out of memory while sampling; max_batch_rows is now %d.", self.max_batch_rows)
        for part in _batches(_groups(left), self.max_batch_rows):
            self._run(part, requests, done)

    def _watch(self, stops: tuple[str, ...]) -> StopStrings | None:
        if not stops:
            return None
        if stops not in self._stops:
            self._stops[stops] = StopStrings(self.base.tokenizer, stops)
        return self._stops[stops]

    def _thought(self, request: Request) -> Thought:
        from mafrt.engines.local.thoughts import Thought, ThoughtMarks

        if self._marks is None:
            self._marks = ThoughtMarks(self.base.tokenizer)
        how = request.sampling
        return Thought(self._marks, request.prompt_ids, how.thinking_budget, opened=how.thought_opened)

    def _grammar(self, schema: str, ends: frozenset[int]) -> Grammar:
        if self._grammars is None:
            from mafrt.engines.local.grammar import Grammars

            self._grammars = Grammars(self.base.tokenizer)
        return self._grammars.of(schema, ends)

    def _blame(self, error: NonFiniteLogitsError, batch: list[SamplingGroup]) -> NonFiniteLogitsError:
        """Name the adapters whose weights are not finite, if there are any.

        Where several adapters share a matrix product, one that is NaN spoils the rows of all.
        """
        names = dict.fromkeys(group.adapter for group in batch if group.adapter is not None)
        sick = [name for name in names if not self.base.finite(name)]
        return NonFiniteLogitsError(sick) if sick else error


def _groups(requests: Mapping[int, Request]) -> list[SamplingGroup]:
    members: dict[tuple[str | None, tuple[int, ...]], list[int]] = {}
    for member, request in requests.items():
        members.setdefault((request.adapter, tuple(request.prompt_ids)), []).append(member)
    return [SamplingGroup(*key, tuple(numbers)) for key, numbers in members.items()]


def _side_by_side(groups: list[SamplingGroup]) -> list[SamplingGroup]:
    """Sorted by adapter, the bare base last, as the decoder wants them."""
    return sorted(groups, key=lambda group: (group.adapter is None, group.adapter or ""))


def _batches(groups: list[SamplingGroup], most: int) -> list[list[SamplingGroup]]:
    """Cut the groups into batches of like size, prompts of like length together."""
    total = sum(len(group.members) for group in groups)
    if not total:
        return []
    # Rounded up twice, the number of batches and then their equal size, so that the last is no remainder of a few rows.
    size = -(-total // -(-total // most))
    batches: list[list[SamplingGroup]] = [[]]
    room = size
    # Like lengths together, because shorter prompts are padded to the longest of their batch.
    for group in sorted(groups, key=lambda group: len(group.prompt)):
        members = group.members
        while members:
            if not room:
                batches.append([])
                room = size
            batches[-1].append(SamplingGroup(group.adapter, group.prompt, members[:room]))
            taken = min(room, len(members))
            members, room = members[taken:], room - taken
    return [_side_by_side(batch) for batch in batches]
