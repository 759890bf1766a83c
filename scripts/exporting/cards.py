"""Model cards of an export, as Markdown with the header that model hubs read."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath

from mafrt import __version__
from mafrt.config.team import Team
from mafrt.core.text import counted
from mafrt.runners.intervals import interval
from mafrt.scripts.reporting.episodes import Recorded
from mafrt.scripts.reporting.run_data import RunData
from mafrt.storage.transcript_files import read_transcript, transcript_files


@dataclass(frozen=True)
class EvaluationScore:
    """A score of an evaluation."""

    name: str
    """metric, such as eval/avg@4"""
    iteration: int
    value: float
    interval: tuple[float, float] | None
    """95%, over tasks; None: the evaluation's episodes are not recorded, or are of one task"""
    tasks: int | None
    """recorded tasks that the interval is over"""

    def __str__(self) -> str:
        if self.interval is None:
            return f"{self.value:.3f}"
        return f"{self.value:.3f} ({self.interval[0]:.3f} to {self.interval[1]:.3f})"


def last_scores(run: RunData, iteration: int) -> list[EvaluationScore]:
    """The scores of the newest evaluation up to `iteration`, and none if there was no evaluation."""
    rows = [row for row, done in enumerate(run.evaluations.iterations) if done <= iteration]
    if not rows:
        return []
    row = rows[-1]
    done = run.evaluations.iterations[row]
    scores = []
    for name, values in run.evaluations.columns.items():
        value = values[row]
        if value is None or not name.startswith(("eval/avg@", "eval/greedy")):
            continue
        kind = "greedy" if name == "eval/greedy" else "sampled"
        means = task_means(run.path, done, kind)
        scores.append(EvaluationScore(name, done, value, interval(means), len(means) or None))
    return scores


def task_means(run: Path, iteration: int, kind: str) -> list[float]:
    """Mean score of each recorded task of one evaluation."""
    scores: dict[str, list[float]] = {}
    for file in transcript_files(run):
        if file.kind != "evaluation" or file.iteration != iteration:
            continue
        for content in read_transcript(file).episodes:
            episode = Recorded(0, kind, iteration, content, {})
            if str(content.get("id", "")).startswith(kind) and episode.score is not None:
                scores.setdefault(episode.group, []).append(episode.score)
    return [sum(values) / len(values) for values in scores.values()]


@dataclass(frozen=True)
class Export:
    """Facts that the cards of one export state."""

    run: RunData
    team: Team
    bases: Mapping[str, str]
    """adapter -> name of its base as the run or the team file named it"""
    step: int
    """iterations of training"""
    scores: Sequence[EvaluationScore]
    ranks: Mapping[str, int]
    """adapter -> rank"""
    serve: str
    """commands that serve all adapters with vLLM, one for each base; or mafrt's own, for adapters of scope action"""
    activated: Sequence[str] = ()
    """adapters of scope action"""
    here: str = ""
    """the same commands as they are typed in the folder of the export"""

    @property
    def base_names(self) -> tuple[str, ...]:
        """The bases, each once."""
        return tuple(dict.fromkeys(self.bases.values()))


def team_card(export: Export) -> str:
    """README.md of the whole export."""
    names = [f"`{name}`" for name in export.base_names]
    bases = f"one frozen base, {names[0]}" if len(names) == 1 else f"{len(names)} frozen bases, {', '.join(names)}"
    lines = [
        *_header(export.base_names, ["reinforcement-learning", "multi-agent"]),
        f"# {export.run.name}",
        "",
        f"A team of {counted(len(export.team.agents), 'agents')} with {counted(len(export.ranks), 'LoRA adapters')} "
        f"on {bases}, trained for {counted(export.step, 'iterations')} with mafrt {__version__}.",
        "",
        "| agent | adapter | rank | base |",
        "|---|---|---|---|",
        *(
            f"| {agent.name} | `{agent.adapter}/` | {export.ranks[agent.adapter]} | `{export.bases[agent.adapter]}` |"
            for agent in export.team.agents
        ),
        "",
        "`team.json` is the team file with all role prompts; `chat_template.jinja` is the chat template of the base"
        f"{'' if len(names) == 1 else ', beside each adapter'}.",
        "",
        *_scores(export),
        *_training(export),
        "## Serve",
        "",
        "In this folder:",
        "",
        *_fence(export.here or export.serve, "bash"),
        "",
        "Each agent is then a model of its name. Its role prompt, in `AGENT/role_prompt.txt`, is the system message.",
    ]
    return "\n".join(lines) + "\n"


def agent_card(export: Export, adapter: str) -> str:
    """README.md of one adapter's folder."""
    agents = [agent for agent in export.team.agents if agent.adapter == adapter]
    base = export.bases[adapter]
    kind = "Activated LoRA" if adapter in export.activated else "LoRA"
    lines = [
        *_header([base], ["lora", "reinforcement-learning"]),
        f"# {adapter}",
        "",
        f"{kind} adapter (rank {export.ranks[adapter]}) of {', '.join(agent.name for agent in agents)} in the team "
        f"{', '.join(export.team.names)}, on `{base}`.",
        "",
    ]
    for agent in agents:
        lines += [f"## Role prompt of {agent.name}", "", *_fence(agent.prompt or "(none)", "text"), ""]
    load = f'model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained("{base}"), "{adapter}")'
    imports = "from peft import PeftModel\nfrom transformers import AutoModelForCausalLM\n\n"
    lines += ["## Load", "", *_fence(imports + load, "python"), "", *_scores(export), *_training(export)]
    return "\n".join(lines) + "\n"


def _header(bases: Sequence[str], tags: Sequence[str]) -> list[str]:
    ids = [base for base in bases if re.fullmatch(r"[\w.-]+/[\w.-]+", base)]
    base = (
        [f"base_model: {ids[0]}"] if len(ids) == 1 else ["base_model:", *(f"- {name}" for name in ids)] if ids else []
    )
    head = ["---", "library_name: peft", "pipeline_tag: text-generation"]
    return [*head, *base, "tags:", *(f"- {tag}" for tag in ("mafrt", *tags)), "---", ""]


def _scores(export: Export) -> list[str]:
    if not export.scores:
        return ["## Scores", "", "The team was not evaluated.", ""]
    rows = [f"| {score.name} | {score} | {score.tasks or '-'} | {score.iteration} |" for score in export.scores]
    return [
        "## Scores of the team in evaluations",
        "",
        "| metric | value (95% interval over tasks) | tasks | iteration |",
        "|---|---|---|---|",
        *rows,
        "",
    ]


def _training(export: Export) -> list[str]:
    """Algorithm, environment, data with their hashes, and the settings."""
    record, settings = export.run.record, export.run.settings
    lines = ["## Training", "", f"- algorithm: {settings.get('algorithm', 'unknown')}"]
    if record is not None and record.environment is not None:
        lines.append(f"- environment: `{record.environment.path}`")
    for name, file in () if record is None else sorted(record.files.items()):
        # The folder belongs to the machine of the run and not into a card.
        lines.append(f"- {name}: `{PurePath(file.path).name}`, SHA-256 `{file.sha256}`")
    if record is not None and not any(name.startswith("dataset") for name in record.files):
        lines.append("- data: of the environment")
    lines.append(f"- coach: {settings.get('coach', 'none')}")
    paths = {name for name, value in settings.items() if isinstance(value, str) and PurePath(value).is_absolute()}
    shown = {name: value for name, value in settings.items() if name not in paths}
    text = "\n".join(f"{name}: {value}" for name, value in sorted(shown.items()))
    return [*lines, "", "Settings:", "", *_fence(text, "yaml"), ""]


def _fence(text: str, language: str) -> list[str]:
    """A block of code whose fence is longer than any run of backticks in it."""
    ticks = "`" * max(3, 1 + max((len(run) for run in re.findall("`+", text)), default=0))
    return [f"{ticks}{language}", text, ticks]
