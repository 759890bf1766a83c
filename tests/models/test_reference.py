"""The reference of the KL penalty: the base, or the adapters that a run starts from."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from toy import make, train

from mafrt.core.errors import CheckpointError
from mafrt.models.memory_estimate import MODEL_SHAPES, MemoryInputs, adapter_weights, footprint
from mafrt.storage.load_path import resolve

FLAT = {"eval_episodes": 0, "kl_coef": 0.1, "ppo_epoch": 1, "num_mini_batch": 1}


def lines(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def kl(run: Path, iteration: int = 0) -> float:
    return max(abs(value) for name, value in lines(run)[iteration].items() if name.startswith("ref_kl/"))


@pytest.fixture(scope="module")
def start(tmp_path_factory) -> Path:
    """Adapters that have learnt something, as a folder."""
    where = tmp_path_factory.mktemp("start")
    train(where / "run", iterations=4, eval_episodes=0)
    (where / "adapters").mkdir()
    for name in ("first", "second"):
        (resolve(where / "run").path / name).rename(where / "adapters" / name)
    return where / "adapters"


@pytest.mark.slow
@pytest.mark.parametrize("rule", [{}, {"algorithm": "dr_mas", "n_samples": 4, "kl_in": "reward"}])
def test_a_run_that_starts_from_adapters_is_kept_near_them(start, tmp_path, rule):
    train(tmp_path / "initial", start, iterations=2, **FLAT, **rule)
    train(tmp_path / "base", start, iterations=1, reference="base", **FLAT, **rule)
    assert kl(tmp_path / "initial") < 1e-5 < 0.01 < kl(tmp_path / "base")
    assert kl(tmp_path / "initial", 1) > 1e-6  # the copies stay, the adapters move


@pytest.mark.slow
def test_a_fresh_run_may_have_either_and_has_the_base(tmp_path):
    train(tmp_path / "default", iterations=2, **FLAT)
    train(tmp_path / "initial", iterations=2, reference="initial", **FLAT)
    # New adapters change nothing, so both are the same policy, up to the rounding of another pass.
    for one, other in zip(lines(tmp_path / "default"), lines(tmp_path / "initial"), strict=True):
        assert one["ref_kl/first"] == pytest.approx(other["ref_kl/first"], rel=1e-2, abs=1e-6)
    assert make(**FLAT).updater.reference is None and make(reference="initial", **FLAT).updater.reference is not None
    assert make(reference="initial", eval_episodes=0).updater.reference is None  # no penalty, no copies


@pytest.mark.slow
@pytest.mark.parametrize("named", [{}, {"reference": "initial"}])
def test_a_resumed_run_has_the_reference_that_it_began_with(start, tmp_path, named):
    train(tmp_path / "whole", start, iterations=4, **FLAT, **named)
    train(tmp_path / "cut", start, iterations=2, **FLAT, **named)
    train(tmp_path / "cut", tmp_path / "cut", iterations=4, **FLAT, **named)
    assert (tmp_path / "cut/metrics.jsonl").read_bytes() == (tmp_path / "whole/metrics.jsonl").read_bytes()
    newest = [resolve(tmp_path / name).path for name in ("cut", "whole")]
    for name in ("first", "second"):
        weights = [(path / name / "adapter_model.safetensors").read_bytes() for path in newest]
        assert weights[0] == weights[1]


@pytest.mark.slow
def test_a_checkpoint_without_copies_cannot_be_gone_on_with_from_them(tmp_path):
    train(tmp_path / "run", iterations=2, **FLAT)
    with pytest.raises(CheckpointError, match=r"state/reference\.pt"):
        make(tmp_path / "run", tmp_path / "run", reference="initial", **FLAT)


def test_memory_counts_the_copies():
    shape = MODEL_SHAPES["Qwen/Qwen3-0.6B"]
    with_copies, without = (footprint(shape, MemoryInputs(reference=name)) for name in ("initial", "base"))
    # float32 weights, and their copy in the base's 2 bytes
    assert with_copies.adapters - without.adapters == 3 * adapter_weights(shape, MemoryInputs()) * 6
