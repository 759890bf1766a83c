"""Run folders made up for tests of the report, and a headless browser to look at it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from mafrt.config.team import AgentSpec, Team
from mafrt.core.types import Episode, Evidence, Scored, Turn
from mafrt.storage.run_dir import RunDir
from mafrt.storage.run_record import RunRecord
from mafrt.storage.transcripts import TranscriptWriter

TEAM = Team((AgentSpec("planner", prompt="Plan."), AgentSpec("solver", prompt="Solve.")))
BROWSER = shutil.which("chromium") or shutil.which("chromium-browser")
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"]
FLAGS += ["--disable-component-update", "--disable-sync"]


def turn(agent: str, text: str, number: int, advantages: list[float] | None = None, **more: Any) -> Turn:
    """A turn whose tokens are its characters."""
    ids = [ord(c) % 60000 for c in text]
    return Turn(agent, [1, 2], ids, [-0.1] * len(ids), "eos", text, number, number, 0, advantages=advantages, **more)


def episode(
    name: str, group: str, outcome: float, plan: str = "Add.", answer: str = "42", train: bool = True
) -> Episode:
    """Two turns about one task."""
    signs = [outcome - 0.5 + 0.01 * place for place in range(len(answer))]
    turns = [
        turn("planner", plan, 0, [0.25] * len(plan) if train else None, observation=f"Task {group}", paid=0.0),
        turn("solver", answer, 1, signs if train else None, observation=f"Task {group}\n{plan}", paid=outcome),
    ]
    turns[1].coach = Scored(10 * outcome, f"reason of {name}")
    turns[0].evidence = Evidence(tool_output=f"tool of {name}")
    return Episode(name, group, turns, outcome, {"task": group, "ended": "terminated"})


def make_run(path: Path, *, seed: int = 1, iterations: int = 6, groups: int = 4, lr: float = 0.1) -> Path:
    """A run folder with metrics, two evaluations and transcripts; the score rises with the iterations."""
    record = RunRecord([{"role": agent.name, "prompt": agent.prompt} for agent in TEAM.agents], command="train_math")
    args = {"seed": seed, "algorithm": "ppo", "iterations": iterations, "lr": lr, "coach": "rules", "eval_episodes": 4}
    with RunDir.open(path, args, record=record) as disk:
        writer = TranscriptWriter(disk.transcripts, TEAM, lambda ids: "".join(map(chr, ids)), share=1.0, max_mib=64)
        for done in range(iterations + 1):
            score = min(1.0, done / iterations + 0.02 * seed)
            if done in (0, iterations):
                disk.evaluations.append(done, [{"when": "x", "eval/greedy": score, "eval/avg@2": score / 2}])
                kinds = ("sampled", "greedy")
                held = [f"{g:06d}" for g in range(groups)]
                played = [episode(f"{k}-{g}-0", g, float(done > 0), train=False) for k in kinds for g in held]
                writer.write("evaluation", done, played)
            if done:
                line = {"score": score, "reward/planner": score / 2, "reward/solver": score, "kl/solver": 0.01}
                disk.metrics.append(done, [line | {"trained/planner": done % 2, "trained/solver": 1 - done % 2}])
                disk.timings.append(done, [{"seconds_play": 1.0, "seconds_learn": 2.0}])
                some = [episode(f"{done:06d}-{g:05d}", f"{done}-{g}", float(g % 2)) for g in range(groups)]
                writer.write("train", done, some)
    assert yaml.safe_load((path / "args.yaml").read_text())["seed"] == seed
    return path


@contextmanager
def browsing() -> Iterator[Any]:
    """A page of a headless Chromium; an error of a script fails the test. Skipped where there is no Chromium."""
    if BROWSER is None:
        pytest.skip("Chromium is not installed")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=BROWSER, args=FLAGS)
        page = browser.new_page(viewport={"width": 1320, "height": 860})
        errors: list[str] = []
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
        page.on("request", lambda request: errors.append(request.url) if request.url.startswith("http") else None)
        try:
            yield page
        finally:
            browser.close()
        assert errors == []
