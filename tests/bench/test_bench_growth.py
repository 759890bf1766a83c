"""`mafrt bench growth`: fits worked by hand, and a tiny run with its figure."""

from __future__ import annotations

import pytest

from bench import _measure, growth
from bench._growth_fits import fit_axis
from mafrt.core.errors import ConfigError

TINY = ["--width", "64", "--mlp", "64", "--layers", "1", "--rounds", "1", "--clock", "cpu"]
POINTS = ["--agents", "1", "5", "--answers", "1", "3", "--context", "8", "32", "--shared_prompt", "12", "--answer", "3"]

pytestmark = pytest.mark.usefixtures("same_threads")


def test_fits_by_hand():
    # 3 + 2 x, exactly; from x=2 to x=4 the seconds go from 7 to 11: log2(11 / 7) = .652.
    fit = fit_axis("agents", "play", [1, 2, 4], [[5.0, 5.0, 5.0], [7.0, 6.0, 9.0], [11.0, 11.0, 11.0]])
    assert fit.constant == pytest.approx(3.0) and fit.slope == pytest.approx(2.0) and fit.r2 == pytest.approx(1.0)
    assert fit.last_exponent == pytest.approx(0.652, abs=1e-3)
    # x^2: around the means 7/3 and 7 the sums are xy 24, xx 14/3, yy 126: slope 36/7, R2 24^2 / (14/3 * 126) = .980.
    square = fit_axis("context", "update", [1, 2, 4], [[1.0], [4.0], [16.0]])
    assert square.exponent == pytest.approx(2.0) and square.last_exponent == pytest.approx(2.0)
    assert square.slope == pytest.approx(36 / 7) and square.r2 == pytest.approx(0.980, abs=1e-3)


@pytest.mark.nightly
@pytest.mark.slow
def test_a_tiny_run_draws_its_figure(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    drawing = tmp_path / "growth.svg"
    found = growth.run([*TINY, *POINTS, "--figure", str(drawing)])
    assert [(fit["axis"], fit["part"]) for fit in found["fits"]] == [
        (axis, part) for axis in ("agents", "agents, same work", "answers", "context") for part in ("play", "update")
    ]
    assert all(min(fit["seconds"]) > 0 for fit in found["fits"]) and found["parity"] <= 1e-3
    assert "| agents | play | K = 1 to 5 |" in capsys.readouterr().out
    assert all(text in drawing.read_text() for text in ("<svg", "agents, same work", "update", "milliseconds"))


def test_a_sampler_that_forgets_its_adapters_is_not_timed(monkeypatch):
    requests = growth._requests
    monkeypatch.setattr(
        growth, "_requests", lambda work: [r.__class__(r.prompt_ids, None, r.sampling, r.seed) for r in requests(work)]
    )
    with pytest.raises(_measure.Disagreement, match="agents, 1, sampler"):
        growth.run([*TINY, *POINTS])


def test_one_point_has_no_slope():
    with pytest.raises(ConfigError, match="give --context two values"):
        growth.run(["--context", "64"])


@pytest.mark.parametrize("name", ["here.png", "nowhere/here.svg", "folder.svg"])
def test_a_figure_that_cannot_be_written_is_refused_before_the_work(tmp_path, name):
    (tmp_path / "folder.svg").mkdir()
    with pytest.raises(ConfigError, match="figure "):
        growth.run(["--figure", str(tmp_path / name)])
