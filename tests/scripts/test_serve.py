"""A trained team that answers: the chat API with the stock openai client, and the terminal."""

from __future__ import annotations

import io
import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import ClassVar

import pytest
import torch
from helpers_models import add_random_adapter, tiny_base
from openai import (
    APIStatusError,
    APITimeoutError,
    AuthenticationError,
    BadRequestError,
    NotFoundError,
    OpenAI,
    RateLimitError,
)

from mafrt.config.team import AgentSpec, Team
from mafrt.core.errors import ConfigError, ModelError
from mafrt.core.types import Completion, Request, SamplingParams
from mafrt.engines.local.engine import LocalEngine
from mafrt.environment.chat_api.server import ChatServer, Limits
from mafrt.envs.math import MathEnv
from mafrt.rollout.prompts import encode_prompt
from mafrt.runners.build import voices_of
from mafrt.scripts import chat, serve_team, train_math
from mafrt.scripts.serving.answers import TeamAnswers, TextPieces
from mafrt.scripts.serving.engine_queue import EngineQueue
from mafrt.scripts.serving.trained_team import TrainedTeam

TEAM = Team((AgentSpec("reasoner", prompt="Plan."), AgentSpec("actor", prompt="Solve.", with_answer=True)))
ASK = [{"role": "user", "content": "2+2"}]


class Counted(LocalEngine):
    """Notes the most rows of a running batch, and can wait before each step."""

    widest = 0
    gate: threading.Semaphore | None = None
    sampled = 0

    def step(self, batch):
        self.widest = max(self.widest, batch.live)
        if self.gate is not None:
            self.gate.acquire()
        self.sampled += 1
        return super().step(batch)


def answering(*texts):
    """An engine that cannot be stepped."""

    class Whole:
        sizes: ClassVar[list[int]] = []

        def generate(self, requests):
            self.sizes.append(len(requests))
            return [Completion([1], [0.0], "eos", text, 0) for text, _ in zip(texts, requests, strict=False)]

    return Whole()


def trained_team(new_tokens=8) -> TrainedTeam:
    base = tiny_base()
    for seed, name in enumerate(TEAM.adapters):
        add_random_adapter(base, name, seed=seed)
    sampling = {name: SamplingParams(max_new_tokens=new_tokens) for name in TEAM.names}
    queue = EngineQueue(Counted(base), settle_s=0.02)
    return TrainedTeam(TEAM, base, queue, sampling, voices_of(base, TEAM, 128), "auto")


def wait_until_idle(server):
    deadline = time.monotonic() + 90
    while server.in_flight and time.monotonic() < deadline:
        time.sleep(0.01)
    assert server.in_flight == 0


@pytest.fixture(scope="module")
def served():
    """A server of a tiny team, its team, and a client."""
    answers, team = TeamAnswers(), trained_team()
    server = ChatServer(answers)
    with OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0, timeout=300) as client:
        with pytest.raises(APIStatusError) as error:
            client.chat.completions.create(model="actor", messages=ASK)
        assert error.value.status_code == 503
        answers.ready(team, MathEnv(team=TEAM))
        yield server, team, client
    server.close()
    team.close()


def test_models_are_the_agents_and_the_team(served):
    _, _, client = served
    assert [model.id for model in client.models.list()] == ["reasoner", "actor", "team"]


def test_one_model_can_be_asked_for_by_its_name(served):
    from anthropic import Anthropic

    server, _, client = served
    assert client.models.retrieve("actor").id == "actor"
    with pytest.raises(NotFoundError, match="reasoner, actor, team"):
        client.models.retrieve("nobody")
    for base_url in (server.url, f"{server.url}/v1"):
        with Anthropic(base_url=base_url, api_key="x", max_retries=0, timeout=300) as other:
            assert other.models.retrieve("actor").id == "actor"
            assert [model.id for model in other.models.list()] == ["reasoner", "actor", "team"]


def test_an_answer_is_the_engines(served):
    _, team, client = served
    reply = client.chat.completions.create(model="actor", messages=ASK, seed=7)
    again = client.chat.completions.create(model="actor", messages=ASK, seed=7)
    other = client.chat.completions.create(model="reasoner", messages=ASK, seed=7)
    assert reply.choices[0].message.content == again.choices[0].message.content != other.choices[0].message.content
    ids = encode_prompt(team.base.tokenizer, "Solve.", ASK)
    greedy = client.chat.completions.create(model="actor", messages=ASK, temperature=0, max_tokens=3)
    [made] = team.queue.generate([team.request("actor", ASK, 0, temperature=0.0, max_new_tokens=3)])
    assert greedy.choices[0].message.content == made.text
    assert greedy.usage.prompt_tokens == len(ids) and greedy.usage.completion_tokens == len(made.ids) <= 3


def test_streaming(served):
    _, _, client = served
    whole = client.chat.completions.create(model="actor", messages=ASK, seed=3)
    chunks = list(client.chat.completions.create(model="actor", messages=ASK, seed=3, stream=True))
    said = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert said == whole.choices[0].message.content
    assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason


def test_several_answers_to_one_call(served):
    server, _, client = served
    ask = {"model": "actor", "messages": ASK, "seed": 7}
    one, three = (client.chat.completions.create(**ask, n=n, logprobs=True) for n in (1, 3))
    assert [choice.index for choice in three.choices] == [0, 1, 2]
    assert three.choices[0].message.content == one.choices[0].message.content
    texts = [choice.message.content for choice in three.choices]
    assert len(set(texts)) == 3
    assert three.usage.prompt_tokens == one.usage.prompt_tokens
    # The end token has no text, and so no log-probability that is shown.
    assert three.usage.completion_tokens >= sum(len(choice.logprobs.content) for choice in three.choices)
    streamed = ["", "", ""]
    for chunk in client.chat.completions.create(**ask, n=3, stream=True):
        for choice in chunk.choices:
            streamed[choice.index] += choice.delta.content or ""
    assert streamed == texts
    wait_until_idle(server)
    workflow = client.chat.completions.create(model="team", messages=ASK, n=2)
    assert len(workflow.choices) == 2


def test_pieces_are_streamed_while_the_engine_samples(served):
    """The engine may take as many steps as the client has seen pieces, and one more: else the test would hang."""
    _, team, client = served
    engine = team.queue.engine
    whole = client.chat.completions.create(model="actor", messages=ASK, seed=3).choices[0].message.content
    engine.gate, engine.sampled = threading.Semaphore(1), 0
    try:
        stream = client.chat.completions.create(
            model="actor", messages=ASK, seed=3, stream=True, stream_options={"include_usage": True}
        )
        pieces, usage = [], None
        for chunk in stream:
            usage = chunk.usage or usage
            if chunk.choices and chunk.choices[0].delta.content:
                assert engine.sampled <= len(pieces) + 1
                pieces.append(chunk.choices[0].delta.content)
                engine.gate.release()
    finally:
        engine.gate.release(100)
        engine.gate = None
    assert "".join(pieces) == whole and len(pieces) > 2 and usage.completion_tokens >= len(pieces)


def test_a_stop_text_is_no_part_of_the_answer(served):
    _, _, client = served
    whole = client.chat.completions.create(model="actor", messages=ASK, seed=3).choices[0].message.content
    stop = whole[3:5]
    cut = client.chat.completions.create(model="actor", messages=ASK, seed=3, stop=[stop])
    assert cut.choices[0].message.content == whole[: whole.index(stop)] and cut.choices[0].finish_reason == "stop"
    chunks = client.chat.completions.create(model="actor", messages=ASK, seed=3, stop=[stop], stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole[: whole.index(stop)]


def test_pieces_hold_back_half_characters():
    class Bytes:
        def decode(self, ids, **_):
            return bytes(ids).decode("utf-8", "replace")

    said: list[str] = []
    pieces = TextPieces(Bytes(), (), said.append)
    for end in range(1, 6):
        pieces("aé€".encode()[:end])
    assert said == ["a", "é"]  # the euro sign has three bytes, of which two have come
    pieces("aé€".encode())
    assert said == ["a", "é", "€"]


def test_an_engine_that_answers_whole_streams_one_piece():
    team = trained_team()
    team.queue.close()
    team.queue = EngineQueue(answering("all at once"))
    answers = TeamAnswers()
    answers.ready(team, None)
    server = ChatServer(answers)
    with OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0, timeout=300) as client:
        chunks = client.chat.completions.create(model="actor", messages=ASK, stream=True)
        assert [chunk.choices[0].delta.content for chunk in chunks] == ["", "all at once", None]
    server.close()


def test_calls_at_the_same_time_share_batches(served):
    _, team, client = served
    team.queue.engine.widest = 0
    with ThreadPoolExecutor(24) as pool:
        asks = [pool.submit(client.chat.completions.create, model=m, messages=ASK) for m in ("actor", "reasoner") * 12]
        assert all(ask.result().choices for ask in asks)
    assert 1 < team.queue.engine.widest <= 24


def test_a_request_enters_a_running_batch_and_a_bad_one_fails_alone():
    base = tiny_base()
    engine = Counted(base, eos_ids=())
    engine.gate = threading.Semaphore(0)
    queue = EngineQueue(engine)
    first = queue.submit(Request([5, 6], None, SamplingParams(60), 0))
    engine.gate.release(2)
    while engine.sampled < 2:
        time.sleep(0.001)
    second = queue.submit(Request([7, 8], None, SamplingParams(4), 0))
    bad = queue.submit(Request([], None, SamplingParams(4), 0))
    engine.gate.release(18)
    assert len(second.result(timeout=300).ids) == 4 and not first.done() and engine.widest == 2
    with pytest.raises(ConfigError, match="empty prompt"):
        bad.result(timeout=300)
    engine.gate.release(100)
    assert len(first.result(timeout=300).ids) == 60
    queue.close()


def test_log_probabilities_are_the_engines(served):
    _, _, client = served
    asked = {"model": "actor", "messages": ASK, "temperature": 1.0, "seed": 5}
    choice = client.chat.completions.create(**asked, logprobs=True).choices[0]
    tokens = choice.logprobs.content
    assert "".join(token.token for token in tokens) == choice.message.content and len(tokens) > 1
    assert all(token.logprob <= 0 for token in tokens) and len({token.logprob for token in tokens}) > 1
    stop = choice.message.content[2:4]
    cut = client.chat.completions.create(**asked, logprobs=True, stop=[stop]).choices[0]
    assert len(cut.logprobs.content) < len(tokens)
    chunks = list(client.chat.completions.create(**asked, logprobs=True, stream=True))
    assert [t.logprob for c in chunks if c.choices[0].logprobs for t in c.choices[0].logprobs.content] == [
        token.logprob for token in tokens
    ]


@pytest.mark.parametrize("answers", [1, 3])
def test_a_row_whose_client_has_left_ends(served, answers):
    """The engine waits at a gate; after the client has gone it takes a step or two, and not all of them."""
    server, team, _ = served
    engine = team.queue.engine
    engine.gate, engine.sampled = threading.Semaphore(1), 0
    try:
        hasty = OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0, timeout=0.5)
        with hasty, pytest.raises(APITimeoutError):
            hasty.chat.completions.create(model="actor", messages=ASK, seed=3, max_tokens=60, n=answers)
        wait_until_idle(server)
    finally:
        engine.gate.release(1000)
        engine.gate = None
    assert team.queue.generate([team.request("actor", ASK, 0, max_new_tokens=2)])[0].ids
    assert engine.sampled < 20


@pytest.mark.slow
def test_responses_are_the_engines_too(served):
    _, _, client = served
    reply = client.responses.create(model="actor", input="2+2", temperature=0, max_output_tokens=3)
    chat = client.chat.completions.create(model="actor", messages=ASK, temperature=0, max_tokens=3)
    assert reply.output_text == chat.choices[0].message.content
    assert reply.usage.output_tokens == chat.usage.completion_tokens
    with client.responses.stream(model="actor", input="2+2", temperature=0, max_output_tokens=3) as stream:
        deltas = [event.delta for event in stream if event.type == "response.output_text.delta"]
        assert "".join(deltas) == reply.output_text == stream.get_final_response().output_text
    with pytest.raises(BadRequestError, match="'logprobs' cannot be given for 'team'"):
        client.chat.completions.create(model="team", messages=ASK, logprobs=True)


def test_the_team_plays_its_workflow(served):
    _, _, client = served
    reply = client.chat.completions.create(model="team", messages=ASK, seed=1)
    assert reply.usage.completion_tokens > 0
    with pytest.raises(BadRequestError, match="too long"):
        client.chat.completions.create(model="team", messages=[{"role": "user", "content": "9" * 500}])


def test_errors_have_the_shape_that_clients_know(served):
    _, _, client = served
    with pytest.raises(NotFoundError, match="there are reasoner, actor, team"):
        client.chat.completions.create(model="gpt-5", messages=ASK)
    with pytest.raises(BadRequestError) as error:
        client.chat.completions.create(model="actor", messages=[{"role": "user", "content": "9" * 500}])
    assert error.value.code == "context_length_exceeded"
    with pytest.raises(BadRequestError, match="temperature"):
        client.chat.completions.create(model="actor", messages=ASK, temperature=9)


def test_a_token_and_a_bound_on_calls(served):
    _, team, _ = served
    answers = TeamAnswers()
    answers.ready(team, None)
    server = ChatServer(answers, token="s3cret", limits=Limits(calls=1))
    try:
        with pytest.raises(AuthenticationError):
            OpenAI(base_url=f"{server.url}/v1", api_key="wrong", max_retries=0).models.list()
        client = OpenAI(base_url=f"{server.url}/v1", api_key="s3cret", max_retries=0)
        assert [model.id for model in client.models.list()] == ["reasoner", "actor"]
        with pytest.raises(BadRequestError, match="at most 1"):
            client.chat.completions.create(model="actor", messages=ASK, n=2)
        server.in_flight = 1
        with pytest.raises(RateLimitError):
            client.chat.completions.create(model="actor", messages=ASK)
    finally:
        server.close()
    with pytest.raises(ConfigError, match="a token is needed"):
        ChatServer(answers, host="0.0.0.0")


def test_an_engine_that_fails_answers_with_an_error_and_goes_on():
    class Fails:
        def generate(self, requests):
            raise RuntimeError("out of order")

    queue = EngineQueue(Fails())
    for _ in range(2):
        with pytest.raises(RuntimeError, match="out of order"):
            queue.generate([None])
    queue.close()


def test_where_memory_runs_out_fewer_requests_run_together_and_none_is_lost():
    class Short(LocalEngine):
        most = 2

        def step(self, batch):
            if batch.live > self.most and len(batch.rows[0].ids) >= 2:
                raise torch.cuda.OutOfMemoryError("CUDA out of memory")
            return super().step(batch)

    requests = [Request([5, 6 + n], None, SamplingParams(6), n) for n in range(8)]
    wanted = LocalEngine(tiny_base(), eos_ids=()).generate(requests)
    engine = Short(tiny_base(), eos_ids=())
    queue, heard = EngineQueue(engine, settle_s=0.2), []
    told = queue.submit(Request([9, 9], None, SamplingParams(6), 1), heard.append)
    assert [found.ids for found in queue.generate(requests)] == [each.ids for each in wanted] and queue.rows <= 2
    with pytest.raises(ModelError, match="there was no memory for this answer; ask again"):
        told.result(timeout=300)
    engine.most = 0
    with pytest.raises(ModelError, match="there was no memory"):
        queue.generate(requests[:1])
    queue.close()


# ------------------------------------------------------------------------------------------------------ the commands


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("serve") / "run"
    argv = ["--iterations", "1", "--n_rollout_threads", "4", "--max_new_tokens", "12", "--eval_episodes", "0"]
    argv += ["--profile_path", "profiles/quickstart_math.json", "--threads", "1", "--coach", "rules"]
    assert train_math.main([*argv, "--run_dir", str(folder)]) == 0
    return folder


@pytest.mark.slow
def test_chat_in_the_terminal(run, monkeypatch, capsys):
    lines = "Tom has 3 pens and gets 4 more. How many?\n/agent actor\n2 + 2\n/agent nobody\n/what\n/quit\n"
    monkeypatch.setattr("sys.stdin", io.StringIO(lines))
    assert chat.main([str(run), "--threads", "1"]) == 0
    out, errors = capsys.readouterr()
    assert "You talk to team; there are reasoner, actor, team." in out
    assert len(re.findall(r"^(?:team> )?reasoner: ", out, re.MULTILINE)) == 1 and out.count("actor: ") == 2
    assert "There is no agent 'nobody'" in errors


@pytest.mark.slow
def test_serve_team_as_a_command(run, monkeypatch, capsys):
    """The command itself, in a thread; the test's client finds the address in its output."""
    monkeypatch.delenv(serve_team.TOKEN, raising=False)
    argv = [str(run), "--port", "0", "--threads", "1"]
    threading.Thread(target=serve_team.main, args=(argv,), daemon=True).start()
    text, deadline = "", time.monotonic() + 60
    while "Models" not in text and time.monotonic() < deadline:
        time.sleep(0.1)
        text += capsys.readouterr().out
    address = re.search(r"Models reasoner, actor, team at (\S+);", text)[1]
    with OpenAI(base_url=address, api_key="x") as client:
        reply = client.chat.completions.create(model="team", messages=[{"role": "user", "content": "2 + 2?"}])
        assert reply.choices[0].message.content


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        ([], "Name a run"),
        (["RUN", "--host", "0.0.0.0"], "set a token in MAFRT_SERVE_TOKEN"),
        (["RUN", "--port", "99999"], "port is 99999"),
        (["nowhere"], "does not exist"),
    ],
)
def test_bad_servers_get_a_sentence_before_a_model_is_loaded(run, monkeypatch, capsys, argv, says):
    monkeypatch.delenv(serve_team.TOKEN, raising=False)
    assert serve_team.main([str(run) if word == "RUN" else word for word in argv]) == 2
    out, errors = capsys.readouterr()
    assert says in errors and "Loading" not in out
