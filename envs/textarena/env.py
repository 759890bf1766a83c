"""`TextArena`: games of the package `textarena` (Guertler et al. 2025, arXiv:2504.11442), a seat for each agent."""

from __future__ import annotations

import copy
import difflib
import inspect
import itertools
import pkgutil
import random
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

from mafrt.config.schema import check_bool, check_choice, check_number
from mafrt.core.errors import ConfigError, EnvError, MissingExtraError
from mafrt.core.extras import install
from mafrt.core.forked_trial import TRIAL_CPU_S, TRIAL_MIB, in_fork
from mafrt.core.text import error_line, shortened
from mafrt.core.types import Observation, StepResult
from mafrt.environment.base import Env
from mafrt.environment.registry import check_types
from mafrt.envs.construction import SPLITS

FIRST = {"test": 0, "validation": 10**6, "train": 2 * 10**6}
"""Seed of a split's first game."""
MOST_PLAYERS = 15
OPPONENTS = ("self", "random")
GAME = -1
"""stands for the game among those who speak"""
KINDS = ("GAME_BOARD", "GAME_ADMIN")
"""kinds of message of a brief observation: the board, and what the referee says, such as why a move is illegal"""
_BRACKETS = re.compile(r"[\[\]]|[^\[\]]+")
_PLAYER = re.compile(r"Player \d+")
_ENDS = r"\n\v\f\r\x1c-\x1e\x85\u2028\u2029"
_FURTHER = re.compile(rf"(?<=[{_ENDS}])(?=[^\S{_ENDS}]*\[)")
"""The beginning of a further line that opens a bracket."""
ADDRESSED = "[Player X]"
"""Stands in the rules of a game in which `[Player 3]` is a move."""
MOVES = ("hm", "[0]", "[1 1]", "[A]")
"""that are tried at the beginning: a game that raises an error at all of them fails at whatever is said"""
ANY_NUMBER = re.compile("reward|profit|payoff|penalty|guess|min_")
MAY_BE_NONE = re.compile("allowance|blind|capstones|communication|conversation|discussion|gap|holes|mines|ratio|seed")
"""Names of a game's settings that may be any number, and that may be 0: others count what a game cannot do without."""
LONGEST = 200_000
"""most characters of a first observation"""
_OPEN = re.compile(r"available|valid|legal|possible", re.IGNORECASE)
_MOVE = re.compile(r"\[[^\[\]\n]+\]")
"""A move, such as [4], in a line of those that are open."""


class TextArena(Env):
    """A game of TextArena; `player_0`, `player_1` and so on act when it is their turn.

    Among several players each is paid what the game pays its seat, from -1 for a loss to 1; what is paid in chips or
    beyond these is placed between the seat with the least, -1, and the one with the most. A game for one player, and
    one against a scripted opponent, has an outcome instead: 0 for a loss to 1 for a win or more. TextArena answers an
    illegal move with a warning, and a second one in a row with a loss; an action that makes a game fail is a loss too.
    The share of such games is the measure `illegal`.
    """

    held_out = MappingProxyType({"split": "test"})
    validation = MappingProxyType({"split": "validation"})

    def __init__(
        self,
        name: str,
        players: int | None = None,
        config: Mapping[str, Any] | None = None,
        opponent: str = "self",
        size: int = 1000,
        held_out_size: int = 200,
        split: str = "train",
        max_turns: int = 64,
        brief: bool = False,
    ) -> None:
        """Make the game.

        Args:
            name: as TextArena registers it, such as `TicTacToe-v0`.
            players: how many; None: two if the game takes two, else the fewest that it takes.
            config: arguments of the game itself.
            opponent: `self`, or `random`: one seat, drawn for each game, is the team's, and the others draw among the
                moves that the game lists.
            size: games of the training split, each with a seed of its own.
            held_out_size: games of `validation`, and of `test`.
            split: `train`, `validation` or `test`.
            max_turns: turns after which a game is cut.
            brief: an observation is the game's last board and what the referee has said since, without the rules and
                the moves so far: for a small base, in a game whose board says it all.

        Raises:
            ConfigError: a game or a number of players that is not there.
            MissingExtraError: textarena is not installed.
        """
        check_choice("split", split, SPLITS)
        check_choice("opponent", opponent, OPPONENTS)
        for what, value in (("size", size), ("held_out_size", held_out_size), ("max_turns", max_turns)):
            check_number(what, value, least=1, most=10**6, whole=True)
        check_bool("brief", brief)
        self.name, self.split, self.opponent, self.brief = name, split, opponent, brief
        self.num_tasks = size if split == "train" else held_out_size
        self.max_steps = max_turns
        self._chance = random.Random(0).getstate()
        settings = dict(config or {})
        self._check(settings)
        self._try(settings, players)
        self._fresh = self._made(settings)
        """the game before its first reset: its wrappers keep what was seen over a reset, so that each begins anew"""
        count = self._players(players)
        if opponent != "self" and count < 2:
            raise ConfigError(f"{name} is a game for one player, so that opponent {opponent!r} has no seat.")
        self.agents = tuple(f"player_{seat}" for seat in range(count))
        self.opponents = count > 1 and opponent == "self"
        try:
            # A game says what it shows once it has begun, the team in one seat after the other.
            for task in range(count if opponent != "self" else 1):
                self.reset(options={"task": task % self.num_tasks})
        except EnvError as error:
            raise ConfigError(str(error)) from error
        given = f" with config {shortened(str(settings))}" if settings else ""
        if max(map(len, self.next_seen.values())) > LONGEST:
            raise ConfigError(f"textarena's {name} shows more than {LONGEST} characters{given}; make it smaller.")
        if (fault := self._same_whatever_is_said()) is not None:
            raise ConfigError(f"textarena's {name} {fault}{given}; choose another game.")

    def _check(self, config: dict[str, Any]) -> None:
        """Raise ConfigError for a game that is not there, or a setting of another type than the game names."""
        try:
            import textarena  # noqa: F401
            from textarena.envs.registration import ENV_REGISTRY
        except ImportError as error:
            raise MissingExtraError(f"games of TextArena need its package ({error}); {install('textarena')}") from error
        if self.name not in ENV_REGISTRY:
            near = difflib.get_close_matches(self.name, ENV_REGISTRY, 1)
            hint = f"did you mean {near[0]!r}?" if near else f"it has {', '.join(sorted(ENV_REGISTRY)[:4])} and others."
            raise ConfigError(f"textarena has no game {self.name!r}; {hint}")
        with self._made_here():
            factory = pkgutil.resolve_name(ENV_REGISTRY[self.name].entry_point)
        try:
            # It compares a text with a number when it is played, and every action would be an agent's loss.
            check_types(f"textarena:{self.name}", factory.__init__, config)
        except EnvError as error:
            raise ConfigError(str(error)) from error
        self._check_numbers(config, ENV_REGISTRY[self.name].kwargs, inspect.signature(factory.__init__).parameters)

    def _check_numbers(
        self, config: dict[str, Any], registered: Mapping[str, Any], declared: Mapping[str, Any]
    ) -> None:
        """Raise ConfigError for a number that a game cannot mean, judged by the setting's name and usual value.

        Few games look at their settings: with piles of -1 each move loses, with -1 turns the first one ends the game.
        """
        for setting, value in config.items():
            usual = registered.get(setting, getattr(declared.get(setting), "default", None))
            bounds: dict[str, Any] = {"most": 1.0} if isinstance(usual, float) and 0.0 < usual < 1.0 else {}
            if not ANY_NUMBER.search(setting):
                bounds["least" if MAY_BE_NONE.search(setting) else "above"] = 0.0
            for number in value if isinstance(value, (list, tuple)) else [value]:
                if type(number) in (int, float) or (type(usual) in (int, float) and value is not None):
                    check_number(f"textarena:{self.name}: {setting}", number, **bounds)

    def _same_whatever_is_said(self) -> str | None:
        """What the game that has begun does at every move that is tried: it fails, or is over and pays the same."""
        failed, paid = "", []
        for move in MOVES:
            game = copy.deepcopy(self.game)
            try:
                with self._own_chance():
                    over, _ = game.step(action=move)
                if not over:
                    return None
                paid.append(game.close()[0])
            except Exception as error:
                failed = f"fails at whatever is said ({type(error).__name__}: {error_line(error)})"
        same = len(paid) == len(MOVES) and all(each == paid[0] for each in paid)
        return "is over after one move and pays the same whatever is said" if same else None if paid else failed

    def _try(self, config: dict[str, Any], players: int | None) -> None:
        """Begin the game in a fork first: nothing else bounds a board of a billion cells. Raises ConfigError."""

        def begin() -> str:
            try:
                self._fresh = self._made(config)
                count = self._players(players)
                with self._own_chance():  # how long it takes to begin may depend on the seed
                    game = copy.deepcopy(self._fresh)
                    game.reset(num_players=count, seed=FIRST[self.split or "train"])
                    game.get_observation()
            except ConfigError as error:
                return str(error)
            except Exception:  # told when the first game begins
                return ""
            return ""

        fault = in_fork(begin)
        if not fault:
            given = f" with config {shortened(str(config))}" if config else ""
            raise ConfigError(
                f"textarena's {self.name} does not begin within {TRIAL_CPU_S} s and {TRIAL_MIB} MiB of memory{given}; "
                "make it smaller, or choose another game."
            )
        if fault[0]:
            raise ConfigError(fault[0])

    def _made(self, config: dict[str, Any]) -> Any:
        import textarena

        with self._made_here(), self._own_chance():
            return textarena.make(self.name, **config)

    @contextmanager
    def _made_here(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            why = f"{type(error).__name__}: {error_line(error)}"
            raise ConfigError(f"textarena's {self.name} cannot be made here ({why}).") from error

    def _players(self, asked: int | None) -> int:
        """How many seats the game has. A game says so by refusing to begin with another number."""
        why, other = "", None
        for count in (2, 1, *range(3, MOST_PLAYERS + 1)) if asked is None else (asked,):
            try:
                with self._own_chance():
                    copy.deepcopy(self._fresh).reset(num_players=count, seed=0)
                return int(count)
            except Exception as error:
                why = f"{type(error).__name__}: {error_line(error)}"
                if not isinstance(error, AssertionError):  # which says that the number is not the game's
                    other = other or why
        why = other or why
        with_so_many = "" if asked is None else f" with {asked} players"
        raise ConfigError(f"textarena's {self.name} does not begin{with_so_many} ({why}).")

    def reset(
        self, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, Observation], dict[str, Any]]:
        assert self.num_tasks is not None
        chosen = (options or {}).get("task")
        number = self.rng.randrange(self.num_tasks) if chosen is None else chosen
        game_seed = FIRST[self.split or "train"] + number
        self._chance = random.Random(game_seed).getstate()
        self.illegal = False
        self.acted: set[str] = set()
        try:
            with self._own_chance():
                self.game = copy.deepcopy(self._fresh)
                self.game.reset(num_players=len(self.agents), seed=game_seed)
        except Exception as error:
            why = f"{type(error).__name__}: {error_line(error)}"
            raise EnvError(f"textarena's {self.name} does not begin ({why})") from error
        self.boards: dict[int, str] = {}
        self.told: dict[int, list[str]] = {}
        """seat -> what a game without a wrapper has shown it, each with who says so"""
        self.addressed = False
        """whether `[Player 3]` is a move"""
        self.seat = None if self.opponent == "self" else game_seed % len(self.agents)
        try:
            self.next_seen = self._observe()
        except EnvError:
            raise
        except Exception as error:
            why = f"{type(error).__name__}: {error_line(error)}"
            raise EnvError(f"textarena's {self.name} shows nothing ({why}); choose another game") from error
        if self._let_others_play():
            raise EnvError(f"textarena's {self.name} was over before the team's first turn")
        return self.seen, {"task": f"{self.name}/{game_seed}"}

    def step(self, actions: dict[str, str]) -> StepResult:
        ((agent, action),) = actions.items()
        self.acted.add(agent)
        over = self._act(agent, action) or self._let_others_play()
        if not over:
            return StepResult(self.seen, {}, False, False, {})
        info: dict[str, Any] = {"measures": {"illegal": float(self.illegal)}}
        if self.seat is None and len(self.agents) > 1:
            # A player that never came to its turn has nothing to be paid for.
            return StepResult(
                {}, {name: self.paid[name] for name in self.agents if name in self.acted}, True, False, info
            )
        learner = self.agents[self.seat or 0]
        info["outcome"] = (self.paid[learner] + 1.0) / 2.0 if self.seat is not None else max(self.paid[learner], 0.0)
        return StepResult({}, {}, True, False, info)

    def _let_others_play(self) -> bool:
        """Play the scripted seats until it is the team's turn; whether the game is over."""
        while self.seat is not None and self.agents[self.seat] not in self.next_seen:
            ((agent, text),) = self.next_seen.items()
            moves = listed_moves(text)
            if not moves:
                raise EnvError(
                    f"textarena's {self.name} lists no moves in its observations, so that there is no random opponent "
                    "for it; leave opponent out"
                )
            with self._own_chance():
                move = random.choice(moves)
            over = self._act(agent, move)
            if getattr(self.game.state, "error_count", 0):
                raise EnvError(
                    f"textarena's {self.name} refuses {move}, which it lists as open, so that there is no random "
                    "opponent for it; leave opponent out"
                )
            if over:
                return True
        self.seen = dict[str, Observation](self.next_seen)
        return False

    def _act(self, agent: str, action: str) -> bool:
        """Hand an action to the game; whether it is over, with what it pays in `paid`, or shows next in `next_seen`."""
        try:
            with self._own_chance():
                over, _ = self.game.step(action=without_tags(action, self._roles().values(), addressed=self.addressed))
            if over:
                rewards, about = self.game.close()
                ours = range(len(self.agents)) if self.seat is None else (self.seat,)
                self.illegal = any(dict((about or {}).get(seat) or {}).get("invalid_move") for seat in ours)
                # After an illegal move some games (Countdown, Cryptarithm) pay a text, their reason.
                self.paid = within_one(
                    {name: float((rewards or {}).get(seat, 0.0)) for seat, name in enumerate(self.agents)}
                )
            else:
                self.next_seen = self._observe()
        except EnvError:
            raise
        except (OSError, MemoryError) as error:
            raise EnvError(f"textarena's {self.name} failed: {type(error).__name__}: {error_line(error)}") from error
        except Exception:
            # The game failed on this action: what an agent brings about is its own loss, and no lost episode.
            self.illegal = self.seat is None or agent == self.agents[self.seat]
            self.paid = {name: -1.0 if name == agent else 0.0 for name in self.agents}
            return True
        return bool(over)

    def _roles(self) -> Mapping[int, str]:
        """Seat -> name of a speaker, `Player 3` or another, where the game gives them."""
        given: Mapping[int, str] = getattr(self.game.state, "role_mapping", None) or {}
        return given

    def _observe(self) -> dict[str, str]:
        untold: list[Any] = []
        if self.brief:
            state = self.game.state
            untold += state.observations[state.current_player_id]
        with self._own_chance():
            seat, seen = self.game.get_observation()
        if not isinstance(seen, str):  # what is new to the seat: a prompt is all that there is to know
            told = self.told.setdefault(seat, [])
            roles = {**self._roles(), GAME: "GAME"}
            told += [f"[{roles.get(by, f'Player {by}')}] {message}" for by, message, *_ in seen]
            seen = "\n".join(told)
        text = seen
        self.addressed = self.addressed or ADDRESSED in text
        if self.brief:
            # A few games hand over their fields in another order, and a text as the kind.
            boards, warnings = (
                [str(message) for _, message, kind in untold if getattr(kind, "name", "") == label] for label in KINDS
            )
            if boards:  # none after an illegal move
                self.boards[seat] = boards[-1]
            if seat not in self.boards:
                raise EnvError(f"textarena's {self.name} shows no board; leave brief out")
            text = "\n".join([*warnings, self.boards[seat]])
        return {self.agents[seat]: text}

    @contextmanager
    def _own_chance(self) -> Iterator[None]:
        """TextArena draws from Python's global generator; here each game has a state of its own."""
        before = random.getstate()
        random.setstate(self._chance)
        try:
            yield
        finally:
            self._chance = random.getstate()
            random.setstate(before)


def listed_moves(text: str) -> list[str]:
    """The moves that an observation lists as open, such as `[4]`."""
    lists = [line[found.end() :].partition(":") for line in text.split("\n") if (found := _OPEN.search(line))]
    return _MOVE.findall(next((listed for _, colon, listed in reversed(lists) if colon), ""))


def within_one(paid: dict[str, float]) -> dict[str, float]:
    """What seats are paid, from -1 for the least to 1 for the most where that is beyond them; as it is otherwise."""
    least, most = min(paid.values()), max(paid.values())
    if len(paid) == 1 or (least >= -1.0 and most <= 1.0):
        return paid
    return {name: 2.0 * (value - least) / (most - least) - 1.0 if most > least else 0.0 for name, value in paid.items()}


def without_tags(action: str, roles: Iterable[str] = (), *, addressed: bool = False) -> str:
    """An action without the tags by which TextArena names who speaks, so that no player speaks for another.

    Args:
        action: of a player.
        roles: names of speakers that the game gives; `Player 3` is one in any game.
        addressed: whether `[Player 3]` is a move, and stays: then further lines that open a bracket begin with `> `.
    """
    tags = {"GAME", "Player", *(str(role) for role in roles if not _PLAYER.fullmatch(str(role)))}
    if addressed:
        action = _FURTHER.sub("> ", action)
    done: list[str] = []
    opened: list[list[str]] = []  # [GA[GAME]ME] holds one tag within another
    for token in _BRACKETS.findall(action):
        if token == "[":
            opened.append([])
        (opened[-1] if opened else done).append(token)
        if token != "]" or not opened:
            continue
        name = "".join(opened[-1])[1:-1]
        if name in tags or (not addressed and _PLAYER.fullmatch(name)):
            opened.pop()
        else:  # what holds brackets is no tag
            done += itertools.chain(*opened)
            opened = []
    return "".join(itertools.chain(done, *opened))
