"""How a run that was stopped goes on: exit codes, and the command line to paste."""

from __future__ import annotations

import json
import os
import shlex
import signal
import sys
from pathlib import Path
from typing import Any

from mafrt.core.signals import source_of
from mafrt.scripts.cli.command import Command
from mafrt.scripts.cli.recorded_run import flags_needed
from mafrt.storage.checkpoint import candidates

PAUSED = 3
"""Exit code of a run that pauses until the user fixes its coach or its engine."""

ON_CLUSTER = "MAFRT_ON_CLUSTER"
"""Variable of a process on a Ray cluster: JSON of the flags that put it there, and of the settings that were asked for
where it is given the cluster's servers."""


def on_cluster() -> tuple[list[str], dict[str, Any]]:
    """The value of `ON_CLUSTER`; nothing elsewhere."""
    flags, asked = json.loads(os.environ.get(ON_CLUSTER, "[[], {}]"))
    return flags, asked


def interrupted(error: KeyboardInterrupt, command: Command, run_dir: Path) -> int | None:
    """Say what a second Ctrl-C leaves, the last checkpoint, and how to go on with it. The exit code; None without one.

    A third waits until that is said, and ends the process without a word from then on.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    steps = [step for step, _ in candidates(run_dir / "checkpoints")]
    by, code = source_of(error)
    if steps:
        told = f"Stopped by {by}; {run_dir} holds the checkpoint of iteration {max(steps)}."
        print(f"{told}\nGo on with: {go_on(command, run_dir)}", file=sys.stderr, flush=True)
    signal.signal(signal.SIGINT, signal.SIG_DFL if steps else signal.default_int_handler)
    return code if steps else None


def go_on(command: Command, run_dir: Path) -> str:
    """The command line that goes on with a run, to be pasted as it is."""
    words = ["--load_path", str(run_dir), *flags_needed(run_dir), *on_cluster()[0]]
    typed = Path(sys.argv[0])
    # An experiment of several stages has other flags than its training.
    stage = typed.resolve().is_relative_to(Path(__file__).resolve().parent.parent) and typed.stem != command.name
    # The line can be pasted as it is, so that it names what the user typed.
    if stage or typed.suffix != ".py":
        return shlex.join(["mafrt", command.name, *words])
    python = Path(sys.executable)
    here = python.relative_to(Path.cwd()) if python.is_relative_to(Path.cwd()) else python
    return shlex.join([str(here), sys.argv[0], *words])
