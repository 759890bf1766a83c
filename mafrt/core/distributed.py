"""The processes of one run: rank and size, and collective calls that work on one process as well.

`accelerate launch` or `torchrun` starts the same script several times. Every process plays a part of the episodes and
learns from a part of the turns. Credit and optimizer steps run in every process on the same numbers, so the adapters
stay equal without ever being sent. With one process every method here is a plain no-op.

Messages are JSON and not pickles: floats come back bit for bit, and nothing that arrives can run. They have a gloo
group of their own on GPUs too, since a dead peer closes its socket at once, where NCCL would wait.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar, cast

from mafrt.core import errors
from mafrt.core.errors import ConfigError, MafrtError, ProcessLostError
from mafrt.core.text import shortened

if TYPE_CHECKING:
    from torch import Tensor

log = logging.getLogger(__name__)

T = TypeVar("T")

TIMEOUT_S = 1800.0
"""Seconds that a process waits for the others before it counts them as lost; their rollouts may differ by as much."""


class Processes:
    """This process among `size`. `ALONE` is the one of an ordinary run; `connect` makes the others.

    All methods but `share` are collective: every process calls them, in the same order.

    Raises:
        ProcessLostError: from any collective method, when another process is dead, or silent for the timeout.
    """

    def __init__(
        self, rank: int = 0, size: int = 1, control: Any = None, timeout_s: float = TIMEOUT_S, device: str = "cpu"
    ) -> None:
        self.rank, self.size = rank, size
        self.timeout_s = timeout_s
        self.device = device
        """device that this one of several processes computes on, such as `cuda:3`"""
        self._control = control
        """Group of the messages; None is torch's default group."""

    @property
    def main(self) -> bool:
        """Whether this is the process that writes and prints."""
        return self.rank == 0

    def share(self, items: Sequence[T]) -> list[T]:
        """This process's part: every `size`-th item, so that items sorted by length are dealt evenly."""
        return list(items[self.rank :: self.size])

    def any(self, flag: bool) -> bool:
        """Whether it is true in any process."""
        return flag if self.size == 1 else any(self.gather(flag))

    def gather(self, value: Any) -> list[Any]:
        """`value` (JSON) of every process, by rank. Tuples are returned as lists, also this process's own."""
        if self.size == 1:
            return [value]
        return [json.loads(part) for part in self._exchange(json.dumps(value, default=_plain).encode())]

    def lead(self, decide: Callable[[], T]) -> T:
        """Result of `decide()` in the first process (JSON), sent to all; a MafrtError there is raised in all."""
        if self.size == 1:
            return decide()
        decision: dict[str, Any] = {}
        if self.main:
            try:
                decision = {"value": decide()}
            except MafrtError as error:
                decision = {"error": packed_error(error)}
        decision = self.gather(decision)[0]
        if "error" in decision:
            raise unpacked_error(decision["error"])
        return cast(T, decision["value"])

    def same(self, value: Any, name: str) -> None:
        """Raise ConfigError unless all processes give the same `value` (JSON; of a dict, the first that differs)."""
        first, *others = self.gather(value)
        for rank, other in enumerate(others, 1):
            if other == first:
                continue
            expected, actual = first, other
            while isinstance(expected, dict) and isinstance(actual, dict):
                key = next(key for key in {**expected, **actual} if expected.get(key) != actual.get(key))
                name, expected, actual = f"{name}: {key}", expected.get(key), actual.get(key)
            raise ConfigError(
                f"{name} differs between processes: process 0 has {expected!r}, process {rank} has {actual!r}; "
                "start all of them with the same settings, code, libraries and files."
            )

    def sum(self, tensors: Iterable[Tensor]) -> None:
        """Add each tensor up over the processes, in place. Of one device; float32 unless all are of another type."""
        tensors = list(tensors)
        if self.size == 1 or not tensors:
            return
        import torch

        # One collective for all tensors: its latency dominates at the size of adapters.
        flat = torch.cat([tensor.detach().reshape(-1) for tensor in tensors])
        self._collective(lambda: torch.distributed.all_reduce(flat))
        for tensor, part in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
            tensor.detach().copy_(part.view_as(tensor))

    def sum_gradients(self, parameters: Iterable[Tensor]) -> None:
        """Add the gradients up over the processes; one that a process has not is 0."""
        if self.size == 1:
            return
        import torch

        parameters = list(parameters)
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        self.sum(parameter.grad for parameter in parameters if parameter.grad is not None)

    def most(self, number: int) -> int:
        """The largest `number` of all processes."""
        return number if self.size == 1 else max(self.gather(number))

    def beside(self) -> Processes:
        """The same processes with a channel of their own, for another thread: two on one channel would mix."""
        if self.size == 1:
            return self
        import torch

        group = _new_group(torch.distributed, self.timeout_s)
        return Processes(self.rank, self.size, group, self.timeout_s, self.device)

    def close(self) -> None:
        """Leave the group."""
        if self.size > 1:
            import torch

            torch.distributed.destroy_process_group()

    def _exchange(self, message: bytes) -> list[bytes]:
        """Every process's message, by rank."""
        import torch

        size = torch.tensor([len(message)])
        sizes = [torch.zeros_like(size) for _ in range(self.size)]
        self._collective(lambda: torch.distributed.all_gather(sizes, size, group=self._control))
        # all_gather needs equal sizes on all processes.
        longest = max(int(length) for length in sizes)
        padded = torch.frombuffer(bytearray(message.ljust(longest, b" ")), dtype=torch.uint8)
        messages = [torch.empty_like(padded) for _ in range(self.size)]
        self._collective(lambda: torch.distributed.all_gather(messages, padded, group=self._control))
        return [part[: int(length)].numpy().tobytes() for part, length in zip(messages, sizes, strict=True)]

    def _collective(self, call: Callable[[], Any]) -> None:
        try:
            call()
        except RuntimeError as error:  # gloo and NCCL share no narrower class
            raise lost(error, self.rank, self.size, self.timeout_s) from error


ALONE = Processes()

_joined = False


def lost(error: Exception, rank: int, size: int, timeout_s: float) -> ProcessLostError:
    """The sentence for a collective that failed."""
    log.debug("process %d: %s", rank, error)
    return ProcessLostError(
        f"another of the {size} processes is gone, or was silent for {timeout_s:g} s (process_timeout_s), so process "
        f"{rank} ends too; the line of the one that failed says why, and --load_path with the run's folder goes on "
        "from its newest checkpoint, with any number of processes"
    )


def started() -> tuple[int, int]:
    """(rank, number) of this process as its launcher says; (0, 1) where there is none. Imports nothing."""
    try:
        return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    except (KeyError, ValueError):
        return 0, 1


def started_here() -> tuple[int, int]:
    """The same among the processes of this machine."""
    rank, size = started()
    if size == 1:
        return 0, 1
    try:
        return int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    except (KeyError, ValueError):
        return rank, size


def joined() -> bool:
    """Whether `connect` has joined others in this process, or tried to; also after `close`."""
    return _joined


def connect(*, cpu: bool, timeout_s: float = TIMEOUT_S) -> Processes:
    """Join the other processes, if a launcher started several: through accelerate, NCCL on GPUs, gloo on CPUs."""
    global _joined
    rank, size = started()
    names = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"]
    # Kubernetes sets MASTER_PORT to an address for everybody, where a service is called master.
    for name in names if size == 1 else [*names, "MASTER_PORT"]:
        if (value := os.environ.get(name, "")) and not value.isdecimal():
            raise ConfigError(
                f"the environment variable {name} is {shortened(value)!r}, expected a whole number; unset it, or start "
                "several processes with `accelerate launch` or `torchrun`, which set it"
            )
    for name, other, alone in (("WORLD_SIZE", "RANK", 1), ("RANK", "WORLD_SIZE", 0)):
        if not os.environ.get(other) and int(os.environ.get(name) or alone) != alone:
            raise ConfigError(
                f"the environment variable {name} is {os.environ[name]}, and {other} is not set, so that this process "
                f"would train alone; unset {name}, or start several processes with `accelerate launch` or `torchrun`"
            )
    if rank >= size:
        raise ConfigError(
            f"the environment variables RANK and WORLD_SIZE are {rank} and {size}, expected a rank below the size; "
            "unset them, or start several processes with `accelerate launch` or `torchrun`, which set them"
        )
    if size == 1:
        return ALONE
    import torch

    # Its functions take the default group for a default argument: imported later, they would keep that group, and the
    # threads of gloo with it, alive beyond `close`.
    import torch.distributed.nn.functional
    from accelerate import PartialState

    _joined = True
    try:
        state = PartialState(cpu=cpu, timeout=timedelta(seconds=timeout_s))
        control = None if state.backend == "gloo" else _new_group(torch.distributed, timeout_s)
    except (RuntimeError, ValueError) as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise ProcessLostError(
            f"process {rank} of {size} cannot join the others ({lines[0][:200]}); start all of them with "
            "`accelerate launch` or `torchrun`, with one address and port that every machine reaches."
        ) from error
    return Processes(rank, size, control, timeout_s, "cpu" if control is None else str(state.device))


def _new_group(distributed: Any, timeout_s: float) -> Any:
    return distributed.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))


def packed_error(error: MafrtError) -> dict[str, str]:
    """An error of ours as JSON."""
    return {"kind": type(error).__name__, "text": str(error)}


def unpacked_error(packed: dict[str, str]) -> MafrtError:
    """The error that `packed_error` packed, of the same class where it is one of `mafrt.core.errors`."""
    kind = getattr(errors, packed["kind"], MafrtError)
    known = isinstance(kind, type) and issubclass(kind, MafrtError)
    return kind(packed["text"]) if known else MafrtError(packed["text"])


def _plain(value: Any) -> Any:
    """Values outside JSON: scalars of numpy and torch as numbers, sets as lists, the rest as text."""
    if hasattr(value, "item") and getattr(value, "ndim", 1) == 0:
        return value.item()
    return sorted(value, key=str) if isinstance(value, (set, frozenset)) else str(value)
