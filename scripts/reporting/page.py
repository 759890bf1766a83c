"""The report as one HTML file: data, styles and scripts inside, no network.

Nothing that an agent, a judge or a data set wrote is put into the markup: it travels in compressed JSON and the page's
script sets it as text. The content security policy lets only the two scripts of this file run, by their hash.
"""

from __future__ import annotations

import base64
import hashlib
import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mafrt import __version__
from mafrt.runners.doctor import Doctor
from mafrt.scripts.reporting.blocks import Blocks, compressed
from mafrt.scripts.reporting.episodes import read_episodes, selection
from mafrt.scripts.reporting.run_data import RunData, Table, same_but_seed
from mafrt.storage.json_lines import json_safe
from mafrt.storage.metrics import explain

ASSETS = Path(__file__).parent / "assets"
SCRIPTS = (
    *("dom.js", "text.js", "data.js", "charts.js", "overview.js", "curves.js", "coach.js"),
    *("conversation.js", "episodes.js", "before_after.js", "runs.js", "main.js"),
)
MARK = "<!doctype html><!-- mafrt report -->"
"""How every report begins; a file that begins otherwise is not overwritten."""


@dataclass(frozen=True)
class Page:
    """A finished report."""

    html: bytes
    episodes: int
    """episodes in the page"""
    left_out: int
    """recorded episodes for which there was no room"""


def build_page(runs: Sequence[RunData], *, max_mib: float, live: bool = False) -> Page:
    """The report of some runs.

    Args:
        runs: read by `read_run`.
        max_mib: MiB that the episodes may take in the file, compressed; further tasks are left out.
        live: the page is served and asks for news.
    """
    blocks, left_out = _episodes(runs, max_mib)
    groups: dict[str, int] = {}
    meta = {
        "version": __version__,
        "live": live,
        "runs": [_run(run, groups.setdefault(same_but_seed(run), len(groups))) for run in runs],
        "index": vars(blocks.index),
        "blocks": len(blocks.done),
        "explained": _explained(runs),
    }
    title = " · ".join(run.name for run in runs[:3]) + (" …" if len(runs) > 3 else "")
    html = _render(title, meta, blocks.done, live)
    return Page(html, len(blocks.index.run), left_out)


def _episodes(runs: Sequence[RunData], max_mib: float) -> tuple[Blocks, int]:
    """The blocks of all runs, which share the room evenly; and how many episodes had none."""
    in_base64 = 0.75  # of the page's bytes, how many are data
    blocks, left_out = Blocks(max_mib * 2**20), 0
    for position, run in enumerate(runs):
        left_here = kept_here = 0
        notes: list[str] = []
        chosen = selection(run.path, in_base64 * max_mib * 2**20 / len(runs))
        for episode in read_episodes(run.path, notes):
            if chosen(episode) and blocks.add(position, episode):
                kept_here += 1
            else:
                left_here += 1
        run.problems += notes
        if left_here:
            run.problems.append(f"{left_here} of {left_here + kept_here} recorded episodes are left out (--max_mib).")
        if not left_here and not kept_here and run.metrics.iterations:
            run.problems.append("No episodes are recorded.")
        left_out += left_here
    blocks.close()
    return blocks, left_out


def _run(run: RunData, group: int) -> dict[str, Any]:
    record = run.record
    return {
        "name": run.name,
        "group": group,
        "seed": run.settings.get("seed"),
        "command": None if record is None else record.command,
        "environment": None if record is None or record.environment is None else record.environment.path,
        "base": None if record is None or record.base is None else record.base.name,
        "agents": run.agents,
        "prompts": run.prompts,
        "settings": run.settings,
        "findings": findings_of(run),
        "problems": run.problems,
        "metrics": _table(run.metrics),
        "evaluations": _table(run.evaluations),
        "seconds": sum(value or 0 for name in ("seconds_play", "seconds_learn") for value in _column(run, name)),
    }


def _column(run: RunData, name: str) -> list[float | None]:
    return run.timings.columns.get(name, [])


def _table(table: Table) -> dict[str, Any]:
    thin = table.thinned()
    columns = {
        name: [None if value is None else float(f"{value:.5g}") for value in values]
        for name, values in sorted(thin.columns.items())
    }
    return {"iterations": thin.iterations, "columns": columns, "when": thin.when}


def _explained(runs: Sequence[RunData]) -> dict[str, str]:
    """Metric -> its meaning and unit, for names that the glossary knows."""
    names = {name for run in runs for table in (run.metrics, run.evaluations) for name in table.columns}
    meanings = {}
    for name in sorted(names):
        try:
            meaning = explain(name)
        except KeyError:
            continue
        meanings[name] = meaning.text + (f" ({meaning.unit})" if meaning.unit else "")
    return meanings


def _render(title: str, meta: dict[str, Any], blocks: Sequence[str], live: bool) -> bytes:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from markupsafe import Markup

    style = _asset("uPlot.min.css") + _asset("report.css")
    plots = _asset("uPlot.iife.min.js")
    script = '"use strict";\n(() => {\n' + "\n".join(_asset(f"js/{name}") for name in SCRIPTS) + "\n})();\n"
    policy = "; ".join(
        [
            "default-src 'none'",
            f"script-src {_hash(plots)} {_hash(script)}",
            "style-src 'unsafe-inline'",  # uPlot and the heat map colour elements one by one
            "connect-src 'self'" if live else "connect-src 'none'",
            "base-uri 'none'",
            "form-action 'none'",
        ]
    )
    jinja = Environment(loader=FileSystemLoader(ASSETS), autoescape=True, undefined=StrictUndefined)
    text = jinja.get_template("report.html.jinja").render(
        mark=Markup(MARK),
        title=title,
        policy=policy,
        style=Markup(style),
        plots=Markup(plots),
        script=Markup(script),
        meta=compressed(json.dumps(json_safe(meta), ensure_ascii=True, separators=(",", ":"))),
        blocks=blocks,
    )
    return text.encode()


def _asset(name: str) -> str:
    return (ASSETS / name).read_text(encoding="utf-8")


def _hash(script: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"


def findings_of(run: RunData) -> list[str]:
    """One sentence per finding. Findings that need episodes come from `summary.json`, which a complete run has."""
    recorded = run.summary.get("findings")
    if isinstance(recorded, list):
        return [str(finding) for finding in recorded]
    doctor = Doctor(run.agents)
    logger = logging.getLogger(Doctor.__module__)
    level = logger.level
    logger.setLevel(logging.CRITICAL)  # the run itself has logged them
    try:
        for iteration, line in _lines(run.metrics):
            doctor.look(iteration, line, [])
        for iteration, line in _lines(run.evaluations):
            doctor.look_at_evaluation(iteration, line, int(run.settings.get("eval_episodes") or 0))
    finally:
        logger.setLevel(level)
    return doctor.lines()


def _lines(table: Table) -> list[tuple[int, dict[str, Any]]]:
    """The rows of a table with the values that are there."""
    return [
        (iteration, {name: values[row] for name, values in table.columns.items() if values[row] is not None})
        for row, iteration in enumerate(table.iterations)
    ]
