"""What kind of model a checkpoint holds, by its config.json: which class loads it, and what cannot be trained here."""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from mafrt.config import permission
from mafrt.core.errors import ModelError
from mafrt.core.forked_trial import TRIAL_CPU_S, TRIAL_MIB, in_fork
from mafrt.core.reading import parse_json, read_text
from mafrt.core.text import shortened

log = logging.getLogger(__name__)

DEQUANTISED = {"fp8": "FineGrainedFP8Config", "mxfp4": "Mxfp4Config"}
"""formats whose weights transformers turns into ordinary ones while loading, with the class that asks for it"""
OWN_FORMATS = ("bitsandbytes",)
"""formats through whose layers gradients go"""
OTHER_TASKS = ("Classification", "QuestionAnswering", "MaskedLM", "MultipleChoice", "NextSentencePrediction",
               "PreTraining", "RewardModel", "ImageGeneration", "SpeechSeq2Seq", "CTC")  # fmt: skip
"""ends of the names of classes whose heads do not predict the next token"""
WANTED = "expected a causal language model, such as Qwen/Qwen3-0.6B"

WIDTHS = ("vocab_size", "hidden_size", "intermediate_size", "head_dim", "num_attention_heads", "num_key_value_heads",
          "n_embd", "n_head")  # fmt: skip
"""sizes in config.json that are rows or columns of some tensor, or factors of them"""
DEPTHS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
"""numbers of blocks, of which each has a tensor"""
MOST_HEADER = 1 << 27
"""bytes of a safetensors header"""
MOST_TIMES, SPARE = 4, 1 << 27
"""A model has at most so many times the numbers of its files (two numbers of 4 bits lie in a byte, and a head may be
its embeddings), and some more: of buffers, which no file holds."""
MOST_ROWS, SPARE_IDS = 1 << 18, 1 << 16
"""rows of an embedding where config.json has no vocab_size, and ids of a tokenizer beyond the allowed times of it"""

REAL = ("F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2")
"""types of numbers in a safetensors file that are a weight as they stand"""

FORMS: dict[str, tuple[type, str]] = {
    "model_type": (str, "a name"),
    "architectures": (list, "a list of names"),
    "auto_map": (dict, "an object"),
    "quantization_config": (dict, "an object"),
}
"""fields of config.json that are read here, and what they are"""


def has_towers(config: Any) -> bool:
    """Whether a configuration is of a model that reads images or sound beside text."""
    return config.get_text_config() is not config


def read_config(name: str, path: str) -> dict[str, Any]:
    """The content of config.json, of a folder or a hub id; empty where it cannot be read (loading says why).

    Raises ModelError for fields of a form that they cannot have.
    """
    from transformers import PretrainedConfig

    try:
        local = not permission.is_ours(name)
        found: Any = PretrainedConfig.get_config_dict(path, local_files_only=local)[0]
    except (OSError, ValueError, RecursionError):
        return {}
    except TypeError:  # of versions of transformers before 5.19
        found = None
    if not isinstance(found, dict):
        raise ModelError(f"the model {name!r} has a config.json that is no JSON object; take another copy")
    for field, (kind, wanted) in FORMS.items():
        value = found.get(field)
        names = all(isinstance(entry, str) for entry in value) if isinstance(value, list) else True
        if value is not None and not (isinstance(value, kind) and names):
            raise ModelError(
                f"the model {name!r} has {shortened(repr(value))} as {field} in its config.json; expected {wanted}; "
                "take another copy"
            )
    return found


def _hub_kernels(config: dict[str, Any]) -> list[str]:
    """Implementations that a config.json names as `owner/name`: transformers fetches their code and runs it."""
    found: list[str] = []
    parts: list[tuple[str, Any]] = [("", config)]
    while parts:
        key, value = parts.pop()
        if isinstance(value, (dict, list)):
            entries = value.items() if isinstance(value, dict) else enumerate(value)
            # Below a dict of implementations the keys are names of parts of the model.
            parts += [
                (key if key.strip("_").partition("_implementation")[1] else str(parent), one) for parent, one in entries
            ]
        elif "_implementation" in key and "/" in str(value):
            found.append(str(value))
    return found


def refuse_other_kinds(name: str, config: dict[str, Any], *, trust_remote_code: bool, bits: int | None) -> None:
    """Raise ModelError for a checkpoint that is no causal language model, or that cannot be trained through.

    Args:
        name: of the model, for the message.
        config: content of its config.json.
        trust_remote_code: whether code that comes with it may run.
        bits: to which it is quantised while it is loaded; None: not at all.
    """
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    kind, _, what = _described(config)
    if not trust_remote_code and (kernels := _hub_kernels(config)):
        raise ModelError(
            f"the config.json of the model {name!r} asks for code from a hub ({shortened(kernels[0])}), which is "
            "not run unasked; take the line out, or give --trust_remote_code if you know that code"
        )
    code = config.get("auto_map") or {}
    own_code = code.get("AutoModelForCausalLM")
    if own_code and not trust_remote_code:
        if kind not in CONFIG_MAPPING_NAMES:
            raise ModelError(
                f"the model {name!r} is computed by code of its own ({own_code}), which is not run unasked; read it, "
                "and give --trust_remote_code, or take a model that transformers knows"
            )
        own_code = None
    if own_code or not kind:
        _refuse_bits(name, config, bits)
        return
    if kind not in CONFIG_MAPPING_NAMES:
        if code:
            raise ModelError(
                f"the model {name!r} is {what}, computed by code of its own that names no AutoModelForCausalLM "
                f"(auto_map has {shortened(', '.join(code))}), so it cannot be loaded as a causal language model; take "
                "a model that transformers knows"
            )
        raise ModelError(
            f"the model {name!r} is {what}, which this version of transformers does not know; upgrade transformers, or "
            "take another model"
        )
    refuse_other_tasks(name, config)
    if _has_encoder(kind):
        raise ModelError(f"the model {name!r} is an encoder-decoder ({what}); {WANTED}")
    if (thinker := f"{kind}_thinker") in CONFIG_MAPPING_NAMES:
        raise ModelError(
            f"the model {name!r} is {what}, several models in one; save the one that writes text, of type {thinker}, "
            "as a folder of its own (model.thinker.save_pretrained(FOLDER), and the tokenizer), and give that"
        )
    if auto_class(config) is None:
        raise ModelError(f"the model {name!r} is {what}, which does not write text; {WANTED}")
    _refuse_bits(name, config, bits)


def _refuse_bits(name: str, config: dict[str, Any], bits: int | None) -> None:
    """Raise ModelError for weights that are quantised already, unless they can be loaded as they are or turned back."""
    quantised = quantised_by(config)
    if not quantised or (quantised in OWN_FORMATS and bits in (None, _own_bits(config))):
        return
    if bits:
        raise ModelError(
            f"the model {name!r} is quantised already ({quantised}), so load_in_{bits}bit has no weights to quantise; "
            "take the checkpoint in bfloat16, or leave the flag out"
        )
    refuse_quantised(name, config)
    log.warning("%s: its %s weights are turned into ordinary ones, which take more memory.", name, quantised)


def refuse_other_tasks(name: str, config: dict[str, Any]) -> None:
    """Raise ModelError for a class that does not predict the next token of a text. Needs no transformers."""
    _, cls, what = _described(config)
    if any(cls.endswith(task) for task in OTHER_TASKS):
        raise ModelError(f"the model {name!r} is {what}, whose head does not predict the next token; {WANTED}")
    if config.get("is_encoder_decoder") and not cls.endswith("CausalLM"):
        raise ModelError(f"the model {name!r} is an encoder-decoder ({what}); {WANTED}")


def refuse_quantised(name: str, config: dict[str, Any]) -> None:
    """Raise ModelError for weights that no gradient goes through and that are not loaded otherwise."""
    quantised = quantised_by(config)
    if quantised and quantised not in (*DEQUANTISED, *OWN_FORMATS):
        raise ModelError(
            f"the model {name!r} is quantised ({quantised}), and no gradient goes through its layers to the adapters; "
            "take the checkpoint in bfloat16, and --load_in_4bit if memory is short"
        )


def quantised_by(config: dict[str, Any]) -> str | None:
    """The method by which a checkpoint's weights are quantised; None: they are not."""
    for part in (config, config.get("text_config")):
        for field in ("quantization_config", "compression_config", "quantization"):  # MLX writes the last
            if isinstance(part, dict) and isinstance(quant := part.get(field), dict):
                return str(quant.get("quant_method") or "no method named")
    return None


def _own_bits(config: dict[str, Any]) -> int | None:
    """Bits of weights that bitsandbytes quantised; None where config.json does not say."""
    quant = config.get("quantization_config") or (config.get("text_config") or {}).get("quantization_config") or {}
    return next((bits for bits in (4, 8) if quant.get(f"load_in_{bits}bit")), None)


def _described(config: dict[str, Any]) -> tuple[str, str, str]:
    """Type, class, and both in words; empty where config.json does not say."""
    kind, [cls] = str(config.get("model_type") or ""), [*(config.get("architectures") or []), ""][:1]
    return kind, cls, f"{cls} of type {kind}" if cls else f"a model of type {kind}"


def check_weights(name: str, path: str, config: Mapping[str, Any], *, trust_remote_code: bool) -> None:
    """Raise ModelError for weights that no model of this config.json is laid out for, or that cannot be read.

    A far larger one would be laid out before its weights are found not to fit: a million layers take hours, a wide one
    all memory. So it is laid out without memory, in a fork, where also a file that is unpickled can do no harm.
    """
    from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM
    from transformers.initialization import no_init_weights

    loader = auto_class(dict(config)) or AutoModelForCausalLM
    # Imported here, since loading imports it too and says what fails.
    with contextlib.suppress(KeyError, TypeError, AttributeError, ImportError, RuntimeError):
        loader._model_mapping[CONFIG_MAPPING[config["model_type"]]]

    def fault() -> str:
        import torch

        try:
            files = _weight_files(Path(path))
            shapes = [shape for file in files for shape in _shapes(file)]
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            if getattr(error, "errno", None) in (errno.EMFILE, errno.EIO):
                raise  # nothing is wrong with the model
            return str(error) if isinstance(error, ValueError) else "has an index of weights that cannot be read"
        if files and (wrong := _too_large(config, shapes) or _whole_numbers(config, files)):
            return wrong
        try:
            config_read = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code, local_files_only=True)
            with torch.device("meta"), no_init_weights():
                model = loader.from_config(config_read, trust_remote_code=trust_remote_code)
        except MemoryError:
            raise
        except Exception:  # loading says why
            return ""
        if not files:
            return "has no weights in its folder (model.safetensors or pytorch_model.bin)"
        described = sum(tensor.numel() for tensor in (*model.parameters(), *model.buffers()))
        # A file holds two numbers a byte at most; a shape that repeats its numbers has more.
        held = min(sum(map(math.prod, shapes)), 2 * sum(file.stat().st_size for file in files))
        if described > MOST_TIMES * held + SPARE:
            return f"has a config.json that describes {described} numbers, and its weights are {held}"
        return ""

    faults = in_fork(fault)
    if not faults:
        raise ModelError(
            f"the model {name!r} is not laid out within {TRIAL_CPU_S} s and {TRIAL_MIB} MiB of memory, as its "
            "config.json and its weights describe it; take another copy"
        )
    if faults[0]:
        raise ModelError(f"the model {name!r} {faults[0]}; take both from one model")


def check_token_ids(name: str, folder: Path, config: Mapping[str, Any]) -> None:
    """Raise ModelError for a tokenizer with an id far beyond the rows of the model's embedding.

    A tokenizer is laid out as a table of all ids up to its largest: one of 4e9 takes all memory.
    """
    rows = max((part["vocab_size"] for part in (config, config.get("text_config"))
                if isinstance(part, dict) and type(part.get("vocab_size")) is int), default=MOST_ROWS)  # fmt: skip
    for file in ("tokenizer.json", "tokenizer_config.json", "added_tokens.json", "vocab.json"):
        if not (folder / file).exists():
            continue
        try:
            found = json.loads(read_text(folder / file))
        except OSError as error:
            raise ModelError(f"the model {name!r} has a {file} that {error.strerror}; take another copy") from None
        except (ValueError, RecursionError):  # loading says why
            continue
        largest = max(_token_ids(found if "tokenizer" in file else {"model": {"vocab": found}}), default=0)
        if largest > MOST_TIMES * rows + SPARE_IDS:
            raise ModelError(
                f"the model {name!r} has a token of id {largest} in its {file}, and its config.json has {rows} as "
                "vocab_size; take both from one model"
            )


def _token_ids(found: Any) -> Iterator[int]:
    """The ids in a tokenizer's file: of its vocabulary, and of the tokens added to it."""
    parts = found if isinstance(found, dict) else {}
    model, added, decoded = (parts.get(key) for key in ("model", "added_tokens", "added_tokens_decoder"))
    vocab = model.get("vocab") if isinstance(model, dict) else None
    entries = added if isinstance(added, list) else []
    ids = [entry.get("id") for entry in entries if isinstance(entry, dict)]
    ids += vocab.values() if isinstance(vocab, dict) else []
    ids += [int(key) for key in decoded if key.isdecimal()] if isinstance(decoded, dict) else []
    return (value for value in ids if type(value) is int)


def _weight_files(folder: Path) -> list[Path]:
    """The files of weights in a folder; ValueError where one is missing, elsewhere, a pipe or a device."""
    files = set(folder.glob("*.safetensors")) or set(folder.glob("pytorch_model*.bin"))
    for index in folder.glob("*.index.json"):
        try:
            parts = parse_json(read_text(index))["weight_map"]
        except (ValueError, RecursionError):
            raise KeyError(index.name) from None
        if not parts:
            raise KeyError(index.name)
        named = set(parts.values()) if index.name.startswith(("model.s", "pytorch")) else set()
        if away := sorted(part for part in named if Path(part).is_absolute() or ".." in Path(part).parts):
            raise ValueError(f"has the index {index.name}, which names a file elsewhere, {shortened(away[0])}")
        files |= {folder / part for part in named}
    for file in sorted(files):
        if not file.is_file():
            raise ValueError(f"has a {file.name} that is {'a pipe or a device' if file.exists() else 'not there'}")
    return sorted(files)


def _shapes(file: Path) -> list[list[int]]:
    """Shapes of the tensors in a file of weights. Raises ValueError if it is damaged."""
    try:
        if file.suffix == ".safetensors":
            return header_shapes(file)
        import torch

        loaded = torch.load(file, map_location="meta", weights_only=True)
        return [list(tensor.shape) for tensor in loaded.values() if isinstance(tensor, torch.Tensor)]
    except MemoryError:
        raise
    except Exception:  # what unpickling raises over a file's content has no common class
        raise ValueError(f"cannot be loaded: its {file.name} is cut, damaged, or of another format") from None


def header_shapes(file: Path) -> list[list[int]]:
    """Shapes of the tensors in a safetensors file, of which only the header is read.

    Raises ValueError, KeyError, TypeError or AttributeError for a damaged one, or one of another size than it tells.
    """
    return [[int(size) for size in entry["shape"]] for entry in _header(file).values()]


def _header(file: Path) -> dict[str, Any]:
    # The format: eight bytes with the length of the header, little-endian, the header as JSON, and the numbers.
    with open(file, "rb") as content:
        length = int.from_bytes(content.read(8), "little")
        tensors: dict[str, Any] = parse_json(content.read(min(length, MOST_HEADER)))
    tensors.pop("__metadata__", None)
    if 8 + length + max((entry["data_offsets"][1] for entry in tensors.values()), default=0) != file.stat().st_size:
        raise ValueError("its size is not that of its header")
    return tensors


def _whole_numbers(config: Mapping[str, Any], files: list[Path]) -> str:
    """What is wrong where a weight in safetensors is of no real numbers: it would be read as if it were."""
    for file in files if not quantised_by(dict(config)) else ():
        for name, entry in _header(file).items() if file.suffix == ".safetensors" else ():
            kind = str(entry["dtype"])
            if name.endswith(".weight") and len(entry["shape"]) > 1 and kind not in REAL:
                return (
                    f"has {name} in numbers of type {kind}, as of a quantised model, and its config.json does not say "
                    "how to read them; expected bfloat16"
                )
    return ""


def _too_large(config: Mapping[str, Any], shapes: list[list[int]]) -> str:
    """What a config.json says that no tensor has; empty if nothing."""
    widest = max((size for shape in shapes for size in shape), default=0)
    parts: list[Any] = [config]
    while parts:
        part = parts.pop()
        parts += [value for value in part.values() if isinstance(value, dict)]
        sizes = {key: value for key, value in part.items() if type(value) is int}
        heads = sizes.get("num_attention_heads", 0) * sizes.get("head_dim", 0)
        if "moe_intermediate_size" in sizes:  # where all blocks have experts no tensor has the other width
            sizes.pop("intermediate_size", None)
        told = {**{key: sizes[key] for key in WIDTHS if key in sizes}, "num_attention_heads * head_dim": heads}
        wide = [f"{key} {value}" for key, value in told.items() if value > widest]
        long = [f"{key} {sizes[key]}" for key in DEPTHS if sizes.get(key, 0) > len(shapes)]
        if found := [*wide, *long]:
            return (
                f"has {found[0]} in its config.json, and its weights are {len(shapes)} tensors of at most {widest} "
                "rows or columns"
            )
    return ""


def _has_encoder(kind: str) -> bool:
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
        MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    )

    # Models that hear are listed with encoder-decoders, though they read what they hear as tokens.
    decoders = (*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES)
    return kind in MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES and kind not in decoders


def auto_class(config: dict[str, Any]) -> Any:
    """The class of transformers that loads a checkpoint under the names that PEFT and vLLM know its layers by.

    A model that reads images or sound too is loaded as such (`...ForConditionalGeneration`), and its text is used
    alone. None: it is no language model.
    """
    from transformers import AutoModelForCausalLM, AutoModelForMultimodalLM
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
    )

    kind, classes = str(config.get("model_type", "")), config.get("architectures") or []
    of_senses = MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES.get(kind)
    if of_senses is not None and (of_senses in classes or kind not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES):
        return AutoModelForMultimodalLM
    return AutoModelForCausalLM if kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES else None


def attention_of(config: Any, loader: Any, wanted: str) -> str:
    """The implementation of attention that a class has: the wanted one, or `eager`, which all have.

    Args:
        config: of transformers.
        loader: the auto class.
        wanted: `sdpa` or `eager`.
    """
    cls = loader._model_mapping.get(type(config), None)
    return wanted if wanted != "sdpa" or getattr(cls, "_supports_sdpa", True) else "eager"


def dequantising(config: dict[str, Any]) -> dict[str, Any]:
    """Arguments for `from_pretrained` that have a quantised checkpoint loaded in ordinary numbers."""
    import transformers

    quantised = quantised_by(config)
    if quantised not in DEQUANTISED:
        return {}
    return {"quantization_config": getattr(transformers, DEQUANTISED[quantised])(dequantize=True)}
