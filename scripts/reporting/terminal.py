"""Recorded episodes in the terminal. Control characters of what was recorded are shown and never obeyed."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from mafrt.scripts.reporting.blocks import title_of
from mafrt.scripts.reporting.episodes import Recorded
from mafrt.scripts.reporting.run_data import finite

CUT = 20_000
"""Characters of a text that are printed; the rest is counted."""
_COLORS = ("blue", "dark_orange", "green", "magenta", "yellow", "cyan", "red")
_HIDDEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\ud800-\udfff]"
)


def safe(text: Any, limit: int = CUT) -> str:
    """`text` without characters that a terminal would obey, or that reorder or hide their neighbours."""
    whole = str(text)
    shown = _HIDDEN.sub(_visible, whole[:limit])
    return shown if len(whole) <= limit else f"{shown} … ({len(whole) - limit:,} more characters)"


def _visible(match: re.Match[str]) -> str:
    code = ord(match[0])
    return chr(0x2400 + code) if code < 32 else f"<U+{code:04X}>"


def episode_table(episodes: Sequence[Recorded]) -> Table:
    table = Table(box=None, header_style="dim", pad_edge=False, expand=True)
    for name in ("episode", "iteration", "kind", "score", "turns"):
        table.add_column(name, justify="left" if name == "kind" else "right", no_wrap=True, min_width=len(name))
    table.add_column("task", no_wrap=True, overflow="ellipsis", ratio=1)
    for episode in episodes:
        score = "-" if episode.score is None else f"{episode.score:.3f}"
        row = (str(episode.number), str(episode.iteration), episode.kind, score, str(len(episode.turns)))
        table.add_row(*row, Text(safe(title_of(episode))))
    return table


def print_episode(console: Console, episode: Recorded) -> None:
    """The episode as a conversation: a panel per turn, with role prompt, observation, answer, tools and verdict."""
    score = "no score" if episode.score is None else f"score {episode.score:.3f}"
    where = f"episode {episode.number} · {episode.kind} · iteration {episode.iteration} · {score}"
    console.print(Text(where, style="bold"))
    info = episode.content.get("info")
    if info:
        console.print(Text(safe(json.dumps(info, ensure_ascii=False), 2000), style="dim"))
    team = episode.header.get("team")
    names = list(dict.fromkeys(str(turn.get("agent")) for turn in episode.turns))
    for turn in episode.turns:
        agent = str(turn.get("agent"))
        entry = team.get(agent) if isinstance(team, dict) else None
        prompt = entry.get("prompt") if isinstance(entry, dict) else None
        color = _COLORS[names.index(agent) % len(_COLORS)]
        title = Text(safe(agent), style=f"bold {color}")
        console.print(Panel(_turn(turn, prompt), title=title, title_align="left", border_style=color))


def _turn(turn: dict[str, Any], prompt: Any) -> Text:
    parts = Text()

    def add(label: str, content: Any, style: str = "") -> None:
        if content not in (None, "", []):
            parts.append(f"{label}\n" if label else "", style="dim italic")
            parts.append(f"{safe(content)}\n", style=style)

    add("role prompt", prompt, "dim")
    seen = turn.get("observation")
    if isinstance(seen, list):
        for message in seen:
            if isinstance(message, dict):
                add(f"observation, {safe(message.get('role'))}", message.get("content"), "dim")
    else:
        add("observation", seen, "dim")
    add("answer", turn.get("text"))
    evidence = turn.get("evidence") if isinstance(turn.get("evidence"), dict) else {}
    assert isinstance(evidence, dict)
    add("tool output", evidence.get("tool_output"), "cyan")
    verdict = turn.get("coach") or evidence.get("rules")
    if isinstance(verdict, dict):
        who = "coach" if turn.get("coach") else "rules"
        score = "not scored" if "unscored" in verdict else f"{verdict.get('score')} of 10"
        add(f"{who}: {safe(score)}", verdict.get("reason") or verdict.get("unscored"), "yellow")
    facts = [
        f"{name} {turn[name]:.4g}"
        for name in ("tokens", "reward", "paid", "return", "value", "baseline", "advantage")
        if finite(turn.get(name)) is not None
    ]
    if isinstance(terms := turn.get("terms"), dict):
        facts += [f"by {safe(str(name))} {term:+.4g}" for name, term in terms.items() if finite(term) is not None]
    parts.append(
        " · ".join([*facts, *(["cut at the token limit"] if turn.get("stop") == "length" else [])]), style="dim"
    )
    return parts
