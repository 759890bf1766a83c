"""Questions answered by search: a Verifier, a Search agent with a retriever, and an Answer agent (docs/search.md)."""

from mafrt.envs.search.env import SearchEnv
from mafrt.envs.search.questions import Question, load_questions
from mafrt.envs.search.retrieval import Bm25, HttpRetriever, Passage, Retriever

__all__ = ["Bm25", "HttpRetriever", "Passage", "Question", "Retriever", "SearchEnv", "load_questions"]
