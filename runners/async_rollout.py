"""Asynchronous rollout, one step off-policy: the next batch is sampled during the update (`--async_steps 1`).

A thread plays with copies of the adapters from before the concurrent update, so iteration i+1 learns from turns
sampled with the weights at the beginning of iteration i. The base is shared; the adapters exist twice. Before the
update, the trainer recomputes the log-probs of the batch with its own weights, and each token has the truncated
weight min(pi_old / pi_sampler, cap) of `mafrt.algorithms.losses`, as if another engine had sampled it.

A checkpoint keeps the copies too. The batch in progress is lost and played again from them, so a resumed run
repeats an uninterrupted one (as long as the environment does not draw from the global random generators).

Sources: Noukhovitch 2024, "Asynchronous RLHF", 2410.18252 (one step behind costs little); Yao 2025 for the weights.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from mafrt.core import atomic_files
from mafrt.core.errors import CheckpointError, ConfigError
from mafrt.core.types import Turn

if TYPE_CHECKING:
    from mafrt.config.team import Team
    from mafrt.config.train_config import TrainConfig
    from mafrt.models.several_bases import Bases

T = TypeVar("T")

STATE = "ahead.pt"
"""File of the copies in the state of a checkpoint."""


class AsyncRollout(Generic[T]):
    """Background rollout: copies of the adapters, and the thread that samples with them.

    Args:
        base: holds adapters and copies.
        adapters: those of the team; they have been added.
    """

    def __init__(self, base: Bases, adapters: tuple[str, ...]) -> None:
        self.base = base
        self.copies = {name: f"{name}@sampler" for name in adapters}
        for name, copy in self.copies.items():
            # Copies are ordinary adapters of the same base, so the rollout needs no second base.
            base.copy_adapter(name, copy)
        self._batch: Future[T] | None = None
        self._stream = _stream_of(base, tuple(self.copies.values()))
        self.take()

    def take(self) -> None:
        """Copy the present weights of the adapters."""
        import torch

        with torch.no_grad():
            for name, copy in self.copies.items():
                pairs = zip(self.base.adapter_parameters(name), self.base.adapter_parameters(copy), strict=True)
                for parameter, copied in pairs:
                    copied.copy_(parameter)
                self.base.bump(copy)
                # Turns then carry the version of the adapter itself, from which `staleness` counts.
                self.base.versions[copy] = self.base.versions[name]

    def adapters(self, adapter_of: Mapping[str, str]) -> dict[str, str]:
        """Agent -> the copy of its adapter."""
        return {agent: self.copies[name] for agent, name in adapter_of.items()}

    def start(self, play: Callable[[], T]) -> None:
        """Start the rollout of the next batch in a thread, on a GPU in a stream of its own.

        On the stream of the update its many small kernels would wait for the large ones. It begins behind all that was
        launched so far, the copies first of all, and ends when its own kernels have: they may be written again.
        """
        import torch

        threads, batch = torch.get_num_threads(), Future[T]()
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))

        def work() -> None:
            torch.set_num_threads(threads)  # a new thread takes the default of the machine
            try:
                with _on(self._stream):
                    result = play()
                batch.set_result(result)
            except BaseException as error:
                batch.set_exception(error)  # raised by `batch`

        self._batch = batch
        # A daemon: a run that ends by an error must not wait for the rest of a batch.
        threading.Thread(target=work, name="sampler", daemon=True).start()

    def wait(self) -> None:
        """Block until the background rollout ends; its errors are raised by `batch`."""
        if self._batch is not None:
            # Waits for the end and raises nothing: the error belongs to the call that fetches the batch.
            self._batch.exception()

    def batch(self, play: Callable[[], T]) -> T:
        """The batch that was started, or the result of `play` if none was."""
        if self._batch is None:
            return play()
        batch, self._batch = self._batch, None
        return batch.result()

    def state(self) -> dict[str, Any]:
        """The copies, for a checkpoint."""
        names = self.copies.items()
        return {
            name: {"version": self.base.versions[copy], "weights": self.base.adapter_state(copy)}
            for name, copy in names
        }

    def load(self, path: Path) -> None:
        """Take the copies from a checkpoint; in a run that had none they equal the adapters."""
        self.take()
        if not path.is_file():
            return
        stored = atomic_files.load_tensors(path)
        try:
            for name, copy in self.copies.items():
                self.base.load_adapter_state(copy, stored[name]["weights"])
                self.base.versions[copy] = stored[name]["version"]
        except KeyError as error:
            raise CheckpointError(f"{path} has no {error}; go on with the team it was saved with.") from None


def _stream_of(base: Bases, copies: tuple[str, ...]) -> Any:
    import torch

    device = next(iter(base.adapter_parameters(copies[0]))).device
    return torch.cuda.Stream(device) if device.type == "cuda" else None


@contextmanager
def _on(stream: Any) -> Iterator[None]:
    """Launch on the stream, and wait for it at the end."""
    import torch

    with torch.cuda.stream(stream):  # none: the current one
        try:
            yield
        finally:
            if stream is not None:
                stream.synchronize()


def staleness(turns: Iterable[Turn], versions: Mapping[str, int], adapter_of: Mapping[str, str]) -> dict[str, float]:
    """`staleness/AGENT`: updates of the agent's adapter since sampling, mean over its turns."""
    ages: dict[str, list[int]] = {}
    for turn in turns:
        ages.setdefault(turn.agent, []).append(versions[adapter_of[turn.agent]] - turn.adapter_version)
    return {f"staleness/{agent}": sum(steps) / len(steps) for agent, steps in ages.items()}


def check_async(config: TrainConfig, team: Team, *, sharded: bool) -> None:
    """Raise ConfigError where rollout and update cannot run concurrently, or the lag could not be corrected."""
    if not config.play.async_steps:
        return
    where = f"async_steps is {config.play.async_steps}, but "
    if sharded:
        raise ConfigError(
            where + "the base is sharded: it must be whole for the rollout and sharded for the update; leave "
            "async_steps at 0, or sample with --vllm_servers on other GPUs and keep a whole base (configs/zero2.json)."
        )
    if config.engine.engine == "vllm" and not config.engine.vllm_servers:
        raise ConfigError(
            where + "vLLM in this process sleeps while the team learns; use --vllm_servers, or the local engine."
        )
    if config.algorithm.importance_cap is None:
        raise ConfigError(where + "importance_cap is none, which leaves the older samples uncorrected; give a cap.")
    for agent in team.agents:
        top_p = config.play.top_p if agent.top_p is None else agent.top_p
        top_k = config.play.top_k if agent.top_k is None else agent.top_k
        # A token outside the cut has probability 0 in the sampler, and no weight can correct for it.
        if top_p < 1 or top_k > 0:
            raise ConfigError(
                where + f"top_p or top_k cut the distribution of {agent.name!r}, so the importance weight of a sample "
                "under the newer weights is undefined; leave both out."
            )
    if config.coach.coach_feedback:
        raise ConfigError(where + "coach_feedback judges during the rollout; switch one of them off.")
