"""vLLM servers as the engine: OpenAI-compatible, token ids in and out, adapters loaded while they run.

Sampling is spread over the servers. One that does not answer is dead: its requests go to the others, with the
same seeds, and every request is answered once. A dead server is asked now and then whether it is back, and taken back
if it still holds the same base. When none is left, and none is back when asked once more, the engine raises
EngineDownError, and the run pauses. A connection that breaks is no death: a server that is well is asked once more.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import weakref
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from mafrt.config.train_config import EngineConfig
from mafrt.core.errors import ConfigError, EngineDownError
from mafrt.core.types import Completion, Request, SamplingParams
from mafrt.engines.checks import check_engine, server_urls
from mafrt.engines.requests import by_adapter, check_requests, completion, sampling_words
from mafrt.engines.vllm.adapter_sync import AdapterVersion, Handover
from mafrt.engines.vllm.server_calls import SMALL_S, LostError, ServerCalls, UnknownModelError
from mafrt.engines.vllm.watchdog import dismiss, watch

if TYPE_CHECKING:
    import httpx

    from mafrt.models.shared_base import SharedBase

log = logging.getLogger(__name__)

REVIVE_S = 30.0
"""Seconds after which a dead server is asked again; twice as many after each time in vain."""
REVIVE_MOST_S = 1800.0
PROBE = SamplingParams(max_new_tokens=8)


@dataclass
class _Server:
    url: str
    model: str = ""
    """its name of the base"""
    alive: bool = False
    loaded: dict[str, AdapterVersion] = field(default_factory=dict)
    """adapters that it has, by the names they were given"""
    why: str = ""
    """why it counts as dead"""
    asked_at: float = float("-inf")
    in_vain: int = 0
    """how often it was asked since it died"""
    probe: Completion | None = None
    """its answer to the probe prompt when it was checked"""
    handing: asyncio.Lock | None = None
    era: int = 0
    """how often it was found to have been started again"""


class ServerEngine:
    """Samples for the whole team on vLLM servers.

    Args:
        base: the model and its adapters.
        config: which servers, and how long to wait for them.
        window: tokens of prompt and answer together; None for the base's.
        run: part of the adapters' names; equal in all processes of one run.
        probe: a prompt that shows later whether a server that comes back still holds the same base.

    Raises:
        MissingExtraError: httpx is not installed.
        ConfigError: settings, adapters or servers that do not fit each other.
        EngineDownError: no server answers.
    """

    foreign = True

    def __init__(
        self,
        base: SharedBase,
        config: EngineConfig,
        *,
        window: int | None = None,
        run: str | None = None,
        probe: Sequence[int] | None = None,
    ) -> None:
        check_engine(
            config,
            {name: record.rank for name, record in base.records.items()},
            {name: tuple(record.layers) for name, record in base.records.items()},
            base.activated,
        )
        self.base = base
        self.window = window or base.context_window
        self._config = config
        self._probe_ids = list(probe or [])
        self._eos = base.eos_ids
        self._servers = [_Server(url.rstrip("/")) for url in server_urls(config.vllm_servers)]
        self._only: list[_Server] | None = None
        self._http = ServerCalls(config.vllm_timeout)
        # Asked before adapters are written: a wrong address is then an error within seconds.
        _run(self._open_all())
        self._handover = Handover(base, config.vllm_adapter_dir, run)
        # A trainer that is killed with -9 leaves no adapters behind in memory.
        self._dismiss = weakref.finalize(self, dismiss, watch([], self._handover.folder))

    @property
    def servers(self) -> dict[str, bool]:
        """Address of every server -> whether it answers."""
        return {server.url: server.alive for server in self._servers}

    @contextlib.contextmanager
    def only(self, url: str) -> Any:
        """Within it, one server answers everything, and its death is not made up for."""
        self._only = [server for server in self._servers if server.url == url.rstrip("/")]
        try:
            yield self
        finally:
            self._only = None

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """One completion per request, in their order; see `LocalEngine.generate`.

        Raises:
            EngineDownError: no server is left.
            ConfigError: a server refuses an adapter or a request, in its own words.
        """
        check_requests(self.base, self.window, requests)
        completions: dict[int, Completion] = {}
        if requests:
            _run(self._sample(requests, completions))
        return [completions[place] for place in range(len(requests))]

    def rest(self) -> None:
        """Nothing: servers have devices of their own."""

    def close(self) -> None:
        """Take the adapters off the servers and remove their folders."""
        _run(self._unload_all())
        self._dismiss()
        self._handover.close()

    async def _open_all(self) -> None:
        async with self._http.client() as client:
            await asyncio.gather(*(self._open(client, server) for server in self._servers))
        self._someone()
        for server in self._servers:
            if not server.alive:
                log.warning("The vLLM server %s does not answer (%s); the others sample.", server.url, server.why)

    async def _open(self, client: httpx.AsyncClient, server: _Server) -> None:
        """Find out the server's name of the base, and whether its context is long enough."""
        server.asked_at = time.monotonic()
        try:
            models = await self._http.call(client, server.url, "GET", "/v1/models")
        except LostError as error:
            server.why = str(error)
            return
        bases = [card for card in models.get("data", []) if not card.get("parent")]
        if not bases:
            raise ConfigError(f"{server.url} serves no model; expected one of `mafrt serve_vllm`.")
        length = bases[0].get("max_model_len")
        if length is not None and length < self.window:
            raise ConfigError(
                f"{server.url} takes {length} tokens of prompt and answer, but the run wants {self.window}; start it "
                f"with --max-model-len {self.window}, or give --context_window {length}."
            )
        server.model, server.alive = bases[0]["id"], True
        server.loaded.clear()

    def _add_listed(self) -> None:
        """Take in servers that a list in a file has got since; they are checked as those that come back are."""
        with contextlib.suppress(ConfigError):  # a list that is gone changes nothing
            known = {server.url for server in self._servers}
            new = [url.rstrip("/") for url in server_urls(self._config.vllm_servers)]
            self._servers += [_Server(url, handing=asyncio.Lock()) for url in new if url not in known]

    def _someone(self) -> list[_Server]:
        """The servers that answer. Raises EngineDownError if there are none."""
        alive = [server for server in (self._only or self._servers) if server.alive]
        if not alive:
            reasons = "; ".join(f"{server.url}: {server.why}" for server in (self._only or self._servers))
            raise EngineDownError(f"No vLLM server answers ({reasons}); start one of them again")
        return alive

    async def _sample(self, requests: Sequence[Request], completions: dict[int, Completion]) -> None:
        """Fill `found`. Every place is in the queue, asked of one server, or answered; never two of these."""
        async with self._http.client() as client:
            for server in self._servers:
                # A lock belongs to one event loop, and each call has its own.
                server.handing = asyncio.Lock()
            self._add_listed()
            # A check of one server must not be interrupted by attempts at others.
            if self._only is None:
                await asyncio.gather(*(self._revive(client, server) for server in self._servers if _due(server)))
            parcels, replaced = self._handover.parcels(request.adapter for request in requests)
            queue = deque(place for places in by_adapter(requests).values() for place in places)
            hoped_at = -1
            while queue:
                if self._only is None and len(completions) > hoped_at and not any(self.servers.values()):
                    # A trainer whose machine stood still for a moment has lost all of them at once, and none has died.
                    hoped_at = len(completions)
                    self._add_listed()
                    await asyncio.gather(*(self._revive(client, server) for server in self._servers))
                alive = self._someone()
                # No more workers than places, so that small batches open no idle connections.
                workers = min(self._config.vllm_concurrency, -(-len(queue) // len(alive)))
                tasks = [
                    asyncio.create_task(self._work(client, server, queue, requests, parcels, completions))
                    for server in alive
                    for _ in range(workers)
                ]
                try:
                    await asyncio.gather(*tasks)
                finally:
                    for task in tasks:
                        task.cancel()
            for parcel in replaced:
                self._handover.forget(parcel)

    async def _work(
        self,
        client: httpx.AsyncClient,
        server: _Server,
        queue: deque[int],
        requests: Sequence[Request],
        parcels: dict[str | None, AdapterVersion],
        completions: dict[int, Completion],
    ) -> None:
        """Ask one server for one place after the other."""
        while queue and server.alive:
            place = queue.popleft()
            request = requests[place]
            parcel = parcels[request.adapter]
            try:
                await self._hand_over(client, server, list(parcels.values()))
                era = server.era
                try:
                    completions[place] = await self._ask(client, server, request, parcel.name)
                except UnknownModelError:
                    await self._again(client, server, list(parcels.values()), era)
                    completions[place] = await self._ask(client, server, request, parcel.name)
            except (LostError, UnknownModelError) as error:
                # Back to the end of the queue, where another server takes it with the same seed.
                queue.append(place)
                self._bury(server, str(error))

    def _bury(self, server: _Server, why: str) -> None:
        if server.alive:
            server.alive, server.why, server.asked_at, server.in_vain = False, why, time.monotonic(), 0
            log.warning("The vLLM server %s is lost (%s); its requests go to the others.", server.url, why)

    async def _hand_over(self, client: httpx.AsyncClient, server: _Server, parcels: Sequence[AdapterVersion]) -> None:
        """Have the server hold these adapters, and none of the versions that they replace."""
        assert server.handing is not None
        async with server.handing:
            wanted = {parcel.name for parcel in self._handover.current()}
            for name in [name for name in server.loaded if name not in wanted]:
                await self._unload(client, server, name)
            for parcel in parcels:
                if parcel.name not in server.loaded:
                    await self._load(client, server, parcel)

    async def _again(
        self, client: httpx.AsyncClient, server: _Server, parcels: Sequence[AdapterVersion], era: int
    ) -> None:
        """A server that does not know an adapter it was given was started again; it may hold another base by now."""
        assert server.handing is not None
        async with server.handing:
            if server.era == era:  # no other call has noticed
                server.era += 1
                server.loaded.clear()
                await self._verify(client, server)
        await self._hand_over(client, server, parcels)

    async def _load(self, client: httpx.AsyncClient, server: _Server, parcel: AdapterVersion) -> None:
        body = {"lora_name": parcel.name, "lora_path": str(parcel.path)}
        try:
            await self._http.call(client, server.url, "POST", "/v1/load_lora_adapter", body)
        except UnknownModelError as error:
            raise ConfigError(
                f"{server.url} cannot load adapters while it runs, or does not find {parcel.path} ({error}); start it "
                "with `mafrt serve_vllm`, on a machine that sees that folder."
            ) from None
        except ConfigError as error:
            # The answer of an earlier attempt was lost, and the adapter is there.
            if "already been loaded" not in str(error):
                raise
        except LostError as error:
            # vLLM answers 500 both to an adapter that it cannot hold and when it is dying.
            if error.status != 500:
                raise
            await self._http.call(client, server.url, "GET", "/health")
            raise ConfigError(
                f"{server.url} cannot hold the adapter {parcel.name} ({error}); start it with `mafrt serve_vllm`, "
                "which gives it room for the team's ranks."
            ) from None
        server.loaded[parcel.name] = parcel

    async def _unload(self, client: httpx.AsyncClient, server: _Server, name: str) -> None:
        # A server that was started again has none to unload.
        with contextlib.suppress(UnknownModelError, ConfigError):
            await self._http.call(client, server.url, "POST", "/v1/unload_lora_adapter", {"lora_name": name})
        server.loaded.pop(name, None)

    async def _unload_all(self) -> None:
        async with self._http.client() as client:
            for server in self._servers:
                with contextlib.suppress(LostError):
                    for name in list(server.loaded) if server.alive else ():
                        await self._unload(client, server, name)

    async def _ask(self, client: httpx.AsyncClient, server: _Server, request: Request, model: str) -> Completion:
        words = sampling_words(request, self._eos, self.window)
        body = {"model": model, "prompt": list(request.prompt_ids), "return_token_ids": True, **words}
        answer = await self._http.call(client, server.url, "POST", "/v1/completions", body)
        try:
            choice = answer["choices"][0]
            ids, logprobs = choice["token_ids"], choice["logprobs"]["token_logprobs"]
        except (KeyError, IndexError, TypeError):
            raise ConfigError(
                f"{server.url} answers without token ids and log-probabilities; expected vLLM 0.11 or later."
            ) from None
        return completion(self.base, request, ids, logprobs, choice.get("finish_reason"))

    async def _revive(self, client: httpx.AsyncClient, server: _Server) -> None:
        server.in_vain += 1
        try:
            # One that hangs must not hold up the others.
            await asyncio.wait_for(self._come_back(client, server), SMALL_S)
        except TimeoutError:
            server.alive, server.why, server.asked_at = False, f"no answer within {SMALL_S:g} s", time.monotonic()
        except (LostError, UnknownModelError, ConfigError) as error:
            server.alive, server.why = False, str(error)
            log.warning("The vLLM server %s is not taken back: %s", server.url, error)

    async def _come_back(self, client: httpx.AsyncClient, server: _Server) -> None:
        await self._open(client, server)
        if server.alive:
            await self._verify(client, server)
            log.warning("The vLLM server %s is back.", server.url)

    def keep_probes(self) -> None:
        """Keep every server's answer to the probe prompt, once it is known to be right."""
        _run(self._keep_probes())

    async def _keep_probes(self) -> None:
        async with self._http.client() as client:
            for server in self._servers:
                if server.alive and self._probe_ids:
                    server.probe = await self._say_probe(client, server)

    async def _say_probe(self, client: httpx.AsyncClient, server: _Server) -> Completion:
        bare = self._handover.parcels([None])[0][None]
        if bare.name not in server.loaded:
            await self._load(client, server, bare)
        return await self._ask(client, server, Request(self._probe_ids, None, PROBE, seed=1), bare.name)

    async def _verify(self, client: httpx.AsyncClient, server: _Server) -> None:
        """Raise LostError unless the server answers the probe prompt as it, or another one, did before."""
        known = server.probe or next((other.probe for other in self._servers if other.probe), None)
        if known is None:
            return
        probe = await self._say_probe(client, server)
        # Only up to the first difference, since later tokens follow from other texts.
        same = next((n for n, (a, b) in enumerate(zip(probe.ids, known.ids, strict=False)) if a != b), len(known.ids))
        gaps = [abs(a - b) for a, b in zip(probe.logprobs[:same], known.logprobs[:same], strict=False)]
        # Rounding moves a log-prob by far less than .15 nats, and another base by more.
        if not gaps or sum(gaps) / len(gaps) > 0.15:
            raise LostError("it came back with another base")
        server.probe = probe


def _due(server: _Server) -> bool:
    """Whether it is time to ask a dead server again."""
    wait_s = min(REVIVE_S * 2.0 ** min(server.in_vain, 9), REVIVE_MOST_S)
    return not server.alive and time.monotonic() - server.asked_at > wait_s


def _run(work: Any) -> Any:
    """Wait for a coroutine, in a thread of its own: the caller may be inside an event loop (a notebook is)."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(asyncio.run, work).result()
