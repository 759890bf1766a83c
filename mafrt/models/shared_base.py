"""One frozen base model in memory, every agent a LoRA adapter on it.

One forward serves rows of different agents, of the reference policy and of the critic at once (both: no adapter,
index -1), and one backward gives every adapter its own gradient. Logits and gradients equal PEFT's with
`set_adapter`; adapters enter and leave in PEFT's own layout (`mafrt/models/peft_format.py`).
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from mafrt.config.resolve import declared
from mafrt.core.distributed import ALONE, Processes
from mafrt.core.errors import ConfigError, ModelError
from mafrt.core.types import Message
from mafrt.models import family_checks, logprobs
from mafrt.models.adapted_model import AdaptedModel
from mafrt.models.adapter_routing import AdapterRouting
from mafrt.models.compute import Compute, compute_for
from mafrt.models.multi_lora import set_checkpointing
from mafrt.models.packed_attention import use_packed_attention
from mafrt.models.packing import Packing, SharedPrefixes, pack
from mafrt.models.pretrained import load_pretrained
from mafrt.models.sharding import Sharding

log = logging.getLogger(__name__)


class SharedBase(AdaptedModel):
    """A frozen causal language model that holds all adapters of a team.

    `model` must be a Hugging Face causal LM whose logits are its head applied to the last hidden state, perhaps
    scaled or capped (`logprobs.LogitForm`). It is put in eval mode and frozen; its linear layers are wrapped where
    an adapter targets them, and behave as before when called without a routing (`base.model(...)` is always the
    bare base). `goes_to` is the device on which it will compute, where its weights are not there yet (`shard`).

    >>> base = mafrt.SharedBase.load("teaching-base")
    >>> base.add_adapter("solver", mafrt.LoraSpec(rank=4), seed=0)
    >>> base
    <SharedBase teaching_base: Qwen3ForCausalLM, 0.9M parameters, adapters: solver>
    >>> len(base.generate(["3 + 4 =", "5 - 2 ="], adapter="solver", max_new_tokens=2))
    2
    """

    def __init__(
        self, model: Any, tokenizer: Any, name: str = "", *, goes_to: str | torch.device | None = None
    ) -> None:
        super().__init__(model, tokenizer, name)
        self._goes_to = None if goes_to is None else torch.device(goes_to)
        self.config = model.config.get_text_config()
        self.inner = model.base_model
        self.logit_form = logprobs.LogitForm.of(self.config)
        self.processes: Processes = ALONE
        """processes that train these adapters together"""
        self.sharding: Sharding | None = None
        """sharding of the frozen weights; None: replicated"""
        self.zero: dict[str, Any] | None = None
        """DeepSpeed settings of the adapters' optimizers; None: DeepSpeed is not used"""
        self._routing: tuple[object, AdapterRouting | None] | None = None
        self.through_head = False
        """whether hidden states are taken at the head's input, since the model computes more between body and head"""
        self._takes = family_checks.arguments(self.inner.forward)
        self._cache_name = family_checks.cache_name(self.inner.forward)
        self._window = family_checks.steady_window(self.config)
        self._unpacked = model.config._attn_implementation
        self._packs = use_packed_attention(model)
        self._recomputes = False
        self.continues = False
        """whether rows go on from a beginning that they share where they are not packed (`shared_beginnings`)"""
        self._engine: Any = None
        self._fingerprint: str | None = None
        self._device: torch.device | None = None
        self.compute.adopt(self)
        family_checks.settle(self)

    @classmethod
    def load(
        cls,
        name_or_path: str,
        *,
        dtype: str | torch.dtype | Callable[[], str | None] | None = None,
        device: str | torch.device | None = None,
        goes_to: str | torch.device | None = None,
        attn_implementation: str = "sdpa",
        trust_remote_code: bool = False,
        bits: Literal[4, 8] | None = None,
    ) -> SharedBase:
        """Load model and tokenizer from a folder or the hub; `teaching-base` ships, `smollm2` is fetched.

        `dtype=None` means float32 on a CPU and the checkpoint's own on a GPU, a function is asked once the base is
        checked; `device=None` a GPU if there is one.
        `goes_to`: the device that a base loaded into main memory computes on once it is sharded (`shard`).
        `attn_implementation`: `sdpa`; `eager` or, on a GPU, a flash kind of transformers compute every row whole.
        `bits` quantises the linear layers but the head with bitsandbytes: 4 (nf4, Dettmers 2023) or 8 (LLM.int8).
        Raises ModelError, naming the missing files, if either cannot be loaded, MissingExtraError, and ConfigError for
        a device that cannot compute.
        """
        model, tokenizer, path = load_pretrained(
            name_or_path,
            dtype=dtype,
            device=device,
            goes_to=goes_to,
            attn_implementation=attn_implementation,
            trust_remote_code=trust_remote_code,
            bits=bits,
        )
        base = cls(model, tokenizer, path, goes_to=goes_to)
        if not base.packs and not base.continues:
            log.warning(
                "The attention of %s as loaded (%s) cannot mask beginnings that rows share, so every row is computed "
                "whole and padded: exact, and slower.",
                *(name_or_path, attn_implementation),
            )
        return base

    def __repr__(self) -> str:
        held = ", ".join(self.records) or "none"
        size = sum(weight.numel() for weight in self.model.parameters() if not weight.requires_grad) / 1e6
        name, kind = Path(self.name).name, type(self.model).__name__
        return f"<SharedBase {name}: {kind}, {size:.1f}M parameters, adapters: {held}>"

    @property
    def engine(self) -> Any:
        """The engine of `generate`: a `LocalEngine`, laid out at first use. It notices when weights have changed."""
        if self._engine is None:
            self._engine = declared("mafrt.engines.local.engine:LocalEngine")(self)
        return self._engine

    def generate(
        self,
        prompts: str | Sequence[str] | Sequence[Message] | Sequence[Sequence[Message]],
        adapter: str | None = None,
        *,
        system: str = "",
        seed: int = 0,
        **sampling: Any,
    ) -> Any:
        """Answer one prompt or several, in one batch, to look at what an adapter says.

        Args:
            prompts: a text, which is a message of the user's, or a list of chat messages; or a list of either.
            adapter: who answers; None: the bare base.
            system: role prompt, where a chat has none of its own.
            seed: sampling follows from it.
            sampling: fields of `SamplingParams`, such as `max_new_tokens=64, temperature=0`.

        Returns:
            The answer to one prompt as a text; the answers to a list of prompts as a list.

        Raises:
            ConfigError: an unknown adapter or sampling parameter.
            PromptTooLongError: a prompt leaves no room for a token in the context window.
        """
        generate = declared("mafrt.rollout.ask:generate")
        return generate(self, prompts, adapter, system=system, seed=seed, **sampling)

    def shard(self, make: Callable[[], Sharding]) -> None:
        """Spread the frozen weights over `processes` (`mafrt.models.sharding`), before any adapter is added."""
        if self.records:
            raise ConfigError(f"found the adapters {', '.join(self.records)}, expected none yet; shard a base before")
        # The fingerprint reads the embedding, so it must be computed before the weights are sharded.
        self._fingerprint = self.fingerprint()
        self._device = self._goes_to or torch.device(self.processes.device)
        self.sharding = make()
        self.context.sharded, self.context.device = True, self._device

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
    def compute(self) -> Compute:
        """How this base's device computes."""
        # From the start: what a CPU's form does to a model would stay when the weights have gone to a GPU.
        return compute_for((self._goes_to or self.device).type)

    @property
    def sharded(self) -> bool:
        """Whether the frozen weights are sharded, which makes every forward collective."""
        return self.sharding is not None

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Context for play: the frozen weights are gathered on every process, so forwards are not collective."""
        with self.sharding.whole() if self.sharding is not None else nullcontext():
            yield

    def _run(self, compute: Callable[[], Tensor]) -> Tensor:
        return compute() if self.sharding is None else self.sharding.run(compute)

    @property
    def quantised(self) -> bool:
        """Whether bitsandbytes quantised the linear layers: their outputs then depend slightly on the batch."""
        return getattr(self.model, "quantization_method", None) is not None

    def fingerprint(self) -> str:
        """12 hex digits that identify the base: hash of shapes and the embedding's first rows, rounded to bfloat16.

        The embedding is never quantised, so the same model loaded in another precision keeps its fingerprint.
        """
        if self._fingerprint is not None:
            return self._fingerprint
        # A few rows suffice to tell models apart, and cost nothing on a large base.
        rows = self.model.get_input_embeddings().weight[:8].detach().to("cpu", torch.bfloat16).float()
        # Shapes too, since models of one family may share the first rows of an embedding.
        shapes = [int(getattr(self.config, name)) for name in ("hidden_size", "num_hidden_layers", "vocab_size")]
        return hashlib.sha256(repr(shapes).encode() + rows.numpy().tobytes()).hexdigest()[:12]

    @property
    def packs(self) -> bool:
        """Whether whole sequences are computed without padding and equal beginnings once (`mafrt.models.packing`)."""
        return self._packs

    @property
    def shares(self) -> bool:
        """Whether equal beginnings are computed once: not by a pass with a cache that is collective or run again."""
        return self._packs or (self.continues and not self.sharded and not self._recomputes)

    def unpack(self) -> None:
        """Pad rows from now on, with the attention that the model was loaded with."""
        self._packs, self.model.config._attn_implementation = False, self._unpacked

    @property
    def head_size(self) -> int:
        """Number of logits."""
        return int(self.head.weight.shape[0])

    @property
    def hidden_size(self) -> int:
        return int(self.config.hidden_size)

    @property
    def device(self) -> torch.device:
        # Sharded weights have no single device, so it was recorded before they were spread.
        return self._device or self.model.device

    @property
    def context_window(self) -> int:
        """Max sequence length of the model, prompt and answer together, in tokens."""
        # Recurrences have no largest position.
        return self._window or int(getattr(self.config, "max_position_embeddings", None) or 2**20)

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
        # Any id will do, since padding is masked.
        return min(self.eos_ids, default=0)

    def gradient_checkpointing(self, enabled: bool) -> None:
        """Recompute each decoder block's activations in the backward pass instead of keeping them."""
        self._recomputes = enabled
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

        `input_ids` `[B, T]`. `attention_mask` `[B, past + T]`, 1 for a real token, or a 4D mask for the model as it
        is, or None where all are real. `adapter_index` `[B]` or `[B, T]` on the CPU, -1 for no adapter. `position_ids`
        count the real tokens. `past_key_values` is a Hugging Face cache, extended in place. Only adapters named in
        `train` (None: all) get gradients; the others act all the same.
        """
        rows, steps = input_ids.shape
        # Read on the host: the routing is built in Python, and a GPU index would synchronise at every forward.
        index = adapter_index.cpu()
        if index.shape not in ((rows,), (rows, steps)):
            raise ValueError(f"found adapter_index of shape {tuple(index.shape)}, expected {[rows]} or {[rows, steps]}")
        if index.numel() and not -1 <= int(index.min()) <= int(index.max()) < len(self.records):
            raise ValueError(f"found adapter index {index.unique().tolist()}, expected -1 to {len(self.records) - 1}")
        # None stands for all, and must not become an empty set, which would stop every gradient.
        learn = None if train is None else frozenset(self._record(name).index for name in train)
        flat_mask = attention_mask if attention_mask is not None and attention_mask.dim() == 2 else None
        shares = position_ids is None
        if shares and flat_mask is not None:
            # Rows that are padded on the left count from their first real token.
            position_ids = (flat_mask.long().cumsum(-1) - 1).clamp_(min=0)[:, -steps:]
        if self._packs and past_key_values is None and flat_mask is attention_mask:
            return self._forward_packed(input_ids, attention_mask, index, position_ids, learn, shares=shares)
        if shares and past_key_values is None and flat_mask is attention_mask:
            states = self._padded_right(input_ids, attention_mask, index, learn)
            if states is not None:
                return states
        given: dict[str, Any] = {"input_ids": input_ids, "attention_mask": attention_mask, "position_ids": position_ids}
        given |= {"past_key_values": past_key_values, "use_cache": past_key_values is not None}
        with self.context.use(self._routing_for(index, rows, steps, learn)):
            return self._run(lambda: self._states(given))

    __call__ = forward

    def _padded_right(
        self, ids: Tensor, mask: Tensor | None, index: Tensor, learn: frozenset[int] | None
    ) -> Tensor | None:
        """Hidden states of whole rows, beginnings that they share once; None for rows with padding on the left."""
        real = torch.ones(ids.shape) if mask is None else mask.cpu()
        # Nothing that is read sees padding on the right, and without a mask rows have the positions that the model
        # gives them, which some count from 2.
        if not bool((real[:, 1:] <= real[:, :-1]).all()):
            return None
        states = None
        if self.shares and len(ids) > 1:
            states = declared("mafrt.models.shared_beginnings:forward")(self, ids, real, index, learn)
        return self.padded(ids, index, learn) if states is None else states

    def padded(self, ids: Tensor, index: Tensor, learn: frozenset[int] | None) -> Tensor:
        """Hidden states `[B, T, d]` of whole rows that are padded on the right; arguments as of `forward`."""
        with self.context.use(self._routing_for(index, len(ids), ids.shape[1], learn)):
            return self._run(lambda: self._states({"input_ids": ids, "use_cache": False}))

    def read(
        self,
        ids: Tensor,
        index: Tensor,
        cache: Any = None,
        positions: Tensor | None = None,
        real: Tensor | None = None,
        learn: frozenset[int] | None = None,
    ) -> tuple[Tensor, Any]:
        """Hidden states `[B, T, d]` of rows, and the model's own cache after them, of whatever kind it is.

        Args:
            ids: `[B, T]`; they go on from the rows in `cache`. None: they are beginnings.
            index: `[B, past + T]` on the CPU: the adapter of each token of the rows.
            positions: `[B, T]` of the ids; None: counted from the first real token.
            real: `[B, past + T]`, 0 for padding; None: there is none.
            learn: indices of the adapters that get gradients; None: all.
        """
        rows, steps = ids.shape
        cached: dict[str, Any] = {} if cache is None else {self._cache_name: cache}
        if positions is None and real is not None:
            positions = (real.cumsum(1) - 1).clamp_(min=0)[:, -steps:]
        elif positions is None:
            positions = torch.arange(steps, device=ids.device).expand(rows, steps)
        given = {"input_ids": ids, "position_ids": positions, "use_cache": True, **cached}
        if real is not None:
            given["attention_mask"] = real
        now = index[:, -steps:]
        now = now[:, 0] if bool((now == now[:, :1]).all()) else now
        routing = self._routing_for(now, rows, steps, learn)
        with self.context.use(None if routing is None else replace(routing, whole=index)):
            out = self.inner(**self._taken(given))
        return self._as_head_takes(out[0]), getattr(out, self._cache_name)

    def _as_head_takes(self, states: Tensor) -> Tensor:
        """In the number format of the output layer: some models keep their residual in float32, and cast before it."""
        weight = self.head.weight
        return states.to(weight.dtype) if weight.is_floating_point() else states

    def _states(self, given: dict[str, Any]) -> Tensor:
        """Hidden states of a pass of the model as loaded."""
        if not self.through_head:
            out = self.inner(**self._taken(given))
            states: Tensor | None = getattr(out, "last_hidden_state", None)
            return self._as_head_takes(out[0] if states is None else states)
        with family_checks.stopped_before(self.head):
            try:
                self.model(**{name: value for name, value in given.items() if value is not None})
            except family_checks.StatesBeforeHead as reached:
                return reached.states
        raise ModelError(f"{self.name}: its forward does not reach its output layer")

    def _taken(self, given: dict[str, Any]) -> dict[str, Any]:
        """The arguments that the model's body knows."""
        return given if self._takes is None else {name: value for name, value in given.items() if name in self._takes}

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
        beginnings = SharedPrefixes.of(real, index, ids, input_ids.device) if apart and ids is not None else None
        if beginnings is not None:
            with torch.no_grad():
                hidden = self._packed_pass(beginnings.packing, flat, learn, hidden)
        most = self.compute.family_tokens(self)
        packing = pack(real, index, input_ids.device, ids, beginnings=beginnings, most=most)
        hidden = self._packed_pass(packing, flat, learn, hidden)
        return hidden.view(rows, steps, -1)

    def _packed_pass(
        self, packing: Packing, flat: tuple[Tensor, Tensor], learn: frozenset[int] | None, hidden: Tensor
    ) -> Tensor:
        """`hidden` `[B*T, d]`, now with the states of the packed tokens; `flat`: ids and positions of the batch."""
        if not packing.blocks:
            return hidden
        ids, positions = (part[packing.take].unsqueeze(0) for part in flat)
        # A mask of four dimensions is not looked at on its way to `packed_attention`, which needs none.
        given: dict[str, Any] = {"input_ids": ids, "position_ids": positions, "use_cache": False}
        given |= {"attention_mask": ids.new_zeros(1, 1, 1, 1), "packing": packing, "compute": self.compute}
        with self.context.use(self._make_routing(packing.index.unsqueeze(0), 1, len(packing.index), learn)):
            packed = self._run(lambda: self.inner(**given).last_hidden_state).squeeze(0)
        return hidden.index_copy_(0, packing.places, packed if packing.in_order else packed[packing.source])

    def _routing_for(self, index: Tensor, rows: int, steps: int, learn: frozenset[int] | None) -> AdapterRouting | None:
        """The routing of the last forward if it still applies (as in decode steps), else a new one."""
        # Decode steps repeat the same routing; building it once per batch saves most of a small step's time.
        key = (tuple(index.flatten().tolist()), rows, steps, learn, self._changes)
        last = self._routing  # a local reference: another thread may replace it at any moment
        if last is None or last[0] != key:
            self._routing = last = (key, self._make_routing(index, rows, steps, learn))
        return last[1]

    def _make_routing(
        self, index: Tensor, rows: int, steps: int, learn: frozenset[int] | None
    ) -> AdapterRouting | None:
        routing = AdapterRouting(rows, steps, index, learn)
        bare = not torch.is_grad_enabled() and self.compute.routes_bare(self)
        return routing if routing.present or bare else None

    def token_logprobs(
        self, hidden: Tensor, targets: Tensor, temperature: float | Tensor = 1.0, *, entropy_grad: bool = True
    ) -> tuple[Tensor, Tensor]:
        """Log-probability of each target and entropy, `[N]` each, from `hidden` `[N, d]`: `mafrt.models.logprobs`."""
        with self.sharding.head() if self.sharding is not None else nullcontext():
            head = self._frozen_head()
            return logprobs.token_logprobs(hidden, targets, head, temperature=temperature, entropy_grad=entropy_grad)

    def _frozen_head(self) -> logprobs.FrozenHead:
        # The weight of a sharded head is there for a moment only.
        packed = None if self.sharded else self.context.packed
        return self.compute.frozen_head(self.head.weight, getattr(self.head, "bias", None), self.logit_form, packed)

    def logits(self, hidden: Tensor) -> Tensor:
        """The head on `[..., d]`: `[..., V]`. For the last positions of a batch only; training uses token_logprobs."""
        # The products of a frozen head record nothing.
        if type(self.head) is not nn.Linear or self.sharded or (hidden.requires_grad and torch.is_grad_enabled()):
            return self.logit_form(self.head(hidden))
        products = self._frozen_head().products(hidden.reshape(-1, hidden.shape[-1]))
        return self.logit_form(products.view(*hidden.shape[:-1], -1))
