"""Decoding made for GPUs equals the model's own forward pass; it is plain torch, so a CPU can tell."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from helpers_families import tiny
from helpers_models import ALL, ATTENTION, add_random_adapter, random_ids, tiny_base, tiny_tokenizer

from bench._gpu.pretend_cuda import PretendCuda
from mafrt.config.agent import ALL_LINEAR
from mafrt.core.types import Request, SamplingParams
from mafrt.engines.local.engine import LocalEngine
from mafrt.models.compute import reference
from mafrt.models.decoder import DecodeModel, ExpandedDecoder
from mafrt.models.gpu import lean_decoder
from mafrt.models.gpu.graphs import Recorder
from mafrt.models.gpu.lean_decoder import LeanModel, agrees, decode_model
from mafrt.models.kv_cache import prefill
from mafrt.models.shared_base import SharedBase
from mafrt.models.state_prompts import StatePrompts

pytestmark = pytest.mark.takes(slow=8)

LENGTHS = (9, 4, 12, 12, 1)


@pytest.fixture(autouse=True)
def without_gradients():
    with torch.no_grad():
        yield


@pytest.fixture
def plain():
    """Without the forms of the CPU, which lay out weights of their own."""
    with reference():
        yield


def base_of(kind="qwen3", targets=(ALL, ATTENTION, ("up_proj", "k_proj")), **shape):
    base = tiny_base(kind, **shape)
    for number, own in enumerate(targets):
        add_random_adapter(base, f"agent{number}", rank=3 + number, targets=own, seed=number)
    return base


def pair(base, lengths=LENGTHS, samples=2, steps=40):
    """A lean decoder and the reference in front of the same prompts, rows of one adapter side by side."""
    names = [*base.adapters, None]
    prompts = [random_ids(1, length, seed=n)[0].tolist() for n, length in enumerate(lengths)]
    of = sorted(names[n % len(names)] or "~" for n in range(len(prompts)))
    of = [None if name == "~" else name for name in of]
    index = [base.adapter_index(name) for name in of]
    owner = [n for n in range(len(prompts)) for _ in range(samples)]
    lean = LeanModel(base).decoder(prefill(base, prompts, index)[1], owner, [of[n] for n in owner], steps)
    rows = torch.tensor([index[n] for n in owner])
    return lean, ExpandedDecoder(base, prefill(base, prompts, index)[1], torch.tensor(owner), rows)


def agree(lean, whole, tokens):
    torch.testing.assert_close(lean.step(tokens), whole.step(tokens), atol=2e-4, rtol=2e-4)


@pytest.mark.slow
@pytest.mark.parametrize("lengths", [LENGTHS, (6, 6, 6)])
@pytest.mark.parametrize("kind", ["qwen3", "qwen2", "llama"])
def test_steps_equal_the_models_own(plain, kind, lengths, monkeypatch):
    monkeypatch.setattr(lean_decoder, "ROOM", 16)
    lean, whole = pair(base_of(kind), lengths)
    first = lean._keys[0].shape[2]
    walked(lean, whole, (3, 20))
    assert lean._keys[0].shape[2] > first, "the buffers had to grow"
    folded, expected = pair(base_of(kind), lengths)
    tokens = random_ids(1, len(folded._lengths), seed=1)[0]
    agree(folded, expected, tokens)
    same_folds(folded, expected)


def walked(lean, whole, leave):
    """Both through 38 steps; every other row leaves after the steps `leave`."""
    for step in range(38):
        rows = len(lean._lengths)
        agree(lean, whole, random_ids(1, rows, seed=step)[0])
        if step in leave:
            kept = torch.arange(0, rows, 2)
            lean.keep(kept)
            whole.keep(kept)


def same_folds(folded, expected):
    ours, theirs = folded.folded(), expected.folded()
    assert ours.lengths.tolist() == theirs.lengths.tolist()
    for own, other in zip((*ours.keys, *ours.values), (*theirs.keys, *theirs.values), strict=True):
        for row, length in enumerate(ours.lengths.tolist()):
            torch.testing.assert_close(own[row, :, :length], other[row, :, :length], atol=1e-4, rtol=1e-4)


class Repeats:
    """Stands in for a recorder: repeats the work by running it again, at the first call and not when it is given."""

    works = True

    def __init__(self):
        self.recordings = 0

    def record(self, work):
        self.recordings += 1
        return work


@pytest.mark.slow
@pytest.mark.parametrize("lengths", [LENGTHS, (6, 6, 6)])
def test_recorded_steps_equal_the_models_own(plain, lengths, monkeypatch):
    monkeypatch.setattr(lean_decoder, "ROOM", 16)
    lean, whole = pair(base_of(), lengths)
    recorder = lean.model.recorder = Repeats()
    walked(lean, whole, (5, 20))
    assert recorder.recordings >= 3, "anew when rows leave or the buffers grow"
    same_folds(lean, whole)


def test_what_cannot_be_recorded_is_launched_one_by_one(plain, monkeypatch, caplog):
    lean, whole = pair(base_of(), steps=20)
    monkeypatch.setattr(Recorder, "_recorded", lambda self, work: (_ for _ in ()).throw(RuntimeError("no capture")))
    recorder = lean.model.recorder = Recorder(torch.device("cuda", 0))
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    for step in range(9):
        agree(lean, whole, random_ids(1, len(lean._lengths), seed=step)[0])
    assert not recorder.works and caplog.text.count("no capture") == 1


@pytest.mark.slow
def test_a_recorded_step_is_one_launch():
    with PretendCuda() as gpu:
        lean = LeanModel(on_gpu(2, layers=3))
        decoder = lean.decoder(prefill(lean.base, [[1, 2, 3], [4, 5, 6]], [0, 1])[1], [0, 1], ["agent0", "agent1"], 30)
        for step in range(12):
            gpu.clear()
            decoder.step(torch.tensor([step, 7]).to("cuda"))
        assert gpu.launched <= 3 and 30 < gpu.recorded.total() <= 12 * 3 + 8


def test_weights_are_parts_of_one_and_held_once(plain):
    base = base_of(targets=())
    before = {name: p.clone() for name, p in base.model.named_parameters()}
    model, again = LeanModel(base), LeanModel(base)
    for name, p in base.model.named_parameters():
        assert torch.equal(p, before[name]) and not p.requires_grad
    layer = base.inner.layers[0]
    for block in (model.blocks[0], again.blocks[0]):
        for linear, part in zip(block.linears, ("q_proj", "o_proj", "gate_proj", "down_proj"), strict=True):
            own = getattr(layer.self_attn, part, None) or getattr(layer.mlp, part)
            assert own.weight.untyped_storage()._cdata == linear.weight.untyped_storage()._cdata
    assert not model.stale
    layer.mlp.up_proj.weight[0, 0] += 1.0
    assert model.stale and float(model.blocks[0].linears[2].weight[64, 0]) == float(layer.mlp.up_proj.weight[0, 0])


def test_a_written_or_loaded_adapter_is_laid_out_anew(plain):
    base = base_of()
    model = LeanModel(base)
    first = model.adapters(["agent0", "agent2"])
    assert model.adapters(["agent0", "agent2"]) is first
    base.adapter_parameters("agent2")[0].add_(1.0)
    second = model.adapters(["agent0", "agent2"])
    assert second is not first
    base.bump("agent0")
    assert model.adapters(["agent0", "agent2"]) is not second


@pytest.mark.parametrize(
    ("base", "why"),
    [
        (lambda: tiny_base("mistral"), "windows"),
        (lambda: tiny_base("gemma3"), "model type"),
        (lambda: tiny_base("phi3"), "model type"),
        (lambda: tiny_base("qwen3", hidden_act="gelu"), "SiLU"),
    ],
)
def test_other_models_decode_by_their_own_forward(plain, base, why):
    made = decode_model(base())
    assert type(made) is DecodeModel and why in made.reason


@pytest.mark.parametrize("fault", ["weights", "scale", "rotary"])
def test_a_fault_is_noticed_at_the_start(plain, fault):
    base = base_of()
    model = LeanModel(base)
    assert agrees(model)
    if fault == "scale":
        for block in model.blocks:
            block.mixer.scale *= 0.5
    elif fault == "rotary":
        cos, sin = model.rotary(32)
        model.rotary = lambda positions: (cos, -sin)
    else:
        for block in model.blocks:
            block.linears[0].weight = block.linears[0].weight.roll(1, 0)
    assert not agrees(model)


def hybrid(**shape):
    """Qwen3.5 with adapters of several ranks."""
    base = SharedBase(tiny("qwen3_5_text", **shape), tiny_tokenizer(), "qwen3_5_text")
    for number, own in enumerate(((ALL_LINEAR,), ("in_proj_qkv", "q_proj", "down_proj"), ("in_proj_b", "out_proj"))):
        add_random_adapter(base, f"agent{number}", rank=3 + 6 * number, targets=own, seed=number)
    return base


def hybrid_pair(base, steps=40):
    """A lean decoder, and the rows that the model's own forward reads whole: prompts of many lengths, two of each."""
    names = [*base.adapters, None]
    prompts = [random_ids(1, length, seed=n)[0].tolist() for n, length in enumerate((9, 4, 12, 1))]
    index = [base.adapter_index(name) for name in names]
    model, owner = LeanModel(base), [0, 0, 1, 1, 2, 2, 3, 3]
    lean = model.decoder(model.prefill(prompts, index), owner, [names[n] for n in owner], steps)
    return lean, [list(prompts[n]) for n in owner], [index[n] for n in owner]


def last_states(base, rows, index):
    pairs = zip(rows, index, strict=True)
    return torch.cat([base.forward(torch.tensor([row]), None, torch.tensor([k]))[:, -1] for row, k in pairs])


@pytest.mark.parametrize("shape", [{}, {"linear_num_value_heads": 2, "linear_key_head_dim": 8}])
@pytest.mark.parametrize("recorded", [False, True])
def test_steps_of_a_hybrid_equal_the_models_own(plain, monkeypatch, shape, recorded):
    monkeypatch.setattr(lean_decoder, "ROOM", 16)
    base = hybrid(**shape)
    lean, rows, index = hybrid_pair(base)
    if recorded:
        lean.model.recorder = Repeats()
    for step in range(22):
        tokens = random_ids(1, len(rows), seed=step)[0]
        rows = [[*row, token] for row, token in zip(rows, tokens.tolist(), strict=True)]
        found = lean.step(tokens)
        if step % 3 == 0:
            torch.testing.assert_close(found, last_states(base, rows, index), atol=1e-4, rtol=1e-4)
        if step in (5, 12):  # the rows that stay go on in another decoder
            kept = torch.arange(0, len(rows), 2)
            lean.keep(kept)
            rows, index = [rows[n] for n in kept], [index[n] for n in kept]
            names = [None if k < 0 else list(base.adapters)[k] for k in index]
            lean = lean.model.decoder(lean.folded(), range(len(rows)), names, 30)


def test_a_hybrid_answers_as_generate(plain):
    base = hybrid()
    engine = LocalEngine(base, eos_ids=())
    model = LeanModel(base)
    assert agrees(model) and model.stateful and not model.stale
    engine._model, engine.transcripts = model, StatePrompts(base)
    greedy = SamplingParams(max_new_tokens=12, temperature=0.0)
    base.model.generation_config.eos_token_id = None
    prompts = [random_ids(1, length, seed=length)[0].tolist() for length in (7, 3, 11)]
    for prompt, done in zip(prompts, engine.generate([Request(p, None, greedy, seed=1) for p in prompts]), strict=True):
        expected = base.model.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False)
        assert done.ids == expected[0, len(prompt) :].tolist()
    asked = [Request(p, "agent1", SamplingParams(max_new_tokens=12), seed=n) for n, p in enumerate(prompts)]
    for request, done in zip(asked, engine.generate(asked), strict=True):
        ids = torch.tensor([[*request.prompt_ids, *done.ids]])
        states = base.forward(ids, None, torch.tensor([base.adapter_index("agent1")]))
        spoken = states[0, len(request.prompt_ids) - 1 : -1]
        logprobs, _ = base.token_logprobs(spoken, torch.tensor(done.ids))
        torch.testing.assert_close(torch.tensor(done.logprobs), logprobs, atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("fault", "broken"),
    [
        ("decay", lambda delta: delta.decay.mul_(0.1)),
        ("filter", lambda delta: setattr(delta, "filter", delta.filter * 2)),
    ],
)
def test_a_fault_of_a_recurrence_is_noticed_at_the_start(plain, fault, broken):
    model = LeanModel(hybrid())
    broken(model.blocks[0].mixer)
    assert not agrees(model)


def test_a_hybrid_of_another_form_decodes_by_its_own_forward(plain):
    base = hybrid()
    base.inner.layers[0].linear_attn.activation = "gelu"
    assert "gated delta rule" in decode_model(base).reason


def on_gpu(adapters, **shape):
    base = tiny_base(**shape)
    base = SharedBase(base.model.to("cuda"), base.tokenizer, base.name)
    for number in range(adapters):
        add_random_adapter(base, f"agent{number}", seed=number)
    return base


@pytest.mark.slow
@pytest.mark.ci
def test_the_engine_samples_the_same_on_a_pretended_gpu():
    """With requests that end at different times, and one that joins."""

    def spoken(base, decoding):
        engine = LocalEngine(base, eos_ids=(), decoding=decoding)
        ids = random_ids(7, 11, seed=5).tolist()
        made = {}
        for n in range(7):
            how = SamplingParams(max_new_tokens=3 + 2 * n, temperature=1.0)
            made[n] = Request(ids[n][: 5 + n % 4], [*base.adapters, None][n % 3], how, seed=n)
        batch = engine.begin({n: made[n] for n in range(6)})
        done = {}
        for step in range(20):
            if step == 4:
                engine.join(batch, {6: made[6]})
            if batch.live:
                done |= {n: completion.ids for n, completion in engine.step(batch)}
        assert (engine.decoding == "lean") == (decoding == "lean")
        return done

    with PretendCuda():
        base = on_gpu(2)
        assert spoken(base, "lean") == spoken(base, "expanded")
        base = hybrid_on_gpu()
        assert spoken(base, "lean") == spoken(base, "expanded")


def hybrid_on_gpu(**shape):
    base = SharedBase(tiny("qwen3_5_text", **shape).to("cuda"), tiny_tokenizer(), "qwen3_5_text")
    for number in range(2):
        add_random_adapter(base, f"agent{number}", targets=(ALL_LINEAR,), seed=number)
    return base


@pytest.mark.slow
def test_a_step_of_a_hybrid_is_recorded():
    with PretendCuda() as gpu:
        lean = LeanModel(hybrid_on_gpu())
        prompts = lean.prefill([[1, 2, 3], [4, 5]], [0, 1])
        decoder = lean.decoder(prompts, [0, 1], ["agent0", "agent1"], 30)
        for step in range(12):
            gpu.clear()
            decoder.step(torch.tensor([step, 7]).to("cuda"))
        assert gpu.launched <= 3
        # Three layers of the delta rule, and one of attention.
        assert gpu.recorded.total() <= 3 * 12 + 30 + 8


@pytest.mark.parametrize(
    ("adapters", "even"),
    [
        (0, True),
        pytest.param(4, False, marks=pytest.mark.slow),
        *(pytest.param(*some, marks=[pytest.mark.slow, pytest.mark.ci]) for some in ((1, True), (4, True), (9, False))),
    ],
)
def test_a_step_takes_twelve_launches_a_layer_at_most(adapters, even):
    def step(layers):
        base = on_gpu(adapters, layers=layers)
        engine = LocalEngine(base, eos_ids=(), decoding="lean")
        ids = random_ids(10, 9, seed=3).tolist()
        names = [*base.adapters, None]
        how = SamplingParams(max_new_tokens=64)
        lengths = [9 if even else 5 + n % 4 for n in range(10)]
        requests = {n: Request(ids[n][: lengths[n]], names[n % len(names)], how, seed=n) for n in range(10)}
        batch = engine.begin(requests)
        gpu.clear()
        batch.step()
        first = gpu.launched
        gpu.clear()
        batch.step()
        assert gpu.waited == 1, gpu.waits
        return gpu.launched, first - gpu.launched

    with PretendCuda() as gpu:
        (few, laid_out), (many, laid_out_more) = step(2), step(4)
    assert (many - few) / 2 <= 12, (few, many)
    assert few - (many - few) <= 45, "beside the layers"
    assert (laid_out_more - laid_out) / 2 <= 28, "the layout of adapters, a layer"
