"""A workflow of one's own on the shipped word problems: both agents answer in one step, and the majority counts.

python examples/own_workflow.py 10      # iterations
"""

import sys
from dataclasses import replace

import mafrt
from mafrt.envs.workflows.registry import WORKFLOWS, Workflow, transcript


class AllAtOnce(Workflow):
    """Every agent sees the problem only, and all answer at the same time."""

    max_steps = 1

    def observe(self, state):
        return {} if state.over else {name: transcript(state, self.names) for name in self.names}

    def transition(self, state, actions):
        return replace(state, said=tuple(actions.items()), position=len(self.names))


def main(iterations=10, episodes=64):
    WORKFLOWS["all_at_once"] = AllAtOnce
    team = mafrt.Team((mafrt.AgentSpec("left", with_answer=True), mafrt.AgentSpec("right", with_answer=True)))
    env = mafrt.make_env("math", workflow="all_at_once", team=team)
    config = mafrt.TrainConfig.of(
        iterations=iterations, n_rollout_threads=episodes, max_new_tokens=48, lr=3e-3, ppo_epoch=1, eval_episodes=16
    )
    summary = mafrt.runners.OnPolicy(env, team, mafrt.SharedBase.load("teaching-base"), config).run()
    print("before:", summary.before)
    print("after:", summary.after)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
