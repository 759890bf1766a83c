"""Story problems: every one solvable as its demonstration says, and held out by template and by number."""

from __future__ import annotations

import dataclasses
import itertools

import pytest

from mafrt.core.errors import DataError
from mafrt.envs.math import process_rewards, verify
from mafrt.envs.math.stories import COUNTS, RANGES, distinct
from mafrt.envs.math.story_templates import SPLITS, templates
from mafrt.envs.math.story_templates import sentences as scenes_of
from mafrt.envs.math.tasks import load_tasks


@pytest.mark.parametrize("split", list(SPLITS))
def test_demonstrations_solve_their_problems(split):
    for story in distinct(split, 150):
        assert process_rewards.carried_out(story.plan) == story.answer, story
        assert verify(story.solution, str(story.answer)), story
        assert all(number >= 2 for number in (story.start, *(n for _, n in story.steps)))
        assert all(value >= 1 for value in story.values)


def test_by_hand():
    story = next(s for s in distinct("train", 200) if [sign for sign, _ in s.steps] == ["-", "+"])
    (_, first), (_, second) = story.steps
    middle = story.start - first
    assert story.answer == middle + second
    assert story.plan == f"Subtract {first} from {story.start}, then add {second}."
    assert story.solution == (
        f"{story.start}-{first}={middle} {middle}+{second}={middle + second} \\boxed{{{middle + second}}}"
    )


def texts(split):
    return {text for kinds in templates(split).values() for texts in kinds for text in texts}


def sentences(scenes):
    return {text for part in dataclasses.astuple(dataclasses.replace(scenes, texts={})) for text in part}


def test_splits_share_neither_templates_nor_numbers():
    for one, other in itertools.combinations(SPLITS, 2):
        assert not texts(one) & texts(other)
        if {one, other} != {"test", "new"}:
            assert not set(RANGES[one]) & set(RANGES[other])
    assert not sentences(scenes_of("known")) & sentences(scenes_of("new"))
    # Every sentence of a held-out template stands in templates of training, in another sequence.
    for held_out in ("validation", "test"):
        for operations, (_, composed) in templates(held_out).items():
            shown = " ".join(templates("train")[operations][1])
            assert all(sentence in shown for text in composed for sentence in text.split(". "))
    for split in SPLITS:
        for story in distinct(split, 150):
            sign, number = story.steps[0]
            largest = story.values[0] if sign in "+*" else story.start
            assert largest in RANGES[split], (story, number)


def test_named_as_a_data_set():
    tasks = load_tasks("stories:validation")
    assert len(tasks) == len({task.problem for task in tasks}) == COUNTS["validation"]
    assert tasks == load_tasks("stories:validation") and tasks[0].id == "stories:validation:0"
    with pytest.raises(DataError, match="expected stories:train, stories:validation, stories:test, stories:new"):
        load_tasks("stories:dev")
