"""Where a run's curves are shown besides its own files: TensorBoard, and Weights & Biases or trackio if asked for.

All get the same numbers, the settings, and an episode of each evaluation as text. The numbers are safe in
`metrics.jsonl`: a tracker that fails is logged once and left out, and the run goes on.

A run that goes on shows each iteration once, however it was interrupted: what comes after the checkpoint is played
again, so it is taken out of TensorBoard, and what came before is read from the run's own files where it is missing. A
service takes nothing out. There the same run goes on only if it was closed in the iteration from which the run goes
on; otherwise a new one in the same group begins, with the whole history.
"""

from __future__ import annotations

import html
import importlib
import json
import logging
import uuid
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

from mafrt.core.atomic_files import load_json, save_json
from mafrt.core.errors import ConfigError, MafrtError, MissingExtraError
from mafrt.core.text import error_line
from mafrt.storage.args_file import ARGS, read_args
from mafrt.storage.run_dir import RunDir

log = logging.getLogger(__name__)


class Tracker(Protocol):
    """One destination."""

    missing: int | None
    """the first iteration of the run's history that it has not; None: it has all"""

    def scalars(self, iteration: int, values: Mapping[str, float]) -> None: ...

    def text(self, iteration: int, name: str, text: str) -> None: ...

    def close(self) -> None: ...


class TensorBoard:
    """Event files in `tensorboard/` of the run. Raises MissingExtraError if the package is missing."""

    def __init__(self, run: RunDir) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise MissingExtraError(f"TensorBoard is missing ({error}); run: pip install tensorboard") from error
        goes_on = run.tensorboard.is_dir() and any(run.tensorboard.iterdir())
        # Events of the iterations that are played again are hidden, and with them those of the checkpoint's iteration,
        # whose evaluation is made again too. What was never shown is then read from the run's files.
        self.file = run.path / "tensorboard.json"
        step = min(run.step or 0, load_json(self.file)["last"] if self.file.is_file() else 0)
        self.board = SummaryWriter(str(run.tensorboard), purge_step=step if goes_on else None)
        self.missing: int | None = step if goes_on else 0
        settings = settings_of(run)
        if settings and (not goes_on or step == 0):
            self.board.add_text("settings", indented("\n".join(f"{name}: {v}" for name, v in settings.items())), 0)
            # Its own folder would be a run of its own beside the curves.
            self.board.add_hparams(settings, {}, run_name=".")

    def scalars(self, iteration: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self.board.add_scalar(name, value, iteration)
        self.board.flush()
        save_json(self.file, {"last": iteration})

    def text(self, iteration: int, name: str, text: str) -> None:
        self.board.add_text(name, indented(text), iteration)

    def close(self) -> None:
        self.board.close()


class Service:
    """Weights & Biases or trackio, which share their calls; `WANDB_MODE=offline` and the like are theirs to read."""

    def __init__(self, module: Any, run: RunDir) -> None:
        self.module, self.file = module, run.path / f"{module.__name__}.json"
        # Not by the folder alone: one that was set aside or deleted must not get the next run's curves.
        group = f"{run.path.resolve().name}-{uuid.uuid4().hex[:6]}"
        before: dict[str, Any] = {"group": group, "runs": 0, "closed": None}
        if self.file.is_file():
            before = load_json(self.file)
        self.group = group = before["group"]
        goes_on = before["closed"] is not None and before["closed"]["iteration"] == run.step
        self.runs = before["runs"] + (not goes_on)
        self.missing = None if goes_on else 0
        # An evaluation of the very step is made again.
        self.last, self.shown = (run.step or 0, set(before["closed"]["shown"])) if goes_on else (0, set())
        name = group if self.runs == 1 else f"{group}-{self.runs}"
        how: dict[str, Any] = {"project": "mafrt", "name": name, "config": settings_of(run), "resume": "allow"}
        how |= {"group": group}
        if module.__name__ == "wandb":
            how |= {"id": name, "dir": str(run.path)}
        self._remember(closed=False)
        module.init(**how)
        if module.__name__ == "wandb":
            # Its own step holds the numbers back until the next one begins, and a kill would lose them.
            module.define_metric("iteration")
            module.define_metric("*", step_metric="iteration")

    def _remember(self, *, closed: bool) -> None:
        state = {"iteration": self.last, "shown": sorted(self.shown)} if closed else None
        save_json(self.file, {"group": self.group, "runs": self.runs, "closed": state})

    def scalars(self, iteration: int, values: Mapping[str, float]) -> None:
        self._log(iteration, dict(values))

    def text(self, iteration: int, name: str, text: str) -> None:
        content = self.module.Html(f"<pre>{escaped(text)}</pre>") if self.module.__name__ == "wandb" else text
        self._log(iteration, {name: content})

    def _log(self, iteration: int, values: Mapping[str, Any]) -> None:
        if iteration != self.last:
            self.last, self.shown = iteration, set()
        new = {name: value for name, value in values.items() if name not in self.shown}
        self.shown |= new.keys()
        if not new:
            return
        if self.module.__name__ == "wandb":
            self.module.log({"iteration": iteration, **new})
        else:
            self.module.log(new, step=iteration)

    def close(self) -> None:
        self.module.finish()
        self._remember(closed=True)


def open_tracker(name: str, run: RunDir) -> Tracker:
    """The tracker of this name: tensorboard, wandb or trackio. Raises MissingExtraError if its package is missing."""
    return TensorBoard(run) if name == "tensorboard" else Service(_service(name), run)


def check_services(names: tuple[str, ...]) -> None:
    """Look before a run has a folder whether the services among `names` can be used.

    Raises:
        MissingExtraError: a package is missing.
        ConfigError: wandb has no key, or refuses for another reason.
    """
    for name in names:
        if name == "tensorboard":
            continue
        module = _service(name)
        if name == "wandb":
            try:
                module.login()  # as its `init` would
            except Exception as error:
                raise _refusal(name, error) from error


def _service(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise MissingExtraError(f"{name} is missing ({error}); run: pip install {name}") from error


def _refusal(name: str, error: Exception) -> ConfigError:
    offline = ", set WANDB_MODE=offline to keep the curves on this machine" if name == "wandb" else ""
    return ConfigError(
        f"{name} cannot be used ({type(error).__name__}: {error_line(error)}); mend that{offline}, or leave "
        f"--report_to {name} out"
    )


class Trackers:
    """All destinations of a run; one that fails is left out from then on."""

    def __init__(self, names: tuple[str, ...], run: RunDir) -> None:
        self.open: dict[str, Tracker] = {}
        for name in names:
            try:
                self.open[name] = open_tracker(name, run)
            except MissingExtraError as error:
                # TensorBoard is on by default; another tracker was asked for.
                if name != "tensorboard":
                    raise
                log.warning("%s; metrics.jsonl has the same numbers", error)
            except MafrtError:
                raise
            except Exception as error:  # a service's client, in its own words
                if name != "tensorboard":
                    raise _refusal(name, error) from error
                self._leave_out(name, error)  # a disk, as in the middle of a run
        self._show_history(run)

    def _show_history(self, run: RunDir) -> None:
        """Give every tracker what it lacks of the run's history; texts are in the transcripts alone."""
        wanted = {name: tracker.missing for name, tracker in self.open.items() if tracker.missing is not None}
        if not wanted or run.step is None:
            return
        for iteration, values in history(run, min(wanted.values())):
            for name, first in wanted.items():
                if iteration >= first:
                    self._each("scalars", iteration, values, only=name)

    def scalars(self, iteration: int, values: Mapping[str, float]) -> None:
        self._each("scalars", iteration, values)

    def text(self, iteration: int, name: str, text: str) -> None:
        self._each("text", iteration, name, text)

    def close(self) -> None:
        self._each("close")

    def _each(self, method: str, *args: Any, only: str | None = None) -> None:
        for name, tracker in [each for each in self.open.items() if only in (None, each[0])]:
            try:
                getattr(tracker, method)(*args)
            except Exception as error:  # a disk, a service or its client; losing the curves must not stop the run
                self._leave_out(name, error)

    def _leave_out(self, name: str, error: Exception) -> None:
        log.error("%s cannot be written any more (%s); metrics.jsonl goes on", name, error)
        self.open.pop(name, None)


def history(run: RunDir, first: int) -> Iterator[tuple[int, dict[str, float]]]:
    """The numbers of all iterations from `first` on that the run's files hold, as trackers got them."""
    lines: dict[int, list[dict[str, Any]]] = {}
    for file in (run.metrics.path, run.timings.path, run.evaluations.path):
        for line in file.read_bytes().splitlines() if file.is_file() else ():
            values = json.loads(line)
            if (iteration := values.pop("iteration")) >= first:
                lines.setdefault(iteration, []).append(values)
    for iteration in sorted(lines):
        for values in lines[iteration]:
            yield iteration, {name: value for name, value in values.items() if isinstance(value, (int, float))}


def settings_of(run: RunDir) -> dict[str, Any]:
    """The settings of the run, as text where they are neither numbers nor texts."""
    if not (run.path / ARGS).is_file():
        return {}
    plain = (str, bool, int, float)
    return {
        name: value if isinstance(value, plain) else str(value) for name, value in read_args(run.path / ARGS).items()
    }


def indented(text: str) -> str:
    """`text` as a block of code: TensorBoard renders Markdown, and a model wrote the text."""
    return "\n".join(f"    {line}" for line in text.splitlines()) or "    "


def escaped(text: str) -> str:
    """`text` for HTML."""
    return html.escape(text)
