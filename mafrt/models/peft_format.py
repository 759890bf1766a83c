"""Adapters on disk, in PEFT's own layout: `adapter_config.json` and `adapter_model.safetensors`.

PEFT and vLLM load these folders unchanged, and LoRA adapters trained by PEFT load here, including per-layer rank and
alpha (`rank_pattern`, `alpha_pattern`) and rank-stabilised scaling. Unsupported variants (DoRA, trained biases, fully
saved modules) are refused.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.numpy import save as save_bytes
from safetensors.torch import load as load_bytes
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors

from mafrt.core.errors import CheckpointError
from mafrt.core.flat_tensors import on_cpu
from mafrt.core.patterns import PatternError, full_matches
from mafrt.core.reading import parse_json, read_file, read_text
from mafrt.core.text import error_line, shortened
from mafrt.models.checkpoint_class import OTHER_TASKS, header_shapes

log = logging.getLogger(__name__)

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
ENDING = ".lora_A.weight"
"""of the key of a layer's A"""
ELSEWHERE = (
    *("lora_dropout", "loftq_config", "eva_config", "corda_config", "lora_ga_config", "velora_config"),
    *("megatron_config", "runtime_config"),
)
"""Settings that tell how an adapter was begun, or is trained by PEFT. They change no answer of one that is there."""
PLAIN_LORA = frozenset(
    (
        *("r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora", "alora_invocation_tokens"),
        *("target_modules", "exclude_modules", "target_parameters", "layers_to_transform"),
        *("peft_type", "task_type", "bias", "init_lora_weights", "base_model_name_or_path"),
        *("inference_mode", "auto_mapping", "revision", "peft_version", "megatron_core", "qalora_group_size"),
        *ELSEWHERE,
    )
)
"""Settings of a PEFT LoRA folder that are read here, or change no answer. Any other is refused where it is set."""


_BLOCK = re.compile(r"((?:[^.]+\.)*?)[^.]+\.[0-9]+\.")
"""The name of a layer up to its block; the group is what stands before the list of blocks."""

_OF_SENSES = re.compile(r"vis(ion|ual)|image|audio|speech")

OF_EXPERTS = ("gate_proj", "up_proj", "down_proj", "w1", "w2", "w3", "gate")
"""Names of layers that PEFT takes for those of experts where a family holds these as one parameter. Dense layers of
such a family that have these names are written under `target_parameters`, which PEFT reads as they are."""

Layers = Mapping[str, tuple[nn.Parameter, nn.Parameter]]
"""Module path in the base -> (A `[r, in]`, B `[out, r]`)."""
LinearPaths = Mapping[str, tuple[int, int]]
"""Module path in the base -> (in, out) features, of every linear layer that may be adapted."""
FusedPaths = Mapping[str, tuple[int, int, int]]
"""Path of a parameter in the base -> (in, out, experts), where it holds a matrix of each expert of a block."""


@dataclass(frozen=True)
class AdapterShape:
    """Rank and alpha of an adapter, and its layers."""

    rank: int
    alpha: float
    layers: Mapping[str, tuple[int, float]]
    """Module path in the base -> (rank, scaling)."""
    invocation: tuple[int, ...] | None = None
    """Tokens from which on the adapter acts (`mafrt.models.invocation`); None: it acts on all tokens."""


@dataclass(frozen=True)
class PeftFolder:
    """The content of a PEFT folder, checked against a base."""

    path: Path
    shape: AdapterShape
    tensors: Mapping[str, Tensor]
    """Under PEFT's key names; all finite."""


def matches(path: str, target: str) -> bool:
    """PEFT's rule for `target_modules`: the layer's path is the target, or ends with it after a dot."""
    return path == target or path.endswith("." + target)


def names_in_checkpoints(model: Any, paths: Collection[str]) -> dict[str, str]:
    """Path -> its name in the family's checkpoints, of layers that PEFT finds under that name only; empty: under none.

    PEFT renames what it reads as transformers renames a checkpoint. A rule for `shared_expert.` may match the
    `shared_experts.` that it makes, so that the name in memory would be renamed once more.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightRenaming, rename_source_key

    rules = [rule for rule in get_model_conversion_mapping(model) if isinstance(rule, WeightRenaming)]
    back: list[Any] = [rule.reverse_transform() for rule in reversed(rules)]
    names = {}
    for path in paths if rules else ():
        key = path + ENDING
        read, _ = rename_source_key(key, rules, [])
        # PEFT itself takes back what only cuts a beginning off.
        if not key.endswith(read):
            stored, _ = rename_source_key(key, back, [])
            fits = rename_source_key(stored, rules, [])[0] == key
            names[path] = stored.removesuffix(ENDING) if fits else ""
    return names


def stems(paths: Collection[str], experts: Collection[str], stored: Mapping[str, str]) -> dict[str, str]:
    """Path -> the name under which PEFT keeps an adapter of these paths.

    A module whose parameters are targeted is wrapped once for each, the first innermost.

    Args:
        paths: of linear layers and of parameters.
        experts: the paths of parameters, in the order of the model.
        stored: as of `names_in_checkpoints`.
    """
    targeted: dict[str, list[str]] = {}
    for path in experts:
        if path in paths:
            targeted.setdefault(path.rpartition(".")[0], []).append(path)
    names = {path: stored.get(path, path) for path in paths}
    for module, chain in targeted.items():
        names |= {path: module + ".base_layer" * depth for depth, path in enumerate(reversed(chain))}
    return names


def keys(path: str) -> tuple[str, str]:
    """PEFT's names for A and B of the layer at `path` (of parameters: as `stems` names them)."""
    return f"{PREFIX}{path}.lora_A.weight", f"{PREFIX}{path}.lora_B.weight"


def state_of(layers: Layers) -> dict[str, Tensor]:
    """A copy of the tensors on the CPU, under PEFT's key names."""
    parameters = {key: p for path, pair in layers.items() for key, p in zip(keys(path), pair, strict=True)}
    return {key: read.clone() for key, read in zip(parameters, on_cpu(list(parameters.values())), strict=True)}


def copy_state(layers: Layers, state: Mapping[str, Tensor], *, name: str, where: str) -> None:
    """Copy `state` into the parameters of `layers`, all or nothing.

    Args:
        layers: of the adapter that is written to.
        state: tensors under PEFT's key names.
        name: of the adapter, for errors.
        where: the source of `state`, for errors.

    Raises:
        CheckpointError: a key is missing or unexpected, or a shape differs.
    """
    parameters = {key: p for path, pair in layers.items() for key, p in zip(keys(path), pair, strict=True)}
    # All is checked before the first copy, or a refused file would leave an adapter half of each.
    for key in sorted(parameters.keys() ^ state.keys()):
        verb = "lacks" if key in parameters else "has"
        raise CheckpointError(
            f"{where} {verb} {key}, expected the {len(parameters)} tensors of adapter {name!r} and no others; "
            "give the adapter the same targets as the one that was saved"
        )
    for key, parameter in parameters.items():
        if state[key].shape != parameter.shape:
            raise CheckpointError(
                f"{where} has {key} of shape {list(state[key].shape)}, expected {list(parameter.shape)}; "
                "give the adapter the rank it was saved with, and load it on the base it was trained on"
            )
    with torch.no_grad():
        for key, parameter in parameters.items():
            parameter.copy_(state[key])


@dataclass(frozen=True)
class PeftFiles:
    """The two files of one adapter's PEFT folder. Only its weights change, so all else is made once."""

    config: bytes
    header: bytes
    """the part of the safetensors file before the weights"""
    parameters: tuple[Tensor, ...]
    """in the order of that file"""

    @classmethod
    def of(
        cls, shape: AdapterShape, layers: Layers, *, base_name: str, linear_paths: LinearPaths, fused: bool = False
    ) -> PeftFiles:
        """Of one adapter.

        Args:
            shape: of the adapter.
            layers: its parameters; they stay the same objects.
            base_name: name or path of the base, recorded in the configuration.
            linear_paths: all layers that could be adapted; decide how short `target_modules` may be written.
            fused: whether the base holds experts as one parameter.
        """
        pairs = {key: p for path, pair in layers.items() for key, p in zip(keys(path), pair, strict=True)}
        empty = {key: np.zeros(tuple(p.shape), np.float32) for key, p in pairs.items()}
        content = save_bytes(empty, metadata={"format": "pt"})
        begin = _weights_begin(content)
        entries = json.loads(content[8:begin])
        order = sorted(pairs, key=lambda key: int(entries[key]["data_offsets"][0]))
        return cls(_config(shape, base_name, linear_paths, fused), content[:begin], tuple(pairs[key] for key in order))

    def contents(self) -> dict[str, bytes]:
        """Each file by its name, with the weights as they are now, in float32."""
        # One copy by torch's own call, since one for each of some hundred small tensors takes longer than their bytes.
        weights = _flatten_dense_tensors([p.detach() for p in self.parameters]).float().cpu().numpy()
        return {WEIGHTS: b"".join((self.header, weights.data)), CONFIG: self.config}

    def save(self, folder: Path) -> None:
        """Write the folder, made if it does not exist. Each file appears by one rename."""
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in self.contents().items():
            temporary = folder / f"{name}.tmp"
            temporary.write_bytes(content)
            os.replace(temporary, folder / name)


def finite(files: Mapping[str, bytes]) -> bool:
    """Whether all weights in the files of a folder (`PeftFiles.contents`) are finite."""
    begin = _weights_begin(files[WEIGHTS])
    return bool(np.isfinite(np.frombuffer(files[WEIGHTS], np.float32, offset=begin)).all())


def _weights_begin(content: bytes) -> int:
    # The format: the header's length in 8 bytes, the header in JSON, and the weights in the order it tells.
    return 8 + int.from_bytes(content[:8], "little")


def _config(shape: AdapterShape, base_name: str, linear_paths: LinearPaths, fused: bool) -> bytes:
    dense = [path for path in shape.layers if path in linear_paths]
    apart = [path for path in dense if fused and path.rsplit(".", 1)[-1] in OF_EXPERTS]
    parameters = [*(f"{path}.weight" for path in apart), *(path for path in shape.layers if path not in linear_paths)]
    named = {path: f"{path}.weight" if path in apart else path for path in shape.layers}
    ranks = {named[path]: rank for path, (rank, _) in shape.layers.items()}
    alphas = {named[path]: scaling * rank for path, (rank, scaling) in shape.layers.items()}
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_name,
        # PEFT then loads the adapter frozen, which serving expects; training with PEFT sets is_trainable anyway.
        "inference_mode": True,
        "r": shape.rank,
        "lora_alpha": _whole(shape.alpha),
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "use_rslora": False,
        "use_dora": False,
        "modules_to_save": None,
        "alora_invocation_tokens": None if shape.invocation is None else list(shape.invocation),
        "target_modules": _targets(linear_paths, [path for path in dense if path not in apart]),
        **({"target_parameters": sorted(parameters)} if parameters else {}),
        # Anchored and escaped, since PEFT reads the names as regular expressions and layer 1 would match layer 11.
        "rank_pattern": {f"^{re.escape(p)}$": r for p, r in ranks.items() if r != shape.rank},
        "alpha_pattern": {f"^{re.escape(p)}$": _whole(a) for p, a in alphas.items() if a != shape.alpha},
    }
    return (json.dumps(config, indent=2, sort_keys=True) + "\n").encode()


def read(
    folder: Path, stored: Mapping[str, str], *, base_name: str, linear_paths: LinearPaths, experts: FusedPaths
) -> PeftFolder:
    """Read and check a PEFT folder; its own `adapter_config.json` says which shape it has.

    `stored` as of `names_in_checkpoints`; the folder may have the names in memory, too.

    Raises:
        CheckpointError: it is missing, corrupt, not LoRA as computed here, or made for another base.
    """
    config, tensors = _read_files(folder)
    begin, root = _beginnings(tensors, linear_paths, experts)
    # The settings are read under the folder's own names, which are of the text alone.
    shapes = {begin + path.removeprefix(root): size for path, size in linear_paths.items() if path.startswith(root)}
    fused = {begin + path.removeprefix(root): size for path, size in experts.items() if path.startswith(root)}
    _refuse_unlike(config, folder)
    _refuse_parameters(config, folder, shapes, fused, base_name)
    if begin != root:
        layers = _layers(base_name, shapes, fused, config, tensors, folder, {})
        layers = {root + path.removeprefix(begin): layer for path, layer in layers.items()}
        tensors = {PREFIX + root + key.removeprefix(PREFIX + begin): tensor for key, tensor in tensors.items()}
    renamed = {key: new for path, name in stored.items() for key, new in zip(keys(path), keys(name), strict=True)}
    tensors = {renamed.get(key, key): tensor for key, tensor in tensors.items()}
    if begin == root:
        layers = _layers(base_name, linear_paths, experts, config, tensors, folder, stored)
    _refuse_another_base(config, base_name, folder)
    shape = AdapterShape(int(config["r"]), float(config["lora_alpha"]), layers, _invocation(config, folder))
    return PeftFolder(folder, shape, tensors)


def _beginnings(tensors: Mapping[str, Tensor], linear_paths: LinearPaths, experts: FusedPaths) -> tuple[str, str]:
    """What stands before the blocks in the names of a folder's layers and of the base's, where it differs.

    The classes of a family call its layers otherwise: `model.layers`, and `model.language_model.layers` where images
    are read too. Two empty texts where nothing differs, or the base has no such layers.
    """
    stems = {key.removeprefix(PREFIX).partition(".lora_")[0].replace(".base_layer", "") for key in tensors}
    ours = {path: match[1] for path in linear_paths if not _OF_SENSES.search(path) and (match := _BLOCK.match(path))}
    theirs = {match[1] for path in stems if not _OF_SENSES.search(path) and (match := _BLOCK.match(path))}
    if len(set(ours.values())) != 1 or len(theirs) != 1:
        return "", ""
    begin, root = theirs.pop(), next(iter(ours.values()))
    known = {*ours, *(path.rpartition(".")[0] for path in experts)}
    return (begin, root) if any(root + path.removeprefix(begin) in known for path in stems) else ("", "")


def _refuse_another_base(config: dict[str, Any], base_name: str, folder: Path) -> None:
    """Another base of the same shape takes the weights without an error, and the adapter then says nothing sensible.

    Raises CheckpointError for one of another family or other tokens, and warns of another name, or of none.
    """
    trained_on, mapping = config.get("base_model_name_or_path"), config.get("auto_mapping")
    class_ = mapping.get("base_model_class") if isinstance(mapping, dict) else None
    classes = [_stem(class_), _stem(_architecture(Path(base_name) / "config.json"))]
    if "" not in classes and classes[0] != classes[1]:
        raise CheckpointError(
            f"{folder} was trained on a {class_}, and {base_name} is none, though its layers have the same names and "
            "sizes; load it on the base it was trained on, or take auto_mapping out of its adapter_config.json"
        )
    if not isinstance(trained_on, str):
        trained_on = ""
    for name in (class_, _architecture(Path(trained_on) / "config.json") if trained_on else None):
        if isinstance(name, str) and name.endswith(OTHER_TASKS):
            raise CheckpointError(
                f"{folder} was trained on a {name}, whose outputs are no next tokens, and {base_name} has the same "
                "layers in a causal language model; give adapters that were trained on one"
            )
    if not trained_on:
        log.warning(
            "%s does not say which base it was trained on; its layers have the names and sizes of those of %s, which "
            "other models have too: if it was another one, its answers mean nothing here",
            *(folder, base_name),
        )
        return
    vocabularies = [_vocabulary(Path(name) / "tokenizer.json") for name in (trained_on, base_name)]
    if None not in vocabularies and vocabularies[0] != vocabularies[1]:
        raise CheckpointError(
            f"{folder} was trained on the base {trained_on}, whose tokens are not those of {base_name}; give "
            f"--model_name_or_path {trained_on}, or adapters of this base"
        )
    # Folders of the hub's cache are named by a commit, and hold the model's name further up.
    names = [
        re.sub(r".*models--(?:.*--)?(.+)/snapshots/[0-9a-f]{40}/?$", r"\1", name) for name in (trained_on, base_name)
    ]
    families = [_family(Path(name) / "config.json") for name in (trained_on, base_name)]
    if "" not in families and families[0] != families[1]:
        raise CheckpointError(
            f"{folder} was trained on the base {trained_on} (of family {families[0]}), and {base_name} is of family "
            f"{families[1]}, though its layers have the same names and sizes; give --model_name_or_path {trained_on}, "
            "or, if both are one model, write this base into base_model_name_or_path of its adapter_config.json"
        )
    if Path(names[0]).name != Path(names[1]).name:
        log.warning(
            "%s was trained on the base %s and is loaded on %s, whose layers have the same names and sizes; it "
            "fits only the weights that it was trained with: if these differ, give --model_name_or_path %s",
            *(folder, trained_on, base_name, trained_on),
        )


def _stem(class_: Any) -> str:
    """The family in the name of a model's class: those for text alone and for images share it."""
    return re.sub(r"(?:Text)?(?:For[A-Z]\w*|LMHead\w*|Model)$", "", class_) if isinstance(class_, str) else ""


def _architecture(file: Path) -> Any:
    try:
        return next(iter(parse_json(read_file(file)).get("architectures") or ()), None)
    except (OSError, ValueError, AttributeError, TypeError):
        return None  # the base itself is checked where it is loaded


def _family(file: Path) -> str:
    """The model type of a config.json, of the text where images are read too; empty if it is not at hand."""
    try:
        config = parse_json(read_file(file))
        return str((config.get("text_config") or config).get("model_type") or "")
    except (OSError, ValueError, AttributeError):
        return ""  # the base itself is checked where it is loaded


@lru_cache(maxsize=8)
def _vocabulary(file: Path) -> str | None:
    """A hash of the tokens of a tokenizer's file; None if it is not at hand."""
    if not file.is_file():
        return None
    try:
        tokenizer = parse_json(read_file(file))
        tokens = json.dumps(tokenizer["model"]["vocab"], sort_keys=True)
    except (OSError, ValueError, KeyError, TypeError):
        return None  # the base itself is checked where it is loaded
    return hashlib.sha256(tokens.encode()).hexdigest()


def _invocation(config: dict[str, Any], folder: Path) -> tuple[int, ...] | None:
    """The tokens that activate the adapter; None in plain LoRA. Raises CheckpointError for anything but token ids."""
    invocation = config.get("alora_invocation_tokens")
    if invocation is None:
        return None
    if (
        not isinstance(invocation, list)
        or not invocation
        or not all(type(token) is int and 0 <= token < 2**31 for token in invocation)
    ):
        raise CheckpointError(
            f"{folder / CONFIG}: found alora_invocation_tokens={shortened(repr(invocation))}, expected a list of "
            "token ids; take the checkpoint before it"
        )
    return tuple(invocation)


def _targets(linear_paths: LinearPaths, paths: list[str]) -> list[str]:
    """The layers' last names if these match exactly these layers, else their full paths."""
    short = sorted({path.rsplit(".", 1)[-1] for path in paths})
    meant = {path for path in linear_paths if any(matches(path, target) for target in short)}
    # A number is the name of a whole block too, on which PEFT would stumble.
    return short if meant == set(paths) and not any(name.isdigit() for name in short) else sorted(paths)


def _whole(value: float) -> float | int:
    """PEFT and vLLM expect whole alphas to be written as integers."""
    return int(value) if float(value).is_integer() else value


def _is_rank(value: Any) -> bool:
    return type(value) is int and 0 < value < 2**31


def _is_alpha(value: Any) -> bool:
    return type(value) in (int, float) and 0 < value <= 1e9


def _by_name(value: Any, fits: Callable[[Any], bool]) -> bool:
    return isinstance(value, dict) and all(map(fits, value.values()))


def _is_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


def _is_numbers(value: Any) -> bool:
    return all(type(number) is int for number in value) if isinstance(value, list) else type(value) is int


_FORMS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "r": ("a whole number above 0", _is_rank),
    "lora_alpha": ("a number above 0", _is_alpha),
    "rank_pattern": ("whole numbers above 0 by name", lambda value: _by_name(value, _is_rank)),
    "alpha_pattern": ("numbers above 0 by name", lambda value: _by_name(value, _is_alpha)),
    "target_modules": ("names of layers", lambda value: isinstance(value, str) or _is_names(value)),
    "exclude_modules": ("names of layers", lambda value: isinstance(value, str) or _is_names(value)),
    "target_parameters": ("names of parameters", _is_names),
    "layers_to_transform": ("numbers of layers", _is_numbers),
    "use_rslora": ("true or false", lambda value: isinstance(value, bool)),
}
"""Setting -> what it must be, where it is not null."""


def _read_files(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Read the two files of a PEFT folder. Raises CheckpointError if one is missing or unreadable."""
    for file in (CONFIG, WEIGHTS):
        if not (folder / file).is_file():
            what = "that folder" if folder.is_dir() else "no such folder"
            raise CheckpointError(
                f"found no {file} in {folder} ({what}), expected a PEFT adapter folder with {CONFIG} and {WEIGHTS}; "
                "check the path (an adapter_model.bin must be saved again as safetensors)"
            )
    config = read_settings(folder)
    try:
        header_shapes(folder / WEIGHTS)  # before all of it is read into memory
        # Not memory-mapped: the file may be replaced or truncated while the tensors are in use.
        tensors = load_bytes((folder / WEIGHTS).read_bytes())
        # Numbers of any precision become those that are computed with, or are found to lie beyond them.
        tensors = {key: each.float() if each.is_floating_point() else each for key, each in tensors.items()}
    except (SafetensorError, OSError, ValueError, LookupError, TypeError, AttributeError, MemoryError) as error:
        raise CheckpointError(
            f"{folder / WEIGHTS} is corrupt: found {error_line(error)}, expected a safetensors file; take the "
            "checkpoint before it"
        ) from None
    # All at once first: some hundred looks at small tensors take longer than reading them.
    floats = [tensor.flatten() for tensor in tensors.values() if tensor.is_floating_point()]
    fine = not floats or bool(torch.cat(floats).isfinite().all())
    for key, tensor in tensors.items():
        if not tensor.is_floating_point():
            raise CheckpointError(
                f"{folder / WEIGHTS}: found {key} of {tensor.dtype}, expected floating-point weights; save the adapter "
                "again with PEFT"
            )
        if not fine and not tensor.isfinite().all():
            raise CheckpointError(
                f"{folder / WEIGHTS}: found NaN or infinity in {key}, expected finite weights; "
                "take the checkpoint before it"
            )
    return config, tensors


def read_settings(folder: Path) -> dict[str, Any]:
    """The content of an `adapter_config.json`, whose settings are of the kinds that PEFT writes.

    Raises:
        CheckpointError: it is missing or corrupt.
    """
    try:
        config = parse_json(read_text(folder / CONFIG))
        if not isinstance(config, dict):
            raise ValueError(f"a {type(config).__name__} at the top")
        for name in ("r", "lora_alpha"):
            config[name]
        for name, (expected, fits) in _FORMS.items():
            if (value := config.get(name)) is None and name not in ("r", "lora_alpha"):
                continue
            if not fits(value):
                raise ValueError(f"{name}={shortened(repr(value))}, which must be {expected}")
    except KeyError as error:
        kind = config.get("peft_type", "LORA")
        found = f"no {error}" if kind == "LORA" else f"peft_type={shortened(repr(kind))}"
        raise CheckpointError(
            f"{folder / CONFIG}: found {found}, expected the configuration of a PEFT LoRA adapter; "
            "check that the folder holds one"
        ) from None
    except (ValueError, TypeError) as error:
        raise CheckpointError(
            f"{folder / CONFIG} is corrupt: found {error_line(error)}, expected PEFT's JSON; take the checkpoint "
            "before it"
        ) from None
    return config


def _refuse_parameters(
    config: dict[str, Any], folder: Path, linear_paths: LinearPaths, experts: FusedPaths, base_name: str
) -> None:
    """Raise CheckpointError for targeted parameters that are neither whole linear layers nor experts of the base."""
    known = [*experts, *(f"{path}.weight" for path in linear_paths)]
    others = [name for name in config.get("target_parameters") or () if not any(matches(path, name) for path in known)]
    if others:
        of_this, hint = _origin(config, base_name)
        raise CheckpointError(
            f"{folder / CONFIG}: found target_parameters={shortened(str(others))}, expected LoRA of linear layers and "
            f"experts of {base_name}; {'merge the adapter into the base' if of_this else hint}"
        )


def _origin(config: dict[str, Any], base_name: str) -> tuple[bool, str]:
    """Whether a folder may be an adapter of this base, and the remedy where it is not."""
    trained_on = config.get("base_model_name_or_path")
    of_this = not trained_on or Path(str(trained_on)).name == Path(base_name).name
    return of_this, "load it on the base it was trained on" + (f" ({trained_on})" if trained_on else "")


def _refuse_unlike(config: dict[str, Any], folder: Path) -> None:
    """Raise CheckpointError for unsupported LoRA variants, and warn of settings of training that have no effect."""
    set_here = [f"{key}={value!r}" for key, value in config.items() if value and key not in PLAIN_LORA]
    unsupported = [shortened(each) for each in set_here]
    # Old versions of PEFT wrote no such key, and had LoRA only.
    if config.get("peft_type", "LORA") != "LORA":
        unsupported.append(f"peft_type={shortened(repr(config['peft_type']))}")
    if config.get("task_type") not in (None, "CAUSAL_LM"):
        unsupported.append(f"task_type={shortened(repr(config['task_type']))}")
    if config.get("bias", "none") != "none":
        unsupported.append(f"bias={shortened(repr(config['bias']))}")
    if config.get("init_lora_weights", True) not in (True, False, "gaussian", "eva", "orthogonal"):
        # PiSSA, OLoRA, CorDA and LoftQ subtract the initial adapter from the base's weights, which are frozen here.
        unsupported.append(f"init_lora_weights={shortened(repr(config['init_lora_weights']))}")
    if unsupported:
        raise CheckpointError(
            f"{folder / CONFIG}: found {', '.join(unsupported)}, expected plain LoRA on linear layers; "
            "convert the adapter with PEFT, merge it into the base, or remove a setting that changes no answer"
        )
    if idle := [key for key in ELSEWHERE if config.get(key)]:
        log.warning(
            "%s: %s of PEFT's training %s not read: the adapter answers as it is, and learns on without",
            *(folder / CONFIG, " and ".join(idle), "is" if len(idle) == 1 else "are"),
        )


def _named(setting: Any, shapes: Mapping[str, Any], stem_of: Mapping[str, str]) -> set[str]:
    """The layers that `target_modules` or `exclude_modules` names: a list of names, or an expression, as in PEFT."""
    if setting == "all-linear":
        return set(shapes)
    if not isinstance(setting, str):
        return {path for path in shapes if any(matches(path, str(target)) for target in setting or ())}
    names = [*shapes, *(stem_of[path] for path in shapes)]
    [fits] = full_matches([setting], names)
    return {path for path, *ways in zip(shapes, fits, fits[len(shapes) :], strict=False) if any(ways)}


def _layers(
    base_name: str,
    linear_paths: LinearPaths,
    experts: FusedPaths,
    config: dict[str, Any],
    tensors: Mapping[str, Tensor],
    folder: Path,
    stored: Mapping[str, str],
) -> dict[str, tuple[int, float]]:
    """Path -> (rank, scaling) of every adapted layer: layers from the tensors, scaling from the config."""
    shapes, where = linear_paths, folder / WEIGHTS
    of_this, hint = _origin(config, base_name)
    parameters = [str(name) for name in config.get("target_parameters") or ()]
    fused = [path for path in experts if any(matches(path, name) for name in parameters)]
    stem_of = {**{path: stored.get(path, path) for path in shapes}, **stems(fused, experts, stored)}
    path_of = {stem: path for path, stem in stem_of.items()}
    paths, of_lora = set(fused), re.compile(re.escape(PREFIX) + r"(.+)\.lora_[AB]\.weight")
    for key in sorted(tensors):
        match = of_lora.fullmatch(key)
        if match is None or match[1] not in path_of:
            remedy = _foreign_key(key, shapes, of_lora) or ("save it again with PEFT" if of_this else hint)
            raise CheckpointError(
                f"{where}: found {shortened(key, 200)}, expected LoRA of a linear layer of {base_name}; {remedy}"
            )
        paths.add(path_of[match[1]])
    wanted, excluded = config.get("target_modules"), config.get("exclude_modules") or []
    if isinstance(wanted, list) or (wanted is None and parameters):
        wanted = [*(wanted or ()), *(name.removesuffix(".weight") for name in parameters)]
    try:
        # An expression is of the names in the folder, which may be others than those in memory.
        meant = _named(wanted, shapes, stem_of) - _named(excluded, shapes, stem_of)
    except PatternError as error:
        raise CheckpointError(
            f"{folder / CONFIG}: found a pattern of which {error}, expected the names of layers; write them out"
        ) from error
    # Tensors of other layers than the targets are those of another adapter, or the settings are.
    of_parameters = {path for path in paths if any(matches(f"{path}.weight", name) for name in parameters)}
    if wanted is not None and (stray := sorted(paths - meant - of_parameters - {*experts})):
        raise CheckpointError(
            f"{folder / CONFIG}: found weights of {stray[0]}, target_modules {shortened(str(wanted))} and "
            f"exclude_modules {shortened(str(excluded))}, expected weights of the targets alone; take both files from "
            "one adapter"
        )
    if isinstance(wanted, list) and not config.get("layers_to_transform"):
        # A targeted layer without tensors is a damaged file, so the targets count beside the tensors that are there.
        paths |= meant
    if (only := config.get("layers_to_transform")) is not None:
        numbers = only if isinstance(only, list) else [only]
        other = next((p for p in sorted(paths) if not {int(n) for n in re.findall(r"\d+", p)} & {*numbers}), None)
        if other is not None:
            raise CheckpointError(
                f"{folder / CONFIG}: found weights of {other} and layers_to_transform {shortened(str(only))}, expected "
                "weights of these layers alone; take both files from one adapter"
            )
    if not paths:
        raise CheckpointError(f"{where}: found no LoRA weights, expected at least one pair; {hint}")
    adapted = [path for path in (*shapes, *experts) if path in paths]
    # PEFT matches patterns with the targets, which are parameters where these are named.
    apart = {path for path in adapted if any(matches(f"{path}.weight", name) for name in parameters)}
    named = [f"{path}.weight" if path in apart else path for path in adapted]
    try:
        ranks = by_pattern(config.get("rank_pattern"), named, config["r"])
        alphas = by_pattern(config.get("alpha_pattern"), named, config["lora_alpha"])
        for setting in ("rank_pattern", "alpha_pattern"):
            if idle := _idle(config.get(setting), [*named, *shapes, *experts]):
                raise CheckpointError(
                    f"{folder / CONFIG}: found {shortened(idle[0])!r} in {setting}, expected names of layers of "
                    f"{base_name}; remove it if it is of no use, or {hint}"
                )
    except PatternError as error:
        raise CheckpointError(
            f"{folder / CONFIG}: found a pattern of which {error}, expected the names of layers; write them out"
        ) from error
    layers = {}
    for path, rank_of, alpha_of in zip(adapted, ranks, alphas, strict=True):
        key_a, key_b = keys(stem_of[path])
        if key_a not in tensors or key_b not in tensors:
            lacking = key_a if key_a not in tensors else key_b
            raise CheckpointError(f"{where}: found no {lacking}, expected it; take the checkpoint before it, or {hint}")
        rank, alpha = int(rank_of), float(alpha_of)
        inner, outer, count = experts[path] if path in experts else (*shapes[path], 1)
        for key, expected in ((key_a, [rank * count, inner]), (key_b, [outer, rank * count])):
            if list(tensors[key].shape) != expected:
                raise CheckpointError(
                    f"{where}: found {key} of shape {list(tensors[key].shape)}, expected {expected} for {base_name} "
                    f"and the rank in {CONFIG}; {hint}"
                )
        layers[path] = (rank, alpha / (math.sqrt(rank) if config.get("use_rslora") else rank))
    return layers


def _foreign_key(key: str, shapes: LinearPaths, of_lora: re.Pattern[str]) -> str | None:
    """What is wrong with a key that is not of one of our layers, if that can be told; None if it cannot."""
    match = of_lora.fullmatch(key.replace(".default.weight", ".weight"))
    if match is None:
        return "adapters are LoRA on linear layers and nothing else; save it without modules_to_save and embeddings"
    if _OF_SENSES.search(match[1]):
        return "this layer reads images or sound, of which nothing is read here; save it with the text's layers alone"
    if match[1] in shapes:
        return "its keys name the adapter, as a state dict does; write the folder with PEFT's save_pretrained"
    ending = ".".join(match[1].split(".")[-4:])
    if ours := next((path for path in shapes if path.endswith(ending)), None):
        return f"here that layer is called {PREFIX}{ours}; rename the keys, or save it from the class of this base"
    return None


def by_pattern(patterns: Mapping[str, Any] | None, paths: Sequence[str], default: Any) -> list[Any]:
    """PEFT's rule for each path: the first pattern that matches it or a dotted end of it. Raises PatternError."""
    values, rows = list((patterns or {}).values()), _rows(patterns, paths)
    return [next((v for v, row in zip(values, rows, strict=True) if row[n]), default) for n in range(len(paths))]


def _rows(patterns: Iterable[str] | None, paths: Sequence[str]) -> list[list[bool]]:
    return full_matches([rf"(.*\.)?({pattern})" for pattern in patterns or ()], paths)


def _idle(patterns: Mapping[str, Any] | None, paths: Sequence[str]) -> list[str]:
    """The patterns that match no path. Raises PatternError."""
    return [pattern for pattern, row in zip(patterns or (), _rows(patterns, paths), strict=True) if not any(row)]


def refuse_other_shape(expected: AdapterShape, loaded: PeftFolder, *, name: str) -> None:
    """Raise CheckpointError unless a folder fits an adapter that exists.

    Such an adapter keeps its parameters, since an optimizer may hold them.
    """
    if loaded.shape.invocation != expected.invocation:
        have_scope, want_scope = (
            "all" if shape.invocation is None else f"action (from the tokens {list(shape.invocation)} on)"
            for shape in (loaded.shape, expected)
        )
        raise CheckpointError(
            f"{loaded.path}: found an adapter of scope {have_scope}, expected {want_scope} as the run asks for adapter "
            f"{name!r}; give --adapter_scope as the folder was saved with"
        )
    have_layers, want_layers = loaded.shape.layers, expected.layers
    for path in sorted(want_layers.keys() | have_layers.keys()):
        have, want = have_layers.get(path), want_layers.get(path)
        if have is None or want is None or have[0] != want[0] or not math.isclose(have[1], want[1], rel_tol=1e-6):
            raise CheckpointError(
                f"{loaded.path}: found {_words(have)} at {path}, expected {_words(want)} as the run asks for adapter "
                f"{name!r}; give the agent the rank, alpha and targets that the folder was saved with"
            )


def _words(layer: tuple[int, float] | None) -> str:
    return "no LoRA" if layer is None else f"rank {layer[0]} and scaling {layer[1]:g}"
