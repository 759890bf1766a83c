"""Which process runs which tests, side by side."""

from __future__ import annotations

from itertools import groupby

from xdist.scheduler import LoadScopeScheduling


class FileRuns(LoadScopeScheduling):
    """Give out tests of one file that stand side by side, in the order in which the processes list them.

    So the fast tests of a file are one unit and its slow tests another, if all fast tests stand before the slow ones.
    """

    def schedule(self) -> None:
        if self.collection is None:
            listed = next(iter(self.registered_collections.values()))
            runs = groupby(listed, key=lambda test: test.split("::", 1)[0])
            self._units = {test: f"{file} {number}" for number, (file, tests) in enumerate(runs) for test in tests}
        super().schedule()

    def _split_scope(self, nodeid: str) -> str:
        return self._units[nodeid]
