"""The doctor's findings of a run: as its end recorded them, or found again from its metrics while it goes on."""

from __future__ import annotations

import logging
from typing import Any

from mafrt.runners.doctor import Doctor
from mafrt.scripts.reporting.run_data import RunData, Table


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
