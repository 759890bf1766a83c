"""The charts of BENCHMARKS.md: ratios with their quartiles and bars, and time over agents, answers and context."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from mafrt.scripts.benchmarks._growth_fits import AxisFit, figure
from mafrt.scripts.benchmarks._plan import PLAN
from mafrt.scripts.reproduce._figure import COLOURS

Record = Mapping[str, Any]
_TITLES = {planned.name: planned.title for planned in PLAN}


class Panel(NamedTuple):
    """One ratio of several measurements."""

    title: str
    key: str
    bars: Mapping[str, Mapping[int, float]]
    """by measurement, the bar by K; without one there is no mark"""
    least: bool = True
    """whether the ratio is to be at least the bar, or at most"""


_AT_MOST = dict.fromkeys((1, 2, 4, 8, 16), 2.1)
PANELS = (
    Panel(
        "One iteration: TRL / ours per agent",
        "trl/ours per agent",
        {
            "iteration_smollm2_bfloat16": {1: 5.0, 4: 5.0},
            "iteration_smollm2": {1: 2.5, 4: 2.5},
            "iteration": {1: 4.0, 4: 4.0},
        },
    ),
    Panel(
        "Rollout: share of the bare base",
        "bare/ours",
        {
            "rollout": {4: 0.85, 16: 0.8},
            "rollout_bfloat16": {4: 0.85, 16: 0.75},
            "rollout_smollm2_bfloat16": {4: 0.85, 16: 0.75},
        },
    ),
    Panel(
        "Rollout: PEFT's adapter_names / ours",
        "names_loop/ours",
        {name: {4: 2.0, 16: 3.0} for name in ("rollout", "rollout_bfloat16", "rollout_smollm2_bfloat16")},
    ),
    Panel(
        "Update / a forward that records nothing",
        "update/no_grad",
        dict.fromkeys(("update", "update_smollm2", "update_smollm2_bfloat16", "update_qwen3"), _AT_MOST),
        least=False,
    ),
)


def ratios(records: Mapping[str, Record]) -> str | None:
    """An SVG chart of the panels that have any result; None: there is none."""
    panels = [(panel, points) for panel in PANELS if (points := list(_points(panel, records)))]
    if not panels:
        return None
    import matplotlib
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    tallest = max(len(points) for _, points in panels)
    # Text stays text and ids stay the same from one drawing to the next: small files, readable differences.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "mafrt", "font.family": "sans-serif"}):
        drawing = Figure(figsize=(11.0, (0.7 + 0.24 * tallest) * ((len(panels) + 1) // 2)), layout="constrained")
        FigureCanvasSVG(drawing)
        places = drawing.subplots((len(panels) + 1) // 2, 2, squeeze=False).flatten()
        for axes in places[len(panels) :]:
            axes.remove()
        for axes, (panel, points) in zip(places, panels, strict=False):
            for y, (_, ratio, bar) in enumerate(points):
                met = bar is None or (ratio["median"] >= bar if panel.least else ratio["median"] <= bar)
                colour = COLOURS[0] if met else COLOURS[1]
                axes.plot([ratio["q1"], ratio["q3"]], [y, y], color=colour, linewidth=2.4)
                axes.plot(ratio["median"], y, "o", color=colour, markersize=5)
                if bar is not None:
                    axes.plot([bar, bar], [y - 0.4, y + 0.4], color="#495057", linewidth=1.2)
            axes.set_yticks(range(len(points)), [label for label, _, _ in points], fontsize=8)
            axes.invert_yaxis()
            axes.set_title(panel.title, loc="left", fontsize=10)
            # From 0 on, so that a length is a ratio; those that lie between 1.5 and 2.5 would not differ then.
            if panel.least:
                axes.set_xlim(left=0.0)
            axes.grid(axis="x", color="#dddddd")
            axes.set_axisbelow(True)
            axes.spines[["top", "right"]].set_visible(False)
        buffer = io.StringIO()
        drawing.savefig(buffer, format="svg", metadata={"Date": None})
    return buffer.getvalue()


def growth(records: Mapping[str, Record]) -> str | None:
    """The SVG chart of the benchmark `growth`; None: it was not measured."""
    if "growth" not in records:
        return None
    return figure([AxisFit(**fit) for fit in records["growth"]["result"]["fits"]])


def _points(panel: Panel, records: Mapping[str, Record]) -> Iterator[tuple[str, Mapping[str, float], float | None]]:
    """Label, ratio and bar of each row."""
    for name, own in panel.bars.items():
        rows: Sequence[Mapping[str, Any]] = records[name]["result"]["rows"] if name in records else ()
        for row in rows:
            each = f", {row['rows_per_adapter']} rows each" if "rows_per_adapter" in row else ""
            yield f"{_TITLES[name]}, K={row['K']}{each}", row[panel.key], own.get(row["K"])
