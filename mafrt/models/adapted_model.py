"""The adapters of a frozen model: added to its linear layers, counted, and exchanged with PEFT's files."""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import compress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from mafrt.config.agent import ALL_LINEAR, LoraSpec
from mafrt.core.errors import CheckpointError, ConfigError
from mafrt.core.patterns import PatternError, full_matches
from mafrt.core.text import shortened
from mafrt.models import peft_format
from mafrt.models.adapter_routing import LoraContext
from mafrt.models.compute import compute_for
from mafrt.models.invocation import active_from, invocation_of
from mafrt.models.multi_lora import StackedLoRALinear
from mafrt.models.peft_format import AdapterShape, PeftFiles, matches, stems
from mafrt.models.routers import routers

if TYPE_CHECKING:
    from mafrt.models.expert_lora import AdaptedExperts, StackedLoRAExperts

log = logging.getLogger(__name__)

BLOCK = re.compile(r"\.\d+\.")
"""in the path of a layer: the number of its block"""
NO_OUT_PROJ = ("falcon_h1", "falcon_mamba", "mamba", "mamba2", "nemotron_h")
"""families whose kernels read `out_proj` past its module, so that PEFT refuses adapters on it"""


@dataclass(frozen=True)
class Adapter(AdapterShape):
    """The record of one adapter: its number and its shape."""

    index: int = field(kw_only=True)


class AdaptedModel:
    """A model whose linear layers hold any number of LoRA adapters, by name.

    A layer is wrapped when the first adapter targets it.
    """

    def __init__(self, model: Any, tokenizer: Any, name: str = "") -> None:
        self.model = model.eval().requires_grad_(False)
        self.tokenizer = tokenizer
        self.name = name or str(getattr(model.config, "_name_or_path", ""))
        self.head = model.get_output_embeddings()
        self._decoder = _decoder_path(model)
        self.unrouted: frozenset[str] = frozenset()
        """linear layers on which no adapter can act, as `family_checks` found"""
        self._routers = tuple(routers(model))
        self.fused = _fused_experts(model)
        """path -> (in, out, experts) of every parameter that holds a matrix of each expert of a block"""
        self.context = LoraContext()
        self.records: dict[str, Adapter] = {}
        self.versions: dict[str, int] = {}
        """adapter -> number of changes of its weights"""
        self.adapted_layers: dict[str, StackedLoRALinear] = {}
        """the layers that hold adapters, by path"""
        self.adapted_experts: dict[str, StackedLoRAExperts] = {}
        """the parameters of experts that hold adapters, by path"""
        self._experts: dict[str, AdaptedExperts] = {}
        self._files: dict[str, PeftFiles] = {}
        self._changes = 0
        """changes of any adapter, so that what was derived from them is known to be stale"""
        self._linear_paths: dict[str, tuple[int, int]] | None = None
        """kept from the first adapter on, since no layer comes or goes then"""
        self._told: set[frozenset[str]] = set()
        """sets of layers of which it was said what they leave out"""

    @property
    def adapters(self) -> dict[str, int]:
        """Adapter name -> index, in order of adding."""
        return {name: record.index for name, record in self.records.items()}

    def adapter_index(self, name: str | None) -> int:
        """Index of the adapter in `forward`; -1 for None. Raises ConfigError for an unknown name."""
        return -1 if name is None else self._record(name).index

    @property
    def activated(self) -> list[str]:
        """Names of the adapters of scope `action`."""
        return [name for name, record in self.records.items() if record.invocation is not None]

    def active_from(self, name: str | None, prompt: Sequence[int]) -> int:
        """Position in a prompt of the first token on which the adapter acts: 0 unless its scope is `action`."""
        invocation = None if name is None else self._record(name).invocation
        return 0 if invocation is None else active_from(prompt, invocation)

    def _record(self, name: str) -> Adapter:
        if name not in self.records:
            known = ", ".join(self.records) or "none"
            raise ConfigError(f"found adapter name {name!r}, expected one that was added: {known}")
        return self.records[name]

    def add_adapter(self, name: str, spec: LoraSpec, *, seed: int) -> None:
        """Add an adapter that changes nothing yet (B = 0); A depends on `seed`, the name and the layer only.

        Raises ConfigError if the name is taken or a target matches no linear layer.
        """
        if spec.rank < 1:
            raise ConfigError(f"adapter {name!r}: found rank {spec.rank}, expected 1 or more")
        # Scaled by alpha / rank as in the LoRA paper, so that a learning rate need not be found anew for another rank.
        layers = dict.fromkeys(self.match_targets(name, spec.targets), (spec.rank, spec.alpha / spec.rank))
        invocation = invocation_of(self.tokenizer, self.name) if spec.scope == "action" else None
        self.place_adapter(name, spec.rank, spec.alpha, layers, seed=seed, invocation=invocation)

    def match_targets(self, name: str, targets: Sequence[str]) -> list[str]:
        """Paths of the linear layers, and of experts' parameters, that the targets name.

        Raises ConfigError for a target that names none.
        """
        paths = self.adaptable()
        chosen = set[str]()
        for target in targets:
            try:
                found = self._named(target)
            except PatternError as error:
                raise ConfigError(
                    f"adapter {name!r}: found target {shortened(repr(target))}, and {error}; name the layers, as q_proj"
                ) from error
            if not found:
                # The last part of a path is shown, since a user writes targets that way: q_proj, not model.layers.0...
                kinds = ", ".join(sorted({self._short(path) for path in paths}))
                raise ConfigError(
                    f"adapter {name!r}: found target {target!r}, which is no linear layer of {self.name} that text "
                    f"passes; expected {ALL_LINEAR}, or some of {kinds or 'none: it has no linear layers'}"
                )
            chosen.update(found)
        return [path for path in paths if path in chosen]

    def _short(self, path: str) -> str:
        """The end of a path that a user would write: `q_proj`, `experts.down_proj`."""
        return ".".join(path.rsplit(".", 2)[-2 if path in self.fused else -1 :])

    def _tell_of_layers(self, name: str, layers: Collection[str], rank: int) -> None:
        """Say what an adapter leaves out, and what share of it lies on experts, of which there may be hundreds.

        Once for adapters of the same layers, those that were loaded included.
        """
        if frozenset(layers) in self._told:
            return
        self._told.add(frozenset(layers))
        # Where layers are named, those that are not are left out on purpose, but no name reaches experts.
        every = set(self._named(ALL_LINEAR)) <= set(layers)
        others = [kind for kind in self.left_out(layers) if every or "(experts)" in kind]
        if others:
            who = "no adapter reaches" if every else f"the adapter {name!r} does not reach"
            log.warning("%s: %s %s", self.name, who, ", ".join(others))
        sizes = {path: sum(self.linear_paths()[path]) for path in layers if path not in self.fused}
        many = {path: (a + b) * count for path, (a, b, count) in self.fused.items() if path in layers}
        if many:
            total = sum(sizes.values()) + sum(many.values())
            names = " ".join(sorted(set(map(self._short, sizes))))
            log.warning(
                "%s: %d%% of the %s parameters of an adapter are on experts (%s)%s",
                *(self.name, round(100 * sum(many.values()) / total), f"{rank * total:,}"),
                ", ".join(sorted(set(map(self._short, many)))),
                f"; to leave these out, name the layers in --lora_targets: {names}" if names else "",
            )

    def adaptable(self) -> list[str]:
        """Paths on which an adapter can act. Towers that read images have layers of the same names, which text never
        passes."""
        return [path for path in (*self.linear_paths(), *self.fused) if path not in self.unrouted]

    def _named(self, target: str) -> list[str]:
        """Paths that one target means."""
        paths = self.adaptable()
        if target == ALL_LINEAR:
            return [path for path in paths if self._by_default(path)]
        if named := [path for path in paths if matches(path, target)]:
            return named
        # A run's args.yaml and a team file may come from anybody, with an expression that takes for ever.
        [row] = full_matches([target], paths)
        return list(compress(paths, row))

    def _by_default(self, path: str) -> bool:
        """Whether `all-linear` means a layer: one of a decoder block, and no router of experts."""
        block = BLOCK.search(path)
        if self.model.config.model_type in NO_OUT_PROJ and path.endswith(".out_proj"):
            return False
        return block is not None and path.startswith(self._decoder) and not self._of_router(path)

    def _of_router(self, path: str) -> bool:
        return any(path == router or path.startswith(f"{router}.") for router in self._routers)

    def left_out(self, layers: Collection[str]) -> list[str]:
        """Kinds of matrices in the decoder blocks that an adapter of these layers leaves out, each with a reason."""
        kinds = {}
        for path, parameter in self.model.named_parameters():
            block, layer = BLOCK.search(path), path.rpartition(".")[0].removesuffix(".base_layer")
            adapters = ".lora_A." in path or ".lora_B." in path
            if block is None or not path.startswith(self._decoder) or adapters:
                continue
            if parameter.dim() < 2 or layer in layers or path in layers:
                continue
            kind = path[block.end() :].removesuffix(".weight").removesuffix(".base_layer")
            why = "router" if self._of_router(layer) else "experts" if "expert" in kind and parameter.dim() > 2 else ""
            kinds[f"{kind} ({why})" if why else kind] = True
        return list(kinds)

    def linear_paths(self) -> dict[str, tuple[int, int]]:
        """Path -> (in, out) features of every layer that may be adapted: all linear ones but the head."""
        if self._linear_paths is not None:
            return self._linear_paths
        features: dict[str, tuple[int, int]] = {}
        for path, module in self.model.named_modules():
            if path in self.adapted_layers:
                features[path] = (module.in_features, module.out_features)
            # The frozen layer inside a wrapper is skipped, or a second adapter would be put on it.
            elif path.rpartition(".")[0] not in self.adapted_layers and module is not self.head:
                shape = (getattr(module, "in_features", None), getattr(module, "out_features", None))
                if type(module).__name__ == "Conv1D":  # a linear layer of GPT-2, whose weight is `[in, out]`
                    shape = (module.nx, module.nf)
                # Asked for by its features and not by its class, since quantised linear layers are no nn.Linear.
                if isinstance(shape[0], int) and isinstance(shape[1], int):
                    features[path] = (shape[0], shape[1])
        if self.records:
            self._linear_paths = features
        return features

    def place_adapter(
        self,
        name: str,
        rank: int,
        alpha: float,
        layers: Mapping[str, tuple[int, float]],
        *,
        seed: int,
        invocation: tuple[int, ...] | None = None,
    ) -> None:
        """Add an adapter with rank and scaling given layer by layer (`{path: (rank, scaling)}`).

        `invocation` holds the tokens from which on it acts; None: it acts on all tokens.
        """
        if name in self.records:
            raise ConfigError(f"found a second adapter called {name!r}, expected every name once")
        if lost := next((path for path in layers if self._stored.get(path) == ""), None):
            raise ConfigError(
                f"adapter {name!r}: found the layer {lost}, which PEFT would read under another name; expected one "
                "that it finds again; leave it out of --lora_targets"
            )
        self._tell_of_layers(name, layers, rank)
        # The first that is free: indices have no gaps once the place of a removed adapter is taken again.
        index = min({*range(len(self.records) + 1)} - {record.index for record in self.records.values()})
        # Read before the loop: it wraps layers, and paths of unwrapped ones would change on the way.
        shapes = self.linear_paths()
        for path, (layer_rank, scaling) in layers.items():
            if path in self.fused:
                device = self.context.device or self.model.device
                self._expert_layer(path).add(index, layer_rank, scaling, f"{seed}/{name}/{path}", device)
                continue
            if path not in self.adapted_layers:
                parent, _, child = path.rpartition(".")
                holder = self.model.get_submodule(parent)
                self.adapted_layers[path] = StackedLoRALinear(getattr(holder, child), *shapes[path], self.context)
                setattr(holder, child, self.adapted_layers[path])
            self.adapted_layers[path].add(index, layer_rank, scaling, f"{seed}/{name}/{path}")
        compute_for((self.context.device or self.model.device).type).link(self.adapted_layers)
        self.records[name] = Adapter(rank, alpha, dict(layers), invocation, index=index)
        self.versions[name] = 0
        self._changed()

    def remove_adapter(self, name: str) -> None:
        """Forget an adapter that no pass uses; the next one that is placed takes its index."""
        record = self._record(name)
        for path in record.layers:
            layer = self.adapted_experts.get(path) or self.adapted_layers[path]
            del layer.pairs[record.index], layer.ranks[record.index], layer.scalings[record.index]
            if isinstance(layer, StackedLoRALinear):
                for held in (layer.lora_A, layer.lora_B):
                    if str(record.index) in held:  # not so where the base is sharded
                        del held[str(record.index)]
        del self.records[name], self.versions[name]
        self._changed()

    def _expert_layer(self, path: str) -> StackedLoRAExperts:
        """The adapters on a parameter of experts, which are computed with them from now on."""
        from mafrt.models.expert_lora import AdaptedExperts, StackedLoRAExperts

        if path not in self.adapted_experts:
            holder, _, name = path.rpartition(".")
            if holder not in self._experts:
                self._experts[holder] = AdaptedExperts(self.model.get_submodule(holder), self.context)
            self.adapted_experts[path] = self._experts[holder].layers[name] = StackedLoRAExperts(*self.fused[path])
        return self.adapted_experts[path]

    def copy_adapter(self, name: str, copy: str) -> None:
        """Add an adapter `copy` of the shape of `name`, which changes nothing yet."""
        record = self._record(name)
        # The seed does not matter: B is zero, so A does not show until weights are copied in.
        self.place_adapter(copy, record.rank, record.alpha, record.layers, seed=0, invocation=record.invocation)

    def adapter_layers(self, name: str) -> dict[str, tuple[nn.Parameter, nn.Parameter]]:
        """Path -> (A `[r, in]`, B `[out, r]`) of one adapter; in experts r is the rank times their number."""
        record = self._record(name)
        layers: dict[str, StackedLoRALinear | StackedLoRAExperts] = {**self.adapted_layers, **self.adapted_experts}
        return {path: layers[path].pairs[record.index] for path in record.layers}

    def stored_layers(self, name: str) -> dict[str, tuple[nn.Parameter, nn.Parameter]]:
        """The same under the names that PEFT gives the layers (`peft_format.stems`)."""
        layers = self.adapter_layers(name)
        return {stem: layers[path] for path, stem in stems(layers, self.fused, self._stored).items()}

    @cached_property
    def _stored(self) -> dict[str, str]:
        """As of `peft_format.names_in_checkpoints`."""
        return peft_format.names_in_checkpoints(self.model, self.linear_paths())

    def adapter_parameters(self, name: str) -> list[nn.Parameter]:
        """The adapter's parameters, A and B of each layer in turn; no other adapter holds any of them."""
        return [p for pair in self.adapter_layers(name).values() for p in pair]

    def adapter_state(self, name: str) -> dict[str, Tensor]:
        """A copy of the adapter's tensors (on the CPU) under PEFT's key names."""
        return peft_format.state_of(self.stored_layers(name))

    def load_adapter_state(self, name: str, state: Mapping[str, Tensor]) -> None:
        """Copy tensors with PEFT's key names into an adapter; raises CheckpointError unless all keys and shapes fit."""
        layers = self.stored_layers(name)
        peft_format.copy_state(layers, state, name=name, where=f"the state for adapter {name!r}")
        self.bump(name)

    def save_adapter(self, name: str, folder: str | Path) -> None:
        """Write the adapter as a PEFT folder (`adapter_config.json`, `adapter_model.safetensors`)."""
        self._peft_files(name).save(Path(folder))

    def adapter_files(self, name: str) -> dict[str, bytes]:
        """What `save_adapter` writes: the content of each file, by its name."""
        return self._peft_files(name).contents()

    def _peft_files(self, name: str) -> PeftFiles:
        if name not in self._files:
            self._files[name] = self.files_of(name, self.stored_layers(name))
        return self._files[name]

    def files_of(self, name: str, layers: peft_format.Layers) -> PeftFiles:
        """The files of an adapter with other weights: `layers` as of `stored_layers`."""
        fused = any(p.dim() == 3 and "expert" in path for path, p in self.model.named_parameters())
        return PeftFiles.of(
            self._record(name), layers, base_name=self.name, linear_paths=self.linear_paths(), fused=fused
        )

    def finite(self, name: str) -> bool:
        """Whether all weights of an adapter are finite."""
        return peft_format.finite(self.adapter_files(name))

    def load_adapter(self, name: str, folder: str | Path) -> None:
        """Read a PEFT folder: into the adapter of that name if it was added, else as an adapter of its own shape.

        Raises CheckpointError if it is missing, corrupt, not LoRA as computed here, or made for another base.
        """
        loaded = self._read(folder)
        if name in self.records:
            peft_format.refuse_other_shape(self.records[name], loaded, name=name)
        else:
            shape = loaded.shape
            self.place_adapter(name, shape.rank, shape.alpha, shape.layers, seed=0, invocation=shape.invocation)
        layers, where = self.stored_layers(name), str(loaded.path / peft_format.WEIGHTS)
        peft_format.copy_state(layers, loaded.tensors, name=name, where=where)
        self.bump(name)

    def _read(self, folder: str | Path) -> peft_format.PeftFolder:
        found = peft_format.read(
            *(Path(folder), self._stored), base_name=self.name, linear_paths=self.linear_paths(), experts=self.fused
        )
        if idle := self.unrouted.intersection(found.shape.layers):
            kinds = ", ".join(sorted(set(map(self._short, idle))))
            if any(path.startswith(self._decoder) for path in idle):
                raise CheckpointError(
                    f"{folder} adapts {kinds}, on which no adapter acts here, as not every token passes these layers; "
                    "merge it into the base"
                )
            log.warning("%s: text never passes %s of it, which do nothing here", folder, kinds)
        return found

    def targets_of(self, name: str, folder: str | Path) -> tuple[str, ...]:
        """Paths of what a PEFT folder of the adapter adapts. Raises CheckpointError as `load_adapter`."""
        return tuple(self._read(folder).shape.layers)

    def bump(self, name: str) -> None:
        """Record a change of the adapter's weights: increment its version and drop caches derived from them."""
        self._record(name)
        self.versions[name] += 1
        # The counter tells a pending decode step, perhaps in another thread, that its routing and fused weights are
        # stale; otherwise it would go on with the old ones.
        self._changed()

    def _changed(self) -> None:
        self._changes += 1
        for layer in self.adapted_layers.values():
            layer.drop_cache()
        for experts in self.adapted_experts.values():
            experts.drop_cache()


def _fused_experts(model: nn.Module) -> dict[str, tuple[int, int, int]]:
    if not any("has_gate" in vars(module) for module in model.modules()):
        return {}
    from mafrt.models.expert_lora import fused_experts

    return fused_experts(model)


def _decoder_path(model: nn.Module) -> str:
    """Path of the part that reads text, with a dot behind it; empty where that is the whole model."""
    part = getattr(model, "get_decoder", lambda: None)()
    found = next((path for path, module in model.named_modules() if module is part), "")
    if part is None or not found:
        return ""
    # Without blocks it is the output layer, which some families call so.
    return f"{found}." if any(BLOCK.search(f".{path}.") for path, _ in part.named_modules()) else ""
