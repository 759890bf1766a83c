"""One frozen base model in memory, every agent a LoRA adapter on it.

One forward serves rows of different agents, of the reference policy and of the critic at once (both: no adapter,
index -1), and one backward gives every adapter its own gradient. Logits and gradients equal PEFT's with
`set_adapter`; adapters enter and leave in PEFT's own layout (`mafrt/models/peft_format.py`).
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from mafrt.config.agent import LoraSpec
from mafrt.core.distributed import ALONE, Processes
from mafrt.core.errors import ConfigError, ModelError
from mafrt.models import logprobs, peft_format
from mafrt.models.adapter_routing import AdapterRouting, LoraContext, route_adapters
from mafrt.models.invocation import active_from, invocation_of
from mafrt.models.multi_lora import StackedLoRALinear, link_siblings, set_checkpointing
from mafrt.models.packed_attention import packed_attention
from mafrt.models.packing import Beginnings, Packing, pack
from mafrt.models.peft_format import AdapterShape, matches
from mafrt.models.pretrained import load_pretrained
from mafrt.models.sharding import Sharding

PACKED = "mafrt_packed"
"""Name of `packed_attention` among transformers' attention implementations."""
WINDOWED = ("gemma3_text", "mistral", "phi3", "qwen2", "qwen3")
"""Families whose layers tell the attention implementation their window; windows of others are not packed."""


@dataclass(frozen=True)
class Adapter(AdapterShape):
    """The record of one adapter: its number and its shape."""

    index: int = field(kw_only=True)


class SharedBase:
    """A frozen causal language model that holds all adapters of a team.

    `model` must be a Hugging Face causal LM whose logits are its head applied to the last hidden state. It is put in
    eval mode and frozen; its linear layers are wrapped where an adapter targets them, and behave as before when
    called without a routing (`base.model(...)` is always the bare base).
    """

    def __init__(self, model: Any, tokenizer: Any, name: str = "") -> None:
        self.model = model.eval().requires_grad_(False)
        self.tokenizer = tokenizer
        self.name = name or str(getattr(model.config, "_name_or_path", ""))
        self.config = model.config.get_text_config()
        self.head = model.get_output_embeddings()
        self.inner = model.base_model
        for setting in ("final_logit_softcapping", "logit_scale", "logits_scaling"):
            if getattr(self.config, setting, None) not in (None, 1.0):
                raise ModelError(
                    f"{self.name}: found {setting}={getattr(self.config, setting)}, expected a model whose logits are "
                    "its head applied to the last hidden state; use a Qwen, Llama or Mistral model"
                )
        self.context = LoraContext()
        self.records: dict[str, Adapter] = {}
        self.versions: dict[str, int] = {}
        self.form = "auto"
        self.processes: Processes = ALONE
        """processes that train these adapters together"""
        self.sharding: Sharding | None = None
        """sharding of the frozen weights; None: replicated"""
        self.zero: dict[str, Any] | None = None
        """DeepSpeed settings of the adapters' optimizers; None: DeepSpeed is not used"""
        self._layers: dict[str, StackedLoRALinear] = {}
        self._routing: tuple[object, AdapterRouting | None] | None = None
        self._packs = _use_packed_attention(model)
        self._fingerprint: str | None = None
        self._device: torch.device | None = None

    @classmethod
    def load(
        cls,
        name_or_path: str,
        *,
        dtype: str | torch.dtype | None = None,
        device: str | torch.device | None = None,
        attn_implementation: str = "sdpa",
        trust_remote_code: bool = False,
        bits: Literal[4, 8] | None = None,
    ) -> SharedBase:
        """Load model and tokenizer from a folder or the hub; `teaching-base` ships, `smollm2` is fetched.

        `dtype=None` means float32 on a CPU and the checkpoint's own on a GPU; `device=None` a GPU if there is one.
        `bits` quantises the linear layers but the head with bitsandbytes: 4 (nf4, Dettmers 2023) or 8 (LLM.int8).
        Raises ModelError, naming the missing files, if either cannot be loaded, and MissingExtraError.
        """
        model, tokenizer, path = load_pretrained(
            name_or_path,
            dtype=dtype,
            device=device,
            attn_implementation=attn_implementation,
            trust_remote_code=trust_remote_code,
            bits=bits,
        )
        return cls(model, tokenizer, path)

    def shard(self, make: Callable[[], Sharding]) -> None:
        """Spread the frozen weights over `processes` (`mafrt.models.sharding`), before any adapter is added."""
        if self.records:
            raise ConfigError(f"found the adapters {', '.join(self.records)}, expected none yet; shard a base before")
        # The fingerprint reads the embedding, so it must be computed before the weights are sharded.
        self._fingerprint, self._device = self.fingerprint(), torch.device(self.processes.device)
        self.sharding = make()
        self.context.sharded = True

    @property
    def main(self) -> SharedBase:
        """Itself; `SeveralBases` has one that serves the coach and rows without an adapter."""
        return self

    @property
    def parts(self) -> dict[str, SharedBase]:
        """Itself by its name; `SeveralBases` has several."""
        return {self.name: self}

    def of_agent(self, agent: str) -> SharedBase:
        """The base that an agent sits on: this one."""
        return self

    def of_adapter(self, adapter: str) -> SharedBase:
        """The base that an adapter belongs to: this one."""
        return self

    @property
    def sharded(self) -> bool:
        """Whether the frozen weights are sharded, which makes every forward collective."""
        return self.sharding is not None

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Context for play: the frozen weights are gathered on every process, so forwards are not collective."""
        with self.sharding.whole() if self.sharding is not None else nullcontext():
            yield

    @property
    def _run(self) -> Callable[[Callable[[], Any]], Any]:
        return _at_once if self.sharding is None else self.sharding.run

    @property
    def quantised(self) -> bool:
        """Whether the linear layers are quantised by bitsandbytes. Their outputs depend slightly on the batch (rounding
        to 4 or 8 bits), so sampler and trainer log-probs differ."""
        return getattr(self.model, "quantization_method", None) is not None

    def fingerprint(self) -> str:
        """12 hex digits that identify the base: hash of shapes and the embedding's first rows, rounded to bfloat16.

        The embedding is never quantised, so the same model loaded in another precision keeps its fingerprint.
        """
        if self._fingerprint is not None:
            return self._fingerprint
        # A few rows suffice to tell models apart, and cost nothing on a large base.
        rows = self.model.get_input_embeddings().weight[:8].detach().to("cpu", torch.bfloat16).float()
        shapes = [int(getattr(self.config, name)) for name in ("hidden_size", "num_hidden_layers", "vocab_size")]
        return hashlib.sha256(repr(shapes).encode() + rows.numpy().tobytes()).hexdigest()[:12]

    @property
    def packs(self) -> bool:
        """Whether whole sequences are computed without padding and equal beginnings once (`mafrt.models.packing`)."""
        return self._packs

    @property
    def hidden_size(self) -> int:
        return int(self.config.hidden_size)

    @property
    def device(self) -> torch.device:
        return self._device or self.model.device

    @property
    def context_window(self) -> int:
        """Max sequence length of the model, prompt and answer together, in tokens."""
        return int(self.config.max_position_embeddings)

    @property
    def eos_ids(self) -> frozenset[int]:
        """Token ids that end a generation: the model's and the tokenizer's."""
        ids: set[int] = set()
        generation = getattr(self.model, "generation_config", None)
        # Models differ in where they name their end tokens; chat models often in the generation config only.
        for holder in (generation, self.config, self.tokenizer):
            value = getattr(holder, "eos_token_id", None)
            if value is not None:
                ids.update([value] if isinstance(value, int) else value)
        return frozenset(ids)

    @property
    def pad_id(self) -> int:
        for holder in (self.tokenizer, self.config):
            value = getattr(holder, "pad_token_id", None)
            if value is not None:
                return int(value)
        return min(self.eos_ids, default=0)

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
        layers = dict.fromkeys(self.match_targets(name, spec.targets), (spec.rank, spec.alpha / spec.rank))
        invocation = invocation_of(self.tokenizer, self.name) if spec.scope == "action" else None
        self.place_adapter(name, spec.rank, spec.alpha, layers, seed=seed, invocation=invocation)

    def match_targets(self, name: str, targets: Sequence[str]) -> list[str]:
        """Paths of the linear layers that the targets name. Raises ConfigError for a target that names none."""
        linears = self.linear_paths()
        for target in targets:
            if not any(matches(path, target) for path in linears):
                kinds = ", ".join(sorted({path.rsplit(".", 1)[-1] for path in linears}))
                raise ConfigError(
                    f"adapter {name!r}: found target {target!r}, which is no linear layer of {self.name}; "
                    f"expected some of {kinds}"
                )
        return [path for path in linears if any(matches(path, target) for target in targets)]

    def linear_paths(self) -> dict[str, tuple[int, int]]:
        """Path -> (in, out) features of every layer that may be adapted: all linear ones but the head."""
        features: dict[str, tuple[int, int]] = {}
        for path, module in self.model.named_modules():
            if path in self._layers:
                features[path] = (module.in_features, module.out_features)
            elif path.rpartition(".")[0] not in self._layers and module is not self.head:
                shape = (getattr(module, "in_features", None), getattr(module, "out_features", None))
                if isinstance(shape[0], int) and isinstance(shape[1], int):
                    features[path] = (shape[0], shape[1])
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
        # Adapters are never removed, so the count is a stable index.
        index = len(self.records)
        shapes = self.linear_paths()
        for path, (layer_rank, scaling) in layers.items():
            if path not in self._layers:
                parent, _, child = path.rpartition(".")
                holder = self.model.get_submodule(parent)
                self._layers[path] = StackedLoRALinear(getattr(holder, child), *shapes[path], self.context)
                setattr(holder, child, self._layers[path])
            self._layers[path].add(index, layer_rank, scaling, f"{seed}/{name}/{path}")
        link_siblings(self._layers)
        self.records[name] = Adapter(rank, alpha, dict(layers), invocation, index=index)
        self.versions[name] = 0
        self._drop_caches()

    def copy_adapter(self, name: str, copy: str) -> None:
        """Add an adapter `copy` of the shape of `name`, which changes nothing yet."""
        record = self._record(name)
        self.place_adapter(copy, record.rank, record.alpha, record.layers, seed=0, invocation=record.invocation)

    def adapter_layers(self, name: str) -> dict[str, tuple[nn.Parameter, nn.Parameter]]:
        """Path -> (A `[r, in]`, B `[out, r]`) of one adapter."""
        record = self._record(name)
        return {path: self._layers[path].pairs[record.index] for path in record.layers}

    def adapter_parameters(self, name: str) -> list[nn.Parameter]:
        """The adapter's parameters, A and B of each layer in turn; no other adapter holds any of them."""
        return [p for pair in self.adapter_layers(name).values() for p in pair]

    def adapter_state(self, name: str) -> dict[str, Tensor]:
        """A copy of the adapter's tensors (on the CPU) under PEFT's key names."""
        return peft_format.state_of(self.adapter_layers(name))

    def load_adapter_state(self, name: str, state: Mapping[str, Tensor]) -> None:
        """Copy tensors with PEFT's key names into an adapter; raises CheckpointError unless all keys and shapes fit."""
        layers = self.adapter_layers(name)
        peft_format.copy_state(layers, state, name=name, where=f"the state for adapter {name!r}")
        self.bump(name)

    def save_adapter(self, name: str, folder: str | Path) -> None:
        """Write the adapter as a PEFT folder (`adapter_config.json`, `adapter_model.safetensors`)."""
        peft_format.save(
            Path(folder),
            self._record(name),
            self.adapter_layers(name),
            base_name=self.name,
            linear_paths=self.linear_paths(),
        )

    def load_adapter(self, name: str, folder: str | Path) -> None:
        """Read a PEFT folder: into the adapter of that name if it was added, else as an adapter of its own shape.

        Raises CheckpointError if it is missing, corrupt, not LoRA as computed here, or made for another base.
        """
        loaded = peft_format.read(Path(folder), base_name=self.name, linear_paths=self.linear_paths())
        if name in self.records:
            peft_format.refuse_other_shape(self.records[name], loaded, name=name)
        else:
            shape = loaded.shape
            self.place_adapter(name, shape.rank, shape.alpha, shape.layers, seed=0, invocation=shape.invocation)
        layers, where = self.adapter_layers(name), str(loaded.path / peft_format.WEIGHTS)
        peft_format.copy_state(layers, loaded.tensors, name=name, where=where)
        self.bump(name)

    def bump(self, name: str) -> None:
        """Record a change of the adapter's weights: increment its version and drop caches derived from them."""
        self._record(name)
        self.versions[name] += 1
        self._drop_caches()

    def _drop_caches(self) -> None:
        self._routing = None
        for layer in self._layers.values():
            layer.drop_cache()

    def gradient_checkpointing(self, enabled: bool) -> None:
        """Recompute each decoder block's activations in the backward pass instead of keeping them."""
        set_checkpointing(self.inner, self.context, enabled)

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None,
        adapter_index: Tensor,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        train: Collection[str] | None = None,
    ) -> Tensor:
        """Hidden states `[B, T, d]` after the final norm; the head is not applied.

        `input_ids` `[B, T]`. `attention_mask` `[B, past + T]`, 1 for a real token, or a mask that the model takes as
        it is (4D), or None where all are real. `adapter_index` `[B]` or `[B, T]`, -1 for no adapter; it is read on
        the host, so leave it on the CPU. `position_ids` default to counting the real tokens. `past_key_values` is a
        Hugging Face cache, extended in place. With gradients enabled, only adapters named in `train` (None: all) get
        them; the others act all the same.
        """
        rows, steps = input_ids.shape
        # Read on the host: the routing is built in Python, and a GPU index would synchronise at every forward.
        index = adapter_index.cpu()
        if index.shape not in ((rows,), (rows, steps)):
            raise ValueError(f"found adapter_index of shape {tuple(index.shape)}, expected {[rows]} or {[rows, steps]}")
        if index.numel() and (int(index.min()) < -1 or int(index.max()) >= len(self.records)):
            raise ValueError(f"found adapter index {index.unique().tolist()}, expected -1 to {len(self.records) - 1}")
        learn = None if train is None else frozenset(self._record(name).index for name in train)
        flat_mask = attention_mask is not None and attention_mask.dim() == 2
        shares = position_ids is None
        if position_ids is None and attention_mask is not None and flat_mask:
            # Rows that are padded on the left count from their first real token.
            position_ids = (attention_mask.long().cumsum(-1) - 1).clamp_(min=0)[:, -steps:]
        if self._packs and past_key_values is None and (flat_mask or attention_mask is None):
            return self._forward_packed(input_ids, attention_mask, index, position_ids, learn, shares=shares)
        with self.context.use(self._routing_for(index, rows, steps, learn)):
            return self._run(
                lambda: (
                    self.inner(
                        input_ids=input_ids,
                        attention_mask=attention_mask,
                        position_ids=position_ids,
                        past_key_values=past_key_values,
                        use_cache=past_key_values is not None,
                    ).last_hidden_state
                )
            )

    __call__ = forward

    def _forward_packed(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None,
        index: Tensor,
        position_ids: Tensor | None,
        learn: frozenset[int] | None,
        *,
        shares: bool,
    ) -> Tensor:
        """`forward` without computing the padding, whose positions are returned as zeros."""
        rows, steps = input_ids.shape
        real = torch.ones(rows, steps, dtype=torch.bool) if attention_mask is None else attention_mask.cpu().bool()
        # A prefix is shared only where positions count the tokens, so that equal beginnings have equal positions.
        ids = input_ids.cpu() if shares else None
        positions = torch.arange(steps, device=input_ids.device) if position_ids is None else position_ids
        flat = (input_ids.flatten(), positions.expand(rows, steps).flatten())
        hidden = input_ids.new_zeros(rows * steps, self.hidden_size, dtype=self.model.dtype)
        # A sharded forward is collective, so every process must make the same number of them.
        apart = torch.is_grad_enabled() and ids is not None and index.dim() == 2 and not self.sharded
        beginnings = Beginnings.of(real, index, ids, input_ids.device) if apart and ids is not None else None
        if beginnings is not None:
            with torch.no_grad():
                hidden = self._packed_pass(beginnings.packing, flat, learn, hidden)
        hidden = self._packed_pass(pack(real, index, input_ids.device, ids, beginnings=beginnings), flat, learn, hidden)
        return hidden.view(rows, steps, -1)

    def _packed_pass(
        self, packing: Packing, flat: tuple[Tensor, Tensor], learn: frozenset[int] | None, hidden: Tensor
    ) -> Tensor:
        """`hidden` `[B*T, d]` with the states of the packed tokens; `flat`: ids and positions `[B*T]` of the batch."""
        if not packing.blocks:
            return hidden
        ids, positions = (part[packing.take].unsqueeze(0) for part in flat)
        with self.context.use(self._make_routing(packing.index.unsqueeze(0), 1, len(packing.index), learn)):
            packed = self._run(
                lambda: (
                    self.inner(
                        input_ids=ids,
                        # A mask of four dimensions is not looked at on its way to `packed_attention`, which needs none.
                        attention_mask=ids.new_zeros(1, 1, 1, 1),
                        position_ids=positions,
                        use_cache=False,
                        packing=packing,
                    ).last_hidden_state
                )
            )
        return hidden.index_copy(0, packing.places, packed[0][packing.source])

    def _routing_for(self, index: Tensor, rows: int, steps: int, learn: frozenset[int] | None) -> AdapterRouting | None:
        """The routing of the last forward if it still applies (as in decode steps), else a new one."""
        # Decode steps repeat the same routing; building it once per batch saves most of a small step's time.
        key = (tuple(index.flatten().tolist()), rows, steps, learn, self.form)
        last = self._routing  # a local reference: another thread may replace it at any moment
        if last is None or last[0] != key:
            self._routing = last = (key, self._make_routing(index, rows, steps, learn))
        return last[1]

    def _make_routing(
        self, index: Tensor, rows: int, steps: int, learn: frozenset[int] | None
    ) -> AdapterRouting | None:
        layers = self._layers.values()
        width = sum(m.in_features + m.out_features for m in layers) / max(1, len(layers))
        ranks = [record.rank for record in self.records.values()]
        routing = route_adapters(
            index, rows, steps, ranks=ranks, width=width, device=self.device, form=self.form, train=learn
        )
        return routing if routing.present else None

    def token_logprobs(
        self,
        hidden: Tensor,
        targets: Tensor,
        temperature: float | Tensor = 1.0,
        chunk: int | None = None,
        entropy_grad: bool = True,
    ) -> tuple[Tensor, Tensor]:
        """Log-probability of each target and entropy, `[N]` each, from `hidden` `[N, d]`.

        See `mafrt.models.logprobs`.
        """
        with self.sharding.head() if self.sharding is not None else nullcontext():
            return logprobs.token_logprobs(
                hidden,
                targets,
                self.head.weight,
                getattr(self.head, "bias", None),
                temperature=temperature,
                chunk=chunk,
                entropy_grad=entropy_grad,
            )

    def logits(self, hidden: Tensor) -> Tensor:
        """The head on `[..., d]`: `[..., V]`. For the last positions of a batch only; training uses token_logprobs."""
        return self.head(hidden)


def _at_once(compute: Callable[[], Any]) -> Any:
    return compute()


def _use_packed_attention(model: Any) -> bool:
    """Enable packed batches if the model supports them (`sdpa` attention, in a sliding window or without one)."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    config = model.config.get_text_config()
    kinds = getattr(config, "layer_types", None)
    windowed = set(kinds) != {"full_attention"} if kinds else getattr(config, "sliding_window", None) is not None
    if config.model_type in WINDOWED and set(kinds or ()) <= {"full_attention", "sliding_attention"}:
        windowed = bool(getattr(config, "use_bidirectional_attention", False))
    # Models without the dispatch table call their attention directly and would ignore `packing`.
    dispatches = hasattr(sys.modules[type(model).__module__], "ALL_ATTENTION_FUNCTIONS")
    if windowed or not dispatches or config._attn_implementation not in ("sdpa", PACKED):
        return False
    ALL_ATTENTION_FUNCTIONS.register(PACKED, packed_attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register(PACKED, sdpa_mask)
    model.config._attn_implementation = PACKED
    return True
