"""The environment of programming problems for a workflow: Coder and Tester, or any workflow of a team."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Unpack

from mafrt.config.team import Team
from mafrt.core.errors import ConfigError
from mafrt.envs.code.env import CodeEnv
from mafrt.envs.code.task_env import CodeTaskEnv
from mafrt.envs.code.tasks import CodeTask
from mafrt.envs.workflows.config import WorkflowOptions

CODER_TESTER = "coder_tester"
"""The default workflow: a Coder that is shown tracebacks, alone or with a Tester that writes checks."""


def code_env(
    dataset_path: str | Path | None = None,
    team: Team | None = None,
    split: str = "train",
    turns: int | None = None,
    reviews: int | None = None,
    timeout_s: float = 10.0,
    memory_mib: int = 1024,
    tasks: Sequence[CodeTask] | None = None,
    **options: Unpack[WorkflowOptions],
) -> CodeEnv | CodeTaskEnv:
    """`CodeEnv` for the workflow `coder_tester` (the default), else `CodeTaskEnv`.

    `turns` (2 by default) and `reviews` (1) belong to `coder_tester`.

    Raises:
        ConfigError: a setting that the workflow does not have, or a team that does not fit it.
        DataError: the problems cannot be read.
        SandboxError: there is no such sandbox here.
    """
    read: dict[str, Any] = {"dataset_path": dataset_path, "split": split, "tasks": tasks}
    limits: dict[str, Any] = {"timeout_s": timeout_s, "memory_mib": memory_mib}
    if options.get("workflow", CODER_TESTER) == CODER_TESTER:
        _refuse_options({name: value for name, value in options.items() if name not in ("workflow", "sandbox")})
        options_given: dict[str, Any] = {"turns": turns, "reviews": reviews, "sandbox": options.get("sandbox")}
        given = {name: value for name, value in options_given.items() if value is not None}
        return CodeEnv(team=team, **given, **read, **limits)
    for flag, value in (("coder_turns", turns), ("reviews", reviews)):
        if value is not None:
            raise ConfigError(
                f"workflow {options['workflow']!r} has no setting {flag}; leave it out, or take the workflow "
                f"{CODER_TESTER!r}, which has it"
            )
    return CodeTaskEnv(team=team, **read, **limits, **options)


def _refuse_options(given: dict[str, Any]) -> None:
    """ConfigError for an option that `coder_tester` does not have; those that change nothing may stay."""
    without_effect: dict[str, Any] = {"horizon": 1, "judge_lines": True, "rewards": "outcome_only"}
    for name, value in given.items():
        empty = value is None or value is False or (isinstance(value, (list, tuple)) and not value)
        if empty or value == without_effect.get(name):
            continue
        raise ConfigError(
            f"workflow {CODER_TESTER!r} has no setting {name}; leave it out, or take another --workflow that has it"
        )
