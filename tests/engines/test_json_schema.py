"""Answers that must fit a JSON schema: the engine's samples, a served team in all three APIs, and the refusals."""

from __future__ import annotations

import json
import math
from concurrent.futures import Future
from typing import Literal

import anthropic
import pytest
import torch
from helpers_extras import need
from helpers_models import tiny_base
from openai import BadRequestError, OpenAI
from pydantic import BaseModel
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from mafrt.config.agent import LoraSpec
from mafrt.config.team import AgentSpec, Team
from mafrt.core.errors import ConfigError
from mafrt.core.types import Completion, Request, SamplingParams
from mafrt.engines.local.engine import LocalEngine
from mafrt.engines.local.grammar import Grammars
from mafrt.engines.requests import check_requests
from mafrt.environment.chat_api.completions import Completions
from mafrt.environment.chat_api.protocol import ApiError, ChatCall, ChatReply, parts_of
from mafrt.environment.chat_api.server import ChatServer
from mafrt.environment.registry import make_env
from mafrt.models.shared_base import SharedBase
from mafrt.runners.build import voices_of
from mafrt.scripts.serving.answers import TeamAnswers, _pass_on
from mafrt.scripts.serving.engine_queue import EngineQueue
from mafrt.scripts.serving.trained_team import TrainedTeam

need("llguidance")

TEAM = Team((AgentSpec("actor", prompt="Solve."),))
ASK = [{"role": "user", "content": "2+2"}]


class Move(BaseModel):
    """A move of a game."""

    model_config = {"extra": "forbid"}
    piece: Literal["king", "rook"]
    takes: bool
    steps: list[Literal[1, 2]]


@pytest.fixture(scope="module")
def base():
    base = SharedBase.load("teaching-base")
    base.add_adapter("actor", LoraSpec(), seed=0)
    return base


@pytest.fixture(scope="module")
def served(base):
    sampling = {"actor": SamplingParams(max_new_tokens=120)}
    team = TrainedTeam(TEAM, base, EngineQueue(LocalEngine(base)), sampling, voices_of(base, TEAM, None), "auto")
    answers = TeamAnswers()
    answers.ready(team, None)
    server = ChatServer(answers)
    with OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0, timeout=60) as client:
        yield server, team, client
    server.close()
    team.close()


def request(base, seed, **how):
    ids = base.tokenizer.encode("2 + 2 =", add_special_tokens=False)
    return Request(ids, None, SamplingParams(**{"max_new_tokens": 60, **how}), seed)


# ---------------------------------------------------------------------------------------------------------- the engine


@pytest.mark.parametrize(
    ("schema", "fits"),
    [
        ({"enum": ["yes", "no"]}, lambda value: value in ("yes", "no")),
        ({"type": "boolean"}, lambda value: isinstance(value, bool)),
        ({"type": "integer", "minimum": 3, "maximum": 7}, lambda value: 3 <= value <= 7),
        ({"type": "string", "maxLength": 4}, lambda value: len(value) <= 4),
        ({"type": "string", "pattern": "^[ab]{2}$"}, lambda value: set(value) <= {"a", "b"} and len(value) == 2),
        ({"const": {"é": None}}, lambda value: value == {"é": None}),
        (
            {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 2},
            lambda value: 1 <= len(value) <= 2,
        ),
        (
            {
                "type": "object",
                "properties": {"a": {"$ref": "#/$defs/x"}},
                "required": ["a"],
                "additionalProperties": False,
                "$defs": {"x": {"anyOf": [{"type": "null"}, {"type": "boolean"}]}},
            },
            lambda value: value.keys() == {"a"} and value["a"] in (None, True, False),
        ),
    ],
    ids=lambda each: json.dumps(each)[:40] if isinstance(each, dict) else "",
)
def test_samples_fit_the_schema(base, schema, fits):
    engine, said = LocalEngine(base), json.dumps(schema)
    asked = [request(base, seed, schema=said, temperature=t) for seed in range(4) for t in (0.0, 1.0, 3.0)]
    for made in engine.generate(asked):
        assert made.stop == "eos" and fits(json.loads(made.text))


def test_log_probabilities_are_those_of_the_barred_distribution(base):
    """Of each token: its logit among those of the tokens that the grammar leaves."""
    words = {"type": "string", "enum": ["a", "b"]}
    [made] = LocalEngine(base).generate([request(base, 1, schema=json.dumps(words))])
    prompt = list(request(base, 1).prompt_ids)
    both = [base.tokenizer.encode(text, add_special_tokens=False) for text in ('"a"', '"b"')]
    assert [len(ids) for ids in both] == [3, 3] and made.ids[:3] in both
    chosen = both.index(made.ids[:3])
    opened = both[0][:1]
    states = base.forward(torch.tensor([prompt + opened]), None, torch.tensor([base.adapter_index(None)]))
    scores, _ = base.token_logprobs(states[0, -1:].repeat(2, 1), torch.tensor([ids[1] for ids in both]))
    scores = scores.tolist()
    expected = scores[chosen] - math.log(sum(map(math.exp, scores)))
    assert made.logprobs == pytest.approx([0.0, expected, 0.0, 0.0], abs=1e-4)
    assert SamplingParams(schema="{}").truncated


def test_neighbours_are_not_touched(base):
    engine = LocalEngine(base)
    [alone] = engine.generate([request(base, 5)])
    both = engine.generate([request(base, 3, schema='{"type": "boolean"}'), request(base, 5)])
    assert (both[1].ids, both[1].logprobs) == (alone.ids, pytest.approx(alone.logprobs, abs=1e-5))
    assert json.loads(both[0].text) in (True, False)


@pytest.mark.parametrize(
    "schema",
    [
        '{"not": {"type": "string"}}',
        '{"type": "array", "uniqueItems": true}',
        '{"$ref": "#/nothing"}',
        '{"$ref": "http://127.0.0.1:1/x"}',
        '{"type": "frog"}',
        '{"type": "string", "pattern": "(?=a)b"}',
        '{"type": "string", "pattern": "("}',
        '{"if": {}, "then": {}}',
        '{"allOf": [{"type": "string"}, {"type": "integer"}]}',
        '{"type": "object", "propertyNames": {"pattern": "a"}}',
        '{"type": "string", "format": "zip"}',
        '{"enum": []}',
        '{"type": "array", "minItems": 1000000000}',
        '{"items": [{"type": "string", "maxLength": 1e9}]}',
        '{"properties": []}',
        '{"type": "string", "minLength": 5, "maxLength": 2}',
        '{"type": "string", "type": "integer"}',
        '{"$ref": "#"}',
        '{"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}',
        '{"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"], "additionalProperties": false}',
        pytest.param(
            json.dumps(
                {
                    "type": "object",
                    "properties": {f"p{place}": {} for place in range(800)},
                    "additionalProperties": False,
                }
            ),
            id="many optional",
        ),
        '{"type": "string", "pattern": "^a{1000000}$"}',
        '{"type": "integer", "minimum": 1000000000000000000000000000000}',
        '{"type": "integer", "exclusiveMaximum": -1e30}',
        '{"type": "array", "uniqueItems": true, "x-guidance": {"lenient": true}}',
        pytest.param('{"items":' * 980 + "{}" + "}" * 980, id="deep"),
        pytest.param('{"items":' * 6000 + "{}" + "}" * 6000, id="deeper"),
        "[]",
        "7",
        "{",
    ],
)
def test_schemas_that_no_grammar_covers_get_a_sentence(base, schema):
    with pytest.raises(ConfigError, match="no grammar covers this JSON schema") as error:
        LocalEngine(base).generate([request(base, 1, schema=schema)])
    assert "\n" not in str(error.value)


def test_engines_and_bases_that_cannot_say_so(base):
    asked = request(base, 1, schema='{"type": "boolean"}')
    with pytest.raises(ConfigError, match="only the local engine takes"):
        check_requests(base, 100, [asked])
    with pytest.raises(ConfigError, match="a token that ends it") as no_end:
        LocalEngine(base, eos_ids=()).generate([asked])
    tiny = tiny_base()
    with pytest.raises(ConfigError, match="tokenizer") as unknown:
        LocalEngine(tiny).generate([Request([5, 6], None, asked.sampling, 1)])
    assert not any("no grammar covers" in str(error.value) for error in (no_end, unknown))  # the schema is not at fault


def test_a_vocabulary_without_the_characters_of_json_is_named(base):
    """As of a byte-level tokenizer that was trained on a text of few letters: the library leaves out what it lacks."""

    def made(letters):
        small = Tokenizer(models.BPE({letter: place for place, letter in enumerate(["</s>", *letters])}, []))
        small.pre_tokenizer, small.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
        return Grammars(PreTrainedTokenizerFast(tokenizer_object=small))

    letters, schema = sorted(pre_tokenizers.ByteLevel.alphabet()), '{"const": "\\u65e5"}'
    assert made(letters).of(schema, frozenset([0]))
    for missing in '"{', "\u00e6":  # the third stands for the byte e6, the first of the schema's character
        with pytest.raises(ConfigError, match="tokenizer lacks characters"):
            made([letter for letter in letters if letter not in missing]).of(schema, frozenset([0]))


# ------------------------------------------------------------------------------------------------------------- serving


@pytest.mark.slow
def test_completions(served):
    _, _, client = served
    form = {"type": "json_schema", "json_schema": {"name": "move", "schema": Move.model_json_schema()}}
    for seed in range(3):
        choice = client.chat.completions.create(
            model="actor", messages=ASK, seed=seed, response_format=form, logprobs=True
        ).choices[0]
        if choice.finish_reason == "stop":
            Move.model_validate_json(choice.message.content)
        assert max(token.logprob for token in choice.logprobs.content) == 0.0  # tokens without a choice
    small = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": ["yes", "no"]}}}
    chunks = client.chat.completions.create(model="actor", messages=ASK, response_format=small, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) in ('"yes"', '"no"')
    cut = client.chat.completions.create(model="actor", messages=ASK, response_format=small, max_tokens=1).choices[0]
    assert cut.finish_reason == "length"
    asked = {"model": "actor", "messages": ASK, "max_tokens": 40, "response_format": {"type": "json_object"}}
    assert client.chat.completions.create(**asked).choices[0].message.content.startswith("{")


class Verdict(BaseModel):
    model_config = {"extra": "forbid"}
    right: bool


@pytest.mark.slow
def test_the_clients_own_ways_to_ask_for_a_form(served):
    server, _, client = served
    parsed = client.chat.completions.parse(model="actor", messages=ASK, response_format=Verdict).choices[0].message
    assert parsed.parsed.right in (True, False)
    assert client.responses.parse(model="actor", input="2+2", text_format=Verdict).output_parsed.right in (True, False)
    with anthropic.Anthropic(base_url=server.url, api_key="x", max_retries=0, timeout=60) as llm:
        form = {"format": {"type": "json_schema", "schema": Verdict.model_json_schema()}}
        reply = llm.messages.create(model="actor", max_tokens=40, messages=ASK, output_config=form)
        assert Verdict.model_validate_json(reply.content[0].text)


MOVES = {
    "type": "object",
    "properties": {"to": {"$ref": "#/$defs/square"}, "takes": {"type": "boolean"}},
    "required": ["to", "takes"],
    "additionalProperties": False,
    "$defs": {"square": {"enum": ["a1", "h8", "#/$defs/square"]}},
}
SAYS = {"type": "object", "properties": {"n": {"$ref": "#/$defs/square"}}, "required": ["n"],
        "additionalProperties": False, "$defs": {"square": {"enum": [1, 4]}}}  # fmt: skip
STRICT = [{"name": "move", "parameters": MOVES, "strict": True}, {"name": "say", "parameters": SAYS, "strict": True}]


def fits(name, arguments):
    given = json.loads(arguments) if isinstance(arguments, str) else arguments
    if name == "say":
        return given in ({"n": 1}, {"n": 4})
    return given.keys() == {"to", "takes"} and given["to"] in MOVES["$defs"]["square"]["enum"]


@pytest.mark.slow
def test_a_strict_tool_that_must_be_called_gets_arguments_of_its_schema(served):
    """An untrained adapter calls nothing of itself; two schemas have different definitions of one name."""
    server, _, client = served
    tools = [{"type": "function", "function": tool} for tool in STRICT]
    for choice in ("required", {"type": "function", "function": {"name": "say"}}):
        message = client.chat.completions.create(model="actor", messages=ASK, tools=tools, tool_choice=choice).choices[
            0
        ]
        [call] = message.message.tool_calls
        assert message.finish_reason == "tool_calls" and fits(call.function.name, call.function.arguments)
        assert choice == "required" or call.function.name == "say"
    flat = [{"type": "function", **tool} for tool in STRICT]
    [item] = client.responses.create(model="actor", input="2+2", tools=flat, tool_choice="required").output
    assert item.type == "function_call" and fits(item.name, item.arguments)
    theirs = [{"name": t["name"], "input_schema": t["parameters"], "strict": True} for t in STRICT]
    with anthropic.Anthropic(base_url=server.url, api_key="x", max_retries=0, timeout=60) as llm:
        asked = {"model": "actor", "max_tokens": 60, "messages": ASK, "tools": theirs, "tool_choice": {"type": "any"}}
        [block] = llm.messages.create(**asked).content
        assert block.type == "tool_use" and fits(block.name, block.input)


@pytest.mark.slow
def test_a_form_beside_tools_is_an_answer_of_the_form_or_one_call(served):
    _, _, client = served
    form = {"type": "json_schema", "json_schema": {"name": "v", "schema": Verdict.model_json_schema()}}
    tools = [{"type": "function", "function": tool} for tool in STRICT]
    loose = [{"type": "function", "function": {"name": "note", "parameters": {"type": "object"}}}]
    kinds = set()
    for seed in range(8):
        asked = {"model": "actor", "messages": ASK, "seed": seed, "response_format": form}
        [choice] = client.chat.completions.create(**asked, tools=tools).choices
        kinds.add(choice.finish_reason)
        if choice.finish_reason == "tool_calls":
            [call] = choice.message.tool_calls
            assert choice.message.content is None and fits(call.function.name, call.function.arguments)
        else:
            assert Verdict.model_validate_json(choice.message.content)
    assert kinds == {"tool_calls", "stop"}
    [choice] = client.chat.completions.create(**asked, tools=loose, tool_choice="required", max_tokens=200).choices
    assert choice.finish_reason in ("length", "tool_calls")
    [choice] = client.chat.completions.create(**asked, tools=tools, tool_choice="none").choices
    assert Verdict.model_validate_json(choice.message.content)


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ('{"name": "say", "arguments": {"n": 1}}', 1),
        ('{"name": "sat", "arguments": {"n": 1}}', 0),
        ('{"name": "say", "arguments": {"n": 1}, "also": 2}', 0),
        ('{"says": "<tool_call>{\\"name\\": \\"say\\", \\"arguments\\": {\\"n\\": 1}}</tool_call>"}', 0),
        ('{"name": "say", "argum', 0),
    ],
)
def test_an_answer_of_a_form_is_a_call_as_a_whole_or_not_at_all(text, calls):
    body = {"model": "actor", "messages": ASK, "tools": [{"type": "function", "function": tool} for tool in STRICT]}
    call = Completions().parse({**body, "response_format": {"type": "json_object"}})
    words, said = parts_of(call, ChatReply(text))
    assert len(said) == calls and words == ("" if calls else text)


@pytest.mark.parametrize(
    ("choice", "strict"), [("auto", (True, True)), ("none", (True, True)), ("required", (True, False))]
)
def test_nothing_is_forced_where_no_strict_tool_must_be_called(choice, strict):
    tools = [{"type": "function", "function": {**t, "strict": own}} for t, own in zip(STRICT, strict, strict=True)]
    body = {"model": "actor", "messages": ASK, "tools": tools, "tool_choice": choice}
    assert Completions().parse(body).forced == ""


def test_what_cannot_be_honoured_is_refused(served):
    server, team, client = served
    wrong = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"not": {}}}}
    with pytest.raises(BadRequestError, match="no grammar covers this JSON schema") as error:
        client.chat.completions.create(model="actor", messages=ASK, response_format=wrong)
    assert error.value.status_code == 400
    assert client.chat.completions.create(model="actor", messages=ASK).choices  # the engine goes on
    tool = {
        "type": "function",
        "function": {"name": "f", "parameters": {"properties": {"a": {"not": {}}}}, "strict": True},
    }
    with pytest.raises(BadRequestError, match="no grammar covers"):
        client.chat.completions.create(model="actor", messages=ASK, tools=[tool], tool_choice="required")
    form = {"format": {"type": "json_schema", "schema": {"not": {}}}}
    llm = anthropic.Anthropic(base_url=server.url, api_key="x", max_retries=0, timeout=60)
    with llm, pytest.raises(anthropic.BadRequestError, match="no grammar covers"):
        llm.messages.create(model="actor", max_tokens=40, messages=ASK, output_config=form)

    class Whole:
        def generate(self, requests):
            return [Completion([1], [0.0], "eos", said, 0)]

    said = "no JSON"
    before, team.queue = team.queue, EngineQueue(Whole())
    asked = {"model": "actor", "messages": ASK, "response_format": {"type": "json_object"}}
    try:
        with pytest.raises(BadRequestError, match="--engine local"):
            client.chat.completions.create(**asked)
        asked = {"model": "actor", "messages": ASK, "tool_choice": "required",
                 "tools": [{"type": "function", "function": STRICT[0]}]}  # fmt: skip
        assert client.chat.completions.create(**asked).choices[0].message.content == "no JSON"
        for to, fit in (("a1", True), ("a2", False)):  # there is no grammar here: what does not fit is words
            told = json.dumps({"name": "move", "arguments": {"to": to, "takes": True}})
            said = f"<tool_call>{told}</tool_call>"
            message = client.chat.completions.create(**asked).choices[0].message
            assert bool(message.tool_calls) is fit and message.content == (None if fit else said)
    finally:
        team.queue.close()
        team.queue = before


def test_a_grammar_that_ends_an_answer_is_the_schemas_fault(served):
    _, team, _ = served
    call = ChatCall("actor", ASK, schema="{}")
    done, answer = Future(), Future()
    done.set_result(Completion([1], [0.0], "eos", "{", 0))
    _pass_on(done, answer, 3, call, None, team)
    with pytest.raises(ApiError, match="too large for its grammar") as error:
        answer.result()
    assert error.value.status == 400


def test_training_refuses_a_form(tmp_path):
    (tmp_path / "forms.py").write_text(
        "from openai import AsyncOpenAI, BadRequestError\n"
        "async def run(task, base_url):\n"
        "    async with AsyncOpenAI(base_url=base_url, api_key='x') as llm:\n"
        "        ask = {'model': 'a', 'messages': [{'role': 'user', 'content': 'x'}]}\n"
        "        try:\n"
        "            await llm.chat.completions.create(**ask, response_format={'type': 'json_object'})\n"
        "        except BadRequestError as error:\n"
        "            said = 'not supported in training' in str(error)\n"
        "        await llm.chat.completions.create(**ask)\n"
        "    return float(said)\n"
    )
    env = make_env("program", program=f"{tmp_path / 'forms.py'}:run", agents=["a"])
    assert list(env.reset(seed=1)[0]["a"]) == [{"role": "user", "content": "x"}]
    assert env.step({"a": "x"}).info["outcome"] == 1.0
