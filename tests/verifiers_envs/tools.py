"""A solver with a tool of its own (an MCP server, started for each rollout), and a judge that reads its answer."""

import verifiers.v1 as vf


class Sums(vf.Toolset[vf.ToolsetConfig]):
    TOOL_PREFIX = "sums"

    @vf.tool
    def add(self, a: int, b: int) -> str:
        """Add two numbers."""
        return str(a + b)


class Config(vf.TaskConfig):
    tools: vf.ToolsetConfig = vf.ToolsetConfig()


class Data(vf.TaskData):
    answer: str


class Add(vf.Task[Data, vf.State, Config]):
    @classmethod
    def toolsets(cls, config: Config) -> list[vf.Toolset]:
        return [Sums(config.tools)]


class TasksetConfig(vf.TasksetConfig):
    task: Config = Config()


class Additions(vf.Taskset[Add, TasksetConfig]):
    def load(self) -> list[Add]:
        return [Add(Data(prompt=f"Add 2 and {i}.", answer=str(2 + i)), self.config.task) for i in range(3, 5)]


class JudgedConfig(vf.EnvConfig):
    solver: vf.AgentConfig = vf.AgentConfig()
    judge: vf.AgentConfig = vf.AgentConfig()


class Judged(vf.Env[JudgedConfig]):
    async def run(self, task: vf.Task, agents: vf.Agents) -> None:
        solved = await agents.solver.run(task)
        question = f"Is {solved.last_reply!r} right for {task.data.prompt!r}? Reply yes or no."
        judged = await agents.judge.run(vf.Task(vf.TaskData(prompt=question)))
        said = judged.last_reply == "yes"
        right = task.data.answer in solved.last_reply
        solved.record_reward("judged", float(said))
        judged.record_reward("agrees", float(said == right))


__all__ = ["Additions", "Judged"]

if __name__ == "__main__":
    Sums.run()
