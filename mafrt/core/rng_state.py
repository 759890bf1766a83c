"""The global random generators of python, numpy and torch, as JSON."""

from __future__ import annotations

import logging
import random
from collections.abc import Mapping
from typing import Any, cast

log = logging.getLogger(__name__)


def seed_random_state(seed: int) -> None:
    """Seed the global generators of python, numpy and torch, which otherwise start from the clock of each process."""
    import numpy
    import torch

    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def random_state() -> dict[str, Any]:
    """The states of the global generators of python, numpy and torch (CPU, CUDA), as JSON."""
    import numpy
    import torch

    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() and torch.cuda.is_initialized() else []
    kind, keys, *rest = cast("tuple[Any, ...]", numpy.random.get_state(legacy=True))
    return {
        "python": random.getstate(),
        "numpy": [kind, keys.tobytes().hex(), *rest],
        "torch": bytes(torch.get_rng_state().tolist()).hex(),
        "cuda": [bytes(state.tolist()).hex() for state in cuda],
    }


def restore_random_state(state: Mapping[str, Any]) -> None:
    """Put the global generators where `random_state` found them."""
    import numpy
    import torch

    kind, keys, gauss = state["python"]
    random.setstate((kind, tuple(keys), gauss))
    kind, keys, *rest = state["numpy"]
    numpy.random.set_state((kind, numpy.frombuffer(bytes.fromhex(keys), dtype=numpy.uint32), *rest))
    torch.set_rng_state(_byte_tensor(state["torch"]))
    if state["cuda"]:
        if torch.cuda.device_count() == len(state["cuda"]):
            torch.cuda.set_rng_state_all([_byte_tensor(saved) for saved in state["cuda"]])
        else:
            log.warning("the random states of %d GPUs do not fit here and are not restored", len(state["cuda"]))


def _byte_tensor(text: str) -> Any:
    import torch

    return torch.tensor(list(bytes.fromhex(text)), dtype=torch.uint8)
