"""Speakers chosen by the agents' own words: a router in YAML, without code.

    python examples/router.py 10      # iterations

On the command line: mafrt train_math --workflow router --routes examples/router.yaml --profile_path team.json
"""

import sys
from pathlib import Path

import mafrt

ROUTES = Path(__file__).with_name("router.yaml")
TEAM = mafrt.Team(
    (
        mafrt.AgentSpec("solver", prompt="You are the Solver. Solve it and box the answer.", with_answer=True),
        mafrt.AgentSpec("verifier", prompt='You are the Verifier. Say "verdict: approve" if the answer is right.'),
    )
)


def main(iterations=10, episodes=64):
    env = mafrt.make_env("math", workflow="router", routes=str(ROUTES), team=TEAM)
    config = mafrt.TrainConfig.of(
        iterations=iterations, n_rollout_threads=episodes, max_new_tokens=48, lr=3e-3, ppo_epoch=1, eval_episodes=16
    )
    summary = mafrt.runners.OnPolicy(env, TEAM, mafrt.SharedBase.load("teaching-base"), config).run()
    print("before:", summary.before)
    print("after:", summary.after)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
