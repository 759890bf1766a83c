"""The search environment and its settings, from which flags and their help follow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from mafrt.config.team import Team
from mafrt.core.text import counted
from mafrt.envs.construction import Construction, evaluated_split, held_out_note, hold_out, subset
from mafrt.envs.search.env import RETRIEVER, SearchEnv
from mafrt.envs.search.generated import generated
from mafrt.envs.search.questions import Question, load_questions, passages_of
from mafrt.envs.search.retrieval import Bm25, Passage
from mafrt.envs.workflows.config import workflow_options


@dataclass(frozen=True)
class SearchSettings:
    """Questions and retriever."""

    dataset_path: str | None = None
    """JSON, JSONL or Parquet of questions and answers, such as NQ or HotpotQA; default: generated questions"""
    eval_dataset_path: str | None = None
    """held-out questions; default: generated ones, or the last tenth (at most 200) of dataset_path"""
    corpus_path: str | None = None
    """JSON, JSONL or Parquet of passages; default: the passages that the questions bring along, as HotpotQA's do"""
    retriever: str | None = None
    """URL of a retriever in Search-R1's form, such as http://127.0.0.1:8000/retrieve; default: BM25 in this process"""
    topk: int = 3
    """passages of one search"""
    retriever_timeout_s: float = 10.0
    """max seconds of one search over HTTP; a later answer loses its episode"""
    metric: Literal["em", "f1"] = "em"
    """score of an answer: exact match, or F1 of its words"""
    demonstrations: str | None = None
    """write good and careless turns on the generated questions to this JSONL, for train_sft, and leave"""
    demonstration_episodes: int = 400
    """episodes that they come from"""


NAME = "search"


def build(settings: Mapping[str, Any], team: Team | None = None) -> Construction:
    """Questions, retriever and environments.

    Args:
        settings: the fields of `SearchSettings` and `WorkflowSettings`, `sandbox` and `seed`, by name.
        team: who plays; None: a Verifier, a Search agent and an Answer agent.

    Raises:
        DataError: the questions or the corpus cannot be read.
        ConfigError: a setting does not fit the workflow or the team, or the retriever does not answer.
        MissingExtraError: a package for the retriever is missing.
    """
    source = settings.get("dataset_path")
    questions, held_out = load(settings)
    notes = []
    if source is not None and settings.get("eval_dataset_path") is None:
        notes.append(held_out_note(source, len(questions), len(held_out)))
    shared = {q.text.casefold() for q in questions} & {q.text.casefold() for q in held_out}
    if shared:
        both = counted(len(shared), "questions")
        notes.append(f"Careful: {both} common to both sets, so the evaluation shows in part memory.")
    # All passages of a file stay searchable, also those of questions that are held out or left out.
    retriever = settings.get("retriever")
    whole: Sequence[Passage] = ()
    if source is not None and retriever is None:
        asked = evaluated_split(settings)
        other = load({**settings, "eval_split": "test" if asked == "validation" else "validation"})[1]
        whole = passages_of([*questions, *held_out, *other])
    if whole and settings.get("corpus_path") is None and settings.get("workflow", NAME) == NAME:
        settings = {**settings, "retriever": Bm25(whole)}
    questions = subset(questions, settings.get("train_limit"), settings.get("seed", 0))
    eval_env = build_env(settings, held_out, team) if held_out else None
    if eval_env is not None and settings.get("eval_dataset_path") is None:
        eval_env.split = evaluated_split(settings)
    return Construction(build_env(settings, questions, team), eval_env, tuple(notes))


def build_env(settings: Mapping[str, Any], questions: Sequence[Question], team: Team | None) -> SearchEnv:
    """The environment that the settings describe, on these questions."""
    names = ("metric", *RETRIEVER)
    options = {name: settings[name] for name in names if name in settings}
    return SearchEnv(questions=questions, team=team, **options, **workflow_options(settings))


def load(settings: Mapping[str, Any]) -> tuple[Sequence[Question], Sequence[Question]]:
    """Questions to train on and held-out questions; there are none of the latter if the file is too small."""
    fields = settings.get("problem_field"), settings.get("answer_field")
    source, held_out = settings.get("dataset_path"), settings.get("eval_dataset_path")
    questions = load_questions(source, *fields) if source is not None else generated("train").questions
    if held_out is not None:
        return questions, load_questions(held_out, *fields)
    split = evaluated_split(settings)
    return (questions, generated(split).questions) if source is None else hold_out(questions, split)
