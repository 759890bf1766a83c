"""CrewAI: an agent with a tool, a task and a crew; it finds its address in the environment."""

import os

os.environ["CREWAI_DISABLE_TELEMETRY"] = os.environ["OTEL_SDK_DISABLED"] = "true"

from crewai import LLM, Agent, Crew, Task
from crewai.tools import tool


@tool("add")
def add(a: int, b: int) -> int:
    """Adds."""
    return a + b


if __name__ == "__main__":
    llm = LLM(model="solver", provider="openai")
    agent = Agent(role="Adder", goal="Add", backstory="You add.", llm=llm, tools=[add], verbose=False)
    task = Task(description="2+3", expected_output="A number", agent=agent)
    answer = Crew(agents=[agent], tasks=[task], verbose=False).kickoff()
    print(float("five" in answer.raw))
