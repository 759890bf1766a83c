"""Data sets of Hugging Face in and out: in memory, and as folders of `save_to_disk`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from datasets import Dataset, DatasetDict, load_from_disk

import mafrt
from mafrt.config.team import Team
from mafrt.core.errors import DataError, MissingExtraError
from mafrt.core.hf_datasets import dataset_rows, is_dataset, write_dataset
from mafrt.envs.code.tasks import load_tasks as load_code
from mafrt.envs.math.tasks import load_tasks
from mafrt.envs.search.questions import load_corpus, load_questions
from mafrt.runners.offline.dataset import read_answers

SUMS = [{"problem": f"{n} + 1?", "answer": str(n + 1), "meta": {"n": n}} for n in range(5)]


def saved(rows, folder):
    made = Dataset.from_list(rows) if isinstance(rows, list) else DatasetDict(
        {name: Dataset.from_list(part) for name, part in rows.items()}
    )  # fmt: skip
    made.save_to_disk(str(folder))
    return folder


def test_tasks_come_from_memory_and_from_a_folder(tmp_path):
    parts = {"train": SUMS[:3], "test": SUMS[3:]}
    folder, one = saved(parts, tmp_path / "parts"), saved(SUMS, tmp_path / "sums")
    for source in (folder, str(folder), load_from_disk(str(folder))):
        assert [task.problem for task in load_tasks(source)] == ["0 + 1?", "1 + 1?", "2 + 1?"]
        assert [task.answer for task in load_tasks(source, split="test")] == ["4", "5"]
    for source in (one, load_from_disk(str(one)), load_from_disk(str(one)).with_format("torch"), folder / "train"):
        assert load_tasks(source, split="test")[1].meta == {"meta": {"n": 1}}
    env = mafrt.make_env("math", dataset_path=load_from_disk(str(one)))
    assert env.num_tasks == 5
    with pytest.raises(DataError, match=r"parts.* has the parts train, test and none of the name validation"):
        load_tasks(folder, split="validation")


def test_the_other_readers_of_tasks(tmp_path):
    questions = saved([{"question": "who?", "golden_answers": ["me", "I"]}], tmp_path / "questions")
    assert load_questions(questions)[0].answers == ("me", "I")
    assert load_corpus(saved([{"id": "1", "title": "T", "text": "words"}], tmp_path / "corpus"))[0].text == "words"
    code = {"task_id": 7, "text": "Write f.", "code": "def f(): return 1", "test_list": ["assert f() == 1"]}
    assert load_code(saved([code], tmp_path / "code"))[0].id == "7"


def test_records_are_those_of_a_file_of_the_same_lines(tmp_path):
    """Fields that some rows lack are none of them, though a data set has a null there."""
    records = [
        {"agent": "ann", "prompt": "a?", "response": "b"},
        {"agent": "bob", "messages": [{"role": "user", "content": "c?"}], "response": "d"},
    ]
    file = tmp_path / "records.jsonl"
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    records = [{**dict.fromkeys(("prompt", "messages")), **record} for record in records]
    team, folder = Team.of(["ann", "bob"]), saved(records, tmp_path / "records")
    expected = [[(a.agent, a.seen, a.text) for a in group] for group in read_answers([file], ("response",), team)]
    for source in (folder, str(folder), Dataset.from_list(records), DatasetDict({"any": Dataset.from_list(records)})):
        found = read_answers([source], ("response",), team)
        assert [[(a.agent, a.seen, a.text) for a in group] for group in found] == expected
    pairs = Dataset.from_list([{"prompt": "p", "chosen": "x", "rejected": "y"}])
    assert [a.text for a in read_answers([pairs], ("chosen", "rejected"), Team.of(["ann"]))[0]] == ["x", "y"]


def test_a_fault_names_the_row(tmp_path):
    rows = [{"agent": "ann", "prompt": "a?", "response": "b"}, {"agent": "eve", "prompt": "a?", "response": "b"}]
    with pytest.raises(DataError, match=r"records, row 2: .*eve"):
        read_answers([saved(rows, tmp_path / "records")], ("response",), Team.of(["ann", "bob"]))
    with pytest.raises(DataError, match=r"data set, row 2: no answer"):
        load_tasks(Dataset.from_list([SUMS[0], {"problem": "?", "answer": "", "meta": {"n": 1}}]))
    with pytest.raises(DataError, match=r"the data set: holds no records"):
        load_tasks(Dataset.from_list(SUMS).select([]))
    with pytest.raises(DataError, match=r"the data set: holds no records"):
        read_answers([Dataset.from_list(rows).select([])], ("response",), None)


@pytest.mark.parametrize("name", ["state.json", "data-00000-of-00001.arrow", "dataset_info.json"])
def test_a_damaged_folder_is_one_sentence(name, tmp_path):
    folder = saved(SUMS, tmp_path / "sums")
    (folder / name).write_bytes(b"{" if name.endswith("json") else b"no arrow")
    with pytest.raises(DataError, match=r"sums cannot be read.*save_to_disk") as caught:
        load_tasks(folder)
    assert "\n" not in str(caught.value)


def test_what_is_no_data_set(tmp_path):
    (tmp_path / "a.jsonl").write_text("{}")
    assert not any(map(is_dataset, (tmp_path, tmp_path / "a.jsonl", "openai/gsm8k", {}, {"a": 1}, [], None)))


def test_a_missing_package_is_one_sentence(tmp_path, monkeypatch):
    folder = saved(SUMS, tmp_path / "sums")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(MissingExtraError, match=r"sums.*needs a package: pip install .*datasets"):
        list(dataset_rows(folder))
    with pytest.raises(MissingExtraError, match="needs a package"):
        write_dataset(SUMS, tmp_path / "new")
    assert not (tmp_path / "new").exists() and isinstance(folder, Path)
