"""Settings of the code environment; flags and their help follow from them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class CodeSettings:
    """Problems."""

    dataset_path: str = "programs"
    """HumanEval-, MBPP- or APPS-style JSONL, or shipped data: functions, or programs, which suit the teaching base"""
    eval_dataset_path: str | None = None
    """held-out problems; default: the shipped ones, or the last tenth (at most 200) of your own"""
    coder_turns: int | None = None
    """coder_tester: turns of the Coder in a row while its program fails to compile or raises; default: 2"""
    reviews: int | None = None
    """coder_tester: times that the Tester, if the team has one, may send a program back; default: 1"""
    program_timeout: float = 10.0
    """seconds that a program and all its tests may take"""
    program_memory: int = 1024
    """MiB of memory that they may take"""
