"""Clients of the Tinker server that mean ill or err: each gets one clear refusal, and nobody else notices."""

from __future__ import annotations

import http.client
import json
import socket
import time
from dataclasses import replace

import numpy as np
import pytest
from helpers_models import random_ids, tiny_base
from helpers_requests import BROKEN, status_of
from helpers_tinker import PROTOBUF, Client, RefusedByServerError, datum, new_key, serving, tensor

from mafrt.core.errors import ConfigError
from mafrt.scripts.tinker_server import wire_pb2 as wire
from mafrt.scripts.tinker_server.limits import Limits
from mafrt.scripts.tinker_server.server import TinkerServer

ROWS = random_ids(4, 24, seed=3).tolist()
GOOD = datum(ROWS[0][:-1], ROWS[0][1:], weights=[1.0] * 23)


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    limits = replace(
        Limits(), sessions=200, batch_tokens=2000, body_mib=1.0, waiting=64, samples=16, rank=16, adapters=8
    )
    server = serving(tiny_base(), tmp_path_factory.mktemp("tinker"), limits=limits)
    yield server
    server.close()


@pytest.fixture
def honest(served):
    """A client that works before and after: its losses stay as they are."""
    client = Client(served, new_key())
    model = client.model()
    before = client.learn(model, [GOOD], backward=False)
    yield client, model
    after = client.learn(model, [GOOD], backward=False)
    assert after[0] == pytest.approx(before[0], rel=1e-6)
    client.post(f"sessions/{client.session}/finish", {})


def refused(call, status, *words):
    with pytest.raises(RefusedByServerError) as error:
        call()
    assert error.value.status == status, error.value
    for word in words:
        assert word in str(error.value)


def failed(call, *words):
    with pytest.raises(RuntimeError) as error:
        call()
    assert str(error.value).startswith("user: ")
    for word in words:
        assert word in str(error.value)


# ------------------------------------------------------------------------------------------------- of somebody else


def test_what_belongs_to_another_key_is_not_there(served, honest):
    owner, model = honest
    state = owner.save(model, "mine")
    sampler = owner.snapshot(model)
    asked = owner.asample(sampler, ROWS[0][:5])["request_id"]
    thief = Client(served, new_key())
    thief.seqs[model] = owner.seqs[model]
    refused(lambda: thief.learn(model, [GOOD]), 404, "of yours")
    refused(lambda: thief.step(model, learning_rate=1.0), 404)
    refused(lambda: thief.save(model, "stolen"), 404)
    refused(lambda: thief.snapshot(model), 404)
    refused(lambda: thief.from_state(state), 404)
    refused(lambda: thief.sampler(model_path=state), 404)
    refused(lambda: thief.sample(sampler, ROWS[0][:5]), 404)
    refused(lambda: thief.fetch(asked), 404)
    refused(lambda: thief.post("cancel_future", {"request_id": asked}), 404)
    refused(lambda: thief.post("get_info", {"model_id": model}), 404)
    refused(lambda: thief.post("weights_info", {"tinker_path": state}), 404)
    refused(lambda: thief.get(f"training_runs/{model}"), 404)
    refused(lambda: thief.get(f"training_runs/{model}/checkpoints"), 404)
    refused(lambda: thief.get(f"samplers/{sampler}"), 404)
    refused(lambda: thief.get(f"sessions/{owner.session}"), 404)
    refused(lambda: thief.call("DELETE", f"training_runs/{model}/checkpoints/weights/mine"), 404)
    refused(lambda: thief.post(f"sessions/{owner.session}/finish", {}), 404)
    refused(lambda: thief.post("session_heartbeat", {"session_id": owner.session}), 404)
    body = {"session_id": owner.session, "model_seq_id": 7, "base_model": "tiny"}
    refused(lambda: thief.post("create_model", body), 404)
    target = {"target": {"type": "sampling_session", "sampling_session_id": sampler}}
    refused(lambda: thief.post("retrieve_futures", target), 404)
    owner.fetch(asked)


PATHS = [
    "tinker://../../etc/weights/passwd",
    "tinker://{run}/weights/../../../x",
    "tinker://{run}/weights/..",
    "tinker://{run}/weights/.mine.tmp",
    "tinker://{run}/weights/a/b",
    "tinker://{run}/optimizer/a",
    "tinker://{run}/weights/",
    "tinker:///weights/a",
    "tinker://{run}/weights/%2e%2e",
    "tinker://{run}/weights/a\u0000b",
    "tinker://{run}/weights/" + "a" * 200,
    "/etc/passwd",
    "file:///etc/passwd",
    "tinker://{upper}/weights/a",
    "tinker://{run}/weights/١",
    "",
]


@pytest.mark.parametrize("path", PATHS)
def test_paths_lead_nowhere_else(served, honest, path):
    client, model = honest
    path = path.format(run=model, upper=model.upper())
    for call in (
        lambda: client.from_state(path),
        lambda: client.sampler(model_path=path),
        lambda: client.post("weights_info", {"tinker_path": path}),
    ):
        refused(call, 400)


def test_a_wrong_path_is_told_as_it_was_given(honest):
    client, _ = honest
    for path in ("file:///etc/passwd", "tinker://x/weights/a/b"):
        with pytest.raises(RefusedByServerError, match=f"'{path}' is no path of this server"):
            client.sampler(model_path=path)


@pytest.mark.parametrize("name", ["..", "a/b", "../x", ".hidden", "a\\b/../c", "", "x" * 101, "a\n", "é"])
def test_names_of_checkpoints_stay_in_their_folder(served, honest, name):
    client, model = honest
    refused(lambda: client.save(model, name), 400)
    refused(lambda: client.save(model, name, "save_weights_for_sampler"), 400)
    assert client.save(model, "good", overwrite=True).endswith("/weights/good")


# ---------------------------------------------------------------------------------------------------- wrong contents


def nan(value=float("nan")):
    return datum(ROWS[0][:3], ROWS[0][1:4], weights=[1.0, value, 1.0])


def shaped(shape, values=3):
    made = datum(ROWS[0][:3], ROWS[0][1:4], weights=[1.0] * 3)
    made.loss_fn_inputs["weights"].shape[:] = shape
    made.loss_fn_inputs["weights"].dense = np.ones(values, np.float32).tobytes()
    return made


def cut():
    made = datum(ROWS[0][:3], ROWS[0][1:4], weights=[1.0] * 3)
    made.loss_fn_inputs["weights"].dense = b"\0" * 11
    return made


def sparse(starts, columns, shape=(3, 2)):
    made = datum(ROWS[0][:3], np.zeros((3, 2), np.int64), weights=np.zeros((3, 2)))
    held = made.loss_fn_inputs["weights"]
    held.shape[:] = shape
    held.sparse_csr.values = np.ones(len(columns), np.float32).tobytes()
    held.sparse_csr.crow_indices = np.array(starts, np.int64).tobytes()
    held.sparse_csr.col_indices = np.array(columns, np.int64).tobytes()
    return made


def floats_as_targets():
    made = datum(ROWS[0][:3], ROWS[0][1:4], weights=[1.0] * 3)
    made.loss_fn_inputs["target_tokens"].CopyFrom(tensor([1.0, 2.0, 3.0]))
    return made


def image():
    made = datum(ROWS[0][:3], ROWS[0][1:4], weights=[1.0] * 3)
    made.model_input.add()
    return made


LONG = [5] * 300
BAD = {
    "NaN": ([nan()], "cross_entropy", {}, 400, "NaN"),
    "infinity": ([nan(float("inf"))], "cross_entropy", {}, 400, "infinity"),
    "absurd weight": ([nan(1e30)], "cross_entropy", {}, 400, "beyond"),
    "no examples": ([], "cross_entropy", {}, 400, "no examples"),
    "empty example": ([datum([], [], weights=[])], "cross_entropy", {}, 400, "empty"),
    "unknown loss": ([GOOD], "exec", {}, 400, "unknown"),
    "loss of the SDK": ([GOOD], "custom", {}, 400, "not this server's"),
    "long loss name": ([GOOD], "x" * 100_000, {}, 400, "unknown"),
    "unknown setting": ([GOOD], "cross_entropy", {"beta": 1.0}, 400, "no setting"),
    "absurd setting": ([GOOD], "ppo", {"clip_low_threshold": float("nan")}, 400, "number"),
    "no targets": ([wire.Datum(model_input=GOOD.model_input)], "cross_entropy", {}, 400, "target_tokens"),
    "no weights": ([datum([5, 6], [6, 7])], "cross_entropy", {}, 400, "weights"),
    "inputs of another loss": ([GOOD], "ppo", {}, 400, "logprobs"),
    "token below": ([datum([5, -1], [6, 7], weights=[1, 1])], "cross_entropy", {}, 400, "-1"),
    "token beyond": ([datum([5, 10**6], [6, 7], weights=[1, 1])], "cross_entropy", {}, 400, "1000000"),
    "target beyond": ([datum([5, 6], [6, 10**6], weights=[1, 1])], "cross_entropy", {}, 400, "ids"),
    "target below": ([datum([5, 6], [6, -100], weights=[1, 1])], "cross_entropy", {}, 400, "ids"),
    "targets are floats": ([floats_as_targets()], "cross_entropy", {}, 400, "int64"),
    "short weights": ([datum([5, 6, 7], [6, 7, 8], weights=[1, 1])], "cross_entropy", {}, 400, "shape"),
    "wide weights": ([datum([5, 6], [6, 7], weights=[[1, 1], [1, 1]])], "cross_entropy", {}, 400, "shape"),
    "shape of more numbers": ([shaped([3, 1000])], "cross_entropy", {}, 400, "entries|shape"),
    "negative shape": ([shaped([-3])], "cross_entropy", {}, 400, "shape"),
    "huge shape": ([shaped([2**62, 2**62])], "cross_entropy", {}, 400, "shape"),
    "three axes": ([shaped([3, 1, 1])], "cross_entropy", {}, 400, "shape"),
    "cut bytes": ([cut()], "cross_entropy", {}, 400, "cut"),
    "sparse columns beyond": ([sparse([0, 1, 1, 1], [5])], "cross_entropy", {}, 400, "indices"),
    "sparse rows fall": ([sparse([0, 2, 1, 1], [0])], "cross_entropy", {}, 400, "indices"),
    "sparse without rows": ([sparse([], [0])], "cross_entropy", {}, 400, "indices"),
    "longer than the window": ([datum(LONG, LONG, weights=[1.0] * 300)], "cross_entropy", {}, 400, "window"),
    "huge batch": ([datum(LONG[:200], LONG[:200], weights=[1.0] * 200)] * 11, "cross_entropy", {}, 413, "tokens"),
    "image": ([image()], "cross_entropy", {}, 400, "text only"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_wrong_batch_is_refused(served, honest, name):
    client, model = honest
    data, loss, config, status, words = BAD[name]
    with pytest.raises(RefusedByServerError) as error:
        client.learn(model, data, loss, **config)
    assert error.value.status == status and any(word in str(error.value) for word in words.split("|")), error.value
    assert len(str(error.value)) < 1000


def test_a_ratio_that_overflows_fails_alone(served, honest):
    client, model = honest
    other = Client(served, new_key())
    theirs = other.model()
    bad = datum(ROWS[0][:3], ROWS[0][1:4], logprobs=[-1e5] * 3, advantages=[1.0] * 3)
    with served.service.slots.training:
        one = other.begin_pass(other.message(theirs, [bad], "importance_sampling"))
        two = client.begin_pass(client.message(model, [GOOD]))
        time.sleep(0.1)
    failed(lambda: other.fetch(one), "not finite")
    client.fetch(two)
    assert bool(served.service._models[model].adapter.gradient.isfinite().all())
    assert other.step(theirs, learning_rate=0.1) == {"grad_norm:mean": 0.0}
    client.step(model, learning_rate=0.0)


@pytest.mark.parametrize(
    "adam",
    [
        *({"learning_rate": value} for value in (1e30, -1.0, "1", True, [])),
        *({"beta1": 1.0}, {"beta2": 5}, {"eps": -1}, {"weight_decay": 1e9}, {"grad_clip_norm": "x"}),
    ],
)
def test_absurd_steps_are_refused(served, honest, adam):
    client, model = honest
    refused(lambda: client.step(model, **adam), 400, next(iter(adam)))


def test_a_step_to_absurd_weights_is_taken_back(served, honest):
    client, _ = honest
    model = client.model()
    client.learn(model, [GOOD])
    before = client.learn(model, [GOOD], backward=False)
    failed(
        lambda: [client.learn(model, [GOOD]) and client.step(model, learning_rate=10.0, eps=0.0) for _ in range(200)]
    )
    assert np.isfinite(client.learn(model, [GOOD], backward=False)[0]) and np.isfinite(before[0])


SAMPLES = {
    "no tokens": ({"prompt": {"chunks": []}}, "empty"),
    "no chunks": ({"prompt": 5}, "prompt"),
    "an image": ({"prompt": {"chunks": [{"type": "image", "data": "x"}]}}, "text"),
    "texts as tokens": ({"prompt": {"chunks": [{"tokens": ["a"]}]}}, "token"),
    "token beyond": ({"prompt": {"chunks": [{"tokens": [10**9]}]}}, "token"),
    "true as token": ({"prompt": {"chunks": [{"tokens": [True]}]}}, "token"),
    "longer than the window": ({"prompt": {"chunks": [{"tokens": [5] * 5000}]}}, "tokens"),
    "a million samples": ({"num_samples": 10**6}, "num_samples"),
    "no samples": ({"num_samples": 0}, "num_samples"),
    "hot": ({"sampling_params": {"temperature": 1e300}}, "temperature"),
    "cold": ({"sampling_params": {"temperature": -1}}, "temperature"),
    "top_p of nothing": ({"sampling_params": {"top_p": 0}}, "top_p"),
    "no new tokens": ({"sampling_params": {"max_tokens": 0}}, "max_tokens"),
    "stop of objects": ({"sampling_params": {"stop": [{}]}}, "token"),
    "many stops": ({"sampling_params": {"stop": ["a"] * 1000}}, "stop"),
    "empty stop": ({"sampling_params": {"stop": [""]}}, "token"),
    "a seed of text": ({"sampling_params": {"seed": "x"}}, "seed"),
    "all tokens as likeliest": ({"topk_prompt_logprobs": 10**6}, "topk_prompt_logprobs"),
    "alternatives": ({"prompt_alt_tokens_k": 2}, "prompt_alt_tokens_k"),
    "a sequence number of text": ({"seq_id": "1"}, "seq_id"),
}


@pytest.mark.parametrize("name", SAMPLES)
def test_wrong_samples_are_refused(served, honest, name):
    client, _ = honest
    change, word = SAMPLES[name]
    good = {"prompt": {"chunks": [{"tokens": ROWS[0][:5]}]}, "sampling_params": {"max_tokens": 3}}
    body = {"sampling_session_id": client.sampler(), "seq_id": 1, "num_samples": 1, **good}
    refused(lambda: client.post("asample", {**body, **change}), 400, word)


def test_wrong_models_are_refused(served):
    client = Client(served, new_key())
    for lora in (
        {"rank": 0},
        {"rank": 10**6},
        {"rank": "8"},
        {"rank": True},
        {"train_attn": False, "train_mlp": False},
    ):
        refused(lambda lora=lora: client.model(**lora), 400)
    for body in ({"base_model": "other"}, {"base_model": 5}, {"base_model": "tiny", "model_seq_id": -1}):
        asked = {"session_id": client.session, "model_seq_id": 90, "lora_config": {"rank": 4}, **body}
        refused(lambda asked=asked: client.post("create_model", asked), 400)
    asked = {
        "session_id": client.session,
        "model_seq_id": 91,
        "base_model": "tiny",
        "optimizer_config": {"type": "dimuon"},
    }
    refused(lambda: client.post("create_model", asked), 400, "adamw")


# ------------------------------------------------------------------------------------------------------- wrong bodies


@pytest.mark.parametrize(
    ("path", "content", "kind", "status"),
    [
        ("forward_backward", b"\xff" * 100, PROTOBUF, 400),
        ("forward_backward", b"\x1a\x00" * 500_000, PROTOBUF, 404),  # half a million empty examples, of no model
        ("forward_backward", b"{}", "application/json", 415),
        ("forward_backward", b"x" * (2**20 + 1), PROTOBUF, 413),
        ("create_session", b"x" * (2**20 + 1), "application/json", 413),
        ("create_session", b"[1]", "application/json", 400),
        ("create_session", b"{", "application/json", 400),
        ("create_session", b'{"user_metadata": 5}', "application/json", 400),
        ("create_session", b"[" * 10**5, "application/json", 400),
        ("create_session", b"{}", "text/plain", 415),
        ("optim_step", b'{"model_id": {"a": 1}}', "application/json", 400),
        (
            "optim_step",
            b'{"model_id": "x", "seq_id": 1, "adam_params": {"learning_rate": NaN}}',
            "application/json",
            400,
        ),
        ("retrieve_future", b'{"request_id": null}', "application/json", 400),
        ("retrieve_future", b'{"request_id": "x"}', "application/json", 404),
        ("nothing_here", b"{}", "application/json", 404),
        ("healthz", b"{}", "application/json", 405),
    ],
)
def test_wrong_bodies_are_refused(served, honest, path, content, kind, status):
    client, _ = honest
    found, body = client.raw("POST", path, content, kind)
    assert found == status and "detail" in json.loads(body)


@pytest.mark.parametrize("wrong", [True, 1, -(2**63), 0.5, "x", {"a": 1}])
def test_what_was_retrieved_is_a_list(served, wrong):
    client = Client(served, new_key())
    target = {"sampling_session_id": client.sampler()}
    asked = {"target": target, "retrieved_request_ids": wrong, "timeout": 0}
    refused(lambda: client.post("retrieve_futures", asked), 400, "must be a list")
    assert client.post("retrieve_futures", {**asked, "retrieved_request_ids": [wrong, None]})["completions"] == []


def test_another_sites_page_is_refused(served):
    client = Client(served, new_key())
    for headers in ({"Origin": "https://evil.example"}, {"Sec-Fetch-Site": "cross-site"}, {"Host": "evil.example"}):
        assert client.raw("POST", "create_session", b"{}", **headers)[0] == 403
        assert client.raw("POST", "forward_backward", b"", PROTOBUF, **headers)[0] == 403


def test_a_half_sent_request_harms_nobody(served, honest):
    client, model = honest
    message = client.message(model, [GOOD])
    content = message.SerializeToString()
    head = (
        f"POST /api/v1/forward_backward HTTP/1.1\r\nHost: 127.0.0.1\r\nX-API-Key: {client.key}\r\n"
        f"Content-Type: {PROTOBUF}\r\nContent-Length: {len(content)}\r\n\r\n"
    )
    with socket.create_connection(("127.0.0.1", served.port)) as half:
        half.sendall(head.encode() + content[: len(content) // 2])
        time.sleep(0.05)
    # The request that is then sent in full is the first of its number.
    assert client.fetch(client.begin_pass(message))


@pytest.mark.slow
def test_broken_requests_are_refused(tmp_path):
    server = serving(tiny_base(), tmp_path, limits=replace(Limits(), body_s=0.2))
    try:
        client = Client(server)
        body = b'{"session_id": "none"}'
        for name, (made, status) in BROKEN.items():
            assert status_of(server, made("/api/v1/create_model", body)) == status, name
        assert client.model()
    finally:
        server.close()


@pytest.mark.slow
def test_hundreds_of_open_connections_keep_nobody_out(served, honest):
    client, model = honest
    opened = []
    try:
        for _ in range(400):
            opened.append(socket.create_connection(("127.0.0.1", served.port)))
        assert client.learn(model, [GOOD], backward=False)[0] > 0
    finally:
        for each in opened:
            each.close()


def test_a_numbers_gap_ends(tmp_path):
    server = serving(tiny_base(), tmp_path, limits=replace(Limits(), gap_s=0.2))
    try:
        client = Client(server)
        model = client.model()
        client.seq(model)
        request = client.begin_pass(client.message(model, [GOOD]))
        failed(lambda: client.fetch(request), "has not come")
        far = client.message(model, [GOOD])
        far.seq_id = 10**9
        refused(lambda: client.begin_pass(far), 400, "far ahead")
    finally:
        server.close()


def test_bounds_of_a_client_hold_for_it_alone(tmp_path):
    limits = replace(Limits(), sessions=2, adapters=1, waiting=8, kept=4, checkpoints=2, snapshots=2)
    server = serving(tiny_base(), tmp_path, limits=limits)
    try:
        greedy = Client(server, "tml-greedy-client")
        Client(server, "tml-greedy-client")
        refused(lambda: Client(server, "tml-greedy-client"), 429, "sessions")
        other = Client(server, "tml-other-client")
        model = greedy.model()
        refused(lambda: greedy.model(), 429, "training clients")
        other.model()
        sampler = greedy.sampler()
        with server.service.slots.sampling:
            begun = [greedy.asample(sampler, ROWS[0][:5], 4)["request_id"] for _ in range(2)]
            refused(lambda: greedy.asample(sampler, ROWS[0][:5], 4), 429, "wait")
            other.asample(other.sampler(), ROWS[0][:5], 4)
        for request in begun:
            greedy.fetch(request)
        greedy.seqs[sampler] -= 1  # the refused one may come again
        assert len(greedy.sample(sampler, ROWS[0][:5], 4).sequences) == 4
        requests = [greedy.asample(sampler, ROWS[0][:5])["request_id"] for _ in range(6)]
        time.sleep(1.0)
        refused(lambda: [greedy.fetch(request) for request in requests], 404, "kept")
        greedy.save(model, "a")
        greedy.save(model, "b")
        refused(lambda: greedy.save(model, "c"), 422, "checkpoints")
        first, *_ = [greedy.snapshot(model) for _ in range(3)]
        refused(lambda: greedy.sample(first, ROWS[0][:5]), 404)
    finally:
        server.close()


def test_tokens(tmp_path):
    for host, tokens in (("192.0.2.1", ()), ("127.0.0.1", ("secret-without-prefix",)), ("127.0.0.1", ("tml-short",))):
        with pytest.raises(ConfigError, match="token"):
            TinkerServer(host=host, tokens=tokens)
    server = serving(tiny_base(), tmp_path, tokens=("tml-the-first-one", "tml-the-second"))
    try:
        for key in ("tml-another-key", "", "tml-the-first-on"):
            connection = http.client.HTTPConnection("127.0.0.1", server.port)
            connection.request(
                "POST", "/api/v1/client/config", b"{}", {"X-API-Key": key, "Content-Type": "application/json"}
            )
            assert connection.getresponse().status == 401
            connection.close()
        first, second = Client(server, "tml-the-first-one"), Client(server, "tml-the-second")
        state = first.save(first.model(), "mine")
        refused(lambda: second.from_state(state), 404)
    finally:
        server.close()
