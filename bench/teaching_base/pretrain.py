"""Pretraining of the tiny bases: one pass over a generated corpus, on a CPU, in minutes.

Documents are never packed together: each starts at position 0, as it will when the team is asked,
and batches are cut from documents of similar length, so little of them is padding. The loss is
taken over all assistant tokens and over a random `prompt_share` of the others: the prompts teach the
wording of problems, but most of their entropy is names and numbers that cannot be foreseen.
"""

from __future__ import annotations

import logging
import math
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)

POOL_BATCHES = 64
SAVE_EVERY = 500


@dataclass(frozen=True)
class PretrainConfig:
    """Size of the model and of its training."""

    hidden_size: int = 128
    layers: int = 4
    vocab_size: int = 1056
    batch_tokens: int = 3072
    """Tokens of a batch, padding included."""
    learning_rate: float = 0.02
    """Peak of Muon's, for the weight matrices; warmed up over 3 % of the steps, then linearly to zero."""
    embedding_learning_rate: float = 5e-3
    """Peak of AdamW's, for the embeddings and the norms; the same schedule."""
    weight_decay: float = 0.05
    prompt_share: float = 0.1
    """Share of the tokens outside of answers that are learnt too."""
    seed: int = 0


@dataclass(frozen=True)
class Encoded:
    """One document: its tokens, and which of them an assistant wrote (its end marker included)."""

    ids: list[int]
    written: list[bool]


def model_config(config: PretrainConfig, ids: dict[str, int]) -> Any:
    """The Qwen3 architecture at teaching size; `ids` holds the ids of the special tokens."""
    from transformers import Qwen3Config

    return Qwen3Config(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=3 * config.hidden_size,
        num_hidden_layers=config.layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=ids["end"],
        pad_token_id=ids["pad"],
    )


def mark_written(ids: list[int], header: list[int], end: int) -> list[bool]:
    """True for the tokens between an assistant `header` and the `end` marker, `end` included."""
    written, inside, width = [], False, len(header)
    for position, token in enumerate(ids):
        written.append(inside)
        if inside:
            inside = token != end
        elif ids[max(0, position - width + 1) : position + 1] == header:
            inside = True
    return written


def batches(documents: list[Encoded], batch_tokens: int, rng: random.Random) -> Iterator[list[Encoded]]:
    """Batches of similar lengths, in random order within pools."""
    pool_size = POOL_BATCHES * max(1, batch_tokens // 64)
    for begin in range(0, len(documents), pool_size):
        pool = sorted(documents[begin : begin + pool_size], key=lambda document: len(document.ids))
        cut: list[list[Encoded]] = [[]]
        for document in pool:
            if cut[-1] and (len(cut[-1]) + 1) * len(document.ids) > batch_tokens:
                cut.append([])
            cut[-1].append(document)
        rng.shuffle(cut)
        yield from cut


def tensors(batch: list[Encoded], pad: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and a mask (True: assistant token), both [batch, time], padded on the right."""
    import torch

    width = max(len(document.ids) for document in batch)
    ids = torch.full((len(batch), width), pad)
    written = torch.zeros(len(batch), width, dtype=torch.bool)
    for row, document in enumerate(batch):
        length = len(document.ids)
        ids[row, :length] = torch.tensor(document.ids)
        written[row, :length] = torch.tensor(document.written)
    return ids, written


def schedule(progress: float) -> float:
    """Share of the peak learning rate at `progress` in [0, 1] of the steps."""
    return min(1.0, progress / 0.03 + 1e-3) * min(1.0, max(0.0, (1 - progress) / 0.97))


def pretrain(
    config: PretrainConfig,
    documents: list[Encoded],
    ids: dict[str, int],
    save: Callable[[Any, dict[str, float]], None],
) -> None:
    """Train a model from random weights; `save` gets it with the figures so far, at times and at the end."""
    import torch
    from transformers import Qwen3ForCausalLM

    from bench.teaching_base.muon import Muon

    torch.manual_seed(config.seed)
    model = Qwen3ForCausalLM(model_config(config, ids))
    hidden = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    others = [p for name, p in model.named_parameters() if p.ndim != 2 or "embed" in name]
    optimizers = [
        Muon(hidden, lr=config.learning_rate, weight_decay=config.weight_decay),
        torch.optim.AdamW(others, lr=config.embedding_learning_rate, betas=(0.9, 0.95), weight_decay=0.0),
    ]
    peaks = [(group, group["lr"]) for optimizer in optimizers for group in optimizer.param_groups]
    plan = list(batches(documents, config.batch_tokens, random.Random(config.seed)))
    started, smooth, tokens = time.perf_counter(), math.nan, 0
    for step, batch in enumerate(plan):
        for group, peak in peaks:
            group["lr"] = peak * schedule(step / len(plan))
        token_ids, mask = tensors(batch, ids["pad"])
        targets, written = token_ids[:, 1:], mask[:, 1:]
        chosen = written | ((torch.rand(written.shape) < config.prompt_share) & (targets != ids["pad"]))
        states = model.model(input_ids=token_ids[:, :-1], use_cache=False).last_hidden_state
        losses = torch.nn.functional.cross_entropy(model.lm_head(states[chosen]), targets[chosen], reduction="none")
        loss = losses.mean()
        model.zero_grad(set_to_none=True)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        current = losses.detach()[written[chosen]].mean().item()
        smooth = current if math.isnan(smooth) else 0.98 * smooth + 0.02 * current
        tokens += token_ids.numel()
        last = step == len(plan) - 1
        if step % 50 == 0 or last:
            seconds = time.perf_counter() - started
            figures = {"loss": smooth, "seconds": seconds, "tokens": tokens, "steps": step + 1}
            log.info(
                "step %d/%d  loss %.4f (assistant tokens)  %.0f tokens/s  %.0f s",
                *(step, len(plan), smooth, tokens / seconds, seconds),
            )
            if (step and step % SAVE_EVERY == 0) or last:
                save(model, figures)
