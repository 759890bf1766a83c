"""The first-time walk: the commands of README, tutorial and start pages, in their order, as a stranger types them.

The commands of the README and the tutorial run in a copy of the sources with an environment of its own, which the first
command fills; those of the pages in an empty folder away from it. The first command and those that load no model start
as a reader starts them; the others are forks of an interpreter of that environment that holds the imports. Every line
of every `bash` block is walked, or stands in SKIPPED with the reason: a new command in a page is tried, or decided
about, before the tests pass again.
"""

from __future__ import annotations

import re
import shlex
import shutil
import signal
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from helpers_flags import later_wins
from helpers_fresh import fresh_environment
from helpers_warm import end_server, start_python

pytestmark = pytest.mark.takes(slow=130)

ROOT = Path(__file__).resolve().parents[2]
HOME = ("README.md", "docs/tutorial.md")
"""Walked in the checkout."""
PAGES = ("docs/report.md", "docs/transcripts.md", "docs/serve.md", "docs/export.md", "docs/programs.md")
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
SAVED = re.compile(r"Saved as `(\w+\.py)`")
SHORT = "--iterations 1 --n_rollout_threads 2 --max_new_tokens 16 --eval_episodes 1 --eval_samples 1 --threads 1"
UNEVALUATED = "--iterations 1 --n_rollout_threads 2 --max_new_tokens 16 --eval_episodes 0 --threads 1"

EVALUATED = "--k 4 --tasks 100"
"""What scripts/quickstart.sh plays at its end; fewer games here."""

SKIPPED = {
    r"^bash scripts/test\.sh": "runs these tests",
    r"Qwen/": "needs a model that does not ship",
    r"my_adapters": "a folder of the reader's own; tests/storage/test_load_path.py",
    r"^mafrt export .*step_000020": "a step that the short run has not; tests/scripts/test_export.py",
    r"--reward my_reward": "a file of the reader's own; tests/envs/test_reward_functions.py",
    r"--push_to_hub": "wants a login; tests/scripts/test_export.py",
    r"^pip install": "what scripts/install.sh does, with other words",
}
"""Pattern of a line -> the reason why it is not walked."""

CHANGES = {
    # Groups of eight games.
    r"^bash scripts/quickstart\.sh.*": rf"\g<0> {SHORT} --n_rollout_threads 8",
    r"^bash scripts/quickstart_math\.sh.*": rf"\g<0> {SHORT} --iterations 2",
    r"^python .*--iterations 60 --seed 2": rf"\g<0> {SHORT} --run_dir runs/B",
    r"--iterations 400": "--iterations 4",
    r"--iterations 14": "--iterations 2",
    r"(?<=runs/pens --kind train )--iteration 12": "--iteration 1",
    r"^mafrt train --(program|env) .*": rf"\g<0> {SHORT}",
    # Each of its episodes imports an SDK of its own, so none is played for an evaluation.
    r"^mafrt train --command .*": rf"\g<0> {UNEVALUATED}",
    r"--k 16": "--k 1 --tasks 2 --threads 1",
    r"--record_dir evaluated": r"\g<0> --k 1 --tasks 2 --threads 1",
    r"^mafrt collect .*": r"\g<0> --min_score 0 --overwrite",
    r"--k 4 --tasks 50": "--k 1 --tasks 2 --threads 1",
    r"^mafrt serve_team.*": r"\g<0> --port 0",
    r"^mafrt serve_tinker.*": "mafrt serve_tinker --model_name_or_path teaching-base --port 0 --output runs/tinker",
    r"^mafrt report .*--live": r"\g<0> --port 0",
    r"(?<!runs/pens )--agent solver": "--agent actor",
    r"--iteration 12": "--iteration 2",
    r"--episode 12": "--episode 11",
    r"runs/(NAME|A)\b": "CHECKOUT/runs/quickstart_math",
    r"runs/B\b": "CHECKOUT/runs/B",
    r"(?<=path )(envs/\S*/word_problems_)?(train|test)\.jsonl": r"CHECKOUT/envs/math/data/word_problems_\2.jsonl",
    r"(?<=path )team\.json": "CHECKOUT/profiles/quickstart_math.json",
}
"""Pattern in a line -> the words in its place, one rule after the other: shorter, and with names that exist here."""

SERVERS = {"serve_team": "Models ", "serve_tinker": "TINKER_BASE_URL=", "--live": "http://127.0.0.1"}
"""Word in a command that goes on until Ctrl-C -> the words that it prints when it is ready."""

WARM = re.compile(r"mafrt (train|evaluate|chat|serve_team|serve_tinker|export)\b(?!.*--help)|python scripts/")
"""Commands whose imports of torch and transformers take longer than their work."""

TYPED = "2 + 2\n/quit\n"
"""Standard input of every command; only the chat reads it."""


@dataclass
class Reader:
    """A person at a terminal in a folder."""

    folder: Path
    checkout: Path
    activated: list[str] = field(default_factory=list)
    """`source` lines typed so far; they hold for every later command"""
    told: list[str] = field(default_factory=list)
    """seconds of every command"""

    def type(self, line: str) -> None:
        """Type one line of a page; with other words where CHANGES says so."""
        if line.startswith("source "):
            self.activated.append(line.replace("source ", f"source {self.checkout}/"))
            return
        for pattern, words in CHANGES.items():
            line = re.sub(pattern, words, line)
        line = " ".join(later_wins(*line.split()))
        line = line.replace("CHECKOUT", str(self.checkout))
        started = time.monotonic()
        script = "; ".join([*self.activated, f"exec {line}"])
        ready = next((words for word, words in SERVERS.items() if word in line), None)
        if WARM.match(line):
            self.fork(line, ready)
        elif ready:
            self.serve(script, ready)
        else:
            self.run(script)
        self.told.append(f"{time.monotonic() - started:5.1f} s  {line}")

    def fork(self, line: str, ready: str | None) -> None:
        """The same from the environment's own interpreter, with the imports done."""
        bare = subprocess.run(
            ["bash", "-c", "; ".join([*self.activated, "env -0"])], capture_output=True, text=True, check=True
        ).stdout
        env = dict(one.split("=", 1) for one in bare.split("\0") if one)
        name, *words = shlex.split(line)
        program = shutil.which(name, path=env["PATH"])
        assert program == str(self.checkout / ".venv/bin" / name), f"{name} is {program}"
        if name == "mafrt":
            words.insert(0, program)
        process = start_python(*words, cwd=self.folder, env=env, typed=TYPED, python=self.python)
        try:
            if ready:
                while ready not in process.stdout:
                    assert process.poll() is None, f"{line}\nended before it was ready\n{process.stderr[-4000:]}"
                    time.sleep(0.05)
                process.send_signal(signal.SIGINT)
            code = process.wait(600)
            assert code == 0, f"{line}\n{process.stdout[-2000:]}{process.stderr[-4000:]}"
        finally:
            process.kill()
            process.wait(10)

    @property
    def python(self) -> Path:
        """The interpreter of the checkout's environment."""
        return self.checkout / ".venv/bin/python"

    def run(self, script: str) -> None:
        done = subprocess.run(
            ["bash", "-c", script], cwd=self.folder, input=TYPED, capture_output=True, text=True, timeout=600
        )
        assert done.returncode == 0, f"{script}\n{done.stdout[-2000:]}{done.stderr[-4000:]}"

    def serve(self, script: str, ready: str) -> None:
        server = subprocess.Popen(
            ["bash", "-c", script],
            cwd=self.folder,
            stdout=subprocess.PIPE,
            text=True,
            # A test run in the background of a script ignores Ctrl-C, and its children would inherit that.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
        try:
            assert server.stdout is not None
            assert any(ready in line for line in server.stdout), f"{script}\nended before it was ready"
            server.send_signal(signal.SIGINT)
            assert server.wait(timeout=60) == 0
        finally:
            server.kill()
            server.wait()


def save_files(reader: Reader) -> None:
    """Save the files that the pages say to save."""
    for page in (*HOME, *PAGES):
        text = (ROOT / page).read_text(encoding="utf-8")
        for match in BLOCK.finditer(text):
            saved = SAVED.findall(text[max(0, match.start() - 200) : match.start()])
            if match[1] == "python" and saved:
                (reader.folder / saved[-1]).write_text(match[2], encoding="utf-8")


def walk(reader: Reader, page: str, typed: set[str]) -> None:
    """Type every command of a page that no earlier page has had."""
    for match in BLOCK.finditer((ROOT / page).read_text(encoding="utf-8")):
        for line in match[2].replace("\\\n", " ").splitlines() if match[1] == "bash" else ():
            words = re.sub(r"\s+#.*$", "", line).strip()
            if words and words not in typed and not any(re.search(pattern, words) for pattern in SKIPPED):
                typed.add(words)
                reader.type(words)


def test_every_rule_is_for_some_line():
    lines = [line for page in (*HOME, *PAGES) for line in (ROOT / page).read_text(encoding="utf-8").splitlines()]
    for pattern in SKIPPED:
        assert any(re.search(pattern, line) for line in lines), pattern


@pytest.fixture
def checkout(tmp_path):
    """A copy of the sources as a clone has them, with an empty environment of its own."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    target = tmp_path / "checkout"
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, target / name)
    script = target / "scripts/quickstart.sh"
    assert EVALUATED in script.read_text()
    script.write_text(script.read_text().replace(EVALUATED, "--k 1 --tasks 2 --threads 1"))
    fresh_environment(target / ".venv", with_pip=True)
    return target


@pytest.mark.nightly
@pytest.mark.slow
def test_the_first_time_walk(checkout, tmp_path, capsys, monkeypatch):
    for name in ("VIRTUAL_ENV", "PYTHONPATH", "PYTHONHOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    typed: set[str] = set()
    at_home = Reader(checkout, checkout)
    save_files(at_home)
    for page in HOME:
        walk(at_home, page, typed)
    (tmp_path / "elsewhere").mkdir()
    away = Reader(tmp_path / "elsewhere", checkout, at_home.activated)
    save_files(away)
    for page in PAGES:
        walk(away, page, typed)
    end_server(at_home.python)
    told = at_home.told + away.told
    with capsys.disabled():
        print("\nThe first-time walk:", *told, sep="\n")
    assert len(told) > 20
    assert (checkout / "runs/quickstart_math/report.html").is_file() and (tmp_path / "elsewhere/both.html").is_file()
    assert (checkout / "my_team/solver/adapter_model.safetensors").is_file()
    assert (away.folder / "team/merged/actor/model.safetensors").is_file()
    assert (checkout / "good.jsonl").stat().st_size
