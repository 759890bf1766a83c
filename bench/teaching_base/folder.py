"""From texts to tokens, and from a trained model to its folder: what the makers of all tiny bases share."""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.teaching_base.pretrain import Encoded, mark_written
from bench.teaching_base.tokenizer import END, PAD, START, save_tokenizer
from mafrt.core.reading import is_writable

if TYPE_CHECKING:
    from tokenizers import Tokenizer


def add_pretraining(parser: argparse._ArgumentGroup | argparse.ArgumentParser, documents: int, of: str) -> None:
    """The arguments of every tiny base; `of` says of which documents there are `documents` by default."""
    parser.add_argument("--documents", type=int, default=documents, help=f"{of} (default: {documents})")
    parser.add_argument("--hidden_size", type=int, default=128, help="width of the model (default: 128)")
    parser.add_argument("--layers", type=int, default=4, help="layers of the model (default: 4)")
    parser.add_argument("--learning_rate", type=float, default=0.02, help="peak learning rate (default: 0.02)")
    parser.add_argument("--batch_tokens", type=int, default=3072, help="tokens a batch (default: 3072)")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads (default: 2)")
    parser.add_argument("--seed", type=int, default=0, help="seed of texts, weights and order (default: 0)")


def check_arguments(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """End with one sentence, before anything is made, for a count below 1 or a folder that cannot be written."""
    for name in ("documents", "hidden_size", "layers", "batch_tokens", "threads"):
        if getattr(args, name) < 1:
            parser.error(f"--{name} is {getattr(args, name)}; choose a value of at least 1")
    if not 0 < args.learning_rate < 10:
        parser.error(f"--learning_rate is {args.learning_rate}; choose a value in (0, 10)")
    if why := is_writable(args.output_dir):
        parser.error(f"--output_dir {args.output_dir} cannot be written ({why}); give another folder")


def special_ids(tokenizer: Tokenizer) -> dict[str, int]:
    """Ids of the tokens that pad (`pad`) and end a message (`end`)."""
    return {name: int(tokenizer.token_to_id(token) or 0) for name, token in (("pad", PAD), ("end", END))}


def encode(tokenizer: Tokenizer, texts: Sequence[str]) -> list[Encoded]:
    """Tokens of rendered documents, and which of them an assistant wrote."""
    end, header = special_ids(tokenizer)["end"], tokenizer.encode(f"{START}assistant\n").ids
    return [
        Encoded(encoding.ids, mark_written(encoding.ids, header, end)) for encoding in tokenizer.encode_batch(texts)
    ]


def write_base(model: Any, tokenizer: Tokenizer, card: str, folder: Path) -> None:
    """Write model, tokenizer and model card into `folder`; beside it first, so that no reader finds half of them."""
    from transformers import GenerationConfig

    ids = special_ids(tokenizer)
    folder.parent.mkdir(parents=True, exist_ok=True)
    fresh = Path(tempfile.mkdtemp(prefix=f".{folder.name}", dir=folder.parent))
    model.generation_config = GenerationConfig(
        do_sample=True, temperature=1.0, top_k=0, top_p=1.0, eos_token_id=ids["end"], pad_token_id=ids["pad"]
    )
    model.save_pretrained(fresh)
    save_tokenizer(tokenizer, fresh, model.config.max_position_embeddings)
    (fresh / "README.md").write_text(card)
    for path in fresh.iterdir():
        path.chmod(0o644)
    fresh.chmod(0o755)
    if folder.exists():
        shutil.rmtree(folder)
    os.replace(fresh, folder)
