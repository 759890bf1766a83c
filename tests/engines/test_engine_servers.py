"""vLLM servers as the engine, against a stand-in on loopback: fail-over, hand-over, refusals. No vLLM needed."""

from __future__ import annotations

import fcntl
import importlib.util
import logging
import math
import os
import socket
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers_models import ATTENTION, add_random_adapter, random_ids, tiny_base
from helpers_warm import start_python
from toy import Digits, settings
from vllm_standin import StandIn, _choice

from mafrt.config.team import Team
from mafrt.config.train_config import EngineConfig, TrainConfig
from mafrt.core.errors import ConfigError, EngineDownError, MissingExtraError, ModelError
from mafrt.core.types import Request, SamplingParams, Turn
from mafrt.engines import checks
from mafrt.engines.checks import check_engine, reach_servers
from mafrt.engines.local.engine import LocalEngine
from mafrt.engines.local.sampler import NonFiniteLogitsError
from mafrt.engines.logprob_check import EFFECT_NATS, EXACT_NATS, probe_prompt, self_check
from mafrt.engines.logprob_gap import engine_gap
from mafrt.engines.vllm import adapter_sync, server
from mafrt.engines.vllm.adapter_sync import Handover
from mafrt.engines.vllm.server import ServerEngine
from mafrt.models.shared_base import SharedBase
from mafrt.runners.identity import Provenance
from mafrt.runners.on_policy import OnPolicy
from mafrt.storage.load_path import resolve

pytest.importorskip("httpx", reason="the extra [servers] is not installed: pip install httpx")

pytestmark = pytest.mark.takes(slow=10)

NAMES = ("a", "b", "c")


def team_base() -> SharedBase:
    base = tiny_base()
    for number, name in enumerate(NAMES):
        add_random_adapter(base, name, rank=(4, 2, 8)[number], seed=number)
    return base


def requests(count: int = 4, *, tokens: int = 6, adapters=(None, *NAMES), **sampling) -> list[Request]:
    how = SamplingParams(max_new_tokens=tokens, **sampling)
    prompts = random_ids(count, 9, seed=5).tolist()
    return [Request(prompt, name, how, seed=100 + i) for i, prompt in enumerate(prompts) for name in adapters]


def config(*servers: StandIn, **changes) -> EngineConfig:
    return EngineConfig(engine="vllm", vllm_servers=tuple(server.url for server in servers), **changes)


def engine_on(base: SharedBase, *servers: StandIn, **changes) -> ServerEngine:
    return ServerEngine(base, config(*servers, **changes), probe=probe_prompt(base))


def change(base: SharedBase, name: str, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for _, b in base.adapter_layers(name).values():
            b.copy_(0.2 * torch.randn(b.shape, generator=generator))
    base.bump(name)


@pytest.mark.slow
def test_it_says_what_the_local_engine_says_before_and_after_updates():
    base = team_base()
    asked = requests(temperature=0.0) + requests(temperature=0.8, top_p=0.9, top_k=20)
    with StandIn(tiny_base) as server:
        engine = engine_on(base, server)
        seen = set()
        for update in range(3):
            local = LocalEngine(base).generate(asked)
            said = engine.generate(asked)
            assert [one.ids for one in said] == [one.ids for one in local]
            assert [one.text for one in said] == [one.text for one in local]
            assert [one.stop for one in said] == [one.stop for one in local]
            assert [one.adapter_version for one in said] == [one.adapter_version for one in local]
            for one, other in zip(said, local, strict=True):
                assert one.logprobs == pytest.approx(other.logprobs, abs=1e-5)
            assert len(server.loaded) == 4  # three adapters and the bare base, nothing of before
            assert not seen & {name for name in server.loaded if not name.startswith("bare")}
            seen |= set(server.loaded)
            for name in NAMES:
                change(base, name, seed=10 * update)
        folder = engine._handover.folder
        assert folder.is_dir()
        engine.close()
        assert server.loaded == {} and not folder.exists()


@pytest.mark.slow
def test_an_adapter_that_did_not_change_is_not_loaded_again():
    base = team_base()
    with StandIn(tiny_base) as server:
        engine = engine_on(base, server)
        engine.generate(requests())
        before = dict(server.loaded)
        change(base, "b", seed=1)
        engine.generate(requests())
        kept = {name for name in before if name in server.loaded}
        assert {name.split("-")[0] for name in kept} == {"bare", "a", "c"}
        assert [name.split("-")[0] for name in server.unloaded] == ["b"]


def test_a_write_that_nobody_announced_is_noticed():
    base = team_base()
    handover = Handover(base)
    first = handover.parcels(["a"])[0]["a"]
    assert handover.parcels(["a"]) == ({"a": first}, [])
    with torch.no_grad():
        base.adapter_parameters("a")[0].add_(1.0)
    second, replaced = handover.parcels(["a"])
    assert second["a"].name != first.name and second["a"].path != first.path and replaced == [first]
    handover.forget(first)
    assert not first.path.exists() and second["a"].path.is_dir()


def test_adapters_of_a_trainer_that_was_killed_are_removed_by_the_next(tmp_path, monkeypatch):
    """They stayed in memory, 5 to 500 MiB each time, until the machine was started again."""
    monkeypatch.setattr(adapter_sync, "MEMORY", tmp_path)
    dead = 2**22 + 1  # above all process ids
    names = {kind: f"mafrt-{n:08d}-{dead}-x" for n, kind in enumerate(("left", "held", "young", "file"))}
    names |= {"alive": f"mafrt-00000009-{os.getpid()}-x", "other": "mafrt-packages-x"}
    for kind, name in names.items():
        (tmp_path / name).touch() if kind == "file" else (tmp_path / name / "actor-1").mkdir(parents=True)
        if kind != "young":
            os.utime(tmp_path / name, (0, 0))
    held = os.open(tmp_path / names["held"], os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_SH)
    first = Handover(team_base())
    os.utime(first.folder, (0, 0))
    second = Handover(team_base())
    os.close(held)
    assert {path.name for path in tmp_path.iterdir()} == {
        *(names[kind] for kind in ("held", "young", "file", "alive", "other")),
        first.folder.name,
        second.folder.name,
    }
    first.close()
    assert not first.folder.exists() and second.folder.exists()


def test_equal_weights_keep_their_name_whatever_the_version():
    base = team_base()
    handover = Handover(base)
    first = handover.parcels(["a"])[0]["a"]
    base.bump("a")
    again, replaced = handover.parcels(["a"])
    assert (again["a"].name, again["a"].number, replaced) == (first.name, first.number, [])


def test_an_adapter_that_is_not_finite_is_never_handed_over():
    base = team_base()
    with torch.no_grad():
        base.adapter_parameters("b")[0][0, 0] = math.nan
    with StandIn(tiny_base) as server, pytest.raises(NonFiniteLogitsError, match="'b'"):
        engine_on(base, server).generate(requests())


def test_a_token_without_a_probability_is_an_error_that_names_the_adapter():
    def spoilt(said, body):
        found = _choice(said, body)
        found["logprobs"]["token_logprobs"][-1] = -9999.0
        return found

    with StandIn(tiny_base, answer=spoilt) as server, pytest.raises(NonFiniteLogitsError, match="'a'"):
        engine_on(team_base(), server).generate(requests(adapters=("a",)))


@pytest.mark.slow
def test_work_is_spread_and_every_request_is_answered_once():
    base = team_base()
    asked = requests(12)
    with StandIn(tiny_base, delay_s=0.005) as one, StandIn(tiny_base, delay_s=0.005) as two:
        said = engine_on(base, one, two).generate(asked)
        assert len(one.completed) + len(two.completed) == len(asked)
        assert min(len(one.completed), len(two.completed)) >= len(asked) // 4
    assert [c.ids for c in said] == [c.ids for c in LocalEngine(base).generate(asked)]


@pytest.mark.slow
def test_a_server_that_dies_amid_a_rollout_is_made_up_for(caplog):
    base = team_base()
    asked = requests(12)
    with StandIn(tiny_base, delay_s=0.005) as one, StandIn(tiny_base, delay_s=0.005, die_after=5) as two:
        engine = engine_on(base, one, two)
        with caplog.at_level(logging.WARNING):
            said = engine.generate(asked)
        assert engine.servers == {one.url: True, two.url: False}
        assert len(two.completed) == 5 and len(one.completed) >= len(asked) - 5
        again = engine.generate(asked)
    assert [c.ids for c in said] == [c.ids for c in LocalEngine(base).generate(asked)]
    assert [c.ids for c in again] == [c.ids for c in said]
    assert sum("is lost" in line for line in caplog.messages) == 1


@pytest.mark.parametrize(("path", "breaks"), [("/v1/completions", 3), ("/v1/load_lora_adapter", 1)])
def test_a_connection_that_breaks_costs_one_more_request_and_no_server(path, breaks, caplog):
    base = team_base()
    asked = requests(3)
    with StandIn(tiny_base, hiccups=breaks, hiccup_path=path) as server:
        engine = engine_on(base, server)
        with caplog.at_level(logging.WARNING):
            said = engine.generate(asked)
        assert engine.servers == {server.url: True} and not caplog.messages
        assert server.stumbled == breaks and len(server.completed) == len(asked)
    assert [c.ids for c in said] == [c.ids for c in LocalEngine(base).generate(asked)]


def test_an_answer_that_breaks_twice_is_the_others_work():
    base = team_base()
    asked = requests(3)
    with StandIn(tiny_base) as one, StandIn(tiny_base, hiccups=99) as two:
        engine = engine_on(base, one, two)
        said = engine.generate(asked)
        assert engine.servers == {one.url: True, two.url: False}
        assert len(one.completed) == len(asked) and not two.completed
    assert [c.ids for c in said] == [c.ids for c in LocalEngine(base).generate(asked)]


@pytest.mark.slow
def test_servers_that_all_seem_lost_are_asked_once_more_before_the_run_pauses(caplog):
    """As after a moment in which the trainer's machine stood still."""
    base = team_base()
    asked = requests(3)
    with StandIn(tiny_base) as one, StandIn(tiny_base) as two:
        engine = engine_on(base, one, two)
        engine.keep_probes()
        one.ill = two.ill = 4
        with caplog.at_level(logging.WARNING):
            said = engine.generate(asked)
        assert any("is lost" in line for line in caplog.messages) and any("is back" in line for line in caplog.messages)
        assert any(engine.servers.values())
    assert [c.ids for c in said] == [c.ids for c in LocalEngine(base).generate(asked)]


def test_servers_that_are_back_and_never_answer_are_asked_once_more_and_not_for_ever():
    with StandIn(tiny_base) as one:
        engine = engine_on(team_base(), one)
        asked = requests(3)
        one.ill = 10_000
        with pytest.raises(EngineDownError, match=r"No vLLM server answers \(.*503"):
            engine.generate(asked)
        assert 10_000 - one.ill <= 2 * len(asked)


@pytest.mark.slow
def test_no_connection_in_time_costs_one_more_request_and_no_server(monkeypatch, caplog):
    import httpx

    plain, late = httpx.AsyncClient.request, 1

    async def request(self, method, url, **words):
        nonlocal late
        if late and url.endswith("/v1/completions"):
            late -= 1
            raise httpx.ConnectTimeout("")
        return await plain(self, method, url, **words)

    monkeypatch.setattr(httpx.AsyncClient, "request", request)
    base = team_base()
    with StandIn(tiny_base) as server, caplog.at_level(logging.WARNING):
        said = engine_on(base, server).generate(requests())
        assert late == 0 and not caplog.messages
    assert [c.ids for c in said] == [c.ids for c in LocalEngine(base).generate(requests())]


@pytest.mark.slow
def test_a_dead_server_that_takes_connections_and_says_nothing_holds_nobody_up(monkeypatch):
    monkeypatch.setattr(server, "REVIVE_S", 0.0)
    monkeypatch.setattr(server, "SMALL_S", 0.5)
    base = team_base()
    with StandIn(tiny_base) as one:
        two = StandIn(tiny_base).__enter__()
        engine = engine_on(base, one, two)  # which waits 600 s for an answer
        two.kill()
        engine.generate(requests())
        with socket.create_server(("127.0.0.1", two.port)):
            began = time.monotonic()
            said = engine.generate(requests())
            assert time.monotonic() - began < 300
        assert engine.servers == {one.url: True, two.url: False}
    assert [c.ids for c in said] == [c.ids for c in LocalEngine(base).generate(requests())]


def test_a_dead_server_is_asked_again_less_and_less_often(monkeypatch):
    monkeypatch.setattr(server.time, "monotonic", lambda: 1000.0)
    for in_vain, wait_s in [(0, 30), (1, 60), (3, 240), (6, 1800), (2000, 1800)]:
        asked = {"alive": False, "in_vain": in_vain}
        assert server._due(server._Server("x", asked_at=999.0 - wait_s, **asked))
        assert not server._due(server._Server("x", asked_at=1001.0 - wait_s, **asked))
    assert not server._due(server._Server("x", alive=True))


TRAINER = """
import sys
sys.path[:0] = sys.argv[2:]
from test_engine_servers import EngineConfig, ServerEngine, probe_prompt, requests, team_base, time
base = team_base()
engine = ServerEngine(base, EngineConfig(engine="vllm", vllm_servers=(sys.argv[1],)), probe=probe_prompt(base))
engine.generate(requests(1))
print(engine._handover.folder, flush=True)
time.sleep(60)
"""


@pytest.mark.slow
def test_a_trainer_killed_with_9_leaves_no_adapters_in_memory(tmp_path):
    script = tmp_path / "trainer.py"
    script.write_text(TRAINER)
    with StandIn(tiny_base) as server:
        trainer = start_python(script, server.url, *Path(__file__).parents[:2])
        try:
            while "\n" not in trainer.stdout:
                assert trainer.poll() is None, trainer.stderr
                time.sleep(0.05)
            folder = Path(trainer.stdout.strip())
            assert len(list(folder.iterdir())) == 4
        finally:
            trainer.kill()
            trainer.wait(60)
    deadline = time.monotonic() + 60
    while folder.exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not folder.exists()


@pytest.mark.slow
def test_a_server_that_says_nothing_is_dead_after_the_timeout():
    base = team_base()
    with StandIn(tiny_base) as one, StandIn(tiny_base) as two:
        engine = engine_on(base, one, two, vllm_timeout=4.0)
        asked = requests(1)
        engine.generate(asked)
        two.delay_s = 60.0
        said = engine.generate(asked)
        assert engine.servers == {one.url: True, two.url: False}
    assert [c.ids for c in said] == [c.ids for c in LocalEngine(base).generate(asked)]


@pytest.mark.slow
def test_a_server_that_comes_back_is_taken_back_with_its_adapters(monkeypatch):
    monkeypatch.setattr(server, "REVIVE_S", 0.0)
    base = team_base()
    with StandIn(tiny_base) as one:
        two = StandIn(tiny_base).__enter__()
        engine = engine_on(base, one, two)
        engine.keep_probes()
        two.kill()
        engine.generate(requests())
        assert engine.servers == {one.url: True, two.url: False}
        with StandIn(tiny_base, port=two.port) as back:
            said = engine.generate(requests(12))
            assert engine.servers == {one.url: True, back.url: True}
            assert back.completed and len(back.loaded) == 4
    assert [c.ids for c in said] == [c.ids for c in LocalEngine(base).generate(requests(12))]


@pytest.mark.slow
def test_a_server_that_a_list_in_a_file_gets_later_samples_too_and_a_list_that_is_gone_changes_nothing(tmp_path):
    base, named = team_base(), tmp_path / "servers"
    with StandIn(team_base) as first, StandIn(team_base) as second:
        named.write_text(f"{first.url}\n")
        engine = ServerEngine(base, EngineConfig(engine="vllm", vllm_servers=(f"@{named}",)), probe=probe_prompt(base))
        engine.keep_probes()
        expected = LocalEngine(base).generate(requests())
        named.write_text(f"{first.url}\n{second.url}\n")
        first.kill()
        assert [c.ids for c in engine.generate(requests())] == [c.ids for c in expected]
        assert engine.servers == {first.url: False, second.url: True}
        named.unlink()
        assert [c.ids for c in engine.generate(requests())] == [c.ids for c in expected]
        engine.close()
    for content in (None, "\n"):
        if content is not None:
            named.write_text(content)
        with pytest.raises(ConfigError, match="the list"):
            checks.server_urls([f"@{named}"])


@pytest.mark.slow
def test_a_server_that_comes_back_with_another_base_is_not(monkeypatch, caplog):
    monkeypatch.setattr(server, "REVIVE_S", 0.0)
    base = team_base()
    with StandIn(tiny_base) as one:
        two = StandIn(tiny_base).__enter__()
        engine = engine_on(base, one, two)
        engine.keep_probes()
        two.kill()
        engine.generate(requests())
        with StandIn(lambda: tiny_base(seed=1), port=two.port) as back, caplog.at_level(logging.WARNING):
            engine.generate(requests())
            assert engine.servers == {one.url: True, back.url: False}
    assert any("another base" in line for line in caplog.messages)


@pytest.mark.slow
def test_a_server_started_again_between_two_calls_gets_its_adapters_again():
    base = team_base()
    server = StandIn(tiny_base).__enter__()
    engine = engine_on(base, server)
    engine.keep_probes()
    engine.generate(requests())
    server.kill()
    with StandIn(tiny_base, port=server.port) as back:
        said = engine.generate(requests())
        assert len(back.loaded) == 4
    assert [c.ids for c in said] == [c.ids for c in LocalEngine(base).generate(requests())]


def test_when_none_is_left_it_says_so():
    with StandIn(tiny_base, die_after=3) as one, StandIn(tiny_base, die_after=2) as two:
        engine = engine_on(team_base(), one, two)
        with pytest.raises(EngineDownError, match="No vLLM server answers"):
            engine.generate(requests(12))
        with pytest.raises(EngineDownError, match=one.url):
            engine.generate(requests())


def run_config(server: StandIn, **changes) -> TrainConfig:
    return TrainConfig.of(**{**settings().flat(), **vars(config(server)), "eval_episodes": 0, **changes})


def play(server: StandIn, run_dir, resume=None, **changes):
    runner = OnPolicy(
        Digits(),
        Team.of(Digits.agents),
        tiny_base(),
        run_config(server, iterations=2, n_rollout_threads=6, **changes),
        run_dir=run_dir,
        provenance=Provenance(resume),
    )
    try:
        return runner.run(), {name: runner.base.adapter_state(name) for name in Digits.agents}
    finally:
        runner.close()


@pytest.mark.slow
def test_a_run_whose_servers_die_pauses_and_goes_on_as_if_nothing_had_been(tmp_path):
    with StandIn(tiny_base) as server:
        whole, weights = play(server, tmp_path / "whole")
        sampled = len(server.completed)
    assert not whole.paused and whole.iterations == 2
    with StandIn(tiny_base) as server:
        server.die_after = sampled - 2  # amid the last iteration
        paused, _ = play(server, tmp_path / "cut")
    assert paused.paused and paused.iterations == 1 and "No vLLM server answers" in str(paused.stopped_by)
    with StandIn(tiny_base) as server:
        resumed, again = play(server, tmp_path / "cut", resume=resolve(tmp_path / "cut"))
    assert not resumed.paused and resumed.iterations == 2
    for name, state in weights.items():
        assert all(torch.equal(state[key], again[name][key]) for key in state)
    lines = [(tmp_path / run / "episodes.jsonl").read_bytes() for run in ("whole", "cut")]
    assert lines[0] == lines[1]


@pytest.mark.slow
def test_a_run_on_servers_measures_the_gap_and_learns_as_local_does(tmp_path):
    with StandIn(tiny_base) as server:
        _, weights = play(server, tmp_path / "served")
    config = settings(iterations=2, n_rollout_threads=6, eval_episodes=0)
    assert config.engine.engine == "local"
    runner = OnPolicy(Digits(), Team.of(Digits.agents), tiny_base(), config)
    text = (tmp_path / "served" / "metrics.jsonl").read_text()
    assert all(f'"engine_{what}/{name}"' in text for what in ("gap", "gap_max", "kl") for name in Digits.agents)
    runner.run()
    for name, state in weights.items():
        for key, tensor in runner.base.adapter_state(name).items():
            torch.testing.assert_close(state[key], tensor, atol=2e-4, rtol=0.0)


@pytest.mark.slow
def test_the_self_check_measures_and_leaves_everything_as_it_was():
    base = team_base()
    before = {name: base.adapter_state(name) for name in NAMES}
    versions = dict(base.versions)
    with StandIn(tiny_base) as server:
        found = self_check(engine_on(base, server), base, server.url)
    assert found.base_nats <= EXACT_NATS / 10 and found.adapter_nats <= EXACT_NATS / 10
    assert found.effect_nats > 10 * EXACT_NATS and EFFECT_NATS > 10 * EXACT_NATS
    assert base.versions == versions
    assert all(torch.equal(base.adapter_state(name)[key], before[name][key]) for name in NAMES for key in before[name])


def raw(said, body):
    """Log-probabilities of the model, whatever was sampled from: what vLLM gives unless told otherwise."""
    found = _choice(said, body)
    if body["top_k"]:
        found["logprobs"]["token_logprobs"] = [value - 1.0 for value in said.logprobs]
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("knobs", "seed", "words"),
    [
        ({}, 1, "does not hold the base"),
        ({"deaf": True}, 0, "adapter 'a' changes nothing"),
        ({"frozen": True}, 0, "an update of adapter 'a' does not arrive"),
        ({"answer": raw}, 0, "--logprobs-mode processed_logprobs"),
    ],
)
def test_the_self_check_refuses_an_engine_that_says_something_else(knobs, seed, words):
    base = team_base()
    with StandIn(lambda: tiny_base(seed=seed), **knobs) as server:
        engine = engine_on(base, server)
        with pytest.raises(ModelError, match=words) as error:
            self_check(engine, base, server.url)
    assert str(error.value).count("\n") == 0 and server.url in str(error.value)


@pytest.mark.slow
def test_servers_that_cannot_do_it_are_refused_in_a_sentence(monkeypatch):
    base = team_base()
    with StandIn(tiny_base, lora=False) as server, pytest.raises(ConfigError, match="cannot load adapters"):
        engine_on(base, server).generate(requests())
    with StandIn(tiny_base, room=4) as server, pytest.raises(ConfigError, match="cannot hold the adapter c-"):
        engine_on(base, server).generate(requests(adapters=("c",)))
    with StandIn(tiny_base, max_model_len=100) as server, pytest.raises(ConfigError, match="takes 100 tokens"):
        engine_on(base, server)
    with StandIn(tiny_base, token="sesame") as server:
        with pytest.raises(ConfigError, match="refuses the token"):
            engine_on(base, server)
        with pytest.raises(ConfigError, match="refuses the token"):
            reach_servers(config(server), "teaching-base")
        monkeypatch.setenv(checks.TOKEN, "sesame")
        reach_servers(config(server), "teaching-base")
        assert len(engine_on(base, server).generate(requests())) == 16
    with pytest.raises(EngineDownError, match="No vLLM server answers"):
        reach_servers(config(server), "teaching-base")
    with pytest.raises(EngineDownError, match="No vLLM server answers"):
        engine_on(base, server)


def test_it_works_inside_an_event_loop():
    import asyncio

    base = team_base()

    async def notebook():
        with StandIn(tiny_base) as server:
            return engine_on(base, server).generate(requests(1))

    assert len(asyncio.run(notebook())) == 4


@pytest.mark.slow
def test_two_engines_may_share_a_server():
    base = team_base()
    with StandIn(tiny_base) as server:
        first, second = engine_on(base, server), engine_on(base, server)
        found: list = []
        threads = [
            threading.Thread(target=lambda e=e: found.append([c.ids for c in e.generate(requests())]))
            for e in (first, second)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        first.close()
        assert [c.ids for c in second.generate(requests())] == found[0] == found[1]


GOOD = EngineConfig(engine="vllm", vllm_servers=("http://127.0.0.1:1",))


@pytest.mark.parametrize(
    ("changes", "rank", "target", "words"),
    [
        ({"engine": "local"}, 8, "q_proj", "add --engine vllm"),
        ({"engine": "local", "vllm_servers": (), "max_loras": 4}, 8, "q_proj", "max_loras is 4, but engine is local"),
        ({"vllm_servers": ("127.0.0.1:8000",)}, 8, "q_proj", "expected an address such as"),
        ({"vllm_servers": ("http://h:1?key=secret",)}, 8, "q_proj", "expected an address such as"),
        ({"vllm_servers": ("http://127.0.0.1:port",)}, 8, "q_proj", "expected an address such as"),
        ({"vllm_servers": ("http://[::1",)}, 8, "q_proj", "expected an address such as"),
        ({"vllm_servers": ("http://127.0.0.1:1", "http://127.0.0.1:1/")}, 8, "q_proj", "twice"),
        ({"vllm_servers": ("http://10.1.2.3:1",)}, 8, "q_proj", "there is no token"),
        ({"gpu_memory_utilization": 0.5}, 8, "q_proj", "settings of their own"),
        ({"tensor_parallel_size": 2}, 8, "q_proj", "settings of their own"),
        ({"max_lora_rank": 16}, 32, "q_proj", "Adapter 'a' has rank 32, above --max_lora_rank"),
        ({"max_lora_rank": 12}, 8, "q_proj", "vLLM takes 1, 8, 16"),
        ({}, 1024, "q_proj", "above the largest rank that vLLM knows"),
        ({}, 8, "model.layers.0.mlp.router", "target router, which vLLM does not serve"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_is_loaded(changes, rank, target, words, monkeypatch):
    monkeypatch.delenv(checks.TOKEN, raising=False)
    with pytest.raises(ConfigError, match=words):
        check_engine(replace(GOOD, **changes), {"a": rank}, {"a": [target]})


def test_settings_that_work_are_not_refused(monkeypatch):
    check_engine(EngineConfig(), {"a": 4096}, {"a": ["anything"]})
    check_engine(GOOD, {"a": 8}, {"a": ["model.layers.0.self_attn.q_proj"]})
    monkeypatch.setenv(checks.TOKEN, "t")
    with pytest.raises(ConfigError, match="vllm_adapter_dir"):
        check_engine(replace(GOOD, vllm_servers=("http://10.1.2.3:1",)), {}, {})
    check_engine(replace(GOOD, vllm_servers=("http://10.1.2.3:1",), vllm_adapter_dir="/shared"), {}, {})


def test_a_missing_extra_names_its_install(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match="pip install 'vllm"):
        check_engine(EngineConfig(engine="vllm"), {}, {})
    with pytest.raises(MissingExtraError, match="pip install 'httpx"):
        check_engine(GOOD, {}, {})


def test_a_server_whose_files_are_another_model_is_refused_while_the_base_is_on_disk(tmp_path):
    (tmp_path / "config.json").write_text('{"hidden_size": 64, "vocab_size": 1147}')
    with pytest.raises(ConfigError, match="its hidden_size is 64, that of teaching-base is 128"):
        checks._refuse_other_base("http://127.0.0.1:1", str(tmp_path), "teaching-base")
    checks._refuse_other_base("http://127.0.0.1:1", "some/hub-id", "teaching-base")


def test_adapters_of_attention_alone_are_served_too():
    base = tiny_base()
    add_random_adapter(base, "a", targets=ATTENTION)
    with StandIn(tiny_base) as server:
        asked = requests(adapters=("a", None))
        assert [c.ids for c in engine_on(base, server).generate(asked)] == [
            c.ids for c in LocalEngine(base).generate(asked)
        ]


def test_the_gap_between_engine_and_trainer_by_hand():
    def turn(agent, engine, trainer):
        ids = list(range(len(engine)))
        made = Turn(agent, [1], ids, engine, "eos", "", turn=0, env_step=0, adapter_version=0)
        made.old_logprobs = trainer
        return made

    turns = [turn("a", [-1.0, -2.0], [-1.5, -2.0]), turn("a", [-3.0], [-2.0]), turn("b", [-1.0], [-4.0])]
    plain, cut = SamplingParams(), SamplingParams(top_k=5)
    found = engine_gap(turns, {"a": plain, "b": cut})
    # d = -.5, 0, 1: mean |d| = 1.5 / 3; exp(d) - 1 - d = .10653, 0, .71828, mean .27494
    assert found == {
        "engine_gap/a": pytest.approx(0.5),
        "engine_gap_max/a": pytest.approx(1.0),
        "engine_kl/a": pytest.approx(0.27494, abs=1e-5),
    }


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--engine", "vllm", "--vllm_servers", "http://127.0.0.1:9"], "No vLLM server answers"),
        (["--vllm_servers", "http://127.0.0.1:9"], "without --engine vllm"),
        (["--max_lora_rank", "16"], "max_lora_rank has no effect without --engine vllm"),
        (["--engine", "vllm", "--vllm_servers", "http://127.0.0.1:9", "--lora_rank", "640"], "lora_rank is 640"),
    ],
)
def test_scripts_refuse_in_one_sentence_and_write_nothing(words, said, tmp_path, capsys, monkeypatch):
    from mafrt.scripts import train_math

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(SharedBase, "load", lambda *_, **__: pytest.fail("a model was loaded"))
    assert train_math.main(words) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1
    assert list(tmp_path.iterdir()) == []
