"""The one figure of a miniature: curves over iterations, drawn by matplotlib (the extra `[plots]`)."""

from __future__ import annotations

import io
import itertools
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from mafrt.core.errors import MissingExtraError
from mafrt.core.extras import install

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLOURS = ("#0f6f95", "#d9480f", "#2b8a3e", "#862e9c", "#c2255c", "#5c940d", "#495057", "#e8a100")
A_LINE = 4
"""Names in a line of the legend."""


def need_matplotlib() -> None:
    """Raise MissingExtraError if no figure can be drawn; asked before hours of training, not after."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise MissingExtraError(f"The figure needs matplotlib, which is not installed: {install('plots')}.") from error


def svg(width: float, height: float, draw: Callable[[Figure], None]) -> str:
    """An SVG chart of so many inches. Text stays text and ids stay the same from one drawing to the next."""
    import matplotlib
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "mafrt", "font.family": "sans-serif"}):
        figure = Figure(figsize=(width, height), layout="constrained")
        FigureCanvasSVG(figure)
        draw(figure)
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    return buffer.getvalue()


def curves(
    title: str,
    arms: Mapping[str, Sequence[Sequence[float]]],
    ylabel: str,
    xlabel: str = "iteration",
    steps: Sequence[int] | None = None,
) -> str:
    """An SVG chart: per arm the curves of its seeds (thin) and their mean (thick), over `steps`, by default from 1 on.

    The vertical axis begins at 0 over iterations, and below the curves where `steps` are given.
    """
    need_matplotlib()
    from matplotlib.ticker import MaxNLocator

    def draw(figure: Figure) -> None:
        axes = figure.add_subplot()
        for colour, (name, runs) in zip(itertools.cycle(COLOURS), arms.items(), strict=False):
            for run in runs:
                axes.plot((steps or range(1, len(run) + 1))[: len(run)], run, color=colour, linewidth=0.8, alpha=0.35)
            shortest = min(map(len, runs))
            mean = [statistics.fmean(run[i] for run in runs) for i in range(shortest)]
            places = (steps or range(1, shortest + 1))[:shortest]
            axes.plot(places, mean, color=colour, linewidth=2.4, label=name)
        axes.set_title(title, loc="left")
        axes.set_xlabel(xlabel)
        axes.set_ylabel(ylabel)
        if steps is None:
            axes.set_ylim(bottom=min(0.0, axes.get_ylim()[0]))
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(axis="y", color="#dddddd")
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
        figure.legend(
            *axes.get_legend_handles_labels(), loc="outside upper right", ncols=min(len(arms), A_LINE), frameon=False
        )

    return svg(7.5, 4.0, draw)


def seeds(title: str, found: Mapping[str, tuple[float, float, float]], xlabel: str, least: float | None = None) -> str:
    """An SVG chart of final results: a point and its 95% interval (value, low, high) for each seed, and their mean.

    `least` draws a line that no seed is to fall below.
    """
    need_matplotlib()

    def draw(figure: Figure) -> None:
        axes = figure.add_subplot()
        names = list(found)[::-1]
        for place, name in enumerate(names):
            value, low, high = found[name]
            axes.plot([low, high], [place, place], color=COLOURS[0], linewidth=1.2, alpha=0.6)
            axes.plot([value], [place], "o", color=COLOURS[0], markersize=5)
        mean = statistics.fmean(value for value, _, _ in found.values())
        axes.axvline(mean, color=COLOURS[1], linewidth=1, label=f"mean {mean:.3f}")
        if least is not None:
            axes.axvline(least, color=COLOURS[6], linewidth=1, linestyle=":", label=f"bar {least:.2f}")
        axes.set_yticks(range(len(names)), names)
        axes.set_xlim(0, 1)
        axes.set_xlabel(xlabel)
        axes.set_ylabel("seed")
        axes.set_title(title, fontsize=11, loc="left")
        axes.legend(frameon=False, fontsize=9, loc="lower left")
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)

    return svg(6.4, 0.6 + 0.28 * len(found), draw)
