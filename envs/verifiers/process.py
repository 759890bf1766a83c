"""The trainer's side of the process that has `verifiers`: one for each interpreter, which all environments share.

Every wait has a deadline and every line a largest size. A process that dies or breaks the protocol ends its episodes,
and the next one starts it again.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import queue
import select
import shutil
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mafrt.config import permission
from mafrt.core.errors import EnvError
from mafrt.core.text import clean_text, shortened
from mafrt.envs.program.episode import ProgramEnd, ProgramEpisode

KNOWN = "0.4"
"""Version of the package whose interface the worker speaks"""
PIP = f"pip install 'verifiers=={KNOWN}.*'"
MAKE_ONE = f"make an interpreter with it (python3 -m venv vf && vf/bin/{PIP}) and give --env_python vf/bin/python"
START_S = 120.0
"""for the package to be imported"""
LOAD_S = 600.0
"""for an environment to load its data"""
SEND_S = 10.0
"""for a request to be taken"""
END_S = 8.0
"""for the process to put away what it has started"""
LARGEST = 17 << 20
"""Bytes of one line"""
MOST_TASKS = 1_000_000
_KEPT_BYTES = 16384
"""of the end of what the process wrote"""
_WORKER = Path(__file__).with_name("worker.py")


def remedy(python: str) -> str:
    """How to have the package. Ours is not told to install it: its pins would replace what we need, such as openai."""
    if python == os.path.abspath(sys.executable):
        return f"{MAKE_ONE}, or name the one that has it"
    return f"run: {python} -m {PIP}, or name the interpreter that has it by --env_python"


@dataclass(frozen=True)
class Description:
    """An environment that was loaded."""

    number: int
    """of the request that loaded it"""
    agents: tuple[str, ...]
    untrained: tuple[str, ...]
    """agents that the environment keeps from learning"""
    tasks: tuple[str, ...]
    """their prompts, shortened"""


class Life:
    """One running process."""

    def __init__(self, python: str) -> None:
        self.python = python
        try:
            self.process = subprocess.Popen(
                [python, "-u", str(_WORKER)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,  # Ctrl-C is for the trainer
                # Beside the files of a run nothing of the run's is importable.
                cwd=None if permission.run_of(os.curdir) is None else "/",
                env={k: v for k, v in os.environ.items() if k not in ("PYTHONHOME", "VIRTUAL_ENV")},
            )
        except OSError as error:
            raise EnvError(f"env_python {python} could not be started: {error.strerror}") from None
        self.lock = threading.Lock()
        self.answers: dict[int, queue.Queue[dict[str, Any]]] = {}
        self.episodes: dict[int, ProgramEpisode] = {}
        self.loaded: dict[str, Description] = {}
        self.numbers = 0
        self._hello: queue.Queue[dict[str, Any]] = queue.Queue()
        self._wrote = bytearray()
        self.dead: str | None = None
        """why it ended"""
        for work in (self._read, self._keep):
            threading.Thread(target=work, daemon=True, name="mafrt-verifiers").start()
        self._greet()

    def _greet(self) -> None:
        until = time.monotonic() + START_S
        while True:
            try:
                greeting = self._hello.get(timeout=max(0.0, until - time.monotonic()))
            except queue.Empty:
                self.end(f"did not import verifiers within {START_S:g} s")
                raise EnvError(f"env_python {self.python} {self.dead}") from None
            if greeting.get("ready"):
                return
            version = greeting.get("version")
            if version is not None:
                if str(version).startswith(f"{KNOWN}."):
                    continue
                why = f"has verifiers {shortened(str(version), 40)}, expected {KNOWN}.x; {remedy(self.python)}"
            elif greeting.get("missing"):
                why = f"has no package verifiers; {remedy(self.python)}"
            elif "error" in greeting:
                why = f"cannot import verifiers: {clean_text(str(greeting['error']))[:600]}"
            else:
                why = f"did not answer as an interpreter of Python: {greeting.get('dead', 'it wrote something else')}"
            self.end(why)
            raise EnvError(f"env_python {self.python} {why}")

    # ---------------------------------------------------------------------------------------------------- threads

    def _read(self) -> None:
        assert self.process.stdout is not None
        why, greeted = "ended", False
        with self.process.stdout as lines:
            while line := lines.readline(LARGEST):
                if not line.endswith(b"\n"):
                    why = f"wrote a line of more than {LARGEST >> 20} MiB" if len(line) >= LARGEST else why
                    break
                try:
                    message = json.loads(line)
                    if not isinstance(message, dict):
                        raise ValueError
                except (ValueError, RecursionError):
                    why = f"wrote a line that is no JSON object ({shortened(line.decode('utf-8', 'replace'), 80)!r})"
                    break
                if not greeted:
                    self._hello.put(message)
                    greeted = bool(message.get("ready"))
                else:
                    self._sort(message)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(1.0)  # its last words are then there
            time.sleep(0.05)
        self.end(f"{why}{self._last_line()}")
        self._hello.put({"dead": self.dead})

    def _keep(self) -> None:
        assert self.process.stderr is not None
        with self.process.stderr as stream:
            while part := os.read(stream.fileno(), 65536):
                self._wrote.extend(part)
                del self._wrote[:-_KEPT_BYTES]

    def _last_line(self) -> str:
        lines = bytes(self._wrote).decode("utf-8", "replace").strip().splitlines()
        code = self.process.poll()
        line = f": {shortened(clean_text(lines[-1]), 300)}" if lines else ""
        return f"{'' if code is None else f' with code {code}'}{line}"

    def _sort(self, message: dict[str, Any]) -> None:
        number = message.get("id")
        if isinstance(number, int) and (answers := self.answers.get(number)) is not None:
            answers.put(message)
        elif isinstance(number, int) and (episode := self.episodes.pop(number, None)) is not None:
            error = message.get("error")
            ended = message.get("ended")
            if error is None and not isinstance(ended, dict):
                error = "ended an episode without a result"
            episode.events.put(ProgramEnd(ended) if error is None else ProgramEnd(error=clean_text(str(error))[:800]))

    # ---------------------------------------------------------------------------------------------------- requests

    def send(self, message: dict[str, Any]) -> None:
        """Send a request. Raises EnvError if the process is gone, or does not read."""
        line = json.dumps(message).encode() + b"\n"
        assert self.process.stdin is not None
        try:
            with self.lock:
                # A pipe that is ready takes a short line whole, so that the trainer never waits for a stopped process.
                if not select.select([], [self.process.stdin], [], SEND_S)[1]:
                    self.end(f"did not read for {SEND_S:g} s")
                self.process.stdin.write(line)
                self.process.stdin.flush()
        except (OSError, ValueError):
            raise EnvError(f"the process of verifiers is gone ({self.dead or 'it ended'})") from None

    def number(self) -> int:
        with self.lock:
            self.numbers += 1
            return self.numbers

    def load(self, name: str, config: dict[str, Any], split: str, most: int | None) -> Description:
        key = json.dumps([name, config, split, most], sort_keys=True)
        if (known := self.loaded.get(key)) is not None:
            return known
        number, answers, tasks = self.number(), queue.Queue[dict[str, Any]](), list[str]()
        self.answers[number] = answers
        try:
            asked = {"op": "load", "id": number, "name": name, "config": config, "split": split, "most": most}
            self.send(asked)
            until = time.monotonic() + LOAD_S
            while True:
                try:
                    reply = answers.get(timeout=max(0.0, until - time.monotonic()))
                except queue.Empty:
                    self.end("was busy with an environment that does not load")
                    raise EnvError(f"verifiers:{name} did not load within {LOAD_S:g} s") from None
                if "error" in reply:
                    raise EnvError(f"verifiers:{name} {clean_text(str(reply['error']))[:800]}")
                tasks += [clean_text(str(each)) for each in reply.get("tasks") or ()]
                if len(tasks) > MOST_TASKS:
                    raise EnvError(f"verifiers:{name} has more than {MOST_TASKS} tasks; give max_tasks in --env_kwargs")
                if isinstance(about := reply.get("loaded"), dict):
                    agents, untrained = (tuple(map(str, about.get(part) or ())) for part in ("agents", "untrained"))
                    if not tasks or not agents:
                        raise EnvError(f"verifiers:{name} told of no tasks, or of no agents")
                    self.loaded[key] = Description(number, agents, untrained, tuple(tasks))
                    return self.loaded[key]
        finally:
            self.answers.pop(number, None)

    def play(self, env: int, task: int, episode: ProgramEpisode, base_url: str) -> None:
        number = self.number()
        self.episodes[number] = episode
        episode.stop = lambda: self._give_up(number)
        try:
            self.send({"op": "run", "id": number, "env": env, "task": task, "base_url": base_url})
        except EnvError as error:
            self.episodes.pop(number, None)
            episode.events.put(ProgramEnd(error=f"could not begin: {error}"))
        if self.dead is not None and self.episodes.pop(number, None) is not None:
            episode.events.put(ProgramEnd(error=f"could not begin: {self.dead}"))

    def _give_up(self, number: int) -> None:
        self.episodes.pop(number, None)
        with contextlib.suppress(EnvError):
            self.send({"op": "give_up", "id": 0, "of": number})

    def end(self, why: str) -> None:
        """End the process, its episodes and its requests."""
        if self.dead is None:
            self.dead = why
            threading.Thread(target=self.close, daemon=True, name="mafrt-verifiers").start()
        told = {"error": f"was lost: the process of verifiers {self.dead}"}
        for answers in list(self.answers.values()):
            answers.put(told)
        for number in list(self.episodes):
            if (episode := self.episodes.pop(number, None)) is not None:
                episode.events.put(ProgramEnd(error=told["error"]))

    def close(self, within_s: float = END_S) -> None:
        """End the process, and wait for it."""
        # Its input ends first, so that it can put away what it has started; it then ends by itself.
        with contextlib.suppress(OSError, ValueError):
            assert self.process.stdin is not None
            self.process.stdin.close()
        try:
            self.process.wait(within_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


class Interpreter:
    """The process of one interpreter, started when it is needed, and again when it has died."""

    def __init__(self, python: str) -> None:
        self.python = python
        self._life: Life | None = None
        self._lock = threading.Lock()

    def life(self) -> Life:
        with self._lock:
            if self._life is None or self._life.dead is not None:
                self._life = Life(self.python)
            return self._life

    def close(self) -> None:
        with self._lock:
            if self._life is not None:
                self._life.end("was ended")
                self._life.close()
            self._life = None


_INTERPRETERS: dict[str, Interpreter] = {}


def interpreter(python: str | None) -> Interpreter:
    """The process of an interpreter; None: of this one. Raises EnvError if there is no such interpreter."""
    found = sys.executable if python is None else shutil.which(os.path.expanduser(python))
    if found is None:
        raise EnvError(f"env_python {python} is no program that can be run; {MAKE_ONE}")
    # Not resolved: a link in a virtual environment is another interpreter than its target.
    place = os.path.abspath(found)
    if place not in _INTERPRETERS:
        _INTERPRETERS[place] = Interpreter(place)
    return _INTERPRETERS[place]


@atexit.register
def close_all() -> None:
    """End all processes."""
    for each in _INTERPRETERS.values():
        each.close()
