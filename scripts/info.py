"""Print versions, devices and which extras are installed: what to add to a report of a problem."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

from mafrt.scripts._cli import Command, run_main

from mafrt.version import __version__

CORE = (
    *("torch", "transformers", "tokenizers", "peft", "accelerate", "safetensors"),
    *("tensorboard", "PyYAML", "math-verify", "pyarrow", "tqdm", "numpy"),
)
EXTRAS = {
    "vllm": ("vllm",),
    "deepspeed": ("deepspeed",),
    "quant": ("bitsandbytes",),
    "coach": ("openai", "anthropic", "google-genai"),
    "datasets": ("datasets",),
    "dev": ("pytest", "hypothesis", "ruff", "mypy"),
}

COMMAND = Command("info", "Print versions, devices and which extras are installed.", ())


def version(package: str) -> str:
    """The installed version, or `-`."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "-"


def info(argv: Sequence[str]) -> int:
    COMMAND.read(argv)
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
    width = max(len(name) for name, _ in rows)
    print("\n".join(f"{name.ljust(width)}  {value}" for name, value in rows))
    return 0


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
