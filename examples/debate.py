"""A debate of three agents over two rounds: all see the others' latest answers, and the majority counts.

    python examples/debate.py 10      # iterations

On the command line: mafrt train_math --workflow debate --horizon 2 --profile_path profiles/math_trio.json
"""

import sys

import mafrt


def main(iterations=10, episodes=64):
    names = ("ann", "bob", "cleo")
    team = mafrt.Team(tuple(mafrt.AgentSpec(name, prompt=f"You are {name}.", with_answer=True) for name in names))
    env = mafrt.make_env("math", workflow="debate", horizon=2, team=team)
    config = mafrt.TrainConfig.of(
        iterations=iterations, n_rollout_threads=episodes, max_new_tokens=48, lr=3e-3, ppo_epoch=1, eval_episodes=16
    )
    summary = mafrt.runners.OnPolicy(env, team, mafrt.SharedBase.load("teaching-base"), config).run()
    print("before:", summary.before)  # with the measures of a debate: agreement, tie, kept
    print("after:", summary.after)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
