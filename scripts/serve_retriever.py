"""Serve a corpus for search: BM25 behind an address in Search-R1's request form."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated

from mafrt.config.schema import Bounds, Checked, Port
from mafrt.core.errors import ConfigError
from mafrt.core.extras import package
from mafrt.core.text import counted
from mafrt.environment.local_server import address, bounded_server, listening, most_connections, token_for
from mafrt.envs.search.questions import load_corpus
from mafrt.envs.search.retrieval import TOKEN, Bm25
from mafrt.envs.search.server import app
from mafrt.scripts.cli.command import Command
from mafrt.scripts.cli.run_main import run_main

CONNECTIONS = 1024
"""at the same time; those without a request end first"""


@dataclass(frozen=True)
class RetrieverSettings(Checked):
    """Retrieval server"""

    corpus_path: str | None = None
    """JSON, JSONL or Parquet of passages: {"id", "contents"} or {"title", "text"}"""
    host: str = "127.0.0.1"
    """address to listen on; any but loopback needs a token in MAFRT_RETRIEVER_TOKEN"""
    port: Port = 8000
    """port to listen on; 0 takes a free one"""
    topk: Annotated[int, Bounds(least=1, most=100)] = 3
    """passages of a query that names no topk"""


COMMAND = Command(
    "serve_retriever",
    "Serve a corpus for search: POST /retrieve in Search-R1's request form, answered by BM25.",
    (RetrieverSettings,),
    words="corpus_path",
)


def serve(argv: Sequence[str]) -> int:
    asked = COMMAND.read(argv).make(RetrieverSettings)
    if asked.corpus_path is None:
        raise ConfigError("there is nothing to serve; give --corpus_path, a file of passages.")
    token = token_for(asked.host, TOKEN)
    package("the retrieval server", "serve", "uvicorn")
    taken = listening(asked.host, asked.port)  # before the corpus is read: a port that is in use is an error at once
    index = Bm25(load_corpus(asked.corpus_path))
    url = f"{address(asked.host, taken.getsockname()[1])}/retrieve"
    print(f"{counted(len(index.passages), 'passages')} at {url}; Ctrl-C ends it.", flush=True)
    application = app(index, asked.topk, token)
    with contextlib.suppress(KeyboardInterrupt):
        bounded_server(application, connections=most_connections(CONNECTIONS)).run(sockets=[taken])
    return 0


main = partial(run_main, serve)

if __name__ == "__main__":
    sys.exit(main())
