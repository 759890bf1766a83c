"""A coach of one's own: it scores each turn from 0 to 10, here for a short answer in a box.

    python examples/own_coach.py 20      # iterations

On the command line: mafrt train_math --coach examples/own_coach.py:Boxed
"""

import sys

import mafrt


class Boxed(mafrt.Coach):
    """Ten points for a boxed answer, less one for every eight words."""

    def judge(self, cases):
        return [self.verdict(case) for case in cases]

    @staticmethod
    def verdict(case):
        if not case.said.strip():
            return mafrt.Unscored("silence")  # a failed judgement is never a number
        boxed = "\\boxed{" in case.said
        return mafrt.Scored(max(0.0, 10.0 * boxed - len(case.said.split()) / 8), "boxed" if boxed else "no box")


def main(iterations=20, episodes=64):
    env = mafrt.make_env("math")
    config = mafrt.TrainConfig.of(
        iterations=iterations, n_rollout_threads=episodes, max_new_tokens=48, lr=3e-3, ppo_epoch=1, eval_episodes=16
    )
    base = mafrt.SharedBase.load("teaching-base")
    summary = mafrt.runners.OnPolicy(env, env.team, base, config, coach=Boxed()).run()
    print("before:", summary.before)
    print("after:", summary.after)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
