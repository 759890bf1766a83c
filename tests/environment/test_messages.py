"""Anthropic's Messages: the stock client against a scripted model, in training, and against a served team."""

from __future__ import annotations

import asyncio
import json
import time
from concurrent.futures import Future

import anthropic
import httpx
import pytest
import toy
from helpers_models import tiny_base

from mafrt.config.team import Team
from mafrt.environment.chat_api.protocol import ChatReply
from mafrt.environment.chat_api.server import ChatServer, Limits
from mafrt.environment.registry import make_env
from mafrt.environment.tool_calls import leading_thought
from mafrt.envs.program.own_process import Source
from mafrt.runners.on_policy import OnPolicy

ASK = [{"role": "user", "content": "2+3?"}]
VERSION = {"anthropic-version": "2023-06-01", "content-type": "application/json"}
ADD = {
    "name": "add",
    "description": "Adds.",
    "input_schema": {"type": "object", "properties": {"a": {"type": "number"}}},
}
CALLED = 'Wait.\n<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call>'
THINKING = {"type": "enabled", "budget_tokens": 1024}


class Scripted:
    """Models that note their calls and say what they are told to, in pieces where the call streams."""

    def __init__(self, learns=False):
        self.learns, self.calls, self.futures = learns, [], []
        self.text, self.more, self.pieces, self.answering = "five", {}, (), True

    def models(self, key):
        return ["a", "b"]

    def begin(self, key, call, said):
        self.calls.append(call)
        future: Future[ChatReply] = Future()
        self.futures.append(future)
        for piece in self.pieces if call.stream else ():
            said(piece)
        if self.answering:
            future.set_result(ChatReply(self.text, prompt_tokens=7, completion_tokens=3, **self.more))
        return future

    def count(self, key, call):
        self.calls.append(call)
        return 41

    def reward(self, key, body): ...


@pytest.fixture
def served(request):
    models = Scripted(learns=getattr(request, "param", False))
    server = ChatServer(models, limits=Limits(body_s=0.5))
    with anthropic.Anthropic(base_url=server.url, api_key="x", max_retries=0, timeout=300) as client:
        models.server = server
        yield models, client
    server.close()


@pytest.fixture(scope="module")
def standing():
    """One server for all requests that it refuses: a server's end takes .2 s."""
    models = Scripted()
    server = ChatServer(models, limits=Limits(body_s=0.5))
    yield models, server.url
    server.close()


@pytest.fixture
def refusing(standing):
    standing[0].calls.clear()
    return standing


def ask(client, **more):
    return client.messages.create(**{"model": "a", "max_tokens": 50, "messages": ASK, **more})


def streamed(client, **more):
    """The kinds of the events, and the message that the client makes of them."""
    with client.messages.stream(**{"model": "a", "max_tokens": 50, "messages": ASK, **more}) as stream:
        kinds = [event.type for event in stream]
        return kinds, stream.get_final_message()


def seen(models):
    return models.calls[-1].messages


# ------------------------------------------------------------------------------------------------------------- answers


def test_a_plain_answer(served):
    models, client = served
    reply = ask(client, system="Be brief.", metadata={"user_id": "u"}, extra_body={"temperature": 0.5, "top_p": 0.9})
    assert [block.text for block in reply.content] == ["five"]
    assert (reply.stop_reason, reply.stop_sequence, reply.role, reply.model) == ("end_turn", None, "assistant", "a")
    assert (reply.usage.input_tokens, reply.usage.output_tokens) == (7, 3)
    assert seen(models) == [{"role": "system", "content": "Be brief."}, *ASK]
    assert (models.calls[0].max_tokens, models.calls[0].temperature, models.calls[0].top_p) == (50, 0.5, 0.9)


def test_why_an_answer_ended(served):
    models, client = served
    models.more = {"cut": True}
    assert ask(client).stop_reason == "max_tokens"
    models.more = {"stopped": "END"}
    reply = ask(client, stop_sequences=["END", "DONE"])
    assert (reply.stop_reason, reply.stop_sequence) == ("stop_sequence", "END")
    assert models.calls[-1].stop == ("END", "DONE")


def test_events_make_the_same_message(served):
    models, client = served
    models.text, models.pieces = "five or so", ("fi", "ve or")
    kinds, reply = streamed(client)
    assert [kind for kind in kinds if not kind.startswith("text")] == [
        *("message_start", "content_block_start", "content_block_delta", "content_block_delta", "content_block_delta"),
        *("content_block_stop", "message_delta", "message_stop"),
    ]
    assert reply.content[0].text == "five or so" and len(reply.content) == 1
    assert (reply.usage.input_tokens, reply.usage.output_tokens, reply.stop_reason) == (7, 3, "end_turn")
    models.text, models.pieces = "", ()
    assert [block.text for block in streamed(client)[1].content] == [""]


def test_tools_make_the_round(served):
    models, client = served
    models.text = CALLED
    reply = ask(client, tools=[ADD])
    words, call = reply.content
    assert words.text == "Wait." and (call.name, call.input) == ("add", {"a": 2, "b": 3})
    assert reply.stop_reason == "tool_use" and call.id
    kinds, again = streamed(client, tools=[ADD])
    assert [block.to_dict() | {"id": ""} for block in again.content] == [
        block.to_dict() | {"id": ""} for block in reply.content
    ]
    assert "input_json" in kinds and again.stop_reason == "tool_use"
    models.text = "five"
    results = [
        {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "5"}]},
        {"type": "tool_result", "tool_use_id": call.id, "content": "too late", "is_error": True},
        {"type": "text", "text": "So?"},
    ]
    history = [*ASK, {"role": "assistant", "content": reply.content}, {"role": "user", "content": results}]
    assert ask(client, messages=history, tools=[ADD]).content[0].text == "five"
    assert seen(models)[1:] == [
        *ASK,
        {"role": "assistant", "content": CALLED},
        {"role": "tool", "content": "5"},
        {"role": "tool", "content": "Error: too late"},
        {"role": "user", "content": "So?"},
    ]
    assert '"name": "add"' in seen(models)[0]["content"] and '"parameters"' in seen(models)[0]["content"]


def test_which_tools_may_be_called(served):
    models, client = served
    tools = [ADD, {**ADD, "name": "sub", "type": "custom"}]
    for choice, said in (
        ({"type": "auto"}, None),
        ({"type": "any"}, "must call a function"),
        ({"type": "tool", "name": "sub"}, "must call the function sub"),
    ):
        ask(client, tools=tools, tool_choice=choice)
        assert (said or "You may call") in seen(models)[0]["content"]
        assert ('"name": "add"' in seen(models)[0]["content"]) == ("name" not in choice)
        assert ("must call" in seen(models)[0]["content"]) == (said is not None)
    ask(client, tools=tools, tool_choice={"type": "none"})
    assert seen(models) == ASK
    models.text = CALLED * 2
    assert sum(block.type == "tool_use" for block in ask(client, tools=tools).content) == 2
    one = ask(client, tools=tools, tool_choice={"type": "auto", "disable_parallel_tool_use": True})
    assert sum(block.type == "tool_use" for block in one.content) == 1


@pytest.mark.parametrize(
    ("text", "thought", "words"),
    [
        ("<think>\n2 and 3\n</think>\n\nfive", "2 and 3", "five"),
        ("2 and 3</think>five", "2 and 3", "five"),  # the prompt opened the thought
        ("<think>2 and", "2 and", ""),
        ("five", "", "five"),
        ("<think></think>five", "", "five"),
        ("<think>a</think>b <think>c</think>d", "a", "b <think>c</think>d"),
        ("Write '</think>' at the end", "", "Write '</think>' at the end"),
        ("<thin", "", "<thin"),
        ("<think>a < b</th and so", "a < b</th and so", ""),
    ],
)
def test_thoughts_are_blocks(served, text, thought, words):
    models, client = served
    models.text = text
    assert leading_thought(text) == (thought, words)
    reply = ask(client, thinking=THINKING)
    shown = [(block.type, getattr(block, block.type)) for block in reply.content]
    assert shown == [("thinking", thought)] * bool(thought) + [("text", words)]
    for size in (1, 2, 5, 100):
        models.pieces = [text[at : at + size] for at in range(0, len(text), size)]
        assert [block.to_dict() for block in streamed(client, thinking=THINKING)[1].content] == [
            block.to_dict() for block in reply.content
        ]
    # Without thinking the text is what the model said.
    assert ask(client).content[0].text == text


def test_a_thought_goes_back_as_it_was_said(served):
    models, client = served
    models.text = f"<think>\n2 and 3\n</think>\n\n{CALLED}"
    reply = ask(client, tools=[ADD], thinking=THINKING)
    assert [block.type for block in reply.content] == ["thinking", "text", "tool_use"]
    result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": reply.content[2].id, "content": "5"}]}
    ask(client, messages=[*ASK, {"role": "assistant", "content": reply.content}, result], tools=[ADD])
    assert seen(models)[2] == {"role": "assistant", "content": models.text}


def test_turns_of_one_role_are_one(served):
    models, client = served
    parts = [{"type": "text", "text": "2", "cache_control": {"type": "ephemeral"}}, {"type": "text", "text": "+3"}]
    ask(client, system=parts, messages=[{"role": "user", "content": parts}, {"role": "user", "content": "now"}])
    assert seen(models) == [{"role": "system", "content": "2+3"}, {"role": "user", "content": "2+3\n\nnow"}]


def test_tokens_are_counted_and_models_listed(served):
    models, client = served
    counted = client.messages.count_tokens(model="a", messages=ASK, system="Be brief.", tools=[ADD])
    assert counted.input_tokens == 41 and "Be brief." in seen(models)[0]["content"]
    listed = client.models.list()
    assert [model.id for model in listed] == ["a", "b"] and listed.data[0].display_name == "a"


def test_an_address_that_ends_in_v1_is_the_same(served):
    _, client = served
    assert ask(client.with_options(base_url=f"{client.base_url}/v1")).content[0].text == "five"


# ------------------------------------------------------------------------------------------------------------- refusals

LONG = int("9" * 400)


@pytest.mark.parametrize(
    "more",
    [
        {"max_tokens": None},
        {"max_tokens": 0},
        {"max_tokens": LONG},
        {"model": []},
        {"messages": []},
        {"messages": {}},
        {"messages": [7]},
        {"messages": [{"role": [], "content": "x"}]},
        {"messages": [{"role": "tool", "content": "x"}]},
        {"messages": [{"role": "user", "content": None}]},
        {"messages": [{"role": "user", "content": [[]]}]},
        {"messages": [{"role": "user", "content": [{"type": []}]}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": 7}]}]},
        {"messages": [{"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": "x"}}]}]},
        {"messages": [{"role": "user", "content": [{"type": "document", "source": {}}]}]},
        {"messages": [{"role": "user", "content": [{"type": "tool_use", "name": "f", "input": {}}]}]},
        {"messages": [{"role": "user", "content": [{"type": "tool_result", "content": [{"type": "image"}]}]}]},
        {"messages": [{"role": "user", "content": [{"type": "tool_result", "content": "x", "is_error": "no"}]}]},
        {"messages": [{"role": "assistant", "content": [{"type": "tool_use", "name": [], "input": {}}]}, *ASK]},
        {"messages": [{"role": "assistant", "content": [{"type": "tool_use", "name": "f", "input": "{}"}]}, *ASK]},
        {"messages": [{"role": "assistant", "content": [{"type": "thinking", "thinking": 7}]}, *ASK]},
        {"messages": [{"role": "assistant", "content": [{"type": "redacted_thinking", "data": "x"}]}, *ASK]},
        {"messages": [*ASK, {"role": "assistant", "content": "The answer is ("}]},
        {"system": 7},
        {"system": [{"type": "image"}]},
        {"temperature": 1.5},
        {"top_p": -LONG},
        {"top_k": 5},
        {"stop_sequences": [[]]},
        {"stop_sequences": 7},
        {"stream": "yes"},
        {"thinking": "on"},
        {"thinking": []},
        {"thinking": {"type": []}},
        {"thinking": {"type": "enabled", "display": "omitted"}},
        {"output_config": 7},
        {"output_config": {"format": {"type": "json_schema"}}},
        {"output_format": {"type": "json_schema"}},
        {"tools": "all"},
        {"tools": [7]},
        {"tools": [{"name": []}]},
        {"tools": [{"type": "web_search_20250305", "name": "web_search"}]},
        {"tools": [{"type": [], "name": "f"}]},
        {"tools": [{**ADD, "defer_loading": True}]},
        {"tool_choice": "auto"},
        {"tool_choice": {"type": []}},
        {"tool_choice": {"type": "any"}},
        {"tool_choice": {"type": "tool", "name": "other"}, "tools": [ADD]},
        {"tool_choice": {"type": "auto", "disable_parallel_tool_use": 1}},
        {"container": "c"},
        {"mcp_servers": [{"url": "x"}]},
        {"speed": "fast"},
        {"n": 2},
    ],
    ids=lambda more: str(more)[:60],
)
def test_what_cannot_be_honoured_is_refused_in_its_own_form(refusing, more):
    models, url = refusing
    body = {"model": "a", "max_tokens": 9, "messages": ASK, **more}
    reply = httpx.post(f"{url}/v1/messages", json=body, headers=VERSION, timeout=60)
    told = reply.json()
    assert reply.status_code == 400 and not models.calls
    assert told["type"] == "error" and told["error"]["type"] == "invalid_request_error" and told["error"]["message"]


@pytest.mark.parametrize(
    ("content", "status", "kind"),
    [
        (b"[" * 100_000, 400, "invalid_request_error"),
        (b'{"model": NaN}', 400, "invalid_request_error"),
        (b"x" * (9 * 2**20), 413, "request_too_large"),
    ],
    ids=["deep", "nan", "huge"],
)
def test_bytes_that_are_no_request_get_the_same_form(refusing, content, status, kind):
    _, url = refusing
    reply = httpx.post(f"{url}/v1/messages", content=content, headers=VERSION, timeout=60)
    assert (reply.status_code, reply.json()["error"]["type"]) == (status, kind)


def test_wild_texts_do_no_harm(served):
    models, client = served
    models.text = '<tool_call>{"name": "f\\ud800", "arguments": {"a": "\\ud800", "b": 1e999}}</tool_call>\ud800'
    tool = {"name": "f", "description": "\ud800", "input_schema": {"title": "\ud800"}}
    for stream in (False, True):
        body = {"model": "a", "max_tokens": 9, "system": "\ud800", "messages": ASK, "tools": [tool], "stream": stream}
        reply = httpx.post(f"{client.base_url}/v1/messages", content=json.dumps(body), headers=VERSION, timeout=60)
        assert reply.status_code == 200 and "f\ufffd" in reply.text and "Infinity" not in reply.text


def test_errors_are_those_that_the_client_knows(served):
    models, client = served
    with pytest.raises(anthropic.NotFoundError, match="POST /v1/messages"):
        client.messages.batches.list()
    models.pieces = ("fi",)
    models.answering = False
    with client.messages.stream(model="a", max_tokens=9, messages=ASK) as stream, pytest.raises(anthropic.APIError):
        for _ in stream:
            if models.futures[-1].done():
                continue
            models.futures[-1].set_exception(RuntimeError("out of memory"))


def test_a_token_may_come_as_either_header():
    server = ChatServer(Scripted(), token="s3cret")
    for given in ({"api_key": "s3cret"}, {"auth_token": "s3cret"}):
        with anthropic.Anthropic(base_url=server.url, max_retries=0, **given) as client:
            assert ask(client).content
    other = anthropic.Anthropic(base_url=server.url, max_retries=0, api_key="other")
    with other, pytest.raises(anthropic.AuthenticationError, match="authentication_error"):
        ask(other)
    server.close()


@pytest.mark.parametrize("served", [True], indirect=True)
def test_a_client_that_asks_again_means_the_same_call(served):
    models, client = served
    models.answering = False
    with pytest.raises(anthropic.APITimeoutError):
        ask(client.with_options(timeout=0.3, max_retries=2))
    assert len(models.calls) == 1
    until = time.monotonic() + 90
    while (
        models.server.in_flight and time.monotonic() < until
    ):  # a server hears a little later that its client has gone
        time.sleep(0.01)
    models.futures[0].set_result(ChatReply("late"))
    models.answering = True
    assert [ask(client).content[0].text for _ in "ab"] == ["late", "five"] and len(models.calls) == 2


# ------------------------------------------------------------------------------------------------------------- training

PROGRAM = """
from anthropic import AsyncAnthropic

AGENTS = ("solver",)
ADD = {"name": "add", "input_schema": {"type": "object", "properties": {"a": {"type": "integer"}}}}


async def run(task):
    async with AsyncAnthropic() as llm:
        reply = await llm.messages.create(
            model="solver", max_tokens=20, messages=[{"role": "user", "content": f"task {task['seed'] % 7}"}]
        )
    text = reply.content[0].text
    return sum(c.isdigit() for c in text) / max(1, len(text))


def given_an_address(task, base_url):
    from anthropic import Anthropic

    with Anthropic(base_url=base_url, api_key="x") as llm:
        ask = [{"role": "user", "content": "2+3"}]
        with llm.messages.stream(model="solver", max_tokens=20, messages=ask, tools=[ADD]) as stream:
            reply = stream.get_final_message()
        call = reply.content[-1]
        result = {"type": "tool_result", "tool_use_id": call.id, "content": str(call.input["a"] + 3)}
        ask += [{"role": "assistant", "content": reply.content}, {"role": "user", "content": [result]}]
        last = llm.messages.create(model="solver", max_tokens=20, messages=ask, tools=[ADD])
    return float(last.content[0].text == "answer" and last.usage.input_tokens >= 0)
"""


@pytest.fixture
def program(tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    return tmp_path / "program.py"


def test_tools_travel_as_text_in_training(program):
    env = make_env("program", program=f"{program}:given_an_address")
    env.reset(seed=1)
    called = '<tool_call>\n{"name": "add", "arguments": {"a": 2}}\n</tool_call>'
    shown = env.step({"solver": called}).observations["solver"]
    assert shown[1:] == [
        {"role": "user", "content": "2+3"},
        {"role": "assistant", "content": called},
        {"role": "tool", "content": "5"},
    ]
    assert env.step({"solver": "answer"}).info["outcome"] == 1.0


@pytest.mark.slow
@pytest.mark.ci
def test_a_program_of_the_stock_client_trains(program, tmp_path):
    assert Source.read(f"{program}:run").needs_process
    env = make_env("program", program=f"{program}:run", timeout_s=60)
    config = toy.settings(n_rollout_threads=8, iterations=1, ppo_epoch=1, num_mini_batch=1, eval_episodes=0)
    OnPolicy(env, Team.of(env.agents), tiny_base(), config, run_dir=tmp_path / "run").run()
    [line] = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert line["env_errors"] == 0 and line["ratio_mean/solver"] == pytest.approx(1, abs=1e-4)


def test_tokens_are_not_counted_in_training(tmp_path):
    (tmp_path / "counts.py").write_text(
        "from anthropic import AsyncAnthropic, BadRequestError\n"
        "async def run(task, base_url):\n"
        "    async with AsyncAnthropic(base_url=base_url, api_key='x') as llm:\n"
        "        ask = {'model': 'a', 'messages': [{'role': 'user', 'content': 'x'}]}\n"
        "        try:\n"
        "            await llm.messages.count_tokens(**ask)\n"
        "        except BadRequestError as error:\n"
        "            said = 'usage' in str(error)\n"
        "        await llm.messages.create(**ask, max_tokens=5)\n"
        "    return float(said)\n"
    )
    env = make_env("program", program=f"{tmp_path / 'counts.py'}:run", agents=["a"])
    env.reset(seed=1)
    assert env.step({"a": "x"}).info["outcome"] == 1.0


def test_several_wait_side_by_side(served):
    models, client = served

    async def many():
        async with anthropic.AsyncAnthropic(base_url=str(client.base_url), api_key="x") as llm:
            made = [llm.messages.create(model="a", max_tokens=9, messages=ASK) for _ in range(20)]
            return await asyncio.gather(*made)

    assert [reply.content[0].text for reply in asyncio.run(many())] == ["five"] * 20 and len(models.calls) == 20


def test_a_request_without_the_version_is_no_clients_of_this_api(served):
    _, client = served
    reply = httpx.post(
        f"{client.base_url}/v1/messages", json={"model": "a", "max_tokens": 9, "messages": ASK}, timeout=60
    )
    assert reply.status_code == 400 and "anthropic-version" in reply.json()["error"]["message"]
