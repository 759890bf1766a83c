"""Rubrics: files of criteria that a user edits, with placeholders for the parts of a case.

A rubric is any text with `{{said}}` in it and, as it likes, the other names of `PLACEHOLDERS`. Each is replaced by a
quotation, except `{{agent}}`, which is a bare name. How a verdict is to be written is no part of a rubric (see
`judge_prompt.py`), so no edit of one can break the reading of replies; but a rubric with a line `PROCESS_SCORE: ...`,
as MARTI's prompts have it, asks for an analysis with such a line at its end. A rubric is known by the hash of its text.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from mafrt.config.schema import unknown
from mafrt.core.errors import ConfigError
from mafrt.core.reading import read_text

SHIPPED = Path(__file__).parent / "rubrics"
GENERAL = "general"

PLACEHOLDERS: Mapping[str, str] = {
    "agent": "the agent's name",
    "role": "its role prompt",
    "saw": "its prompt, the role prompt included",
    "said": "its text: the turn that is judged",
    "tools": "output of its tools",
    "facts": "other findings of the environment, as JSON",
    "truth": "the reference answer; only a rubric with this placeholder lets the judge know it",
}
"""Name -> its replacement."""

_ELSEWHERE = {
    "agent_name": "agent",
    "agent_role": "role",
    "agent_input": "saw",
    "agent_output": "said",
    "response": "said",
    "problem": "saw",
    "tool_output": "tools",
    "tool_observation": "tools",
    "files_available": "facts",
    "files_from_previous_agents": "facts",
    "code_output": "tools",
    "ground_truth_answer": "truth",
    "ground_truth": "truth",
}
"""Names in the prompts of other coaches, such as MARTI's `{agent_output}` -> the name here."""

_TEMPLATE = re.compile(r"(?<!\{)\{\{?\s*(" + "|".join(_ELSEWHERE) + r")\s*\}\}?(?!\})")
_SCORE_LINE = re.compile(r"^\W*PROCESS_SCORE:", re.MULTILINE)
_PLACEHOLDER = re.compile(r"\{\{\s*([^{}\s]+)\s*\}\}")


@dataclass(frozen=True)
class Rubric:
    """Criteria, checked."""

    name: str
    text: str

    @property
    def version(self) -> str:
        """12 hex digits that change with any edit."""
        return hashlib.sha256(self.text.encode()).hexdigest()[:12]

    @property
    def asks_analysis(self) -> bool:
        """Whether it asks for an analysis with the score at its end."""
        return _SCORE_LINE.search(self.text) is not None

    def fill(self, values: Mapping[str, str]) -> str:
        """The text with every placeholder replaced, in one pass: replacements are not searched again."""
        return _PLACEHOLDER.sub(lambda match: values[match[1]], self.text)


def shipped_rubrics() -> tuple[str, ...]:
    """Names of the rubrics that come with the library."""
    return tuple(sorted(path.stem for path in SHIPPED.glob("*.md")))


def load_rubric(given: str | None, own: str | None = None) -> Rubric:
    """The rubric that the user names (a file, or one that ships), else the environment's own, else the general one.

    Raises:
        ConfigError: a file that cannot be read or has nothing in it, an unknown placeholder, or no `{{said}}`.
    """
    if given is None:
        # A custom workflow may have no rubric.
        named = _named(own) if own is not None else None
        return _read(named or SHIPPED / f"{GENERAL}.md")
    path = _named(given)
    if path is None:
        if "/" in given or "." in given:
            raise ConfigError(
                f"coach_rubric {given} cannot be read: there is no such file; give a text file of criteria."
            )
        raise ConfigError(f"coach_rubric: {unknown('rubric', given, shipped_rubrics())} (Or give a text file.)")
    return _read(path)


def _named(name: str) -> Path | None:
    path = Path(name).expanduser()
    if path.is_file() or path.is_dir():
        return path
    shipped_file = SHIPPED / f"{name}.md"
    return shipped_file if name in shipped_rubrics() else None


def _read(path: Path) -> Rubric:
    try:
        text = read_text(path)
    except OSError as error:
        raise ConfigError(f"coach_rubric {path} cannot be read ({error.strerror}); give a text file.") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"coach_rubric {path} is not UTF-8 text; give a text file of criteria.") from error
    text = _TEMPLATE.sub(lambda match: f"{{{{{_ELSEWHERE[match[1]]}}}}}", text)
    names = _PLACEHOLDER.findall(text)
    for name in names:
        if name not in PLACEHOLDERS:
            known = {f"{{{{{known}}}}}" for known in PLACEHOLDERS}
            raise ConfigError(f"coach_rubric {path}: {unknown('placeholder', f'{{{{{name}}}}}', known)}")
    if "said" not in names:
        raise ConfigError(
            f"coach_rubric {path} lacks {{{{said}}}}, so the judge would not see the turn that it judges; add it."
        )
    return Rubric(path.stem, text)
