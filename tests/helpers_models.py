"""Tiny random models made in the test itself: no files, no hub, milliseconds."""

from __future__ import annotations

import string
from typing import Any

import torch

from mafrt.config.agent import LoraSpec
from mafrt.models.shared_base import SharedBase

ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")

CHARS = string.digits + string.ascii_letters + string.punctuation + " \n"
SPECIAL = ("<pad>", "<eos>", "<|im_start|>", "<|im_end|>", "<unk>")

CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def tiny_tokenizer() -> Any:
    """One token per character; 5 special tokens and a ChatML template."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: i for i, token in enumerate((*SPECIAL, *CHARS))}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    inner.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        additional_special_tokens=["<|im_start|>", "<|im_end|>"],
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def tiny_model(kind: str = "qwen3", *, seed: int = 0, layers: int = 2, width: int = 32, **changes: Any) -> Any:
    """A random causal LM of `width` channels in eval mode.

    `kind` is "qwen3", "qwen2" (biases), "llama", "phi3", "mistral" (a window of 12 tokens), "gemma2" or "gemma3" (the
    same in their first layer, none in the second; "gemma2" caps scores and logits, low enough to matter here).
    """
    import transformers

    names = {
        "qwen3": "Qwen3",
        "qwen2": "Qwen2",
        "llama": "Llama",
        "phi3": "Phi3",
        "mistral": "Mistral",
        "gemma2": "Gemma2",
    }
    name = names.get(kind, "Gemma3")
    settings: dict[str, Any] = {
        "vocab_size": len(CHARS) + len(SPECIAL),
        "hidden_size": width,
        "intermediate_size": 2 * width,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "pad_token_id": 0,
        "eos_token_id": 1,
        "bos_token_id": None,
        "tie_word_embeddings": True,
        "attn_implementation": "sdpa",
    }
    if kind in ("qwen3", "gemma2", "gemma3"):
        settings["head_dim"] = width // 4
    if kind in ("mistral", "gemma2", "gemma3"):
        settings["sliding_window"] = 12
    if kind == "gemma2":
        settings |= {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}
    if kind in ("gemma2", "gemma3"):
        settings |= {"layer_types": ["sliding_attention", "full_attention"] * (layers // 2), "query_pre_attn_scalar": 9}
    settings.update(changes)
    torch.manual_seed(seed)
    config = getattr(transformers, "Gemma3TextConfig" if kind == "gemma3" else f"{name}Config")(**settings)
    model = getattr(transformers, f"{name}ForCausalLM")(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:  # ten times the default, so that the layers matter and errors show
                parameter.mul_(5.0)
            elif parameter.abs().max() == 0:
                parameter.normal_(0.0, 0.1)
    return model.eval()


def tiny_base(kind: str = "qwen3", **settings: Any) -> SharedBase:
    return SharedBase(tiny_model(kind, **settings), tiny_tokenizer(), f"tiny-{kind}")


def add_random_adapter(
    base: SharedBase,
    name: str,
    rank: int = 4,
    alpha: float = 8.0,
    targets: tuple[str, ...] = ALL,
    *,
    seed: int = 0,
    scope: Any = "all",
) -> None:
    """An adapter whose B is not zero, so that it changes the logits."""
    base.add_adapter(name, LoraSpec(rank=rank, alpha=alpha, targets=targets, scope=scope), seed=seed)
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for _, b in base.adapter_layers(name).values():
            b.copy_(0.2 * torch.randn(b.shape, generator=generator))
    base.bump(name)


def random_ids(rows: int, steps: int, *, seed: int = 0) -> torch.Tensor:
    """`[rows, steps]` ordinary (not special) tokens."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(len(SPECIAL), len(SPECIAL) + len(CHARS), (rows, steps), generator=generator)
