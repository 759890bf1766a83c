"""The GPUs of this machine, and whether this torch can use them."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import warnings
from pathlib import Path
from typing import Any

from mafrt.core.errors import ConfigError
from mafrt.core.text import shortened

_DEVICE = re.compile(r"(?:cpu|meta|cuda)(?::[0-9]{1,3})?")
DRIVER = Path("/proc/driver/nvidia/gpus")
"""a folder for each GPU that the driver of NVIDIA knows"""


def check_device_name(device: str) -> None:
    """Raise ConfigError for a device of a kind on which nothing here has ever been computed. Imports nothing."""
    if _DEVICE.fullmatch(device) is None:
        if device.startswith("cuda:"):
            raise ConfigError(f"device {shortened(device)!r} cannot be used here: give a GPU by its number, as cuda:0.")
        raise ConfigError(
            f"device {shortened(device)!r} cannot be used here: mafrt computes on CPUs and on GPUs with CUDA or ROCm, "
            f"and was never run on {shortened(device.partition(':')[0])}; give cpu, which also a Mac has, or cuda:0"
        )


def gpu_there() -> str | None:
    """The first NVIDIA GPU of this machine by its driver, whatever torch says; None: there is none, or it is hidden."""
    # A user who hides the GPUs wants no advice on them.
    if os.environ.get("CUDA_VISIBLE_DEVICES", "0").strip() in ("", "-1", "NoDevFiles"):
        return None
    if shutil.which("nvidia-smi"):
        command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
        except (OSError, subprocess.TimeoutExpired):
            done = None
        if done is not None and done.returncode == 0 and (names := done.stdout.split("\n"))[0].strip():
            return names[0].strip()
    return "an NVIDIA GPU" if DRIVER.is_dir() and any(DRIVER.iterdir()) else None


def unusable_gpu(device: str | None = None) -> str | None:
    """One sentence, with the remedy, if there is a GPU that this torch cannot compute on; else None.

    Of several that it can see, `device` says which is meant; default: the current one.
    """
    import torch

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own words are told below
        usable = torch.cuda.is_available()
    version: str = torch.__version__
    if usable:
        return _foreign_kind(torch, device)
    name = gpu_there()
    if name is None:
        return None
    if torch.version.cuda is None:
        return (
            f"This machine has a GPU ({name}) that this torch ({version}) cannot use, since it is built for CPUs; "
            "install the CUDA build: bash scripts/install.sh, or pip install --upgrade --force-reinstall "
            f"torch=={version.split('+')[0]} --index-url https://download.pytorch.org/whl/cu130"
        )
    return (
        f"This machine has a GPU ({name}) that this torch ({version}) cannot use ({_why_not(torch)}); update the "
        f"driver to one for CUDA {torch.version.cuda} or newer, or install a build of torch for the driver that is "
        "there (nvidia-smi names its CUDA version)"
    )


def _why_not(torch: Any) -> str:
    """The reason in torch's own words."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        return lines[0].split(". Please", 1)[0].rstrip(".")[:200]
    return "its driver answers no program"


def _foreign_kind(torch: Any, device: str | None) -> str | None:
    """The sentence for a GPU whose instructions this build does not hold."""
    kinds = [kind for kind in torch.cuda.get_arch_list() if kind.startswith(("sm_", "compute_"))]
    major, minor = torch.cuda.get_device_capability(device)
    if not kinds or any(_runs(kind, major, minor) for kind in kinds):
        return None
    return (
        f"The GPU {torch.cuda.get_device_name(device)} (sm_{major}{minor}) cannot be used by this torch "
        f"({torch.__version__}), which is built for {', '.join(kinds)}; install a build of torch for it, or give "
        "--device cpu"
    )


def _runs(kind: str, major: int, minor: int) -> bool:
    """Whether code for `kind` runs on a GPU of this capability: machine code within a generation, PTX on later ones."""
    how, _, digits = kind.partition("_")
    digits = digits.rstrip("af")
    built_for = (int(digits[:-1]), int(digits[-1]))
    return built_for <= (major, minor) and (how == "compute" or built_for[0] == major)
