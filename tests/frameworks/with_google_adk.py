"""Google ADK: an agent with a tool, over Anthropic's API or, through LiteLLM, OpenAI's."""

import asyncio
import sys

from google.adk.agents import LlmAgent
from google.adk.models.anthropic_llm import AnthropicLlm
from google.adk.models.lite_llm import LiteLlm
from google.adk.runners import InMemoryRunner
from google.genai import types

MODELS = {"anthropic": lambda: AnthropicLlm(model="solver"), "openai": lambda: LiteLlm(model="openai/solver")}


def add(a: int, b: int) -> int:
    """Adds."""
    return a + b


async def main(tongue):
    agent = LlmAgent(name="adder", model=MODELS[tongue](), instruction="You add.", tools=[add])
    runner = InMemoryRunner(agent=agent, app_name="sums")
    session = await runner.session_service.create_session(app_name="sums", user_id="u")
    asked = types.Content(role="user", parts=[types.Part(text="2+3")])
    said = ""
    async for event in runner.run_async(user_id="u", session_id=session.id, new_message=asked):
        if event.is_final_response():
            said = "".join(part.text or "" for part in event.content.parts)
    return float(said == "five")


if __name__ == "__main__":
    print(asyncio.run(main(sys.argv[1])))
