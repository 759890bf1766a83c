"""Evaluate a team and say how sure the numbers are: 95% intervals over tasks, and a paired comparison.

python examples/evaluate_with_intervals.py 100      # tasks
"""

import sys

import mafrt
from mafrt.envs.math import MathEnv
from mafrt.rollout.player import Player
from mafrt.runners.evaluation import EvaluationPlan, evaluate
from mafrt.runners.intervals import interval


def main(tasks=100, samples=2):
    env = MathEnv(split="test")
    team = env.team
    base = mafrt.SharedBase.load("teaching-base")
    for seed, name in enumerate(team.adapters):
        base.add_adapter(name, mafrt.LoraSpec(), seed=seed)
    found = {}
    for temperature in (1.0, 0.5):
        sampling = dict.fromkeys(team.names, mafrt.SamplingParams(max_new_tokens=48, temperature=temperature))
        player = Player(mafrt.LocalEngine(base), base.tokenizer, team, sampling, base.context_window)
        result = evaluate(env, player, EvaluationPlan(tasks, samples, greedy=False, seed=1))
        means = [sum(scores) / len(scores) for scores in result.scores.values()]
        low, high = interval(means)
        print(f"temperature {temperature}: {result.avg:.3f} ({low:.3f} to {high:.3f}), {len(means)} tasks")
        found[temperature] = dict(zip(result.scores, means, strict=True))
    both = found[1.0].keys() & found[0.5].keys()
    low, high = interval([found[0.5][task] - found[1.0][task] for task in both])
    print(f"difference, task by task: {low:+.3f} to {high:+.3f}")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
