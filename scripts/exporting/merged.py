"""Whole models with an adapter merged into the base, made by PEFT."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from mafrt.config import permission
from mafrt.core.errors import ConfigError
from mafrt.core.shipped import base_folder


def check_mergeable(bases: Iterable[str], settings: Mapping[str, Any]) -> None:
    """ConfigError if a base is quantised: the sum of its weights and an adapter's has no place in its 4 or 8 bits.

    Args:
        bases: names or folders of the bases.
        settings: settings of the run; a base that the run has quantised is not the one on disk.
    """

    for bits in (4, 8):
        if settings.get(f"load_in_{bits}bit"):
            raise ConfigError(
                f"merged is on, but the run has trained on a base in {bits} bits (load_in_{bits}bit), and merging into "
                "another base changes the answers; leave merged out: the adapters are served on the base."
            )
    for base in bases:
        if getattr(base_config(base, "merged is on", "merged"), "quantization_config", None) is not None:
            raise ConfigError(
                f"merged is on, but the weights of {base} are quantised, and an adapter cannot be added to them "
                "exactly; leave merged out: the adapters are served on the base."
            )


def base_config(base: str, given: str, name: str) -> Any:
    """The configuration of a run's base. Raises ConfigError: `given`, and it cannot be read; `name` can be left out."""
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(str(base_folder(base) or base), **of_base(base))
    except Exception as error:  # what libraries raise over a file's content has no common class
        why = "code of its own would have to run" if "trust_remote_code" in str(error) else type(error).__name__
        raise ConfigError(
            f"{given}, but the base {base} cannot be loaded ({why}); give the run its base again, or leave {name} out."
        ) from error


def of_base(base: str) -> dict[str, Any]:
    """How transformers may read a base: no code of its own, and nothing fetched that only a run's files name."""
    return {"trust_remote_code": False, "local_files_only": not permission.is_ours(base)}


def write_merged(target: Path, base: str, adapters: Mapping[str, Path]) -> None:
    """Write `target/ADAPTER` with weights, configuration and tokenizer, for each adapter.

    Raises ModelError or CheckpointError: the base or an adapter cannot be loaded.
    """
    from peft import PeftModel
    from transformers import GenerationConfig

    from mafrt.models.pretrained import if_there, load_pretrained
    from mafrt.models.shared_base import SharedBase

    how: dict[str, Any] = {"dtype": "auto", "device": "cpu"}
    checked = SharedBase.load(base, **how)
    for name, path in adapters.items():  # PEFT takes folders as they are
        checked.load_adapter(name, path)
    del checked
    file = "generation_config.json"
    generation = if_there(str(base_folder(base) or base), file, local=bool(of_base(base)["local_files_only"]))
    for name, path in adapters.items():
        # Merging changes it: one load for each.
        how |= {"attn_implementation": "sdpa", "trust_remote_code": False, "bits": None}
        model, tokenizer, _ = load_pretrained(base, **how)
        merged = PeftModel.from_pretrained(model, str(path)).merge_and_unload()
        if generation:  # taken as it is, since transformers reads some that it does not write
            merged.generation_config = GenerationConfig()
        merged.save_pretrained(str(target / name))
        if generation:
            shutil.copyfile(generation, target / name / file)
        tokenizer.save_pretrained(str(target / name))
