"""Families of models that transformers loads: tiny random ones learn, agree with `generate`, and go home to PEFT.

`python tests/models/test_families.py` walks all of them and writes the table of bench/results/families.md (with names:
their rows); here is a sample.
"""

from __future__ import annotations

import logging
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers_families import VOCAB, model_types, tiny, whole, whole_types
from helpers_models import tiny_base, tiny_model, tiny_tokenizer

from mafrt.config.agent import LoraSpec
from mafrt.core.errors import CheckpointError, ConfigError, ModelError
from mafrt.core.types import Request, SamplingParams
from mafrt.engines.local.engine import LocalEngine
from mafrt.engines.local.own_cache import ModelCachePrompts
from mafrt.models import family_checks
from mafrt.models.shared_base import SharedBase

pytestmark = pytest.mark.takes(slow=20)

DOCS = Path(__file__).parents[2] / "bench" / "results" / "families.md"
BEGIN, END = "<!-- families: begin -->\n", "<!-- families: end -->"
WHOLE = {"begin": "<!-- whole: begin -->\n", "end": "<!-- whole: end -->"}
MOST_NUMBERS = 10**8
"""A model that is larger is not tiny."""
AGENTS = ("ann", "bob")
SAMPLE = (
    "deepseek_v3", "gemma3_text", "glm4_moe", "gpt2", "gpt_oss", "laguna", "lfm2", "llama4_text", "mamba", "nemotron_h",
    "phi3", "qwen3_5_text", "qwen3_next", "stablelm",
)  # fmt: skip


def base_of(model_type: str, make: Callable[[str], Any] = tiny) -> SharedBase:
    """A base with two adapters of default settings."""
    base = SharedBase(make(model_type), tiny_tokenizer(), model_type)
    for seed, name in enumerate(AGENTS):
        base.add_adapter(name, LoraSpec(), seed=seed)
    return base


def differ(base: SharedBase) -> None:
    """Give the adapters weights that change the answers."""
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name in AGENTS:
            for _, b in base.adapter_layers(name).values():
                b.copy_(0.1 * torch.randn(b.shape, generator=draw))
            base.bump(name)


def requests(ids: list[int], temperature: float) -> list[Request]:
    """Prompts of three lengths, answers that end at different times."""
    cases = [(length, name) for length in (5, 9, 11) for name in (*AGENTS, None)]
    return [
        Request(ids[:length], name, SamplingParams(max_new_tokens=3 + number % 4, temperature=temperature), number)
        for number, (length, name) in enumerate(cases)
    ]


def walk(model_type: str, folder: Path, make: Callable[[str], Any] = tiny) -> dict[str, Any]:
    """What a family can do with default settings. Raises what goes wrong."""
    base = base_of(model_type, make)
    engine = LocalEngine(base, eos_ids=())
    ids = torch.randint(5, VOCAB, (11,), generator=torch.Generator().manual_seed(0)).tolist()
    # New adapters change nothing yet: greedy answers are the model's own.
    plain = _without_cache(model_type, make)
    greedy = requests(ids, 0.0)[-3]
    [answer] = engine.generate([greedy])
    with torch.no_grad():
        logits = plain(input_ids=torch.tensor([[*greedy.prompt_ids, *answer.ids]])).logits[0].float()
    assert logits[len(greedy.prompt_ids) - 1 : -1].argmax(-1).tolist() == list(answer.ids), "greedy answers differ"
    differ(base)
    asked = requests(ids, 1.0)
    answers = engine.generate(asked)
    rows = [[*request.prompt_ids, *answer.ids] for request, answer in zip(asked, answers, strict=True)]
    padded, real = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.long), torch.zeros(0)
    real = torch.zeros_like(padded)
    for number, row in enumerate(rows):
        padded[number, : len(row)], real[number, : len(row)] = torch.tensor(row), 1
    index = torch.tensor([base.adapter_index(request.adapter) for request in asked])
    states = base.forward(padded, real, index)
    total, worst = torch.zeros(()), 0.0
    for number, (request, answer) in enumerate(zip(asked, answers, strict=True)):
        at = len(request.prompt_ids) - 1
        found, _ = base.token_logprobs(states[number, at : at + len(answer.ids)], torch.tensor(answer.ids))
        worst = max(worst, float((found.detach() - torch.tensor(answer.logprobs)).abs().max()))
        total = total + found.sum()
    assert worst < 1e-4, f"play and learning differ by {worst:.1e} nats"
    total.backward()
    for name in AGENTS:
        grads = [p.grad for p in base.adapter_parameters(name)]
        assert any(grad is not None and grad.abs().max() > 0 for grad in grads), "an adapter gets no gradient"
    home = _at_home(_without_cache(model_type, make), base, padded[-1:, :11], folder)
    assert home < 1e-4, f"PEFT computes log-probabilities that differ by {home:.1e} nats"
    layers = {family_block(path) for path in base.adapter_layers("ann")}
    return {
        "play": engine.decoding,
        "learn": "packed" if base.packs else "continued" if base.continues else "padded",
        "layers": sorted(layers),
        "left": base.left_out(base.adapter_layers("ann")),
    }


def family_block(path: str) -> str:
    """The kind of a layer: the end of its path, with `experts` before it where it is one of theirs."""
    holder, last = path.rsplit(".", 2)[-2:]
    return f"experts.{last}" if holder == "experts" else last


def _without_cache(model_type: str, make: Callable[[str], Any]) -> Any:
    model = make(model_type)
    model.config.use_cache = False  # xLSTM's cannot be filled
    return model


def _at_home(plain: Any, base: SharedBase, ids: torch.Tensor, folder: Path) -> float:
    """Largest difference of a log-probability in PEFT."""
    from peft import PeftModel

    base.save_adapter("ann", folder)
    theirs = PeftModel.from_pretrained(plain, folder).eval()
    with torch.no_grad():
        expected = theirs(input_ids=ids).logits.float().log_softmax(-1)
        ours = base.logits(base.forward(ids, None, torch.tensor([0]))).float().log_softmax(-1)
    return float((expected - ours).abs().max())


@pytest.mark.slow
@pytest.mark.cases(14)
@pytest.mark.parametrize("model_type", SAMPLE)
def test_a_family_learns_with_default_settings(model_type, tmp_path):
    found = walk(model_type, tmp_path / "ann")
    assert found["layers"]
    again = base_of(model_type)
    again.load_adapter("ann", tmp_path / "ann")  # our own folders can be read again


@pytest.mark.slow
@pytest.mark.cases(6)
@pytest.mark.parametrize(
    "model_type", ["glm4v", "granite_speech", "idefics3", "kimi_k25", "qwen2_5_vl", "qwen3_vl_moe"]
)
def test_the_text_of_a_model_that_reads_images_or_sound_learns_with_default_settings(model_type, tmp_path):
    assert walk(model_type, tmp_path / "ann", whole)["layers"]


@pytest.mark.parametrize("model_type", ["blip", "blip-2"])
def test_a_model_that_writes_no_text_alone_is_refused(model_type):
    with pytest.raises(ModelError, match=r"cannot read text alone: found (no output layer|.*pixel_values)"):
        SharedBase(whole(model_type), tiny_tokenizer(), model_type)


@pytest.mark.slow
def test_ways_of_decoding_agree_with_each_other():
    """Rows that leave at different times, prompts of unequal length, an adapter each."""
    base = tiny_base()
    for seed, name in enumerate(AGENTS):
        base.add_adapter(name, LoraSpec(), seed=seed)
    differ(base)
    asked = requests(list(range(20, 31)), 1.0)
    expected = LocalEngine(base, eos_ids=()).generate(asked)
    for cached, aligned in ((True, True), (True, False), (False, False)):
        engine = LocalEngine(base, eos_ids=(), decoding="expanded")
        engine.transcripts = ModelCachePrompts(base, cached, aligned)
        assert engine.decoding == ("own cache" if cached else "no cache")
        found = engine.generate(asked)
        assert [each.ids for each in found] == [each.ids for each in expected]
        for one, other in zip(found, expected, strict=True):
            assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)


OWN_CACHE = (
    "qwen3_5_text",
    *(pytest.param(n, marks=pytest.mark.slow) for n in ("deepseek_v3", "doge", "lfm2", "rwkv")),
)
"""recurrence beside attention; compressed keys; the same in a window; convolutions; a cache that is not known"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["mamba2", "lfm2", "qwen3_moe"])
def test_a_base_in_half_precision_plays_and_learns(kind):
    """Some keep their states in float32, whatever the number format of their output layer is."""
    base = SharedBase(tiny(kind).to(torch.bfloat16), tiny_tokenizer(), kind)
    for seed, name in enumerate(AGENTS):
        base.add_adapter(name, LoraSpec(), seed=seed)
    ids = torch.randint(5, VOCAB, (2, 11), generator=torch.Generator().manual_seed(3))
    made = LocalEngine(base, eos_ids=()).generate(requests(ids[0].tolist(), 1.0))
    assert all(len(each.ids) == len(each.logprobs) for each in made)
    hidden = base.forward(ids, None, torch.tensor([0, 1]))
    assert hidden.dtype == torch.bfloat16
    base.token_logprobs(hidden[:, :-1].flatten(0, 1), ids[:, 1:].flatten())[0].sum().backward()
    assert all(any(p.grad is not None for p in base.adapter_parameters(name)) for name in AGENTS)


@pytest.mark.slow
@pytest.mark.parametrize("model_type", OWN_CACHE)
@pytest.mark.parametrize("invocation", [None, (21, 22)])
def test_rows_join_and_leave_a_batch_of_the_models_own_cache(model_type, invocation):
    base = SharedBase(tiny(model_type), tiny_tokenizer(), model_type)
    for seed, name in enumerate(AGENTS):
        layers = dict.fromkeys(base.match_targets(name, ["all-linear"]), (4, 2.0))
        base.place_adapter(name, 4, 8, layers, seed=seed, invocation=invocation)
    differ(base)
    asked = dict(enumerate(requests([20, 19, 21, 22, 20, 23, 21, 22, 30, 31, 32], 1.0)))
    engine, plain = LocalEngine(base, eos_ids=()), LocalEngine(base, eos_ids=())
    plain.transcripts = ModelCachePrompts(base, cached=False)
    expected = plain.generate([*asked.values()])
    assert engine.decoding == ("no cache" if model_type == "rwkv" else "own cache")
    found = {}
    batch = engine.begin({n: asked[n] for n in range(4)})
    for wave in ((4, 5, 6), (7, 8), (), (), (), (), (), ()):
        found |= dict(engine.step(batch)) if batch.live else {}
        if wave:
            engine.join(batch, {n: asked[n] for n in wave})
    assert [found[n].ids for n in asked] == [each.ids for each in expected]
    for n, each in enumerate(expected):
        assert found[n].logprobs == pytest.approx(each.logprobs, abs=1e-4)


def test_a_model_that_reads_later_tokens_is_refused():
    import transformers

    shape = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.BertConfig(vocab_size=VOCAB, **shape)
    with pytest.raises(ModelError, match="no causal language model"):
        SharedBase(transformers.BertLMHeadModel(config).eval(), tiny_tokenizer(), "bert")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model_type", "changes"),
    [
        ("falcon_h1", {"lm_head_multiplier": 0.0390625}),
        ("hyperclovax", {"logits_scaling": 0.125}),
        ("recurrent_gemma", {"logits_soft_cap": 3.0}),
        ("nanochat", {"final_logit_softcapping": 2.0}),
    ],
)
def test_logits_are_scaled_and_capped_as_the_configuration_says_under_any_name(model_type, changes):
    model = tiny(model_type, **changes)
    ids = torch.randint(5, VOCAB, (1, 11), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        expected = model(input_ids=ids).logits.log_softmax(-1)
        base = SharedBase(model, tiny_tokenizer(), model_type)
        found, _ = base.token_logprobs(base.forward(ids, None, torch.tensor([-1]))[0, :-1], ids[0, 1:])
    torch.testing.assert_close(found, expected[0, :-1].gather(1, ids[0, 1:, None])[:, 0], atol=1e-4, rtol=1e-4)


def test_a_known_family_that_is_set_to_read_both_ways_is_refused():
    with pytest.raises(ModelError, match="no causal language model"):
        SharedBase(tiny("gemma3_text", use_bidirectional_attention=True), tiny_tokenizer(), "gemma3")


@pytest.mark.parametrize("changes", [{"use_bidirectional_attention": True}, {"is_causal": False}])
def test_one_in_8_bits_is_refused_by_its_configuration(changes):
    model = tiny("gemma3_text", **changes)
    model.is_quantized = True  # rounding by columns hides what later tokens change
    with pytest.raises(ModelError, match="no causal language model"):
        SharedBase(model, tiny_tokenizer(), "gemma3")


def test_a_model_that_cannot_fill_its_own_cache_reads_every_row_anew():
    base = SharedBase(tiny("xlstm"), tiny_tokenizer(), "xlstm")
    assert LocalEngine(base, eos_ids=()).decoding == "no cache"


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["phi3", "llama"])
def test_a_row_computes_the_same_whatever_the_length_of_its_neighbours(kind):
    """LongRoPE has two sets of angles, and the longest row of a batch would choose for all."""
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 16}
    rope |= {"short_factor": [1.0] * 8, "long_factor": [1.0, 2.0, 3.0, 5.0] * 2}
    base = SharedBase(tiny(kind, max_position_embeddings=64, rope_parameters=rope), tiny_tokenizer(), kind)
    longest = base.context_window
    ids = torch.randint(5, VOCAB, (2, longest), generator=torch.Generator().manual_seed(2))
    real = torch.ones_like(ids)
    real[0, 8:] = 0
    both = base.forward(ids, real, torch.tensor([-1, -1]))
    torch.testing.assert_close(both[0, :8], base.forward(ids[:1, :8], None, torch.tensor([-1]))[0], atol=1e-4, rtol=0)
    torch.testing.assert_close(both[1], base.forward(ids[1:], None, torch.tensor([-1]))[0], atol=1e-4, rtol=0)


def test_a_model_whose_backward_pass_leaves_adapters_out_is_refused():
    with pytest.raises(ModelError, match="no gradient reaches"):
        SharedBase(tiny("reformer"), tiny_tokenizer(), "reformer")


@pytest.mark.slow
def test_layers_are_stored_under_the_name_that_peft_finds(tmp_path):
    """It renames `shared_expert.` to `shared_experts.`, which its own pattern matches once more."""
    from peft import PeftModel

    spec = LoraSpec(targets=(r".*shared_experts\.(up|down)_proj",))
    base = SharedBase(tiny("laguna"), tiny_tokenizer(), "laguna")
    base.add_adapter("ann", spec, seed=0)
    base.add_adapter("bob", spec, seed=0)
    differ(base)
    base.save_adapter("ann", tmp_path / "ann")
    theirs = PeftModel.from_pretrained(tiny("laguna"), tmp_path / "ann").state_dict()
    for path, (a, b) in base.adapter_layers("ann").items():
        found = [value for key, value in theirs.items() if path in key.replace(".base_layer", "") and ".lora_" in key]
        assert sorted(float(value.detach().sum()) for value in found) == pytest.approx(
            sorted(float(p.detach().sum()) for p in (a, b))
        )
    base.load_adapter("bob", tmp_path / "ann")
    assert torch.equal(*(torch.cat([p.flatten() for p in base.adapter_parameters(name)]) for name in AGENTS))


def test_a_layer_that_peft_would_not_find_again_is_refused(monkeypatch):
    base = tiny_base()
    monkeypatch.setattr(type(base), "_stored", {"model.layers.0.self_attn.q_proj": ""})
    with pytest.raises(ConfigError, match="PEFT would read under another name"):
        base.add_adapter("ann", LoraSpec(targets=("q_proj",)), seed=0)


def test_a_folder_whose_layers_no_adapter_can_act_on_is_refused(tmp_path):
    base = tiny_base()
    base.add_adapter("ann", LoraSpec(targets=("q_proj",)), seed=0)
    base.save_adapter("ann", tmp_path)
    base.unrouted = frozenset(path for path in base.linear_paths() if path.endswith("0.self_attn.q_proj"))
    with pytest.raises(CheckpointError, match="adapts q_proj, on which no adapter acts here"):
        base.load_adapter("bob", tmp_path)
    assert "bob" not in base.adapters


def test_a_family_that_is_known_is_not_tried(monkeypatch):
    monkeypatch.setattr(family_checks, "_unrouted", lambda *_: pytest.fail("a pass that costs time"))
    assert SharedBase(tiny_model("llama"), tiny_tokenizer(), "llama").packs


@pytest.mark.parametrize(("begin", "end", "types"), [(BEGIN, END, model_types), (*WHOLE.values(), whole_types)])
def test_the_docs_name_every_family(begin, end, types):
    shown = DOCS.read_text(encoding="utf-8").split(begin)[1].split(end)[0]
    missing = [name for name in types() if f"| `{name}` |" not in shown]
    assert not missing, "bench/results/families.md is out of date; run: python tests/models/test_families.py"
    assert summary([line for line in shown.splitlines() if line.startswith("| `")]).strip() in shown


def row(name: str, folder: Path, make: Callable[[str], Any] = tiny) -> str:
    """The row of a family in the table."""
    try:
        numbers = sum(parameter.numel() for parameter in make(name).parameters())
    except Exception as error:
        said = str(error).strip().splitlines() or [type(error).__name__]
        return f"| `{name}` | - | - | | no tiny model of it could be made: {_short(said[0])} |"
    if numbers > MOST_NUMBERS:
        return f"| `{name}` | - | - | | no tiny model of it could be made: {numbers} numbers |"
    try:
        if make is whole:
            make(name).save_pretrained(folder / "base")
            tiny_tokenizer().save_pretrained(folder / "base")
            SharedBase.load(str(folder / "base"), device="cpu")
        found = walk(name, folder / name, make)
        cells = (found["play"], found["learn"], ", ".join(found["layers"]), ", ".join(found["left"]))
    except (ModelError, ConfigError) as error:
        cells = ("refused", "refused", "", _short(str(error).replace(str(folder / "base"), name)))
    except Exception as error:
        cells = ("fails", "fails", "", _short(f"{type(error).__name__}: {error}"))
    return f"| `{name}` | {' | '.join(cells)} |"


def state(line: str) -> str:
    """Whether a row's family is fast (lean and packed), general, refused, failing or not tried."""
    play, learn = (cell.strip() for cell in line.split("|")[2:4])
    if (play, learn) == ("lean", "packed"):
        return "fast"
    return {"-": "not tried", "refused": "refused", "fails": "fail"}.get(play, "general")


def summary(lines: list[str]) -> str:
    """How many families are in each state."""
    states = [state(line) for line in lines]
    counts = ", ".join(f"{states.count(each)} {each}" for each in ("fast", "general", "refused", "fail", "not tried"))
    return f"{len(lines)} families: {counts}.\n\n"


def _short(text: str) -> str:
    return " ".join(text.replace("|", "/").split())[:150]


HEAD = "| family | play | learn | layers with adapters | left out, or the reason |\n|---|---|---|---|---|\n"


def write(names: Sequence[str], begin: str, end: str, types: list[str], make: Callable[[str], Any]) -> None:
    """Make a table's rows of these names anew, or all where none is given."""
    page = DOCS.read_text(encoding="utf-8")
    lines = {line.split("`")[1]: line for line in page.split(begin)[1].split(end)[0].splitlines() if "`" in line}
    for each in [name for name in names if name in types] or ([] if names else types):
        with tempfile.TemporaryDirectory() as temporary:
            lines[each] = row(each, Path(temporary), make)
        print(lines[each], flush=True)
    made = summary([*lines.values()]) + HEAD + "".join(f"{lines[each]}\n" for each in sorted(lines))
    DOCS.write_text(page.split(begin)[0] + begin + made + end + page.split(end)[1], encoding="utf-8")


if __name__ == "__main__":  # python tests/models/test_families.py: an hour of one core
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    write(sys.argv[1:], BEGIN, END, model_types(), tiny)
    write(sys.argv[1:], *WHOLE.values(), whole_types(), whole)
