"""A model of transformers as a GGUF file, the format of llama.cpp."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mafrt.core.errors import ConfigError


def stored_as(dtype: str) -> int:
    """llama.cpp's number of a number format, `float32` or `bfloat16`."""
    import gguf

    return int(gguf.GGMLQuantizationType.BF16 if dtype == "bfloat16" else gguf.GGMLQuantizationType.F32)


def write_gguf(model: Any, path: Path, dtype: str) -> None:
    """Write a Qwen3 or Llama model of transformers for llama.cpp, with the texts `<0>`, `<1>`, ... as its vocabulary.

    Raises:
        ConfigError: another family, or scaled rotary positions.
    """
    import gguf

    config = model.config
    kinds = {"qwen3": gguf.MODEL_ARCH.QWEN3, "llama": gguf.MODEL_ARCH.LLAMA}
    rope = getattr(config, "rope_parameters", None) or {}
    if config.model_type not in kinds or rope.get("rope_type", "default") != "default":
        raise ConfigError(f"llama.cpp is a rival for plain Qwen3 and Llama models; found {config.model_type!r}.")
    kind = kinds[config.model_type]
    heads, groups = config.num_attention_heads, config.num_key_value_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    file = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[kind])
    file.add_context_length(config.max_position_embeddings)
    file.add_embedding_length(config.hidden_size)
    file.add_block_count(config.num_hidden_layers)
    file.add_feed_forward_length(config.intermediate_size)
    file.add_head_count(heads)
    file.add_head_count_kv(groups)
    file.add_key_length(width)
    file.add_value_length(width)
    file.add_rope_dimension_count(width)
    file.add_rope_freq_base(rope["rope_theta"])
    file.add_layer_norm_rms_eps(config.rms_norm_eps)
    file.add_vocab_size(config.vocab_size)
    # The one kind of vocabulary for which llama.cpp assumes no end token.
    file.add_tokenizer_model("rwkv")
    file.add_token_list([f"<{number}>" for number in range(config.vocab_size)])
    file.add_token_types([int(gguf.TokenType.NORMAL)] * config.vocab_size)
    names = gguf.get_tensor_name_map(kind, config.num_hidden_layers)
    stored = gguf.GGMLQuantizationType(stored_as(dtype))
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        weight = tensor.detach().float().cpu()
        if kind == gguf.MODEL_ARCH.LLAMA and name.endswith(("q_proj.weight", "k_proj.weight")):
            # There llama.cpp rotates neighbours, transformers the two halves of a head.
            count = heads if "q_proj" in name else groups
            weight = weight.view(count, 2, -1, weight.shape[1]).transpose(1, 2).reshape(weight.shape)
        array, kept = weight.contiguous().numpy(), gguf.GGMLQuantizationType.F32
        if array.ndim > 1:
            array, kept = gguf.quants.quantize(array, stored), stored
        place = names.get_name(name, try_suffixes=(".weight",))
        if place is None:
            raise ConfigError(f"llama.cpp has no place for {name!r}.")
        file.add_tensor(place, array, raw_dtype=kept)
    file.write_header_to_file()
    file.write_kv_data_to_file()
    file.write_tensors_to_file()
    file.close()
