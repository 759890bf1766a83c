"""An environment that is played on servers elsewhere (`--env grpc://HOST:PORT/NAME`).

What a server sends is checked as what an environment returns is; a server that breaks the contract is set aside.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from mafrt.core.errors import EnvError
from mafrt.core.types import Observation, StepResult
from mafrt.environment.contract import MOST_MEASURES, checked_reset, checked_step
from mafrt.environment.remote import environment_pb2 as pb
from mafrt.environment.remote.messages import pack_actions, unpack_failure, unpack_reset, unpack_result
from mafrt.environment.remote.pool import Servers, ServerSession
from mafrt.environment.replayed import LostError, ReplayedEnv

T = TypeVar("T")


class RemoteEnv(ReplayedEnv[ServerSession]):
    """One environment on one or more servers.

    Args:
        address: `grpc://HOST:PORT[,HOST:PORT...][/NAME]`, or `grpc://@FILE/NAME` with an address on every line of FILE.
        held_out: play the held-out instances.

    Raises:
        EnvError: the address is none, no server can be reached, or one serves something else.
    """

    def __init__(self, address: str, held_out: bool = False) -> None:
        addresses, name = parsed(address)
        self._servers = Servers(addresses, name)
        self._end = self._servers.leave
        described = self._servers.description
        assert described is not None
        self._held = held_out
        self.agents = tuple(described.agents)
        self.num_tasks = None if described.num_tasks < 0 else described.num_tasks
        self.max_steps = None if described.max_steps < 0 else described.max_steps
        self.costly_reset, self.opponents = described.costly_reset, described.opponents
        if described.held_out and not held_out:
            self.held_out = {"held_out": True}
        elif held_out and not described.held_out:
            raise EnvError(f"{address} has no held-out instances; start the servers with --eval_env_kwargs")
        self.identity = described.identity
        """hash of class, arguments and source of the environment that the servers play"""
        self._begin()

    def _begin(self) -> None:
        super()._begin()
        self._seed, self._task = 0, None
        self._first: dict[str, Observation] | None = None
        self._steps: list[tuple[dict[str, str], StepResult]] = []

    def reset(
        self, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, Observation], dict[str, Any]]:
        # A drawn seed, so that the episode can be played again.
        self._seed = self.rng.getrandbits(62) if seed is None else seed
        self._task = (options or {}).get("task")
        self._first, self._steps = None, []
        observations, info = self._persist(self._reset)
        self._first = observations
        return observations, info

    def step(self, actions: dict[str, str]) -> StepResult:
        result = self._persist(lambda: self._step(len(self._steps), actions))
        self._steps.append((dict(actions), result))
        return result

    # ------------------------------------------------------------------------------------------------------- servers

    def _open(self) -> ServerSession:
        return self._servers.open_session(self._held)

    def _play_again(self) -> bool:
        if self._first is None:
            return True
        observations, _ = self._reset()
        same = observations == self._first
        for number, (actions, shown) in enumerate(self._steps):
            same = same and tuple(self._step(number, actions))[:4] == tuple(shown)[:4]
        return same

    def _reset(self) -> tuple[dict[str, Observation], dict[str, Any]]:
        request = pb.ResetRequest(session=self._sessions[0].session, seed=self._seed, task=self._task)
        reply = self._servers.call(self._sessions[0], "Reset", request)
        return self._read(reply, "reset()", lambda where: checked_reset(self.agents, where, unpack_reset(reply)))

    def _step(self, number: int, actions: dict[str, str]) -> StepResult:
        request = pb.StepRequest(session=self._sessions[0].session, number=number, actions=pack_actions(actions))
        server = self._sessions[0].server
        reply = self._servers.call(self._sessions[0], "Step", request)

        def read(where: str) -> StepResult:
            result = checked_step(self.agents, where, unpack_result(reply))
            server.measures.update(result.info.get("measures", ()))
            if len(server.measures) > MOST_MEASURES:
                raise ValueError(f"it has measured under more than {MOST_MEASURES} names")
            return result

        return self._read(reply, "step()", read)

    def _read(self, reply: Any, method: str, read: Callable[[str], T]) -> T:
        """A reply, checked. A failure of the environment is raised; a server that breaks the contract is set aside."""
        if reply.HasField("failure"):
            raise unpack_failure(reply.failure)
        seat = self._sessions[0]
        try:
            return read(f"the reply of {seat.server.address} to {method}")
        except (EnvError, ValueError, TypeError, KeyError, AttributeError) as error:
            self._servers.mark_broken(seat, f"it broke the protocol: {' '.join(str(error).split())[:200]}")
            raise LostError(seat.server.address) from None


def parsed(address: str) -> tuple[list[str], str]:
    """Addresses and name of `grpc://...`. Raises EnvError."""
    body = address.removeprefix("grpc://")
    places, slash, name = body.rpartition("/")
    if not slash:
        places, name = body, ""
    if places.startswith("@"):
        return [places], name
    addresses = [place.strip() for place in places.split(",") if place.strip()]
    for place in addresses:
        host, _, port = place.rpartition(":")
        if not host or not port.isdigit() or not 0 < int(port) < 65536:
            raise EnvError(f"{address}: {place!r} is no HOST:PORT; expected grpc://HOST:PORT/NAME")
    if not addresses:
        raise EnvError(f"{address} names no server; expected grpc://HOST:PORT/NAME")
    return addresses, name
