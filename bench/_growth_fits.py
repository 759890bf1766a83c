"""Fits of seconds over an axis, and their figure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from bench import _measure
from bench.reproduce._figure import COLOURS, svg

if TYPE_CHECKING:
    from matplotlib.figure import Figure

UNITS = {"agents": "K", "agents, same work": "K", "answers": "n", "context": "c"}
"""axis -> letter of its x"""


@dataclass(frozen=True)
class AxisFit:
    """Medians over an axis, and both fits of them."""

    axis: str
    part: str
    """play or update"""
    xs: list[int]
    seconds: list[float]
    """median of the rounds, per x"""
    quartiles: list[tuple[float, float]]
    """of the rounds, per x"""
    constant: float
    """a of time = a + b x, in seconds"""
    slope: float
    """b of time = a + b x, in seconds per unit of x"""
    r2: float
    """share of the variance that the line explains"""
    exponent: float
    """p of time ~ x^p over all points"""
    last_exponent: float
    """p between the two largest x"""

    def record(self) -> dict[str, Any]:
        return asdict(self)

    def line(self) -> str:
        return (
            f"{self.axis:>17} {self.part:<6} {self.seconds[0] * 1e3:8.1f} to {self.seconds[-1] * 1e3:8.1f} ms  "
            f"{self.constant * 1e3:.1f} + {self.slope * 1e3:.3g} {UNITS[self.axis]} ms (R2 {self.r2:.3f})  "
            f"p {self.exponent:.2f}, last {self.last_exponent:.2f}"
        )


def fit_axis(axis: str, part: str, xs: Sequence[int], times: Sequence[Sequence[float]]) -> AxisFit:
    """Fit the medians of `times` (seconds of each round, per x) by least squares; `xs` rise."""
    spread = [_measure.quartiles(list(rounds)) for rounds in times]
    seconds = [quartiles["median"] for quartiles in spread]
    line = statistics.linear_regression(xs, seconds)
    logs = [math.log(x) for x in xs], [math.log(second) for second in seconds]
    mean = statistics.fmean(seconds)
    rest = sum((second - line.intercept - line.slope * x) ** 2 for x, second in zip(xs, seconds, strict=True))
    total = sum((second - mean) ** 2 for second in seconds)
    return AxisFit(
        axis,
        part,
        list(xs),
        seconds,
        [(quartiles["q1"], quartiles["q3"]) for quartiles in spread],
        line.intercept,
        line.slope,
        1 - rest / total if total else 1.0,
        statistics.linear_regression(*logs).slope,
        (logs[1][-1] - logs[1][-2]) / (logs[0][-1] - logs[0][-2]),
    )


def figure(fits: Sequence[AxisFit]) -> str:
    """An SVG chart: a panel for each axis with the medians of play and update, and their lines a + b x (dashed)."""
    from matplotlib.ticker import StrMethodFormatter

    axes_names = list(dict.fromkeys(fit.axis for fit in fits))

    def draw(drawing: Figure) -> None:
        for axes, name in zip(drawing.subplots(1, len(axes_names), squeeze=False)[0], axes_names, strict=True):
            for fit, colour in zip([fit for fit in fits if fit.axis == name], COLOURS, strict=False):
                axes.plot(fit.xs, [1e3 * s for s in fit.seconds], "o-", color=colour, markersize=4, label=fit.part)
                low, high = ([1e3 * pair[side] for pair in fit.quartiles] for side in (0, 1))
                axes.fill_between(fit.xs, low, high, color=colour, alpha=0.2, linewidth=0)
                fitted = [(x, 1e3 * (fit.constant + fit.slope * x)) for x in fit.xs]
                # A logarithmic axis has no place for a line's part below 0.
                drawn = [(x, y) for x, y in fitted if y > 0]
                axes.plot(*zip(*drawn, strict=True), "--", color=colour, linewidth=0.9)
            axes.set_xscale("log", base=2)
            axes.set_yscale("log", base=2)
            for axis in (axes.xaxis, axes.yaxis):
                axis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
            axes.set_title(name, loc="left", fontsize=10)
            axes.set_xlabel(UNITS[name])
            axes.grid(color="#dddddd")
            axes.set_axisbelow(True)
            axes.spines[["top", "right"]].set_visible(False)
        first = drawing.axes[0]
        first.set_ylabel("milliseconds")
        first.legend(frameon=False)

    return svg(3.0 * len(axes_names), 3.4, draw)
