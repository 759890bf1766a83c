"""Sessions, training clients and samplers of the Tinker API. All methods run in the server's event loop.

A request of a training client has a number (`seq_id`); requests are done in the order of these, and one that comes a
second time gets the result of the first. Everything belongs to the API key that made it; for any other key it is not
there.
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import time
import uuid
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mafrt.core.seeding import seed_of
from mafrt.core.text import shortened
from mafrt.core.types import Request
from mafrt.environment.local_server import RefusedError
from mafrt.scripts.serving.engine_queue import Answer, EngineQueue
from mafrt.scripts.tinker_server import adam, messages
from mafrt.scripts.tinker_server.adapter_slots import AdapterSlots, Sampler, Shape
from mafrt.scripts.tinker_server.checkpoints import Checkpoints, Place, at, described, dumps, parse_path, place_of
from mafrt.scripts.tinker_server.limits import Limits, refused
from mafrt.scripts.tinker_server.messages import Reading, SampleRequest
from mafrt.scripts.tinker_server.results import Result, Results, digest_of
from mafrt.scripts.tinker_server.trainer import Adapter, Job, Trainer

if TYPE_CHECKING:
    from mafrt.engines.local.engine import LocalEngine
    from mafrt.models.shared_base import SharedBase

log = logging.getLogger(__name__)

CLONES = 1_000_000_000
"""numbers of the requests of one copy of a sampling client"""


class GatedEngine:
    """An engine whose steps wait while a place for adapters changes."""

    def __init__(self, engine: LocalEngine, slots: AdapterSlots) -> None:
        self._engine, self._slots, self.joins, self.check = engine, slots, engine.joins, engine.check

    def generate(self, requests: Sequence[Request]) -> Any:
        with self._slots.sampling:
            return self._engine.generate(requests)

    def begin(self, requests: Mapping[int, Request]) -> Any:
        with self._slots.sampling:
            return self._engine.begin(requests)

    def join(self, batch: Any, requests: Mapping[int, Request]) -> None:
        with self._slots.sampling:
            self._engine.join(batch, requests)

    def step(self, batch: Any) -> Any:
        with self._slots.sampling:
            return self._engine.step(batch)


@dataclass(eq=False)
class Model:
    """A training client."""

    id: str
    owner: str
    session: Session
    shape: Shape
    adapter: Adapter | None = None
    """None until it is made"""
    next: int = 1
    """number of the next request"""
    waiting: dict[int, Callable[[], None]] = field(default_factory=dict)
    results: dict[int, Result] = field(default_factory=dict)
    created: Result | None = None
    metadata: dict[str, str] = field(default_factory=dict)
    about: dict[str, Any] | None = None
    """what is recorded of it, as long as its weights are in memory"""
    unsaved: set[Future[Any]] = field(default_factory=set)
    """requests in the trainer that no save follows: nobody would see what they do once the session has ended"""

    @property
    def lost(self) -> bool:
        """Whether it could not be made, so that it holds no place."""
        return self.created is not None and self.created.failed


@dataclass(eq=False)
class SamplingSession:
    """A sampling client."""

    id: str
    owner: str
    session: Session
    sampler: Sampler | None
    """None: the bare base"""
    path: str | None = None
    ephemeral: bool = False
    """whether it is a snapshot of this session's alone"""
    clones: int = 0
    results: dict[int, Result] = field(default_factory=dict)
    done: dict[int, dict[Result, int]] = field(default_factory=lambda: defaultdict(dict))
    """copy of the client -> results that are kept and that it has not acknowledged, with their cursors"""
    cursors: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    news: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(eq=False)
class Session:
    """A client's session."""

    id: str
    owner: str
    seen: float
    metadata: dict[str, str]
    models: dict[str, Model] = field(default_factory=dict)
    samplers: OrderedDict[str, SamplingSession] = field(default_factory=OrderedDict)


class Service:
    """Answers the requests.

    Args:
        base: the frozen base; it has no adapters yet.
        names: under which clients may ask for it, the first in answers.
        tokenizer: path or name of its tokenizer, for the SDK's `get_tokenizer`.
        checkpoints: on disk.
        limits: bounds.
        rows: max sequences that are sampled side by side.
        micro_batch_tokens: tokens that are trained on together.
    """

    def __init__(
        self,
        base: SharedBase,
        names: Sequence[str],
        tokenizer: str,
        checkpoints: Checkpoints,
        limits: Limits,
        *,
        rows: int = 256,
        micro_batch_tokens: int = 8192,
    ) -> None:
        from mafrt.engines.local.engine import LocalEngine

        self.base, self.names, self.tokenizer, self.checkpoints, self.limits = (
            base,
            names,
            tokenizer,
            checkpoints,
            limits,
        )
        self.slots = AdapterSlots(base, limits)
        # The SDK's usual shape, placed before the engine looks at the layers.
        usual = Shape(min(32, limits.rank), attention=True, mlp=True)
        self.slots.give(usual, self.slots.take(usual))
        self.trainer = Trainer(self.slots, micro_batch_tokens=micro_batch_tokens, round_tokens=limits.batch_tokens)
        engine: Any = GatedEngine(LocalEngine(base, max_batch_rows=rows), self.slots)
        self.queue = EngineQueue(engine, rows=rows)
        self.reading = Reading(base.head_size, base.context_window, base.eos_ids, limits)
        self._sessions: dict[str, Session] = {}
        self._ended: OrderedDict[str, None] = OrderedDict()
        self._models: dict[str, Model] = {}
        self._samplers: dict[str, SamplingSession] = {}
        self._by_path: dict[tuple[str, float], Sampler] = {}
        self.results = Results(limits)
        self._tasks: set[asyncio.Task[None]] = set()

    def close(self) -> None:
        self.queue.close()
        self.trainer.close()

    # ------------------------------------------------------------------------------------------------------- sessions

    def create_session(self, owner: str, body: Mapping[str, Any]) -> dict[str, Any]:
        def mine() -> int:
            return sum(session.owner == owner for session in self._sessions.values())

        self._make_room(mine, self.limits.sessions, "you have {} open sessions; close one")
        self._make_room(lambda: len(self._sessions), self.limits.all_sessions, "there are {} open sessions; wait")
        session = Session(uuid.uuid4().hex, owner, time.monotonic(), messages.read_metadata(body))
        self._sessions[session.id] = session
        self._watch(session)
        note = "Adapters of this server act on attention and MLP layers; the output layer stays frozen."
        return {"type": "create_session", "session_id": session.id, "info_message": note}

    def session(self, owner: str, name: str) -> Session:
        """An open session, which is now seen. Raises RefusedError."""
        found = self._sessions.get(name)
        if found is None or found.owner != owner:
            if name in self._ended:
                raise refused("the session has ended; create another one", 410)
            raise refused(f"there is no session {shortened(name)} of yours", 404)
        found.seen = time.monotonic()
        return found

    def _watch(self, session: Session) -> None:
        """End a session once it has given no sign of life for too long."""
        if session.id not in self._sessions:
            return
        if (left := session.seen + self.limits.session_s - time.monotonic()) <= 0:
            self.end(session)
        else:
            asyncio.get_running_loop().call_later(left, self._watch, session)

    def _make_room(self, count: Callable[[], int], most: int, why: str) -> None:
        """Where there are too many of something, end the sessions of clients that have gone without a word.

        Raises RefusedError (429) if there are still too many.
        """
        if count() >= most:
            for session in list(self._sessions.values()):
                if time.monotonic() - session.seen > self.limits.silent_s:
                    self.end(session)
        if count() >= most:
            raise refused(why.format(most), 429)

    def end(self, session: Session) -> None:
        """End a session: its places go back, its checkpoints stay."""
        self._sessions.pop(session.id, None)
        self._ended[session.id] = None
        while len(self._ended) > 4096:
            self._ended.popitem(last=False)
        for model in session.models.values():
            self._models.pop(model.id, None)
            for future in list(model.unsaved):
                future.cancel()
            for seq in model.waiting:
                if (result := model.results.get(seq)) is not None and not result.ready.is_set():
                    self.results.fail(result, refused("the session has ended"))
            model.waiting.clear()
            if (adapter := model.adapter) is not None:
                # Behind the requests that it has.
                self.trainer.submit(Job(model, lambda a=adapter: self.slots.give(a.shape, a.slot)))  # type: ignore[misc]
            for result in [*model.results.values(), *([model.created] if model.created else [])]:
                self.results.drop(result)
        for sampling in session.samplers.values():
            self._end_sampling(sampling)

    def _end_sampling(self, sampling: SamplingSession) -> None:
        self._samplers.pop(sampling.id, None)
        if sampling.ephemeral and sampling.sampler is not None:
            self.slots.drop(sampling.sampler)
        for result in list(sampling.results.values()):
            result.cancel()
            self.results.drop(result)

    def result(self, owner: str, name: str) -> Result:
        """What a request was promised; its session is now seen. Raises RefusedError."""
        found = self.results.of(owner, name)
        self.session(owner, name.partition(":")[0])
        return found

    def cancel(self, owner: str, name: str) -> dict[str, Any]:
        self.results.of(owner, name).cancel()
        return {}

    # ------------------------------------------------------------------------------------------- requests with numbers

    def model(self, owner: str, name: str) -> Model:
        found = self._models.get(name)
        if found is None or found.owner != owner:
            raise refused(
                f"there is no training client {shortened(name)} of yours in memory; its session may have ended, or the "
                "server was restarted: create one from its last checkpoint",
                404,
            )
        found.session.seen = time.monotonic()
        return found

    def ordered(
        self,
        model: Model,
        seq: int,
        request: bytes,
        make: Callable[[], tuple[Callable[[], Any] | messages.PassRequest, Callable[[Any], bytes], bool]],
        saves: bool = False,
    ) -> Result:
        """Take a request of a training client into its order.

        Args:
            model: whose request it is.
            seq: its number, from 1.
            request: its content, which is the same whenever it is sent.
            make: checks it, and returns the work, what makes its result from that of the work, and whether the result
                is a protocol buffer. A request that it refuses keeps its number: those behind it go on.
            saves: whether the work has a use after the end of the session.
        """
        if (known := model.results.get(seq)) is not None:
            if known.digest != digest_of(request):
                raise refused(f"the request {seq} of {model.id} has come before with another content", 422)
            if known.refusal is not None:
                raise known.refusal
            return known
        if seq < model.next or seq in model.waiting:
            raise refused(f"the request {seq} of {model.id} was done, and its result is not kept any more", 410)
        if seq > model.next + self.limits.waiting:
            raise refused(f"the number {seq} of a request of {model.id} is far ahead of {model.next}, which is next")
        result = self.results.new(model.owner, f"{model.id}:{seq}", request)
        result.forget = lambda: model.results.pop(seq, None)  # type: ignore[assignment]
        model.results[seq] = result
        try:
            work, finish, binary = make()
        except RefusedError as error:
            result.refusal = error
            self.results.finish(result, b"")
            model.waiting[seq] = lambda: None
            self._advance(model)
            raise

        def start() -> None:
            if model.adapter is None:
                self.results.fail(result, refused("the training client could not be made"))
                return
            job = Job(model, work, adapter=model.adapter if isinstance(work, messages.PassRequest) else None)
            future = self.trainer.submit(job)
            if saves:
                model.unsaved.clear()
            else:
                model.unsaved.add(future)
                future.add_done_callback(model.unsaved.discard)
            self._follow(future, result, finish, binary)

        model.waiting[seq] = start
        self._advance(model)
        if seq in model.waiting:
            asyncio.get_running_loop().call_later(self.limits.gap_s, self._give_up, model, seq, result)
        return result

    def _advance(self, model: Model) -> None:
        # Until the adapter is there nothing is begun.
        while (model.created is None or model.created.ready.is_set()) and model.next in model.waiting:
            start = model.waiting.pop(model.next)
            model.next += 1
            start()

    def _give_up(self, model: Model, seq: int, result: Result) -> None:
        """The request before this one has not come."""
        if seq in model.waiting and not result.ready.is_set():
            model.waiting[seq] = lambda: None
            self.results.fail(
                result, refused(f"request {model.next} of {model.id} has not come within {self.limits.gap_s:g} s")
            )

    def _follow(
        self, future: Future[Any], result: Result, finish: Callable[[Any], bytes], binary: bool = False
    ) -> None:
        async def wait() -> None:
            try:
                self.results.finish(result, finish(await asyncio.wrap_future(future)), binary=binary)
            except (Exception, asyncio.CancelledError) as error:
                self.results.fail(result, error)

        self._task(wait())

    def _task(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # ----------------------------------------------------------------------------------------------- training clients

    def _base_named(self, name: str) -> None:
        if name not in self.names:
            raise refused(f"this server holds the base {self.names[0]}, not {shortened(name)}")

    def create_model(self, owner: str, body: Mapping[str, Any]) -> Result:
        """A new training client, or one from a checkpoint if the body has a `path`."""
        session = self.session(owner, messages.text_of(body, "session_id"))
        number = messages.whole_of(body, "model_seq_id", 0, 10**9 - 1)
        name, request = f"{session.id}:train:{number}", _canonical(body)
        if (known := session.models.get(name)) is not None:
            if known.created is None or known.created.digest != digest_of(request):
                raise refused(f"there is a training client {name} already, made with other settings", 422)
            return known.created
        if (optimizer := body.get("optimizer_config")) and messages.object_of(optimizer, "it").get("type") != "adamw":
            raise refused(f"the optimizer {shortened(repr(optimizer))} is unknown, expected adamw")
        if len(session.models) >= self.limits.waiting:
            raise refused(f"this session has asked for {len(session.models)} training clients; begin another", 429)

        def held() -> list[str]:
            return [model.owner for model in self._models.values() if not model.lost]

        self._make_room(
            lambda: held().count(owner), self.limits.adapters, "you have {} training clients in memory; close a session"
        )
        self._make_room(
            lambda: len(held()), self.limits.slots, "all {} places are taken by training clients; ask again later"
        )
        place = moments = None
        if "path" in body:
            place = parse_path(messages.text_of(body, "path", most=400))
            manifest = self.checkpoints.manifest(place, owner)
            shape = Shape(**manifest["shape"])
            if body.get("base_model") is not None:
                self._base_named(messages.text_of(body, "base_model", most=4096))
            moments = bool(body.get("optimizer"))
        else:
            self._base_named(messages.text_of(body, "base_model", most=4096))
            lora = messages.object_of(body.get("lora_config") or {}, "lora_config")
            rank = messages.whole_of(lora, "rank", 1, self.limits.rank, 32)
            shape = Shape(rank, lora.get("train_attn", True) is True, lora.get("train_mlp", True) is True)
            self.slots.layers(shape)
            seed = lora.get("seed")
            seed = secrets.randbits(63) if seed is None else messages.whole_of(lora, "seed", -(2**63), 2**64)
        model = Model(name, owner, session, shape, metadata=messages.read_metadata(body))
        model.created = self.results.new(owner, f"{name}:create", request)
        session.models[name] = self._models[name] = model

        def make() -> Adapter:
            slot = self.slots.take(shape)
            adapter = Adapter(shape, slot)
            try:
                if place is None:
                    self.slots.begin(slot, str(seed))
                else:
                    self._load(adapter, place, owner, bool(moments))
                about = {"owner": owner, "created": time.time(), "base": self.names[0], "shape": vars(shape)}
                model.about = {**about, "metadata": model.metadata}
                self.checkpoints.begin(name, model.about)
            except BaseException:
                self.slots.give(shape, slot)
                raise
            return adapter

        def finish(adapter: Adapter) -> bytes:
            if session.id not in self._sessions:
                self.slots.give(shape, adapter.slot)
                raise refused("the session has ended")
            model.adapter = adapter
            asyncio.get_running_loop().call_soon(self._advance, model)
            kind = "create_model" if place is None else "load_weights"
            return dumps({"type": kind, "model_id": name, **({} if place is None else {"path": place.path})})

        self._follow(self.trainer.submit(Job(model, make)), model.created, finish)
        return model.created

    def _load(self, adapter: Adapter, place: Place, owner: str, moments: bool) -> None:
        """Read a checkpoint into an adapter, in the trainer's thread."""
        manifest = self.checkpoints.manifest(place, owner)
        if Shape(**manifest["shape"]) != adapter.shape:
            raise refused(f"{place.path} holds an adapter of another rank, or of other layers")
        folder = self.checkpoints.verify(place, manifest)
        stored = self.checkpoints.moments(place) if moments else {}
        if stored is None:
            raise refused(f"{place.path} holds no optimizer state; load it without, or take one of save_state")
        moments_read = adam.read(stored, self.base.adapter_parameters(adapter.slot))
        self.slots.read(adapter.slot, folder)
        adapter.moments, adapter.gradient = moments_read, None

    def forward_backward(self, owner: str, content: bytes) -> Result:
        message = messages.parse_pass(content)
        model, seq = self.model(owner, message.model_id), message.seq_id
        if seq < 1:
            raise refused(f"seq_id is {seq}, expected 1 or more")
        # Maps of a message have no order of their own.
        request = message.SerializeToString(deterministic=True)
        read = lambda: (messages.read_pass(message, self.reading), messages.pass_reply, True)  # noqa: E731
        return self.ordered(model, seq, request, read)

    def _request(self, owner: str, body: Mapping[str, Any]) -> tuple[Model, int, bytes]:
        model = self.model(owner, messages.text_of(body, "model_id"))
        return model, messages.whole_of(body, "seq_id", 1, 2**31 - 1), _canonical(body)

    def optim_step(self, owner: str, body: Mapping[str, Any]) -> Result:
        model, seq, request = self._request(owner, body)

        def make() -> Any:
            how = messages.read_adam(body)

            def step() -> dict[str, float]:
                assert model.adapter is not None
                return self.trainer.step(model.adapter, how)

            return step, lambda metrics: dumps({"metrics": metrics}), False

        return self.ordered(model, seq, request, make)

    def load_weights(self, owner: str, body: Mapping[str, Any]) -> Result:
        if body.get("session_id") is not None:
            return self.create_model(owner, body)
        model, seq, request = self._request(owner, body)

        def make() -> Any:
            place = parse_path(messages.text_of(body, "path", most=400))
            self.checkpoints.manifest(place, owner)

            def load() -> None:
                assert model.adapter is not None
                self._load(model.adapter, place, owner, bool(body.get("optimizer")))

            reply = dumps({"type": "load_weights", "path": place.path, "model_id": model.id})
            return load, lambda _: reply, False

        return self.ordered(model, seq, request, make)

    def save_weights(self, owner: str, body: Mapping[str, Any], kind: str) -> Result:
        """`save_state`, `save_weights_for_sampler`, and a snapshot to sample from if that has no name."""
        model, seq, request = self._request(owner, body)
        if kind == "sampler_weights" and body.get("path") is None:
            return self._snapshot(model, seq, request, body)

        def make() -> Any:
            place = place_of(model.id, kind, messages.text_of(body, "path", f"{seq:06d}"))
            if model.about is not None:  # a folder that was removed meanwhile must not cost what is in memory
                self.checkpoints.begin(model.id, model.about, again=True)
            overwrite = body.get("overwrite") is True
            self.checkpoints.refuse_taken(place, owner, overwrite=overwrite)
            life = body.get("ttl_seconds")
            expires = None if life is None else time.time() + messages.whole_of(body, "ttl_seconds", 1, 2**31)
            about = {
                "shape": vars(model.shape),
                "base": self.names[0],
                "expires": expires,
                "metadata": messages.read_metadata(body),
            }

            def save() -> None:
                assert model.adapter is not None
                # Once more: another request may have written it meanwhile.
                self.checkpoints.refuse_taken(place, owner, overwrite=overwrite)
                slot, moments = model.adapter.slot, None
                if kind == "weights":
                    moments = adam.stored(model.adapter.moments, self.base.adapter_parameters(slot))
                self.checkpoints.write(place, self.base.adapter_files(slot), moments, about)

            type_name = "save_weights" if kind == "weights" else "save_weights_for_sampler"
            return save, lambda _: dumps({"type": type_name, "path": place.path}), False

        return self.ordered(model, seq, request, make, saves=True)

    def _snapshot(self, model: Model, seq: int, request: bytes, body: Mapping[str, Any]) -> Result:
        def make() -> Any:
            name = f"{model.session.id}:sample:{messages.whole_of(body, 'sampling_session_seq_id', 0, 10**9 - 1)}"
            if name in model.session.samplers:
                raise refused(f"there is a sampling client {name} already", 422)
            folder = self.checkpoints.folder / "snapshots" / uuid.uuid4().hex

            def copy() -> Sampler:
                assert model.adapter is not None
                return self.slots.snapshot(model.adapter.slot, model.shape, folder)

            def finish(sampler: Sampler) -> bytes:
                if model.session.id not in self._sessions:
                    self.slots.drop(sampler)
                    raise refused("the session has ended")
                self._add_sampling(SamplingSession(name, model.owner, model.session, sampler, ephemeral=True))
                return dumps({"type": "save_weights_for_sampler", "sampling_session_id": name})

            return copy, finish, False

        return self.ordered(model, seq, request, make)

    def _add_sampling(self, sampling: SamplingSession) -> None:
        session = sampling.session
        session.samplers[sampling.id] = self._samplers[sampling.id] = sampling
        snapshots = [each for each in session.samplers.values() if each.ephemeral]
        if len(snapshots) > self.limits.snapshots:
            del session.samplers[snapshots[0].id]
            self._end_sampling(snapshots[0])

    def about(self, owner: str, name: str) -> dict[str, Any]:
        """`get_info`."""
        model = self.model(owner, name)
        arch = str(getattr(self.base.model.config, "model_type", ""))
        data = {"arch": arch, "model_name": self.names[0], "tokenizer_id": self.tokenizer}
        return {
            "type": "get_info",
            "model_data": data,
            "model_id": model.id,
            "is_lora": True,
            "lora_rank": model.shape.rank,
            "model_name": self.names[0],
        }

    def weights_info(self, owner: str, path: str) -> dict[str, Any]:
        manifest = self.checkpoints.manifest(parse_path(path), owner)
        shape = Shape(**manifest["shape"])
        layers = {"train_unembed": False, "train_mlp": shape.mlp, "train_attn": shape.attention}
        return {"base_model": manifest["base"], "is_lora": True, "lora_rank": shape.rank, **layers}

    def run(self, owner: str, name: str) -> dict[str, Any]:
        """A training run in the words of the API."""
        about, found = self.checkpoints.about(name, owner), self.checkpoints.all_of(name, owner)
        last = {place.kind: described(place, manifest) for place, manifest in found}
        times = [about["created"], *(manifest["time"] for _, manifest in found)]
        return {
            "training_run_id": name,
            "base_model": about["base"],
            "model_owner": "you",
            "is_lora": True,
            "lora_rank": about["shape"]["rank"],
            "last_request_time": at(max(times)),
            "last_checkpoint": last.get("weights"),
            "last_sampler_checkpoint": last.get("sampler_weights"),
            "user_metadata": about.get("metadata") or None,
        }

    # ------------------------------------------------------------------------------------------------------- sampling

    def create_sampling_session(self, owner: str, body: Mapping[str, Any]) -> dict[str, Any]:
        session = self.session(owner, messages.text_of(body, "session_id"))
        name = f"{session.id}:sample:{messages.whole_of(body, 'sampling_session_seq_id', 0, 10**9 - 1)}"
        path = body.get("model_path")
        if (known := session.samplers.get(name)) is not None:
            if known.path != path or known.ephemeral:
                raise refused(f"there is a sampling client {name} already, of other weights", 422)
        elif path is None:
            self._base_named(messages.text_of(body, "base_model", most=4096))
            self._add_sampling(SamplingSession(name, owner, session, None))
        else:
            place = parse_path(messages.text_of(body, "model_path", most=400))
            manifest = self.checkpoints.manifest(place, owner)
            folder = self.checkpoints.verify(place, manifest)
            # One place for all clients of a checkpoint, as long as it is not written anew.
            key = (place.path, float(manifest["time"]))
            sampler = self._by_path.setdefault(key, Sampler(Shape(**manifest["shape"]), folder))
            self._add_sampling(SamplingSession(name, owner, session, sampler, place.path))
        if len(session.samplers) > 4096:
            raise refused("the session has more than 4,096 sampling clients; create another session", 429)
        return {"type": "create_sampling_session", "sampling_session_id": name}

    def sampling(self, owner: str, name: str) -> SamplingSession:
        found = self._samplers.get(name)
        if found is None or found.owner != owner:
            raise refused(f"there is no sampling client {shortened(name)} of yours; create one", 404)
        found.session.seen = time.monotonic()
        return found

    def sampler(self, owner: str, name: str) -> dict[str, Any]:
        found = self.sampling(owner, name)
        return {"sampler_id": found.id, "base_model": self.names[0], "model_path": found.path}

    def join(self, owner: str, body: Mapping[str, Any]) -> dict[str, Any]:
        found = self.sampling(owner, messages.text_of(body, "sampling_session_id"))
        found.clones += 1
        return {"type": "join_sampling_session", "client_counter": found.clones}

    def sample(self, owner: str, body: Mapping[str, Any]) -> tuple[Result, list[str]]:
        """`asample`; the result, and an id for each sample."""
        sampling = self.sampling(owner, messages.text_of(body, "sampling_session_id"))
        seq, content = messages.whole_of(body, "seq_id", 0, 2**63 - 1), _canonical(body)
        if (clone := seq // CLONES) > sampling.clones:
            raise refused(f"there is no copy {clone} of {sampling.id}; join_sampling_session makes one")
        count = messages.whole_of(body, "num_samples", 1, self.limits.samples, 1)
        name = f"{sampling.id}:{seq}"
        ids = [f"{name}:{place}" for place in range(count)]
        if (known := sampling.results.get(seq)) is not None:
            if known.digest != digest_of(content):
                raise refused(f"the request {seq} of {sampling.id} has come before with another content", 422)
            return known, ids
        request = messages.read_sample(body, self.reading)
        result = self.results.new(owner, name, content, count)

        def forget() -> None:
            sampling.results.pop(seq, None)
            sampling.done[clone].pop(result, None)

        result.forget = forget
        sampling.results[seq] = result
        self._task(self._sample(sampling, seq, request, result))
        return result, ids

    async def _sample(self, sampling: SamplingSession, seq: int, request: SampleRequest, result: Result) -> None:
        slot: str | None = None
        answers: list[Answer] = []
        scores: list[Future[Any]] = []
        left = False

        def cancel() -> None:
            nonlocal left
            left = True
            for answer in answers:
                answer.leave()
            for future in scores:
                future.cancel()

        def go_on() -> None:
            if left:
                raise asyncio.CancelledError

        result.cancel = cancel
        try:
            if sampling.sampler is not None:
                # It may have to be read, and waits for a step of the engine then.
                slot = await asyncio.to_thread(self.slots.hold, sampling.sampler)
            go_on()
            seed = seed_of(sampling.id, seq) if request.seed is None else request.seed
            answers += [
                self.queue.submit(Request(request.prompt, slot, request.sampling, seed_of(seed, place)))
                for place in range(request.samples)
            ]
            if request.score is not None:
                scores.append(self.trainer.submit(Job(object(), request.score, slot=slot)))
            made = [await asyncio.wrap_future(answer) for answer in answers]
            scored = await asyncio.wrap_future(scores[0]) if scores else None
            go_on()  # the answers that were left have ended early
            top = []
            if request.top_sampled:
                jobs = [Job(object(), messages.after(request, one), slot=slot) for one in made]
                top = [await asyncio.wrap_future(future) for future in [self.trainer.submit(job) for job in jobs]]
            self.results.finish(result, messages.sample_reply(request, made, scored, top), binary=True)
        except (Exception, asyncio.CancelledError) as error:
            cancel()
            self.results.fail(result, error)
        finally:
            if slot is not None:
                self.slots.release(sampling.sampler)  # type: ignore[arg-type]
            clone = seq // CLONES
            sampling.cursors[clone] += 1
            if self.results.by_id.get(result.id) is result:
                sampling.done[clone][result] = sampling.cursors[clone]
            sampling.news.set()

    async def completions(self, owner: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """`retrieve_futures`: which requests of a sampling client are ready since the last call."""
        target = messages.object_of(body.get("target"), "target")
        sampling = self.sampling(owner, messages.text_of(target, "sampling_session_id"))
        clone = messages.whole_of(target, "cloned_sampler_id", 0, CLONES, 0)
        cursor = messages.whole_of(body, "prev_cursor", 0, 2**62, 0)
        if not isinstance(fetched := body.get("retrieved_request_ids") or [], list):
            raise refused(f"retrieved_request_ids must be a list, found {shortened(repr(fetched))}")
        for name in fetched:
            if isinstance(name, str) and (found := self.results.by_id.get(name)) is not None and found.owner == owner:
                self.results.fetched(found)
        wait = messages.number_of(body, "timeout", 0.0, 3600.0, self.limits.poll_s)
        done = {result: at for result, at in sampling.done.get(clone, {}).items() if at > cursor}
        if clone in sampling.done:
            sampling.done[clone] = done
        if not done and wait > 0:
            sampling.news.clear()
            await self.results.wait(owner, sampling.news, min(wait, self.limits.poll_s))
            done = {result: at for result, at in sampling.done.get(clone, {}).items() if at > cursor}
        completions = [
            {"state": "failed", "request_id": result.id}
            if result.failed
            else {
                "state": "finished",
                "request_id": result.id,
                "response_payload_uncompressed_size": len(result.content),
            }
            for result in done
        ]
        return {"completions": completions, "cursor": max(done.values(), default=cursor)}


def _canonical(body: Mapping[str, Any]) -> bytes:
    return json.dumps(body, sort_keys=True).encode()


def names_of(path: str, asked: str) -> list[str]:
    """Names under which a base may be asked for: as on the command line, its folder, and the last part of these."""
    folder = str(Path(path).expanduser().resolve()) if Path(path).expanduser().is_dir() else path
    names = [asked, path, folder, Path(folder).name, Path(asked).name]
    return list(dict.fromkeys([*names, *(name.replace("_", "-") for name in names)]))
