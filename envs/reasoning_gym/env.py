"""`ReasoningGym`: procedural tasks of `reasoning-gym` (Stojanovski et al. 2025, arXiv:2505.24760), for every workflow.

Making tasks and scoring answers are the package's own, in a process that this module asks (`_worker`): nothing of it is
imported here, and no answer of a model is evaluated by the trainer.
"""

from __future__ import annotations

import atexit
import json
import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Unpack

from mafrt.config.agent import AgentSpec
from mafrt.config.schema import check_choice, check_number
from mafrt.config.team import Team
from mafrt.core.asked_process import AskedProcess, EndedError
from mafrt.core.errors import ConfigError, EnvError
from mafrt.envs.construction import SPLITS
from mafrt.envs.math.answers import boxed
from mafrt.envs.tasks.env import GradeRules
from mafrt.envs.workflows.config import WorkflowOptions
from mafrt.envs.workflows.task_env import TaskEnv

PROMPT = "Solve the problem. Give the final answer, and nothing else, between <answer> and </answer>."
SHIFT = 10**5
"""Places between the training tasks of two seeds."""
SCORE_S, TASKS_S = 120.0, 900.0
"""By the clock; the process bounds its processor time itself."""
MOST_CHARS = 10_000
"""of an answer; a longer one is scored 0"""

_TAGGED = re.compile(r"<answer>((?:(?!<answer>).)*?)</answer>", re.DOTALL)
_WORKER = AskedProcess("mafrt.envs.reasoning_gym._worker", "reasoning-gym")
atexit.register(_WORKER.close)


class ReasoningGym(TaskEnv):
    """A team works on tasks of one data set of reasoning-gym, or of its `composite`.

    The score of an answer, 0 to 1, is the data set's own; many give part of it for what is nearly right or well-formed.
    The answer of a text stands between `<answer>` and `</answer>`, else in its last box, else in its last line.
    Training tasks are in neither held-out split, and the tasks of `test` are the same whatever the seed.
    """

    held_out = MappingProxyType({"split": "test"})
    validation = MappingProxyType({"split": "validation"})

    def __init__(
        self,
        name: str,
        config: Mapping[str, Any] | None = None,
        level: int | Sequence[int] | None = None,
        size: int = 1000,
        held_out_size: int = 200,
        seed: int = 0,
        split: str = "train",
        team: Team | None = None,
        **options: Unpack[WorkflowOptions],
    ) -> None:
        """Make the tasks.

        Args:
            name: of the data set, such as `leg_counting`.
            config: the data set's own settings.
            level: difficulty on the data set's curriculum, from 0; several are mixed in equal shares.
            size: training tasks.
            held_out_size: tasks of `validation`, and of `test`.
            seed: draws the training tasks.
            split: `train`, `validation` or `test`.
            team: who plays; None: one solver.

        Raises:
            ConfigError: a setting that the data set does not have or take.
            MissingExtraError: reasoning-gym is not installed.
        """
        check_choice("split", split, SPLITS)
        levels = [level] if isinstance(level, int) else list([] if level is None else level)
        for what, value, least in (("size", size, 1), ("held_out_size", held_out_size, 1), ("seed", seed, 0)):
            check_number(what, value, least=least, most=SHIFT, whole=True)
        if not all(type(each) is int and each >= 0 for each in levels) or level == []:
            raise ConfigError(f"level is {level!r}; expected a whole number from 0 on, or a list of them.")
        if not isinstance(config or {}, Mapping):
            raise ConfigError(f"config is {config!r}; expected the data set's settings by name.")
        self.asked = {"name": name, "config": dict(config or {}), "levels": levels}
        try:
            json.dumps(self.asked)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"config cannot be written as JSON: {error}.") from error
        numbers = {"train": size, "validation": held_out_size, "test": held_out_size}
        question = {"task": self.asked, "numbers": numbers, "split": split, "shift": seed * SHIFT}
        try:
            reply = _WORKER.ask(question, TASKS_S)
        except (TimeoutError, EndedError) as error:
            raise ConfigError(f"reasoning-gym could not make {size} tasks of {name}: {error}.") from error
        if "unusable" in reply:
            raise ConfigError(reply["unusable"])
        self.name, self.tasks = name, reply["tasks"]
        super().__init__(
            team if team is not None else Team((AgentSpec("solver", PROMPT, with_answer=True),)), **options
        )

    def task_count(self) -> int:
        return len(self.tasks)

    def choose(self, index: int) -> tuple[str, dict[str, Any]]:
        self.place, question, answer = self.tasks[index]
        info = {"task": f"{self.name}/{self.place}"}
        return question, info | ({"answer": answer} if answer is not None else {})

    def grade(self, texts: Sequence[str]) -> list[float | None]:
        return [self._score(text) for text in texts]

    def key(self, text: str) -> str | None:
        answer = answer_of(text)
        return None if answer is None else answer.casefold()

    def rules(self) -> GradeRules:
        return GradeRules(self._score)

    def _score(self, text: str) -> float:
        """Raises EnvError where the process cannot be started: a failure of ours is no verdict."""
        answer = answer_of(text)
        if answer is not None and len(answer) > MOST_CHARS:
            return 0.0
        for last_try in (False, True):
            try:
                reply = _WORKER.ask({"task": self.asked, "place": self.place, "answer": answer}, SCORE_S)
            except TimeoutError:
                return 0.0
            except EndedError:
                # It may have been killed from outside, so the answer gets a second process before it is blamed.
                if last_try:
                    return 0.0
            else:
                if "unusable" in reply:
                    raise EnvError(reply["unusable"])
                return float(reply["score"])
        raise AssertionError


def answer_of(text: str) -> str | None:
    """The answer of a text: the last between tags, else the last box, else the last line; None if there is none."""
    if tagged := _TAGGED.findall(text):
        return str(tagged[-1]).strip()
    if (box := boxed(text)) is not None:
        return box.strip()
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else None
