"""What the documents say works: Python snippets run, commands parse, links lead somewhere."""

from __future__ import annotations

import importlib
import re
import shlex
from pathlib import Path

import pytest
from helpers_warm import run_python

from mafrt.scripts import main as console

pytestmark = pytest.mark.takes(slow=16)

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("bench/results/*.md")])
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
SAVED = re.compile(r"Saved as `(\w+\.py)`")


def names(paths: list[Path]) -> list[str]:
    return [str(path.relative_to(ROOT)) for path in paths]


@pytest.mark.slow  # all together
@pytest.mark.cases(100)
@pytest.mark.parametrize("document", names([path for path in DOCUMENTS if "```python" in path.read_text()]))
def test_python_snippets_run(document, tmp_path):
    """The blocks of a document run one after the other, as a reader would type them; `Saved as` makes a file first."""
    text = (ROOT / document).read_text(encoding="utf-8")
    blocks = [match for match in FENCE.finditer(text) if match[1] == "python"]
    edges = [0, *(match.end() for match in blocks), len(text)]
    program = ""
    for number, match in enumerate(blocks):
        # The remark stands right before its block, or right after it.
        around = (text[edges[number] : match.start()][-200:], text[match.end() : edges[number + 2]][:200])
        if saved := next((found for part in around if (found := SAVED.search(part))), None):
            (tmp_path / saved[1]).write_text(match[2], encoding="utf-8")
        line = text[: match.start()].count("\n") + 1  # a traceback then names the line of the document
        program += "\n" * (line - program.count("\n")) + match[2]
    (tmp_path / "snippets.py").write_text(program, encoding="utf-8")
    done = run_python("snippets.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr


def test_the_snippets_of_contributing_are_short():
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    for match in FENCE.finditer(text):
        assert match[2].count("\n") < 20, match[2]


def commands() -> list[tuple[str, str]]:
    """Every `mafrt ...`, `python scripts/...` and `bash scripts/...` line of every document."""
    found = []
    for path in DOCUMENTS:
        for match in FENCE.finditer(path.read_text(encoding="utf-8")):
            if match[1] in ("", "bash"):
                lines = match[2].replace("\\\n", " ").splitlines()
                found += [(path.name, line.strip()) for line in lines if re.match(r"\s*(mafrt|python|bash) ", line)]
    return found


@pytest.mark.parametrize(("document", "line"), commands())
def test_commands_parse(document, line):
    """Flags are real and their values can be read; files that the reader is to have need not exist."""
    program, *words = shlex.split(line, comments=True)
    if program == "mafrt":
        name = words[0]
        assert name in console.COMMANDS, line
    elif words[0] == "-m":
        assert importlib.util.find_spec(words[1]), line
        return
    else:
        assert (ROOT / words[0]).is_file(), line
        name = {"quickstart": "train", "quickstart_math": "train_math", "quickstart_dsbench": "train_dsbench"}.get(
            Path(words[0]).stem, Path(words[0]).stem
        )
    argv = words[1:]
    if name == "train" and "--reward" in argv:
        name = "train_tasks"
    # These have parsers of their own.
    if name in ("test", "install", "bench", "completion", "gpu_check") or argv == ["--help"]:
        return
    if "--config" in argv:
        at = argv.index("--config")
        del argv[at : at + 2]
    command = importlib.import_module(f"mafrt.scripts.{name}").COMMAND
    settings = command.read(argv)
    for kind in command.groups:
        settings.make(kind)


@pytest.mark.parametrize("document", names(DOCUMENTS))
def test_links_lead_somewhere(document):
    path = ROOT / document
    text = path.read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if target.startswith(("http://", "https://")):
            continue
        file, _, anchor = target.partition("#")
        other = (path.parent / file) if file else path
        assert other.exists(), f"{document} links to {target}"
        if anchor:
            titles = re.findall(r"^#+ (.+)$", other.read_text(encoding="utf-8"), re.MULTILINE)
            assert anchor in {re.sub(r"[^\w -]", "", title).lower().replace(" ", "-") for title in titles}, target


def test_the_page_of_the_command_line_has_every_command():
    text = (ROOT / "docs" / "command_line.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| ((?:`\w+`(?:, )?)+) \|", text, re.MULTILINE)
    assert {name for row in rows for name in re.findall(r"\w+", row)} == console.COMMANDS.keys()


def test_numbers_of_rules_and_of_their_parts_are_counted():
    from mafrt.algorithms import ALGORITHMS

    (rules,) = re.findall(r"\[(\d+) algorithms\]", (ROOT / "README.md").read_text(encoding="utf-8"))
    assert int(rules) == len(set(ALGORITHMS.values()))
    table = (ROOT / "bench" / "results" / "algorithms.md").read_text(encoding="utf-8").split("| part | task |")[1]
    decides = re.findall(r"\| (yes|alone|not shown) \|", table.split("\n\n")[0])
    told = re.findall(r"in (\d+) of (\d+) it decides", (ROOT / "docs" / "algorithms.md").read_text(encoding="utf-8"))
    assert told == [(str(decides.count("yes")), str(len(decides)))]


def test_every_page_is_in_the_navigation():
    """Pages of docs/, and those of the root that the site shows."""
    import yaml

    class Loader(yaml.SafeLoader):
        """Tags of mkdocs are left alone."""

    Loader.add_multi_constructor("", lambda loader, suffix, node: None)
    told = yaml.load((ROOT / "website" / "mkdocs.yml").read_text(encoding="utf-8"), Loader)["nav"]

    def pages(entry):
        if isinstance(entry, str):
            return [entry]
        return [page for inner in (entry.values() if isinstance(entry, dict) else entry) for page in pages(inner)]

    shown = pages(told)
    results = {f"results_{path.stem}.md" for path in ROOT.glob("bench/results/*.md")}
    assert {path.name for path in ROOT.glob("docs/*.md")} | results <= set(shown)
    assert len(shown) == len(set(shown)) and shown[:2] == ["index.md", "tutorial.md"]


def test_yaml_snippets_are_settings():
    import yaml

    from mafrt.scripts import train_math

    known = train_math.COMMAND.settings()
    for match in FENCE.finditer((ROOT / "docs" / "command_line.md").read_text(encoding="utf-8")):
        if match[1] == "yaml":
            assert yaml.safe_load(match[2]).keys() <= known.keys()


def test_flags_that_the_text_names_exist():
    """`--name` in running text is a flag of some command, or of a tool that is named there."""
    of_others = {"logdir", "editable", "no-deps", "version", "help", "debug", "config", "check"}
    of_others |= {"multi_gpu", "mixed_precision", "use_fsdp", "fsdp_version"}  # of accelerate's launcher
    of_others |= {"model"}  # of vLLM's server
    of_others |= {"empty"}  # a setting of an environment
    known = set(of_others)
    for name in console.COMMANDS:
        module = importlib.import_module(f"mafrt.scripts.{name}")
        if hasattr(module, "COMMAND") or hasattr(module, "build_parser"):
            parser = module.COMMAND.parser() if hasattr(module, "COMMAND") else module.build_parser()
            actions = parser._actions
            known |= {option.removeprefix("--") for action in actions for option in action.option_strings}
    for path in DOCUMENTS:
        # The first names flags of others (test_recipes looks at ours), the rest those of earlier days and other tools.
        if path.name in ("coming_from.md", "CHANGELOG.md", "BENCHMARKS.md", "ARCHITECTURE.md"):
            continue
        text = FENCE.sub("", path.read_text(encoding="utf-8"))
        for flag in re.findall(r"(?<![\w-])--([a-z][\w-]*)", text):
            assert flag in known or flag in ("name", "no-name"), f"{path.name} names --{flag}"


def test_the_page_of_the_team_file_lists_every_key(tmp_path):
    from dataclasses import fields

    from mafrt.config.agent import AgentSpec
    from mafrt.config.team import Team

    text = (ROOT / "docs" / "team_file.md").read_text(encoding="utf-8")
    rows = "".join(line.split("|")[1] for line in text.splitlines() if line.startswith("| `"))
    listed = set(re.findall(r"`(\w+)`", rows))
    assert listed == {"role", "agent", *(item.name for item in fields(AgentSpec))} - {"name"}
    example = next(match[2] for match in FENCE.finditer(text) if match[1] == "yaml")
    (tmp_path / "team.yaml").write_text(example, encoding="utf-8")
    team = Team.load(tmp_path / "team.yaml")
    assert team.names == ("reasoner", "actor", "reviewer") and team.frozen() == ("reviewer",)


@pytest.mark.slow
def test_the_glossary_names_things_that_exist():
    rows = re.findall(r"^\| .+ \| .+ \| (`.+`) \|$", (ROOT / "docs" / "glossary.md").read_text("utf-8"), re.MULTILINE)
    sources = "\n".join(
        path.read_text(encoding="utf-8")
        for folder in ("mafrt", "envs", "runners", "scripts")
        for path in (ROOT / folder).rglob("*.py")
    )
    assert len(rows) > 40
    for name in sorted({name for row in rows for name in re.findall(r"`(\w+)`", row)}):
        assert re.search(rf"^(class|def) {name}\b", sources, re.MULTILINE), name
