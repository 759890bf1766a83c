"""Environments on servers: equal to local play, whole after a server is killed, plain about servers that are no use."""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from helpers_models import tiny_tokenizer
from walk_env import Walk

from mafrt import make_env
from mafrt.config.team import Team
from mafrt.core import records
from mafrt.core.errors import ConfigError, EnvDownError, EnvError
from mafrt.core.types import SamplingParams
from mafrt.engines.scripted import ScriptedEngine
from mafrt.environment.checker import check_env
from mafrt.environment.remote import environment_pb2 as pb
from mafrt.environment.remote import pool, rpc
from mafrt.environment.remote.messages import PROTOCOL, unpack_failure
from mafrt.environment.remote.server import EnvironmentServer, ServedEnv
from mafrt.environment.session import Session
from mafrt.envs.games import TicTacToe
from mafrt.rollout.player import Player, Start

ROOT = Path(__file__).parents[2]


def played(env: Any, count: int, say: Any = lambda request: str(request.seed % 997)) -> list[Any]:
    """All episodes of a rollout with `count` environments side by side, as records."""
    tokenizer, team = tiny_tokenizer(), Team.of(Walk.agents)
    how = dict.fromkeys(team.names, SamplingParams(max_new_tokens=20))
    player = Player(ScriptedEngine(say, tokenizer), tokenizer, team, how, 900)
    starts = {slot: Start(f"e{slot:03d}", f"g{slot}", slot, slot + 7, slot % Walk.num_tasks) for slot in range(count)}
    episodes, stats = player.play([env.spawn() for _ in range(count)], lambda slot, done: starts.pop(slot, None))
    assert stats.env_errors == 0
    return [records.pack_episode(episode) for episode in episodes]


def serve(**changes: Any) -> EnvironmentServer:
    """A server in this process, on a free port of loopback."""
    env = changes.pop("env", None) or Session(Walk())
    served = {"name": "Walk", "env": env, "held_out": None, "identity": "i", "timeout_s": 5.0}
    served |= {name: changes.pop(name) for name in list(changes) if name in served}
    return EnvironmentServer(
        ServedEnv(**served), **{"host": "127.0.0.1", "port": 0, "token": None, "max_sessions": 8, **changes}
    )


@pytest.fixture
def server():
    one = serve()
    yield one
    one.close()


def test_an_episode_on_a_server_equals_a_local_one(server):
    remote = make_env(f"grpc://{server.address}/Walk")
    assert (remote.agents, remote.num_tasks, remote.max_steps) == (Walk.agents, 50, 64)
    assert played(remote, 6) == played(Session(Walk()), 6)
    check_env(remote)
    session = remote.spawn()
    session.reset(seed=3, options={"task": 1})
    with pytest.raises(EnvError, match=r"Walk.step\(\) raised ValueError .*as asked.*walk_env.py"):
        session.step({"left": "raise"})


@pytest.mark.parametrize("opponent", ["self", "random"])
def test_a_server_tells_that_agents_are_opponents(opponent):
    one = serve(env=Session(TicTacToe(opponent=opponent)))
    try:
        assert make_env(f"grpc://{one.address}").unwrapped.opponents is (opponent == "self")
    finally:
        one.close()


def test_a_fork_and_an_unseeded_reset_can_be_played_again(server):
    session = make_env(f"grpc://{server.address}").spawn()
    session.reset()
    session.step({"left": "a"})
    twin = session.fork()
    assert tuple(twin.step({"right": "b"}))[:4] == tuple(session.step({"right": "b"}))[:4]


def test_sessions_are_bounded_and_given_back(server):
    remote = make_env(f"grpc://{server.address}/Walk")
    remote.unwrapped._servers.patience_s = 0.3
    held = [remote.spawn() for _ in range(8)]
    for session in held:
        session.reset(seed=1)
    with pytest.raises(EnvDownError, match="all its sessions are taken"):
        remote.spawn().reset(seed=1)
    remote.unwrapped._servers.patience_s = 30.0  # giving back is a call to the server, which may take its time
    del session, held[2:]
    remote.spawn().reset(seed=1)


def test_a_closing_call_outlives_its_session(server):
    """gRPC cancels a call whose future is garbage, and then a busy server keeps the session for 15 minutes."""
    remote = make_env(f"grpc://{server.address}/Walk")
    servers = remote.unwrapped._servers
    session = remote.spawn()
    session.reset(seed=1)
    with server._lock:  # the server is too busy to answer
        del session
        gc.collect()
        servers._clear()
        gc.collect()
        (call,) = map(weakref.ref, servers._closing)
        assert not call().cancelled()
    for _ in range(500):
        if not server._sessions and not servers._closing:
            break
        time.sleep(0.02)
    assert not server._sessions and not servers._closing


def test_idle_sessions_are_closed_and_their_episodes_go_on(server):
    server.idle_s = 0.0
    session = make_env(f"grpc://{server.address}/Walk").spawn()
    session.reset(seed=5)
    local = Session(Walk())
    local.reset(seed=5)
    make_env(f"grpc://{server.address}/Walk").spawn().reset(seed=1)  # opening one closes those that are idle
    assert len(server._sessions) == 1
    assert session.step({"left": "x"}).rewards == local.step({"left": "x"}).rewards


def test_a_killed_clients_sessions_make_room_and_a_live_ones_go_on(server):
    with grpc.insecure_channel(server.address) as channel:
        stub = rpc.EnvironmentStub(channel)
        left = [stub.Open(pb.OpenRequest()).id for _ in range(server.max_sessions)]  # and nobody closes them
    remote = make_env(f"grpc://{server.address}/Walk")
    remote.unwrapped._servers.patience_s = 0.5
    with pytest.raises(EnvDownError, match="all its sessions are taken"):
        remote.spawn().reset(seed=1)
    for name in left[:-1]:
        server._sessions[name].used -= 40.0
    server._sessions[left[3]].used -= 40.0
    remote.spawn().reset(seed=1)
    assert left[3] not in server._sessions and len(server._sessions) == server.max_sessions
    assert left[-1] in server._sessions


def test_a_request_that_comes_twice_is_one_step(server):
    with grpc.insecure_channel(server.address) as channel:
        stub = rpc.EnvironmentStub(channel)
        name = stub.Open(pb.OpenRequest()).id
        stub.Reset(pb.ResetRequest(session=name, seed=4, task=0))
        ask = pb.StepRequest(session=name, number=0, actions=[pb.Action(agent="left", text="a")])
        assert stub.Step(ask) == stub.Step(ask)
        with pytest.raises(grpc.RpcError) as caught:
            stub.Step(pb.StepRequest(session=name, number=5))
        assert caught.value.code() == grpc.StatusCode.FAILED_PRECONDITION


def test_calls_that_send_nothing_hold_up_nobody(server):
    """A call without its request held one of 32 threads, as long as its client wished."""
    let = threading.Event()

    def nothing():
        let.wait(60)
        yield b""

    with grpc.insecure_channel(server.address) as channel:
        silent = channel.stream_unary("/mafrt.environment.v1.Environment/Step")
        calls = [silent.future(nothing(), timeout=60) for _ in range(40)]
        try:
            time.sleep(0.5)
            assert rpc.EnvironmentStub(channel).Describe(pb.DescribeRequest(), timeout=5).name == "Walk"
        finally:
            let.set()
            for call in calls:
                call.cancel()


@pytest.mark.parametrize("method", ["Describe", "Open", "Reset", "Step", "Close"])
@pytest.mark.parametrize("sent", [b"\xff" * 100, b"\x0a\x7fabc", b"\x0a" + b"\xff" * 8 + b"\x7f", b"\x93\x03" * 10**5])
def test_bytes_that_are_no_message_are_refused_in_a_line(method, sent, server):
    with grpc.insecure_channel(server.address) as channel:
        with pytest.raises(grpc.RpcError) as caught:
            channel.unary_unary(f"/mafrt.environment.v1.Environment/{method}")(sent, timeout=10)
        assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        assert caught.value.details() == "the request is no message of this protocol"


@pytest.mark.parametrize(
    ("method", "request_", "code", "said"),
    [
        ("Open", pb.OpenRequest(name="chess"), "FAILED_PRECONDITION", "other environments"),
        ("Open", pb.OpenRequest(identity="j"), "FAILED_PRECONDITION", "other environments"),
        ("Step", pb.StepRequest(actions=[pb.Action(agent="left")] * 2), "INVALID_ARGUMENT", "two values for"),
        ("Step", pb.StepRequest(actions=[pb.Action(agent=str(n)) for n in range(300)]), "INVALID_ARGUMENT", "300"),
        ("Step", pb.StepRequest(actions=[pb.Action(text="x" * (9 << 20))]), "RESOURCE_EXHAUSTED", "larger than max"),
        ("Step", pb.StepRequest(number=2**32 - 1), "FAILED_PRECONDITION", "after 0 steps"),
        ("Reset", pb.ResetRequest(session="x"), "NOT_FOUND", "no such session"),
    ],
)
def test_requests_that_are_none_are_refused_in_a_line(method, request_, code, said, server):
    with grpc.insecure_channel(server.address, options=[("grpc.max_send_message_length", -1)]) as channel:
        stub = rpc.EnvironmentStub(channel)
        if method == "Step":
            request_.session = stub.Open(pb.OpenRequest()).id
            stub.Reset(pb.ResetRequest(session=request_.session, seed=1, task=0))
        with pytest.raises(grpc.RpcError) as caught:
            getattr(stub, method)(request_, timeout=10)
        assert caught.value.code().name == code and said in caught.value.details()
        assert len(caught.value.details()) < 200 and stub.Describe(pb.DescribeRequest()).name == "Walk"


def test_a_failure_is_told_in_500_characters(server):
    with grpc.insecure_channel(server.address) as channel:
        stub = rpc.EnvironmentStub(channel)
        session = stub.Open(pb.OpenRequest()).id
        stub.Reset(pb.ResetRequest(session=session, seed=1, task=0))
        ask = pb.StepRequest(session=session, actions=[pb.Action(agent="x" * 10**6, text="")])
        assert len(stub.Step(ask).failure.text) <= 500


def test_a_server_that_is_exchanged_between_two_episodes_plays_no_other_environment():
    """The channel connects again by itself, and the new server took the sessions of the old one's trainers."""
    old = serve()
    remote = make_env(f"grpc://{old.address}/Walk")
    remote.reset(seed=1)
    old.close()
    new = serve(port=old.port, identity="j")
    try:
        remote.unwrapped._servers.patience_s = 3.0
        with pytest.raises(EnvDownError, match=r"other arguments or source"):
            remote.spawn().reset(seed=1)
    finally:
        new.close()


class Slow(Walk):
    """Its step takes until `let` is set."""

    let = threading.Event()

    def step(self, actions):
        self.let.wait(20)
        return super().step(actions)


def test_calls_that_their_client_has_left_hold_no_thread():
    server = serve(env=Session(Slow()))
    try:
        with grpc.insecure_channel(server.address) as channel:
            stub = rpc.EnvironmentStub(channel)
            session = stub.Open(pb.OpenRequest(name="Walk")).id
            stub.Reset(pb.ResetRequest(session=session, seed=4, task=0))
            ask = pb.StepRequest(session=session, number=0, actions=[pb.Action(agent="left", text="a")])
            left = [stub.Step.future(ask, timeout=0.5) for _ in range(40)]
            assert all(call.exception() is not None for call in left)
            time.sleep(0.5)
            assert stub.Describe(pb.DescribeRequest(name="Walk"), timeout=10).name == "Walk"
            Slow.let.set()
            # The step that was asked for first was played, and once.
            assert stub.Step(ask, timeout=10) == stub.Step(ask, timeout=10)
    finally:
        Slow.let.set()
        server.close()


class Waiting(Walk):
    let = threading.Event()
    begun = 0

    def step(self, actions):
        Waiting.begun += 1
        self.let.wait(60)
        return super().step(actions)


def test_calls_that_wait_for_another_sessions_end_with_their_clients():
    server = serve(env=Session(Waiting()))
    try:
        with grpc.insecure_channel(server.address) as channel:
            stub = rpc.EnvironmentStub(channel)
            sessions = [stub.Open(pb.OpenRequest(name="Walk")).id for _ in range(6)]
            for session in sessions:
                stub.Reset(pb.ResetRequest(session=session, seed=4, task=0))
            action = pb.Action(agent="left", text="a")
            asked = [pb.StepRequest(session=session, number=0, actions=[action]) for session in sessions]
            first = stub.Step.future(asked[0], timeout=60)
            deadline = time.monotonic() + 60
            while Waiting.begun < 1 and time.monotonic() < deadline:
                time.sleep(0.01)
            left = [stub.Step.future(ask, timeout=0.5) for ask in asked[1:]]
            assert all(call.exception() is not None for call in left)
            time.sleep(0.5)
            Waiting.let.set()
            # What nobody waits for is not played, and is there to be asked for again.
            assert not first.result().HasField("failure")
            assert not stub.Step(asked[1], timeout=60).HasField("failure") and Waiting.begun == 2
    finally:
        Waiting.let.set()
        server.close()


def test_health_needs_no_token_and_everything_else_does(monkeypatch):
    guarded = serve(token="secret")
    try:
        with grpc.insecure_channel(guarded.address) as channel:
            health = health_pb2_grpc.HealthStub(channel)
            for service in ("", "mafrt.environment.v1.Environment"):
                answer = health.Check(health_pb2.HealthCheckRequest(service=service))
                assert answer.status == health_pb2.HealthCheckResponse.SERVING
        for token in (None, "other"):
            monkeypatch.delenv("MAFRT_ENV_TOKEN", raising=False)
            if token:
                monkeypatch.setenv("MAFRT_ENV_TOKEN", token)
            with pytest.raises(EnvError, match="refuses the token; set MAFRT_ENV_TOKEN"):
                make_env(f"grpc://{guarded.address}/Walk")
        monkeypatch.setenv("MAFRT_ENV_TOKEN", "secret")
        assert make_env(f"grpc://{guarded.address}/Walk").agents == Walk.agents
    finally:
        guarded.close()
    with pytest.raises(ConfigError, match="can be reached from other machines; set a token"):
        serve(host="0.0.0.0")


def test_one_server_holds_several_environments():
    several = [
        ServedEnv("Walk", Session(Walk()), Session(Walk()), "i", 5.0),
        ServedEnv("TicTacToe", Session(TicTacToe()), None, "k", 5.0),
    ]
    one = EnvironmentServer(several, host="127.0.0.1", port=0, token=None, max_sessions=8)
    try:
        walk, game = (make_env(f"grpc://{one.address}/{each.name}") for each in several)
        assert (walk.agents, game.agents) == (Walk.agents, TicTacToe.agents)
        assert walk.unwrapped.held_out and not game.unwrapped.held_out
        assert played(walk, 4) == played(Session(Walk()), 4)
        check_env(game)
        with pytest.raises(EnvError, match="serves 'Walk', 'TicTacToe', and 'chess' was asked for"):
            make_env(f"grpc://{one.address}/chess")
        with pytest.raises(EnvError, match="serves 'Walk', 'TicTacToe'; name one of them"):
            make_env(f"grpc://{one.address}")
    finally:
        one.close()


def test_serve_builds_every_environment_that_is_named():
    from mafrt.scripts.serve import ServeEnvSettings, environments

    arguments = ('{"math": {"horizon": 3}, "debate": {"horizon": 2}}',)
    made = environments(ServeEnvSettings(env="math, debate,tic_tac_toe", env_kwargs=arguments))
    assert [name for name, *_ in made] == ["math", "debate", "tic_tac_toe"]
    math, debate = (env.unwrapped for _, env, _, _ in made[:2])
    assert (math.workflow.horizon, debate.workflow.horizon) == (3, 2)
    assert made[1][3] == {"dataset_path": "arithmetic:validation:claims=1"}
    for settings, match in (
        ({"env": "math,math"}, "names two environments alike"),
        ({"env": "math,code", "env_kwargs": ("horizon=3",)}, "env_kwargs holds 'horizon'"),
    ):
        with pytest.raises(ConfigError, match=match):
            environments(ServeEnvSettings(**settings))


# ------------------------------------------------------------------------------------------------------ bad servers


DEEP = '{"a":' * 100_000 + "1" + "}" * 100_000
DEEP_MESSAGE = pb.Message(role="user", json=f'{{"role": "user", "content": {DEEP}}}')
OTHER_ROLE = pb.Message(role="user", json='{"role": "system", "content": "x"}')


class Bad:
    """A server that answers `Describe` as told and hangs or lies afterwards."""

    def __init__(self, does: str) -> None:
        self.does, self.released, self.resets = does, threading.Event(), 0
        self.steps = 0
        self.server = grpc.server(ThreadPoolExecutor(4))
        rpc.serve(self, self.server, lambda method, read: lambda asked, context: method(read(asked), context))
        self.address = f"127.0.0.1:{self.server.add_insecure_port('127.0.0.1:0')}"
        self.server.start()

    def Describe(self, request: Any, context: Any) -> Any:
        protocol = PROTOCOL + 1 if self.does == "protocol" else PROTOCOL
        identity = "j" if self.does == "identity" else "i"
        return pb.Description(
            protocol=protocol,
            name="W" * 3_000_000 if self.does == "long name" else "Walk",
            agents={
                "agents": ["a\nb"],
                "no names": [""],
                "many": [f"a{n}" for n in range(10_000)],
                "the same": ["left", "left"],
                "paths": ["../x"],
                "endless names": ["a" * 10**6],
            }.get(self.does, Walk.agents),
            num_tasks={"no tasks": 0, "minus": -5, "endless tasks": 2**62}.get(self.does, 50),
            max_steps={"no steps": 0, "endless steps": 2**62}.get(self.does, 64),
            identity=identity,
            timeout_s={"for days": 1e6, "nan": float("nan"), "below": -1.0, "inf": float("inf")}.get(self.does, 0.1),
        )

    def Open(self, request: Any, context: Any) -> Any:
        return pb.Session(id="s")

    def Reset(self, request: Any, context: Any) -> Any:
        self.resets += 1
        if self.does == "no session":
            context.abort(grpc.StatusCode.NOT_FOUND, "there is no such session")
        if self.does == "large":
            return pb.ResetReply(info="x" * (65 * 2**20))
        if self.does == "hang":
            self.released.wait(30)
        lies = {
            "json": pb.ResetReply(observations=[pb.Observation(agent="left", text="x")], info="[not json"),
            "agent": pb.ResetReply(observations=[pb.Observation(agent="nobody", text="x")], info="{}"),
            "empty": pb.ResetReply(info="{}"),
            "twice": pb.ResetReply(observations=[pb.Observation(agent="left", text=t) for t in "xy"], info="{}"),
            "deep": pb.ResetReply(observations=[pb.Observation(agent="left", text="x")], info=DEEP),
            "deep message": pb.ResetReply(
                observations=[pb.Observation(agent="left", messages=[DEEP_MESSAGE])], info="{}"
            ),
            "role": pb.ResetReply(observations=[pb.Observation(agent="left", messages=[OTHER_ROLE])], info="{}"),
        }
        # The measures come with a step.
        first = [pb.Observation(agent="left", text="x")] if "measures" in self.does else []
        return lies.get(self.does, pb.ResetReply(observations=first, info="{}" if first else ""))

    def Step(self, request: Any, context: Any) -> Any:
        self.steps += 1
        measures = {
            "100,000 measures": {str(n): n for n in range(100_000)},
            "lines in measures": {"solved\nreward": 1},
            "ever other measures": {f"{self.steps}/{n}": n for n in range(200)},
        }[self.does]
        return pb.StepReply(
            observations=[pb.Observation(agent="left", text="x")], info=json.dumps({"measures": measures})
        )

    def close(self) -> None:
        self.released.set()
        self.server.stop(0).wait()


@pytest.mark.parametrize(
    ("does", "words"),
    [
        ("hang", "it has not answered in time"),
        ("json", "it broke the protocol"),
        ("agent", "nobody"),
        ("empty", "no observations"),
        ("twice", "two values for"),
        ("role", "in its JSON"),
        ("deep", "nested too deeply"),
        ("deep message", "nested too deeply"),
    ],
)
def test_a_server_that_hangs_or_lies_is_set_aside(does, words, server, monkeypatch):
    monkeypatch.setattr(pool, "MARGIN_S", 0.3)
    bad = Bad(does)
    try:
        alone = make_env(f"grpc://{bad.address}/Walk")
        alone.unwrapped._servers.patience_s = 0.2
        with pytest.raises(EnvDownError) as caught:
            alone.spawn().reset(seed=1)
        said = str(caught.value)
        assert words in said and bad.address in said and "\n" not in said, said
        both = make_env(f"grpc://{bad.address},{server.address}/Walk")
        assert played(both, 4) == played(Session(Walk()), 4)
    finally:
        bad.close()


@pytest.mark.parametrize("does", ["100,000 measures", "lines in measures", "ever other measures"])
def test_a_server_that_measures_without_end_is_left_for_good(does, monkeypatch):
    monkeypatch.setattr(pool, "_LONGEST_S", 0.01)
    bad = Bad(does)
    try:
        env = make_env(f"grpc://{bad.address}/Walk")
        env.reset(seed=1)
        with pytest.raises(EnvDownError, match="measure"):
            for _ in range(3):
                env.step({"left": "x"})
        assert [server.broken for server in env.unwrapped._servers.servers.values()] == [pool.MOST_BROKEN]
    finally:
        bad.close()


@pytest.mark.slow
@pytest.mark.parametrize("does", ["json", "agent", "empty", "large"])
def test_a_server_that_goes_on_lying_is_left_for_good(does, monkeypatch):
    monkeypatch.setattr(pool, "_LONGEST_S", 0.01)
    monkeypatch.setattr(pool, "MARGIN_S", 20.0)
    bad = Bad(does)
    try:
        env = make_env(f"grpc://{bad.address}/Walk")
        for _ in range(2):
            with pytest.raises(EnvDownError, match=bad.address):  # and not after the patience of a minute
                env.spawn().reset(seed=1)
        assert bad.resets == pool.MOST_BROKEN
    finally:
        bad.close()


@pytest.mark.parametrize(
    ("kind", "text", "expected", "said"),
    [
        ("EnvError", "no more", EnvError, "no more"),
        ("EnvDownError", "gone", EnvDownError, "gone"),
        ("BudgetSpentError", "spent", EnvError, "spent"),
        ("CoachInterruptedError", "x", EnvError, "x"),
        ("SystemExit", "x", EnvError, "x"),
        ("__class__", "x", EnvError, "x"),
        ("", "", EnvError, "no reason"),
        ("EnvError", "a\n\x1b[31mb", EnvError, "a \N{REPLACEMENT CHARACTER}[31mb"),
        ("EnvError", "x" * 10**6, EnvError, "xxx..."),
    ],
)
def test_a_server_tells_of_failures_of_its_environment_alone_and_on_a_line(kind, text, expected, said):
    error = unpack_failure(pb.Failure(kind=kind, text=text))
    assert type(error) is expected and said in str(error) and len(str(error)) <= 500


def test_servers_that_keep_no_session_lose_the_episode_and_not_the_run():
    bad = Bad("no session")
    try:
        with pytest.raises(EnvError, match="keep none"):
            make_env(f"grpc://{bad.address}/Walk").reset(seed=1)
        assert bad.resets <= 50
    finally:
        bad.close()


@pytest.mark.parametrize(
    ("does", "words"),
    [
        ("for days", "1e\\+06 s for a call"),
        ("nan", "for a call"),
        ("inf", "for a call"),
        ("below", "for a call"),
        ("agents", "not a valid name"),
        ("no names", "not a valid name"),
        ("the same", "a name twice"),
        ("paths", "not a valid name"),
        ("endless names", "1000000 characters"),
        ("many", "10000 agents"),
        ("long name", "WWW.*was asked for"),
        ("no tasks", "has 0 tasks"),
        ("minus", "has -5 tasks"),
        ("endless tasks", "expected 1 to"),
        ("no steps", "has 0 steps"),
        ("endless steps", "expected 1 to"),
    ],
)
def test_a_description_that_cannot_be_is_refused(does, words):
    bad = Bad(does)
    try:
        with pytest.raises(EnvError, match=words) as caught:
            make_env(f"grpc://{bad.address}/Walk")
        assert len(str(caught.value)) < 1000
    finally:
        bad.close()


@pytest.mark.parametrize(
    ("does", "words"), [("protocol", "version 2 of the protocol"), ("identity", "other arguments or source")]
)
def test_a_server_of_another_version_or_environment_is_refused(does, words, server):
    bad = Bad(does)
    try:
        with pytest.raises(EnvError, match=words):
            make_env(f"grpc://{server.address},{bad.address}/Walk")
    finally:
        bad.close()


def test_addresses_that_are_none(server):
    for address, words in (
        ("grpc://nowhere", "no HOST:PORT"),
        ("grpc:///Walk", "names no server"),
        ("grpc://127.0.0.1:1/Walk", "no environment server can be reached"),
        (f"grpc://{server.address}/Other", "'Other' was asked for"),
        ("grpc://@/nowhere/servers.txt/Walk", "cannot be read"),
    ):
        with pytest.raises(EnvError, match=words):
            make_env(address)
    with pytest.raises(EnvError, match="settings of an environment go to mafrt serve"):
        make_env(f"grpc://{server.address}/Walk", floor=1)


# --------------------------------------------------------------------------------------------------- many processes


def start(tmp_path: Path, port: int = 0) -> tuple[subprocess.Popen[str], str]:
    """`mafrt serve` in a process of its own, and its host:port."""
    words = ["serve", "--env", "walk_env:Walk", "--port", str(port)]
    process = subprocess.Popen(
        [sys.executable, "-m", "mafrt.scripts.main", *words],
        cwd=Path(__file__).parents[1],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert process.stdout is not None
    return process, process.stdout.readline().split("grpc://")[1].split("/")[0]


@pytest.mark.slow
@pytest.mark.ci
def test_200_episodes_on_4_servers_one_of_which_is_killed_and_one_exchanged(tmp_path):
    servers = [start(tmp_path) for _ in range(4)]
    late: list[Any] = []
    listed = tmp_path / "servers.txt"
    listed.write_text("".join(f"{address}\n" for _, address in servers))
    calls = 0
    seen: list[int] = []

    def say(request: Any) -> str:
        nonlocal calls
        calls += 1
        if calls == 300:  # every episode has begun, none has ended in all steps
            servers[1][0].send_signal(signal.SIGKILL)
        if calls == 450:  # swapped while running: a new server for one that is taken from the list
            late.append(start(tmp_path))
            listed.write_text("".join(f"{address}\n" for _, address in [servers[0], servers[2], late[0]]))
            time.sleep(pool.LOOK_S)  # the list is looked at again; the episodes left may take less time than that
        seen.append(request.seed)
        return str(request.seed % 997)

    try:
        remote = make_env(f"grpc://@{listed}/Walk")
        began = time.monotonic()
        far = played(remote, 200, say)
        print(f"200 episodes in {time.monotonic() - began:.1f} s")
        near = played(Session(Walk()), 200)
        assert len({episode["id"] for episode in far}) == len(far) == 200
        assert far == near
        assert len(seen) == len(set(seen)) == sum(len(episode["turns"]) for episode in near)  # no turn asked for twice
        used = remote.unwrapped._servers.servers
        assert late[0][1] in used and servers[3][1] not in used
    finally:
        for process, _ in [*servers, *late]:
            process.kill()
            process.wait()


def test_the_generated_code_is_that_of_the_protocol(tmp_path):
    made = subprocess.run(
        ["bash", str(ROOT / "scripts/generate_protos.sh"), str(tmp_path)],
        env={**os.environ, "PYTHON": sys.executable},
        capture_output=True,
        text=True,
    )
    assert made.returncode == 0, made.stderr
    remote = [f"mafrt/environment/remote/environment_pb2{end}" for end in (".py", ".pyi")]
    for name in (*remote, "scripts/tinker_server/wire_pb2.py", "scripts/tinker_server/wire_pb2.pyi"):
        assert (tmp_path / name).read_text() == (ROOT / name).read_text(), name


def test_a_resumed_run_may_use_other_servers(server):
    from mafrt.runners.identity import environment_record
    from mafrt.storage.run_record import RunRecord, changes

    other = serve()
    try:
        found = [
            RunRecord([], environment=environment_record(make_env(f"grpc://{one.address}/Walk")))
            for one in (server, other)
        ]
        assert found[0].environment.arguments == {"address": f"grpc://{server.address}/Walk"}
        assert changes(*found) == []
    finally:
        other.close()
