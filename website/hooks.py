"""Pages of the site that are no files of docs/: those of the root, the examples, and the references from the code."""

from __future__ import annotations

import importlib
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
ROOT_PAGES = ("ARCHITECTURE.md", "CONTRIBUTING.md", "BENCHMARKS.md", "CHANGELOG.md", "SECURITY.md")
RESULTS = {f"results_{path.stem}.md": path for path in sorted((ROOT / "bench" / "results").glob("*.md"))}
PLACES = {
    "README.md": "index.md",
    **{name: name for name in ROOT_PAGES},
    **{str(path.relative_to(ROOT)): name for name, path in RESULTS.items()},
}
"""File of the checkout -> its page; the pages of docs/ keep their names."""
LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)")
FENCED = re.compile(r"^(```.*?^```)", re.MULTILINE | re.DOTALL)

API = {
    "Environments": ("mafrt.environment.base.Env", "mafrt.environment.checker.check_env", "mafrt.core.types.StepResult",
                     "mafrt.core.types.Evidence"),
    "Teams": ("mafrt.config.team.Team", "mafrt.config.agent.AgentSpec", "mafrt.config.agent.LoraSpec"),
    "Episodes": ("mafrt.core.types.Turn", "mafrt.core.types.Episode", "mafrt.core.types.SamplingParams",
                 "mafrt.core.types.Request", "mafrt.core.types.Completion"),
    "Base and engines": ("mafrt.models.shared_base.SharedBase", "mafrt.engines.Engine",
                         "mafrt.engines.local.engine.LocalEngine"),
    "Play": ("mafrt.rollout.player.Player", "mafrt.rollout.player.Start"),
    "Coach": ("mafrt.coach.Coach", "mafrt.coach.Case", "mafrt.core.types.Scored", "mafrt.core.types.Unscored"),
    "Credit and learning": ("mafrt.algorithms.assign", "mafrt.algorithms.base.Algorithm",
                            "mafrt.training.learner.Learner"),
    "Runs": ("mafrt.config.train_config.TrainConfig", "mafrt.runners.on_policy.OnPolicy",
             "mafrt.runners.evaluation.evaluate", "mafrt.runners.evaluation.EvaluationPlan",
             "mafrt.runners.evaluation.Evaluation"),
    "Errors": ("mafrt.core.errors",),
}  # fmt: skip


def _tree() -> None:
    """The package as it is imported: its folders lie side by side, and the reference is read from the files."""
    package = ROOT / "website" / ".tree" / "mafrt"
    package.mkdir(parents=True, exist_ok=True)
    inner = [path for path in (ROOT / "mafrt").iterdir() if path.name != "__pycache__"]
    for path in (*inner, *(ROOT / name for name in ("envs", "runners", "scripts"))):
        link = package / path.name
        if not link.is_symlink():
            link.symlink_to(path)


_tree()


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that are made here."""
    pages: dict[str, Callable[[], str]] = {
        "index.md": (ROOT / "README.md").read_text,
        "examples.md": examples,
        "settings.md": settings,
        "api.md": api,
        **{name: (ROOT / name).read_text for name in ROOT_PAGES},
        **{name: path.read_text for name, path in RESULTS.items()},
    }
    for name, text in pages.items():
        files.append(File.generated(config, name, content=text()))
    return files


def on_page_markdown(text: str, page: Any, config: Any, files: Files) -> str:
    """Lead links to where the pages are on the site; a link to a file that is no page is shown as its text."""
    known = {file.src_uri for file in files}
    files_of = {name: Path(file) for file, name in PLACES.items()}
    folder = files_of.get(page.file.src_uri, Path("docs") / page.file.src_uri).parent

    def led(match: re.Match[str]) -> str:
        mark, label, target = match.groups()
        if target.startswith(("http://", "https://", "#")):
            return match[0]
        path, hash_, anchor = target.partition("#")
        file = os.path.normpath(folder / path)
        place = PLACES.get(file, file.removeprefix("docs/"))
        return f"{mark}[{label}]({place}{hash_}{anchor})" if place in known else label

    parts = FENCED.split(text)  # fenced code is left as it is
    return "".join(part if part.startswith("```") else LINK.sub(led, part) for part in parts)


def examples() -> str:
    """All scripts of examples/, with what each says about itself."""
    parts = ["# Examples\n\nShort scripts, each run by a test."]
    for path in sorted((ROOT / "examples").iterdir()):
        if path.suffix in (".py", ".yaml"):
            code = path.read_text(encoding="utf-8").rstrip()
            language = {".py": "python", ".yaml": "yaml"}[path.suffix]
            parts.append(f"## {path.name}\n\n```{language}\n{code}\n```")
    return "\n\n".join(parts) + "\n"


def settings() -> str:
    """Every setting of every command, from the dataclasses that declare them."""
    from mafrt.config.algorithm import REGISTRY, algorithm_class
    from mafrt.config.schema import describe
    from mafrt.scripts.main import COMMANDS

    kinds: dict[type, list[str]] = {}
    for name in COMMANDS:
        command = getattr(importlib.import_module(f"mafrt.scripts.{name}"), "COMMAND", None)
        for kind in () if command is None else command.groups:
            kinds.setdefault(kind, []).append(name)
    parts = ["# Settings\n\nGenerated from the code. Each is a flag, and a key of a file for `--config`."]
    for kind, commands in kinds.items():
        title = (kind.__doc__ or kind.__name__).strip().splitlines()[0].rstrip(".")
        described = kind.flags() if hasattr(kind, "flags") else describe(kind)
        used = ", ".join(f"`{name}`" for name in commands)
        parts.append(f"## {title}\n\nOf {used}.\n\n{_table(described)}")
    for name in REGISTRY.names():
        parts.append(f"## `--algorithm {name}`\n\n{_table(algorithm_class(name).settings())}")
    return "\n\n".join(parts) + "\n"


def _table(described: Any) -> str:
    rows = ["| setting | type | default | meaning |", "|---|---|---|---|"]
    for setting in described.values():
        kind = " or ".join(setting.choices) if setting.choices else setting.kind.__name__
        cells = (f"`{setting.name}`", kind, f"`{setting.default}`", setting.help)
        rows.append("| " + " | ".join(str(cell).replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(rows)


def api() -> str:
    """The reference of the Python interface."""
    parts = ["# Python\n\nGenerated from the code."]
    for title, names in API.items():
        parts.append(f"## {title}\n\n" + "\n\n".join(f"::: {name}" for name in names))
    return "\n\n".join(parts) + "\n"
