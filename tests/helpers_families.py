"""Tiny random models of every family in transformers' causal mapping: its configuration class with small numbers."""

from __future__ import annotations

from typing import Any

import torch
from helpers_models import CHARS, SPECIAL

VOCAB = len(CHARS) + len(SPECIAL)

SMALL: dict[str, Any] = {
    # widths
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "dim", "word_embed_proj_dim", "embedding_size"), 64),
    **dict.fromkeys(
        (
            "intermediate_size",
            "ffn_dim",
            "n_inner",
            "ffn_hidden_size",
            "d_inner",
            "encoder_ffn_dim",
            "decoder_ffn_dim",
            "intermediate_size_mlp",
            "dense_intermediate_size",
            "feed_forward_size",
            "d_ff",
        ),
        96,
    ),
    **dict.fromkeys(
        (
            "moe_intermediate_size",
            "shared_expert_intermediate_size",
            "shared_intermediate_size",
            "expert_ffn_hidden_size",
            "moe_shared_expert_intermediate_size",
        ),
        32,
    ),
    # depth
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers"), 4),
    # heads
    **dict.fromkeys(
        (
            "num_attention_heads",
            "n_head",
            "n_heads",
            "num_heads",
            "encoder_attention_heads",
            "decoder_attention_heads",
            "linear_num_value_heads",
            "mamba_n_heads",
            "mamba_num_heads",
        ),
        4,
    ),
    **dict.fromkeys(("num_key_value_heads", "linear_num_key_heads", "num_kv_heads"), 2),
    **dict.fromkeys(
        ("head_dim", "linear_key_head_dim", "linear_value_head_dim", "attention_head_dim", "global_head_dim"), 16
    ),
    **dict.fromkeys(("kv_lora_rank", "q_lora_rank", "v_head_dim", "qk_nope_head_dim"), 16),
    **dict.fromkeys(("qk_rope_head_dim",), 8),
    **dict.fromkeys(("mamba_d_head", "mamba_head_dim"), 32),
    **dict.fromkeys(("mamba_d_state", "ssm_state_size", "state_size"), 16),
    # experts
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts"), 2),
    **dict.fromkeys(("n_group", "topk_group"), 1),
    **dict.fromkeys(("first_k_dense_replace", "num_dense_layers", "n_shared_experts", "num_shared_experts"), 1),
    # the rest
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), VOCAB),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "seq_length"), 256),
    **dict.fromkeys(("sliding_window", "sliding_window_size", "attention_window_size", "window_size"), 12),
    "is_decoder": True,
    "hidden_size_per_layer_input": 8,
    "num_kv_shared_layers": 0,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": 2,
    "decoder_start_token_id": 1,
}


def model_types() -> list[str]:
    """Every family that transformers loads as a causal language model."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def shrink(config: Any, own: dict[str, Any]) -> None:
    """Write small numbers over those of a configuration and of the ones within it."""
    for name, value in (SMALL | own).items():
        if hasattr(config, name) and not isinstance(getattr(type(config), name, None), property):
            found = getattr(config, name)
            if isinstance(found, list) and isinstance(value, int):
                value = [value] * len(found)
            setattr(config, name, value)
    for name in getattr(config, "sub_configs", {}):
        if getattr(config, name, None) is not None:
            shrink(getattr(config, name), own)


def tiny(model_type: str, seed: int = 0, **own: Any) -> Any:
    """A random model of a family, as `AutoModelForCausalLM` builds it from a configuration."""
    from transformers import AutoConfig, AutoModelForCausalLM

    first = AutoConfig.for_model(model_type)
    shrink(first, own)
    given = first.to_dict()
    layers = getattr(first, "num_hidden_layers", 4)
    for name, value in list(given.items()):
        # Per layer: made anew from the small numbers.
        if isinstance(value, list) and name in (
            "layer_types",
            "layers_block_type",
            "mlp_layer_types",
            "mlp_only_layers",
        ):
            given[name] = None
    config = type(first).from_dict({name: value for name, value in given.items() if value is not None or name in SMALL})
    shrink(config, own)
    for name in ("layer_types", "layers_block_type", "mlp_layer_types"):
        kinds = getattr(config, name, None)
        if isinstance(kinds, list) and len(kinds) != layers:
            setattr(config, name, (list(dict.fromkeys(kinds)) * layers)[:layers])
    torch.manual_seed(seed)
    model: Any = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() >= 2:
                parameter.mul_(3.0)
    return model.float().eval()
