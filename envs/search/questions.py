"""Reads questions with their answers, and corpora of passages, from the files in which people have them.

NQ, TriviaQA (FlashRAG, Search-R1)  {"question", "golden_answers": [...]}
NQ-open, DPR                        {"question", "answer": [...]} or {"question", "answers": [...]}
HotpotQA                            {"question", "answer", "context": [[title, [sentence, ...]], ...]}, as a list of
                                    pairs or as {"title": [...], "sentences": [[...], ...]}
verl's Parquet                      {"question", "reward_model": {"ground_truth": {"target": [...]}}}
Dr. MAS's drmas_search.py           the same with the question in {"extra_info": {"question"}}
corpora                             {"id", "contents": "\\"Title\\"\\ntext"} (Search-R1), or {"title", "text"}
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mafrt.core.errors import DataError
from mafrt.core.hf_datasets import is_dataset
from mafrt.core.text import brief, keys_of
from mafrt.envs.data_files import clean_record, file_records
from mafrt.envs.math.tasks import value_at
from mafrt.envs.search.retrieval import Passage

ANSWER_FIELDS = ("golden_answers", "answers", "answer", "target", "ground_truth")
NESTED_QUESTION = "extra_info.question"
TEXT_FIELDS = ("contents", "text", "content", "passage")


@dataclass(frozen=True)
class Question:
    """One question. `id` is unique within its source."""

    id: str
    text: str
    answers: tuple[str, ...]
    """golden answers, each of which is right"""
    meta: Mapping[str, Any] = field(default_factory=dict, compare=False)
    """the record's type and level, where it has them"""
    passages: tuple[Passage, ...] = field(default=(), compare=False)
    """the passages that came with it"""


def load_questions(
    source: str | Path, problem_field: str | None = None, answer_field: str | None = None
) -> tuple[Question, ...]:
    """All questions of a file. Raises DataError that names the file, the record and its fault.

    `problem_field`, `answer_field`: names of the fields, where they have other ones than usual; those of nested ones
    have dots, as in `extra_info.question`.
    """
    questions = []
    name, asked = Path(source).stem, problem_field or "question"
    for number, (here, record) in enumerate(_records(source)):
        text = value_at(record, asked)
        if text is None and problem_field is None:
            text = value_at(record, NESTED_QUESTION)
        if not isinstance(text, str) or not text.strip():
            raise DataError(f"{here}: expected a text {asked!r}, found {brief(text)}; it has {keys_of(record)}")
        answers = _answers(record, answer_field)
        if not answers:
            fields = answer_field or ", ".join(ANSWER_FIELDS)
            raise DataError(
                f"{here}: no answer found; it has {keys_of(record)}, expected one of {fields} with a text or a list"
            )
        meta = {key: record[key] for key in ("type", "level") if isinstance(record.get(key), str)}
        passages = tuple(_context(here, record.get("context")))
        questions.append(Question(f"{name}:{number}", text.strip(), answers, meta, passages))
    if not questions:
        raise DataError(f"{source}: holds no questions; expected records with 'question' and an answer")
    return tuple(questions)


def load_corpus(source: str | Path) -> tuple[Passage, ...]:
    """All passages of a file. Raises DataError."""
    passages = []
    for number, (here, record) in enumerate(_records(source)):
        text = next((record[name] for name in TEXT_FIELDS if isinstance(record.get(name), str)), "")
        if not text.strip():
            raise DataError(
                f"{here}: no passage found; it has {keys_of(record)}, expected a text in {', '.join(TEXT_FIELDS)}"
            )
        passages.append(Passage.of(record.get("id", number), record.get("title"), text))
    if not passages:
        raise DataError(f"{source}: holds no passages; expected records with one of {', '.join(TEXT_FIELDS)}")
    return tuple(passages)


def passages_of(questions: Sequence[Question]) -> tuple[Passage, ...]:
    """The passages that the questions bring along, each once."""
    return tuple({(p.title, p.text): p for question in questions for p in question.passages}.values())


def _records(source: str | Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    if not os.path.exists(source) or (os.path.isdir(source) and not is_dataset(source)):
        raise DataError(f"data file {source} does not exist, or is a folder; give a JSON, JSONL or Parquet file")
    for where, record in file_records(Path(source)):
        here = f"{source}, {where}"
        record = clean_record(here, record)
        if not isinstance(record, Mapping):
            raise DataError(f"{here}: expected an object, found {brief(record)}")
        yield here, record


def _answers(record: Mapping[str, Any], field: str | None) -> tuple[str, ...]:
    nested = record.get("reward_model")
    truth = nested.get("ground_truth") if isinstance(nested, Mapping) else None
    values = [value_at(record, name) for name in ([field] if field else ANSWER_FIELDS)] + ([] if field else [truth])
    value = next((v for v in values if v is not None), None)
    value = value.get("target") if isinstance(value, Mapping) else value
    listed = value if isinstance(value, (list, tuple)) else [value]
    aliases = record.get("answer_aliases")
    listed = [*listed, *(aliases if isinstance(aliases, (list, tuple)) else ())]
    texts = (str(v).strip() for v in listed if isinstance(v, (str, int, float)) and not isinstance(v, bool))
    return tuple(dict.fromkeys(text for text in texts if text))


def _context(here: str, context: Any) -> Iterator[Passage]:
    """Passages of HotpotQA's `context`."""
    if context is None:
        return
    pairs = context
    if isinstance(context, Mapping):
        titles, texts = context.get("title"), context.get("sentences")
        listed = isinstance(titles, (list, tuple)) and isinstance(texts, (list, tuple))
        pairs = [*zip(titles or (), texts or (), strict=False)] if listed else None
    fine = isinstance(pairs, (list, tuple)) and all(
        isinstance(pair, (list, tuple)) and len(pair) == 2 and isinstance(pair[1], (list, tuple)) for pair in pairs
    )
    if not fine:
        raise DataError(f"{here}: expected 'context' as pairs of a title and its sentences, found {brief(context)}")
    for title, sentences in pairs:
        if text := "".join(map(str, sentences)).strip():
            yield Passage(str(title), str(title), text)
