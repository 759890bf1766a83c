"""A frozen base in 4 or 8 bits, by bitsandbytes. Adapters stay float32: their gradients need no finer base (QLoRA).

QLoRA: Dettmers 2023, 2305.14314; LLM.int8: Dettmers 2022, 2208.07339. The head and the embedding are not quantised.
"""

from __future__ import annotations

import importlib.util
from typing import Any, Literal

import torch

from mafrt.core.errors import MissingExtraError, ModelError
from mafrt.core.extras import install


def quantisation(bits: Literal[4, 8], device: torch.device) -> dict[str, Any]:
    """Quantisation arguments for `from_pretrained`. Raises MissingExtraError without bitsandbytes."""
    if importlib.util.find_spec("bitsandbytes") is None:
        raise MissingExtraError(f"a base in 4 or 8 bits needs bitsandbytes; run {install('quant')}.")
    from transformers import BitsAndBytesConfig

    if bits == 8:
        config = BitsAndBytesConfig(load_in_8bit=True)
    else:
        config = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=torch.float32 if device.type == "cpu" else torch.bfloat16,
        )
    index = torch.cuda.current_device() if device.type == "cuda" and device.index is None else device.index
    return {
        "quantization_config": config,
        "device_map": {"": device.type if index is None else f"{device.type}:{index}"},
    }


def keep_differentiable(model: torch.nn.Module) -> None:
    """Keep bitsandbytes from packing 4-bit weights for inference.

    On CPUs with AVX512-BF16 a layer in eval mode packs its weights in the first no-grad forward, and then propagates no
    gradient: adapters in earlier layers would silently not learn. Here the same layers serve sampling and training.
    """
    for module in model.modules():
        if getattr(module, "support_avx512bf16_for_cpu", False):
            module.support_avx512bf16_for_cpu = False  # type: ignore[assignment]


def check_quantised(name: str, model: torch.nn.Module) -> None:
    """Raise ModelError for layers of bitsandbytes that have got ordinary weights, which they cannot compute with."""
    for path, module in model.named_modules():
        state = {"Linear4bit": "quant_state", "Linear8bitLt": "SCB"}.get(type(module).__name__, "")
        parts = (getattr(module, part, None) for part in ("weight", "state"))
        if state and all(getattr(part, state, None) is None for part in parts):
            raise ModelError(
                f"the config.json of the model {name!r} says that bitsandbytes quantised its weights, and "
                f"{path}.weight is not quantised; take the quantization_config out of its config.json, and give "
                "--load_in_4bit to have them quantised while loading"
            )
