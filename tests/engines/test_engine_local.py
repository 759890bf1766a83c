"""The local engine against `transformers.generate` with PEFT, and against what the trainer recomputes."""

from __future__ import annotations

import functools
import itertools
import random
import weakref

import pytest
import torch
from helpers_models import ALL, ATTENTION, add_random_adapter, random_ids, tiny_base, tiny_model, tiny_tokenizer

from mafrt.core.errors import ConfigError, ModelError, PromptTooLongError
from mafrt.core.types import Request, SamplingParams
from mafrt.cpu import lean_decoder, lean_model
from mafrt.cpu.lean_decoder import LeanDecoding, agrees
from mafrt.cpu.lean_model import LeanModel
from mafrt.cpu.library import library
from mafrt.engines.local.engine import LocalEngine
from mafrt.engines.local.running_batch import RunningBatch
from mafrt.engines.local.sampler import NonFiniteLogitsError
from mafrt.models import kv_cache
from mafrt.models.decoder import DecodeModel
from mafrt.models.outside_text import answer_text
from mafrt.models.shared_base import SharedBase

SPECS = {"solver": (4, 8.0, ALL), "verifier": (2, 16.0, ATTENTION), "coder": (7, 7.0, ("down_proj", "q_proj"))}
NAMES = (*SPECS, None)
DECODINGS = ("lean", "expanded")
KINDS = ("qwen3", "qwen2", "llama", "phi3", "mistral", "gemma2", "gemma3")
OF_PHI3 = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj"), "qkv_proj"),
    "gate_proj": "gate_up_proj",
    "up_proj": "gate_up_proj",
}


def specs_of(kind):
    """Rank, alpha and targets of each adapter, with the names of the model's layers."""
    named = OF_PHI3 if kind == "phi3" else {}
    return {
        name: (rank, alpha, tuple(dict.fromkeys(named.get(target, target) for target in targets)))
        for name, (rank, alpha, targets) in SPECS.items()
    }


GREEDY = SamplingParams(max_new_tokens=20, temperature=0.0)


def team_base(kind="qwen3", **settings):
    base = tiny_base(kind, **settings)
    for i, (name, (rank, alpha, targets)) in enumerate(specs_of(kind).items()):
        add_random_adapter(base, name, rank, alpha, targets, seed=i)
    return base


def prompt(length, seed=0):
    return random_ids(1, length, seed=seed)[0].tolist()


def mixed_requests(count=24, seed=0):
    """Requests of unequal prompts, limits and samplings, unsorted, some with the same prompt."""
    rng = random.Random(seed)
    made = []
    for i in range(count):
        sampling = SamplingParams(
            max_new_tokens=rng.randint(1, 20),
            temperature=rng.choice([0.0, 0.7, 1.0, 1.0]),
            top_k=rng.choice([0, 0, 5]),
            top_p=rng.choice([1.0, 1.0, 0.8]),
        )
        text = rng.randrange(12)
        made.append(Request(prompt(1 + 3 * text, seed=text), rng.choice(NAMES), sampling, seed=i))
    return made


def assert_same(found, expected):
    assert [c.ids for c in found] == [c.ids for c in expected]
    assert [(c.stop, c.text) for c in found] == [(c.stop, c.text) for c in expected]
    for mine, theirs in zip(found, expected, strict=True):
        assert mine.logprobs == pytest.approx(theirs.logprobs, abs=1e-4)


def greedy_requests():
    made = [
        Request(prompt(length, seed=length), name, SamplingParams(8 + length // 3, temperature=0.0), seed=0)
        for length in (5, 31, 1, 18)
        for name in NAMES
    ]
    return random.Random(1).sample(made, len(made))


@functools.cache
def greedy_by_transformers(kind):
    """Greedy ids from `generate` on PEFT's model, one request at a time."""
    from peft import LoraConfig, get_peft_model, set_peft_model_state_dict

    base, requests, model = team_base(kind), greedy_requests(), None
    exact = {"attn_implementation": "eager"} if kind == "gemma2" else {}  # their sdpa leaves Gemma 2's cap out
    for name, (rank, alpha, targets) in specs_of(kind).items():
        config = LoraConfig(r=rank, lora_alpha=alpha, target_modules=list(targets), task_type="CAUSAL_LM")
        if model is None:
            model = get_peft_model(tiny_model(kind, **exact), config, adapter_name=name)
        else:
            model.add_adapter(name, config)
        set_peft_model_state_dict(model, base.adapter_state(name), adapter_name=name)
    model.eval()
    found = []
    for request in requests:
        ids = torch.tensor([request.prompt_ids])
        fixed = {"max_new_tokens": request.sampling.max_new_tokens, "do_sample": False, "pad_token_id": 0}
        if request.adapter is None:
            with model.disable_adapter():
                out = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **fixed)
        else:
            model.set_adapter(request.adapter)
            out = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **fixed)
        found.append(out[0, ids.shape[1] :].tolist())
    return found


@pytest.mark.slow
@pytest.mark.parametrize("decoding", DECODINGS)
@pytest.mark.parametrize("kind", KINDS)
def test_greedy_equals_generate_token_for_token(kind, decoding):
    requests = greedy_requests()
    found = LocalEngine(team_base(kind), decoding=decoding).generate(requests)
    assert [c.ids for c in found] == greedy_by_transformers(kind)
    assert all(set(c.logprobs) == {0.0} for c in found)
    assert len({tuple(c.ids[:5]) for c in found}) > len(requests) / 2  # the adapters do something


@pytest.mark.parametrize("decoding", DECODINGS)
@pytest.mark.parametrize("kind", KINDS)
def test_logprobs_agree_with_what_the_trainer_recomputes(kind, decoding):
    base = team_base(kind)
    requests = [
        Request(prompt(3 + 5 * (i % 4), seed=i % 4), NAMES[i % 3], SamplingParams(25, temperature=t), seed=i)
        for i, t in enumerate([1.0, 0.7, 1.3] * 6)
    ]
    found = LocalEngine(base, decoding=decoding).generate(requests)
    rows = [[*r.prompt_ids, *c.ids] for r, c in zip(requests, found, strict=True)]
    width = max(map(len, rows))
    ids = torch.tensor([row + [0] * (width - len(row)) for row in rows])
    mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows])
    index = torch.tensor([base.adapter_index(r.adapter) for r in requests])
    with torch.no_grad():
        hidden = base.forward(ids, mask, index)
    for i, (request, completion) in enumerate(zip(requests, found, strict=True)):
        start = len(request.prompt_ids)
        span = slice(start - 1, start - 1 + len(completion.ids))
        expected, _ = base.token_logprobs(
            hidden[i, span], torch.tensor(completion.ids), temperature=request.sampling.temperature
        )
        assert completion.logprobs == pytest.approx(expected.tolist(), abs=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("decoding", DECODINGS)
def test_a_request_gets_the_same_alone_in_company_and_in_small_batches(decoding):
    base = team_base()
    requests = mixed_requests()
    together = LocalEngine(base, decoding=decoding).generate(requests)
    alone = [LocalEngine(base, decoding=decoding).generate([r])[0] for r in requests]
    assert_same(together, alone)
    assert_same(LocalEngine(base, decoding=decoding, max_batch_rows=7).generate(requests), alone)
    order = random.Random(5).sample(range(len(requests)), len(requests))
    shuffled = LocalEngine(base, decoding=decoding).generate([requests[i] for i in order])
    assert_same(shuffled, [alone[i] for i in order])


@pytest.mark.slow
def test_both_decoders_sample_the_same():
    base = team_base()
    requests = mixed_requests(seed=3)
    assert_same(*(LocalEngine(base, decoding=decoding).generate(requests) for decoding in DECODINGS))


@pytest.mark.slow
def test_prompts_prefilled_in_several_chunks_change_nothing(monkeypatch):
    base = team_base()
    requests = mixed_requests(seed=4)
    expected = LocalEngine(base).generate(requests)
    monkeypatch.setitem(kv_cache.PREFILL_TOKENS, "cpu", 40)
    assert_same(LocalEngine(base).generate(requests), expected)


def test_seeds_decide_the_samples():
    engine = LocalEngine(team_base())
    requests = [Request(prompt(8), "solver", SamplingParams(12), seed=seed) for seed in (1, 2, 3, 1, 2, 3)]
    found = engine.generate(requests)
    assert_same(found[:3], found[3:])
    # Without the kernels in C a row's last bits depend on its place in the batch.
    assert library() is None or found[:3] == found[3:]
    assert len({tuple(c.ids) for c in found[:3]}) == 3
    assert engine.generate(requests) == found


@pytest.mark.parametrize("decoding", DECODINGS)
def test_samples_of_a_prompt_are_prefilled_once(decoding):
    base = team_base()
    engine, fed, forward = LocalEngine(base, decoding=decoding), [], base.forward

    def counting(ids, *args, **kwargs):
        fed.append(tuple(ids.shape))
        return forward(ids, *args, **kwargs)

    base.forward = counting
    engine.generate([Request(prompt(9), name, SamplingParams(2), seed=s) for s in range(8) for name in NAMES[:2]])
    assert fed[0] == (2, 9)
    assert all(shape[1] == 1 for shape in fed[1:])


@pytest.mark.parametrize("decoding", DECODINGS)
def test_where_memory_runs_out_fewer_rows_are_sampled_at_a_time(decoding, monkeypatch):
    requests = [Request(prompt(5 + n % 3), NAMES[n % 2], SamplingParams(3 + n), seed=n) for n in range(9)]
    wanted = LocalEngine(team_base(), decoding=decoding, eos_ids=()).generate(requests)
    step, most, held = RunningBatch.step, 2, weakref.WeakSet()

    def short(self):
        if self.live > most and len(self.rows[0].ids) >= 2:
            held.add(self)
            raise torch.cuda.OutOfMemoryError("CUDA out of memory")
        assert not held, "what the larger batch held was let go"
        return step(self)

    monkeypatch.setattr(RunningBatch, "step", short)
    engine = LocalEngine(team_base(), decoding=decoding, eos_ids=())
    assert_same(engine.generate(requests), wanted)
    assert engine.max_batch_rows == 1, "4, then half of three"
    most = 0
    with pytest.raises(ModelError, match=r"one answer of up to 8 tokens to a prompt of 7; lower --context_window"):
        engine.generate([Request(prompt(7), NAMES[0], SamplingParams(8), seed=1)])
    monkeypatch.setattr(RunningBatch, "step", lambda self: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        engine.generate(requests)


def test_finished_rows_leave_the_batch(monkeypatch):
    fed, step = [], lean_decoder.LeanDecoder.step

    def counting(self, tokens):
        fed.append(len(tokens))
        return step(self, tokens)

    engine = LocalEngine(team_base(), decoding="lean", eos_ids=())
    monkeypatch.setattr(lean_decoder.LeanDecoder, "step", counting)
    limits = [2] * 6 + [10] * 2
    found = engine.generate([Request(prompt(5), "coder", SamplingParams(n), seed=n) for n in limits])
    assert [len(c.ids) for c in found] == limits
    assert fed == [8] + [2] * 8


@pytest.mark.slow
@pytest.mark.parametrize("decoding", DECODINGS)
def test_end_tokens_limits_and_stop_strings_are_per_request(decoding):
    base = team_base()
    free = LocalEngine(base, decoding=decoding, eos_ids=())
    sampling = SamplingParams(max_new_tokens=30)
    (whole,) = free.generate([Request(prompt(6), "solver", sampling, seed=5)])
    assert (len(whole.ids), whole.stop) == (30, "length")
    pieces = [base.tokenizer.decode([token]) for token in whole.ids]
    stop = next(a + b for a, b in itertools.pairwise(pieces[9:]) if len(a + b) == 2)
    end = next(n for n in range(30) if stop in "".join(pieces[:n]))
    text = answer_text(base.tokenizer, whole.ids[:end], ())

    def asked(adapter="solver", seed=5, **changes):
        return Request(prompt(6), adapter, SamplingParams(**{"max_new_tokens": 30, **changes}), seed=seed)

    requests = [asked(stop=("never", stop)), asked(), asked(max_new_tokens=4), asked(seed=6, stop=("\0",))]
    found = free.generate(requests)
    assert (found[0].ids, found[0].stop, found[0].text) == (whole.ids[:end], "stop", text)
    assert_same(found[1:2], [whole])
    assert (found[2].ids, found[2].stop) == (whole.ids[:4], "length")
    assert found[3].stop == "length" and len(found[3].ids) == 30
    ending = LocalEngine(base, decoding=decoding, eos_ids={whole.ids[7]})
    (ended,) = ending.generate([asked()])
    first = whole.ids.index(whole.ids[7])
    assert (ended.ids, ended.stop) == (whole.ids[: first + 1], "eos")


def test_a_special_tokens_text_can_be_a_stop_string():
    base = tiny_base()
    special = base.tokenizer.convert_tokens_to_ids("<|im_end|>")
    with torch.no_grad():  # the tied head now prefers that token for ever
        hidden = base.forward(torch.tensor([prompt(4)]), None, torch.tensor([-1]))[0, -1]
        base.head.weight[special] = 50 * hidden / hidden.norm()
    request = Request(prompt(4), None, SamplingParams(8, temperature=0.0, stop=("<|im_end|>",)), seed=0)
    (found,) = LocalEngine(base).generate([request])
    assert (found.ids, found.stop, found.text) == ([special], "stop", "<|im_end|>")


def test_stop_strings_of_a_byte_level_tokenizer():
    """A stop string whose last character is split over two tokens, and one that ends inside a token."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    from mafrt.engines.local.stop_strings import StopStrings

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE({c: i for i, c in enumerate([*alphabet, "ab"])}, [("a", "b")]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, clean_up_tokenization_spaces=False)
    ids = tokenizer.encode("x é\nab!")
    assert len(ids) == 7  # é is two bytes, ab is one token

    def first_hit(stop):
        watch = StopStrings(tokenizer, (stop,))
        return next((n for n in range(1, len(ids) + 1) if watch.hit(ids[:n])), None)

    assert [first_hit(stop) for stop in ("é", "x é", "\n", "\na", "ab!", "b!x", " ")] == [4, 4, 5, 6, 7, None, 2]


def test_nothing_asked_nothing_done():
    assert LocalEngine(tiny_base()).generate([]) == []


@pytest.mark.parametrize("decoding", DECODINGS)
def test_the_context_window_ends_a_generation_and_bars_prompts_that_fill_it(decoding):
    engine = LocalEngine(team_base(max_position_embeddings=24), decoding=decoding, eos_ids=())
    short, long = (Request(prompt(n), "solver", SamplingParams(20), seed=0) for n in (2, 20))
    found = engine.generate([short, long, Request(prompt(23), None, GREEDY, seed=0)])
    assert [(len(c.ids), c.stop) for c in found] == [(20, "length"), (4, "length"), (1, "length")]
    for length in (24, 25):
        with pytest.raises(PromptTooLongError, match=f"'coder'.*prompt of {length} tokens.*at most 23"):
            engine.generate([short, Request(prompt(length), "coder", GREEDY, seed=0)])


def test_wrong_requests_are_one_sentence():
    engine = LocalEngine(team_base())
    with pytest.raises(ConfigError, match=r"'critic'.*solver"):
        engine.generate([Request(prompt(3), "critic", GREEDY, seed=0)])
    with pytest.raises(ConfigError, match="empty prompt"):
        engine.generate([Request([], None, GREEDY, seed=0)])
    with pytest.raises(ConfigError, match="max_new_tokens=0"):
        engine.generate([Request(prompt(3), None, SamplingParams(0), seed=0)])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("decoding", DECODINGS)
def test_an_adapter_that_is_not_finite_is_named_and_the_others_go_on(decoding, temperature):
    base = team_base()
    engine = LocalEngine(base, decoding=decoding)
    sampling = SamplingParams(6, temperature=temperature)
    requests = [Request(prompt(4 + i), NAMES[i % 4], sampling, seed=i) for i in range(8)]
    before = engine.generate(requests)
    for parameter in base.adapter_parameters("verifier")[:2]:
        parameter.data[0, 0] = torch.nan
    base.bump("verifier")
    with pytest.raises(NonFiniteLogitsError, match="adapter 'verifier'") as caught:
        engine.generate(requests)
    assert caught.value.adapters == ("verifier",)
    healthy = [i for i in range(8) if NAMES[i % 4] != "verifier"]
    assert_same(engine.generate([requests[i] for i in healthy]), [before[i] for i in healthy])


def test_a_base_that_is_not_finite_is_an_error():
    base = team_base()
    engine = LocalEngine(base)
    with torch.no_grad():
        base.inner.layers[1].mlp.down_proj.weight.fill_(torch.nan)
    with pytest.raises(NonFiniteLogitsError, match="adapter 'solver', the bare base"):
        engine.generate([Request(prompt(3), name, GREEDY, seed=0) for name in ("solver", None)])


@pytest.mark.slow
@pytest.mark.parametrize("decoding", DECODINGS)
def test_the_next_call_samples_from_the_changed_adapter(decoding):
    base = team_base()
    engine = LocalEngine(base, decoding=decoding)
    requests = [Request(prompt(7), name, GREEDY, seed=0) for name in NAMES]
    before = engine.generate(requests)
    with torch.no_grad():
        for parameter in base.adapter_parameters("solver"):
            parameter.mul_(-1.5)
    base.bump("solver")
    after = engine.generate(requests)
    assert after[0].ids != before[0].ids
    assert after[1:] == before[1:]
    assert after == LocalEngine(base, decoding=decoding).generate(requests)
    assert [c.adapter_version for c in after] == [*(base.versions[name] for name in SPECS), 0]
    assert after[0].adapter_version == before[0].adapter_version + 1


def test_an_adapter_added_later_is_sampled_from():
    base = team_base()
    engine = LocalEngine(base, decoding="lean")
    add_random_adapter(base, "late", rank=3, seed=9)
    found = engine.generate([Request(prompt(7), "late", GREEDY, seed=0)])
    assert_same(found, LocalEngine(base, decoding="expanded").generate([Request(prompt(7), "late", GREEDY, seed=0)]))


def test_generating_and_training_do_not_disturb_each_other():
    base = team_base()
    engine = LocalEngine(base)
    requests = [Request(prompt(6, seed=i), NAMES[i % 3], SamplingParams(4), seed=i) for i in range(6)]
    with torch.inference_mode():
        inside = engine.generate(requests)
    assert inside == engine.generate(requests)
    ids = torch.tensor([r.prompt_ids for r in requests])
    index = torch.tensor([base.adapter_index(r.adapter) for r in requests])
    for train in (None, ["solver"]):
        base.forward(ids, None, index, train=train).sum().backward()
    assert all(p.grad is not None for p in base.adapter_parameters("solver"))
    assert engine.generate(requests) == inside


@pytest.mark.slow
def test_a_model_that_the_lean_decoder_does_not_cover_goes_through_its_own_forward():
    """An architecture of another kind altogether."""
    import transformers

    shape = {"vocab_size": 100, "bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(**shape, n_embd=32, n_layer=2, n_head=4, n_positions=64)
    ).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3.0)
    prompts = [prompt(n, seed=n) for n in (3, 20, 9)]
    expected = []
    for ids in prompts:
        given = torch.tensor([ids])
        out = model.generate(given, attention_mask=torch.ones_like(given), max_new_tokens=20, do_sample=False)
        expected.append(out[0, len(ids) :].tolist())
    base = SharedBase(model, tiny_tokenizer())
    engine = LocalEngine(base, eos_ids=())
    assert engine.decoding == "expanded"
    assert [c.ids for c in engine.generate([Request(ids, None, GREEDY, seed=0) for ids in prompts])] == expected
    with pytest.raises(ConfigError, match="lean"):
        LocalEngine(base, decoding="lean")


@pytest.mark.parametrize("kind", ["mistral", "gemma3", "qwen2"])
@torch.no_grad()
def test_states_within_a_window_equal_the_models_own(kind):
    """Two prompts of three rows, decoded past the window; the third family has windows from its second layer on."""
    changes = {"use_sliding_window": True, "sliding_window": 12, "max_window_layers": 1} if kind == "qwen2" else {}
    base = tiny_base(kind, **changes)
    model = LeanModel(base)
    windows = {"mistral": [12, 12], "gemma3": [12, None], "qwen2": [None, 12]}
    assert [block.window for block in model.blocks] == windows[kind]
    tokens, lengths, owner = random_ids(3, 40, seed=3), (20, 6), torch.tensor([0, 0, 1])
    _, kv = kv_cache.prefill(base, [tokens[0, :20].tolist(), tokens[2, :6].tolist()], [-1, -1])
    tokens[1, :20] = tokens[0, :20]
    expected = base.inner(input_ids=tokens, use_cache=False).last_hidden_state
    decoder = lean_decoder.LeanDecoder(model, kv, owner, [None] * 3, 20)
    for step in range(20):
        place = torch.tensor([lengths[prompt_of] + step for prompt_of in owner.tolist()])
        found = decoder.step(tokens[torch.arange(3), place])
        torch.testing.assert_close(found, expected[torch.arange(3), place], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", ["gemma2", "gemma3"])
def test_gemma_decodes_lean_in_bfloat16(kind):
    base = tiny_base(kind)
    base.model.to(torch.bfloat16)
    model = LeanModel(base)
    assert model.blocks[0].norm_in.dtype == torch.float32 and agrees(model)


@pytest.mark.parametrize(
    ("kind", "changes", "reason"),
    [
        ("gemma3", {"use_bidirectional_attention": True}, "later tokens"),
        ("gemma3", {"attn_logit_softcapping": 50.0}, "capped"),
        ("qwen3", {"layer_types": ["full_attention", "chunked_attention"]}, "chunked"),
    ],
)
def test_attention_of_another_kind_is_not_decoded_lean(kind, changes, reason):
    base = tiny_base(kind)
    for name, value in changes.items():
        setattr(base.config, name, value)
    with pytest.raises(ValueError, match=reason):
        LeanModel(base)


def test_a_mixture_of_experts_decodes_lean_as_its_own_forward_does():
    import transformers

    torch.manual_seed(0)
    shape = {"vocab_size": 110, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 8}
    model = transformers.Qwen3MoeForCausalLM(
        transformers.Qwen3MoeConfig(
            **shape,
            num_key_value_heads=2,
            intermediate_size=64,
            moe_intermediate_size=16,
            num_experts=6,
            num_experts_per_tok=2,
            mlp_only_layers=[1],
            max_position_embeddings=256,
            pad_token_id=0,
            eos_token_id=1,
        )
    ).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(5.0)
    base = SharedBase(model, tiny_tokenizer(), "tiny-moe")
    add_random_adapter(base, "solver", targets=("q_proj", "v_proj", "down_proj"), seed=3)
    greedy = SamplingParams(12, temperature=0.0)
    asked = [Request(prompt(n, seed=n), name, greedy, 0) for n in (3, 20, 9) for name in ("solver", None)]
    asked += [Request(prompt(7, seed=7), "solver", SamplingParams(12), seed) for seed in range(3)]
    found, expected = (LocalEngine(base, decoding=decoding).generate(asked) for decoding in DECODINGS)
    assert_same(found, expected)


def test_a_model_that_computes_something_else_is_noticed_at_the_start():
    base = team_base()
    base.inner.layers[0].mlp.register_forward_hook(lambda module, inputs, output: 1.1 * output)
    engine = LocalEngine(base)
    assert engine.decoding == "expanded"
    with pytest.raises(ConfigError, match="differ"):
        LocalEngine(base, decoding="lean")


@pytest.mark.parametrize("error", [IndexError("too many indices"), AttributeError("no rotary_emb")])
def test_a_check_that_ends_in_an_error_means_that_the_model_decodes_as_it_is(error, monkeypatch, caplog):
    def fails(*_):
        raise error

    requests = [Request(prompt(6), name, SamplingParams(5), seed=3) for name in NAMES[:2]]
    wanted = LocalEngine(team_base(), decoding="expanded").generate(requests)
    caplog.set_level("INFO")
    monkeypatch.setattr(lean_decoder, "agrees", fails)
    engine = LocalEngine(team_base())
    assert engine.decoding == "expanded" and f"its check ended in {type(error).__name__}: {error}" in caplog.text
    assert_same(engine.generate(requests), wanted)
    error = torch.cuda.OutOfMemoryError("CUDA out of memory")
    with pytest.raises(torch.cuda.OutOfMemoryError):
        LocalEngine(team_base())


def test_weights_written_after_the_engine_was_made_are_used():
    base = tiny_base()
    engine = LocalEngine(base, decoding="lean")
    with torch.no_grad():
        base.inner.layers[0].self_attn.q_proj.weight.mul_(-1)
    request = Request(prompt(9), None, GREEDY, seed=0)
    assert_same(engine.generate([request]), LocalEngine(base, decoding="expanded").generate([request]))


def test_the_larger_models_way_without_copied_weights_gives_the_same(monkeypatch):
    base = team_base("qwen2")
    requests = mixed_requests(seed=6)
    expected = LocalEngine(base, decoding="lean").generate(requests)
    monkeypatch.setattr(lean_model, "FUSE_BYTES", 0)
    assert_same(LocalEngine(base, decoding="lean").generate(requests), expected)


@torch.no_grad()
def test_rows_that_are_taken_up_by_another_decoder_go_on_as_they_were():
    base = team_base()
    names = ["solver", "solver", "verifier", None]
    _, prompts = kv_cache.prefill(base, [prompt(9), prompt(4, seed=1), prompt(6, seed=2)], [0, 1, -1])
    tokens = random_ids(4, 6, seed=8)
    folded = []
    for model in (LeanDecoding(base), DecodeModel(base)):
        decoder = model.decoder(prompts, [0, 0, 1, 2], names, 20)
        for step in range(3):
            decoder.step(tokens[:, step])
        decoder.keep(torch.tensor([0, 2, 3]))
        folded.append(decoder.folded())
    # Either goes on from what the other has read.
    rest = [names[n] for n in (0, 2, 3)]
    some, other = (
        model.decoder(kv, [0, 1, 2], rest, 20)
        for model, kv in zip((DecodeModel(base), LeanDecoding(base)), folded, strict=True)
    )
    assert folded[0].lengths.tolist() == folded[1].lengths.tolist() == [12, 7, 9]
    for step in range(3, 6):
        given = tokens[[0, 2, 3], step]
        torch.testing.assert_close(some.step(given), other.step(given), atol=1e-4, rtol=1e-4)


def test_bfloat16_samples_with_the_logprobs_of_its_own_forward():
    base = team_base()
    base.model.to(torch.bfloat16)
    engine = LocalEngine(base)
    assert engine.decoding == "lean"
    for completion in engine.generate([Request(prompt(5), name, SamplingParams(8), seed=1) for name in NAMES]):
        assert len(completion.ids) == len(completion.logprobs) >= 1
        assert all(value <= 0 for value in completion.logprobs)


def deep_base(dtype: torch.dtype) -> SharedBase:
    """Twenty layers, over which the roundings of bfloat16 add up to several percent of the hidden state."""
    base = tiny_base(layers=20)
    for seed, name in enumerate(("a", "b")):
        add_random_adapter(base, name, rank=3, seed=seed)
    base.model.to(dtype)
    return base


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_deep_model_decodes_leanly_in_every_precision(dtype):
    assert LocalEngine(deep_base(dtype)).decoding == "lean"


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("wrong", ["attention's scale", "rotation", "head order", "adapter", "last layer"])
def test_an_error_in_the_lean_decoder_is_noticed_in_every_precision(monkeypatch, dtype, wrong):
    base = deep_base(dtype)
    with torch.no_grad():
        assert agrees(LeanModel(base))
        model = LeanModel(base)
        if wrong == "attention's scale":
            model.shape = model.shape._replace(scale=4.0 * model.shape.scale)
        elif wrong == "rotation":
            rotary = model.rotary
            monkeypatch.setattr(
                model,
                "rotary",
                lambda count: {kind: tuple(t[3:] for t in both) for kind, both in rotary(count + 3).items()},
            )
        elif wrong == "head order":
            qkv = model.blocks[7].qkv
            qkv.weights, qkv.packed = [weight.flip(0) for weight in qkv.weights], None
        elif wrong == "adapter":
            given = model.joined
            monkeypatch.setattr(model, "joined", lambda names: given([*names[1:], *names[:1]]))
        else:
            down = model.blocks[19].feed[1]
            down.weights, down.packed = [-weight for weight in down.weights], None
        assert not agrees(model)


def test_a_write_to_a_norm_is_noticed():
    model = LeanModel(deep_base(torch.float32))
    assert not model.stale
    with torch.no_grad():
        model.base.inner.norm.weight.mul_(2.0)
    assert model.stale


@pytest.mark.parametrize("kind", KINDS)
def test_requests_that_join_a_running_batch_get_the_answers_they_get_alone(kind):
    engine = LocalEngine(team_base(kind), decoding="lean", eos_ids=())
    requests = dict(enumerate(mixed_requests()))
    waves = [dict(list(requests.items())[first : first + 6]) for first in range(0, 24, 6)]
    batch, found, widest = engine.begin(waves.pop(0)), {}, 0
    for step in itertools.count():
        if not batch.live and not waves:
            break
        if waves and step % 3 == 2:
            engine.join(batch, waves.pop(0))
        widest = max(widest, batch.live)
        found.update(engine.step(batch))
    assert widest > 6  # rows of several waves ran side by side
    assert_same([found[number] for number in range(24)], engine.generate(list(requests.values())))
