"""Make the frozen tables of tests/parity: inputs, and what the authors' own code gives for them.

    python -m bench.reproduce.parity_tables VERL_CHECKOUT COMMIT

The code is run as it is in the checkout; modules that its file imports and the tabled functions do not use are
replaced by empty ones. The table is small JSON: numbers in, numbers out, with source and commit.
"""

from __future__ import annotations

import importlib.util
import json
import random
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

TABLE = Path(__file__).parents[2] / "tests" / "parity" / "verl_core_algos.json"
UNUSED = ("omegaconf", "verl", "verl.utils", "verl.trainer", "verl.trainer.config", "verl.workers", "tensordict")
UNUSED_TOO = ("verl.workers.config", "verl.utils.import_utils", "verl.utils.device", "verl.utils.torch_dtypes")
MODES = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean")


class Empty(ModuleType):
    """A module that has every name."""

    __path__: list[str] = []  # noqa: RUF012

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _decorator if name == "deprecated" else Any


def _decorator(*_: Any, **__: Any) -> Callable[[Any], Any]:
    return lambda function: function


def load(checkout: Path, name: str, file: str) -> Any:
    """A module of the checkout, from its file alone."""
    spec = importlib.util.spec_from_file_location(name, checkout / file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def cases() -> list[dict[str, Any]]:
    """Batches of sequences: group, length, outcome at the last token, and values."""
    tables = []
    for seed in range(4):
        chance = random.Random(seed)
        lengths = [chance.randint(1, 6) for _ in range(8)]
        tables.append(
            {
                "groups": [index // 4 for index in range(8)] if seed < 3 else [0, 0, 0, 1, 1, 1, 1, 2],
                "lengths": lengths,
                "scores": [round(chance.choice([0.0, 1.0, chance.uniform(-1, 1)]), 3) for _ in range(8)],
                "values": [[round(chance.uniform(-1, 1), 3) for _ in range(length)] for length in lengths],
            }
        )
    return tables


def outputs(core: Any, case: dict[str, Any]) -> dict[str, Any]:
    """What every tabled function gives, per sequence and token."""
    import numpy as np
    import torch

    lengths, width = case["lengths"], max(case["lengths"])
    mask = torch.tensor([[float(t < n) for t in range(width)] for n in lengths], dtype=torch.float64)
    rewards, values = torch.zeros_like(mask), torch.zeros_like(mask)
    for row, length in enumerate(lengths):
        rewards[row, length - 1] = case["scores"][row]
        values[row, :length] = torch.tensor(case["values"][row], dtype=torch.float64)
    index = np.array(case["groups"])

    def rows(matrix: Any) -> list[list[float]]:
        return [matrix[row, :length].tolist() for row, length in enumerate(lengths)]

    config = SimpleNamespace(gamma=1.0)
    gae, returns = core.compute_gae_advantage_return(rewards.clone(), values, mask, 1.0, 0.95)
    scaled, _ = core.compute_grpo_outcome_advantage(rewards.clone(), mask, index)
    centred, _ = core.compute_grpo_outcome_advantage(rewards.clone(), mask, index, norm_adv_by_std_in_grpo=False)
    rloo, _ = core.compute_rloo_outcome_advantage(rewards.clone(), mask, index)
    plus, _ = core.compute_reinforce_plus_plus_outcome_advantage(rewards.clone(), mask, config=config)
    return {
        "grpo": rows(scaled),
        "dr_grpo": rows(centred),
        "rloo": rows(rloo),
        "reinforce_pp": rows(plus),
        "gae": rows(gae),
        "gae_returns": rows(returns),
        "aggregated": {mode: float(core.agg_loss(-centred, mask, mode)) for mode in MODES},
    }


def main(argv: list[str] | None = None) -> int:
    checkout, commit = (sys.argv[1:] if argv is None else argv)[:2]
    for name in (*UNUSED, *UNUSED_TOO):
        sys.modules.setdefault(name, Empty(name))
    functional = load(Path(checkout), "verl.utils.torch_functional", "verl/utils/torch_functional.py")
    sys.modules["verl.utils"].torch_functional = functional  # type: ignore[attr-defined]
    sys.modules["verl"].utils = sys.modules["verl.utils"]  # type: ignore[attr-defined]
    core = load(Path(checkout), "verl.trainer.ppo.core_algos", "verl/trainer/ppo/core_algos.py")
    source = {"repository": "volcengine/verl", "file": "verl/trainer/ppo/core_algos.py", "commit": commit}
    rows = [{"input": case, "output": outputs(core, case)} for case in cases()]
    TABLE.parent.mkdir(exist_ok=True)
    TABLE.write_text(json.dumps({"source": source, "cases": rows}, indent=1) + "\n", encoding="utf-8")
    print(f"{len(rows)} cases in {TABLE}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
