"""Make the report of one or several runs: one HTML file without network, or a page on loopback that follows them."""

from __future__ import annotations

import sys
import webbrowser
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from mafrt.config.schema import Checked, Port, Positive
from mafrt.core.atomic_files import write_atomic
from mafrt.core.errors import ConfigError
from mafrt.core.reading import is_file_writable
from mafrt.core.text import counted
from mafrt.scripts.cli.command import Command
from mafrt.scripts.cli.run_main import run_main
from mafrt.scripts.reporting.live import serve
from mafrt.scripts.reporting.page import MARK, build_page
from mafrt.scripts.reporting.run_data import read_run
from mafrt.storage.args_file import ARGS
from mafrt.storage.run_dir import LINE_FILES
from mafrt.storage.run_record import RECORD
from mafrt.storage.transcript_files import FOLDER


@dataclass(frozen=True)
class ReportSettings(Checked):
    """Report"""

    runs: tuple[str, ...] = ()
    """run folders; those that differ in the seed only share a curve with its spread"""
    output: str | None = None
    """HTML file to write; default: report.html in the run, or in the working directory for several runs"""
    max_mib: Positive = 20.0
    """max MiB of episodes in the file, compressed; beyond it a share of the tasks is shown"""
    live: bool = False
    """serve the report on loopback instead, and follow the runs until Ctrl-C"""
    port: Port = 8765
    """port of --live; 0 takes a free one"""
    open_browser: bool = False
    """open the report in a browser"""


COMMAND = Command(
    "report",
    "Make a report of runs: curves, who learnt when, every recorded episode, the same problems before and after.",
    (ReportSettings,),
    words="runs",
)


def report(argv: Sequence[str]) -> int:
    settings = COMMAND.read(argv).make(ReportSettings)
    folders = run_folders(settings.runs)
    if settings.live:
        return serve(folders, settings.port, settings.max_mib, open_browser=settings.open_browser)
    target = output_file(settings, folders)
    runs = [read_run(folder) for folder in folders]
    page = build_page(runs, max_mib=settings.max_mib)
    write_atomic(target, page.html)
    for run in runs:
        for problem in run.problems:
            print(f"{run.name}: {problem}")
    print(f"{counted(page.episodes, 'episodes')} in {target} ({len(page.html) / 2**20:.1f} MiB); open it in a browser.")
    if settings.open_browser:
        webbrowser.open(target.resolve().as_uri())
    return 0


def run_folders(names: Sequence[str], command: str = "report") -> list[Path]:
    """The folders of the named runs. Raises ConfigError for one that does not exist or holds no run."""
    if not names:
        raise ConfigError(f"Name at least one run folder, as in mafrt {command} runs/NAME.")
    folders = [Path(name).expanduser() for name in names]
    for folder in folders:
        if not folder.is_dir():
            problem = "is a file" if folder.exists() else "does not exist"
            raise ConfigError(f"{folder} {problem}; give a run folder, such as one in runs/.")
        if not _holds_run(folder):
            within = next((parent for parent in folder.resolve().parents if _holds_run(parent)), None)
            remedy = f"it is a part of the run {within}, give that" if within else "give one, such as one in runs/"
            raise ConfigError(f"{folder} is no run folder; {remedy}.")
    places = [folder.resolve() for folder in folders]
    if twice := next((folder for at, folder in enumerate(folders) if places[at] in places[:at]), None):
        raise ConfigError(f"the run {twice} is named twice; leave one of them out.")
    return folders


def _holds_run(folder: Path) -> bool:
    """Whether a folder holds anything that is shown: a run's settings, its lines, or recorded episodes."""
    names = (ARGS, RECORD, FOLDER, *(f"{name}.jsonl" for name in LINE_FILES))
    return any((folder / name).exists() for name in names)


def output_file(settings: ReportSettings, folders: Sequence[Path]) -> Path:
    """Where the report goes. Raises ConfigError if that cannot be written, or holds anything but a report."""
    default = folders[0] / "report.html" if len(folders) == 1 else Path("report.html")
    target = Path(settings.output).expanduser() if settings.output else default
    if why := is_file_writable(target):
        raise ConfigError(f"output {target} cannot be written ({why}); give another file name.")
    if target.exists():
        with open(target, "rb") as file:
            # Only a report is replaced: a mistyped name must not cost another file.
            if file.read(len(MARK)) != MARK.encode():
                raise ConfigError(f"output {target} exists and is no report; give another file name.")
    elif target.suffix.lower() not in ("", ".html", ".htm"):
        raise ConfigError(f"output {target}: a report is a page of HTML; name it {target.with_suffix('.html')}.")
    return target


main = partial(run_main, report)

if __name__ == "__main__":
    sys.exit(main())
