"""A team of two in plain Python with the stock openai client; training needs no other change than `base_url`.

    mafrt train --program examples/plain_openai.py:run_episode --profile_path profiles/quickstart_math.json \\
        --tasks_path envs/math/data/word_problems_train.jsonl \\
        --eval_tasks_path envs/math/data/word_problems_test.jsonl \\
        --iterations 20 --n_rollout_threads 64 --max_new_tokens 48 --lr 0.003
"""

from openai import OpenAI

AGENTS = ("reasoner", "actor")
client = OpenAI(base_url="http://127.0.0.1/v1", api_key="not needed")


def run_episode(task, base_url):
    """One episode: the reasoner plans, the actor solves. Returns the reward."""
    llm = client.with_options(base_url=base_url)

    def ask(agent, content):
        reply = llm.chat.completions.create(model=agent, messages=[{"role": "user", "content": content}])
        return reply.choices[0].message.content

    problem = f"Problem: {task['problem']}"
    plan = ask("reasoner", problem)
    answer = ask("actor", f"{problem}\n\nreasoner: {plan}")
    return float(f"\\boxed{{{task['answer']}}}" in answer)
