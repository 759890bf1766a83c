"""Collect recorded episodes with a good score as chat JSONL for supervised fine-tuning (TRL and others)."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from mafrt.config.schema import Checked, CountOrZero, unknown
from mafrt.core.atomic_files import write_atomic
from mafrt.core.errors import ConfigError
from mafrt.core.hf_datasets import is_dataset, load_datasets, write_dataset
from mafrt.core.reading import is_file_writable, is_writable
from mafrt.core.text import counted
from mafrt.scripts.cli.command import Command
from mafrt.scripts.cli.run_main import run_main
from mafrt.scripts.report import run_folders
from mafrt.scripts.reporting.episodes import read_episodes
from mafrt.scripts.reporting.run_data import finite

if TYPE_CHECKING:
    from mafrt.scripts.reporting.episodes import Recorded


@dataclass(frozen=True)
class CollectSettings(Checked):
    """Collect"""

    runs: tuple[str, ...] = ()
    """run folders"""
    output: str = "collected.jsonl"
    """file to write"""
    overwrite: bool = False
    """replace the file, or the data set's folder, if it exists"""
    dataset: bool = False
    """write a folder that load_from_disk of Hugging Face's datasets reads, in place of a file"""
    layout: Literal["messages", "prompt_completion", "turns"] = "messages"
    """a line holds the whole chat; or prompt and completion apart, of which TRL trains the completion only; or any turn
    with its rewards and its place in the episode"""
    min_score: float | None = None
    """least score of an episode, its outcome or the sum of its rewards; default: 1, and any with --layout turns"""
    min_paid: float | None = None
    """least reward paid to a turn; default: any"""
    agent: tuple[str, ...] = ()
    """agents whose turns are taken; default: all"""
    kind: Literal["all", "train", "sampled", "greedy"] = "train"
    """episodes of training, or sampled or greedy ones of evaluations"""
    per_task: CountOrZero = 0
    """max episodes of one task, the newest; 0: no limit"""

    @property
    def least(self) -> float | None:
        return 1.0 if self.min_score is None and self.layout != "turns" else self.min_score


PLAYS_NOTHING = (
    "mafrt collect reads episodes that were played: record some by mafrt evaluate --env NAME --tasks N "
    "--record_dir DIR (with --model_name_or_path or --load_path), then mafrt collect DIR --min_score X --output FILE."
)
COMMAND = Command(
    "collect",
    "Collect the turns of recorded episodes with a good score as chat JSONL for fine-tuning.",
    (CollectSettings,),
    refused=dict.fromkeys(("model", "m", "environment", "e", "env", "num_episodes", "n"), PLAYS_NOTHING),
    words="runs",
)


def collect(argv: Sequence[str]) -> int:
    settings = COMMAND.read(argv).make(CollectSettings)
    folders = run_folders(settings.runs, "collect")
    target = Path(settings.output.removesuffix(".jsonl") if settings.dataset else settings.output).expanduser()
    if target.exists() and not settings.overwrite:
        raise ConfigError(f"output {target} exists; give another name, or replace it with --overwrite.")
    if settings.dataset and target.exists() and not is_dataset(target):
        raise ConfigError(f"output {target} holds no data set, so it is not replaced; give another name.")
    if why := is_writable(target.absolute().parent) if settings.dataset else is_file_writable(target):
        raise ConfigError(f"output {target} cannot be written ({why}); give another name.")
    if settings.dataset:
        load_datasets()
    problems: list[str] = []
    seen: set[str] = set()
    agents: set[str] = set()
    rows: list[dict[str, Any]] = []
    unseen = 0
    for folder in folders:
        recorded = list(read_episodes(folder, problems))
        agents.update(str(turn.get("agent")) for episode in recorded for turn in episode.turns)
        for episode in chosen(recorded, settings):
            for turn in episode.turns:
                if not wanted(turn, settings):
                    continue
                prompt = prompt_of(turn, episode)
                if settings.layout == "turns":
                    rows.append(turn_row(turn, prompt, episode, str(folder)))
                    continue
                if prompt is None:
                    unseen += 1
                    continue
                # Without the score, or the same answer from two episodes would weigh twice.
                key = json.dumps([turn.get("agent"), prompt, turn["text"]])
                if key not in seen:
                    seen.add(key)
                    rows.append(row(turn, prompt, episode, settings.layout))
    for problem in problems:
        print(problem, file=sys.stderr)
    if unseen:
        print(
            f"Left out: {counted(unseen, 'turns')} without a recorded observation (--transcript_share).",
            file=sys.stderr,
        )
    if not rows:
        raise ConfigError(nothing_found(folders, agents, settings))
    if settings.dataset:
        write_dataset(rows, target)
    else:
        lines = (json.dumps(row, ensure_ascii=False) for row in rows)
        write_atomic(target, "".join(f"{line}\n" for line in lines).encode("utf-8", "replace"))
    print(f"{len(rows)} {'turns' if settings.layout == 'turns' else 'different turns'} in {target}.")
    return 0


def nothing_found(folders: Sequence[Path], agents: set[str], settings: CollectSettings) -> str:
    """The reason why no turn is left, and the remedy."""
    if not agents:
        return f"no episodes are recorded in {', '.join(map(str, folders))}; name a run that has played some."
    for name in settings.agent or ():
        if name not in agents:
            return unknown("agent", name, sorted(agents))
    lower = "" if settings.least is None else f"lower --min_score ({settings.least:g}) or "
    return f"no turn passes the filters; {lower}choose another --kind."


def chosen(episodes: Sequence[Recorded], settings: CollectSettings) -> list[Recorded]:
    """Episodes with a good score, at most `per_task` of one task."""
    good = [
        episode
        for episode in episodes
        if settings.kind in ("all", episode.kind)
        and (settings.least is None or (episode.score is not None and episode.score >= settings.least))
    ]
    if not settings.per_task:
        return good
    taken: dict[str, int] = {}
    episodes_chosen = []
    # From the end, since later episodes come from a team that has learnt more.
    for episode in reversed(good):
        task = str((episode.content.get("info") or {}).get("task") or episode.group)
        taken[task] = taken.get(task, 0) + 1
        if taken[task] <= settings.per_task:
            episodes_chosen.append(episode)
    return episodes_chosen[::-1]


def wanted(turn: dict[str, Any], settings: CollectSettings) -> bool:
    if settings.agent and turn.get("agent") not in settings.agent:
        return False
    if not isinstance(turn.get("text"), str) or (turn.get("stop") == "length" and settings.layout != "turns"):
        return False  # a cut answer teaches to stop in the middle
    paid = turn.get("paid")
    return settings.min_paid is None or (isinstance(paid, (int, float)) and paid >= settings.min_paid)


def prompt_of(turn: dict[str, Any], episode: Recorded) -> list[dict[str, str]] | None:
    """The chat that the agent saw, its role prompt first; None if it is not recorded."""
    seen = turn.get("observation")
    if isinstance(seen, str):
        seen = [{"role": "user", "content": seen}]
    if not isinstance(seen, list) or not all(isinstance(message, dict) for message in seen):
        return None
    messages = [{"role": str(m.get("role")), "content": str(m.get("content"))} for m in seen]
    team = episode.header.get("team")
    entry = team.get(turn.get("agent")) if isinstance(team, dict) else None
    prompt = entry.get("prompt") if isinstance(entry, dict) else None
    # Recorded observations may hold the role prompt already.
    if prompt and not (messages and messages[0]["role"] == "system"):
        messages.insert(0, {"role": "system", "content": str(prompt)})
    return messages


def row(turn: dict[str, Any], prompt: list[dict[str, str]], episode: Recorded, layout: str) -> dict[str, Any]:
    answer = [{"role": "assistant", "content": turn["text"]}]
    chat = {"messages": prompt + answer} if layout == "messages" else {"prompt": prompt, "completion": answer}
    return {**chat, "agent": str(turn.get("agent")), "score": episode.score, "iteration": episode.iteration}


def turn_row(turn: dict[str, Any], prompt: list[dict[str, str]] | None, episode: Recorded, run: str) -> dict[str, Any]:
    """A turn with its rewards and its place, in fields that all turns have."""
    content = episode.content
    return {
        **{"run": run, "kind": episode.kind, "iteration": episode.iteration, "episode": episode.number},
        "task": str((content.get("info") or {}).get("task") or episode.group),
        **{"turn": turn.get("turn"), "agent": str(turn.get("agent")), "prompt": prompt, "answer": turn["text"]},
        **{name: _float(turn.get(name)) for name in ("reward", "paid")},
        **{"stop": turn.get("stop"), "outcome": _float(content.get("outcome")), "score": episode.score},
    }


def _float(value: object) -> float | None:
    number = finite(value)
    return None if number is None else float(number)


main = partial(run_main, collect)

if __name__ == "__main__":
    sys.exit(main())
