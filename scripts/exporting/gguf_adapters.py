"""Adapters as GGUF files, the format of llama.cpp and Ollama, each with an Ollama Modelfile.

The layout is that of llama.cpp's `convert_lora_to_gguf.py`, which is in no package: `NAME.lora_a` [rank, in] and
`NAME.lora_b` [out, rank] for each adapted layer, scaled by `adapter.lora.alpha` / rank.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from mafrt.config.agent import AgentSpec
from mafrt.core.errors import ConfigError
from mafrt.core.extras import package
from mafrt.scripts.exporting.merged import base_config

ARCHITECTURES = {"llama": "LLAMA", "mistral": "LLAMA", "qwen2": "QWEN2", "qwen3": "QWEN3"}
"""Family -> llama.cpp's name of it, of families whose linear layers it stores as they are, or reordered as below."""
GGUF = "adapter.gguf"
_ENDS_EARLY = re.compile(r'"""[ \t]*[\r\n]')
_LAYER = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_(?P<part>[AB])\.weight")


def check_gguf(base: str) -> Any:
    """The configuration of a base whose adapters can be written.

    Raises:
        ConfigError: another family, or a base that cannot be read.
        MissingExtraError: gguf is missing.
    """
    package("--gguf", "bases", "gguf")
    config = base_config(base, "gguf is given", "gguf")
    if config.model_type not in ARCHITECTURES:
        raise ConfigError(
            f"gguf is given, and the base {base} is of the family {config.model_type!r}; adapters of "
            f"{', '.join(ARCHITECTURES)} can be written. Leave gguf out."
        )
    return config


def write_gguf_adapter(target: Path, source: Path, base: str) -> None:
    """Write a PEFT folder as one GGUF file. Raises ConfigError for a layer that llama.cpp adapts in no such way."""
    import gguf
    from safetensors.torch import load_file

    from mafrt.models.peft_format import by_pattern, read_settings

    config, given = check_gguf(base), read_settings(source)
    kind = gguf.MODEL_ARCH[ARCHITECTURES[config.model_type]]
    names = gguf.get_tensor_name_map(kind, config.num_hidden_layers)
    file = gguf.GGUFWriter(target, gguf.MODEL_ARCH_NAMES[kind])
    file.add_type(gguf.GGUFType.ADAPTER)
    file.add_string(gguf.Keys.Adapter.TYPE, "lora")
    file.add_float32(gguf.Keys.Adapter.LORA_ALPHA, float(given["lora_alpha"]))
    tensors = load_file(source / "adapter_model.safetensors")
    layers = {name: found for name in tensors if (found := _LAYER.fullmatch(name)) is not None}
    alphas = by_pattern(given.get("alpha_pattern"), [found["module"] for found in layers.values()], given["lora_alpha"])
    scales = {name: alpha / given["lora_alpha"] for name, alpha in zip(layers, alphas, strict=True)}
    for name, tensor in tensors.items():
        found = layers.get(name)
        place = names.get_name(f"{found['module']}.weight", try_suffixes=(".weight",)) if found else None
        if found is None or place is None:
            raise ConfigError(f"{source}: llama.cpp has no place for {name!r}; leave gguf out.")
        weight = tensor.float()
        if found["part"] == "B":  # the file has one alpha for all layers
            weight = weight * scales[name]
        if found["part"] == "B" and kind == gguf.MODEL_ARCH.LLAMA and found["module"].endswith((".q_proj", ".k_proj")):
            # There llama.cpp rotates neighbours, transformers the two halves of a head.
            query = found["module"].endswith(".q_proj")
            heads = config.num_attention_heads if query else config.num_key_value_heads
            weight = weight.view(heads, 2, -1, weight.shape[1]).transpose(1, 2).reshape(weight.shape)
        file.add_tensor(f"{place}.lora_{found['part'].lower()}", weight.contiguous().numpy())
    file.write_header_to_file()
    file.write_kv_data_to_file()
    file.write_tensors_to_file()
    file.close()


def check_modelfile(agents: Iterable[AgentSpec], base: str) -> None:
    """Raises ConfigError for a role prompt or a name of a base that no Modelfile can hold.

    As Ollama's parser (`parser/parser.go`) reads one: a text in three double quotes ends with the first line that ends
    in three, and a character that cannot be printed is dropped, as are a no-break space and the joiners of emoji.
    """
    if not base.isprintable() or base.strip() != base or base[:1] in ("", '"'):
        raise ConfigError(f"gguf is {base!r}; expected the name of the base in llama.cpp or Ollama, on one line.")
    for agent in agents:
        odd = next((char for char in agent.prompt if not (char.isprintable() or char in "\n\r\t")), None)
        if odd is not None:
            raise ConfigError(
                f"the role prompt of {agent.name!r} holds U+{ord(odd):04X}, which Ollama drops from a Modelfile; leave "
                "gguf out."
            )
        if _ENDS_EARLY.search(agent.prompt):
            raise ConfigError(
                f"a line of the role prompt of {agent.name!r} ends in three double quotes, which end the text of a "
                "Modelfile; leave gguf out."
            )


def modelfile(agent: AgentSpec, base: str, temperature: float) -> str:
    """Ollama's Modelfile of an agent that `check_modelfile` took."""
    lines = [f"FROM {base}", f"ADAPTER ./{GGUF}", f"PARAMETER temperature {temperature:g}"]
    return "\n".join([*lines, *([f'SYSTEM """{agent.prompt}"""'] if agent.prompt else []), ""])


def served_by_llama(base: str, adapters: Iterable[str]) -> str:
    """The command that serves adapters with llama.cpp; a request names its own: `"lora": [{"id": 0, "scale": 1}]`.

    One that names none gets the base. Adapters of `--lora` would all be added up for it, whatever
    `--lora-init-without-apply` says.
    """
    scaled = ",".join(f"{name}/{GGUF}:0" for name in adapters)
    return shlex.join(["llama-server", "--model", base, "--lora-scaled", scaled])
