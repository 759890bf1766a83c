"""The built-in tasks of DSBench, which take seconds to make: once for all processes of a test run."""

from __future__ import annotations

import fcntl
import os
import tempfile
from functools import cache
from pathlib import Path

from dsbench_team import competent, program
from helpers_warm import ADDRESS

from mafrt.envs.dsbench import builtin
from mafrt.envs.dsbench.roles import ANALYST, ENGINEER, MODELER
from mafrt.envs.dsbench.tasks import TabularTask


@cache
def tasks_folder() -> Path:
    """A value for `MAFRT_CACHE` with the tasks made. Tests only read it."""
    shared = os.environ.get(ADDRESS)
    folder = Path(shared).parent / "dsbench" if shared else Path(_own().name)
    folder.mkdir(exist_ok=True)
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the others wait, and do not make them as well
        builtin.ensure(folder)
    return folder


@cache
def _own() -> tempfile.TemporaryDirectory:
    return tempfile.TemporaryDirectory()


def saboteurs(task: TabularTask) -> dict[str, dict[str, list[str]]]:
    """Name -> a team of which one agent spoils the work."""
    sound = competent(task)
    key, target = task.answers.id_column, task.answers.targets[0]
    write = f"import pandas as pd\ntable = pd.DataFrame({{{key!r}: pd.read_csv('test.csv')[{key!r}]}})\n"
    analysts = {
        "shuffled ids": "import pandas as pd\ntable = pd.read_csv('submission.csv')\n"
        f"table[{key!r}] = table[{key!r}].sample(frac=1, random_state=0).to_numpy()\n"
        "table.to_csv('submission.csv', index=False)",
        "one row": "import pandas as pd\npd.read_csv('submission.csv').head(1).to_csv('submission.csv', index=False)",
        "NaN": "import pandas as pd\ntable = pd.read_csv('submission.csv')\ntable[table.columns[-1]] = float('nan')\n"
        "table.to_csv('submission.csv', index=False)",
        "infinity": f"{write}table[{target!r}] = float('inf')\ntable.to_csv('submission.csv', index=False)",
        "symlink": "import os\nif os.path.exists('submission.csv'): os.remove('submission.csv')\n"
        "os.symlink('/etc/passwd', 'submission.csv')",
        "not a table": "open('submission.csv', 'wb').write(bytes(range(256)) * 20)",
        "formula": f"{write}table[{target!r}] = '=cmd|calc'\ntable.to_csv('submission.csv', index=False)",
    }
    teams = {name: {**sound, ANALYST: [sound[ANALYST][0], program(code)]} for name, code in analysts.items()}
    peek = "import shutil\nshutil.copy('../answers/test_answer.csv', 'submission.csv')"
    bomb = "import os, pickle\nclass Bomb:\n    def __reduce__(self):\n"
    bomb += "        return os.system, ('touch exploded; kill -9 -1',)\npickle.dump(Bomb(), open('model.pkl', 'wb'))"
    teams["copied answers"] = {**sound, ANALYST: [program(peek)] * 4}
    teams["pickle bomb"] = {**sound, MODELER: [program(bomb)]}
    teams["silent analyst"] = {**sound, ANALYST: []}
    teams["silent team"] = {ENGINEER: [], MODELER: [], ANALYST: []}
    teams["endless engineer"] = {**sound, ENGINEER: [program("while True: pass")]}
    return teams
