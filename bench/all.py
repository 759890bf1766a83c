"""Every measurement of BENCHMARKS.md, one after the other, and the page's tables and charts from their results.

Each result is a JSON file. One that is there already is not measured again unless it is named, so a run that was
interrupted goes on. The tables stand between marks in the page, and the text around them stays as it is. On a machine
of two cores everything takes about an hour and a half, and nothing should run beside it.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench import _chart
from bench._measure import Disagreement
from bench._page import fill
from bench._plan import PLAN, measure, result_file
from bench.reproduce._figure import need_matplotlib
from mafrt.core.atomic_files import write_atomic
from mafrt.core.errors import ConfigError
from mafrt.scripts.cli.strict_parser import StrictParser


def run(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Measure, draw, and return the failures, of which there are none: raises `_measure.Disagreement` where any are."""
    args = _parser().parse_args(argv)
    need_matplotlib()
    if not args.page.is_file():
        raise ConfigError(f"page is {args.page}; expected an existing page with marks, such as BENCHMARKS.md.")
    args.folder.mkdir(parents=True, exist_ok=True)
    _draw(args.page, args.folder)  # before an hour of measuring: a page that cannot be filled is told now
    failed: dict[str, str] = {}
    for planned in PLAN:
        named = planned.name in args.only
        if args.draw or (args.only and not named) or (not named and result_file(planned.name, args.folder).exists()):
            continue
        if why := measure(planned, args.folder):
            failed[planned.name] = why
            print(f"{planned.name}: {why}", flush=True)
        else:
            _draw(args.page, args.folder)
    if failed:
        raise Disagreement(f"no result of {', '.join(failed)}; the reasons are above")
    return {"bench": "all", "page": str(args.page), "results": sorted(_records(args.folder))}


def _parser() -> argparse.ArgumentParser:
    parser = StrictParser(prog="mafrt bench all", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--page", type=Path, default=Path("BENCHMARKS.md"), help="the page with marks")
    parser.add_argument("--folder", type=Path, default=Path("docs/benchmarks"), help="of results and charts")
    chosen = parser.add_mutually_exclusive_group()
    names = [planned.name for planned in PLAN]
    chosen.add_argument("--only", nargs="+", default=[], choices=names, help="measure these alone, again")
    chosen.add_argument("--draw", action="store_true", help="measure nothing: tables and charts from the results")
    return parser


def _records(folder: Path) -> dict[str, Any]:
    """The results that there are, in the order of the plan."""
    records = {}
    for planned in PLAN:
        path = result_file(planned.name, folder)
        if not path.exists():
            continue
        try:
            records[planned.name] = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ConfigError(f"{path} is no JSON ({error}); delete it to measure it again.") from error
    return records


def _draw(page: Path, folder: Path) -> None:
    """Write tables and charts from the results."""
    records = _records(folder)
    text = page.read_text(encoding="utf-8")
    filled = fill(text, records)
    if filled != text:
        write_atomic(page, filled.encode())
    for name, chart in (("ratios", _chart.ratios(records)), ("growth", _chart.growth(records))):
        if chart is not None:
            write_atomic(folder / f"{name}.svg", chart.encode())
