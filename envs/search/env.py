"""`SearchEnv`: questions with golden answers and a retriever, as a task source for every workflow."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Unpack

from mafrt.config.schema import check_choice, check_number
from mafrt.config.team import Team
from mafrt.core.deadline import LateError, call_within
from mafrt.core.errors import ConfigError, EnvError
from mafrt.core.types import StepResult
from mafrt.environment.tool_calls import shorten
from mafrt.envs.search.answers import exact_match, f1, given_answer, normalize
from mafrt.envs.search.generated import generated
from mafrt.envs.search.process_rewards import SearchRules
from mafrt.envs.search.questions import Question, load_corpus, load_questions, passages_of
from mafrt.envs.search.retrieval import Bm25, HttpRetriever, Passage, Retriever
from mafrt.envs.workflows.config import WorkflowOptions, workflow_options
from mafrt.envs.workflows.state import WorkflowTool
from mafrt.envs.workflows.task_env import TaskEnv

METRICS = {"em": exact_match, "f1": f1}
NOTHING = "Nothing was found."
MOST_TOPK = 100


@dataclass(frozen=True)
class SearchTool:
    """Passages for a query, as one text."""

    retriever: Retriever
    topk: int
    timeout_s: float = 10.0

    def run(self, text: str) -> list[Passage]:
        """The passages. Raises EnvError for a retriever that fails, or does not answer in time."""
        if isinstance(self.retriever, HttpRetriever):
            return [passage for passage, _ in self.retriever.search(text, self.topk)]
        name = f"the retriever {type(self.retriever).__name__}"
        try:
            found = call_within(self.timeout_s, name, self.retriever.search, text, self.topk)
        except LateError as late:
            raise EnvError(str(late)) from None
        return [passage for passage, _ in found]

    def says(self, ran: list[Passage]) -> str:
        return shorten("\n".join(passage.shown() for passage in ran) or NOTHING)


@dataclass(frozen=True)
class RetrieverChoice:
    """The retriever of an environment, and the number of passages of a search."""

    corpus_path: str | Path | None = None
    """passages for BM25; None: those that come with the questions"""
    retriever: str | Retriever | None = None
    """an object, the URL of a server, or None for BM25 in this process"""
    topk: int = 3
    """passages of one search"""
    retriever_timeout_s: float = 10.0
    """max seconds of one search"""

    def __post_init__(self) -> None:
        check_number("topk", self.topk, least=1, most=MOST_TOPK, whole=True)

    def open(self, questions: Sequence[Question]) -> Retriever:
        """The retriever. Raises ConfigError for a server that does not answer, or nothing to search in."""
        if self.retriever is not None and self.corpus_path is not None:
            raise ConfigError("retriever and corpus_path exclude each other; leave one of them out.")
        if isinstance(self.retriever, str):
            remote = HttpRetriever(self.retriever, self.retriever_timeout_s)
            # A wrong URL is found before a model is loaded, not in the first episode.
            remote.check()
            return remote
        if self.retriever is not None:
            return self.retriever
        passages = load_corpus(self.corpus_path) if self.corpus_path else passages_of(questions)
        if not passages:
            raise ConfigError(
                "there is nothing to search in: the questions bring no passages along; give --corpus_path FILE, or "
                "--retriever URL"
            )
        return Bm25(passages)


RETRIEVER = tuple(field.name for field in fields(RetrieverChoice))


class SearchOptions(WorkflowOptions, total=False):
    """Options of a workflow, and the fields of `RetrieverChoice`."""

    corpus_path: str | Path | None
    retriever: str | Retriever | None
    topk: int
    retriever_timeout_s: float


class SearchEnv(TaskEnv):
    """A team answers questions with what it finds.

    The outcome is the exact match (or F1) of the answer; episodes also report both as the measures `em` and `f1`.
    """

    def __init__(
        self,
        dataset_path: str | Path | None = None,
        team: Team | None = None,
        metric: str = "em",
        split: str = "train",
        questions: Sequence[Question] | None = None,
        **options: Unpack[SearchOptions],
    ) -> None:
        """Read the questions (`dataset_path=None`: generated ones of `split`) or take `questions` as given.

        `options`: fields of `RetrieverChoice` and `WorkflowOptions`; `workflow` is `search` by default, `horizon` 4.
        Raises DataError for the data, ConfigError for a setting or a server that does not answer, MissingExtraError
        if a package is missing.
        """
        check_choice("metric", metric, METRICS)
        retriever_options: dict[str, Any] = {name: value for name, value in options.items() if name in RETRIEVER}
        self.retrieval = RetrieverChoice(**retriever_options)
        if questions is None:
            if not dataset_path:
                self.split, self.held_out, self.validation = split, {"split": "test"}, {"split": "validation"}
            questions = load_questions(dataset_path) if dataset_path else generated(split).questions
        self.questions = tuple(questions)
        if not self.questions:
            raise ConfigError("questions is empty; give at least one")
        self.metric = METRICS[metric]
        named: WorkflowOptions = {"workflow": "search", "horizon": 4, **workflow_options(options)}
        super().__init__(team if team is not None else Team.of(("verifier", "search", "answer")), **named)

    def make_tool(self, sandbox: str) -> WorkflowTool:
        if self.workflow.tool != "search":
            return super().make_tool(sandbox)
        return SearchTool(self.retrieval.open(self.questions), self.retrieval.topk, self.retrieval.retriever_timeout_s)

    def task_count(self) -> int:
        return len(self.questions)

    def choose(self, index: int) -> tuple[str, dict[str, Any]]:
        self.task = self.questions[index]
        return self.task.text, {"task": self.task.id, "answer": self.task.answers[0]}

    def step(self, actions: dict[str, str]) -> StepResult:
        result = super().step(actions)
        if result.terminated:
            texts = [text for name, text in self.state.said if name in result.info["correct"]]
            given = [given_answer(text) or "" for text in texts[-len(result.info["correct"]) :]]
            golden = self.task.answers
            for name, score in METRICS.items():
                mean = sum(score(text, golden) for text in given) / len(given) if given else 0.0
                result.info.setdefault("measures", {})[name] = mean
        return result

    def grade(self, texts: Sequence[str]) -> list[float]:
        given = [given_answer(text) for text in texts]
        return [0.0 if answer is None else self.metric(answer, self.task.answers) for answer in given]

    def key(self, text: str) -> str | None:
        given = given_answer(text)
        return None if given is None else normalize(given)

    def rules(self) -> SearchRules:
        return SearchRules(self.task.answers)
