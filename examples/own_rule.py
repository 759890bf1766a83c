"""A learning rule of one's own: every token gets its turn's reward less the mean of the batch.

    python examples/own_rule.py 20      # iterations

On the command line: mafrt train_math --algorithm examples/own_rule.py:Centred --scale 2
"""

import sys
from dataclasses import dataclass

import mafrt
from mafrt.algorithms import Algorithm


@dataclass(frozen=True)
class Centred(Algorithm):
    """REINFORCE with the batch mean as its baseline."""

    scale: float = 1.0
    """advantage per unit of reward"""

    def credit(self, trajectories, context):
        rows = [row for trajectory in trajectories for row in trajectory if row.dropped is None]
        mean = sum(row.reward for row in rows) / max(len(rows), 1)
        for row in rows:
            values = [self.scale * (row.reward - mean)] * len(row.turn.action_ids)
            row.fill(advantages=values, returns=values)
        return {"baseline": mean}


def main(iterations=20, episodes=64):
    env = mafrt.make_env("math")
    config = mafrt.TrainConfig.of(
        algorithm=Centred(), iterations=iterations, n_rollout_threads=episodes, max_new_tokens=48, lr=3e-3, ppo_epoch=1,
        coach="rules", eval_episodes=16,
    )  # fmt: skip
    summary = mafrt.runners.OnPolicy(env, env.team, mafrt.SharedBase.load("teaching-base"), config).run()
    print("before:", summary.before)
    print("after:", summary.after)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
