"""A real vLLM, in a process beside the trainer and as servers on loopback, against the local engine and the trainer.

Where vLLM is not installed nothing here runs, and pytest says so. CI installs it (requirements-scale.txt).
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import signal
import socket
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest
import torch
from helpers_families import tiny
from helpers_models import tiny_tokenizer
from helpers_warm import WarmProcess, start_python

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM IS NOT INSTALLED: its engine is untested here (requirements-scale.txt)", allow_module_level=True)

from mafrt.config.agent import LoraSpec
from mafrt.config.team import Team
from mafrt.config.train_config import EngineConfig
from mafrt.core.errors import ConfigError, EngineDownError, PromptTooLongError
from mafrt.core.shipped import TEACHING_BASE
from mafrt.core.types import Request, SamplingParams
from mafrt.engines.checks import SERVED
from mafrt.engines.local.engine import LocalEngine
from mafrt.engines.logprob_check import probe_prompt, self_check, trainer_logprobs
from mafrt.engines.vllm.in_process import VllmEngine
from mafrt.engines.vllm.server import ServerEngine
from mafrt.envs.math import MathEnv, load_tasks
from mafrt.models.shared_base import SharedBase
from mafrt.rollout.player import Player, Start

pytestmark = [pytest.mark.takes(slow=40), pytest.mark.slow, pytest.mark.ci]

SERVERS = Path(__file__).parents[1] / "vllm_servers.py"

NATS = 1e-4
"""Stated bound on the difference of one token's log-probability between vLLM and the trainer, both in float32."""
RANKS = {"planner": 8, "solver": 4, "checker": 16}
GREEDY = SamplingParams(max_new_tokens=40, temperature=0.0)
WARM = SamplingParams(max_new_tokens=40)
CUT = SamplingParams(max_new_tokens=40, temperature=0.7, top_p=0.9, top_k=20)


def shake(base: SharedBase, name: str, seed: int, scale: float = 0.1) -> None:
    """What an update does, only more: other weights, and the version says so."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for _, b in base.adapter_layers(name).values():
            b.copy_(scale * torch.randn(b.shape, generator=generator))
    base.bump(name)


def team_base() -> SharedBase:
    torch.set_num_threads(1)
    base = SharedBase.load("teaching-base")
    for number, (name, rank) in enumerate(RANKS.items()):
        base.add_adapter(name, LoraSpec(rank=rank, alpha=16.0), seed=number)
        shake(base, name, number)
    return base


def prompts(base: SharedBase, count: int = 8) -> list[list[int]]:
    texts = [f"Tom has {n} apples and buys {n + 2} more. How many?" for n in range(2, 2 + count)]
    return [base.tokenizer.encode(f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n") for text in texts]


def requests(base: SharedBase, how: SamplingParams, adapters=(None, *RANKS)) -> list[Request]:
    return [Request(p, name, how, seed=7 + n) for n, p in enumerate(prompts(base)) for name in adapters]


def worst_gap(base: SharedBase, asked: list[Request], said) -> float:
    """Largest difference of a token's log-probability between an engine and the trainer."""
    return max(
        float((torch.tensor(a.logprobs) - trainer_logprobs(base, r.prompt_ids, a, r.adapter, r.sampling)).abs().max())
        for r, a in zip(asked, said, strict=True)
    )


def start_servers(ports: list[int], folder: Path) -> WarmProcess:
    environment = {
        **os.environ,
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
        # The model runs in the engine's process: otherwise the two spin while they wait for each other.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "OMP_NUM_THREADS": "1",
    }
    words = f"--model {TEACHING_BASE} --host 127.0.0.1 --dtype float32 --enforce-eager --gpu-memory-utilization 0.1"
    words += " --no-enable-chunked-prefill --logprobs-mode processed_logprobs"
    words += " --enable-lora --max-loras 4 --max-cpu-loras 8 --max-lora-rank 16"
    return start_python(SERVERS, folder, *map(str, ports), "--", *words.split(), env=environment)


def kill(server: int) -> None:
    """kill -9 for the server and the processes it has started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(server, signal.SIGKILL)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture(scope="module")
def started(tmp_path_factory):
    """Two servers on their way up."""
    folder, ports = tmp_path_factory.mktemp("servers"), [free_port(), free_port()]
    process = start_servers(ports, folder)
    yield process, ports, folder
    for server in process.stdout.split():
        kill(int(server))
    process.kill()
    process.wait(60)


@pytest.fixture(scope="module")
def servers(started):
    """Address -> process id."""
    process, ports, folder = started
    urls, deadline = [f"http://127.0.0.1:{port}" for port in ports], time.monotonic() + 400
    for url in urls:
        while True:
            try:
                urllib.request.urlopen(url + "/health", timeout=5).close()
                break
            except (urllib.error.URLError, OSError):
                last = [log.read_text()[-2000:] for log in folder.iterdir()]
                assert process.poll() is None and time.monotonic() < deadline, [*last, process.stderr[-2000:]]
                time.sleep(0.2)
    return dict(zip(urls, map(int, process.stdout.split()), strict=True))


@pytest.fixture(scope="module")
def base():
    return team_base()


@pytest.fixture(scope="module")
def engine(base):
    made = VllmEngine(base, EngineConfig(engine="vllm"), window=1024)
    yield made
    made.close()


def same_greedy_before_and_after_an_update(base, engine):
    asked = requests(base, GREEDY)
    for update in range(2):
        local, said = LocalEngine(base).generate(asked), engine.generate(asked)
        assert [a.ids for a in said] == [a.ids for a in local]
        assert [(a.stop, a.text, a.logprobs) for a in said] == [(a.stop, a.text, a.logprobs) for a in local]
        assert [a.adapter_version for a in said] == [a.adapter_version for a in local]
        texts = {name: [a.text for r, a in zip(asked, said, strict=True) if r.adapter == name] for name in RANKS}
        assert len({tuple(text) for text in texts.values()}) == 3  # the adapters do differ
        for name in RANKS:
            shake(base, name, seed=50 + 10 * update + len(name))


def test_local_and_vllm_say_the_same_greedily_before_and_after_an_update(base, engine):
    same_greedy_before_and_after_an_update(base, engine)


def test_logprobs_are_those_of_the_distribution_sampled_from(base, engine):
    for how in (WARM, CUT):
        asked = requests(base, how)
        said = engine.generate(asked)
        assert len({tuple(a.ids) for a in said}) > 8
        assert worst_gap(base, asked, said) <= NATS
        assert all(a.ids and len(a.logprobs) == len(a.ids) for a in said)


def test_a_sample_depends_on_its_request_alone(base, engine):
    asked = requests(base, WARM)
    together = engine.generate(asked)
    assert [a.ids for a in together] == [a.ids for a in engine.generate(asked)]
    alone = [engine.generate([request])[0].ids for request in asked[:6]]
    assert alone == [a.ids for a in together[:6]]


def crowd(base: SharedBase) -> list[Request]:
    """More prompt tokens than vLLM takes in one step, each request with its own seed."""
    long = [*(prompts(base, 1)[0] * 30)][:600]
    how = SamplingParams(max_new_tokens=4)
    return [Request([5 + n, *long], name, how, seed=n) for n in range(3) for name in RANKS]


def test_more_prompts_than_fit_into_a_step(base, engine):
    asked = crowd(base)
    assert sum(len(request.prompt_ids) for request in asked) > 5000  # vLLM takes 4096 by default
    assert worst_gap(base, asked, engine.generate(asked)) <= NATS


def test_no_update_is_ever_answered_from_before(base, engine):
    long = [*(prompts(base)[0] * 20)][:400]  # several blocks of the prompt cache
    ask = [Request(long, name, WARM, seed=3) for name in RANKS]

    def from_the_cache() -> list[int]:
        parcels = engine.hand_over(ask)
        outputs = engine._llm.generate(
            [{"prompt_token_ids": long}] * 3,
            [engine._sampling(request) for request in ask],
            lora_request=[engine._lora(parcels[request.adapter]) for request in ask],
            use_tqdm=False,
        )
        return [output.num_cached_tokens for output in outputs]

    for update in range(3):
        for name in RANKS:
            shake(base, name, seed=1000 + 10 * update + len(name))
        assert from_the_cache() == [0, 0, 0]
        assert min(from_the_cache()) > 0  # it is in use, and answers for the version that it was made with
        said = engine.generate(ask)
        assert worst_gap(base, ask, said) <= NATS
        assert [a.adapter_version for a in said] == [base.versions[name] for name in RANKS]
    assert set(engine._llm.llm_engine.list_loras()) == {p.number for p in engine._handover.current()}
    assert len(list(engine._handover.folder.iterdir())) == len(engine._handover.current())


def test_stops_and_limits_are_those_of_the_local_engine(base, engine):
    asked = [
        Request(prompts(base)[n], name, SamplingParams(max_new_tokens=limit, temperature=0.0, stop=stop), seed=n)
        for n in range(4)
        for name in (None, "planner")
        for limit, stop in ((3, ()), (40, (" and",)), (40, ("<|im_end|>",)), (40, ("d 3", "zzz")))
    ]
    local, said = LocalEngine(base).generate(asked), engine.generate(asked)
    assert [(a.ids, a.stop, a.text) for a in said] == [(a.ids, a.stop, a.text) for a in local]
    assert {a.stop for a in said} >= {"length", "stop"}
    with pytest.raises(PromptTooLongError, match="at most 1023"):
        engine.generate([Request([5] * 1024, None, GREEDY, seed=0)])
    assert engine.generate([Request([5] * 1020, None, GREEDY, seed=0)])[0].stop in ("length", "eos")
    assert engine.generate([]) == []


def test_the_self_check_passes_with_room_to_spare(base, engine):
    before = {name: base.adapter_state(name) for name in RANKS}
    found = self_check(engine, base)
    assert found.base_nats < NATS and found.adapter_nats < NATS and found.effect_nats > 0.1
    assert all(torch.equal(t, before[name][key]) for name in RANKS for key, t in base.adapter_state(name).items())
    assert worst_gap(base, requests(base, WARM), engine.generate(requests(base, WARM))) <= NATS


def test_an_adapter_that_vllm_cannot_hold_is_a_sentence_and_not_its_end(base, engine):
    if "giant" not in base.records:  # left by a first try that failed
        base.add_adapter("giant", LoraSpec(rank=48), seed=0)
    with pytest.raises(ConfigError, match="cannot hold the adapter giant"):
        engine.generate([Request(prompts(base)[0], "giant", GREEDY, seed=0)])
    assert len(engine.generate(requests(base, GREEDY))) == 32


def test_vllm_killed_is_one_sentence_and_stays_so(base, engine):
    for pid in engine.pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    for _ in range(2):
        with pytest.raises(EngineDownError, match="vLLM's process died"):
            engine.generate(requests(base, WARM))


@pytest.fixture(scope="module")
def served(servers):
    base = team_base()
    made = ServerEngine(base, EngineConfig(engine="vllm", vllm_servers=tuple(servers)), probe=probe_prompt(base))
    yield base, made
    made.close()


@pytest.mark.nightly
def test_servers_say_what_the_local_engine_says_before_and_after_an_update(served):
    base, engine = served
    same_greedy_before_and_after_an_update(base, engine)


@pytest.mark.nightly
def test_servers_give_the_logprobs_of_the_distribution_sampled_from(served):
    base, engine = served
    for how in (WARM, CUT):
        asked = requests(base, how)
        assert worst_gap(base, asked, engine.generate(asked)) <= NATS


@pytest.mark.nightly
def test_more_prompts_than_fit_into_a_step_of_a_server(served):
    base, engine = served
    asked = crowd(base)
    with engine.only(next(iter(engine.servers))):
        assert worst_gap(base, asked, engine.generate(asked)) <= NATS


@pytest.mark.nightly
def test_every_server_passes_the_self_check(served):
    base, engine = served
    for url in engine.servers:
        with engine.only(url):
            assert self_check(engine, base, url).adapter_nats < NATS
    engine.keep_probes()


@pytest.mark.nightly
def test_no_update_is_ever_answered_from_before_by_a_server(served):
    base, engine = served
    long = [*(prompts(base)[0] * 20)][:400]
    ask = [Request(long, name, WARM, seed=3) for name in RANKS] * 2
    for update in range(3):
        for name in RANKS:
            shake(base, name, seed=2000 + 10 * update + len(name))
        said = engine.generate(ask)
        assert worst_gap(base, ask, said) <= NATS
        assert [a.ids for a in engine.generate(ask)] == [a.ids for a in said]


class Watched:
    """An engine that does something during its second call."""

    def __init__(self, engine, then) -> None:
        self.engine, self.then, self.calls, self.answers = engine, then, 0, 0

    def generate(self, asked):
        self.calls += 1
        if self.calls == 2:
            threading.Timer(0.5, self.then).start()
        found = self.engine.generate(asked)
        self.answers += len(found)
        return found


@pytest.mark.nightly
def test_a_server_killed_amid_a_rollout_costs_nothing_and_nothing_is_sampled_twice(served, servers):
    """The last of the tests with servers: it kills both."""
    base, engine = served
    team = Team.of(["reasoner", "actor"])
    for name in team.adapters:
        base.add_adapter(name, LoraSpec(rank=8), seed=1)
        shake(base, name, seed=5, scale=0.6)  # so strong that it babbles to the limit, and the kill comes amid it
    env = MathEnv(tasks=load_tasks(split="test")[:12], team=team, workflow="chain")
    how = SamplingParams(max_new_tokens=150)

    def play(engine):
        starts = iter([Start(f"e{n}", f"g{n}", reset_seed=n, seed=n, task=n) for n in range(12)])
        player = Player(engine, base.tokenizer, team, dict.fromkeys(team.names, how), 1024)
        episodes, stats = player.play([env.spawn() for _ in range(12)], lambda slot, done: next(starts, None))
        return {episode.id: [turn.action_ids for turn in episode.turns] for episode in episodes}, episodes, stats

    victim, survivor = engine.servers
    watched = Watched(engine, lambda: kill(servers[victim]))
    said, episodes, stats = play(watched)
    assert engine.servers == {victim: False, survivor: True}
    assert len(episodes) == len(said) == 12 and all(len(turns) == 2 for turns in said.values())
    assert watched.answers == 24 and stats.tokens == sum(len(t) for turns in said.values() for t in turns)
    assert play(engine)[0] == said  # one server alone says the same: seeds follow from places, not from servers
    watched = Watched(engine, lambda: kill(servers[survivor]))
    with pytest.raises(EngineDownError, match="No vLLM server answers"):
        play(watched)


OF_FAMILIES = ("llama", "phi3", "gemma3_text", "granite", "olmo3", "falcon_h1")
"""joined projections, windows, scaled logits, norms behind the layers, a recurrence"""


@pytest.mark.nightly
@pytest.mark.cases(len(OF_FAMILIES))
@pytest.mark.parametrize("family", OF_FAMILIES)
def test_an_adapter_of_another_family_has_the_logprobs_of_the_trainer(family, tmp_path):
    """Tiny ones, but for their heads: vLLM's attention on a CPU takes multiples of 32."""
    tiny(family, hidden_size=128, head_dim=32).save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    base = SharedBase.load(str(tmp_path), device="cpu")
    served = sorted(SERVED & {path.rsplit(".", 1)[-1] for path in base.linear_paths()})
    for seed, name in enumerate(("ann", "bob")):
        base.add_adapter(name, LoraSpec(rank=4, alpha=8.0, targets=tuple(served)), seed=seed)
        shake(base, name, seed)
    engine = VllmEngine(base, EngineConfig(engine="vllm"), window=128)
    try:
        prompt = probe_prompt(base)
        asked = [Request(prompt[:n], name, WARM, n) for n in (5, 12, 24) for name in (None, "ann", "bob")]
        assert worst_gap(base, asked, engine.generate(asked)) < NATS
    finally:
        engine.close()
