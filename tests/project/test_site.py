"""The documentation site: it builds, warnings are errors, and its references follow from the code."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.ci
@pytest.mark.slow
def test_the_site_builds_without_a_warning(tmp_path):
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-q", "-f", "website/mkdocs.yml", "-d"]
    done = subprocess.run([*command, str(tmp_path)], cwd=ROOT, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr
    pages = {path.name: path.read_text(encoding="utf-8") for path in tmp_path.glob("*.html")}
    assert {f"{path.stem}.html" for path in (ROOT / "docs").glob("*.md")} <= pages.keys()
    assert {f"results_{path.stem}.html" for path in (ROOT / "bench" / "results").glob("*.md")} <= pages.keys()
    assert 'href="results_games.html' in pages["games.html"] and 'href="games.html' in pages["results_games.html"]
    assert "lora_rank" in pages["settings.html"] and "<code>--algorithm grpo</code>" in pages["settings.html"]
    assert 'id="mafrt.runners.on_policy.OnPolicy"' in pages["api.html"]
    assert 'id="mafrt.environment.base.Env.step"' in pages["api.html"]
    assert "run_episode" in pages["examples.html"] and "langgraph_team.py" in pages["examples.html"]
    assert "../" not in pages["index.html"].split("<article")[1].split("</article>")[0]
