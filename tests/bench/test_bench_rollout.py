"""`mafrt bench rollout` at a tiny size: rivals agree, the chi-square test sees a wrong sampler, bars are the stated."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from bench import _measure, rollout
from bench._distribution import p_value, places
from mafrt.core.types import SamplingParams
from mafrt.engines.local.engine import LocalEngine

TINY = ["--width", "64", "--mlp", "64", "--layers", "1", "--vocab", "64", "--rounds", "1", "--clock", "cpu"]
SMALL = [*TINY, "--adapters", "4", "--rows", "2", "--batch", "4", "--prompt", "12", "--tokens", "4", "--draws", "512"]

pytestmark = pytest.mark.usefixtures("same_threads")


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rivals_agree_and_are_timed(dtype, capsys):
    found = rollout.run([*SMALL, "--dtype", dtype])
    (row,), (bare,) = found["rows"], found["bare"]
    assert row["K"] == 4 and row["bare/ours"]["median"] > 0
    assert bare["rows"] == 4 and bare["generate/bare sampled"]["median"] > 0
    assert min(row["chi_square_p"], bare["chi_square_p"]) >= 1e-3
    # 4 rows are not the 64 of the bar, so it is not judged.
    assert set(found["bars"]) == {
        "K=4: >=2x adapter_names",
        "K=4: >=2x switching",
        "K=4: >=.85 of the bare base",
    }
    assert "chi-square p" in capsys.readouterr().out


@pytest.mark.nightly
@pytest.mark.slow
def test_a_sampler_of_another_temperature_is_not_timed(monkeypatch):
    generate = LocalEngine.generate

    def hotter(self, requests):
        hot = [replace(r, sampling=replace(r.sampling, temperature=1.5 * r.sampling.temperature)) for r in requests]
        return generate(self, hot)

    monkeypatch.setattr(LocalEngine, "generate", hotter)  # greedy stays greedy
    with pytest.raises(_measure.Disagreement, match="K=4: found p="):
        rollout.run(SMALL)


def test_places_lie_in_the_stretch_of_their_token():
    logits = torch.tensor([[0.2, 0.5, 0.3]]).log().expand(3, -1)
    found = places(logits, torch.tensor([0, 1, 2]), SamplingParams(), torch.Generator().manual_seed(0))
    # Likely tokens first: 1 on [0, .5), 2 on [.5, .8), 0 on [.8, 1).
    assert 0.8 <= found[0] < 1 and 0 <= found[1] < 0.5 <= found[2] < 0.8
    # Temperature 1/2 squares them: .04, .25, .09 of .38; the best two are left, .25 and .09 of .34.
    cut = places(logits, torch.tensor([0, 1, 2]), SamplingParams(temperature=0.5, top_k=2), torch.Generator())
    assert cut[0] == pytest.approx(1.0) and 0 <= cut[1] < 0.25 / 0.34 <= cut[2] < 1


def test_a_p_value_by_hand():
    # 10 and 20 of 30: (25 + 25) / 15 = 3.33 with one degree of freedom, p = erfc(sqrt(3.33 / 2)) = .0679.
    spots = torch.cat((torch.full((10,), 0.1), torch.full((20,), 0.9))).double()
    assert p_value(spots, 2) == pytest.approx(0.0679, abs=1e-4)


def test_the_bars_are_judged_by_the_faster_rival():
    def row(count, **ratios):
        return {"K": count} | {f"{name}/ours": {"median": value} for name, value in ratios.items()}

    measured = [
        row(4, names=2.4, names_loop=1.9, switching=2.0, bare=0.86),
        row(4, names=2.4, names_loop=2.4, switching=2.0, bare=0.85),
        row(16, names=3.1, names_loop=3.0, switching=1.0, bare=0.78),
    ]
    assert rollout._bars(measured, "float32") == {
        "K=4: >=2x adapter_names": False,
        "K=4: >=2x switching": True,
        "K=4: >=.85 of the bare base": True,
        "K=16: >=3x adapter_names": True,
        "K=16: >=.8 of the bare base": False,
    }
    assert rollout._bars(measured, "bfloat16")["K=16: >=.75 of the bare base"]
