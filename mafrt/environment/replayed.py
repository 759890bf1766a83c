"""Environments that are played on servers: the episode of one that dies is played again on another.

An environment is a function of its seed and the actions, so an episode is brought up to where it was and goes on there:
none is lost, and none is counted twice.
"""

from __future__ import annotations

import copy
import random
import weakref
from collections.abc import Callable
from typing import Any, Generic, Protocol, Self, TypeVar

from mafrt.core.errors import EnvError
from mafrt.environment.base import Env

T = TypeVar("T")


class LostError(Exception):
    """A session is gone with its server; the episode has to be played again on another one."""

    def __init__(self, why: str, *, late: bool = False) -> None:
        """`late`: the server did not answer within the deadline of the call."""
        super().__init__(why)
        self.late = late


class OnServer(Protocol):
    """A session; `server.address` says where."""

    server: Any


S = TypeVar("S", bound=OnServer)

MOST_LOST = 50
"""Times that an episode is played again for one call"""
MOST_LATE = 3
"""of them after a server was late: an environment that hangs costs a deadline each time"""


class ReplayedEnv(Env, Generic[S]):
    """Base class of environments whose episodes are sessions on servers.

    A subclass defines `_open`, `_play_again` and `_end`, calls `_begin` at the end of its constructor, and makes its
    calls through `_persist`, in which `LostError` means that the session is gone.
    """

    blocking = True  # steps wait for a server: environments played side by side are stepped in threads
    bounded = True  # every call has a deadline

    _end: Callable[[S], None]
    """Ends a session. Not a method, since it is called when the environment is gone."""

    def _open(self) -> S:
        """A new session."""
        raise NotImplementedError

    def _play_again(self) -> bool:
        """Bring a new session to where the episode is; whether it went the same way. True without an episode."""
        raise NotImplementedError

    def _begin(self) -> None:
        """No session and no episode yet."""
        self._sessions: list[S] = []  # at most one; a list, so that the finaliser sees the last one
        weakref.finalize(self, _leave, self._sessions, self._end)

    def spawn(self) -> Self:
        twin = copy.copy(self)
        twin.rng, twin.step_count = random.Random(), 0
        twin._begin()
        return twin

    def close(self) -> None:
        _leave(self._sessions, self._end)

    def _persist(self, call: Callable[[], T]) -> T:
        """The result of a call on a server that is alive; the episode so far is played again where it has to be.

        Raises:
            EnvError: the environment raised or hangs, an episode that is played again goes another way, or the servers
                keep no session.
            EnvDownError: no server is left.
        """
        late = 0
        for _ in range(MOST_LOST):
            try:
                if not self._sessions:
                    self._sessions.append(self._open())
                    if not self._play_again():
                        address = self._sessions[0].server.address
                        self.close()
                        raise EnvError(
                            f"an episode that lost its server was played again on {address} and went another way with "
                            "the same seed and actions; draw from self.rng only, and set all state in reset()"
                        )
                return call()
            except LostError as lost:
                self.close()
                late += lost.late
                if late == MOST_LATE:
                    raise EnvError(f"no answer within the deadline, {late} times in one call: {lost}") from None
        raise EnvError(f"an episode lost its session {MOST_LOST} times in one call; the servers answer, but keep none")


def _leave(sessions: list[S], end: Callable[[S], None]) -> None:
    while sessions:
        end(sessions.pop())
