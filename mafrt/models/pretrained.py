"""Loading of a Hugging Face model and its tokenizer, with one sentence for each way in which that fails."""

from __future__ import annotations

import contextlib
import logging
import re
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from mafrt.config import permission
from mafrt.core.errors import ConfigError, ModelError, is_panic
from mafrt.core.extras import check_package
from mafrt.core.gpus import check_device_name, unusable_gpu
from mafrt.core.reading import parse_json, read_text
from mafrt.core.shipped import SHIPPED_BASES, base_folder, require_base
from mafrt.core.text import counted
from mafrt.models.bounded_trial import check_tokenizer_ends

log = logging.getLogger(__name__)

TEMPLATE = "chat_template.json"
"""of a processor"""
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")

FLASH = ("flash_attention_2", "flash_attention_3")
ATTENTION = ("sdpa", "eager", *FLASH)
"""attention implementations of transformers that a base may be loaded with; all but the first compute rows whole"""


def check_device(device: str | torch.device | None) -> torch.device:
    """Where a base computes; None: on the GPU if torch sees one. Raises ConfigError where it cannot."""
    asked = str(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    gpu = asked.startswith("cuda")
    try:
        check_device_name(asked)
        found = torch.device(asked)
        torch.empty(0, device=found)
        # One of another generation than the build takes tensors, and fails at the first kernel.
        reason = unusable_gpu(asked) if gpu else None
    except (RuntimeError, AssertionError) as error:
        reason = unusable_gpu() if gpu else None
        reason = reason or f"{str(error).strip().splitlines()[0]}; give cpu, or cuda:N of a GPU that is there"
    if reason is not None:
        raise ConfigError(f"device {asked!r} cannot be used here: {reason}.")
    return found


def load_pretrained(
    name_or_path: str,
    *,
    dtype: str | torch.dtype | Callable[[], str | None] | None,
    device: str | torch.device | None,
    goes_to: str | torch.device | None = None,
    attn_implementation: str,
    trust_remote_code: bool,
    bits: Literal[4, 8] | None,
) -> tuple[Any, Any, str]:
    """(model, tokenizer, path or hub id); arguments and errors as of `SharedBase.load`."""
    import_generation()
    from transformers import AutoModelForCausalLM

    from mafrt.models.checkpoint_class import attention_of, auto_class, dequantising

    if attn_implementation not in ATTENTION:
        raise ModelError(
            f"attn_implementation {attn_implementation!r} cannot mask the beginnings that rows share; give 'sdpa', or "
            f"one with which every row is computed whole: {', '.join(ATTENTION[1:])}"
        )
    device = check_device(device)
    if attn_implementation in FLASH and torch.device(goes_to or device).type != "cuda":
        raise ModelError(
            f"attn_implementation {attn_implementation!r} has kernels for GPUs only, and the base goes to "
            f"{goes_to or device}; give 'sdpa'"
        )
    config, parsed, tokenizer = check_base(name_or_path, trust_remote_code=trust_remote_code, bits=bits)
    if callable(dtype):
        dtype = dtype()
    if isinstance(dtype, str) and dtype != "auto" and not isinstance(getattr(torch, dtype, None), torch.dtype):
        raise ModelError(f"found dtype {dtype!r}, expected float32, bfloat16 or float16")
    path = str(base_folder(name_or_path) or name_or_path)
    quantised = quantisation(bits, device) if bits else dequantising(config)
    loader = auto_class(config) or AutoModelForCausalLM
    where = _where(name_or_path, trust_remote_code)
    with _told(name_or_path, trust_remote_code=trust_remote_code):
        loaded: Any = loader.from_pretrained(
            path,
            # Half precision is emulated on many CPUs, where it is slower than float32.
            dtype=dtype or ("float32" if torch.device(goes_to or device).type == "cpu" else own_format(path, where)),
            attn_implementation=attention_of(parsed, loader, attn_implementation),
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # told below, with the layer's name
            **where,
            **quantised,
        )
    model, info = loaded
    _check_weights(name_or_path, model, info)
    check_quantised(name_or_path, model)
    if quantised and not bits:
        # Transformers leaves some of these in bfloat16, whatever format was asked for.
        for parameter in model.parameters():
            parameter.data = parameter.data.to(model.dtype)
    keep_differentiable(model)
    # bitsandbytes places quantised layers itself and may refuse a later move.
    return model if bits else model.to(device), tokenizer, path


def own_format(path: str, where: dict[str, Any]) -> str:
    """The number format of a checkpoint on a GPU: its own, as transformers finds it, but bfloat16 for float16.

    A loss is a mean over tens of thousands of tokens: most of each token's gradient is below float16's smallest number.
    """
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(path, **where)
    formats = (getattr(part, "dtype", None) for part in (config, config.get_text_config()))
    return "bfloat16" if any(number_format in (torch.float16, "float16") for number_format in formats) else "auto"


def _check_weights(name_or_path: str, model: Any, info: Mapping[str, Collection[Any]]) -> None:
    """ModelError for weights that are missing, of another form than the model's, or not finite.

    `info` is what transformers says of loading: the names of tensors that are missing, that have no place in the
    model, and that have another shape than there. A warning names tensors of parts that the model does not have.
    """
    if other := sorted(info["mismatched_keys"]):
        key, found, expected = other[0]
        raise ModelError(
            f"the model {name_or_path!r} has {key} of shape {list(found)}, expected {list(expected)} by its "
            f"config.json ({counted(len(other), 'tensors')} in all); take another copy, and of a quantised model the "
            "checkpoint in bfloat16"
        )
    buffers = {path for path, _ in model.named_buffers()}
    layers = {path for path, module in model.named_modules() if isinstance(getattr(module, "weight", None), Tensor)}
    layers |= {path for path, _ in model.named_parameters()}  # `q_proj.weight._data`
    extra = sorted(key for key in info["unexpected_keys"] if key not in buffers)
    # A layer that is here has been saved in another form: its weights alone do not compute what they did.
    if of_layers := [key for key in extra if key.rpartition(".")[0] in layers]:
        raise ModelError(
            f"the model {name_or_path!r} has {of_layers[0]}, which that layer does not take "
            f"({counted(len(of_layers), 'tensors')} in all), as of a quantised model whose config.json does not say "
            "how to read it; take the checkpoint in bfloat16"
        )
    if lacking := sorted(info["missing_keys"]):
        raise ModelError(
            f"the model {name_or_path!r} is incomplete: found no {lacking[0]} "
            f"({counted(len(lacking), 'tensors')} in all), expected all weights of a causal language model; take "
            "another copy, or a model with a language head"
        )
    if extra:
        log.warning(
            "%s: left out of the checkpoint, since %s has no place for them: %s, such as %s",
            *(name_or_path, type(model).__name__, counted(len(extra), "tensors"), extra[0]),
        )
    # A damaged download would otherwise show only as NaN losses, long after loading.
    for name, parameter in model.named_parameters():
        if parameter.is_floating_point() and not parameter.isfinite().all():
            raise ModelError(
                f"the model {name_or_path!r} is damaged: found NaN or infinity in {name}, expected finite weights; "
                "take another copy"
            )


def check_base(
    name: str, *, trust_remote_code: bool = False, bits: int | None = None
) -> tuple[dict[str, Any], Any, Any]:
    """All that is checked of a base before its weights are loaded, by this or another program.

    Returns:
        The content of its config.json, that as transformers reads it, and the tokenizer.

    Raises:
        ModelError: as `SharedBase.load`.
    """
    from transformers import AutoConfig

    from mafrt.models.checkpoint_class import check_token_ids, check_weights, read_config, refuse_other_kinds
    from mafrt.models.config_values import check_values

    # Asked for first, so that a base that is fetched by name fails with the command that fetches it.
    require_base(name)
    path = str(base_folder(name) or name)
    check_folder(name, path)
    config = read_config(name, path)
    refuse_other_kinds(name, config, trust_remote_code=trust_remote_code, bits=bits)
    where = _where(name, trust_remote_code)
    with _told(name, trust_remote_code=trust_remote_code):
        folder = Path(path) if Path(path).is_dir() else _fetched(path, where["local_files_only"])
    if config and folder is not None:
        check_weights(name, str(folder), config, trust_remote_code=trust_remote_code)
        check_token_ids(name, folder, config)
    with _told(name, trust_remote_code=trust_remote_code):
        tokenizer = read_tokenizer(path, **where)
        parsed = AutoConfig.from_pretrained(path, **where)
    check_tokenizer_ends(name, tokenizer)
    check_values(name, config, parsed, tokenizer, folder)
    with _told(name, trust_remote_code=trust_remote_code):
        tokenizer.decode(tokenizer.encode("a b"))  # one that raises over any text
    return config, parsed, tokenizer


def read_tokenizer(path: str, **where: Any) -> Any:
    """A base's tokenizer, of a folder or a hub id, with its chat template.

    Models that read images kept that in a file of their processor, which transformers' tokenizers do not look at.
    """
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(path, **where)
    local = bool(where.get("local_files_only"))
    if not getattr(tokenizer, "chat_template", None) and (file := if_there(path, TEMPLATE, local=local)):
        tokenizer.chat_template = parse_json(read_text(Path(file)))["chat_template"]
    return tokenizer


def if_there(path: str, file: str, *, local: bool) -> str | None:
    """Where a file of a folder or hub id lies; None where there is none, or the hub cannot be asked."""
    from transformers.utils.hub import cached_file

    quiet = {"_raise_exceptions_for_missing_entries": False, "_raise_exceptions_for_connection_errors": False}
    found: str | None = cached_file(path, file, local_files_only=local, **quiet)
    return found


def _fetched(model: str, local: bool) -> Path | None:
    """The folder in the cache with the config, weights and tokenizer of a hub id, as transformers would fetch them.

    None: it has no weights in files that are looked for here; loading says why.
    """
    from transformers.utils.hub import cached_file, get_checkpoint_shard_files

    def have(file: str) -> str | None:
        return cached_file(model, file, local_files_only=local, _raise_exceptions_for_missing_entries=False)

    config = have("config.json")
    for file in ("model.safetensors", "pytorch_model.bin"):
        if not have(file) and (index := have(f"{file}.index.json")):
            get_checkpoint_shard_files(model, index, local_files_only=local)
        elif not have(file):
            continue
        for other in TOKENIZER_FILES:
            have(other)
        return Path(config).parent if config else None
    return None


def _where(name: str, trust_remote_code: bool) -> dict[str, Any]:
    """Arguments of `from_pretrained`: a base that a run's files name is not asked of a hub, but lies in the cache."""
    return {"trust_remote_code": trust_remote_code, "local_files_only": not permission.is_ours(name)}


@contextlib.contextmanager
def _told(name: str, *, trust_remote_code: bool) -> Iterator[None]:
    """ModelError, of one sentence, for whatever libraries raise over a base's files."""
    try:
        yield
    except ModelError:
        raise
    except BaseException as error:  # what libraries raise over a file's content has no common class
        if not isinstance(error, Exception) and not is_panic(error):
            raise
        raise _unloadable(name, error, trust_remote_code) from None


def _unloadable(name: str, error: BaseException, trust_remote_code: bool) -> ModelError:
    if not trust_remote_code and "trust_remote_code" in str(error):
        return ModelError(
            f"the model {name!r} or its tokenizer comes with code of its own, which is not run unasked; "
            "read it, and give --trust_remote_code, or take a model that transformers knows"
        )
    # Only the first line: transformers adds advice on logins and caches, which is seldom the reason.
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    if lines[0].endswith(":"):  # a heading of its validators
        lines[0] = " ".join(lines[:2])
    if needed := re.search(r"requires the (?:the )?(\w[\w.-]*) library", lines[0]):
        return ModelError(
            f"the model {name!r} needs the package {needed[1]}, which is not installed, even where only its text is "
            f"used; install it (pip install {needed[1]}), or take a model of the family for text alone"
        )
    return ModelError(
        f"the model {name!r} cannot be loaded: found {lines[0][:300]!r}; expected a folder with "
        "config.json, weights and tokenizer, or a Hugging Face model id that can be reached from here"
    )


def check_folder(name: str, path: str) -> None:
    """Raise ModelError for a missing folder or one without a model, before the name is tried as a hub id."""
    folder = Path(path)
    if folder.is_dir():
        if (folder / "adapter_config.json").is_file():
            # Transformers would put an adapter beside a model into it, in silence.
            beside = (folder / "config.json").is_file()
            raise ModelError(
                f"the folder {path} holds an adapter and {'its base too' if beside else 'no model'}; give "
                f"{'a folder with the base alone' if beside else 'its base'} as --model_name_or_path, and the "
                "adapter in the team file or as --load_path"
            )
        if not (folder / "config.json").is_file():
            raise ModelError(f"the folder {path} holds no config.json; expected a Hugging Face model folder")
        if not any((folder / file).is_file() for file in TOKENIZER_FILES):
            raise ModelError(
                f"the folder {path} holds no tokenizer; expected one of {', '.join(TOKENIZER_FILES)} beside the model"
            )
    elif folder.exists():
        raise ModelError(f"found the file {path}, expected a model folder or a Hugging Face model id")
    elif name in SHIPPED_BASES:
        maker = "make_base" if name == "teaching-base" else "make_games_base"
        raise ModelError(
            f"the shipped base is missing from {path}; reinstall mafrt, or make it again in a checkout: "
            f"python -m bench.{maker}"
        )
    # A hub id has one slash at most, so these can only be meant as folders; asking the hub would end in a misleading
    # message.
    elif folder.is_absolute() or path.startswith((".", "~")) or path.count("/") > 1:
        raise ModelError(f"found no model folder {name}; expected one that exists, or a Hugging Face model id")


PART = "transformers.generation.candidate_generator"
"""The module that draws the curve."""


def import_generation() -> None:
    """Import transformers' `generation` package without scikit-learn, which takes a quarter of a base's loading time.

    Every model class imports that package, and it imports scikit-learn, SciPy and pandas where they are installed, for
    one curve of a decoding method that mafrt does not use. So import `PART` as if scikit-learn were not installed, then
    let it import scikit-learn when the curve is drawn.

    Does nothing if the module is there already, or if transformers does not ask about scikit-learn.
    """
    from transformers import utils

    if PART in sys.modules or not hasattr(utils, "is_sklearn_available"):
        return
    installed = utils.is_sklearn_available
    utils.is_sklearn_available = lambda: False
    try:
        from transformers.generation import candidate_generator as part
    finally:
        utils.is_sklearn_available = installed
    module: Any = part
    module.is_sklearn_available = installed
    if installed():
        module.roc_curve = _roc_curve


def _roc_curve(*args: Any, **words: Any) -> Any:
    from sklearn.metrics import roc_curve

    return roc_curve(*args, **words)


def quantisation(bits: Literal[4, 8], device: torch.device) -> dict[str, Any]:
    """Arguments of `from_pretrained` for a frozen base in 4 bits (QLoRA; Dettmers 2023, 2305.14314) or 8 (LLM.int8;
    Dettmers 2022, 2208.07339), without head and embedding.

    Adapters stay float32: their gradients need no finer base. Raises MissingExtraError without bitsandbytes."""
    check_package("a base in 4 or 8 bits", "quant", "bitsandbytes")
    from transformers import BitsAndBytesConfig

    if bits == 8:
        config = BitsAndBytesConfig(load_in_8bit=True)
    else:
        config = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=torch.float32 if device.type == "cpu" else torch.bfloat16,
        )
    index = torch.cuda.current_device() if device.type == "cuda" and device.index is None else device.index
    return {
        "quantization_config": config,
        "device_map": {"": device.type if index is None else f"{device.type}:{index}"},
    }


def keep_differentiable(model: torch.nn.Module) -> None:
    """Keep bitsandbytes from packing 4-bit weights for inference.

    On CPUs with AVX512-BF16 a layer in eval mode packs its weights in the first no-grad forward, and then propagates no
    gradient: adapters in earlier layers would silently not learn. Here the same layers serve sampling and training.
    """
    for module in model.modules():
        if getattr(module, "support_avx512bf16_for_cpu", False):
            module.support_avx512bf16_for_cpu = False  # type: ignore[assignment]


def check_quantised(name: str, model: torch.nn.Module) -> None:
    """Raise ModelError for layers of bitsandbytes that have got ordinary weights, which they cannot compute with."""
    for path, module in model.named_modules():
        state = {"Linear4bit": "quant_state", "Linear8bitLt": "SCB"}.get(type(module).__name__, "")
        parts = (getattr(module, part, None) for part in ("weight", "state"))
        if state and all(getattr(part, state, None) is None for part in parts):
            raise ModelError(
                f"the config.json of the model {name!r} says that bitsandbytes quantised its weights, and "
                f"{path}.weight is not quantised; take the quantization_config out of its config.json, and give "
                "--load_in_4bit to have them quantised while loading"
            )
