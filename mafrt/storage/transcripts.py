"""Transcripts: recorded episodes with observations, verdicts, rewards and advantages, for people to look at.

One file an iteration and one an evaluation (`mafrt.storage.transcript_files`). Each is written whole, by one rename,
so a killed run leaves no half file and a repeated iteration replaces its own. The first line describes the file, every
other line is one episode; `docs/transcripts.md` has the schema. Equal episodes give equal bytes.
"""

from __future__ import annotations

import gzip
import hashlib
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mafrt.config.team import Team
from mafrt.core import atomic_files
from mafrt.core.types import Episode, Turn
from mafrt.storage.episode_lines import episode_record
from mafrt.storage.json_lines import encode_line
from mafrt.storage.transcript_files import FORMAT, Kind, file_name

log = logging.getLogger(__name__)

Decode = Callable[[Sequence[int]], str]
"""Token ids -> text without special tokens."""


class TranscriptWriter:
    """Writes the transcripts of a run.

    Args:
        folder: `transcripts/` of the run; made when the first file is written.
        team: its role prompts and adapters stand in every file.
        decode: of the tokenizer, to find where each token ends in a turn's text.
        decoders: agent -> its own `decode`, where agents have different tokenizers.
        share: share of the tasks, in [0, 1], whose episodes are written. The choice depends on the task's group alone,
            so every evaluation records the same tasks.
        max_mib: MiB of one file before compression; tasks beyond it are left out and counted.
    """

    def __init__(
        self,
        folder: Path,
        team: Team,
        decode: Decode,
        *,
        share: float,
        max_mib: float,
        decoders: Mapping[str, Decode] | None = None,
    ) -> None:
        self.folder, self.team, self.decode, self.decoders = folder, team, decode, decoders
        self.share, self.max_bytes = share, max_mib * 2**20
        self.failed = False
        """Whether the disk has refused a file."""

    def write(self, kind: Kind, iteration: int, episodes: Sequence[Episode]) -> None:
        """Write the file of one iteration or evaluation.

        A disk that refuses is logged once and ends the recording; it never ends the run.
        """
        if self.failed or self.share == 0:
            return
        lines = self._lines(episodes)
        header = {
            "format": FORMAT,
            "kind": kind,
            "iteration": iteration,
            "episodes": len(episodes),
            "recorded": len(lines),
            "team": {agent.name: {"prompt": agent.prompt, "adapter": agent.adapter} for agent in self.team.agents},
        }
        data = gzip.compress(encode_line(header) + b"".join(lines), compresslevel=6, mtime=0)
        try:
            self.folder.mkdir(exist_ok=True)
            atomic_files.write_atomic(self.folder / file_name(kind, iteration), data)
        except OSError as error:
            log.error("transcripts cannot be written any more (%s); the run goes on without them", error)
            self.failed = True

    def _lines(self, episodes: Sequence[Episode]) -> list[bytes]:
        """The lines of the recorded episodes, by id; groups are whole, unless one alone is larger than the limit."""
        groups: dict[str, list[Episode]] = {}
        for episode in episodes:
            if wanted(episode.group, self.share):
                groups.setdefault(episode.group, []).append(episode)
        chosen: list[tuple[str, bytes]] = []
        room = self.max_bytes
        for group in sorted(groups, key=_place):
            lines = [
                (episode.id, encode_line(transcript_of(episode, self.decode, self.decoders)))
                for episode in groups[group]
            ]
            size = sum(len(line) for _, line in lines)
            if size > room and chosen:
                break
            while size > room and lines:
                size -= len(lines.pop()[1])
            chosen += lines
            room -= size
        return [line for _, line in sorted(chosen)]


def transcript_of(episode: Episode, decode: Decode, decoders: Mapping[str, Decode] | None = None) -> dict[str, Any]:
    """An episode as a transcript holds it: its record of `episodes.jsonl`, with more about each turn."""
    decoder_of = decoders or {}
    record = episode_record(episode)
    for turn, line in zip(episode.turns, record["turns"], strict=True):
        line |= _more(turn, decoder_of.get(turn.agent, decode))
    if episode.branches:
        others = [turn for branch in episode.branches if not branch.info.get("carried") for turn in branch.turns]
        for turn, line in zip(others, record["alternatives"], strict=True):
            line |= _more(turn, decoder_of.get(turn.agent, decode))
    return record


def _more(turn: Turn, decode: Decode) -> dict[str, Any]:
    more: dict[str, Any] = {"observation": turn.observation, "paid": turn.paid}
    # The path from the pay to the advantage: its parts, the return at the first token, what that is compared
    # with, and the terms of the sum.
    if turn.parts:
        more["parts"] = {name: _rounded(amount) for name, amount in turn.parts.items()}
    if turn.returns:
        more["return"] = _rounded(turn.returns[0])
    if turn.values:
        more["value"] = _rounded(turn.values[0])
    if turn.baseline is not None:
        more["baseline"] = _rounded(turn.baseline)
    if turn.terms:
        more["terms"] = {name: _rounded(amount) for name, amount in turn.terms.items()}
    if turn.advantages:
        advantages = [_rounded(number) for number in turn.advantages]
        if len(set(advantages)) == 1:
            more["advantages"] = advantages[0]
        else:
            more["advantages"] = advantages
            more["token_ends"] = token_ends(turn.action_ids, turn.text, decode)
    return more


def as_text(episode: Episode) -> str:
    """An episode as plain text: its outcome, and each agent with its answer."""
    outcome = "none" if episode.outcome is None else f"{episode.outcome:g}"
    return "\n\n".join([f"{episode.id}, outcome {outcome}", *(f"{turn.agent}: {turn.text}" for turn in episode.turns)])


def token_ends(ids: Sequence[int], text: str, decode: Decode) -> list[int] | None:
    """Where each token ends in `text`, in characters; None if the tokens do not add up to it.

    A token that holds only a part of a character ends where the one before it ends. Special tokens are empty.
    """
    pieces = [decode([token]) for token in ids]
    if "".join(pieces) != text:
        pieces = _pieces_in_context(ids, decode)
        if "".join(pieces) != text and len("".join(pieces)) != len(text):  # cleaning a text keeps its length
            return None
    ends, end = [], 0
    for piece in pieces:
        end += len(piece)
        ends.append(end)
    return ends


def _pieces_in_context(ids: Sequence[int], decode: Decode) -> list[str]:
    """The text that each token adds, decoded after the token before it, which decides on spaces and whole characters.

    Two short windows are decoded for each token, as streaming decoders do, and never the whole text.
    """
    pieces: list[str] = []
    first = done = 0
    for index in range(len(ids)):
        before, now = decode(ids[first:done]), decode(ids[first : index + 1])
        if now.endswith("\N{REPLACEMENT CHARACTER}") and index + 1 < len(ids) and len(now) > len(before):
            pieces.append("")  # the rest of the character follows
            continue
        pieces.append(now[len(before) :])
        if len(now) > len(before):
            first, done = done, index + 1
    return pieces


def wanted(group: str, share: float) -> bool:
    """Whether episodes of this group are among the `share` of the tasks that is recorded, if there is room."""
    return _place(group) < share


def _rounded(number: float) -> float:
    return float(f"{number:.4g}")


def _place(group: str) -> float:
    """A number in [0, 1) that follows from the group's name."""
    return int.from_bytes(hashlib.blake2b(group.encode(errors="replace"), digest_size=7).digest(), "big") / 2**56
