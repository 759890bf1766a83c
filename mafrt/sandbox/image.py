"""The file system that a snippet sees: the system's libraries, Python's own library, and declared packages.

Everything else that is installed is out of sight, this library included: it holds hidden tests and reference solutions,
and other packages may hold the very tables that tasks are made of (`sklearn.datasets.load_digits`). Such data files of
the declared packages are hidden too.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import mafrt

PACKAGES = (
    *("numpy", "pandas", "scipy", "scikit-learn", "joblib", "pyarrow", "sympy", "networkx", "matplotlib"),
    *("statsmodels", "xgboost", "lightgbm", "catboost"),
)
"""Distributions that snippets can import where they are installed, together with those that they require."""
MORE_PACKAGES = "MAFRT_SANDBOX_PACKAGES"
"""Environment variable with the names of further distributions, with commas between them."""
OWN = "mafrt"

SYSTEM = (
    *(f"/usr/{name}" for name in ("bin", "sbin", "lib", "lib32", "lib64", "libx32", "libexec", "share/zoneinfo")),
    *(f"/usr/local/{name}" for name in ("bin", "lib", "lib64")),
    *("/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32"),
)
PACKAGE_FOLDERS = ("site-packages", "dist-packages")

DATA_SUFFIXES = frozenset(
    f".{name}"
    for name in (
        *("arff", "arrow", "bz2", "csv", "dat", "data", "dta", "feather", "gz", "h5", "hdf5", "joblib", "json"),
        *("jsonl", "mat", "npy", "npz", "orc", "parquet", "pickle", "pkl", "sas7bdat", "sav", "tsv", "txt", "xlsx"),
        *("xz", "zip"),
    )
)
DATA_FOLDERS = ("data", "datasets", "sample_data", "test", "tests")
"""A data file below a folder of one of these names is a data set or a test's; others, such as scipy's table of Sobol
directions, are needed at run time."""
MIXED = "datasets"
"""Holds code too, so that its data files are hidden one by one."""


@dataclass(frozen=True)
class Image:
    """Paths of this machine that are shown, and those below them that are not."""

    folders: tuple[str, ...]
    """Shown at their own place: the system's libraries and Python's."""
    masked: tuple[str, ...]
    """Folders below `folders` that are empty for a snippet: installed packages, and this library."""
    packages: tuple[tuple[str, str], ...]
    """(name, path) of each module, package and shared library of the declared distributions."""
    hidden: tuple[str, ...]
    """Data files and folders of them, by names that begin as those of `packages` do: `sklearn/datasets/data`."""

    def readable(self) -> tuple[list[str], list[str]]:
        """The image as path rules, which cannot exclude a path below an allowed one.

        Returns:
            Paths allowed for reading, and folders allowed for listing because only a part below them is readable.
        """
        sources = dict(self.packages)
        hidden = {os.path.join(os.path.dirname(sources[name.split("/")[0]]), name) for name in self.hidden}
        read: list[str] = []
        listed: list[str] = []
        for root in (*self.folders, *sources.values()):
            _split(root, {*self.masked, *hidden}, read, listed)
        return read, listed


def executable() -> str:
    """The interpreter itself, not that of a virtual environment, whose packages it would bring along."""
    return os.path.abspath(getattr(sys, "_base_executable", None) or sys.executable)


@cache
def image(more: str | None = None) -> Image:
    """The image of this machine; `more`: see `MORE_PACKAGES`. Reads the lists of installed files once per process."""
    extra = os.environ.get(MORE_PACKAGES, "") if more is None else more
    wanted = [*PACKAGES, *(name.strip() for name in extra.split(",") if name.strip())]
    folders = tuple(_folders())
    packages: dict[str, str] = {}
    hidden: list[str] = []
    for distribution in _distributions(wanted):
        entries = _top_level(distribution)
        packages |= entries
        hidden += _data(distribution, entries)
    return Image(folders, tuple(_masked(folders)), tuple(sorted(packages.items())), tuple(sorted(hidden)))


def _folders() -> Iterator[str]:
    """The system's folders, and Python's own where they are others."""
    system = [folder for folder in SYSTEM if os.path.isdir(folder)]
    yield from system
    base = os.path.abspath(sys.base_prefix)
    real = os.path.realpath(base)
    library = sysconfig.get_path("stdlib", vars={"base": base, "installed_base": base})
    wanted = [f"{place}/{name}" for place in {base, real} for name in ("bin", "lib", "lib64")]
    wanted += [library, executable(), os.path.realpath(executable())]
    folders: list[str] = []
    for path in sorted(set(wanted), key=len):
        if os.path.exists(path) and not any(within(path, folder) for folder in (*system, *folders)):
            folders.append(path)
    yield from folders


def _masked(folders: Iterable[str]) -> Iterator[str]:
    """Where packages are installed below the folders that are shown; R's data sets; and this library, wherever."""
    package = [str(Path(path).resolve()) for path in mafrt.__path__]
    for name in ("envs", "runners", "scripts"):
        spec = importlib.util.find_spec(f"{OWN}.{name}")
        package += [str(Path(path).resolve()) for path in (spec.submodule_search_locations or ())] if spec else []
    masked: list[str] = []
    for folder in folders:
        place = Path(folder)
        if not place.is_dir() or place.is_symlink():
            continue
        paths = [path for name in PACKAGE_FOLDERS for path in (*place.glob(f"python*/{name}"), *place.glob(name))]
        paths += [place / "R"]
        masked += [str(path) for path in paths if path.is_dir() and not path.is_symlink()]
        masked += [path for path in package if within(path, os.path.realpath(folder))]
    for path in sorted(set(masked), key=len):
        if not any(within(path, other) for other in masked if other != path):
            yield path


def _distributions(names: Iterable[str]) -> Iterator[importlib.metadata.Distribution]:
    """Those that are installed, and all that they require; never this library."""
    waiting, seen = list(names), {OWN}
    while waiting:
        name = re.sub(r"[-_.]+", "-", waiting.pop(0)).lower()
        if name in seen:
            continue
        seen.add(name)
        try:
            distribution = importlib.metadata.distribution(name)
        except (importlib.metadata.PackageNotFoundError, ValueError):
            continue
        waiting += [required for line in distribution.requires or () if (required := _required(line))]
        yield distribution


def _required(line: str) -> str:
    """The name in a requirement, empty for one that only an extra asks for."""
    match = re.match(r"[A-Za-z0-9._-]+", line)
    return "" if match is None or re.search(r"\bextra\b", line) else match[0]


def _top_level(distribution: importlib.metadata.Distribution) -> dict[str, str]:
    """Name -> path of a distribution's entries in site-packages."""
    entries: dict[str, str] = {}
    for file in distribution.files or ():
        name = file.parts[0]
        if name not in ("..", "__pycache__", "/", OWN) and name not in entries and not name.endswith(".pth"):
            entries[name] = os.path.abspath(str(distribution.locate_file(name)))
    for name in (distribution.read_text("top_level.txt") or "").split():
        # An editable or a system's package has no list of files, or one that does not name the code.
        if name not in entries and name != OWN and (spec := importlib.util.find_spec(name)) is not None:
            places = list(spec.submodule_search_locations or ())
            path = places[0] if places else spec.origin
            if path and os.path.exists(path):
                entries[os.path.basename(path)] = os.path.abspath(path)
    return {name: path for name, path in entries.items() if os.path.exists(path)}


def _data(distribution: importlib.metadata.Distribution, packages: Mapping[str, str]) -> set[str]:
    """Data sets of one distribution: the topmost folder that is named so, or the file where code lies beside it."""
    files = [tuple(file.parts) for file in distribution.files or ()]
    listed = {parts[0] for parts in files if len(parts) > 1}
    for name, path in packages.items():
        if name not in listed and os.path.isdir(path):  # no list of files came with it
            for folder, _, names in os.walk(path):
                files += [(name, *Path(os.path.relpath(folder, path), file).parts) for file in names]
    data_files = set()
    for parts in files:
        if parts[0] in packages and Path(parts[-1]).suffix.lower() in DATA_SUFFIXES:
            for depth, part in enumerate(parts[1:-1], start=2):
                if part in DATA_FOLDERS:
                    data_files.add("/".join(parts if part == MIXED else parts[:depth]))
                    if part != MIXED:
                        break
    return {path for path in data_files if not any(within(path, other) for other in data_files if other != path)}


def _split(path: str, without: set[str], read: list[str], listed: list[str]) -> None:
    """`path`, or its parts if something below it is left out."""
    if path in without:
        return
    if not any(other.startswith(path.rstrip("/") + "/") for other in without):
        read.append(path)
        return
    listed.append(path)
    for entry in sorted(os.listdir(path)):
        _split(os.path.join(path, entry), without, read, listed)


def within(path: str, folder: str) -> bool:
    return path == folder or path.startswith(folder.rstrip("/") + "/")
