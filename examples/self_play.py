"""Self-play: two players of a game share one adapter, and what one wins the other loses.

    python examples/self_play.py 20      # iterations

Players name a number in turn; the larger one wins. Numbers above nine, and words, lose.
"""

import re
import sys

import mafrt


class Larger(mafrt.Env):
    agents = ("first", "second")

    def reset(self, seed=None, options=None):
        self.said = []
        return {"first": f"Game {self.rng.randint(10, 99)}. Name a number from 1 to 9."}, {}

    def step(self, actions):
        [(name, text)] = actions.items()
        number = re.search(r"\d+", text)
        self.said.append(int(number[0]) if number and 1 <= int(number[0]) <= 9 else 0)
        if name == "first":
            return mafrt.StepResult({"second": "Name a number from 1 to 9."}, {}, False, False, {})
        first, second = self.said
        won = float((first > second) - (first < second))
        legal = (first > 0) + (second > 0)
        return mafrt.StepResult({}, {"first": won, "second": -won}, True, False, {"measures": {"legal": legal / 2}})


def main(iterations=20, episodes=64):
    # One adapter for both seats: it plays against itself.
    team = mafrt.Team(tuple(mafrt.AgentSpec(name, adapter="player") for name in Larger.agents))
    config = mafrt.TrainConfig.of(
        iterations=iterations, n_rollout_threads=episodes, max_new_tokens=8, lr=3e-3, ppo_epoch=1, eval_episodes=16
    )
    summary = mafrt.runners.OnPolicy(Larger(), team, mafrt.SharedBase.load("teaching-base"), config).run()
    print("before:", summary.before)  # the score is 0 by construction; `legal` shows what was learnt
    print("after:", summary.after)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
