"""Of each family: a model of the hub, what it takes, how it calls tools, and whether vLLM serves its adapters.

Everything is read from installed packages, and no weights are loaded: the model that transformers names beside the
configuration of a family, the numbers of that default configuration on torch's device without memory, and vLLM's own
class for it (with torchvision, or classes that read images cannot be looked at). Writes bench/results/families.md.
"""

from __future__ import annotations

import importlib
import inspect
import logging
import re
import sys
from pathlib import Path

import torch
from huggingface_hub.errors import StrictDataclassError

from mafrt.models.adapted_model import AdaptedModel

PAGE = Path(__file__).resolve().parents[1] / "results" / "families.md"
BEGIN, END = "<!-- checkpoints: begin -->\n", "<!-- checkpoints: end -->\n"
RANK = 8
CALLS = {
    r"qwen3_5.*|nemotron_h|seed_oss": "functions",
    r"minimax_m2|deepseek_v32": "invocations",
    r"glm4_moe.*|glm_moe_dsa|hunyuan_v1.*": "keys and values",
    r"deepseek_v3|ministral3?|mistral": "headers",
    r"gemma3n.*|gemma4.*": "braces",
    r"llama4.*|olmo3|gemma3.*|lfm2.*": "Python",
    r"llama|qwen2.*|qwen3|qwen3_moe|qwen3_next|granite.*|phi3|smollm3": "JSON",
    r"gpt_oss": "channels",
}
"""family -> the form of its tool calls, in the words of mafrt/environment/call_forms.py"""


def checkpoint(config: object) -> str:
    """The model of the hub that transformers names beside a configuration's class."""
    source = inspect.getsource(sys.modules[type(config).__module__])
    before = source[: source.index(f"class {type(config).__name__}(")]
    found = re.search(r'checkpoint="([^"]+)"', before[max(before.rfind("@auto_docstring"), 0) :])
    return f"`{found[1]}`" if found else ""


def sizes(config: object) -> tuple[str, str]:
    """GB of the weights in bfloat16, and MB of an adapter of rank 8 in float32, with the family's default sizes."""
    from transformers import AutoModelForCausalLM

    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        adapted = AdaptedModel(model, None)
        paths, linears = adapted.match_targets("a", ("all-linear",)), adapted.linear_paths()
    except Exception:  # a default configuration that makes no model
        return "", ""
    widths = [sum(linears[p]) if p in linears else sum(adapted.fused[p][:2]) * adapted.fused[p][2] for p in paths]
    weights = sum(parameter.numel() for parameter in model.parameters())
    return f"{2 * weights / 1e9:.1f}", f"{4 * RANK * sum(widths) / 1e6:.0f}"


def served(architecture: str) -> str:
    """Whether vLLM's class for an architecture takes adapters; empty where it has none."""
    from vllm.model_executor.models import registry

    where = {**registry._TEXT_GENERATION_MODELS, **registry._MULTIMODAL_MODELS}.get(architecture)
    if where is None:
        return ""
    try:
        place = where[0] if where[0].startswith("vllm.") else f"vllm.model_executor.models.{where[0]}"
        module = importlib.import_module(place)
    except ImportError as error:
        return f"? ({error.name})"
    return "yes" if getattr(getattr(module, where[1]), "supports_lora", False) else "no"


def rows() -> list[str]:
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    made = []
    for family, name in sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items()):
        try:
            config = AutoConfig.for_model(family)
        except StrictDataclassError:  # it has no default configuration
            continue
        calls = next((form for pattern, form in CALLS.items() if re.fullmatch(pattern, family)), "")
        lora = served(name if isinstance(name, str) else name[0])
        made.append(f"| `{family}` | {' | '.join((checkpoint(config), *sizes(config), calls, lora))} |")
        print(made[-1], flush=True)
    return made


def main() -> int:
    logging.disable(logging.WARNING)
    columns = "| family | a model of it | weights, GB | an adapter, MB | tool calls | adapters in vLLM |\n"
    head = columns + "|---" * 6 + "|\n"
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    made = before + BEGIN + head + "".join(f"{row}\n" for row in rows()) + END + rest.partition(END)[2]
    PAGE.write_text(made, encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
