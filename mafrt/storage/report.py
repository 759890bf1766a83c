"""End-of-run report: a before/after table, paths of the outputs, and `summary.json`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mafrt.core.atomic_files import write_atomic
from mafrt.core.text import counted
from mafrt.storage.json_lines import json_safe

SUMMARY = "summary.json"


def before_after(before: Mapping[str, float | None], after: Mapping[str, float | None]) -> str:
    """A table with one row per metric of either side, in the order of `after`: before, after, change.

    Missing values and None are shown as a dash.
    """
    names = [*after, *(name for name in before if name not in after)]
    rows = [("", "before", "after", "change")]
    for name in names:
        old, new = before.get(name), after.get(name)
        change = "" if old is None or new is None else _signed(new - old)
        rows.append((name, _number(old), _number(new), change))
    lines = aligned(rows)
    return "\n".join([lines[0], "-" * max(map(len, lines)), *lines[1:]])


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows as aligned text lines: the first column left, all others right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        ).rstrip()
        for row in rows
    ]


def end_of_run(
    run_dir: str | Path,
    before: Mapping[str, float | None],
    after: Mapping[str, float | None],
    *,
    iterations: int,
    seconds: float,
    checkpoint: str | Path | None = None,
    adapters: tuple[str, ...] = (),
    go_on: str | None = None,
) -> str:
    """The text that closes a run: the table, the duration, and the paths of the outputs."""
    run_dir = Path(run_dir)
    lines = [before_after(before, after), ""] if before or after else []
    lines += [f"{counted(iterations, 'iterations')} in {duration(seconds)}", ""]
    places = [
        ("settings", run_dir / "args.yaml"),
        ("metrics", run_dir / "metrics.jsonl"),
        ("episodes", run_dir / "episodes.jsonl"),
        ("curves", f"tensorboard --logdir {run_dir / 'tensorboard'}"),
        ("report", f"mafrt report {run_dir}"),
    ]
    if checkpoint is not None:
        places += [(f"adapter {name}", Path(checkpoint) / name) for name in adapters]
    if go_on is not None:
        places.append(("go on", go_on))
    width = max(len(name) for name, _ in places)
    return "\n".join([*lines, *(f"{name.ljust(width)}  {place}" for name, place in places)])


AUDITS = ("fidelity", "variance", "noise", "influence")


def audits(run_dir: str | Path) -> dict[str, float]:
    """`audit_*` metrics of a run (`--audit_turns`), each its mean over the iterations that have it; empty without."""
    path, series = Path(run_dir) / "metrics.jsonl", dict[str, list[float]]()
    for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else ():
        for name, value in json.loads(line).items():
            if name.startswith("audit_") and "/" in name and value is not None:
                series.setdefault(name, []).append(value)
    return {name: sum(values) / len(values) for name, values in sorted(series.items())}


def audit_table(numbers: Mapping[str, float]) -> str:
    """One row per agent of `audits`; a dash for what could not be found out."""
    agents = sorted({name.partition("/")[2] for name in numbers})
    rows: list[tuple[str, ...]] = [("credit, audited", *AUDITS)]
    rows += [(agent, *(_number(numbers.get(f"audit_{name}/{agent}")) for name in AUDITS)) for agent in agents]
    return "\n".join(aligned(rows))


def write_summary(run_dir: str | Path, summary: Mapping[str, Any]) -> Path:
    """Write `summary.json` atomically and return its path. Non-finite values become null."""
    path = Path(run_dir) / SUMMARY
    write_atomic(path, (json.dumps(json_safe(summary), indent=2, allow_nan=False) + "\n").encode())
    return path


def duration(seconds: float) -> str:
    """`42 s`, `3 min 20 s`, `2 h 05 min`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    if isinstance(value, int) or (value == int(value) if abs(value) < 1e15 else False):
        return str(int(value)) if abs(value) >= 10 or isinstance(value, int) else f"{value:.3f}"
    return f"{value:.3f}" if 1e-3 <= abs(value) < 1e5 else f"{value:.3g}"


def _signed(value: float) -> str:
    text = _number(value)
    return text if text.startswith("-") else f"+{text}"
