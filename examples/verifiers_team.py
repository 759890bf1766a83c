"""A team of two as an environment of `verifiers`: a proposer plans, a solver solves, and both are paid for the answer.

    mafrt train --env verifiers:examples/verifiers_team.py --env_python vf/bin/python \\
        --algorithm dr_mas --n_rollout_threads 64 --n_samples 8 --iterations 15 --max_new_tokens 48 --lr 0.003
"""

import json
from pathlib import Path
from typing import Literal

import verifiers.v1 as vf

DATA = Path(__file__).parents[1] / "envs/math/data"


class Problem(vf.TaskData):
    answer: str


class Solve(vf.Task[Problem]):
    @vf.reward
    async def solved(self, trace: vf.Trace) -> float:
        return float(f"\\boxed{{{self.data.answer}}}" in trace.last_reply)


class Problems(vf.TasksetConfig):
    split: Literal["train", "test"] = "train"


class WordProblems(vf.Taskset[Solve, Problems]):
    def load(self):
        for line in (DATA / f"word_problems_{self.config.split}.jsonl").read_text().splitlines():
            row = json.loads(line)
            yield Solve(Problem(prompt=f"Problem: {row['problem']}", answer=row["answer"]), self.config.task)


class Team(vf.EnvConfig):
    proposer: vf.AgentConfig = vf.AgentConfig()
    solver: vf.AgentConfig = vf.AgentConfig()


class ProposeAndSolve(vf.Env[Team]):
    async def run(self, task, agents):
        plan = vf.TaskData(prompt=task.data.prompt, system_prompt="You are the Reasoner. Plan which steps to take.")
        proposed = await agents.proposer.run(vf.Task(plan))
        prompt = f"{task.data.prompt}\n\nreasoner: {proposed.last_reply}"
        role = "You are the Actor. Solve it and box the answer."
        solved = await agents.solver.run(task.with_data(prompt=prompt, system_prompt=role))
        proposed.record_reward("solved", solved.reward)


__all__ = ["ProposeAndSolve", "WordProblems"]
