"""The Tinker API by raw HTTP on a tiny base: what it computes, and the order and repetition of requests."""

from __future__ import annotations

import errno
import os
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers_models import random_ids, tiny_base, tiny_model
from helpers_tinker import Client, RefusedByServerError, datum, ids, output, serving

from mafrt.algorithms import Algorithm
from mafrt.config.agent import LoraSpec
from mafrt.config.team import AgentSpec, Team
from mafrt.config.train_config import LearnConfig
from mafrt.core.types import Turn
from mafrt.models.peft_format import keys
from mafrt.models.shared_base import SharedBase
from mafrt.scripts.tinker_server.checkpoints import Checkpoints, parse_path
from mafrt.scripts.tinker_server.limits import Limits
from mafrt.scripts.tinker_server.trainer import Job
from mafrt.training.learner import Learner
from mafrt.training.policy_objective import Objective

ADAM = {"learning_rate": 0.02, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8}
ROWS = random_ids(6, 24, seed=3).tolist()


@pytest.fixture
def served(tmp_path):
    server = serving(tiny_base(), tmp_path)
    yield server
    server.close()


@contextmanager
def paused(trainer):
    """Nothing is computed inside; what comes meanwhile stands in the queue at the end."""
    begun, end = threading.Event(), threading.Event()
    trainer.submit(Job("nobody", lambda: (begun.set(), end.wait(600))))
    assert begun.wait(600)
    try:
        yield
    finally:
        end.set()


def weights_of(server, model: str) -> dict[str, torch.Tensor]:
    service = server.service
    return service.base.adapter_state(service._models[model].adapter.slot)


def plain(base: SharedBase, state: dict[str, torch.Tensor], scaling: float):
    """Log-probabilities by the model's own forward pass, with the adapter written into its weights by plain torch."""
    leaves, model = {name: value.clone().requires_grad_() for name, value in state.items()}, tiny_model()

    def logprobs(tokens: list[int], targets: list[int]) -> torch.Tensor:
        changed = {}
        for path, (_, _) in base.adapter_layers("slot0").items():
            a, b = (leaves[key] for key in keys(path))
            changed[f"{path}.weight"] = model.get_submodule(path).weight.detach() + scaling * b @ a
        logits = torch.func.functional_call(model, changed, (torch.tensor([tokens]),)).logits[0]
        return logits.log_softmax(1).gather(1, torch.tensor(targets).unsqueeze(1)).squeeze(1)

    return leaves, logprobs


def losses(name: str, logprobs, inputs, settings):
    """The documented formulas, written out once more."""
    if name == "cross_entropy":
        return -(logprobs * inputs["weights"]).sum()
    ratio, advantages = (logprobs - inputs["logprobs"]).exp(), inputs["advantages"]
    low, high = settings.get("clip_low_threshold", 0.8), settings.get("clip_high_threshold", 1.2)
    if name == "importance_sampling":
        return -(ratio * advantages).sum()
    if name == "ppo":
        return -torch.min(ratio * advantages, ratio.clamp(low, high) * advantages).sum()
    if name == "cispo":
        return -(ratio.clamp(low, high).detach() * logprobs * advantages).sum()
    beta = settings.get("beta", 0.05)
    return -(logprobs * advantages - 0.5 * beta * (logprobs - inputs["logprobs"]) ** 2).sum()


@pytest.mark.parametrize(
    ("loss", "settings"),
    [
        ("cross_entropy", {}),
        ("importance_sampling", {}),
        ("ppo", {}),
        ("ppo", {"clip_low_threshold": 0.9, "clip_high_threshold": 1.05}),
        ("cispo", {}),
        ("dro", {"beta": 0.3}),
    ],
)
def test_losses_and_gradients_are_those_of_plain_torch(served, loss, settings):
    client, generator = Client(served), torch.Generator().manual_seed(0)
    models = [client.model(rank=4, seed=n) for n in range(3)]
    # B is 0 at first, and then so is the gradient of A.
    for model in models:
        client.learn(model, [datum(ROWS[0][:-1], ROWS[0][1:], weights=[1.0] * 23)])
        client.step(model, **ADAM)
    datas, before, asked = [], [weights_of(served, model) for model in models], []
    for n, model in enumerate(models):
        rows = ROWS[n : n + 3]
        data = []
        for row in rows:
            size = 5 + 3 * len(data)
            if loss == "cross_entropy":
                inputs = {"weights": torch.rand(size, generator=generator)}
            else:
                inputs = {
                    "logprobs": -4 * torch.rand(size, generator=generator),
                    "advantages": torch.randn(size, generator=generator),
                }
            data.append((row[:size], row[1 : size + 1], inputs))
        datas.append(data)
        asked.append(client.begin_pass(client.message(model, [datum(*d[:2], **d[2]) for d in data], loss, **settings)))
    base, worst = served.service.base, 0.0
    for n, model in enumerate(models):
        found, logprobs = output(client.fetch(asked[n]))
        leaves, score = plain(base, before[n], 32 / 4)
        total = torch.zeros(())
        for (tokens, targets, inputs), given in zip(datas[n], logprobs, strict=True):
            own = score(tokens, targets)
            np.testing.assert_allclose(given, own.detach().numpy(), atol=2e-5)
            total = total + losses(loss, own, inputs, settings)
        assert found == pytest.approx(float(total.detach()), rel=1e-5, abs=1e-5)
        total.backward()
        wanted = [leaves[key].grad for path in base.adapter_layers("slot0") for key in keys(path)]
        gradient = served.service._models[model].adapter.gradient
        for got, want in zip(gradient.split([each.numel() for each in wanted]), wanted, strict=True):
            want = want.flatten()
            scale = max(1.0, float(want.abs().max()))
            worst = max(worst, float((got - want).abs().max()) / scale)
    assert worst < 1e-5


def test_a_step_is_that_of_the_librarys_own_learner(served):
    """The same samples learnt from here and by `Learner`: equal weights after one step."""
    client, generator = Client(served), torch.Generator().manual_seed(1)
    model = client.model(rank=4, seed=7)
    client.learn(model, [datum(ROWS[0][:-1], ROWS[0][1:], weights=[0.1] * 23)])
    client.step(model, **ADAM)
    start = weights_of(served, model)
    turns, data = [], []
    for row, size in zip(ROWS, (5, 9, 14), strict=False):
        prompt, answer = row[:6], row[6 : 6 + size]
        old = (-4 + torch.randn(size, generator=generator)).tolist()
        advantage = torch.randn(1, generator=generator).item()
        turns.append(Turn("own", prompt, answer, old, "eos", "", 0, 0, 0, advantages=[advantage] * size))
        # The library's loss is a mean over an adapter's tokens, that of the API a sum.
        paid = [0.0] * 5 + [advantage / (5 + 9 + 14)] * size
        data.append(datum([*prompt, *answer[:-1]], [*prompt[1:], *answer], logprobs=[0.0] * 5 + old, advantages=paid))
    client.learn(model, data, "ppo")
    # Without decay and from fresh moments the step is the learner's.
    served.service._models[model].adapter.moments = None
    client.step(model, learning_rate=0.01, beta1=0.9, beta2=0.999, eps=1e-8, grad_clip_norm=1.0)
    base = tiny_base()
    base.add_adapter("own", LoraSpec(rank=4, alpha=32.0, targets=("all-linear",)), seed=0)
    base.load_adapter_state("own", start)
    learn = LearnConfig(lr=0.01, opti_eps=1e-8, max_grad_norm=1.0, ppo_epoch=1)
    objective = Objective(Algorithm(level="token", importance_cap=None))
    Learner(base, Team((AgentSpec("own"),)), learn, objective, 0).update(turns, ["own"], 0)
    after, own = weights_of(served, model), base.adapter_state("own")
    assert max(float((after[name] - start[name]).abs().max()) for name in own) > 5e-3
    for name, value in own.items():
        torch.testing.assert_close(after[name], value, atol=1e-5, rtol=1e-5)


def test_gradients_add_up_until_the_step(served):
    client = Client(served)
    once, twice = client.model(seed=3), client.model(seed=3)
    first, second = (datum(row[:-1], row[1:], weights=[0.5] * 23) for row in ROWS[:2])
    client.learn(once, [first, second])
    client.learn(twice, [first])
    client.learn(twice, [second])
    client.learn(twice, [second], backward=False)  # leaves no gradient
    for model in (once, twice):
        client.step(model, **ADAM)
    assert client.step(once, **ADAM) == {"grad_norm:mean": 0.0}
    left, right = weights_of(served, once), weights_of(served, twice)
    for name in left:
        torch.testing.assert_close(left[name], right[name], atol=1e-5, rtol=1e-4)


def test_adapters_of_several_clients_share_micro_batches(served):
    clients = [Client(served, f"tml-{n}-client") for n in range(6)]
    models = [client.model(seed=n) for n, client in enumerate(clients)]
    trainer = served.service.trainer
    before, data = trainer.micro_batches, [datum(row[:-1], row[1:], weights=[1.0] * 23) for row in ROWS]
    with paused(trainer):
        requests = [client.begin_pass(client.message(m, data)) for client, m in zip(clients, models, strict=True)]
    together = [output(client.fetch(request)) for client, request in zip(clients, requests, strict=True)]
    assert trainer.mixed == 1 and trainer.micro_batches - before == 1  # whatever stands in the queue is one micro-batch
    for client, model, (loss, logprobs) in zip(clients, models, together, strict=True):
        alone = client.learn(model, data, backward=False)
        assert loss == pytest.approx(alone[0], rel=1e-5)
        np.testing.assert_allclose(np.concatenate(logprobs), np.concatenate(alone[1]), atol=1e-5)


def test_where_memory_runs_out_smaller_micro_batches_give_the_same(served, monkeypatch):
    clients = [Client(served, f"tml-{n}-client") for n in range(3)]
    models = [client.model(seed=n) for n, client in enumerate(clients)]
    trainer, data = served.service.trainer, [datum(row[:-1], row[1:], weights=[1.0] * 23) for row in ROWS[:2]]
    long = [datum([*ROWS[0], *ROWS[1]][:-1], [*ROWS[0], *ROWS[1]][1:], weights=[1.0] * 47)]
    whole = [client.learn(model, data, backward=False) for client, model in zip(clients, models, strict=True)]
    monkeypatch.setattr(trainer, "micro_batch_tokens", 512)
    forward, ran_out = trainer.base.forward, []

    def small(ids, *args, **kwargs):
        if ids.numel() > 40:
            ran_out.append(ids.numel())
            raise torch.cuda.OutOfMemoryError("CUDA out of memory")
        return forward(ids, *args, **kwargs)

    monkeypatch.setattr(trainer.base, "forward", small)
    with paused(trainer):
        asked = [data, data, long]
        requests = [c.begin_pass(c.message(m, d)) for c, m, d in zip(clients, models, asked, strict=True)]
    together = [output(client.fetch(request)) for client, request in zip(clients[:2], requests, strict=False)]
    with pytest.raises(RuntimeError, match="user: memory ran out over a row of 47 tokens"):
        clients[2].fetch(requests[2])
    assert trainer.micro_batch_tokens < 46 and len(ran_out) <= 8, "what cannot be cut makes the others no smaller"
    for (loss, logprobs), (wanted, each) in zip(together, whole, strict=False):
        assert loss == pytest.approx(wanted, rel=1e-5)
        np.testing.assert_allclose(np.concatenate(logprobs), np.concatenate(each), atol=1e-5)
    monkeypatch.undo()
    twin = Client(served, "tml-twin-client")
    again = twin.model(seed=0)
    twin.learn(again, data)
    norms = [client.step(model, **ADAM)["grad_norm:mean"] for client, model in ((clients[0], models[0]), (twin, again))]
    assert norms[0] == pytest.approx(norms[1], rel=1e-4) and norms[0] > 0


def test_equal_losses_of_all_clients_are_computed_together_and_a_bad_one_fails_alone(served, monkeypatch):
    trainer, calls = served.service.trainer, []
    own = trainer._losses
    monkeypatch.setattr(trainer, "_losses", lambda rows, *more: calls.append(len(rows)) or own(rows, *more))
    row, old, paid = ROWS[0], [-3.0] * 23, [1.0] * 23
    ppo = datum(row[:-1], row[1:], logprobs=old, advantages=paid)
    clipped = datum(row[:-1], row[1:], logprobs=old, advantages=paid, clip_high_threshold=[1.01] * 23)
    bad = datum(row[:-1], row[1:], logprobs=[-9e5] * 23, advantages=paid)  # its ratio is infinite
    asked = [("ppo", {}, [ppo]), ("ppo", {}, [bad]), ("ppo", {}, [ppo, clipped]), ("dro", {}, [ppo]),
             ("dro", {"beta": 0.5}, [ppo])]  # fmt: skip
    clients = [Client(served, f"tml-{n}-loss") for n in range(len(asked))]
    models = [client.model(seed=n) for n, client in enumerate(clients)]
    with paused(trainer):
        sent = [
            client.begin_pass(client.message(model, data, loss, **settings))
            for client, model, (loss, settings, data) in zip(clients, models, asked, strict=True)
        ]
    for n, (client, model, (loss, settings, data)) in enumerate(zip(clients, models, asked, strict=True)):
        if n == 1:
            with pytest.raises(RuntimeError, match="not finite or beyond"):
                client.fetch(sent[n])
            continue
        assert output(client.fetch(sent[n]))[0] == pytest.approx(
            sum(client.learn(model, [one], loss, backward=False, **settings)[0] for one in data), rel=1e-5
        )
    assert sorted(calls[:4]) == [1, 1, 1, 3]
    assert served.service._models[models[1]].adapter.gradient is None
    assert all(served.service._models[models[n]].adapter.gradient is not None for n in (0, 2, 3, 4))


@pytest.mark.slow
def test_sixteen_clients_at_once_cost_the_passes_of_one_with_all_rows(tmp_path):
    server = serving(tiny_base(), tmp_path)
    try:
        trainer, rows = server.service.trainer, [datum(row[:-1], row[1:], weights=[1.0] * 23) for row in ROWS] * 16
        counted = []
        forward = trainer.base.forward
        trainer.base.forward = lambda *given, **more: counted.append(given[0].shape) or forward(*given, **more)
        for number in (1, 16):
            clients = [Client(server, f"tml-{n}-of-{number}-clients") for n in range(number)]
            models = [client.model(seed=n) for n, client in enumerate(clients)]
            counted.clear()
            with paused(trainer):
                requests = [
                    client.begin_pass(client.message(model, rows[n::number]))
                    for n, (client, model) in enumerate(zip(clients, models, strict=True))
                ]
            losses = [output(client.fetch(request))[0] for client, request in zip(clients, requests, strict=True)]
            assert len(losses) == number
            assert [shape.numel() for shape in counted] == [23 * len(rows)]  # one pass, and no token twice
    finally:
        server.close()


@pytest.mark.slow
def test_a_step_that_is_refused_leaves_its_adapter_as_it_was(served, monkeypatch):
    """Before its first step and after one, with steps of another adapter in between."""
    client = Client(served)
    data = [datum(ROWS[0][:-1], ROWS[0][1:], weights=[1.0] * 23)]
    models = [client.model(seed=n) for n in range(2)]
    for model in models * 2:
        client.learn(model, data)
        before = [client.learn(each, data, backward=False)[0] for each in models]
        monkeypatch.setattr("mafrt.scripts.tinker_server.trainer.LARGEST_WEIGHT", 5.0)
        with pytest.raises(RuntimeError, match="the adapter is as it was"):
            client.step(model, learning_rate=10.0)
        monkeypatch.undo()
        assert [client.learn(each, data, backward=False)[0] for each in models] == before
        client.learn(model, data)
        client.step(model, learning_rate=1e-2)
        after = [client.learn(each, data, backward=False)[0] for each in models]
        assert [a < b for a, b in zip(after, before, strict=True)] == [each == model for each in models]


def test_several_targets_a_position_and_sparse_ones(served):
    client = Client(served)
    model, tokens = client.model(), ROWS[2][:5]
    targets = np.array([[7, 9], [8, 0], [0, 0], [11, 0], [12, 13]])
    weights = np.array([[0.5, 0.25], [1, 0], [0, 0], [2, 0], [0.1, 0.2]], np.float32)
    dense = client.learn(model, [datum(tokens, targets, weights=weights)], backward=False)
    made = datum(tokens, targets, weights=weights)
    for name, values in (("target_tokens", targets), ("weights", weights)):
        held = made.loss_fn_inputs[name]
        rows, columns = np.nonzero(values)
        held.sparse_csr.values = values[rows, columns].tobytes()
        held.sparse_csr.crow_indices = np.searchsorted(rows, np.arange(6)).astype(np.int64).tobytes()
        held.sparse_csr.col_indices = columns.astype(np.int64).tobytes()
    sparse = client.learn(model, [made], backward=False)
    assert dense[0] == pytest.approx(sparse[0], rel=1e-6) and dense[1][0].shape == (5, 2)
    one = client.learn(model, [datum(tokens, targets[:, 0], weights=weights[:, 0])], backward=False)
    np.testing.assert_allclose(dense[1][0][:, 0], one[1][0], atol=1e-6)


# ------------------------------------------------------------------------------------------------------------ sampling


def test_samples_have_the_adapters_logprobs(served):
    client = Client(served)
    model = client.model()
    client.learn(model, [datum(ROWS[0][:-1], ROWS[0][1:], weights=[1.0] * 23)])
    client.step(model, **ADAM)
    sampler, prompt = client.snapshot(model), ROWS[1][:9]
    reply = client.sample(sampler, prompt, 3, prompt_logprobs=True, topk_prompt_logprobs=4, topk_sample_logprobs=2)
    assert len(reply.sequences) == 3
    for one in reply.sequences:
        made = ids(one.tokens)
        whole = [*prompt, *made]
        _, [own] = client.learn(model, [datum(whole[:-1], whole[1:], weights=[0.0] * (len(whole) - 1))], backward=False)
        np.testing.assert_allclose(np.frombuffer(one.logprobs, np.float32), own[8:], atol=1e-4)
        prompt_logprobs = np.frombuffer(reply.prompt_logprobs, np.float32)
        assert np.isnan(prompt_logprobs[0])
        np.testing.assert_allclose(prompt_logprobs[1:], own[:8], atol=1e-4)
        top = np.frombuffer(one.topk_sampled_logprobs.logprobs, np.float32).reshape(-1, 2)
        assert len(top) == len(made) and (top[:, 0] >= own[8:] - 1e-4).all()
    best = np.frombuffer(reply.topk_prompt_logprobs.token_ids, np.int32).reshape(9, 4)
    assert (best[1:] > 0).any(1).all() and not best[0].any()


def test_a_snapshot_keeps_its_weights_and_seeds_repeat(served):
    client = Client(served)
    model, prompt = client.model(), ROWS[1][:9]
    before = client.snapshot(model)
    params = {"seed": 5, "max_tokens": 8}
    first = client.sample(before, prompt, params=params).sequences[0]
    for _ in range(4):
        client.learn(model, [datum(ROWS[0][:-1], ROWS[0][1:], weights=[1.0] * 23)])
        client.step(model, learning_rate=0.1)
    again, after = (
        client.sample(before, prompt, params=params),
        client.sample(client.snapshot(model), prompt, params=params),
    )
    assert again.sequences[0].tokens == first.tokens
    assert after.sequences[0].logprobs != first.logprobs
    bare = client.sample(client.sampler(), prompt, params=params)
    assert bare.sequences[0].tokens == first.tokens  # B was 0


def test_where_samples_end(served):
    client = Client(served)
    sampler, prompt = client.sampler(), ROWS[1][:9]
    free = ids(
        client.sample(sampler, prompt, params={"temperature": 0, "max_tokens": 8, "stop": []}).sequences[0].tokens
    )
    stopped = client.sample(sampler, prompt, params={"temperature": 0, "max_tokens": 8, "stop": [free[2]]}).sequences[0]
    assert ids(stopped.tokens) == free[: free.index(free[2]) + 1] and stopped.stop_reason == 0
    short = client.sample(sampler, prompt, params={"temperature": 0, "max_tokens": 2, "stop": []}).sequences[0]
    assert ids(short.tokens) == free[:2] and short.stop_reason == 1


@pytest.mark.slow
def test_more_weights_than_places(tmp_path):
    limits = replace(Limits(), slots=4)
    server = serving(tiny_base(), tmp_path, limits=limits)
    try:
        client = Client(server)
        model, prompt = client.model(), ROWS[1][:9]
        samplers, firsts = [], []
        for _ in range(5):
            client.learn(model, [datum(ROWS[0][:-1], ROWS[0][1:], weights=[1.0] * 23)])
            client.step(model, **ADAM)
            samplers.append(client.snapshot(model))
            firsts.append(client.sample(samplers[-1], prompt, params={"seed": 1}).sequences[0].logprobs)
        assert len(set(firsts)) == 5
        for sampler, first in zip(samplers, firsts, strict=True):
            assert client.sample(sampler, prompt, params={"seed": 1}).sequences[0].logprobs == first
        others = [client.model(rank=4) for _ in range(1)]
        with pytest.raises(RefusedByServerError, match="places"):
            for _ in range(4):
                others.append(client.model(rank=4))
    finally:
        server.close()


@pytest.mark.slow
def test_samples_of_many_clients_while_they_train(served):
    def work(n):
        client = Client(served, f"tml-{n}-busy")
        model = client.model(rank=2 + n % 3, seed=n)
        seen = []
        for _ in range(3):
            sampler = client.snapshot(model)
            reply = client.sample(sampler, ROWS[n][:8], 4, params={"max_tokens": 12, "stop": []})
            for one in reply.sequences:
                whole = [*ROWS[n][:8], *ids(one.tokens)]
                size = len(whole) - 1
                data = [datum(whole[:-1], whole[1:], weights=[0.0] * 7 + [0.2] * (size - 7))]
                _, [own] = client.learn(model, data)
                seen.append(float(np.abs(np.frombuffer(one.logprobs, np.float32) - own[7:]).max()))
            client.step(model, **ADAM)
        return max(seen)

    with ThreadPoolExecutor(6) as pool:
        assert max(pool.map(work, range(6))) < 1e-3


# ------------------------------------------------------------------------------------------------- order, and restarts


def test_requests_are_done_in_the_order_of_their_numbers(served):
    client = Client(served)
    model = client.model()
    one, two = client.message(model, [datum(ROWS[0][:-1], ROWS[0][1:], weights=[1.0] * 23)]), client.seq(model)
    late = client.message(model, [datum(ROWS[0][:-1], ROWS[0][1:], weights=[1.0] * 23)], backward=False)
    last = client.begin_pass(late)
    body = {"model_id": model, "seq_id": two, "adam_params": ADAM}
    step = client.post("optim_step", body)["request_id"]
    first = client.begin_pass(one)
    before, norm = output(client.fetch(first))[0], client.fetch(step)["metrics"]["grad_norm:mean"]
    assert norm > 0 and output(client.fetch(last))[0] < before


def test_a_repeated_request_is_done_once(served):
    client = Client(served)
    model = client.model()
    message = client.message(model, [datum(ROWS[0][:-1], ROWS[0][1:], weights=[1.0] * 23)])
    assert client.begin_pass(message) == client.begin_pass(message)
    body = {"model_id": model, "seq_id": client.seq(model), "adam_params": ADAM}
    ask = [client.post("optim_step", body)["request_id"] for _ in range(3)]
    assert len(set(ask)) == 1
    moved = client.fetch(ask[0])
    after = weights_of(served, model)
    assert client.fetch(client.post("optim_step", body)["request_id"]) == moved
    assert all(torch.equal(after[name], value) for name, value in weights_of(served, model).items())
    with pytest.raises(RefusedByServerError, match="another content") as error:
        client.post("optim_step", {**body, "adam_params": {"learning_rate": 0.5}})
    assert error.value.status == 422
    asked = client.asample(client.sampler(), ROWS[0][:5])
    assert len(asked["sample_sequence_ids"]) == 1


def test_a_refused_request_keeps_its_number(served):
    client = Client(served)
    model = client.model()
    bad = client.message(model, [datum(ROWS[0][:-1], ROWS[0][1:], weights=[float("nan")] * 23)])
    for _ in range(2):
        with pytest.raises(RefusedByServerError, match="NaN"):
            client.begin_pass(bad)
    assert client.learn(model, [datum(ROWS[0][:-1], ROWS[0][1:], weights=[1.0] * 23)])[0] > 0


@pytest.mark.slow
def test_checkpoints_outlive_the_server(tmp_path):
    data = [datum(row[:-1], row[1:], weights=[1.0] * 23) for row in ROWS[:2]]

    def learn(client, model, steps):
        for _ in range(steps):
            client.learn(model, data)
            client.step(model, **ADAM)

    server = serving(tiny_base(), tmp_path)
    client = Client(server)
    model = client.model()
    learn(client, model, 2)
    state, sampler = client.save(model, "two"), client.save(model, "two", "save_weights_for_sampler")
    learn(client, model, 2)
    wanted = weights_of(server, model)
    greedy = (
        client.sample(client.sampler(model_path=sampler), ROWS[3][:7], params={"temperature": 0}).sequences[0].tokens
    )
    with pytest.raises(RefusedByServerError, match="already"):
        client.save(model, "two")
    client.save(model, "two.b")
    server.close()

    server = serving(tiny_base(), tmp_path)
    try:
        with pytest.raises(RefusedByServerError, match="restarted") as error:
            client.port = server.port
            client.learn(model, data)
        assert error.value.status == 404
        again = Client(server)
        new = again.from_state(state)
        learn(again, new, 2)
        for name, value in weights_of(server, new).items():
            torch.testing.assert_close(value, wanted[name], atol=1e-6, rtol=1e-5)
        fresh = again.from_state(state, optimizer=False)
        learn(again, fresh, 2)
        assert any((value - wanted[name]).abs().max() > 1e-5 for name, value in weights_of(server, fresh).items())
        made = again.sample(again.sampler(model_path=sampler), ROWS[3][:7], params={"temperature": 0})
        assert made.sequences[0].tokens == greedy
        listed = {each["tinker_path"] for each in again.get("checkpoints")["checkpoints"]}
        assert listed == {state, sampler, f"tinker://{model}/weights/two.b"}
        assert again.post("weights_info", {"tinker_path": state})["lora_rank"] == 4
        other = Client(server, "tml-somebody-else")
        assert other.get("checkpoints")["checkpoints"] == []
        for path in (state, sampler):
            with pytest.raises(RefusedByServerError, match="of yours"):
                other.from_state(path)
        again.call("DELETE", f"training_runs/{model}/checkpoints/weights/two")
        with pytest.raises(RefusedByServerError, match="no checkpoint"):
            again.from_state(state)
    finally:
        server.close()


def test_a_damaged_checkpoint_is_not_loaded(tmp_path):
    server = serving(tiny_base(), tmp_path)
    try:
        client = Client(server)
        state = client.save(client.model(), "a")
        folder = Checkpoints(tmp_path, 10).folder_of(parse_path(state))
        weights = bytearray((folder / "adapter_model.safetensors").read_bytes())
        weights[-5] ^= 1
        (folder / "adapter_model.safetensors").write_bytes(bytes(weights))
        with pytest.raises(RuntimeError, match="damaged"):
            client.from_state(state, optimizer=False)
    finally:
        server.close()


def test_a_session_that_ends_gives_its_places_back(tmp_path):
    server = serving(tiny_base(), tmp_path, limits=replace(Limits(), slots=3))
    try:
        for _ in range(4):
            client = Client(server)
            model = client.model()
            client.snapshot(model)
            client.post(f"sessions/{client.session}/finish", {"reason": {"type": "success"}})
            with pytest.raises(RefusedByServerError) as error:
                client.post("session_heartbeat", {"session_id": client.session})
            assert error.value.status == 410
    finally:
        server.close()


def test_places_of_one_rank_are_made_anew_for_another(tmp_path):
    """Snapshots take all places, and the next client's adapter has another shape; those before it sample as before."""
    server = serving(tiny_base(), tmp_path, limits=replace(Limits(), slots=5))
    try:
        client, prompt, samplers = Client(server), ROWS[1][:9], []
        for seed, rank in enumerate((4, 4, 2, 8)):
            model = client.model(rank=rank, seed=seed)
            client.learn(model, [datum(ROWS[0][:-1], ROWS[0][1:], weights=[1.0] * 23)])
            client.step(model, **ADAM)
            for _ in range(2):
                samplers.append(client.snapshot(model))
                client.learn(model, [datum(ROWS[0][:-1], ROWS[0][1:], weights=[1.0] * 23)])
                client.step(model, **ADAM)
            firsts = [client.sample(each, prompt, params={"seed": 1}).sequences[0].logprobs for each in samplers]
            again = [client.sample(each, prompt, params={"seed": 1}).sequences[0].logprobs for each in samplers]
            assert firsts == again and len(set(firsts)) == len(samplers)
        indices = sorted(record.index for record in server.service.base.records.values())
        assert indices == list(range(5))
    finally:
        server.close()


def full(*_):
    raise OSError(errno.ENOSPC, "No space left on device", "/srv/secret")


@pytest.mark.parametrize("file", ["adapter_config.json", "optimizer.safetensors", "checkpoint.json"])
def test_a_full_disk_is_one_sentence_and_costs_no_checkpoint(served, monkeypatch, caplog, file):
    client = Client(served)
    model = client.model()
    state = client.save(model, "a")
    checkpoints = served.service.checkpoints
    folder = checkpoints.folder_of(parse_path(state))
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    real = os.replace
    monkeypatch.setattr(os, "replace", lambda a, b: full() if Path(b).name == file else real(a, b))
    for name, overwrite in (("a", True), ("b", False)):
        with pytest.raises(RuntimeError, match="No space left on device") as error:
            client.save(model, name, overwrite=overwrite)
        assert "/srv" not in str(error.value) and str(checkpoints.folder) not in str(error.value)
    assert "Traceback" not in caplog.text
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert [path.name for path in folder.parent.iterdir()] == ["a"]
    monkeypatch.undo()
    assert client.from_state(client.save(model, "b"))


def test_a_full_disk_begins_no_run_and_costs_no_place(served, monkeypatch):
    client = Client(served)
    monkeypatch.setattr(os, "replace", full)
    for _ in range(2 * served.limits.adapters):
        with pytest.raises(RuntimeError, match="No space left on device"):
            client.model()
    monkeypatch.undo()
    assert client.model()


def test_a_folder_that_was_removed_costs_nothing_that_is_in_memory(served):
    client = Client(served)
    model = client.model()
    lost = client.save(model, "a")
    shutil.rmtree(served.service.checkpoints.folder)
    assert client.from_state(client.save(model, "b")) and client.model()
    with pytest.raises(RefusedByServerError, match="no checkpoint"):
        client.from_state(lost)


def test_a_server_that_was_killed_while_it_wrote_has_the_checkpoint_before(tmp_path):
    kind = tmp_path / "runs" / f"{'0' * 32}_train_0" / "weights"
    for name in (".a.old", ".b.old", "b", ".c.tmp"):
        (kind / name).mkdir(parents=True)
        (kind / name / "x").write_text(name)
    Checkpoints(tmp_path, 10)
    assert {path.name: (path / "x").read_text() for path in kind.iterdir()} == {"a": ".a.old", "b": "b"}
