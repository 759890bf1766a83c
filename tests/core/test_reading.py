"""Files as people write them."""

from __future__ import annotations

import gzip
import os

import pytest

from mafrt.core import reading
from mafrt.core.errors import CheckpointError
from mafrt.core.reading import read_list
from mafrt.core.text import counted
from mafrt.scripts.reporting.run_data import json_lines
from mafrt.storage.json_lines import keep_until
from mafrt.storage.transcript_files import TranscriptFile, read_transcript


def test_a_list_has_comments_on_lines_of_their_own_and_behind_an_entry(tmp_path):
    path = tmp_path / "servers.txt"
    path.write_text("# all\n\nhost:1  # first\n  host:2\n#host:3\nhttp://host:4/#x\n\t# end\n", encoding="utf-8")
    assert read_list(path) == ["host:1", "host:2", "http://host:4/#x"]


def test_a_number_and_its_noun_agree():
    assert [counted(number, "next observations") for number in (0, 1, 2)] == [
        "0 next observations", "1 next observation", "2 next observations",
    ]  # fmt: skip


@pytest.mark.parametrize("file", ["metrics.jsonl", "evaluations.jsonl", "timings.jsonl", "episodes.jsonl"])
def test_a_line_of_any_length_is_read_by_nobody(file, tmp_path, monkeypatch):
    monkeypatch.setattr(reading, "LONGEST_LINE_MIB", 1)
    path = tmp_path / file
    path.write_bytes(b'{"iteration": 1, "score": 0.5}\n')
    os.truncate(path, 2**40)
    problems: list[str] = []
    assert [line["iteration"] for line in json_lines(path, problems)] == [1]
    assert problems == [f"{file} cannot be read ([Errno 27] holds a line of more than 1 MiB)."]
    with pytest.raises(CheckpointError, match="holds a line of more than 1 MiB; move it away"):
        keep_until(path, 1)
    assert path.stat().st_size == 2**40


def test_a_transcript_of_one_line_without_end_is_not_unpacked(tmp_path, monkeypatch):
    monkeypatch.setattr(reading, "LONGEST_LINE_MIB", 1)
    path = tmp_path / "train-000001.jsonl.gz"
    with gzip.open(path, "wb") as packed:
        for _ in range(20):
            packed.write(b" " * 2**20)
    found = read_transcript(TranscriptFile(path, "train", 1))
    assert "holds a line of more than 1 MiB" in found.problem
