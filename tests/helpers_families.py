"""Tiny random models of every family in transformers' causal mapping: its configuration class with small numbers."""

from __future__ import annotations

import sys
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

OWN: dict[str, dict[str, Any]] = {
    "gemma3n_text": {"intermediate_size": [96] * 4, "activation_sparsity_pattern": [0.0] * 4, "laurel_rank": 8},
    "mamba2": {"num_heads": 4, "head_dim": 32, "expand": 2, "hidden_size": 64, "n_groups": 1},
    "falcon_h1": {"mamba_d_ssm": 128, "mamba_n_heads": 4, "mamba_d_head": 32, "mamba_n_groups": 1},
    "nemotron_h": {"n_groups": 1, "layers_block_type": ["mamba", "attention", "moe", "mlp"], "moe_latent_size": None},
    "bamba": {"attn_layer_indices": [1, 3], "mamba_n_groups": 1},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * 2, "mamba_n_groups": 1, "num_local_experts": 4},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "gptj": {"rotary_dim": 8},
    "codegen": {"rotary_dim": 8, "n_head": 4},
    "laguna": {"num_attention_heads_per_layer": [4] * 4},
    "xlnet": {"d_head": 16},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "zamba2": {"layers_block_type": ["linear_attention", "hybrid"] * 2, "n_mamba_heads": 4},
    "prophetnet": {"num_encoder_layers": 2, "num_decoder_layers": 2},
    "reformer": {"axial_pos_embds_dim": [32, 32], "axial_pos_shape": [16, 16]},
    "kimi_linear": {"layer_types": ["linear_attention", "full_attention"] * 2},
    "qwen4_exp_text": {
        "num_key_value_heads": 2,
        "num_attention_heads": 4,
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 8,
        "indexer_compress_ratio": 4,
    },
    "rwkv": {"attention_hidden_size": 64},
    "zamba": {"num_hidden_layers": 6, "attn_layer_period": 2, "attn_layer_offset": 1, "n_mamba_heads": 2},
    "zaya": {"num_experts_per_tok": 1},
    "xmod": {"languages": ["en_XX"], "default_language": "en_XX"},
}
"""What single families need beyond it."""


def model_types() -> list[str]:
    """Every family that transformers loads as a causal language model."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def small(config: Any) -> dict[str, Any]:
    """Arguments of a configuration's class that make it small; those of the ones within it are dictionaries."""
    given = {name: value for name, value in SMALL.items() if _has(config, name)}
    if "qk_rope_head_dim" in given:
        given |= {name: value for name, value in (("head_dim", 8), ("num_key_value_heads", 4)) if name in given}
    for name in getattr(config, "sub_configs", {}):
        if getattr(config, name, None) is not None:
            given[name] = small(getattr(config, name))
    if config.model_type == "xlnet":
        given.pop("max_position_embeddings", None)  # it has no largest position, and says so
    if "num_hidden_layers" in given and config.model_type == "prophetnet":
        del given["num_hidden_layers"]  # the sum of two others
    return given | OWN.get(config.model_type, {})


def _has(config: Any, name: str) -> bool:
    declared = getattr(type(config), name, None)
    if isinstance(declared, property) and declared.fset is None:
        return False
    try:
        return hasattr(config, name)
    except Exception:  # a setting that differs from layer to layer
        return True


def tiny(model_type: str, seed: int = 0, **changes: Any) -> Any:
    """A random model of a family, as `AutoModelForCausalLM` builds it from a configuration; `changes` to that."""
    from transformers import AutoConfig, AutoModelForCausalLM

    first = AutoConfig.for_model(model_type)
    config = type(first)(**small(first) | changes)
    torch.manual_seed(seed)
    model: Any = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() >= 2:
                parameter.mul_(3.0)
    return model.float().eval()


SENSES: dict[str, Any] = {"depth": 2, "image_size": 28, "patch_size": 14, "num_channels": 3} | dict.fromkeys(
    ("mm_hidden_size", "out_hidden_size", "vision_output_dim", "embed_dim"), 64
)
"""of the parts that see or hear"""
OF_TEXT = ("is_decoder", "pad_token_id", "eos_token_id", "bos_token_id", "decoder_start_token_id", "sliding_window",
           "window_size", "max_position_embeddings")  # fmt: skip
"""what those parts do not have, or in another meaning"""
_QWEN = ("glm46v", "glm4v", "glm_ocr", "glmga", "hunyuan_vl", "paddleocr_vl", "qwen2_5_vl", "qwen2_vl",
         "qwen2_5_omni_thinker")  # fmt: skip
SECTIONS = {name: [2, 3, 3] for name in _QWEN} | {"glm4v_moe": [2, 1, 1]}
"""how many angles turn by time, height and width, in tiny models"""


def whole_types() -> list[str]:
    """Every model of transformers that reads images or sound beside text."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES

    return sorted(MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES)


def _with_senses(config: Any) -> dict[str, Any]:
    given = dict(small(config))
    for name in getattr(config, "sub_configs", {}):
        part = getattr(config, name, None)
        if part is None:
            continue
        inside = _with_senses(part) | {"model_type": part.model_type}
        if any(word in name for word in ("vision", "image", "audio", "speech", "encoder", "vq", "vit")):
            inside = {key: value for key, value in inside.items() if key not in OF_TEXT}
            inside |= {key: value for key, value in SENSES.items() if type(getattr(part, key, None)) is int}
        given[name] = inside
    return given


def whole(model_type: str, seed: int = 0) -> Any:
    """A random model that reads images or sound too, of its own class (`...ForConditionalGeneration`)."""
    from transformers import AutoConfig, AutoModelForMultimodalLM

    first = AutoConfig.for_model(model_type)
    given = _with_senses(first)
    marks = [n for n in vars(first) if n.endswith(("_token_id", "_token_index")) and n not in OF_TEXT]
    for number, name in enumerate(marks):  # of images and sounds, far beyond a tiny vocabulary
        if isinstance(getattr(first, name), int):
            given[name] = VOCAB - 1 - number % 10
    if model_type in SECTIONS:
        text = getattr(first, "text_config", first)
        rope = dict(getattr(text, "rope_parameters", None) or {}) | {"mrope_section": SECTIONS[model_type]}
        (given.get("text_config") or given)["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e4} | rope
    torch.manual_seed(seed)
    model: Any = AutoModelForMultimodalLM.from_config(type(first)(**given))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() >= 2 and parameter.std() < 0.05:
                parameter.mul_(3.0)
    return model.float().eval()


class _Double:
    """torch, but that float32 is float64."""

    float = float32 = torch.float64

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def in_double(monkeypatch: Any, model_type: str) -> Any:
    """A tiny model in float64 throughout: transformers computes norms, positions and recurrences in float32."""
    model = tiny(model_type).double()
    model.set_experts_implementation("eager")  # its grouped products know no float64
    for module in {type(part).__module__ for part in model.modules()}:
        if hasattr(sys.modules[module], "torch"):
            monkeypatch.setattr(sys.modules[module], "torch", _Double())
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    return model
