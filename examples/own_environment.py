"""An environment of one's own, trained from Python: two agents, turn by turn, paid for the last answer.

    python examples/own_environment.py 20      # iterations

A run of 20 iterations with 128 episodes each takes a minute or two on two CPU cores.
"""

import sys

import mafrt


class Sum(mafrt.Env):
    """The planner sees two numbers and advises the solver, which adds them."""

    agents = ("planner", "solver")

    def reset(self, seed=None, options=None):
        self.a, self.b = self.rng.randint(1, 9), self.rng.randint(1, 9)
        self.problem = f"Problem: Tom has {self.a} pens and gets {self.b} more. How many pens does he have?"
        return {"planner": self.problem}, {"problem": self.problem}

    def step(self, actions):
        if "planner" in actions:
            return mafrt.StepResult(
                {"solver": f"{self.problem}\n\nplanner: {actions['planner']}"}, {}, False, False, {}
            )
        total = str(self.a + self.b)
        outcome = 0.5 * (total in actions["solver"]) + 0.5 * (f"\\boxed{{{total}}}" in actions["solver"])
        return mafrt.StepResult({}, {}, True, False, {"outcome": outcome})


def main(iterations=20, episodes=128):
    env = Sum()
    config = mafrt.TrainConfig.of(
        iterations=iterations,
        n_rollout_threads=episodes,
        max_new_tokens=48,
        lr=3e-3,
        ppo_epoch=1,
        eval_episodes=16,
        eval_samples=2,
    )
    base = mafrt.SharedBase.load("teaching-base")
    summary = mafrt.runners.OnPolicy(env, mafrt.Team.of(env.agents), base, config).run()
    print("before:", summary.before)
    print("after:", summary.after)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
