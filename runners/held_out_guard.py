"""The best held-out weights of a run: kept, and restored when training makes the held-out score fall.

Each evaluation plays the same tasks, so two evaluations are compared task by task: the score has fallen when the mean
difference to the best evaluation is below 0 by more than `LIMIT` of its standard errors over tasks. Then the adapters
return to the best weights, their optimizers forget their moments, and all learning rates are halved; after
`max_rollbacks` falls the run stops. Everything is a function of evaluations, so a resumed run decides alike.
"""

from __future__ import annotations

import json
import logging
import math
import os
import shutil
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mafrt.config.train_config import RunConfig
from mafrt.core.atomic_files import load_tensors, remedy
from mafrt.core.errors import CheckpointError
from mafrt.core.reading import parse_json, read_text
from mafrt.runners.evaluation import Evaluation
from mafrt.storage.load_path import BEST, BEST_SCORE

if TYPE_CHECKING:
    from torch import Tensor

    from mafrt.models.several_bases import Bases
    from mafrt.runners.run_state import OptimizerHolder

log = logging.getLogger(__name__)

STATE = "best.pt"
"""file of a checkpoint's state with the same, and the scores"""
LIMIT = 2.5
"""standard errors by which a score has to fall"""
SLOWER = 0.5
"""factor on the learning rates after a fall"""


def task_scores(evaluation: Evaluation) -> dict[str, float]:
    """Score of each task: the mean of its sampled episodes, averaged with its greedy one where both were played."""
    scores_of: dict[str, list[float]] = {}
    for task, scores in evaluation.scores.items():
        scores_of.setdefault(task, []).append(statistics.fmean(scores))
    for task, score in evaluation.greedy_scores.items():
        scores_of.setdefault(task, []).append(score)
    return {task: statistics.fmean(parts) for task, parts in scores_of.items()}


def has_fallen(best: Mapping[str, float], now: Mapping[str, float]) -> bool:
    """Whether `now` is below `best` beyond its interval, by the paired differences of the tasks that both have."""
    # Task by task: tasks differ far more than weights do, and pairing takes that out of the error.
    differences = [now[task] - best[task] for task in sorted(best.keys() & now.keys())]
    if len(differences) < 2:
        return False
    mean = statistics.fmean(differences)
    # Where all tasks fall alike there is no spread; a tenth of a task is the least error that is assumed.
    error = max(statistics.stdev(differences), 0.1) / math.sqrt(len(differences))
    return mean < -LIMIT * error


class HeldOutGuard:
    """Keeps the best weights of a run and restores them.

    Args:
        base: has the adapters.
        adapters: names of those that are kept.
        learner: its optimizers and learning rates are reset after a fall.
        run: `keep_best`, `on_collapse` and `max_rollbacks`.
    """

    def __init__(self, base: Bases, adapters: Sequence[str], learner: OptimizerHolder, run: RunConfig) -> None:
        self.base, self.adapters, self.learner, self.run = base, tuple(adapters), learner, run
        self.iteration: int | None = None
        """of the best evaluation; None before the first"""
        self.scores: dict[str, float] = {}
        """its score by task"""
        self.weights: dict[str, dict[str, Tensor]] = {}
        self.falls = 0

    @property
    def score(self) -> float:
        """Mean score of the best evaluation."""
        return statistics.fmean(self.scores.values())

    def look(self, iteration: int, evaluation: Evaluation) -> str | None:
        """Keep or restore the weights after an evaluation; a sentence if the score has fallen, else None."""
        now = task_scores(evaluation)
        if not now or not self.run.keep_best:
            return None
        mean = statistics.fmean(now.values())
        if self.iteration is None or mean > self.score:
            self.iteration, self.scores = iteration, now
            # On the CPU, so that the best weights take no memory of the GPU.
            self.weights = {name: self.base.adapter_state(name) for name in self.adapters}
            return None
        if not has_fallen(self.scores, now):
            return None
        self.falls += 1
        fell = (
            f"The evaluation score fell from {self.score:.3f} (iteration {self.iteration}) to {mean:.3f}, beyond its "
            "interval"
        )
        if self.run.on_collapse == "warn":
            return f"{fell}. Remedy: a lower --lr, or --on_collapse rollback."
        self.restore()
        # With the same rate the same fall would follow.
        self.learner.slowdown *= SLOWER
        return (
            f"{fell}; the adapters are back at the weights of iteration {self.iteration}, and the learning rates at "
            f"{self.learner.slowdown:g} of what was asked. Remedy: a lower --lr, more tasks per iteration, or "
            "--step_kl 0.01."
        )

    @property
    def stops(self) -> bool:
        """Whether the run has to end."""
        if self.run.on_collapse == "stop":
            return self.falls > 0
        return self.run.on_collapse == "rollback" and self.falls > self.run.max_rollbacks

    def restore(self) -> None:
        """Put the best weights back and let the optimizers forget."""
        for name, state in self.weights.items():
            self.base.load_adapter_state(name, state)
            self.learner.forget(name)

    def state(self) -> dict[str, Any]:
        """Tensors and numbers in plain containers, for a checkpoint."""
        return {
            "iteration": self.iteration,
            "scores": self.scores,
            "weights": self.weights,
            "falls": self.falls,
            "slowdown": self.learner.slowdown,
        }

    def load(self, path: Path) -> None:
        """The inverse of `state`, from a checkpoint's file. A checkpoint without one leaves everything as it is."""
        if not path.is_file():
            return
        tensors = load_tensors(path)
        try:
            if tensors["weights"].keys() not in (set(), set(self.adapters)):
                raise ValueError(f"it holds the adapters {', '.join(tensors['weights'])}")
            self.iteration, self.scores, self.weights = tensors["iteration"], tensors["scores"], tensors["weights"]
            self.falls, self.learner.slowdown = int(tensors["falls"]), float(tensors["slowdown"])
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CheckpointError(f"{path} does not hold the best weights of this team ({error})") from error

    def write(self, run_dir: Path) -> None:
        """Write the best adapters to `RUN_DIR/best`, replacing what was there by renames.

        Raises:
            CheckpointError: the disk is full, or refuses for another reason; the best adapters so far are still there.
        """
        if self.iteration is None:
            return
        best = {"iteration": self.iteration, "score": self.score}
        target = run_dir / BEST
        try:
            if parse_json(read_text(target / BEST_SCORE)) == best:
                return
        except (OSError, ValueError):
            pass  # none yet, or one that is damaged
        from mafrt.models.peft_format import keys

        fresh, old = run_dir / f".{BEST}-none", run_dir / f".{BEST}-old"
        try:
            fresh = Path(tempfile.mkdtemp(prefix=f".{BEST}-", dir=run_dir))
            for name, state in self.weights.items():
                base = self.base.of_adapter(name)
                layers: Any = {stem: tuple(state[key] for key in keys(stem)) for stem in base.stored_layers(name)}
                base.files_of(name, layers).save(fresh / name)
            (fresh / BEST_SCORE).write_text(json.dumps(best) + "\n", encoding="utf-8")
            fresh.chmod(0o755)
            if target.exists():  # else an earlier process was killed between two renames, and `old` is the best so far
                shutil.rmtree(old, ignore_errors=True)
                os.replace(target, old)
            os.replace(fresh, target)
            shutil.rmtree(old, ignore_errors=True)
        except BaseException as error:
            shutil.rmtree(fresh, ignore_errors=True)
            if old.exists() and not target.exists():
                os.replace(old, target)
            if isinstance(error, OSError) and not isinstance(error, CheckpointError):
                raise CheckpointError(
                    f"the best adapters cannot be written to {target} ({error.strerror or error}); "
                    f"{remedy(error, 'make room')}, then go on with --load_path {run_dir}"
                ) from error
            raise
