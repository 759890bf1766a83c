"""Side by side, the fast tests of a file are one unit of work and its slow tests another."""

from __future__ import annotations

from types import SimpleNamespace

from helpers_schedule import FileRuns

LISTED = ["a.py::one", "a.py::two[x::y]", "a.py::three", "b.py::one", "b.py::two", "b.py::three", "a.py::slow"]


class Node:
    """A process that is told the numbers of its tests."""

    shutting_down = False
    gateway = SimpleNamespace(id="")

    def __init__(self) -> None:
        self.told: list[int] = []

    def send_runtest_some(self, numbers: list[int]) -> None:
        self.told += numbers

    def shutdown(self) -> None:
        self.shutting_down = True


def test_fast_and_slow_tests_of_a_file_are_given_out_apart():
    option = SimpleNamespace(loadscopereorder=False)
    config = SimpleNamespace(option=option, getvalue=lambda name: ["popen", "popen"])
    schedule, nodes = FileRuns(config), [Node(), Node()]
    for node in nodes:
        schedule.add_node(node)  # type: ignore[arg-type]
        schedule.add_node_collection(node, LISTED)  # type: ignore[arg-type]
    schedule.schedule()
    assert [node.told for node in nodes] == [[0, 1, 2], [3, 4, 5]]
    schedule.mark_test_complete(nodes[1], 3)
    assert nodes[1].told == [3, 4, 5, 6]
    for number in (0, 1, 2):
        schedule.mark_test_complete(nodes[0], number)
    for number in (4, 5):
        schedule.mark_test_complete(nodes[1], number)
    assert schedule.tests_finished and nodes[0].told == [0, 1, 2]
