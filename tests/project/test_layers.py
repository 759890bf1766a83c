"""Imports run downwards only, envs and credit know little, and nothing heavy comes before arguments are parsed."""

from __future__ import annotations

import ast
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = {"mafrt": "mafrt", "envs": "mafrt.envs", "runners": "mafrt.runners", "scripts": "mafrt.scripts"}

# From the top; a folder may import from itself and from the lines below its own. Names are relative to `mafrt`.
LAYERS = (
    "scripts",
    "runners envs",
    "coach",
    "rollout",
    "engines training cpu",
    "environment models",
    "algorithms storage sandbox",
    "config",
    "core",
)
LEVEL = {name: len(LAYERS) - depth for depth, names in enumerate(LAYERS) for name in names.split()}

ENVS_KNOW = {"envs", "environment", "sandbox", "config", "core"}
ALGORITHMS_KNOW = {"algorithms", "config", "core"}
HEAVY = {"torch", "transformers", "peft", "accelerate", "safetensors", "numpy", "pandas", "math_verify", "sympy"}
HEAVY |= {"pyarrow", "datasets", "tensorboard", "yaml", "wandb", "openai", "anthropic", "vllm", "deepspeed", "tqdm"}
HEAVY |= {"google", "tenacity", "grpc"}


@cache
def modules() -> dict[str, Path]:
    """Dotted name -> file, of everything that is installed."""
    found = {}
    for folder, package in FOLDERS.items():
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = [package, *path.relative_to(ROOT / folder).with_suffix("").parts]
            if parts[-1] != "__main__":  # a door to the console command
                found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def imports(name: str, *, at_once: bool, types: bool = False) -> frozenset[str]:
    """Dotted names that a module imports: all, or only those `at_once`; `types`: those for type checkers too."""
    path = modules()[name]
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    found: set[str] = set()

    def visit(node: ast.AST) -> None:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test) and not types:
            for child in node.orelse:
                visit(child)
            return
        if at_once and isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            return
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parent = package.split(".")
                base = ".".join([*parent[: len(parent) - node.level + 1], *([base] if base else [])])
            for alias in node.names:
                whole = f"{base}.{alias.name}"
                found.add(whole if whole in modules() else base)
        for child in ast.iter_child_nodes(node):
            if isinstance(child, (ast.stmt, ast.ExceptHandler, ast.match_case)):  # no import stands in an expression
                visit(child)

    visit(parsed(path))
    return frozenset(found)


def part(name: str) -> str:
    """`mafrt.algorithms.gae` -> `credit`."""
    return name.split(".")[1] if "." in name else ""


def ours(name: str) -> bool:
    return name.split(".")[0] == "mafrt" and part(name) != ""


def closure(name: str) -> dict[str, str]:
    """Everything that importing a module imports -> who imports it first."""
    found: dict[str, str] = {}
    stack = [name]
    while stack:
        current = stack.pop()
        parents = [".".join(current.split(".")[: n + 1]) for n in range(current.count("."))]
        for wanted in [*parents, *imports(current, at_once=True)]:
            if wanted not in found:
                found[wanted] = current
                if wanted in modules():
                    stack.append(wanted)
    return found


def test_every_folder_has_its_layer():
    folders = {part(name) for name in modules() if part(name)}
    assert folders == LEVEL.keys(), "LAYERS of tests/project/test_layers.py lists the folders of mafrt"
    assert len([path for path in (ROOT / "mafrt").iterdir() if (path / "__init__.py").exists()]) <= 12


@pytest.mark.slow
def test_imports_run_downwards():
    """Imports inside functions and under TYPE_CHECKING count too."""
    upward = {
        f"{name} imports {other}"
        for name in modules()
        for other in imports(name, at_once=False, types=True)
        if part(name) and ours(other) and part(other) != part(name) and LEVEL[part(other)] >= LEVEL[part(name)]
    }
    assert upward == set()


@pytest.mark.slow
@pytest.mark.ci
def test_the_drawing_shows_the_imports_as_they_are(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "website"))
    import import_graph

    assert import_graph.PICTURE.read_text(encoding="utf-8") == import_graph.drawing(), (
        "run .venv/bin/python website/import_graph.py"
    )


def test_modules_do_not_import_each_other_in_circles():
    done: set[str] = set()

    def visit(name: str, above: tuple[str, ...]) -> None:
        assert name not in above, " -> ".join([*above[above.index(name) :], name])
        if name not in done:
            for other in sorted(imports(name, at_once=False, types=True)):
                if other in modules() and other != name and not name.startswith(other + "."):
                    visit(other, (*above, name))
            done.add(name)

    for name in modules():
        visit(name, ())


def test_envs_know_the_environment_api_and_nothing_of_training():
    for name in (name for name in modules() if part(name) == "envs"):
        others = imports(name, at_once=False, types=True)
        assert {part(other) for other in others if ours(other)} <= ENVS_KNOW, name
        assert "torch" not in {other.split(".")[0] for other in others}, name
        # Settings of training are not an environment's business.
        assert "mafrt.config.train_config" not in others, name


def test_algorithms_are_mathematics():
    for name in (name for name in modules() if part(name) == "algorithms"):
        others = imports(name, at_once=False, types=True)
        outside = {other.split(".")[0] for other in others if not ours(other)}
        assert {part(other) for other in others if ours(other)} <= ALGORITHMS_KNOW, name
        assert outside <= {"torch", "mafrt"} | set(sys.stdlib_module_names), name
        assert not outside & {"os", "pathlib", "io", "json", "socket", "subprocess", "shutil"}, name


LIGHT = ("core", "config", "environment", "storage", "envs", "scripts")
HEAVY_FOLDERS = ("mafrt.environment.remote.", "mafrt.scripts.tinker_server.")


@pytest.mark.slow
def test_nothing_heavy_before_arguments_are_parsed():
    heavy = {
        f"{other} by {by}, which {name} needs"
        for name in modules()
        if name == "mafrt" or (part(name) in LIGHT and not name.startswith(HEAVY_FOLDERS))
        for other, by in closure(name).items()
        if other.split(".")[0] in HEAVY
    }
    assert heavy == set()


def test_import_mafrt_is_light():
    code = "import sys, mafrt; dir(mafrt); mafrt.errors; mafrt.TrainConfig; mafrt.Team; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not HEAVY & {name.split(".")[0] for name in loaded}


def test_every_name_that_mafrt_promises_exists():
    """`import mafrt` resolves names late, so a wrong one would be noticed by users only."""
    import mafrt

    for module in {*mafrt._WHERE.values(), *mafrt._MODULES.values()}:
        assert module in modules(), module
    for name, module in mafrt._WHERE.items():
        tree = ast.parse(modules()[module].read_text(encoding="utf-8"))
        defined = {node.name for node in tree.body if isinstance(node, (ast.ClassDef, ast.FunctionDef))}
        defined |= {alias.asname or alias.name for n in tree.body if isinstance(n, ast.ImportFrom) for alias in n.names}
        assert name in defined, f"{module} has no {name}"
