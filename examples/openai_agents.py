"""A team of two with the OpenAI Agents SDK; training needs no other change than `base_url`.

    mafrt train --program examples/openai_agents.py:run_episode --profile_path profiles/quickstart_math.json \\
        --tasks_path envs/math/data/word_problems_train.jsonl \\
        --eval_tasks_path envs/math/data/word_problems_test.jsonl \\
        --iterations 20 --n_rollout_threads 64 --max_new_tokens 48 --lr 0.003
"""

from agents import Agent, OpenAIChatCompletionsModel, Runner, set_tracing_disabled
from openai import AsyncOpenAI

AGENTS = ("reasoner", "actor")
set_tracing_disabled(True)


async def run_episode(task, base_url):
    """One episode. Returns the reward."""
    async with AsyncOpenAI(base_url=base_url, api_key="not needed", max_retries=0) as client:

        def agent(name):
            return Agent(name=name, model=OpenAIChatCompletionsModel(model=name, openai_client=client))

        problem = f"Problem: {task['problem']}"
        plan = (await Runner.run(agent("reasoner"), problem)).final_output
        answer = (await Runner.run(agent("actor"), f"{problem}\n\nreasoner: {plan}")).final_output
    return float(f"\\boxed{{{task['answer']}}}" in answer)
