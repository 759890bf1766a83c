"""Google ADK: an agent with a tool, over Anthropic's API or, through LiteLLM, OpenAI's; `typed`: with a schema too."""

import asyncio
import sys

from google.adk.agents import LlmAgent
from google.adk.models.anthropic_llm import AnthropicLlm
from google.adk.models.lite_llm import LiteLlm
from google.adk.runners import InMemoryRunner
from google.genai import types
from pydantic import BaseModel

MODELS = {"anthropic": lambda: AnthropicLlm(model="solver"), "openai": lambda: LiteLlm(model="openai/solver")}


def add(a: int, b: int) -> int:
    """Adds."""
    return a + b


class Sum(BaseModel):
    total: int


async def main(tongue, typed=""):
    schema = Sum if typed else None
    agent = LlmAgent(name="adder", model=MODELS[tongue](), instruction="You add.", tools=[add], output_schema=schema)
    runner = InMemoryRunner(agent=agent, app_name="sums")
    session = await runner.session_service.create_session(app_name="sums", user_id="u")
    asked = types.Content(role="user", parts=[types.Part(text="2+3")])
    said = ""
    async for event in runner.run_async(user_id="u", session_id=session.id, new_message=asked):
        if event.error_message:
            raise RuntimeError(event.error_message)
        if event.is_final_response():
            said = "".join(part.text or "" for part in event.content.parts)
    return float(said == ('{"total": 5}' if typed else "five"))


if __name__ == "__main__":
    print(asyncio.run(main(*sys.argv[1:])))
