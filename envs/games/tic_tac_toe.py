"""`tic_tac_toe`: two players on nine cells, from start positions that are already begun.

An instance is a position after a few legal moves; held-out instances are positions that no rotation or reflection of a
training one gives. The solver is a minimax over all continuations. Training is self-play of `x` and `o`; evaluations
play the one whose turn it is first, x or o, against a scripted opponent.
"""

from __future__ import annotations

import random
import re
from functools import cache
from types import MappingProxyType
from typing import Any

from mafrt.core.errors import ConfigError
from mafrt.core.types import Observation, Scored, StepResult
from mafrt.envs.games.base import PLAYERS, Game, Player, scored

LINES = ((0, 1, 2), (3, 4, 5), (6, 7, 8), (0, 3, 6), (1, 4, 7), (2, 5, 8), (0, 4, 8), (2, 4, 6))
FREE = "."
SEATS = ("x", "o")
OPPONENTS = ("self", *PLAYERS)
_TURN = (6, 3, 0, 7, 4, 1, 8, 5, 2)
_MIRROR = (2, 1, 0, 5, 4, 3, 8, 7, 6)
_NUMBER = re.compile(r"\d+")


def winner(board: str) -> str | None:
    """The seat with three in a line, or None."""
    return next((board[a] for a, b, c in LINES if board[a] != FREE and board[a] == board[b] == board[c]), None)


def to_move(board: str) -> str:
    """The seat whose turn it is; x begins."""
    return SEATS[(9 - board.count(FREE)) % 2]


def after(board: str, cell: int) -> str:
    """The board after the seat to move has taken a free cell, 0 to 8."""
    return board[:cell] + to_move(board) + board[cell + 1 :]


@cache
def value(board: str) -> int:
    """Result under best play for the seat to move: 1 win, 0 draw, -1 loss."""
    if winner(board) is not None:
        return -1  # the seat that has just moved has won
    return max((-value(after(board, cell)) for cell in free_cells(board)), default=0)


def free_cells(board: str) -> list[int]:
    return [cell for cell, sign in enumerate(board) if sign == FREE]


def best_cells(board: str) -> list[int]:
    """The moves that keep the value of the board."""
    return [cell for cell in free_cells(board) if -value(after(board, cell)) == value(board)]


RESULTS = {-1: "a loss", 0: "a draw", 1: "a win"}


def kept(before: str, board: str) -> Scored:
    """Score of a legal move by the result that best play still promises its seat: all of it 10, a win for a draw 5."""
    promised, left = value(before), -value(board)
    score = 10.0 * (left + 1) / (promised + 1) if promised > -1 else 10.0
    return Scored(score, f"Best play promised {RESULTS[promised]}, and {RESULTS[left]} after this move.")


def canonical(board: str) -> str:
    """The same text for all rotations and reflections of a board."""
    seen = []
    for _ in range(4):
        board = "".join(board[cell] for cell in _TURN)
        seen += [board, "".join(board[cell] for cell in _MIRROR)]
    return min(seen)


class TicTacToe(Game):
    """Two players; a move is the number of a free cell, 1 to 9.

    In self-play a win pays 1 and a loss -1, and a move that is not legal ends the game and pays its player -1: the
    summed reward is 0 for legal play and falls to -1 where no player knows a legal move. Against a scripted opponent
    the outcome is 1 for a win, .5 for a draw, 0 for a loss or an illegal move.

    Args:
        plies: most moves of a start position, 2 to 5; at least two are made.
        opponent: `self`, or the scripted player on the other seat: `optimal`, `random` or `constant`.
        split: `train`, `validation` or `test`.
        brief: observations without instructions.
    """

    agents = SEATS
    max_steps = 9
    bounded = True
    held_out = MappingProxyType({"split": "test", "opponent": "random"})
    validation = MappingProxyType({"split": "validation", "opponent": "random"})

    def __init__(self, plies: int = 4, opponent: str = "self", split: str = "train", brief: bool = False) -> None:
        super().__init__(split, brief)
        if not 2 <= plies <= 5 or opponent not in OPPONENTS:
            raise ConfigError(
                f"plies is {plies} and opponent is {opponent!r}; choose 2 to 5 moves and {', '.join(OPPONENTS)}."
            )
        self.plies, self.opponent = plies, opponent
        # A scripted opponent is no agent: then there is one outcome for both seats of the team.
        self.opponents = opponent == "self"

    def draw(self, rng: random.Random) -> str:
        while True:
            board = FREE * 9
            for _ in range(rng.randint(2, self.plies)):
                board = after(board, rng.choice(free_cells(board)))
            # No seat has won, and no move wins at once, so both seats act before a game ends.
            if winner(board) is None and not any(winner(after(board, cell)) for cell in free_cells(board)):
                break
        self.board, self.seat, self.promised = board, to_move(board), value(board)
        return f"{canonical(board)}|{board}"

    def start(self) -> dict[str, Observation]:
        return {self.seat: self.shown()}

    def _answer(self) -> None:
        """The scripted opponent moves; an illegal move of the constant player becomes a random one."""
        cells = free_cells(self.board)
        move = self.move(self.opponent, to_move(self.board), self.rng)  # type: ignore[arg-type]
        cell = int(move) - 1
        self.board = after(self.board, cell if cell in cells else self.rng.choice(cells))

    def shown(self) -> str:
        """The board with free cells as numbers, for the seat to move."""
        cells = [str(cell + 1) if sign == FREE else sign.upper() for cell, sign in enumerate(self.board)]
        if self.brief:
            return f"{to_move(self.board).upper()} {' '.join(cells)}"
        rows = "\n".join(" ".join(cells[row : row + 3]) for row in (0, 3, 6))
        return f"You are {to_move(self.board).upper()}.\n{rows}\nSay the number of a free cell."

    def step(self, actions: dict[str, str]) -> StepResult:
        [(seat, text)] = actions.items()
        match = _NUMBER.search(text)
        cell = int(match[0]) - 1 if match is not None and len(match[0]) == 1 else -1
        if cell not in free_cells(self.board):
            return self._over({seat: -1.0}, None, False, scored(seat, Scored(0.0, "The move is not legal.")))
        before, self.board = self.board, after(self.board, cell)
        score = scored(seat, kept(before, self.board))
        if self.opponent != "self" and not self._ended():
            self._answer()
        if not self._ended():
            return StepResult({to_move(self.board): self.shown()}, {}, False, False, score)
        won = winner(self.board)
        rewards = dict.fromkeys(SEATS, 0.0) if won is None else {s: 1.0 if s == won else -1.0 for s in SEATS}
        return self._over(rewards, won, True, score)

    def _ended(self) -> bool:
        return winner(self.board) is not None or FREE not in self.board

    def _over(self, rewards: dict[str, float], won: str | None, legal: bool, score: dict[str, Any]) -> StepResult:
        measures = {"legal": float(legal), "draw": float(legal and won is None)}
        if self.opponent == "self":
            return StepResult({}, rewards, True, False, {"measures": measures, **score})
        result = -1 if not legal else 0 if won is None else 1 if won == self.seat else -1
        measures |= {"won": float(result == 1), "lost": float(result == -1), "kept": float(result >= self.promised)}
        info = {"outcome": (result + 1) / 2, "measures": measures, **score}
        return StepResult({}, {}, True, False, info)

    def move(self, player: Player, agent: str, rng: random.Random) -> str:
        if player == "constant":
            return "5"
        cells = best_cells(self.board) if player == "optimal" else free_cells(self.board)
        return str(rng.choice(cells) + 1)
