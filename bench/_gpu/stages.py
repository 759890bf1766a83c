"""Stages that run one after another within a deadline, each with its result in the output file when it ends."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mafrt.core.atomic_files import save_json


@dataclass(frozen=True)
class GpuStage:
    """One part of the check."""

    name: str
    needs_s: float
    """Time without which it is not begun."""
    run: Callable[[], Any]
    """Returns a JSON-able result. An exception is the stage's failure, and the next stage goes on."""


def run_stages(stages: Sequence[GpuStage], minutes: float, output: Path | None) -> dict[str, Any]:
    """Results by stage: `{"state": "ok" | "failed" | "left out", "seconds": ..., "result" or "why": ...}`."""
    ends, results = time.monotonic() + 60 * minutes, dict[str, Any]()
    for stage in stages:
        left = ends - time.monotonic()
        if left < stage.needs_s:
            results[stage.name] = {"state": "left out", "why": f"{left:.0f} s left, it needs {stage.needs_s:.0f}"}
        else:
            results[stage.name] = _run(stage)
        print(f"{stage.name}: {results[stage.name]['state']}  {_brief(results[stage.name])}", flush=True)
        if output is not None:
            save_json(output, results)
    return results


def _run(stage: GpuStage) -> dict[str, Any]:
    started = time.monotonic()
    try:
        result = stage.run()
    except Exception as error:
        traceback.print_exc()
        return {"state": "failed", "seconds": _since(started), "why": f"{type(error).__name__}: {error}"[:500]}
    return {"state": "ok", "seconds": _since(started), "result": result}


def _since(started: float) -> float:
    return round(time.monotonic() - started, 1)


def _brief(entry: dict[str, Any]) -> str:
    return str(entry.get("why") or f"{entry['seconds']} s")
