"""Results of benchmarks as Markdown tables."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from bench._growth_fits import UNITS
from bench._measure import markdown

T_975 = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228,
    2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086,
)  # fmt: skip
"""Student's t, 97.5%, for 1, 2, ... degrees of freedom; beyond, the last is a little wide"""


def seed_interval(values: Sequence[float]) -> tuple[float, float] | None:
    """95% interval of the mean over seeds, by Student's t; None for a single seed."""
    if len(values) < 2:
        return None
    freedom = len(values) - 1
    half = T_975[min(freedom, len(T_975)) - 1] * statistics.stdev(values) / math.sqrt(len(values))
    return statistics.fmean(values) - half, statistics.fmean(values) + half


Row = Mapping[str, Any]


class Column(NamedTuple):
    """One column; left out where no row has its key."""

    head: str
    key: str
    show: Callable[[Any], str]


class Table(NamedTuple):
    """One of a result's tables."""

    rows: str
    """the key of its rows in the result"""
    columns: tuple[Column, ...]


def _number(digits: int) -> Callable[[Any], str]:
    return lambda value: "-" if value is None else f"{value:,.{digits}f}"


def _ratio(value: Mapping[str, float]) -> str:
    """Median and quartiles; where there was one round, that."""
    median, q1, q3 = (f"{value[name]:.2f}" for name in ("median", "q1", "q3"))
    return median if value["q1"] == value["q3"] else f"{median} ({q1} to {q3})"


def _median_ms(value: float | Mapping[str, float]) -> str:
    """Milliseconds of seconds, of which there may be quartiles."""
    seconds = value["median"] if isinstance(value, Mapping) else value
    return f"{seconds * 1e3:,.1f}" if seconds < 0.1 else f"{seconds * 1e3:,.0f}"


def _mib(value: float) -> str:
    return f"{value / 2**20:,.1f}"


def _columns(*columns: tuple[str, str, Callable[[Any], str]]) -> tuple[Column, ...]:
    return tuple(Column(*column) for column in columns)


_PLAIN, _SHORT, _P = _number(0), _number(2), _number(3)
TABLES = {
    "update": Table(
        "rows",
        _columns(
            ("K", "K", _PLAIN),
            ("rows", "rows", _PLAIN),
            ("tokens", "tokens", _PLAIN),
            ("update, ms", "update_s", _median_ms),
            ("update / forward", "update/forward", _ratio),
            ("update / `no_grad`", "update/no_grad", _ratio),
            ("PEFT, a pass per agent / update", "peft_loop/update", _ratio),
            ("PEFT mixed / update", "peft_mixed/update", _ratio),
        ),
    ),
    "rollout": Table(
        "rows",
        _columns(
            ("K", "K", _PLAIN),
            ("rows per adapter", "rows_per_adapter", _PLAIN),
            ("our tokens/s", "tokens_per_s", _PLAIN),
            ("PEFT `adapter_names` (`generate`)", "names/ours", _ratio),
            ("the same, bare decode loop", "names_loop/ours", _ratio),
            ("switching with `set_adapter`", "switching/ours", _ratio),
            ("bare base", "bare/ours", _ratio),
            ("vLLM with adapters", "vllm/ours", _ratio),
            ("chi-square p", "chi_square_p", _SHORT),
        ),
    ),
    "rollout:bare": Table(
        "bare",
        _columns(
            ("rows", "rows", _PLAIN),
            ("our tokens/s", "tokens_per_s", _PLAIN),
            ("`generate`, greedy", "generate/bare greedy", _ratio),
            ("sampled", "generate/bare sampled", _ratio),
            ("vLLM, greedy", "vllm/bare greedy", _ratio),
            ("sampled", "vllm/bare sampled", _ratio),
            ("llama.cpp, greedy", "llama.cpp/bare greedy", _ratio),
            ("sampled", "llama.cpp/bare sampled", _ratio),
            ("chi-square p", "chi_square_p", _SHORT),
        ),
    ),
    "iteration": Table(
        "rows",
        _columns(
            ("K", "K", _PLAIN),
            ("answers", "answers", _PLAIN),
            ("distinct", "distinct", _PLAIN),
            ("ours, s", "ours_s", _SHORT),
            ("play", "play_s", _SHORT),
            ("learn", "learn_s", _SHORT),
            ("limit, s", "limit_s", _SHORT),
            ("TRL, s an agent", "trl_s", _SHORT),
            ("TRL / ours per agent", "trl/ours per agent", _ratio),
        ),
    ),
    "prefix": Table(
        "rows",
        _columns(
            ("part", "part", str),
            ("n", "n", _PLAIN),
            ("shared, ms", "shared_s", _median_ms),
            ("unshared, ms", "unshared_s", _median_ms),
            ("rows, ms", "rows_s", _median_ms),
            ("action, ms", "action_s", _median_ms),
            ("rows / shared", "rows/shared", _ratio),
            ("unshared / shared", "unshared/shared", _ratio),
            ("rows / action", "rows/action", _ratio),
        ),
    ),
    "memory": Table(
        "adapters",
        _columns(
            ("K", "K", _PLAIN),
            ("base, MiB", "base", _mib),
            ("adapters, gradients, optimizers, MiB", "held", _mib),
            ("copies for the kernels, MiB", "copies", _mib),
            ("rest at the peak, MiB", "rest", _mib),
            ("update, ms", "update_s", _median_ms),
        ),
    ),
    "memory:vocabulary": Table(
        "vocabularies",
        _columns(
            ("V", "V", _PLAIN),
            ("tokens", "tokens", _PLAIN),
            ("full logits, MiB", "full", _mib),
            ("chunked, MiB", "chunked", _mib),
            ("chunked / full", "share", _SHORT),
            ("seconds, chunked / full", "chunked/full seconds", _ratio),
        ),
    ),
    "resume": Table(
        "rows",
        _columns(
            ("K", "K", _PLAIN),
            ("checkpoint, MiB", "checkpoint_mib", _SHORT),
            ("cold load, ms", "cold_load_s", _median_ms),
            ("cold resume, ms", "cold_resume_s", _median_ms),
            ("load, ms", "load_base_s", _median_ms),
            ("resume, ms", "resume_s", _median_ms),
            ("save, ms", "save_s", _median_ms),
            ("cold resume / load", "cold_resume/cold_load", _ratio),
            ("resume / load", "resume/load_base", _ratio),
        ),
    ),
    "handover": Table(
        "rows",
        _columns(
            ("K", "K", _PLAIN),
            ("answers", "answers", _PLAIN),
            ("hand over, ms", "hand_over_s", _median_ms),
            ("play, ms", "play_s", _median_ms),
            ("learn, ms", "learn_s", _median_ms),
            ("iteration, ms", "iteration_s", _median_ms),
            ("hand over / iteration", "hand_over/iteration", _ratio),
        ),
    ),
    "turns": Table(
        "rows",
        _columns(
            ("c", "context", _PLAIN),
            ("T", "turns", _PLAIN),
            ("all, ms", "all_s", _median_ms),
            ("action, ms", "action_s", _median_ms),
            ("all / action", "all/action", _ratio),
        ),
    ),
    "growth": Table(
        "fits",
        _columns(
            ("axis", "axis", str),
            ("part", "part", str),
            ("x", "x", str),
            ("ms, first to last", "span", str),
            ("a, ms", "constant", _median_ms),
            ("b, ms per unit", "slope", lambda slope: f"{slope * 1e3:.3g}"),
            ("R2", "r2", _P),
            ("exponent", "exponent", _SHORT),
            ("last exponent", "last_exponent", _SHORT),
        ),
    ),
    "endpoint": Table(
        "rows",
        _columns(
            ("calls", "calls", _PLAIN),
            ("tokens", "tokens", _PLAIN),
            ("engine alone, s", "engine_s", _P),
            ("served / engine alone", "served/engine", _ratio),
            ("program / ordinary environment", "program/played", _ratio),
        ),
    ),
    "environment": Table(
        "rows",
        _columns(
            ("environments side by side", "environments", _PLAIN),
            ("in process, ms a step", "process_ms", _P),
            ("in workers, ms a step", "worker_ms", _P),
            ("more", "more_ms", _P),
        ),
    ),
    "sandbox": Table(
        "rows",
        _columns(
            ("snippet", "snippet", str),
            ("callers at once", "concurrency", _PLAIN),
            ("sandbox, ms", "ms", _number(1)),
            ("p90, ms", "p90_ms", _number(1)),
            ("executions/s", "per_s", _PLAIN),
            ("fresh interpreter, ms", "fresh_ms", _PLAIN),
        ),
    ),
    "coach": Table(
        "rows",
        _columns(
            ("way to the judge", "way", str),
            ("calls at once", "concurrency", _PLAIN),
            ("wall, s", "wall_s", _number(1)),
            ("of the bound", "ratio", _SHORT),
            ("serial calls, s", "serial_s", _PLAIN),
            ("times faster", "speedup", _number(1)),
            ("the same batch again, s", "repeat_s", _SHORT),
        ),
    ),
}
"""By benchmark, and by benchmark and part."""


def table(results: Sequence[tuple[str, Row]], part: str | None = None) -> str:
    """One table of the results of one benchmark, each with its title, which is shown where there are several."""
    kind = results[0][1]["bench"]
    rows_key, columns = TABLES[f"{kind}:{part}" if part else kind]
    lines = [(title, _derived(kind, row)) for title, result in results for row in result[rows_key]]
    shown = [column for column in columns if any(column.key in row for _, row in lines)]
    head, cells, before = [column.head for column in shown], list[list[str]](), None
    for title, row in lines:
        own = [column.show(row[column.key]) if column.key in row else "-" for column in shown]
        if len(results) > 1:
            own.insert(0, title if title != before else "")
        cells.append(own)
        before = title
    return markdown([*([""] if len(results) > 1 else []), *head], cells)


def bars(results: Sequence[tuple[str, Row]]) -> str:
    """A sentence with the bars of the results, and whether each is met; empty where there are none."""
    said = []
    for title, result in results:
        of = f"{title}, " if len(results) > 1 else ""
        said += [f"{of}{bar}: {'met' if met else '**missed**'}" for bar, met in result.get("bars", {}).items()]
    return f"Bars: {'; '.join(said)}." if said else ""


def _derived(kind: str, row: Row) -> Row:
    """Of a fit the range of its points, as texts."""
    if kind != "growth":
        return row
    xs, seconds = row["xs"], row["seconds"]
    letter, first, last = UNITS[row["axis"]], seconds[0] * 1e3, seconds[-1] * 1e3
    return {**row, "x": f"{letter} = {xs[0]:,} to {xs[-1]:,}", "span": f"{first:,.1f} to {last:,.0f}"}


def over_seeds(values: Sequence[float], spec: str = ".3f") -> str:
    """`mean (low to high)` of the mean over seeds for a table; the mean alone of a single seed.

    Args:
        spec: how each number is written, as in a format string.
    """
    mean, bounds = statistics.fmean(values), seed_interval(values)
    return f"{mean:{spec}}" if bounds is None else f"{mean:{spec}} ({bounds[0]:{spec}} to {bounds[1]:{spec}})"
