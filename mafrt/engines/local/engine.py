"""The local engine: sampling in process, on the shared base itself, with all adapters in one batch."""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol

import torch
from torch import Tensor

from mafrt.core.errors import ConfigError, PromptTooLongError
from mafrt.core.types import Completion, Request, Stop
from mafrt.engines.local.fast_decoder import LeanDecoder, LeanModel, agrees
from mafrt.engines.local.hf_decoder import ExpandedDecoder
from mafrt.engines.local.kv_cache import PromptKV, prefill
from mafrt.engines.local.sampler import NonFiniteLogitsError, Sampler, check_sampling
from mafrt.engines.local.stop_strings import StopStrings

if TYPE_CHECKING:
    from mafrt.models.shared_base import SharedBase

log = logging.getLogger(__name__)

COMPACT_AT = 1 / 4
"""Share of finished rows in a batch at which they are taken out of it. Taking out copies the others' own keys and
values, about the price of one step; leaving them in costs their share of every step."""


class Decoder(Protocol):
    """A batch in the middle of its generation."""

    def step(self, tokens: Tensor) -> Tensor: ...

    def keep(self, rows: Tensor) -> None: ...


@dataclass
class _Group:
    """Requests with the same prompt and adapter."""

    adapter: str | None
    prompt: tuple[int, ...]
    members: list[int]


@dataclass
class _Row:
    """One request while it is being sampled."""

    member: int
    limit: int
    stops: StopStrings | None
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    stop: Stop | None = None


class LocalEngine:
    """Samples for the whole team on one `SharedBase`.

    Every (adapter, prompt) is prefilled once; its keys and values are shared by all samples of it. Log-probabilities
    are those of the distribution really sampled from; without top-k and top-p they agree with
    `SharedBase.token_logprobs` on the same ids. There is no copy of the adapters to keep in step: the next call
    samples from their present weights.

    Args:
        base: the model and its adapters.
        max_batch_rows: most rows decoded at once; more requests than that go in several batches.
        eos_ids: tokens that end a generation; None for the base's. Empty: none does, for benchmarks.
        decoding: "lean" for Llama-like models, "expanded" for any; "auto" takes lean where it is covered and agrees
            with the model (checked at once).
    """

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
        self._decoding = decoding
        self._gathered = 0
        """when the weights of a sharded base were last laid out for the lean decoder"""
        self._lean = None if decoding == "expanded" or base.sharded else self._make_lean()

    @property
    def decoding(self) -> str:
        """ "lean" or "expanded"."""
        return "expanded" if self._lean is None else "lean"

    def _make_lean(self) -> LeanModel | None:
        try:
            with torch.no_grad():
                lean = LeanModel(self.base)
                if agrees(lean):
                    return lean
                reason = "its results differ from the model's"
        except ValueError as error:
            reason = f"it does not cover {error}"
        if self._decoding == "lean":
            raise ConfigError(f"found decoding='lean' for {self.base.name}, but {reason}; use decoding='auto'")
        log.info("decoding %s through its own forward: the lean decoder is not used, %s", self.base.name, reason)
        return None

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """One completion per request, in their order.

        A generation ends with one of `eos_ids` ("eos"), when its text reaches a stop string ("stop"), or at
        `max_new_tokens` or the end of the context window ("length"). `ids` hold the token that ended it.

        Raises:
            PromptTooLongError: a prompt leaves no room for a token in the context window.
            ConfigError: an unknown adapter, an empty prompt, sampling parameters out of range.
            NonFiniteLogitsError: the model returned NaN or infinity; it names the adapters.
        """
        for place, request in enumerate(requests):
            self._check(place, request)
        completions: dict[int, Completion] = {}
        with torch.no_grad():
            if self.base.sharding is not None and self._decoding != "expanded":
                # Its weights are there for the time of play only, and elsewhere each time.
                if self._gathered != self.base.sharding.gathered:
                    self._lean, self._gathered = self._make_lean(), self.base.sharding.gathered
            elif self._lean is not None and self._lean.stale:
                self._lean = LeanModel(self.base)
            for batch in _batches(_groups(requests), self.max_batch_rows):
                try:
                    self._run(batch, requests, completions)
                except NonFiniteLogitsError as error:
                    raise self._blame(error, batch) from None
        return [completions[place] for place in range(len(requests))]

    def _check(self, place: int, request: Request) -> None:
        self.base.adapter_index(request.adapter)
        check_sampling(request.sampling)
        tokens, window = len(request.prompt_ids), self.base.context_window
        if not tokens:
            raise ConfigError(f"request {place} (adapter {request.adapter!r}): found an empty prompt, expected tokens")
        if tokens + 1 > window:
            raise PromptTooLongError(
                f"request {place} (adapter {request.adapter!r}): found a prompt of {tokens} tokens, expected at most "
                f"{window - 1} (the model's context window of {window} less one to answer); shorten the observation"
            )

    def _run(self, groups: list[_Group], requests: Sequence[Request], completions: dict[int, Completion]) -> None:
        """Sample one batch of groups to its end."""
        rows: list[_Row] = []
        owner: list[int] = []
        for number, group in enumerate(groups):
            room = self.base.context_window - len(group.prompt)
            for member in group.members:
                sampling = requests[member].sampling
                rows.append(_Row(member, min(sampling.max_new_tokens, room), self._watch(sampling.stop)))
                owner.append(number)
        sampler = Sampler(
            [requests[row.member].sampling for row in rows],
            [requests[row.member].seed for row in rows],
            [groups[number].adapter for number in owner],
            max(row.limit for row in rows),
            self.base.device,
        )
        index = [self.base.adapter_index(group.adapter) for group in groups]
        hidden, prompts = prefill(self.base, [group.prompt for group in groups], index)
        logits = self.base.logits(hidden)[torch.tensor(owner, device=self.base.device)]
        decoder: Decoder | None = None
        live = list(range(len(rows)))
        for step in range(max(row.limit for row in rows)):
            ids, logprobs = sampler(logits, step)
            self._take(rows, live, ids.tolist(), logprobs.tolist())
            live = [place for place in live if rows[place].stop is None]
            if not live:
                break
            if decoder is None:
                decoder = self._decoder(groups, prompts, owner, max(row.limit for row in rows))
            if len(live) <= (1 - COMPACT_AT) * len(rows):
                kept = torch.tensor(live, device=self.base.device)
                self._finish([row for row in rows if row.stop is not None], requests, completions)
                rows, live, ids = [rows[place] for place in live], list(range(len(live))), ids[kept]
                sampler.keep(kept)
                decoder.keep(kept)
            logits = self.base.logits(decoder.step(ids))
        self._finish(rows, requests, completions)

    def _decoder(self, groups: list[_Group], prompts: PromptKV, owner: list[int], steps: int) -> Decoder:
        names = [groups[number].adapter for number in owner]
        if self._lean is not None:
            return LeanDecoder(self._lean, prompts, torch.tensor(owner), names, steps)
        adapters = torch.tensor([self.base.adapter_index(name) for name in names])
        return ExpandedDecoder(self.base, prompts, torch.tensor(owner), adapters)

    def _take(self, rows: list[_Row], live: list[int], ids: list[int], logprobs: list[float]) -> None:
        """Give every live row its token, and see whether that ended it."""
        eos = self._eos
        for place in live:
            row, token = rows[place], ids[place]
            row.ids.append(token)
            row.logprobs.append(logprobs[place])
            if token in eos:
                row.stop = "eos"
            elif row.stops is not None and row.stops.hit(row.ids):
                row.stop = "stop"
            elif len(row.ids) == row.limit:
                row.stop = "length"

    def _finish(self, rows: list[_Row], requests: Sequence[Request], completions: dict[int, Completion]) -> None:
        for row in rows:
            assert row.stop is not None
            name = requests[row.member].adapter
            completions[row.member] = Completion(
                ids=row.ids,
                logprobs=row.logprobs,
                stop=row.stop,
                text=self.base.tokenizer.decode(row.ids, skip_special_tokens=True, clean_up_tokenization_spaces=False),
                adapter_version=0 if name is None else self.base.versions[name],
            )

    def _watch(self, stops: tuple[str, ...]) -> StopStrings | None:
        if not stops:
            return None
        if stops not in self._stops:
            self._stops[stops] = StopStrings(self.base.tokenizer, stops)
        return self._stops[stops]

    def _blame(self, error: NonFiniteLogitsError, batch: list[_Group]) -> NonFiniteLogitsError:
        """Name the adapters whose weights are not finite, if there are any.

        Where several adapters share a matrix product, one that is NaN spoils the rows of all.
        """
        names = dict.fromkeys(group.adapter for group in batch if group.adapter is not None)
        sick = [n for n in names if not all(bool(p.isfinite().all()) for p in self.base.adapter_parameters(n))]
        return NonFiniteLogitsError(sick) if sick else error


def _groups(requests: Sequence[Request]) -> list[_Group]:
    groups: dict[tuple[str | None, tuple[int, ...]], _Group] = {}
    for member, request in enumerate(requests):
        key = (request.adapter, tuple(request.prompt_ids))
        groups.setdefault(key, _Group(*key, [])).members.append(member)
    return list(groups.values())


def _batches(groups: list[_Group], most: int) -> list[list[_Group]]:
    """Cut the groups into batches of like size, prompts of like length together.

    Within a batch, rows of one adapter lie side by side and those of the bare base last, as the decoder wants them.
    """
    total = sum(len(group.members) for group in groups)
    if not total:
        return []
    size = -(-total // -(-total // most))
    batches: list[list[_Group]] = [[]]
    room = size
    for group in sorted(groups, key=lambda group: len(group.prompt)):
        members = group.members
        while members:
            if not room:
                batches.append([])
                room = size
            batches[-1].append(_Group(group.adapter, group.prompt, members[:room]))
            taken = min(room, len(members))
            members, room = members[taken:], room - taken
    for batch in batches:
        batch.sort(key=lambda group: (group.adapter is None, group.adapter or ""))
    return batches
