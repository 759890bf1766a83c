"""One agent, one turn: word problems, in the form of the package's own `gsm8k` and `reverse_text`."""

import json
from pathlib import Path
from typing import Literal

import verifiers.v1 as vf

DATA = Path(__file__).parents[2] / "envs/math/data"
SYSTEM = "You are the Actor. Solve it and box the answer."


class Data(vf.TaskData):
    answer: str


class Solve(vf.Task[Data]):
    @vf.stop
    async def single_turn(self, trace: vf.Trace) -> bool:
        return trace.num_turns >= 1

    @vf.reward(weight=1.0)
    async def correct(self, trace: vf.Trace) -> float:
        return float(f"\\boxed{{{self.data.answer}}}" in trace.last_reply)

    @vf.metric
    async def boxed(self, trace: vf.Trace) -> float:
        return float("\\boxed{" in trace.last_reply)


class Config(vf.TasksetConfig):
    split: Literal["train", "test"] = "test"


class OneTurn(vf.Taskset[Solve, Config]):
    def load(self) -> list[Solve]:
        lines = (DATA / f"word_problems_{self.config.split}.jsonl").read_text().splitlines()
        rows = [json.loads(line) for line in lines]
        return [
            Solve(
                Data(prompt=f"Problem: {row['problem']}", system_prompt=SYSTEM, answer=row["answer"]), self.config.task
            )
            for row in rows
        ]


__all__ = ["OneTurn"]
