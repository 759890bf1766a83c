"""What the self-check of engines takes for rounding, and what it does not."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from helpers_models import random_ids, tiny_base

from mafrt.core.types import Request
from mafrt.engines import logprob_check
from mafrt.engines.local.engine import LocalEngine
from mafrt.engines.logprob_check import CUT, HALF_NATS, mean_gap, trainer_logprobs


def gaps(base, how, count=40):
    prompt = random_ids(1, 12, seed=3)[0].tolist()
    answers = LocalEngine(base, eos_ids=()).generate([Request(prompt, None, how, seed) for seed in range(count)])
    return [mean_gap(answer, trainer_logprobs(base, prompt, answer, None, CUT)) for answer in answers]


@pytest.mark.slow
def test_rounding_may_change_which_token_is_the_last_one_kept(monkeypatch):
    """Of a flat distribution: half precision then samples tokens that float32 would have cut off."""
    base, exact = tiny_base(), logprob_check._logits

    def rounded(base, ids, adapter):
        logits = exact(base, ids, adapter)
        return logits + 0.03 * torch.randn(logits.shape, generator=torch.Generator().manual_seed(sum(ids)))

    monkeypatch.setattr(logprob_check, "_logits", rounded)
    assert math.inf in gaps(base, CUT), "in float32 the edge is sharp"
    monkeypatch.setattr(logprob_check, "nats_apart", lambda base: HALF_NATS)
    assert max(gaps(base, CUT)) <= HALF_NATS


@pytest.mark.parametrize("how", [replace(CUT, top_k=0, top_p=1.0), replace(CUT, top_p=1.0, top_k=40)])
def test_an_engine_that_does_not_cut_is_noticed_in_half_precision_too(monkeypatch, how):
    monkeypatch.setattr(logprob_check, "nats_apart", lambda base: HALF_NATS)
    assert min(gaps(tiny_base(), how)) > HALF_NATS
