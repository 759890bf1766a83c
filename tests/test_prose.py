"""Plain English, measured: words that mark a riddle are rare in docstrings and documentation pages.

Reference projects (prime-rl, verifiers, torchtune) use "what" .2 to 1.6 times per 1,000 words of docstrings, and
"somebody" or "nobody" never. The count is a gauge: it notices a drift in tone, it does not prove that a text is good.
"""

import ast
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FOLDERS = [*(f"mafrt/{p.name}" for p in sorted((ROOT / "mafrt").iterdir()) if (p / "__init__.py").exists()),
           "envs", "runners", "scripts"]  # fmt: skip
PAGES = ["README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "BENCHMARKS.md"]
PAGES += [f"docs/{path.name}" for path in sorted((ROOT / "docs").glob("*.md"))]
VAGUE = re.compile(r"\b(?:some|no|every|any)body\b|\bwhoever\b", re.IGNORECASE)
WORD = re.compile(r"[A-Za-z][A-Za-z'-]*")
WHATS_PER_1000 = 1.6


def docstrings(folder: str) -> str:
    """All docstrings below `folder`, those of fields (a string under an assignment) included."""
    listed = subprocess.run(["git", "ls-files", "*.py"], cwd=ROOT / folder, capture_output=True, text=True, check=True)
    texts = []
    for name in listed.stdout.split():
        if not (path := ROOT / folder / name).exists():
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if (
                isinstance(node, ast.Expr)
                and isinstance(node.value, ast.Constant)
                and isinstance(node.value.value, str)
            ):
                texts.append(node.value.value)
    return "\n".join(texts)


def prose(page: str) -> str:
    """A page without its code blocks and inline code."""
    return re.sub(r"`[^`\n]*`", "", re.sub(r"```.*?```", "", (ROOT / page).read_text(), flags=re.DOTALL))


def rate(text: str) -> float:
    words = WORD.findall(text)
    return 1000 * sum(word.lower() == "what" for word in words) / max(len(words), 1)


@pytest.mark.parametrize("folder", FOLDERS)
def test_docstrings_name_things_instead_of_describing_them_as_what(folder):
    text = docstrings(folder)
    assert rate(text) <= WHATS_PER_1000
    assert not VAGUE.findall(text)


@pytest.mark.parametrize("page", PAGES)
def test_pages_name_things_too(page):
    text = prose(page)
    assert rate(text) <= WHATS_PER_1000
    assert not VAGUE.findall(text)


def test_the_gauge_counts():
    assert rate("What it does, and what comes of it.") == pytest.approx(1000 * 2 / 8)
    assert VAGUE.findall("Somebody, nobody; whoever has antibody.") == ["Somebody", "nobody", "whoever"]


if __name__ == "__main__":  # python tests/test_prose.py: the figures
    for folder in FOLDERS:
        print(f"{folder:24}{rate(docstrings(folder)):6.1f}{len(VAGUE.findall(docstrings(folder))):4}")
    for page in PAGES:
        print(f"{page:24}{rate(prose(page)):6.1f}{len(VAGUE.findall(prose(page))):4}")
