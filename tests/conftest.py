"""Order: the fast tests first, so that a mistake shows within seconds; those marked slow at the end."""

from __future__ import annotations

import gc
from typing import Any

import pytest

NOT_RUN: dict[str, str] = {}
"""Sandbox tier -> why its hostile set could not run, of all processes that run tests."""

LONGEST = (
    *("test_engine_vllm.py", "test_walk.py", "test_processes.py", "test_serve_vllm.py", "test_dsbench_learns.py"),
    *("test_quickstart.py", "test_dsbench_train.py", "test_bench_learn.py", "test_program.py", "test_examples.py"),
    *("test_report.py", "test_dsbench_constants.py", "test_workflow_fuzz.py", "test_trackers.py", "test_cli.py"),
)
"""Slow files that take half a minute and more, the longest first."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # Files stay together, and of the slow ones the longest come first: at the end no process waits for a long one.
    items.sort(key=lambda item: _rank(item.path.name) if item.get_closest_marker("slow") is not None else -1)


def pytest_collection_finish() -> None:
    # Modules and tests live until the end: collections need not look at them again.
    gc.collect()
    gc.freeze()


@pytest.hookimpl(trylast=True)
def pytest_unconfigure() -> None:
    gc.unfreeze()  # libraries with nanobind report objects that are never collected as leaks


def _rank(file: str) -> int:
    return LONGEST.index(file) if file in LONGEST else len(LONGEST)


def pytest_sessionfinish(session: pytest.Session) -> None:
    from helpers_sandbox import NOT_RUN as here

    NOT_RUN.update(here)
    if hasattr(session.config, "workeroutput"):  # one of several processes: the first one prints
        session.config.workeroutput["not_run"] = dict(here)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    NOT_RUN.update(getattr(node, "workeroutput", {}).get("not_run", {}))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for tier, why in NOT_RUN.items():
        terminalreporter.write_line(f"NOT RUN: the hostile set on the sandbox {tier!r}: {why}", red=True, bold=True)
