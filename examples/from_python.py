"""A loop of one's own from the parts: `Player` plays, `assign` gives credit, `Learner` updates the adapters.

python examples/from_python.py 20      # iterations
"""

import sys

import mafrt


def main(iterations=20, tasks=16, samples=4):
    env = mafrt.make_env("math")
    team = env.unwrapped.team
    base = mafrt.SharedBase.load("teaching-base")
    for seed, name in enumerate(team.adapters):
        base.add_adapter(name, mafrt.LoraSpec(), seed=seed)
    sampling = dict.fromkeys(team.names, mafrt.SamplingParams(max_new_tokens=48))
    player = mafrt.Player(mafrt.LocalEngine(base), base.tokenizer, team, sampling, base.context_window)
    rule = mafrt.make_algorithm("grpo")
    learner = mafrt.Learner(base, team, mafrt.LearnConfig(lr=3e-3, ppo_epoch=1), mafrt.Objective(rule), seed=0)
    envs = [env.spawn() for _ in range(tasks * samples)]
    for iteration in range(iterations):
        starts = iter(
            mafrt.Start(f"{iteration}-{task}-{sample}", f"{iteration}-{task}", reset_seed=0, seed=100 * number + sample,
                  task=number % env.num_tasks)
            for task in range(tasks) for number in [iteration * tasks + task] for sample in range(samples)
        )  # fmt: skip
        episodes, _ = player.play(envs, lambda slot, finished, starts=starts: next(starts, None))
        credit = mafrt.assign(episodes, rule)  # fills the advantages of every turn
        turns = [turn for episode in episodes for turn in episode.turns]
        update = learner.update(turns, team.names, iteration)
        score = sum(episode.outcome for episode in episodes) / len(episodes)
        print(f"{iteration}: score {score:.3f}, reward of the actor {credit['reward/actor']:.3f}, "
              f"gradient norm {update['grad_norm/actor']:.3f}")  # fmt: skip
    base.save_adapter("actor", "actor_adapter")  # a PEFT folder


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
