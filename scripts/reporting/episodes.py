"""The recorded episodes of a run, in one order: transcripts, or `episodes.jsonl` of a run without them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mafrt.scripts.reporting.run_data import finite, json_lines
from mafrt.storage.transcript_files import TranscriptFile, read_transcript, transcript_files


@dataclass(frozen=True)
class Recorded:
    """One recorded episode."""

    number: int
    """place among all recorded episodes of the run, from 0; `mafrt show --episode` takes it"""
    kind: str
    """`train`, `sampled` or `greedy`; the last two are of evaluations"""
    iteration: int
    content: dict[str, Any]
    """the episode's record (docs/transcripts.md)"""
    header: Mapping[str, Any]
    """of its file; empty for one of `episodes.jsonl`"""

    @property
    def group(self) -> str:
        return str(self.content.get("group", ""))

    @property
    def turns(self) -> list[dict[str, Any]]:
        """The turns that are records at all."""
        turns = self.content.get("turns")
        return [turn for turn in turns if isinstance(turn, dict)] if isinstance(turns, list) else []

    @property
    def score(self) -> float | None:
        """The outcome, or the sum of the rewards; None if there are neither."""
        outcome = self.content.get("outcome")
        if isinstance(outcome, (int, float)):
            return None if (score := finite(outcome)) is None else float(score)
        rewards = [reward for turn in self.turns if (reward := finite(turn.get("reward"))) is not None]
        return finite(float(sum(rewards))) if rewards else None


def read_episodes(run: Path, problems: list[str]) -> Iterator[Recorded]:
    """All recorded episodes, by iteration; `problems` gets a sentence for every file that is not whole."""
    number = 0
    files = transcript_files(run)
    for file in files:
        transcript = read_transcript(file)
        if transcript.problem is not None:
            problems.append(transcript.problem)
        for content in transcript.episodes:
            yield Recorded(number, _kind(file, content), file.iteration, content, transcript.header)
            number += 1
    if not files:
        for content in json_lines(run / "episodes.jsonl", problems):
            yield Recorded(number, "train", content["iteration"], content, {})
            number += 1


def bytes_on_disk(run: Path) -> int:
    """Size of the files that `read_episodes` reads, as they would be when compressed."""
    files = transcript_files(run)
    if files:
        return sum(file.path.stat().st_size for file in files)
    plain = run / "episodes.jsonl"
    return plain.stat().st_size // 5 if plain.is_file() else 0


def selection(run: Path, most_bytes: float) -> Callable[[Recorded], bool]:
    """Which episodes fit into about `most_bytes`, compressed: a share of the tasks, the same in every evaluation."""
    size = bytes_on_disk(run)
    share = min(1.0, most_bytes / size) if size else 1.0

    def chosen(episode: Recorded) -> bool:
        digest = hashlib.blake2b(episode.group.encode(errors="replace"), digest_size=4, key=b"report").digest()
        return int.from_bytes(digest, "big") / 2**32 < share

    return chosen


def _kind(file: TranscriptFile, content: Mapping[str, Any]) -> str:
    if file.kind == "train":
        return "train"
    return "greedy" if str(content.get("id", "")).startswith("greedy") else "sampled"
