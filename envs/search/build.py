"""The search environment from its settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mafrt.config.team import Team
from mafrt.core.text import counted
from mafrt.envs.construction import Construction, evaluated_split, held_out_note, hold_out, subset
from mafrt.envs.search.env import RETRIEVER, SearchEnv
from mafrt.envs.search.generated import generated
from mafrt.envs.search.questions import Question, load_questions, passages_of
from mafrt.envs.search.retrieval import Bm25, Passage
from mafrt.envs.workflows.config import workflow_options

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
    own = {name: settings[name] for name in names if name in settings}
    return SearchEnv(questions=questions, team=team, **own, **workflow_options(settings))


def load(settings: Mapping[str, Any]) -> tuple[Sequence[Question], Sequence[Question]]:
    """Questions to train on and held-out questions; there are none of the latter if the file is too small."""
    fields = settings.get("problem_field"), settings.get("answer_field")
    source, held_out = settings.get("dataset_path"), settings.get("eval_dataset_path")
    questions = load_questions(source, *fields) if source is not None else generated("train").questions
    if held_out is not None:
        return questions, load_questions(held_out, *fields)
    split = evaluated_split(settings)
    return (questions, generated(split).questions) if source is None else hold_out(questions, split)
