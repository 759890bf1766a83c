"""Episodes of a report: an index that is read at once, and compressed blocks that the page opens when they are needed.

50,000 turns are some 50 MB of text. Compressed in blocks they are a tenth of that, and the page opens without reading
any of them.
"""

from __future__ import annotations

import base64
import gzip
import json
from dataclasses import dataclass, field
from typing import Any

from mafrt.core.text import clean_text
from mafrt.scripts.reporting.episodes import Recorded
from mafrt.scripts.reporting.run_data import finite
from mafrt.storage.json_lines import json_safe

BLOCK_BYTES = 192 * 1024
"""Size of a block before compression, unless one episode alone is larger."""
_TITLE = 90
"""Characters of an episode's title in the list."""
_KINDS = ("train", "sampled", "greedy")


@dataclass
class Index:
    """One column per fact, one entry per episode, for filters and lists."""

    run: list[int] = field(default_factory=list)
    number: list[int] = field(default_factory=list)
    kind: list[int] = field(default_factory=list)
    iteration: list[int] = field(default_factory=list)
    score: list[float | None] = field(default_factory=list)
    turns: list[int] = field(default_factory=list)
    group: list[str] = field(default_factory=list)
    title: list[str] = field(default_factory=list)
    block: list[int] = field(default_factory=list)
    place: list[int] = field(default_factory=list)
    """position in its block"""
    paid: dict[str, list[float | None]] = field(default_factory=dict)
    """agent -> sum of the rewards that its turns were paid; None if it has no such turn"""
    coach: dict[str, list[float | None]] = field(default_factory=dict)
    """agent -> mean score of the coach, 0..10"""

    def add(self, run: int, episode: Recorded, block: int, place: int) -> None:
        rows = len(self.run)
        self.run.append(run)
        self.number.append(episode.number)
        self.kind.append(_KINDS.index(episode.kind))
        self.iteration.append(episode.iteration)
        self.score.append(_short(episode.score))
        self.turns.append(len(episode.turns))
        self.group.append(episode.group)
        self.title.append(title_of(episode))
        self.block.append(block)
        self.place.append(place)
        paid: dict[str, list[float]] = {}
        coach: dict[str, list[float]] = {}
        for turn in episode.turns:
            agent, verdict = str(turn.get("agent")), turn.get("coach")
            paid.setdefault(agent, [])
            reward = finite(turn.get("paid", turn.get("reward")))
            if reward is not None:
                paid[agent].append(reward)
            if isinstance(verdict, dict) and (score := finite(verdict.get("score"))) is not None:
                coach.setdefault(agent, []).append(score)
        _extend(self.paid, {name: sum(values) if values else None for name, values in paid.items()}, rows)
        _extend(self.coach, {name: sum(values) / len(values) for name, values in coach.items()}, rows)


class Blocks:
    """Collects episodes into compressed blocks.

    Args:
        most_bytes: of all blocks as the page holds them; episodes beyond it are refused.
    """

    def __init__(self, most_bytes: float) -> None:
        self.index = Index()
        self.done: list[str] = []
        """each block: gzip of a JSON list of episodes, in base64"""
        self.most_bytes = most_bytes
        self._waiting: list[str] = []
        self._size = self._bytes = 0

    def add(self, run: int, episode: Recorded) -> bool:
        """Add one episode; False if there is no room."""
        if self._bytes > self.most_bytes:
            return False
        text = json.dumps(json_safe(episode.content), ensure_ascii=True, separators=(",", ":"))
        self.index.add(run, episode, len(self.done), len(self._waiting))
        self._waiting.append(text)
        self._size += len(text)
        if self._size >= BLOCK_BYTES:
            self.close()
        return True

    def close(self) -> None:
        """Finish the block that is being filled."""
        if self._waiting:
            self.done.append(compressed(f"[{','.join(self._waiting)}]"))
            self._bytes += len(self.done[-1])
            self._waiting, self._size = [], 0


def compressed(text: str) -> str:
    # Level 9 takes a third longer, for .3 percent of the size.
    return base64.b64encode(gzip.compress(text.encode(), compresslevel=8, mtime=0)).decode()


def title_of(episode: Recorded) -> str:
    """The task in a few words: what the environment calls it, or the first observation."""
    info = episode.content.get("info")
    told = (
        next((info[key] for key in ("problem", "question", "task") if info.get(key)), "")
        if isinstance(info, dict)
        else ""
    )
    seen: Any = episode.turns[0].get("observation") if episode.turns else ""
    if isinstance(seen, list):
        seen = seen[-1].get("content", "") if seen and isinstance(seen[-1], dict) else ""
    text = told if isinstance(told, str) and told else seen or told or episode.group
    return " ".join(clean_text(str(text)[: 4 * _TITLE]).split())[:_TITLE]


def _short(number: float | None) -> float | None:
    return None if number is None else float(f"{number:.4g}")


def _extend(
    columns: dict[str, list[float | None]], values: dict[str, float | None] | dict[str, float], rows: int
) -> None:
    for name in values:
        columns.setdefault(name, [None] * rows)
    for name, column in columns.items():
        column.append(_short(values.get(name)))
