"""DSBench as it lies on disk: found, validated, each problem named; and the built-in tasks."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from helpers_dsbench import tasks_folder
from helpers_extras import need

pd = pytest.importorskip("pandas")
need("sklearn")

from mafrt.core.errors import DataError  # noqa: E402
from mafrt.envs.dsbench import builtin  # noqa: E402
from mafrt.envs.dsbench.records import find_records, load_records  # noqa: E402
from mafrt.scripts import train_dsbench  # noqa: E402

SHARED = Path(__file__).parents[3] / "shared" / "data"


class Disk:
    """A data root in the layout of DSBench, with one sound task that a test then spoils."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.records, self.metrics = [], {}
        self.add("sound")

    def folder(self, name: str) -> Path:
        return self.root / "data/DSBench/data/data_resplit" / name

    def answers(self, name: str) -> Path:
        return self.root / "data/DSBench/data/answers" / name / "test_answer.csv"

    def add(self, name: str, **entry) -> None:
        self.folder(name).mkdir(parents=True)
        self.answers(name).parent.mkdir(parents=True)
        (self.folder(name) / "train.csv").write_text("id,x,y\n1,a,0\n2,b,1\n3,a,1\n")
        (self.folder(name) / "test.csv").write_text("id,x\n4,a\n5,b\n")
        self.answers(name).write_text("id,y\n5,1\n4,0\n")
        self.records.append(
            {
                "prompt": f"Predict y of {name}.",
                "answer": None,
                "metadata": {
                    "task_id": name,
                    "task_type": "data_modeling",
                    "data_type": "classification",
                    "train_file": f"./data/DSBench/data/data_resplit/{name}/train.csv",
                    "test_file": f"./data/DSBench/data/data_resplit/{name}/test.csv",
                    "answer_dir": f"./data/DSBench/data/answers/{name}",
                },
            }
        )
        fields = {"metric": "roc_auc", "task_type": "classification", "target_column": "y", "id_column": "id"}
        self.metrics[name] = {**fields, **entry}

    def write(self, lines: bool = False, name: str = "dsbench_modeling_train.json") -> Path:
        (self.root / "dsbench_task_metrics.json").write_text(json.dumps(self.metrics))
        path = self.root / name
        path.write_text("\n".join(map(json.dumps, self.records)) if lines else json.dumps(self.records))
        return path

    def load(self):
        return load_records(self.write(), self.root)


@pytest.fixture
def disk(tmp_path):
    return Disk(tmp_path)


@pytest.mark.parametrize("lines", [False, True])
def test_a_sound_record_becomes_a_task(disk, lines):
    [task] = load_records(disk.write(lines=lines), disk.root).tasks
    assert (task.id, task.description, task.data_type) == ("sound", "Predict y of sound.", "classification")
    assert task.files == {"train.csv": b"id,x,y\n1,a,0\n2,b,1\n3,a,1\n", "test.csv": b"id,x\n4,a\n5,b\n"}
    assert task.answers.ids == ("5", "4")
    assert task.answers.truth.tolist() == [[1], [0]]


def test_leading_folders_that_are_not_there_are_dropped(disk):
    path = disk.write()
    [task] = load_records(path, disk.root / "data/DSBench/data", disk.root / "dsbench_task_metrics.json").tasks
    assert task.train_path == disk.folder("sound") / "train.csv"


def spoil_encoding(disk, bad="bad"):
    (disk.folder(bad) / "train.csv").write_bytes(b"id,x,y\n1,\xe4,0\n2,b,1\n")


def spoil_header(disk, bad="bad"):
    (disk.folder(bad) / "test.csv").write_bytes(b"id,\xe4\n1,2\n")


def spoil_target(disk, bad="bad"):
    disk.answers(bad).write_text("id,z\n4,1\n5,0\n")


def spoil_train_target(disk, bad="bad"):
    (disk.folder(bad) / "train.csv").write_text("id,x\n1,a\n")


def spoil_id(disk, bad="bad"):
    (disk.folder(bad) / "test.csv").write_text("key,x\n4,a\n5,b\n")


def spoil_rows(disk, bad="bad"):
    disk.answers(bad).write_text("id,y\n4,1\n")


def spoil_ids(disk, bad="bad"):
    disk.answers(bad).write_text("id,y\n4,1\n6,0\n")


def spoil_twice(disk, bad="bad"):
    (disk.folder(bad) / "test.csv").write_text("id,x\n4,a\n4,b\n")


def spoil_leak(disk, bad="bad"):
    (disk.folder(bad) / "test.csv").write_text("id,x,y\n4,a,0\n5,b,1\n")


def spoil_metric(disk, bad="bad"):
    disk.metrics[bad]["metric"] = "roc_acu"


def spoil_no_metric(disk, bad="bad"):
    del disk.metrics[bad]


def spoil_empty(disk, bad="bad"):
    disk.answers(bad).write_text("")


def spoil_no_rows(disk, bad="bad"):
    (disk.folder(bad) / "train.csv").write_text("id,x,y\n")


def spoil_file(disk, bad="bad"):
    (disk.folder(bad) / "test.csv").unlink()


def spoil_answers(disk, bad="bad"):
    disk.answers(bad).unlink()


def spoil_two_answers(disk, bad="bad"):
    disk.answers(bad).rename(disk.answers(bad).parent / "a.csv")
    (disk.answers(bad).parent / "b.csv").write_text("id,y\n4,1\n5,0\n")


def spoil_prompt(disk, bad="bad"):
    disk.records[-1]["prompt"] = " "


def spoil_path(disk, bad="bad"):
    disk.records[-1]["metadata"]["train_file"] = None


def spoil_columns(disk, bad="bad"):
    disk.metrics[bad]["target_column"] = []


def spoil_labels(disk, bad="bad"):
    disk.metrics[bad]["target_column"] = "30_labels"


SPOILT = {
    spoil_encoding: "train.csv is not UTF-8 text",
    spoil_header: "test.csv is not UTF-8 text",
    spoil_target: "has no target column 'y'; it has 'id', 'z'",
    spoil_train_target: "has no target column 'y'; it has 'id', 'x'",
    spoil_id: "has no id column 'id'; it has 'key', 'x'",
    spoil_rows: "the answers do not match the rows of test.csv",
    spoil_ids: "lacks 1 of the ids, such as '5', and has '6' instead",
    spoil_twice: "has 1 of its ids in 'id' more than once",
    spoil_leak: "holds the target 'y' itself",
    spoil_metric: "did you mean 'roc_auc'",
    spoil_no_metric: "no metric is known",
    spoil_empty: "is empty",
    spoil_no_rows: "has column names but no rows",
    spoil_file: "test.csv does not exist",
    spoil_answers: "holds no CSV file; expected test_answer.csv",
    spoil_two_answers: "holds a.csv, b.csv; expected test_answer.csv",
    spoil_prompt: "the record has no prompt",
    spoil_path: "train_file is NoneType None; expected a text",
    spoil_columns: "target_column is list []",
    spoil_labels: "the answers have 1 columns beside the id",
}


@pytest.mark.parametrize("spoil", SPOILT, ids=lambda spoil: spoil.__name__)
def test_a_spoilt_task_is_named_and_skipped(disk, spoil):
    disk.add("bad")
    spoil(disk)
    loaded = disk.load()
    assert [task.id for task in loaded.tasks] == ["sound"]
    [found] = loaded.problems
    assert found.task == "bad"
    assert SPOILT[spoil] in found.what


def test_other_records_that_are_none(disk):
    disk.records += [3, {"prompt": "x"}, disk.records[0]]
    found = disk.load().problems
    assert [problem.task for problem in found] == ["record 2", "record 3", "sound"]
    assert "occurs a second time" in found[2].what


def test_thirty_labels_are_all_columns_beside_the_id(disk):
    disk.add("many", metric="spearman", target_column="2_labels")
    disk.answers("many").write_text("id,p,q\n4,0.5,1\n5,0.7,0\n")
    (disk.folder("many") / "train.csv").write_text("id,x,p,q\n1,a,0.1,0.2\n2,b,0.3,0.1\n")
    task = disk.load().tasks[1]
    assert task.answers.targets == ("p", "q")


def test_fields_of_the_metadata_win(disk):
    disk.records[0]["metadata"] |= {"metric": "f1", "reference_score": 0.9, "baseline_score": 0.25}
    [task] = disk.load().tasks
    assert (task.answers.metric.name, task.answers.reference, task.answers.baseline) == ("f1", 0.9, 0.25)


def test_the_type_comes_from_the_metrics_where_the_record_has_none(disk):
    del disk.records[0]["metadata"]["data_type"]
    disk.metrics["sound"]["task_type"] = "regression"
    [task] = disk.load().tasks
    assert task.data_type == "regression"


def test_files_that_cannot_be_read_at_all(disk):
    path = disk.write()
    path.write_text("[{]")
    with pytest.raises(DataError, match=r"train.json, line 1: is not JSON"):
        load_records(path, disk.root)
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(DataError, match="is not UTF-8"):
        load_records(path, disk.root)
    path.write_text("[]")
    with pytest.raises(DataError, match="holds no records"):
        load_records(path, disk.root)


def test_records_are_found_by_their_names(disk):
    train = disk.write()
    assert find_records(disk.root) == {"train": train.resolve()}
    held_out = disk.write(name="dsbench_modeling_eval.json")
    assert find_records(disk.root) == {"train": train.resolve(), "eval": held_out.resolve()}
    disk.write(name="dsbench_other.json")
    with pytest.raises(DataError, match="holds several files of records"):
        find_records(disk.root)
    with pytest.raises(DataError, match="holds no dsbench"):
        find_records(disk.folder("sound"))


def test_check_names_every_problem(disk, capsys):
    disk.add("bad")
    spoil_metric(disk)
    disk.write()
    assert train_dsbench.main(["--check", "--data_root", str(disk.root)]) == 0
    said = capsys.readouterr().out
    assert "1 of 2 tasks can be used" in said
    assert "sound: classification, roc_auc of y, 2 test rows" in said
    assert "PROBLEM bad: There is no metric 'roc_acu'; did you mean 'roc_auc'?" in said


@pytest.mark.slow
def test_check_names_each_of_many_problems(disk, capsys):
    """A data root with one task of every defect, as somebody may have it after a broken download."""
    for spoil in SPOILT:
        disk.add(spoil.__name__)
        spoil(disk, spoil.__name__)
    disk.add("vast")
    (disk.folder("vast") / "train.csv").write_text("id,x,y\n" + "".join(f"{i},a,{i % 2}\n" for i in range(60_000)))
    disk.write()
    assert train_dsbench.main(["--check", "--data_root", str(disk.root), "--workspace_mib", "1"]) == 0
    said = capsys.readouterr().out
    assert f"1 of {len(SPOILT) + 2} tasks can be used" in said
    problems = dict(re.findall(r"^  PROBLEM (\w+): (.*)$", said, re.MULTILINE))
    assert list(problems) == [*(spoil.__name__ for spoil in SPOILT), "vast"]
    assert all(why in problems[spoil.__name__] for spoil, why in SPOILT.items())
    assert "raise --workspace_mib above twice that" in problems["vast"]


def test_nothing_left_is_refused(disk, capsys):
    disk.metrics["sound"]["metric"] = "nonsense"
    disk.write()
    assert train_dsbench.main(["--check", "--data_root", str(disk.root)]) == 2
    assert train_dsbench.main(["--data_root", str(disk.root), "--run_dir", str(disk.root / "run")]) == 2
    said = capsys.readouterr().err
    assert "none of the tasks of" in said
    assert "the first one: sound: There is no metric 'nonsense'" in said
    assert not (disk.root / "run").exists()


def test_the_real_records_are_read(tmp_path, capsys):
    """The real file of records with tables made to fit: all of it is found, and what is missing is named."""
    source = SHARED / "dsbench_modeling_6.json"
    if not source.exists():
        pytest.skip(f"{source} is not here")
    (tmp_path / source.name).write_bytes(source.read_bytes())
    (tmp_path / "dsbench_task_metrics.json").write_bytes((SHARED / "dsbench_task_metrics.json").read_bytes())
    records = json.loads(source.read_text())
    metrics = json.loads((SHARED / "dsbench_task_metrics.json").read_text())
    for record in records[:-1]:
        meta, entry = record["metadata"], metrics[record["metadata"]["task_id"]]
        targets = [entry["target_column"]] if isinstance(entry["target_column"], str) else entry["target_column"]
        ids = [f"{i}" for i in range(30)]
        values = {
            name: [i * 7 % 3 if entry["task_type"] == "classification" else i * 1.5 for i in range(30)]
            for name in targets
        }
        if entry["metric"] in ("roc_auc", "normalized_gini"):
            values = {name: [i % 2 for i in range(30)] for name in targets}
        table = pd.DataFrame({entry["id_column"]: ids, "x": range(30), **values})
        for key, part in (("train_file", table), ("test_file", table.drop(columns=targets))):
            (tmp_path / meta[key]).parent.mkdir(parents=True, exist_ok=True)
            part.to_csv(tmp_path / meta[key], index=False)
        (tmp_path / meta["answer_dir"]).mkdir(parents=True)
        table.drop(columns="x").to_csv(tmp_path / meta["answer_dir"] / "test_answer.csv", index=False)
    loaded = load_records(tmp_path / source.name, tmp_path)
    assert [task.id for task in loaded.tasks] == [record["metadata"]["task_id"] for record in records[:-1]]
    assert [problem.task for problem in loaded.problems] == [records[-1]["metadata"]["task_id"]]
    assert "does not exist" in loaded.problems[0].what


def synthetic(entry, rows=30):
    """A table that the entry of a task could stand for: its id, a feature, a text, and its targets."""
    metric, targets = entry["metric"], entry["target_column"]
    if targets == "30_labels":
        targets = [f"label_{i}" for i in range(30)]
    targets = [targets] if isinstance(targets, str) else targets
    classes = entry["task_type"] == "classification" or metric in ("roc_auc", "f1", "log_loss")

    def values(shift):
        if metric == "jaccard":
            return [f"word{i % 5} and more" for i in range(rows)]
        if metric in ("map_at_3", "accuracy", "f1_micro") and len(targets) == 1:
            return [("red", "green", "dark blue")[i % 3] for i in range(rows)]
        if metric in ("qwk", "quadratic_weighted_kappa"):
            return [i % 5 for i in range(rows)]
        return (
            [(i + shift) % 2 for i in range(rows)] if classes else [(i * (shift + 3)) % 17 * 0.5 for i in range(rows)]
        )

    table = {entry["id_column"]: [f"2021-01-{i + 1:02d} 00:00:00" for i in range(rows)], "x": range(rows)}
    table |= {"words": [f"word{i % 5} and more" for i in range(rows)]}
    return pd.DataFrame({**table, **{name: values(shift) for shift, name in enumerate(targets)}}), targets


@pytest.mark.slow
def test_every_task_that_has_a_metric_can_be_used(disk, capsys):
    """All tasks of the real file of metrics, in the layout of the data set, with tables made to fit."""
    source = SHARED / "dsbench_task_metrics.json"
    if not source.exists():
        pytest.skip(f"{source} is not here")
    entries = json.loads(source.read_text())
    disk.records, disk.metrics = [], {}
    for name, entry in entries.items():
        disk.add(name, **entry)
        disk.records[-1]["metadata"]["data_type"] = entry["task_type"]
        table, targets = synthetic(entry)
        table.to_csv(disk.folder(name) / "train.csv", index=False)
        table.drop(columns=targets).to_csv(disk.folder(name) / "test.csv", index=False)
        table[[entry["id_column"], *targets]].to_csv(disk.answers(name), index=False)
    disk.write()
    assert train_dsbench.main(["--check", "--data_root", str(disk.root)]) == 0
    said = capsys.readouterr().out
    assert f"{len(entries)} of {len(entries)} tasks can be used" in said
    assert len(re.findall(r"^  [\w.-]+: \w+, \w+ of .* 30 test rows", said, re.MULTILINE)) == len(entries)


# The built-in tasks.


@pytest.fixture(scope="module")
def folder():
    return tasks_folder()


@pytest.mark.slow
def test_the_builtin_tasks_are_what_they_are_said_to_be(folder):
    train, chosen_by, test = (builtin.builtin_tasks(split, folder) for split in ("train", "validation", "eval"))
    assert (len(train), len(chosen_by), len(test)) == (18, 6, 8)
    held_out = (*chosen_by, *test)
    assert len({task.id for task in (*train, *held_out)}) == 32
    for tasks in (train, chosen_by, test):
        assert {task.data_type for task in tasks} == {"classification", "regression"}
    assert len({task.answers.metric.name for task in (*train, *held_out)}) >= 12
    content = b"".join(task.files["train.csv"] for task in (*train, *held_out))
    assert b",," in content  # missing values
    assert b"2021-0" in content and b".2021," in content  # dates in two writings
    for task in (*train, *held_out):
        # There is something to learn, and the reference has learnt it.
        assert task.answers.reference is not None
        assert task.answers.metric.better(task.answers.reference, task.answers.baseline)


def test_they_are_made_once_and_equal_everywhere(folder, tmp_path):
    first = builtin.ensure(folder)
    stamp = first.stat().st_mtime_ns
    assert builtin.ensure(folder) == first
    assert first.stat().st_mtime_ns == stamp
    task = builtin.BUILTIN[3]
    for left, right in zip(builtin.tables(task), builtin.tables(task), strict=True):
        pd.testing.assert_frame_equal(left, right)
    made = (first / "data_resplit" / task.id / "train.csv").read_text()
    assert made == builtin.tables(task)[0].to_csv(index=False, lineterminator="\n")
    assert not list(folder.glob(".dsbench*"))  # nothing half made is left behind


def test_a_cache_that_cannot_be_written_is_said_so(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="set MAFRT_CACHE to a folder that can"):
        builtin.ensure(tmp_path / "file")
