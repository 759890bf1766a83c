"""Judging room: trusted code inspects model-made files (tables, results, pickles) inside the sandbox.

The sandbox bounds time, memory and size, so no file can block the trainer; the answer is a small JSON object. One
execution runs either model code or the judging code, never both, so the answer cannot be forged.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import py_compile
import tempfile
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from mafrt.core.errors import EnvError, SandboxError
from mafrt.sandbox.types import Sandbox

log = logging.getLogger(__name__)

ANSWER = ".answer.json"
OURS = "judge"
"""Folder of our modules in the room."""
MOST_GIVEN_MIB = 192
MOST_ANSWER_KIB = 4096

_RUN = """
import json, sys
sys.dont_write_bytecode = True
sys.path.insert(0, "{ours}")
import {module} as judging
answer = json.dumps(judging.{function}(*{arguments!r}))
open("{answer}", "w").write(answer)
"""


class Undecided(Exception):
    """Judging exceeded time, memory or size, which counts against the judged file. The text is a clause."""


def judge(
    sandbox: Sandbox,
    ours: Mapping[str, bytes],
    call: tuple[str, str, Sequence[Any]],
    given: Mapping[str, bytes],
    *,
    timeout_s: float = 60.0,
    memory_mib: int = 2048,
    most_kib: int = 64,
) -> dict[str, Any]:
    """The answer of one of our functions to files that a model made.

    Args:
        ours: modules by file name, see `sources`.
        call: module, function, and arguments that `repr` can write.
        given: the files, which lie in the folder in which it runs.
        most_kib: size of the answer as JSON.

    Raises:
        Undecided: a limit was reached; nothing is known but that.
        EnvError: the sandbox, or our own code, failed.
    """
    if sum(map(len, given.values())) > MOST_GIVEN_MIB * 2**20:
        raise Undecided(f"it has more than {MOST_GIVEN_MIB} MiB")
    module, function, arguments = call
    code = _RUN.format(ours=OURS, module=module, function=function, arguments=tuple(arguments), answer=ANSWER)
    files = {**given, **{f"{OURS}/{name}": text for name, text in ours.items()}}
    try:
        done = sandbox.execute(code, files, (ANSWER,), timeout_s, memory_mib)
    except SandboxError as error:
        raise EnvError(f"the sandbox failed, so nothing is known about a program's files: {error}") from error
    # These the file can bring about itself, so that they are held against it; any other failure is ours.
    if done.status in ("timeout", "memory", "killed"):
        reason = {"timeout": f"took more than {timeout_s:g} s", "memory": f"took more than {memory_mib} MiB of memory"}
        if done.status == "killed":
            raise Undecided("killed: the program that reads it was ended")
        raise Undecided(f"reading it {reason[done.status]}")
    # The answer comes as a file and not on stdout, where libraries print warnings.
    data = done.files.get(ANSWER, b"")
    if done.status != "ok" or not data:
        why = (done.stderr.strip().splitlines() or [done.status])[-1][:300]
        # The reader may notice the limit itself before the kernel does.
        if why.startswith("MemoryError"):
            raise Undecided(f"reading it took more than {memory_mib} MiB of memory")
        # With nothing to read, our modules are imported or they are not: the rest is the work of what was read.
        if not _importable(sandbox, ours, module):
            raise EnvError(f"{module}.{function} failed in the judging room: {why}")
        log.warning("%s.%s could not read what a program left behind: %s", module, function, why)
        raise Undecided(f"reading it failed ({why[:120]})")
    if len(data) > min(most_kib, MOST_ANSWER_KIB) * 1024:
        raise Undecided("its description is too long")
    answer = json.loads(data)
    if not isinstance(answer, dict):
        raise EnvError(f"{module}.{function} gave a {type(answer).__name__} in the judging room, expected an object")
    return answer


def _importable(sandbox: Sandbox, ours: Mapping[str, bytes], module: str) -> bool:
    """Whether the room is sound: our module can be imported in it."""
    code = f"import sys\nsys.path.insert(0, {OURS!r})\nimport {module}\n"
    try:
        done = sandbox.execute(code, {f"{OURS}/{name}": text for name, text in ours.items()}, (), 60.0, 2048)
    except SandboxError as error:
        raise EnvError(f"the sandbox failed, so nothing is known about a program's files: {error}") from error
    return done.status == "ok"


@cache
def sources(*names: str) -> dict[str, bytes]:
    """File name -> text of these modules of ours, with packages around them that are empty, and their bytecode."""
    files: dict[str, bytes] = {}
    for name in names:
        spec = importlib.util.find_spec(name)
        if spec is None or spec.origin is None:
            raise EnvError(f"there is no module {name} to judge with")
        parts = name.split(".")
        for depth in range(1, len(parts)):
            files.setdefault("/".join([*parts[:depth], "__init__.py"]), b"")
        files["/".join(parts) + ".py"] = Path(spec.origin).read_bytes()
    return files | bytecode(files)


def bytecode(files: Mapping[str, bytes]) -> dict[str, bytes]:
    """File name -> compiled form of these modules, so that a judgement need not compile them: half of its time.

    Marked as unchecked (PEP 552): the sandbox's clock and file times play no part. Another version of Python looks for
    another name, and compiles the text.
    """
    compiled: dict[str, bytes] = {}
    with tempfile.TemporaryDirectory() as folder:
        text, code = Path(folder, "text.py"), Path(folder, "code.pyc")
        for name, content in files.items():
            text.write_bytes(content)
            mode = py_compile.PycInvalidationMode.UNCHECKED_HASH
            py_compile.compile(str(text), str(code), name, doraise=True, invalidation_mode=mode)
            compiled[importlib.util.cache_from_source(name)] = code.read_bytes()
    return compiled
