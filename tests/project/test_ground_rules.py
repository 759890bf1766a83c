"""Ground rules of SAFETY as a lint: what may run code, hide an error or name a machine is found in the syntax tree."""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("mafrt", "envs", "runners", "scripts", "bench")

FORBIDDEN_CALLS = {
    **dict.fromkeys(("eval", "exec", "compile", "__import__"), "runs code"),
    **{f"{m}.{f}": "unpickles" for m in ("pickle", "_pickle", "dill", "cloudpickle") for f in ("load", "loads")},
    **dict.fromkeys(("pickle.Unpickler", "marshal.load", "marshal.loads", "shelve.open", "joblib.load"), "unpickles"),
    **dict.fromkeys(("pandas.read_pickle", "torch.jit.load", "torch.package.PackageImporter"), "unpickles"),
    **dict.fromkeys(("os.system", "os.popen", "subprocess.getoutput", "subprocess.getstatusoutput"), "uses a shell"),
    "asyncio.create_subprocess_shell": "uses a shell",
    **{f"yaml.{f}": "is not yaml.safe_load" for f in ("load", "load_all", "full_load", "unsafe_load", "Loader")},
    **dict.fromkeys(("sympy.sympify", "sympy.S", "sympy.parse_expr"), "runs what a model wrote"),
    "sympy.parsing.sympy_parser.parse_expr": "runs what a model wrote",
    **dict.fromkeys(("math_verify.parse", "math_verify.verify"), "runs what a model wrote"),
    "tempfile.mktemp": "races with others",
}
FORBIDDEN_VALUES = {"shell": True, "weights_only": False, "allow_pickle": True, "trust_remote_code": True}

# A process of their own, which holds nothing and is thrown away.
SEPARATE_PROCESSES = {
    "envs/math/_worker.py": {"runs what a model wrote", "hides an error"},
    "mafrt/sandbox/inside/snippet.py": {"runs code"},
}
# These go to the sandbox as text.
SEPARATE_PROCESSES |= {f"envs/code/inside/{name}.py": {"runs code"} for name in ("asserts", "calls", "stdin")}
SEPARATE_PROCESSES |= {f"envs/dsbench/inside/{name}.py": {"unpickles"} for name in ("lab", "reading")}
PRINTING = ("scripts/", "bench/")


def violations(source: str, name: str = "mafrt/x.py") -> list[str]:
    """Each broken rule as `line: what`."""
    tree = ast.parse(source)
    allowed = SEPARATE_PROCESSES.get(name, set())
    found = [f"{line}: {what}" for line, what in _violations(tree, name) if what.split(" ", 1)[1] not in allowed]
    return sorted(found)


def _violations(tree: ast.Module, name: str) -> Iterator[tuple[int, str]]:
    aliases = _aliases(tree)
    for node in ast.walk(tree):
        if isinstance(node, (ast.Name, ast.Attribute)):
            called = _dotted(node, aliases)
            # Names too, not only calls: `functools.partial(pickle.loads)` is no better.
            if called in FORBIDDEN_CALLS:
                yield node.lineno, f"{called} {FORBIDDEN_CALLS[called]}"
        if isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                called = f"{node.module}.{alias.name}"
                if called in FORBIDDEN_CALLS:
                    yield node.lineno, f"{called} {FORBIDDEN_CALLS[called]}"
        if isinstance(node, ast.Call):
            yield from _call(node, aliases, name)
        if isinstance(node, ast.ExceptHandler):
            yield from _handler(node)
        if isinstance(node, ast.Constant) and node.value == "0.0.0.0":
            yield node.lineno, "0.0.0.0 listens to everybody"


def _call(node: ast.Call, aliases: dict[str, str], name: str) -> Iterator[tuple[int, str]]:
    called = _dotted(node.func, aliases)
    keywords = {keyword.arg: keyword.value for keyword in node.keywords if keyword.arg}
    for key, bad in FORBIDDEN_VALUES.items():
        value = keywords.get(key)
        if isinstance(value, ast.Constant) and bool(value.value) is bad:
            yield node.lineno, f"{key}={value.value} breaks a ground rule"
    if called == "torch.load" and "weights_only" not in keywords:
        yield node.lineno, "torch.load without weights_only=True"
    if called == "contextlib.suppress" and any(_is_wide(argument) for argument in node.args):
        yield node.lineno, "suppress(Exception) hides an error"
    if called == "print" and not name.startswith(PRINTING):
        yield node.lineno, "print belongs to scripts; use logging"


def _handler(node: ast.ExceptHandler) -> Iterator[tuple[int, str]]:
    if node.type is None:
        yield node.lineno, "except: without a type"
    silent = all(
        isinstance(step, (ast.Pass, ast.Continue))
        or (isinstance(step, ast.Expr) and isinstance(step.value, ast.Constant))
        for step in node.body
    )
    if node.type is not None and _is_wide(node.type) and silent:
        yield node.lineno, "except Exception: pass hides an error"


def _is_wide(caught: ast.expr) -> bool:
    return any(isinstance(n, ast.Name) and n.id in ("Exception", "BaseException") for n in ast.walk(caught))


def _aliases(tree: ast.Module) -> dict[str, str]:
    """Local name -> what it was imported as, anywhere in the file."""
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                found[alias.asname or alias.name.split(".")[0]] = (
                    alias.name if alias.asname else alias.name.split(".")[0]
                )
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                found[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    return found


def _dotted(node: ast.expr, aliases: dict[str, str]) -> str:
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name):
        return ""
    return ".".join([aliases.get(node.id, node.id), *reversed(parts)])


def sources() -> list[Path]:
    return sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))


@pytest.mark.slow
def test_ground_rules():
    names = {path.relative_to(ROOT).as_posix(): path for path in sources()}
    found = {name: violations(path.read_text(encoding="utf-8"), name) for name, path in names.items()}
    assert {name: lines for name, lines in found.items() if lines} == {}


@pytest.mark.parametrize(
    "source",
    [
        "eval('1')",
        "exec(text)",
        "x = [compile]",
        "import pickle\npickle.loads(b)",
        "import pickle as p\np.Unpickler(f).load()",
        "from pickle import loads as innocent",
        "def f():\n    from dill import load",
        "import functools, pickle\nfunctools.partial(pickle.load)",
        "import subprocess\nsubprocess.run('ls', shell=True)",
        "run(shell=1)",
        "import os\nos.system('ls')",
        "from os import popen",
        "import torch\ntorch.load(path)",
        "import torch as t\nt.load(path, weights_only=False)",
        "from torch import load\nload(path)",
        "import numpy as np\nnp.load(path, allow_pickle=True)",
        "import yaml\nyaml.load(text, Loader=yaml.SafeLoader)",
        "from yaml import unsafe_load",
        "from math_verify import parse",
        "import sympy\nsympy.sympify(answer)",
        "from sympy.parsing.sympy_parser import parse_expr",
        "AutoModel.from_pretrained(name, trust_remote_code=True)",
        "try:\n    f()\nexcept Exception:\n    pass",
        "try:\n    f()\nexcept (ValueError, BaseException) as e:\n    ...",
        "for x in y:\n    try:\n        f()\n    except Exception:\n        continue",
        "try:\n    f()\nexcept:\n    raise",
        "import contextlib\nwith contextlib.suppress(KeyError, Exception):\n    f()",
        "print('hello')",
        "serve(host='0.0.0.0')",
    ],
)
def test_the_lint_finds(source):
    assert len(violations(source)) >= 1


@pytest.mark.parametrize(
    "source",
    [
        "model.eval()",
        "import re\nre.compile('x')",
        "import torch\ntorch.load(path, weights_only=True)",
        "import torch\ntorch.load(path, weights_only=only)",
        "import yaml\nyaml.safe_load(text)",
        "import pickle\ntry:\n    f()\nexcept pickle.UnpicklingError:\n    raise",
        "import subprocess\nsubprocess.run(['ls'], shell=False)",
        "def load(model, trust_remote_code=False):\n    f(model, trust_remote_code=trust_remote_code)",
        "try:\n    f()\nexcept KeyError:\n    pass",
        "try:\n    f()\nexcept Exception as error:\n    log.warning('%s', error)",
        "log.info('print(x)')",
        "from contextlib import suppress\nwith suppress(KeyError):\n    f()",
    ],
)
def test_the_lint_lets_pass(source):
    assert violations(source) == []


def test_printing_is_for_scripts():
    assert violations("print(1)", "scripts/train.py") == violations("print(1)", "bench/update.py") == []


# Written in pieces, or this file would break its own rule.
MACHINE_PATH = re.compile(
    r"(?<![\w.~$}/-])/(?:" + "|".join(["ho" + "me", "ro" + "ot", "Us" + "ers", "wo" + "rk", "mn" + "t"]) + r")/\w"
    "|" + r"\b[A-Z]:\\" + "Users"
)


def test_a_program_starts_at_the_end_of_its_file():
    """What stands below the start does not exist yet when the file is run by itself."""
    programs = 0
    for path in sources():
        _, start, below = path.read_text(encoding="utf-8").partition("\nif __name__ ==")
        programs += bool(start)
        assert not re.search(r"^\S", below.partition("\n")[2], re.MULTILINE), path
    assert programs > 20


def test_no_tracked_file_knows_a_machine():
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], cwd=ROOT, capture_output=True
    )
    if listed.returncode:
        pytest.skip("not a git checkout")
    found = []
    for name in filter(None, listed.stdout.decode().split("\0")):
        path = ROOT / name
        if not path.is_file() or path.is_symlink():
            continue
        content = path.read_bytes()
        if b"\0" in content[:8192]:
            continue
        lines = enumerate(content.decode("utf-8", "replace").splitlines(), 1)
        found += [f"{name}:{number}: {line.strip()[:80]}" for number, line in lines if MACHINE_PATH.search(line)]
    assert found == []


def test_the_search_for_machine_paths_finds_them():
    for text in ("/ho" + "me/me/x", "'/ro" + "ot/x'", "in /wo" + "rk/main", "C:\\" + "Users\\me"):
        assert MACHINE_PATH.search(text)
    for text in ("frame" + "work/main", "https://x.org/ho" + "me/a", "~/ho" + "me/x", "a/ro" + "ot/b", "/ho" + "me"):
        assert not MACHINE_PATH.search(text)
