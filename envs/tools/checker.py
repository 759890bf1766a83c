"""The trainer's side of the process that checks arguments against schemas and computes expressions.

One process serves all threads.
"""

from __future__ import annotations

import atexit
import json
from collections.abc import Mapping
from typing import Any

from mafrt.core.asked_process import AskedProcess, EndedError
from mafrt.core.text import clean_text
from mafrt.envs.tools.failed import Failed

REPLY_S = 30.0
"""By the clock; the process itself bounds the processor time, so that a busy machine fails no call."""
MOST_ASKED_KIB = 24 * 1024
"""of a schema with its arguments"""
DEEPEST = 200
"""levels of nesting of a schema or of arguments"""


class Checker:
    """Asks one process. Safe to share among threads."""

    def __init__(self, reply_s: float = REPLY_S) -> None:
        self.reply_s = reply_s
        self.worker = AskedProcess("mafrt.envs.tools._checker", "the calls of tools")

    def compute(self, expression: str) -> int | float:
        """The value of an arithmetic expression. Raises Failed."""
        reply = self._ask({"do": "compute", "expression": expression})
        if reply.get("fault") is not None:
            raise Failed(str(reply["fault"]))
        value: int | float = reply["value"]
        return value

    def schema_fault(self, schema: Mapping[str, Any]) -> str | None:
        """Why a JSON schema cannot be used, as a clause; None if it can."""
        try:
            fault = self._ask({"do": "schema", "schema": schema}).get("fault")
        except Failed as failure:
            return str(failure).rstrip(".")
        return None if fault is None else clean_text(str(fault))

    def wrong(self, schema: Mapping[str, Any], arguments: Mapping[str, Any]) -> str | None:
        """The first fault of arguments, as a clause; None if they fit. Raises Failed if that cannot be found out."""
        reply = self._ask({"do": "check", "schema": schema, "arguments": arguments})
        if (fault := reply.get("fault")) is None:
            return None
        where = clean_text(str(reply.get("where") or ""))
        return f"{f' at {where}' if where else ''}: {clean_text(str(fault))}"

    def close(self) -> None:
        """End the process; the next question starts another."""
        self.worker.close()

    def _ask(self, question: Mapping[str, Any]) -> dict[str, Any]:
        try:
            text = json.dumps(question)
        except (ValueError, RecursionError) as error:
            raise Failed(f"the arguments cannot be read ({type(error).__name__}).") from error
        if len(text) > MOST_ASKED_KIB * 1024:
            raise Failed(f"schema and arguments have more than {MOST_ASKED_KIB} KiB.")
        if _deeper(question, DEEPEST):
            raise Failed(f"schema or arguments are nested deeper than {DEEPEST} levels.")
        late = Failed("the call took too long to check, so it was not made.")
        # A process that died may have been ended from outside, so that the question is put once more.
        for _ in range(2):
            try:
                reply = self.worker.ask(question, self.reply_s)
            except TimeoutError:
                break
            except EndedError:
                continue
            if reply["timeout"]:
                break
            return reply
        raise late


def _deeper(value: Any, levels: int) -> bool:
    """Whether a value is nested deeper than so many levels."""
    layer = [value]
    for _ in range(levels):
        layer = [
            inner
            for part in layer
            if isinstance(part, (dict, list, tuple))
            for inner in (part.values() if isinstance(part, dict) else part)
        ]
        if not layer:
            return False
    return True


CHECKER = Checker()
atexit.register(CHECKER.close)
