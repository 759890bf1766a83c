"""The wheel: installed into a new environment, away from the sources, it trains."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from helpers_fresh import fresh_environment

pytestmark = pytest.mark.takes(slow=11)

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ("mafrt", "envs", "runners", "scripts", "profiles", "configs")


@pytest.mark.ci
@pytest.mark.slow
def test_a_wheel_trains_away_from_the_sources(tmp_path):
    source = tmp_path / "source"
    for name in SOURCES:
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    for name in ("setup.cfg", "setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)

    def run(*words: str | Path, cwd: Path = tmp_path) -> str:
        done = subprocess.run(list(map(str, words)), cwd=cwd, capture_output=True, text=True, timeout=400, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    pip = (sys.executable, "-m", "pip", "-q", "--disable-pip-version-check")
    isolated = ["--no-build-isolation"] if importlib.util.find_spec("setuptools") else []
    run(*pip, "wheel", "--no-deps", *isolated, "--wheel-dir", tmp_path / "wheels", source)
    shutil.rmtree(source)
    [wheel] = (tmp_path / "wheels").glob("mafrt-*.whl")

    home = tmp_path / "env"
    python, packages = fresh_environment(home)
    run(*pip, "--python", python, "install", "--no-deps", "--no-index", wheel)
    where = run(python, "-c", "import mafrt, mafrt.runners, mafrt.envs; print(mafrt.__file__, mafrt.envs.__file__)")
    assert all(path.startswith(str(packages)) for path in where.split())
    said = run(home / "bin" / "mafrt", "train_math", "--iterations", "1", "--n_rollout_threads", "4",
               "--max_new_tokens", "8", "--eval_episodes", "2", "--eval_samples", "1", "--threads", "1",
               "--coach", "rules", "--run_dir", "run")  # fmt: skip
    assert "go on" in said and (tmp_path / "run" / "checkpoints" / "step_000001").is_dir()
    run(home / "bin" / "mafrt", "report", "run")
    assert (tmp_path / "run" / "report.html").stat().st_size > 50_000
