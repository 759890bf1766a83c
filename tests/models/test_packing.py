"""Rows that begin alike compute their beginning once; states and gradients are those of row-by-row passes."""

from __future__ import annotations

import logging
import random
import re

import pytest
import torch
from helpers_models import ALL, add_random_adapter, tiny_base

from mafrt.core.errors import ModelError
from mafrt.models import packing as packing_module
from mafrt.models import pretrained
from mafrt.models.packing import MOST_TOKENS, SharedPrefixes, pack
from mafrt.models.shared_base import SharedBase


def make_rows(seed=0, tasks=3, samples=4, prompt=24):
    """Rows of `samples` answers to each of `tasks` prompts, shuffled, of unequal length."""
    rng = random.Random(seed)
    rows = []
    for _ in range(tasks):
        asked = [rng.randrange(5, 90) for _ in range(prompt + rng.randrange(6))]
        rows += [asked + [rng.randrange(5, 90) for _ in range(rng.randint(1, 9))] for _ in range(samples)]
    rng.shuffle(rows)
    return rows


def padded(rows, side="right"):
    width = max(map(len, rows))
    pads = [[0] * (width - len(row)) for row in rows]
    ids = [row + pad if side == "right" else pad + row for row, pad in zip(rows, pads, strict=True)]
    real = [
        [1] * len(row) + pad if side == "right" else pad + [1] * len(row) for row, pad in zip(rows, pads, strict=True)
    ]
    return torch.tensor(ids), torch.tensor(real)


def team_base(kind="qwen3"):
    base = tiny_base(kind)
    for number, name in enumerate(("ann", "bob")):
        add_random_adapter(base, name, 2 + number, 8.0, ALL, seed=number)
    return base


def states_and_grads(base: SharedBase, batches):
    """Hidden states of the real tokens, row by row, and the adapters' gradients of a fixed function of them."""
    for name in base.adapters:
        for parameter in base.adapter_parameters(name):
            parameter.grad = None
    found = []
    for ids, real, index in batches:
        hidden = base.forward(ids, real, index, train=["ann", "bob"])
        weight = torch.linspace(-1, 1, hidden.shape[-1])
        for row, mask in zip(hidden, real.bool(), strict=True):
            own = row[mask]
            if own.requires_grad:  # the bare base alone has no adapter to learn
                (own * weight * torch.linspace(0.5, 2, len(own)).unsqueeze(1)).sum().backward(retain_graph=True)
            found.append(own.detach())
    return found, [p.grad.clone() for name in base.adapters for p in base.adapter_parameters(name)]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["qwen3", "llama", "mistral", "gemma2", "gemma3"])  # the last three see 12 tokens
@pytest.mark.parametrize("side", ["right", "left"])
def test_states_and_gradients_equal_those_of_row_by_row_passes(kind, side):
    base, rows = team_base(kind), make_rows()
    tasks = sorted({tuple(row[:20]) for row in rows})
    index = torch.tensor([(0, 1, -1)[tasks.index(tuple(row[:20]))] for row in rows])
    ids, real = padded(rows, side)
    assert base.packs
    together = states_and_grads(base, [(ids, real, index)])
    base._packs = False  # row by row as transformers computes it, with its own masks
    alone = [
        (torch.tensor([row]), torch.ones(1, len(row), dtype=torch.long), index[n : n + 1]) for n, row in enumerate(rows)
    ]
    one_by_one = states_and_grads(base, alone)
    for ours, theirs in zip(together[0], one_by_one[0], strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
    for ours, theirs in zip(together[1], one_by_one[1], strict=True):
        # The terms of a gradient cancel, so rounding shows against the largest entry.
        assert float((ours - theirs).abs().max()) <= 1e-5 * max(1.0, float(theirs.abs().max()))


def test_a_beginning_is_computed_once():
    rows = [[*range(100, 120), 1, 2], [*range(100, 120), 3], [*range(200, 220), 4], [*range(100, 120), 3]]
    ids, real = padded(rows)
    found = pack(real.bool(), torch.tensor([0, 0, 0, 1]), torch.device("cpu"), ids)
    # 20 + 2 + 1 of the family, 21 of the other task, 21 of the other adapter, whose equal row is not shared.
    assert len(found.take) == 23 + 21 + 21 and found.index.tolist() == [0] * 44 + [1] * 21
    assert [(block.rows, block.length, block.family is not None) for block in found.blocks] == [
        (1, 23, True),
        (2, 21, False),
    ]
    family = found.blocks[0].family
    assert family.shared == 20 and sorted(family.rests[family.real].tolist()) == [0, 1, 2]
    assert sorted(family.real.sum(1).tolist()) == [1, 2]
    # The first token of a rest sees the beginning and itself, the second one the first too.
    assert family.mask.sum(1).tolist() == [21, 22]
    assert not found.in_order and pack(real.bool(), torch.zeros(4, dtype=torch.long), torch.device("cpu")).in_order
    back = ids.flatten()[found.take][found.source]
    assert torch.equal(back, ids.flatten()[found.places]) and len(found.places) == int(real.sum())


def test_what_is_not_shared(monkeypatch):
    device, alike = torch.device("cpu"), [[*range(40), n] for n in range(3)]
    ids, real = padded(alike)
    assert len(pack(real.bool(), torch.zeros(3, dtype=torch.long), device, ids).take) == 43
    assert len(pack(real.bool(), torch.zeros(3, dtype=torch.long), device).take) == 123  # no ids given
    per_token = torch.arange(3).unsqueeze(1).repeat(1, 41)
    assert len(pack(real.bool(), per_token, device, ids).take) == 123  # equal tokens with another adapter on each
    per_token[:, :40] = -1
    assert len(pack(real.bool(), per_token, device, ids).take) == 43  # and with none on the beginning
    short = [[1, 2, 3, *range(50 * n, 50 * n + 40)] for n in range(1, 4)]
    assert len(pack(*(padded(short)[1].bool(), torch.zeros(3, dtype=torch.long)), device, padded(short)[0]).take) == 129
    assert MOST_TOKENS >= 1024
    monkeypatch.setattr(packing_module, "MOST_TOKENS", 42)
    assert len(pack(real.bool(), torch.zeros(3, dtype=torch.long), device, ids).take) == 42 + 41


def test_rows_without_tokens_and_single_tokens():
    device = torch.device("cpu")
    found = pack(torch.zeros(2, 3, dtype=torch.bool), torch.tensor([0, 1]), device, torch.zeros(2, 3, dtype=torch.long))
    assert found.blocks == () and len(found.take) == 0
    found = pack(torch.ones(2, 1, dtype=torch.bool), torch.tensor([0, 0]), device, torch.ones(2, 1, dtype=torch.long))
    assert [(block.rows, block.length) for block in found.blocks] == [(2, 1)]


def dialogue_rows(seed=0, answers=4, transcript=40, said=7):
    """Rows of two agents on one growing transcript, and each row's first token with an adapter."""
    rng = random.Random(seed)
    text = [rng.randrange(5, 90) for _ in range(transcript + 20)]
    rows, starts, owner = [], [], []
    for agent, length in ((0, transcript), (1, transcript), (1, transcript + 20), (0, 3)):
        for _ in range(answers):
            rows.append([*text[:length], 1, 2, *(rng.randrange(5, 90) for _ in range(rng.randint(1, said)))])
            starts.append(length)
            owner.append(agent)
    order = rng.sample(range(len(rows)), len(rows))
    return [rows[i] for i in order], [starts[i] for i in order], [owner[i] for i in order]


def per_token(rows, starts, owner, side, width):
    """`[rows, width]`: each row's adapter from its start on, -1 before."""
    index = torch.full((len(rows), width), -1)
    for row, (ids, start) in enumerate(zip(rows, starts, strict=True)):
        first = 0 if side == "right" else width - len(ids)
        index[row, first + start : first + len(ids)] = owner[row]
    return index


@pytest.mark.slow
@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_tokens_before_the_adapter_are_constants_of_the_backward_pass(side, checkpointing):
    base = team_base()
    rows, starts, owner = dialogue_rows()
    rows, starts, owner = [*rows, rows[0][:20]], [*starts, 20], [*owner, 0]  # the last row has no adapter at all
    ids, real = padded(rows, side)
    base.gradient_checkpointing(checkpointing)
    together = states_and_grads(base, [(ids, real, per_token(rows, starts, owner, side, ids.shape[1]))])
    base.gradient_checkpointing(False)
    base._packs = False  # row by row, as transformers computes it, everything recorded
    alone = [
        (torch.tensor([row]), torch.ones(1, len(row), dtype=torch.long), per_token([row], [s], [o], side, len(row)))
        for row, s, o in zip(rows, starts, owner, strict=True)
    ]
    one_by_one = states_and_grads(base, alone)
    for ours, theirs in zip(together[0], one_by_one[0], strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
    for ours, theirs in zip(together[1], one_by_one[1], strict=True):
        assert float(theirs.abs().max()) > 0
        assert float((ours - theirs).abs().max()) <= 1e-5 * max(1.0, float(theirs.abs().max()))


def test_the_recorded_pass_has_only_the_tokens_from_the_adapter_on():
    base, (rows, starts, owner) = team_base(), dialogue_rows()
    ids, real = padded(rows)
    index = per_token(rows, starts, owner, "right", ids.shape[1])
    found = SharedPrefixes.of(real.bool(), index, ids, torch.device("cpu"))
    assert found is not None
    # Three of the four lengths have 16 tokens or more: 40 tokens once, and those of the longer one after its 39 shared.
    assert len(found.packing.take) == 39 + 1 + 21 and len(found.of_row) == 12
    later = pack(real.bool(), index, torch.device("cpu"), ids, beginnings=found)
    assert len(later.take) == sum(len(row) - (s if s >= 16 else 0) for row, s in zip(rows, starts, strict=True))
    assert sorted([*found.packing.places.tolist(), *later.places.tolist()]) == real.flatten().nonzero()[:, 0].tolist()
    widths = []
    hook = base.inner.layers[0].register_forward_hook(lambda _, given, out: widths.append(given[0].shape[1]))
    base.forward(ids, real, index)
    with torch.no_grad():
        base.forward(ids, real, index)
    hook.remove()
    assert widths[:2] == [61, len(later.take)] and len(widths) == 3  # without gradients one pass is enough


@pytest.mark.slow
@pytest.mark.ci
def test_attention_that_cannot_mask_shared_beginnings_is_refused_or_said(caplog, monkeypatch):
    for name in ("flex_attention", "paged|sdpa", "nonsense"):
        with pytest.raises(
            ModelError, match=re.escape(f"'{name}' cannot mask the beginnings that rows share; give 'sdpa'")
        ):
            SharedBase.load("teaching-base", attn_implementation=name)
    for name in ("flash_attention_2", "flash_attention_3"):
        with pytest.raises(ModelError, match=f"'{name}' has kernels for GPUs only, .* cpu; give 'sdpa'"):
            SharedBase.load("teaching-base", attn_implementation=name)
        # On a GPU it is transformers that says whether its package is installed.
        with monkeypatch.context() as there, pytest.raises(ModelError, match=r"(?i)flash"):
            there.setattr(pretrained, "check_device", torch.device)
            SharedBase.load("teaching-base", attn_implementation=name, device="cuda", dtype="bfloat16")
    with caplog.at_level(logging.WARNING, logger="mafrt"):
        logging.getLogger("mafrt").propagate = True
        sdpa = SharedBase.load("teaching-base")
        assert sdpa.packs and "cannot mask" not in caplog.text
        eager = SharedBase.load("teaching-base", attn_implementation="eager")
    assert not eager.packs and "every row is computed whole and padded" in caplog.text
    ids, real = padded(make_rows())
    index = torch.full((len(ids),), -1)
    with torch.no_grad():
        ours, theirs = (base.forward(ids, mask, index) for base, mask in ((sdpa, real), (eager, None)))
    torch.testing.assert_close(ours[real.bool()], theirs[real.bool()], atol=1e-4, rtol=1e-4)
