"""Process that does the tools' open-ended work: JSON schema checks, and arithmetic. JSON lines in, JSON lines out.

A schema comes from a server and its arguments from a model: a pattern such as `^(a+)+$` or twenty doubled `anyOf` take
for ever. Here that ends with the processor time of one question; `checker.py` is the trainer's side. Nothing is
fetched: a schema's references to other documents are faults.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mafrt.core.bounded_worker import answer_requests, replies
from mafrt.core.text import brief
from mafrt.envs.tools.calculator import compute
from mafrt.envs.tools.failed import Failed

MEMORY_MIB = 1024
CPU_S = 1.0
KILL_AFTER_CPU_S = 3
_REFERENCES = ("$ref", "$dynamicRef", "$recursiveRef")


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


def answer(question: Mapping[str, Any]) -> dict[str, Any]:
    """`fault`: a sentence, or None; `value` of an expression; `where` the fault of arguments is."""
    if question["do"] == "compute":
        try:
            return {"fault": None, "value": compute(question["expression"])}
        except Failed as failure:
            return {"fault": str(failure)}
    import jsonschema

    schema = question["schema"]
    try:
        if question["do"] == "schema":
            if (elsewhere := foreign_reference(schema)) is not None:
                return {"fault": f"it refers to another document, {elsewhere!r}"}
            kind, check = validator(schema)
            kind.check_schema(schema)
            any(check().iter_errors({}))  # a schema that refers to itself without end fits no arguments
            return {"fault": None}
        fault = jsonschema.exceptions.best_match(validator(schema)[1]().iter_errors(question["arguments"]))
    except jsonschema.SchemaError as error:
        return {"fault": error.message[:300]}
    except RecursionError:
        return {"fault": "it refers to itself without end"}
    except Exception as error:  # the schema or the arguments brought it about; the sentence says what it was
        return {"fault": f"it cannot be checked ({type(error).__name__})"}
    if fault is None:
        return {"fault": None}
    told = fault.message if len(fault.message) < 200 else f"found {brief(fault.instance)}"
    return {"fault": told, "where": ".".join(map(str, fault.absolute_path))[:200]}


def main() -> None:
    reply = replies()
    answer({"do": "check", "schema": {"type": "object"}, "arguments": {}})  # its imports count against no question
    answer_requests(reply, answer, {}, memory_mib=MEMORY_MIB, cpu_s=CPU_S, kill_after_s=KILL_AFTER_CPU_S)


if __name__ == "__main__":
    main()
