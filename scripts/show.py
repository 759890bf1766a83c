"""Print a recorded episode of a run in the terminal, or list the recorded ones."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from mafrt.config.schema import Checked, Count, CountOrZero, unknown
from mafrt.core.errors import ConfigError
from mafrt.core.text import counted
from mafrt.scripts.cli.command import Command
from mafrt.scripts.cli.run_main import run_main
from mafrt.scripts.report import run_folders
from mafrt.scripts.reporting.episodes import read_episodes
from mafrt.scripts.reporting.terminal import episode_table, print_episode

if TYPE_CHECKING:
    from mafrt.scripts.reporting.episodes import Recorded


@dataclass(frozen=True)
class ShowSettings(Checked):
    """Show"""

    runs: tuple[str, ...] = ()
    """the run folder"""
    episode: str | None = None
    """number of an episode, as the list and the report show it, or its id; default: list episodes"""
    kind: Literal["all", "train", "sampled", "greedy"] = "all"
    """list: episodes of training, or sampled or greedy ones of evaluations"""
    iteration: CountOrZero | None = None
    """list: episodes of this iteration; default: of all"""
    agent: str | None = None
    """list: episodes in which this agent speaks; default: any"""
    search: str | None = None
    """list: episodes with this text in a turn; default: any"""
    min_score: float | None = None
    """list: episodes with this score or more; default: any"""
    max_score: float | None = None
    """list: episodes with this score or less; default: any"""
    limit: Count = 20
    """list: max episodes, the newest"""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.min_score is not None and self.max_score is not None and self.min_score > self.max_score:
            raise ConfigError(
                f"min_score is {self.min_score:g} and max_score {self.max_score:g}, so no score fits; exchange them."
            )


COMMAND = Command(
    "show",
    "Print a recorded episode of a run in the terminal, or list the recorded ones.",
    (ShowSettings,),
    words="runs",
)


def show(argv: Sequence[str]) -> int:
    settings = COMMAND.read(argv).make(ShowSettings)
    folders = run_folders(settings.runs, "show")
    if len(folders) > 1:
        raise ConfigError("Name one run folder; mafrt report compares several.")
    [run] = folders
    from rich.console import Console

    problems: list[str] = []
    # Everything off that would read an agent's words as markup.
    console = Console(highlight=False, markup=False, emoji=False, soft_wrap=False)
    if console.width < 40:  # some terminals say 0
        console.width = 80
    if settings.episode is not None:
        print_episode(console, find(run, settings.episode, problems))
    else:
        episodes = list(selected(run, settings, problems))
        if episodes:
            console.print(episode_table(episodes[-settings.limit :]))
        else:
            refuse_unknown_names(run, settings)
        console.print(f"{counted(len(episodes), 'episodes')}; mafrt show {run} --episode NUMBER prints one.")
        if not episodes and next(read_episodes(run, []), None) is None:
            problems.append(f"No episodes are recorded in {run}.")
    for problem in problems:
        print(problem, file=sys.stderr)
    return 0


def refuse_unknown_names(run: Path, settings: ShowSettings) -> None:
    """ConfigError if none of the recorded episodes is of the agent or iteration that is asked for."""
    recorded = list(read_episodes(run, []))
    agents = {str(turn.get("agent")) for episode in recorded for turn in episode.turns}
    if agents and settings.agent is not None and settings.agent not in agents:
        raise ConfigError(unknown("agent", settings.agent, agents))
    iterations = sorted({episode.iteration for episode in recorded})
    if iterations and settings.iteration is not None and settings.iteration not in iterations:
        known = ", ".join(map(str, iterations)) if len(iterations) < 9 else f"{iterations[0]} to {iterations[-1]}"
        raise ConfigError(f"{run} has no episode of iteration {settings.iteration}; it has those of {known}.")


def find(run: Path, name: str, problems: list[str]) -> Recorded:
    """The episode with this number or id. Raises ConfigError if there is none."""
    count = 0
    for episode in read_episodes(run, problems):
        # By number or by id, since other files of a run name episodes by their ids.
        if str(episode.number) == name or episode.content.get("id") == name:
            return episode
        count += 1
    there = f"it has the episodes 0 to {count - 1}" if count else "no episodes are recorded"
    raise ConfigError(f"{run} has no episode {name!r}; {there}.")


def selected(run: Path, settings: ShowSettings, problems: list[str]) -> Iterator[Recorded]:
    """The episodes that pass all filters."""
    for episode in read_episodes(run, problems):
        if settings.kind not in ("all", episode.kind):
            continue
        if settings.iteration not in (None, episode.iteration):
            continue
        if settings.agent is not None and all(turn.get("agent") != settings.agent for turn in episode.turns):
            continue
        score = episode.score
        if settings.min_score is not None and (score is None or score < settings.min_score):
            continue
        if settings.max_score is not None and (score is None or score > settings.max_score):
            continue
        words = (settings.search or "").lower()
        if words and not any(words in str(turn.get("text", "")).lower() for turn in episode.turns):
            continue
        yield episode


main = partial(run_main, show)

if __name__ == "__main__":
    sys.exit(main())
