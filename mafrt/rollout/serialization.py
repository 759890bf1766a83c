"""Episodes as JSON, whole and exact: how they go from the process that played them to all others.

Unlike `rundir.episode_record`, which is for people, nothing is left out; floats come back bit for bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from mafrt.core.types import Episode, Evidence, Scored, Turn, Unscored, Verdict

_PLAIN = tuple(field.name for field in fields(Turn) if field.name not in ("evidence", "coach"))


def pack(episode: Episode) -> dict[str, Any]:
    """What `unpack` makes an equal episode of, if `info` and evidence hold only what JSON can."""
    turns, branches = [_pack_turn(turn) for turn in episode.turns], [pack(branch) for branch in episode.branches]
    return {**vars(episode), "turns": turns, "branches": branches}


def unpack(record: dict[str, Any]) -> Episode:
    turns, branches = map(_unpack_turn, record["turns"]), map(unpack, record["branches"])
    return Episode(**{**record, "turns": list(turns), "branches": list(branches)})


def pack_verdicts(episodes: Sequence[Episode]) -> list[list[dict[str, Any] | None]]:
    """The coach's verdict on every turn."""
    return [[None if turn.coach is None else vars(turn.coach) for turn in one.turns] for one in episodes]


def unpack_verdicts(episodes: Sequence[Episode], verdicts: list[list[dict[str, Any] | None]]) -> None:
    """Put verdicts of the same episodes onto their turns."""
    for episode, some in zip(episodes, verdicts, strict=True):
        for turn, verdict in zip(episode.turns, some, strict=True):
            turn.coach = None if verdict is None else _verdict(verdict)


def _pack_turn(turn: Turn) -> dict[str, Any]:
    record = {name: getattr(turn, name) for name in _PLAIN}
    if turn.coach is not None:
        record["coach"] = vars(turn.coach)
    if turn.evidence is not None:
        rules = turn.evidence.rules
        record["evidence"] = {**vars(turn.evidence), "rules": None if rules is None else vars(rules)}
    return record


def _unpack_turn(record: dict[str, Any]) -> Turn:
    coach, evidence = record.pop("coach", None), record.pop("evidence", None)
    turn = Turn(**record)
    if coach is not None:
        turn.coach = _verdict(coach)
    if evidence is not None:
        rules = evidence["rules"]
        turn.evidence = Evidence(**{**evidence, "rules": None if rules is None else _scored(rules)})
    return turn


def _verdict(record: dict[str, Any]) -> Verdict:
    return Unscored(**record) if "why" in record else _scored(record)


def _scored(record: dict[str, Any]) -> Scored:
    spans = tuple((str(text), float(score)) for text, score in record["spans"])
    return Scored(**{**record, "spans": spans})
