"""Programs that read nothing are worth little on the built-in tasks, and each task's own right programs nearly all."""

from __future__ import annotations

import pytest
from helpers_dsbench import tasks_folder
from helpers_extras import need
from helpers_sandbox import ensure_bubblewrap

from bench.reproduce import dsbench_constants as constants
from mafrt.envs.dsbench.builtin import builtin_tasks
from mafrt.envs.dsbench.builtin_tables import BUILTIN
from mafrt.envs.dsbench.demonstrations import COLUMNS, good

need("pandas", "sklearn")

pytestmark = pytest.mark.takes(slow=50)


@pytest.fixture(scope="module")
def held_out():
    ensure_bubblewrap()
    return builtin_tasks("eval", tasks_folder())


def test_programs_cover_the_right_ones_of_every_task(held_out):
    programs = constants.fixed_programs()
    for task in held_out:
        assert set(good(task).values()) <= {*programs.engineer, *programs.modeler, *programs.analyst}


def test_no_two_choices_are_enough_for_half_of_the_held_out_tasks():
    held_out = [task for task in BUILTIN if task.split == "eval"]
    assert len({(task.position, task.form, task.metric) for task in BUILTIN}) == len(
        {(task.position, task.form, task.metric) for task in BUILTIN if task.split == "train"}
    ) + len([task for task in BUILTIN if task.split != "train"])
    trained = {(task.position, task.form, task.metric) for task in BUILTIN if task.split == "train"}
    assert trained.isdisjoint((task.position, task.form, task.metric) for task in held_out)
    positions = [task.position for task in held_out]
    assert max(map(positions.count, positions)) <= 2 and set(positions) == set(COLUMNS)
    for choice in ("position", "form"):
        kinds = {getattr(task, choice) for task in BUILTIN if task.split == "train"}
        assert {getattr(task, choice) for task in held_out} <= kinds


@pytest.mark.slow
@pytest.mark.ci
def test_on_two_tasks_nothing_but_the_right_triple_is_worth_much(held_out):
    """`street-air` (drop 2, linear, numbers) and `heart-risk` (drop 1, power, probabilities)."""
    tasks = [task for task in held_out if task.id in ("street-air", "heart-risk")]
    engineers = tuple(good(task)["data_engineer"] for task in tasks)
    programs = constants.Programs(engineers, ("Solve(2)", "Solve(3)"), ("Write(Give())", "Write(Conclude())"))
    found = constants.constant_scores(tasks, programs, "bwrap")
    assert all(worth >= 0.9 for worth in constants.right(found, tasks).values())
    best, _ = constants.means(found)[0]
    assert best == pytest.approx(0.5, abs=0.1)  # one of the two tasks, and hardly anything of the other
    for task in tasks:
        wrong = [worth for (engineer, _, _), worth in found[task.id].items() if engineer != good(task)["data_engineer"]]
        assert max(wrong) < 0.3


@pytest.mark.nightly
@pytest.mark.ci
@pytest.mark.slow
def test_no_fixed_programs_score_above_half_on_the_held_out_tasks(held_out):
    found = constants.constant_scores(held_out, constants.fixed_programs(), "bwrap")
    best, triple = constants.means(found)[0]
    print(constants.table(found, constants.right(found, held_out)))
    assert len(found[held_out[0].id]) == 112
    assert best <= 0.5, triple
    assert all(worth >= 0.9 for worth in constants.right(found, held_out).values())
