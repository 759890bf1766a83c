"""Make the frozen tables of tests/parity from the code of the authors of multi-agent rules.

    python -m bench.reproduce.parity_authors harl CHECKOUT COMMIT          # also maporl, pettingllms, c3, ccpo

Each tabled function is taken out of its file in the checkout and run as it is; the objects around it are stand-ins that
hold the numbers of a case. A table is small JSON: numbers in, numbers out, with repository, file and commit.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import math
import random
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

FOLDER = Path(__file__).parents[2] / "tests" / "parity"
Case = dict[str, Any]


def functions(checkout: Path, file: str, *names: str, **known: Any) -> list[Any]:
    """Functions or methods of a file by name, imported as a module of their own; `known` are the globals they use."""
    tree = ast.parse((checkout / file).read_text(encoding="utf-8"))
    definitions = {
        node.name: node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name in names
    }
    text = "\n\n".join(["from __future__ import annotations", *(ast.unparse(definitions[name]) for name in names)])
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "taken_out.py"
        path.write_text(text + "\n", encoding="utf-8")
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        vars(module).update(known)
        spec.loader.exec_module(module)
    return [getattr(module, name) for name in names]


def harl(checkout: Path) -> tuple[str, str, list[Case]]:
    """HAPPO's loss with a factor, the factor of later agents, and the advantage that all agents share."""
    import numpy as np
    import torch

    runner, actor = "harl/runners/on_policy_ha_runner.py", "harl/algorithms/actors/happo.py"
    [train] = functions(checkout, runner, "train", np=np, torch=torch, _t2n=lambda value: value.detach().numpy())
    [update] = functions(
        checkout, actor, "update", torch=torch, nn=torch.nn, check=torch.as_tensor, get_grad_norm=lambda _: 0.0
    )
    cases = []
    for seed in range(4):
        chance, steps, agents = random.Random(seed), 3, 3
        old = [[round(chance.uniform(-2, -0.1), 3) for _ in range(steps)] for _ in range(agents)]
        new = [[round(value + chance.uniform(-0.2, 0.2), 3) for value in own] for own in old]
        values = [round(chance.uniform(-1, 1), 3) for _ in range(steps)]
        rewards = [round(chance.choice([0.0, 1.0, chance.uniform(-1, 1)]), 3) for _ in range(steps)]
        given = {"old": old, "new": new, "values": values, "rewards": rewards}
        cases.append({"input": given, "output": _harl_outputs(train, update, given)})
    return "PKU-MARL/HARL", f"{runner}, {actor}", cases


def _harl_outputs(train: Callable[..., Any], update: Callable[..., Any], given: Case) -> Case:
    import numpy as np
    import torch

    steps, factors, seen = len(given["values"]), [], []
    returns = [sum(given["rewards"][step:]) for step in range(steps)]

    def column(numbers: list[float]) -> Any:
        return np.array(numbers, dtype=np.float64).reshape(-1, 1, 1)

    def made_actor(agent: int) -> Any:
        answers = [given["old"][agent], given["new"][agent]]
        return SimpleNamespace(
            evaluate_actions=lambda *_: (torch.tensor(answers.pop(0), dtype=torch.float64)[:, None], None, None),
            train=lambda _buffer, advantages, _kind: seen.append(advantages.ravel().tolist()),
        )

    blank = np.zeros((steps + 1, 1, 1))
    buffers = [
        SimpleNamespace(
            update_factor=lambda factor: factors.append(np.asarray(factor, dtype=np.float64).ravel().tolist()),
            available_actions=None,
            obs=blank,
            rnn_states=blank,
            actions=blank[:-1],
            masks=blank,
            active_masks=blank,
        )
        for _ in given["old"]
    ]
    this = SimpleNamespace(
        algo_args={"train": {"episode_length": steps, "n_rollout_threads": 1}},
        value_normalizer=None,
        critic_buffer=SimpleNamespace(returns=column([*returns, 0.0]), value_preds=column([*given["values"], 0.0])),
        critic=SimpleNamespace(train=lambda *_: None),
        state_type="EP",
        fixed_order=True,
        num_agents=len(given["old"]),
        actor_buffer=buffers,
        actor=[made_actor(agent) for agent in range(len(given["old"]))],
        action_aggregation="prod",
    )
    train(this)
    losses = [_harl_loss(update, given, agent, factors[agent], seen[agent]) for agent in range(len(factors))]
    return {"factors": factors, "advantages": seen, "losses": losses}


def _harl_loss(update: Callable[..., Any], given: Case, agent: int, factor: list[float], adv: list[float]) -> float:
    import torch

    def column(numbers: list[float]) -> Any:
        return torch.tensor(numbers, dtype=torch.float64)[:, None]

    fresh = column(given["new"][agent]).requires_grad_()
    nothing = SimpleNamespace(zero_grad=lambda: None, step=lambda: None)
    this = SimpleNamespace(
        tpdv={"dtype": torch.float64},
        evaluate_actions=lambda *_: (fresh, torch.zeros(()), None),
        action_aggregation="prod",
        clip_param=0.2,
        use_policy_active_masks=False,
        entropy_coef=0.0,
        use_max_grad_norm=False,
        actor_optimizer=nothing,
        actor=SimpleNamespace(parameters=list),
    )
    old, ones = column(given["old"][agent]), torch.ones(len(adv), 1)
    loss, *_ = update(this, (None, None, None, None, ones, old, column(adv), None, column(factor)))
    return float(loss.detach())


def maporl(checkout: Path) -> tuple[str, str, list[Case]]:
    """The bonuses of a debate of three rounds: every agent in every round."""
    import torch

    file = "trl/trl/trainer/utils_multi_unified.py"
    [rule] = functions(checkout, file, "bonus_rule", torch=torch)
    cases = []
    for seed in range(36):
        chance, agents, alpha = random.Random(seed), 2 + seed % 2, [1.0, 10.0, 100.0, 1000.0]
        rounds = [[chance.choice([0.0, 0.2, 0.8, 1.0]) for _ in range(agents)] for _ in range(3)]
        table = {(t, a): torch.tensor([score]) for t, some in enumerate(rounds) for a, score in enumerate(some)}
        bonuses = [
            [float(rule(table, 3, agents, [-1], t, a, False, "cpu", alpha)[0]) for a in range(agents)] for t in range(3)
        ]
        cases.append({"input": {"rounds": rounds, "alpha": alpha}, "output": {"bonuses": bonuses}})
    return "chanwoo-park-official/MAPoRL", file, cases


def pettingllms(checkout: Path) -> tuple[str, str, list[Case]]:
    """The groups of AT-GRPO: which samples of a batch are compared."""
    file = "pettingllms/trainer/multi_agents_ppo_trainer.py"
    quiet: Any = lambda *_, **__: None  # noqa: E731
    [assign] = functions(checkout, file, "_assign_consistent_uids", print=quiet, colorful_print=quiet)
    cases = []
    for seed in range(4):
        import numpy as np

        chance, samples = random.Random(seed), 3
        rows = [
            [rollout, turn, agent]
            for rollout in range(2 * samples)
            for turn in range(chance.randint(1, 3))
            for agent in range(2)
        ]
        rewards = [round(chance.uniform(0, 1), 3) for _ in rows]
        columns = dict(zip(("env_idx", "turn_idx", "agent_idx"), map(np.array, zip(*rows, strict=True)), strict=True))

        class Data(SimpleNamespace):
            def __len__(self) -> int:
                return len(self.non_tensor_batch["env_idx"])

        made = assign(None, Data(non_tensor_batch={**columns, "reward": np.array(rewards)}), sample_num=samples)
        names = list(dict.fromkeys(made.non_tensor_batch["uid"].tolist()))
        groups = [names.index(uid) for uid in made.non_tensor_batch["uid"].tolist()]
        given = {"rows": rows, "samples": samples, "rewards": rewards}
        cases.append({"input": given, "output": {"groups": groups}})
    return "pettingllms-ai/PettingLLMs", file, cases


def c3(checkout: Path) -> tuple[str, str, list[Case]]:
    """Leave-one-out baselines of a turn's alternatives, and fidelity: a rank correlation."""
    import numpy as np
    import torch

    provider, analysis = "c3/credit/c3/provider.py", "c3/analysis/metrics.py"
    _, baseline = functions(checkout, provider, "_ensure_1d", "_baseline_loo", torch=torch)
    *_, fidelity = functions(
        checkout,
        analysis,
        "_safe_float",
        "_rankdata_average_ties",
        "_pearsonr",
        "credit_fidelity",
        np=np,
        math=math,
        Sequence=Sequence,
    )
    cases = []
    for seed in range(6):
        chance = random.Random(seed)
        returns = [round(chance.choice([0.0, 1.0, chance.uniform(0, 2)]), 3) for _ in range(2 + seed)]
        pairs = [[chance.choice([0.0, 0.5, 1.0]), round(chance.gauss(0, 1), 3)] for _ in range(8)]
        values = torch.tensor(returns, dtype=torch.float64)
        output = {"advantages": (values - baseline(values)).tolist(), "fidelity": fidelity(pairs)}
        cases.append({"input": {"returns": returns, "pairs": pairs}, "output": output})
    return "EIT-EAST-Lab/C3", f"{provider}, {analysis}", cases


def ccpo(checkout: Path) -> tuple[str, str, list[Case]]:
    """Rewards of the thinker, whose contribution is paid, for outcomes of -1 and 1; without events and group mean."""
    import torch

    file = "CCPO/examples/gspo_trainer/two_model/two_model_trainer.py"
    [rule] = functions(
        checkout, file, "_compute_counterfactual_role_rewards", torch=torch, THINKER="thinker", SOLVER="solver"
    )
    cases = []
    for seed in range(4):
        chance = random.Random(seed)
        joint, solo = ([chance.choice([-1.0, 1.0]) for _ in range(8)] for _ in range(2))
        this = SimpleNamespace(
            counterfactual_use_group_solo_baseline=False,
            counterfactual_use_event_bonus=False,
            counterfactual_lambda=0.2,
        )
        rewards, _ = rule(this, torch.tensor(joint), torch.tensor(solo))
        output = {"thinker": rewards["thinker"].double().tolist()}
        cases.append({"input": {"joint": joint, "solo": solo}, "output": output})
    return "bhai114/ccpo", file, cases


TABLES = {"harl": harl, "maporl": maporl, "pettingllms": pettingllms, "c3": c3, "ccpo": ccpo}


def main(argv: list[str] | None = None) -> int:
    name, checkout, commit = (sys.argv[1:] if argv is None else argv)[:3]
    repository, file, cases = TABLES[name](Path(checkout))
    source = {"repository": repository, "file": file, "commit": commit}
    path = FOLDER / f"{name}.json"
    path.write_text(json.dumps({"source": source, "cases": cases}) + "\n", encoding="utf-8")
    print(f"{len(cases)} cases in {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
