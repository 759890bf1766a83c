"""What a release rests on: pins that agree, the release script, and the files that GitHub reads."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from configparser import ConfigParser
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
PIN = re.compile(r"([\w.-]+)==([\w.!+-]+)")
CHANGELOG = "# Changelog\n\n## 0.2.0, 2026-12-01\n\n- Better.\n\n## 0.1.0, 2026-11-01\n\n- First.\n"


def pins(name: str) -> dict[str, str]:
    lines = [line for line in (ROOT / name).read_text(encoding="utf-8").splitlines() if line and line[0] != "#"]
    found = [PIN.fullmatch(line) for line in lines]
    assert all(found), [line for line, match in zip(lines, found, strict=True) if match is None]
    return {re.sub(r"[-_.]+", "-", match[1]).lower(): match[2] for match in found if match}


def test_constraints_agree_with_the_requirements():
    required, constrained = pins("requirements.txt"), pins("constraints.txt")
    assert required.items() <= constrained.items(), "run: .venv/bin/python .ci/constraints.py"
    assert len(constrained) > 1.5 * len(required)  # those that come along are there too
    assert list(constrained) == sorted(constrained) and not {"mafrt", "pip", "setuptools"} & constrained.keys()


def test_constraints_have_every_package_that_users_get():
    setup = ConfigParser()
    setup.read(ROOT / "setup.cfg")
    wanted = [line for line in setup["options"]["install_requires"].splitlines() if line]
    for line in wanted:
        assert re.sub(r"[-_.]+", "-", re.split(r"[<>=]", line)[0]).lower() in pins("constraints.txt"), line


@pytest.fixture
def repository(tmp_path):
    """A repository that may release 0.2.0 after 0.1.0."""
    folder = tmp_path / "repository"
    for name in ("scripts", "mafrt"):
        (folder / name).mkdir(parents=True)
    shutil.copy(ROOT / "scripts/release.sh", folder / "scripts")
    (folder / "mafrt/__init__.py").write_text('"""A package."""\n\n__version__ = "0.2.0"\n')
    (folder / "setup.cfg").write_text(
        "[metadata]\nname = mafrt\nversion = attr: mafrt.__version__\n[options]\npackages = mafrt\n"
    )
    (folder / "pyproject.toml").write_text(
        '[build-system]\nrequires = ["setuptools"]\nbuild-backend = "setuptools.build_meta"\n'
    )
    (folder / "CHANGELOG.md").write_text(CHANGELOG)
    (folder / ".gitignore").write_text("dist/\nbuild/\n*.egg-info/\n")
    git(folder, "init", "-q", "-b", "main")
    commit(folder)
    git(folder, "tag", "-a", "v0.1.0", "-m", "first")
    return folder


def git(folder: Path, *words: str) -> str:
    identity = ("-c", "user.name=a", "-c", "user.email=a@example.org")
    done = subprocess.run(["git", *identity, *words], cwd=folder, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def commit(folder: Path) -> None:
    git(folder, "add", "-A")
    git(folder, "commit", "-q", "-m", "change")


def release(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    known = {"GIT_COMMITTER_NAME": "a", "GIT_COMMITTER_EMAIL": "a@example.org"}
    return subprocess.run(
        ["bash", "scripts/release.sh", *words], cwd=folder, capture_output=True, text=True, env=os.environ | known,
        check=False,
    )  # fmt: skip


def test_a_release_is_only_told_until_it_is_asked_for(repository):
    told = release(repository, "0.2.0")
    assert told.returncode == 0, told.stderr
    assert "v0.2.0" in told.stdout and "after v0.1.0" in told.stdout and "- Better." in told.stdout
    assert "First" not in told.stdout and git(repository, "tag") == "v0.1.0" and not (repository / "dist").exists()


def broken(name, text):
    def change(folder):
        (folder / name).write_text(text)
        commit(folder)

    return change


@pytest.mark.parametrize(
    ("change", "version", "words"),
    [
        (lambda folder: (folder / "new.txt").write_text("x"), "0.2.0", "working tree"),
        (lambda folder: git(folder, "switch", "-q", "-c", "other"), "0.2.0", "on main"),
        (lambda folder: git(folder, "tag", "v0.2.0"), "0.2.0", "already"),
        (lambda folder: git(folder, "tag", "v0.3.0"), "0.2.0", "v0.3.0"),
        (lambda folder: git(folder, "tag", "v0.1.5"), "0.2.0", "no section"),
        (broken("mafrt/__init__.py", '__version__ = "0.1.9"\n'), "0.2.0", "0.1.9"),
        (broken("CHANGELOG.md", CHANGELOG.replace("2026-12-01", "not released")), "0.2.0", "not released"),
        (broken("CHANGELOG.md", CHANGELOG.replace("- Better.\n", "")), "0.2.0", "empty"),
        (broken("CHANGELOG.md", "# Changelog\n"), "0.2.0", "begins with ''"),
        (lambda folder: None, "0.2", "three numbers"),
        (lambda folder: None, "", "three numbers"),
        (lambda folder: None, "0.3.0", "0.2.0"),
    ],
)
def test_a_release_that_is_not_ready_is_refused_in_one_sentence(repository, change, version, words):
    change(repository)
    tags = git(repository, "tag")
    told = release(repository, version, "--do")
    assert told.returncode == 2 and told.stderr.count("\n") == 1 and words in told.stderr
    assert git(repository, "tag") == tags and not (repository / "dist").exists()


def test_an_unknown_word_is_refused(repository):
    assert "--now" in release(repository, "0.2.0", "--now").stderr


@pytest.mark.ci
@pytest.mark.slow
def test_a_release_makes_a_tag_and_a_wheel(repository):
    told = release(repository, "0.2.0", "--do")
    assert told.returncode == 0, told.stderr
    assert "- Better." in git(repository, "tag", "-l", "--format=%(contents)", "v0.2.0")
    assert [path.name for path in (repository / "dist").iterdir()] == ["mafrt-0.2.0-py3-none-any.whl"]


def test_the_changelog_begins_with_the_version_of_the_package():
    version = re.search(r'^__version__ = "(.+)"$', (ROOT / "mafrt/__init__.py").read_text(), re.MULTILINE)
    heading = re.search(r"^## (.+), (not released|\d{4}-\d\d-\d\d)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert version and heading and version[1] == heading[1]


def test_ci_calls_the_one_script_and_the_versions_that_setup_declares():
    told = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())
    steps = [step.get("run", "") for job in told["jobs"].values() for step in job["steps"]]
    assert any(step == "bash .ci/run" for step in steps)
    setup = (ROOT / "setup.cfg").read_text()
    declared = set(re.findall(r"Python :: (3\.\d+)", setup))
    used = {*told["jobs"]["fast"]["strategy"]["matrix"]["python"], *re.findall(r"python:(3\.\d+)", str(told["jobs"]))}
    assert used == declared


def test_forms_of_issues_and_hooks_are_whole():
    for path in (ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml"):
        told = yaml.safe_load(path.read_text())
        if path.name != "config.yml":
            assert {"name", "description", "body"} <= told.keys()
            assert all(part["attributes"]["label"] for part in told["body"])
    for hook in yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"][0]["hooks"]:
        words = hook["entry"].split()
        assert words[0].startswith(".venv/bin/") or (ROOT / words[1]).is_file(), hook["id"]
