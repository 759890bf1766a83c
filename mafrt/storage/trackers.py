"""Where a run's curves are shown besides its own files: TensorBoard, and Weights & Biases or trackio if asked for.

All get the same numbers, the settings, and an episode of each evaluation as text. The numbers are safe in
`metrics.jsonl`: a tracker that fails is logged once and left out, and the run goes on.
"""

from __future__ import annotations

import hashlib
import html
import importlib
import logging
from collections.abc import Mapping
from typing import Any, Protocol

from mafrt.core.errors import MissingExtraError
from mafrt.storage.args_file import ARGS, read_args
from mafrt.storage.run_dir import RunDir

log = logging.getLogger(__name__)


class Tracker(Protocol):
    """One destination."""

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
        # Events of the iterations that are played again are hidden.
        self.board = SummaryWriter(str(run.tensorboard), purge_step=None if run.step is None else run.step + 1)
        settings = settings_of(run)
        if settings and run.step is None:
            self.board.add_text("settings", indented("\n".join(f"{name}: {v}" for name, v in settings.items())), 0)
            # Its own folder would be a run of its own beside the curves.
            self.board.add_hparams(settings, {}, run_name=".")

    def scalars(self, iteration: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self.board.add_scalar(name, value, iteration)
        self.board.flush()

    def text(self, iteration: int, name: str, text: str) -> None:
        self.board.add_text(name, indented(text), iteration)

    def close(self) -> None:
        self.board.close()


class Service:
    """Weights & Biases or trackio, which share their calls; `WANDB_MODE=offline` and the like are theirs to read."""

    def __init__(self, module: Any, run: RunDir) -> None:
        self.module = module
        # A run that goes on continues its own curves: the name follows from the folder.
        name = f"{run.path.resolve().name}-{hashlib.sha256(str(run.path.resolve()).encode()).hexdigest()[:6]}"
        how: dict[str, Any] = {"project": "mafrt", "name": name, "config": settings_of(run), "resume": "allow"}
        if module.__name__ == "wandb":
            how |= {"id": name, "dir": str(run.path)}
        module.init(**how)

    def scalars(self, iteration: int, values: Mapping[str, float]) -> None:
        self.module.log(dict(values), step=iteration)

    def text(self, iteration: int, name: str, text: str) -> None:
        content = self.module.Html(f"<pre>{escaped(text)}</pre>") if self.module.__name__ == "wandb" else text
        self.module.log({name: content}, step=iteration)

    def close(self) -> None:
        self.module.finish()


def open_tracker(name: str, run: RunDir) -> Tracker:
    """The tracker of this name: tensorboard, wandb or trackio. Raises MissingExtraError if its package is missing."""
    if name == "tensorboard":
        return TensorBoard(run)
    try:
        module = importlib.import_module(name)
    except ImportError as error:
        raise MissingExtraError(f"{name} is missing ({error}); run: pip install {name}") from error
    return Service(module, run)


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

    def scalars(self, iteration: int, values: Mapping[str, float]) -> None:
        self._each("scalars", iteration, values)

    def text(self, iteration: int, name: str, text: str) -> None:
        self._each("text", iteration, name, text)

    def close(self) -> None:
        self._each("close")

    def _each(self, method: str, *args: Any) -> None:
        for name, tracker in list(self.open.items()):
            try:
                getattr(tracker, method)(*args)
            except Exception as error:  # a disk, a service or its client; losing the curves must not stop the run
                log.error("%s cannot be written any more (%s); metrics.jsonl goes on", name, error)
                del self.open[name]


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
