"""Data sets as they come: half surrogate pairs, NULs, endless nesting, pipes and devices, for every reader of them."""

from __future__ import annotations

import gzip
import json
import os
import time

import pytest
from test_dsbench_records import Disk

from mafrt.core.errors import DataError, MafrtError
from mafrt.core.text import clean_text
from mafrt.envs import code, data_files, math
from mafrt.envs.dsbench.records import load_records
from mafrt.envs.dsbench.tables import header_of, read_columns
from mafrt.runners.offline.dataset import read_answers
from mafrt.runners.offline.replay import read_episodes

pytest.importorskip("pandas")

DEEP = '{"a":' * 100_000 + "1" + "}" * 100_000
LESS_DEEP = '{"a":' * 300 + "1" + "}" * 300
BAD = "x\ud83d\x00\x1b[31m\x85"
CLEAN = "x\ufffd\ufffd\ufffd[31m\x85"

MATH = {"problem": f"Add 1 and 2. {BAD}", "answer": f"3{BAD[1:3]}", f"note{BAD}": [BAD]}
MBPP = {
    "task_id": f"t{BAD}",
    "text": f"Add. {BAD}",
    "code": f"# {BAD}\ndef add(a, b):\n    return a + b",
    "test_list": [f"assert add(1, 2) == 3, '{BAD[1]}'"],
}
APPS = {
    "question": BAD,
    "input_output": json.dumps({"inputs": [BAD], "outputs": [BAD]}),
    "solutions": json.dumps([f"print(1) # {BAD}"]),
}
PAIR = {"agent": "solver", "prompt": BAD, "chosen": BAD, "rejected": "b"}


def texts_of(value):
    """Every text within lists, tuples, dicts and dataclasses."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, entry in value.items():
            yield from texts_of(key)
            yield from texts_of(entry)
    elif isinstance(value, (list, tuple)):
        for entry in value:
            yield from texts_of(entry)
    elif hasattr(value, "__dataclass_fields__"):
        for name in value.__dataclass_fields__:
            yield from texts_of(getattr(value, name))


def load_math(path):
    return math.load_tasks(path)


def load_code(path):
    return code.load_tasks(path)


def load_pairs(path):
    return read_answers([path], ("chosen", "rejected"), None)


READERS = {"math": (load_math, MATH), "mbpp": (load_code, MBPP), "apps": (load_code, APPS), "pairs": (load_pairs, PAIR)}


@pytest.mark.parametrize("reader", READERS)
def test_texts_of_a_data_set_are_valid_unicode(tmp_path, reader):
    load, record = READERS[reader]
    path = tmp_path / "data.jsonl"
    path.write_text(json.dumps(record) + "\n")
    loaded = load(path)
    texts = list(texts_of(loaded))
    assert any("\ufffd" in text for text in texts)
    assert all(text == clean_text(text) for text in texts)
    json.dumps(texts, ensure_ascii=False).encode()


def test_texts_of_whole_json_are_valid_unicode(tmp_path):
    path = tmp_path / "data.json"
    path.write_text(json.dumps({"rows": [MATH]}))
    [task] = math.load_tasks(path)
    assert task.problem == f"Add 1 and 2. {CLEAN}".strip()
    assert task.meta == {f"note{CLEAN}": [CLEAN]}


@pytest.mark.parametrize(
    "line", [DEEP, LESS_DEEP, "[" * 100_000, '{"answer": ' + "9" * 5000 + "}", '{"problem": "\\ud8', "\x00"]
)
@pytest.mark.parametrize("reader", READERS)
def test_a_line_that_cannot_be_used_is_one_sentence(tmp_path, reader, line):
    load, record = READERS[reader]
    path = tmp_path / "data.jsonl"
    path.write_text(f"{json.dumps(record)}\n{line}\n")
    with pytest.raises(DataError, match="line 2: ") as caught:
        load(path)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 800


def test_whole_json_that_cannot_be_used_is_one_sentence(tmp_path):
    path = tmp_path / "data.json"
    for text in (DEEP, f"[{DEEP}]", '{"a": 1, "a": 2}', "9" * 5000):
        path.write_text(text)
        with pytest.raises(DataError, match="is not JSON that can be used"):
            math.load_tasks(path)
        with pytest.raises(DataError, match="is not JSON that can be used"):
            load_records(path, tmp_path)


def test_fields_of_unexpected_kinds_are_one_sentence(tmp_path):
    path = tmp_path / "data.jsonl"
    chain = "+".join(["1"] * 5000)
    for record in (
        {**APPS, "input_output": DEEP},
        {**APPS, "input_output": LESS_DEEP},
        {**MBPP, "test_imports": [1, None], "test_list": ["assert ("]},
        {**MBPP, "code": f"def add(a, b={chain}): pass", "test_list": ["assert ("]},
    ):
        path.write_text(json.dumps(record))
        with pytest.raises(DataError, match="line 1: "):
            code.load_tasks(path)
    chain = "+".join(["1"] * 900)  # Python reads it, but may not be able to write it
    path.write_text(json.dumps({**MBPP, "code": f"def add(a, b={chain}):\n    return a + b"}))
    code.load_tasks(path)


HUMAN_EVAL = {
    "task_id": "HumanEval/0",
    "prompt": "def add(a, b):\n",
    "entry_point": "add",
    "test": "def check(candidate):\n    assert candidate(1, 2) == 3",
}


@pytest.mark.parametrize(("load", "record"), [(load_math, {"problem": "1+2", "answer": "3"}), (load_code, HUMAN_EVAL)])
def test_public_sets_are_read_in_every_form_in_which_they_lie(tmp_path, load, record):
    """HumanEval lies as .jsonl.gz, MBPP's sanitized part as .json, others as Parquet."""
    import pyarrow
    from pyarrow import parquet

    line = json.dumps(record).encode()
    forms = {"a.jsonl": line, "a.jsonl.gz": gzip.compress(line), "a.json": b"[%b]" % line}
    forms["A.JSON.GZ"] = gzip.compress(forms["a.json"])
    for name, content in forms.items():
        (tmp_path / name).write_bytes(content)
    parquet.write_table(pyarrow.Table.from_pylist([record]), tmp_path / "a.parquet")
    found = [load(tmp_path / name)[0] for name in (*forms, "a.parquet")]
    assert all(len(load(tmp_path / name)) == 1 for name in forms)
    assert len({getattr(task, "problem", None) or task.statement for task in found}) == 1


def test_a_packed_folder_is_read_file_by_file(tmp_path):
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(b'{"problem": "1+2", "answer": "3"}'))
    assert [task.id for task in math.load_tasks(tmp_path)] == ["a.jsonl.gz:0"]


def test_packed_records_are_learnt_from(tmp_path):
    (tmp_path / "a.jsonl.gz").write_bytes(packed := gzip.compress(b'{"prompt": "1+2", "response": "3"}'))
    assert [answer.text for (answer,) in read_answers([tmp_path / "a.jsonl.gz"], ("response",), None)] == ["3"]
    (tmp_path / "cut.jsonl.gz").write_bytes(packed[:20])
    with pytest.raises(DataError, match=r"cut.jsonl.gz cannot be unpacked by gzip"):
        read_answers([tmp_path / "cut.jsonl.gz"], ("response",), None)


def test_a_packed_file_that_cannot_be_used_is_one_sentence(tmp_path, monkeypatch):
    path, whole = tmp_path / "x.jsonl.gz", gzip.compress(b" " * 3 * 2**20)
    for broken in (whole[: len(whole) // 2], b"\x1f\x8b nonsense", whole[:-8] + b"12345678"):
        path.write_bytes(broken)
        with pytest.raises(DataError, match="cannot be unpacked"):
            code.load_tasks(path)
    path.write_bytes(whole)
    monkeypatch.setattr(data_files, "MOST_MIB", 2)  # three MiB in three KiB
    with pytest.raises(DataError, match="larger than 2 MiB when unpacked"):
        math.load_tasks(path)


# ------------------------------------------------------------------------------------------------------------- DSBench


def test_texts_of_dsbench_records(tmp_path):
    disk = Disk(tmp_path)
    disk.records[0]["prompt"] = BAD
    disk.records[0]["metadata"]["note"] = {BAD: [BAD]}
    [task] = load_records(disk.write(lines=True), disk.root).tasks
    assert task.description == CLEAN.strip()
    assert all(text == clean_text(text) for text in texts_of([task.description, dict(task.meta)]))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"train_file": "a\x00\ud83d"}, "does not exist"),
        ({"task_id": "x\ud83d"}, "no metric is known"),
        ({"train_file": "a" * 9000}, "cannot be read"),
        ({"train_file": {"a": 1}}, "expected a text"),
        ({"baseline_score": 10**400}, "baseline_score is int 1000"),
        ({"baseline_score": float("inf")}, "expected a finite number"),
        ({"baseline_score": True}, "expected a finite number"),
        ({"note": json.loads(LESS_DEEP)}, "nested deeper"),
    ],
)
def test_a_record_that_cannot_be_used_is_skipped(tmp_path, change, says):
    disk = Disk(tmp_path)
    disk.add("other")
    disk.records[1]["metadata"].update(change)
    loaded = load_records(disk.write(), disk.root)
    assert [task.id for task in loaded.tasks] == ["sound"]
    [problem] = loaded.problems
    assert says in str(problem) and len(str(problem)) < 400
    str(problem).encode()


def test_tables_with_control_characters(tmp_path):
    path = tmp_path / "t.csv"
    path.write_bytes(b"id,x\x1b\n1,a\x00b\n2,c\x07\n")
    assert header_of(path) == ["id", "x\ufffd"]
    cells = read_columns(path, ["x\ufffd"])["x\ufffd"].tolist()
    assert all(cell == clean_text(cell) for cell in cells) and cells[1] == "c\ufffd"


# ---------------------------------------------------------------------------------------------------- pipes and devices


def load_dsbench(path):
    return load_records(path, path.parent)


def load_run(path):
    """As a run directory whose record of episodes this is."""
    path.rename(path.parent / "episodes.jsonl")
    return read_episodes(path.parent, None)


@pytest.mark.parametrize("kind", ["pipe", "zero", "folder"])
@pytest.mark.parametrize(
    ("load", "suffix"),
    [
        *((load_math, suffix) for suffix in ("jsonl", "json", "parquet")),
        *((load, "jsonl") for load in (load_code, load_dsbench, load_pairs, load_run)),
        (header_of, "csv"),
    ],
)
def test_only_regular_files_are_read(tmp_path, load, suffix, kind):
    path = tmp_path / f"x.{suffix}"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "zero":
        path.symlink_to("/dev/zero")
    else:
        path.mkdir()
    started = time.monotonic()
    with pytest.raises(MafrtError) as caught:
        load(path)
    assert time.monotonic() - started < 300 and "\n" not in str(caught.value)  # else it waits, or reads, without end


def test_a_pipe_among_the_tables_of_a_task_is_skipped(tmp_path):
    disk = Disk(tmp_path)
    disk.add("piped")
    for name in ("train.csv", "test.csv"):
        (disk.folder("piped") / name).unlink()
        os.mkfifo(disk.folder("piped") / name)
    loaded = load_records(disk.write(), disk.root)
    assert len(loaded.tasks) == 1 and "is no file" in str(loaded.problems[0])


def test_golden_answers_of_a_search_file_are_read_where_there_is_one(tmp_path):
    """As verl's data sets of questions hold them: `reward_model.ground_truth.target`, a list."""
    path = tmp_path / "x.jsonl"
    record = {"question": "What is 2 + 2?", "reward_model": {"ground_truth": {"target": ["4"]}}}
    path.write_text(json.dumps(record))
    [task] = math.load_tasks(str(path))
    assert task.answer == "4"
    record["reward_model"]["ground_truth"]["target"].append("four")
    path.write_text(json.dumps(record))
    with pytest.raises(DataError, match="neither one text nor one number"):
        math.load_tasks(str(path))
