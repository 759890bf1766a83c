"""`DSBenchEnv`: Data Engineer, Modeler and Analyst solve a tabular modelling task in one workspace."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Unpack

from mafrt.config.schema import unknown
from mafrt.core.errors import ConfigError, DataError
from mafrt.core.types import Evidence, Message, Observation, Scored, StepResult
from mafrt.environment.base import Env
from mafrt.environment.cloning import spawn_sharing
from mafrt.environment.tool_calls import BadCall, find_code, tool_message
from mafrt.envs.dsbench import process_rewards, prompts
from mafrt.envs.dsbench.builtin import builtin_tasks
from mafrt.envs.dsbench.records import find_records, load_records
from mafrt.envs.dsbench.roles import ANALYST, APPROVE, DONE, ENGINEER, REQUIRED, ROLES, says_done, turns_of
from mafrt.envs.dsbench.scoring import SubmissionScore
from mafrt.envs.dsbench.tasks import TabularTask
from mafrt.envs.dsbench.workspace import INSIDE, LAB, Bench, BenchOptions, FileSummary

FIXED_FLOW = (
    "every stage (data_engineer, modeler, analyst) works on the files that the stage before it left in the workspace, "
    "so the order of turns is fixed; leave it out, or take other tasks, such as math or code, for another workflow."
)
REFUSED = dict.fromkeys(("workflow", "horizon", "sees", "routes", "judge", "tools", "tool_turns"), FIXED_FLOW)
"""Settings of workflows, which these tasks cannot have, with the reason."""

STYLES = ("full", "brief")
PRELUDE = "from lab import *\n"
SUBMISSION = "submission.csv"


@dataclass(frozen=True)
class EpisodeProgress:
    """Where an episode stands; never changed, only replaced."""

    position: int = 0
    """index of the agent who speaks in ROLES"""
    turns: int = 0
    """turns that it has had"""
    chat: tuple[Message, ...] = ()
    """its words and the answers to them, after the opening message"""
    said: tuple[tuple[str, str], ...] = ()
    """(agent, last message) of those who are through"""
    pending: str | None = None
    """the program that has to be run before the turn is over"""
    done: bool = False
    """whether the agent has just said that its stage is done"""

    @property
    def role(self) -> str:
        return ROLES[self.position]

    @property
    def over(self) -> bool:
        return self.position >= len(ROLES)


class DSBenchEnv(Env):
    """A team of three makes features, a model and a submission, each by programs of its own.

    An agent has `turns` turns, or each its own number of them, in the order of the stages. Its stage ends when its
    files are there and it says DONE, or with its last turn. The outcome is the normalised score of submission.csv: 0
    if it is missing, invalid or no better than a constant, 1 if it is as good as the task's reference.

    `info["measures"]` of the last step: `success` (1 if the submission is valid), `above_baseline`, and the task's own
    metric under its name if it is valid.
    """

    agents = ROLES
    profile = "profiles/dsbench.json"
    blocking = True
    rubric = "dsbench"
    refused = REFUSED

    def __init__(
        self,
        dataset_path: str | Path | None = None,
        data_root: str | Path | None = None,
        task_metrics: str | Path | None = None,
        split: str = "train",
        turns: int | Sequence[int] = 4,
        style: str = "full",
        lab: bool | None = None,
        tasks: Sequence[TabularTask] | None = None,
        **limits: Unpack[BenchOptions],
    ) -> None:
        """Read the tasks (without a path: the built-in ones of `split`, `train` or `eval`) or take `tasks` as given.

        `style`: prompt style, `full` or `brief` (for very small models). `lab`: whether the helper module `lab` is
        in the workspace and imported; None: with `brief`. `limits`: the sandbox (default `bwrap`), the seconds and MiB
        of a program (60, 2048), and the MiB of an episode's files (256).
        Raises DataError for the data, ConfigError for a setting, SandboxError if there is no such sandbox here.
        """
        if style not in STYLES:
            raise ConfigError(unknown("style", str(style), STYLES))
        self.turns, self.style = turns_of(turns), style
        self.word = APPROVE if style == "brief" else DONE
        self.lab = style == "brief" if lab is None else lab
        self.tasks: tuple[TabularTask, ...] = tuple(tasks) if tasks is not None else _read(
            dataset_path, data_root, task_metrics, split
        )  # fmt: skip
        if not self.tasks:
            raise ConfigError("tasks is empty; give at least one")
        if tasks is None and dataset_path is None and data_root is None:
            self.held_out, self.validation = {"split": "eval"}, {"split": "validation"}
            self.split = "test" if split == "eval" else split
        self.bench = Bench(**limits)
        for task in self.tasks:
            if task.size_mib > self.bench.workspace_mib:
                raise ConfigError(
                    f"task {task.id} has {task.size_mib:.0f} MiB of tables, the workspace has room for "
                    f"{self.bench.workspace_mib} MiB; raise workspace_mib or leave the task out"
                )
        # The sandbox is opened now, so that its absence is an error before anything is played.
        self.bench.opened()
        self.bench.equipped()
        self.num_tasks = len(self.tasks)
        self.max_steps = sum(self.turns.values())

    bounded = True  # programs run in the sandbox, with deadlines
    spawn = spawn_sharing

    def reset(
        self, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, Observation], dict[str, Any]]:
        chosen = (options or {}).get("task")
        self.task = self.tasks[self.rng.randrange(len(self.tasks)) if chosen is None else chosen]
        self.stage = EpisodeProgress()
        # Fresh bytes for each episode: a program may have changed or deleted the tables of the last one.
        self.files = workspace_files(self.task, self.lab)
        self.shapes = self.bench.look({name: self.files[name] for name in self.task.files})
        self.judged: dict[str, Scored] = {}
        self.handed: list[process_rewards.Work] = []
        info = {
            "task": self.task.id,
            "problem": self.task.description,
            "data_type": self.task.data_type,
            "metric": self.task.answers.metric.name,
        }
        self.opening = self._opening(self.stage)
        return self._observations(), info

    def transition(self, state: EpisodeProgress, actions: dict[str, str]) -> EpisodeProgress:
        """The stage after its agent spoke: its words are in the conversation, and a program in them is pending."""
        text = actions[state.role]
        call = find_code(text)
        return replace(
            state,
            turns=state.turns + 1,
            chat=(*state.chat, {"role": "assistant", "content": text}),
            pending=call if isinstance(call, str) else None,
            done=says_done(text, self.word),
        )

    def step(self, actions: dict[str, str]) -> StepResult:
        role, text = self.stage.role, actions[self.stage.role]
        after = self.transition(self.stage, actions)
        code, status, output, changed = self._run(text)
        # What a program has deleted is gone.
        self.shapes = {name: shape for name, shape in self.shapes.items() if name in self.files} | changed
        work = self._work(scored=role == ANALYST)
        missing, done = work.missing(role), after.done
        left = self.turns[role] - after.turns
        evidence = {role: self._evidence(role, work, status, code, done, output)}
        # The word alone does not end a stage, since the next agent needs the files; out of turns it gets what there is.
        if (done and not missing) or not left:
            self.handed.append(work)
            transcript = (*self.stage.said, (role, text.strip()))
            self.stage = EpisodeProgress(self.stage.position + 1, said=transcript)
            if not self.stage.over:
                self.opening = self._opening(self.stage)
        else:
            answer = (
                prompts.brief_answer(output, missing)
                if self.style == "brief"
                else prompts.full_answer(output, changed, missing, done, left)
            )
            self.stage = replace(after, chat=(*after.chat, tool_message(answer)), pending=None, done=False)
        if not self.stage.over:
            info = {"evidence": evidence, "state": self.stage}
            return StepResult(self._observations(), {}, False, False, info)
        return self._end(work, evidence)

    def _end(self, work: process_rewards.Work, evidence: dict[str, Evidence]) -> StepResult:
        """The last step: the score of the submission, and who is to blame if there is none."""
        score = work.score or SubmissionScore(False, "is missing")
        measures = {"success": float(score.valid), "above_baseline": float(score.above_baseline)}
        if score.value is not None:
            measures[self.task.answers.metric.name] = score.value
        info: dict[str, Any] = {"outcome": score.normalised, "measures": measures, "evidence": evidence}
        info["state"] = self.stage
        if (cause := process_rewards.root_cause(self.handed)) is not None:
            blamed, why = cause
            reason = f"The team failed, and this is why: {why}."
            before = self.judged.get(blamed)
            # At most 1 of 10: the others' failures follow from this one, and should not cost it less than them.
            low = min(1.0, before.score) if before else 1.0
            latest = evidence.get(blamed, Evidence())
            evidence[blamed] = latest.updated(Evidence(rules=Scored(low, reason), facts={"root_cause": why}))
        return StepResult({}, {}, True, False, info)

    def _run(self, text: str) -> tuple[str | None, str | None, str, dict[str, FileSummary]]:
        """(program, status, output shown to the agent, files made or changed)."""
        code = find_code(text)
        if code is None:
            return None, None, "There was no program to run.", {}
        if isinstance(code, BadCall):
            return None, "no call", code.why, {}
        # The helpers are imported for the agent, so that its programs stay short.
        done, after = self.bench.run(PRELUDE + code if self.lab else code, self.files)
        # Only changed files are read again.
        fresh = {name: data for name, data in after.items() if self.files.get(name) != data}
        self.files = after
        if SUBMISSION in fresh and self.stage.role == ANALYST:
            self.bench.prepare_submission(self.task.answers, fresh[SUBMISSION])
        output = prompts.printed(done, self.bench.timeout_s, self.bench.memory_mib)
        return code, done.status, output, self.bench.look(fresh)

    def _work(self, scored: bool) -> process_rewards.Work:
        """Facts about the current files."""
        model, probe = self.shapes.get("model.pkl"), None
        # A pickle that names other than plain model classes is not loaded, not even in the sandbox.
        if model is not None and "X_test.pkl" in self.files and not process_rewards.dangerous(model):
            self.bench.prepare_model(self.task.answers, self.task.files["test.csv"], self.files)
            probe = self.bench.probe(self.files)
        model_score = None
        if probe is not None and "error" not in probe:
            model_score = self.bench.score_model(self.task.answers, self.task.files["test.csv"], self.files)
        # Scored in the last stage only, so that no earlier agent can probe the answers through its reward.
        given = self.files.get(SUBMISSION) if scored else None
        score = None if given is None else self.bench.score(self.task.answers, given)
        tables = all(self.shapes[name].rows for name in REQUIRED[ENGINEER][:2] if name in self.shapes)
        there = tables and set(REQUIRED[ENGINEER][:2]) <= self.files.keys() & self.shapes.keys()
        features = self.bench.features(self.files) if there else None
        return process_rewards.Work(self.task, dict(self.shapes), probe, score, features, model_score)

    def _evidence(
        self, role: str, work: process_rewards.Work, status: str | None, code: str | None, done: bool, output: str
    ) -> Evidence:
        """Evidence about the turn for the coach."""
        judged = process_rewards.judge(role, work, status, code, done, self.handed[-1] if self.handed else None)
        self.judged[role] = judged
        facts: dict[str, Any] = {
            "turn": f"{self.stage.turns + 1} of {self.turns[role]}",
            "status": status or "no program",
            "done": done,
            "files": {name: shape.brief() for name, shape in sorted(work.shapes.items())},
            "missing": list(work.missing(role)),
        }
        if work.probe is not None:
            facts["model"] = dict(work.probe)
        if work.score is not None:
            facts["submission"] = work.score.problem or {
                "metric": self.task.answers.metric.name,
                "normalised": round(work.score.normalised, 4),
            }
        return Evidence(output if status is not None else None, judged, facts)

    def _opening(self, stage: EpisodeProgress) -> str:
        shapes = {name: shape for name, shape in self.shapes.items() if name != "task.json"}
        if self.style == "brief":
            return prompts.brief_task(stage.role, self.task, shapes)
        return prompts.full_task(stage.role, self.task, shapes, stage.said, self.lab)

    def _observations(self) -> dict[str, Observation]:
        return {self.stage.role: [{"role": "user", "content": self.opening}, *self.stage.chat]}


def workspace_files(task: TabularTask, lab: bool) -> dict[str, bytes]:
    """Files of the workspace at the start of an episode; `lab`: with the helper module. Raises DataError."""
    files = dict(task.files)
    return files | {LAB: (INSIDE / LAB).read_bytes(), "task.json": _about(task)} if lab else files


def _about(task: TabularTask) -> bytes:
    """`task.json` for the helper module: the prediction target, without the answers."""
    answers = task.answers
    about = {"id": answers.id_column, "targets": list(answers.targets), "metric": answers.metric.name}
    return json.dumps({**about, "data_type": task.data_type}).encode()


def _read(
    dataset_path: str | Path | None, data_root: str | Path | None, task_metrics: str | Path | None, split: str
) -> tuple[TabularTask, ...]:
    """Tasks from the user's records, or the built-in ones. Raises DataError if none can be used."""
    if dataset_path is None and data_root is None:
        if split not in ("train", "validation", "eval"):
            raise ConfigError(unknown("split", str(split), ("train", "validation", "eval")))
        return builtin_tasks(split)
    root = Path(data_root) if data_root is not None else Path(dataset_path or ".").parent
    if dataset_path is None:
        files = find_records(root)
        if split not in files:
            raise DataError(f"{root} holds no records of the split {split!r}; there are {', '.join(files)}")
        dataset_path = files[split]
    loaded = load_records(Path(dataset_path), root, Path(task_metrics) if task_metrics else None)
    if not loaded.tasks:
        raise DataError(f"none of the tasks of {dataset_path} can be used; the first problem: {loaded.problems[0]}")
    return loaded.tasks


__all__ = ["REQUIRED", "ROLES", "STYLES", "DSBenchEnv"]
