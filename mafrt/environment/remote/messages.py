"""Observations, results and errors as messages of `environment.proto`, and back. Nothing is ever unpickled."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from mafrt.core.distributed import packed_error, unpacked_error
from mafrt.core.errors import EnvError, MafrtError
from mafrt.core.reading import parse_json
from mafrt.core.records import pack_step, unpack_step
from mafrt.core.text import brief, shortened
from mafrt.core.types import Observation, StepResult
from mafrt.environment.remote import environment_pb2 as pb
from mafrt.environment.worker_process import plain

PROTOCOL = 1
"""Version of the protocol; a server and a client of different versions refuse each other."""
TOKEN = "MAFRT_ENV_TOKEN"
"""Environment variable with the servers' token: keys are never arguments."""
LARGEST = 64 << 20
"""Bytes of one reply."""
LARGEST_REQUEST = 8 << 20
"""Bytes of one request, which holds the texts of one turn: as many lie in memory as there are calls."""
LONGEST_FAILURE = 500
"""Characters of an error's text."""
MOST_AGENTS = 256
"""Agents of an environment, of which each acts once in a step."""
FAILURES = ("EnvError", "EnvDownError", "SandboxError", "DataError", "ConfigError")
"""Classes of errors that an environment may have met."""
OPTIONS = [("grpc.max_send_message_length", LARGEST), ("grpc.max_receive_message_length", LARGEST)]


def pack_observations(observations: Mapping[str, Observation]) -> list[pb.Observation]:
    """In their order, which is that of the agents' turns."""
    packed = []
    for agent, seen in observations.items():
        if isinstance(seen, str):
            packed.append(pb.Observation(agent=agent, text=seen))
        else:
            messages = [pb.Message(role=m["role"], json=json.dumps(m, default=plain)) for m in seen]
            packed.append(pb.Observation(agent=agent, messages=messages))
    return packed


def unpack_observations(packed: Iterable[pb.Observation]) -> dict[str, Observation]:
    """Raises ValueError for a message that is no JSON object or has another role in it, and an agent that sees two."""
    return _once(
        (item.agent, item.text if item.HasField("text") else [_message(message) for message in item.messages])
        for item in packed
    )


def _message(message: pb.Message) -> dict[str, Any]:
    found = _object(message.json)
    if found.get("role") != message.role:
        raise ValueError(
            f"a message of the role {brief(message.role)} is one of {brief(found.get('role'))} in its JSON"
        )
    return found


def _once(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Agent -> value. ValueError for an agent that has two."""
    found: dict[str, Any] = {}
    for agent, value in pairs:
        if agent in found:
            raise ValueError(f"it holds two values for {brief(agent)}")
        found[agent] = value
    return found


def pack_actions(actions: Mapping[str, str]) -> list[pb.Action]:
    return [pb.Action(agent=agent, text=text) for agent, text in actions.items()]


def unpack_actions(packed: Sequence[pb.Action]) -> dict[str, str]:
    """Raises ValueError for more actions than a team has agents, and for an agent with two."""
    if len(packed) > MOST_AGENTS:
        raise ValueError(f"it holds {len(packed)} actions; expected at most {MOST_AGENTS}")
    return _once((action.agent, action.text) for action in packed)


def pack_reset(observations: Mapping[str, Observation], info: Mapping[str, Any]) -> pb.ResetReply:
    return pb.ResetReply(observations=pack_observations(observations), info=json.dumps(info, default=plain))


def unpack_reset(reply: pb.ResetReply) -> tuple[dict[str, Observation], dict[str, Any]]:
    """Raises ValueError for a reply that is none."""
    return unpack_observations(reply.observations), _object(reply.info)


def pack_result(result: StepResult) -> pb.StepReply:
    record = pack_step(result)
    return pb.StepReply(
        observations=pack_observations(result.observations),
        rewards=[pb.Reward(agent=agent, amount=amount) for agent, amount in result.rewards.items()],
        terminated=result.terminated,
        truncated=result.truncated,
        info=json.dumps(record["info"], default=plain),
    )


def unpack_result(reply: pb.StepReply) -> StepResult:
    """Raises ValueError, TypeError, KeyError or AttributeError for a reply that is none."""
    return unpack_step(
        {
            "observations": unpack_observations(reply.observations),
            "rewards": _once((reward.agent, reward.amount) for reward in reply.rewards),
            "terminated": reply.terminated,
            "truncated": reply.truncated,
            "info": _object(reply.info),
        }
    )


def pack_failure(error: MafrtError) -> pb.Failure:
    packed = packed_error(error)
    return pb.Failure(kind=packed["kind"], text=shortened(packed["text"], LONGEST_FAILURE))


def unpack_failure(failure: pb.Failure) -> MafrtError:
    """The error of an environment, on one line; what only a run itself can meet becomes an EnvError."""
    kind = failure.kind if failure.kind in FAILURES else EnvError.__name__
    return unpacked_error(
        {"kind": kind, "text": shortened(failure.text, LONGEST_FAILURE) or "the environment gave no reason"}
    )


def _object(text: str) -> dict[str, Any]:
    value = parse_json(text)
    if not isinstance(value, dict):
        raise ValueError(f"a {type(value).__name__} instead of a JSON object")
    return value
