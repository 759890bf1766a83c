"""A budget of thought: the end of the thought is put in, the model reads it on, and nothing is learnt from it."""

from __future__ import annotations

import pytest
import torch
from helpers_models import tiny_base

from mafrt.config.agent import LoraSpec
from mafrt.config.team import Team
from mafrt.config.train_config import TrainConfig
from mafrt.core.errors import ConfigError
from mafrt.core.records import pack_turn, unpack_turn
from mafrt.core.types import Request, SamplingParams, Turn
from mafrt.engines.local.engine import LocalEngine
from mafrt.engines.local.own_cache import ModelCachePrompts
from mafrt.engines.local.thoughts import Thought, ThoughtMarks
from mafrt.runners.build import sampling_of
from mafrt.runners.checks import check_budget, check_sampler
from mafrt.training.batch import collate
from mafrt.training.token_scores import token_scores


@pytest.fixture(scope="module")
def base():
    base = tiny_base()
    base.add_adapter("ann", LoraSpec(), seed=0)
    with torch.no_grad():
        for _, b in base.adapter_layers("ann").values():
            b.copy_(0.1 * torch.randn(b.shape, generator=torch.Generator().manual_seed(1)))
    base.bump("ann")
    return base


def asked(base, text, budget, tokens=40, seed=0):
    how = SamplingParams(max_new_tokens=tokens, thinking_budget=budget)
    return Request(base.tokenizer.encode(text), "ann", how, seed)


def turn_of(request, answer):
    own = (answer.stop, answer.text, 0, 0, 0)
    return Turn("ann", list(request.prompt_ids), answer.ids, answer.logprobs, *own, forced=answer.forced)


def scored(base, turns):
    batch = collate(turns, lambda _: 0, base.pad_id, base.device)
    states = base.forward(batch.input_ids, batch.attention_mask, batch.adapter_index)
    return token_scores(base, batch, states.flatten(0, 1), {"ann": 1.0})


def test_a_thought_that_the_prompt_does_not_show_has_the_budget_too(base):
    config = TrainConfig.of(reasoning="on", thinking_budget=3, max_new_tokens=40)
    how = sampling_of(config, Team.of(("ann",)), "ann")
    [answer] = LocalEngine(base, eos_ids=()).generate([Request(base.tokenizer.encode("what?"), "ann", how, 0)])
    ending = ThoughtMarks(base.tokenizer).ending
    assert answer.forced == tuple(range(3, 3 + len(ending))) and tuple(answer.ids[3 : 3 + len(ending)]) == tuple(ending)


@pytest.mark.slow
@pytest.mark.parametrize("own_cache", [False, True])
def test_the_end_is_put_in_after_the_budget_and_the_model_reads_it_on(base, own_cache):
    engine, ending = LocalEngine(base, eos_ids=()), ThoughtMarks(base.tokenizer).ending
    if own_cache:
        engine.transcripts = ModelCachePrompts(base, True, True)
    free = asked(base, "what? <think>\n", 0)
    requests = [asked(base, "what? <think>\n", n) for n in (1, 3, 7)] + [asked(base, "what?", 3), free]
    *answers, plain, unlimited = engine.generate(requests)
    for answer, budget in zip(answers, (1, 3, 7), strict=True):
        places = tuple(range(budget, budget + len(ending)))
        assert answer.forced == places
        assert [answer.ids[place] for place in places] == ending
        assert [answer.logprobs[place] for place in places] == [0.0] * len(ending)
        assert answer.ids[:budget] == unlimited.ids[:budget]
        assert "</think>" in answer.text and len(answer.ids) == 40
    assert plain.forced == unlimited.forced == ()
    turns = [turn_of(request, answer) for request, answer in zip(requests, [*answers, plain, unlimited], strict=True)]
    found, _ = scored(base, turns)
    assert found.tolist() == pytest.approx([x for turn in turns for x in turn.logprobs], abs=1e-3)


def test_nothing_is_learnt_from_what_was_put_in(base):
    [answer] = LocalEngine(base, eos_ids=()).generate([request := asked(base, "what? <think>\n", 3)])
    logprobs, entropy = scored(base, [turn_of(request, answer)])
    forced = torch.tensor([place in answer.forced for place in range(len(answer.ids))])
    assert not logprobs[forced].any() and not entropy[forced].any()
    assert (logprobs[~forced] < 0).all() and (entropy[~forced] > 0).all()
    (logprobs[forced].sum() + entropy[forced].sum()).backward()
    assert all(p.grad is None or not p.grad.any() for p in base.adapter_parameters("ann"))


def test_equal_answers_of_which_one_was_put_in(base):
    """They are one row, and its tokens are scored for each turn."""
    [answer] = LocalEngine(base, eos_ids=()).generate([request := asked(base, "what? <think>\n", 3)])
    one = turn_of(request, answer)
    other = unpack_turn({**pack_turn(one), "forced": []})
    both, _ = scored(base, [one, other])
    first, second = both.split(len(answer.ids))
    assert not first[list(answer.forced)].any() and second[list(answer.forced)].all()


class Letters:
    """A tokenizer of single characters, with single tokens for the marks of a thought or without."""

    def __init__(self, *marks):
        self.words = [*marks, *map(chr, range(128))]
        self.all_special_tokens, self.all_special_ids = list(marks), list(range(len(marks)))
        self.added_tokens_decoder: dict = {}

    def decode(self, ids, skip_special_tokens=False):
        return "".join(self.words[i] for i in ids)

    def ids(self, text):
        found = []
        while text:
            word = next(word for word in self.words if text.startswith(word))
            found.append(self.words.index(word))
            text = text[len(word) :]
        return found


@pytest.mark.parametrize("marks", [(), ("<think>", "</think>")])
@pytest.mark.parametrize(("prompt", "answer", "budget", "ended"), [
    ("<think>\n", "abcdef", 4, "abcd|"),
    ("<think>\n", "ab</think>cdefghijklmnopqrstuvwxyz", 14, "ab</think>cdefghijklmnopqrstuvwxyz"),
    ("", "no thought here at all", 3, "no thought here at all"),
    ("", "so <think>abcdefgh", 3, "so <think>abc|"),
    ("<think>x</think>", "abcdefgh", 3, "abcdefgh"),
    ("<think>ab</think>", "say <think>abcd", 2, "say <think>ab|"),
])  # fmt: skip
def test_where_a_thought_is(marks, prompt, answer, budget, ended, monkeypatch):
    letters = Letters(*marks)
    monkeypatch.setattr("mafrt.engines.local.thoughts.encode_outside", lambda tokenizer, text, own: letters.ids(text))
    thought, ids = Thought(ThoughtMarks(letters), letters.ids(prompt), budget), []
    for token in letters.ids(answer):
        if thought.next is not None:
            break
        ids.append(token)
        thought.take(ids)
    assert letters.decode(ids) + ("|" if thought.next is not None else "") == ended
    put = []
    while (token := thought.next) is not None:
        put.append(token)
        ids.append(token)
        thought.take(ids)
    assert letters.decode(put) == ("\n</think>\n\n" if ended.endswith("|") else "")


GPT_OSS = "<|channel|>analysis<|message|>", "<|end|><|start|>assistant"


@pytest.mark.parametrize(("template", "answer", "budget", "ended", "put"), [
    ("<seed:think>", "<seed:think>abcdef", 3, "<seed:think>abc", "</seed:think>"),
    ("<seed:think>", "<seed:think>ab</seed:think>cdefgh", 20, "<seed:think>ab</seed:think>cdefgh", ""),
    ("<seed:think>", "<think>abcdef", 3, "<think>abcdef", ""),
    ("[THINK]", "[THINK]abcdef", 3, "[THINK]abc", "[/THINK]"),
    ("<|START_THINKING|>", "<|START_THINKING|>abcdef", 3, "<|START_THINKING|>abc", "<|END_THINKING|>"),
    ("<|channel>thought", "<|channel>thoughtabcdef", 3, "<|channel>thoughtabc", "\n<channel|>"),
    ("<|inner_prefix|>", "<|inner_prefix|>abcdef", 3, "<|inner_prefix|>abc", "<|inner_suffix|>"),
    ("<|open|>think<|sep|>", "<|open|>think<|sep|>abcd", 3, "<|open|>think<|sep|>abc", "<|close|>think<|sep|>"),
    (GPT_OSS[0], f"{GPT_OSS[0]}abcdef", 3, f"{GPT_OSS[0]}abc", GPT_OSS[1]),
    # After a first thought the channel is the model's choice; a second one is ended for good.
    (GPT_OSS[0], f"{GPT_OSS[0]}abc{GPT_OSS[1]}{GPT_OSS[0]}d", 3, f"{GPT_OSS[0]}abc{GPT_OSS[1]}{GPT_OSS[0]}",
     f"{GPT_OSS[1]}<|channel|>final<|message|>"),
])  # fmt: skip
def test_a_thought_is_ended_as_the_template_writes_it(template, answer, budget, ended, put, monkeypatch):
    marks = ("<|START_THINKING|>", "<|END_THINKING|>", "<|channel|>", "<|message|>", "<|end|>", "<|start|>")
    letters = Letters(
        *marks, "<|inner_prefix|>", "<|inner_suffix|>", "<|channel>", "<channel|>", "<|open|>", "<|close|>", "<|sep|>"
    )
    letters.chat_template = "{{ x }}" + template
    monkeypatch.setattr("mafrt.engines.local.thoughts.encode_outside", lambda tokenizer, text, own: letters.ids(text))
    thought, ids, forced = Thought(ThoughtMarks(letters), [], budget), [], []
    for token in letters.ids(answer):
        if thought.next is not None and thought.next != token:
            break
        ids.append(token)
        thought.take(ids)
    assert letters.decode(ids) == ended
    while (token := thought.next) is not None:
        forced.append(token)
        ids.append(token)
        thought.take(ids)
    assert letters.decode(forced) == put


def test_a_record_has_the_places_where_there_are_any():
    turn = Turn("ann", [1], [2, 3], [-0.1, 0.0], "eos", "x", 0, 0, 0, forced=(1,))
    assert unpack_turn(pack_turn(turn)) == turn
    turn.forced = ()
    assert "forced" not in pack_turn(turn) and unpack_turn(pack_turn(turn)) == turn


def test_a_budget_that_cannot_be_kept_is_refused(base):
    with pytest.raises(ConfigError, match="thinking_budget is 5, but engine other"):
        check_budget(TrainConfig.of(thinking_budget=5, engine="other:Engine"))
    with pytest.raises(ConfigError, match="thinking_budget is 5, but engine vllm"):
        check_sampler(
            TrainConfig.of(thinking_budget=5, engine="vllm", vllm_servers=("http://localhost:1",)), Team.of(["a"]), ""
        )
    with pytest.raises(ConfigError, match="thinking_budget"):
        TrainConfig.of(thinking_budget=-1)
    with pytest.raises(ConfigError, match="thinking_budget=-1"):
        LocalEngine(base).generate([asked(base, "x", -1)])
