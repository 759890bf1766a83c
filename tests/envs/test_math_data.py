"""Readers of math data: real records as people have them, and files that cannot be used."""

from __future__ import annotations

import json
import os
import sys
import types
from pathlib import Path

import pytest
from huggingface_hub import constants

from mafrt.core.errors import DataError, MissingExtraError
from mafrt.envs.math import MathEnv, Task, find_leaks, load_tasks, verify_many
from mafrt.envs.math.contamination import normalise
from mafrt.envs.math.tasks import answer_text

SHARED = Path(__file__).parents[3] / "shared" / "data"
real_records = pytest.mark.skipif(
    not SHARED.is_dir(), reason=f"the excerpts of public data sets are not there: {SHARED}"
)


@real_records
@pytest.mark.parametrize(
    ("name", "count", "first", "last"),
    [
        ("math_train_200.json", 200, "20\\text{ days}", "7"),
        ("gsm8k_train_200.jsonl", 200, "34", "1000"),
        ("gsm8k_test_50.parquet", 50, "18", "30"),
        ("aime_1983_2024_first120.json", 120, "60", "156"),
        ("amc_30.json", 30, "142", "44"),
    ],
)
def test_real_files_load_as_they_are(name, count, first, last):
    tasks = load_tasks(SHARED / name)
    assert len(tasks) == count and len({t.id for t in tasks}) == count
    assert (tasks[0].answer, tasks[-1].answer) == (first, last)
    assert all(t.problem and t.answer for t in tasks)
    assert tasks[3].id == f"{Path(name).stem}:3"


@real_records
def test_gsm8k_answers_are_the_numbers_after_the_hashes():
    for task in load_tasks(SHARED / "gsm8k_train_200.jsonl"):
        assert "<<" not in task.answer and "####" not in task.answer
        float(task.answer.replace(",", ""))


@real_records
def test_aime_keeps_the_record_s_other_fields():
    task = load_tasks(SHARED / "aime_1983_2024_first120.json")[0]
    assert task.meta["year"] == 1983 and task.meta["id"] == "1983-1" and "answer" not in task.meta


@real_records
def test_every_reference_answer_agrees_with_itself():
    tasks = load_tasks(SHARED / "math_train_200.json")
    assert all(verify_many([(f"so it is \\boxed{{{t.answer}}}.", t.answer) for t in tasks]))
    # Written differently, so that math-verify has to read them.
    again = verify_many([(f"\\boxed{{\\displaystyle {t.answer} \\quad}}", t.answer) for t in tasks])
    assert sum(again) >= 199, [t.answer for t, ok in zip(tasks, again, strict=True) if not ok]


@real_records
def test_a_real_file_without_answers_is_refused_in_one_sentence():
    with pytest.raises(DataError) as caught:
        load_tasks(SHARED / "dsbench_modeling_6.json")
    assert "record 1: no answer found" in str(caught.value) and "'metadata'" in str(caught.value)


@real_records
def test_an_environment_on_a_real_file():
    env = MathEnv(SHARED / "math_train_200.json")
    observations, _ = env.reset(seed=0, options={"task": 0})
    assert observations["reasoner"].startswith("Problem: Darren has borrowed $100$ clams")
    env.step({"reasoner": "Set the debts equal."})
    assert env.step({"actor": "$t = 20$, so \\boxed{20}"}).info["outcome"] == 1.0


def put(tmp_path: Path, name: str, content: object) -> Path:
    path = tmp_path / name
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return path


def test_layouts_that_load(tmp_path):
    record = {"problem": "p", "answer": "1"}
    chat = [{"role": "system", "content": "s"}, {"role": "user", "content": "p"}]
    for name, content in [
        ("list.json", [record]),
        ("object.json", {"version": 2, "data": [record]}),
        ("one.json", record),
        ("lines.jsonl", json.dumps(record) + "\n\n" + json.dumps(record) + "\n"),
        ("lines.json", json.dumps(record) + "\n" + json.dumps(record)),  # JSON lines under the wrong name
        ("bom.json", b"\xef\xbb\xbf" + json.dumps([record]).encode()),
        ("crlf.jsonl", (json.dumps(record) + "\r\n").encode()),
        ("Case.json", [{"Problem": "p", "Final_Answer": 1}]),
        (
            "chat.json",
            [{"prompt": chat, "answer": "1"}],
        ),
        ("solution.json", [{"problem": "p", "answer": None, "solution": "so \\boxed{2} or \\boxed{1}"}]),
        ("named.json", [{"q": "p", "a": "1", "answer": "2"}]),
    ]:
        fields = {"problem_field": "q", "answer_field": "a"} if name == "named.json" else {}
        task = load_tasks(put(tmp_path, name, content), **fields)[0]
        assert (task.problem, task.answer) == ("p", "1"), name


def test_a_folder_is_read_file_by_file(tmp_path):
    put(tmp_path, "a.json", [{"problem": "p", "answer": "1"}])
    put(tmp_path, "a.jsonl", '{"problem": "q", "answer": "2"}\n')
    put(tmp_path, "notes.txt", "not data")
    assert [t.id for t in load_tasks(tmp_path)] == ["a.json:0", "a.jsonl:0"]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (142.0, "142"),
        (0.5, "0.5"),
        (-3, "-3"),
        ("  x ", "x"),
        ("a\n#### 1,234", "1,234"),
        ("thus \\boxed{\\frac{1}{2}}.", "\\frac{1}{2}"),
        (["7"], "7"),
        (None, ""),
        (True, ""),
        (float("nan"), ""),
        (float("inf"), ""),
        ({}, ""),
    ],
)
def test_answer_text(value, text):
    assert answer_text(value) == text


@pytest.mark.parametrize(
    "solution",
    [
        "Let $x$ be the number. Then $2x = 4$, so the answer is $\\boxed 2$.",
        "Since 3 < 4, there are 2 ways, so $\\fbox{2}$.",
        "There are $4!=24$ orders, half of which count twice, so $\\boxed2$ ways.",
        "It was 3.\n#### 2",
    ],
)
def test_the_reference_of_a_solution_is_its_answer(tmp_path, solution):
    assert load_tasks(put(tmp_path, "math.json", [{"problem": "p", "solution": solution}]))[0].answer == "2"


@pytest.mark.parametrize(
    ("answer", "fault"),
    [
        *(
            (answer, "empty")
            for answer in ("$$", "$ $", "-", "?", "...", "\\boxed{}", "so \\boxed{2", "####", "[]", "\\text{}")
        ),
        *(
            (answer, "missing answer")
            for answer in ("N/A", "n/a", "None", "nan", "\\text{N/A}", "Proof", "not found", "TBD")
        ),
        ("Since 3 < 4, there are 2 ways.", "prose"),
        ("The answer is 2.", "prose"),
        ("Let x be the number. Then 2x = 4.", "prose"),
        ("We add the numbers of all of the rows and of all of the columns and compare", "prose"),
        ("1" * 700, "700 characters"),
    ],
)
def test_a_reference_that_no_answer_can_meet_is_refused(tmp_path, answer, fault):
    path = put(tmp_path, "math.json", [{"problem": "p", "answer": "1"}, {"problem": "q", "answer": answer}])
    with pytest.raises(DataError, match="record 2: no answer can be read") as caught:
        load_tasks(path)
    assert fault in str(caught.value)


@pytest.mark.parametrize(
    "answer",
    ["<", "∞", "∅", "\\emptyset", "\\{\\}", "none", "\\text{no solution}", "There is no solution.", "20 miles per hour",
     "3 hours and 20 minutes", "Evelyn", "n \\text{ is even and } n \\ge 2", "all multiples of 3", "x"],
)  # fmt: skip
def test_a_short_reference_is_taken_as_it_is(tmp_path, answer):
    assert load_tasks(put(tmp_path, "math.json", [{"problem": "p", "answer": answer}]))[0].answer == answer


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("empty.json", "", "is empty"),
        ("blank.jsonl", "\n \n", "is empty"),
        ("none.json", [], "holds no records"),
        ("cut.json", '[{"problem": "p",\n "answer"', "line 2: is not JSON"),
        ("cut.jsonl", '{"problem": "p", "answer": "1"}\n{"problem"', "line 2: is not JSON"),
        ("text.json", '"hello"', "expected a list of records, found str"),
        ("lists.json", {"train": [], "test": []}, "several lists ('train', 'test')"),
        ("strings.json", ["p"], "record 1: expected an object"),
        ("latin.jsonl", b'{"problem": "p", "answer": "1"}\n{"problem": "\xe9"}', "line 2: is not UTF-8"),
        ("data.csv", "problem,answer", "unknown kind of file '.csv'"),
        ("bad.parquet", b"PAR1 nonsense", "not a readable Parquet file"),
        ("nofield.jsonl", '{"problem": "p", "answer": 1}\n{"x": "p"}', "line 2: no problem found; it has the keys 'x'"),
        ("noanswer.json", [{"problem": "p", "x": 1}], "record 1: no answer found; it has the keys 'problem', 'x'"),
        ("nothing.json", [{}], "record 1: no problem found; it has no keys"),
        ("noproblem.json", [{"problem": " ", "answer": 1}], "the problem 'problem' must be a text that is not empty"),
        ("badanswer.json", [{"problem": "p", "answer": {}}], "no answer can be read from 'answer': dict {}"),
        ("emptyanswer.json", [{"problem": "p", "answer": ""}], "no answer can be read from 'answer'"),
    ],
)  # fmt: skip
def test_bad_files_are_one_sentence(tmp_path, name, content, words):
    path = put(tmp_path, name, content)
    with pytest.raises(DataError) as caught:
        load_tasks(path)
    text = str(caught.value)
    assert str(path) in text and words in text and "\n" not in text, text


def test_bad_sources(tmp_path):
    with pytest.raises(DataError, match=r"nowhere\.json does not exist"):
        load_tasks(tmp_path / "nowhere.json")
    with pytest.raises(DataError, match="holds none of"):
        load_tasks(tmp_path)
    path = put(tmp_path, "a.json", [{"problem": "p", "answer": "1"}])
    with pytest.raises(DataError, match=r"no field 'gold' \(asked for with answer_field\); it has the keys"):
        load_tasks(path, answer_field="gold")
    with pytest.raises(DataError, match="no split 'dev'"):
        load_tasks(split="dev")


class FakeHub(types.ModuleType):
    """Stands in for the `datasets` package; records what it was asked for."""

    def __init__(self) -> None:
        super().__init__("datasets")
        self.asked: list[tuple[object, ...]] = []

    def load_dataset(self, name, config, split):
        self.asked.append((name, config, split))
        if name == "owner/missing":
            raise FileNotFoundError("Dataset 'owner/missing' doesn't exist\non the Hub")
        return [{"question": "p", "answer": "so\n#### 3"}, {"question": "q", "answer": "#### 4"}]


@pytest.fixture
def reached(monkeypatch):
    monkeypatch.setattr("mafrt.envs.math.tasks.reachable", lambda: True)


def test_hugging_face_ids(monkeypatch, reached):
    hub = FakeHub()
    monkeypatch.setitem(sys.modules, "datasets", hub)
    tasks = load_tasks("openai/gsm8k")
    assert [t.id for t in tasks] == ["openai/gsm8k:0", "openai/gsm8k:1"] and tasks[0].answer == "3"
    load_tasks("openai/gsm8k:socratic:test")
    load_tasks("owner/name", split="test")
    assert hub.asked == [
        ("openai/gsm8k", "main", "train"),
        ("openai/gsm8k", "socratic", "test"),
        ("owner/name", None, "test"),
    ]
    with pytest.raises(DataError, match="data set owner/missing cannot be loaded: FileNotFoundError") as caught:
        load_tasks("owner/missing")
    assert "\n" not in str(caught.value)


def test_a_hub_that_cannot_be_reached_is_asked_for_nothing(monkeypatch):
    class Offline:
        def load_dataset(self, *asked, **more):
            assert os.environ["HF_HUB_OFFLINE"] == "1" and constants.HF_HUB_OFFLINE
            raise ConnectionError("Couldn't reach it")

    monkeypatch.setenv("HF_HUB_OFFLINE", "")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # where nobody listens
    for name in ("https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setitem(sys.modules, "datasets", Offline())
    with pytest.raises(DataError, match="the hub cannot be reached, and the local cache does not hold it"):
        load_tasks("owner/name")


def test_a_data_set_id_without_the_package(monkeypatch, reached):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(MissingExtraError, match="pip install 'datasets"):
        load_tasks("openai/gsm8k")


def test_leaks_by_text_without_case_spacing_and_latex_spacing():
    def tasks(name, *pairs):
        return [Task(f"{name}:{i}", problem, answer) for i, (problem, answer) in enumerate(pairs)]

    train = tasks("a", ("What is $2+2$?", "4"), ("What is  $2+2$ ?", "4"), ("Find $x\\,y$.", "1"))
    test = tasks("b", ("what is $2 + 3$?", "5"), ("WHAT IS $2+2$", "4"), ("Find $x y$", "2"))
    report = find_leaks(train, test)
    assert report.shared == (("b:1", "a:0"), ("b:2", "a:2")) and report.contradicting == (("b:2", "a:2"),)
    assert (report.train, report.evaluation, report.repeated_train, report.repeated_evaluation) == (3, 3, 1, 0)
    assert str(report) == (
        "2 of 3 evaluation problems (66.7%) are also among the 3 training problems, 1 of them with another answer"
    )
    # A sign, a number or an operator makes another problem.
    assert len({normalise(p) for p in ("2-3", "2+3", "2*3", "23", "2.3")}) == 5


def test_the_shipped_problems_do_not_leak():
    report = find_leaks(load_tasks(split="train"), load_tasks(split="test"))
    assert report.train > 0 and report.evaluation > 0 and report.shared == ()


@real_records
def test_leaks_between_real_files():
    train, test = load_tasks(SHARED / "gsm8k_train_200.jsonl"), load_tasks(SHARED / "gsm8k_test_50.parquet")
    assert find_leaks(train, test).shared == ()
    assert len(find_leaks(train, train[:20]).shared) == 20
