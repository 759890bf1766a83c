"""Files into the workdir before a snippet runs, and out of it when all its processes are gone.

Nothing is followed that a snippet could have made to lead elsewhere: every part of a path is opened on its own, from
the folder before it, and only a regular file of reasonable size is read.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Mapping, Sequence

from . import limits, names

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC


def write(workdir: str, files: Mapping[str, bytes], owner: int | None = None) -> None:
    """The files with their folders; `owner`: whom they are given to."""
    for name, content in files.items():
        path = workdir
        *folders, last = name.split("/")
        for folder in folders:
            path = f"{path}/{folder}"
            if not os.path.isdir(path):
                os.mkdir(path, 0o700)
                if owner is not None:
                    os.chown(path, owner, owner)
        path = f"{path}/{last}"
        # Created and never overwritten: a name that comes twice is a fault of the caller.
        with open(path, "xb") as file:
            file.write(content)
        if owner is not None:
            os.chown(path, owner, owner)


class CollectedFiles:
    """Collected file contents, and reasons for refused files."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.missing: list[str] = []
        self.refused: dict[str, str] = {}
        self.total = 0

    def refuse(self, name: str, why: str) -> None:
        # The list is bounded too, since a program can make any number of files that are refused, and names of any
        # length.
        if len(self.refused) < limits.FETCH_FILES:
            self.refused[name[: limits.SHOWN_NAME]] = why

    def add(self, workdir: str, name: str) -> None:
        """Read one file, or say why not."""
        why = names.fault(name)
        if why is None:
            try:
                content = _read(workdir, name, limits.FETCH_TOTAL_MIB * limits.MIB - self.total)
            except FileNotFoundError:
                self.missing.append(name)
                return
            except RefusedFile as error:
                why = str(error)
            except OSError as error:
                why = f"cannot be read: {error.strerror}"
            else:
                self.files[name] = content
                self.total += len(content)
                return
        self.missing.append(name[: limits.SHOWN_NAME] if names.fault(name) else name)
        self.refuse(name, why)


class RefusedFile(Exception):
    """There is something of this name, and it will not be read."""


def fetch(workdir: str, wanted: list[str]) -> CollectedFiles:
    """The named files."""
    fetched = CollectedFiles()
    for name in wanted[: limits.FETCH_FILES]:
        fetched.add(workdir, name)
    for name in wanted[limits.FETCH_FILES :]:
        fetched.missing.append(name)
        fetched.refuse(name, f"more than {limits.FETCH_FILES} files were asked for")
    return fetched


def fetch_changes(workdir: str, handed: Mapping[str, bytes]) -> CollectedFiles:
    """New or changed files; `missing` lists given files that were deleted."""
    fetched = CollectedFiles()
    for name in _walk(workdir):
        if len(fetched.files) >= limits.FETCH_FILES or len(fetched.missing) >= limits.FETCH_FILES:
            fetched.refuse("*", f"more than {limits.FETCH_FILES} files; the rest was left")
            break
        before = fetched.total
        fetched.add(workdir, name)
        # Unchanged files are left where the caller has them.
        if name in fetched.files and fetched.files[name] == handed.get(name):
            del fetched.files[name]
            fetched.total = before
    fetched.missing += [name for name in handed if not os.path.lexists(f"{workdir}/{name}")]
    return fetched


def entries(workdir: str, deepest: int = names.MAX_PARTS) -> Iterator[tuple[str, os.stat_result, bool]]:
    """Path below `workdir`, status, and whether it is a folder, of all there is; links are not followed.

    Neither depth nor the length of paths can end this: folders are opened part by part, and those that lie `deepest`
    levels down are named but not entered.
    """
    waiting: list[tuple[str, ...]] = [()]
    while waiting:
        parts = waiting.pop()
        try:
            folder = _open_folder(workdir, parts)
        except OSError:
            continue  # gone, or closed to the supervisor by its owner
        try:
            listed = sorted(os.listdir(folder))
            inner = []
            for name in listed:
                try:
                    about = os.stat(name, dir_fd=folder, follow_symlinks=False)
                except OSError:
                    continue
                is_folder = stat.S_ISDIR(about.st_mode)
                if is_folder and len(parts) + 1 < deepest:
                    inner.append((*parts, name))
                yield "/".join((*parts, name)), about, is_folder
            # A stack instead of recursion, since folders can be nested deeper than Python can call.
            waiting += reversed(inner)
        finally:
            os.close(folder)


def _walk(workdir: str) -> Iterator[str]:
    """Names of all that is not a folder, and of folders that are too deep to be looked into."""
    for path, _, is_folder in entries(workdir):
        too_deep = is_folder and path.count("/") + 1 >= names.MAX_PARTS
        if "__pycache__" in path.split("/") or (is_folder and not too_deep):
            continue
        yield path.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


def _open_folder(workdir: str, parts: Sequence[str]) -> int:
    place = os.open(workdir, _FOLDER)
    # Opened one by one without following links: a path as a whole could lead out through one on the way.
    for part in parts:
        try:
            inner = os.open(part, _FOLDER, dir_fd=place)
        finally:
            os.close(place)
        place = inner
    return place


def _read(workdir: str, name: str, room: int) -> bytes:
    *folders, last = name.split("/")
    place = os.open(workdir, _FOLDER)
    try:
        for folder in folders:
            try:
                inner = os.open(folder, _FOLDER, dir_fd=place)
            except NotADirectoryError:
                raise RefusedFile(f"{folder!r} is not a folder, or is a link") from None
            except OSError as error:
                raise RefusedFile(f"{folder!r} is a link") if error.errno == 40 else error from None
            os.close(place)
            place = inner
        kind = os.stat(last, dir_fd=place, follow_symlinks=False).st_mode
        if stat.S_ISLNK(kind):
            raise RefusedFile("a symbolic link")
        if not stat.S_ISREG(kind):
            raise RefusedFile("a folder" if stat.S_ISDIR(kind) else "not a regular file")
        # Opened without blocking, or a pipe in place of a file would hold the supervisor.
        file = os.open(last, _FILE, dir_fd=place)
    finally:
        os.close(place)
    with open(file, "rb") as opened:
        about = os.fstat(file)
        if not stat.S_ISREG(about.st_mode):
            raise RefusedFile("not a regular file")
        if about.st_size > limits.FETCH_FILE_MIB * limits.MIB:
            raise RefusedFile(f"{about.st_size} bytes; at most {limits.FETCH_FILE_MIB} MiB are taken")
        if about.st_size > room:
            raise RefusedFile(f"all files together have more than {limits.FETCH_TOTAL_MIB} MiB")
        return opened.read(about.st_size)
