"""Calls of `strict` tools in answers that no grammar has bound: arguments that do not fit make an answer words."""

from __future__ import annotations

import importlib.util
import json
from dataclasses import replace

from mafrt.core.extras import install
from mafrt.environment.chat_api.protocol import ApiError, ChatCall, ChatReply, parts_of
from mafrt.envs.tools.checker import CHECKER
from mafrt.envs.tools.failed import Failed


def held_to_strict(call: ChatCall, reply: ChatReply) -> ChatReply:
    """The reply, as words where a call of a strict tool does not fit the tool's schema.

    Raises:
        ApiError (400): the schema is none; a package is missing.
    """
    if not call.strict:
        return reply
    for tool_call in parts_of(call, reply)[1]:
        schema = call.schemas.get(tool_call.name)
        if tool_call.name not in call.strict or schema is None:
            continue
        if importlib.util.find_spec("jsonschema") is None:
            raise ApiError(400, f"a strict tool needs a package: {install('serve')}")
        if (fault := CHECKER.schema_fault(schema)) is not None:
            raise ApiError(400, f"the strict tool {tool_call.name!r} has 'parameters' that are no JSON schema: {fault}")
        try:
            fits = CHECKER.wrong(schema, json.loads(tool_call.arguments)) is None
        except Failed:  # it takes too long to find out
            fits = False
        if not fits:
            return replace(reply, misfit=True)
    return reply
