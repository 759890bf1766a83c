"""Imports run downwards only, envs and credit know little, and nothing heavy comes before arguments are parsed."""

from __future__ import annotations

import ast
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = {"mafrt": "mafrt", "envs": "mafrt.envs", "runners": "mafrt.runners", "scripts": "mafrt.scripts"}

# From the top; a module may import from its own layer and those below. Names are relative to `mafrt`.
LAYERS = (
    "scripts bench",
    "runners envs teaching",
    "learner objective stepping rollout tree valuation mixing tally coach checkpoint loadable rundir metrics report",
    "policy sharding quantised lora adapters critic mixer logprobs memory batch transcript engine sampling sandbox",
    "credit losses losses_preference env sharing env_check registry team config seeding prompts signals"
    " files random_state processes wire zero fit pace optimizers",
    "types errors version toolcalls",
)
LEVEL = {name: len(LAYERS) - depth for depth, names in enumerate(LAYERS) for name in names.split()}

ENVS_KNOW = {"envs", "env", "sharing", "types", "errors", "team", "sandbox", "toolcalls"}
CREDIT_KNOWS = {"credit", "losses", "types", "errors"}
HEAVY = {"torch", "transformers", "peft", "accelerate", "safetensors", "numpy", "pandas", "math_verify", "sympy"}
HEAVY |= {"pyarrow", "datasets", "tensorboard", "yaml", "wandb", "openai", "anthropic", "vllm", "deepspeed", "tqdm"}
HEAVY |= {"google", "tenacity"}


@cache
def modules() -> dict[str, Path]:
    """Dotted name -> file, of everything that is installed."""
    found = {}
    for folder, package in FOLDERS.items():
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = [package, *path.relative_to(ROOT / folder).with_suffix("").parts]
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@cache
def imports(name: str, *, at_once: bool) -> frozenset[str]:
    """What a module imports, as dotted names; `at_once`: only what runs when it is imported itself.

    Imports for type checkers (`if TYPE_CHECKING:`) do not count.
    """
    path = modules()[name]
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    found: set[str] = set()

    def visit(node: ast.AST) -> None:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            for child in node.orelse:
                visit(child)
            return
        if at_once and isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
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
            visit(child)

    visit(ast.parse(path.read_text(encoding="utf-8")))
    return frozenset(found)


def part(name: str) -> str:
    """`mafrt.credit.gae` -> `credit`."""
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


def test_every_module_has_its_layer():
    unknown = sorted({part(name) for name in modules() if part(name)} - LEVEL.keys())
    assert not unknown, f"say in LAYERS of tests/test_layers.py where these belong: {unknown}"


@pytest.mark.parametrize("name", sorted(name for name in modules() if part(name)))
def test_imports_run_downwards(name):
    own = LEVEL.get(part(name), 99)  # one without a layer fails the test above
    assert [other for other in imports(name, at_once=False) if ours(other) and LEVEL.get(part(other), 0) > own] == []


def test_modules_do_not_import_each_other_in_circles():
    done: set[str] = set()

    def visit(name: str, above: tuple[str, ...]) -> None:
        assert name not in above, " -> ".join([*above[above.index(name) :], name])
        if name not in done:
            for other in sorted(imports(name, at_once=True)):
                if other in modules() and other != name and not name.startswith(other + "."):
                    visit(other, (*above, name))
            done.add(name)

    for name in modules():
        visit(name, ())


@pytest.mark.parametrize("name", sorted(name for name in modules() if part(name) == "envs"))
def test_envs_know_the_environment_api_and_nothing_of_training(name):
    known = {part(other) for other in imports(name, at_once=False) if ours(other)}
    assert known <= ENVS_KNOW | {"config"}
    assert "torch" not in {other.split(".")[0] for other in imports(name, at_once=False)}
    tree = ast.parse(modules()[name].read_text(encoding="utf-8"))
    of_config = [n for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) and n.module == "mafrt.config"]
    # The sentence for a wrong name, with the nearest right one, is the same everywhere; settings of training are not
    # an environment's business.
    assert {alias.name for node in of_config for alias in node.names} <= {"unknown"}


@pytest.mark.parametrize("name", sorted(name for name in modules() if part(name) in ("credit", "losses")))
def test_credit_and_losses_are_mathematics(name):
    others = imports(name, at_once=False)
    outside = {other.split(".")[0] for other in others if not ours(other)}
    assert {part(other) for other in others if ours(other)} <= CREDIT_KNOWS
    assert outside <= {"torch", "mafrt"} | set(sys.stdlib_module_names)
    assert not outside & {"os", "pathlib", "io", "json", "socket", "subprocess", "shutil"}


LIGHT = ("types", "errors", "version", "config", "team", "env", "registry", "signals", "seeding")
LIGHT += ("checkpoint", "rundir", "metrics", "report", "envs", "scripts")


@pytest.mark.parametrize("name", sorted(name for name in modules() if part(name) in LIGHT or name == "mafrt"))
def test_nothing_heavy_before_arguments_are_parsed(name):
    found = closure(name)
    heavy = {f"{other} by {by}" for other, by in found.items() if other.split(".")[0] in HEAVY}
    assert heavy == set()


def test_import_mafrt_is_light():
    code = "import sys, mafrt; dir(mafrt); mafrt.errors; mafrt.TrainConfig; mafrt.Team; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not HEAVY & {name.split(".")[0] for name in loaded}


def test_every_name_that_mafrt_promises_exists():
    """`import mafrt` resolves names late, so a wrong one would be noticed by users only."""
    import mafrt

    for module in {*mafrt._WHERE.values(), *(f"mafrt.{name}" for name in mafrt._MODULES)}:
        assert module in modules(), module
    for name, module in mafrt._WHERE.items():
        tree = ast.parse(modules()[module].read_text(encoding="utf-8"))
        defined = {node.name for node in tree.body if isinstance(node, (ast.ClassDef, ast.FunctionDef))}
        defined |= {alias.asname or alias.name for n in tree.body if isinstance(n, ast.ImportFrom) for alias in n.names}
        assert name in defined, f"{module} has no {name}"
