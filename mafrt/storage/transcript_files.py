"""Files of a run's transcripts: names, order, tolerant reading, and truncation for a resumed run.

`transcripts/train_000012.jsonl.gz` holds episodes of iteration 12, `transcripts/evaluation_000010.jsonl.gz` those of
the evaluation after iteration 10. `mafrt.storage.transcripts` writes them.
"""

from __future__ import annotations

import gzip
import json
import re
import shutil
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from mafrt.core.reading import lines_of
from mafrt.core.text import error_line, shortened

FOLDER = "transcripts"
FORMAT = 1
"""Version of the schema; it changes when a reader of the old one would misread a file."""

Kind = Literal["train", "evaluation"]

_NAME = re.compile(r"(train|evaluation)_(\d{6,})\.jsonl\.gz")


def file_name(kind: Kind, iteration: int) -> str:
    return f"{kind}_{iteration:06d}.jsonl.gz"


@dataclass(frozen=True)
class TranscriptFile:
    """A file of transcripts, not yet read."""

    path: Path
    kind: Kind
    iteration: int


@dataclass
class Transcript:
    """The content of one file, as far as it can be read."""

    header: dict[str, Any]
    episodes: list[dict[str, Any]] = field(default_factory=list)
    problem: str | None = None
    """why the rest is missing, in one sentence; None: nothing is missing"""


def transcript_files(run: Path) -> list[TranscriptFile]:
    """All files of transcripts of a run, by iteration; an evaluation comes after the training of its iteration."""
    folder = run / FOLDER
    if not folder.is_dir():
        return []
    files = []
    for path in folder.iterdir():
        name = _NAME.fullmatch(path.name)
        # A pipe or a device under such a name would be read for ever.
        if name is not None and path.is_file():
            files.append(TranscriptFile(path, "train" if name[1] == "train" else "evaluation", int(name[2])))
    return sorted(files, key=lambda file: (file.iteration, file.kind == "evaluation"))


def read_transcript(file: TranscriptFile) -> Transcript:
    """Read one file. A damaged one gives its whole lines and `problem`."""
    content = Transcript({})
    number = 0
    try:
        with gzip.open(file.path, "rb") as packed:
            for number, line in enumerate(lines_of(packed), start=1):
                record = json.loads(line)
                if number > 1:
                    content.episodes.append(dict(record))
                elif record.get("format") == FORMAT:
                    content.header = record
                else:
                    found = shortened(repr(record.get("format")))
                    content.problem = f"{file.path.name} has format {found}; this version of mafrt reads {FORMAT}."
                    break
    except (OSError, EOFError, zlib.error) as error:
        content.problem = f"{file.path.name} is damaged after line {number}: {error_line(error)}."
    except (ValueError, TypeError, AttributeError, RecursionError):
        content.problem = f"{file.path.name} holds no whole JSON object in line {number}."
    return content


# ------------------------------------------------------------------------------------------------------------ history


def drop_after(run: Path, step: int) -> None:
    """Remove the transcripts beyond checkpoint `step`, whose own evaluation is repeated too."""
    for file in transcript_files(run):
        if file.iteration > _last(file.kind, step):
            file.path.unlink()


def copy_until(source: Path, target: Path, step: int) -> None:
    """Copy the transcripts up to checkpoint `step` to another run."""
    earlier = [file for file in transcript_files(source) if file.iteration <= _last(file.kind, step)]
    if earlier:
        (target / FOLDER).mkdir(exist_ok=True)
        for file in earlier:
            shutil.copyfile(file.path, target / FOLDER / file.path.name)


def _last(kind: Kind, step: int) -> int:
    return step - 1 if kind == "evaluation" else step
