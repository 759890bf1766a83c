"""Side by side, the fast tests of a file are one unit of work and its slow tests another."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from conftest import pytest_collection_modifyitems
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


class Listed(SimpleNamespace):
    """A test with its marks."""

    __hash__ = object.__hash__  # type: ignore[assignment]

    def get_closest_marker(self, name: str) -> SimpleNamespace | None:
        return self.marks.get(name)

    def add_marker(self, mark: pytest.MarkDecorator) -> None:
        self.marks = {**self.marks, mark.name: mark}


def test_the_longest_files_come_first_among_the_fast_tests_and_among_the_slow_ones():
    takes = SimpleNamespace(kwargs={"fast": 5, "slow": 90})
    other = SimpleNamespace(kwargs={"fast": 30})
    listed = [
        Listed(name="short", marks={}),
        Listed(name="slow and short", marks={"slow": True, "takes": other}),
        Listed(name="fast of a long file", marks={"takes": takes}),
        Listed(name="slow of a long file", marks={"slow": True, "takes": takes}),
        Listed(name="longest of the fast", marks={"takes": other}),
    ]
    alone, side_by_side = list(listed), list(listed)
    pytest_collection_modifyitems(SimpleNamespace(workerinput={}, getoption=lambda name: False), side_by_side)  # type: ignore[arg-type]
    assert [one.name for one in side_by_side] == [
        *("longest of the fast", "fast of a long file", "short"),
        *("slow of a long file", "slow and short"),
    ]
    pytest_collection_modifyitems(SimpleNamespace(getoption=lambda name: False), alone)  # type: ignore[arg-type]
    assert [one.name for one in alone][:3] == ["short", "fast of a long file", "longest of the fast"]


def chosen(marks: dict[str, object], count: int, *, without_ci: bool = False) -> list[int]:
    """Numbers of the cases that run with --few-cases; `without_ci`: of these, those that are not left to CI."""
    listed = [Listed(nodeid=f"a.py::test[{n}]", marks=marks) for n in range(count)]
    whole, left_out = list(listed), list[Listed]()
    hook = SimpleNamespace(pytest_deselected=lambda items: left_out.extend(items))
    config = SimpleNamespace(getoption=lambda name: name == "few_cases", hook=hook)
    pytest_collection_modifyitems(config, listed)  # type: ignore[arg-type]
    assert len(left_out) + len(listed) == count
    return [n for n, case in enumerate(whole) if case in listed and not (without_ci and "ci" in case.marks)]


def test_some_cases_run_of_slow_tests_and_of_those_that_say_how_many():
    def cases(*given):
        return SimpleNamespace(args=given)

    assert (
        chosen({"slow": True}, 5) == [0, 4] and chosen({"slow": True}, 1) == [0] and chosen({"slow": True}, 2) == [0, 1]
    )
    assert chosen({}, 5) == chosen({"slow": True, "cases": cases()}, 5) == [0, 1, 2, 3, 4]
    for count in range(1, 40):
        for number in range(1, count + 3):
            ran = chosen({"cases": cases(number)}, count)
            assert len(ran) == min(number, count) and 0 in ran
            assert ran == chosen({"slow": True, "cases": cases(number)}, count)


def test_every_other_case_of_a_slow_test_is_left_to_ci_unless_all_have_to_run():
    def cases(*given):
        return SimpleNamespace(args=given)

    assert chosen({"slow": True}, 5, without_ci=True) == chosen({"slow": True}, 1, without_ci=True) == [0]
    assert chosen({"slow": True, "cases": cases(4)}, 4, without_ci=True) == [0, 2]
    for marks in ({"slow": True, "cases": cases()}, {"cases": cases(4)}, {}):
        assert chosen(marks, 9, without_ci=True) == chosen(marks, 9)


def test_the_chosen_cases_of_a_product_hold_every_value_of_each_list():
    ran = chosen({"cases": SimpleNamespace(args=(18,))}, 36)  # 18 checks by 2 programs
    assert {n % 18 for n in ran} == set(range(18)) and [n // 18 for n in ran].count(0) == 9
    ran = chosen({"cases": SimpleNamespace(args=(12,))}, 240)  # 12 values by 20
    assert {n % 12 for n in ran} == set(range(12)) and len({n // 12 for n in ran}) >= 10
