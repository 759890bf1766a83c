"""A proposer learns to make tasks that a solver succeeds at half of the time, while the solver learns them.

    python examples/propose_solve.py 20      # iterations

The teaching base has never seen the game, so both imitate first: legal tasks, and right answers to easy sums.
"""

import json
import random
import sys
import tempfile
from pathlib import Path

import mafrt
from mafrt.envs.games import ProposeSolve
from mafrt.scripts import train_sft


def records(count=300, seed=1):
    """Legal tasks of any difficulty for the proposer, and right answers for the solver."""
    game, chance = ProposeSolve(), random.Random(seed)
    for number in range(count):
        game.rng.seed(number)
        seen, _ = game.reset()
        task = game.move("random", "proposer", chance)
        yield {"agent": "proposer", "prompt": seen["proposer"], "response": task}
        asked = game.step({"proposer": task}).observations
        yield {"agent": "solver", "prompt": asked["solver"], "response": game.move("optimal", "solver", chance)}


def main(iterations=20, episodes=32, imitated=300):
    with tempfile.TemporaryDirectory() as folder:
        path, start = Path(folder) / "tasks.jsonl", Path(folder) / "start"
        path.write_text("\n".join(json.dumps(record) for record in records(imitated)) + "\n")
        imitate = f"--records_path {path} --run_dir {start} --lr 3e-3 --epochs 2 --batch_size 16 --threads 1"
        if train_sft.main(imitate.split()):
            raise SystemExit("imitation failed")
        base, team = mafrt.SharedBase.load("teaching-base"), mafrt.Team.of(ProposeSolve.agents)
        for name in team.adapters:
            base.load_adapter(name, start / "adapters" / name)
    config = mafrt.TrainConfig.of(
        algorithm="reinforce_pp", iterations=iterations, n_rollout_threads=episodes, max_new_tokens=10, lr=1e-3,
        ppo_epoch=1, eval_episodes=32, eval_samples=2,
    )  # fmt: skip
    summary = mafrt.runners.OnPolicy(
        ProposeSolve(), team, base, config, eval_env=ProposeSolve(split="validation")
    ).run()
    print("before:", summary.before)
    print("after:", summary.after)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
