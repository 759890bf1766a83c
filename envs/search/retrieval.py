"""Retrievers: an embedded BM25 index, and a client of a server in Search-R1's request form.

    POST {"queries": ["who wrote it"], "topk": 3, "return_scores": true}
    ->   {"result": [[{"document": {"id": "7", "contents": "\\"Title\\"\\ntext"}, "score": 8.1}, ...]]}

With `return_scores` false the documents stand in the lists themselves; both replies are read.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from mafrt.config.schema import check_number
from mafrt.core.errors import ConfigError, EnvError
from mafrt.core.extras import package
from mafrt.core.http_request import StatusError, http_request, is_http_address
from mafrt.core.text import brief, clean_text, error_line, real_number, shortened

TOKEN = "MAFRT_RETRIEVER_TOKEN"
"""Environment variable of the token that a retriever's client sends and its server asks for."""
REPLY_MIB = 8
"""Largest reply of a server."""


@dataclass(frozen=True)
class Passage:
    """One passage of a corpus."""

    id: str
    title: str
    text: str

    @classmethod
    def of(cls, identity: Any, title: Any, contents: str) -> Passage:
        """From a record's fields; without a title, contents may begin with one in quotes and a line break."""
        title = title if isinstance(title, str) else ""
        if not title and contents.startswith('"') and '"\n' in contents:
            title, _, contents = contents[1:].partition('"\n')
        return cls(clean_text(str(identity)), clean_text(title).strip(), clean_text(contents).strip())

    def shown(self) -> str:
        """The passage as an agent reads it."""
        return f"({self.title}) {self.text}" if self.title else self.text

    def document(self) -> dict[str, str]:
        """The passage in Search-R1's form."""
        return {"id": self.id, "contents": f'"{self.title}"\n{self.text}' if self.title else self.text}


class Retriever(Protocol):
    """Passages for a query."""

    def search(self, query: str, topk: int) -> list[tuple[Passage, float]]:
        """At most `topk` passages with their scores, best first; none where nothing fits. Raises EnvError."""


class Bm25:
    """BM25 over passages, by bm25s (Lù 2024, 2407.03618), in this process.

    Raises MissingExtraError if bm25s is not installed, ConfigError for a corpus without a word.
    """

    def __init__(self, passages: Sequence[Passage]) -> None:
        bm25s = package("search", "search", "bm25s")
        self.passages = tuple(passages)
        self._tokenize = bm25s.tokenize
        words = self._words([f"{passage.title} {passage.text}" for passage in self.passages])
        if not words.vocab:
            raise ConfigError(f"the corpus has {len(self.passages)} passages without a word to search for; give others")
        self._index = bm25s.BM25()
        self._index.index(words, show_progress=False)

    def _words(self, texts: list[str]) -> Any:
        return self._tokenize(texts, stopwords="en", show_progress=False)

    def search(self, query: str, topk: int) -> list[tuple[Passage, float]]:
        documents, scores = self._index.retrieve(
            self._words([query]), k=min(topk, len(self.passages)), show_progress=False, n_threads=0
        )
        pairs = zip(documents[0].tolist(), scores[0].tolist(), strict=True)
        return [(self.passages[number], score) for number, score in pairs if score > 0]


class HttpRetriever:
    """A retriever behind a URL. A server that is down, hangs or lies raises EnvError, which loses the episode.

    The token in `MAFRT_RETRIEVER_TOKEN`, if set, is sent along.
    """

    def __init__(self, url: str, timeout_s: float = 10.0) -> None:
        if not is_http_address(url):
            raise ConfigError(
                f"retriever is {shortened(url, 200)!r}; give a URL such as http://127.0.0.1:8000/retrieve."
            )
        check_number("retriever_timeout_s", timeout_s, above=0)
        self.url, self.timeout_s = url, timeout_s
        token = os.environ.get(TOKEN)
        self._headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {token}"} if token else {})

    def check(self) -> None:
        """Raises ConfigError unless the retriever answers a query now."""
        try:
            self.search("test", 1)
        except EnvError as error:
            raise ConfigError(f"{error}; start one, for example: mafrt serve_retriever --corpus_path FILE") from error

    def search(self, query: str, topk: int) -> list[tuple[Passage, float]]:
        body = json.dumps({"queries": [query], "topk": topk, "return_scores": True}).encode()
        try:
            content = http_request(
                self.url, body, headers=self._headers, within_s=self.timeout_s, most=REPLY_MIB * 2**20
            )
            reply = json.loads(content)
        except StatusError as error:
            raise EnvError(f"the retriever {self.url} answered status {error.status}, expected 200") from None
        except TimeoutError:
            raise EnvError(f"the retriever {self.url} did not answer within {self.timeout_s:g} s") from None
        except OSError as error:
            raise EnvError(f"the retriever {self.url} cannot be reached ({error_line(error)})") from error
        except (ValueError, RecursionError):
            raise EnvError(f"the retriever {self.url} answered something that is not JSON") from None
        return self._read(reply)[:topk]

    def _read(self, reply: Any) -> list[tuple[Passage, float]]:
        result = reply.get("result") if isinstance(reply, dict) else None
        if not isinstance(result, list) or len(result) != 1 or not isinstance(result[0], list):
            raise EnvError(
                f'the retriever {self.url} answered {brief(reply)}; expected {{"result": [[...]]}}, one list a query'
            )
        return [self._passage(entry) for entry in result[0]]

    def _passage(self, entry: Any) -> tuple[Passage, float]:
        scored = isinstance(entry, dict) and "document" in entry
        document = entry["document"] if scored else entry
        contents = document.get("contents", document.get("text")) if isinstance(document, dict) else None
        score = entry.get("score", 0.0) if scored else 0.0
        number = None if isinstance(score, bool) else real_number(score)
        if not isinstance(contents, str) or number is None:
            raise EnvError(
                f"the retriever {self.url} answered a passage {brief(entry)}; "
                "expected a text 'contents' and a finite 'score'"
            )
        return Passage.of(document.get("id", ""), document.get("title"), contents), number
