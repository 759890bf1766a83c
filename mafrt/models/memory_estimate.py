"""Memory estimate of a run: one base, K adapters with their optimizers, activations, KV cache.

    one GPU = base / shards
              + K * A * (4 weights + 4 gradient + 4 last good weights + moments + sampler's copy + reference)
              + max(activations of a micro-batch + head, keys and values of the rows that are decoded)

Numbers are bytes unless said otherwise. A is the number of parameters of one adapter, r * sum(d_in + d_out) over its
layers. Moments are 8 bytes a parameter (AdamW), 2 in 8 bits, and divided by the processes under ZeRO. The base is held
once, and [tokens, vocabulary] logits never exist. Not included: the critic, allocator fragmentation, other processes on
the GPU, and about 1 GB for CUDA and its libraries.

Standard library only: `mafrt info --memory` answers without torch.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mafrt.config.agent import ALL_LINEAR, LoraSpec
from mafrt.config.schema import check_choice
from mafrt.core.errors import ConfigError
from mafrt.core.machine_memory import memory_bytes
from mafrt.core.reading import parse_json, read_text
from mafrt.core.text import error_line, shortened
from mafrt.models.checkpoint_class import DEPTHS, WIDTHS, header_shapes, refuse_other_tasks, refuse_quantised

HEAD_ELEMENTS = 2**26
"""logits that exist at a time on a GPU (`mafrt.models.logprobs`), in two float32 buffers"""
PACKED_SHARE, PACKED_ALONE = 1 / 16, 1 / 8
"""largest models that are packed for a CPU's kernels (`mafrt/cpu/`), as a share of the memory: where other bases or
processes have a part of that memory too, and alone"""
QUANTISED = {8: 1.0, 4: 0.516}
"""bytes a weight; nf4 keeps a scale for 64 weights in 8 bits, and one in 32 bits for 256 of those"""


@dataclass(frozen=True)
class ModelShape:
    """Dimensions of a decoder-only model."""

    hidden: int
    layers: int
    inner: int
    """width of the MLP"""
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    tied: bool
    """head and embedding are one matrix"""
    sparse: int = 0
    """blocks whose MLP is a mixture of experts"""
    experts: int = 0
    """in each of these"""
    chosen: int = 0
    """experts that compute a token"""
    expert_inner: int = 0
    """width of an expert"""
    shared_inner: int = 0
    """width of the MLP that computes every token beside the experts; 0: there is none"""
    recurrent: int = 0
    """blocks with a gated delta rule instead of attention"""
    state_heads: int = 0
    """states of one of these"""
    state_keys: int = 0
    """width of all its keys, and so of its queries"""
    state_values: int = 0
    """width of all its values"""
    state_rows: int = 0
    """width of a key"""
    joined: bool = False
    """whether its projections are two matrices, as in Qwen3-Next, and not four"""
    gated: bool = False
    """whether queries come with gates of attention's output"""
    towers: int = 0
    """weights of the parts that read images or sound, which text does not pass"""

    @property
    def linears(self) -> dict[str, list[tuple[int, int, int]]]:
        """(number in the model, in, out) of the linear layers, and of the experts' matrices, by name."""
        queries, keys, dense = self.heads * self.head_dim, self.kv_heads * self.head_dim, self.layers - self.sparse
        attending = self.layers - self.recurrent
        found = {
            "q_proj": [(attending, self.hidden, queries * (2 if self.gated else 1))],
            "k_proj": [(attending, self.hidden, keys)],
            "v_proj": [(attending, self.hidden, keys)],
            "o_proj": [(attending, queries, self.hidden)],
        }
        if self.recurrent:
            widths = {"qkv": 2 * self.state_keys + self.state_values, "z": self.state_values}
            widths |= {"b": self.state_heads, "a": self.state_heads}
            if self.joined:
                widths = {"qkvz": widths["qkv"] + widths["z"], "ba": 2 * self.state_heads}
            found |= {f"in_proj_{name}": [(self.recurrent, self.hidden, width)] for name, width in widths.items()}
            found["out_proj"] = [(self.recurrent, self.state_values, self.hidden)]
        inner = [(dense, self.inner), (self.sparse, self.shared_inner)]
        if mlps := [(number, width) for number, width in inner if number and width]:
            found["gate_proj"] = found["up_proj"] = [(number, self.hidden, width) for number, width in mlps]
            found["down_proj"] = [(number, width, self.hidden) for number, width in mlps]
        if self.sparse:
            number = self.sparse * self.experts
            found["experts.gate_up_proj"] = [(number, self.hidden, 2 * self.expert_inner)]
            found["experts.down_proj"] = [(number, self.expert_inner, self.hidden)]
        return found

    def named(self, targets: Collection[str]) -> tuple[str, ...]:
        """The targets by name."""
        return tuple(self.linears) if ALL_LINEAR in targets else tuple(targets)

    @property
    def block_weights(self) -> int:
        """Weights of the linear layers of all blocks."""
        return sum(number * a * b for layers in self.linears.values() for number, a, b in layers)

    @property
    def widest(self) -> int:
        """Width of the widest MLP that a token goes through; that of experts together."""
        return max(self.inner if self.layers > self.sparse else 0, self.chosen * self.expert_inner + self.shared_inner)

    @property
    def other_weights(self) -> int:
        """Weights of embedding and head; norms are negligible."""
        return self.vocabulary * self.hidden * (1 if self.tied else 2)


MODEL_SHAPES = {
    "Qwen/Qwen2.5-1.5B-Instruct": ModelShape(1536, 28, 8960, 12, 2, 128, 151936, True),
    "Qwen/Qwen2.5-7B": ModelShape(3584, 28, 18944, 28, 4, 128, 152064, False),
    "Qwen/Qwen3-0.6B": ModelShape(1024, 28, 3072, 16, 8, 128, 151936, True),
    "Qwen/Qwen3-1.7B": ModelShape(2048, 28, 6144, 16, 8, 128, 151936, True),
    "Qwen/Qwen3-4B": ModelShape(2560, 36, 9728, 32, 8, 128, 151936, True),
    "Qwen/Qwen3-8B": ModelShape(4096, 36, 12288, 32, 8, 128, 151936, False),
    "Qwen/Qwen3-14B": ModelShape(5120, 40, 17408, 40, 8, 128, 151936, False),
    "Qwen/Qwen3-32B": ModelShape(5120, 64, 25600, 64, 8, 128, 151936, False),
    "Qwen/Qwen3.5-0.8B": ModelShape(
        1024,
        24,
        3584,
        8,
        2,
        256,
        248320,
        True,
        recurrent=18,
        state_heads=16,
        state_keys=2048,
        state_values=2048,
        state_rows=128,
        gated=True,
    ),
}
"""Dimensions of common models; others are read from their config.json."""


@dataclass(frozen=True)
class MemoryInputs:
    """Settings of a run that determine its memory."""

    agents: int = 3
    rank: int = 8
    targets: tuple[str, ...] = LoraSpec.targets
    bits: int = 16
    """of the base's weights: 32, 16, 8 or 4"""
    processes: int = 1
    layout: str = "ddp"
    """ddp, zero1, zero2, zero3 or fsdp"""
    optimizer: str = "adamw"
    async_steps: int = 0
    reference: str = "base"
    """of a KL penalty: base, or initial, which is a frozen copy of every adapter"""
    micro_batch_tokens: int = 8192
    gradient_checkpointing: bool = True
    on_cpu: bool = False
    """on a CPU"""
    kernels: str = "c"
    """whose a CPU computes with: c, c in decoding (then learning is torch's), or torch"""
    rows: int = 64
    """answers decoded at a time in one process; 0 where another engine decodes elsewhere"""
    context: int = 2048
    """tokens of prompt and answer that are kept of each"""


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes on one GPU, by purpose."""

    base: float
    """while learning; whole while playing"""
    base_whole: float
    adapters: float
    activations: float
    keys_and_values: float

    @property
    def learning(self) -> float:
        return self.base + self.adapters + self.activations

    @property
    def playing(self) -> float:
        return self.base_whole + self.adapters + self.keys_and_values

    @property
    def peak(self) -> float:
        return max(self.learning, self.playing)


def adapter_weights(shape: ModelShape, use: MemoryInputs) -> int:
    """A: parameters of one adapter."""
    linears = shape.linears
    return use.rank * sum(n * (a + b) for name in shape.named(use.targets) for n, a, b in linears[name])


def footprint(shape: ModelShape, use: MemoryInputs) -> MemoryEstimate:
    """Memory of one process. Raises ConfigError for an unknown layout or number of bits."""
    check_choice("layout", use.layout, ("ddp", "zero1", "zero2", "zero3", "fsdp"))
    if use.bits not in (32, 16, 8, 4):
        raise ConfigError(f"bits is {use.bits}; choose 32, 16, 8 or 4.")
    number = 4 if use.bits == 32 else 2
    base = shape.block_weights * QUANTISED.get(use.bits, number) + shape.other_weights * number
    copies = packed(base, use)
    base += copies + shape.towers * QUANTISED.get(use.bits, number)
    shards = use.processes if use.layout in ("zero3", "fsdp") else 1
    zero = use.processes if use.layout.startswith("zero") else 1
    # Adam keeps two float32 moments of 4 bytes, or two of 1 byte in 8 bits.
    moments = (2 if use.optimizer == "paged_adamw_8bit" else 8) / zero
    if zero > 1:
        moments += 8 / zero  # ZeRO's own float32 weights and reduced gradients
    # Float32 weights, gradient and last good weights; then moments, the copy that plays ahead, and the sampler's copy,
    # which alone is in the base's precision, since it is multiplied with the base's activations.
    each = 4 + 4 + 4 + moments + (4 if use.async_steps else 0) + (number if use.rows else 0)
    if copies:
        # Joined with those of the layer's neighbours, and the same in panels; the sampler has no copy of its own.
        each += 2 * number - (number if use.rows else 0)
    if use.reference == "initial":  # frozen: weights, and their copy in the base's precision where they are multiplied
        each += 4 + (2 * number if copies else number)
    number_bytes = 4 if use.on_cpu else number  # as the CPU's decoder keeps them
    return MemoryEstimate(
        base / shards,
        base if use.rows else base / shards,
        use.agents * adapter_weights(shape, use) * each,
        activations(shape, use, number),
        2.0 * number_bytes * use.rows * use.context * (shape.layers - shape.recurrent) * shape.kv_heads * shape.head_dim
        + 4.0 * use.rows * shape.recurrent * shape.state_rows * shape.state_values,
    )


def packed(base: float, use: MemoryInputs) -> float:
    """Copies of the weights in the layout of a CPU's kernels, for a base of so many bytes.

    One for play and, where the kernels learn too, for the way forward, and then one for the way back.
    """
    if not use.on_cpu or use.kernels == "torch" or use.bits < 16:
        return 0.0
    share = PACKED_ALONE if use.processes == 1 else PACKED_SHARE
    copies = 2 if use.kernels == "c" else 1
    return base * copies if base <= share * memory_bytes() else 0.0


def activations(shape: ModelShape, use: MemoryInputs, number: int) -> float:
    """Activations of one micro-batch: tensors saved for the backward pass, and one chunk of logits.

    A block saves, per token: inputs and outputs of its norms (of query and key norms too); queries, keys, values and
    the attention output, twice; gate, its activation, up and their product; and the adapters' inner activations.
    On a CPU without kernels in C norms keep their inputs in float32. With these the output of attention is kept once,
    and the activation of the gate is computed again. With checkpointing only the block's input is saved, plus all of
    that for one block at a time. Tests count autograd's saved tensors, and the bytes of a pretended GPU.

    A block with a gated delta rule keeps more, much of it in float32, where `flash-linear-attention` is not installed:
    the numbers are those that autograd keeps of transformers' form in chunks of 64 tokens. Kernels in C keep what goes
    in: the convolution's and the rule's inputs, and those of norms and layers.
    """
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    inner = use.rank * len(shape.named(use.targets))
    in_a_block: float = number * (4 * shape.hidden + 4 * queries + 3 * keys + 3 * shape.widest + inner)
    # Of every expert of a token its input, output, and inner activations of its adapter.
    in_a_block += number * shape.chosen * (2 * shape.hidden + 2 * use.rank)
    # In float32 whatever the base's precision: the rows' factors of the norms, and the log-sum-exps of attention.
    in_a_block += 4 * (2 + 2 * shape.heads + shape.kv_heads)
    if use.on_cpu and use.kernels == "c":
        in_a_block -= 0 if shape.gated else number * queries
    else:
        in_a_block += number * shape.widest
    if use.on_cpu and use.kernels != "c":
        in_a_block += (4 - number) * (2 * shape.hidden + keys + (0 if shape.gated else queries))
    if shape.gated:
        in_a_block += 3 * number * queries
    per_state = shape.state_heads * shape.state_rows  # every state has keys of its own by then
    recurrent: float = number * (4 * (shape.hidden + shape.widest + shape.state_keys + shape.state_values) + inner)
    recurrent += number * shape.state_heads + 4 * (9 * per_state + 7 * shape.state_values + 327 * shape.state_heads + 2)
    if shape.recurrent:  # the state after each chunk, twice
        recurrent += 2 * 4 * per_state * shape.state_values / shape.state_heads / 64
    if use.on_cpu and use.kernels == "c":  # which compute a chunk again on the way back
        recurrent = number * (4 * shape.hidden + 3 * shape.widest + 4 * shape.state_keys + 5 * shape.state_values)
        recurrent += number * (inner + shape.state_heads + 2 * per_state * (per_state > shape.state_keys))
        recurrent += 4 * (2 + 3 * shape.state_heads)
    elif use.on_cpu:
        recurrent += (4 - number) * 2 * shape.hidden
    of_all = (shape.layers - shape.recurrent) * in_a_block + shape.recurrent * recurrent
    in_a_block = max(in_a_block, recurrent) if shape.recurrent else in_a_block
    tokens = use.micro_batch_tokens
    head = 2 * 4 * min(HEAD_ELEMENTS, tokens * shape.vocabulary) + 2 * number * tokens * shape.hidden
    if use.gradient_checkpointing:
        between_blocks = tokens * shape.layers * number * shape.hidden
        if use.on_cpu:
            return float(between_blocks + tokens * in_a_block + head)
        # The head lets its logits go before the first block is computed again; its gradient stays.
        return float(between_blocks + max(tokens * in_a_block + number * tokens * shape.hidden, head))
    return float(tokens * of_all + head)


def model_shape(model: str) -> ModelShape:
    """Of a known name, or of a folder with a config.json. Raises ConfigError, and ModelError for another kind."""
    if model in MODEL_SHAPES:
        return MODEL_SHAPES[model]
    path = Path(model).expanduser() / "config.json"
    try:
        config = parse_json(read_text(path))
    except (OSError, ValueError):
        raise ConfigError(
            f"{model!r} is neither a known model ({', '.join(MODEL_SHAPES)}) nor a folder with a readable config.json; "
            "give one of those names, or the folder of a model."
        ) from None
    try:
        if isinstance(config, dict):
            refuse_other_tasks(model, config)
            refuse_quantised(model, config)
        shape = shape_of(config)
    except KeyError as error:
        raise ConfigError(f"{path} lacks {error}; expected the configuration of a Llama-like model.") from None
    except (TypeError, ValueError, AttributeError) as error:
        raise ConfigError(f"{path} is no configuration of a Llama-like model ({error_line(error)}).") from None
    try:
        weights = sum(math.prod(size) for file in path.parent.glob("*.safetensors") for size in header_shapes(file))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        weights = 0  # a damaged file is told where it is loaded
    text = config.get("text_config") or config
    # A config.json that transformers 4 wrote does not tell what its families have by default.
    if "tie_word_embeddings" not in text and 0 < weights < shape.block_weights + shape.other_weights:
        shape = replace(shape, tied=True)
    beside = max(0, weights - shape.block_weights - shape.other_weights)
    return shape if text is config else replace(shape, towers=beside)


def shape_of(config: Mapping[str, Any]) -> ModelShape:
    """From the content of a config.json. Raises KeyError, TypeError or ValueError for one of another kind."""
    config = config.get("text_config") or config  # of a model that reads images too
    for key in (*WIDTHS, *DEPTHS):
        if (size := config.get(key)) is not None and not (type(size) is int and size > 0):
            raise ValueError(f"{key} is {shortened(repr(size))}, and must be a whole number above 0")
    heads = int(config["num_attention_heads"])
    return ModelShape(
        hidden=int(config["hidden_size"]),
        layers=int(config["num_hidden_layers"]),
        inner=int(config.get("intermediate_size") or config["moe_intermediate_size"]),
        heads=heads,
        kv_heads=int(config.get("num_key_value_heads") or heads),
        head_dim=int(config.get("head_dim") or int(config["hidden_size"]) // heads),
        vocabulary=int(config["vocab_size"]),
        tied=bool(config.get("tie_word_embeddings", False)),
        **_experts(config),
        **_recurrent(config),
    )


def _experts(config: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a `ModelShape` that tell of experts; none for a model without."""
    experts = _first(config, "num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
    chosen = _first(config, "num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk", "top_k_experts")
    if experts < 2 or not chosen:
        return {}
    layers, width = int(config["num_hidden_layers"]), _first(config, "moe_intermediate_size", "intermediate_size")
    step, dense = int(config.get("decoder_sparse_step") or 1), config.get("mlp_only_layers") or ()
    first = _first(config, "first_k_dense_replace", "num_dense_layers")
    sparse = [n for n in range(first, layers) if n not in dense and (n + 1) % step == 0]
    shared = _first(config, "n_shared_experts", "num_shared_experts") * width
    return {
        "sparse": len(sparse),
        "experts": experts,
        "chosen": chosen,
        "expert_inner": width,
        "shared_inner": _first(config, "shared_expert_intermediate_size", "shared_intermediate_size") or shared,
    }


def _recurrent(config: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a `ModelShape` that tell of blocks with a gated delta rule, as Qwen3-Next and Qwen3.5 have them."""
    kind, layers = str(config.get("model_type")), int(config["num_hidden_layers"])
    if not kind.startswith(("qwen3_next", "qwen3_5")):
        return {}
    kinds = config.get("layer_types")
    if not kinds:
        interval = int(config.get("full_attention_interval") or 4)
        kinds = ["linear_attention" if (n + 1) % interval else "full_attention" for n in range(layers)]
    heads, width = int(config["linear_num_value_heads"]), int(config["linear_key_head_dim"])
    return {
        "recurrent": kinds.count("linear_attention"),
        "state_heads": heads,
        "state_keys": int(config["linear_num_key_heads"]) * width,
        "state_values": heads * int(config["linear_value_head_dim"]),
        "state_rows": width,
        "joined": kind.startswith("qwen3_next"),
        "gated": True,
    }


def _first(config: Mapping[str, Any], *names: str) -> int:
    """The first of these settings that is a number; 0 if none is."""
    return next((int(config[name]) for name in names if isinstance(config.get(name), int)), 0)


def fitting_micro_batch(shape: ModelShape, use: MemoryInputs, free: float, asked: int) -> int:
    """The largest micro-batch whose backward pass takes at most half of the free memory.

    Args:
        shape: of the base.
        use: bits, rank, targets and checkpointing.
        free: bytes that the device has free with the base loaded. The other half is for adapters, optimizers, the
            keys and values of play, and the allocator's fragmentation.
        asked: tokens that it should have if they fit.

    Returns:
        `asked`, or a smaller multiple of 256 tokens, at least 256.
    """
    number = 4 if use.bits == 32 else 2
    weights = (shape.block_weights + shape.other_weights) * number
    free -= packed(weights, use)
    fixed, some = (activations(shape, replace(use, micro_batch_tokens=tokens), number) for tokens in (0, 1024))
    most = int((0.5 * free - fixed) / ((some - fixed) / 1024))
    return asked if asked <= most else max(256, most // 256 * 256)


def table(model: str, variants: Sequence[tuple[str, MemoryInputs]]) -> list[tuple[str, ...]]:
    """Rows of (how, base, adapters, activations, keys and values, peak) in GB, after a line of titles."""
    shape = model_shape(model)
    rows: list[tuple[str, ...]] = [("", "base", "adapters", "activations", "keys, values", "peak of one GPU")]
    for title, use in variants:
        memory = footprint(shape, use)
        parts = (memory.base, memory.adapters, memory.activations, memory.keys_and_values, memory.peak)
        rows.append((title, *(f"{part / 1e9:.2f}" for part in parts)))
    return rows
