"""Files that go from one execution to the next, within a quota."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace

from mafrt.core.errors import ConfigError
from mafrt.sandbox.types import EVERYTHING, Execution, Sandbox


class Workspace:
    """Persistent files of a series of executions, held as bytes.

    Every `run` starts with the files of the previous ones, and its changes and deletions persist. One `run` at a time.
    Files over the quota are not kept: `refused`, `stderr` and `over_quota` report them, and a file's earlier content
    stays. Code outside the sandbox must treat the contents as opaque bytes: `model.pkl` is only opened inside.
    """

    def __init__(self, sandbox: Sandbox, quota_mib: int = 64, max_files: int = 64) -> None:
        if quota_mib < 1 or max_files < 1:
            raise ConfigError(f"found a quota of {quota_mib} MiB and {max_files} files, expected at least one of each")
        self.sandbox, self.quota_mib, self.max_files = sandbox, quota_mib, max_files
        self.files: dict[str, bytes] = {}
        self.over_quota = 0
        """Files that were not kept so far."""
        self._lock = threading.Lock()

    def run(
        self,
        code: str,
        timeout_s: float = 10.0,
        memory_mib: int = 1024,
        fetch: str | Sequence[str] = "all",
    ) -> Execution:
        """Run `code` with the files in place. `fetch`: "all", or the names of those that shall be kept."""
        everything = fetch in ("all", EVERYTHING)
        if isinstance(fetch, str) and not everything:
            raise ConfigError(f"found the text {fetch!r} for fetch, expected 'all' or a list of names")
        wanted = (EVERYTHING,) if everything else tuple(fetch)
        # Files of one execution are the next one's input, so two at a time would lose changes.
        with self._lock:
            done = self.sandbox.execute(code, self.files, wanted, timeout_s, memory_mib)
            if everything:
                for name in done.missing:
                    self.files.pop(name, None)
            return self._keep(done)

    def _clear_place(self, name: str) -> None:
        """Drop a file where `name` needs a folder, and files of a folder that has become the file `name`."""
        parts = name.split("/")
        for depth in range(1, len(parts)):
            self.files.pop("/".join(parts[:depth]), None)
        for inside in [other for other in self.files if other.startswith(name + "/")]:
            del self.files[inside]

    def _keep(self, done: Execution) -> Execution:
        """Keep the files that fit the quota, in order of their names; report a reason for each of the others."""
        refused = {}
        # In the order of names, so that the same files are kept on every machine.
        for name in sorted(done.files):
            content = done.files[name]
            total = sum(len(data) for other, data in self.files.items() if other != name) + len(content)
            if total > self.quota_mib * 2**20:
                refused[name] = f"over the workspace's quota of {self.quota_mib} MiB"
            elif name not in self.files and len(self.files) >= self.max_files:
                refused[name] = f"over the workspace's quota of {self.max_files} files"
            else:
                self._clear_place(name)
                self.files[name] = content
        if not refused:
            return done
        self.over_quota += len(refused)
        names = ", ".join(repr(name) for name in list(refused)[:5]) + (" and others" if len(refused) > 5 else "")
        note = f"[workspace] not kept, {next(iter(refused.values()))}: {names}\n"
        return replace(
            done,
            files={name: content for name, content in done.files.items() if name not in refused},
            missing=(*done.missing, *refused),
            refused={**done.refused, **refused},
            stderr=done.stderr + ("" if not done.stderr or done.stderr.endswith("\n") else "\n") + note,
        )
