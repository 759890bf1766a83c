"""Order, and imports shared by the processes of a run.

The fast tests come first, so that a mistake shows within seconds. Side by side the longest files come first among the
fast tests and again among the slow ones, as they say by `pytestmark = pytest.mark.takes(...)`, and one process runs the
fast tests of a file, one (perhaps another) its slow tests: they share servers and trained runs.
"""

from __future__ import annotations

import functools
import gc
import math
import os
import shlex
import ssl
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from helpers_left import children, end
from helpers_warm import ADDRESS, RUNNING, WORKER, start_server

# Another program may have the core for longer than any deadline of a single example.
hypothesis.settings.register_profile("busy machine", deadline=None)
hypothesis.settings.load_profile("busy machine")

# On every processor the kernels in C are tested, also where torch is faster and is taken by default.
os.environ.setdefault("MAFRT_KERNELS", "c")

# No test takes the machine's power: what a killed process has written stays, and the disk need not be waited for.
os.fsync = lambda descriptor: None

# Every client of a server reads all certificates of the machine; here they are read once per process.
ssl.create_default_context = functools.cache(ssl.create_default_context)

STARTED: dict[str, tuple[tempfile.TemporaryDirectory, subprocess.Popen]] = {}
"""The process that holds the imports for all processes of this run, and the folder of its socket."""

NOT_RUN: dict[str, str] = {}
"""Sandbox tier -> why its hostile set could not run, of all processes that run tests."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--few-cases", action="store_true", help="run some cases of long tests, evenly chosen")


def pytest_configure(config: pytest.Config) -> None:
    # Side by side the files of tests are imported once. Coverage has to see the imports, so then each imports its own.
    if config.getoption("numprocesses", None) and not config.pluginmanager.hasplugin("_cov"):
        folder = tempfile.TemporaryDirectory()
        os.environ[ADDRESS] = f"{folder.name}/server"
        STARTED["server"] = folder, start_server(sys.executable, Path(os.environ[ADDRESS]), *config.args)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    if config.getoption("dist") != "loadfile":
        return None
    from helpers_schedule import FileRuns

    return FileRuns(config, log)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(specs: list[Any]) -> None:
    for spec in specs if STARTED else ():
        spec.python = shlex.join([sys.executable, "-E", str(WORKER), ".tests"])


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("few_cases"):
        tests: dict[str, list[pytest.Item]] = {}
        for item in items:
            tests.setdefault(item.nodeid.partition("[")[0], []).append(item)
        left_out = set[pytest.Item]()
        for cases in tests.values():
            chosen, mark = _some(cases), cases[0].get_closest_marker("cases")
            left_out |= set(cases) - set(chosen)
            if _slow(cases[0]) and (mark is None or mark.args):
                for case in chosen[1::2]:
                    case.add_marker(pytest.mark.ci)
        config.hook.pytest_deselected(items=list(left_out))
        items[:] = [item for item in items if item not in left_out]
    items.sort(key=lambda item: (_slow(item), -_takes(item) if hasattr(config, "workerinput") else 0))


def pytest_collection_finish() -> None:
    # Modules and tests live until the end: collections need not look at them again.
    gc.collect()
    gc.freeze()


@pytest.hookimpl(trylast=True)
def pytest_unconfigure() -> None:
    gc.unfreeze()  # libraries with nanobind report objects that are never collected as leaks


def _slow(item: pytest.Item) -> bool:
    return item.get_closest_marker("slow") is not None


def _some(cases: list[pytest.Item]) -> list[pytest.Item]:
    """As many as the mark `cases` says, all without a number; of a slow test without it the first and the last.

    Every other one of a slow test is marked `ci` then, unless they are all.

    Steps of .62 of the list that share no factor with its length: of a product of lists, values of each list come up
    equally often.
    """
    mark = cases[0].get_closest_marker("cases")
    if mark is None:
        return cases[:: max(len(cases) - 1, 1)] if _slow(cases[0]) else cases
    count, number = len(cases), mark.args[0] if mark.args else len(cases)
    step = next(step for step in range(round(0.618 * count), count + 2) if math.gcd(step, count) == 1)
    chosen = {n * step % count for n in range(min(number, count))}
    return [case for n, case in enumerate(cases) if n in chosen]


def _takes(item: pytest.Item) -> float:
    """Seconds that the fast or the slow tests of its file take, as far as the file says so: the longest come first."""
    mark = item.get_closest_marker("takes")
    return mark.kwargs.get("slow" if _slow(item) else "fast", 0) if mark else 0


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


@pytest.fixture(autouse=True)
def same_environment() -> Iterator[None]:
    """What a test leaves in the process's environment would reach the processes that later tests start."""
    before = dict(os.environ)
    yield
    for name in os.environ.keys() - before.keys():
        del os.environ[name]
    os.environ.update({name: value for name, value in before.items() if os.environ.get(name) != value})


FAILED = pytest.StashKey[bool]()
"""of a test: whether what has run of it so far has failed"""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    report: Any = yield
    item.stash[FAILED] = report.failed or (call.when != "setup" and item.stash.get(FAILED, False))
    return report


@pytest.fixture(autouse=True)
def no_process_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """A test that fails seldom comes to the lines that end its processes; they would slow down all tests after it."""
    warm, others = set(RUNNING), children()
    yield
    for process in RUNNING - warm:
        process.kill()
    if request.node.stash.get(FAILED, False):  # otherwise a library may keep a worker for its next call
        for pid in children() - others:
            end(pid)


@pytest.fixture
def same_threads() -> Iterator[None]:
    """Benchmarks choose the number of torch's threads for the whole process."""
    import torch

    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)
