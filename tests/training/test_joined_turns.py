"""Turns that continue one another are computed in one row, with the gradients of a pass for each."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from helpers_learner import make_learner, make_turns
from helpers_models import ALL, add_random_adapter, tiny_base
from test_adapter_scope import scoped_base

from mafrt.training.batch import collate, join, micro_batches, split
from mafrt.training.token_scores import base_pass, token_scores

AGENTS = ("ann", "bob")
LIKE = make_turns(1)[0]


def turn(agent, prompt, answer):
    return replace(LIKE, agent=agent, prompt_ids=prompt, action_ids=answer, advantages=[0.5] * len(answer))


def conversations(samples=2, turns=3, seed=0):
    """Turns of both agents in `samples` chats that begin alike and only grow, shuffled."""
    rng = random.Random(seed)
    found = []
    for agent in AGENTS:
        asked = [rng.randrange(5, 90) for _ in range(20)]
        for _ in range(samples):
            said = list(asked)
            for _ in range(turns):
                answer = [rng.randrange(5, 90) for _ in range(rng.randint(2, 6))]
                found.append(turn(agent, list(said), answer))
                said += [*answer, *(rng.randrange(5, 90) for _ in range(3))]
    rng.shuffle(found)
    return found


def whole(turn):
    return (*turn.prompt_ids, *turn.action_ids)


def test_every_turn_is_in_the_row_of_one_that_continues_it():
    rng = random.Random(3)
    for _ in range(200):
        some = [
            turn(
                rng.choice(AGENTS),
                [rng.randint(5, 6) for _ in range(rng.randint(1, 4))],
                [rng.randint(5, 6) for _ in range(rng.randint(1, 3))],
            )
            for _ in range(rng.randint(1, 12))
        ]
        rows = join(some, [turn.agent for turn in some])
        assert sorted(n for row in rows for n in row) == list(range(len(some)))
        for row in rows:
            last = some[row[-1]]
            for n in row:
                assert some[n].agent == last.agent and whole(last)[: len(whole(some[n]))] == whole(some[n])
        ends = {
            (t.agent, whole(t))
            for t in some
            if not any(
                o.agent == t.agent and len(whole(o)) > len(whole(t)) and whole(o)[: len(whole(t))] == whole(t)
                for o in some
            )
        }
        assert len(rows) == len(ends)


@pytest.mark.slow
@pytest.mark.parametrize("packs", [True, False])
@pytest.mark.parametrize("kind", ["qwen3", "llama"])
def test_gradients_and_log_probabilities_are_those_of_a_pass_for_each_turn(kind, packs, monkeypatch):
    base = tiny_base(kind)
    for number, name in enumerate(AGENTS):
        add_random_adapter(base, name, 2 + number, 8.0, ALL, seed=number)
    monkeypatch.setattr(base, "_packs", packs)
    learner, turns = make_learner(base), conversations()
    weight = torch.linspace(-1, 2, 300)

    def found(batches):
        for name in AGENTS:
            for parameter in base.adapter_parameters(name):
                parameter.grad = None
        scored = {}
        for numbers in batches:
            batch = learner._collate([turns[n] for n in numbers], learner.adapter_of)
            logprobs, entropy = learner._logprobs(batch, AGENTS)
            ends = torch.tensor([len(turns[n].action_ids) for n in numbers]).tolist()
            for n, own, spread in zip(numbers, logprobs.split(ends), entropy.split(ends), strict=True):
                scored[n] = torch.stack((own, spread)).detach()
                (own * weight[n : n + len(own)]).sum().backward(retain_graph=True)
        return scored, [p.grad.clone() for name in AGENTS for p in base.adapter_parameters(name)]

    everything = list(range(len(turns)))
    batch = learner._collate(turns, learner.adapter_of)
    assert len(batch.input_ids) == 4 and len(batch.turns) == 12  # two chats of each agent
    (ours, grads), (theirs, expected) = found([everything]), found([[n] for n in everything])
    for n in everything:
        torch.testing.assert_close(ours[n], theirs[n], atol=1e-5, rtol=1e-5)
    for mine, other in zip(grads, expected, strict=True):
        torch.testing.assert_close(mine, other, atol=1e-5 * float(other.abs().max()) + 1e-8, rtol=1e-4)


def test_the_bare_base_reads_all_agents_turns_alike():
    base = tiny_base()
    for number, name in enumerate(AGENTS):
        add_random_adapter(base, name, 2, 8.0, ALL, seed=number)
    said = list(range(10, 34))
    turns = [turn("ann", said[:10], said[10:14]), turn("bob", said[:18], said[18:])]
    for pass_of in (turns, turns[:1]):
        ((_, batch, _),) = base_pass(base, pass_of, 1000, {"ann": 1.0, "bob": 1.0})
        assert len(batch.input_ids) == 1
        ours, turns[0].ref_logprobs = turns[0].ref_logprobs, None
        states = base.forward(torch.tensor([said[:14]]), None, torch.tensor([-1]))[0]
        theirs, _ = base.token_logprobs(states[9:13], torch.tensor(said[10:14]))
        torch.testing.assert_close(torch.tensor(ours), theirs, atol=1e-5, rtol=1e-5)


def test_agents_that_act_on_their_own_words_only_are_not_joined():
    """An earlier answer was read by the base there, and was said with the adapter."""
    base = scoped_base()
    learner, turns = make_learner(base), conversations()
    assert len(learner._collate(turns, learner.adapter_of).input_ids) == len(turns)
    assert sum(len(group) for group in split(turns, 40, [[n] for n in range(len(turns))])) == len(turns)
    largest = max(len(part.rows) for part in micro_batches(turns, 40, base))
    assert largest < max(len(part.rows) for part in micro_batches(turns, 40, tiny_base()))


@pytest.mark.parametrize("packs", [True, False])
def test_micro_batches_hold_whole_rows_and_count_them_once(packs):
    turns = conversations(samples=3, turns=4)
    rows = join(turns, [turn.agent for turn in turns])
    assert len(rows) == 6
    longest = max(len(whole(turns[row[-1]])) for row in rows)
    for most in (longest, 2 * longest, 10**4):
        groups = split(turns, most, packs=packs)
        assert sorted(n for group in groups for n in group) == list(range(len(turns)))
        for group in groups:
            own = [row for row in rows if row[-1] in group]
            assert sorted(n for row in own for n in row) == sorted(group)
            assert len(own) == 1 or packs or len(own) * max(len(whole(turns[row[-1]])) for row in own) <= most
    assert len(split(turns, 10**4, packs=packs)) == 1


def test_collation_keeps_the_order_of_turns():
    turns = conversations()
    batch = collate(turns, lambda turn: AGENTS.index(turn.agent), 0, torch.device("cpu"))
    values = torch.arange(len(batch.targets)).float()
    assert batch.targets.tolist() == [token for turn in turns for token in turn.action_ids]
    assert torch.equal(batch.gather(batch.scatter(values)), values)
    assert batch.turn.tolist() == [n for n, turn in enumerate(turns) for _ in turn.action_ids]
    flat = batch.input_ids.flatten()
    assert torch.equal(flat[batch.predict + 1], batch.targets)


def test_equal_answers_go_through_the_head_once(monkeypatch):
    """Two agents on one adapter sample at different temperatures, so theirs are apart."""
    base = tiny_base()
    add_random_adapter(base, "both", 3, 8.0, ALL, seed=1)
    prompt, answer = list(range(10, 34)), [40, 41, 42]
    turns = [turn(agent, prompt, answer) for agent in ("ann", "ann", "bob", "ann")]
    turns.append(turn("ann", prompt, [40, 41, 60, 61]))
    temperatures, weight = {"ann": 1.0, "bob": 0.5}, torch.linspace(-1, 2, 16)
    rows, original = [], base.token_logprobs

    def token_logprobs(hidden, targets, **settings):
        rows.append(len(hidden))
        return original(hidden, targets, **settings)

    monkeypatch.setattr(base, "token_logprobs", token_logprobs)

    def scored(groups):
        for parameter in base.adapter_parameters("both"):
            parameter.grad = None
        found = []
        for group in groups:
            batch = collate(group, lambda _: 0, 0, torch.device("cpu"))
            states = base.forward(batch.input_ids, batch.attention_mask, batch.adapter_index).flatten(0, 1)
            found.append(torch.stack(token_scores(base, batch, states, temperatures)))
        whole = torch.cat(found, 1)
        (whole[0] * weight + 0.1 * whole[1] * weight.flip(0)).sum().backward()
        return whole.detach(), [p.grad.clone() for p in base.adapter_parameters("both")]

    (ours, grads), (theirs, expected) = scored([turns]), scored([[one] for one in turns])
    assert rows[0] == 3 + 3 + 4 and rows[1:] == [3, 3, 3, 3, 4]
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
    for mine, other in zip(grads, expected, strict=True):
        torch.testing.assert_close(mine, other, atol=1e-5 * float(other.abs().max()) + 1e-8, rtol=1e-4)
