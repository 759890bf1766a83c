"""Verdicts that need not be asked for again: one SQLite file, JSON values, valid verdicts only.

A key is a hash of everything that the verdict depends on: provider, address, model, parameters, rubric and the whole
prompt. A file that turns out to be broken is set aside; one that cannot be written any more is done without. Neither
is worth a run.
"""

from __future__ import annotations

import hashlib
import json
import logging
import sqlite3
from pathlib import Path
from typing import Any

from mafrt.coach.parse_reply import UnreadableError, read_json, verdict_json
from mafrt.core.errors import ConfigError
from mafrt.core.types import Scored

log = logging.getLogger(__name__)

_TABLE = "CREATE TABLE IF NOT EXISTS verdicts (key TEXT PRIMARY KEY, coach TEXT NOT NULL, verdict TEXT NOT NULL)"


def key_of(*parts: Any) -> str:
    """SHA-256 of the parts as JSON."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


class VerdictCache:
    """Verdicts by key. Used by one thread at a time; several processes may share the file."""

    def __init__(self, path: str | Path, coach: str) -> None:
        """`coach` is written beside each verdict, for people. Raises ConfigError if the folder cannot be made."""
        self.path, self.coach = Path(path).expanduser(), coach
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"coach_cache {self.path}: the folder cannot be made ({error.strerror}); give another file, or none."
            ) from error
        if self.path.is_dir():
            raise ConfigError(f"coach_cache {self.path} is a folder; give a file, or none.")
        self._database: sqlite3.Connection | None = None
        try:
            self._database = self._open()
        except sqlite3.OperationalError as error:  # may not be written or read
            raise ConfigError(
                f"coach_cache {self.path} cannot be opened ({error}); give another file, or none."
            ) from error
        except sqlite3.DatabaseError as error:  # not a database, or a broken one
            self._set_aside(error)

    def _open(self) -> sqlite3.Connection:
        # The event loop's thread uses it, another one closes it.
        database = sqlite3.connect(self.path, timeout=30.0, isolation_level=None, check_same_thread=False)
        try:
            # Several runs may share one file: with a write-ahead log readers do not wait for a writer.
            database.execute("PRAGMA journal_mode=WAL")
            # A verdict that is lost with the machine is asked for again, so no write waits for the disk.
            database.execute("PRAGMA synchronous=NORMAL")
            database.execute(_TABLE)
        except BaseException:
            database.close()
            raise
        return database

    def _set_aside(self, error: Exception) -> None:
        number = 1
        while (aside := self.path.with_name(f"{self.path.name}.broken{number}")).exists():
            number += 1
        log.error("the coach's cache %s is broken (%s); it is now %s, and a new one begins", self.path, error, aside)
        # Kept and not deleted: verdicts cost money, and a tool may recover them.
        self.path.replace(aside)
        self._database = self._open()

    def get(self, key: str) -> Scored | None:
        """The verdict, None if there is none that can be read."""
        if self._database is None:
            return None
        try:
            row = self._database.execute("SELECT verdict FROM verdicts WHERE key = ?", (key,)).fetchone()
            # Checked as a fresh reply is, since others may have written to the file.
            return read_json(row[0]) if row else None
        except (sqlite3.Error, UnreadableError, TypeError) as error:
            log.warning("a verdict in %s cannot be read (%s); it is asked for again", self.path, error)
            return None

    def put(self, key: str, verdict: Scored) -> None:
        if self._database is None:
            return
        try:
            self._database.execute(
                "INSERT OR REPLACE INTO verdicts VALUES (?, ?, ?)", (key, self.coach, verdict_json(verdict))
            )
        except sqlite3.Error as error:
            log.error(
                "the coach's cache %s cannot be written any more (%s); the run goes on without it", self.path, error
            )
            self.close()

    def close(self) -> None:
        if self._database is not None:
            self._database.close()
            self._database = None
