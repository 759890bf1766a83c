"""One agent, up to two turns: the environment is the user, who asks once more after a wrong answer."""

import verifiers.v1 as vf
from one_turn import OneTurn


class SecondTryConfig(vf.EnvConfig):
    agent: vf.AgentConfig = vf.AgentConfig()


class SecondTry(vf.Env[SecondTryConfig]):
    async def run(self, task: vf.Task, agents: vf.Agents) -> None:
        async with agents.agent.interaction(Sequel(task.data, task.config)) as talk:
            segment = await talk.turn()
            if not segment.terminated and f"\\boxed{{{task.data.answer}}}" not in segment.last_reply:
                await talk.turn(f"That is wrong. {task.data.prompt}")


class Sequel(OneTurn.task_type()):
    @vf.stop
    async def single_turn(self, trace: vf.Trace) -> bool:
        return trace.num_turns >= 2


__all__ = ["OneTurn", "SecondTry"]
