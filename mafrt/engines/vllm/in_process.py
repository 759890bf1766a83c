"""The vLLM engine in a process of its own on this machine: the base once more, and every adapter beside it.

vLLM (https://docs.vllm.ai) keeps a copy of the base, since its kernels want the weights laid out their own way.
Adapters are handed over after each update, a new name and number per version (`handover.py`): nothing is merged,
nothing is started again, and no prompt cache outlives the weights it was computed with.

Log-probabilities are those of the distribution really sampled from (`logprobs_mode="processed_logprobs"`), as
`Completion` promises. They agree with the trainer's within the difference of two implementations of one model, so they
serve for importance weights and not as the policy's own: `foreign` says so.
"""

from __future__ import annotations

import contextlib
import os
import queue
import subprocess
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from mafrt.config.train_config import EngineConfig
from mafrt.core.errors import ConfigError, EngineDownError, ModelError
from mafrt.core.types import Completion, Request
from mafrt.engines.checks import check_engine, room_for_rank
from mafrt.engines.requests import check_requests, completion, sampling_words
from mafrt.engines.vllm.adapter_sync import AdapterVersion, Handover
from mafrt.engines.vllm.gpu_layout import SHARE, visible
from mafrt.engines.vllm.watchdog import POLL_S, alive, birth, children, descendants, dismiss, watch, watch_what_starts
from mafrt.models.cache_rows import keeps_states
from mafrt.models.checkpoint_class import has_towers

if TYPE_CHECKING:
    from mafrt.models.shared_base import SharedBase

T = TypeVar("T")

LAUNCHER = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "GROUP_RANK")
"""Variables that launchers set for their processes; vLLM's own processes are no part of that."""


class VllmEngine:
    """Samples for the whole team with vLLM, beside the trainer.

    Args:
        base: the model and its adapters; must have been loaded from a folder or the hub, where vLLM loads it too.
        config: the engine's settings.
        window: tokens of prompt and answer together; None for the base's.

    Raises:
        MissingExtraError: vLLM is not installed.
        ConfigError: settings or adapters that vLLM cannot serve.
        ModelError: vLLM cannot load the base.
    """

    foreign = True

    def __init__(self, base: SharedBase, config: EngineConfig, *, window: int | None = None) -> None:
        shapes = {name: record.rank for name, record in base.records.items()}
        targets = {name: tuple(record.layers) for name, record in base.records.items()}
        check_engine(config, shapes, targets, base.activated)
        self.base = base
        self.window = window or base.context_window
        self._eos = base.eos_ids
        gpu = base.device.type != "cpu"
        self._sleeps = gpu and config.vllm_sleep
        self._asleep = False
        self._dead = False
        slots = len(base.records) + 1  # the bare base is one too
        settings: dict[str, Any] = {
            "model": base.name,
            "dtype": str(base.model.dtype).removeprefix("torch."),
            "enable_lora": True,
            "max_loras": config.max_loras or slots,
            "max_cpu_loras": max(config.max_loras or 0, slots) + 1,
            "max_lora_rank": config.max_lora_rank or room_for_rank(max(shapes.values(), default=1)),
            # Bounded by the run's window, since vLLM refuses to start where the keys and values of its longest sequence
            # do not fit.
            "max_model_len": self.window,
            "gpu_memory_utilization": config.gpu_memory_utilization or (SHARE if gpu else 0.1),
            "tensor_parallel_size": config.tensor_parallel_size,
            "logprobs_mode": "processed_logprobs",
            "enforce_eager": not gpu,  # compiling pays on a GPU only
            # vLLM 0.32 on a CPU dies of a prompt cut into chunks whose request has a seed of its own; and without such
            # chunks it keeps no states of recurrences for prompts that begin alike.
            "enable_chunked_prefill": gpu,
            "enable_prefix_caching": gpu or not keeps_states(base.model.config),
            "enable_sleep_mode": self._sleeps,
            # Otherwise vLLM mixes in the model's own defaults, such as top_p, and samples from another distribution
            # than the trainer scores.
            "generation_config": "vllm",
            "use_tqdm_on_load": False,
            "disable_log_stats": True,
            "seed": 0,
        } | ({"language_model_only": True} if has_towers(base.model.config) else {})
        self._loaded: set[int] = set()
        self._handover = Handover(base)
        self._thread = _OneThread()
        starting = watch_what_starts(self._handover.folder)
        try:
            others = children(os.getpid())
            with _environment(base.device, config.tensor_parallel_size):
                classes = tuple(getattr(base.model.config, "architectures", None) or ())
                self._llm, self._vllm = self._thread.call(lambda: _start(settings, base.name, classes))
            started = children(os.getpid()) - others
            self._thread.lives = {pid: birth(pid) for pid in started}
            self.pids = sorted(started.union(*(descendants(pid) for pid in started)))
            """vLLM's processes"""
            self._close = weakref.finalize(self, _shut_down, self._llm, watch(self.pids, self._handover.folder))
        finally:
            dismiss(starting)

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """One completion per request, in their order; see `LocalEngine.generate`.

        Raises:
            EngineDownError: vLLM's process died.
        """
        check_requests(self.base, self.window, requests)
        if not requests:
            return []
        parcels = self.hand_over(requests)
        prompts = [{"prompt_token_ids": list(request.prompt_ids)} for request in requests]
        sampling = [self._sampling(request) for request in requests]
        adapters = [self._lora(parcels[request.adapter]) for request in requests]
        outputs = self._ask(lambda: self._llm.generate(prompts, sampling, lora_request=adapters, use_tqdm=False))
        return [self._completion(request, output.outputs[0]) for request, output in zip(requests, outputs, strict=True)]

    def rest(self) -> None:
        """Give the GPU's memory back until the next call, where the device can; caches are gone then."""
        if self._sleeps and not self._asleep:
            # The prefix cache is emptied first: its blocks are gone after the sleep, but would be looked up.
            self._ask(self._llm.reset_prefix_cache)
            self._ask(lambda: self._llm.sleep(level=1))
            self._asleep = True

    def close(self) -> None:
        """End vLLM's processes and remove the adapters' folders."""
        self._close()
        self._handover.close()

    def _wake(self) -> None:
        if self._asleep:
            # What torch keeps for later in this process is not free for vLLM's.
            if self.base.device.type == "cuda":
                torch.cuda.empty_cache()
            self._ask(self._llm.wake_up)
            self._asleep = False

    def hand_over(self, requests: Sequence[Request]) -> Mapping[str | None, AdapterVersion]:
        """Load the adapters of these requests into vLLM as they are now, and drop the versions that they replace.

        `generate` does so by itself.
        """
        self._wake()
        parcels, replaced = self._handover.parcels(request.adapter for request in requests)
        # Old versions leave first, since the new ones need their places.
        for parcel in replaced:
            self._ask(partial(self._llm.llm_engine.remove_lora, parcel.number))
            self._loaded.discard(parcel.number)
            self._handover.forget(parcel)
        for parcel in parcels.values():
            # Before it is needed: one that cannot be loaded is an error here, and the end of the engine later.
            if parcel.number not in self._loaded:
                self._add(parcel)
                self._loaded.add(parcel.number)
        return parcels

    def _add(self, parcel: AdapterVersion) -> None:
        try:
            self._ask(lambda: self._llm.llm_engine.add_lora(self._lora(parcel)))
        except EngineDownError:
            raise
        except Exception as error:  # a failure in vLLM's process is raised as a bare Exception
            raise ConfigError(
                f"vLLM cannot hold the adapter {parcel.name} ({_last_line(error)}); give --max_lora_rank and targets "
                "that fit it."
            ) from error

    def _lora(self, parcel: AdapterVersion) -> Any:
        return self._vllm.lora.request.LoRARequest(parcel.name, parcel.number, str(parcel.path))

    def _sampling(self, request: Request) -> Any:
        words = sampling_words(request, self._eos, self.window)
        return self._vllm.SamplingParams(**words, detokenize=bool(words["stop"]))

    def _completion(self, request: Request, output: Any) -> Completion:
        ids = list(output.token_ids)
        logprobs = [by_token[token].logprob for token, by_token in zip(ids, output.logprobs, strict=True)]
        return completion(self.base, request, ids, logprobs, output.finish_reason)

    def _ask(self, work: Callable[[], T]) -> T:
        """Have vLLM do something; its death is one sentence, and no later call tries again."""
        from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

        died = "vLLM's process died (its last words are above); nothing that it was sampling is used"
        if self._dead:
            raise EngineDownError(died)
        try:
            return self._thread.call(work)
        except (EngineDeadError, EngineGenerateError, _DiedError) as error:
            self._dead = True
            raise EngineDownError(died) from error


class _DiedError(Exception):
    """A process is gone whose answer is waited for."""


class _OneThread:
    """Makes every call in one thread of its own, and stops waiting when a process that it depends on is gone.

    vLLM 0.32 waits for ever for a process that was killed while something was asked of it; and its sockets belong to
    the thread that made them.
    """

    def __init__(self) -> None:
        self.lives: Mapping[int, str | None] = {}
        """processes, and when they were born"""
        self._work: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]]] = queue.SimpleQueue()
        threading.Thread(target=self._serve, name="vllm", daemon=True).start()

    def call(self, work: Callable[[], T]) -> T:
        result: Future[T] = Future()
        self._work.put((work, result))
        gone = 0
        while gone < 2:  # it may have ended in good order, with an error that says why, just now
            done, _ = wait([result], timeout=POLL_S)
            if done:
                return result.result()
            # A process id alone may be used again by another process, hence its birth too.
            gone += not all(alive(pid, born) for pid, born in self.lives.items())
        raise _DiedError

    def _serve(self) -> None:
        while True:
            work, result = self._work.get()
            try:
                result.set_result(work())
            except BaseException as error:  # raised again where it was asked for
                result.set_exception(error)


def _start(settings: Mapping[str, Any], name: str, classes: Sequence[str]) -> tuple[Any, Any]:
    """The engine and the module, with vLLM's many ways to fail as one.

    Args:
        settings: of the engine.
        name: of the base, for the message.
        classes: that its configuration names.
    """
    import vllm
    import vllm.lora.request

    try:
        for known in (vllm.ModelRegistry.models.get(cls) for cls in classes):
            # It would say so at the end of its start.
            if known is not None and not getattr(model := known.load_model_cls(), "supports_lora", False):
                raise ModelError(
                    f"vLLM's class for {name}, {model.__name__}, takes no adapters; leave --engine vllm out"
                )
        return vllm.LLM(**settings), vllm
    except ModelError:
        raise
    except Exception as error:  # what its classes raise over a configuration has no common class
        raise ModelError(
            f"vLLM cannot serve {name}: found {_last_line(error)!r}; its own log is above. Lower "
            "--gpu_memory_utilization or --context_window if memory is short, or leave --engine vllm out"
        ) from error


def _last_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    # pydantic adds an address to what it found.
    return next((line for line in reversed(lines) if "errors.pydantic.dev" not in line), lines[-1])[:300]


QUIET = {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1"}
"""environment variables by which vLLM prints errors only and reports nothing"""
ON_CPU = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
"""those of a CPU: GiB of its cache, and threads that keep to no core"""


@contextlib.contextmanager
def _environment(device: Any, gpus: int) -> Iterator[None]:
    """Environment variables of vLLM's processes while they start. The user's values win; all are restored."""
    # A process of its own: inside the trainer's, vLLM would bind threads and memory, and seed the generators. It is
    # not forked, since locks of torch's threads would be copied as they are.
    words: dict[str, str | None] = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        **QUIET,
    }
    if device.type == "cpu":
        words |= ON_CPU
    words = {name: value for name, value in words.items() if name not in os.environ}
    words |= {name: None for name in os.environ if name in LAUNCHER or name.startswith("TORCHELASTIC_")}
    if device.type == "cuda":
        # vLLM counts from the first GPU that it sees.
        words["CUDA_VISIBLE_DEVICES"] = visible(device, gpus, os.environ.get("CUDA_VISIBLE_DEVICES"))
    before = {name: os.environ.get(name) for name in words}
    _set(words)
    try:
        yield
    finally:
        _set(before)


def _set(words: Mapping[str, str | None]) -> None:
    for name, value in words.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def _shut_down(llm: Any, guardian: subprocess.Popen[bytes]) -> None:
    dismiss(guardian)
    llm.llm_engine.engine_core.shutdown()
