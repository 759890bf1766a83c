"""Search: questions and corpora as they are, retrievers that work and that fail, the workflow, and the commands."""

from __future__ import annotations

import asyncio
import http.server
import json
import threading
import time

import pytest

from mafrt.config.team import Team
from mafrt.core.errors import ConfigError, DataError, EnvError
from mafrt.environment.checker import check_env
from mafrt.environment.session import session_of
from mafrt.envs.math import MathEnv
from mafrt.envs.search import Bm25, HttpRetriever, Passage, SearchEnv, load_questions, server
from mafrt.envs.search.answers import exact_match, f1, given_answer, mentions, normalize
from mafrt.envs.search.build import build
from mafrt.envs.search.demonstrations import play
from mafrt.envs.search.generated import generated
from mafrt.envs.search.questions import load_corpus
from mafrt.envs.search.server import app, retrieve
from mafrt.envs.search.workflow import query_of, sufficient
from mafrt.scripts import serve_retriever, train_search

HOTPOT = [
    {
        "_id": "5a8b",
        "question": "Which river crosses the capital of France?",
        "answer": "the Seine",
        "type": "bridge",
        "level": "easy",
        "context": [["Paris", ["Paris is the capital of France.", " The Seine crosses it."]], ["Rome", ["A city."]]],
    },
    {
        "question": "Is Rome a city?",
        "answer": "yes",
        "context": {"title": ["Rome"], "sentences": [["A city."]]},
    },
]
PASSAGES = [Passage("0", "Paris", "The Seine crosses it."), Passage("1", "", "Rome lies on the Tiber.")]


def outcome(env: SearchEnv, texts: list[str]):
    """The last info of an episode about task 0, with one text after the other."""
    session = session_of(env)
    session.reset(seed=1, options={"task": 0})
    for text in texts:
        [agent] = session._acting
        result = session.step({agent: text})
    assert result.terminated
    return result.info


def test_normalisation_em_and_f1_are_squads():
    assert normalize("The  Beatles!") == "beatles" and exact_match("a Seine.", ["Tiber", "the seine"]) == 1.0
    assert exact_match("Seine river", ["Seine"]) == 0.0
    assert f1("the Seine river", ["Seine"]) == pytest.approx(2 / 3)  # precision 1/2, recall 1
    assert f1("no", ["no idea"]) == 0.0 and f1("", ["x"]) == 0.0
    assert mentions("It is the Seine.", ["seine"]) and not mentions("Seines", ["seine"])
    assert given_answer("<answer> a </answer> \\boxed{b}") == "a" and given_answer("\\boxed{b}") == "b"
    assert given_answer("the Seine") is None
    # An answer that was taken back is none, also where the new one is cut off or empty.
    for text in (
        "<answer>a</answer> no: <answer>b",
        "<answer>a</answer> <answer></answer>",
        "<answer>a",
        "\\boxed{a} \\boxed{b",
    ):
        assert given_answer(text) is None
    assert given_answer("in <answer> tags: <answer>a</answer>") == "a"


def test_hotpot_nq_and_verl_records_are_read_as_they_are(tmp_path):
    path = tmp_path / "hotpot.json"
    path.write_text(json.dumps(HOTPOT))
    first, second = load_questions(path)
    assert first.answers == ("the Seine",) and first.meta == {"type": "bridge", "level": "easy"}
    assert [p.title for p in first.passages] == ["Paris", "Rome"] and second.passages[0].text == "A city."
    lines = [
        {"id": "test_0", "question": "q1", "golden_answers": ["a", "b"], "metadata": {}},
        {"question": "q2", "answer": ["c"]},
        {"question": "q3", "prompt": [{}], "reward_model": {"ground_truth": {"target": ["d"]}}},
    ]
    nq = tmp_path / "nq.jsonl"
    nq.write_text("\n".join(map(json.dumps, lines)))
    assert [q.answers for q in load_questions(nq)] == [("a", "b"), ("c",), ("d",)]
    # Dr. MAS's drmas_search.py writes the question among other things.
    truth = {"reward_model": {"ground_truth": {"target": ["e"]}}}
    nq.write_text(json.dumps({"prompt": [{}], **truth, "extra_info": {"question": "q4", "own": {"answer": "f"}}}))
    for field in (None, "extra_info.question"):
        assert [(q.text, q.answers) for q in load_questions(nq, problem_field=field)] == [("q4", ("e",))]
    assert load_questions(nq, answer_field="extra_info.own.answer")[0].answers == ("f",)
    for broken, words in (
        ({"question": "q"}, "line 1: no answer found; it has the keys 'question'"),
        ({"query": "q", "answer": "a"}, "expected a text 'question'"),
        ({"question": "q", "answer": "a", "context": [["t"]]}, "pairs of a title"),
    ):
        nq.write_text(json.dumps(broken))
        with pytest.raises(DataError, match=words):
            load_questions(nq)
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text('{"id": "7", "contents": "\\"Paris\\"\\nThe Seine."}\n{"title": "Rome", "text": "A city."}')
    assert [(p.id, p.title, p.text) for p in load_corpus(corpus)] == [
        ("7", "Paris", "The Seine."),
        ("1", "Rome", "A city."),
    ]
    corpus.write_text('{"id": "7"}')
    with pytest.raises(DataError, match="no passage found"):
        load_corpus(corpus)


def test_no_held_out_answer_stands_in_the_training_corpus():
    train = " ".join(fact.text for fact in generated("train").facts)
    held_out = generated("test").questions
    assert len(held_out) == 300 and not any(mentions(train, question.answers) for question in held_out)


@pytest.mark.parametrize("split", ["train", "test"])
def test_a_perfect_team_scores_1_and_a_careless_one_less(split):
    env, world = SearchEnv(split=split), generated(split)
    perfect = [play(env, world, task, careless=0.0)[1] for task in range(0, len(world.facts), 9)]
    assert {info["outcome"] for info in perfect} == {1.0}
    assert {info["measures"]["searches"] for info in perfect} == {1.0, 2.0}  # some facts refer to another one
    assert {info["evidence"]["answer"].rules.score for info in perfect} == {10.0}
    careless = [play(env, world, task, careless=0.5)[1]["outcome"] for task in range(0, len(world.facts), 9)]
    assert 0.0 < sum(careless) / len(careless) < 0.6


def test_the_verifier_routes_and_the_last_turn_is_an_answer():
    env = SearchEnv(retriever=Bm25(PASSAGES), horizon=3, questions=generated("train").questions)
    check_env(env)
    assert outcome(env, ["<verify>yes</verify>", "<answer>x</answer>"])["measures"]["searches"] == 0.0
    info = outcome(env, ["no decision", "<search>Seine</search>", "Verdict: reject", "?!", "\\boxed{1}"])
    assert [text for role, text in info["state"].said if role == "tool"] == [
        "(Paris) The Seine crosses it.",
        "Nothing was searched for: the query is empty.",
    ]
    assert info["measures"] == {"searches": 2.0, "undecided": 0.5, "em": 0.0, "f1": 0.0}
    session = session_of(env)
    session.reset(seed=0)
    seen = [session.step({"verifier": "no"}), session.step({"search": "Tiber"})]
    assert seen[1].observations["verifier"].endswith("\nsearch: Tiber\ntool: Rome lies on the Tiber.")
    assert seen[1].info["evidence"]["search"].rules.score == 4.0
    assert sufficient("<verify>YES</verify>") and sufficient("nothing") is None
    assert query_of("<think>a</think> b\n c") == "b c"
    assert query_of("as <search> says: <search>b</search>") == "b"
    started = time.process_time()
    query_of("<search>" * 25_000)  # quadratic work would take a minute
    assert time.process_time() - started < 2


@pytest.mark.parametrize(
    "text", ["a the " * 33_000, " ".join(map(str, range(33_000))), "\u0130" * 200_000, " " * 200_000]
)
def test_a_long_answer_is_read_once_however_many_are_right(text):
    golden = [f"answer {n}" for n in range(400)]
    started = time.process_time()
    assert exact_match(text, golden) == 0.0 and f1(text, golden) < 0.01
    # Once takes a few hundredths of a second, and once for every golden answer 6 s or more.
    assert time.process_time() - started < 2


@pytest.mark.parametrize("workflow", ["single", "chain", "vote", "debate", "summary"])
def test_other_workflows_play_the_questions_without_search(workflow):
    team = Team.of(("a", "b", "c"))
    env = SearchEnv(team=Team.of(("c",)) if workflow in ("single",) else team, workflow=workflow, horizon=1)
    session = session_of(env)
    observations, info = session.reset(seed=3)
    while True:
        result = session.step(dict.fromkeys(observations, f"\\boxed{{{info['answer']}}}"))
        if result.terminated:
            break
        observations = result.observations
    assert result.info["outcome"] == 1.0 == result.info["measures"]["em"]


def test_wrong_settings_are_one_sentence(tmp_path):
    question = load_questions_of(tmp_path, [{"question": "q", "answer": "a"}])
    for make, words in (
        (lambda: SearchEnv(questions=question), "nothing to search in"),
        (lambda: SearchEnv(metric="bleu"), "choose one of em, f1"),
        (lambda: SearchEnv(topk=0), "topk is 0"),
        (lambda: SearchEnv(horizon=1), "horizon is 1"),
        (lambda: SearchEnv(team=Team.of(("a", "b"))), "three agents"),
        (lambda: SearchEnv(retriever="localhost:8000"), "give a URL"),
        (lambda: MathEnv(team=Team.of(("a", "b", "c")), workflow="search", horizon=2), "train_search"),
        (lambda: Bm25([Passage("0", "", "!")]), "without a word"),
    ):
        with pytest.raises(ConfigError, match=words):
            make()


def load_questions_of(folder, records):
    path = folder / "questions.jsonl"
    path.write_text("\n".join(map(json.dumps, records)))
    return load_questions(path)


def test_the_build_holds_out_and_searches_all_passages_of_the_file(tmp_path):
    path = tmp_path / "h.json"
    path.write_text(json.dumps(HOTPOT * 10))
    built = build({"dataset_path": str(path), "horizon": 4, "workflow": "search", "topk": 2})
    assert len(built.train_env.unwrapped.questions) == 18 and len(built.eval_env.unwrapped.questions) == 1
    assert built.train_env.tool.retriever is built.eval_env.tool.retriever
    assert "1 question common to both sets" in built.notes[1]
    test = build({"dataset_path": str(path), "eval_split": "test"})
    assert [q.id for q in test.eval_env.unwrapped.questions] != [q.id for q in built.eval_env.unwrapped.questions]
    found = built.eval_env.tool.retriever.passages if hasattr(built.eval_env.tool.retriever, "passages") else None
    assert found is None or len(found) == len(test.eval_env.tool.retriever.passages)


# ------------------------------------------------------------------------------------------------- servers


@pytest.fixture
def liar():
    """A server whose replies the test chooses."""
    reply = {"status": 200, "body": b"{}", "delay": 0.0}

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            self.rfile.read(int(self.headers["content-length"]))
            time.sleep(reply["delay"])
            self.send_response(reply["status"])
            self.end_headers()
            self.wfile.write(reply["body"])

        def log_message(self, *args):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}/retrieve", reply
    server.shutdown()


def test_a_retriever_that_lies_or_hangs_loses_the_episode(liar):
    url, reply = liar
    retriever = HttpRetriever(url, timeout_s=0.5)
    for body, words in (
        (b"not json", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b"{}", 'expected {"result"'),
        (b'{"result": [[], []]}', "one list a query"),
        (b'{"result": [[{"document": {"contents": 5}}]]}', "a text 'contents'"),
        (b'{"result": [[{"document": {"contents": "x"}, "score": "high"}]]}', "answered a passage"),
        (b'{"result": [[{"document": {"contents": "x"}, "score": NaN}]]}', "a finite 'score'"),
        (b'{"result": [[{"document": {"contents": "x"}, "score": -Infinity}]]}', "a finite 'score'"),
        (b'{"result": [[{"document": {"contents": "x"}, "score": 1' + b"0" * 400 + b"}]]}", "a finite 'score'"),
        (b'{"result": [[{"document": {"contents": "x"}, "score": true}]]}', "a finite 'score'"),
        (b"x" * (9 * 2**20), "more than 8 MiB"),
    ):
        reply["body"] = body
        with pytest.raises(EnvError, match=words):
            retriever.search("q", 3)
    reply.update(body=b'{"result": [[{"id": 1, "contents": "\\"T\\"\\nbare\\u0000"}]]}')
    assert retriever.search("q", 3) == [(Passage("1", "T", "bare\N{REPLACEMENT CHARACTER}"), 0.0)]
    env = SearchEnv(retriever=url, retriever_timeout_s=0.5)
    session = session_of(env)
    session.reset(seed=0)
    session.step({"verifier": "no"})
    reply["delay"] = 1.0
    with pytest.raises(EnvError, match=r"did not answer within 0\.5 s"):
        session.step({"search": "q"})
    reply.update(delay=0.0, status=500)
    with pytest.raises(ConfigError, match=r"status 500.*serve_retriever"):
        SearchEnv(retriever=url)
    with pytest.raises(EnvError, match="cannot be reached"):
        HttpRetriever("http://127.0.0.1:9/retrieve").search("q", 1)


def test_a_search_whose_client_has_left_ends():
    asked = []

    class Slow:
        passages = ()

        def search(self, query, topk):
            asked.append(query)
            time.sleep(0.02)
            return []

    body = json.dumps({"queries": ["x"] * 512}).encode()
    head = {"type": "http", "method": "POST", "path": "/retrieve", "query_string": b"", "server": ("127.0.0.1", 80)}
    head["headers"] = [(b"host", b"127.0.0.1"), (b"content-type", b"application/json")]
    messages = [{"type": "http.disconnect"}, {"type": "http.request", "body": body, "more_body": False}]
    sent = []

    async def receive():
        return messages.pop() if len(messages) > 1 else messages[0]

    async def send(message):
        sent.append(message)

    asyncio.run(app(Slow())(head, receive, send))
    assert len(asked) < 256 and sent[0]["status"] == 503


def test_the_server_answers_in_search_r1s_form_and_refuses_the_rest(monkeypatch):
    from starlette.testclient import TestClient

    index = Bm25(PASSAGES)
    client = TestClient(app(index, topk=1))
    body = {"queries": ["Seine", "Tiber"], "topk": 2, "return_scores": True}
    result = client.post("/retrieve", json=body).json()["result"]
    assert [hit["document"]["id"] for hits in result for hit in hits] == ["0", "1"]
    assert result[0][0]["document"]["contents"] == '"Paris"\nThe Seine crosses it.' and result[0][0]["score"] > 0
    assert client.post("/retrieve", json={"queries": ["Seine"]}).json() == {"result": [[PASSAGES[0].document()]]}
    for wrong in ([], {"queries": "Seine"}, {"queries": [], "topk": 0}, {"queries": [], "return_scores": 1}):
        assert client.post("/retrieve", json=wrong).status_code == 422
    assert client.post("/retrieve", content=b"x" * (2**20 + 1)).status_code == 413
    closed = TestClient(app(index, token="secret"))
    assert closed.post("/retrieve", json=body).status_code == 401
    assert closed.post("/retrieve", json=body, headers={"authorization": "Bearer secret"}).status_code == 200
    with pytest.raises(ValueError, match="at most 512"):
        retrieve(index, {"queries": ["x"] * 513}, 1)
    for reply in (client.get("/retrieve"), client.post("/search", json=body)):
        assert reply.status_code in (404, 405) and "POST /retrieve and GET /health" in reply.json()["error"]
    monkeypatch.setattr(server, "MOST_REPLY_MIB", 0.001)
    assert client.post("/retrieve", json={"queries": ["Seine"]}).status_code == 200
    reply = client.post("/retrieve", json={"queries": ["Seine"] * 100})
    assert reply.status_code == 422 and "fewer queries" in reply.json()["error"]


def test_the_served_corpus_answers_the_environment(tmp_path):
    import uvicorn

    world = generated("test")
    config = uvicorn.Config(app(Bm25(world.questions[0].passages)), port=0, log_level="error", lifespan="off")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    url = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}/retrieve"
    env = SearchEnv(split="test", retriever=url)
    assert [play(env, world, task, careless=0.0)[1]["outcome"] for task in (0, 299)] == [1.0, 1.0]
    server.should_exit = True
    thread.join(60)


def test_commands_refuse_before_a_model_is_loaded(tmp_path, capsys):
    for main, words, said in (
        (train_search.main, ["--retriever", "http://127.0.0.1:9/retrieve"], "cannot be reached"),
        (train_search.main, ["--dataset_path", "nothing.jsonl"], "does not exist"),
        (train_search.main, ["--demonstrations", "d.jsonl", "--demonstration_episodes", "0"], "at least 1"),
        (serve_retriever.main, [], "nothing to serve"),
        (serve_retriever.main, ["--corpus_path", "x", "--host", "0.0.0.0"], "set a token"),
    ):
        assert main(words) == 2 and said in capsys.readouterr().err
    path = tmp_path / "d.jsonl"
    assert train_search.main(["--demonstrations", str(path), "--demonstration_episodes", "5"]) == 0
    assert {json.loads(line)["agent"] for line in path.read_text().splitlines()} >= {"verifier", "answer"}
