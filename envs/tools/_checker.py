"""Process that does the tools' open-ended work: JSON schema checks, and arithmetic. JSON lines in, JSON lines out.

A schema comes from a server and its arguments from a model: a pattern such as `^(a+)+$` or twenty doubled `anyOf` take
for ever. Here that ends with the processor time of one question; `checker.py` is the trainer's side. Nothing is
fetched: a schema's references to other documents are faults.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
from typing import Any

from mafrt.core.bounded_worker import limit
from mafrt.envs.tools.calculator import compute
from mafrt.envs.tools.failed import Failed

MEMORY_MIB = 1024
CPU_S = 1.0
KILL_AFTER_CPU_S = 3
_REFERENCES = ("$ref", "$dynamicRef", "$recursiveRef")


class OutOfTime(BaseException):
    """Raised into the work by the timer; not an Exception, which a library might catch."""


def foreign_reference(schema: Any) -> str | None:
    """A reference of the schema to another document; None if it has none."""
    waiting = [schema]
    while waiting:
        part = waiting.pop()
        if isinstance(part, dict):
            for name in _REFERENCES:
                if name in part and not (isinstance(part[name], str) and part[name].startswith("#")):
                    return str(part[name])[:80]
        waiting += part.values() if isinstance(part, dict) else part if isinstance(part, list) else ()
    return None


def validator(schema: Any) -> Any:
    """A validator that fetches nothing."""
    import jsonschema
    from referencing import Registry

    kind = jsonschema.validators.validator_for(schema, jsonschema.Draft202012Validator)
    return kind, lambda: kind(schema, registry=Registry())


def answer(question: dict[str, Any]) -> dict[str, Any]:
    """`fault`: a sentence, or None; `value` of an expression."""
    if question["do"] == "compute":
        try:
            return {"fault": None, "value": compute(question["expression"])}
        except Failed as failure:
            return {"fault": str(failure)}
    import jsonschema

    schema = question["schema"]
    if question["do"] == "schema":
        if (elsewhere := foreign_reference(schema)) is not None:
            return {"fault": f"it refers to another document, {elsewhere!r}"}
        try:
            validator(schema)[0].check_schema(schema)
        except jsonschema.SchemaError as error:
            return {"fault": error.message[:300]}
        return {"fault": None}
    fault = jsonschema.exceptions.best_match(validator(schema)[1]().iter_errors(question["arguments"]))
    if fault is None:
        return {"fault": None}
    return {
        "fault": fault.message if len(fault.message) < 200 else None,
        "found": None if len(fault.message) < 200 else fault.instance,
        "where": ".".join(map(str, fault.absolute_path))[:200],
        "wrong": True,
    }


def main() -> None:
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)

    def interrupt(signum: int, frame: Any) -> None:
        raise OutOfTime

    signal.signal(signal.SIGPROF, interrupt)
    answer({"do": "check", "schema": {"type": "object"}, "arguments": {}})  # its imports count against no question
    limit(resource.RLIMIT_AS, MEMORY_MIB * 2**20)
    limit(resource.RLIMIT_FSIZE, 0)
    limit(resource.RLIMIT_CORE, 0)
    replies.write(json.dumps({"id": 0}) + "\n")
    replies.flush()
    for line in sys.stdin:
        question = json.loads(line)
        used = resource.getrusage(resource.RUSAGE_SELF)
        limit(resource.RLIMIT_CPU, int(used.ru_utime + used.ru_stime) + KILL_AFTER_CPU_S)
        try:
            try:
                signal.setitimer(signal.ITIMER_PROF, CPU_S, CPU_S)
                said = answer(question)
            finally:
                signal.setitimer(signal.ITIMER_PROF, 0)
        except OutOfTime:
            said = {"late": True}
        except Exception as error:  # the schema or the arguments brought it about; the sentence says what it was
            said = {"fault": f"it cannot be checked ({type(error).__name__})", "wrong": True, "where": ""}
        try:
            text = json.dumps({**said, "id": question["id"]})
        except (ValueError, RecursionError):
            text = json.dumps({"fault": "it cannot be checked", "wrong": True, "where": "", "id": question["id"]})
        replies.write(text + "\n")
        replies.flush()


if __name__ == "__main__":
    main()
