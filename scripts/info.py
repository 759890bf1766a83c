"""Print versions, devices and which extras are installed: what to add to a report of a problem."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from mafrt.scripts._cli import Command, run_main
from mafrt.version import __version__

CORE = (
    *("torch", "transformers", "tokenizers", "peft", "accelerate", "safetensors"),
    *("tensorboard", "PyYAML", "math-verify", "pyarrow", "tqdm", "numpy"),
)
EXTRAS = {
    "vllm": ("vllm", "httpx"),
    "servers": ("httpx",),
    "deepspeed": ("deepspeed",),
    "quant": ("bitsandbytes",),
    "coach": ("openai", "anthropic", "google-genai"),
    "datasets": ("datasets",),
    "dev": ("pytest", "hypothesis", "ruff", "mypy"),
}


@dataclass(frozen=True)
class InfoSettings:
    """What is told."""

    algorithms: bool = False
    """list the learning rules that --algorithm takes"""
    environments: bool = False
    """list the built-in environments that --env takes"""


COMMAND = Command("info", "Print versions, devices and which extras are installed.", (InfoSettings,))


def version(package: str) -> str:
    """The installed version, or `-`."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "-"


def info(argv: Sequence[str]) -> int:
    settings = COMMAND.read(argv).make(InfoSettings)
    if settings.algorithms or settings.environments:
        print(algorithms() if settings.algorithms else environments())
        return 0
    rows = [("mafrt", f"{__version__} in {Path(__file__).resolve().parent.parent}")]
    rows += [("python", platform.python_version()), ("system", platform.platform()), ("cores", str(os.cpu_count()))]
    rows += [(name, version(name)) for name in CORE]
    rows.append(("accelerator", accelerator()))
    for extra, packages in EXTRAS.items():
        found = [f"{package} {version(package)}" for package in packages if version(package) != "-"]
        missing = [package for package in packages if version(package) == "-"]
        text = ", ".join(found)
        if missing:
            text += f"{'; ' if found else ''}not installed: {', '.join(missing)} (pip install -e '.[{extra}]')"
        rows.append((f"[{extra}]", text))
    print(columns(rows))
    return 0


def columns(rows: Sequence[tuple[str, str]]) -> str:
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name.ljust(width)}  {value}" for name, value in rows)


def algorithms() -> str:
    """Every learning rule, where it is from, and what it needs."""
    from mafrt.credit import ALGORITHMS

    rows = []
    for name, rule in ALGORITHMS.items():
        needs = ["--n_samples of 2 or more"] if rule.needs_groups else []
        needs += ["several agents"] if rule.needs_several_agents else []
        rows.append((name, f"{rule.summary} [{rule.paper}]" + (f"; needs {' and '.join(needs)}" if needs else "")))
    return columns(rows)


def environments() -> str:
    """The built-in environments."""
    from mafrt.registry import env_names

    return "\n".join(env_names())


def accelerator() -> str:
    """The GPUs that torch sees."""
    try:
        import torch
    except ImportError:
        return "unknown: torch is not installed"
    if not torch.cuda.is_available():
        return f"none; {torch.get_num_threads()} CPU threads"
    return ", ".join(torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count()))


def main(argv: Sequence[str] | None = None) -> int:
    return run_main(info, argv)


if __name__ == "__main__":
    sys.exit(main())
