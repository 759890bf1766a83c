"""Prepare public data sets from local files: DAPO-Math, NQ and HotpotQA as the JSONL that training reads."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from mafrt.config.schema import Checked, CountOrZero
from mafrt.core.atomic_files import write_atomic
from mafrt.core.errors import ConfigError
from mafrt.core.text import counted
from mafrt.envs.construction import subset
from mafrt.envs.math.tasks import load_tasks
from mafrt.envs.search.questions import load_questions, passages_of
from mafrt.scripts.cli.command import Command
from mafrt.scripts.cli.run_main import run_main

_DAPO_HEAD = re.compile(r"\ASolve the following math problem step by step\..*?\n\n", re.DOTALL)
_DAPO_TAIL = re.compile(
    r"\s*(?:\n\nRemember to put your answer on its own line after \"Answer:\"\.?"
    # Dr. MAS's drmas_math.py, and the filtered sets that it reads.
    r"|(?:Let's think|Please reason) step by step,? and (?:output|put) (?:the|your) final answer within \\boxed\{\}\.?)"
    r"\s*\Z"
)


@dataclass(frozen=True)
class PrepareSettings(Checked):
    """Data to prepare."""

    dataset: Literal["dapo_math", "nq", "hotpot"] | None = None
    """dapo_math, nq or hotpot"""
    input: tuple[str, ...] = ()
    """files as they were downloaded: Parquet, JSON or JSONL"""
    output: str = "data"
    """folder for train.jsonl, test.jsonl, and corpus.jsonl of hotpot"""
    test_size: CountOrZero = 500
    """records that are held out, drawn with the seed; 0: none"""
    limit: int | None = None
    """keep a random subset of so many records, drawn with the seed; default: all"""
    seed: int = 1
    """every random choice follows from it"""


EXAMPLES = {
    "dapo_math": "dapo-math-17k.parquet",
    "nq": "NQ-open.train.jsonl",
    "hotpot": "hotpot_train_v1.1.json",
}

COMMAND = Command(
    "prepare_data",
    "Prepare DAPO-Math, NQ or HotpotQA from local files: duplicates and prompt templates removed, a part held out.",
    (PrepareSettings,),
    words="dataset",
)


def dapo_math(paths: Sequence[str]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Problems and answers of DAPO-Math, without the template around each problem and without repetitions."""
    records: dict[str, dict[str, Any]] = {}
    for path in paths:
        for task in load_tasks(path):
            problem = _DAPO_TAIL.sub("", _DAPO_HEAD.sub("", task.problem)).strip()
            # The data set holds each problem many times, so the first is kept.
            records.setdefault(problem, {"problem": problem, "answer": task.answer})
    return list(records.values()), []


def questions(paths: Sequence[str]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Questions with golden answers, and the passages that come with them as a corpus."""
    read = [question for path in paths for question in load_questions(path)]
    records = {q.text: {"question": q.text, "golden_answers": list(q.answers), **q.meta} for q in read}
    passages = [{"id": str(n), "title": p.title, "text": p.text} for n, p in enumerate(passages_of(read))]
    return list(records.values()), passages


def prepare(argv: Sequence[str]) -> int:
    asked = COMMAND.read(argv).make(PrepareSettings)
    if asked.dataset is None or not asked.input:
        named = asked.dataset or "hotpot"
        raise ConfigError(f"give the data set and its files: prepare_data {named} --input {EXAMPLES[named]}")
    records, corpus = (dapo_math if asked.dataset == "dapo_math" else questions)(asked.input)
    if asked.limit is not None and asked.limit < len(records):
        records = list(subset(records, asked.limit, asked.seed, "limit"))
    if asked.test_size >= len(records):
        raise ConfigError(
            f"test_size is {asked.test_size} of {counted(len(records), 'records')}; leave some to train on."
        )
    order = subset(range(len(records)), asked.test_size, asked.seed) if asked.test_size else ()
    # Drawn by the seed and written down, so that every run learns from the same part.
    held_out = set(order)
    folder = Path(asked.output).expanduser()
    folder.mkdir(parents=True, exist_ok=True)
    parts = {
        "train": [record for n, record in enumerate(records) if n not in held_out],
        "test": [records[n] for n in sorted(held_out)],
        "corpus": corpus,
    }
    files = {folder / f"{name}.jsonl": part for name, part in parts.items() if part}
    drafts = {file.with_name(f".{file.name}.new"): file for file in files}
    try:
        for draft, file in drafts.items():
            write_atomic(draft, _lines(files[file]))
        # All or none, also on a full disk: a new half beside an old one would train on what is held out.
        for draft, file in drafts.items():
            os.replace(draft, file)
            print(f"{counted(len(files[file]), 'records')} in {file}")
    finally:
        for draft in drafts:
            draft.unlink(missing_ok=True)
    return 0


def _lines(records: Iterable[dict[str, Any]]) -> bytes:
    return "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records).encode()


main = partial(run_main, prepare)

if __name__ == "__main__":
    sys.exit(main())
