"""`CodeEnv`: programming problems, a Coder, if wanted a Tester, and a sandbox put together."""

from __future__ import annotations

import ast
import secrets
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Unpack

from mafrt.config.schema import check_number
from mafrt.config.team import Team
from mafrt.core.errors import ConfigError
from mafrt.core.types import Evidence, Observation, Scored, StepResult
from mafrt.environment.base import Env
from mafrt.environment.cloning import fork_sharing, spawn_sharing
from mafrt.environment.python_tool import PythonTool, Ran, SandboxOptions
from mafrt.environment.tool_calls import shorten
from mafrt.envs.code.grading import Grade, Grader
from mafrt.envs.code.other_results import with_other_results
from mafrt.envs.code.state import TOOL, CodeState, Flow, why_not
from mafrt.envs.code.task_env import scored
from mafrt.envs.code.tasks import SETS, CodeTask, load_tasks

SILENT = "The checks ran without an error."


class CodeEnv(Env):
    """Write a program for a statement; the outcome is the fraction of the tests that the last program passes.

    A team of one codes alone: a program that does not compile, or that raises while it is tested, comes back with the
    traceback for another turn, `turns` in all. In a team of two the second agent is the Tester: it sees the program
    and writes checks, which are run with it. Checks that fail go back to the Coder with their results, at most
    `reviews` times; checks that pass, or none, end the episode. Hidden tests are not shown.
    """

    rubric = "code"
    blocking = True

    def __init__(
        self,
        dataset_path: str | Path | None = None,
        team: Team | None = None,
        split: str = "train",
        turns: int = 2,
        reviews: int = 1,
        tasks: Sequence[CodeTask] | None = None,
        **limits: Unpack[SandboxOptions],
    ) -> None:
        """Read the problems (`dataset_path`: a file, or `functions` or `programs`, which ship) or take `tasks`.

        `limits`: the sandbox (default `bwrap`), and the seconds and MiB of a program with all its tests (10, 1024).
        Raises DataError for the data, ConfigError for a setting, SandboxError if there is no such sandbox here.
        """
        check_number("turns", turns, least=1, whole=True)
        check_number("reviews", reviews, least=1, whole=True)
        self.team = team if team is not None else Team.of(("coder",))
        if len(self.team.names) > 2:
            raise ConfigError(
                f"code is written by one agent, or by a Coder and a Tester, found {', '.join(self.team.names)}; take "
                "profiles/code_single.json or profiles/coder_tester.json, or for a larger team another workflow, such "
                "as 'chain', 'debate' or 'vote'"
            )
        if TOOL in self.team.names:
            raise ConfigError(f"no agent may be called {TOOL!r}: the environment speaks under that name")
        self.tasks = tuple(tasks) if tasks is not None else load_tasks(dataset_path, split=split)
        if tasks is None and (dataset_path is None or dataset_path in SETS):
            self.split, self.held_out, self.validation = split, {"split": "test"}, {"split": "validation"}
        if not self.tasks:
            raise ConfigError("tasks is empty; give at least one")
        self.agents = self.team.names
        self.num_tasks = len(self.tasks)
        coder, tester = (*self.agents, None)[:2]
        assert coder is not None
        self.flow = Flow(coder, tester, turns, reviews)
        self.max_steps = self.flow.max_steps
        self.tool = PythonTool(**limits)
        self.grader = Grader(self.tool)

    bounded = True  # programs run in the sandbox, with deadlines
    spawn, fork = spawn_sharing, fork_sharing

    def reset(
        self, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, Observation], dict[str, Any]]:
        chosen = (options or {}).get("task")
        self.task = self.tasks[self.rng.randrange(len(self.tasks)) if chosen is None else chosen]
        self.state = CodeState(self.task.shown)
        self.grade = Grade(0, self.task.tests, "error")
        info = {"task": self.task.id, "problem": self.task.shown}
        return self.flow.observations(self.state), info | ({"answer": ref} if (ref := self.task.reference) else {})

    def transition(self, state: CodeState, actions: dict[str, str]) -> CodeState:
        """Append the turns to the transcript; a program in them becomes pending."""
        return self.flow.advance(state, actions)

    def step(self, actions: dict[str, str]) -> StepResult:
        [(name, text)] = actions.items()
        reviewing = self.state.reviewing
        following = self.transition(self.state, actions)
        if reviewing:
            self.state, evidence = self._review(following, text)
        else:
            self.state, evidence = self._try(following, text)
        info: dict[str, Any] = {"state": self.state, "evidence": {name: evidence}}
        if self.state.over:
            info |= {"outcome": self.grade.fraction, "passed": self.grade.passed, "tests": self.grade.total}
        return StepResult(self.flow.observations(self.state), {}, self.state.over, False, info)

    def _try(self, state: CodeState, text: str) -> tuple[CodeState, Evidence]:
        """Grade the Coder's program, and show it the failures."""
        if state.pending is None:
            why = why_not(text)
            return state, Evidence(why, Scored(0.0, why), {"status": "no program"})
        self.grade = grade = self.grader.grade(self.task, state.pending)
        facts = {"status": grade.status, "passed": grade.passed, "tests": grade.total}
        if grade.status == "ok" or grade.passed == grade.total:
            return self.flow.ran(state, ""), Evidence(None, scored(grade), facts)
        output = shorten(grade.trace.strip(), self.tool.shown)
        return self.flow.failed(state, output), Evidence(output, scored(grade), facts)

    def _review(self, state: CodeState, text: str) -> tuple[CodeState, Evidence]:
        """The Tester has spoken: run its checks on the program."""
        right = self.grade.passed == self.grade.total
        if state.pending is None:
            why = why_not(text)
            facts = {"status": "no checks", "program_right": right}
            return state, Evidence(why, Scored(0.0, f"There are no checks. {why}"), facts)
        assert state.program is not None
        ran = self._checked(state.program, state.pending)
        output = self.tool.says(ran)
        failed = ran.status != "ok"
        after = self.flow.failed(state, output) if failed else self.flow.ran(state, output or SILENT)
        facts = {"status": ran.status, "program_right": right}
        return after, Evidence(output, self._judge_checks(state.program, state.pending, failed, right), facts)

    def _checked(self, program: str, checks: str) -> Ran:
        # Two texts, so that an error in one is not taken for the other's, and each has its own line numbers.
        files = {"solution.py": _full(self.task.before, program).encode("utf-8", "replace")}
        token = secrets.token_hex(16)
        end = f"\nopen('.finished', 'w').write({token!r})\n"
        ran = self.tool.run(f"{_LOAD}\n{checks}{end}", files, [".finished"])
        if ran.status == "ok" and ran.files.get(".finished") != token.encode():
            # The program has ended the process before the checks were through, which no right program does.
            return replace(ran, status="error", stderr=f"{ran.stderr}{UNFINISHED}\n")
        return ran

    def _holds_for_anything(self, checks: str, right: str | None) -> bool:
        """Whether checks call no function of the program in an assert, or hold for one that does not do the task.

        Such a program does nothing, or is the `right` one with other results: a check of a name, of the number of
        arguments or of a type is none of what was asked for.
        """
        names = self.task.functions
        try:
            tree = ast.parse(checks)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return False  # they fail, and are judged by that
        asserts = [node.test for node in ast.walk(tree) if isinstance(node, ast.Assert)]
        if not asserts or (names and not any(name in _names(tree) for name in names)):
            return True
        if self._checked(_stub(names), checks).status == "ok":
            return True
        other = None if right is None else with_other_results(right, names)
        return other is not None and self._checked(other, checks).status == "ok"

    def _judge_checks(self, program: str, checks: str, failed: bool, right: bool) -> Scored:
        """Checks that hold for a right program and fail for a wrong one are good; the reference is a right program."""
        reference = self.task.reference
        if self._holds_for_anything(checks, reference or (program if right else None)):
            return Scored(2.0, "The checks assert nothing about the program.")
        if reference is not None and self._checked(reference, checks).status != "ok":
            return Scored(1.0, "The checks fail for a right program.")
        if failed != right:
            return Scored(10.0, "The checks hold for a right program and fail for a wrong one.")
        if right:
            return Scored(1.0, "The checks fail although the program is right.")
        return Scored(4.0, "The checks hold although the program is wrong.")


UNFINISHED = "The program ended before the checks were through."
_STUB = """
class _Nothing:
    def __call__(self, *arguments, **named):
        return type(self)()
"""


def _stub(names: Sequence[str]) -> str:
    """A program whose functions return nothing that any test could want."""
    return _STUB + "\n".join(f"{name} = _Nothing()" for name in names)


_LOAD = """try:
    exec(compile(open("solution.py", encoding="utf-8").read(), "solution.py", "exec"), globals())
except SystemExit:
    pass"""
"""Runs in the sandbox, as everything that agents write."""


def _names(tree: ast.AST) -> set[str]:
    return {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}


def _full(before: str, program: str) -> str:
    return f"{before}\n\n{program}" if before else program
