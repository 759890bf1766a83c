"""CUDA graphs: work whose launches are recorded once, and then given to the GPU together.

A step of decoding has some nine hundred launches, and a host that needs ten microseconds for each is slower than the
GPU. A recorded step reads and writes the same memory every time, so its inputs and results are tensors that stay.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

log = logging.getLogger(__name__)


class Recorder:
    """Records work on one device; the memory that one recording needs within itself is used again by the next."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.works = True
        """whether recordings have succeeded so far"""
        self._pool: Any = None
        self._last: Any = None

    def record(self, work: Callable[[], Tensor]) -> Callable[[], Tensor] | None:
        """`work` as a call that repeats it; nothing is computed yet. None where it cannot be recorded.

        It must have run before, so that what it makes once is there, and must not wait for the device.
        """
        try:
            with torch.cuda.device(self.device):
                return self._recorded(work)
        except RuntimeError as error:
            self.works = False
            log.warning("decoding launches every kernel by itself: it cannot be recorded (%s)", str(error)[:200])
            return None

    def _recorded(self, work: Callable[[], Tensor]) -> Callable[[], Tensor]:
        here, aside = torch.cuda.current_stream(), torch.cuda.Stream()
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        aside.wait_stream(here)
        with torch.cuda.stream(aside):
            # Other threads may allocate meanwhile: one learns while this one plays.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                result = work()
            finally:
                graph.capture_end()
        here.wait_stream(aside)
        # A pool lives as long as one of its recordings.
        self._last = graph

        def again() -> Tensor:
            graph.replay()
            return result

        return again
