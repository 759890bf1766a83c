"""Runs the agents' programs and inspects their files; equal work is done once.

An execution depends on its program and its files alone, so far as it depends on anything that can be repeated: the
same program on the same files is not run a second time. Episodes of one task begin with equal files, and short
programs repeat, so this saves most of the work. It also makes a repeated episode an equal one.
"""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from mafrt.core.errors import ConfigError, EnvError
from mafrt.core.extras import install
from mafrt.core.text import readable_name
from mafrt.environment.python_tool import SandboxOptions
from mafrt.envs.dsbench.ground_truth import Answers
from mafrt.envs.dsbench.scoring import SubmissionScore, read_score
from mafrt.envs.dsbench.tables import MOST_COLUMNS
from mafrt.sandbox import SandboxError, Workspace, shared_sandbox
from mafrt.sandbox.judging import MOST_ANSWER_KIB, OURS, Undecided, bytecode, judge, sources

if TYPE_CHECKING:
    from mafrt.sandbox import Execution, Sandbox

INSIDE = Path(__file__).parent / "inside"
LAB = "lab.py"
LOOK_TIMEOUT_S = 60.0
LOOK_MEMORY_MIB = 2048
LOOKING = ("allowed.py", "reading.py", "look.py")
PREDICTING = ("allowed.py", "reading.py", "predict.py")
PREDICTED = ("guess.npy", "chances.npy", "error.txt")
SCORING = (
    *("mafrt.core.errors", "mafrt.core.reading", "mafrt.core.text", "mafrt.config.schema"),
    *("mafrt.envs.dsbench.metrics", "mafrt.envs.dsbench.tables"),
    *("mafrt.envs.dsbench.ground_truth", "mafrt.envs.dsbench.scoring"),
)
"""Modules that go into the room in which submissions are scored; the last one is called."""
MODEL_SCORING = (*SCORING, "mafrt.envs.dsbench.model_scoring")
"""The same for a model's predictions."""
TOGETHER = ("allowed.py", "reading.py", "look.py", "predictions.py", "together.py")
"""Scripts that ask two questions about the same bytes at once, beside the modules that score."""
Call = tuple[str, str, Sequence[Any]]
"""Module, function and arguments."""
SCORE: Call = (SCORING[-1], "score_files", ())
SCORE_MODEL: Call = (MODEL_SCORING[-1], "score_predictions", ())
PROBE: tuple[Sequence[str], Call] = (("predictions.py",), ("predictions", "main", ()))
MOST_KIB = 64
"""of an answer of the judging room to one question"""
NEEDED = ("joblib", "numpy", "pandas", "sklearn")
"""Packages imported by programs and by the inspection of their files."""
MEMO_MIB = 256
"""of files and output that are kept for repeated work"""
LONGEST_SUFFIX = 16
"""of a file's name, with its point; a longer one tells no kind"""
HIDDEN = "."
"""Files whose names begin so are neither shown nor looked at."""


class BenchOptions(SandboxOptions, total=False):
    """Where programs run, and the limits of programs and of an episode's files. All may be left out."""

    workspace_mib: int
    """MiB of all files of an episode"""


@dataclass(frozen=True)
class FileSummary:
    """Description of a file, found in the sandbox. Controlled by untrusted code: data, not facts."""

    kind: str
    """table, matrix, array, model, file, broken, or the name of a class"""
    rows: int | None = None
    columns: int | None = None
    names: tuple[str, ...] = ()
    missing: int | None = None
    """missing cells of a table"""
    words: tuple[str, ...] = ()
    """columns of a table that are not numbers"""
    of: str = ""
    """class of a model"""
    asks: tuple[str, ...] = ()
    """packages that a model's pickle asks for"""
    why: str = ""
    """fault of a broken file"""

    def brief(self, names: int = 0) -> str:
        """`107 rows, 8 columns`, with the first column names if asked for."""
        if self.kind == "broken":
            return f"broken: {self.why}"
        if self.kind == "model":
            return self.of or "model"
        if self.rows is None:
            return self.kind
        text = f"{self.rows} rows, {self.columns} columns"
        if self.missing:
            text += f", {self.missing} missing"
        if names and self.names:
            more = " ..." if len(self.names) > names or (self.columns or 0) > len(self.names) else ""
            text += f": {', '.join(self.names[:names])}{more}"
        return text


@dataclass
class ResultCache:
    """Results of equal work, the oldest forgotten first. For many threads: one works, the others wait."""

    most_bytes: int = MEMO_MIB * 2**20
    _known: OrderedDict[bytes, tuple[Future[Any], int]] = field(default_factory=OrderedDict)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _bytes: int = 0

    def get(self, key: bytes, make: Callable[[], Any], size: Callable[[Any], int], keep: Callable[[Any], bool]) -> Any:
        """The cached result of `make` for this key. Results refused by `keep`, and exceptions, are not cached."""
        with self._lock:
            if (known := self._known.get(key)) is not None:
                self._known.move_to_end(key)
            else:
                future: Future[Any] = Future()
                self._known[key] = (future, 0)
        if known is not None:
            return known[0].result()
        try:
            result = make()
        except BaseException as error:
            self._forget(key)
            future.set_exception(error)
            raise
        future.set_result(result)
        if not keep(result):
            self._forget(key)
            return result
        with self._lock:
            self._known[key] = (future, size(result))
            self._bytes += size(result)
            while self._bytes > self.most_bytes and len(self._known) > 1:
                oldest = next(iter(self._known))
                if not self._known[oldest][0].done():
                    break
                self._bytes -= self._known.pop(oldest)[1]
        return result

    def known(self, key: bytes) -> Any | None:
        """The cached result of this key if there is one by now."""
        with self._lock:
            found = self._known.get(key)
        return found[0].result() if found is not None and found[0].done() and not found[0].exception() else None

    def _forget(self, key: bytes) -> None:
        with self._lock:
            self._known.pop(key, None)


@dataclass
class Bench:
    """The sandbox as the environment uses it; shared by all its siblings."""

    sandbox: str = "bwrap"
    """`bwrap`, `fusion:URL` or `degraded`"""
    timeout_s: float = 60.0
    memory_mib: int = 2048
    workspace_mib: int = 256
    """of files in a workspace"""
    max_files: int = 64
    memo: ResultCache = field(default_factory=ResultCache, repr=False)

    def opened(self) -> Sandbox:
        """The process's sandbox of this name. Raises SandboxError if this machine has none."""
        return shared_sandbox(self.sandbox)

    def equipped(self) -> None:
        """Check that the sandbox has the packages of the tasks. Raises ConfigError, since every program would fail."""
        names = ", ".join(NEEDED)
        done, _ = self._run(f"import {names}", {}, LOOK_TIMEOUT_S, ())
        if done.status != "ok":
            why = (done.stderr.strip().splitlines() or [done.status])[-1]
            raise ConfigError(
                f"programs cannot import {names} in the sandbox {self.sandbox} ({why}); run "
                f"{install('dsbench')} in the Python environment that the sandbox uses."
            )

    def run(self, code: str, files: Mapping[str, bytes]) -> tuple[Execution, dict[str, bytes]]:
        """Run an agent's program; how it went, and the files of the workspace afterwards.

        Raises EnvError if the sandbox failed, not the program.
        """
        return self._run(code, files, self.timeout_s, "all")

    def look(self, files: Mapping[str, bytes]) -> dict[str, FileSummary]:
        """Summaries of these files, which are those that one program made or changed, or a task's own.

        A file that is unpickled has an execution of its own, since a pickle may change the classes that it names; the
        others, which are only parsed, share one. A file that brings that to its limits is found by one for each.
        """
        shown = sorted(name for name in files if not name.startswith(HIDDEN) and name != LAB)
        asked = {name: (_kept(name), files[name]) for name in shown}
        parsed = [one for one in asked.values() if not _unpickled(one[0]) and self.memo.known(_looked(*one)) is None]
        if len(parsed) > 1:
            self._look_together(parsed)
        return {name: self._look(*asked[name]) for name in shown}

    def _look_together(self, asked: Sequence[tuple[str, bytes]]) -> None:
        """Describe these (name in the room, content) in one execution, for `_look` to find."""
        given = {f"{place}/{name}": data for place, (name, data) in enumerate(asked)}
        names = tuple(name for name, _ in asked)
        try:
            answer = self._judge(LOOKING, ("look", "look_at_all", (names, MOST_COLUMNS)), given, MOST_ANSWER_KIB)
        except Undecided:
            return
        seen = answer.get("seen")
        for one, told in zip(asked, seen if isinstance(seen, list) else (), strict=False):
            self._tell(_looked(*one), told)

    def _look(self, name: str, data: bytes) -> FileSummary:
        try:
            answer = self._judge(LOOKING, _look_call(name), {name: data})
        except Undecided as undecided:
            return FileSummary("broken", why=str(undecided))
        return _shape(answer)

    def probe(self, files: Mapping[str, bytes]) -> dict[str, Any]:
        """Predictions of model.pkl on X_test.pkl: `rows` and `constant`, or `error`.

        The model and the judgement of its predictions never share an execution.
        """
        made = self._predicted(files)
        if isinstance(made, str):
            return {"error": made}
        try:
            return _probed(self._judge(*PROBE, made))
        except Undecided as undecided:
            return {"error": str(undecided)}

    def score_model(self, answers: Answers, test: bytes, files: Mapping[str, bytes]) -> SubmissionScore:
        """Score of model.pkl's predictions on X_test.pkl, its rows in the order of `test`, the task's test.csv."""
        made = self._predicted(files)
        if isinstance(made, str) or "guess.npy" not in made:
            return SubmissionScore(False, "could not be scored")
        try:
            return read_score(self._in_room(sources(*MODEL_SCORING), SCORE_MODEL, _with_answers(made, answers, test)))
        except Undecided as undecided:
            return SubmissionScore(False, f"could not be scored: {undecided}")

    def prepare_model(self, answers: Answers, test: bytes, files: Mapping[str, bytes]) -> None:
        """Ask what `probe` and `score_model` ask in one execution, for them to find."""
        made = self._predicted(files)
        if isinstance(made, str) or "guess.npy" not in made:
            return
        given = _with_answers(made, answers, test)
        scripts, call = PROBE
        self._both(
            ("of_predictions", ()),
            given,
            {
                "probe": _question(_inside(*scripts), call, made),
                "score": _question(sources(*MODEL_SCORING), SCORE_MODEL, given),
            },
        )

    def _predicted(self, files: Mapping[str, bytes]) -> dict[str, bytes] | str:
        """Arrays of predictions of model.pkl on X_test.pkl, or why the program that makes them did not end."""
        ours = {f"{OURS}/{name}": text for name, text in _inside(*PREDICTING).items()}
        needed = {name: files[name] for name in ("model.pkl", "X_test.pkl")}
        code = f"import sys\nsys.path.insert(0, {OURS!r})\nimport predict\npredict.main()\n"
        done, after = self._run(code, {**needed, **ours}, LOOK_TIMEOUT_S, PREDICTED)
        if done.status not in ("ok", "error"):
            return str(done.status)
        return {name: after[name] for name in PREDICTED if name in after}

    def features(self, files: Mapping[str, bytes]) -> dict[str, Any]:
        """Of the training tables: `idle` (constants and row numbers), `noise`, and `copies`, the name of a target."""
        given = {name: files[name] for name in ("X_train.pkl", "y_train.pkl")}
        try:
            answer = self._judge((*LOOKING[:2], "noise.py", "features.py"), ("features", "main", ()), given)
        except Undecided:
            return {}
        copies = answer.get("copies")
        return {
            "idle": answer.get("idle") is True,
            "noise": answer.get("noise") is True,
            "copies": None if copies is None else readable_name(str(copies))[:60],
        }

    def score(self, answers: Answers, submission: bytes) -> SubmissionScore:
        """Score of submission.csv."""
        try:
            return read_score(self._in_room(sources(*SCORING), SCORE, _handed_in(answers, submission)))
        except Undecided as undecided:
            return SubmissionScore(False, f"cannot be read: {undecided}")

    def prepare_submission(self, answers: Answers, submission: bytes) -> None:
        """Ask what `look` and `score` ask about submission.csv in one execution, for them to find."""
        given = _handed_in(answers, submission)
        score = _question(sources(*SCORING), SCORE, given)
        self._both(
            ("of_submission", (MOST_COLUMNS,)),
            given,
            {"look": _looked(_kept("submission.csv"), submission), "score": score},
        )

    def _both(
        self, asked: tuple[str, Sequence[Any]], given: Mapping[str, bytes], questions: Mapping[str, bytes]
    ) -> None:
        """Keep the answers of a function of `together.py` to these questions, each by its key in the memo."""
        if all(self.memo.known(key) is not None for key in questions.values()):
            return
        ours = {**sources(*MODEL_SCORING), **_inside(*TOGETHER)}
        try:
            answer = self._in_room(ours, ("together", *asked), given, 2 * MOST_KIB)
        except Undecided:
            return  # each is asked alone
        for name, key in questions.items():
            self._tell(key, answer.get(name))

    def _tell(self, key: bytes, answer: Any) -> None:
        if isinstance(answer, dict):
            self.memo.get(key, lambda: answer, _length, lambda _: True)

    def _judge(
        self, scripts: Sequence[str], call: Call, given: Mapping[str, bytes], most_kib: int = MOST_KIB
    ) -> dict[str, Any]:
        return self._in_room(_inside(*scripts), call, given, most_kib)

    def _in_room(
        self, ours: Mapping[str, bytes], call: Call, given: Mapping[str, bytes], most_kib: int = MOST_KIB
    ) -> dict[str, Any]:
        """An answer of the judging room; equal questions are asked once. Raises Undecided."""

        def work() -> dict[str, Any]:
            limits: dict[str, Any] = {"timeout_s": LOOK_TIMEOUT_S, "memory_mib": LOOK_MEMORY_MIB}
            return judge(self.opened(), ours, call, given, **limits, most_kib=most_kib)

        answer: dict[str, Any] = self.memo.get(_question(ours, call, given), work, _length, lambda _: True)
        return answer

    def _run(
        self, code: str, files: Mapping[str, bytes], timeout_s: float, fetch: str | tuple[str, ...]
    ) -> tuple[Execution, dict[str, bytes]]:
        def work() -> tuple[Execution, dict[str, bytes]]:
            place = Workspace(self.opened(), self.workspace_mib, self.max_files)
            place.files.update(files)
            try:
                done = place.run(code, timeout_s=timeout_s, memory_mib=self.memory_mib, fetch=fetch)
            except SandboxError as error:
                raise EnvError(f"the sandbox failed, so nothing is known about a program: {error}") from error
            return done, dict(place.files)

        def size(result: tuple[Execution, dict[str, bytes]]) -> int:
            fresh = sum(len(data) for name, data in result[1].items() if files.get(name) is not data)
            return fresh + len(result[0].stdout) + len(result[0].stderr) + 200

        # A deadline or a lack of memory may be the machine's fault, and is not held against the next one.
        keep = lambda result: result[0].status in ("ok", "error")  # noqa: E731
        return cast("tuple[Execution, dict[str, bytes]]", self.memo.get(_key(code, files, fetch), work, size, keep))


@cache
def _inside(*names: str) -> dict[str, bytes]:
    files = {name: (INSIDE / name).read_bytes() for name in names}
    return files | bytecode(files)


def _kept(name: str) -> str:
    """The name under which a file lies in the room: of a program's choice only what tells its kind."""
    last, suffix = Path(name).name, Path(name).suffix
    return last if last.startswith("model") else f"file{suffix}" if len(suffix) <= LONGEST_SUFFIX else "file"


def _unpickled(name: str) -> bool:
    """Whether looking at the file runs its pickle; a model's is only read."""
    return name.endswith((".pkl", ".pickle", ".joblib")) and not name.startswith("model")


def _look_call(name: str) -> Call:
    return "look", "look", (name, MOST_COLUMNS)


def _looked(name: str, data: bytes) -> bytes:
    """The key of a file's description."""
    return _question(_inside(*LOOKING), _look_call(name), {name: data})


def _question(ours: Mapping[str, bytes], call: Call, given: Mapping[str, bytes]) -> bytes:
    """The key of an answer of the judging room."""
    return _key(repr(call), given, tuple(sorted(ours)))


def _handed_in(answers: Answers, submission: bytes) -> dict[str, bytes]:
    return {"submission.csv": submission, "answers.json": answers.to_json()}


def _with_answers(made: Mapping[str, bytes], answers: Answers, test: bytes) -> dict[str, bytes]:
    return {**made, "test.csv": test, "answers.json": answers.to_json()}


def _length(answer: Any) -> int:
    return len(repr(answer))


def _probed(answer: Mapping[str, Any]) -> dict[str, Any]:
    rows = answer.get("rows")
    if isinstance(rows, int) and not isinstance(rows, bool) and 0 <= rows < 10**12:
        return {"rows": rows, "constant": answer.get("constant") is True}
    return {"error": readable_name(str(answer.get("error", "it says nothing")))[:240]}


def _key(code: str, files: Mapping[str, bytes], fetch: Sequence[str]) -> bytes:
    digest = hashlib.blake2b(digest_size=16)
    parts = [part for name in sorted(files) for part in (name.encode("utf-8", "replace"), files[name])]
    for part in (code.encode("utf-8", "replace"), repr(fetch).encode(), *parts):
        digest.update(len(part).to_bytes(8, "big") + part)
    return digest.digest()


def _shape(answer: Any) -> FileSummary:
    """A `FileSummary` from the sandbox's untrusted answer."""
    if not isinstance(answer, dict) or not isinstance(answer.get("kind"), str):
        return FileSummary("broken", why="could not be looked at")

    def count(key: str) -> int | None:
        value = answer.get(key)
        return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 10**12 else None

    def texts(key: str) -> tuple[str, ...]:
        value = answer.get(key)
        return tuple(readable_name(str(name))[:60] for name in value[:40]) if isinstance(value, list) else ()

    return FileSummary(
        answer["kind"][:40],
        count("rows"),
        count("columns"),
        texts("names"),
        count("missing"),
        texts("words"),
        readable_name(str(answer.get("class", "")))[:80],
        texts("asks"),
        readable_name(str(answer.get("why", "")))[:160],
    )
