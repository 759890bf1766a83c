"""Order: the fast tests first, so that a mistake shows within seconds; those marked slow at the end."""

from __future__ import annotations

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.get_closest_marker("slow") is not None)  # stable: files stay together


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    from helpers_sandbox import NOT_RUN

    for tier, why in NOT_RUN.items():
        terminalreporter.write_line(f"NOT RUN: the hostile set on the sandbox {tier!r}: {why}", red=True, bold=True)
