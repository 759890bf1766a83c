"""Requests of the Tinker API, checked in full before any work begins, and its replies.

The JSON bodies and the protocol buffers are those of the SDK `tinker` 0.38 (`wire.proto`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from google.protobuf.message import DecodeError

from mafrt.core.text import shortened
from mafrt.core.types import Completion, SamplingParams
from mafrt.scripts.tinker_server import wire_pb2 as wire
from mafrt.scripts.tinker_server.limits import Limits, refused
from mafrt.scripts.tinker_server.losses import LOSSES, Loss

MOST = 1e6
"""largest weight, advantage, log-probability or setting of a loss that is taken"""
OTHER_LOSSES = ("gspo", "stable_reinforce", "custom")
"""known to the SDK and not computed here"""


@dataclass(frozen=True)
class Reading:
    """What the base allows."""

    vocabulary: int
    """number of token ids"""
    window: int
    """max tokens of a sequence"""
    ends: frozenset[int]
    """token ids that end a generation of the base"""
    limits: Limits


@dataclass(frozen=True)
class Example:
    """One sequence of a batch."""

    tokens: list[int]
    targets: np.ndarray
    """`[T]` or `[T, K]` int64: the tokens whose log-probabilities are wanted after each position"""
    inputs: Mapping[str, np.ndarray]
    """of the loss: float32, of the shape of `targets`"""


@dataclass(frozen=True)
class PassRequest:
    """A forward pass of an adapter, with or without the backward pass."""

    loss: Loss
    settings: Mapping[str, float]
    examples: Sequence[Example]
    backward: bool

    @property
    def tokens(self) -> int:
        return sum(len(example.tokens) for example in self.examples)


@dataclass(frozen=True)
class AdamStep:
    """Settings of one step of AdamW."""

    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    clip: float
    """largest norm of the gradient; 0: any"""


@dataclass(frozen=True)
class ScoreRequest:
    """Log-probabilities of a sequence's own tokens, and of others at the same positions."""

    tokens: list[int]
    first: int
    """position of the first token that is scored, 1 or more"""
    top: int = 0
    """likeliest tokens of each position"""
    targets: np.ndarray | None = None
    """`[T - 1, K]` int64: tokens at positions 1 to T - 1; -1: none"""


@dataclass(frozen=True)
class SampleRequest:
    """Samples after a prompt."""

    prompt: list[int]
    samples: int
    sampling: SamplingParams
    seed: int | None
    prompt_logprobs: bool
    score: ScoreRequest | None
    top_sampled: int


# ----------------------------------------------------------------------------------------------------------------- JSON


def text_of(body: Mapping[str, Any], name: str, default: str | None = None, most: int = 200) -> str:
    value = body.get(name, default)
    if value is None and default is None:
        raise refused(f"{name} is missing")
    if not isinstance(value, str) or len(value) > most:
        raise refused(f"{name} is {shortened(repr(value))}, expected a text of at most {most} characters")
    return value


def whole_of(body: Mapping[str, Any], name: str, low: int, high: int, default: int | None = None) -> int:
    value = body.get(name)
    value = default if value is None else value
    if type(value) is not int or not low <= value <= high:
        raise refused(f"{name} is {shortened(repr(value))}, expected a whole number from {low} to {high}")
    return value


def number_of(body: Mapping[str, Any], name: str, low: float, high: float, default: float) -> float:
    value = body.get(name)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
        raise refused(f"{name} is {shortened(repr(value))}, expected a number from {low:g} to {high:g}")
    return float(value)


def object_of(value: Any, what: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise refused(f"{what} is {shortened(repr(value))}, expected a JSON object")
    return value


def read_metadata(body: Mapping[str, Any]) -> dict[str, str]:
    """`user_metadata`: texts by name."""
    found = body.get("user_metadata") or {}
    found = {
        str(name): value if isinstance(value, str) else str(value) for name, value in object_of(found, "it").items()
    }
    if len(found) > 64 or any(len(name) + len(value) > 4096 for name, value in found.items()):
        raise refused("user_metadata holds more than 64 entries, or one of more than 4,096 characters")
    return found


def read_adam(body: Mapping[str, Any]) -> AdamStep:
    """The settings of `optim_step`."""
    if "adam_params" not in body:
        raise refused("adam_params are missing; AdamW is the only optimizer of this server")
    adam = object_of(body["adam_params"], "adam_params")
    return AdamStep(
        number_of(adam, "learning_rate", 0.0, 10.0, 1e-4),
        (number_of(adam, "beta1", 0.0, 0.999999, 0.9), number_of(adam, "beta2", 0.0, 0.999999, 0.95)),
        number_of(adam, "eps", 0.0, 1.0, 1e-12),
        number_of(adam, "weight_decay", 0.0, 1.0, 0.0),
        max(0.0, number_of(adam, "grad_clip_norm", -MOST, MOST, 0.0)),
    )


def read_sample(body: Mapping[str, Any], reading: Reading) -> SampleRequest:
    """The body of `asample`."""
    limits, prompt = reading.limits, _prompt(body.get("prompt"), reading)
    if len(prompt) >= reading.window:
        raise refused(f"the prompt has {len(prompt)} tokens, expected at most {reading.window - 1}; shorten it")
    how = object_of(body.get("sampling_params") or {}, "sampling_params")
    room = reading.window - len(prompt)
    most = min(room, whole_of(how, "max_tokens", 1, 2**31, room))
    stop, stop_ids = _stops(how.get("stop"), reading)
    top_k = whole_of(how, "top_k", -1, 2**31, -1)
    sampling = SamplingParams(
        max_new_tokens=most,
        temperature=number_of(how, "temperature", 0.0, 1e4, 1.0),
        top_p=number_of(how, "top_p", 1e-6, 1.0, 1.0),
        top_k=max(0, top_k),
        stop=stop,
        stop_ids=stop_ids,
    )
    if whole_of(body, "prompt_alt_tokens_k", 0, 2**31, 0):
        raise refused("prompt_alt_tokens_k is not offered by this server; leave it out")
    if body.get("record_stability_info"):
        raise refused("record_stability_info is not offered by this server; leave it out")
    wanted = bool(body.get("prompt_logprobs"))
    top = whole_of(body, "topk_prompt_logprobs", 0, limits.top, 0)
    last = whole_of(body, "prompt_logprobs_last_n", 1, max(1, len(prompt) - 1), max(1, len(prompt) - 1))
    targets = _score_targets(body.get("target_prompt_logprobs"), len(prompt), reading)
    # Targets are given for all positions, whatever part of the prompt's own log-probabilities is wanted.
    first = 1 if targets is not None else max(1, len(prompt) - last)
    score = ScoreRequest(prompt, first, top, targets) if wanted or top or targets is not None else None
    seed = None if how.get("seed") is None else whole_of(how, "seed", 0, 2**64 - 1)
    return SampleRequest(
        *(prompt, whole_of(body, "num_samples", 1, limits.samples, 1), sampling, seed, wanted, score),
        whole_of(body, "topk_sample_logprobs", 0, limits.top, 0),
    )


def _prompt(value: Any, reading: Reading) -> list[int]:
    chunks = object_of(value, "prompt").get("chunks")
    if not isinstance(chunks, list):
        raise refused("prompt has no list of chunks")
    ids: list[int] = []
    for chunk in chunks:
        tokens = chunk.get("tokens") if isinstance(chunk, dict) else None
        if not isinstance(tokens, list) or chunk.get("type", "encoded_text") != "encoded_text":
            raise refused("a chunk of the prompt holds no tokens; this server takes text only")
        ids += tokens
    if not ids:
        raise refused("the prompt is empty, expected tokens")
    if len(ids) > reading.window:
        raise refused(f"the prompt has {len(ids)} tokens, expected at most {reading.window}")
    _check_ids(ids, reading.vocabulary)
    return ids


def _check_ids(ids: Sequence[Any], vocabulary: int) -> None:
    for token in ids:
        if type(token) is not int or not 0 <= token < vocabulary:
            raise refused(f"found the token {shortened(repr(token))}, expected ids from 0 to {vocabulary - 1}")


def _stops(stop: Any, reading: Reading) -> tuple[tuple[str, ...], tuple[int, ...] | None]:
    """Texts and tokens at which a sample ends, None for the base's own; an empty list leaves out these too."""
    if stop is None:
        return (), None
    stop = [stop] if isinstance(stop, str) else stop
    if not isinstance(stop, list) or len(stop) > 16:
        raise refused(f"stop is {shortened(repr(stop))}, expected a text, or up to 16 texts or tokens")
    if not stop:
        return (), ()
    if all(isinstance(each, str) and 0 < len(each) <= 200 for each in stop):
        return tuple(stop), None
    _check_ids(stop, reading.vocabulary)
    return (), tuple(sorted({*stop, *reading.ends}))


def _score_targets(value: Any, length: int, reading: Reading) -> np.ndarray | None:
    """`target_prompt_logprobs`, dense, -1 where nothing is asked."""
    if value is None:
        return None
    what, tensor = "target_prompt_logprobs", object_of(value, "target_prompt_logprobs")
    if tensor.get("sparse_crow_indices") is not None:
        raise refused(f"{what} is sparse, expected a dense tensor")
    shape, data = tensor.get("shape"), tensor.get("data")
    if not isinstance(shape, list) or len(shape) != 2 or shape[0] != length - 1 or type(shape[1]) is not int:
        raise refused(f"{what} has the shape {shortened(repr(shape))}, expected [{length - 1}, K]")
    if not 1 <= shape[1] <= reading.limits.top:
        raise refused(f"{what} has {shape[1]} tokens a position, expected 1 to {reading.limits.top}")
    if not isinstance(data, list) or len(data) != shape[0] * shape[1]:
        raise refused(f"{what} does not hold the numbers of its shape")
    _check_ids([0 if token == -1 else token for token in data], reading.vocabulary)
    return np.array(data, np.int64).reshape(shape)


# ----------------------------------------------------------------------------------------------------- protocol buffers


def parse_pass(content: bytes) -> wire.ForwardBackwardRequest:
    """The message of a request whose content is not checked yet."""
    message = wire.ForwardBackwardRequest()
    try:
        message.ParseFromString(content)
    except DecodeError:
        raise refused("the body is no ForwardBackwardRequest") from None
    return message


def read_pass(message: wire.ForwardBackwardRequest, reading: Reading) -> PassRequest:
    """A checked `forward_backward`."""
    name = message.loss_fn
    if name not in LOSSES:
        known = " (the SDK's, but not this server's)" if name in OTHER_LOSSES else ""
        raise refused(f"the loss {shortened(name)!r}{known} is unknown, expected one of {', '.join(LOSSES)}")
    loss = LOSSES[name]
    if not message.data:
        raise refused("the request holds no examples")
    settings = _settings(message, loss)
    examples, tokens = [], 0
    for place, datum in enumerate(message.data):
        examples.append(_example(f"example {place}", datum, loss, reading))
        tokens += len(examples[-1].tokens)
        if tokens > reading.limits.batch_tokens:
            raise refused(f"the request has more than {reading.limits.batch_tokens} tokens; send smaller batches", 413)
    return PassRequest(loss, settings, examples, not message.forward_only)


def _settings(message: wire.ForwardBackwardRequest, loss: Loss) -> dict[str, float]:
    given: dict[str, float] = dict(message.loss_fn_config)
    for name, value in message.loss_fn_config_v2.items():
        if value.WhichOneof("value") != "number":
            raise refused(f"loss_fn_config: {shortened(name)!r} is no number")
        given[name] = value.number
    for name, number in given.items():
        if name not in loss.settings:
            known = ", ".join(loss.settings) or "none"
            raise refused(f"loss_fn_config: {shortened(name)!r} is no setting of {loss.name}, expected {known}")
        if not math.isfinite(number) or not 0 <= number <= MOST:
            raise refused(f"loss_fn_config: {name} is {number}, expected a number from 0 to {MOST:g}")
    return {**loss.settings, **given}


def _example(where: str, datum: wire.Datum, loss: Loss, reading: Reading) -> Example:
    tokens: list[int] = []
    for chunk in datum.model_input:
        if chunk.WhichOneof("chunk") is None:
            raise refused(f"{where}: a chunk holds no tokens; this server takes text only")
        tokens += _numbers(f"{where}: tokens", chunk.encoded_text.tokens, np.dtype(np.int32)).tolist()
        if len(tokens) > reading.window:
            raise refused(f"{where} has more than the {reading.window} tokens of the base's context window")
    if not tokens:
        raise refused(f"{where} is empty")
    if min(tokens) < 0 or max(tokens) >= reading.vocabulary:
        raise refused(
            f"{where} holds the token {min(tokens) if min(tokens) < 0 else max(tokens)}, expected ids from 0 to "
            f"{reading.vocabulary - 1}"
        )
    found = {
        name: _tensor(f"{where}: {name}", tensor, len(tokens), reading) for name, tensor in datum.loss_fn_inputs.items()
    }
    targets = found.pop("target_tokens", None)
    if targets is None:
        raise refused(f"{where} has no target_tokens")
    if targets.dtype != np.int64 or targets.min() < 0 or targets.max() >= reading.vocabulary:
        raise refused(f"{where}: target_tokens must be int64 ids from 0 to {reading.vocabulary - 1}")
    loss.check(where, found)
    for name, values in found.items():
        if values.shape != targets.shape:
            raise refused(
                f"{where}: {name} has the shape {list(values.shape)}, expected {list(targets.shape)}, as of "
                "target_tokens"
            )
        if not np.isfinite(values).all() or np.abs(values).max() > MOST:
            raise refused(f"{where}: {name} holds NaN, infinity or a number beyond {MOST:g}")
    return Example(tokens, targets, {name: values.astype(np.float32) for name, values in found.items()})


def _numbers(where: str, content: bytes, dtype: np.dtype[Any]) -> np.ndarray:
    if len(content) % dtype.itemsize:
        raise refused(f"{where} is cut: {len(content)} bytes are no whole number of {dtype.name}")
    return np.frombuffer(content, dtype)


def _tensor(where: str, tensor: wire.Tensor, length: int, reading: Reading) -> np.ndarray:
    """`[T]` or `[T, K]`; entries that a sparse tensor does not list are 0."""
    dtypes: dict[int, np.dtype[Any]] = {wire.FLOAT32: np.dtype(np.float32), wire.INT64: np.dtype(np.int64)}
    if tensor.dtype not in dtypes:
        raise refused(f"{where} has an unknown type of numbers")
    dtype, shape = dtypes[tensor.dtype], list(tensor.shape) or [length]
    if shape[0] != length or len(shape) > 2 or not 1 <= shape[-1] <= max(length, reading.limits.top):
        raise refused(
            f"{where} has the shape {shortened(str(shape))}, expected [{length}] or [{length}, K] with K up to "
            f"{reading.limits.top}"
        )
    if len(shape) == 2 and shape[1] > reading.limits.top:
        raise refused(f"{where} has {shape[1]} entries a position, expected at most {reading.limits.top}")
    if tensor.WhichOneof("encoding") != "sparse_csr":
        values = _numbers(where, tensor.dense, dtype)
        if len(values) != math.prod(shape):
            raise refused(f"{where} holds {len(values)} numbers, expected {math.prod(shape)} for the shape {shape}")
        return values.reshape(shape)
    values = _numbers(where, tensor.sparse_csr.values, dtype)
    starts = _numbers(where, tensor.sparse_csr.crow_indices, np.dtype(np.int64))
    columns = _numbers(where, tensor.sparse_csr.col_indices, np.dtype(np.int64))
    whole = len(shape) == 2 and len(starts) == length + 1 and len(columns) == len(values)
    rising = whole and starts[0] == 0 and starts[-1] == len(values) and bool((np.diff(starts) >= 0).all())
    if not rising or (len(columns) and (columns.min() < 0 or columns.max() >= shape[1])):
        raise refused(f"{where}: the indices of the sparse tensor do not fit its shape {shape}")
    dense = np.zeros(shape, dtype)
    dense[np.repeat(np.arange(length), np.diff(starts)), columns] = values
    return dense


# -------------------------------------------------------------------------------------------------------------- replies


@dataclass(frozen=True)
class Scored:
    """Of a `ScoreRequest`."""

    own: np.ndarray
    """`[T]` float32, NaN before `first`"""
    top_ids: np.ndarray | None = None
    """`[T, top]` int32"""
    top_logprobs: np.ndarray | None = None
    targets: np.ndarray | None = None
    """`[T - 1, K]` float32, 0 where nothing was asked"""


@dataclass
class PassResult:
    """Of a `PassRequest`: log-probabilities of each example's targets, in the shape of these."""

    logprobs: list[np.ndarray] = field(default_factory=list)
    loss: float = 0.0


def pass_reply(result: PassResult) -> bytes:
    """A `ForwardBackwardOutput`."""
    reply = wire.ForwardBackwardOutput(loss_fn_output_type="ArrayRecord", metrics={"loss:sum": result.loss})
    runs: list[list[np.ndarray]] = []
    for values in result.logprobs:
        # Examples of one record share all axes but the first.
        if not runs or runs[-1][0].shape[1:] != values.shape[1:]:
            runs.append([])
        runs[-1].append(values)
    for run in runs:
        offsets = np.cumsum([0, *(values.size * 4 for values in run)]).astype(np.int64)
        record = reply.loss_fn_outputs.add(num_datums=len(run))
        record.fields["logprobs"].CopyFrom(
            wire.BatchedTensor(
                data=b"".join(values.astype(np.float32).tobytes() for values in run),
                offsets=offsets.tobytes(),
                dtype=wire.FLOAT32,
                trailing_shape=run[0].shape[1:],
            )
        )
    return bytes(reply.SerializeToString())


def sample_reply(
    request: SampleRequest, completions: Sequence[Completion], scored: Scored | None, top: Sequence[Scored]
) -> bytes:
    """A `SampleResponse`; `top` holds the likeliest tokens of each sample, if they were asked for."""
    reply = wire.SampleResponse()
    for place, made in enumerate(completions):
        one = reply.sequences.add(stop_reason=wire.LENGTH if made.stop == "length" else wire.STOP)
        one.tokens, one.logprobs = np.array(made.ids, np.int32).tobytes(), np.array(made.logprobs, np.float32).tobytes()
        if top:
            one.topk_sampled_logprobs.CopyFrom(_top(top[place], len(request.prompt)))
    if scored is not None:
        if request.prompt_logprobs:
            reply.prompt_logprobs = scored.own.tobytes()
        if scored.top_ids is not None:
            reply.topk_prompt_logprobs.CopyFrom(_top(scored, 0))
        if scored.targets is not None:
            values = scored.targets
            reply.target_prompt_logprobs.CopyFrom(
                wire.Tensor(dense=values.tobytes(), dtype=wire.FLOAT32, shape=values.shape)
            )
    return bytes(reply.SerializeToString())


def _top(scored: Scored, first: int) -> wire.TopkLogprobs:
    assert scored.top_ids is not None and scored.top_logprobs is not None
    ids, values = scored.top_ids[first:], scored.top_logprobs[first:]
    return wire.TopkLogprobs(token_ids=ids.tobytes(), logprobs=values.tobytes(), k=ids.shape[1], length=len(ids))


def after(request: SampleRequest, made: Completion) -> ScoreRequest:
    """The score of a sample's tokens."""
    return ScoreRequest([*request.prompt, *made.ids], len(request.prompt), request.top_sampled)
