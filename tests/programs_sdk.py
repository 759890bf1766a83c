"""Programs of the OpenAI Agents SDK as its users write them: the address in the environment, Responses by default."""

from __future__ import annotations

import os

from agents import Agent, ModelSettings, Runner, function_tool, handoff, set_default_openai_client
from openai import AsyncOpenAI


def asking(*agents):
    """A coroutine that asks each agent in turn and passes its answer on."""

    async def run(text):
        for agent in agents:
            text = (await Runner.run(agent, text)).final_output
        return text

    return run


async def default_mode(task):
    """Nothing but the address in the environment is ours."""
    plan = await Runner.run(Agent(name="Planner", model="planner", instructions="You plan."), f"task {task['seed']}")
    answer = await Runner.run(Agent(name="Solver", model="solver"), plan.final_output)
    return sum(c.isdigit() for c in answer.final_output) / max(1, len(answer.final_output))


def run_sync(task):
    return float(len(Runner.run_sync(Agent(name="Solver", model="solver"), "hello").final_output))


async def sets_the_environment(task, base_url):
    os.environ["OPENAI_BASE_URL"] = base_url
    os.environ["OPENAI_API_KEY"] = "x"
    return float((await asking(Agent(name="Solver", model="solver"))("x")) == "answer")


async def sets_the_client(task, base_url):
    set_default_openai_client(AsyncOpenAI(base_url=base_url, api_key="x"))
    return float((await asking(Agent(name="Solver", model="solver"))("x")) == "answer")


@function_tool
def add(a: int, b: int) -> int:
    """Adds."""
    return a + b


async def tools(task):
    agent = Agent(name="Solver", model="solver", tools=[add], instructions="You add.")
    result = await Runner.run(agent, "2+3")
    return {"reward": float(result.final_output == "answer"), "rewards": {"solver": len(result.new_items)}}


async def handoffs(task):
    second = Agent(name="Second", model="second")
    first = Agent(name="First", model="first", handoffs=[handoff(second)])
    result = await Runner.run(first, "go")
    return float(result.last_agent.name == "Second")


async def streams(task):
    result = Runner.run_streamed(Agent(name="Solver", model="solver", tools=[add]), "2+3")
    said = ""
    async for event in result.stream_events():
        if event.type == "raw_response_event" and event.data.type == "response.output_text.delta":
            said += event.data.delta
    return float(said == "answer" and result.final_output == "answer")


async def remembers(task):
    agent = Agent(name="Solver", model="solver", model_settings=ModelSettings(store=True))
    first = await Runner.run(agent, "one")
    second = await Runner.run(agent, "two", previous_response_id=first.last_response_id)
    return float(second.final_output == "answer")
