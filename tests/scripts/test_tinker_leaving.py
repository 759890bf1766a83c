"""Clients of the Tinker server that leave, stay silent, cancel or never fetch: nothing of theirs stays for ever."""

from __future__ import annotations

import json
import socket
import threading
import time
from contextlib import contextmanager
from dataclasses import replace

import pytest
from helpers_models import random_ids, tiny_base
from helpers_tinker import PROTOBUF, Client, RefusedByServerError, datum, new_key, serving

from mafrt.environment import local_server
from mafrt.scripts.tinker_server.limits import Limits
from mafrt.scripts.tinker_server.trainer import Job

ROWS = random_ids(4, 24, seed=3).tolist()
GOOD = datum(ROWS[0][:-1], ROWS[0][1:], weights=[1.0] * 23)


@pytest.fixture
def serve(tmp_path):
    servers = []

    def made(**limits):
        servers.append(serving(tiny_base(), tmp_path, limits=replace(Limits(), **limits)))
        return servers[-1]

    yield made
    for server in servers:
        server.close()


@contextmanager
def busy_trainer(server):
    """While the trainer's thread has something else to do."""
    gate, begun = threading.Event(), threading.Event()
    server.service.trainer.submit(Job(object(), lambda: (begun.set(), gate.wait(60))))
    assert begun.wait(60)
    try:
        yield
    finally:
        gate.set()


def until(true):
    deadline = time.monotonic() + 90
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def sent(server, client, path, content, kind="application/json"):
    """A connection on which a whole request was sent."""
    made = socket.create_connection(("127.0.0.1", server.port))
    head = f"POST /api/v1/{path} HTTP/1.1\r\nHost: 127.0.0.1\r\nX-API-Key: {client.key}\r\nContent-Type: {kind}\r\n"
    made.sendall(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
    return made


def test_a_pass_and_a_step_whose_sender_left_count_once(serve):
    server = serve()
    client = Client(server)
    model, other = client.model(), client.model()
    message = client.message(model, [GOOD])
    for _ in range(3):
        sent(server, client, "forward_backward", message.SerializeToString(), PROTOBUF).close()
    client.fetch(client.begin_pass(message))
    client.learn(other, [GOOD])
    steps = []
    for each in (model, other):
        body = {"model_id": each, "seq_id": client.seq(each), "adam_params": {"learning_rate": 1e-2}}
        for _ in range(3 if each == model else 0):
            sent(server, client, "optim_step", json.dumps(body).encode()).close()
        steps.append(client.fetch(client.post("optim_step", body)["request_id"])["metrics"])
    assert steps[0] == pytest.approx(steps[1])
    assert client.learn(model, [GOOD])[0] == pytest.approx(client.learn(other, [GOOD])[0], rel=1e-6)


def test_polls_whose_clients_left_hold_no_connection(serve):
    server = serve()
    client = Client(server)
    model = client.model()
    with busy_trainer(server):
        request = client.begin_pass(client.message(model, [GOOD]))
        for _ in range(100):
            sent(server, client, "retrieve_future", json.dumps({"request_id": request}).encode()).close()
        until(lambda: len(server._server.server_state.connections) < 10)
    client.fetch(request)


def test_a_client_that_polls_on_every_connection_keeps_nobody_out(serve):
    server = serve(connections=12)
    greedy, other = Client(server, new_key()), Client(server, new_key())
    model, sampler = greedy.model(), greedy.sampler()
    target = {"target": {"type": "sampling_session", "sampling_session_id": sampler}}
    with busy_trainer(server):
        request = greedy.begin_pass(greedy.message(model, [GOOD]))
        future = json.dumps({"request_id": request}).encode()
        polls = [sent(server, greedy, "retrieve_future", future) for _ in range(6)]
        polls += [sent(server, greedy, "retrieve_futures", json.dumps(target).encode()) for _ in range(6)]
        until(lambda: sum(not each.idle for each in server._server.server_state.connections) == 12)
        for _ in range(5):
            assert other.get("healthz") == {"status": "ok"}
        assert b" 408 " in polls[0].recv(20)
    for each in polls:
        each.close()


def half_sent(server, key, path="forward_backward", sent=10):
    line = socket.create_connection(("127.0.0.1", server.port))
    head = f"POST /api/v1/{path} HTTP/1.1\r\nHost: 127.0.0.1\r\nX-API-Key: {key}\r\nContent-Type: {PROTOBUF}\r\n"
    line.sendall(f"{head}Content-Length: 10000\r\n\r\n".encode() + b"x" * sent)
    return line


def arriving(server):
    return [each for each in server._server.server_state.connections if each.arrives]


def ended(line):
    """Whether the server ends a connection."""
    line.settimeout(60)
    try:
        return line.recv(1) == b""
    except ConnectionResetError:
        return True


@pytest.mark.parametrize("keys", ["one", "many", "none"])
@pytest.mark.parametrize("stalled_s", [0.0, 1e9])
def test_half_sent_bodies_on_every_connection_keep_nobody_out(serve, monkeypatch, keys, stalled_s):
    monkeypatch.setattr(local_server, "STALLED_S", stalled_s)
    server = serve(connections=12, body_s=1e6)
    name = {"one": lambda n: "tml-greedy-one", "many": lambda n: f"tml-greedy-{n}", "none": lambda n: ""}[keys]
    halves = [half_sent(server, name(n)) for n in range(12)]
    until(lambda: len(arriving(server)) == 12)
    other = Client(server, new_key())
    model = other.model()
    assert other.learn(model, [GOOD])[0] > 0
    for line in halves:
        line.close()


def test_the_client_with_most_half_sent_bodies_makes_room_first(serve, monkeypatch):
    monkeypatch.setattr(local_server, "STALLED_S", 0.0)
    server = serve(connections=8, body_s=1e6)
    slow = half_sent(server, "tml-slow-client")
    until(lambda: len(arriving(server)) == 1)
    greedy = []
    for count in range(2, 9):
        greedy.append(half_sent(server, "tml-greedy-client"))
        until(lambda count=count: len(arriving(server)) == count)
    more = socket.create_connection(("127.0.0.1", server.port))
    assert ended(greedy[0])
    assert {each.caller for each in arriving(server)} == {b"tml-slow-client", b"tml-greedy-client"}
    for line in (slow, more, *greedy):
        line.close()


def test_bytes_of_half_sent_bodies_are_bounded_all_together(serve, monkeypatch):
    monkeypatch.setattr(local_server, "ARRIVING_MIB", 6000 / 2**20)
    server = serve(body_s=1e6)
    lines = [half_sent(server, key, sent=n) for key, n in (("a", 2000), ("b", 1300), ("b", 1600))]
    until(lambda: len(arriving(server)) == 3 and sum(each.body_bytes for each in arriving(server)) > 4900)
    lines[1].sendall(b"x" * 1000)  # its client has most, and the other of its two is now the smaller
    assert ended(lines[1])
    until(lambda: sorted(each.caller for each in arriving(server)) == [b"a", b"b"])
    lines[0].sendall(b"x" * 4500)
    assert ended(lines[0])
    for line in lines:
        line.close()


def test_a_body_on_its_way_stays_while_a_poll_can_make_room(serve, monkeypatch):
    monkeypatch.setattr(local_server, "STALLED_S", 1e9)
    server = serve(connections=8, body_s=1e6)
    client = Client(server, new_key())
    model = client.model()
    with busy_trainer(server):
        future = json.dumps({"request_id": client.begin_pass(client.message(model, [GOOD]))}).encode()
        until(lambda: all(each.idle for each in server._server.server_state.connections))
        polls = [sent(server, client, "retrieve_future", future) for _ in range(4)]
        bodies = [half_sent(server, "tml-slow-client") for _ in range(4)]
        until(lambda: sum(not each.idle for each in server._server.server_state.connections) == 8)
        more = socket.create_connection(("127.0.0.1", server.port))
        assert b" 408 " in polls[0].recv(20)
        assert len(arriving(server)) == 4
    for line in (*polls, *bodies, more):
        line.close()


def test_results_that_nobody_fetches_are_bounded_in_bytes(serve):
    server = serve(kept_mib=0.001)
    client = Client(server)
    sampler = client.sampler()
    for _ in range(20):
        client.asample(sampler, ROWS[0][:5], 4)
    until(lambda: not server.service._tasks)
    held = [result for results in server.service._samplers[sampler].done.values() for result in results]
    assert 0 < sum(len(result.content) for result in held) <= 0.001 * 2**20
    target = {"target": {"type": "sampling_session", "sampling_session_id": sampler}, "timeout": 0}
    found = client.post("retrieve_futures", target)
    assert [each["request_id"] for each in found["completions"]] == [each.id for each in held]
    assert client.post("retrieve_futures", {**target, "prev_cursor": found["cursor"]})["completions"] == []


def test_requests_that_wait_are_bounded_in_bytes(serve):
    server = serve(waiting_mib=0.01)
    client = Client(server)
    model = client.model()
    message = client.message(model, [GOOD] * 60)
    with pytest.raises(RefusedByServerError, match="429"):
        client.begin_pass(message)
    message.ClearField("data")
    message.data.append(GOOD)
    assert client.fetch(client.begin_pass(message))  # the refused one used up nothing


def test_copies_of_a_sampler_are_those_that_joined(serve):
    client = Client(serve())
    sampler = client.sampler()
    copy = client.post("join_sampling_session", {"sampling_session_id": sampler})["client_counter"]
    client.seqs[sampler] = copy * 10**9
    assert client.sample(sampler, ROWS[0][:5])
    client.seqs[sampler] = (copy + 1) * 10**9
    with pytest.raises(RefusedByServerError, match="copy"):
        client.sample(sampler, ROWS[0][:5])


def test_a_session_ends_without_anybody_asking(serve):
    server = serve(session_s=0.5)
    Client(server).model()
    until(lambda: not server.service._sessions and not server.service._models)


def test_a_client_that_crashed_makes_room_for_the_next(serve):
    server = serve(sessions=2, adapters=1, silent_s=0.3)
    Client(server).model()
    alive = Client(server)
    time.sleep(0.4)
    alive.post("session_heartbeat", {"session_id": alive.session})
    assert alive.model()
    with pytest.raises(RefusedByServerError, match="429"):
        alive.model()
    assert Client(server).session


def test_sessions_of_all_keys_are_bounded(serve):
    server = serve(all_sessions=3, silent_s=0.3)
    for _ in range(3):
        Client(server, new_key())
    with pytest.raises(RefusedByServerError, match="429"):
        Client(server, new_key())
    time.sleep(0.4)
    assert Client(server, new_key()).session


def test_requests_behind_an_adapter_that_came_too_late_move_nobody(serve):
    server = serve()
    client, model = Client(server), None
    stepped = []
    server.service.trainer.step = lambda adapter, how: stepped.append(adapter.slot)
    with busy_trainer(server):
        body = {"session_id": client.session, "model_seq_id": 0, "base_model": "tiny", "lora_config": {"rank": 4}}
        client.post("create_model", body)
        model = f"{client.session}:train:0"
        client.begin_pass(client.message(model, [GOOD]))
        client.post("optim_step", {"model_id": model, "seq_id": client.seq(model), "adam_params": {}})
        client.post(f"sessions/{client.session}/finish", {})
    until(lambda: not server.service._tasks)
    other = Client(server)
    other.learn(other.model(), [GOOD])
    assert stepped == [] and set(server.service.results._work.values()) == {0}


def test_what_an_ended_session_asked_for_is_not_computed_unless_it_saves(serve):
    server = serve()
    client = Client(server)
    model = client.model()
    with busy_trainer(server):
        client.begin_pass(client.message(model, [GOOD]))
        client.post("optim_step", {"model_id": model, "seq_id": client.seq(model), "adam_params": {}})
        client.post("save_weights", {"model_id": model, "seq_id": client.seq(model), "path": "last"})
        for _ in range(5):
            client.begin_pass(client.message(model, [GOOD]))
        client.post(
            "save_weights_for_sampler",
            {"model_id": model, "seq_id": client.seq(model), "sampling_session_seq_id": 0},
        )
        before = server.service.trainer.micro_batches
        client.post(f"sessions/{client.session}/finish", {})
    until(lambda: not server.service._tasks)
    assert server.service.trainer.micro_batches == before + 1
    assert not server.service._samplers and not server.service.slots._resident
    assert Client(server).from_state(f"tinker://{model}/weights/last")


def test_snapshots_leave_no_files(serve, tmp_path):
    client = Client(serve(slots=3, snapshots=2))
    model = client.model()
    for _ in range(5):
        client.sample(client.snapshot(model), ROWS[0][:5])
    assert len(list((tmp_path / "snapshots").iterdir())) <= 2
    client.post(f"sessions/{client.session}/finish", {})
    assert not list((tmp_path / "snapshots").iterdir())


def test_a_cancelled_sample_never_looks_like_an_answer(serve):
    server = serve()
    client = Client(server)
    sampler = client.snapshot(client.model())
    slots = server.service.slots
    for held in (slots.sampling, slots._lock):  # while it is sampled, and while its weights get their place
        with held:
            request = client.asample(sampler, ROWS[0][:5], 2, params={"max_tokens": 1000})["request_id"]
            time.sleep(0.2)
            client.post("cancel_future", {"request_id": request})
        with pytest.raises(RuntimeError, match="cancelled"):
            client.fetch(request)
