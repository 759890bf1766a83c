"""The charts of BENCHMARKS.md: ratios with their quartiles and bars, and time over agents, answers and context."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from bench._bars import ADAPTER_NAMES, BARE_SHARE, NO_GRAD, over_trl
from bench._growth_fits import AxisFit, figure
from bench._plan import TITLES
from bench.reproduce._figure import COLOURS, svg

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Record = Mapping[str, Any]


class Panel(NamedTuple):
    """One ratio of several measurements."""

    title: str
    key: str
    names: tuple[str, ...]
    bar: Callable[[Mapping[str, Any], int], float | None]
    """from a measurement's shape and K; None: there is none"""
    least: bool = True
    """whether the ratio is to be at least the bar, or at most"""


ROLLOUTS = ("rollout", "rollout_bfloat16", "rollout_smollm2_bfloat16")
PANELS = (
    Panel(
        "One iteration: TRL / ours per agent",
        "trl/ours per agent",
        ("iteration_smollm2_bfloat16", "iteration_smollm2", "iteration"),
        lambda shape, _: over_trl(shape["model"], shape["dtype"]),
    ),
    Panel("Rollout: share of the bare base", "bare/ours", ROLLOUTS, lambda shape, k: BARE_SHARE[shape["dtype"]].get(k)),
    Panel("Rollout: PEFT's adapter_names / ours", "names_loop/ours", ROLLOUTS, lambda _, k: ADAPTER_NAMES.get(k)),
    Panel(
        "Update / a forward that records nothing",
        "update/no_grad",
        ("update", "update_smollm2", "update_smollm2_bfloat16", "update_qwen3"),
        lambda *_: NO_GRAD,
        least=False,
    ),
)


def ratios(records: Mapping[str, Record]) -> str | None:
    """An SVG chart of the panels that have any result; None: there is none."""
    panels = [(panel, points) for panel in PANELS if (points := list(_points(panel, records)))]
    if not panels:
        return None
    tallest = max(len(points) for _, points in panels)
    lines = (len(panels) + 1) // 2

    def draw(drawing: Figure) -> None:
        places = drawing.subplots(lines, 2, squeeze=False).flatten()
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

    return svg(11.0, (0.7 + 0.24 * tallest) * lines, draw)


def growth(records: Mapping[str, Record]) -> str | None:
    """The SVG chart of the benchmark `growth`; None: it was not measured."""
    if "growth" not in records:
        return None
    return figure([AxisFit(**fit) for fit in records["growth"]["result"]["fits"]])


def _points(panel: Panel, records: Mapping[str, Record]) -> Iterator[tuple[str, Mapping[str, float], float | None]]:
    """Label, ratio and bar of each row."""
    for name in panel.names:
        if name not in records:
            continue
        result = records[name]["result"]
        for row in result["rows"]:
            each = f", {row['rows_per_adapter']} rows each" if "rows_per_adapter" in row else ""
            yield f"{TITLES[name]}, K={row['K']}{each}", row[panel.key], panel.bar(result["shape"], row["K"])
