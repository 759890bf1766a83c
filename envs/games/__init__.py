"""Small worlds that are generated from a seed and have to be learnt: docs/games.md."""

from mafrt.envs.games.base import Game, baseline_scores, play
from mafrt.envs.games.haggle import Haggle
from mafrt.envs.games.plan_path import PlanPath
from mafrt.envs.games.propose_solve import ProposeSolve
from mafrt.envs.games.referential import Referential
from mafrt.envs.games.sokoban import Sokoban
from mafrt.envs.games.sudoku import Sudoku
from mafrt.envs.games.tic_tac_toe import TicTacToe

__all__ = ["Game", "Haggle", "PlanPath", "ProposeSolve", "Referential", "Sokoban", "Sudoku", "TicTacToe"]
__all__ += ["baseline_scores", "play"]
