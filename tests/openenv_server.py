"""Environments of OpenEnv for tests, made with its own classes: run by an interpreter that has `openenv` and `uvicorn`.

python openenv_server.py KIND PORT
"""

import random
import sys

import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_app
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation


class Say(Action):
    message: str


class Seen(Observation):
    text: str = ""


class Guess(Environment):
    """A number from 0 to 3 that the prompt tells by a letter; two tries."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed=None, episode_id=None, **kwargs):
        self.number, self.tries = random.Random(seed).randrange(4), 0
        return Seen(text=f"The letter is {'abcd'[self.number]}. Which number is it?")

    def step(self, action, timeout_s=None, **kwargs):
        if action.message == "fail":
            raise ValueError("the environment fell over")
        self.tries += 1
        right = str(self.number) in action.message
        return Seen(text="No. Again?", reward=float(right), done=right or self.tries == 2)

    @property
    def state(self):
        return State(step_count=self.tries)


class Place(Action):
    column: int
    loud: bool = False


class Board(Observation):
    board: tuple[int, ...] = ()
    current_player_id: int = 0


class Turns(Environment):
    """Two players name a column each; the same column as the other's costs 1, another pays 1."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed=None, episode_id=None, **kwargs):
        self.board = []
        return Board()

    def step(self, action, timeout_s=None, **kwargs):
        self.board.append(action.column)
        done = len(self.board) == 2
        paid = None if not done else 1.0 if len(set(self.board)) > 1 else -1.0
        return Board(board=tuple(self.board), current_player_id=len(self.board) % 2, reward=paid, done=done)

    @property
    def state(self):
        return State()


class Tools(MCPEnvironment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        from fastmcp import FastMCP

        server = FastMCP("tools")

        @server.tool
        def double(number: int) -> int:
            """Twice the number."""
            return 2 * number

        super().__init__(server)

    def reset(self, seed=None, episode_id=None, **kwargs):
        return Observation(metadata={})

    def _step_impl(self, action, timeout_s=None, **kwargs):
        return Observation(metadata={"error": "unknown"})

    @property
    def state(self):
        return State()


KINDS = {
    "guess": (Guess, Say, Seen),
    "turns": (Turns, Place, Board),
    "tools": (Tools, CallToolAction, CallToolObservation),
}

if __name__ == "__main__":
    kind, port = sys.argv[1:]
    app = create_app(*KINDS[kind], env_name=kind, max_concurrent_envs=64)
    uvicorn.run(app, host="127.0.0.1", port=int(port), log_level="error")
