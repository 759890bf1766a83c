"""smolagents: an agent that calls tools."""

import os

from smolagents import OpenAIServerModel, ToolCallingAgent, tool


@tool
def add(a: int, b: int) -> int:
    """Adds.

    Args:
        a: a number
        b: another
    """
    return a + b


if __name__ == "__main__":
    model = OpenAIServerModel("solver", api_base=os.environ["OPENAI_BASE_URL"], api_key=os.environ["OPENAI_API_KEY"])
    answer = ToolCallingAgent(tools=[add], model=model, max_steps=3, verbosity_level=0).run("2+3")
    print(float(str(answer) == "5"))
