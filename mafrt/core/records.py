"""Episodes, turns, verdicts and evidence as JSON, whole and exact: the one place that writes and reads them.

Used between processes (distributed play, environment workers) and for records on disk. Floats come back bit for bit.
`mafrt.storage.episode_lines.episode_record` is for people and leaves things out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from mafrt.core.types import Audit, Episode, Evidence, Scored, Start, StepResult, Turn, Unscored, Verdict

_PLAIN = tuple(field.name for field in fields(Turn) if field.name not in ("evidence", "coach", "audit"))

_SELDOM = ("forced", "own_turns")
"""fields that are written only where they hold something"""


def pack_episode(episode: Episode) -> dict[str, Any]:
    """A record of which `unpack_episode` makes an equal episode, if `info` and evidence hold JSON-able values only."""
    turns = [pack_turn(turn) for turn in episode.turns]
    start = None if episode.start is None else dict(vars(episode.start))
    return {
        **vars(episode),
        "start": start,
        "turns": turns,
        "branches": [pack_episode(branch) for branch in episode.branches],
    }


def unpack_episode(record: dict[str, Any]) -> Episode:
    turns = [unpack_turn(turn) for turn in record["turns"]]
    branches = [unpack_episode(branch) for branch in record["branches"]]
    start = None if record.get("start") is None else Start(**record["start"])
    return Episode(**{**record, "turns": turns, "branches": branches, "start": start})


def pack_turn(turn: Turn) -> dict[str, Any]:
    record = {name: getattr(turn, name) for name in _PLAIN if name not in _SELDOM or getattr(turn, name)}
    if turn.coach is not None:
        record["coach"] = pack_verdict(turn.coach)
    if turn.evidence is not None:
        record["evidence"] = pack_evidence(turn.evidence)
    if turn.audit is not None:
        record["audit"] = dict(vars(turn.audit))
    return record


def unpack_turn(record: dict[str, Any]) -> Turn:
    coach, evidence = record.get("coach"), record.get("evidence")
    turn = Turn(**{name: value for name, value in record.items() if name in _PLAIN})
    turn.forced = tuple(turn.forced)
    turn.own_turns = tuple((place, list(ids)) for place, ids in turn.own_turns)
    turn.late = [(step, amount) for step, amount in turn.late]  # JSON has no tuples
    turn.coach = None if coach is None else unpack_verdict(coach)
    turn.audit = None if record.get("audit") is None else Audit(**record["audit"])
    turn.evidence = None if evidence is None else unpack_evidence(evidence)
    return turn


def pack_verdict(verdict: Verdict) -> dict[str, Any]:
    return dict(vars(verdict))


def unpack_verdict(record: dict[str, Any]) -> Verdict:
    return Unscored(**record) if "why" in record else _unpack_scored(record)


def pack_evidence(evidence: Evidence) -> dict[str, Any]:
    return {**vars(evidence), "rules": None if evidence.rules is None else pack_verdict(evidence.rules)}


def unpack_evidence(record: dict[str, Any]) -> Evidence:
    rules = record["rules"]
    return Evidence(**{**record, "rules": None if rules is None else _unpack_scored(rules)})


def pack_verdicts(episodes: Sequence[Episode]) -> list[list[dict[str, Any] | None]]:
    """The coach's verdict on every turn, by episode."""
    return [[None if turn.coach is None else pack_verdict(turn.coach) for turn in e.turns] for e in episodes]


def unpack_verdicts(episodes: Sequence[Episode], verdicts: list[list[dict[str, Any] | None]]) -> None:
    """Put verdicts of the same episodes onto their turns."""
    for episode, records in zip(episodes, verdicts, strict=True):
        for turn, record in zip(episode.turns, records, strict=True):
            turn.coach = None if record is None else unpack_verdict(record)


def pack_step(result: StepResult) -> dict[str, Any]:
    """A step result; its `info["evidence"]` is packed, the rest of `info` must be JSON-able."""
    info = dict(result.info)
    if "evidence" in info:
        info["evidence"] = {agent: pack_evidence(evidence) for agent, evidence in info["evidence"].items()}
    return {**result._asdict(), "info": info}


def unpack_step(record: dict[str, Any]) -> StepResult:
    info = dict(record["info"])
    if "evidence" in info:
        info["evidence"] = {agent: unpack_evidence(evidence) for agent, evidence in info["evidence"].items()}
    return StepResult(**{**record, "info": info})


def _unpack_scored(record: dict[str, Any]) -> Scored:
    spans = tuple((str(text), float(score)) for text, score in record["spans"])
    return Scored(**{**record, "spans": spans})
